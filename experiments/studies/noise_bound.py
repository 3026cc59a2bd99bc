"""`privlab study noise-bound`: what attacks on noisy gradients achieve, beside the bound that none may cross.

A success is a reconstruction of at least a stated PSNR. The prior is uniform over the photographs of the run, which the
adversary of the bound has: it only has to tell which of them was used. To show how near the bound is, that game is also
played by the attack that plays it best (`identified`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import PrivlabError, draw_for, full_precision, write_whole
from privlab.evaluation import Case, batches, labelled, source_of
from privlab.experiments.methods.reconstruction_bound import fixed_guess, gram, identify, success_bound
from privlab.grids import specify
from privlab.release import released_gradients, released_parameters
from privlab.report.intervals import clopper_pearson
from privlab.stores import RunDirectory
from privlab.threat import Feed
from privlab.victims import Victim, victim

DEFENSE = "gradient-noise"
GAMES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Multipliers at which the identification game is always played; the bound there is neither κ nor one."""


@dataclass(frozen=True, kw_only=True)
class BoundStudy:
    """A run of `gradient-noise`, with its victim and its photographs.

    `psnr` is the least PSNR of a success, in dB; `draws` is how often the identification game is played for each
    photograph.
    """

    run: Path
    images: str
    model: str
    weights: str = "auto"
    img_size: int | None = None
    labels: str | None = None
    limit: int | None = None
    psnr: float = 20.0
    draws: int = 200
    seed: int = 0


def study(plan: BoundStudy, out: Path, *, say: Callable[[str], object] = print) -> dict[str, Any]:
    """Write `facts.json` with the prior, the norms of the gradients, and all shares beside their bounds; return it.

    The gradients of all photographs, over all released parameters, are in memory at once.

    Args:
        plan: the run, its victim and its photographs.
        out: folder of `facts.json`.
        say: is called with a line before the long part.

    Raises:
        PrivlabError: if the run has no scores of `gradient-noise` alone, or is not of these photographs.
    """
    rows = _rows(plan)
    spec = specify(
        model=(plan.model,), images=(plan.images,), weights=plan.weights, limit=plan.limit, labels=plan.labels
    )
    base = victim(plan.model, weights=plan.weights, img_size=plan.img_size)
    say("computing the gradients of all photographs")
    images, products, hashes = _photographs(spec, base)
    if set(rows.image_sha256) != hashes or set(rows.weights_sha256) != {base.weights.sha256}:
        raise PrivlabError(
            f"The run '{plan.run}' is not of these photographs and weights: of its "
            f"{rows.image_sha256.nunique()} photographs {len(hashes & set(rows.image_sha256))} are among the "
            f"{len(hashes)} given. Give those that it was run on, all of them."
        )
    κ, norms = fixed_guess(images, plan.psnr), products.diagonal().sqrt()
    noises = sorted({*_noises(rows), *((float(rows["clip"].iloc[0]), σ, 1) for σ in GAMES)})
    facts = {
        "run": str(plan.run),
        "model": plan.model,
        "photographs": len(images),
        "psnr": plan.psnr,
        "prior": κ,
        "norm": {"mean": float(norms.mean()), "least": float(norms.min()), "greatest": float(norms.max())},
        "attacks": [_share(plan, of, κ) for _, of in rows.groupby(["multiplier", "releases", "clip", "attack"])],
        "games": [_game(plan, products, *noise) for noise in noises],
    }
    write_whole(out / "facts.json", lambda path: path.write_text(json.dumps(facts, indent=1), encoding="utf-8"))
    return facts


def _rows(plan: BoundStudy) -> pd.DataFrame:
    """Return the scores of attacks on `gradient-noise` alone, with its options as columns."""
    rows = RunDirectory(plan.run).store.frame()
    sound = (rows.defense == DEFENSE) & (rows.status == "ok") & (rows.geometry == "in_place") & rows.psnr.notna()
    single = rows.batch_images.isna() | (rows.batch_images == 1)
    rows = rows.loc[sound & single & ~rows.attack.str.startswith("control:")]
    if rows.empty:
        raise PrivlabError(f"The run '{plan.run}' has no scores (psnr) of attacks on {DEFENSE} alone.")
    options = rows.defense_params.map(json.loads)
    named = {name: options.map(lambda each, name=name: each[name]) for name in ("clip", "multiplier", "releases")}
    return rows.assign(**named)


