"""What Adam's share of a full step shows: signs, the magnitude of small entries, and two matrices of such a product.

Adam moves a weight by η · u with u = g / (|g| + ε) in its first step. So sgn g is known of every entry, but |g| only of
entries that are not much larger than ε. Sought are the patches X in G = Aᵀ X, where A and G are such gradients of the
position embeddings and of the patch projection.

1. `shown_by_round` divides the update by the full step, and `shown_by_adam` turns each share u into what it shows of g.
2. `expected_excess` guesses the magnitudes that are not shown from those that are.
3. `signed_product` searches for A and X together, under signs, bounds, known magnitudes and an image prior.
4. `likelihood_of_shares` hands all of it on to a search over more layers.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.first_blocks import as_rows, names_before
from privlab.attacks.solvers.linear import RTOL
from privlab.attacks.solvers.noisy_gradients import Likelihood
from privlab.attacks.solvers.prior import EDGE_WIDTH, Smoothness, photograph_gradients
from privlab.base import PrivlabError, gradients_enabled
from privlab.patches import patchify
from privlab.release import Update, rounding_deviation, without_decay
from privlab.threat import Client
from privlab.victims import VictimModel

_TOLERANCES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Errors that ∂ℓ/∂W is allowed, in units of its channels' mean magnitude, from the first stage of the search on."""

_PSEUDO_COUNT = 3.0  # known entries of mean size that each row and column counts beside its own, for its scale
_BOX = 100.0  # weight of the squared distance of normalised pixels from those of black and white
_EDGES = 5.0  # weight of the edges' energy, beside which an entry of G off by its error counts a half

_CERTAIN = 3.0
"""Standard deviations of rounding by which a share must differ from a full one for its magnitude to be known."""


class Shown(NamedTuple):
    """What is shown of a gradient: where `known`, its `value` up to a `deviation`; else `sign` and `least` magnitude.

    An entry that is not known has its least magnitude as its value, which may be 0: its sign is known all the same.
    `eps` is Adam's ε, in units of the gradient.
    """

    value: Float[Tensor, "r c"]
    deviation: Float[Tensor, "r c"]
    least: Float[Tensor, "r c"]
    known: Bool[Tensor, "r c"]
    sign: Float[Tensor, "r c"]
    eps: float

    def last(self, rows: int) -> "Shown":
        """Return what is shown of the last rows alone, such as those of patches."""
        value, deviation, least, known, sign, eps = self
        return Shown(value[-rows:], deviation[-rows:], least[-rows:], known[-rows:], sign[-rows:], eps)


def shown_by_adam(share: Float[Tensor, "r c"], deviation: Float[Tensor, "r c"], eps: float) -> Shown:
    """Return what u = g / (|g| + ε) shows of g: |g| = ε |u| / (1 − |u|), and sgn g = sgn u.

    An error σ in u is one of ε σ / (1 − |u|)² in |g|. Where u is within three σ of a full step, |g| has no upper bound.

    Args:
        share: u, signed, with errors.
        deviation: σ, their standard deviations, > 0.
        eps: ε, in units of the gradient.
    """
    # u has reached a full step, within its error, where 1 − |u| ≤ 3 σ: |g| then has a lower bound only.
    size = share.abs()
    known = 1 - size > _CERTAIN * deviation
    # The lower bound of |g| is ε v / (1 − v) at the least share v = |u| − 3 σ that the error allows (v ≥ 0).
    least = (size.clamp_max(1) - _CERTAIN * deviation).clamp_min(0)
    least = eps * least / (1 - least)
    # |g| = ε |u| / (1 − |u|). Where |g| is not known, `missing` is 1, which avoids a division by zero and is not used.
    missing, sign = (1 - size).where(known, torch.ones_like(size)), share.sign()
    value = sign * torch.where(known, eps * size / missing, least)
    return Shown(value, eps * deviation / missing**2, least, known, sign, eps)


