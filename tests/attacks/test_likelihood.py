"""The likelihood of a release over all layers: against loops, finite differences, and the embedding alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import GradientLikelihood, PatchGradient, PatchGradientAdaptive
from privlab.attacks.gradients.gradient_matching import Match
from privlab.attacks.solvers import RTOL, Likelihood
from privlab.base import draw_for
from privlab.defenses import GradientNoise, GradientPruning
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe, released_parameters
from privlab.threat import GradientDefense, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
pytestmark = pytest.mark.usefixtures("cache")

SMALL = {"img_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
"""N = 4 patches of K = 48 values."""


def under(model: VictimModel, images: Tensor, *defense: GradientDefense) -> Observation:
    draws = [draw_for(0, str(i), "release") for i in range(len(images))]
    labels = torch.arange(len(images)) % model.vit.num_classes
    return observe(model, images, labels, released_parameters(model), defense, draws)


def matched(seen: Observation, tv: float = 0.0) -> tuple[Match, Callable[[Tensor], Tensor]]:
    """Return the objective, and the map from images to its points."""
    match = Match.of(seen, "likelihood", tv)
    model = seen.model
    return match, lambda images: match.coordinates(patchify(model.normalise(images), model.patch).unflatten(0, (-1, 1)))


def test_it_is_the_sum_over_entries_by_their_variance(tiny_model: Model) -> None:
    """An entry that is missing costs nothing within its edge, and its excess over it beyond."""
    model, draw = tiny_model(**SMALL), Generator().manual_seed(0)
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=draw)
    for noise, pruning in ((0.01, 1.0), (0.0, 0.4)):
        seen = under(model, images, GradientNoise(multiplier=noise), GradientPruning(keep=pruning))
        released = dict(seen.gradients)
        found = Likelihood.of(seen, released)
        g = {name: 0.3 * torch.randn(each.shape, dtype=each.dtype, generator=draw) for name, each in released.items()}
        values = found(g, torch.tensor([0, 1]))
        for i in range(2):
            flat = torch.cat([released[name][i].flatten() for name in sorted(released)])
            whole = torch.cat([g[name][i].flatten() for name in sorted(released)])
            whole = whole * min(1.0, 1.0 / whole.norm().item())
            edge = flat[flat != 0].abs().min() if pruning < 1 else torch.tensor(0.0, dtype=flat.dtype)
            variance = max(noise**2, RTOL**2 * flat.square().mean().item())
            total = 0.0
            for entry, is_ in zip(flat.tolist(), whole.tolist(), strict=True):
                off = is_ - entry if entry else max(abs(is_) - edge.item(), 0.0)
                total += off**2 / variance / 2
            assert values[i].item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("defense", [GradientNoise(multiplier=0.01), GradientPruning(keep=0.5)], ids=repr)
def test_its_slope_is_that_of_finite_differences(defense: GradientDefense, tiny_model: Model) -> None:
    """Clipping is derived too: the norm of these gradients is above C."""
    model, draw = tiny_model(**SMALL), Generator().manual_seed(0)
    images, others = torch.rand(2, 1, 3, 8, 8, dtype=torch.float64, generator=draw)
    match, points = matched(under(model, images, defense), tv=1.0)
    x, one = points(others), torch.tensor([0])
    _, slope = match(x, one)
    for _ in range(3):
        way = torch.randn(x.shape, dtype=x.dtype, generator=draw)
        h = 1e-6
        rise = (match(x + h * way, one)[0] - match(x - h * way, one)[0]) / (2 * h)
        assert_close(rise, (slope * way).sum(1), rtol=1e-4, atol=1e-9)


def test_the_truth_explains_the_release_up_to_its_noise(tiny_model: Model, photographs: Callable[..., Tensor]) -> None:
    """Twice the value, at the private image, is χ² of as many degrees of freedom as there are entries."""
    model, images = tiny_model(**SMALL), photographs(3, 8).double()
    for releases in (1, 4):
        seen = under(model, images, GradientNoise(multiplier=0.05, releases=releases))
        match, points = matched(seen)
        value, _ = match(points(images), torch.arange(3))
        entries = sum(g[0].numel() for g in seen.gradients.values())
        assert_close(2 * 64 * value / entries, torch.ones_like(value), rtol=0, atol=5 * (2 / entries) ** 0.5)


def test_without_noise_it_is_the_closed_form(tiny_model: Model, photographs: Callable[..., Tensor]) -> None:
    model, images = tiny_model(**SMALL), photographs(2, 8).double()
    seen = under(model, images, GradientNoise(multiplier=0.0, clip=1e9))
    reconstruction = GradientLikelihood(start="patch-gradient", steps=5)(seen)
    assert_close(reconstruction.images, PatchGradient()(seen), atol=1e-4, rtol=0)
    assert (psnr(reconstruction.images, images) > 80).all()


@pytest.mark.slow
def test_all_layers_tell_more_than_the_embedding(tiny_model: Model, photographs: Callable[..., Tensor]) -> None:
    model, images = tiny_model(**SMALL), photographs(4, 8).double()
    seen = under(model, images, GradientNoise(multiplier=1e-3))
    alone = psnr(PatchGradientAdaptive()(seen), images)
    whole = psnr(GradientLikelihood(steps=80)(seen).images, images)
    assert whole.mean() > alone.mean() + 2
