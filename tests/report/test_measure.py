"""What an attack leaks beside the leakiest control of its images: which control, which images, and what is chance."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from privlab.report.tables.measure import Measure, measure, structure

CHANCE = -np.log1p(-(np.arange(24) + 0.5) / 24)
CHANCE -= CHANCE.mean()
"""Gains of mean zero with their long tail above, where the interval is Student's."""


def scores(metric: str, mirrored: float | Sequence[float] | None = None, **attacks: Sequence[float]) -> pd.DataFrame:
    """Return the scores of attacks and of controls, `control_NAME`, image by image."""
    rows = [
        {"attack": name.replace("control_", "control:"), "image": f"{i:02d}", metric: value, "exact": False}
        for name, values in attacks.items()
        for i, value in enumerate(values)
    ]
    made = pd.DataFrame(rows)
    if mirrored is not None:
        each = np.broadcast_to(mirrored, len(next(iter(attacks.values()))))
        made[f"{metric}_mirrored"] = [each[int(image)] for image in made.image]
    return made


def of(images: pd.DataFrame, metric: str) -> Measure:
    found = measure(images, ["own"], metric, 0.95)[0]
    assert found is not None
    return found


def test_the_leakiest_control_is_the_bar() -> None:
    given = {"own": [0.2, 0.4], "control_mean": [0.5, 0.5], "control_other": [0.1, 0.45]}
    high, low = of(scores("ssim", **given), "ssim"), of(scores("mse", **given), "mse")
    assert (high.control, round(high.gain.mean, 12)) == ("control:mean", -0.2)
    assert (low.control, round(low.gain.mean, 12), low.ahead) == ("control:other", -0.025, 1)


def test_of_several_scores_of_one_image_the_leakiest_counts() -> None:
    for metric, best in (("ssim", 0.6), ("mse", 0.2)):
        once, again = (scores(metric, own=[value], control_mean=[0.3]) for value in (0.2, 0.6))
        assert of(pd.concat([once, again]), metric).mean == best


def test_a_control_counts_if_it_has_all_images_of_the_attack() -> None:
    given = scores("ssim", own=[0.2, 0.4], control_mean=[0.9, math.nan], control_other=[0.1, 0.1])
    assert of(given, "ssim").control == "control:other"
    assert measure(given.loc[given.attack != "control:other"], ["own"], "ssim", 0.95) == [None]
    fewer = scores("ssim", own=[0.2, math.nan], control_mean=[0.9, math.nan], control_other=[0.1, 0.1])
    assert of(fewer, "ssim").control == "control:mean"


def test_structure_is_measured_where_the_mirrored_image_is_of_every_image() -> None:
    given = {"own": [0.5, 0.6], "control_mean": [0.1, 0.1]}
    assert of(scores("correlation", 0.2, **given), "correlation").control == "the mirrored image"
    assert measure(scores("correlation", [0.2, math.nan], **given), ["own"], "correlation", 0.95) == [None]
    assert measure(scores("correlation", 0.2, own=[0.5, 0.6]), ["own"], "correlation", 0.95) == [None]


def test_the_best_of_two_attacks_shows_structure_by_chance() -> None:
    """One interval of 95 % lies above zero here; that of one among two tries does not, and a mean alone never."""
    ahead = 12.43 + CHANCE
    images = scores("psnr_affine", 12.0, own=ahead, another=0 * ahead, control_mean=0 * ahead)
    assert [*structure(images, ["own"])] == ["own"]
    assert structure(images, ["own", "another"]) == {}
    images = scores("psnr_affine", 12.0, own=ahead - 0.2, control_mean=0 * ahead)
    assert structure(images, ["own"]) == {}
