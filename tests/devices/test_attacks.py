"""Every attack with tensors of a card: what a run does there is, bit for bit, what it does on the CPU."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from privlab.attacks import ATTACKS
from privlab.evaluation import (
    AttackGroup,
    Batch,
    Case,
    Evaluator,
    Record,
    applicable,
    check,
    default_attacks,
)
from privlab.grids import specify
from privlab.images import NamedImage, Others, Preprocessing
from privlab.inventory.explain import explain
from privlab.inventory.texts import arguments_of, docstrings
from privlab.threat import Reconstruction, attack_declarations
from privlab.victims import Victim, VictimModel, Weights

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

SIDE = 16
CUT = Preprocessing(size=(SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
METRICS = ("mse", "psnr", "ssim", "ssim_skimage", "fft2d", "fft2d_mjp", "psnr_affine", "correlation", "gms_affine")
SHARED: dict[str, dict[str, Any]] = {
    "mjp": {"gamma": 0.25},
    "two in one": {"gamma": 0.5, "gradient_batch": 2, "defense": "jigsaw"},
    "noise": {"defense": "mjp+gradient-noise", "gamma": 0.5, "attack": ("patch-gradient-adaptive",)},
    "update": {"client": "sgd", "setting": ("a",)},
    "adam": {"client": "adamw", "setting": ("a",)},
    "means": {"client": "sgd", "setting": ("a",), "options": ("client.clients=2", "client.steps=1")},
    "rows": {"defense": "row-permutation"},
    "columns": {"defense": "row-permutation+column-permutation"},
    "batch": {"defense": "batch-shuffle"},
    "noisy features": {"defense": "gaussian-noise"},
    "posterior": {"defense": "gaussian-noise+row-permutation", "attack": ("map-inversion", "map-unet")},
    "filter": {"defense": "blur", "release": "features"},
    "mixture": {"defense": "cutmix", "release": "features"},
    "values": {"defense": "block-scrambling"},
    "depth": {"cut_layer": 1},
}
"""Releases, with every attack that runs on them by default, or with those that are named."""

ASKED_FOR = [
    name
    for name, kind in ATTACKS.items()
    for declared in [attack_declarations(kind)]
    if not name.startswith("breaching:")
    and (declared.named_only or declared.effort == "full" or "Example" in docstrings(name)[0].sections)
]
"""The attacks that these releases may leave out: each of them has the case of its example."""


def of_example(name: str) -> dict[str, Any]:
    """Return the case that the example on the page of an attack describes."""
    example = arguments_of(explain(name).sections["Example"])
    given: dict[str, Any] = {key: example[key] for key in ("release", "defense", "client", "options") if key in example}
    if "client" in given:
        given["setting"] = ("a",)
    elif any(word in given.get("defense", "mjp") for word in ("mjp", "jigsaw")):
        given["gamma"] = 0.5
    return given | {"attack": (name,)}


CASES = SHARED | {name: of_example(name) for name in ASKED_FOR}


def short(names: Iterable[str]) -> tuple[str, ...]:
    """Return the options that cut searches short: where they compute is of interest here, and not how far they come."""
    return tuple(f"{name}.{key}={n}" for name in names for key, n in attack_declarations(ATTACKS[name]).short.items())


DOWNLOADS = {
    "attacks/tokens/bottleneck.py:_distinct",  # of which solutions are the same, once a round
    "attacks/features/cutmix_completion.py:fill",  # the equations are solved by SciPy
    "attacks/rows/placement.py:_assign",
    "attacks/rows/placement.py:least_cost",  # which SciPy finds
    "attacks/rows/reassembly.py:_links",
    "attacks/baselines/fedavg_matching.py:__call__",  # the numbers of the clients that a step evaluates
    "attacks/decoders/networks.py:reconstruct",
    "attacks/dishonest/shrunk_loss.py:__call__",  # the labels, all at once, by which Python takes a gradient each
    "attacks/dishonest/token_bins.py:joined",  # the gradients of the layers, which are read in float64
    "privlab/training/kept.py:<dictcomp>",  # the decoder that is kept on disk
    "attacks/tokens/equations.py:_distinct",
    "attacks/tokens/equations.py:separate",  # the ranks of the gradients, once
    "attacks/tokens/equations.py:_start",  # the ranks of what is left of them, for the draws of a round
    "attacks/tokens/refinement.py:refine",  # the numbers of starts that go on
    "attacks/tokens/spans.py:packed",  # the numbers of tokens that a round found
    "privlab/release/labels.py:_listed",  # the labels that a gradient shows, which Python tries one by one
    "attacks/updates/round_unrolling.py:labels_near",  # the likely labels of a step, which Python tries one by one
    "attacks/tokens/context.py:missing",  # the places of tokens, which Python sorts
    "attacks/tokens/grouping.py:_by_slot",
    "attacks/tokens/spans.py:factors",  # one matrix in float64, which LAPACK decomposes sooner; once a round
    "privlab/reassembly/solver.py:_four",  # the jigsaw is solved by NumPy
    "privlab/reassembly/solver.py:assemble",
    "privlab/training/loop.py:_mean_loss",  # the losses of a training, all at once
    "privlab/victims/weights.py:hash_of",
}
"""Where an attack may copy a tensor to the CPU."""

Scored = tuple[list[Record], dict[str, Counter[tuple[str, str]]]]


def specification(case: str) -> Case:
    given = CASES[case]
    options = (*short(given.get("attack") or default_attacks()), "border.rounds=0", *given.get("options", ()))
    return specify(**({"model": ("tiny",), "metrics": METRICS, "setting": ("c",)} | given | {"options": options}))


def groups_of(case: str, base: Victim) -> tuple[AttackGroup, ...]:
    return tuple(applicable(specification(case), base, stand_ins=True)[0])


@pytest.fixture(scope="module")
def base(tiny_model: Callable[..., VictimModel]) -> Victim:
    """Return a small victim, on the CPU: 16 patches of 4 × 4 pixels, width 64, with E_unk."""
    return Victim("tiny", "tiny", tiny_model(), CUT, Weights("given", "0" * 64, "random"))


def victim_of(case: str, base: Victim) -> Victim:
    """Return the victim of a case: the base, or one with the activation in its MLPs that an attack needs."""
    activation = attack_declarations(ATTACKS[case]).activation if case in ATTACKS else ""
    if not activation:
        return base
    model = copy.deepcopy(base.model)
    for i in range(len(model.vit.blocks)):
        model.vit.get_submodule(f"blocks.{i}.mlp").add_module("act", getattr(nn, activation)())
    return replace(base, model=model)


@pytest.fixture
def score(
    monkeypatch: pytest.MonkeyPatch, base: Victim, crops: Tensor, tmp_path: Path
) -> Iterator[Callable[..., Scored]]:
    """Run the pipeline on two crops of photographs; return its records, and for what each attack waits.

    Attention is computed by products, as PyTorch does where a device has nothing of its own.
    """

    def run(case: str, on: str = "cpu", card: Any = None) -> Scored:
        own, device = victim_of(case, base), torch.device(on)
        groups, victim = groups_of(case, own), own.to(device)
        groups = tuple(replace(group, victim=group.victim.to(device)) for group in groups)
        monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path / device.type))  # decoders are trained on each
        names = [f"{i:064x}" for i in range(100)]
        public = {name: image.to(device) for name, image in zip(names[50:], crops[7:380:29], strict=False)}
        images = crops[: 260 if case != "mjp" else 1 : 130]
        named = tuple(NamedImage(f"{i}.png", names[i], None, 2 * i, "file") for i in range(len(images)))
        spec, waits = specification(case), {}

        def attack_batch(attack: Any, seen: Any) -> Reconstruction:
            before = Counter() if card is None else card.waits.copy()
            made = brought(attack, seen)
            if card is not None:
                waits[attack.name] = waits.get(attack.name, Counter()) + (card.waits - before)
            assert made.images.device == device
            return made

        monkeypatch.setattr(check, "attack_batch", attack_batch)
        evaluator = Evaluator(spec, victim, groups, spec.metrics, {}, Others(public))
        return evaluator(Batch(named, images))[0], waits

    brought = check.attack_batch
    with sdpa_kernel(SDPBackend.MATH):
        yield run


def same(a: object, b: object, case: str) -> bool:
    """Return whether two values are equal, or nearly for `mjp-full`: a card searches several images together."""
    if case == "mjp-full" and isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-3) or str(a) == str(b)
    return str(a) == str(b)


def unlike(records: list[Record], others: list[Record], case: str) -> list[tuple[object, ...]]:
    """Return where the records of two devices differ, but for times and the name of the device."""
    return [
        (a["attack"], a["geometry"], name, a.get(name), b.get(name), b.get("reason"))
        for a, b in zip(records, others, strict=True)
        for name in a.keys() | b.keys()
        if name != "device" and not name.startswith("seconds") and not same(a.get(name), b.get(name), case)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_card_gives_the_same_records(score: Callable[..., Scored], card: Any, no_card: Any, case: str) -> None:
    with no_card():
        records, _ = score(case)
    assert [row["reason"] for row in records if row["status"] != "ok"] == []
    found, waits = score(case, "cuda:0", card)
    assert unlike(records, found, case)[:3] == []
    copies = {place for of_attack in waits.values() for kind, place in of_attack if kind == "download"}
    assert copies - DOWNLOADS == set()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_real_card_runs_every_attack(score: Callable[..., Scored], case: str) -> None:
    records, _ = score(case, "cuda:0")
    assert [(row["attack"], row["reason"]) for row in records if row["status"] != "ok"] == []


def test_every_attack_but_breachings_runs(base: Victim) -> None:
    ran = {attack.name for case in CASES for group in groups_of(case, base) for attack in group.attacks}
    assert ran == {name for name in ATTACKS if not name.startswith("breaching:")}
