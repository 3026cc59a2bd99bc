"""`adam-update`: the image from the update of a client's local training by Adam or AdamW, from its signs and its ε."""

# Known are θ_0, the client's settings, and the update of a client that trained on one image by Adam from a fresh state:
# its first step moves a weight by η g / (|g| + ε). Sought are the normalised patches X (N × K).
# 1. `shown_by_round` undoes decay, and reads of each g its sign, and its magnitude
# where that is not large compared with ε.
# 2. With expected magnitudes for the others, `weighted_patches` solves Aᵀ X = G for a first X.
# 3. `_Search` descends over X and Δ = ∂ℓ/∂z_L, which give the gradients of all matrices before it, by their signs.
# Where many magnitudes of ∂ℓ/∂W are known, `signed_product` fits A and X to them instead.
# 4. For L = 1, 2, … blocks, damped Gauss-Newton steps of a `Stage` move X and Δ, until all gradients before block L
# have the known magnitudes and keep to the bounds of the others.

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import (
    ONE_IMAGE,
    FirstBlocks,
    Shown,
    Smoothness,
    Stage,
    expected_excess,
    expected_value,
    likelihood_of_shares,
    photograph_gradients,
    search_by_signs,
    shown_by_round,
    signed_product,
    slot_gradients,
    too_many,
    warn_of_limits,
    weighted_patches,
)
from privlab.base import AtLeast0, AtLeast1, Checked, NotNegative, PrivlabError, draw_for, full_precision
from privlab.release import Update, each_release
from privlab.threat import Capability, Client, GradientDefense, Observation
from privlab.victims import hash_of

_PE, _PROJECTION = "pos_embed", "patch_embed.proj.weight"

_EPSILON = 0.1  # ε of the image prior of the last search, in standard deviations of differences of adjacent pixels

_KNOWN_ENOUGH = 1 / 3
"""The share of ∂ℓ/∂W with known magnitudes from which the embedding's two gradients alone are explained."""


