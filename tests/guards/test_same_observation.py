"""What an adversary makes is a function of what it sees: another truth behind the same observation changes no bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privlab.attacks import ATTACKS
from privlab.evaluation import Specification, applicable, known_slots
from privlab.patches import permute
from privlab.reassembly import Borders, rearrange
from privlab.threat import Capability, Reconstruction
from privlab.victims import Victim

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

OF_FEATURES = [name for name, kind in ATTACKS.items() if Capability.RELEASED_FEATURES in kind.requires]
DEARER = {
    *(
        "gradient-matching",
        "gradient-likelihood",
        "head-inversion",
        "cocktail-party",
        "fedleak",
        "fedavg-matching",
        "spear",
    ),
    "orthogonal-matching",
    "learning-to-invert",
    "staged-likelihood",
    "map-unet",
    "adapter-separation",
    "qkv-span",
    "qkv-completion",
    *(name for name in OF_FEATURES if name.startswith("inversion-")),
}
BREACHING = {name for name in ATTACKS if name.startswith("breaching:")}  # each of them: hours; see the test below
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
        "settings": ("a",),
        "client": "sgd",
        "options": ("client.steps=3", "client.weight_decay=0.05", "client.lr=0.1"),
    },
    "adamw": {"settings": ("a",), "client": "adamw", "options": ("client.steps=2", "client.dropout=0.1")},
    "means": {
        "settings": ("a",),
        "client": "sgd",
        "options": (
            *("client.clients=2", "client.steps=2", "client-unrolling.starts=4", "client-unrolling.rounds=2"),
            "client-unrolling.passes=0",
        ),
    },
}
"""Clients of one image each: order, dropout and label are drawn or private, and behind the update."""

ADAPTERS: dict[str, Any] = {
    "settings": ("a",),
    "client": "sgd",
    "options": ("client.trains=adapters", "client.rank=40"),
}
LORA: dict[str, Any] = ADAPTERS | {"options": ("client.trains=lora", "client.rank=40")}


def same(run: Any, crops: Tensor, *, together: bool = False, **given: Any) -> set[str]:
    """Run twice, the second time on other images, labels, names, masks, orders and draws behind the same observation.

    Returns:
        the attacks that brought home the same images, bit for bit, in every geometry that an adversary can make.
    """
    first = run(**given)
    truth = given | ({"gamma": given["gamma"] / 2} if given.get("gamma", 1) < 1 else {}) | {"seed": 71}
    other = run(**truth, images=crops[50:260:110], first_label=1, replay=first)
    for (trial, batch), (trial2, batch2) in zip(first.trials, other.trials, strict=True):
        assert not torch.equal(trial.reference, trial2.reference)
        assert not torch.equal(batch.labels, batch2.labels)
        assert {p.sha256 for p in batch.named}.isdisjoint(p.sha256 for p in batch2.named)
        moved = "moved" if trial.feed.moved.any() and not trial.feed.moved.all() else "order"
        if trial.feed.moved.any():
            assert not torch.equal(getattr(trial.feed, moved), getattr(trial2.feed, moved))
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


@pytest.mark.parametrize("case", UPDATES)
def test_of_updates(run: Any, crops: Tensor, case: str) -> None:
    ran = same(run, crops, together=case == "means", **UPDATES[case])
    own = {"patch-update", "mjp-subspace", "round-unrolling"} if case == "sgd" else {"adam-update"}
    assert ran == ({"client-unrolling"} if case == "means" else {"patch-gradient", *own})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DEARER))
def test_of_attacks_that_are_asked_for(run: Any, small: Callable[..., Victim], crops: Tensor, name: str) -> None:
    given: dict[str, Any] = {"release": "features"} if name in OF_FEATURES else {"gamma": 0.5}
    given = UPDATES["sgd"] if name == "fedavg-matching" else given
    given |= {"victim": small(act_layer=nn.ReLU)} if name == "spear" else {}
    given |= {"defense": "mjp+gradient-noise"} if name == "gradient-likelihood" else {}
    given = {"defense": "censor"} if name in ("orthogonal-matching", "learning-to-invert") else given
    given = {"defense": "gradient-pruning"} if name == "staged-likelihood" else given
    given = ADAPTERS if name == "adapter-separation" else given
    given = LORA if name == "qkv-span" else given
    given = {"defense": "percentile-privacy"} if name == "qkv-completion" else given
    assert same(run, crops, attacks=(name,), **given) == {name}


def test_every_attack_but_breachings_was_tried(small: Callable[..., Victim]) -> None:
    """Breaching's get the same observation through the same call; each of them searches for minutes at the least."""
    ran = {*DEARER}
    for given in (*GRADIENTS.values(), *FEATURES.values(), *UPDATES.values()):
        specification = Specification(**({"models": ("tiny",), "settings": ("c",)} | given))
        groups, _ = applicable(specification, small(), stand_ins=True)
        ran |= {attack.name for group in groups for attack in group.attacks}
    assert ran == set(ATTACKS) - BREACHING


def test_what_is_kept_is_laid_out_without_the_truth(run: Any, crops: Tensor) -> None:
    """An earlier run's reconstructions are laid out by what is seen, not by the mask, where the two are at odds."""
    given = {"gamma": 0.5, "attacks": ("patch-gradient",)}
    first, other = run(**given), run(**given, images=crops[50:260:110])
    again = run(**given, replay=other, kept=first.scored.reconstructions)
    (in_place,) = again.images["c", "patch-gradient", "in_place"]
    assert torch.equal(in_place, first.images["c", "patch-gradient", "in_place"][0])
    known = known_slots(other.observed[0])
    assert known is not None
    assert not torch.equal(known, ~first.trials[0][0].feed.moved)
    order = rearrange(Reconstruction(in_place), known, Borders(), (4, 4), 4)
    assert torch.equal(again.images["c", "patch-gradient", "reassembled"][0], permute(in_place, order, 4))
