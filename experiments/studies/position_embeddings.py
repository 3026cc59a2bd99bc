"""`privlab study pe`: what position embeddings reveal (MJP, Section 3, Figures 1, 4, 7 and 8, Tables 6 and 8)."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from privlab.base import PrivlabError, write_whole
from privlab.evaluation import batch_of
from privlab.experiments.studies.data import write_facts, write_tables
from privlab.images import open_images
from privlab.victims import Victim, VictimModel, victim

DIMENSIONS = (3, 4, 5, 6, 7)
PUBLISHED_VARIANCE: dict[str, tuple[float, ...]] = {
    "DeiT-S": (54.61, 68.55, 77.95, 85.54, 90.74),
    "DeiT-S + MJP": (46.74, 58.36, 69.10, 78.13, 84.55),
}
"""Explained variance in % by 3 to 7 dimensions, as printed in Table 6."""

PUBLISHED_MAE: dict[str, tuple[float, float]] = {
    "DeiT-S": (0.945, 0.076),
    "DeiT-S + MJP (DAL - LN)": (0.566, 0.042),
    "DeiT-S + MJP (DAL - NLN)": (1.301, 0.134),
}
"""Mean absolute error of the position in 1-D and in 2-D, as printed in Table 8."""

FACTS = "facts.json"

Matrix = NDArray[np.float64]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PositionStudy:
    """Which position embeddings are examined.

    Args:
        models: names of victims.
        weights: one for all of them, or one for each.
        images: what `open_images` opens, for attention maps; without it there are none.
        limit: the largest number of images.
        umap: whether to project by UMAP, if umap-learn is installed.
    """

    models: tuple[str, ...]
    weights: tuple[str, ...] = ("auto",)
    images: str | None = None
    limit: int = 3
    img_size: int | None = None
    umap: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if the weights do not go with the models."""
        if len(self.weights) not in (1, len(self.models)):
            raise PrivlabError(
                f"--weights takes one for all of the {len(self.models)} models, or one for each. "
                f"Found {len(self.weights)}."
            )


def study(plan: PositionStudy, out: Path, *, say: Say = print) -> list[dict[str, Any]]:
    """Write `facts.json`, `spectrum.parquet`, `points.parquet`, `similarity.parquet` and `attention.parquet` to `out`.

    Return the facts: one entry for each model. The tables hold its position in `facts.json` as `model`.

    Args:
        plan: the models, and the images for their attention maps.
        out: folder of the files, and of the PNGs of the images in `images/`.
        say: is called with a line for each model that gets no UMAP.

    Raises:
        PrivlabError: as `victim` and `open_images` do; if a model has no position embeddings.
    """
    weights = plan.weights if len(plan.weights) > 1 else plan.weights * len(plan.models)
    facts, tables = [], {"spectrum": [], "points": [], "similarity": [], "attention": []}
    for number, (name, of) in enumerate(zip(plan.models, weights, strict=True)):
        subject = victim(name, weights=of, img_size=plan.img_size, seed=plan.seed)
        embeddings = _embeddings(subject)
        about, spectrum, points = _examine(plan, subject, embeddings, say)
        facts.append(about)
        tables["spectrum"].append(spectrum.assign(model=number))
        tables["points"].append(points.assign(model=number))
        tables["similarity"].append(_similarity(embeddings).assign(model=number))
        if plan.images is not None:
            tables["attention"].append(_attention(plan, subject, plan.images, out).assign(model=number))
    write_tables(out, tables)
    write_facts(out / FACTS, facts)
    return facts


