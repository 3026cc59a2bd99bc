"""A submission: an entry is checked, measured on its track, judged, and written as a result file."""

import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from privlab.base import PrivlabError, collect_warnings, draw_for, versions
from privlab.benchmark.cards import CHECKED, FIXED_ATTACKS, UNDEFENDED, Card, instances
from privlab.benchmark.given import measure_releases, reconstructions, releases_sha256
from privlab.benchmark.measure import PUBLIC_LIMIT, Measurement, Photographs
from privlab.benchmark.page import pictures
from privlab.benchmark.plugins import installed, source_of_plugin
from privlab.benchmark.results import (
    FORMAT,
    Result,
    defense_entries,
    from_rows,
    of_package,
    plain,
    to_rows,
    write_result,
)
from privlab.benchmark.rule import conclude, judge
from privlab.benchmark.server import measure_checks
from privlab.benchmark.tracks import BUNDLED
from privlab.benchmark.tracks import photographs as bundled
from privlab.benchmark.weights import measure_keys, secret_bits_of_keys
from privlab.defenses import DEFENSES
from privlab.evaluation import Case, applicable, public_images, victim_of
from privlab.grids import IN_PROCESS, Engine
from privlab.release import observe, observe_updates, predictions, released_parameters, send
from privlab.report.tables.knowledge import declared_defenses, knows
from privlab.testing import Check, check_attack, check_defense
from privlab.testing.claims import largest_difference
from privlab.testing.defenses import case_of, photographs
from privlab.threat import ClientData, Draws, Stack, defense_declarations
from privlab.victims import VictimModel, victim

Say = Callable[[str], object]

_ROUNDING = 0.005
"""How far ε may be from the derived one, relatively, and how many bits more a card may state: it has a few digits."""


def submit(
    card: Card,
    out: Path,
    how: Photographs = Photographs(),  # noqa: B008  # it is frozen
    *,
    key: Path | None = None,
    engine: Engine = IN_PROCESS,
    say: Say = lambda text: None,
) -> Result:
    """Check an entry, measure it on its track, and write its result file.

    Args:
        card: the entry's.
        out: the result file to write; run directories, from which a stopped submission goes on, lie next to it.
        how: its photographs, and the weights of a victim that is not in the package.
        key: an ed25519 private key in PEM, to sign the result with.
        engine: where the photographs are attacked.
        say: called with what is done next.

    Raises:
        PrivlabError: if the card lies, admission fails, or a part of the entry does not fit its track.
    """
    begun, source, folder = time.monotonic(), source_of_plugin(card), out.with_suffix(".runs")
    with installed(card, source), collect_warnings([]):
        say("admission")
        checks = checks_of(card, how.weights)
        say("measurement")
        if card.track == "weights":
            measured = _concluded(card, measure_keys(card)) | {"utility": worth_of(card, how), "draws": card.draws}
        elif card.track == CHECKED:
            records, worth, refused = measure_checks(card, how)
            measured = _concluded(card, records) | {"utility": worth, "draws": card.draws, "refused": refused}
        elif card.kind == "attack":
            measured = _of_attack(card, how, folder, engine, say)
        elif card.releases:
            measured = _of_releases(card, how, folder)
        else:
            measured = _of_defense(Measurement(card, how, folder, engine=engine))
        if source is not None:  # once more, so that when a plug-in is called says nothing of what for
            checks = max(checks, checks_of(card, how.weights), key=lambda each: sum(not check.passed for check in each))
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


REFUSING = frozenset(
    {
        *("contents", "same-draw", "neighbours", "random-state", "untouched", "control"),
        *("declared", "granted", "returns", "same-seen"),
    }
)
"""The checks of admission without which nothing can be measured; any other one that fails makes an entry unreliable."""


