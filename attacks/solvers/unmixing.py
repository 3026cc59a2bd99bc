"""The two photographs of a mixture m = λ a + (1 − λ) b, whose pixels are grey levels, from equations with known errors.

A value m has one of at most 256² pairs (a, b), whose distance is about 0.004 levels. The equations determine some
combinations of patches a thousand times better than others, so that a few pairs that are certain settle the rest:

1. `_others_say`: what the equations say of each value, if those of all other patches have the pairs found so far.
2. `_pairs`: the pairs near that value.
3. `_beliefs`: among them the pairs that make two smooth photographs, by belief propagation over pixels and colours.
4. λ is fitted to these pairs, and all steps are repeated.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from privlab.patches import patchify, unpatchify

_PAIRS, _KEPT = 24, 4  # pairs that are tried for each value, and those that are left for the joint search over colours

_REACH = 4.0  # standard deviations within which a pair must lie

_SINGLE, _JOINT, _EPSILON = 0.6, 1.0, 0.1  # weights of the image prior for one colour and for all, and its ε

_TEMPER = 0.3  # exponent of beliefs, which are too sure: the pixels of a grid are in many loops

_LEAST = 2e-4  # least standard deviation of a value, in levels

_OUTLIER = 3.0  # a value so many standard deviations away counts as unknown in the next round

_SHARE_ERRORS = (1e-5, 1e-6, 1e-7, 3e-8, 1e-8)  # standard deviation of λ in each round, from that of a label on

_MESSAGES, _DAMPING = 10, 0.2  # of belief propagation


class Unmixed(NamedTuple):
    """Two photographs in grey levels, the first with the share λ, and the share of values whose pair is certain."""

    first: Float[Tensor, "c h w"]
    second: Float[Tensor, "c h w"]
    share: float
    certain: float


def unmix(
    mixed: Float[Tensor, "c h w"],
    precision: Float[Tensor, "k n n"],
    share: float,
    Γ: Float[Tensor, "c c"],
    levels: int = 255,
    rounds: int = 6,
) -> Unmixed:
    """Return the likeliest photographs a and b of whole grey levels with λ a + (1 − λ) b near an estimate.

    Args:
        mixed: the estimate of the mixture, in grey levels.
        precision: the inverse covariance of its errors in each column of pixels, one place in all N patches.
        share: λ, with an error of about 1e-5; of λ = p/q with a small q, many pairs have one value.
        Γ: the colour covariance of differences of adjacent pixels, in grey levels.
        levels: grey levels above black.
        rounds: how often pairs are chosen.

    Source: Yedidia et al. (IEEE Trans. Information Theory 2005), belief propagation on graphs with loops.
    """
    shape, λ = (mixed.shape[0], mixed.shape[1], mixed.shape[2]), share
    patch = round((len(precision) / shape[0]) ** 0.5)

    def rows(image: Tensor) -> Float[Tensor, "n k"]:
        return patchify(image[None].double(), patch)[0]

    def image(of: Float[Tensor, "n k"]) -> Float[Tensor, "c h w"]:
        return unpatchify(of[None], shape)[0]

    M, covariance = rows(mixed), torch.linalg.inv(precision)
    # The sites: what is believed of each value, at first nothing. b may differ from a by 60 levels.
    value, variance, difference = M, torch.full_like(M, 1e6), torch.full_like(M, 60.0)
    first = second = mixed
    certain = 0.0
    for round_ in range(rounds):
        # An error of λ moves all values by (a − b) δλ: it adds a covariance of rank one.
        of_share = _SHARE_ERRORS[min(round_, len(_SHARE_ERRORS) - 1)]
        d = of_share * difference.mT
        mean, deviation = _others_say(M, covariance + d[:, :, None] * d[:, None], value, variance)
        deviation = (deviation.square() + _LEAST**2).sqrt()
        a, b, fit = _pairs(image(mean), image(deviation), λ, levels)
        a, b, belief = _beliefs(a, b, fit, Γ)
        best = belief.argmax(-1, keepdim=True)
        first, second = (pairs.gather(-1, best)[..., 0].double() for pairs in (a, b))
        # The sites are the mean and variance of the values of these pairs under tempered beliefs.
        likely = (_TEMPER * belief.double()).softmax(-1)
        values = λ * a.double() + (1 - λ) * b.double()
        middle = (likely * values).sum(-1)
        spread = (likely * (values - middle[..., None]).square()).sum(-1)
        value, variance = rows(middle), rows(spread) + _LEAST**2
        is_far = (mean - value).square() > _OUTLIER**2 * (deviation.square() + variance)
        variance = torch.where(is_far, 1.0, variance)
        # M − value = δλ (a − b) + errors: generalised least squares, with the prior of δλ.
        difference = rows(first - second)
        weighed = torch.linalg.solve(covariance + torch.diag_embed(variance.mT), difference.mT[..., None])[..., 0]
        δ = (weighed * (M - value).mT).sum() / ((weighed * difference.mT).sum() + of_share**-2)
        λ, value = λ + float(δ), value + δ * difference
        certain = float((likely.amax(-1) > 0.99).double().mean())
        if certain == 1 and not is_far.any():
            break
    return Unmixed(first, second, λ, certain)


def _others_say(
    M: Float[Tensor, "n k"],
    covariance: Float[Tensor, "k n n"],
    value: Float[Tensor, "n k"],
    variance: Float[Tensor, "n k"],
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Return mean and standard deviation of each value by M, whose errors have a covariance, and all other sites."""
    # With S = covariance + diag(variance) and e = M − value, entry i of S⁻¹ e over that of the
    # diagonal is e_i less what the others predict of it (leave-one-out of Gaussian processes).
    inverse = torch.linalg.inv(covariance + torch.diag_embed(variance.mT))
    e, own = (M - value).mT, inverse.diagonal(dim1=1, dim2=2)
    predicted = e - (inverse @ e[..., None])[..., 0] / own
    left = (1 / own - variance.mT).clamp_min(torch.finfo(M.dtype).eps)
    return M - predicted.mT, left.sqrt().mT