def to_rows(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return Tables 6 and 8 as text, the numbers printed in the paper below the measured ones."""
    rows = []
    for about in facts:
        mae = about["position_mae"]
        errors = (f"{mae['1d']:.3f} ± {mae['1d_std']:.3f}", f"{mae['2d']:.3f} ± {mae['2d_std']:.3f}")
        shares = [100 * share for share in about["explained_variance"].values()]
        rows.append(_row(f"{about['model']} ({about['weights']})", shares, errors))
    rows += [_row(f"{name}, as printed", shares, ("", "")) for name, shares in PUBLISHED_VARIANCE.items()]
    printed = {name: (f"{one}", f"{two}") for name, (one, two) in PUBLISHED_MAE.items()}
    return rows + [_row(f"{name}, as printed", (), errors) for name, errors in printed.items()]


def _row(name: str, shares: Sequence[float], errors: tuple[str, str]) -> dict[str, str]:
    variance = {f"{n} dim. %": f"{share:.2f}" for n, share in zip(DIMENSIONS, shares, strict=False)}
    blank = {f"{n} dim. %": "" for n in DIMENSIONS}
    return {"position embeddings": name} | blank | variance | {"1-D MAE": errors[0], "2-D MAE": errors[1]}


def _embeddings(subject: Victim) -> Matrix:
    """Return the position embeddings of the patches, row by row; that of the class token is left out."""
    table = subject.model.vit.pos_embed
    if table is None:
        raise PrivlabError(f"{subject.name} has no position embeddings to look at.")
    rows, columns = subject.model.grid
    return table.detach()[0, -rows * columns :].cpu().double().numpy()


def _examine(
    plan: PositionStudy, subject: Victim, embeddings: Matrix, say: Say
) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Return the facts on one model, its spectrum and its points."""
    values, coordinates = principal(embeddings)
    share, energy = np.cumsum(values**2) / (values**2).sum(), np.cumsum(values) / values.sum()
    grid = subject.model.grid
    row, column = np.divmod(np.arange(len(embeddings)), grid[1])
    points = pd.DataFrame({"slot": np.arange(len(embeddings)), "row": row, "column": column})
    for axis in range(3):
        points[f"pca_{axis + 1}"] = coordinates[:, axis]
    plane = umap_plane(embeddings, plan.seed) if plan.umap else None
    if plane is None:
        say(f"{subject.name}: no UMAP" + ("." if not plan.umap else ": pip install 'privlab[study]' for it."))
    else:
        points["umap_1"], points["umap_2"] = plane[:, 0], plane[:, 1]
    spectrum = {"index": np.arange(1, len(values) + 1), "singular_value": values, "accumulated": energy}
    about = {
        "model": subject.name,
        "weights": subject.weights.origin,
        "weights_sha256": subject.weights.sha256,
        "grid": list(grid),
        "width": embeddings.shape[1],
        "explained_variance": {str(n): float(share[n - 1]) for n in DIMENSIONS if n <= len(share)},
        "position_mae": position_errors(embeddings, grid, seed=plan.seed),
        "umap": plane is not None,
    }
    return about, pd.DataFrame(spectrum | {"explained": share}), points


def principal(embeddings: Matrix) -> tuple[Matrix, Matrix]:
    """Return the singular values of the centred embeddings, and their coordinates on the principal axes.

    The first n axes explain Σ_{i ≤ n} σᵢ² / Σ σᵢ² of the variance (MJP, Definition 1).
    """
    u, values, _ = np.linalg.svd(embeddings - embeddings.mean(0), full_matrices=False)
    return values, u * values


def position_errors(
    embeddings: Matrix, grid: tuple[int, int], *, folds: int = 5, repeats: int = 10, seed: int = 0
) -> dict[str, float]:
    """Return the mean absolute error, in slots, of positions by linear regression on the embeddings of other slots.

    In 1-D the position is the slot's number, in 2-D its row and column, over whose errors the mean is taken too. Each
    of `repeats` random partitions into `folds` predicts every slot once; `_std` is the standard deviation over the
    partitions. With more dimensions than slots, least squares takes the smallest solution.

    Args:
        embeddings: position embeddings of the patches, n × d, row by row of the grid.
        grid: number of patches down and across, whose product is n.
        folds: number of parts of a partition; each is predicted from the others, ≥ 2.
        repeats: number of random partitions, ≥ 1.
        seed: seed of the partitions.

    Source: MJP (CVPR 2023), Appendix C.1, Table 8.
    """
    slots = np.arange(len(embeddings))
    plane = np.stack(np.divmod(slots, grid[1]), 1)
    rng = np.random.default_rng(seed)
    found: dict[str, list[float]] = {"1d": [], "2d": []}
    for _ in range(repeats):
        parts = np.array_split(rng.permutation(slots), folds)
        for name, target in (("1d", slots[:, None]), ("2d", plane)):
            errors = [_error(embeddings, target.astype(float), part) for part in parts]
            found[name].append(float(np.concatenate(errors).mean()))
    return {f"{name}{kind}": float(of(some)) for name, some in found.items() for kind, of in _MOMENTS.items()}


_MOMENTS: dict[str, Callable[[list[float]], np.floating[Any]]] = {"": np.mean, "_std": np.std}


def _error(x: Matrix, y: Matrix, held_out: NDArray[np.int64]) -> Matrix:
    """Return |y − ŷ| at the rows held out, ŷ by least squares with an intercept on the others."""
    others = np.setdiff1d(np.arange(len(x)), held_out)
    middle, level = x[others].mean(0), y[others].mean(0)
    weights = np.linalg.lstsq(x[others] - middle, y[others] - level, rcond=None)[0]
    return np.abs(y[held_out] - level - (x[held_out] - middle) @ weights)


def umap_plane(embeddings: Matrix, seed: int = 0) -> Matrix | None:
    """Return the 2-D UMAP projection with 15 neighbours; None if umap-learn is not installed."""
    if importlib.util.find_spec("umap") is None:
        return None
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it misses TensorFlow, and that a seed means one thread
        from umap import UMAP

        made = UMAP(n_components=2, random_state=seed, n_jobs=1).fit_transform(embeddings)
    return np.asarray(made, dtype=float)


def cosines(embeddings: Matrix) -> Matrix:
    """Return the cosine similarity of all pairs of embeddings."""
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), np.finfo(float).tiny)
    return unit @ unit.T


