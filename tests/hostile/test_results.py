"""Result files of the benchmark that somebody changed, under a hash that is right: none of them stops the table."""

import json
import random
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError, PrivlabWarning
from privlab.benchmark import entries, site_files
from privlab.benchmark.results import PACKAGE, entries_of, read_result, write_result
from privlab.benchmark.rule import standings
from privlab.benchmark.tracks import track

MUTATIONS = 154

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, 1e308, "", "x", "\ud800", "inf", "\x1b[2J", "../../x", [], {}, [[]], {"x": []}),
    *({"all": None}, {"each": []}, {"of": ["x"], "codes": [-1]}, '{"input": "x"}', '{"input": [1e999]}', "[" * 3000),
)
"""What is put where something else belongs."""


def mutated(data: Any, rng: random.Random) -> Any:
    """Return JSON with one value replaced, removed or repeated, at any depth."""
    holder, key = data, rng.choice([*data])
    while isinstance(inner := holder[key], dict | list) and inner and rng.random() < 0.85:
        holder = inner
        key = rng.choice([*inner]) if isinstance(inner, dict) else rng.randrange(len(inner))
    kind = rng.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.append(holder[key])
    elif kind == 2 and isinstance(holder[key], str):
        text = holder[key]
        at = rng.randrange(len(text) + 1)
        holder[key] = text[:at] + rng.choice(('"', "\n", "[[[", "=", "\x00", "'")) + text[at + rng.randrange(9) :]
    else:
        holder[key] = rng.choice(ODD)
    return data


def write(data: Any, path: Path) -> None:
    """Write contents under a hash that is right, where it can be computed."""
    try:
        write_result(data, path)
    except (TypeError, ValueError, AttributeError, KeyError):
        path.write_text(json.dumps(data))


@pytest.mark.slow
def test_mutated_results_are_shown_or_left_out_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("gradients-quantisation", "features-deconvolution")
    texts = [(PACKAGE / f"results/{name}.json").read_text("utf-8") for name in names]
    rng, ended = random.Random(0), Counter[str]()
    for number in range(MUTATIONS):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = json.loads(texts[number % 4 == 3])
        if number % 2:  # what runs as a plug-in keeps the words of its file
            data["plugin"] = "class Plugin: pass"
        write(mutated(data, rng), folder / "a.json")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PrivlabWarning)
            files = site_files(entries_of(folder))
        lines = [str(warning.message) for warning in caught]
        assert all("\n" not in line for line in lines), lines
        ended["shown" if len(files) > 2 else "left out" if lines else "an attack without a defense"] += 1
    with capsys.disabled():
        print(f"\n{json.dumps(ended)}")  # noqa: T201


def test_one_bad_file_does_not_stop_the_table(tmp_path: Path) -> None:
    """It is named in one line; a command that is given this file has one error."""
    for name, text in {"nested": "[" * 100_000, "cut": '{"format": 1', "empty": "{}", "bytes": "\x00"}.items():
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(PrivlabError, match=f"{name}.json"):
            read_result(tmp_path / f"{name}.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.warns(PrivlabWarning, match="left out") as caught:
        found = entries([tmp_path])
    assert len(caught) == 5
    assert found == entries()


def test_a_result_whose_columns_do_not_fit_is_named(tmp_path: Path) -> None:
    """An error about a column named no file, so that nobody knew which of a folder was left out."""
    data = json.loads((PACKAGE / "results/gradients-quantisation.json").read_text("utf-8"))
    data["rows"]["count"] += 1
    write_result(data, tmp_path / "short.json")
    with pytest.warns(PrivlabWarning, match=r"short\.json.*values\. It is left out"):
        assert entries([tmp_path]) == entries()


@pytest.mark.parametrize("number", ["nan", "inf", "1" + "0" * 400])
@pytest.mark.parametrize("key", ["secret_bits", "epsilon"])
def test_a_card_with_a_number_beyond_all_bounds_does_not_stop_the_page(tmp_path: Path, key: str, number: str) -> None:
    """JSON has no NaN, and a whole number of 400 digits exceeds a float: the page ended with an error."""
    data = json.loads((PACKAGE / "results/gradients-quantisation.json").read_text("utf-8"))
    data["card"] = re.sub(rf"(?m)^{key} = .*$", f"{key} = {number}", data["card"])
    write_result(data, tmp_path / "a.json")
    with pytest.warns(PrivlabWarning, match=f"{key} must be a finite number"):
        assert [*entries_of(tmp_path)] == []


def test_an_attack_that_names_a_defense_without_rows_does_not_enter_there(tmp_path: Path) -> None:
    data = json.loads((PACKAGE / "results/gradients-norm-regression.json").read_text("utf-8"))
    data["plugin"] = "class Plugin: pass"  # whose words are not derived from its rows
    data["judged"]["gradient-quantisation"] = {**next(iter(data["judged"].values())), "knows": True}
    attack = write_result(data, tmp_path / "a.json")
    (row,) = standings([read_result(PACKAGE / "results/gradients-quantisation.json"), attack])
    assert row.external_by == ()


def test_a_result_of_another_track_than_its_card_s_is_left_out(tmp_path: Path) -> None:
    data = json.loads((PACKAGE / "results/gradients-quantisation.json").read_text("utf-8"))
    data["track"] = {**data["track"], "name": "updates", "sha256": track("updates").sha256}
    write_result(data, tmp_path / "a.json")
    with pytest.warns(PrivlabWarning, match="track 'updates', and its card names 'gradients'"):
        assert [*entries_of(tmp_path)] == []


def test_page_survives_versions_and_file_names_of_strangers(tmp_path: Path) -> None:
    """A result without the version of privlab stopped the page; a name ended the paste of a command in a terminal."""
    data = json.loads((PACKAGE / "results/gradients-quantisation.json").read_text("utf-8"))
    data |= {"versions": {"x": "1"}, "card": data["card"].replace('name = "gradient-quantisation"', 'name = "mine"')}
    write_result(data, tmp_path / "x\x1b[201~\ntouch here\n.json")
    files = site_files(entries_of(tmp_path))
    (entered,) = (text for name, text in files.items() if name.endswith("-mine.json"))
    assert '"version": "unknown"' in entered
    assert "\x1b" not in files["table.html"]
    assert "\ntouch here" not in files["table.html"]