def checks_of(card: Card, weights: str, chance: random.Random | None = None) -> tuple[Check, ...]:
    """Return the checks of admission of every part of an entry; none of keys, and of an entry that is given as files.

    A defense is tried on the track's own victim, whose shapes and gradients it will meet. A plug-in is tried on
    photographs and draws that are chosen at random, in batches of the track's size, and on each model that the attacks
    see, such as one with the block of April.

    Args:
        card: the entry's, whose class is installed.
        weights: the file of a victim that is not in the package, or "auto".
        chance: chooses photographs and draws for a plug-in; None for a random one.

    Raises:
        PrivlabError: if one of `REFUSING` fails, or a defense claims more than it has.
    """
    if card.kind == "defense":
        check_claims(card, weights)
    if card.track in FIXED_ATTACKS or card.reconstructions or card.releases:
        return ()
    found: list[Check] = []
    own_victim = card.of.victim(card.victim_name)
    for part in instances(card):
        if card.kind == "attack":
            own = check_attack(part)
        else:
            model = victim(own_victim.name, weights=weights, img_size=own_victim.img_size).model
            if not card.plugin:
                own = check_defense(part, model)
            else:
                given = _at_random(card, model, chance)
                own = tuple(each for seen in _models_seen(card, weights) for each in check_defense(part, seen, **given))
        for check in own:
            if not check.passed and check.name in REFUSING:
                raise PrivlabError(
                    f"Entry '{card.name}' is not admitted: check {check.name} of '{part.name}' fails "
                    f"({check.value:.3g}, must be {check.bound} {check.limit:g}: {check.text})."
                )
        found += own
    return tuple(found)


def _models_seen(card: Card, weights: str) -> list[VictimModel]:
    """Return the models on which a defense of a track releases, one for each set of parameters that are released."""
    measured, found = Measurement(card, Photographs(weights=weights)), dict[frozenset[str], VictimModel]()
    for case in card.of.cases:
        spec = measured.specification(case, "c", card.of.attacks)
        groups, _ = applicable(spec, victim_of(spec, torch.device("cpu")))
        found |= {released_parameters(group.victim.model): group.victim.model for group in groups}
    return [*found.values()]


def _at_random(card: Card, model: VictimModel, chance: random.Random | None) -> dict[str, Any]:
    """Return photographs and a seed for the checks of a plug-in, which it cannot know from this package."""
    chance = chance or random.Random(secrets.randbits(64))  # the seed is not predictable
    shown = photographs(model, len(bundled(BUNDLED)))
    chosen = chance.sample(range(len(shown)), max(2, card.of.client_batch) + 1)
    return {"images": shown[chosen], "seed": chance.randrange(2**40)}


def worth_of(card: Card, how: Photographs) -> float:
    """Return what the releases of a defense are still worth, in the case of its track where that is least."""
    if card.track == "weights" or card.clients > 1:  # their owner has the key; federated averaging takes the mean
        return 1.0
    parts = instances(card)
    undefended = [Measurement(card, how).specification(case, "a", card.of.attacks[:1]) for case in card.of.cases]
    return min(fidelity(spec, parts) for spec in undefended)


