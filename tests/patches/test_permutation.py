"""The theorems of Permutation Equivariance (CVPR 2024), on timm's ViTs in float64.

In the paper's words: F₁ embeds, T is the backbone, F₂ the head, Z_(P) = P_R F₁(X) P_C and
Ŷ = F₂(P_R⁻¹ T_(P)(Z_(P)) P_C⁻¹), Equation 8.
"""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, RmsNorm, SwiGLU
from timm.models.vision_transformer import Attention, ResPostBlock
from torch import Tensor
from torch.testing import assert_close

from privlab.keys import ModelKey, ModelShape, apply_key, new_key, remove_key, residual_only
from privlab.patches import bits, draw_orders, inverse, permute_features, restore_features
from privlab.victims import VictimModel


class GatedAttention(Attention):
    """timm's attention with its gate, under the type that keys know."""

    def __new__(cls, *args: object, **options: object) -> Attention:
        """Make timm's own class, gated."""
        return Attention(*args, **options, gated=True)


MODELS = {
    "plain": {},
    "layer scale": {"init_values": 0.5},
    "norm of q and k": {"qk_norm": True},
    "norms inside": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "gated attention": {"attn_layer": GatedAttention},
    "gated MLP": {"mlp_layer": GluMlp},
    "gated MLP in two": {"mlp_layer": SwiGLU},
    "norm after": {"block_fn": ResPostBlock, "init_values": 0.5},
    "norm before": {"pre_norm": True},
    "RMS norms": {"norm_layer": RmsNorm},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "registers": {"reg_tokens": 2},
    "no position embeddings": {"pos_embed": "none"},
    "mean of tokens": {"global_pool": "avg"},
    "no class token": {"global_pool": "avg", "class_token": False},
}
OPTIMISERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05),
}
exact = {"rtol": 1e-9, "atol": 1e-9}
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=4)
Make = Callable[..., VictimModel]


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, tiny_model: Make) -> VictimModel:
    """Return a ViT of width 16 with two blocks of four heads, on 8 × 8 pixels: four patches and a class token."""
    options = {"img_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4} | MODELS[request.param]
    return tiny_model(**options).requires_grad_(True)


@pytest.fixture(scope="session")
def plain(tiny_model: Make) -> VictimModel:
    return tiny_model(img_size=8, embed_dim=16, depth=2, num_heads=4).requires_grad_(True)


def batch(seed: int, b: int = 3) -> tuple[Tensor, Tensor]:
    """Return b images of 8 × 8 pixels with labels."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(b, 3, 8, 8, generator=draw, dtype=torch.float64), torch.randint(7, (b,), generator=draw)


def orders(model: VictimModel, seed: int, kind: str) -> Tensor:
    """Draw orders of the tokens: one for the batch, one for each image, or one that leaves the first tokens alone."""
    prefix = model.vit.num_prefix_tokens
    n, draw = prefix + 4, torch.Generator().manual_seed(seed)
    if kind == "per image":
        return draw_orders(n, [draw] * 3)
    return draw_orders(n, [draw], fixed=prefix if kind == "prefix stays" else 0)[0]


rows_kinds = st.sampled_from(["per batch", "per image", "prefix stays"])


def loss_of(
    model: VictimModel, images: Tensor, labels: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Return the loss of Equation 8; Equation 1 where nothing is permuted."""
    Z = permute_features(model.embed(images), rows, columns)
    return F.cross_entropy(model.head(restore_features(model.backbone(Z), rows, columns)), labels)


def gradients(model: VictimModel, *batch: Tensor | None) -> dict[str, Tensor]:
    names, parameters = zip(*model.vit.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(model, *batch), parameters, allow_unused=True), strict=True))


def trained(model: VictimModel, optimiser: str, *batch: Tensor | None, steps: int = 4) -> dict[str, Tensor]:
    """Return the weights after some steps on one batch; the model itself is left alone."""
    model = copy.deepcopy(model)
    steps_of = OPTIMISERS[optimiser](model.vit.parameters())
    for _ in range(steps):
        steps_of.zero_grad()
        loss_of(model, *batch).backward()
        steps_of.step()
    return {name: tensor.detach() for name, tensor in model.vit.state_dict().items()}


def keyed(model: VictimModel, key: ModelKey) -> VictimModel:
    """Return T_(C) between the owner's F₁ and F₂."""
    twin = copy.deepcopy(model)
    twin.vit.load_state_dict(apply_key(model.vit.state_dict(), key, ModelShape.of(model.vit)), strict=True)
    return twin


def key_for(model: VictimModel, space: str) -> ModelKey:
    return new_key(ModelShape.of(model.vit), space)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(found[name], tensor, **exact, msg=lambda m, name=name: f"{name}: {m}")


# ---- the permutations themselves


