"""A submission: an entry is checked, measured on its track, judged, and written as a result file."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from privlab.admission import Check, admit_attack
from privlab.admission.admit import admit, small_victim
from privlab.base import PrivlabError, collect_warnings, options_of, versions
from privlab.benchmark.cards import Card, instances
from privlab.benchmark.entries import defense_entries
from privlab.benchmark.fidelity import fidelity
from privlab.benchmark.given import measure_releases, reconstructions, releases_sha256
from privlab.benchmark.measure import Photographs, draws_of, measure_defense, specification
from privlab.benchmark.pictures import pictures
from privlab.benchmark.plugins import installed, source_of_plugin
from privlab.benchmark.results import FORMAT, Result, plain, to_rows, write_result
from privlab.benchmark.rule import judge
from privlab.benchmark.weights import known_by, measure_keys
from privlab.grids import IN_PROCESS, Engine
from privlab.report.tables.knowledge import knows
from privlab.threat import attack_declarations

__all__ = ["submit"]

Say = Callable[[str], object]


def submit(
    card: Card,
    out: Path,
    how: Photographs = Photographs(),  # noqa: B008  # it is frozen
    *,
    key: Path | None = None,
    runs: Path | None = None,
    engine: Engine = IN_PROCESS,
    say: Say = lambda text: None,
) -> Result:
    """Check an entry, measure it on its track, and write its result file.

    Args:
        card: the entry's.
        out: the result file to write.
        how: its photographs, and the weights of a victim that is not in the package.
        key: an ed25519 private key in PEM, to sign the result with.
        runs: where the run directories lie, from which a submission that was stopped goes on; beside `out` by default.
        engine: where the photographs are attacked.
        say: called with what is done next.

    Raises:
        PrivlabError: if the card lies, admission fails, or a part of the entry does not fit its track.
    """
    begun, source = time.monotonic(), source_of_plugin(card)
    folder = out.with_suffix(".runs") if runs is None else runs
    with installed(card, source), collect_warnings([]):
        say("admission")
        checks = [] if card.track == "weights" or card.reconstructions or card.releases else _admit(card)
        say("measurement")
        measured = _of_keys(card) if card.track == "weights" else _measured(card, how, folder, engine, say)
    data = {
        "format": FORMAT,
        "track": {"name": card.track, "version": card.version, "sha256": card.of.sha256},
        "created": int(time.time()),
        "card": card.text,
        "plugin": source,
        "versions": dict(versions()),
        "photographs": list(how.parts),
        "public_sha256": how.public_sha256(),
        "admission": [{name: plain(value) for name, value in asdict(check).items()} for check in checks],
        **measured,
        "seconds": round(time.monotonic() - begun, 1),
    }
    return write_result(data, out, key)


def _measured(card: Card, how: Photographs, folder: Path, engine: Engine, say: Say) -> dict[str, Any]:
    return (_of_defense if card.kind == "defense" else _of_attack)(card, how, folder, engine, say)


REFUSING = frozenset(
    {
        *("contents", "same-draw", "neighbours", "random-state", "untouched", "control"),
        *("declared", "granted", "returns", "same-seen"),
    }
)
"""The checks of admission without which nothing can be measured; any other one that fails makes an entry unreliable."""


def _admit(card: Card) -> tuple[Check, ...]:
    """Return the checks of admission of every part.

    Raises:
        PrivlabError: if one of `REFUSING` fails.
    """
    found: list[Check] = []
    for part in instances(card):
        name = part.name
        own = admit(part, small_victim()) if card.kind == "defense" else admit_attack(name, options_of(part))
        for check in own:
            if not check.passed and check.name in REFUSING:
                raise PrivlabError(
                    f"Entry '{card.name}' is not admitted: check {check.name} of '{name}' fails ({check.value:.3g}, "
                    f"must be {check.bound} {check.limit:g}: {check.text}). `privlab admit {name}` shows all checks."
                )
        found += own
    return tuple(found)


def _of_defense(card: Card, how: Photographs, folder: Path, engine: Engine, say: Say) -> dict[str, Any]:
    if card.releases:
        return _of_releases(card, how, folder)
    records = measure_defense(card, how, folder, engine=engine)
    judged = judge(records, card.of)
    parts = instances(card)
    worth = min(fidelity(specification(card, case, "a", card.of.attacks[:1], how), parts) for case in card.of.cases)
    return {
        "judged": judged.as_json(),
        "utility": worth,
        "draws": draws_of(card),
        "rows": to_rows(records),
        "pictures": pictures(folder, judged, card.of),
    }


def _of_releases(card: Card, how: Photographs, folder: Path) -> dict[str, Any]:
    if how != Photographs():
        raise PrivlabError(
            f"Entry '{card.name}' holds releases of the bundled photographs alone: leave out --images, --public and "
            "--weights."
        )
    records = measure_releases(card, folder)
    told = {"utility": None, "draws": 1, "releases_sha256": releases_sha256(card)}
    return {"judged": judge(records, card.of).as_json(), **told, "rows": to_rows(records)}


def _of_attack(card: Card, how: Photographs, folder: Path, engine: Engine, say: Say) -> dict[str, Any]:
    """Measure an attack on the defenses that its card names, or on those that it knows."""
    if card.reconstructions:
        target = defense_entries(card.track, card.against)[0]
        records = reconstructions(card, target)
        found = {target.name: records}
    else:
        (attack,) = instances(card)
        found = {}
        for target in _targets(card, attack):
            say(f"on {target.name}")
            found[target.name] = measure_defense(target, how, folder, [attack], engine)
    known = frozenset(card.against) if card.reconstructions else attack_declarations(instances(card)[0]).knows
    judged: Mapping[str, Any] = {
        name: judge(rows, card.of).as_json() | {"knows": _knows_all(name, card, known)} for name, rows in found.items()
    }
    rows = pd.concat([each.assign(entry=name) for name, each in found.items()], ignore_index=True)
    return {"judged": judged, "rows": to_rows(rows)}


def _knows_all(name: str, card: Card, known: frozenset[str]) -> bool:
    (target,) = defense_entries(card.track, [name])
    return bool(card.reconstructions) or knows(known, target.parts, {})


def _targets(card: Card, attack: Any) -> list[Card]:  # noqa: ANN401
    """Return the defenses that an attack is run on.

    Raises:
        PrivlabError: if the card names none, and the attack knows none.
    """
    if card.against:
        return defense_entries(card.track, card.against)
    known = attack_declarations(attack).knows
    found = [each for each in defense_entries(card.track) if each.parts != ("none",) and knows(known, each.parts, {})]
    if not found:
        raise PrivlabError(
            f"Attack '{card.name}' knows no defense of the track '{card.track}': name one by against = []."
        )
    return found


def _of_keys(card: Card) -> dict[str, Any]:
    records = measure_keys(card)
    judged = judge(records, card.of)
    kept = tuple(flag for flag in judged.flags if not flag.startswith("No adaptive attack"))
    judged = replace(judged, known_by=(known_by(card),), flags=kept)  # written against keys, which declare no class
    return {"judged": judged.as_json(), "utility": 1.0, "draws": card.of.draws, "rows": to_rows(records)}
