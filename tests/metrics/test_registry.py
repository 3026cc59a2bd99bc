"""Every metric against its slow, obvious version, on photographs, noise and degenerate images."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import correlate
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.metrics import (
    FORMULAS,
    METRICS,
    Pair,
    correlation,
    fft2d,
    fft2d_mjp,
    formulas,
    gms_affine,
    levels_wrong,
    mse,
    psnr,
    psnr_affine,
    psnr_region,
    score,
    ssim,
    ssim_skimage,
    window,
)

WITHOUT_WEIGHTS = [name for name, metric in METRICS.items() if metric.function]
Function = Callable[[Tensor, Tensor], Tensor]


def photograph(name: str, size: int = 96) -> Tensor:
    pixels = skimage.io.imread(Path(skimage.__file__).parent / "data" / name)[:, :, :3]
    return torch.from_numpy(pixels[100 : 100 + size, 120 : 120 + size].copy()).permute(2, 0, 1) / 255


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(images: Tensor, sigma: float) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return (images + sigma * torch.randn(images.shape, generator=rng)).clamp(0, 1)


PHOTOGRAPHS = torch.stack([photograph(f"{name}.png") for name in ("astronaut", "chelsea", "coffee")])
PAIRS = {
    "slightly noisy": (noisy(PHOTOGRAPHS, 0.02), PHOTOGRAPHS),
    "very noisy": (noisy(PHOTOGRAPHS, 0.3), PHOTOGRAPHS),
    "unrelated": (PHOTOGRAPHS.roll(1, 0), PHOTOGRAPHS),
    "random, oblong": (noise(2, 3, 17, 40), noise(2, 3, 17, 40, seed=1)),
    "one channel": (noise(2, 1, 32, 31), noise(2, 1, 32, 31, seed=1)),
    "dark": (noise(2, 3, 16, 16) / 1e3, noise(2, 3, 16, 16, seed=1) / 1e3),
}
pairs = pytest.mark.parametrize(("x", "y"), PAIRS.values(), ids=PAIRS)


def per_image(naive: Callable[[np.ndarray, np.ndarray], float], x: Tensor, y: Tensor) -> Tensor:
    """Apply a function of two (c, h, w) arrays, one image at a time."""
    values = [naive(a.double().numpy(), b.double().numpy()) for a, b in zip(x, y, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def naive_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """Wang et al. 2004, equation 13, with zeros outside the image."""
    i = np.arange(-5, 6)
    window = np.exp(-(i[:, None] ** 2 + i**2) / (2 * 1.5**2))
    window /= window.sum()

    def mean(image: np.ndarray) -> np.ndarray:
        return np.stack([correlate(channel, window, mode="constant", cval=0) for channel in image])

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    ratio = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    return float(ratio.mean())


def naive_fft2d_mjp(x: np.ndarray, y: np.ndarray) -> float:
    """SciPy 1.0's `cosine` on the complex spectra, then the modulus."""
    u, v = np.fft.fft2(x).flatten(), np.fft.fft2(y).flatten()
    return float(abs(1 - np.average(u * v) / np.sqrt(np.average(u * u) * np.average(v * v))))


def naive_fft2d(x: np.ndarray, y: np.ndarray) -> float:
    """Cosine distance of complex vectors, DC removed."""
    u, v = np.fft.fft2(x), np.fft.fft2(y)
    u[:, 0, 0] = v[:, 0, 0] = 0
    return float(1 - np.vdot(u, v).real / (np.linalg.norm(u) * np.linalg.norm(v)))


@pairs
def test_mse_and_psnr_agree_with_numpy_and_skimage(x: Tensor, y: Tensor) -> None:
    assert_close(mse(x, y), per_image(lambda a, b: float(((a - b) ** 2).mean()), x, y))
    skimages = per_image(lambda a, b: peak_signal_noise_ratio(b, a, data_range=1), x, y)
    assert_close(psnr(x, y), skimages, rtol=0, atol=1e-9)


@pairs
def test_ssim_skimage_agrees_with_skimage(x: Tensor, y: Tensor) -> None:
    def naive(a: np.ndarray, b: np.ndarray) -> float:
        settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
        return float(np.asarray(structural_similarity(a, b, data_range=1, channel_axis=0, **settings)))

    assert_close(ssim_skimage(x, y), per_image(naive, x, y), rtol=0, atol=1e-10)


