"""Results to draw, and what is read back from a figure; run by `runpy`, as test files cannot import one another."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as NamedImage
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from privlab.grids import Layout
from privlab.report.tables import CaseFacts, Results

IMAGES = [f"{i:064x}" for i in range(7)]
GAMMAS = (0.03, 0.27, 0.9)
TABLE_5 = (
    ("ViT-S", "(1) setting a", 78.1, 19.27),
    ("DeiT-S", "(1) setting a", 79.8, 18.94),
    ("DeiT-S (w/o PEs)", "(1) setting a", 77.5, 20.22),
    ("DeiT-S+MJP", "(1) setting a", 80.5, 11.52),
    ("ViT-S", "(2) setting b", 18.7, 18.44),
    ("DeiT-S", "(2) setting b", 36.0, 17.60),
    ("DeiT-S (w/o PEs)", "(2) setting b", 77.5, 20.25),
    ("DeiT-S+MJP", "(2) setting b", 62.9, 11.66),
    ("DeiT-S+MJP (w/o E_unk)", "(3) setting a", 40.6, 11.66),
    ("DeiT-S+MJP", "(4) setting c", 62.9, 8.07),
)
"""Label, group, accuracy and PSNR of MJP, Table 5."""


def record(case: int, attack: str, image: str, draw: int = 0, **scores: Any) -> dict[str, Any]:
    scores = {"psnr": math.nan, "correct": math.nan} | scores
    scores.setdefault("mse", 10 ** (-scores["psnr"] / 10))
    fixed = {"geometry": "in_place", "status": "ok", "seed": 0, "external": None, "cell": f"{case}-{attack}"}
    return fixed | {"case": case, "attack": attack, "image": image[:4], "image_sha256": image, "draw": draw} | scores


def records_of(case: int, level: float) -> Iterator[dict[str, Any]]:
    """Yield two attacks, the second in two draws, and two controls, around a level of PSNR."""
    rng = np.random.default_rng(case)
    for image in IMAGES:
        yield record(case, "april", image, psnr=level + rng.normal(), correct=float(rng.random() < 0.8))
        for n in range(2):
            yield record(case, "patch-gradient", image, n, psnr=level + 2 + 4 * rng.normal())
        yield record(case, "control:mean", image, psnr=12 + rng.normal())
        yield record(case, "control:other", image, psnr=8 + rng.normal())


COLUMNS = ("mse", "fft2d_mjp", "psnr", "ssim", "lpips_alex")


def made(cases: Sequence[CaseFacts], levels: Sequence[float], **fields: Any) -> Results:
    rows = [row for case, level in enumerate(levels) for row in records_of(case, level)]
    given = {
        "name": "made",
        "title": "Made",
        "source": "MJP",
        "cases": tuple(cases),
        "layout": Layout(COLUMNS, paper_attack="april"),
        "figures": (),
        "conditions": {},
        "records": pd.DataFrame(rows),
        "facts": {},
        "path": Path("nowhere"),
    }
    return Results(**given | fields)


@pytest.fixture
def curves() -> Results:
    cases = [CaseFacts(f"γ {g}", None, {"gamma": g}, {"psnr": 20 - 5 * g} if g < 0.5 else {}) for g in GAMMAS]
    return made(cases, [18 - 5 * g for g in GAMMAS])


@pytest.fixture
def groups() -> Results:
    cases = [
        CaseFacts(m, None, {"model": m, "gamma": g}, {"psnr": 20.0 - g}) for m in ("vit_s", "deit_s") for g in GAMMAS
    ]
    return made(cases, [18 - 5 * g + m for m in range(2) for g in GAMMAS])


@pytest.fixture
def table() -> Results:
    cases = [CaseFacts(label, group, {}, {"psnr": psnr, "correct": acc}) for label, group, acc, psnr in TABLE_5]
    results = made(cases, [psnr - 1 for *_, psnr in TABLE_5])
    return replace(results, records=results.records.assign(correct=math.nan))


def naive(results: Results, case: int, who: str, metric: str = "psnr") -> np.ndarray:
    """Return the score of each image by loops: the mean over draws, or the greatest over attacks and draws."""
    rows: list[dict[str, Any]] = results.records.loc[results.records.case == case].to_dict("records")
    found = []
    for image in IMAGES:
        of_image = [row for row in rows if row["image_sha256"] == image and not math.isnan(row[metric])]
        if who == "worst case":
            found.append(max(row[metric] for row in of_image if not row["attack"].startswith("control:")))
        else:
            found.append(float(np.mean([row[metric] for row in of_image if row["attack"] == who])))
    return np.array(found)


def lines(picture: NamedImage, label: str) -> list[Any]:
    return [line for line in picture.axes[0].get_lines() if line.get_label() == label]


def line(picture: NamedImage, label: str) -> Any:
    (found,) = lines(picture, label)
    return found


def visible(picture: NamedImage) -> list[Text]:
    """Return the text that is drawn: ticks outside the axes are not."""
    hidden = []
    for ax in picture.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            hidden += [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
    labels = {id(label) for tick in hidden for label in (tick.label1, tick.label2)}
    every = [text for text in picture.findobj(Text) if isinstance(text, Text)]
    return [text for text in every if text.get_visible() and id(text) not in labels]


def texts(picture: NamedImage) -> list[str]:
    picture.draw_without_rendering()
    return [text.get_text() for text in visible(picture) if text.get_text()]


def said(picture: NamedImage) -> str:
    """Return all text of a figure, however it is wrapped."""
    return " ".join(" ".join(texts(picture)).replace("\N{NO-BREAK SPACE}", " ").split())


def bars(picture: NamedImage) -> list[Rectangle]:
    return [bar for container in picture.axes[0].containers for bar in container]  # type: ignore[union-attr]


def grey(color: Any) -> float:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))
