"""`probe`: a linear head on a frozen victim, which shows what its tokens hold of classes or of places."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from privlab.base import PrivlabError, check_name, check_range, draw_for
from privlab.experiments.training.examples import Examples
from privlab.experiments.training.objectives.mp3 import some_of
from privlab.victims import VictimModel

TARGETS = ("class", "position")
"""What a probe can predict."""


class Head(nn.Module):
    """x ↦ W (x − μ)/√(σ² + 1e-6) + b, with μ and σ² of BatchNorm without affine, where that is asked for.

    W and b start at zero: the problem is convex.

    Source: MAE (He et al. 2022), Appendix A.1.
    """

    def __init__(self, width: int, classes: int, *, batch_norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False, eps=1e-6) if batch_norm else nn.Identity()
        self.linear = nn.Linear(width, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b y"]:
        """Return the logits."""
        return self.linear(self.norm(x))

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """Return the one linear layer that equals BatchNorm and linear layer in evaluation mode."""
        weight, bias = self.linear.weight.double(), self.linear.bias.double()
        if isinstance(self.norm, nn.BatchNorm1d):
            assert self.norm.running_mean is not None
            assert self.norm.running_var is not None
            weight = weight / (self.norm.running_var.double() + self.norm.eps).sqrt()
            bias = bias - weight @ self.norm.running_mean.double()
        made = nn.Linear(self.linear.in_features, self.linear.out_features, device=weight.device)
        made.weight.copy_(weight)
        made.bias.copy_(bias)
        return made


@dataclass(frozen=True)
class Probe:
    """Cross-entropy of a linear head on the tokens of a victim, which is frozen and in evaluation mode.

    Args:
        target: "class", predicted from what the victim's own classifier reads, or "position": the slot of each patch,
            predicted from its token.
        layer: the block whose output is read, from 1 on; None for the last one's, after the final norm.
        mean: whether classes are predicted from the mean of the patches' tokens instead.
        gamma_pos: γ_pos, the share of an image's patches, in [0, 1], whose position embeddings are dropped while places
            are predicted; E_unk stands there where the victim has it, else zero. These patches alone count, and all
            patches where none is dropped.
        batch_norm: whether features pass through BatchNorm without affine first.

    Raises:
        PrivlabError: for another target, or numbers out of range.

    Source: DropPos (Wang et al. 2023), Section 4.3 and Table 7, with γ_pos = 0.75; MAE (He et al. 2022), Appendix A.1.
    """

    name: ClassVar[str] = "probe"
    paper: ClassVar[str] = "DropPos (Wang et al. 2023), Table 7; MAE (He et al. 2022), Appendix A.1"

    target: str = "class"
    layer: int | None = None
    mean: bool = False
    gamma_pos: float = 0.75
    batch_norm: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_name("target of a probe", self.target, TARGETS)
        check_range(0 <= self.gamma_pos <= 1, "gamma_pos (γ_pos)", "in [0, 1]", self.gamma_pos)
        if self.layer is not None and self.layer < 1:
            raise PrivlabError(f"layer of a probe must be at least 1, or none for the last. Found {self.layer}.")

    @property
    def labelled(self) -> bool:
        """Return whether it needs labels."""
        return self.target == "class"

    @property
    def for_victim(self) -> bool:
        """Return whether the head reads what the victim's own head reads, so that it can replace it."""
        return self.target == "class" and self.layer is None and not self.mean

    def module(self, model: VictimModel) -> Head:
        """Return the head alone; the victim is read, not trained.

        Raises:
            PrivlabError: if the victim has fewer blocks.
        """
        vit, (h, w) = model.vit, model.grid
        if self.layer is not None and self.layer > len(vit.blocks):
            raise PrivlabError(f"layer of this probe must be 1 to {len(vit.blocks)}. Found {self.layer}.")
        classes = vit.num_classes if self.labelled else h * w
        return Head(vit.embed_dim, classes, batch_norm=self.batch_norm)

    @torch.no_grad()
    def batch(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], model: VictimModel, draw: Generator
    ) -> tuple[Tensor, ...]:
        """Return features k × d, and the number that each of them is to tell: a class (k = b), or a slot.

        Args:
            images: the augmented images of the step, in [0, 1].
            labels: the class index of each image; not used where places are predicted.
            model: the frozen victim; it is put into evaluation mode.
            draw: the generator of the position embeddings that each image loses.
        """
        model.eval()
        images = images.to(model.mean)
        if self.labelled:
            return self._pool(model, self._tokens(model, model.embed(images))), labels
        (h, w), b = model.grid, len(images)
        own = torch.arange(h * w).expand(b, -1)
        if model.vit.pos_embed is None or round(self.gamma_pos * h * w) == 0:
            tokens = self._tokens(model, model.embed(images))[:, -h * w :]
            return tokens.flatten(0, 1), own.flatten()
        lost = torch.zeros(b, h * w, dtype=torch.bool).scatter_(1, some_of(h * w, self.gamma_pos, b, draw), True)
        masked, stands = lost.to(images.device), "zero" if model.unk_embed is None else "unknown"
        return self._tokens(model, model.embed(images, masked, stands))[:, -h * w :][masked], own[lost]

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the mean cross-entropy.

        Raises:
            PrivlabError: if BatchNorm is to take the variance of one feature.
        """
        features, numbers = batch
        if self.batch_norm and module.training and len(features) < 2:
            raise PrivlabError("batch_norm needs two images at a time: a larger --batch-size, or batch_norm=false.")
        return F.cross_entropy(module(features), numbers)

    def _tokens(self, model: VictimModel, embedded: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return all tokens after the layer, and after the final norm if that is the last."""
        vit = model.vit
        if self.layer is None:
            return vit.norm(model.backbone(embedded))
        return vit.blocks[: self.layer](model.before_blocks(embedded))

    def _pool(self, model: VictimModel, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b d"]:
        h, w = model.grid
        return tokens[:, -h * w :].mean(1) if self.mean else model.vit.forward_head(tokens, pre_logits=True)


@torch.no_grad()
def probe_accuracy(
    probe: Probe, head: nn.Module, model: VictimModel, data: Examples, *, seed: int = 0, batch: int = 250
) -> float:
    """Return the share, in [0, 1], of images whose class, or of patches whose slot, is told right.

    Args:
        probe: the objective by which the head was trained.
        head: the trained head, or its folded layer; it is put into evaluation mode.
        model: the victim whose tokens it reads.
        data: the images, of the victim's input size, and their labels.
        seed: seed of the draws of the position embeddings that images lose.
        batch: the number of images computed at a time; each batch has its own draws, keyed by its first image.
    """
    head.eval()
    right = count = 0
    for rows in torch.arange(len(data)).split(batch):
        draw = draw_for(seed, str(int(rows[0])), "probe")
        features, numbers = probe.batch(data.pixels(rows), data.labels[rows], model, draw)
        right += int((head(features).argmax(1).cpu() == numbers).sum())
        count += len(numbers)
    return right / count
