"""A real simulation of Flower on photographs, and the audit of an update that its server kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not all(map(find_spec, ("flwr", "ray"))), reason="needs flwr and ray")

VICTIM = ("--model", "vit_ti", "--weights", "random", "--img-size", "64")


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run `privlab study federation` in a process of its own, as Flower and Ray leave theirs changed."""

    def run(*options: str) -> list[dict[str, Any]]:
        command = (
            sys.executable,
            "-c",
            "from privlab.cli import main; main()",
            "study",
            "federation",
            *VICTIM,
            *options,
            "--json",
        )
        environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            (*command, "--out", str(tmp_path / "out")),
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.slow
def test_what_the_server_of_a_simulation_kept_is_the_image_of_a_client(
    simulate: Callable[..., list[dict[str, Any]]], cli: Callable[..., Any], tmp_path: Path
) -> None:
    rows = simulate("--weight-decay", "0.05", "--max-psnr", "200")
    assert [row["outcome"] for row in rows] == ["sent", "sent"]
    assert min(row["psnr"] for row in rows) > 60
    places = [place / "round-1" for place in (tmp_path / "out" / "server", tmp_path / "out" / "clients")]
    kept, own = (sorted(path.relative_to(place) for path in place.rglob("*.safetensors")) for place in places)
    assert kept == own
    assert all((places[0] / path).read_bytes() == (places[1] / path).read_bytes() for path in kept)
    for node in {path.parent.name for path in kept}:
        files = [places[0] / node / f"{name}.safetensors" for name in ("before", "after")]
        stated = ("--client", "sgd", "--set", "client.steps=5", "--set", "client.weight_decay=0.05", "--json")
        told = cli(
            *("audit", "update", *files, "--model", "vit_ti", "--img-size", "64", *stated, "--metrics", "psnr"),
            *("--attack", "patch-update", "--reference", tmp_path / "out" / "images" / f"{node}.png"),
            *("--out", tmp_path / node),
        ).json
        (row,) = (row for row in told["attacks"] if row["attack"] == "patch-update")
        assert row["explained"] is True
        assert row["psnr"] > 60


@pytest.mark.slow
def test_updates_that_leak_do_not_reach_the_server(
    simulate: Callable[..., list[dict[str, Any]]], cli: Callable[..., Any], tmp_path: Path
) -> None:
    rows = simulate("--limit", "1")
    assert [row["outcome"] for row in rows] == ["withheld: an image of the client can be reconstructed from it"]
    assert [*(tmp_path / "out").rglob("*.safetensors")] == []
    again = cli("study", "federation", *VICTIM, "--out", tmp_path / "out")
    assert again.error.endswith("holds another run: name another --out.")


@pytest.mark.slow
def test_too_few_photographs_are_said(cli: Callable[..., Any], tmp_path: Path) -> None:
    said = cli("study", "federation", *VICTIM, "--limit", "99", "--out", tmp_path / "out").error
    assert said == "Each client needs a photograph. Found 14 of 99 in 'samples'."
