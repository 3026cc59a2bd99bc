"""The accuracy of a classifier, and its robustness to a shuffle: top-1, Diff. Norm. and Consistency of MJP."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import PrivlabError, check_name, draw_for
from privlab.experiments.training.classifiers import Classifier, position_hint
from privlab.experiments.training.examples import Examples
from privlab.patches import jigsaw

Batch = tuple[Int[Tensor, " b"], Float[Tensor, "b c h w"], Int[Tensor, " b"]]
"""The images' places in the data, which key their draws; the images, in [0, 1]; their labels."""


@dataclass(frozen=True)
class ConsistencyScores:
    """Means over as many images as `images` says; the last three are under a jigsaw of γ = `gamma`.

    Args:
        accuracy: top-1 on the images as they are, in [0, 1].
        diff_norm: ‖F_cls(x) − F_cls(x̃)‖₂² (MJP, Eq. 6).
        consistency: share of the images whose predicted class stays (Eq. 7).
        shuffled_accuracy: top-1 on x̃ (Figure 3).
    """

    images: int
    gamma: float
    accuracy: float
    diff_norm: float
    consistency: float
    shuffled_accuracy: float


def measure_consistency(
    model: Classifier, data: Examples, *, gamma: float = 0.15, seed: int = 0, batch: int = 250
) -> ConsistencyScores:
    """Return accuracy, Diff. Norm. and Consistency on labelled images, as `consistency_by_gamma` does, for one γ.

    Args:
        model: the classifier; it is put into evaluation mode.
        data: the images, of the model's input size, and their labels.
        gamma: γ, the share of the slots that is shuffled, in [0, 1]; 0.15 is that of MJP's Table 1.
        seed: seed of the draws; each image has its own, keyed by its place in `data`.
        batch: the number of images computed at a time; the draws do not depend on it.

    Raises:
        PrivlabError: as `consistency_by_gamma` does.
    """
    batches = ((rows, data.pixels(rows), data.labels[rows]) for rows in torch.arange(len(data)).split(batch))
    return consistency_by_gamma(model, batches, (gamma,), seed=seed)[0]


@torch.no_grad()
def consistency_by_gamma(
    model: Classifier, batches: Iterable[Batch], gammas: Sequence[float], *, seed: int = 0, per: str = "image"
) -> list[ConsistencyScores]:
    """Return accuracy, Diff. Norm. and Consistency of a classifier on labelled images for each γ.

    x̃ holds E_unk at the masked slots where the model has it; elsewhere each slot keeps its own PE. A model with index
    embeddings is told the order.

    Args:
        model: the classifier; it is put into evaluation mode.
        batches: the images, with their places and labels.
        gammas: the shares of the slots that are shuffled, in [0, 1].
        seed: seed of the draws.
        per: "image" draws x̃ for each image, whatever the batch; "batch" one mask and order for each batch, as the
            authors' code does, by the draw of its first image.

    Source: MJP (CVPR 2023), Section 5.1, Eq. 6 and 7; γ at inference as in Figure 3.

    Raises:
        PrivlabError: if there is no image, a γ is outside [0, 1] or `per` is unknown.
    """
    check_name("per", per, ("batch", "image"))
    model.eval()
    count, totals = 0, torch.zeros(len(gammas), 4, dtype=torch.float64)
    for rows, pixels, numbers in batches:
        images, labels = pixels.to(model.mean), numbers.to(model.mean.device)
        plain = model.features(images)
        first = model.logits(plain).argmax(1)
        for total, gamma in zip(totals, gammas, strict=True):
            keys = rows[:1] if per == "batch" else rows
            draws = [draw_for(seed, str(row), "worth") for row in keys.tolist()]
            shuffled, order, masked = jigsaw(images, model.patch, gamma, draws)
            moved = model.features(shuffled, position_hint(model, masked, order, unknown=model.unk_embed is not None))
            second = model.logits(moved).argmax(1)
            norm = (plain - moved).double().square().sum(1).sum()
            hits = [(first == labels).sum(), norm, (first == second).sum(), (second == labels).sum()]
            total += torch.stack([each.double().cpu() for each in hits])
        count += len(rows)
    if not count:
        raise PrivlabError("There is no image to evaluate on.")
    return [
        ConsistencyScores(count, gamma, *total) for gamma, total in zip(gammas, (totals / count).tolist(), strict=True)
    ]
