"""`privlab evaluate`: the accuracy of trained victims, shuffled and not, and what corruptions cost them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from privlab.base import PrivlabError, check_name, check_range
from privlab.images import ImageSource, open_images
from privlab.images.datasets import imagenet_classes
from privlab.utility import robustness
from privlab.utility.consistency import Batch, worth_by_gamma
from privlab.utility.robustness import ALEXNET, Classes, Outputs, Show
from privlab.victims import Pupil, Victim, classifier

__all__ = ["GAMMAS", "Exam", "judge"]

GAMMAS = (0.0, 0.03, 0.15, 0.27, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class Exam:
    """The models that are judged, and the data; what is None is left out.

    Args:
        models: names of victims.
        weights: one for all of them, or one for each, as `classifier` takes them.
        data: what `open_images` opens, labelled, or by the CSV file `labels`; `split` of it is judged on.
        gammas: shares of the patches that are shuffled in x̃, in [0, 1].
        per: "image" or "batch": what has a mask and an order of its own in x̃, as `worth_by_gamma` has it.
        corruptions: a folder CORRUPTION/SEVERITY/class folders, as ImageNet-C.
        baseline: "alexnet", or a JSON file {corruption: error, mean over the severities}: what mCE divides by.
        natural: a folder of class folders, as ImageNet-A.
        outliers: a folder of images of no class, as ImageNet-O; `data` holds the inliers.
    """

    models: tuple[str, ...]
    weights: tuple[str, ...] = ("auto",)
    data: str | None = None
    split: str | None = "test"
    labels: Path | None = None
    gammas: tuple[float, ...] = GAMMAS
    per: str = "image"
    corruptions: Path | None = None
    baseline: str = "alexnet"
    natural: Path | None = None
    outliers: Path | None = None
    img_size: int | None = None
    limit: int | None = None
    batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for options that do not go together, or are unknown or out of range."""
        check_name("per", self.per, ("batch", "image"))
        if len(self.weights) not in (1, len(self.models)):
            raise PrivlabError(
                f"--weights takes one for all of the {len(self.models)} models, or one for each. "
                f"Found {len(self.weights)}."
            )
        for gamma in self.gammas:
            check_range(0 <= gamma <= 1, "--gamma", "in [0, 1]", gamma)
        if self.data is None and self.outliers is not None:
            raise PrivlabError("--outliers are told from the pictures of --data: give both.")
        if (self.data, self.corruptions, self.natural) == (None, None, None):
            raise PrivlabError("There is nothing to judge on: give --data, --corruptions or --natural.")


def judge(exam: Exam, *, device: str = "cpu", progress: Show | None = None) -> list[dict[str, Any]]:
    """Return a row for each model: its name, its weights, and the scores that were asked for.

    Args:
        exam: the models, and the data that they are judged on.
        device: a device of torch, such as "cpu" or "cuda:0".
        progress: called with the number of images, or of folders, that are done, and with the number of all; None for
            silence.

    Raises:
        PrivlabError: as `classifier`, `open_images` and the metrics do; if the baseline cannot be read.
    """
    baseline = _baseline(exam.baseline)
    weights = exam.weights if len(exam.weights) > 1 else exam.weights * len(exam.models)
    found = []
    for name, of in zip(exam.models, weights, strict=True):
        subject = classifier(name, weights=of, img_size=exam.img_size, seed=exam.seed).to(device)
        found.append(_judged(exam, subject, baseline, progress or _silent))
    return found


