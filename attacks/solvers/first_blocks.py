"""The gradients of the first blocks' matrices as a function of the patches and of one gradient behind these blocks.

Known are the released gradients of the matrices in the first L blocks; sought are the patches X and the one gradient
Δ = ∂ℓ/∂z_L behind these blocks. An attack proposes X and Δ, computes the gradients that they give (`FirstBlocks`), and
compares these with the released ones, for example row by row (`row_disagreement`). Where the signs of entries are
known, and not their magnitudes, `search_by_signs` finds X.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.attacks.solvers.descent import Adam, descend, values_and_slopes
from privlab.attacks.solvers.masked_slots import slot_rows
from privlab.attacks.solvers.prior import EDGE_WIDTH, Smoothness
from privlab.base import gradients_enabled
from privlab.patches import patchify, unpatchify
from privlab.victims import PREFIX_TOKENS, VictimModel

_PE = "pos_embed"

_RATE, _FASTER = 0.1, 2.0
"""The first step of a normalised pixel, and how many times as far an entry of Δ goes, whose rows begin at signs."""

_SECOND = 0.98
"""The share of squared slopes that the search keeps from step to step: they fall by orders of magnitude in hundreds."""

_EDGES = 0.002  # weight of the edges' energy, a mean over the pixels

_BOX = 30.0  # weight of the mean squared distance of normalised pixels from those of black and white

_LATER = ("blocks.", "norm.", "fc_norm.", "attn_pool.", "head")
"""What the names of parameters behind the embedding begin with."""

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class FirstBlocks:
    """The embedding and the first L blocks: X and Δ = ∂ℓ/∂z_L give the gradients of all their matrices.

    Whatever follows block L, ∂ℓ/∂θ = ∂⟨Δ, z_L(X)⟩/∂θ for each parameter θ before it. So L blocks add equations for X
    and no unknown: Δ has as many numbers as the gradient of the tokens z_0.
    """

    model: VictimModel
    blocks: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: VictimModel, blocks: int, released: Collection[str]) -> "FirstBlocks":
        """Return the first blocks of a copy of a model, and the names of their matrices of which something is released.

        Args:
            model: the model; it is left as it is.
            blocks: L; a model that has fewer is taken whole, except for its head.
            released: timm's names of the parameters whose gradients are released.
        """
        # Of the embedding and the first L blocks, only matrices with a released gradient are compared.
        twin, blocks = twice_derivable(model), min(blocks, len(model.vit.blocks))
        before = ("pos_embed", "patch_embed.", *(f"blocks.{level}." for level in range(blocks)))
        names = [
            name
            for name, parameter in twin.vit.named_parameters()
            if parameter.ndim > 1 and name in released and name.startswith(before)
        ]
        for name in names:
            twin.vit.get_parameter(name).requires_grad_(True)
        return cls(twin, blocks, tuple(names))

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the patches, as the class token."""
        own = (getattr(self.model.vit, name, None) for name in PREFIX_TOKENS)
        return sum(each.shape[1] for each in own if each is not None)

    def matrix(self, name: str, of: Float[Tensor, "..."]) -> Float[Tensor, "r c"]:
        """Return a parameter, or what is given for each entry, as rows: those of patches of the position embeddings."""
        return slot_rows(self.model, of) if name == _PE else of.flatten(1)

    def gradients(
        self, X: Float[Tensor, "n k"], delta: Float[Tensor, "t d"], *, create_graph: bool = False
    ) -> dict[str, Float[Tensor, "_ _"]]:
        """Return ∂⟨Δ, z_L(X)⟩/∂θ of each matrix.

        Args:
            X: normalised patches.
            delta: Δ, for all t tokens; it may be of any scale.
            create_graph: whether the result is to be differentiated.
        """
        model = self.model
        # `embed` takes pixels in [0, 1], so the normalisation is undone first.
        images = unpatchify(X[None], model.image_shape) * model.std + model.mean
        with gradients_enabled():
            # The chain rule gives ∂ℓ/∂θ = ∂⟨Δ, z_L⟩/∂θ with Δ held constant: one
            # backward pass from the t × D tokens z_L.
            z = model.client_blocks(model.embed(images), self.blocks)[0]
            own = [model.vit.get_parameter(name) for name in self.names]
            parts = torch.autograd.grad((z * delta).sum(), own, create_graph=create_graph)
        return {name: self.matrix(name, part) for name, part in zip(self.names, parts, strict=True)}


def names_before(blocks: int, names: Iterable[str]) -> list[str]:
    """Return those of timm's names of parameters that are before block L: of the embedding and of blocks 0 to L − 1."""
    first = tuple(f"blocks.{level}." for level in range(blocks))
    return [name for name in names if name.startswith(first) or not name.startswith(_LATER)]


def as_rows(name: str, of: Float[Tensor, "..."]) -> Float[Tensor, "r c"]:
    """Return a parameter, or what is given for each entry, as rows: tokens of position embeddings, outputs of matrices.

    A vector is one row.
    """
    return of[0] if name == _PE else of.flatten(1) if of.ndim > 1 else of[None]