def _photographs(spec: Case, base: Victim) -> tuple[Float[Tensor, "m c h w"], Float[Tensor, "m m"], set[str]]:
    """Return the photographs as they are fed, the products of their gradients before clipping, and their hashes."""
    names, images, hashes = released_parameters(base.model), [], set[str]()
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    for chunk in batches(source_of(spec, [base]), base.preprocessing, 8):
        batch = labelled(chunk, base.model, predicted=spec.data.labels == "predicted")
        feed = Feed.undefended(batch.images, base.model.patch)
        with full_precision():
            for name, g in released_gradients(base.model, feed, batch.labels, names).items():
                gradients[name].append(g)
        images.append(batch.images)
        hashes |= {image.sha256 for image in batch.named}
    return torch.cat(images), gram({name: torch.cat(each) for name, each in gradients.items()}), hashes


def _noises(rows: pd.DataFrame) -> list[tuple[float, float, int]]:
    found = rows[["clip", "multiplier", "releases"]].drop_duplicates().itertuples(index=False)
    return [(float(clip), float(σ), int(T)) for clip, σ, T in found if σ > 0]


def _share(plan: BoundStudy, of: pd.DataFrame, κ: float) -> dict[str, Any]:
    """Return how often an attack succeeded at one noise, beside the bound."""
    first, hits = of.iloc[0], int((of.psnr >= plan.psnr).sum())
    noise = {"multiplier": float(first.multiplier), "releases": int(first.releases), "clip": float(first["clip"])}
    bound = success_bound(κ, noise["multiplier"], int(noise["releases"]))
    mean = {"attack": str(first.attack), "psnr_mean": float(of.psnr.mean())}
    return {**noise, **mean, **_proportion(hits, len(of)), "bound": bound}


def _game(plan: BoundStudy, products: Tensor, clip: float, multiplier: float, releases: int) -> dict[str, Any]:
    """Return how often the best attack identifies the photograph, beside the bound."""
    m = len(products)
    scale = (clip / products.diagonal().sqrt()).clamp(max=1)
    clipped = scale[:, None] * products * scale / clip**2
    draw: Generator = draw_for(plan.seed, f"{multiplier:g}/{releases}", "identification", 0)
    found = identify(clipped, multiplier / releases**0.5, plan.draws, draw)
    hits = int((found == torch.arange(m)[:, None]).sum())
    noise = {"multiplier": multiplier, "releases": releases, "clip": clip}
    return {**noise, **_proportion(hits, m * plan.draws), "bound": success_bound(1 / m, multiplier, releases)}


def _proportion(hits: int, trials: int) -> dict[str, Any]:
    low, high = clopper_pearson(hits, trials)
    return {"hits": hits, "trials": trials, "share": hits / trials, "low": low, "high": high}


def to_markdown(facts: Mapping[str, Any]) -> str:
    """Return a table with the shares of the attacks and of the identification game for each noise, and the bounds."""
    norm = facts["norm"]
    lines = [
        f"{facts['photographs']} photographs; norm of the gradient over all parameters before clipping: mean "
        f"{norm['mean']:.3g}, {norm['least']:.3g} to {norm['greatest']:.3g}; prior κ({facts['psnr']:g} dB) = "
        f"{facts['prior']:.3g}",
        "",
        f"| multiplier | releases | attack | share with PSNR ≥ {facts['psnr']:g} dB | bound |",
        "|---|---|---|---|---|",
    ]
    attacks = [(row, row["attack"]) for row in facts["attacks"]]
    for row, name in (*attacks, *((row, "identification, of all") for row in facts["games"])):
        share = f"{row['share']:.3f} [{row['low']:.3f}, {row['high']:.3f}], {row['hits']} of {row['trials']}"
        lines.append(f"| {row['multiplier']:g} | {row['releases']} | {name} | {share} | {row['bound']:.3f} |")
    return "\n".join(lines)
