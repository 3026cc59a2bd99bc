"""The gradients of a ViT's first blocks as functions of the patches and of one gradient behind them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from privlab.attacks.solvers import (
    FirstBlocks,
    photograph_gradients,
    row_disagreement,
    search_by_signs,
    twice_derivable,
)
from privlab.patches import patchify
from privlab.release import observe
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
def test_the_true_gradient_behind_the_blocks_gives_the_gradients_of_all_their_matrices(
    tiny_model: Model, crops: Tensor, blocks: int
) -> None:
    """Against the gradients of the whole model, as they are released."""
    model, image, label = tiny_model(), crops[:1].double(), torch.tensor([3])
    seen = observe(model, image, label, [name for name, _ in model.vit.named_parameters()])
    first = FirstBlocks.of(model, blocks, seen.gradients)
    depth = len(model.vit.blocks)
    assert first.blocks == min(blocks, depth)
    matrices = {n for n, p in model.vit.named_parameters() if p.ndim > 1 and n.startswith("blocks.")}
    inside = {n for n in matrices if int(n.split(".")[1]) < blocks}
    assert {*first.names} - {"cls_token", "reg_token"} == {"pos_embed", "patch_embed.proj.weight"} | inside
    z = model.client_blocks(model.embed(image), first.blocks).detach().requires_grad_()
    rest = model.before_blocks(z) if first.blocks == 0 else z
    logits = model.vit.forward_head(model.vit.norm(model.vit.blocks[first.blocks :](rest)))
    (delta,) = torch.autograd.grad(F.cross_entropy(logits, label), z)
    made = first.gradients(patchify(model.normalise(image), model.patch)[0], delta[0])
    assert made.keys() == {*first.names}
    for name, each in made.items():
        torch.testing.assert_close(each, first.matrix(name, seen.gradients[name][0]), rtol=1e-9, atol=1e-12)
    assert first.gradients(patchify(image, model.patch)[0], 2 * delta[0])["pos_embed"].shape == (16, 64)


def test_only_matrices_that_are_released_are_compared(tiny_model: Model) -> None:
    first = FirstBlocks.of(tiny_model(), 1, ("pos_embed", "blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"))
    assert first.names == ("pos_embed", "blocks.0.mlp.fc1.weight")


def test_a_second_derivative_exists_and_the_model_is_left_as_it_is(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model()
    first = FirstBlocks.of(model, 2, [name for name, _ in model.vit.named_parameters()])
    assert not any(p.requires_grad for p in model.parameters())
    X = patchify(crops[:1].double(), model.patch)[0].requires_grad_()
    delta = torch.ones(first.prefix + len(X), model.vit.embed_dim, dtype=torch.float64)
    made = first.gradients(X, delta, create_graph=True)
    (slope,) = torch.autograd.grad(torch.stack([each.square().sum() for each in made.values()]).sum(), X)
    assert bool(slope.any())
    assert twice_derivable(model) is not model


def test_rows_disagree_by_their_cosines_whatever_their_scale() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    scale = torch.rand(5, 1, generator=draw, dtype=torch.float64) + 0.1
    assert float(row_disagreement({"a": a}, {"a": scale * a})) == pytest.approx(0, abs=1e-12)
    assert float(row_disagreement({"a": a}, {"a": -scale * a})) == pytest.approx(2)
    assert float(row_disagreement({"a": 0 * a}, {"a": a})) == pytest.approx(1)
    naive = [1 - float(x @ y / (x.norm() * y.norm())) for x, y in zip(a, b, strict=True)]
    mean = sum(naive) / 5
    assert float(row_disagreement({"a": a}, {"a": b})) == pytest.approx(mean)
    # Each matrix counts alike, however many rows it has.
    assert float(row_disagreement({"a": a, "b": a[:1]}, {"a": b, "b": a[:1]})) == pytest.approx(mean / 2)


def test_a_search_by_signs_begins_within_black_and_white_and_agrees_more(tiny_model: Model, crops: Tensor) -> None:
    model, image = tiny_model(), crops[:1].double()
    seen = observe(model, image, torch.tensor([3]), [name for name, _ in model.vit.named_parameters()])
    first = FirstBlocks.of(model, 1, seen.gradients)
    wanted = {name: first.matrix(name, seen.gradients[name][0]).sign() for name in first.names}
    X, covariance = patchify(model.normalise(image), model.patch)[0], photograph_gradients(model)
    black, white = (patchify(model.normalise(torch.full_like(image, end)), model.patch)[0] for end in (0.0, 1.0))
    torch.testing.assert_close(search_by_signs(first, wanted, 9 * X, covariance, 0), (9 * X).clamp(black, white))
    poor = (X + torch.randn(X.shape, generator=torch.Generator().manual_seed(0), dtype=X.dtype)).clamp(black, white)
    found = search_by_signs(first, wanted, poor, covariance, 60)
    assert float((found - X).square().mean()) < 0.7 * float((poor - X).square().mean())
