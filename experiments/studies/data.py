"""Images of a study in memory, from a folder with `train` and `test`, each with a folder per class.

And the files that a study leaves.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy.stats import bootstrap
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, write_whole
from privlab.evaluation import batches
from privlab.images import Preprocessing, open_images
from privlab.threat import Draws
from privlab.victims import VictimModel


@dataclass(frozen=True, eq=False)
class Images:
    """One split in memory; labels are class indices, or have one column per attribute."""

    pixels: Float[Tensor, "m c h w"]
    labels: Tensor

    def to(self, device: torch.device | str) -> "Images":
        """Return the images on another device."""
        return Images(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class FineTuning:
    """A recipe that fine-tunes a model on images in memory, each mirrored with a probability of one half."""

    model: VictimModel
    identity: str
    images: Images

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images.pixels)

    def batch(self, rows: Tensor, draw: Generator) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        pixels = self.images.pixels[rows]
        chosen = (torch.rand(len(pixels), generator=draw) < 0.5).to(pixels.device)
        return torch.where(chosen[:, None, None, None], pixels.flip(3), pixels), self.images.labels[rows]


def check_folder(images: Path) -> None:
    """Check that a folder holds `train` and `test`.

    Raises:
        PrivlabError: with the part that is missing.
    """
    for part in ("train", "test"):
        if not (images / part).is_dir():
            raise PrivlabError(f"'{images}' must hold the folders train and test. Found no '{part}'.")


def load_split(images: Path, part: str, preprocessing: Preprocessing, attributes: Path | None = None) -> Images:
    """Read one part of a folder; labels are its class folders, or the rows of a CSV file of attributes.

    Args:
        images: a folder with `train` and `test`.
        part: "train" or "test".
        preprocessing: the resizing and cropping of the victim; pixels stay in [0, 1].
        attributes: a CSV file with the column `file` and a column for each attribute, which is 1 where the value is
            positive; without it, labels are the class folders.

    Raises:
        PrivlabError: if an image has no label, or the CSV file lacks the column `file` or an attribute.
    """
    table = None if attributes is None else _attributes(attributes)
    pixels: list[Tensor] = []
    labels: list[object] = []
    for chunk in batches(open_images(images / part), preprocessing, 64):
        pixels.append(chunk.images)
        for image in chunk.named:
            label = image.label if table is None else table.get(Path(image.name).name)
            if label is None:
                raise PrivlabError(f"'{image.name}' in '{images / part}' has no label: put it into a class folder.")
            labels.append(label)
    return Images(torch.cat(pixels), torch.tensor(labels, dtype=torch.long if table is None else torch.float32))


def _attributes(path: Path) -> dict[str, list[float]]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or "file" not in rows[0] or len(rows[0]) < 2:
        raise PrivlabError(f"'{path}' must have the column file, and one column per attribute.")
    return {row["file"]: [float(float(value) > 0) for name, value in row.items() if name != "file"] for row in rows}


def loss_of(logits: Float[Tensor, "b y"], labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of classes, or the mean binary cross-entropy of attributes."""
    if labels.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, labels)
    return F.cross_entropy(logits, labels)


def new_draws(draw: Generator, n: int) -> Draws:
    """Return fresh generators for a batch of n images."""
    seeds = torch.randint(2**62, (n + 1,), generator=draw).tolist()
    made = [Generator().manual_seed(seed) for seed in seeds]
    return Draws(images=made[1:], batch=made[0], model=Generator().manual_seed(0))


def fresh_head(width: int, classes: int, seed: int) -> nn.Linear:
    """Return a linear classifier with small random weights and a bias of zero.

    Args:
        width: number of features of a token, d.
        classes: number of classes or attributes.
        seed: seed of the weights, which are truncated normal with a standard deviation of 0.02.
    """
    head = nn.Linear(width, classes)
    with torch.no_grad():
        nn.init.trunc_normal_(head.weight, std=0.02, generator=Generator().manual_seed(seed))
        head.bias.zero_()
    return head


def write_tables(out: Path, tables: Mapping[str, Sequence[pd.DataFrame]]) -> None:
    """Write `NAME.parquet` to a folder for each table that has parts."""
    for name, parts in tables.items():
        if parts:
            whole = pd.concat(parts, ignore_index=True)
            write_whole(out / f"{name}.parquet", lambda path, whole=whole: whole.to_parquet(path, index=False))


def write_facts(path: Path, facts: Any) -> None:  # noqa: ANN401  # what JSON can hold
    """Write what a study found as JSON."""
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


def mean_interval(values: Float[np.ndarray, " images"], seed: int) -> dict[str, float | None]:
    """Return the ends of the 95 % percentile bootstrap interval of the mean, `low` and `high`; None for a single image.

    Args:
        values: a score of each image.
        seed: seed of the 2000 resamples.
    """
    if len(values) < 2:
        return {"low": None, "high": None}
    options: dict[str, Any] = {"n_resamples": 2000, "method": "percentile", "random_state": np.random.default_rng(seed)}
    ends = bootstrap((values,), np.mean, **options).confidence_interval
    return {"low": float(ends.low), "high": float(ends.high)}
