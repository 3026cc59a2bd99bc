"""Features after ℓ blocks: equal to a naive twin of hooks, and defended at any depth by the laws of the embedding."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.defenses import BatchShuffle, ColumnPermutation, GaussianNoise, Mjp, RowPermutation
from privlab.patches import permute_features
from privlab.release import observe_features, predictions, send
from privlab.threat import Draws, Feed, Sent, Stack
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]

DEPTH = 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before the blocks": {"pre_norm": True},
    "registers": {"reg_tokens": 2},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "no positions": {"pos_embed": "none"},
}
EXACT: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-10}


def draws(b: int, seed: int = 0) -> Draws:
    made = [Generator().manual_seed(seed + i) for i in range(b + 2)]
    return Draws(images=made[2:], batch=made[0], model=made[1])


def pictures(b: int = 2) -> Tensor:
    return torch.rand(b, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(7))


def sent_at(model: VictimModel, images: Tensor, cut_layer: int, *parts: Any) -> Sent:
    stack, made = Stack(parts), draws(len(images))
    return send(model, stack.feed(images, model.patch, made.images, len(images)), stack, made, cut_layer)


def hooked(model: VictimModel, images: Tensor) -> list[Tensor]:
    """Return the input of the blocks and the output of each, as forward hooks of the user's own model see them."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        seen.append(made)

    handles = [module.register_forward_hook(keep) for module in (model.vit.norm_pre, *model.vit.blocks)]
    model.vit(model.normalise(images))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_that_hooks_see(tiny_model: Make, kind: str) -> None:
    model, images = tiny_model(depth=DEPTH, **KINDS[kind]), pictures()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = hooked(model, images)
    for cut_layer in range(1, DEPTH + 1):
        assert_close(sent_at(model, images, cut_layer).features, twin[cut_layer], **EXACT)
    assert torch.equal(sent_at(model, images, 0).features, model.embed(images))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert len(model.vit.blocks) == DEPTH
    assert not (twin[1] - twin[2]).abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_client_and_server_together_are_the_model(tiny_model: Make, kind: str) -> None:
    model, images = tiny_model(depth=DEPTH, **KINDS[kind]), pictures()
    for cut_layer in range(DEPTH + 1):
        assert_close(predictions(model, sent_at(model, images, cut_layer), cut_layer), model(images), **EXACT)
    with pytest.raises(AssertionError):
        assert_close(predictions(model, sent_at(model, images, 1), 2), model(images), **EXACT)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), cut_layer=st.integers(0, DEPTH), per=st.sampled_from(["batch", "image"]))
def test_a_permutation_of_rows_commutes_with_the_blocks(tiny_model: Make, seed: int, cut_layer: int, per: str) -> None:
    """Theorem 4.1: rows permuted behind ℓ blocks are what ℓ blocks make of the same rows permuted before them."""
    model, images = tiny_model(depth=DEPTH), pictures()
    stack, feed = Stack((RowPermutation(per),)), Feed.undefended(images, model.patch)
    behind = send(model, feed, stack, draws(2, seed), cut_layer)
    before = send(model, feed, stack, draws(2, seed))
    assert torch.equal(behind.source, before.source)
    assert_close(behind.features, model.client_blocks(before.features, cut_layer), **EXACT)
    assert_close(predictions(model, behind, cut_layer), model(images), **EXACT)


@pytest.mark.parametrize("cut_layer", [0, 1, DEPTH])
def test_defenses_act_on_what_is_sent(tiny_model: Make, cut_layer: int) -> None:
    model, images = tiny_model(depth=DEPTH), pictures()
    plain = sent_at(model, images, cut_layer).features
    columns = sent_at(model, images, cut_layer, ColumnPermutation())
    assert_close(columns.features, permute_features(plain, columns=columns.columns), **EXACT)
    assert_close(predictions(model, columns, cut_layer), model(images), **EXACT)
    noise = sent_at(model, images, cut_layer, GaussianNoise(0.5)).features - plain
    assert_close(noise, sent_at(model, images, 0, GaussianNoise(0.5)).features - model.embed(images), **EXACT)
    mixed = sent_at(model, images, cut_layer, BatchShuffle())
    assert_close(mixed.features.flatten(0, 1), plain.flatten(0, 1)[mixed.source.flatten()], **EXACT)


def test_defenses_on_images_act_before_the_blocks(tiny_model: Make) -> None:
    vit = tiny_model(depth=DEPTH).vit
    model = VictimModel(vit, (0.5,) * 3, (0.5,) * 3, torch.randn(1, 1, 64)).double().requires_grad_(False)
    sent = [sent_at(model, pictures(), cut_layer, Mjp(0.5)).features for cut_layer in range(DEPTH + 1)]
    for block, (before, after) in zip(model.vit.blocks, pairwise(sent), strict=True):
        assert_close(block(before), after, **EXACT)


@pytest.mark.parametrize("cut_layer", [-1, DEPTH + 1])
def test_a_cut_that_the_model_does_not_have_is_refused(tiny_model: Make, cut_layer: int) -> None:
    message = rf"The cut layer must be in 0 … {DEPTH}, the number of blocks\. Found {cut_layer}\."
    with pytest.raises(PrivlabError, match=message):
        tiny_model(depth=DEPTH).check_cut_layer(cut_layer)


def test_an_observation_states_the_cut(tiny_model: Make) -> None:
    model, images = tiny_model(depth=DEPTH), pictures()
    seen = observe_features(model, sent_at(model, images, 2), Stack(()), images, 2)
    assert seen.cut_layer == 2
