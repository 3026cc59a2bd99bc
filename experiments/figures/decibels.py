"""What 12 to 40 dB look like: three photographs with the errors that attacks leave, and real reconstructions.

`python -m privlab.experiments.figures.decibels` draws them. The errors of the first three pictures are simulated, each
as strong as the PSNR asks; the reconstructions of the last one are those of the benchmark's results.
"""

import json
import tomllib
from base64 import b64decode
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from skimage.filters import gaussian

from privlab.images.public import photographs
from privlab.report.figures.style import figure_style

FOLDER = Path(__file__).parents[1] / "notes"
LEVELS = (12.0, 16.0, 20.0, 25.0, 30.0, 40.0)
"""PSNR in dB, from bad to good."""

SHOWN = ("chelsea", "motorcycle", "retina")
"""The bundled photographs: an animal, fine detail, and a medical image."""

_SIDE, _PATCH = 128, 8


def psnr(image: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR in dB of two images with values in [0, 1]."""
    return float(-10 * np.log10(max(np.mean((image - other) ** 2), 1e-12)))


def blurred(image: np.ndarray, level: float) -> np.ndarray:
    """Return an image blurred to a PSNR: decoders, and attacks on Adam and on depth, lose fine detail."""
    return _as_strong(lambda sigma: gaussian(image, sigma, channel_axis=2), image, level, most=300.0)


def noisy(image: np.ndarray, level: float) -> np.ndarray:
    """Return an image with Gaussian noise to a PSNR, clipped: what noise, and rounding, on a release leaves."""
    noise = np.random.default_rng(0).standard_normal(image.shape)
    return _as_strong(lambda sigma: (image + sigma * noise).clip(0, 1), image, level, most=10.0)


def misplaced(image: np.ndarray, level: float) -> np.ndarray:
    """Return an image with pairs of patches swapped until the PSNR is reached: what a shuffle leaves."""
    side = len(image) // _PATCH
    corners = np.random.default_rng(0).permutation(side * side)
    budget, found = 10 ** (-level / 10) * image.size, image.copy()
    for first, second in corners.reshape(-1, 2).tolist():
        a, b = _patch(first, side), _patch(second, side)
        error = 2 * np.sum((image[a] - image[b]) ** 2)  # both places are wrong by the difference of the two patches
        if error <= budget:
            found[a], found[b], budget = image[b], image[a], budget - error
    return found


def _patch(i: int, side: int) -> tuple[slice, slice]:
    """Return the rows and columns of the pixels of patch i, of `side` patches in a row."""
    top, left = i // side * _PATCH, i % side * _PATCH
    return slice(top, top + _PATCH), slice(left, left + _PATCH)


KINDS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "blurred": blurred,
    "noisy": noisy,
    "patches\nswapped": misplaced,
}


def draw(name: str) -> Figure:
    """Return a bundled photograph with each kind of error, a row for each, and a column for each PSNR."""
    image = photographs((_SIDE, _SIDE), [f"samples/{name}-0"])[0].permute(1, 2, 0).numpy()
    with figure_style():
        figure = Figure(figsize=(8, 4.1), layout="constrained")
        for row, (kind, changed) in enumerate(KINDS.items()):
            panels = [image, *(changed(image, level) for level in LEVELS)]
            for column, panel in enumerate(panels):
                axes = figure.add_subplot(3, 7, 7 * row + column + 1, xticks=[], yticks=[])
                axes.imshow(panel)
                if column == 0:
                    axes.set_ylabel(kind, fontsize=11)
                if row == 0:
                    title = f"{LEVELS[column - 1]:g} dB" if column else "original"
                    axes.set_title(title, fontsize=12, fontweight="bold")
                reached = psnr(image, panel)
                if column and abs(reached - LEVELS[column - 1]) > 0.5:  # this kind of error cannot be as large
                    axes.set_xlabel(f"{reached:.1f} dB", fontsize=9)
    return figure


def draw_real() -> Figure:
    """Return reconstructions of the benchmark whose PSNR is nearest to each level, below their photographs."""
    found = [min(_reconstructions(), key=lambda one: abs(one[0] - level)) for level in LEVELS]
    with figure_style():
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        for column, (score, label, private, made) in enumerate(found):
            for row, panel in enumerate((private, made)):
                axes = figure.add_subplot(2, 6, 6 * row + column + 1, xticks=[], yticks=[])
                axes.imshow(panel, interpolation="nearest")
                if column == 0:
                    axes.set_ylabel(("original", "rebuilt")[row], fontsize=11)
                if row == 0:
                    axes.set_title(f"{score:.1f} dB", fontsize=12, fontweight="bold")
                else:
                    axes.set_xlabel(label, fontsize=8.5)
    return figure


def _reconstructions() -> Iterator[tuple[float, str, np.ndarray, np.ndarray]]:
    """Yield PSNR, entry and attack, photograph and reconstruction of each picture that the benchmark's results keep."""
    for path in sorted((FOLDER.parent / "benchmark" / "results").glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        kept = result.get("pictures", {})
        by_entry = {tomllib.loads(result["card"])["name"]: kept} if {"median", "worst"} & kept.keys() else kept
        for entry, pictures in by_entry.items():
            for shown in pictures.values():
                both = [Image.open(BytesIO(b64decode(shown[key].partition(",")[2]))) for key in ("private", "made")]
                private, made = (np.asarray(picture.convert("RGB")) for picture in both)
                label = fill(f"{entry}: {shown['attack']}", 18)
                yield float(shown["score"]), label, private, made


def _as_strong(change: Callable[[float], np.ndarray], image: np.ndarray, level: float, most: float) -> np.ndarray:
    """Return a change of an image whose strength, between 0 and the most, is bisected until the PSNR is reached."""
    low, high = 0.0, most
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if psnr(image, change(middle)) > level else (low, middle)
    return change(high)


if __name__ == "__main__":
    for each in SHOWN:
        draw(each).savefig(FOLDER / f"decibels_{each}.jpg", dpi=150, pil_kwargs={"quality": 88})
    draw_real().savefig(FOLDER / "decibels_real.jpg", dpi=150, pil_kwargs={"quality": 88})
