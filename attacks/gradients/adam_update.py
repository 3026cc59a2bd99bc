"""`adam-update`: the image from the update of a client's local training by Adam or AdamW, from its signs and its ε."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import (
    EDGE_WIDTH,
    RTOL,
    Shown,
    Smoothness,
    largest_step,
    photograph_gradients,
    rounding_of_embedding,
    shown_by_adam,
    slot_gradients,
    slot_rows,
    too_many,
    warn_of_limits,
    weighted_patches,
)
from privlab.base import PrivlabError, check_range
from privlab.patches import patchify
from privlab.release import each_release, without_decay
from privlab.threat import Capability, Client, GradientDefense, Observation
from privlab.victims import VictimModel

__all__ = ["AdamUpdate", "misfit"]

_PE, _PROJECTION = "pos_embed", "patch_embed.proj.weight"

_TOLERANCES = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Errors that ∂ℓ/∂W is allowed, in units of its channels' mean magnitude, from the first stage of the search on."""

_PSEUDO_COUNT = 3.0
"""Known entries of mean size that each row and column counts beside its own, for its scale."""

_BOX = 100.0
"""Weight of the squared distance of normalised pixels from those of black and white."""


@dataclass(frozen=True)
class AdamUpdate:
    """Find the patches X and the gradient A of the position embeddings whose product Aᵀ X has the signs that Adam sent.

    A fresh state of Adam moves a weight by η g / (|g| + ε) in its first step. So the update has the sign of each g, and
    the magnitude of those that ε is no rounding error to (`shown_by_adam`); of the others a lower bound.

    1. X is the least-squares solution that takes unknown magnitudes for their expected ones.
    2. −log of the likelihood of signs, bounds and known magnitudes, plus |A| over its scales and the energy of X's
       edges (`Smoothness`), is minimised over A and X together by L-BFGS, in stages: the errors that G = Aᵀ X may have
       shrink from the mean magnitude of a channel to a hundredth of it, and no further than rounding.

    Of several steps the size of a median entry's move counts as that of a full step, and the spread of the moves about
    it as their error: an image that is learnt in the first steps has small gradients after them.

    It has no guarantee where most magnitudes are unknown, which is the usual case at small rates. A state that was
    carried from other rounds is refused where it shows: where a weight moved further than a fresh state can move it.

    Args:
        steps: steps of L-BFGS in each of the five stages; 0 leaves out step 2.
        prior: weight of the edges' energy.

    Source: one-bit and interval measurements as in 1-bit compressed sensing (Boufounos and Baraniuk, CISS 2008), here
        of a product of two unknown matrices.
    """

    name: ClassVar[str] = "adam-update"
    paper: ClassVar[str] = "ours: patch-gradient on the signs and the small entries that Adam's first step shows"
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.KNOWS_WEIGHTS,
            Capability.LEARNABLE_PE_GRADIENT,
            Capability.BATCH_SIZE_ONE,
            Capability.CLIENT_UPDATE,
        }
    )
    effort: ClassVar[str] = "standard"
    search: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = (_PE, _PROJECTION)
    updates_of: ClassVar[tuple[str, ...]] = ("adam", "adamw")

    steps: int = 200
    prior: float = 5.0

    def __post_init__(self) -> None:
        """Raise PrivlabError if an option is out of range."""
        check_range(self.steps >= 0, f"steps of {self.name}", "at least 0", self.steps)
        check_range(0 <= self.prior < float("inf"), f"prior of {self.name}", "at least 0 and finite", self.prior)

    def beyond(self, seen: Observation) -> str | None:
        """Return what violates N < D, with the numbers."""
        return too_many(seen)

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients trained on.

        Raises:
            PrivlabError: if the client does not train by Adam or AdamW, decays by Adam, filters its update, or did not
                begin with a fresh state.
        """
        client = seen.client
        if client is None or client.optimiser not in self.updates_of:
            found = "no client" if client is None else f"client.optimiser={client.optimiser}"
            raise PrivlabError(f"{self.name} needs the update of a client that trains by adam or adamw. Found {found}.")
        filters = [part.name for part in seen.defense if isinstance(part, GradientDefense)]
        why = f"the filter {filters[0]}" if filters else ""
        why = why or ("" if client.is_linear else f"weight decay {client.weight_decay:g} inside Adam's division")
        if why:
            raise PrivlabError(f"{self.name} does not undo {why}. That it does not apply is no evidence of privacy.")
        warn_of_limits(self.name, slot_gradients(seen), most=seen.model.vit.embed_dim - 1)
        model, photographs = seen.model, seen.photographs
        found = [self._patches(model, *_shown(model, client, of), photographs) for of in each_release(seen)]
        return seen.model.to_images(torch.stack(found)).to(seen.model.mean)

    def _patches(
        self, model: VictimModel, a: Shown, g: Shown, photographs: tuple[str, ...] | None
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image.

        Args:
            model: the server's model.
            a: what is shown of the gradient of the position embeddings, N × D.
            g: what is shown of that of the projection, D × K.
            photographs: those that the prior may be learned from.
        """
        scale_a, scale_g = _scales(a), _scales(g)
        A, G = (
            torch.where(of.known, of.value, of.value + of.value.sign() * size)
            for of, size in ((a, scale_a), (g, scale_g))
        )
        errors = [torch.where(of.known, of.deviation, size) for of, size in ((a, scale_a), (g, scale_g))]
        X = weighted_patches(A, G, errors[0], errors[1])
        if not self.steps:
            return X
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
                return explained + size + self.prior * edges + _BOX * outside

            share, X = _descend(energy, share, X, self.steps)
        return X


def _shown(model: VictimModel, client: Client, update: Mapping[str, Float[Tensor, "..."]]) -> tuple[Shown, Shown]:
    """Return what one update shows of the gradients of the position embeddings of patches and of the projection.

    Raises:
        PrivlabError: if a weight moved further than a fresh state can move it.
    """
    moved = without_decay(model, update, 1 - client.kept_share)
    rounded = rounding_of_embedding(model, client, update)
    # AdamW stores the decayed weight, and then the moved one.
    twice = 2**0.5 if client.weight_decay else 1.0
    A, dA = (slot_rows(model, each[_PE]) for each in (moved, rounded))
    G, dG = (each[_PROJECTION].flatten(1) for each in (moved, rounded))
    full, most = client.rates[0], largest_step(client)
    for M, deviation in ((A, dA), (G, dG)):
        over = M.abs() - most - 6 * twice * deviation - most * 8 * RTOL
        if bool((over > 0).any()):
            raise PrivlabError(
                "adam-update needs an optimiser that begins the round with a fresh state. Found a weight that moved by "
                f"{float(M.abs().max()):.3g}, and a fresh state moves it by {most:.3g} at most: the state was carried, "
                "or client.lr is another one."
            )
    spread = 0.0
    if client.total_steps > 1:
        sizes = torch.cat([A.flatten(), G.flatten()]).abs()
        full = float(sizes.median())
        large = sizes[sizes > full / 2]
        spread = 1.4826 * float((large - full).abs().median())  # of a normal distribution, from the median deviation
    shown = [
        shown_by_adam(M / full, ((twice * d).square() + spread**2 + (RTOL * M).square()).sqrt() / full, client.eps)
        for M, d in ((A, dA), (G, dG))
    ]
    return shown[0], shown[1]


def _scales(of: Shown) -> Float[Tensor, "r c"]:
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
