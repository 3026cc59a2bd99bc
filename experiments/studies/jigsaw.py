"""`privlab study jigsaw`: the jigsaw protocols of other papers, their figures next to those of our solvers."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.base import PrivlabError, check_name, check_range, draw_for, versions, write_whole
from privlab.evaluation import Batch, batches
from privlab.experiments.methods.border_odds import border_odds
from privlab.experiments.methods.exact_order import MOST_SLOTS, arrange_exactly
from privlab.experiments.methods.slot_law import SlotLaw, fit_slots
from privlab.experiments.studies.data import mean_interval, write_facts
from privlab.experiments.studies.jigsaw_protocols import PROTOCOLS, Protocol, protocol
from privlab.experiments.studies.jigsaw_published import Published, published_for
from privlab.images import Others, Preprocessing, open_images
from privlab.metrics import adjacent_share
from privlab.reassembly import FLOOR, assemble
from privlab.reassembly.border_costs import border_costs

RECORDS, FACTS = "jigsaw.parquet", "facts.json"

SLOT_WEIGHT = 0.5
"""Weight of −log p(slot | piece) next to the odds of borders; chosen on photographs."""

BATCH = 50
"""Number of images that are read at once."""

Say = Callable[[str], None]


SOLVERS = ("border", "odds", "odds+slots")
"""`border` is what attacks use; `odds` normalises its costs by piece; `odds+slots` adds what public images tell."""


@dataclass(frozen=True, kw_only=True)
class JigsawStudy:
    """Which photographs are cut, how, and who puts them together.

    Args:
        images: what `open_images` opens, with `split`, `limit`, `every` and `offset`.
        public: photographs of the adversary, for `odds+slots`; those that are among `images` are left out.
        public_limit: the most public photographs.
        protocols: names of `PROTOCOLS`, or as `protocol` reads them.
        missing: numbers of pieces that are taken away; each is measured.
        known: number of pieces whose slot is known.
        noise: standard deviation of Gaussian noise on the pieces; it is known to the adversary.
        solvers: names of `SOLVERS`.
        seed: seed of the draws, which are keyed by image.

    Raises:
        PrivlabError: for unknown names, numbers out of range, or no public photographs where they are needed.
    """

    images: str
    split: str | None = None
    limit: int | None = None
    every: int | None = None
    offset: int | None = None
    public: str | None = None
    public_limit: int = 200
    protocols: tuple[str, ...] = tuple(PROTOCOLS)
    missing: tuple[int, ...] = (0,)
    known: int = 0
    noise: float = 0.0
    solvers: tuple[str, ...] = SOLVERS
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the names and numbers."""
        for name in self.solvers:
            check_name("solver", name, SOLVERS)
        check_range(0 <= self.noise < math.inf, "noise", "0 or more", self.noise)
        check_range(self.known >= 0, "known pieces", "0 or more", self.known)
        for cut in self.cuts:
            for missing in self.missing:
                left = cut.slots - self.known - missing
                if missing < 0 or left < 2:
                    raise PrivlabError(
                        f"Two or more pieces of {cut.slots} must be left to place in {cut.name}. Found {missing} "
                        f"missing and {self.known} known."
                    )
        if "odds+slots" in self.solvers and self.public is None:
            raise PrivlabError("odds+slots learns from public photographs: give --public, or --solvers border,odds.")

    @property
    def cuts(self) -> tuple[Protocol, ...]:
        """Return the protocols."""
        return tuple(protocol(name) for name in self.protocols)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """What an adversary is given of one image: pieces in the slots of a canvas, some known, some missing.

    A missing piece is black, and where it stands on the canvas says nothing. `sent` is the truth: the slot that each
    piece belongs in.
    """

    pieces: Float[Tensor, "n c p p"]
    present: Bool[Tensor, " n"]
    known: Bool[Tensor, " n"]
    sent: Int[Tensor, " n"]


def study(plan: JigsawStudy, out: Path, *, say: Say = print) -> dict[str, Any]:
    """Write `jigsaw.parquet`, a row for each image, protocol, number of missing pieces and solver, and `facts.json`.

    `placed` is the share of the present pieces of unknown place that are put into their slot, `neighbours` the share of
    the pairs of present neighbours that are put beside each other in the same direction, and `solved` whether all
    pieces are in their slots. `error` is the mean squared error over the slots whose piece is present; an empty slot is
    shown grey.

    Args:
        plan: the photographs, protocols and solvers.
        out: folder of the two files.
        say: is called with a line for each image that cannot be read.

    Returns:
        The facts: means by protocol, missing pieces and solver, and published figures for the same protocols.

    Raises:
        PrivlabError: as `open_images` does; if no image can be read, or no public one is left.
    """
    tables = [_measure_protocol(plan, cut, say) for cut in plan.cuts]
    records = pd.concat(tables, ignore_index=True)
    write_whole(out / RECORDS, lambda path: records.to_parquet(path, index=False))
    facts = {
        "images": int(records.image.nunique()),
        "public": plan.public_limit if plan.public is not None else 0,
        "known": plan.known,
        "noise": plan.noise,
        "seed": plan.seed,
        "protocols": {cut.name: asdict(cut) for cut in plan.cuts},
        "cells": _means(records, plan.seed),
        "published": [asdict(row) for row in _published(plan)],
        "versions": versions(),
    }
    write_facts(out / FACTS, facts)
    return facts


