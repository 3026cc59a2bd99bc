"""`spear`: the inputs of the first MLP from the exact zeros that ReLU leaves in its gradient, and images from them."""

# Known are the model and the gradients G = ∂ℓ/∂W₁ = Σ_n δ_n u_nᵀ (m × d) and b = ∂ℓ/∂b₁ = Σ_n δ_n of a first MLP with
# ReLU. Sought are the inputs u_n of the MLP, and then the images.
# 1. G = L R has the rank n of its tokens, so that the δ_n are L q for some q: those with many exact zeros.
# 2. Random sets of n − 1 rows of L determine candidates q. The sparsest n independent ones make up Q.
# 3. b gives the lengths of the columns of Q, and U = Q⁻¹ R. Signs of W₁ u + b₁ test each token.
# 4. From tokens to images as in `token-separation`, which this class extends.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.gradients.token_separation import TokenSeparation
from privlab.attacks.tokens import FC1, FC2, PROJ, QKV, UNIT_ROUNDOFF, Mlp, Separated
from privlab.base import AtLeast1, Checked, Fraction, PrivlabError, draw_for, warn
from privlab.threat import Observation
from privlab.victims import PreNormBlock, first_block

_BIAS = "blocks.0.mlp.fc1.bias"

_INDEPENDENT = 1e-3
"""The part of a unit direction outside the span of sparser ones from which it is another one, and no rounding."""


