"""LPIPS on the command line: a figure without a network, by the network that the column says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torchvision

from privlab.metrics.lpips_backbones import SHIPPED

QUICK = ("--attack", "april", "--limit", "1")


@pytest.fixture
def alexnet() -> Callable[[], None]:
    """Put an AlexNet of random weights into torchvision's cache, which is the test's own."""

    def put() -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state = torchvision.models.alexnet(weights=None).features.state_dict()
        path = Path(torch.hub.get_dir(), "checkpoints", "alexnet-owt-7be5be79.pth")
        path.parent.mkdir(parents=True)
        torch.save({f"features.{name}": tensor for name, tensor in state.items()}, path)

    return put


def facts(run: Path) -> dict[str, Any]:
    """Return what `run.json` states."""
    return json.loads((run / "run.json").read_text())


@pytest.mark.slow
def test_without_a_network_the_column_and_run_json_say_squeeze(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    done = attack(*QUICK, "--details")
    assert done.status == 0
    assert "LPIPS squeeze ↓" in done.out
    assert "LPIPS alex" not in done.out
    assert done.err.count("Warning: LPIPS is by SqueezeNet, not AlexNet; see `privlab explain lpips`.\n") == 1
    table, told = records(), facts(tmp_path / "run")
    assert table.lpips_squeeze.notna().all()
    assert table[["lpips_alex", "lpips_vgg"]].isna().all(axis=None)
    assert all("lpips_squeeze" in names.split() and "lpips_alex" not in names.split() for names in table.metrics)
    assert told["specification"]["metrics"][-1] == "lpips_squeeze"
    assert told["learned_metrics"]["lpips_squeeze"] == dict(zip(("file", "sha256"), SHIPPED["squeeze"], strict=True))
    assert told["missing_metrics"] == {}
    assert any(message.startswith("LPIPS is by SqueezeNet") for message in told["warnings"])


def test_a_network_that_is_named_is_not_replaced(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    done = attack(*QUICK, "--metrics", "psnr,lpips_alex", "--details")
    assert done.status == 0
    assert "LPIPS alex ↓" in done.out
    assert "squeeze" not in done.out + done.err
    assert "lpips_alex: n/a (No pretrained backbone for lpips_alex" in done.out
    assert "Warning: lpips_alex is n/a: No pretrained backbone" in done.err
    assert records()[["lpips_alex", "lpips_squeeze"]].isna().all(axis=None)


@pytest.mark.slow
def test_alexnet_is_used_where_it_is(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], alexnet: Callable[[], None]
) -> None:
    alexnet()
    done = attack(*QUICK, "--details")
    assert "LPIPS alex ↓" in done.out
    assert "squeeze" not in done.out + done.err
    table = records()
    assert table.lpips_alex.notna().all()
    assert table.lpips_squeeze.isna().all()


@pytest.mark.slow
def test_lpips_can_be_asked_for_alone(attack: Callable[..., Any], tmp_path: Path) -> None:
    done = attack(*QUICK, "--metrics", "lpips", "--json")
    assert done.status == 0
    assert json.loads(done.out)["metrics"] == {"lpips_squeeze": "lower leaks"}
    assert "1 of 1: a.png: lpips_squeeze, vit_ti, setting a: april " in done.err
    assert facts(tmp_path / "run")["specification"]["metrics"] == ["lpips_squeeze"]


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_network(
    cli: Callable[..., Any],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alexnet: Callable[[], None],
    records: Callable[..., pd.DataFrame],
) -> None:
    """AlexNet's backbone comes while the run is interrupted: half a column by each would be no column."""
    monkeypatch.chdir(tmp_path)
    command = ("attack", "--model", "vit_ti", "--weights", "random", "--img-size", "32", "--images", photos)
    command += ("--attack", "april", "--batch-size", "1", "--no-strips", "--json")
    run = tmp_path / cli(*command).json["run"]
    (run / "run.json").write_text(json.dumps(facts(run) | {"status": "interrupted"}))
    sorted((run / "records").iterdir())[-1].unlink()
    alexnet()
    again = cli(*command)
    assert again.json["run"] == str(run.relative_to(tmp_path))
    table = records(run)
    assert table.lpips_squeeze.notna().all()
    assert table.lpips_alex.isna().all()
    assert len(set(table.image)) == 3
    assert sum(message.startswith("LPIPS is by SqueezeNet") for message in again.json["warnings"]) == 1
    new = tmp_path / cli(*command, "--overwrite").json["run"]
    assert records(new).lpips_alex.notna().all()


@pytest.mark.slow
def test_an_audit_is_scored_by_squeeze_too(
    audit: Callable[..., Any],
    step: Callable[..., Path],
    photos: Path,
    records: Callable[..., pd.DataFrame],
    tmp_path: Path,
) -> None:
    options = ("--attack", "patch-gradient", "--public", photos)
    done = audit(step(hash_weights=False), *options, "--reference", photos / "a.png")
    assert done.status == 0
    assert "lpips squeeze ↓" in done.out
    first, *_, last = json.loads((tmp_path / "audit" / "run.json").read_text())["warnings"]
    assert not first.startswith("LPIPS")
    assert last.startswith("LPIPS is by SqueezeNet")
    assert done.err.count("Warning: LPIPS is by SqueezeNet") == 1
    assert records(tmp_path / "audit").query("attack == 'patch-gradient'").lpips_squeeze.notna().sum() == 1


@pytest.mark.slow
def test_an_audit_without_scores_looks_for_no_backbone(
    audit: Callable[..., Any], step: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("privlab.victims.weights.reachable", lambda _: pytest.fail("tried to reach it"))
    done = audit(step(), "--attack", "patch-gradient")
    assert done.status == 0
    assert "LPIPS" not in done.err
    assert facts(tmp_path / "audit")["specification"]["metrics"][-1] == "lpips_squeeze"
