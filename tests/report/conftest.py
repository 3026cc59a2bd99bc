"""Results made by hand, and a Chromium to look at their page with."""

import hashlib
import os
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from privlab.grids import Layout
from privlab.report.tables import CaseFacts, Results

CHROMIUM = str(Path(__file__).with_name("chromium.py"))
LEVELS = {
    "april": (19.0, 12.0, 7.5),
    "patch-gradient": (60.0, 25.0, 8.0),
    "control:mean": (11.0, 11.0, 11.0),
    "control:shuffled": (9.0, 9.0, 9.0),
}
CASES = (
    CaseFacts("ViT-S", "(1) no defense", {"gamma": 0.0}, {"psnr": 19.27, "mse": 0.0278}),
    CaseFacts("DeiT-S", "(1) no defense", {"gamma": 0.0}, {"psnr": 18.94}),
    CaseFacts("DeiT-S+MJP", "(4) MJP", {"gamma": 0.27}, refused={"pe-assignment": "it needs released features"}),
)


def sha(image: int) -> str:
    return hashlib.sha256(bytes([image])).hexdigest()


def cell(case: int, attack: str) -> str:
    return f"{case}-{list(LEVELS).index(attack)}"


def rows_of(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a record per case, attack, geometry and image: PSNR near `LEVELS`, one of `patch-gradient` exact."""
    draws = np.random.default_rng(0)
    for case in range(len(CASES)):
        for attack, levels in LEVELS.items():
            for i, name in enumerate(names):
                exact = (attack, case, i) == ("patch-gradient", 0, 0)
                psnr = float("inf") if exact else levels[case] + draws.normal()
                for geometry in ("in_place",) if attack.startswith("control") else ("in_place", "oracle"):
                    yield {
                        "case": case,
                        "victim": "deit_s",
                        "weights": "random",
                        "setting": "abc"[case],
                        "attack": attack,
                        "geometry": geometry,
                        "image": name,
                        "image_sha256": sha(i),
                        "cell": cell(case, attack),
                        "seed": 0,
                        "draw": 0,
                        "status": "ok",
                        "reason": None,
                        "external": None,
                        "psnr": psnr,
                        "mse": 10 ** (-psnr / 10),
                        "ssim": float(np.clip(psnr / 40, 0, 1)),
                        "lpips_alex": np.nan,
                    }


def draw_pictures(path: Path, images: int, side: int) -> None:
    """Write the pictures of each image: a gradient of its own, what was fed, and two reconstructions with noise."""
    y, x = np.mgrid[:side, :side] / side
    for i in range(images):
        draws = np.random.default_rng(i)
        private = np.stack([x, y, (x + i / images) % 1], -1)
        folder = path / "pictures" / sha(i)[:16]
        folder.mkdir(parents=True)
        for case in range(len(CASES)):
            made = {"private": private, "fed": private[::-1]}
            made |= {"april": private + draws.normal(0, 0.3, private.shape), "patch-gradient": private}
            for what, pixels in made.items():
                name = cell(case, what) if what in LEVELS else f"{cell(case, 'control:mean')}-{what}"
                Image.fromarray((pixels.clip(0, 1) * 255).astype("uint8")).save(folder / f"{name}.png")


@pytest.fixture(scope="session")
def page_results(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Return a maker of results of three cases, two attacks, two controls; without `side` there are no pictures.

    `change` may alter the records; other names are fields of `Results`.
    """

    def make(
        images: int = 6,
        *,
        side: int | None = None,
        names: Sequence[str] = (),
        change: Callable[[pd.DataFrame], pd.DataFrame] = lambda records: records,
        **fields: Any,
    ) -> Results:
        path = tmp_path_factory.mktemp("run")
        if side:
            draw_pictures(path, images, side)
        records = pd.DataFrame(rows_of(names or [f"image-{i:03d}.png" for i in range(images)]))
        given: Mapping[str, Any] = {
            **{"name": "mjp_table5", "title": "MJP, Table 5", "source": "MJP (CVPR 2023), Table 5", "cases": CASES},
            "layout": Layout(("mse", "psnr", "ssim", "lpips_alex"), paper_attack="april"),
            **{"figures": (), "conditions": {"weights": "trained"}, "records": change(records), "path": path},
            "facts": {
                **{"versions": {"privlab": "0.1.0", "python": "3.11.2"}, "hardware": {"cores": 2, "gpu": None}},
                **{"command": "privlab table mjp_table5 --out runs/t5", "warnings": ["weights are random"]},
                "status": "finished",
            },
        }
        return Results(**{**given, **fields})

    return make


@pytest.fixture(scope="session")
def open_page() -> Iterator[Callable[..., Any]]:
    """Return what opens a file in a headless Chromium: a `Page` of chromium.py; skip where there is none."""
    chromium = runpy.run_path(CHROMIUM)
    if chromium["find_chromium"]() is None:
        pytest.skip("needs a Chromium, on the path or named by PRIVLAB_CHROMIUM")
    with chromium["launched"]() as browser:
        yield browser.open


@pytest.fixture(scope="session")
def keep_screenshot() -> Callable[[str, bytes], None]:
    """Return what writes a screenshot into the folder that PRIVLAB_SCREENSHOTS names, if it does."""

    def keep(name: str, png: bytes) -> None:
        if folder := os.environ.get("PRIVLAB_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.png").write_bytes(png)

    return keep