def fidelity(spec: Case, defense: Sequence[Any]) -> float:
    """Return what a release is still worth on the bundled photographs: a stand-in for utility, without training.

    Of features it is the share of photographs whose class the victim keeps, in [0, 1]. Of gradients and updates it is
    the cosine of the release with the undefended one, in [−1, 1], averaged over photographs: 1 says that training is
    not disturbed, 0 that it learns nothing from the release. Neither is the accuracy of a model that was trained under
    the defense, which the card states.
    """
    base, stack = victim_of(spec, torch.device("cpu")), Stack(tuple(defense))
    model = base.model
    shown = public_images(("samples",), PUBLIC_LIMIT, base.preprocessing, torch.device("cpu")).images
    images = torch.stack([*shown.values()]).to(model.mean)
    draws = [draw_for(spec.seed, sha256, "fidelity") for sha256 in shown]
    with torch.no_grad():
        labels = model(images).argmax(1)

    def key() -> torch.Generator:
        return draw_for(spec.seed, "model", "fidelity")

    if spec.features_released:
        feed = stack.feed(images, model.patch, draws, key=key())
        of_batch = Draws(draws, draw_for(spec.seed, "batch", "fidelity"), key())
        sent = send(model, feed, stack, of_batch, spec.cut_layer)
        kept = predictions(model, sent, spec.cut_layer).argmax(1) == labels
        return round(float(kept.double().mean()), 4)

    def released(stack: Stack) -> Mapping[str, Tensor]:
        if (client := spec.client) is not None:
            clients = [ClientData(*each) for each in zip(images.split(1), labels.split(1), draws, strict=True)]
            return observe_updates(model, client, clients, None, stack.parts).gradients
        feed = stack.feed(images, model.patch, draws, key=key())
        return observe(model, feed, labels, sorted(released_parameters(model)), stack.parts, draws).gradients

    plain, defended = (released(each) for each in (Stack(()), stack))
    names = sorted(plain, key=lambda name: name not in defended)  # those that are withheld come last, as zeros
    whole = torch.cat([plain[name].flatten(1).double() for name in names], 1)
    seen = torch.cat([defended.get(name, torch.zeros_like(plain[name])).flatten(1).double() for name in names], 1)
    return round(float(cosine_similarity(whole, seen).mean()), 4)


def _concluded(card: Card, records: pd.DataFrame) -> dict[str, Any]:
    """Return the rows as the result file has them, and what they say."""
    rows = to_rows(records)
    return {"judged": conclude(card, from_rows(rows)), "rows": rows}


def _of_defense(own: Measurement) -> dict[str, Any]:
    records = own.records()
    found = _concluded(own.card, records)
    shown = pictures(own.card, found["judged"], records, own.run_with_pictures)
    return found | {"utility": worth_of(own.card, own.how), "draws": own.card.draws, "pictures": shown}


def _of_releases(card: Card, how: Photographs, folder: Path) -> dict[str, Any]:
    if how != Photographs():
        raise PrivlabError(
            f"Entry '{card.name}' holds releases of the bundled photographs only. Leave out --images, --public and "
            "--weights."
        )
    records = measure_releases(card, folder)
    return _concluded(card, records) | {"utility": None, "draws": 1, "releases_sha256": releases_sha256(card)}


def _of_attack(card: Card, how: Photographs, folder: Path, engine: Engine, say: Say) -> dict[str, Any]:
    """Measure an attack on the defenses that its card names, or on those that it knows."""
    if card.reconstructions:
        target = defense_entries(card.track, card.against)[0]
        return _concluded(card, reconstructions(card, target).assign(entry=target.name))
    (attack,) = instances(card)
    rows: list[pd.DataFrame] = []
    shown: dict[str, Any] = {}
    for target in _targets(card, attack):
        say(f"on {target.name}")
        on_target = Measurement(target, how, folder, [attack], engine)
        own = on_target.records()
        rows.append(own.assign(entry=target.name))
        before = [each.rows for each in of_package() if (each.card.track, each.card.name) == (card.track, target.name)]
        joined = judge(pd.concat([*before, own]), card.of)
        shown[target.name] = pictures(target, joined, own, on_target.run_with_pictures)
    return _concluded(card, pd.concat(rows, ignore_index=True)) | {"pictures": shown}


def _targets(card: Card, attack: Any) -> list[Card]:  # noqa: ANN401
    """Return the defenses that an attack is run on: those that its card names, or that it knows."""
    if card.against:
        return defense_entries(card.track, card.against)
    known = declared_defenses(attack.name)
    defended = [each for each in defense_entries(card.track) if each.parts != (UNDEFENDED,)]
    found = [each for each in defended if knows(known, each.parts, {})]
    if not found:
        raise PrivlabError(
            f"Attack '{card.name}' knows no defense of the track '{card.track}'. Name one by against = [\"NAME\"]."
        )
    return found


