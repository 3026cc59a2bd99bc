"""The terms of token separation: the MLP of a block, the spans of its gradients' factors, what is known of tokens.

All gradients of a release are sums over its tokens, ∂W₁ = Σ_n δ_n u_nᵀ and ∂W₂ = Σ_n ε_n h_nᵀ. `Mlp` holds the known
weights, which lead from u to h; `Spans` what both sums determine at once, the subspaces of the four kinds of factors;
`Near` what position embeddings add for some tokens. Several releases are stored together, with padding for the smaller
ones: zeros where they must change no product, NaN where a row must never count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from privlab.base import gradients_enabled, one_per_core
from privlab.victims import PreNormBlock

UNIT_ROUNDOFF = 2.0**-24
"""Singular values of a float32 gradient below this share of the largest one are rounding."""


Index: TypeAlias = Tensor | slice | tuple[Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class Mlp:
    """u = γ ⊙ t + β ↦ h = act(W₁ u + b₁) ↦ W₂ h, with t of zero mean and unit variance, in float64."""

    γ: Float[Tensor, " d"]
    β: Float[Tensor, " d"]
    W1: Float[Tensor, "m d"]
    b1: Float[Tensor, " m"]
    W2: Float[Tensor, "d m"]
    act: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, block: PreNormBlock) -> "Mlp":
        """Return the MLP of a pre-norm block, with the normalisation before it."""
        norm, mlp = block.norm2, block.mlp
        fc1, fc2 = mlp.fc1, mlp.fc2
        W1, W2 = fc1.weight.detach().double(), fc2.weight.detach().double()
        γ, β = norm.weight.detach().double(), norm.bias.detach().double()
        # A layer without a bias has b₁ = 0. The bias of the second layer plays no part in its weight's gradient.
        b1 = torch.zeros_like(W1[:, 0]) if fc1.bias is None else fc1.bias.detach().double()
        return cls(γ, β, W1, b1, W2, mlp.act)

    def to(self, dtype: torch.dtype) -> "Mlp":
        """Return the same MLP in another precision."""
        numbers = (self.γ, self.β, self.W1, self.b1, self.W2)
        return Mlp(*(value.to(dtype) for value in numbers), act=self.act)

    def hidden(self, u: Float[Tensor, "*s d"]) -> tuple[Float[Tensor, "*s m"], Float[Tensor, "*s m"]]:
        """Return h and act′ at tokens u."""
        return self.activate(u @ self.W1.mT + self.b1)

    def activate(self, a: Float[Tensor, "*s m"]) -> tuple[Float[Tensor, "*s m"], Float[Tensor, "*s m"]]:
        """Return act and act′ at a = W₁ u + b₁."""
        # The derivative of Σ_i act(a_i) by a_i is act′(a_i), so one backward pass yields all of them.
        with gradients_enabled():
            a = a.requires_grad_()
            h = self.act(a)
            (slope,) = torch.autograd.grad(h.sum(), a)
        return h.detach(), slope


def normalise(mlp: Mlp, u: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """Return t of u = γ ⊙ t + β."""
    return (u - mlp.β) / mlp.γ


def factors(G: Float[Tensor, "*b m n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decompositions U diag(σ) Vh of matrices, by LAPACK on the CPU wherever these are.

    A GPU decomposes one matrix of a few hundred rows in float64 more slowly, and rounds otherwise.
    """
    C = G.cpu()
    if C.dim() == 2:
        U, σ, Vh = torch.linalg.svd(C, full_matrices=False)
    else:
        each = one_per_core(lambda i: torch.linalg.svd(C[i], full_matrices=False), len(C), C.device)
        U, σ, Vh = (torch.stack(part) for part in zip(*each, strict=True))
    return U.to(G), σ.to(G), Vh.to(G)