def row_disagreement(
    made: Mapping[str, Float[Tensor, "_ _"]], wanted: Mapping[str, Float[Tensor, "r c"]]
) -> Float[Tensor, ""]:
    """Return the mean of 1 − cos(row, wanted row), over the rows of each matrix and then over matrices; in [0, 2].

    The cosine needs no scale of a row, which signs do not tell. A row of zeros counts 1.
    """
    # eps = 0 makes 0 / 0 of a row of zeros, which becomes the cosine 0.
    off = [
        (1 - F.cosine_similarity(each, wanted[name], dim=1, eps=0.0).nan_to_num()).mean() for name, each in made.items()
    ]
    return torch.stack(off).mean()


def search_by_signs(
    first: FirstBlocks,
    wanted: Mapping[str, Float[Tensor, "_ _"]],
    X: Float[Tensor, "n k"],
    covariance: Float[Tensor, "c c"],
    steps: int,
    own: Sequence[str] = (),
    prior: float = 1.0,
) -> Float[Tensor, "n k"]:
    """Return the patches for which the rows of the first blocks' gradients have the directions that are wanted.

    The mean of 1 − cos (`row_disagreement`) is minimised over X and Δ by Adam, with the energy of X's edges.

    Args:
        first: the first blocks.
        wanted: the signs of each matrix's entries, times their magnitudes where these are known.
        X: normalised patches, where the search begins.
        covariance: Γ of the image prior, of the differences of adjacent pixels.
        steps: steps of Adam, at least 0.
        own: what names the search's checkpoints.
        prior: factor of the weight of the edges' energy.
    """
    search = _Search.of(first, wanted, covariance, prior * _EDGES)
    best, _ = descend(Adam(_RATE, second=_SECOND), search.start(X)[None], search, steps, own)
    return search.parts(best[0])[0]


@dataclass(frozen=True, eq=False)
class _Search:
    """The objective of a search by signs, of points that hold the normalised patches X and Δ in units of its rows."""

    first: FirstBlocks
    wanted: Mapping[str, Float[Tensor, "_ _"]]
    rows: Float[Tensor, "n 1"]
    smooth: Smoothness
    box: tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]
    prior: float

    @classmethod
    def of(
        cls,
        first: FirstBlocks,
        wanted: Mapping[str, Float[Tensor, "_ _"]],
        covariance: Float[Tensor, "c c"],
        prior: float,
    ) -> "_Search":
        """Return the objective for what is wanted of each matrix, in the number format of the model."""
        model, like = first.model, first.model.mean
        # The normalised values of black and white pixels bound X.
        black, white = (
            patchify(model.normalise(like.new_full((1, *model.image_shape), shade)), model.patch)[0]
            for shade in (0.0, 1.0)
        )
        smooth = Smoothness(model.image_shape, covariance.to(like))
        # Signs do not show how large a row of Δ is. The mean expected magnitude of the rows of ∂ℓ/∂E_pos stands for it.
        rows = wanted[_PE].abs().mean(1, keepdim=True)
        rows = rows / rows.mean()
        return cls(
            first, {name: each.to(like) for name, each in wanted.items()}, rows.to(like), smooth, (black, white), prior
        )

    def start(self, X: Float[Tensor, "n k"]) -> Float[Tensor, " q"]:
        """Return the point of X within black and white, and of a Δ that is nothing but the signs of ∂ℓ/∂E_pos."""
        # ∂ℓ/∂E_pos is ∂ℓ/∂z_0, which stands for Δ at the start; the rows of prefix tokens begin at zero. Division by
        # _FASTER lets entries of Δ go that many times as far in each step of Adam.
        X, signs = X.to(self.rows).clamp(*self.box), self.wanted[_PE].sign()
        return torch.cat([X.flatten(), F.pad(signs, (0, 0, self.first.prefix, 0)).flatten() / _FASTER])

    def parts(self, point: Float[Tensor, " q"]) -> tuple[Float[Tensor, "n k"], Float[Tensor, "t d"]]:
        """Return X and Δ of a point."""
        # The inverse of `start`: N K numbers of X, then t D of Δ, whose rows are scaled.
        X, delta = point.split([self.box[0].numel(), len(point) - self.box[0].numel()])
        rows = F.pad(self.rows, (0, 0, self.first.prefix, 0), value=1.0)
        return X.view_as(self.box[0]), _FASTER * delta.view(len(rows), -1) * rows

    def __call__(
        self, points: Float[Tensor, "s q"], numbers: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, " s"], Float[Tensor, "s q"]]:
        """Return the objective and its gradient at points."""
        return values_and_slopes(self._value, points, numbers)

    def _value(self, points: Float[Tensor, "1 q"], _: Int[Tensor, " 1"]) -> Float[Tensor, " 1"]:
        X, delta = self.parts(points[0])
        # ∂⟨Δ, z_L(X)⟩/∂θ of all matrices. Their rows are compared by 1 − cos, which needs no magnitude of a row.
        made = self.first.gradients(X, delta, create_graph=True)
        # Normalised pixels beyond black and white cost their mean squared distance. Edges
        # cost Σ √(ε² + δᵀ Γ⁻¹ δ) a pixel.
        outside = F.relu(X - self.box[1]).square().mean() + F.relu(self.box[0] - X).square().mean()
        height, width = self.first.model.image_shape[1:]
        edges = self.smooth.sparse_energy(X[None], EDGE_WIDTH).sum() / (height * width)
        return (row_disagreement(made, self.wanted) + self.prior * edges + _BOX * outside)[None]


def twice_derivable(model: Network) -> Network:
    """Return a frozen copy of a model without fused attention, whose gradients cannot be differentiated again."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for module in twin.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  # timm's own switch, which no type declares
    return twin
