"""`staged-likelihood`: the likeliest image behind a defended gradient, by the first blocks and then by more of them."""

# Known are the model, what the gradients of its parameters became under a defense, and what is known of each entry's
# error. Sought are the normalised patches X, and with them Δ = ∂ℓ/∂z_L behind the first L blocks.
# 1. A closed form or a trained decoder gives the first X; where signs alone are known, a search by signs goes on.
# 2. For L = 1, 2, 4, … up to the depth, a `Stage` takes the gradients of all parameters before block L, which are
# ∂⟨Δ, z_L(X)⟩/∂θ, and finds the first Δ by least squares.
# 3. Damped Gauss-Newton steps move X and Δ. X goes on to the next stage, Δ does not.

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.gradients.patch_gradient_adaptive import PatchGradientAdaptive
from privlab.attacks.published.learning_to_invert import LearningToInvert
from privlab.attacks.solvers import (
    FirstBlocks,
    Likelihood,
    Smoothness,
    Stage,
    hides_places,
    photograph_gradients,
    search_by_signs,
)
from privlab.base import AtLeast0, AtLeast1, Checked, Positive, draw_for, full_precision
from privlab.patches import patchify
from privlab.release import released_parameters
from privlab.threat import Capability, Observation, check_capabilities
from privlab.victims import VictimModel, hash_of

_SIGN_BLOCKS, _SIGN_STEPS = 2, 400  # the blocks whose signs a first search reads, and its steps
_MOST_ENTRIES = 2**24  # the most entries of gradients that are held at once
STARTS = {kind.name: kind for kind in (PatchGradientAdaptive, LearningToInvert)}  # what a search may start from


@dataclass(frozen=True)
class StagedLikelihood(Checked):
    """Minimise −log p(G_L | X, Δ) − log p(X) over X and Δ = ∂ℓ/∂z_L, for L = 1, 2, 4, … blocks, up to all of them.

    Idea: Whatever follows the first blocks, the gradients of their parameters depend on the image and on one gradient
    behind these blocks. Of one block this is nearly linear, so that a poor start finds its way. The attack solves for
    both, then does so for more blocks from the image found, up to all of them.

    Steps: start from a closed form → image and gradient behind one block → more blocks, up to all

    Algorithm: The gradients of all parameters before block L are ∂⟨Δ, z_L(X)⟩/∂θ. A larger L adds equations and no
    unknown, and behind the last block Δ is left at the class token alone. p knows the variance of each entry that a
    defense states, or the interval in which a missing one lies; clipping is a scale of Δ. See `Stage` for the
    objective, which damped Gauss-Newton steps reduce.

    Signs are searched for first by the directions of rows (`search_by_signs`), as in `adam-update`. Then each entry
    shall have its sign, and 0.6 of the root mean square of its row, for all stages but the last.

    No label is needed.

    Exact if: no condition is known: it is a search without a guarantee, and stops after a fixed number of steps.

    Fails if: its start is too far from the image, or its steps too few: behind signs and where a tenth of the entries
    is kept it ends far below what the release determines. It was measured on `cifar_vit` alone.

    Cost: 70 to 150 s an image on one core (`cifar_vit`, 32 pixels).

    Studies: gradients

    Args:
        start: "patch-gradient-adaptive" or "learning-to-invert", which needs images of the adversary's own.
        rounds: Gauss-Newton steps of each stage but the last, at least 0.
        last_rounds: those of the last stage, at least 0.
        steps: steps of conjugate gradients in each, at least 1.
        epsilon: ε of the image prior, in standard deviations of the differences of adjacent pixels, > 0.
        seed: of the probes of the curvature.

    Source: [@geiping2020inverting]
    """

    name: ClassVar[str] = "staged-likelihood"
    paper: ClassVar[str] = "ours: maximum a posteriori over the first blocks, then over more, against gradient defenses"
    order: ClassVar[int] = 170
    short: ClassVar[Mapping[str, Any]] = {"rounds": 1, "last_rounds": 1, "steps": 2}
    knows: ClassVar[frozenset[str]] = frozenset(
        {"gradient-noise", "gradient-pruning", "gradient-quantisation", "gradient-sign", "binary-weights"}
    )
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = PatchGradientAdaptive.requires | {Capability.BATCH_SIZE_ONE}
    effort: ClassVar[str] = "full"
    search: ClassVar[bool] = True
    named_only: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ("*",)

    start: Annotated[str, STARTS] = "patch-gradient-adaptive"
    rounds: AtLeast0 = 24
    last_rounds: AtLeast0 = 12
    steps: AtLeast1 = 50
    epsilon: Positive = 0.1
    seed: int = 0

    def beyond(self, seen: Observation) -> str | None:
        """Return what the model of the release lacks: E_unk at slots that a defense of images masks."""
        return "position embeddings are masked" if hides_places(seen) else None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if the start needs more than is granted.
        """
        # The start is in pixels; the search is over normalised patches, b × N × K.
        start = STARTS[self.start]()
        check_capabilities(start, seen.grants)
        model, names = seen.model, released_parameters(seen.model)
        X = patchify(model.normalise(start(seen).to(model.mean)), model.patch)
        likelihood = Likelihood.of(seen, {name: g for name, g in seen.gradients.items() if name in names})
        # Images are independent. As many are searched together as their gradients leave room for.
        entries = sum(g[0].numel() for g in likelihood.released.values())
        prior = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs))
        with full_precision():
            found = [
                self._search(model, X[rows], likelihood.take(rows), prior)
                for rows in torch.arange(len(X), device=X.device).split(max(1, _MOST_ENTRIES // entries))
            ]
        return model.to_images(torch.cat(found))

    def _search(
        self, model: VictimModel, X: Float[Tensor, "b n k"], likelihood: Likelihood, prior: Smoothness
    ) -> Float[Tensor, "b n k"]:
        """Return normalised patches, from stage to stage."""
        depth = len(model.vit.blocks)
        stages = _stages(depth)
        if likelihood.signs:
            X = self._by_signs(model, X, likelihood, prior)
            stages = stages[:-1]
        for blocks in stages:
            # The gradients of few blocks are nearly linear in X and Δ, and forgive a poor start.
            # More blocks add equations and no unknown.
            stage = Stage.of(model, blocks, likelihood, prior, self.epsilon)
            # Each step draws new probes of the curvature, from a seed that depends on the
            # stage and the number of the step.
            draw = partial(draw_for, self.seed, self.name, f"probes of {blocks} blocks")
            X = stage.search(X, self.last_rounds if blocks == depth else self.rounds, self.steps, draw)
        return X

    def _by_signs(
        self, model: VictimModel, X: Float[Tensor, "b n k"], likelihood: Likelihood, prior: Smoothness
    ) -> Float[Tensor, "b n k"]:
        """Return the patches for which the rows of the first blocks' gradients have the directions of their signs."""
        first, found = FirstBlocks.of(model, _SIGN_BLOCKS, likelihood.released), []
        victim = hash_of(model.state_dict())
        for number, start in enumerate(X):
            wanted = {name: first.matrix(name, likelihood.released[name][number]) for name in first.names}
            own = (victim, hash_of(wanted), repr(self))
            found.append(search_by_signs(first, wanted, start, prior.covariance, _SIGN_STEPS, own))
        return torch.stack(found)


def _stages(depth: int) -> list[int]:
    """Return 1, 2, 4, … and the depth."""
    return [*(2**power for power in range(depth.bit_length()) if 2**power < depth), depth]
