"""The studies on tiny data: every row is there, what is done is not done again, and what does not fit is one line."""

import gc
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from privlab.runs import attack as run
from privlab.victims import Victim

pytestmark = pytest.mark.skipif(find_spec("lightning_fabric") is None, reason="needs lightning_fabric")

TINY = ("--model", "vit_ti", "--weights", "random", "--img-size", "32", "--device", "cpu")


@pytest.fixture
def classes(picture: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a folder with train and test, two classes in each."""
    for part, n in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            for i in range(n):
                picture(f"data/{part}/{name}/{part}{i}{name}.png")
    return tmp_path / "data"


@pytest.mark.slow
def test_an_encrypted_model_is_fine_tuned_with_and_without_its_key(
    cli: Callable[..., Any], classes: Path, tmp_path: Path
) -> None:
    options = (*TINY, "--images", classes, "--steps", 4, "--every", 2, "--batch", 3, "--out", tmp_path / "study")
    told = cli("keys", "finetune-study", *options, "--json")
    assert told.status == 0
    curves = json.loads(told.out)
    loss = {(row["manner"], row["step"]): row["validation_loss"] for row in curves}
    assert {manner for manner, _ in loss} == {"normal", "authorized", "unauthorized", "scratch"}
    for step in (0, 2, 4):  # Theorem 4.5, Corollary 4.6
        assert loss["authorized", step] == pytest.approx(loss["normal", step], abs=1e-4)
    assert loss["unauthorized", 4] != pytest.approx(loss["normal", 4], abs=1e-4)
    assert [row["key_recovered"] for row in curves if row["manner"] == "authorized"] == [1.0, 1.0, 1.0]
    again = cli("keys", "finetune-study", *options)
    assert "steps" not in again.err  # nothing is trained anew
    assert "97.94" in again.out


@pytest.mark.slow
def test_table_6_has_the_paper_beside_it(
    cli: Callable[..., Any], classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / "cache"))
    options = (*TINY, "--images", classes, "--steps", 2, "--batch", 4, "--out", tmp_path / "study")
    more = ("--methods", "SL,GN+", "--set", "inversion-mae.steps=2", "--set", "gaussian-noise.std=0.1")
    told = cli("study", "split-privacy", *options, *more, "--adaptive", "least-squares,pe-assignment", "--json")
    assert told.status == 0
    rows = {row["method"]: row for row in json.loads(told.out)}
    assert list(rows) == ["SL", "GN+"]
    for row in rows.values():
        assert 0 <= row["accuracy"] <= 1
        assert (row["images"], row["failed"], row["paper_f_sim"]) == (4, 0, None)
        assert row["adaptive_psnr"] > row["paper_psnr"]
    table = cli("study", "split-privacy", *options, *more, "--adaptive", "least-squares,pe-assignment").out
    assert "(16.25)" in table
    assert "| GN+ |" in table


@pytest.mark.slow
def test_no_victim_of_table_6_outlives_it(
    cli: Callable[..., Any], classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a finished method stays, or memory grows from row to row."""
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / "cache"))
    victims: list[ref[object]] = []

    def victim_of(*arguments: Any) -> Victim:
        made = victim_of_run(*arguments)
        victims.append(ref(made.model))
        return made

    victim_of_run = run.victim_of
    monkeypatch.setattr(run, "victim_of", victim_of)
    options = ("--images", classes, "--steps", 1, "--batch", 4, "--methods", "SL,LP", "--out", tmp_path / "study")
    more = ("--adaptive", "least-squares,pe-assignment", "--set", "inversion-mae.steps=1")
    assert cli("study", "split-privacy", *TINY, *options, *more).status == 0
    gc.collect()
    assert [victim() for victim in victims] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("keys", "finetune-study", "--manners", "stolen"), "Unknown manner 'stolen'."),
        (("study", "split-privacy", "--methods", "XX"), "Unknown method 'XX'."),
    ],
)
def test_what_does_not_exist_is_one_line(
    cli: Callable[..., Any], classes: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in cli(*arguments, *TINY, "--images", classes, "--out", tmp_path / "study").error


def test_a_folder_without_test_is_one_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    error = cli("keys", "finetune-study", *TINY, "--images", tmp_path, "--out", tmp_path / "study").error
    assert "must hold the folders train and test. Found no 'test'." in error