def _judged(exam: Exam, subject: Victim | Pupil, baseline: Mapping[str, float], show: Show) -> dict[str, Any]:
    classes = imagenet_classes() if subject.model.classes == 1000 else None
    row: dict[str, Any] = {
        "model": subject.name,
        "weights": subject.weights.origin,
        "weights_sha256": subject.weights.sha256,
        "image": list(subject.model.image_shape),
    }
    if exam.data is not None:
        row |= _on_data(exam, subject, classes, show)
    if exam.corruptions is not None:
        row["corruptions"] = _on_corruptions(exam, exam.corruptions, subject, classes, baseline, show)
    if exam.natural is not None:
        source = open_images(exam.natural, limit=exam.limit, class_to_index=classes)
        seen = robustness.outputs(subject, source, size=exam.batch, show=show)
        row["natural"] = asdict(robustness.natural(seen))
    if exam.outliers is not None:
        row["outliers"] = _on_outliers(exam, exam.outliers, subject, classes, show)
    return row


def _on_data(exam: Exam, subject: Victim | Pupil, classes: Classes, show: Show) -> dict[str, Any]:
    source, skipped = _data(exam, classes), list[str]()
    batches = _counted(exam, subject, source, skipped, show)
    worths = worth_by_gamma(subject.model, batches, exam.gammas, seed=exam.seed, per=exam.per)
    by_gamma = [
        {name: value for name, value in asdict(worth).items() if name not in ("images", "accuracy")} for worth in worths
    ]
    return {"images": worths[0].images, "skipped": skipped, "accuracy": worths[0].accuracy, "by_gamma": by_gamma}


def _counted(
    exam: Exam, subject: Victim | Pupil, source: ImageSource, skipped: list[str], show: Show
) -> Iterator[Batch]:
    """Yield the batches with the places of their images."""
    count = 0
    for images, labels in robustness.read_batches(subject, source, skipped, size=exam.batch):
        yield torch.arange(count, count + len(labels)), images, labels
        count += len(labels)
        show(count, source.count)


def _on_corruptions(
    exam: Exam, root: Path, subject: Victim | Pupil, classes: Classes, baseline: Mapping[str, float], show: Show
) -> dict[str, Any]:
    """Return errors by corruption and severity; mCE against AlexNet is for ImageNet's 1,000 classes alone."""
    rows = robustness.corruption_errors(subject, root, classes=classes, limit=exam.limit, size=exam.batch, show=show)
    fair = exam.baseline != "alexnet" or classes is not None
    mce = robustness.mean_corruption_error(rows, baseline) if fair else None
    return {
        "mean_error": sum(row.error for row in rows) / len(rows),
        "mce": None if mce is None else mce[0],
        "mce_over": 0 if mce is None else mce[1],
        "errors": [asdict(row) for row in rows],
    }


def _on_outliers(exam: Exam, root: Path, subject: Victim | Pupil, classes: Classes, show: Show) -> dict[str, Any]:
    source = open_images(root, limit=exam.limit, class_to_index=classes)
    high = robustness.outputs(subject, source, labelled=False, size=exam.batch, show=show)
    if source.class_names is None or len(source.class_names) != subject.model.classes:
        high = Outputs(high.logits, torch.full_like(high.labels, -1))  # its folders are not named after our classes
    low = robustness.outputs(subject, _data(exam, classes), size=exam.batch, show=show)
    return {"images": len(high.labels), "aupr": robustness.outlier_aupr(high, low)}


def _data(exam: Exam, classes: Classes) -> ImageSource:
    assert exam.data is not None
    return open_images(exam.data, split=exam.split, limit=exam.limit, labels=exam.labels, class_to_index=classes)


def _baseline(name: str) -> Mapping[str, float]:
    """Return the errors that mCE divides by."""
    if name == "alexnet":
        return ALEXNET
    try:
        read = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PrivlabError(f"--baseline must be alexnet or a JSON file. '{name}' cannot be read: {error}.") from error
    if not isinstance(read, dict) or not all(isinstance(value, (int, float)) and value > 0 for value in read.values()):
        raise PrivlabError(f"'{name}' must hold an object of positive errors by corruption, such as {{\"fog\": 0.82}}.")
    return read


def _silent(done: int, total: int | None) -> None:
    """Show nothing."""
