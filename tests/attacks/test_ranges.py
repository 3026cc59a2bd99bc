"""The range in which each attack is said to be exact, by its own formula, on both sides of each bound."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from privlab.attacks import (
    ATTACKS,
    April,
    GradientMatching,
    MjpFull,
    MjpSubspace,
    PatchGradient,
    PatchGradientAdaptive,
    PatchGradientPrior,
    TokenSeparation,
)
from privlab.evaluation import beyond_range
from privlab.release import gradient_capabilities
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel, april_twin

PATCH = "patch_embed.proj.weight"
Make = Callable[..., Observation]


@pytest.fixture(scope="module")
def make(tiny_vit: Callable[..., VisionTransformer]) -> Make:
    """Return a maker of observations of N = 16 patches of K = 48 values, of nothing but their shapes and zeros."""

    def made(
        width: int = 64, *, masked: int = 0, images: int = 1, frozen: bool = False, april: bool = False, **options: Any
    ) -> Observation:
        vit = tiny_vit(embed_dim=width, num_heads=1, depth=1, **options)
        model = VictimModel(vit, (0.5,) * 3, (0.5,) * 3)
        model = april_twin(model) if april else model
        gradients = {} if frozen else {PATCH: torch.ones(1, width, 3, 4, 4)}
        if vit.pos_embed is not None:
            gradients["pos_embed"] = torch.ones(1, *vit.pos_embed.shape)
            gradients["pos_embed"][0, 0, 1 : 1 + masked] = 0
        return Observation(model, gradients, gradient_capabilities(model, (), images), (), images)

    return made


@pytest.mark.parametrize("attack", [PatchGradient(), PatchGradientAdaptive(), MjpSubspace(), MjpFull()])
def test_closed_forms_take_fewer_patches_than_width(make: Make, attack: PatchGradient) -> None:
    assert attack.beyond(make(17)) is None
    assert attack.beyond(make(16)) == "N = 16 ≥ D = 16"


def test_a_mask_takes_equations_from_mjp_full(make: Make) -> None:
    """N + |masked| + 1 < D: 16 + 4 + 1 < 22."""
    assert MjpFull().beyond(make(22, masked=4)) is None
    assert MjpFull().beyond(make(21, masked=4)) == "N + |masked| + 1 = 21 ≥ D = 21"
    assert MjpSubspace().beyond(make(21, masked=4)) is None


def test_april_takes_tokens_and_patches_up_to_the_width(make: Make) -> None:
    assert April().beyond(make(48, april=True)) is None
    assert April().beyond(make(47, april=True)) == "K = 48 > D = 47"
    assert April().beyond(make(16, april=True)) == "N + 1 = 17 > D = 16 and K = 48 > D = 16"
    assert ATTACKS["breaching:april_analytic"]().beyond(make(47, april=True)) == "K = 48 > D = 47"  # pyright: ignore
    assert not hasattr(ATTACKS["breaching:modern"], "beyond")


def test_the_prior_takes_a_few_patches_more(make: Make) -> None:
    assert PatchGradientPrior().beyond(make(12)) is None
    assert PatchGradientPrior().beyond(make(11)) == "N = 16 > D + 4 = 15"


@pytest.mark.parametrize(
    ("least", "said", "options"),
    [
        (28, "B·N + 2·B·(N + 1) + 4 = 54 ≥ 2·D = 54", {}),  # 3 N + 6 < 2 D
        (53, "B·N + 2·B·(N + 1) + 4 = 104 ≥ 2·D = 104", {"images": 2}),  # 3 B N + 2 B + 4 < 2 D
        (34, "B·N + B·(N + 1) = 33 ≥ D = 33", {"pos_embed": "none"}),  # 2 N + 1 < D
        (44, "2·B·(N + 1) + 3 = 37 ≥ D = 37", {"frozen": True}),  # for D ≤ K = 48; see below
        (49, "2·B·(N + 1) + 3 = 37 ≥ D = 37", {"frozen": True}),  # K + 2 N + 6 < 2 D for D > K: 86 < 98
    ],
)
def test_token_separation_takes_as_many_equations_as_unknowns(
    make: Make, least: int, said: str, options: dict[str, Any]
) -> None:
    attack = TokenSeparation()
    assert attack.beyond(make(least, **options)) is None
    bound = 37 if options.get("frozen") else least - 1
    assert attack.beyond(make(bound, **options)) == said


def test_token_separation_with_a_frozen_patch_embedding_of_more_width_than_values(make: Make) -> None:
    """K + 2 N + 6 < 2 D, which D > K alone does not say where N is large: here K = 12."""
    small = {"frozen": True, "patch_size": 2}  # N = 64
    assert TokenSeparation().beyond(make(74, **small)) is None
    assert TokenSeparation().beyond(make(73, **small)) == "K + 2·B·(N + 1) + 4 = 146 ≥ 2·D = 146"


def test_tokens_must_be_fewer_than_the_width(make: Make) -> None:
    said = TokenSeparation().beyond(make(16))
    assert said == "B·N + 2·B·(N + 1) + 4 = 54 ≥ 2·D = 32 and B·(N + 1) = 17 ≥ D = 16"


def test_what_states_no_range_is_never_beyond_it(make: Make) -> None:
    assert beyond_range(GradientMatching(), make(8)) is None
    assert beyond_range(PatchGradient(), make(16)) == "N = 16 ≥ D = 16"
    assert beyond_range(PatchGradient(), make(17)) is None


def test_what_was_forced_is_beyond_any_range(make: Make) -> None:
    assert beyond_range(PatchGradient(), make(64, images=2)) == "forced without batch_size_one"
    assert beyond_range(April(), make(64)) == "forced without april_block"
    seen = make(64)
    both = replace(seen, grants=seen.grants - {Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE})
    assert beyond_range(PatchGradient(), both) == "forced without batch_size_one, learnable_pe_gradient"