@dataclass(frozen=True)
class Spear(TokenSeparation):
    """Find the factors of ∂ℓ/∂W₁ = Σ_n δ_n u_nᵀ by the zeros of δ_n, where the first MLP has ReLU.

    Idea: ReLU passes no gradient where it is off, so that the gradient of each token has exact zeros. The attack draws
    rows of the factorised gradient until all of them are zero for one token, which gives that token's direction. All
    directions together separate the tokens, and images follow from these.

    Steps: factorise ∂ℓ/∂W₁ = L R → draw rows that one token leaves zero → tokens U = Q⁻¹ R

    Algorithm:

    1. ∂ℓ/∂W₁ = L R has the rank n of its tokens, so that [δ_1 … δ_n] = L Q for an n × n matrix Q. A column q of Q
       leaves zeros in L q, wherever ReLU was off for its token. Any n − 1 rows of L that are all among these determine
       q: rows are drawn at random, and q is kept if a share of `zeros` of L q is zero.
    2. The sparsest independent ones form Q, except for their lengths, since a sum of tokens has no zeros but those that
       all of them have. ∂ℓ/∂b₁ = L Q 1 gives the lengths, and the inputs are U = Q⁻¹ R. A token is found if W₁ u + b₁
       is positive exactly where δ is not zero (`_disaggregate`).
    3. From tokens to images as in `token-separation`.

    The chance that n − 1 rows are off is 2^(1−n) where ReLU is off for half of them.

    Exact if: `token-separation` would be, the MLP has ReLU, and every token's direction was drawn.

    Fails if: the MLP has another activation, as those of all ViTs of timm and of privlab: GELU leaves no exact zeros,
    and is refused. The number of draws grows exponentially with the tokens. `token-separation` needs no zeros.

    Studies: baselines

    Args:
        starts: sets of n − 1 rows that are tried at once.
        rounds: the most times that this is done.
        steps: not used.
        tolerance: the size of an entry of L q, relative to the largest one, below which it counts as zero.
        sure: the share of signs against the zeros from which a token is not certain.
        seed: seed of the rows that are drawn.
        zeros: the share of L q that must be zero, of the rows that are not zero for every token.

    Source: SPEAR (Dimitrov et al., NeurIPS 2024), of a layer that reads images. Ours are the order of the directions in
    the place of its greedy search by consistency, and the way from tokens to images. [@dimitrov2024spear]
    """

    name: ClassVar[str] = "spear"
    paper: ClassVar[str] = "SPEAR (Dimitrov et al., NeurIPS 2024); from tokens to images: ours"
    order: ClassVar[int] = 230
    short: ClassVar[Mapping[str, Any]] = {"starts": 64, "rounds": 2}
    activation: ClassVar[str] = "ReLU"
    parameters: ClassVar[tuple[str, ...]] = (FC1, FC2, QKV, PROJ, _BIAS)
    stands_in_for: ClassVar[tuple[str, ...]] = ()
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    at_full: ClassVar[Mapping[str, int]] = {"rounds": 2000}

    starts: AtLeast1 = 4096
    rounds: AtLeast1 = 200
    tolerance: Fraction = 1e-4
    sure: Fraction = 0.02
    zeros: Fraction = 0.2

    def __post_init__(self) -> None:
        """Raise PrivlabError if a number is out of range."""
        Checked.__post_init__(self)  # `sure` is no residual here, and may be more than the tolerance

    def beyond(self, seen: Observation) -> str | None:
        """Return the conditions of `token-separation` that do not hold, and an activation without exact zeros."""
        act = _activation(first_block(seen.model))
        found = [super().beyond(seen), None if act == self.activation else f"{act} leaves no exact zeros in a gradient"]
        return " and ".join(filter(None, found)) or None

    def tokens(
        self, block: PreNormBlock, seen: Observation, releases: Sequence[int], count: int, *_: object, **__: object
    ) -> list[Separated]:
        """Find the tokens of releases; none, if they are not fewer than the model's width.

        Args:
            block: the first block, in float64.
            seen: the observation, with the gradients of the block's MLP.
            releases: numbers of the releases.
            count: number of tokens in a release: those of all its images, class and register tokens included.

        Raises:
            PrivlabError: if the MLP has no ReLU.

        Warns:
            PrivlabWarning: if tokens are missing.
        """
        if (act := _activation(block)) != self.activation:
            raise PrivlabError(
                f"{self.name} needs an MLP with ReLU, whose gradient has exact zeros. Found {act}. That it does not "
                "apply is no evidence of privacy: see token-separation."
            )
        every = []
        for G, b in zip(seen.gradients[FC1][releases].double(), seen.gradients[_BIAS][releases].double(), strict=True):
            found = Separated(G.new_zeros(0, G.shape[1]), G.new_zeros(0), count)
            # With as many tokens as the width, R is square and any q is possible: no token is sought.
            if count < G.shape[1]:
                found = self._disaggregate(Mlp.of(block), G, b, count, draw_for(self.seed, self.name, "rows"))
            if len(found.u) < count:
                warn(
                    f"{self.name}: {len(found.u)} of {count} tokens were found (width {G.shape[1]}, {self.rounds} "
                    f"rounds of {self.starts} sets of rows). A low score here is no evidence of privacy.",
                )
            every.append(found)
        return every

    @torch.no_grad()
    def _disaggregate(
        self, mlp: Mlp, G: Float[Tensor, "m d"], b: Float[Tensor, " m"], count: int, draw: Generator
    ) -> Separated:
        """Return the tokens u_n of G = Σ_n δ_n u_nᵀ and b = Σ_n δ_n whose signs agree with the zeros of δ_n.

        `residual` is the share of each token's signs that do not.
        """
        # Step 1: L is m × n with orthonormal columns, R is n × d, and singular values of
        # the size of rounding are left out.
        L, σ, V = torch.linalg.svd(G, full_matrices=False)
        n = min(count, int((σ > UNIT_ROUNDOFF * σ[0]).sum()))
        L, R = L[:, :n], σ[:n, None] * V[:n]
        # Rows that are zero for all tokens restrict no q.
        alive = L.norm(dim=1) > self.tolerance * L.norm(dim=1).max()
        rows = L[alive]
        kept = L.new_zeros(0, n)
        found = Separated(R[:0], R[:0, 0], count)
        for _ in range(self.rounds if len(rows) >= n else 0):
            # A set that has a row twice leaves more than one direction, and none of them is sparse.
            chosen = torch.randint(len(rows), (self.starts, n - 1), generator=draw).to(L.device)
            # Step 2: the last column of a complete QR decomposition is orthogonal to the n − 1 rows drawn. It is a
            # token's if these rows are zero for one token, and then L q has far more zeros than the rows drawn.
            Q = torch.linalg.qr(rows[chosen].mT, mode="complete").Q[..., -1]
            new = Q[_zeros(rows, Q, self.tolerance).double().mean(1) > self.zeros]
            if not len(new):
                continue
            # Each direction is found again from all rows that it leaves at zero. Sparser ones
            # replace those of earlier rounds.
            new = _sharpen(rows, _sparsest(rows, new, self.tolerance), self.tolerance)
            kept = _sparsest(rows, torch.cat([kept, new]), self.tolerance)
            if len(kept) < n:
                continue
            # Step 3: b = L Q λ gives the lengths λ of the columns, and G = (L Q Λ) U gives U = (Q Λ)⁻¹ R.
            Q = kept.mT
            lengths = torch.linalg.lstsq(L @ Q, b[:, None]).solution[:, 0]
            u = torch.linalg.solve(Q * lengths, R)
            # ReLU passes a gradient where W₁ u + b₁ > 0, so that δ must be nonzero exactly there. The share of
            # rows where it is not is the token's residual.
            off = L @ Q
            on = off.abs() > self.tolerance * off.abs().amax(0)
            wrong = (((u @ mlp.W1.mT + mlp.b1) > 0).mT != on)[alive].double().mean(0)
            best = wrong < self.sure
            if int(best.sum()) > len(found.u):
                found = Separated(u[best], wrong[best], count)
            if len(found.u) == n:
                break
        return found