def _pairs(
    mean: Float[Tensor, "c h w"], deviation: Float[Tensor, "c h w"], share: float, levels: int
) -> tuple[Float[Tensor, "c h w s"], Float[Tensor, "c h w s"], Float[Tensor, "c h w s"]]:
    """Return a and b of the pairs whose values are the nearest, and the logarithms of their likelihoods."""
    whole = torch.arange(levels + 1, dtype=mean.dtype, device=mean.device)
    values, order = (share * whole[:, None] + (1 - share) * whole).flatten().sort()
    place = torch.searchsorted(values, mean.contiguous())[..., None]
    place = place + torch.arange(-_PAIRS // 2, _PAIRS // 2, device=mean.device)
    inside = (place >= 0) & (place < len(values))
    place = place.clamp(0, len(values) - 1)
    off = (values[place] - mean[..., None]).abs() / deviation[..., None]
    # The nearest pair stays a candidate, however far it is.
    is_near = inside & (off < _REACH) | (off == off.amin(-1, keepdim=True))
    fit = torch.where(is_near, -off.clamp_max(_REACH).square() / 2, -1e4)
    pairs = order[place]
    return (pairs // (levels + 1)).float(), (pairs % (levels + 1)).float(), fit.float()


def _beliefs(
    a: Float[Tensor, "c h w s"], b: Float[Tensor, "c h w s"], fit: Float[Tensor, "c h w s"], Γ: Float[Tensor, "c c"]
) -> tuple[Float[Tensor, "c h w t"], Float[Tensor, "c h w t"], Float[Tensor, "c h w t"]]:
    """Return the few pairs of each value that make the smoothest photographs, and the logarithms of their beliefs."""
    colours = len(a)
    # Each colour alone leaves a few pairs of each value.
    deviation = Γ.diagonal().sqrt().to(a)
    alone = [
        _propagate(fit[c], _SINGLE, a[c][..., None] / deviation[c], b[c][..., None] / deviation[c])
        for c in range(colours)
    ]
    top = torch.stack(alone).topk(min(_KEPT, a.shape[3]), -1).indices
    a, b, fit = (each.gather(-1, top) for each in (a, b, fit))
    # All combinations of these are the states of a pixel. Differences of colours are smaller than those of one.
    states = torch.cartesian_prod(*[torch.arange(top.shape[3], device=a.device)] * colours).view(-1, colours)
    root = torch.linalg.cholesky(torch.linalg.inv(Γ)).to(a)
    both = [torch.stack([each[c][..., states[:, c]] for c in range(colours)], -1) @ root for each in (a, b)]
    together = sum((fit[c][..., states[:, c]] for c in range(1, colours)), fit[0][..., states[:, 0]])
    joint = _propagate(together, _JOINT, *both)
    belief = [
        torch.stack([joint[..., states[:, c] == s].amax(-1) for s in range(top.shape[3])], -1) for c in range(colours)
    ]
    return a, b, torch.stack(belief)


def _propagate(
    fit: Float[Tensor, "h w s"], weight: float, a: Float[Tensor, "h w s f"], b: Float[Tensor, "h w s f"]
) -> Float[Tensor, "h w s"]:
    """Return the logarithm of each state's best likelihood by max-product messages of the four neighbours.

    Two neighbours with the features x and y have the log likelihood −weight √(ε² + ‖x − y‖²), for each photograph.
    """

    def between(one: tuple[slice, slice], other: tuple[slice, slice]) -> Tensor:
        apart = [torch.cdist(each[one], each[other]).square() + _EPSILON**2 for each in (a, b)]
        return -weight * (apart[0].sqrt() + apart[1].sqrt())  # receiver's state, sender's state

    def sent(belief: Tensor, log_likelihood: Tensor) -> Tensor:
        message = (belief[..., None, :] + log_likelihood).amax(-1)
        return message - message.amax(-1, keepdim=True)

    every = slice(None)
    left, right, upper, lower = (every, slice(-1)), (every, slice(1, None)), (slice(-1), every), (slice(1, None), every)
    # A direction has the pixels that receive, those that send, the reverse direction, and where the border is.
    directions = (
        (right, left, 1, (0, 0, 1, 0)),
        (left, right, 0, (0, 0, 0, 1)),
        (lower, upper, 3, (0, 0, 0, 0, 1, 0)),
        (upper, lower, 2, (0, 0, 0, 0, 0, 1)),
    )
    likelihoods = [between(to, by) for to, by, _, _ in directions]
    messages = torch.zeros(4, *fit.shape).to(fit)
    for _ in range(_MESSAGES):
        belief = fit + messages.sum(0)
        new = [
            pad(sent((belief - messages[reverse])[by], likelihood), border)
            for (_, by, reverse, border), likelihood in zip(directions, likelihoods, strict=True)
        ]
        messages = _DAMPING * messages + (1 - _DAMPING) * torch.stack(new)
    belief = fit + messages.sum(0)
    return belief - belief.amax(-1, keepdim=True)
