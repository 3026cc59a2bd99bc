"""`privlab evaluate`: the accuracy of trained victims, shuffled and not, and what corruptions cost them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from privlab.base import PrivlabError, Progress, check_name, check_range
from privlab.experiments.methods import robustness
from privlab.experiments.methods.consistency import Batch, consistency_by_gamma
from privlab.experiments.methods.robustness import ALEXNET, Classes, Outputs
from privlab.experiments.training.classifiers import NamedClassifier, classifier
from privlab.images import Data, open_images
from privlab.images.datasets import imagenet_classes
from privlab.victims import Victim

GAMMAS = (0.0, 0.03, 0.15, 0.27, 0.5, 0.9)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The models that are evaluated, and the data; what is None is left out.

    Args:
        models: names of victims.
        weights: one for all of them, or one for each, as `classifier` takes them.
        data: what `open_images` opens, labelled, or by the CSV file `labels`; `split` of it is evaluated on.
        gammas: shares of the patches that are shuffled in x̃, in [0, 1].
        per: "image" or "batch": what has a mask and an order of its own in x̃, as `consistency_by_gamma` has it.
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
            raise PrivlabError("--outliers are told from the images of --data: give both.")
        if (self.data, self.corruptions, self.natural) == (None, None, None):
            raise PrivlabError("There is nothing to evaluate on: give --data, --corruptions or --natural.")


def evaluate_models(
    config: EvaluationConfig, *, device: str = "cpu", progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Return a row for each model: its name, its weights, and the scores that were asked for.

    Args:
        config: the models, and the data that they are evaluated on.
        device: a device of torch, such as "cpu" or "cuda:0".
        progress: called with the number of images, or of folders, that are done, and with the number of all; None for
            silence.

    Raises:
        PrivlabError: as `classifier`, `open_images` and the metrics do; if the baseline cannot be read.
    """
    baseline = _baseline(config.baseline)
    weights = config.weights if len(config.weights) > 1 else config.weights * len(config.models)
    found = []
    for name, of in zip(config.models, weights, strict=True):
        subject = classifier(name, weights=of, img_size=config.img_size, seed=config.seed).to(device)
        found.append(_row(config, subject, baseline, progress or _silent))
    return found


def _row(
    config: EvaluationConfig, subject: Victim | NamedClassifier, baseline: Mapping[str, float], show: Progress
) -> dict[str, Any]:
    classes = imagenet_classes() if subject.model.classes == 1000 else None
    row: dict[str, Any] = {
        "model": subject.name,
        "weights": subject.weights.origin,
        "weights_sha256": subject.weights.sha256,
        "image": list(subject.model.image_shape),
    }
    if config.data is not None:
        row |= _on_data(config, subject, classes, show)
    if config.corruptions is not None:
        row["corruptions"] = _on_corruptions(config, config.corruptions, subject, classes, baseline, show)
    if config.natural is not None:
        source = open_images(config.natural, limit=config.limit, class_to_index=classes)
        seen = robustness.outputs(subject, source, size=config.batch, show=show)
        row["natural"] = asdict(robustness.natural(seen))
    if config.outliers is not None:
        row["outliers"] = _on_outliers(config, config.outliers, subject, classes, show)
    return row


def _on_data(
    config: EvaluationConfig, subject: Victim | NamedClassifier, classes: Classes, show: Progress
) -> dict[str, Any]:
    source, skipped = _data(config, classes), list[str]()
    batches = _numbered_batches(config, subject, source, skipped, show)
    found = consistency_by_gamma(subject.model, batches, config.gammas, seed=config.seed, per=config.per)
    by_gamma = [
        {name: value for name, value in asdict(each).items() if name not in ("images", "accuracy")} for each in found
    ]
    return {"images": found[0].images, "skipped": skipped, "accuracy": found[0].accuracy, "by_gamma": by_gamma}


def _numbered_batches(
    config: EvaluationConfig, subject: Victim | NamedClassifier, source: Data, skipped: list[str], show: Progress
) -> Iterator[Batch]:
    """Yield the batches with the places of their images."""
    count = 0
    for images, labels in robustness.read_batches(subject, source, skipped, size=config.batch):
        yield torch.arange(count, count + len(labels)), images, labels
        count += len(labels)
        show(count, source.count)


def _on_corruptions(
    config: EvaluationConfig,
    root: Path,
    subject: Victim | NamedClassifier,
    classes: Classes,
    baseline: Mapping[str, float],
    show: Progress,
) -> dict[str, Any]:
    """Return errors by corruption and severity; mCE against AlexNet is for ImageNet's 1,000 classes alone."""
    rows = robustness.corruption_errors(
        subject, root, classes=classes, limit=config.limit, size=config.batch, show=show
    )
    fair = config.baseline != "alexnet" or classes is not None
    mce = robustness.mean_corruption_error(rows, baseline) if fair else None
    return {
        "mean_error": sum(row.error for row in rows) / len(rows),
        "mce": None if mce is None else mce[0],
        "mce_over": 0 if mce is None else mce[1],
        "errors": [asdict(row) for row in rows],
    }


def _on_outliers(
    config: EvaluationConfig, root: Path, subject: Victim | NamedClassifier, classes: Classes, show: Progress
) -> dict[str, Any]:
    source = open_images(root, limit=config.limit, class_to_index=classes)
    high = robustness.outputs(subject, source, labelled=False, size=config.batch, show=show)
    if source.class_names is None or len(source.class_names) != subject.model.classes:
        high = Outputs(high.logits, torch.full_like(high.labels, -1))  # its folders are not named after our classes
    low = robustness.outputs(subject, _data(config, classes), size=config.batch, show=show)
    return {"images": len(high.labels), "aupr": robustness.outlier_aupr(high, low)}


def _data(config: EvaluationConfig, classes: Classes) -> Data:
    assert config.data is not None
    return open_images(
        config.data, split=config.split, limit=config.limit, labels=config.labels, class_to_index=classes
    )


def _baseline(name: str) -> Mapping[str, float]:
    """Return the errors that mCE divides by."""
    if name == "alexnet":
        return ALEXNET
    try:
        read = json.loads(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        raise PrivlabError(f"--baseline must be alexnet or a JSON file. '{name}' cannot be read: {error}.") from error
    if not isinstance(read, dict) or not all(isinstance(value, (int, float)) and value > 0 for value in read.values()):
        raise PrivlabError(f"'{name}' must hold an object of positive errors by corruption, such as {{\"fog\": 0.82}}.")
    return read


def _silent(done: int, total: int | None) -> None:
    """Show nothing."""