@pairs
def test_ssim_agrees_with_the_zero_padded_loop(x: Tensor, y: Tensor) -> None:
    assert_close(ssim(x, y), per_image(naive_ssim, x, y), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 5), (24, 48), (25, 49), (64, 30)])
def test_strips_of_the_window_are_the_whole_of_it(shape: tuple[int, int]) -> None:
    """The window is applied strip by strip; as one matrix, with all its zeros, it gives the same."""
    images = noise(2, 3, *shape)
    down, across = (window._toeplitz(n, images.dtype, images.device) for n in shape)
    assert_close(window.gaussian(images), down @ images @ across, rtol=1e-14, atol=1e-15)


def test_ssim_takes_images_smaller_than_its_window() -> None:
    x, y = noise(2, 3, 8, 5), noise(2, 3, 8, 5, seed=1)
    assert_close(ssim(x, y), per_image(naive_ssim, x, y), rtol=0, atol=1e-10)


@pairs
def test_fft2d_mjp_agrees_with_the_complex_script(x: Tensor, y: Tensor) -> None:
    assert_close(fft2d_mjp(x, y), per_image(naive_fft2d_mjp, x, y), rtol=1e-10, atol=1e-10)


@pairs
def test_fft2d_agrees_with_the_complex_distance(x: Tensor, y: Tensor) -> None:
    assert_close(fft2d(x, y), per_image(naive_fft2d, x, y), rtol=1e-10, atol=1e-10)


def naive_fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares of each colour against (x, 1), by LAPACK."""
    fitted = np.empty_like(x)
    for c in range(len(x)):
        A = np.stack([x[c].ravel(), np.ones(x[c].size)], 1)
        fitted[c] = (A @ np.linalg.lstsq(A, y[c].ravel(), rcond=None)[0]).reshape(x[c].shape)
    return fitted


def naive_gms(x: np.ndarray, y: np.ndarray) -> float:
    """Xue et al. 2014, equations 2 to 4, of each colour; borders are left out, and so is an odd last row or column."""
    down = np.array([[1, 1, 1], [0, 0, 0], [-1, -1, -1]]) / 3
    maps = []
    for a, b in zip(naive_fit(x, y), y, strict=True):
        sizes = []
        for image in (a, b):
            h, w = (n // 2 for n in image.shape)
            small = image[: 2 * h, : 2 * w].reshape(h, 2, w, 2).mean((1, 3))
            sizes.append(np.sqrt(correlate(small, down) ** 2 + correlate(small, down.T) ** 2)[1:-1, 1:-1])
        m, n = sizes
        maps.append((2 * m * n + 170 / 255**2) / (m**2 + n**2 + 170 / 255**2))
    return float(np.mean(maps))


@pairs
def test_what_gain_and_offset_leave_agrees_with_lapack_and_numpy(x: Tensor, y: Tensor) -> None:
    left = per_image(lambda a, b: float(-10 * np.log10(((naive_fit(a, b) - b) ** 2).mean())), x, y)
    assert_close(psnr_affine(x, y), left, rtol=0, atol=1e-9)
    each = per_image(
        lambda a, b: np.mean([abs(np.corrcoef(i.ravel(), j.ravel())[0, 1]) for i, j in zip(a, b, strict=True)]), x, y
    )
    assert_close(correlation(x, y), each, rtol=0, atol=1e-10)
    assert_close(gms_affine(x, y), per_image(naive_gms, x, y), rtol=0, atol=1e-10)


@given(st.lists(st.floats(-1, 1).filter(lambda g: abs(g) > 0.05), min_size=3, max_size=3), st.integers(0, 2**16))
@settings(max_examples=20)
def test_gain_and_offset_of_a_colour_are_no_privacy(gains: list[float], seed: int) -> None:
    """An image of other gains and offsets, negative ones too, is as good as the image itself; psnr may be worse."""
    y, g = noise(1, 3, 12, 12, seed=seed), torch.tensor(gains, dtype=torch.float64)[:, None, None]
    x = noise(1, 3, 12, 12, seed=seed + 1) * 0.5 + 0.5 * y
    other = (g * x - torch.minimum(g, torch.zeros_like(g))).clamp(0, 1)  # within [0, 1], but for rounding
    for function in (psnr_affine, correlation, gms_affine):
        assert_close(function(other, y), function(x, y), rtol=1e-7, atol=1e-9)
    assert (psnr_affine(x, y) >= psnr(x, y)).all()


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_a_flat_image_has_what_the_variance_leaves(level: float) -> None:
    flat, y = torch.full((3, 3, 96, 96), level, dtype=torch.float64), PHOTOGRAPHS.double()
    for x, other in ((flat, y), (y, flat)):
        assert (correlation(x, other) == 0).all()
    assert_close(psnr_affine(flat, y), -10 * y.var((2, 3), correction=0).mean(1).log10())
    assert (correlation(flat, 1 - flat) == 1).all()
    assert psnr_affine(y, flat).isinf().all()  # gain zero, and the offset is the level


def test_gms_affine_refuses_images_without_a_neighbourhood() -> None:
    small = noise(1, 3, 5, 32)
    with pytest.raises(PrivlabError, match=r"gms_affine.*6×6.*5×32"):
        gms_affine(small, small)
    assert gms_affine(noise(1, 3, 6, 6), noise(1, 3, 6, 6)).shape == (1,)


def test_fft2d_sees_the_image_where_mjps_sees_it_turned() -> None:
    """The missing conjugate: only MJP's distance changes when y is turned by 180° onto itself."""
    y = PHOTOGRAPHS
    turned = y.flip((2, 3)).roll((1, 1), (2, 3))
    assert (fft2d(y, y) < 1e-12).all()
    assert (fft2d(turned, y) > 0.1).all()
    assert (fft2d_mjp(turned, y) - fft2d_mjp(y, y)).abs().min() > 0.01
    assert_close(fft2d_mjp(turned, turned), fft2d_mjp(y, y))


