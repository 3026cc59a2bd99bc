"""How well a classifier copes with unusual images: ImageNet-C (mCE), -A (Acc, AURRA) and -O (AUPR)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from privlab.base import PrivlabError, Progress
from privlab.evaluation import batches
from privlab.experiments.training.classifiers import NamedClassifier
from privlab.images import Data, open_images
from privlab.victims import Victim

ALEXNET: dict[str, float] = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""AlexNet's error on ImageNet-C, mean over the five severities, as its authors publish it (hendrycks/robustness)."""

SEVERITIES = (1, 2, 3, 4, 5)

Classes = Mapping[str, int] | None
"""The label of each class by the name of its folder, where that is known."""


@dataclass(frozen=True)
class Corrupted:
    """The error on one corruption at one severity, over as many images as `images` says."""

    corruption: str
    severity: int
    images: int
    error: float


@dataclass(frozen=True)
class Natural:
    """Accuracy and AURRA on images of `classes` classes; the other classes are left out of the prediction."""

    images: int
    classes: int
    accuracy: float
    aurra: float


@dataclass(frozen=True, eq=False)
class Outputs:
    """Logits of images, and their labels; −1 where there is none."""

    logits: Float[Tensor, "n y"]
    labels: Int[Tensor, " n"]


def aurra(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the area under the curve of accuracy against response rate, in [0, 1].

    It is the accuracy among the k most confident answers, averaged over k = 1 … n. Of answers with equal confidence,
    those that come last count first, as in the authors' code.

    Source: Hendrycks et al., Natural Adversarial Examples (CVPR 2021).
    """
    order = np.argsort(np.asarray(confidence))[::-1]
    hits = np.cumsum(np.asarray(correct, dtype=float)[order])
    return float(np.mean(hits / np.arange(1, len(hits) + 1)))


def aupr(outliers: ArrayLike, inliers: ArrayLike) -> float:
    """Return the average precision with which a score tells outliers (positive: they score higher) from inliers.

    Raises:
        PrivlabError: if scikit-learn is not installed, or there are no outliers or no inliers.
    """
    try:
        from sklearn.metrics import average_precision_score
    except ImportError as error:
        raise PrivlabError("AUPR needs scikit-learn: pip install 'privlab[robustness]'.") from error
    high, low = np.asarray(outliers), np.asarray(inliers)
    if not len(high) or not len(low):
        raise PrivlabError(f"AUPR needs outliers and inliers. Found {len(high)} and {len(low)}.")
    truth = np.concatenate([np.ones(len(high)), np.zeros(len(low))])
    return float(average_precision_score(truth, np.concatenate([high, low])))


def mean_corruption_error(rows: list[Corrupted], baseline: Mapping[str, float]) -> tuple[float, int] | None:
    """Return mCE, the mean over corruptions of Σₛ Eₛ / Σₛ E^baselineₛ, and over how many; None where none counts.

    mCE is 1 for a classifier that is as bad as the baseline. Corruptions that the baseline lacks, or of which one of
    the five severities is missing, do not count.

    Source: Hendrycks and Dietterich, Benchmarking Neural Network Robustness (ICLR 2019), Section 4.1.
    """
    by_name = {name: list(some) for name, some in groupby(rows, key=lambda row: row.corruption)}
    complete = {
        name: sum(row.error for row in some) / len(some)
        for name, some in by_name.items()
        if name in baseline and sorted(row.severity for row in some) == list(SEVERITIES)
    }
    if not complete:
        return None
    return sum(error / baseline[name] for name, error in complete.items()) / len(complete), len(complete)


def corruption_errors(
    victim: Victim | NamedClassifier,
    root: Path,
    *,
    classes: Classes = None,
    limit: int | None = None,
    size: int = 64,
    show: Progress,
) -> list[Corrupted]:
    """Return the top-1 error of a classifier for each corruption and severity, in [0, 1].

    Args:
        victim: the classifier, with its preprocessing.
        root: a folder CORRUPTION/SEVERITY/class folders, as ImageNet-C; severities are 1 to 5.
        classes: the label of each class folder by its name; None for the positions in the sorted folder names.
        limit: the number of images of each corruption and severity, taken from each class in turn; None for all.
        size: the number of images computed at a time.
        show: called with the number of severity folders that are done, and with the number of all.

    Raises:
        PrivlabError: if the folder is not laid out so, or its classes are not the victim's.
    """
    found, folders = [], _severities(root)
    for done, (name, severity, folder) in enumerate(folders):
        show(done, len(folders))
        source = open_images(folder, limit=limit, class_to_index=classes)
        seen = outputs(victim, source, size=size)
        wrong = (seen.logits.argmax(1) != seen.labels).double().mean()
        found.append(Corrupted(name, severity, len(seen.labels), float(wrong)))
    show(len(folders), len(folders))
    return found


def natural(seen: Outputs) -> Natural:
    """Return accuracy and AURRA where only the images' own classes are predicted, as ImageNet-A's 200 of 1,000."""
    present, places = seen.labels.unique(return_inverse=True)
    confidence, answer = seen.logits[:, present].softmax(1).max(1)
    correct = answer == places
    return Natural(
        len(seen.labels), len(present), float(correct.double().mean()), aurra(confidence.numpy(), correct.numpy())
    )


def outlier_aupr(outliers: Outputs, inliers: Outputs) -> float:
    """Return the AUPR of −max softmax over the classes that the outliers' folders name; over all where they name none.

    Inliers of other classes are left out, as ImageNet-O is evaluated.

    Raises:
        PrivlabError: as `aupr` does.
    """
    present, kept = outliers.labels.unique(), torch.ones(len(inliers.labels), dtype=torch.bool)
    if -1 in present:
        present = torch.arange(outliers.logits.shape[1])
    else:
        kept = torch.isin(inliers.labels, present)
    high, low = (-logits[:, present].softmax(1).amax(1) for logits in (outliers.logits, inliers.logits[kept]))
    return aupr(high.numpy(), low.numpy())


@torch.no_grad()
def outputs(
    victim: Victim | NamedClassifier,
    source: Data,
    *,
    labelled: bool = True,
    size: int = 64,
    show: Progress | None = None,
) -> Outputs:
    """Return logits and labels of all images that can be read.

    Args:
        victim: the classifier, with its preprocessing.
        source: the images, read one batch at a time.
        labelled: whether an image without label is an error; otherwise its label is −1.
        size: the number of images computed at a time.
        show: called with the number of images that are done, and with the number of all (None: not known).

    Raises:
        PrivlabError: if there is none, or `labelled` and labels are missing or not the victim's.
    """
    logits, labels, skipped = [], [], list[str]()
    for images, numbers in read_batches(victim, source, skipped, labelled=labelled, size=size):
        logits.append(victim.model(images.to(victim.model.mean)).float().cpu())
        labels.append(numbers)
        if show is not None:
            show(sum(map(len, labels)), source.count)
    return Outputs(torch.cat(logits), torch.cat(labels))


def read_batches(
    victim: Victim | NamedClassifier, source: Data, skipped: list[str], *, labelled: bool = True, size: int = 64
) -> Iterator[tuple[Float[Tensor, "b 3 h w"], Int[Tensor, " b"]]]:
    """Yield batches of preprocessed images in [0, 1], and their labels.

    Args:
        victim: the classifier whose preprocessing and classes these are.
        source: the images, read one batch at a time.
        skipped: a list to which the name of each unreadable image is added, with the reason.
        labelled: whether an image without label, or with one beyond the victim's classes, is an error; otherwise an
            image without label has −1.
        size: the largest number of images in a batch.

    Raises:
        PrivlabError: if none can be read, or `labelled` and labels are missing or not the victim's.
    """
    classes, names = victim.model.classes, source.class_names
    if labelled and names is not None and len(names) != classes:
        raise PrivlabError(
            f"{source.description}: {victim.name} tells {classes} classes apart. Give a folder for each of them."
        )
    count = 0
    for chunk in batches(source, victim.preprocessing, size):
        skipped += [f"{image.name}: {image.problem}" for image in chunk.failed]
        labels = torch.tensor([-1 if p.label is None else p.label for p in chunk.named], dtype=torch.long)
        if labelled and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            wrong = next(p for p in chunk.named if p.label is None or not 0 <= p.label < classes)
            raise PrivlabError(
                f"{wrong.name} has the label {wrong.label}; {victim.name} tells {classes} classes apart "
                f"(labels 0 to {classes - 1})."
            )
        if len(labels):
            yield chunk.images, labels
        count += len(labels)
    if not count:
        reason = f" The first: {skipped[0]}" if skipped else ""
        raise PrivlabError(f"There is nothing to evaluate on in {source.description}: no image can be read.{reason}")


def _severities(root: Path) -> list[tuple[str, int, Path]]:
    """Return (corruption, severity, folder) of a folder laid out as ImageNet-C is."""
    if not root.is_dir():
        raise PrivlabError(f"No folder '{root}'. Give one that holds CORRUPTION/SEVERITY/class folders.")
    found = []
    for corruption in _folders(root):
        for folder in _folders(corruption):
            if folder.name not in map(str, SEVERITIES):
                raise PrivlabError(
                    f"'{corruption}' must hold the severities 1 to 5, folders of class folders. Found '{folder.name}'."
                )
            found.append((corruption.name, int(folder.name), folder))
    if not found:
        raise PrivlabError(f"'{root}' holds no CORRUPTION/SEVERITY folders, such as gaussian_noise/3.")
    return found


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