@dataclass(frozen=True)
class AdamUpdate(Checked):
    """Find the patches X that give the gradients of the first blocks the signs and magnitudes that Adam shows.

    Idea: Adam divides each entry of the gradient by its own magnitude, so that an update shows its sign. Small entries
    show their magnitude too, because Adam adds ε to what it divides by. The attack looks for an image, as smooth as
    photographs are, and for one gradient behind the first blocks, which together give matrices these signs and sizes.

    Steps: undo decay, read signs, invert ε → search by signs → fit to magnitudes and bounds

    Algorithm: A fresh state of Adam moves a weight by η g / (|g| + ε) in its first step. So the update has the sign of
    each g, and the magnitude of those that are not large compared with ε (`shown_by_adam`); of others a lower bound.

    1. X is the least-squares solution of (∂ℓ/∂E_pos)ᵀ X = ∂ℓ/∂W that takes unknown magnitudes for their expected ones.
    2. X and Δ = ∂ℓ/∂z_L give the gradients of all matrices of the embedding and of the first L blocks, whatever follows
       (`FirstBlocks`). The mean of 1 − cos, of each row of these with what is shown of it, is minimised over both by
       Adam, with the energy of X's edges (`Smoothness`). Each block adds signs and no unknown. Where more than a third
       of ∂ℓ/∂W is known, the embedding's two gradients alone are explained instead (`signed_product`).
    3. From there, damped Gauss-Newton steps fit X and Δ to the known magnitudes, within their errors, and to the signs
       and bounds of the others, with L = 1 and then with 2 (`Stage`).

    Of several steps the size of a median entry's move counts as that of a full step, and the spread of the moves about
    it as their error: an image that is learnt in the first steps has small gradients after them.

    A state that was carried from other rounds is refused where a weight moved further than a fresh one can move it.

    Exact if: no condition is known: it has no guarantee. The fewer patches there are, and the more entries have a
    magnitude that ε shows, the nearer it comes: at high rates and for images with a small gradient.

    Fails if: the optimiser's state is not fresh, a filter was applied, or the decay is inside Adam's division (AdamW's
    is undone). It refuses a gradient of several images, because its equations then mix the images.

    Cost: 90 s an image of 96 pixels, 150 s of 160 (ViT-Ti, one core).

    Studies: adam, updates

    Args:
        steps: steps of the search by signs; 0 leaves out both first searches.
        blocks: the largest L, at least 0.
        stage_steps: steps of L-BFGS in each of the five stages of the other search.
        prior: factor of the weight of the edges' energy in both.
        rounds: Gauss-Newton steps for each number of blocks; 0 leaves them out.
        solver_steps: steps of conjugate gradients in each, at least 1.

    Source: one-bit measurements as in 1-bit compressed sensing (Boufounos and Baraniuk, CISS 2008), here of what a
    network's first blocks make of two unknown matrices.
    """

    name: ClassVar[str] = "adam-update"
    paper: ClassVar[str] = "ours: patch-gradient on the signs and the small entries that Adam's first step shows"
    order: ClassVar[int] = 30
    short: ClassVar[Mapping[str, Any]] = {"steps": 1, "stage_steps": 1, "rounds": 1, "solver_steps": 2}
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE | {Capability.KNOWS_WEIGHTS, Capability.CLIENT_UPDATE}
    effort: ClassVar[str] = "standard"
    search: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = (_PE, _PROJECTION, "*")
    updates_of: ClassVar[tuple[str, ...]] = ("adam", "adamw")

    steps: AtLeast0 = 400
    blocks: AtLeast0 = 2
    stage_steps: AtLeast0 = 200
    prior: NotNegative = 1.0
    rounds: AtLeast0 = 12
    solver_steps: AtLeast1 = 60

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
        # A filter changes signs or shares, and decay inside Adam's division is part of g. Nothing here undoes either.
        filters = [part.name for part in seen.defense if isinstance(part, GradientDefense)]
        why = f"the filter {filters[0]}" if filters else ""
        why = why or ("" if client.is_linear else f"weight decay {client.weight_decay:g} inside Adam's division")
        if why:
            raise PrivlabError(f"{self.name} does not undo {why}. That it does not apply is no evidence of privacy.")
        warn_of_limits(self.name, slot_gradients(seen), most=seen.model.vit.embed_dim - 1)
        found = [self._patches(seen, client, of) for of in each_release(seen)]
        return seen.model.to_images(torch.stack(found)).to(seen.model.mean)

    def _patches(self, seen: Observation, client: Client, update: Update) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image."""
        # |u| / η = |g| / (|g| + ε) gives |g| = ε |u| / (η − |u|), known only where rounding does not hide the
        # difference from a full step. Gradients behind the last block that is searched are not needed.
        shown = shown_by_round(seen.model, client, update, self.blocks)
        # Unknown magnitudes are their bound plus the expected excess over it, which is also the error of such an entry.
        first = FirstBlocks.of(seen.model, self.blocks, update)
        rows = shown | {_PE: shown[_PE].last(seen.model.vit.patch_embed.num_patches)}
        wanted = {name: expected_value(rows[name]) for name in first.names}
        errors = [torch.where(of.known, of.deviation, expected_excess(of)) for of in (rows[_PE], rows[_PROJECTION])]
        # Aᵀ X = G with A (N × D) and G (D × K), each entry weighed by the inverse variance of these errors.
        X = weighted_patches(wanted[_PE], wanted[_PROJECTION], errors[0], errors[1])
        if self.steps and float(shown[_PROJECTION].known.double().mean()) > _KNOWN_ENOUGH:
            # With many known magnitudes the two gradients of the embedding say more than the signs of further layers.
            a, g, names = rows[_PE], rows[_PROJECTION], seen.photographs
            X = signed_product(seen.model, a, g, X, names, self.stage_steps, self.prior)
        elif self.steps:
            X = self._search(seen, client, update, first, wanted, X)
        return self._fit(seen, shown, X) if self.rounds else X

    def _search(
        self,
        seen: Observation,
        client: Client,
        update: Update,
        first: FirstBlocks,
        wanted: Mapping[str, Float[Tensor, "_ _"]],
        X: Float[Tensor, "n k"],
    ) -> Float[Tensor, "n k"]:
        """Return the patches whose gradients have the signs of what is wanted, row by row."""
        # 1 − cos of rows, over X and Δ, by Adam from the X found.
        hashes = (hash_of(seen.model.state_dict()), hash_of(dict(update)))
        own = (*hashes, repr(client), repr(seen.photographs), repr(self))
        covariance = photograph_gradients(seen.model, seen.photographs)
        return search_by_signs(first, wanted, X, covariance, self.steps, own, self.prior)

    def _fit(self, seen: Observation, shown: Mapping[str, Shown], X: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the patches whose gradients have the known magnitudes, and keep to the bounds of the others."""
        # The gradients of L = 1, 2, … blocks are made from X and Δ. More blocks add equations and no unknown.
        X = X[None].to(seen.model.mean)
        likelihood = likelihood_of_shares(shown, X)
        prior = Smoothness(seen.model.image_shape, photograph_gradients(seen.model, seen.photographs))
        with full_precision():
            for blocks in range(1, min(self.blocks, len(seen.model.vit.blocks)) + 1):
                stage = Stage.of(seen.model, blocks, likelihood, prior, _EPSILON)
                draw = partial(draw_for, 0, self.name, f"probes of {blocks} blocks")
                X = stage.search(X, self.rounds, self.solver_steps, draw)
        return X[0]
