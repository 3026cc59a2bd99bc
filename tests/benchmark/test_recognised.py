"""Whether the photograph of an entry is recognised among candidates: what `privlab identify` found, on the page."""

import json
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.benchmark.page import fragment
from privlab.benchmark.results import entries
from privlab.benchmark.rule import standings
from privlab.benchmark.standing import IDENTITY, PACKAGE, Recognised, Standing, recognised_of_package

CONCLUDE = runpy.run_path(str(Path(__file__).parents[2] / ".ci/conclude_entries.py"))
recognised = CONCLUDE["recognised"]


def row(case: str = "gradients svt-privacy", attack: str = "patch-gradient-adaptive", **own: Any) -> dict[str, Any]:
    common = {"features": "pixels", "n": 500, "rank_1": 0.1, "low": 0.03, "high": 0.22, "images": 50}
    return {"case": case, "attack": attack, **common, **own}


def written(folder: Path, name: str, *rows: Mapping[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"identity": list(rows), "class": []}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def standing() -> Standing:
    """Return the row of an entry of the package that holds."""
    (own,) = (each for each in entries() if each.path.stem == "gradients-svt")
    (row,) = standings([own])
    return row


def test_the_best_of_what_was_compared_among_most_candidates_counts(tmp_path: Path) -> None:
    written(tmp_path, "low-pictures", row(), row(features="low pass", rank_1=0.3), row(n=10, rank_1=0.9))
    written(tmp_path, "other-releases", row(attack="releases", features="release, signs", rank_1=0.2))
    (found,) = recognised(tmp_path).values()
    assert (found.rate, found.among, found.by) == (0.3, 500, "low pass of pictures by patch-gradient-adaptive")
    run, identify = found.commands
    assert run.startswith("privlab table low --images FOLDER --manifest")
    assert identify == "privlab identify runs/low --candidates FOLDER --among 2,10,50,500 --json"
    written(
        tmp_path, "other-releases", row(attack="releases", features="release, signs", rank_1=1.0, low=0.93, high=1.0)
    )
    (found,) = recognised(tmp_path).values()
    assert found.compared == ("pictures", "releases")
    assert (found.rate, found.low, found.high, found.images, found.by) == (1.0, 0.93, 1.0, 50, "releases, signs")
    assert found.commands[1].endswith("--among 2,10,50,500 --compare releases --json")


def test_controls_alone_recognise_nothing(tmp_path: Path) -> None:
    assert recognised(written(tmp_path, "low-pictures", row(attack="control:mean"))) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it has no rows 'identity'"),
        ("{", "it has no rows 'identity'"),
        ('{"identity": [{"case": "x"}]}', "it has no rows 'identity'"),
        (
            json.dumps({"identity": [row("gradients nothing")]}),
            "has the case 'gradients nothing'. It must be 'TRACK ENTRY'",
        ),
        (json.dumps({"identity": [row("mjp")]}), "has the case 'mjp'. It must be 'TRACK ENTRY'"),
    ],
)
def test_a_file_that_is_none_of_identify_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "low-pictures.json").write_text(text, "utf-8")
    with pytest.raises(PrivlabError, match=r"low-pictures\.json") as raised:
        recognised(tmp_path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("low", "control", "above"),
    [(0.001, 0.0, False), (0.002, 0.0, False), (0.003, 0.0, True), (0.003, 0.02, False), (0.03, 0.02, True)],
)
def test_a_photograph_is_recognised_where_the_interval_is_above_chance_and_controls(
    low: float, control: float, above: bool
) -> None:
    assert Recognised(0.04, low, 0.2, 50, 500, control, "x", (), ()).above_control == above


def test_the_highest_control_of_all_that_was_compared_counts(tmp_path: Path) -> None:
    written(tmp_path, "low-pictures", row(), row(attack="control:mean", rank_1=0.06), row(attack="control:flat"))
    written(tmp_path, "low-releases", row(rank_1=0.3), row(attack="control:flat", rank_1=0.02))
    (found,) = recognised(tmp_path).values()
    assert (found.rate, found.control, found.compared) == (0.3, 0.1, ("pictures", "releases"))
    written(tmp_path, "low-pictures", row(), row(attack="control:mean", rank_1=0.06), row(attack="control:mean", n=10))
    (found,) = recognised(tmp_path).values()
    assert found.control == 0.06


def test_the_page_says_of_an_entry_that_holds_that_the_photograph_is_recognised(standing: Standing) -> None:
    commands = ("privlab table low", "privlab identify runs/low")
    found = Recognised(0.88, 0.757, 0.955, 50, 500, 0.02, "signs of releases", commands, ("releases",))
    page = fragment([replace(standing, identity=found)])
    assert "of the entries that hold, under <code>svt-privacy</code> (gradients) in 88 % among 500" in page
    assert '88 % <span class="why">of 500</span>' in page
    assert "88 % [76, 96] of 500; controls 2 %; by signs of releases, 50 photographs" in page
    assert "<b>Verdict:</b> holds, the photograph is recognised in 88 %;" in page
    assert '<span class="holds">holds</span> <span class="why">but recognised</span>' in page
    assert replace(standing, identity=found, verdict="broken").concluded == "broken"
    assert page.count("privlab identify runs/low\n") == 1
    assert "privlab table low\n" in page
    chance = fragment([replace(standing, identity=replace(found, rate=0.002, low=0.0))])
    assert "the photograph is recognised in" not in chance
    assert "of the entries that hold" not in chance
    assert "but recognised" not in chance
    unmeasured = fragment([replace(standing, identity=None)])
    assert '<span class="label">recognised: </span>not measured</span>' in unmeasured
    alone = "releases, which may reveal more, were not compared"
    assert alone in fragment([replace(standing, identity=replace(found, compared=("pictures",)))])
    assert alone not in fragment([replace(standing, identity=replace(found, compared=("pictures", "releases")))])


def test_the_entries_of_the_package_have_what_was_measured() -> None:
    found = recognised_of_package()
    assert len(found) > 1
    assert found == recognised(PACKAGE / "identity"), "Run python .ci/conclude_entries.py"
    assert CONCLUDE["identity_text"](found) == IDENTITY.read_text("utf-8")
    some = [each for each in entries() if each.path.stem in ("gradients-svt", "gradients-sign")]
    rows = {(each.track, each.name): each for each in standings(some)}
    assert len(rows) == 2
    for key, row in rows.items():
        assert row.identity == found[key]
    for each in found.values():
        assert each.images == 50
        assert each.among == 500
        assert each.low <= each.rate <= each.high
    assert rows["gradients", "svt-privacy"].as_json()["identity"]["rate"] == found["gradients", "svt-privacy"].rate


@pytest.mark.slow
def test_an_entry_from_elsewhere_has_not_the_figure_of_the_package(tmp_path: Path) -> None:
    (own,) = (each for each in entries() if each.path.stem == "gradients-svt")
    (ours,), (theirs,) = standings([own]), standings([replace(own, path=tmp_path / "svt.json")])
    assert ours.identity is not None
    assert theirs.identity is None


def test_the_command_names_the_weights_of_a_victim_that_is_not_in_the_package() -> None:
    page = fragment(standings(each for each in entries() if each.card.track == "local-training"))
    assert (
        "privlab table identity_clients --images FOLDER --manifest privlab/benchmark/tracks/public.csv --weights FILE\n"
        in page
    )
    assert "tracks/public.csv\n" in page
