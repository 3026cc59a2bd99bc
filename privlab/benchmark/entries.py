"""The entries of this package, and those of a folder: cards, and the results that were measured of them."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from privlab.base import PrivlabError, first, warn
from privlab.benchmark.cards import Card, read_card
from privlab.benchmark.results import Result, parse_result, read_result
from privlab.benchmark.standing import PACKAGE, result_texts


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
