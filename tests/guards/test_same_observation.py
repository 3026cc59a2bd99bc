"""What an adversary makes is a function of what it sees: another truth behind the same observation changes no bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privlab.attacks import ATTACKS
from privlab.attacks.breaching.wrapper import Breaching
from privlab.evaluation import applicable, known_slots
from privlab.grids import specify
from privlab.inventory.explain import explain
from privlab.inventory.texts import arguments_of, docstrings
from privlab.patches import permute
from privlab.reassembly import Borders, rearrange
from privlab.threat import Reconstruction, attack_declarations
from privlab.victims import Victim

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

ASKED_FOR = [
    name
    for name, kind in ATTACKS.items()
    for declared in [attack_declarations(kind)]
    if not issubclass(kind, Breaching)
    and (declared.named_only or declared.effort == "full" or "Example" in docstrings(name)[0].sections)
]
"""The attacks that the cases below may leave out: each of them runs as the example of its page does.

An attack whose example follows from what it declares, and that runs by default, is in these cases.
"""

MADE = ("in_place", "reassembled")
"""The geometries that an adversary can make."""

GRADIENTS: dict[str, dict[str, Any]] = {
    "mjp": {"gamma": 0.5},
    "jigsaw": {"defense": "jigsaw", "gamma": 0.5},
    "noise and a jigsaw": {"defense": "jigsaw+gradient-noise", "gamma": 0.5},
    "encrypted": {"defense": "block-scrambling"},
    "two in one": {"gamma": 0.5, "gradient_batch": 2},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"release": "features"},
    "rows": {"defense": "row-permutation"},
    "columns": {"defense": "column-permutation"},
    "rows and columns": {"defense": "row-permutation+column-permutation"},
    "batch": {"defense": "batch-shuffle"},
    "noise": {"defense": "gaussian-noise"},
    "filter": {"defense": "blur", "release": "features"},
    "mixture": {"defense": "cutmix", "release": "features"},
}
UPDATES: dict[str, dict[str, Any]] = {
    "sgd": {
        "setting": ("a",),
        "client": "sgd",
        "options": ("client.steps=3", "client.weight_decay=0.05", "client.lr=0.1"),
    },
    "adamw": {"setting": ("a",), "client": "adamw", "options": ("client.steps=2", "client.dropout=0.1")},
    "means": {
        "setting": ("a",),
        "client": "sgd",
        "options": (
            "client.clients=2",
            "client.steps=2",
        ),
    },
}
"""Clients of one image each: order, dropout and label are drawn or private, and behind the update."""


def same(run: Any, crops: Tensor, *, together: bool = False, **given: Any) -> set[str]:
    """Run twice, the second time on other images, labels, names, masks, orders and draws behind the same observation.

    Returns:
        the attacks that brought home the same images, bit for bit, in every geometry that an adversary can make.
    """
    first = run(**given)
    truth = given | ({"gamma": given["gamma"] / 2} if given.get("gamma", 1) < 1 else {}) | {"seed": 71}
    other = run(**truth, images=crops[50:260:110], first_label=1, replay=first)
    for batch, batch2 in zip(first.batches, other.batches, strict=True):
        assert not torch.equal(batch.reference, batch2.reference)
        assert not torch.equal(batch.labels, batch2.labels)
        assert {p.sha256 for p in batch.named}.isdisjoint(p.sha256 for p in batch2.named)
        moved = "moved" if batch.fed.moved.any() and not batch.fed.moved.all() else "order"
        if batch.fed.moved.any():
            assert not torch.equal(getattr(batch.fed, moved), getattr(batch2.fed, moved))
    assert first.images.keys() == other.images.keys()
    fine = {row["attack"] for row in first.records if row["status"] == "ok"}
    changed = [
        (key, [row.get("reason") for row in other.records if row["attack"] == key[1]][:1])
        for key, images in first.images.items()
        if key[2] in MADE and not _alike(images, other.images[key], together)
    ]
    assert changed == []
    return fine & {name for _, name, _ in first.images}


def _alike(a: list[Tensor], b: list[Tensor], together: bool) -> bool:
    one, two = torch.cat(a), torch.cat(b)
    if not together:
        return torch.equal(one, two)
    return sorted(image.numpy().tobytes() for image in one) == sorted(image.numpy().tobytes() for image in two)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRADIENTS)
def test_of_gradients(run: Any, crops: Tensor, case: str) -> None:
    ran = same(run, crops, together=case == "two in one", **GRADIENTS[case])
    assert ran >= {"token-separation"}


@pytest.mark.slow
@pytest.mark.parametrize("case", FEATURES)
def test_of_features(run: Any, crops: Tensor, case: str) -> None:
    ran = same(run, crops, together=case == "batch", **FEATURES[case])
    assert ran >= {"least-squares"}


@pytest.mark.parametrize("case", [pytest.param("sgd", marks=pytest.mark.slow), "adamw", "means"])
def test_of_updates(run: Any, crops: Tensor, case: str) -> None:
    ran = same(run, crops, together=case == "means", **UPDATES[case])
    own = {"patch-update", "mjp-subspace", "round-unrolling"} if case == "sgd" else {"adam-update"}
    assert ran >= ({"client-unrolling"} if case == "means" else {"patch-gradient", *own})


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED_FOR)
def test_of_attacks_that_are_asked_for(run: Any, small: Callable[..., Victim], crops: Tensor, name: str) -> None:
    example = arguments_of(explain(name).sections["Example"])
    given: dict[str, Any] = {key: example[key] for key in ("release", "defense", "client", "options") if key in example}
    given |= {"setting": ("a",)} if "client" in given else {"gamma": 0.5}
    if activation := attack_declarations(ATTACKS[name]).activation:
        given["victim"] = small(act_layer=getattr(nn, activation))
    assert same(run, crops, attack=(name,), **given) == {name}


def test_every_attack_but_breachings_was_tried(small: Callable[..., Victim]) -> None:
    """Breaching's get the same observation through the same call; each of them searches for minutes at the least."""
    ran = {*ASKED_FOR}
    for given in (*GRADIENTS.values(), *FEATURES.values(), *UPDATES.values()):
        specification = specify(**({"model": ("tiny",), "setting": ("c",)} | given))
        groups, _ = applicable(specification, small(), stand_ins=True)
        ran |= {attack.name for group in groups for attack in group.attacks}
    assert ran == {name for name, kind in ATTACKS.items() if not issubclass(kind, Breaching)}


def test_what_is_kept_is_laid_out_without_the_truth(run: Any, crops: Tensor) -> None:
    """An earlier run's reconstructions are laid out by what is seen, not by the mask, where the two are at odds."""
    given = {"gamma": 0.5, "attack": ("patch-gradient",)}
    first, other = run(**given), run(**given, images=crops[50:260:110])
    again = run(**given, replay=other, kept=first.reconstructions)
    (in_place,) = again.images["c", "patch-gradient", "in_place"]
    assert torch.equal(in_place, torch.cat(first.images["c", "patch-gradient", "in_place"]))  # one image a call
    known = torch.cat([slots for seen in other.observed if (slots := known_slots(seen)) is not None])
    assert not torch.equal(known, ~first.batches[0].fed.moved)
    order = rearrange(Reconstruction(in_place), known, Borders(), (4, 4), 4)
    assert torch.equal(again.images["c", "patch-gradient", "reassembled"][0], permute(in_place, order, 4))
