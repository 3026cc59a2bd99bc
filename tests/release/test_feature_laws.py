"""The laws that rows are placed by: covariances by numpy, densities by torch."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.testing import assert_close

from privlab.attacks.rows import known_tokens, patch_law, row_costs
from privlab.attacks.rows.placement import LEAST_VARIANCE, RIDGE
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


def pictures(n: int) -> Tensor:
    return torch.rand(n, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_the_law_of_patches_is_their_covariance_and_the_noise_and_a_ridge(noise: float, tiny_model: Model) -> None:
    model, public = tiny_model(), pictures(8)
    rows = model.vit.patch_embed.proj(model.normalise(public)).flatten(2).mT.flatten(0, 1).numpy()
    mean, covariance = patch_law(model, public, noise)
    expected = np.cov(rows.T, bias=True)
    expected += (1e-3 * expected.diagonal().mean() + noise**2) * np.eye(len(expected))
    assert_close(mean, torch.from_numpy(rows.mean(0)))
    assert_close(covariance, torch.from_numpy(expected))


def test_public_images_that_say_nothing_have_the_least_variance(tiny_model: Model) -> None:
    _, covariance = patch_law(tiny_model(), torch.full((2, 3, 16, 16), 0.5, dtype=torch.float64))
    assert (RIDGE, LEAST_VARIANCE) == (1e-3, 1e-9)
    assert_close(covariance, 1e-12 * torch.eye(64, dtype=torch.float64), rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_a_class_tokens_row_is_its_public_value_with_the_noise_and_rounding(noise: float, tiny_model: Model) -> None:
    """−2 log N(z; c, noise² + (1e-3)² of the mean variance of patches) − d log 2π, by torch's own density."""
    model = tiny_model()
    features, law, (prefix, pe) = model.embed(pictures(2)), patch_law(model, pictures(8), noise), known_tokens(model)
    costs = row_costs(features, prefix, pe, law, noise)
    deviation = (noise**2 + 1e-6 * law[1].diagonal().mean()).sqrt()
    density = Normal(prefix[0], deviation, validate_args=False).log_prob(features).sum(2)
    assert_close(costs[:, :, 0], -2 * density - features.shape[2] * math.log(2 * math.pi))
