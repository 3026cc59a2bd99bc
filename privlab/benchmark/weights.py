"""The track `weights`: keys of stolen weights, recovered against a public model of the same origin."""

import hashlib

import pandas as pd

from privlab.attacks import WeightMatching
from privlab.attacks.weights.weight_matching import WeightObservation, recovered_fraction
from privlab.base import PrivlabError
from privlab.benchmark.cards import KEY, Card
from privlab.benchmark.measure import KEPT
from privlab.evaluation import CONTROLS, SCHEMA
from privlab.keys import apply_key, new_key, public_state, shape_of_model
from privlab.victims import victim

__all__ = ["KNOWN_BY", "measure_keys"]

KNOWN_BY = WeightMatching.name
"""The attack that was written against keys; it declares no defenses, since it is given weights alone."""


def measure_keys(card: Card) -> pd.DataFrame:
    """Return a record for each key that is drawn: the share of the residual order's entries that the thief recovers.

    The control is a guess: one entry of D is right on average.

    Args:
        card: it uses `model-key`, and its parameter `space` is the keys' space.

    Raises:
        PrivlabError: if the card uses something else, or the victim's weights are not the track's.
    """
    if card.parts != (KEY,) or set(card.parameters) != {"space"}:
        raise PrivlabError(
            f"The track 'weights' takes entries that use '{KEY}', with the parameter space. Found "
            f"'{'+'.join(card.parts)}' with {', '.join(card.parameters) or 'no parameter'}."
        )
    own, (case,) = card.of.victim(card.victim_name), card.of.cases
    if (found := victim(own.name).weights.sha256) != own.weights_sha256:
        raise PrivlabError(f"The track 'weights' has {own.name} with other weights than {found[:12]}….")
    shape, state, base = shape_of_model(own.name), public_state(own.name), public_state(case.given["base"])
    space, rows = str(card.parameters["space"]), []
    for draw in range(card.of.draws):
        key = new_key(shape, space)
        seen = WeightObservation(apply_key(state, key, shape), base, shape)
        share = recovered_fraction(WeightMatching()(seen).residual, key.residual)
        name = hashlib.sha256(f"key {draw}".encode()).hexdigest()
        common = {
            "case": case.name,
            "victim": own.name,
            "weights_sha256": own.weights_sha256,
            "release": "weights",
            "defense": KEY,
            "setting": "c",
            "effort": card.of.effort,
            "geometry": "in_place",
            "image": f"key {draw}",
            "image_sha256": name,
            "seed": card.of.seed,
            "draw": draw,
            "status": "ok",
            "schema": SCHEMA,
        }
        rows += [
            common | {"attack": KNOWN_BY, "attack_params": "{}", "key_recovered": share},
            common | {"attack": CONTROLS[1], "draw": 0, "key_recovered": 1 / shape.width},
        ]
    return pd.DataFrame(rows).reindex(columns=[*KEPT, *card.of.metrics])
