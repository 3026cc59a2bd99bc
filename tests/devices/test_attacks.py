"""Every attack with tensors of a card: what a run does there is, bit for bit, what it does on the CPU."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
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
    Evaluator,
    Record,
    Specification,
    applicable,
    default_attacks,
    pipeline,
)
from privlab.images import Chunk, NamedImage, Preprocessing
from privlab.threat import Reconstruction
from privlab.victims import Victim, VictimModel, Weights

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

SIDE = 16
CUT = Preprocessing(size=(SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
METRICS = ("mse", "psnr", "ssim", "ssim_skimage", "fft2d", "fft2d_mjp", "psnr_affine", "correlation", "gms_affine")
SEARCH = {"starts": 2, "rounds": 1, "steps": 2}
SHORT: dict[str, dict[str, Any]] = {
    "patch-gradient-prior": {"rounds": 1, "steps": 1, "passes": 1},
    "mjp-subspace": {"rounds": 1, "steps": 1},
    "mjp-full": {**SEARCH, "sharpen": 1, "inner": 1},
    "token-separation": SEARCH,
    "gradient-matching": {"steps": 1, "start": "patch-gradient"},
    "gradient-likelihood": {"steps": 1, "start": "patch-gradient"},
    **{name: {"steps": 1} for name in ("head-inversion", "cocktail-party", "fedleak", "fedavg-matching")},
    "spear": {"starts": 64, "rounds": 2},
    "adapter-separation": {"starts": 8, "rounds": 1, "steps": 3, "tolerance": 0.5},
    "qkv-span": {"steps": 1},
    "orthogonal-matching": {"steps": 1},
    "learning-to-invert": {"steps": 1, "releases": 8, "batch_size": 8},
    "staged-likelihood": {"rounds": 1, "last_rounds": 1, "steps": 2},
    "map-unet": {"steps": 1, "releases": 8, "batch_size": 8, "width": 4},
    "feature-optimisation": {"steps": 1},
    "depth-optimisation": {"steps": 1},
    "patch-update": {"rounds": 1},
    "adam-update": {"steps": 1, "stage_steps": 1},
    **{f"inversion-{kind}": {"steps": 1} for kind in ("conv", "mae", "set", "token")},
}
"""Searches cut short: where they compute is of interest here, and not how far they come."""

CASES: dict[str, dict[str, Any]] = {
    "mjp": {"gamma": 0.25},
    "two in one": {"gamma": 0.5, "gradient_batch": 2, "defense": "jigsaw"},
    "noise": {"defense": "mjp+gradient-noise", "gamma": 0.5, "attacks": ("patch-gradient-adaptive",)},
    "matching": {"gamma": 0.5, "attacks": ("gradient-matching",)},
    "likelihood": {"defense": "mjp+gradient-noise", "gamma": 0.5, "attacks": ("gradient-likelihood",)},
    "stages": {"defense": "gradient-pruning", "attacks": ("staged-likelihood",)},
    "orthogonal": {"defense": "censor", "attacks": ("orthogonal-matching", "learning-to-invert")},
    "update": {"client": "sgd", "settings": ("a",)},
    "adam": {"client": "adamw", "settings": ("a",)},
    "head": {"client": "sgd", "settings": ("a",), "attacks": ("head-inversion", "cocktail-party")},
    "baselines": {"client": "sgd", "settings": ("a",), "attacks": ("fedleak", "fedavg-matching")},
    "adapters": {
        "client": "sgd",
        "settings": ("a",),
        "attacks": ("adapter-separation",),
        "options": ("client.trains=adapters", "client.rank=40"),
    },
    "rank": {
        "client": "sgd",
        "settings": ("a",),
        "attacks": ("qkv-span",),
        "options": ("client.trains=lora", "client.rank=40"),
    },
    "means": {
        "client": "sgd",
        "settings": ("a",),
        "attacks": ("client-unrolling",),
        "options": ("client.clients=2", "client.steps=1"),
    },
    "cut": {"defense": "percentile-privacy", "attacks": ("qkv-completion",)},
    "relu": {"client": "sgd", "settings": ("a",), "attacks": ("spear",)},
    "rows": {"defense": "row-permutation"},
    "columns": {"defense": "row-permutation+column-permutation"},
    "batch": {"defense": "batch-shuffle"},
    "noisy features": {"defense": "gaussian-noise"},
    "posterior": {"defense": "gaussian-noise+row-permutation", "attacks": ("map-inversion", "map-unet")},
    "filter": {"defense": "blur", "release": "features", "attacks": ("deconvolution",)},
    "mixture": {"defense": "cutmix", "release": "features", "attacks": ("cutmix-completion",)},
    "values": {"defense": "block-scrambling", "attacks": ("block-key",)},
    "depth": {"cut_layer": 1, "attacks": ("depth-optimisation",)},
    "inversion": {"release": "features", "attacks": tuple(name for name in ATTACKS if name.startswith("inversion-"))},
}
DOWNLOADS = {
    "attacks/tokens/bottleneck.py:_distinct",  # of which solutions are the same, once a round
    "attacks/tokens/embedding_fit.py:_assign",  # of SciPy's assignment, once a round
    "attacks/features/cutmix_completion.py:fill",  # the equations are solved by SciPy
    "attacks/features/column_statistics.py:_assign",  # of SciPy's assignment, once for each that is sought
    "attacks/rows/placement.py:_assign",
    "attacks/rows/reassembly.py:_groups",
    "attacks/rows/reassembly.py:_links",
    "attacks/baselines/fedavg_matching.py:__call__",  # the numbers of the clients that a step evaluates
    "attacks/decoders/networks.py:reconstruct",
    "attacks/decoders/store.py:<dictcomp>",  # the decoder that is kept on disk
    "attacks/tokens/equations.py:distinct",
    "attacks/updates/round_unrolling.py:labels_near",  # the likely labels of a step, which Python tries one by one
    "attacks/tokens/context.py:missing",  # the places of tokens, which Python sorts
    "attacks/tokens/grouping.py:_by_slot",
    "attacks/tokens/grouping.py:assign_groups",
    "attacks/solvers/value_order.py:_assign",
    "attacks/tokens/slots.py:_assign",
    "privlab/reassembly/solver.py:_four",  # the jigsaw is solved by NumPy
    "privlab/reassembly/solver.py:assemble",
    "privlab/training/loop.py:_report",  # the losses of a training, all at once
    "privlab/victims/weights.py:hash_of",
}
"""Where an attack may copy a tensor to the CPU."""

Scored = tuple[list[Record], dict[str, Counter[tuple[str, str]]]]


def specification(case: str) -> Specification:
    given = CASES[case]
    named = given.get("attacks") or default_attacks()
    options = tuple(sorted(f"{name}.{key}={n}" for name in {*named} & SHORT.keys() for key, n in SHORT[name].items()))
    options += ("border.rounds=0", *given.get("options", ()))
    return Specification(
        **({"models": ("tiny",), "metrics": METRICS, "settings": ("c",)} | given | {"options": options})
    )


def groups_of(case: str, base: Victim) -> tuple[AttackGroup, ...]:
    return tuple(applicable(specification(case), base, stand_ins=True)[0])


@pytest.fixture(scope="module")
def base(tiny_model: Callable[..., VictimModel]) -> Victim:
    """Return a small victim, on the CPU: 16 patches of 4 × 4 pixels, width 64, with E_unk."""
    return Victim("tiny", "tiny", tiny_model(), CUT, Weights("given", "0" * 64, "random"))


def victim_of(case: str, base: Victim) -> Victim:
    """Return the victim of a case: that with ReLU in its MLPs, whose zeros an attack reads, or the one with GELU."""
    if case != "relu":
        return base
    model = copy.deepcopy(base.model)
    for i in range(len(model.vit.blocks)):
        model.vit.get_submodule(f"blocks.{i}.mlp").add_module("act", nn.ReLU())
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

        monkeypatch.setattr(pipeline, "attack_batch", attack_batch)
        evaluator = Evaluator(spec, victim, groups, spec.metrics, {}, public)
        return evaluator(Chunk(named, images, ())).records, waits

    brought = pipeline.attack_batch
    with sdpa_kernel(SDPBackend.MATH):
        yield run


def unlike(records: list[Record], others: list[Record]) -> list[tuple[object, ...]]:
    """Return where the records of two devices differ, but for times and the name of the device."""
    return [
        (a["attack"], a["geometry"], name, a.get(name), b.get(name), b.get("reason"))
        for a, b in zip(records, others, strict=True)
        for name in a.keys() | b.keys()
        if name != "device" and not name.startswith("seconds") and str(a.get(name)) != str(b.get(name))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_card_gives_the_same_records(score: Callable[..., Scored], card: Any, no_card: Any, case: str) -> None:
    with no_card():
        records, _ = score(case)
    assert [row["reason"] for row in records if row["status"] != "ok"] == []
    found, waits = score(case, "cuda:0", card)
    assert unlike(records, found)[:3] == []
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