class Spans(NamedTuple):
    """Orthonormal rows that span the factors of the gradients ∂W₁ = Σ_n δ_n u_nᵀ and ∂W₂ = Σ_n ε_n h_nᵀ.

    `σ` holds the singular values of ∂W₁, whose directions are the rows of `u`. The gradients of several releases have
    spans of different dimensions: rows of zeros, which change no product, follow in the smaller ones.
    """

    u: Float[Tensor, "*b n d"]
    δ: Float[Tensor, "*b n m"]
    h: Float[Tensor, "*b n m"]
    ε: Float[Tensor, "*b n d"]
    σ: Float[Tensor, "*b n"]

    @classmethod
    def of(cls, G1: Float[Tensor, "*b m d"], G2: Float[Tensor, "*b e h"], count: int | Int[Tensor, " b"]) -> "Spans":
        """Return the spans of the factors of G1 and G2, each of the same number of dimensions.

        Args:
            G1: ∂ℓ/∂W₁ of the first layer, in float64.
            G2: ∂ℓ/∂W₂ of the second layer, in float64.
            count: number of products that the gradients are sums of; fewer dimensions, if fewer singular values are
                above `UNIT_ROUNDOFF`.
        """
        # With G = U diag(σ) V, the rows of V₁ span the u_n and the columns of U₁ the δ_n; those of G₂ the h_n and ε_n.
        (U1, σ1, V1), (U2, σ2, V2) = factors(G1), factors(G2)
        # Directions below rounding are left out. Both gradients sum over the same tokens, so both get the smaller rank.
        ranks = [(σ > UNIT_ROUNDOFF * σ[..., :1]).sum(-1) for σ in (σ1, σ2)]
        rank = torch.minimum(*ranks).clamp_max(count)
        n = int(rank.max())
        # Releases of a smaller rank are filled up to n rows with zeros.
        real = torch.arange(n, device=G1.device) < rank[..., None]
        parts = (part[..., :n, :] * real[..., None] for part in (V1, U1.mT, V2, U2.mT))
        return cls(*parts, σ1[..., :n] * real)

    def real(self) -> Bool[Tensor, "*b n"]:
        """Return which rows are not zero."""
        return self.u.any(-1)

    def without(
        self, G1: Float[Tensor, "*b m d"], G2: Float[Tensor, "*b d m"], count: int | Int[Tensor, " b"]
    ) -> "Spans":
        """Return the spans of what is left of the same gradients where some of their products are taken out.

        What is left lies in the spans of all, so that its decomposition has n columns instead of d and m.

        Args:
            G1: ∂ℓ/∂W₁ without these products.
            G2: ∂ℓ/∂W₂ without them.
            count: number of products that are left.
        """
        # ∂W₁ Tᵀ (m × n) and ∂W₂ Hᵀ (d × n) hold coordinates in span{u} and span{h}; their factors are turned back.
        rest = Spans.of(G1 @ self.u.mT, G2 @ self.h.mT, count)
        return rest._replace(u=rest.u @ self.u, h=rest.h @ self.h)

    def float(self) -> "Spans":
        """Return the same in single precision."""
        return Spans(*(part.float() for part in self))

    def take(self, rows: Index) -> "Spans":
        """Return the spans of some of the releases; None adds a dimension for them."""
        return Spans(*(part[rows] for part in self))


class Near(NamedTuple):
    """Guesses u of tokens, and what is known of each: its t lies in span(Q, base_s).

    The rows of `base` have unit length, and are orthogonal to the orthonormal columns of `Q`. Of several releases,
    rows of NaN and columns of zeros follow where another one has more. Guesses alone have a base of zeros (`alone`).
    """

    u: Float[Tensor, "*b s d"]
    base: Float[Tensor, "*b s d"]
    Q: Float[Tensor, "*b d r"]

    @classmethod
    def alone(cls, u: Float[Tensor, "s d"]) -> "Near":
        """Return guesses of which nothing else is known: every t lies in span(Q)."""
        return cls(u, torch.zeros_like(u), torch.eye(u.shape[1]).to(u))

    @classmethod
    def of(cls, each: Sequence["Near | None"]) -> "Near | None":
        """Return the guesses of several releases together; None if no release has any."""
        # A release without guesses gets empty tensors, as wide as those of a release that has some.
        if (some := next((near for near in each if near is not None), None)) is None:
            return None
        none = Near(some.u[:0], some.base[:0], some.Q[:, :0])
        u, base, Q = zip(*(near or none for near in each), strict=True)
        guesses = (pad_sequence(part, batch_first=True, padding_value=torch.nan) for part in (u, base))
        return cls(*guesses, pad_sequence([q.mT for q in Q], batch_first=True).mT)

    def float(self) -> "Near":
        """Return the same in single precision."""
        return Near(*(part.float() for part in self))

    def take(self, releases: Index, rows: Index) -> "Near":
        """Return the guesses in some rows of some of the releases."""
        return Near(self.u[rows], self.base[rows], self.Q[releases])

    def off(self, t: Float[Tensor, "*b s d"]) -> Float[Tensor, "*b s d"]:
        """Return the component of each t outside its span."""
        # The component in Q is removed, and then that along the unit vector `base`, which is orthogonal to Q.
        t = t - (t @ self.Q) @ self.Q.mT
        return t - (t * self.base).sum(-1, keepdim=True) * self.base

    def cosine(self, t: Float[Tensor, "*b s d"]) -> Float[Tensor, "*b s"]:
        """Return the cosine of each t and its base, without the component in Q."""
        return nn.functional.cosine_similarity(t - (t @ self.Q) @ self.Q.mT, self.base, dim=-1)


def packed(rows: Float[Tensor, "b s d"], kept: Bool[Tensor, "b s"]) -> tuple[Float[Tensor, "b k d"], list[int]]:
    """Return the rows of each release that are kept, rows of NaN below where others have more, and their numbers."""
    counts = kept.sum(1).tolist()
    # A stable sort puts the rows that are kept first, in their order.
    order = kept.int().argsort(dim=1, descending=True, stable=True)[:, : max(counts)]
    kept, order = (of[..., None].to(rows.device) for of in (kept.gather(1, order), order))
    return rows.gather(1, order.expand(-1, -1, rows.shape[2])).where(kept, torch.nan), counts
