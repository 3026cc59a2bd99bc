"""The track `weights`: keys of stolen weights, recovered against a public model of the same origin."""

import hashlib
from collections.abc import Iterator

import pandas as pd

from privlab import keys
from privlab.attacks import WeightMatching
from privlab.attacks.weights.cloak_matching import CloakMatching, CloakObservation, uncloaked_fraction
from privlab.attacks.weights.weight_matching import WeightObservation, recovered_fraction
from privlab.base import PrivlabError
from privlab.benchmark.cards import KEY, Card
from privlab.benchmark.measure import as_kept, row_of
from privlab.evaluation import CONTROLS
from privlab.keys.algebra import SPACES
from privlab.victims import victim

CLOAK = "cloak"
"""The space of a card whose weights are cloaked (`privlab.keys.cloak`) instead of permuted by a model key."""


def known_by(card: Card) -> str:
    """Return the name of the attack against keys of a card's space; it declares none, as it is given weights alone."""
    return CloakMatching.name if card.parameters["space"] == CLOAK else WeightMatching.name


def secret_bits_of_keys(card: Card) -> float | None:
    """Return log₂ of the number of keys of a card's space; None of a space that is not known."""
    space = card.parameters.get("space")
    if space == CLOAK:
        return sum(keys.cloak_bits(len(W)) for W in keys.offloaded(keys.public_state(card.victim_name)).values())
    return keys.key_bits(keys.shape_of_model(card.victim_name), str(space)) if space in SPACES else None


def measure_keys(card: Card) -> pd.DataFrame:
    """Return a record for each key that is drawn: the share of the order's entries that the thief recovers.

    That is the order of the residual stream, or, of a cloak, of the rows of all matrices. The control is a guess: one
    entry of each order is right on average. The card's parameter `space` is the keys' space, or `CLOAK`.
    """
    if card.parts != (KEY,) or set(card.parameters) != {"space"}:
        raise PrivlabError(
            f"The track 'weights' takes entries that use '{KEY}', with the parameter space. Found "
            f"'{'+'.join(card.parts)}' with {', '.join(card.parameters) or 'no parameter'}."
        )
    own, (case,) = card.of.victim(card.victim_name), card.of.cases
    if (found := victim(own.name).weights.sha256) != own.weights_sha256:
        raise PrivlabError(f"The track 'weights' has {own.name} with other weights than {found[:12]}….")
    rows = []
    for draw, (share, guess) in enumerate(_shares(card, own.name, case.given["base"])):
        name = f"key {draw}"
        row = row_of(card, name, hashlib.sha256(name.encode()).hexdigest())
        row |= {"weights_sha256": own.weights_sha256, "defense": KEY}
        rows += [
            row | {"draw": draw, "attack": known_by(card), "attack_params": "{}", "key_recovered": share},
            row | {"attack": CONTROLS[1], "key_recovered": guess},
        ]
    return as_kept(pd.DataFrame(rows), card.of)


def _shares(card: Card, own: str, base: str) -> Iterator[tuple[float, float]]:
    """Yield the share of an order that is recovered, and that of a guess, for each draw of the track."""
    space, states = str(card.parameters["space"]), (keys.public_state(own), keys.public_state(base))
    if space == CLOAK:
        plain, public = (keys.offloaded({name: W.float() for name, W in state.items()}) for state in states)
        for _ in range(card.of.draws):
            cloaks = {name: keys.new_cloak(len(W)) for name, W in plain.items()}
            seen = CloakObservation({name: keys.apply_cloak(W, cloaks[name]) for name, W in plain.items()}, public)
            orders = {name: cloak.order for name, cloak in cloaks.items()}
            yield uncloaked_fraction(CloakMatching()(seen), orders), len(plain) / sum(map(len, plain.values()))
        return
    shape = keys.shape_of_model(own)
    for _ in range(card.of.draws):
        key = keys.new_key(shape, space)
        found = WeightMatching()(WeightObservation(keys.apply_key(states[0], key, shape), states[1], shape))
        yield recovered_fraction(found.residual, key.residual), 1 / shape.width