@pytest.mark.parametrize("level", [0.0, 0.1, 0.3, 1.0])
def test_fft2d_of_constant_images_is_that_of_unrelated_or_of_equal_ones(level: float) -> None:
    flat = torch.full((3, 3, 96, 96), level, dtype=torch.float64)
    for one, other in ((flat, PHOTOGRAPHS.double()), (PHOTOGRAPHS.double(), flat)):
        assert (fft2d(one, other) == 1).all()
    assert (fft2d(flat, flat) == 0).all()
    assert (fft2d(flat, 1 - flat) == 0).all()  # levels are no part of it: the DC is left out


def test_fft2d_mjp_is_undefined_for_black_images() -> None:
    black = torch.zeros(3, 3, 96, 96)
    assert fft2d_mjp(black, PHOTOGRAPHS).isnan().all()


def test_equal_images_have_the_best_value_of_every_metric() -> None:
    best = dict.fromkeys(WITHOUT_WEIGHTS, 1.0) | {"mse": 0.0, "fft2d": 0.0, "fft2d_mjp": 0.0}
    best |= dict.fromkeys(("psnr", "psnr_affine"), math.inf)
    for name, values in score(PHOTOGRAPHS, PHOTOGRAPHS, WITHOUT_WEIGHTS).items():
        assert_close(values, torch.full((3,), best[name], dtype=torch.float64), rtol=0, atol=1e-12)


def test_fft2d_of_proportional_images_is_not_rounded_out_of_its_range() -> None:
    x = noise(200, 3, 12, 12)
    assert fft2d(x, x / 3).min() >= 0
    assert fft2d(x, 1 - x / 3).max() <= 2


def test_psnr_region_agrees_with_masked_numpy() -> None:
    x, y = PAIRS["very noisy"]
    region = noise(3, 96, 96) > torch.tensor([0.2, 0.9, 0.999])[:, None, None]
    expected = [
        -10 * np.log10(((a - b).double().numpy()[:, mask.numpy()] ** 2).mean())
        for a, b, mask in zip(x.double(), y.double(), region, strict=True)
    ]
    assert_close(psnr_region(x, y, region), torch.tensor(expected))


