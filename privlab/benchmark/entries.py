"""The entries of this package, and those of a folder: cards, and the results that were measured of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError, first, read_text, warn
from privlab.benchmark.cards import Card, read_card
from privlab.benchmark.results import Result, parse_result, read_result
from privlab.benchmark.standing import PACKAGE, Told, result_texts
from privlab.evaluation import CONTROL


def entries(folders: Sequence[Path] = ()) -> list[Result]:
    """Return the results of this package and of other folders, checked.

    A result from elsewhere stands in for the package's own of the same entry, with a warning.

    Args:
        folders: each with *.json, or with results/*.json.

    Raises:
        PrivlabError: if a folder is not there, a result was edited or is of another version, or two are of one entry.
    """
    found: dict[tuple[str, str], Result] = {}
    for results in (of_package(), *map(entries_of, folders)):
        for result in results:
            before = found.get(key := (result.card.track, result.card.name))
            if before is not None and before.path.resolve() != result.path.resolve():
                _check_replaces(before, result)
            found[key] = result
    return list(found.values())


@cache
def of_package() -> tuple[Result, ...]:
    """Return the results of this package, which are read and checked once in a process."""
    return tuple(parse_result(text.decode(), PACKAGE / "results" / name) for name, text in result_texts().items())


def _check_replaces(before: Result, result: Result) -> None:
    """Warn if a result stands in for the package's own; two from elsewhere are an error."""
    entry = f"'{result.card.name}' of the track '{result.card.track}'"
    if not before.path.is_relative_to(PACKAGE):
        raise PrivlabError(
            f"'{before.path}' and '{result.path}' are results of the same entry, {entry}. Keep one of them."
        )
    warn(
        f"{result.path} replaces the package's own result of {entry}. Give the entry another name to keep both.",
        3,
    )


def entries_of(folder: Path) -> Iterator[Result]:
    """Yield the results of one folder, in the order of their names."""
    if not folder.is_dir():
        raise PrivlabError(f"No folder at '{folder}'. Give one with result files.")
    for path in sorted({*folder.glob("*.json"), *folder.glob("results/*.json")}):
        yield read_result(path)


def defense_entries(track: str, names: Sequence[str] = ()) -> list[Card]:
    """Return the cards of this package's defenses of a track: those of these names, or all."""
    own = {card.name: card for card in _defenses() if card.track == track}
    for name in names:
        if name not in own:
            raise PrivlabError(f"The track '{track}' has no entry '{name}'. It has {first(sorted(own), 20)}.")
    return [own[name] for name in names or own]


@cache
def _defenses() -> tuple[Card, ...]:
    """Return the cards of this package's defenses, of all tracks, which are read once in a process."""
    cards = (read_card(path) for path in sorted((PACKAGE / "cards").glob("*.toml")))
    return tuple(card for card in cards if card.kind == "defense")


@cache
def told_of_package() -> Mapping[tuple[str, str], Told]:
    """Return what `told` does of this package's files, which are read once in a process."""
    return told(PACKAGE / "identity")


def told(folder: Path) -> dict[tuple[str, str], Told]:
    """Return how often the photograph of each entry is told, by track and name, from what `privlab identify` printed.

    The table of a file TABLE-pictures.json or TABLE-releases.json has a case for each entry, with the track as its
    group and the name as its label. Of several features, attacks and files the one with the highest rate among the most
    candidates counts.

    Args:
        folder: of the files, each the output of `privlab identify runs/TABLE … --json`.

    Raises:
        PrivlabError: if a file has no such rows, or is of no entry of this package.
    """
    known = {f"{card.track} {card.name}": (card.track, card.name) for card in _defenses()}
    rows = [row for path in sorted(folder.glob("*.json")) for row in _identified(path)]
    for row in rows:
        if row["case"] not in known:
            raise PrivlabError(
                f"'{row['path']}' has the case '{row['case']}'. It must be 'TRACK ENTRY', with an entry of this "
                "package."
            )
    found = {key: _best([row for row in rows if row["case"] == case]) for case, key in known.items()}
    return {key: own for key, own in found.items() if own is not None}


def _identified(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a file of `privlab identify --json`, each with the file's path."""
    names = ("case", "attack", "features", "n", "rank_1", "low", "high", "images")
    try:
        rows = json.loads(read_text(path, "file of privlab identify"))["identity"]
        return [{"path": path} | {name: row[name] for name in names} for row in rows]
    except (ValueError, KeyError, TypeError):
        raise PrivlabError(f"'{path}' is not what privlab identify --json prints: it has no rows 'identity'.") from None


def _best(rows: Sequence[Mapping[str, Any]]) -> Told | None:
    """Return the best of what was compared for an entry; None of controls alone, or of nothing."""
    most = max((row["n"] for row in rows), default=0)
    controls, attacks = [], []
    for row in rows:
        if row["n"] == most:
            (controls if row["attack"].startswith(CONTROL) else attacks).append(row)
    if not attacks:
        return None
    best = max(attacks, key=lambda row: row["rank_1"])
    table, _, compared = best["path"].stem.rpartition("-")
    by, option = f"{best['features']} of pictures by {best['attack']}", ""
    if compared != "pictures":
        by, option = best["features"].replace("release", compared), f" --compare {compared}"
    run = f"privlab table {table} --images FOLDER --manifest privlab/benchmark/tracks/public.csv"
    return Told(
        rate=best["rank_1"],
        low=best["low"],
        high=best["high"],
        images=best["images"],
        among=most,
        control=max((row["rank_1"] for row in controls), default=0.0),
        by=by,
        commands=(run, f"privlab identify runs/{table} --candidates FOLDER --among 2,10,50,500{option} --json"),
        compared=tuple(sorted({row["path"].stem.rpartition("-")[2] for row in attacks})),
    )