def _activation(block: PreNormBlock) -> str:
    """Return the name of the activation of a block's MLP."""
    return type(block.mlp.get_submodule("act")).__name__


def _zeros(rows: Float[Tensor, "m n"], Q: Float[Tensor, "s n"], tolerance: float) -> Tensor:
    """Return which entries of L q are zero, for each q."""
    # δ is s × m. An entry counts as zero if it is small compared with the largest one of the same direction.
    δ = (Q @ rows.mT).abs()
    return δ <= tolerance * δ.amax(1, keepdim=True)


def _sharpen(rows: Float[Tensor, "m n"], Q: Float[Tensor, "s n"], tolerance: float) -> Float[Tensor, "s n"]:
    """Return the directions as all rows that they leave at zero determine them, not the n − 1 drawn alone."""
    # The q of least |rows q|² over the rows at zero is the eigenvector of the smallest
    # eigenvalue of their n × n Gram matrix.
    left = _zeros(rows, Q, tolerance)[..., None] * rows
    return torch.linalg.eigh(left.mT @ left).eigenvectors[..., 0]


def _sparsest(rows: Float[Tensor, "m n"], Q: Float[Tensor, "s n"], tolerance: float) -> Float[Tensor, "k n"]:
    """Return the directions that leave the most zeros, except for those in the span of the ones before them.

    Of all bases among the directions it is the one with the most zeros, so that what is left out is never needed.
    """
    Q = Q[_zeros(rows, Q, tolerance).sum(1).argsort(descending=True, stable=True)]
    chosen, basis = [], Q.new_zeros(0, Q.shape[1])
    for i in range(len(Q)):
        if len(basis) == Q.shape[1]:
            break
        # Gram and Schmidt: a direction is independent if enough of it lies outside the span of the sparser ones.
        rest = Q[i : i + 1] - (Q[i : i + 1] @ basis.mT) @ basis
        if bool(rest.norm() > _INDEPENDENT):
            chosen.append(i)
            basis = torch.cat([basis, nn.functional.normalize(rest, dim=1)])
    return Q[chosen]
