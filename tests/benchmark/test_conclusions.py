"""What a result file concludes is derived from its rows again: who edits it and makes a new hash gains nothing."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.benchmark import entries, read_card, standings
from privlab.benchmark.results import PACKAGE, from_rows, read_result, to_rows, write_result
from privlab.benchmark.rule import check_concluded, conclude
from privlab.benchmark.submit import checks_of
from privlab.testing import Check

Change = Callable[[dict[str, Any]], object]


def edited(folder: Path, change: Change, stem: str = "gradients-quantisation", **more: Any) -> Path:
    """Return a result of the package with a change, under a hash that is right."""
    data = {**read_result(PACKAGE / "results" / f"{stem}.json").data, **more}
    change(data)
    return write_result(data, folder / f"{stem}.json").path


def in_judged(**fields: Any) -> Change:
    return lambda data: data["judged"].update(fields)


def scored(score: float) -> Change:
    return lambda data: data["judged"]["worst"]["one step"].update(mean=score)


@pytest.fixture(scope="module")
def checks() -> tuple[Check, ...]:
    """Return the checks of admission of the entry that is edited, which take seconds."""
    return checks_of(read_card(PACKAGE / "cards/gradients-quantisation.toml"), "auto")


@pytest.fixture(scope="module")
def concluded() -> dict[str, Any]:
    """Return what the rows of the entry that is edited say."""
    result = read_result(PACKAGE / "results/gradients-quantisation.json")
    return conclude(result.card, result.rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_judged(verdict="holds"), 'by its rows, verdict is "broken", and it says "holds"'),
        (in_judged(known_by=["april"]), 'known_by is ["patch-gradient-adaptive"], and it says ["april"]'),
        (in_judged(flags=[]), "by its rows, flags is "),
        (in_judged(images=640), "by its rows, images is 64, and it says 640"),
        (scored(12.0), 'by its rows, worst is {"one step": {"mean": 32.4'),
    ],
)
def test_a_file_must_conclude_what_its_rows_say(
    tmp_path: Path, concluded: dict[str, Any], change: Change, said: str
) -> None:
    with pytest.raises(PrivlabError) as refused:
        check_concluded(read_result(edited(tmp_path, change)), concluded)
    assert said in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_judged(verdict="holds"), 'by its rows, verdict is "broken", and it says "holds"'),
        (
            lambda data: data["admission"][0].update(passed=False),
            "admission that fail are none, but the file says contents",
        ),
        (lambda data: data.update(draws=10), "draws is 1 now, and the file says 10"),
        (lambda data: data.update(utility=0.5), "utility is 0.9996 now, and the file says 0.5"),
    ],
)
def test_edited_conclusions_fail_whatever_the_hash_says(
    tmp_path: Path,
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    checks: tuple[Check, ...],
    change: Change,
    said: str,
) -> None:
    monkeypatch.setattr(
        importlib.import_module("privlab.benchmark.verify"), "checks_of", lambda card, weights, chance=None: checks
    )
    assert said in cli("benchmark", "verify", edited(tmp_path, change)).error


@pytest.mark.slow
def test_a_flag_that_names_the_attacks_of_another_version_is_the_same_flag() -> None:
    (result,) = (each for each in entries() if each.path.stem == "gradients-censor")
    found = conclude(result.card, result.rows)

    def refused(flags: list[str]) -> str:
        judged = result.data["judged"] | {"flags": flags}
        try:
            check_concluded(replace(result, data={**result.data, "judged": judged}), found)
        except PrivlabError as error:
            return str(error)
        return ""

    flags = [f"{flag}, one-to-come not scored" for flag in result.data["judged"]["flags"]]
    assert flags
    assert refused(flags) == ""
    for other in ([], [*flags, "Failed: all"], ["Failed: all"]):
        assert "by its rows, flags is " in refused(other)


def test_rows_that_were_edited_with_their_conclusions_are_measured_again(
    tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, checks: tuple[Check, ...]
) -> None:
    """A score that is 3 dB lower everywhere, and all that follows from it."""
    monkeypatch.setattr(
        importlib.import_module("privlab.benchmark.verify"), "checks_of", lambda card, weights, chance=None: checks
    )

    def lower(data: dict[str, Any]) -> None:
        rows = from_rows(data["rows"])
        rows["psnr"] -= 3
        data["rows"] = to_rows(rows)
        data["judged"] = conclude(read_card(PACKAGE / "cards/gradients-quantisation.toml"), from_rows(data["rows"]))

    said = cli("benchmark", "verify", edited(tmp_path, lower)).error
    assert "47 of 238 rows measured again agree within 0.5." in said
    assert "90% must." in said


def test_an_attack_does_not_take_the_place_of_a_defense(tmp_path: Path) -> None:
    """Of one name, it would remove the defense from the table."""
    attack = read_result(PACKAGE / "results/gradients-norm-regression.json")
    card = attack.data["card"].replace('name = "norm-regression"', 'name = "dp-sgd"')
    write_result({**attack.data, "card": card}, tmp_path / "r.json")
    with pytest.raises(PrivlabError, match="results of the same entry"):
        entries([tmp_path])


def test_the_list_has_the_words_of_the_rows(tmp_path: Path) -> None:
    edited(tmp_path, in_judged(verdict="holds", known_by=["april"], flags=["Failed: all"], why="it holds"))
    with pytest.warns(UserWarning, match="replaces the package"):
        given = entries([tmp_path])
    after, before = (
        [row.as_json() for row in standings(each for each in results if each.path.stem.startswith("gradients-q"))]
        for results in (given, entries())
    )
    before[0]["identity"] = None  # of entries of the package alone
    assert after[0].pop("interval") == pytest.approx(before[0].pop("interval"))  # sums of rows in another order
    assert after == before
    assert len(after) == 1


@pytest.mark.parametrize("plugin", [None, "the source"])
def test_the_list_leaves_out_scores_that_are_not_those_of_the_rows(tmp_path: Path, plugin: str | None) -> None:
    """The package's own result of the entry stays, which the file was to replace."""
    path = edited(tmp_path, scored(12.0), plugin=plugin)
    own = [result for result in entries() if result.path.name == "gradients-quantisation.json"]
    with pytest.warns(UserWarning, match=r"quantisation.json.*32.45.*12.0.*left out"):
        found = standings([read_result(path)])
    assert found == standings(own)
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [None, "the source"])
def test_scores_of_attacks_are_those_of_the_rows_too(tmp_path: Path, plugin: str | None) -> None:
    path = edited(
        tmp_path, lambda data: data["judged"]["blur"].update(images=63), "features-deconvolution", plugin=plugin
    )
    with pytest.warns(UserWarning, match=r"images.*64.*63.*left out"):
        assert standings([read_result(path)]) == []