def shown_by_round(model: VictimModel, client: Client, update: Update, blocks: int | None = None) -> dict[str, Shown]:
    """Return what the update of a round shows of each parameter's gradient, by name, as rows of a matrix.

    Position embeddings have a row for each token, and a vector is one row.

    Of several steps the median move of the embedding counts as a full step, and the spread about it as an error.

    Args:
        model: the model before the round.
        client: the public settings of a client that trains by Adam or AdamW from a fresh state.
        update: θ_0 − θ_T by timm's names; that of the position embeddings and of the projection, if of several steps.
        blocks: L, if only parameters before block L are asked for; how far the others moved is checked all the same.

    Raises:
        PrivlabError: if a weight moved further than a fresh state can move it.
    """
    # AdamW stores the decayed weight, and then the moved one.
    twice = 2**0.5 if client.weight_decay else 1.0
    # `moved` is what the gradients moved, without decay; `rounded` is the standard
    # deviation of rounding, both as matrices.
    moved, rounded = {}, {}
    for name, M in without_decay(model, update, 1 - client.kept_share).items():
        before = model.vit.get_parameter(name).detach()
        moved[name] = as_rows(name, M)
        deviation = rounding_deviation(before, update[name], client)
        rounded[name] = twice * as_rows(name, deviation)
    # An entry beyond the largest possible step, with six deviations of rounding, contradicts the assumed optimiser.
    full, most = client.rates[0], largest_step(client)
    for name, M in moved.items():
        over = M.abs() - most - 6 * rounded[name] - most * 8 * RTOL
        if bool((over > 0).any()):
            raise PrivlabError(
                "adam-update needs an optimiser that begins the round with a fresh state. Found a weight that moved by "
                f"{float(M.abs().max()):.3g}, and a fresh state moves it by {most:.3g} at most: the decay is not "
                f"client.weight_decay={client.weight_decay:g}, the state was carried, or client.lr is another one."
            )
    spread = 0.0
    if client.total_steps > 1:
        # No entry shows a full step exactly after several steps: the median move counts as one, and the spread of
        # the larger moves about it as an error.
        sizes = torch.cat([moved[name].flatten() for name in ("pos_embed", "patch_embed.proj.weight")]).abs()
        full = float(sizes.median())
        large = sizes[sizes > full / 2]
        spread = 1.4826 * float((large - full).abs().median())  # of a normal distribution, from the median deviation
    # All errors of a move add up as variances; the division by `full` turns the move
    # and its error into shares of a step.
    shown = {}
    for name in moved if blocks is None else names_before(blocks, moved):
        M = moved[name]
        deviation = (rounded[name].square() + spread**2 + (RTOL * M).square()).sqrt()
        shown[name] = shown_by_adam(M / full, deviation / full, client.eps)
    return shown


def largest_step(client: Client) -> float:
    """Return the most that a fresh state of Adam moves a weight in a round, without decay: Σ_t η_t √(Σ_i a_ti² / b_ti).

    a_ti and b_ti are the shares of step i's gradient in the first moment of step t and of its square in the second, so
    that this is Cauchy and Schwarz's bound of |m_t| / √v_t. It is η for one step.

    Source: Adam (Kingma and Ba, ICLR 2015), Algorithm 1; AdamW moves the same way.
    """
    return sum(
        # |Σ a_i g_i| ≤ √(Σ a_i² / b_i) · √(Σ b_i g_i²), for each step t.
        rate * math.sqrt(sum(a * a / b if b else math.inf for a, b in shares if a))
        for rate, shares in zip(client.rates, _shares(client), strict=True)
    )


def least_step(client: Client) -> float:
    """Return the least that a fresh state of Adam moves a weight by gradients of one sign: Σ_t η_t min_i a_ti / √b_ti.

    Step t moves it by η_t Σ_i a_ti |g_i| / ‖y‖ with y_i = √b_ti |g_i|, and Σ_i y_i ≥ ‖y‖. It is η for one step. ε is
    left out: it is as nothing to larger gradients. AdamW's decay takes a share of all that at most (`kept_share`).

    Source: as of `largest_step`.
    """
    return client.kept_share * sum(
        rate * min(a / math.sqrt(b) for a, b in shares if b)
        for rate, shares in zip(client.rates, _shares(client), strict=True)
    )


def _shares(client: Client) -> Iterator[list[tuple[float, float]]]:
    """Yield (a_ti, b_ti) of all i ≤ t for each step t: shares in its first and second moment, their bias corrected."""
    for t in range(1, client.total_steps + 1):
        first, second = (
            # Step i's gradient has the weight (1 − β) β^(t − i) in the moment of step
            # t, over the bias correction 1 − β^t.
            [(1 - beta) * beta ** (t - i) / (1 - beta**t) for i in range(1, t + 1)]
            for beta in (client.beta1, client.beta2)
        )
        yield list(zip(first, second, strict=True))


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
    # A starts from its shown values and guessed magnitudes. Both unknowns have the scale 1:
    # A is searched as shares of scale_a.
    scale_a, scale_g = expected_excess(a), expected_excess(g)
    A = expected_value(a)
    # Normalised pixels of black and of white, n × k: the energy grows with the distance of X from this box.
    black, white = (
        patchify(model.normalise(X.new_full((1, *model.image_shape), shade)), model.patch)[0].to(X)
        for shade in (0.0, 1.0)
    )
    smooth = Smoothness(model.image_shape, photograph_gradients(model, photographs).to(X))
    share, X = A / scale_a, X.clamp(black, white)
    for tolerance in _TOLERANCES:
        # G is compared with an error that shrinks from stage to stage, in units of the mean
        # magnitude of a row of G (a channel).
        of_channel = tolerance * scale_g.mean(1, keepdim=True)

        def energy(
            share: Float[Tensor, "n d"], X: Float[Tensor, "n k"], allowed: Tensor = of_channel, off: float = tolerance
        ) -> Tensor:
            A = share * scale_a
            # |share|, made smooth: −log of the exponential density of a magnitude of scale
            # scale_a. Known magnitudes need no prior.
            size = (share.square() + 0.01).sqrt().masked_fill(a.known, 0).sum()
            outside = F.relu(X - white).square().sum() + F.relu(black - X).square().sum()
            edges = smooth.sparse_energy(X[None], EDGE_WIDTH).sum()
            # A may miss its known values by a share of its scale, which shrinks too, and G = Aᵀ X (D × K) may miss what
            # is shown of it by the error of this stage.
            explained = misfit(a, A, 0.3 * off * scale_a, 0.1 * scale_a) + misfit(g, A.mT @ X, allowed, allowed)
            return explained + size + prior * _EDGES * edges + _BOX * outside

        # Each stage starts where the last one ended, with a smaller allowed error.
        share, X = _descend(energy, share, X, steps)
    return X


