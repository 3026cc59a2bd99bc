"""`mjp`: training with the masked jigsaw puzzle, the unknown position embedding and DAL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from privlab.base import PrivlabError, check_name, check_range
from privlab.experiments.training.classifiers import Classifier, position_hint
from privlab.experiments.training.objectives.classify import Classify
from privlab.experiments.training.objectives.dal import DALS, Dal
from privlab.patches import jigsaw, patchify, unpatchify


@dataclass(frozen=True)
class TrainMjp(Classify):
    """L_CE + λ L_DAL on images whose block-wise masked patches are shuffled anew in every iteration.

    A model with index embeddings (`IndexedViT`, IDX) is told which patch each slot holds.

    Args:
        gamma: γ, the share of the slots that is masked, in [0, 1].
        unknown: whether E_unk stands at the masked slots (UNK); else each slot keeps its own PE.
        dal: "none", or the regressor: one of `DALS`.
        weight: λ of L_DAL.
        per: "batch" draws one mask and one order for all images of a batch, as the authors' code does, in each of its
            parts and processes; "image" draws for each.
        spp: whether the pixels within the shuffled patches are shuffled too, all patches by one order (SPP).

    Source: MJP (CVPR 2023), Algorithm 2, Equations 1 to 5. Variants of Table 4, by their letters: A is `classify`, B
    that of a `_nope` model; C is γ = 1 with spp, unknown=false and dal=none, D γ = 0 with unknown=false, E
    unknown=false with dal=none, F the same of an `_idx` model; G is dal=none of a `_mjp` model, H to J are dal=pca,
    linear, nonlinear.
    """

    name: ClassVar[str] = "mjp"
    paper: ClassVar[str] = "MJP (Ren et al. 2023), Alg. 2, Eq. 1 to 5"

    gamma: float = 0.03
    unknown: bool = True
    dal: str = "nonlinear"
    weight: float = 0.01
    per: str = "batch"
    spp: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_range(0 <= self.gamma <= 1, "gamma (γ)", "in [0, 1]", self.gamma)
        check_name("DAL regressor", self.dal, ("none", *DALS))
        check_range(self.weight >= 0, "weight (λ)", "at least 0", self.weight)
        check_name("per", self.per, ("batch", "image"))

    def module(self, model: Classifier) -> nn.Module:
        """Return the victim with the regressor beside it.

        Raises:
            PrivlabError: if E_unk or DAL is asked for, and the victim has no E_unk or no learnt PE.
        """
        if self.unknown and model.unk_embed is None:
            raise PrivlabError(
                "MJP trains E_unk, and this model has none. Use a `_mjp` victim, or --set unknown=false."
            )
        if self.dal == "none":
            return _Trained(model, None)
        if (pe := model.slot_pe) is None:
            raise PrivlabError("DAL regresses places from position embeddings; this model has none: --set dal=none.")
        return _Trained(model, Dal(self.dal, pe.shape[1], model.grid))

    def batch(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], model: Classifier, draw: Generator
    ) -> tuple[Tensor, ...]:
        """Return x̃ (b × c × h × w), labels (b × y, rows of probabilities), masks (b × n) and orders (b × n) (Alg. 1).

        Args:
            images: the augmented images of the step, in [0, 1].
            labels: the class index of each image, in [0, y).
            model: the victim, which tells the side of the patches and the number of classes y.
            draw: the generator of the mixing, the masks and the orders.
        """
        images, soft = super().batch(images, labels, model, draw)
        draws = [draw] if self.per == "batch" else [draw] * len(labels)
        shuffled, order, masked = jigsaw(images, model.patch, self.gamma, draws)
        if self.spp:
            shuffled = shuffle_pixels(shuffled, masked, model.patch, draws)
        return shuffled, soft, masked, order

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return L_CE + λ L_DAL."""
        images, labels, masked, order = batch
        logits, dal = module(images, masked, order, self.unknown)
        total = self.cross_entropy(logits, labels)
        return total if dal is None else total + self.weight * dal


def shuffle_pixels(
    images: Float[Tensor, "b c h w"], mask: Bool[Tensor, "b n"], patch: int, draws: Sequence[Generator]
) -> Float[Tensor, "b c h w"]:
    """Return images with the pixels of each masked patch shuffled, by one order for all patches that share a draw.

    The channels of a pixel stay together.

    Args:
        images: the images; their sides are multiples of `patch`.
        mask: marks the patches whose pixels are shuffled.
        patch: the side of a patch, in pixels.
        draws: generators on the CPU, one for each image or one for each group of consecutive images of equal size.

    Raises:
        PrivlabError: if a side of the images is not a multiple of `patch`.

    Source: MLP-Mixer (Tolstikhin et al. 2021), Section 3.5: pixels within each patch, by a shared permutation.
    """
    drawn = torch.stack([torch.randperm(patch**2, generator=draw) for draw in draws]).to(images.device)
    orders = drawn.repeat_interleave(len(images) // len(draws), 0)
    pixels, (_, c, h, w) = patchify(images, patch).unflatten(2, (-1, patch**2)), images.shape
    moved = pixels.gather(3, orders[:, None, None].expand_as(pixels))
    chosen = torch.where(mask[..., None, None], moved, pixels)
    return unpatchify(chosen.flatten(2), (c, h, w))


class _Trained(nn.Module):
    """A victim and the regressor that is trained beside it, but not kept."""

    def __init__(self, victim: Classifier, dal: Dal | None) -> None:
        super().__init__()
        self.victim, self.dal = victim, dal

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters to which the victim wants no weight decay applied."""
        spared = getattr(self.victim, "no_weight_decay", set)
        return {f"victim.{name}" for name in spared()}

    def forward(
        self, images: Float[Tensor, "b c h w"], masked: Bool[Tensor, "b n"], order: Int[Tensor, "b n"], unknown: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.victim(images, position_hint(self.victim, masked, order, unknown=unknown))
        pe = self.victim.slot_pe
        if self.dal is None or pe is None:
            return logits, None
        return logits, self.dal(pe, ~self.victim.slots(masked))
