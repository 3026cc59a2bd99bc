"""The entries of this package, and those of a folder: cards, and the results that were measured of them."""

import warnings
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from privlab.base import PrivlabError, PrivlabWarning, first
from privlab.benchmark.cards import Card, read_card
from privlab.benchmark.results import Result, read_result

__all__ = ["defense_entries", "entries", "entries_of"]

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
    cards = [read_card(path) for path in sorted((PACKAGE / "cards").glob("*.toml"))]
    own = {card.name: card for card in cards if card.kind == "defense" and card.track == track}
    for name in names:
        if name not in own:
            raise PrivlabError(f"The track '{track}' has no entry '{name}'. It has {first(sorted(own), 20)}.")
    return [own[name] for name in names or own]
