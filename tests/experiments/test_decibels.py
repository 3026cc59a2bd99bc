"""The pictures of what a PSNR looks like have that PSNR."""

import numpy as np
import pytest

from privlab.experiments.figures.decibels import blurred, misplaced, noisy, psnr

IMAGE = np.random.default_rng(0).random((32, 32, 3))


def test_psnr_is_that_of_values_up_to_one() -> None:
    assert psnr(np.zeros((2, 2, 3)), np.full((2, 2, 3), 0.1)) == pytest.approx(20)


@pytest.mark.parametrize("level", [12.0, 20.0, 40.0])
def test_a_blur_and_noise_have_the_psnr_that_was_asked_for(level: float) -> None:
    assert psnr(IMAGE, blurred(IMAGE, level)) == pytest.approx(level, abs=0.01)
    assert psnr(IMAGE, noisy(IMAGE, level)) == pytest.approx(level, abs=0.01)


def test_swapped_patches_have_no_lower_psnr_and_keep_every_value() -> None:
    swapped = misplaced(IMAGE, 12.0)
    assert psnr(IMAGE, swapped) >= 12
    assert not np.array_equal(swapped, IMAGE)
    assert np.array_equal(np.sort(swapped, axis=None), np.sort(IMAGE, axis=None))