def expected_excess(of: Shown) -> Float[Tensor, "r c"]:
    """Return the expected excess of each magnitude over its bound: of rows times of columns, over that of all.

    Magnitudes that are exponentially distributed, of which some are known up to a bound alone, have their sum over the
    count of those that are known as their mean of greatest likelihood. Where no size and no bound is shown, it is ε.
    """
    # Exponential magnitudes with lower bounds: the mean of greatest likelihood is
    # Σ (sizes and bounds) over the count of known ones.
    known = of.known.to(of.value)
    size, tiny = of.value.abs(), torch.finfo(of.value.dtype).tiny
    whole = size.sum() / known.sum().clamp_min(1)
    whole = whole.where(whole > 0, whole.new_tensor(of.eps))
    # The same mean for each row and each column, shrunk to the mean of all by `_PSEUDO_COUNT` entries of that size.
    rows, columns = (
        (size.sum(dim, keepdim=True) + _PSEUDO_COUNT * whole) / (known.sum(dim, keepdim=True) + _PSEUDO_COUNT)
        for dim in (1, 0)
    )
    # A product of row and column scales (rank one). An exponential density has no
    # memory: its mean is also the mean excess.
    return (rows * columns / whole).clamp_min(tiny)


def expected_value(of: Shown) -> Float[Tensor, "r c"]:
    """Return the gradient with each magnitude that is not known at what is expected of it: its bound and the excess."""
    return torch.where(of.known, of.value, of.value + of.sign * expected_excess(of))


def misfit(
    of: Shown, at: Float[Tensor, "r c"], known: Float[Tensor, "r _"], unknown: Float[Tensor, "r _"]
) -> Float[Tensor, ""]:
    """Return half the squared errors: from known values, and of the others from their signs and bounds.

    Args:
        of: what is shown.
        at: the gradient to compare.
        known: the error that known values are allowed besides their own.
        unknown: the error that signs and bounds are allowed.
    """
    # Known entries: (at − value) / √(σ² + allowed²), the deviation of both errors.
    exact = (at - of.value) / (of.deviation.square() + known.square()).sqrt()
    # Others: how far sgn · g is below its bound. The bound is ≥ 0, so that a wrong sign always costs.
    bound = F.relu(of.least - of.sign * at) / unknown
    return torch.where(of.known, exact, bound).square().sum() / 2


def _descend(
    energy: Callable[[Tensor, Tensor], Tensor], share: Float[Tensor, "n d"], X: Float[Tensor, "n k"], steps: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k"]]:
    """Return where so many steps of L-BFGS lead from a point of both unknowns."""
    # Both tolerances are 0, so that a small gradient or change does not end the search. Nor does torch's limit of
    # evaluations, 1.25 a step: the line search needs about 1.03.
    point = [each.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for each in (share, X)]
    search = torch.optim.LBFGS(
        point, max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
    )

    def closure() -> Tensor:
        search.zero_grad()
        with gradients_enabled():
            value = energy(*point)
        value.backward()
        return value

    search.step(closure)
    return point[0].detach(), point[1].detach()


def likelihood_of_shares(shown: Mapping[str, Shown], like: Tensor) -> Likelihood:
    """Return what is shown of gradients as their likelihood, in units of ε: known entries, and bounds of the others.

    An entry of which nothing but the sign is shown counts as its expected value, with an error as large. So do all
    entries if no magnitude is known: bounds alone say nothing of the scale.

    Args:
        shown: what is shown of each parameter's gradient, by name.
        like: a tensor of the number format and device of the result.
    """
    released, variance, edge = {}, {}, {}
    scaled = any(bool(of.known.any()) for of in shown.values())
    for name, of in shown.items():
        bounded = ~of.known & (of.least > 0) & scaled
        value = torch.where(of.known | bounded, of.value, expected_value(of)) / of.eps
        deviation = torch.where(of.known | bounded, of.deviation, expected_excess(of)) / of.eps
        released[name], variance[name], edge[name] = (
            each.flatten()[None].to(like) for each in (value, deviation.square(), -1.0 * bounded)
        )
    return Likelihood(released, variance, edge)
