"""`droppos`: reconstruction of dropped position embeddings, without labels."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from privlab.base import PrivlabError, check_range
from privlab.experiments.training.objectives.mp3 import some_of
from privlab.reassembly import DropPosNetwork, tiles
from privlab.victims import VictimModel


@dataclass(frozen=True)
class TrainDropPos:
    """L = −Σᵢ Aᵢ Σⱼ w*(yᵢ, j) log p(slot j | patch i) / Σᵢ Aᵢ, over the visible patches i whose PE was dropped.

    Of the N patches a random share 1 − γ is visible, and of these the share γ_pos carries a mask token for its PE. A is
    computed from the whole image, without gradient, and sums to one over each image's visible patches, as in the
    authors' code.

    Args:
        gamma: γ, the share of the patches that is masked, in [0, 1).
        gamma_pos: γ_pos, the share of the visible patches whose PE is dropped, in (0, 1].
        sigma: σ₀ of the position smoothing, at the start of the training.
        sigma_end: σ_T, at its end; linear in between (Eq. 7).
        temperature: τ of A = softmax(cos(f_cls, f)/τ) (Eq. 9); inf for A = 1, and no pass over the whole image.
        decoder_width: width of the decoder's tokens.
        decoder_depth: the number of blocks of the decoder.
        decoder_heads: the number of attention heads of each of these.

    Raises:
        PrivlabError: for numbers out of range.

    Source: DropPos (Wang et al., NeurIPS 2023), Section 3, Eq. 4 to 9. Distances are Euclidean as in Eq. 5; the
    authors' code squares them.
    """

    name: ClassVar[str] = "droppos"
    paper: ClassVar[str] = "DropPos (Wang et al. 2023), Eq. 4 to 9"

    gamma: float = 0.75
    gamma_pos: float = 0.75
    sigma: float = 1.0
    sigma_end: float = 0.0
    temperature: float = 0.1
    decoder_width: int = 512
    decoder_depth: int = 2
    decoder_heads: int = 16

    def __post_init__(self) -> None:
        """Check the options."""
        check_range(0 <= self.gamma < 1, "gamma (γ) of droppos", "in [0, 1)", self.gamma)
        check_range(0 < self.gamma_pos <= 1, "gamma_pos (γ_pos)", "in (0, 1]", self.gamma_pos)
        for key in ("sigma", "sigma_end"):
            check_range(0 <= (value := getattr(self, key)) < math.inf, f"{key} (σ)", "at least 0 and finite", value)
        check_range(self.temperature > 0, "temperature (τ)", "positive", self.temperature)

    @property
    def labelled(self) -> bool:
        """Return whether it needs labels."""
        return False

    def module(self, model: VictimModel) -> nn.Module:
        """Return the predictor on the victim's ViT, whose own PEs become the fixed ones, to be fine-tuned from there.

        Raises:
            PrivlabError: if the model has no PEs.
        """
        own = model.vit.pos_embed
        if own is None:
            raise PrivlabError("DropPos trains a model with position embeddings; this one has none: use mp3 for it.")
        predictor = DropPosNetwork(model, self.decoder_width, self.decoder_depth, self.decoder_heads)
        with torch.no_grad():
            own.zero_()
            own[0, -predictor.slots :] = predictor.pe
        return _Weighed(predictor, self.temperature)

    def batch(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], model: VictimModel, draw: Generator
    ) -> tuple[Tensor, ...]:
        """Return all patches, the numbers of the visible ones, which of these carry their PE, and w*.

        The patches are b × n × c × p × p, the numbers b × m, the marks b × m, and w* is n × n.

        Args:
            images: the augmented images of the step, in [0, 1].
            labels: not used: the objective needs none.
            model: the victim, which tells the side of the patches and their grid.
            draw: the generator of the visible patches of each image.
        """
        patches = tiles(images, model.patch)
        visible = some_of(patches.shape[1], 1 - self.gamma, len(patches), draw)
        dropped = max(1, round(self.gamma_pos * visible.shape[1]))
        known = torch.arange(visible.shape[1]) >= dropped  # the order of the visible ones is random
        return patches, visible, known.expand(visible.shape), smoothing(model.grid, self.sigma)

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the smoothed, weighed cross-entropy of the dropped positions (Eq. 8)."""
        patches, visible, known, target = batch
        logits, weight = module(patches, visible, known)
        each = -(target[visible] * logits.float().log_softmax(2)).sum(2)
        weight = weight * ~known
        return (each * weight).sum() / weight.sum()

    def at(self, share: float) -> "TrainDropPos":
        """Return the objective when a share of the training is done, with the σ of that moment (Eq. 7)."""
        return replace(self, sigma=self.sigma + share * (self.sigma_end - self.sigma))


class _Weighed(nn.Module):
    """A predictor, and the weight of each visible patch in its loss."""

    def __init__(self, predictor: DropPosNetwork, temperature: float) -> None:
        super().__init__()
        self.predictor, self.temperature = predictor, temperature

    def forward(
        self, patches: Float[Tensor, "b n c p p"], visible: Int[Tensor, "b m"], known: Bool[Tensor, "b m"]
    ) -> tuple[Tensor, Tensor]:
        rows = visible[:, :, None, None, None].expand(-1, -1, *patches.shape[2:])
        return self.predictor(patches.gather(1, rows), visible, known), self._weights(patches, visible)

    @torch.no_grad()
    def _weights(self, patches: Float[Tensor, "b n c p p"], visible: Int[Tensor, "b m"]) -> Float[Tensor, "b m"]:
        if math.isinf(self.temperature):
            return torch.ones_like(visible, dtype=torch.float32)
        b, n = patches.shape[:2]
        places = torch.arange(n, device=patches.device).expand(b, -1)
        f = self.predictor.encode(patches, places, torch.ones_like(places, dtype=torch.bool)).float()
        affinity = F.cosine_similarity(f[:, :1], f[:, 1:], dim=2) / self.temperature
        return affinity.gather(1, visible).softmax(1)


def smoothing(grid: tuple[int, int], sigma: float) -> Float[Tensor, "n n"]:
    """Return w*(i, j) = exp(−dist(i, j)/σ²) / Σₖ exp(−dist(i, k)/σ²); one-hot rows for σ = 0 (Eq. 5)."""
    rows, columns = (torch.arange(side, dtype=torch.float32) for side in grid)
    places = torch.cartesian_prod(rows, columns)
    if sigma == 0:
        return torch.eye(len(places))
    return (-torch.cdist(places, places) / sigma**2).softmax(1)
