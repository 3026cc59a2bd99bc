"""The terms of token separation: the MLP of a block, the spans of its gradients' factors, what is known of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from timm import layers
from torch import Tensor, nn

from privlab.victims import PreNormBlock

__all__ = ["UNIT_ROUNDOFF", "Mlp", "Near", "Spans", "normalise"]

UNIT_ROUNDOFF = 2.0**-24
"""Singular values of a float32 gradient below this share of the largest one are rounding."""


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
        assert isinstance(norm, nn.LayerNorm)
        assert isinstance(mlp, layers.Mlp)
        assert isinstance(mlp.act, nn.Module)
        fc1, fc2 = mlp.fc1, mlp.fc2
        assert isinstance(fc1, nn.Linear)
        assert isinstance(fc2, nn.Linear)
        W1, W2 = fc1.weight.detach().double(), fc2.weight.detach().double()
        γ, β = norm.weight.detach().double(), norm.bias.detach().double()
        b1 = torch.zeros_like(W1[:, 0]) if fc1.bias is None else fc1.bias.detach().double()
        return cls(γ, β, W1, b1, W2, mlp.act)

    def to(self, dtype: torch.dtype) -> "Mlp":
        """Return the same MLP in another precision."""
        numbers = (self.γ, self.β, self.W1, self.b1, self.W2)
        return Mlp(*(value.to(dtype) for value in numbers), act=self.act)

    def hidden(self, u: Float[Tensor, "*s d"]) -> tuple[Float[Tensor, "*s m"], Float[Tensor, "*s m"]]:
        """Return h and act′ at tokens u."""
        with torch.enable_grad():
            a = (u @ self.W1.mT + self.b1).requires_grad_()
            h = self.act(a)
            (slope,) = torch.autograd.grad(h.sum(), a)
        return h.detach(), slope


def normalise(mlp: Mlp, u: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    """Return t of u = γ ⊙ t + β."""
    return (u - mlp.β) / mlp.γ


class Spans(NamedTuple):
    """Orthonormal rows that span the factors of the gradients ∂W₁ = Σ_n δ_n u_nᵀ and ∂W₂ = Σ_n ε_n h_nᵀ.

    `σ` holds the singular values of ∂W₁, whose directions are the rows of `u`.
    """

    u: Float[Tensor, "n d"]
    δ: Float[Tensor, "n m"]
    h: Float[Tensor, "n m"]
    ε: Float[Tensor, "n d"]
    σ: Float[Tensor, " n"]

    @classmethod
    def of(cls, G1: Float[Tensor, "m d"], G2: Float[Tensor, "e h"], count: int) -> "Spans":
        """Return the spans of the factors of G1 and G2, each of the same number of dimensions.

        Args:
            G1: ∂ℓ/∂W₁ of the first layer, in float64.
            G2: ∂ℓ/∂W₂ of the second layer, in float64.
            count: number of products that the gradients are sums of; fewer dimensions, if fewer singular values are
                above `UNIT_ROUNDOFF`.
        """
        U1, σ1, V1 = torch.linalg.svd(G1, full_matrices=False)
        U2, σ2, V2 = torch.linalg.svd(G2, full_matrices=False)
        n = min(count, *(int((σ > UNIT_ROUNDOFF * σ[0]).sum()) for σ in (σ1, σ2)))
        return cls(V1[:n], U1[:, :n].mT, V2[:n], U2[:, :n].mT, σ1[:n])

    def without(self, G1: Float[Tensor, "m d"], G2: Float[Tensor, "d m"], count: int) -> "Spans":
        """Return the spans of what is left of the same gradients where some of their products are taken out.

        What is left lies in the spans of all, so that its decomposition has n columns instead of d and m.

        Args:
            G1: ∂ℓ/∂W₁ without these products.
            G2: ∂ℓ/∂W₂ without them.
            count: number of products that are left.
        """
        rest = Spans.of(G1 @ self.u.mT, G2 @ self.h.mT, count)
        return rest._replace(u=rest.u @ self.u, h=rest.h @ self.h)

    def float(self) -> "Spans":
        """Return the same in single precision."""
        return Spans(*(part.float() for part in self))


class Near(NamedTuple):
    """Guesses u of tokens, and what is known of each: its t lies in span(Q, base_s).

    The rows of `base` have unit length, and are orthogonal to the orthonormal columns of `Q`.
    """

    u: Float[Tensor, "s d"]
    base: Float[Tensor, "s d"]
    Q: Float[Tensor, "d r"]

    def float(self) -> "Near":
        """Return the same in single precision."""
        return Near(*(part.float() for part in self))

    def take(self, rows: Tensor) -> "Near":
        """Return some of the guesses."""
        return Near(self.u[rows], self.base[rows], self.Q)

    def off(self, t: Float[Tensor, "s *n d"]) -> Float[Tensor, "s *n d"]:
        """Return the component of each t outside its span."""
        base = self.base if t.dim() == 2 else self.base[:, None]
        t = t - (t @ self.Q) @ self.Q.mT
        return t - (t * base).sum(-1, keepdim=True) * base

    def cosine(self, t: Float[Tensor, "s d"]) -> Float[Tensor, " s"]:
        """Return the cosine of each t and its base, without the component in Q."""
        return nn.functional.cosine_similarity(t - (t @ self.Q) @ self.Q.mT, self.base)
