"""What a classifier is worth, and how little it minds a shuffle: top-1, Diff. Norm. and Consistency of MJP."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.draws import draw_for
from privlab.model import VictimModel
from privlab.patches import blockwise_mask, permute, shuffled_within
from privlab.training.examples import Examples

__all__ = ["Worth", "worth"]


@dataclass(frozen=True)
class Worth:
    """Means over `images` pictures; the last three under a jigsaw of γ = `gamma`.

    Args:
        accuracy: top-1 on the pictures as they are, in [0, 1].
        diff_norm: ‖F_cls(x) − F_cls(x̃)‖₂² (MJP, Eq. 6).
        consistency: share of the pictures whose predicted class stays (Eq. 7).
        shuffled_accuracy: top-1 on x̃ (Figure 3).
    """

    images: int
    gamma: float
    accuracy: float
    diff_norm: float
    consistency: float
    shuffled_accuracy: float


@torch.no_grad()
def worth(model: VictimModel, data: Examples, *, gamma: float = 0.15, seed: int = 0, batch: int = 250) -> Worth:
    """Return what a classifier is worth on labelled pictures, x̃ by one draw for each of them.

    x̃ holds E_unk at the masked slots where the model has it; elsewhere each slot keeps its own PE.

    Source: MJP (CVPR 2023), Section 5.1, Eq. 6 and 7, γ = 0.15 in Table 1.
    """
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64)
    for rows in torch.arange(len(data)).split(batch):
        images, labels = data.pixels(rows).to(model.mean), data.labels[rows].to(model.mean.device)
        shuffled, masked = _shuffled(model, images, rows, gamma, seed)
        plain = _features(model, images, None)
        moved = _features(model, shuffled, masked if model.unk_embed is not None else None)
        first, second = (model.vit.head(each).argmax(1) for each in (plain, moved))
        norm = (plain - moved).double().square().sum(1).sum()
        hits = [(first == labels).sum(), norm, (first == second).sum(), (second == labels).sum()]
        totals += torch.stack([each.double().cpu() for each in hits])
    accuracy, diff_norm, consistency, shuffled_accuracy = (totals / len(data)).tolist()
    return Worth(len(data), gamma, accuracy, diff_norm, consistency, shuffled_accuracy)


def _features(
    model: VictimModel, images: Float[Tensor, "b c h w"], masked_pe: Bool[Tensor, "b n"] | None
) -> Float[Tensor, "b d"]:
    """Return what the classifier reads: F_cls, normalised."""
    tokens = model.backbone(model.embed(images, masked_pe))
    return model.vit.forward_head(model.vit.norm(tokens), pre_logits=True)


def _shuffled(
    model: VictimModel, images: Float[Tensor, "b c h w"], rows: Int[Tensor, " b"], gamma: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return x̃ and its masks (Alg. 1)."""
    draws = [draw_for(seed, str(row), "worth") for row in rows.tolist()]
    masks = [blockwise_mask(model.grid, gamma, draw) for draw in draws]
    order = torch.stack([shuffled_within(mask, draw) for mask, draw in zip(masks, draws, strict=True)])
    return permute(images, order.to(images.device), model.patch), torch.stack(masks).to(images.device)