def check_claims(card: Card, weights: str) -> None:
    """Compare the ε and the secret bits of a card with what its defense declares; what nothing derives is let pass.

    Raises:
        PrivlabError: if ε is another one, or finite where nothing is drawn, or there are fewer bits than the card says.
    """
    own, where, found = card.of.victim(card.victim_name), f"The card of '{card.name}'", None
    parts = [] if card.track == "weights" or card.releases else instances(card)
    if any(hasattr(part, "suspicion") for part in parts) and not isinstance(card.epsilon, str):
        raise PrivlabError(f'{where}: epsilon says {card.epsilon:g}, and a check adds no noise. State "none".')
    model = victim(own.name, weights=weights, img_size=own.img_size).model if parts else None
    if not card.releases:
        if not isinstance(card.epsilon, str):
            _check_epsilon(where, float(card.epsilon or 0), parts, model)
        found = secret_bits_of_keys(card) if model is None else derived_bits(parts, model, card.of.client_batch)
    claimed = card.secret_bits or 0.0
    if not 0 <= claimed < math.inf:
        raise PrivlabError(f"{where}: secret_bits must be finite and at least 0. Found {claimed:g}.")
    if found is not None and claimed > found + max(0.05, _ROUNDING * found):
        raise PrivlabError(
            f"{where}: secret_bits says {claimed:g}, and '{'+'.join(card.parts)}' draws from keys of {found:.1f} bits. "
            "State at most that."
        )


def derived_bits(parts: Sequence[Any], model: VictimModel, together: int) -> float | None:
    """Return log₂ of the number of keys of the parts, at most; None if one of another package does not declare it.

    A defense of this package that declares no key has none: fresh noise and random masks do not last as a secret.

    Args:
        parts: the defenses.
        model: the victim's.
        together: how many images are released together.
    """
    bits = 0.0
    for part in parts:
        if hasattr(part, "suspicion"):
            continue  # a check keeps no secret
        declared = defense_declarations(part).secret_bits
        if declared is None and part.name not in DEFENSES:
            return None
        bits += 0.0 if declared is None else declared(model, together)
    return bits


def _check_epsilon(where: str, epsilon: float, parts: Sequence[Any], model: VictimModel | None) -> None:
    """Compare an ε with what the parts of a defense declare; a key, which has no parts and no model, adds no noise.

    The ε of a stack is the least of its parts: the others act before that part, or on its release.
    """
    if not 0 < epsilon < math.inf:
        raise PrivlabError(f'{where}: epsilon must be finite and above 0, or "none". Found {epsilon:g}.')
    if model is None:
        raise PrivlabError(f'{where}: epsilon says {epsilon:g}, and a key adds no noise. State "none".')
    guarantees = [declared() for part in parts if (declared := defense_declarations(part).guarantee) is not None]
    if guarantees:
        found = min(guarantees, key=lambda each: each.epsilon)
        if not math.isclose(epsilon, found.epsilon, rel_tol=_ROUNDING):
            raise PrivlabError(
                f"{where}: epsilon says {epsilon:g}, and {found.by} gives {found.epsilon:.4g} at delta = "
                f"{found.delta:g} (replace-one)."
            )
    elif all(draws_nothing(part, model) for part in parts):
        raise PrivlabError(
            f"{where}: epsilon says {epsilon:g}, and '{'+'.join(part.name for part in parts)}' releases the same "
            'whatever it draws, so that no finite epsilon holds. State "none".'
        )


def draws_nothing(part: Any, model: VictimModel) -> bool:  # noqa: ANN401
    """Return whether a defense releases the same of the same images for two different draws, in a victim's shapes."""
    case: Any = case_of(part, model, photographs(model))
    first, second = (case.tensors(case.run(case.inputs(), case.draws(number))) for number in (0, 1))
    return largest_difference(first, second) == 0
