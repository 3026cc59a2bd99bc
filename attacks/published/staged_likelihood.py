"""`staged-likelihood`: the likeliest image behind a defended gradient, by the first blocks and then by more of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.gradients.patch_gradient_adaptive import PatchGradientAdaptive
from privlab.attacks.published.learning_to_invert import LearningToInvert
from privlab.attacks.published.stages import Stage
from privlab.attacks.solvers import Likelihood, Smoothness, hides_places, photograph_gradients
from privlab.base import PrivlabError, check_name, draw_for, full_precision
from privlab.patches import patchify
from privlab.release import released_parameters
from privlab.threat import Capability, Observation, check_capabilities
from privlab.victims import VictimModel

__all__ = ["StagedLikelihood"]

_MOST_ENTRIES = 2**24
"""The most entries of gradients that are held at once."""

STARTS = {kind.name: kind for kind in (PatchGradientAdaptive, LearningToInvert)}
"""What a search may start from."""


@dataclass(frozen=True)
class StagedLikelihood:
    """Minimise −log p(G_L | X, Δ) − log p(X) over X and Δ = ∂ℓ/∂z_L, for L = 1, 2, 4, … blocks, up to all of them.

    Whatever follows block L, the gradients of all parameters before it are ∂⟨Δ, z_L(X)⟩/∂θ. Of a small L they are
    nearly bilinear in X and Δ, so that a search from a poor start finds its way; a larger L adds equations and no
    unknown, and behind the last block Δ is left at the class token alone. Each stage begins at the image of the one
    before. p knows the variance of each entry that a defense states, or the interval in which a missing one lies;
    clipping is a scale of Δ. See `Stage` for the objective, which damped Gauss-Newton steps reduce.

    No label is needed.

    Args:
        start: "patch-gradient-adaptive" or "learning-to-invert", which needs images of the adversary's own.
        rounds: Gauss-Newton steps of each stage but the last, at least 0.
        last_rounds: those of the last stage, at least 0.
        steps: steps of conjugate gradients in each, at least 1.
        epsilon: ε of the image prior, in standard deviations of the differences of adjacent pixels, > 0.
        seed: of the probes of the curvature.
    """

    name: ClassVar[str] = "staged-likelihood"
    paper: ClassVar[str] = "ours: maximum a posteriori over the first blocks, then over more, against gradient defenses"
    knows: ClassVar[frozenset[str]] = frozenset(
        {"gradient-noise", "gradient-pruning", "gradient-quantisation", "binary-weights"}
    )
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = PatchGradientAdaptive.requires | {Capability.BATCH_SIZE_ONE}
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ("*",)

    start: str = "patch-gradient-adaptive"
    rounds: int = 6
    last_rounds: int = 12
    steps: int = 40
    epsilon: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if an option is out of range."""
        check_name(f"start of {self.name}", self.start, STARTS)
        if self.rounds < 0 or self.last_rounds < 0 or self.steps < 1 or not self.epsilon > 0:
            raise PrivlabError(
                f"{self.name} takes rounds ≥ 0, last_rounds ≥ 0, steps ≥ 1 and epsilon > 0. "
                f"Found {self.rounds}, {self.last_rounds}, {self.steps} and {self.epsilon:g}."
            )

    def beyond(self, seen: Observation) -> str | None:
        """Return what the model of the release lacks: E_unk at slots that a defense of images masks."""
        return "position embeddings are masked" if hides_places(seen) else None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if the start needs more than is granted.
        """
        start = STARTS[self.start]()
        check_capabilities(start, seen.grants)
        model, names = seen.model, released_parameters(seen.model)
        X = patchify(model.normalise(start(seen).to(model.mean)), model.patch)
        likelihood = Likelihood.of(seen, {name: g for name, g in seen.gradients.items() if name in names})
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
        for blocks in _stages(depth):
            stage = Stage.of(model, blocks, likelihood, prior, self.epsilon)
            point = stage.start(X, self.steps)
            for number in range(self.last_rounds if blocks == depth else self.rounds):
                draw = draw_for(self.seed, self.name, f"probes of {blocks} blocks", number)
                point = stage.step(point, self.steps, draw)
            X = point.X
        return X


def _stages(depth: int) -> list[int]:
    """Return 1, 2, 4, … and the depth."""
    return [*(2**power for power in range(depth.bit_length()) if 2**power < depth), depth]
