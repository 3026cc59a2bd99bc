"""A submission: an entry is checked, measured on its track, judged, and written as a result file."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from privlab.admission import Check, admit_attack
from privlab.admission.admit import admit
from privlab.admission.confinement import REFUSED
from privlab.admission.privacy_claims import check_bits, check_epsilon, derived_bits
from privlab.base import PrivlabError, collect_warnings, options_of, versions
from privlab.benchmark.cards import Card, instances
from privlab.benchmark.entries import defense_entries, entries
from privlab.benchmark.fidelity import fidelity
from privlab.benchmark.given import measure_releases, reconstructions, releases_sha256
from privlab.benchmark.judged import Judged, conclude, judge
from privlab.benchmark.measure import Photographs, draws_of, measure_defense, run_with_pictures, specification
from privlab.benchmark.page import pictures
from privlab.benchmark.plugins import installed, source_of_plugin
from privlab.benchmark.results import FORMAT, Result, from_rows, plain, to_rows, write_result
from privlab.benchmark.weights import measure_keys, secret_bits_of_keys
from privlab.grids import IN_PROCESS, Engine
from privlab.report.tables.knowledge import declared_defenses, knows
from privlab.victims import victim

__all__ = ["check_claims", "checks_of", "submit", "worth_of"]

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
        checks = checks_of(card, how.weights)
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


def checks_of(card: Card, weights: str) -> tuple[Check, ...]:
    """Return the checks of admission of every part of an entry; none of keys, and of an entry that is given as files.

    A defense is tried on the track's own victim, whose shapes and gradients it will meet.

    Args:
        card: that of the entry, whose class is installed.
        weights: the file of a victim that is not in the package, or "auto".

    Raises:
        PrivlabError: if one of `REFUSING` fails, or a defense claims more than it has.
    """
    if card.kind == "defense":
        check_claims(card, weights)
    if card.track == "weights" or card.reconstructions or card.releases:
        return ()
    found: list[Check] = []
    own_victim = card.of.victim(card.victim_name)
    for part in instances(card):
        if card.kind == "attack":
            own = admit_attack(part.name, options_of(part))
        else:
            own = admit(part, victim(own_victim.name, weights=weights, img_size=own_victim.img_size).model)
        for check in own:
            if not check.passed and check.name in REFUSING:
                raise PrivlabError(
                    f"Entry '{card.name}' is not admitted: check {check.name} of '{part.name}' fails "
                    f"({check.value:.3g}, must be {check.bound} {check.limit:g}: {check.text})."
                )
        found += own
    return tuple(found)


def check_claims(card: Card, weights: str) -> None:
    """Compare the ε and the secret bits of a card with what its defense declares.

    Args:
        card: that of a defense, whose class is installed.
        weights: the file of a victim that is not in the package, or "auto".

    Raises:
        PrivlabError: if ε is another one, or finite where nothing is drawn, or there are fewer bits than the card says.
    """
    own, where, found = card.of.victim(card.victim_name), f"The card of '{card.name}'", None
    keys = card.track == "weights"
    parts = [] if keys or card.releases else instances(card)
    model = victim(own.name, weights=weights, img_size=own.img_size).model if parts else None
    if not isinstance(card.epsilon, str) and not card.releases:
        check_epsilon(where, float(card.epsilon or 0), parts, model)
    if not card.releases:
        found = secret_bits_of_keys(card) if model is None else derived_bits(parts, model, card.of.client_batch)
    check_bits(where, card.secret_bits or 0.0, found, "+".join(card.parts))


def worth_of(card: Card, how: Photographs) -> float:
    """Return what the releases of a defense are still worth, in the case of its track where that is least.

    Args:
        card: that of the defense, whose class is installed.
        how: the weights of a victim that is not in the package.
    """
    parts = instances(card)
    if card.clients > 1:  # the mean is what federated averaging makes of the undefended updates
        return 1.0
    return min(fidelity(specification(card, case, "a", card.of.attacks[:1], how), parts) for case in card.of.cases)


def _concluded(card: Card, records: pd.DataFrame) -> dict[str, Any]:
    """Return the rows as the result file has them, and what they say.

    Raises:
        PrivlabError: if a plug-in did what it may not on a photograph.
    """
    for reason in records.reason.dropna().unique() if "reason" in records else ():
        if str(reason).endswith(REFUSED):
            raise PrivlabError(str(reason))
    rows = to_rows(records)
    return {"judged": conclude(card, from_rows(rows)), "rows": rows}


def _of_defense(card: Card, how: Photographs, folder: Path, engine: Engine, say: Say) -> dict[str, Any]:
    if card.releases:
        return _of_releases(card, how, folder)
    records = measure_defense(card, how, folder, engine=engine)
    found = _concluded(card, records)
    judged = Judged.of_json(found["judged"])
    return {
        **found,
        "utility": worth_of(card, how),
        "draws": draws_of(card),
        "pictures": pictures(
            card, judged, records, partial(run_with_pictures, card, how=how, out=folder, engine=engine)
        ),
    }


def _of_releases(card: Card, how: Photographs, folder: Path) -> dict[str, Any]:
    if how != Photographs():
        raise PrivlabError(
            f"Entry '{card.name}' holds releases of the bundled photographs alone: leave out --images, --public and "
            "--weights."
        )
    records = measure_releases(card, folder)
    told = {"utility": None, "draws": 1, "releases_sha256": releases_sha256(card)}
    return {**_concluded(card, records), **told}


def _of_attack(card: Card, how: Photographs, folder: Path, engine: Engine, say: Say) -> dict[str, Any]:
    """Measure an attack on the defenses that its card names, or on those that it knows."""
    if card.reconstructions:
        target = defense_entries(card.track, card.against)[0]
        return _concluded(card, reconstructions(card, target).assign(entry=target.name))
    (attack,) = instances(card)
    before = {each.card.name: each.rows for each in entries() if _is_of(each, card.track)}
    rows: list[pd.DataFrame] = []
    shown: dict[str, Any] = {}
    for target in _targets(card, attack):
        say(f"on {target.name}")
        own = measure_defense(target, how, folder, [attack], engine)
        rows.append(own.assign(entry=target.name))
        joined = judge(pd.concat([*([before[target.name]] if target.name in before else []), own]), card.of)
        run = partial(run_with_pictures, target, how=how, out=folder, attacks=[attack], engine=engine)
        shown[target.name] = pictures(target, joined, own, run)
    return _concluded(card, pd.concat(rows, ignore_index=True)) | {"pictures": shown}


def _is_of(result: Result, track: str) -> bool:
    return result.card.kind == "defense" and result.card.track == track


def _targets(card: Card, attack: Any) -> list[Card]:  # noqa: ANN401
    """Return the defenses that an attack is run on.

    Raises:
        PrivlabError: if the card names none, and the attack knows none.
    """
    if card.against:
        return defense_entries(card.track, card.against)
    known = declared_defenses(attack.name)
    found = [each for each in defense_entries(card.track) if each.parts != ("none",) and knows(known, each.parts, {})]
    if not found:
        raise PrivlabError(
            f"Attack '{card.name}' knows no defense of the track '{card.track}': name one by against = []."
        )
    return found


def _of_keys(card: Card) -> dict[str, Any]:
    return {**_concluded(card, measure_keys(card)), "utility": 1.0, "draws": card.of.draws}