@given(n=st.integers(1, 6), d=st.integers(1, 6), seed=seeds)
@few
def test_permuting_is_the_product_with_permutation_matrices(n: int, d: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    Z = torch.randn(2, n, d, generator=draw, dtype=torch.float64)
    rows, columns = draw_orders(n, [draw] * 2), draw_orders(d, [draw])[0]
    P_R, P_C = torch.eye(n, dtype=torch.float64)[rows], torch.eye(d, dtype=torch.float64)[:, columns]
    assert torch.equal(permute_features(Z, rows, columns), P_R @ Z @ P_C)
    assert torch.equal(permute_features(Z, rows[0], columns), P_R[0] @ Z @ P_C)
    assert torch.equal(restore_features(permute_features(Z, rows, columns), rows, columns), Z)
    assert torch.equal(rows.gather(-1, inverse(rows)), torch.arange(n).expand(2, n))


def test_bits_are_the_logarithm_of_the_factorials() -> None:
    assert bits(5, 3) == pytest.approx(math.log2(120 * 6))
    assert bits(1) == 0


# ---- rows


@given(seed=seeds, kind=rows_kinds)
@few
def test_4_1_rows_go_through_the_encoder(model: VictimModel, seed: int, kind: str) -> None:
    """Theorem 4.1: Enc(P_R Z) = P_R Enc(Z)."""
    Z, rows = model.embed(batch(seed)[0]), orders(model, seed, kind)
    assert_close(model.backbone(permute_features(Z, rows)), permute_features(model.backbone(Z), rows), **exact)


@given(seed=seeds, kind=rows_kinds)
@few
def test_4_2_rows_do_not_change_gradients(model: VictimModel, seed: int, kind: str) -> None:
    """Theorem 4.2: ∂l/∂W = ∂l/∂W_(R), of the embedding and the head too (appendix 10.3)."""
    images, labels = batch(seed)
    assert_same(gradients(model, images, labels, orders(model, seed, kind)), gradients(model, images, labels))


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("kind", ["per batch", "per image", "prefix stays"])
def test_4_3_rows_do_not_change_what_is_learnt(model: VictimModel, optimiser: str, kind: str) -> None:
    """Corollary 4.3: W = W_(R)."""
    images, labels = batch(1)
    learnt = trained(model, optimiser, images, labels, orders(model, 1, kind))
    assert_same(learnt, trained(model, optimiser, images, labels))


def test_rows_that_are_not_put_back_change_what_the_head_sees(plain: VictimModel) -> None:
    Z = plain.embed(batch(2)[0])
    moved = plain.head(plain.backbone(Z.flip(1)))
    assert (moved - plain.head(plain.backbone(Z))).abs().max() > 1e-3


# ---- columns, and both


@given(seed=seeds, space=st.sampled_from(["full", "residual"]))
@few
def test_4_4_columns_go_through_the_keyed_backbone(model: VictimModel, seed: int, space: str) -> None:
    """Theorem 4.4: T_(C)(Z P_C) = T(Z) P_C, for any P_C, whatever the orders of heads and units."""
    Z, key = model.embed(batch(seed)[0]), key_for(model, space)
    through = keyed(model, key).backbone(permute_features(Z, columns=key.residual))
    assert_close(through, permute_features(model.backbone(Z), columns=key.residual), **exact)


def test_4_4_the_papers_key_is_one_matrix_on_both_sides(plain: VictimModel) -> None:
    """Equations 6, 12 and 13 with matrices: W_(C) = P_C⁻¹ W P_C, γ_(C) = γ P_C, W₁_(C) = W₁ P_C, W₂_(C) = P_C⁻¹ W₂."""
    key, state = key_for(plain, "paper"), plain.vit.state_dict()
    found = apply_key(state, key, ModelShape.of(plain.vit))
    P = torch.eye(16, dtype=torch.float64)[:, key.residual]
    for before, after in zip(*(s["blocks.1.attn.qkv.weight"].chunk(3) for s in (state, found)), strict=True):
        assert torch.equal(after, P.T @ before @ P)
    for name in ("norm1.weight", "norm2.bias", "attn.proj.bias", "mlp.fc2.bias"):
        assert torch.equal(found[f"blocks.1.{name}"], state[f"blocks.1.{name}"] @ P)
    assert torch.equal(found["blocks.1.attn.proj.weight"], P.T @ state["blocks.1.attn.proj.weight"] @ P)
    assert torch.equal(found["blocks.1.mlp.fc1.weight"], state["blocks.1.mlp.fc1.weight"] @ P)
    assert torch.equal(found["blocks.1.mlp.fc1.bias"], state["blocks.1.mlp.fc1.bias"])
    assert torch.equal(found["blocks.1.mlp.fc2.weight"], P.T @ state["blocks.1.mlp.fc2.weight"])
    Z = plain.embed(batch(3)[0])
    assert_close(keyed(plain, key).backbone(Z @ P), plain.backbone(Z) @ P, **exact)


@given(seed=seeds)
@few
def test_4_5_gradients_are_permuted_as_the_weights_are(model: VictimModel, seed: int) -> None:
    """Theorem 4.5: ∂l/∂W_(C) = P_C⁻¹ ∂l/∂W P_C."""
    (images, labels), key, shape = batch(seed), key_for(model, "full"), ModelShape.of(model.vit)
    found = gradients(keyed(model, key), images, labels, None, key.residual)
    assert_same(found, apply_key(gradients(model, images, labels), key, shape))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_4_6_what_is_learnt_is_permuted_as_the_weights_are(model: VictimModel, optimiser: str) -> None:
    """Corollary 4.6: W_(C) = P_C⁻¹ W P_C after training; the key takes it back."""
    (images, labels), key, shape = batch(4), key_for(model, "full"), ModelShape.of(model.vit)
    found = trained(keyed(model, key), optimiser, images, labels, None, key.residual)
    assert_same(remove_key(found, key, shape), trained(model, optimiser, images, labels))


@given(seed=seeds, kind=rows_kinds)
@few
def test_4_7_rows_and_columns_together(model: VictimModel, seed: int, kind: str) -> None:
    """Theorem 4.7 and Lemma 4.8: forward, ∂l/∂Z_(P) = P_R ∂l/∂Z P_C, and the gradients of the weights."""
    (images, labels), key, rows = batch(seed), key_for(model, "full"), orders(model, seed, kind)
    twin, Z = keyed(model, key), model.embed(images).detach().requires_grad_()
    Z_P = permute_features(Z.detach(), rows, key.residual).requires_grad_()
    natural = F.cross_entropy(model.head(model.backbone(Z)), labels)
    permuted = F.cross_entropy(model.head(restore_features(twin.backbone(Z_P), rows, key.residual)), labels)
    assert_close(permuted, natural, **exact)
    dZ, dZ_P = torch.autograd.grad(natural, Z)[0], torch.autograd.grad(permuted, Z_P)[0]
    assert_close(dZ_P, permute_features(dZ, rows, key.residual), **exact)
    found = gradients(twin, images, labels, rows, key.residual)
    assert_same(found, apply_key(gradients(model, images, labels), key, ModelShape.of(model.vit)))


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_4_7_training_with_rows_and_columns_together(model: VictimModel, optimiser: str) -> None:
    """Theorem 4.7 for training: a fresh order of rows for each image, a key for all steps."""
    (images, labels), key, shape = batch(5), key_for(model, "full"), ModelShape.of(model.vit)
    found = trained(keyed(model, key), optimiser, images, labels, orders(model, 5, "per image"), key.residual)
    assert_same(remove_key(found, key, shape), trained(model, optimiser, images, labels))


# ---- what does not hold, and so what a key must be


def test_a_keyed_model_is_useless_without_the_key(plain: VictimModel) -> None:
    key, (images, _) = key_for(plain, "full"), batch(6)
    Z, twin = plain.embed(images), keyed(plain, key)
    assert (
        twin.head(twin.backbone(Z)) - plain.head(plain.backbone(Z))
    ).abs().max() > 0.01  # each run draws its own key


def test_columns_do_not_go_through_a_backbone_without_a_key(plain: VictimModel) -> None:
    Z, columns = plain.embed(batch(7)[0]), torch.arange(16).roll(1)
    through = plain.backbone(permute_features(Z, columns=columns))
    assert (through - permute_features(plain.backbone(Z), columns=columns)).abs().max() > 0.1


def test_an_order_that_mixes_heads_does_not_hold_on_q_k_and_v(plain: VictimModel) -> None:
    """Equation 6 as printed, for any P_C: the dot products of the heads change. `residual` takes the same P_C."""
    columns = torch.arange(16).view(4, 4).T.flatten()
    shape, Z = ModelShape.of(plain.vit), plain.embed(batch(8)[0])
    state = apply_key(plain.vit.state_dict(), residual_only(columns, shape), shape)
    broken = copy.deepcopy(plain)
    for layer in range(shape.depth):
        name = f"blocks.{layer}.attn."
        for kind in ("qkv.weight", "qkv.bias"):
            state[name + kind] = torch.cat([part[columns] for part in state[name + kind].chunk(3)])
        state[name + "proj.weight"] = state[name + "proj.weight"][:, columns]
    broken.vit.load_state_dict(state)
    moved, expected = Z[..., columns], plain.backbone(Z)[..., columns]
    assert (broken.backbone(moved) - expected).abs().max() > 1e-3
    assert_close(keyed(plain, residual_only(columns, shape)).backbone(moved), expected, **exact)


@pytest.mark.parametrize("name", ["heads", "qk", "value", "hidden"])
def test_every_other_order_of_a_key_cancels_inside_the_backbone(model: VictimModel, name: str) -> None:
    """An unauthorised user needs the order of the residual stream alone."""
    full, shape = key_for(model, "full"), ModelShape.of(model.vit)
    key = residual_only(torch.arange(16), shape)
    if getattr(full, name).equal(getattr(key, name)):
        return  # a draw of the identity
    key = ModelKey(**(key.orders() | {name: getattr(full, name)}))
    Z = model.embed(batch(9)[0])
    twin = keyed(model, key)
    assert not all(map(torch.equal, twin.vit.state_dict().values(), model.vit.state_dict().values()))
    assert_close(twin.backbone(Z), model.backbone(Z), **exact)
