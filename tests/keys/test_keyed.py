"""Keys: their spaces in bits, the shapes they fit, and what they refuse. The theorems are in tests/theory."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, VisionTransformer
from torch import Tensor

from privlab.base import PrivlabError
from privlab.keys import (
    ModelKey,
    ModelShape,
    apply_key,
    check_fits,
    key_bits,
    new_key,
    remove_key,
    residual_bits,
    residual_only,
)

SHAPE = ModelShape(width=8, depth=2, heads=2, head_dim=4, hidden=6)
VIT_B = ModelShape(width=768, depth=12, heads=12, head_dim=64, hidden=3072)


@pytest.fixture(scope="module")
def vit(tiny_vit: Callable[..., VisionTransformer]) -> VisionTransformer:
    return tiny_vit(embed_dim=16, depth=2, num_heads=4)


def test_the_papers_space_of_vit_b_has_325_bits() -> None:
    """SCIENCE: log₂(64! · 12!), not log₂ 768!."""
    assert key_bits(VIT_B, "paper") == residual_bits(VIT_B, "paper") == pytest.approx(324.83, abs=0.01)
    assert residual_bits(VIT_B, "full") == residual_bits(VIT_B, "residual") == pytest.approx(6259.38, abs=0.01)


def test_the_full_space_counts_every_order() -> None:
    layer = math.factorial(2) * math.factorial(4) ** (2 * 2) * math.factorial(6)
    assert key_bits(SHAPE, "full") == pytest.approx(math.log2(math.factorial(8) * layer**2))
    shared = math.factorial(2) * math.factorial(4) ** (1 + 2) * math.factorial(6)
    assert key_bits(replace(SHAPE, qk_norm=True), "full") == pytest.approx(math.log2(math.factorial(8) * shared**2))
    assert key_bits(SHAPE, "residual") == pytest.approx(math.log2(math.factorial(8)))


def test_keys_are_drawn_uniformly() -> None:
    """Every order of three features about as often: χ² with 5 degrees of freedom, p = 10⁻⁶."""
    shape = ModelShape(width=3, depth=1, heads=1, head_dim=1, hidden=1)
    counts = Counter(tuple(new_key(shape).residual.tolist()) for _ in range(1200))
    assert len(counts) == 6
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 36


def test_no_seed_of_torch_determines_a_key() -> None:
    torch.manual_seed(0)
    first = new_key(VIT_B, "residual").residual
    torch.manual_seed(0)
    assert not torch.equal(first, new_key(VIT_B, "residual").residual)


@pytest.mark.parametrize("space", ["full", "paper", "residual"])
def test_every_drawn_key_fits_its_shape(space: str) -> None:
    check_fits(new_key(SHAPE, space).orders(), SHAPE)


def test_full_keys_draw_every_order_for_itself() -> None:
    key = new_key(VIT_B)
    for order in (key.heads, key.qk.flatten(0, 1), key.value.flatten(0, 1), key.hidden):
        assert len(order.unique(dim=0)) == len(order)
    assert not torch.equal(key.qk, key.value)


def test_a_key_does_not_show_itself() -> None:
    assert repr(new_key(SHAPE)) == "ModelKey(space='full')"


def test_residual_only_moves_the_stream_and_nothing_else(vit: VisionTransformer) -> None:
    shape, columns = ModelShape.of(vit), torch.arange(16).flip(0)
    state = vit.state_dict()
    found = apply_key(state, residual_only(columns, shape), shape)
    assert torch.equal(found["blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"][:, columns])
    assert torch.equal(found["blocks.1.mlp.fc2.weight"], state["blocks.1.mlp.fc2.weight"][columns])
    assert torch.equal(found["blocks.1.mlp.fc1.bias"], state["blocks.1.mlp.fc1.bias"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_round_trip_is_exact_to_the_bit(vit: VisionTransformer, dtype: torch.dtype) -> None:
    shape = ModelShape.of(vit)
    key, state = new_key(shape), {name: t.clone().to(dtype) for name, t in vit.state_dict().items()}
    state["blocks.0.norm1.weight"][0] = -0.0
    state["blocks.0.norm1.weight"][1] = torch.nan
    found = remove_key(apply_key(state, key, shape), key, shape)
    assert list(found) == list(state)
    assert all(torch.equal(bits_of(found[name]), bits_of(state[name])) for name in state)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_owners_tensors_stay_as_they_are(vit: VisionTransformer) -> None:
    shape, state = ModelShape.of(vit), vit.state_dict()
    found = apply_key(state, new_key(shape), shape)
    owners = [name for name in state if not name.startswith("blocks.")]
    assert owners == [
        "cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias",
        "norm.weight", "norm.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    assert all(found[name] is state[name] for name in owners)


def test_leading_dimensions_are_kept(vit: VisionTransformer) -> None:
    """Per-image gradients go the same way as one."""
    shape = ModelShape.of(vit)
    key, state = new_key(shape), vit.state_dict()
    stacked = apply_key({name: torch.stack([t, 2 * t]) for name, t in state.items()}, key, shape)
    for name, tensor in apply_key(state, key, shape).items():
        assert torch.equal(stacked[name], torch.stack([tensor, 2 * tensor]))


def test_shapes_are_read_from_weights_as_from_models(tiny_vit: Callable[..., VisionTransformer]) -> None:
    for options in ({}, {"qk_norm": True}, {"mlp_ratio": 3.0}):
        vit = tiny_vit(embed_dim=16, depth=2, num_heads=4, **options)
        assert ModelShape.of(vit) == ModelShape.of_state(vit.state_dict(), 4)
    assert ModelShape.of(vit) == ModelShape(width=16, depth=2, heads=4, head_dim=4, hidden=48)


def test_fingerprints_differ_with_every_number() -> None:
    changed = [replace(SHAPE, **{name: 12}) for name in ("width", "depth", "heads", "head_dim", "hidden")]
    changed += [SHAPE, replace(SHAPE, qk_norm=True), replace(SHAPE, glu=True), replace(SHAPE, family="bert")]
    assert len({shape.fingerprint for shape in changed}) == len(changed)


def test_the_fingerprint_is_frozen() -> None:
    assert SHAPE.fingerprint == "b2f0b7460b410745e6371de1a04d6dddb14375736441de874ecb6e514abd1f71"


# ---- what is refused


@pytest.mark.parametrize("block", [ParallelScalingBlock, DiffParallelScalingBlock])
def test_unknown_blocks_are_refused_by_name(tiny_vit: Callable[..., VisionTransformer], block: type) -> None:
    vit = tiny_vit(embed_dim=16, depth=1, num_heads=2, block_fn=block)
    with pytest.raises(PrivlabError, match=rf"No key is known for the block {block.__name__}\. Known are: Block,"):
        ModelShape.of(vit)


def test_unknown_attention_is_refused_by_name(tiny_vit: Callable[..., VisionTransformer]) -> None:
    vit = tiny_vit(embed_dim=16, depth=1, num_heads=2, attn_layer="diff")
    with pytest.raises(PrivlabError, match="DiffAttention"):
        ModelShape.of(vit)


def test_unknown_tensors_are_refused_by_name(vit: VisionTransformer) -> None:
    shape = ModelShape.of(vit)
    for name in ("blocks.0.attn.lambda_q1", "blocks.2.norm1.weight", "decoder.weight"):
        with pytest.raises(PrivlabError, match=f"The key says nothing of the tensor '{name}'"):
            apply_key({name: torch.zeros(16)}, new_key(shape), shape)


def test_misshaped_tensors_are_refused_by_name(vit: VisionTransformer) -> None:
    shape = ModelShape.of(vit)
    with pytest.raises(PrivlabError, match=r"'blocks.0.norm1.bias'.*\(15,\).*\(16,\)"):
        apply_key({"blocks.0.norm1.bias": torch.zeros(15)}, new_key(shape), shape)


def test_missing_tensors_are_named(vit: VisionTransformer) -> None:
    state = dict(vit.state_dict())
    del state["blocks.1.norm2.bias"]
    with pytest.raises(PrivlabError, match=r"'blocks.1.norm2.bias'"):
        ModelShape.of_state(state, 4)


@pytest.mark.parametrize("state", [{}, {"a": torch.zeros(2)}, {"blocks.0.attn.proj.weight": torch.zeros(2)}])
def test_weights_that_are_no_vit_are_refused(state: dict[str, Tensor]) -> None:
    with pytest.raises(PrivlabError, match=r"have a matrix 'blocks.0.attn.proj.weight'. Found"):
        ModelShape.of_state(state, 4)


@pytest.mark.parametrize("heads", [0, 3, 32])
def test_heads_that_do_not_divide_are_refused(vit: VisionTransformer, heads: int) -> None:
    with pytest.raises(PrivlabError, match=f"A model of 16 attention features cannot have {heads} heads"):
        ModelShape.of_state(vit.state_dict(), heads)


def test_unknown_spaces_are_refused_with_the_nearest() -> None:
    for call in (new_key, key_bits, residual_bits):
        with pytest.raises(PrivlabError, match=r"'papers'.*paper\?"):
            call(SHAPE, "papers")


def test_the_papers_space_needs_heads_that_fill_the_width() -> None:
    with pytest.raises(PrivlabError, match=r"width.*9.*2.*4"):
        new_key(replace(SHAPE, width=9), "paper")


def test_a_key_of_another_shape_is_refused(vit: VisionTransformer) -> None:
    shape = ModelShape.of(vit)
    with pytest.raises(PrivlabError, match=r"'residual'.*\(8,\).*\(16,\)"):
        apply_key(vit.state_dict(), new_key(SHAPE), shape)


@pytest.mark.parametrize("name", ["residual", "heads", "qk", "value", "hidden"])
def test_orders_that_are_no_permutations_are_refused(name: str) -> None:
    orders = new_key(SHAPE).orders()
    orders[name] = orders[name].clone()
    orders[name][..., 0] = orders[name][..., 1]
    with pytest.raises(PrivlabError, match=f"order '{name}' is not a permutation"):
        check_fits(orders, SHAPE)


def test_heads_that_share_a_norm_need_one_order() -> None:
    shape = replace(SHAPE, qk_norm=True)
    key = new_key(shape)
    check_fits(key.orders(), shape)
    qk = key.qk.clone()
    qk[0, 0] = qk[0, 0].roll(1)
    with pytest.raises(PrivlabError, match="'qk' differs between heads"):
        apply_key({}, ModelKey(**(key.orders() | {"qk": qk})), shape)
