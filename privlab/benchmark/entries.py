"""The entries of this package, and those of a folder: cards, and the results that were measured of them."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError, PrivlabWarning, first, read_text
from privlab.benchmark.cards import Card, read_card
from privlab.benchmark.results import Result, read_result
from privlab.evaluation import CONTROL

__all__ = ["Told", "defense_entries", "entries", "entries_of", "told"]

PACKAGE = Path(str(files("privlab.experiments") / "benchmark"))
"""The folder of the entries that come with privlab: cards/*.toml and results/*.json."""


def entries(folders: Sequence[Path] = ()) -> list[Result]:
    """Return the results of this package and of other folders, checked.

    A result from elsewhere stands in for the package's own of the same entry, with a warning.

    Args:
        folders: each with *.json, or with results/*.json.

    Raises:
        PrivlabError: if a folder is not there, a result was edited or is of another version, or two are of one entry.
    """
    found: dict[tuple[str, str], Result] = {}
    for folder in (PACKAGE, *folders):
        for result in entries_of(folder):
            before = found.get(key := (result.card.track, result.card.name))
            if before is not None and before.path.resolve() != result.path.resolve():
                _check_replaces(before, result)
            found[key] = result
    return list(found.values())


def _check_replaces(before: Result, result: Result) -> None:
    """Warn if a result stands in for the package's own; two from elsewhere are an error."""
    entry = f"'{result.card.name}' of the track '{result.card.track}'"
    if not before.path.is_relative_to(PACKAGE):
        raise PrivlabError(f"'{before.path}' and '{result.path}' are of one entry, {entry}: keep one of them.")
    warnings.warn(
        f"{result.path} stands in for the package's own result of {entry}. Name the entry otherwise to keep both.",
        PrivlabWarning,
        stacklevel=3,
    )


def entries_of(folder: Path) -> Iterator[Result]:
    """Yield the results of one folder, in the order of their names.

    Raises:
        PrivlabError: if the folder is not there, or as `read_result` does.
    """
    if not folder.is_dir():
        raise PrivlabError(f"There is no folder '{folder}'.")
    for path in sorted({*folder.glob("*.json"), *folder.glob("results/*.json")}):
        yield read_result(path)


def defense_entries(track: str, names: Sequence[str] = ()) -> list[Card]:
    """Return the cards of this package's defenses of a track.

    Args:
        track: the track's name.
        names: those to return; none for all.

    Raises:
        PrivlabError: if one of the names is no entry of the track.
    """
    own = {card.name: card for card in _defenses() if card.track == track}
    for name in names:
        if name not in own:
            raise PrivlabError(f"The track '{track}' has no entry '{name}'. It has {first(sorted(own), 20)}.")
    return [own[name] for name in names or own]


def _defenses() -> list[Card]:
    """Return the cards of this package's defenses, of all tracks."""
    cards = [read_card(path) for path in sorted((PACKAGE / "cards").glob("*.toml"))]
    return [card for card in cards if card.kind == "defense"]


@dataclass(frozen=True)
class Told:
    """How often an adversary names the photograph of an entry among candidates, by the best of what was compared.

    `rate` is the rank-1 rate among `among` candidates, and `low` and `high` its 95 % interval of Clopper and Pearson,
    over `images` photographs; chance is 1 / `among`, and `control` the highest rate of a control, over all that was
    compared. `by` says what was compared, and `commands` measure it again. `compared` names all that was looked at,
    "pictures" and "releases": what was not compared may tell more.
    """

    rate: float
    low: float
    high: float
    images: int
    among: int
    control: float
    by: str
    commands: tuple[str, ...]
    compared: tuple[str, ...]

    @property
    def above_control(self) -> bool:
        """Return whether the interval lies above every control, and above chance: the rate is the best of several."""
        return self.low > max(self.control, 1 / self.among)


def told(folder: Path = PACKAGE / "identity") -> dict[tuple[str, str], Told]:
    """Return how often the photograph of each entry is told, by track and name, from what `privlab identify` printed.

    The table of a file TABLE-pictures.json or TABLE-releases.json has a case for each entry, with the track as its
    group and the name as its label. Of several features, attacks and files the one with the highest rate among the most
    candidates counts.

    Args:
        folder: of the files, each the output of `privlab identify runs/TABLE … --json`.

    Raises:
        PrivlabError: if a file has no such rows, or is of no entry of this package.
    """
    known = {(card.track, card.name) for card in _defenses()}
    rows: dict[tuple[str, str], list[tuple[Path, Mapping[str, Any]]]] = {}
    for path in sorted(folder.glob("*.json")):
        for row in _identified(path):
            track, _, name = str(row["case"]).partition(" ")
            if (track, name) not in known:
                raise PrivlabError(f"'{path}' is of '{row['case']}', which is no 'TRACK ENTRY' of this package.")
            rows.setdefault((track, name), []).append((path, row))
    return {key: own for key, each in rows.items() if (own := _best(each)) is not None}


def _identified(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a file of `privlab identify --json`."""
    names = ("case", "attack", "features", "n", "rank_1", "low", "high", "images")
    try:
        rows = json.loads(read_text(path, "file of privlab identify"))["identity"]
        return [{name: row[name] for name in names} for row in rows]
    except (ValueError, KeyError, TypeError):
        raise PrivlabError(f"'{path}' is not what privlab identify --json prints: it has no rows 'identity'.") from None


def _best(rows: Sequence[tuple[Path, Mapping[str, Any]]]) -> Told | None:
    """Return the best of what was compared for an entry, from its rows and their files; None of controls alone."""
    most = max(row["n"] for _, row in rows)
    able = [(path, row) for path, row in rows if row["n"] == most]
    controls = [row["rank_1"] for _, row in able if row["attack"].startswith(CONTROL)]
    attacks = [(path, row) for path, row in able if not row["attack"].startswith(CONTROL)]
    if not attacks:
        return None
    path, row = max(attacks, key=lambda each: each[1]["rank_1"])
    table, _, compared = path.stem.rpartition("-")
    pictures = f"{row['features']} of pictures by {row['attack']}"
    return Told(
        rate=row["rank_1"],
        low=row["low"],
        high=row["high"],
        images=row["images"],
        among=most,
        control=max(controls, default=0.0),
        by=pictures if compared == "pictures" else row["features"].replace("release", compared),
        commands=_identify_commands(table, compared),
        compared=tuple(sorted({path.stem.rpartition("-")[2] for path, _ in attacks})),
    )


def _identify_commands(table: str, compared: str) -> tuple[str, str]:
    """Return the commands that run a table on the listed photographs, and look for them among candidates."""
    run = f"privlab table {table} --images FOLDER --manifest privlab/benchmark/tracks/public.csv"
    option = "" if compared == "pictures" else f" --compare {compared}"
    return run, f"privlab identify runs/{table} --candidates FOLDER --among 2,10,50,500{option} --json"
