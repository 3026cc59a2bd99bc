"""What a case holds of what names ask for, and what it states of it."""

import json
import sys
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from privlab.base import PrivlabError
from privlab.defenses import Jigsaw, Mjp, defenses
from privlab.grids import case_of, specify
from privlab.threat import Client, Features, Gradient, Release, Update


@dataclass(frozen=True)
class OwnJigsaw(Jigsaw):
    """A defense from another package, with a γ of its own."""

    name: ClassVar[str] = "own-jigsaw"
    gamma: float = 0.9


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"defense": "own-jigsaw"}, OwnJigsaw(gamma=0.9)),
        ({"defense": "own-jigsaw", "gamma": 0.5}, OwnJigsaw(gamma=0.5)),
        ({"defense": "own-jigsaw", "options": ("gamma=0.4",)}, OwnJigsaw(gamma=0.4)),
        ({"defense": "jigsaw", "masked_pe": "slot"}, Jigsaw(gamma=0.27)),
        ({"defense": "mjp"}, Mjp(gamma=0.27, masked_pe="unknown")),
        ({"defense": "mjp", "gamma": 0.0, "masked_pe": "none"}, Mjp(gamma=0.0, masked_pe="none")),
        ({"defense": "mjp", "gamma": 0.5, "options": ("mjp.gamma=0.4",)}, Mjp(gamma=0.4)),
    ],
)
def test_a_defense_keeps_its_own_defaults_where_the_run_states_none(
    given: dict[str, Any], made: Jigsaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**defenses(), OwnJigsaw.name: OwnJigsaw}
    for module in ("privlab.evaluation.names", "privlab.grids.specify"):
        monkeypatch.setattr(sys.modules[module], "defenses", lambda: known)
    spec = specify(model=("vit_ti_mjp",), setting=("c",), **given)
    assert spec.defense == (made,)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "attack": "april,mjp-full",
            "effort": "full",
            "options": ["mjp-full.starts=3"],
            "block": "stock",
            "force": True,
        },
        {"defense": "mjp+gradient-noise", "gamma": 0.4, "options": ["multiplier=2", "border.rounds=3"], "seed": 5},
        {"defense": "row-permutation", "client_batch": 4, "images": ["a", "b"], "limit": 3, "labels": "predicted"},
        {"cut_layer": 2, "release": "features", "defense": "none", "public": ["x"], "public_limit": 9},
        {"client": "flower-default", "options": ["client.steps=2"], "metrics": "psnr", "draws": 2, "img_size": 32},
        {"gradient_batch": 3, "reassembly": "border", "weights": "random", "normalisation": "clip"},
    ],
)
def test_what_run_json_states_makes_the_same_case(options: dict[str, Any]) -> None:
    made = specify("vit_ti_mjp", "a,c", **options)
    assert case_of(json.loads(json.dumps(made.stated())), made.released) == made


@pytest.mark.parametrize(
    ("release", "words"),
    [
        (Gradient(3), {"release": "gradients", "gradient_batch": 3}),
        (Features(2, 4), {"release": "features", "cut_layer": 2, "client_batch": 4}),
        (Update(Client(lr=0.5, steps=2)), {"client": Client(lr=0.5, steps=2)}),
    ],
)
def test_a_release_that_is_given_as_an_object_is_stated_in_words(release: Release, words: dict[str, Any]) -> None:
    made = specify("vit_ti", release=release)
    assert made.release == release
    assert made == specify("vit_ti", **words)


@pytest.mark.parametrize(
    ("options", "release"),
    [
        ({"gradient_batch": 2, "client_batch": 4}, Gradient(2)),
        ({"defense": "row-permutation", "client_batch": 4}, Features(0, 4)),
        ({"attack": "pe-assignment"}, Features()),
        ({"cut_layer": 1}, Features(1)),
        ({"client": "adam", "options": ["client.lr=0.5"]}, Update(Client(optimiser="adam", lr=0.5))),
    ],
)
def test_what_is_released_is_decided_by_what_needs_it(options: dict[str, Any], release: Release) -> None:
    made = specify("vit_ti", **options)
    assert made.release == release
    assert made.stated()["release"] == "auto"


def test_another_release_of_a_case_is_stated() -> None:
    made = specify("vit_ti", gradient_batch=2, client_batch=8)
    stated = replace(made, release=Gradient(5)).stated()
    assert stated == made.stated() | {"gradient_batch": 5}
    assert (stated["gradient_batch"], stated["client_batch"]) == (5, 8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gradient_batch": 0}, "gradient_batch"),
        ({"public_limit": 0}, "public_limit"),
        ({"draws": 0}, "draws"),
        ({"seed": -1}, "seed"),
        ({"attack": []}, "attacks"),
        ({"metrics": []}, "metrics"),
        ({"release": "features", "block": "april"}, "april"),
        ({"client": "sgd", "defense": "row-permutation"}, "does not send"),
        ({"client": "sgd", "options": ["client.lr=unknown"]}, "public here"),
        ({"release": "features", "gradient_batch": 2}, "gradient_batch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        specify("vit_ti", **wrong)
