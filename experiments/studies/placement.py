"""`privlab study placement`: how many shuffled patches each re-assembly puts back, given exact patches."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from privlab.base import (
    PrivlabError,
    check_name,
    configure,
    draw_for,
    read_options,
    versions,
    write_whole,
)
from privlab.evaluation import Batch, batches
from privlab.experiments.studies.data import mean_interval, write_facts
from privlab.images import Preprocessing, open_images
from privlab.metrics import adjacent_share, placed_share
from privlab.patches import jigsaw, patchify
from privlab.reassembly import REASSEMBLIES, Predicted, Reassembly

RECORDS, FACTS = "placement.parquet", "facts.json"

BATCH = 50
"""Number of images that a predictor sees at once."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PlacementStudy:
    """Which patches are shuffled, and which re-assemblies put them back.

    Args:
        images: what `open_images` opens, with `split` and `limit`.
        img_size: side of the images, in pixels, resized and cropped around their centre.
        patch: side of a patch, in pixels, at least 3.
        gammas: shares of the patches that MJP shuffles, in (0, 1]; the others are known to stand in their place. At 1
            no place is known, as under the row permutation of split learning.
        solvers: names of re-assemblies; one with a predictor is measured with border costs and without.
        options: [NAME.]KEY=VALUE of the re-assemblies.

    Raises:
        PrivlabError: for unknown names or options, or numbers out of range.
    """

    images: str
    split: str | None = None
    limit: int | None = None
    img_size: int = 32
    patch: int = 4
    gammas: tuple[float, ...] = (0.03, 0.15, 0.27, 0.5, 0.9, 1.0)
    solvers: tuple[str, ...] = tuple(REASSEMBLIES)
    options: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the names and numbers."""
        for name in self.solvers:
            check_name("re-assembly", name, REASSEMBLIES)
        read_options(self.options, [REASSEMBLIES[name] for name in self.solvers])
        if self.patch < 3 or self.img_size < 2 * self.patch or self.img_size % self.patch:
            raise PrivlabError(
                "A patch must have a side of 3 pixels or more, and the image one of two patches or more, a multiple of "
                f"a patch's. Found patches of {self.patch} and images of {self.img_size}."
            )
        for gamma in self.gammas:
            if not 0 < gamma <= 1 or int(gamma * self.grid[0] * self.grid[1]) < 1:
                raise PrivlabError(
                    f"gamma (γ) must be in (0, 1], and shuffle one of {self.grid[0] * self.grid[1]} patches or more. "
                    f"Found {gamma}."
                )

    @property
    def grid(self) -> tuple[int, int]:
        """Return the patches in a column and in a row."""
        return self.img_size // self.patch, self.img_size // self.patch


def study(plan: PlacementStudy, out: Path, *, say: Say = print) -> dict[str, Any]:
    """Write `placement.parquet`, a row for each image, γ and solver, and `facts.json`; return the facts.

    `placed` is the share of the shuffled slots that hold their own patch. `neighbours` is the share of the pairs of
    adjacent slots, at least one of them shuffled, that hold patches adjacent in the same way. Both are in [0, 1].

    Args:
        plan: the images, how they are shuffled, and the re-assemblies.
        out: folder of the two files.
        say: is called with a line for each image that cannot be read.

    Raises:
        PrivlabError: as `open_images` does; if no image can be read, or a predictor is missing or for other patches.
    """
    named = _solvers(plan)
    source = open_images(plan.images, limit=plan.limit, split=plan.split)
    preprocessing = Preprocessing((plan.img_size, plan.img_size), (0.0,) * 3, (1.0,) * 3, 1.0, "bicubic")
    tables = []
    for chunk in batches(source, preprocessing, BATCH):
        for image in chunk.failed:
            say(f"Left out: {image.problem}")
        tables += [_measure(plan, chunk, gamma, named) for gamma in plan.gammas if chunk.named]
    if not tables:
        raise PrivlabError(f"None of the images of {plan.images} can be read.")
    records = pd.concat(tables, ignore_index=True)
    write_whole(out / RECORDS, lambda path: records.to_parquet(path, index=False))
    facts = {
        "images": int(records.image.nunique()),
        "img_size": plan.img_size,
        "patch": plan.patch,
        "seed": plan.seed,
        "split": plan.split,
        "solvers": {name: repr(solver) for name, solver in named.items()},
        "placed": _means(records, plan.seed),
        "versions": versions(),
    }
    write_facts(out / FACTS, facts)
    return facts


def to_rows(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each solver, with the share of shuffled patches that it places at each γ, as text."""
    rows: dict[str, dict[str, str]] = {}
    for cell in facts["placed"]:
        of_solver = rows.setdefault(cell["solver"], {"re-assembly": cell["solver"]})
        place = "rows (γ = 1)" if cell["gamma"] == 1 else f"γ = {cell['gamma']:g}"
        interval = "" if cell["low"] is None else f"\n[{100 * cell['low']:.1f}, {100 * cell['high']:.1f}]"
        of_solver[place] = f"{100 * cell['placed']:.1f} %{interval}"
        if cell["gamma"] == max(other["gamma"] for other in facts["placed"]):
            of_solver["ms an image"] = f"{1000 * cell['seconds']:.0f}"
    return list(rows.values())


def _solvers(plan: PlacementStudy) -> dict[str, Reassembly]:
    """Return the re-assemblies by name; those with a predictor twice, the second time without border costs."""
    named: dict[str, Reassembly] = {}
    for name in plan.solvers:
        made = configure(REASSEMBLIES[name], plan.options)
        if isinstance(made, Predicted):
            made.predictor(plan.grid, plan.patch)
            named[f"{name} with borders"] = replace(made, borders=True)
            named[f"{name} alone"] = replace(made, borders=False)
        else:
            named[name] = made
    return named


def _measure(plan: PlacementStudy, chunk: Batch, gamma: float, named: Mapping[str, Reassembly]) -> pd.DataFrame:
    """Return the records of some images at one γ."""
    draws = [draw_for(plan.seed, image.sha256, f"placement/{gamma:g}") for image in chunk.named]
    shuffled, sent, moved = jigsaw(chunk.images, plan.patch, gamma, draws)
    patches: Float[Tensor, "b n c p p"] = patchify(shuffled, plan.patch).unflatten(2, (-1, plan.patch, plan.patch))
    about = {"image": [image.sha256 for image in chunk.named], "gamma": gamma, "moved": moved.sum(1).numpy()}
    tables = []
    for name, solver in named.items():
        start = time.perf_counter()
        order = solver(patches, plan.grid, ~moved)
        seconds = (time.perf_counter() - start) / len(patches)
        held = sent.gather(1, order)
        scores = {"placed": placed_share(held, moved), "neighbours": adjacent_share(held, moved, plan.grid)}
        tables.append(pd.DataFrame(about | {"solver": name, "seconds": seconds} | _arrays(scores)))
    return pd.concat(tables, ignore_index=True)


def _arrays(scores: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in scores.items()}


def _means(records: pd.DataFrame, seed: int) -> list[dict[str, Any]]:
    """Return for each γ and solver the means over the images, and the 95 % bootstrap interval of the share placed."""
    cells: list[dict[str, Any]] = []
    for (gamma, solver), found in records.groupby(["gamma", "solver"], sort=False):  # pyright: ignore[reportGeneralTypeIssues]
        placed = found["placed"].to_numpy()
        means = {name: float(found[name].mean()) for name in ("placed", "neighbours", "seconds", "moved")}
        cells.append({"gamma": gamma, "solver": solver, **mean_interval(placed, seed)} | means)
    return cells