@pytest.mark.parametrize("column", ["psnr", "case", "attack", "draw", "setting", "seed"])
def test_rows_that_leave_a_column_empty_are_refused_in_one_line(
    tmp_path: Path, cli: Callable[..., Any], column: str
) -> None:
    def emptied(data: dict[str, Any]) -> None:
        data["rows"]["columns"][column] = {"all": None}

    assert str(tmp_path) in cli("benchmark", "verify", edited(tmp_path, emptied)).error


def test_an_attack_that_says_that_it_knows_a_defense_is_asked(tmp_path: Path, cli: Callable[..., Any]) -> None:
    path = edited(tmp_path, lambda data: data["judged"]["blur"].update(knows=False), "features-deconvolution")
    assert "by its rows, knows is true, and it says false" in cli("benchmark", "verify", path).error


def test_of_two_results_of_one_entry_one_is_to_be_kept(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        edited(folder, lambda data: None)
    with (
        pytest.warns(UserWarning, match=r"a/gradients-quantisation.json"),
        pytest.raises(PrivlabError, match=r"a/gradients.*b/gradients"),
    ):
        entries(folders)


@pytest.mark.slow
def test_the_package_s_results_conclude_what_their_rows_say() -> None:
    for each in entries():
        check_concluded(each, conclude(each.card, each.rows))