def to_rows(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each protocol, number of missing pieces and solver, published ones last, as text."""
    rows = []
    for cell in facts["cells"]:
        interval = "" if cell["low"] is None else f" [{100 * cell['low']:.1f}, {100 * cell['high']:.1f}]"
        rows.append(
            {
                "protocol": cell["protocol"],
                "missing": str(cell["missing"]),
                "solver": cell["solver"],
                "placed %": f"{100 * cell['placed']:.1f}{interval}",
                "neighbours %": f"{100 * cell['neighbours']:.1f}",
                "solved %": f"{100 * cell['solved']:.1f}",
                "PSNR of the mean error": "exact" if cell["psnr"] is None else f"{cell['psnr']:.1f} dB",
                "ms": f"{1000 * cell['seconds']:.0f}",
            }
        )
    for row in facts["published"]:
        solved = "—" if row["solved"] is None else f"{row['solved']:.1f}"
        known = f", {row['known']} known" if row["known"] else ""
        rows.append(
            {
                "protocol": row["protocol"],
                "missing": str(row["missing"]),
                "solver": f"{row['method']}, theirs{known}",
                "placed %": f"{row['placed']:.1f}",
                "neighbours %": "—",
                "solved %": solved,
                "PSNR of the mean error": "—",
                "ms": "—",
            }
        )
    return rows


def _published(plan: JigsawStudy) -> list[Published]:
    return [row for row in published_for(plan.protocols) if row.missing in plan.missing and row.known == plan.known]


def _measure_protocol(plan: JigsawStudy, cut: Protocol, say: Say) -> pd.DataFrame:
    source = open_images(plan.images, limit=plan.limit, every=plan.every, offset=plan.offset, split=plan.split)
    preprocessing = Preprocessing((cut.side, cut.side), (0.0,) * 3, (1.0,) * 3, 1.0, "bicubic")
    chunks = []
    for chunk in batches(source, preprocessing, BATCH):
        for image in chunk.failed:
            say(f"Left out: {image.problem}")
        chunks.append(chunk)
    named = [image for chunk in chunks for image in chunk.named]
    if not named:
        raise PrivlabError(f"None of the images of {plan.images} can be read.")
    law = _learn(plan, cut, preprocessing, chunks) if "odds+slots" in plan.solvers else None
    rows = []
    for chunk in chunks:
        rows += [row for missing in plan.missing for row in _measure(plan, cut, chunk, missing, law)]
    return pd.DataFrame(rows)


def _learn(plan: JigsawStudy, cut: Protocol, preprocessing: Preprocessing, private: Sequence[Batch]) -> SlotLaw:
    """Return the law of slots from the public photographs that show none of the private ones."""
    assert plan.public is not None
    found = []
    for chunk in batches(open_images(plan.public, limit=plan.public_limit), preprocessing, BATCH):
        public = Others({image.sha256: pixels for image, pixels in zip(chunk.named, chunk.images, strict=True)})
        left = {*public.images}
        for given in private:
            left &= {*public.without([image.sha256 for image in given.named], given.images)}
        own = torch.tensor([image.sha256 in left for image in chunk.named], dtype=torch.bool)
        found.append(cut.cut(chunk.images[own]))
    if not sum(map(len, found)):
        raise PrivlabError(f"No image of {plan.public} is public: all are among {plan.images}, or cannot be read.")
    return fit_slots(torch.cat(found))


def shuffle(plan: JigsawStudy, pieces: Float[Tensor, "n c p p"], missing: int, sha256: str, name: str) -> Shuffled:
    """Return the canvas of an image: some pieces taken away, some known, the others in a random order.

    Args:
        plan: the number of known pieces, the noise and the seed.
        pieces: the pieces of the image in their slots.
        missing: number of pieces taken away.
        sha256: hash of the image, which its draws are keyed by.
        name: the protocol.
    """
    draw, n = draw_for(plan.seed, sha256, f"jigsaw/{name}/{missing}/{plan.known}"), len(pieces)
    chosen = torch.randperm(n, generator=draw)
    loose = chosen[plan.known :].sort().values
    sent = torch.arange(n)
    sent[loose] = loose[torch.randperm(len(loose), generator=draw)]
    gone = torch.zeros(n, dtype=torch.bool)
    gone[chosen[n - missing :]] = True
    present, known = ~gone[sent], torch.zeros(n, dtype=torch.bool)
    known[chosen[: plan.known]] = True
    seen = pieces[sent]
    if plan.noise:
        seen = (seen + plan.noise * torch.randn(seen.shape, generator=draw)).clamp(0, 1)
    return Shuffled(torch.where(present[:, None, None, None], seen, 0), present, known, sent)


def solve(
    name: str,
    pieces: Float[Tensor, "n c p p"],
    present: Bool[Tensor, " n"],
    known: Bool[Tensor, " n"],
    *,
    noise: float = 0.0,
    law: SlotLaw | None = None,
) -> Int[Tensor, " n"]:
    """Return the order of the pieces: slot s is given piece `order[s]`, and stays empty if that is not present.

    Args:
        name: one of `SOLVERS`.
        pieces: the pieces as they were found, those that are missing black.
        present: marks the pieces that are there.
        known: marks the pieces that stand in their own slots.
        noise: standard deviation of the noise on a pixel.
        law: what public photographs tell, for `odds+slots`.
    """
    side = round(len(pieces) ** 0.5)
    costs = border_costs(pieces, floor=FLOOR + noise**2)
    if name == "border":
        both = present[:, None] & present
        chance = costs[:, both & ~torch.eye(len(pieces), dtype=torch.bool)].mean()
        return assemble(torch.where(both, costs, chance), (side, side), known)
    odds = border_odds(costs, present)
    places = SLOT_WEIGHT * law.costs(pieces, present) if name == "odds+slots" and law is not None else None
    find = arrange_exactly if len(pieces) <= MOST_SLOTS else assemble
    return find(odds, (side, side), known, places=places)


def _measure(plan: JigsawStudy, cut: Protocol, chunk: Batch, missing: int, law: SlotLaw | None) -> list[dict[str, Any]]:
    """Return the records of some images with some pieces missing."""
    rows = []
    for image, pieces in zip(chunk.named, cut.cut(chunk.images), strict=True):
        given = shuffle(plan, pieces, missing, image.sha256, cut.name)
        for name in plan.solvers:
            start = time.perf_counter()
            order = solve(name, given.pieces, given.present, given.known, noise=plan.noise, law=law)
            seconds = time.perf_counter() - start
            about = {"image": image.sha256, "protocol": cut.name, "missing": missing, "solver": name}
            rows.append(about | {"seconds": seconds} | score(pieces, given, order, cut.grid))
    return rows


def score(
    pieces: Float[Tensor, "n c p p"], given: Shuffled, order: Int[Tensor, " n"], grid: int
) -> dict[str, float | bool]:
    """Return the scores of an arrangement, as `study` describes them.

    Args:
        pieces: the pieces in their slots.
        given: what the solver was given, with the truth.
        order: the piece in each slot.
        grid: pieces a side.
    """
    n, slots = len(order), torch.arange(len(order))
    there = given.present[order]
    held = torch.where(there, given.sent[order], -1)
    own, wanted = held == slots, given.present & ~given.known
    belongs = torch.zeros(n, dtype=torch.bool)
    belongs[given.sent[given.present]] = True
    square, all_pairs = belongs.view(grid, grid), 2 * grid * (grid - 1)
    pairs = int((square[:, 1:] & square[:, :-1]).sum() + (square[1:] & square[:-1]).sum())
    found = float(adjacent_share(held[None], torch.ones(1, n, dtype=torch.bool), (grid, grid))[0]) * all_pairs
    shown = torch.where(there[:, None, None, None], given.pieces[order], 0.5)
    error = (shown - pieces).square()[belongs].double().mean()
    return {
        "placed": float((own & ~given.known).sum() / wanted.sum()),
        "neighbours": found / pairs if pairs else math.nan,
        "solved": bool(own.sum() == given.present.sum()),
        "error": float(error),
    }


def _means(records: pd.DataFrame, seed: int) -> list[dict[str, Any]]:
    """Return the means by protocol, missing pieces and solver, and the 95 % bootstrap interval of the share placed."""
    cells: list[dict[str, Any]] = []
    for (name, missing, solver), found in records.groupby(["protocol", "missing", "solver"], sort=False):  # pyright: ignore[reportGeneralTypeIssues]
        error = float(found["error"].mean())
        means = {score: float(found[score].mean()) for score in ("placed", "neighbours", "solved", "seconds")}
        about = {"protocol": name, "missing": int(str(missing)), "solver": solver, "images": len(found)}
        psnr = {"psnr": None if error == 0 else -10 * math.log10(error)}
        cells.append(about | mean_interval(found["placed"].to_numpy(), seed) | means | psnr)
    return cells
