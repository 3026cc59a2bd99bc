"""Two matrices and their product from signs, bounds and some magnitudes of one of them and of the product."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers.adam_shares import Shown
from privlab.attacks.solvers.prior import EDGE_WIDTH, Smoothness, photograph_gradients
from privlab.patches import patchify
from privlab.victims import VictimModel

__all__ = ["expected_excess", "misfit", "signed_product"]

_TOLERANCES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Errors that ∂ℓ/∂W is allowed, in units of its channels' mean magnitude, from the first stage of the search on."""

_PSEUDO_COUNT = 3.0
"""Known entries of mean size that each row and column counts beside its own, for its scale."""

_BOX = 100.0
"""Weight of the squared distance of normalised pixels from those of black and white."""

_EDGES = 5.0
"""Weight of the edges' energy, beside which an entry of G off by its error counts a half."""


def signed_product(
    model: VictimModel,
    a: Shown,
    g: Shown,
    X: Float[Tensor, "n k"],
    photographs: tuple[str, ...] | None,
    steps: int,
    prior: float,
) -> Float[Tensor, "n k"]:
    """Return the normalised patches X of least energy over X and A, for G = Aᵀ X.

    −log of the likelihood of signs, bounds and known magnitudes, plus |A| over its scales and the energy of X's edges
    (`Smoothness`), is minimised by L-BFGS, in five stages: the errors that G may have shrink from the mean magnitude of
    a channel to a hundredth of it, and no further than rounding.

    Args:
        model: the server's model.
        a: what is shown of the gradient of the position embeddings, N × D.
        g: what is shown of that of the projection, D × K.
        X: where the search begins.
        photographs: those that the prior may be learned from.
        steps: steps of L-BFGS in each stage.
        prior: factor of the weight of the edges' energy.
    """
    scale_a, scale_g = expected_excess(a), expected_excess(g)
    A = torch.where(a.known, a.value, a.value + a.value.sign() * scale_a)
    black, white = (
        patchify(model.normalise(X.new_full((1, *model.image_shape), shade)), model.patch)[0].to(X)
        for shade in (0.0, 1.0)
    )
    smooth = Smoothness(model.image_shape, photograph_gradients(model, photographs).to(X))
    share, X = A / scale_a, X.clamp(black, white)
    for tolerance in _TOLERANCES:
        of_channel = tolerance * scale_g.mean(1, keepdim=True)

        def energy(
            share: Float[Tensor, "n d"],
            X: Float[Tensor, "n k"],
            allowed: Tensor = of_channel,
            off: float = tolerance,
        ) -> Tensor:
            A = share * scale_a
            size = (share.square() + 0.01).sqrt().masked_fill(a.known, 0).sum()
            outside = F.relu(X - white).square().sum() + F.relu(black - X).square().sum()
            edges = smooth.sparse_energy(X[None], EDGE_WIDTH).sum()
            explained = misfit(a, A, 0.3 * off * scale_a, 0.1 * scale_a) + misfit(g, A.mT @ X, allowed, allowed)
            return explained + size + prior * _EDGES * edges + _BOX * outside

        share, X = _descend(energy, share, X, steps)
    return X


def expected_excess(of: Shown) -> Float[Tensor, "r c"]:
    """Return the expected excess of each magnitude over its bound: of rows times of columns, over that of all.

    Magnitudes that are exponentially distributed, of which some are known up to a bound alone, have their sum over the
    count of those that are known as their mean of greatest likelihood.
    """
    known = of.known.to(of.value)
    size, tiny = of.value.abs(), torch.finfo(of.value.dtype).tiny
    whole = size.sum() / known.sum().clamp_min(1)
    rows, columns = (
        (size.sum(dim, keepdim=True) + _PSEUDO_COUNT * whole) / (known.sum(dim, keepdim=True) + _PSEUDO_COUNT)
        for dim in (1, 0)
    )
    return (rows * columns / whole.clamp_min(tiny)).clamp_min(tiny)


def misfit(
    of: Shown, at: Float[Tensor, "r c"], known: Float[Tensor, "r _"], unknown: Float[Tensor, "r _"]
) -> Float[Tensor, ""]:
    """Return half the squared errors: from known values, and of the others from their signs and bounds.

    Args:
        of: what is shown.
        at: the gradient to compare.
        known: the error that known values are allowed beside their own.
        unknown: the error that signs and bounds are allowed.
    """
    exact = (at - of.value) / (of.deviation.square() + known.square()).sqrt()
    bound = F.relu(of.least - of.value.sign() * at) / unknown
    return torch.where(of.known, exact, bound).square().sum() / 2


def _descend(
    energy: Callable[[Tensor, Tensor], Tensor], share: Float[Tensor, "n d"], X: Float[Tensor, "n k"], steps: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k"]]:
    """Return where so many steps of L-BFGS lead from a point of both unknowns."""
    point = [each.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for each in (share, X)]
    search = torch.optim.LBFGS(
        point, max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
    )

    def closure() -> Tensor:
        search.zero_grad()
        with torch.enable_grad():
            value = energy(*point)
        value.backward()
        return value

    search.step(closure)
    return point[0].detach(), point[1].detach()
