"""`qkv-completion` and its solver: matrices with a known completion, closed forms, a naive twin, and refusals."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import PatchGradientAdaptive, QkvCompletion
from privlab.attacks.published.qkv_completion import _fit, _patches, _step_of_span
from privlab.base import PrivlabError, draw_for
from privlab.defenses import GradientNoise, Mjp, PercentilePrivacy
from privlab.metrics import psnr
from privlab.release import observe
from privlab.threat import Defense, GradientDefense, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
SMALL = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "num_heads": 4}
"""N = 16 patches of K = 12 values and a class token: K + 1 = 13 ≤ D − N − p = 31."""


def under(model: VictimModel, images: Tensor, *defense: Defense | GradientDefense) -> Observation:
    draws = [draw_for(0, str(i), "release") for i in range(len(images))]
    labels = torch.arange(len(images)) % model.vit.num_classes
    return observe(model, images, labels, QkvCompletion.parameters, defense, draws)


def of_rank(rank: int, missing: float) -> tuple[Tensor, Tensor]:
    """Return a matrix of 40 × 24 whose singular values fall off a hundredfold, and which entries are exact."""
    draw = Generator().manual_seed(0)
    δ, T = (torch.randn(*s, dtype=torch.float64, generator=draw) for s in ((40, rank), (rank, 24)))
    G = (δ * torch.logspace(0, -2, rank, dtype=torch.float64)) @ T
    return G, torch.rand(40, 24, generator=draw) >= missing


def outside(G: Tensor, T: Tensor) -> float:
    """Return the share of the rows of G that lies outside of the span of T."""
    return float((G - G @ T.mT @ T).norm() / G.norm())


def test_the_span_of_a_matrix_follows_from_its_exact_entries() -> None:
    """A fifth of the entries is replaced: the span is that of the matrix, whatever stands there."""
    G, exact = of_rank(5, 0.2)
    T = QkvCompletion(rank_step=1)._row_span(torch.where(exact, G, 0.3), exact, 5)
    assert_close(T @ T.mT, torch.eye(5).double())
    assert outside(G, T) < 1e-6


def test_rows_of_any_scale_and_a_row_of_zeros_change_nothing() -> None:
    G, exact = of_rank(4, 0.15)
    scale = torch.ones(40, 1, dtype=torch.float64)
    scale[:3], scale[7] = 1e8, 0
    T = QkvCompletion(rank_step=1)._row_span(scale * torch.where(exact, G, 0), exact, 4)
    assert outside(G, T) < 1e-6


def test_without_missing_entries_it_is_the_singular_value_decomposition() -> None:
    G, _ = of_rank(6, 0.0)
    T = QkvCompletion(rank_step=6)._row_span(G, torch.ones_like(G, dtype=torch.bool), 6)
    wanted = torch.linalg.svd(G, full_matrices=False).Vh[:6]
    assert_close(T.mT @ T, wanted.mT @ wanted)


def test_the_step_is_that_of_dense_algebra() -> None:
    """A Jacobian by finite differences of the residuals at the best δ gives the same damped Gauss-Newton step."""
    G, exact = of_rank(3, 0.2)
    mask = exact.double()
    T = torch.linalg.svd(G + 0.01, full_matrices=False).Vh[:3]
    fit, damping = _fit(G, mask, T), 1e-2
    δ = torch.stack([torch.linalg.lstsq(T[:, m].mT, g[m, None]).solution[:, 0] for g, m in zip(G, exact, strict=True)])
    assert_close(fit.δ, δ, rtol=1e-6, atol=1e-9)
    columns = []
    for i in range(T.numel()):
        V = torch.eye(T.numel(), dtype=torch.float64)[i].view(T.shape)
        moved = mask * (δ @ V)
        for j in range(len(G)):  # less what lies in the columns of this row's own system
            B = (mask[j] * T).mT
            moved[j] -= B @ torch.linalg.lstsq(B, moved[j, :, None]).solution[:, 0]
        columns.append(moved.flatten())
    J = torch.stack(columns, 1)
    damped = damping * (δ.mT @ δ).diagonal().mean() * torch.eye(T.numel()).double()
    wanted = torch.linalg.solve(J.mT @ J + damped, J.mT @ (mask * (G - δ @ T)).flatten())
    assert_close(_step_of_span(mask, T, fit, damping, 400).flatten(), wanted, rtol=1e-4, atol=1e-7)


def test_patches_of_a_known_span_are_exact(tiny_model: Model) -> None:
    """From the tokens themselves, with mean and deviation of each, and with a β that is not zero."""
    model = tiny_model(**SMALL)
    images = torch.rand(1, 3, 8, 8, dtype=torch.float64, generator=Generator().manual_seed(0))
    u = model.vit.blocks[0].get_submodule("norm1")(model.embed(images))[0]
    T = torch.linalg.svd(u, full_matrices=False).Vh
    assert_close(model.to_images(_patches(model, T)[None]), images, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_behind_the_filter_images_come_back_that_the_embedding_does_not_tell(tiny_model: Model) -> None:
    """The filter drops a tenth, and cuts the largest entries: with the embedding alone little is left."""
    model = tiny_model(**SMALL)
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=Generator().manual_seed(1))
    undefended = under(model, images).gradients[QkvCompletion.parameters[0]]
    filter_ = PercentilePrivacy(10.0, float(undefended.abs().flatten().quantile(0.97)))
    seen = under(model, images, filter_)
    assert QkvCompletion().beyond(seen) is None
    assert (psnr(QkvCompletion()(seen), images) > 50).all()
    names = (*QkvCompletion.parameters, *PatchGradientAdaptive.parameters)
    both = observe(model, images, torch.arange(2), names, (filter_,), [draw_for(0, str(i), "release") for i in (0, 1)])
    assert (psnr(PatchGradientAdaptive()(both), images) < 40).all()


def test_its_range_is_told_with_the_numbers(tiny_model: Model) -> None:
    images = torch.rand(1, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    told = QkvCompletion().beyond(under(tiny_model(), images, PercentilePrivacy(90.0, 1.0)))
    assert told is not None
    assert "K + 1 = 49 > D − N − p = 47" in told
    assert "exact entries < " in told
    masked = under(tiny_model(**SMALL), torch.rand(1, 3, 8, 8).double(), Mjp(gamma=0.5), PercentilePrivacy(10.0, 1.0))
    assert QkvCompletion().beyond(masked) == "the slots of some patches are hidden"


@pytest.mark.parametrize("option", ["rank_step", "rounds", "last_rounds", "steps"])
def test_options_below_one_are_refused(option: str) -> None:
    with pytest.raises(PrivlabError, match=rf"{option} of qkv-completion must be at least 1. Found 0"):
        QkvCompletion(**{option: 0})


def test_a_gradient_without_exact_entries_is_refused(tiny_model: Model) -> None:
    images = torch.rand(1, 3, 8, 8, dtype=torch.float64, generator=Generator().manual_seed(0))
    with pytest.raises(PrivlabError, match="filter"):
        QkvCompletion()(under(tiny_model(**SMALL), images, GradientNoise(multiplier=1.0)))


def test_more_tokens_than_channels_are_refused(tiny_model: Model) -> None:
    model = tiny_model(img_size=32, patch_size=4, embed_dim=48)
    images = torch.rand(1, 3, 32, 32, dtype=torch.float64, generator=Generator().manual_seed(0))
    with pytest.raises(PrivlabError, match=r"channels.*65.*48"):
        QkvCompletion()(under(model, images, PercentilePrivacy(10.0, 1.0)))
