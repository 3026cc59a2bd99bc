"""The line that names the command on trained weights, where only random ones could be had."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.cli.common import table_on_trained

SAID = "Only random weights could be had. The same on trained weights, which came with privlab:  "
UNTRAINED = ("--weights", "auto", "--metrics", "psnr", "--limit", "1")


def named(text: str) -> list[list[str]]:
    """Return the commands that the lines of a text name."""
    return [shlex.split(line.removeprefix(SAID)) for line in text.splitlines() if line.startswith(SAID)]


@pytest.mark.slow
def test_the_named_command_runs_on_trained_weights_and_bundled_images(
    attack: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ("--setting", "c", "--attack", "april,mjp-subspace", "--set", "april.rtol=1e-5", "--gamma", "0.2")
    done = attack("--model", "vit_ti_mjp", *UNTRAINED, *own)
    assert done.status == 0
    (command,) = named(done.out)
    assert named(done.err) == []
    assert sorted(command) == sorted(["privlab", "attack", "--model", "cifar_vit_mjp", *own, "--limit", "1"])
    trained = cli(*command[1:], "--details")
    assert trained.status == 0
    assert "cifar_vit_mjp: weights pretrained:cifar_vit_mjp, E_unk trained" in trained.out
    assert "Random weights" not in trained.out
    assert named(trained.out + trained.err) == []


@pytest.mark.slow
def test_what_a_machine_reads_does_not_hold_the_line(attack: Callable[..., Any]) -> None:
    done = attack(*UNTRAINED, "--attack", "april", "--json")
    assert SAID not in done.out
    assert "rows" in json.loads(done.out)
    assert named(done.err) == [["privlab", "attack", "--model", "cifar_vit", "--limit", "1", "--attack", "april"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [("--weights", "random", "--model", "vit_ti"), ("--weights", "auto", "--model", "cifar_vit")]
)
def test_no_line_where_weights_are_random_as_asked_or_trained(
    attack: Callable[..., Any], given: tuple[str, ...]
) -> None:
    done = attack(*UNTRAINED, "--attack", "april", *given)
    assert done.status == 0
    assert SAID not in done.out + done.err


@pytest.mark.slow
@pytest.mark.parametrize(("options", "machine"), [((), False), (("--format", "csv"), True), (("--json",), True)])
def test_a_table_names_it_too(
    cli: Callable[..., Any], photos: Path, tmp_path: Path, options: tuple[str, ...], machine: bool
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        f'[run]\nmodel = "vit_ti_mjp"\nimg_size = 32\nattack = "april"\nimages = ["{photos}"]\nlimit = 1\n'
        'metrics = ["psnr"]\nsetting = "c"\n[table]\ncolumns = ["psnr"]\n'
    )
    done = cli("table", file, "--out", tmp_path / "run", *options)
    assert done.status == 0
    assert (SAID in done.out, SAID in done.err) == (not machine, machine)
    assert named(done.out + done.err) == [["privlab", "attack", "--model", "cifar_vit_mjp", "--setting", "c"]]
    assert not named(cli("table", file, "--out", tmp_path / "other", "--weights", "random").out)


def test_an_experiment_with_a_twin_on_trained_victims_names_that() -> None:
    assert table_on_trained("mjp_table5", ["deit_s"], ["a"]) == "privlab table mjp_table5_cifar"
    assert table_on_trained("mjp_full", ["deit_s_mjp"], ["c", "a"]) == (
        "privlab attack --model cifar_vit_mjp --setting a,c"
    )
    assert table_on_trained("mine.toml", ["vit_ti", "deit_s", "vit_ti_nope"], ["a"]) == (
        "privlab attack --model cifar_vit,cifar_vit_nope --setting a"
    )