def _similarity(embeddings: Matrix) -> pd.DataFrame:
    matrix = cosines(embeddings)
    slot, other = np.divmod(np.arange(matrix.size), len(matrix))
    return pd.DataFrame({"slot": slot, "other": other, "cosine": matrix.ravel().astype(np.float32)})


@torch.no_grad()
def last_attention(model: VictimModel, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b heads n"]:
    """Return the attention of the class token to the patches in the last block, by head (MJP, Figure 8).

    Without a class token, the mean over the patches that attend. The attention to the class token is left out: a row
    sums to at most 1.
    """
    vit, (rows, columns) = model.vit, model.grid
    x = vit.norm_pre(model.embed(images))
    for block in vit.blocks[:-1]:
        x = block(x)
    seen = attention_weights(vit.blocks[-1], x)[..., -rows * columns :]
    return seen[:, :, 0] if vit.cls_token is not None else seen.mean(2)


def attention_weights(block: Any, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b heads t t"]:  # noqa: ANN401
    """Return the attention of each token to each token in a block of timm, given the block's input; rows sum to 1."""
    attention = block.attn
    q, k, _ = attention.qkv(block.norm1(x)).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (attention.q_norm(q) * attention.scale @ attention.k_norm(k).mT).softmax(-1)


def _attention(plan: PositionStudy, subject: Victim, images: str, out: Path) -> pd.DataFrame:
    """Return the attention to each slot; `image` names the file in `out` with the image that was fed."""
    chunk = batch_of(open_images(images, limit=plan.limit), subject.preprocessing)
    if not chunk.named:
        raise PrivlabError(f"No image of {images} can be read: {chunk.failed[0].problem}.")
    maps = last_attention(subject.model, chunk.images.to(subject.model.mean)).cpu().double().numpy()
    heads, slots = maps.shape[1:]
    names = [f"images/{subject.name.replace(':', '-')}_{number + 1}.png" for number in range(len(maps))]
    for name, fed in zip(names, chunk.images, strict=True):
        write_whole(out / name, lambda path, fed=fed: to_pil_image(fed).save(path, format="PNG"))
    parts = [
        pd.DataFrame(
            {
                "image": image.name,
                "picture": name,
                "head": np.repeat(np.arange(heads), slots),
                "slot": np.tile(np.arange(slots), heads),
                "weight": one.ravel(),
            }
        )
        for image, name, one in zip(chunk.named, names, maps, strict=True)
    ]
    return pd.concat(parts, ignore_index=True)