def test_psnr_region_of_everything_is_psnr_and_of_nothing_nan() -> None:
    x, y = PAIRS["slightly noisy"]
    region = torch.ones(3, 96, 96, dtype=torch.bool)
    assert_close(psnr_region(x, y, region), psnr(x, y))
    region[1] = False
    assert psnr_region(x, y, region).isnan().tolist() == [False, True, False]
    assert psnr_region(x, x, region)[0] == math.inf


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_each_image_is_scored_alone(name: str) -> None:
    function = METRICS[name].function
    assert function
    x, y = PAIRS["very noisy"]
    alone = torch.cat([function(x[i : i + 1], y[i : i + 1]) for i in range(len(x))])
    assert_close(function(x, y), alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_score_equals_the_functions(name: str) -> None:
    function = METRICS[name].function
    assert function
    x, y = PAIRS["unrelated"]
    values = score(x, y, WITHOUT_WEIGHTS)
    assert list(values) == WITHOUT_WEIGHTS
    assert values[name].dtype == torch.float64
    assert_close(values[name], function(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan, math.inf])
def test_pixels_outside_the_unit_range_are_refused(name: str, value: float) -> None:
    bad = PHOTOGRAPHS.clone()
    bad[1, 2, 3, 4] = value
    function = METRICS[name].function
    assert function
    with pytest.raises(PrivlabError, match=r"\[0.*1\].*values"):
        function(bad, PHOTOGRAPHS)
    with pytest.raises(PrivlabError, match=r"\[0.*1\].*Found"):
        function(PHOTOGRAPHS, bad)


def test_ssim_skimage_refuses_images_smaller_than_its_window() -> None:
    small = noise(1, 3, 10, 32)
    with pytest.raises(PrivlabError, match=r"ssim_skimage.*11×11.*10×32"):
        ssim_skimage(small, small)
    assert ssim_skimage(noise(1, 3, 11, 11), noise(1, 3, 11, 11)).shape == (1,)


def test_shapes_that_differ_are_refused_where_no_checker_runs() -> None:
    """Broadcasting a batch of one would score the wrong pairs in silence; jaxtyping is on only in tests."""
    assert formulas.__file__
    plain = runpy.run_path(formulas.__file__)
    with pytest.raises(PrivlabError, match=r"3×3×96×96.*1×3×96×96"):
        plain["mse"](PHOTOGRAPHS, PHOTOGRAPHS[:1])
    region = torch.ones(1, 96, 96, dtype=torch.bool)
    with pytest.raises(PrivlabError, match=r"3×96×96.*1×96×96"):
        plain["psnr_region"](PHOTOGRAPHS, PHOTOGRAPHS, region)


def test_unknown_metrics_are_named_with_their_neighbours() -> None:
    with pytest.raises(PrivlabError, match="'snr'"):
        score(PHOTOGRAPHS, PHOTOGRAPHS, ["mse", "snr"])


def test_lpips_without_its_backbone_is_refused() -> None:
    with pytest.raises(PrivlabError, match=r"lpips_alex needs learned=.+load_lpips\('alex'\).+ Found: none"):
        score(PHOTOGRAPHS, PHOTOGRAPHS, ["lpips_alex"])


def test_metrics_table_is_consistent() -> None:
    assert all(name == metric.name for name, metric in METRICS.items())
    assert {metric.arrow for name, metric in METRICS.items() if name.startswith(("psnr", "ssim"))} == {"↑"}
    assert {metric.arrow for name, metric in METRICS.items() if name.startswith(("mse", "fft", "lpips"))} == {"↓"}


def test_arrows_point_to_the_better_reconstruction() -> None:
    """On photographs; MJP's FFT2D has no such order, which is why it is not asked here."""
    near, far = (score(PAIRS[name][0], PHOTOGRAPHS, WITHOUT_WEIGHTS) for name in ("slightly noisy", "very noisy"))
    for name in set(WITHOUT_WEIGHTS) - {"fft2d_mjp"}:
        assert ((near[name] > far[name]) == (METRICS[name].arrow == "↑")).all(), name


@given(h=st.integers(11, 24), w=st.integers(11, 24), c=st.sampled_from([1, 3]), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_values_lie_in_their_stated_ranges(h: int, w: int, c: int, seed: int) -> None:
    x, y = noise(2, c, h, w, seed=seed).round(decimals=1), noise(2, c, h, w, seed=seed + 1)
    for name, values in score(x, y, WITHOUT_WEIGHTS).items():
        low, high = METRICS[name].range
        assert ((values >= low) & (values <= high)).all(), name


def test_rounding_takes_no_correlation_beyond_one() -> None:
    x = torch.rand(400, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = FORMULAS["correlation"](Pair.of(x, 0.7 * x + 0.1))
    assert found.max() == 1
    assert found.min() > 1 - 1e-12


def test_wrong_grey_levels_are_those_that_rounding_to_eight_bits_leaves() -> None:
    y = torch.tensor([0, 1, 128, 255]).view(1, 1, 2, 2) / 255
    off = torch.tensor([0.4, -0.4, 0.6, -1.0]).view(1, 1, 2, 2) / 255
    found = levels_wrong(torch.cat([y, y + off, y + 0.6 * off]), y.expand(3, 1, 2, 2))
    assert found.tolist() == [0, 2, 1]
    assert psnr(y + 0.6 * off, y).item() < 60  # no bound of PSNR tells it
