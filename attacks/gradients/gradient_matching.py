"""`gradient-matching`: the images whose gradient is the released one, by descent from the result of a closed form."""

# Known are the model, the released gradients G of B images in each of r releases, and what a defense does.
# Sought are the images whose gradients agree with G.
# 1. `Match.of` reads labels, masked slots, and the directions C Y that a closed form leaves open (under MJP).
# 2. `_points` starts from the reconstruction of a closed form, grey or noise; restarts add noise.
# 3. `descend` minimises `Match._value`: the distance of gradients, and total variation or an image prior.
# 4. The best of all restarts is returned for each release.

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from privlab.attacks.gradients.mjp_full import MjpFull
from privlab.attacks.gradients.mjp_subspace import MjpSubspace, subspace
from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.gradients.patch_gradient_adaptive import PatchGradientAdaptive
from privlab.attacks.gradients.patch_gradient_prior import PatchGradientPrior
from privlab.attacks.solvers import (
    EDGE_WIDTH,
    OPTIMISERS,
    Evaluate,
    Likelihood,
    Smoothness,
    descend,
    feeds_unknown,
    masked_slots,
    photograph_gradients,
    shares_mask,
    slot_gradients,
    twice_derivable,
    values_and_slopes,
)
from privlab.base import (
    AtLeast0,
    AtLeast1,
    Checked,
    NotNegative,
    Positive,
    PrivlabError,
    draw_for,
    warn,
)
from privlab.patches import patchify, unpatchify
from privlab.release import released_gradients, released_parameters, told_labels
from privlab.threat import Attack, Capability, Feed, GradientDefense, Observation, Reconstruction, check_capabilities
from privlab.victims import VictimModel, hash_of

HEAD_BIAS = "head.bias"
"""The parameter whose gradient reveals the labels."""

OBJECTIVES = ("cosine", "l2", "likelihood")

STARTS: dict[str, type[Attack]] = {
    kind.name: kind for kind in (PatchGradientAdaptive, PatchGradient, PatchGradientPrior, MjpSubspace, MjpFull)
}
"""What a search may start from, the best last; all but the first take a defended gradient for an exact one."""

START_NAMES = ("auto", "grey", "noise", *STARTS)

_RESTART_STD = 0.1
"""Standard deviation, in normalised pixels, of the noise by which restarts differ from their common start."""

_MOST_ENTRIES = 2**26  # the most entries of gradients that are held in memory at once


@dataclass(frozen=True)
class GradientMatching(Checked):
    """Minimise the distance between the gradient of candidate images and the released one, plus their total variation.

    Idea: The attack guesses an image, and computes the gradient that a client with that image would release. An
    optimiser changes the guess until both gradients agree. It starts from the best closed form that the threat model
    grants, and keeps what that knows exactly.

    Steps: start from a closed form → match the gradients → search for the unknown part

    Algorithm: Candidates start from the reconstruction of a closed form. If that says X = known + C Y, as under MJP
    (`subspace`), the search is for C alone, and what is known stays exact. Slots whose position embedding has no
    gradient are fed with E_unk, as MJP feeds them: their patches come back in any order. Entries that a defense on
    gradients left out (zeros) are not compared. Labels are read from the gradient of the head's bias.

    A search that was interrupted is resumed when the same observation meets the same options again.

    Exact if: no condition is known: it is a search without a guarantee. Under MJP what is known exactly stays exact.

    Fails if: the search does not improve on its start: on three photographs 200 steps did not improve on
    `mjp-subspace`.

    Cost: 289 s an image for 200 steps (ViT-Ti, 160 pixels, two busy cores).

    Studies: mjp

    Args:
        objective: "cosine", 1 − cos(∇ℓ(x), G) over all released gradients, "l2", ½ ‖∇ℓ(x) − G‖² / ‖G‖², or
            "likelihood", −log p(G | x) by what is known of the defense (`Likelihood`), over the number of pixels.
        optimiser: "lbfgs" or "adam".
        steps: the most steps of the optimiser.
        lr: root mean square of the entries of the (first) step, in normalised pixels; that of Adam shrinks to zero.
        tv: weight of the total variation, a mean over the pixels in standard deviations of photographs.
        restarts: number of searches; the first begins at the start, the others at the start plus noise, and the best
            one is returned for each release.
        start: one of `STARTS`, "grey", "noise" (uniform in [0, 1]), or "auto": the best closed form that is granted,
            else "grey", or "noise" for several images in one gradient.
        seed: seed of the noise.

    Source: DLG (Zhu et al. 2019): l2, L-BFGS; Inverting Gradients (Geiping et al. 2020): cosine, total variation, Adam.
    [@zhu2019dlg; @geiping2020inverting]
    """

    name: ClassVar[str] = "gradient-matching"
    paper: ClassVar[str] = "DLG (Zhu et al. 2019), Inverting Gradients (Geiping et al. 2020); closed-form starts: ours"
    order: ClassVar[int] = 200
    short: ClassVar[Mapping[str, Any]] = {"steps": 1, "restarts": 1, "start": "patch-gradient"}
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS, Capability.CLASS_LABELS})
    knows: ClassVar[frozenset[str]] = frozenset({"mjp", "gradient-pruning"})
    parameters: ClassVar[tuple[str, ...]] = ("*",)
    effort: ClassVar[str] = "full"
    at_full: ClassVar[Mapping[str, int]] = {"restarts": 4}
    search: ClassVar[bool] = True

    objective: Annotated[str, OBJECTIVES] = "cosine"
    optimiser: Annotated[str, OPTIMISERS] = "lbfgs"
    steps: AtLeast0 = 300
    lr: Positive = 0.05
    tv: NotNegative = 0.0
    restarts: AtLeast1 = 1
    start: Annotated[str, START_NAMES] = "auto"
    seed: int = 0

    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if labels cannot be inferred, the start is not granted, or the objective is not finite there.

        Warns:
            PrivlabWarning: if masked slots are not known, or the state cannot be kept.
        """
        # Restart j of release i is candidate j r + i, so that numbers modulo r are those of releases.
        match = self._match(seen)
        points = torch.cat([self._points(match, seen, number) for number in range(self.restarts)])
        optimiser = OPTIMISERS[self.optimiser](self.lr)
        best, least = descend(optimiser, points, self._objective(match), self.steps, search_identity(seen, self))
        # For each release, the restart of least objective.
        winner = least.unflatten(0, (self.restarts, -1)).argmin(0)
        rows = torch.arange(len(winner), device=winner.device)
        chosen = best.unflatten(0, (self.restarts, -1))[winner, rows]
        # Slots with E_unk come back in any order (`loose`), because nothing distinguishes their places.
        images = seen.model.to_images(match.patches(chosen, rows).flatten(0, 1))
        return Reconstruction(images, loose=match.masked)

    def _match(self, seen: Observation) -> "Match":
        """Return what candidates are compared with."""
        return Match.of(seen, self.objective, self.tv)

    def _objective(self, match: "Match") -> Evaluate:
        """Return what is minimised, and its slope."""
        return match

    def _points(self, match: "Match", seen: Observation, restart: int) -> Float[Tensor, "r q"]:
        """Return where the search of each release starts."""
        start, shape, mean = self._start(match, seen), seen.model.image_shape, seen.model.mean
        count = len(match.labels)
        draws = [draw_for(self.seed, key, self.name, restart) for key in match.keys]
        if start == "noise":
            drawn = [torch.rand(match.B, *shape, generator=draw, dtype=mean.dtype) for draw in draws]
            images = torch.stack(drawn).flatten(0, 1).to(mean)
        elif start == "grey":
            images = mean.new_full((count, *shape), 0.5)
        else:
            images = Reconstruction.of(STARTS[start]()(seen)).images.to(mean)
        # Normalised patches, r × B × N × K.
        X = patchify(seen.model.normalise(images), seen.model.patch).unflatten(0, (-1, match.B))
        # Restarts differ in their noise, whose seed depends on the release and on the number of the restart.
        if restart and start != "noise":
            noise = [torch.randn(X.shape[1:], generator=draw, dtype=X.dtype) for draw in draws]
            X = X + _RESTART_STD * torch.stack(noise).to(X)
        return match.coordinates(X)

    def _start(self, match: "Match", seen: Observation) -> str:
        """Return the name of the start; a closed form must be granted.

        Raises:
            PrivlabError: if it is not granted, or if all images of one gradient would start equal.
        """
        if self.start == "grey" and match.B > 1:
            raise PrivlabError(f"start=grey cannot separate the {match.B} images of one gradient. Use noise.")
        if self.start in STARTS:
            check_capabilities(STARTS[self.start](), seen.grants)
        if self.start != "auto":
            return self.start
        # Closed forms are sorted, the best last. Those of MJP count only where masked slots were found; behind a
        # defense on gradients only the first of them knows of errors.
        fitting = [
            name
            for name, kind in STARTS.items()
            if kind.requires <= seen.grants and (match.masked is not None or "mjp" not in name)
        ]
        if Capability.GRADIENT_DEFENSE in seen.grants:
            fitting = fitting[:1]
        return fitting[-1] if fitting else "noise" if match.B > 1 else "grey"


@dataclass(frozen=True, eq=False)
class Match:
    """How well candidates explain r releases of B images each; `descend` calls it with points and their numbers.

    Candidate j is one of release j mod r. Its point holds the normalised patches, r × B × n × k, or the coefficients C
    of `known` + C Y. `target` holds the released gradients over their common norm; only `compared` entries count.
    """

    model: VictimModel
    target: Mapping[str, Float[Tensor, "r ..."]]
    compared: Mapping[str, Bool[Tensor, "r ..."]] | None
    labels: Int[Tensor, " rB"]
    keys: tuple[str, ...]
    B: int
    masked: Bool[Tensor, "rB n"] | None
    unknown: bool
    span: tuple[Float[Tensor, "r n k"], Float[Tensor, "r m k"]] | None
    norm: Float[Tensor, " r"]
    objective: str
    tv: float
    photographs: tuple[str, ...] | None
    likelihood: Likelihood | None = None

    @classmethod
    def of(cls, seen: Observation, objective: str, tv: float, labels: Int[Tensor, " rB"] | None = None) -> "Match":
        """Return the comparison with the released gradients of an observation.

        Args:
            seen: the observation.
            objective: one of `OBJECTIVES`, as in `GradientMatching`.
            tv: weight of the total variation, ≥ 0; at 0 it is not computed.
            labels: those of all images; None reads them from the gradient of the head's bias.

        Raises:
            PrivlabError: if the labels are not known.
        """
        # The order of names is fixed, because hashes and sums depend on it. Only parameters
        # are left of which candidates make gradients too.
        G, B = {name: seen.gradients[name] for name in sorted(seen.gradients)}, seen.images_per_release
        names = released_parameters(seen.model)
        G = {name: g for name, g in G.items() if name in names}
        defended = any(isinstance(part, GradientDefense) for part in seen.defense)
        # Under a defense an entry of zero may be one that was left out, and is not compared.
        compared = {name: g != 0 for name, g in G.items()} if defended else None
        # ‖G‖ over all parameters, of each release.
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in G.values()]).norm(dim=0)
        r = len(norm)
        masked = _masked_slots(seen)
        return cls(
            model=twice_derivable(seen.model),
            target={name: g / norm.view(-1, *[1] * (g.ndim - 1)) for name, g in G.items()},
            compared=compared,
            labels=_labels(seen.model.vit.head, G, B) if labels is None else labels,
            keys=tuple(hash_of({name: g[i] for name, g in G.items()}) for i in range(r)),
            B=B,
            masked=masked,
            unknown=feeds_unknown(seen),
            span=None if masked is None or defended or B > 1 else _span(seen),  # that of one image
            norm=norm,
            objective=objective,
            tv=tv,
            photographs=seen.photographs,
            likelihood=Likelihood.of(seen, G) if objective == "likelihood" else None,
        )

    def coordinates(self, X: Float[Tensor, "r B n k"]) -> Float[Tensor, "r q"]:
        """Return the points of patches; where only C is free, those of the nearest patches `known` + C Y."""
        if self.span is None:
            return X.flatten(1)
        # The rows of Y are orthonormal, so that (X − known) Yᵀ are the nearest coordinates.
        known, Y = self.span
        return ((X[:, 0] - known) @ Y.mT).flatten(1)

    def patches(self, points: Float[Tensor, "s q"], release: Int[Tensor, " s"]) -> Float[Tensor, "s B n k"]:
        """Return the normalised patches of points of these releases."""
        # A point is all patches of B images, or C (N × m) of the one image X = known + C Y.
        n = self.model.vit.patch_embed.num_patches
        if self.span is None:
            return points.view(len(points), self.B, n, -1)
        known, Y = self.span
        return (known[release] + points.view(len(points), n, -1) @ Y[release])[:, None]

    def __call__(
        self, points: Float[Tensor, "s q"], numbers: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, " s"], Float[Tensor, "s q"]]:
        """Return the objective and its gradient at the points of candidates with these numbers, a few at a time."""
        # As many candidates are evaluated together as their gradients leave room for.
        size = self.B * sum(parameter.numel() for parameter in self.model.parameters())
        return values_and_slopes(self._value, points, numbers % len(self.norm), max(1, _MOST_ENTRIES // size))

    def _value(self, points: Float[Tensor, "s q"], release: Int[Tensor, " s"]) -> Float[Tensor, " s"]:
        model, X = self.model, self.patches(points, release).flatten(0, 1)
        # Candidates are fed as the client's images were: slots without a gradient of E_pos
        # are fed with E_unk, or with zero.
        feed = Feed.undefended(unpatchify(X, model.image_shape) * model.std + model.mean, model.patch)
        if self.masked is not None:
            masked = self.masked.unflatten(0, (-1, self.B))[release].flatten(0, 1)
            feed = replace(feed, masked_pe=masked, replacement="unknown" if self.unknown else "zero")
        labels = self.labels.view(-1, self.B)[release].flatten()
        # The gradient of each candidate release, differentiable by its patches.
        g = released_gradients(model, feed, labels, self.target, self.B, create_graph=True)
        pixels = model.image_shape[1] * model.image_shape[2]
        # −log p(G | x) over the number of pixels, or 1 − cos, or ½ ‖g / ‖G‖ − target‖²; see `mismatch`.
        if self.likelihood is not None:
            value = self.likelihood(g, release) / (self.B * pixels)
        else:
            if self.compared is not None:
                g = {name: each * self.compared[name][release] for name, each in g.items()}
            target = {name: each[release] for name, each in self.target.items()}
            value = mismatch(g, target, self.norm[release] if self.objective == "l2" else None)
        if not self.tv:
            return value
        # Σ √(ε² + δᵀ Γ⁻¹ δ) over the differences of adjacent pixels, a mean over images and pixels.
        variation = self._prior.sparse_energy(X, EDGE_WIDTH).view(-1, self.B).mean(1) / pixels
        return value + self.tv * variation

    @cached_property
    def _prior(self) -> Smoothness:
        return Smoothness(self.model.image_shape, photograph_gradients(self.model, self.photographs))


def mismatch(
    g: Mapping[str, Float[Tensor, "s ..."]],
    target: Mapping[str, Float[Tensor, "s ..."]],
    norm: Float[Tensor, " s"] | None = None,
) -> Float[Tensor, " s"]:
    """Return ½ ‖g / norm − target‖² over all tensors, for each of s candidates; without `norm`, 1 − cos(g, target).

    The square is accurate even where a cosine so near to 1 would be lost in rounding.

    Args:
        g: gradients of the candidates by parameter name.
        target: the released gradients of the same names, over their common norm.
        norm: norm of the released gradient of each candidate; without it, that of g itself.
    """
    if norm is None:
        # For unit vectors ½ ‖a − b‖² = 1 − cos(a, b).
        norm = sum((each.flatten(1).square().sum(1) for each in g.values()), torch.zeros(())).sqrt()
    off = [each.flatten(1) / norm[:, None] - target[name].flatten(1) for name, each in g.items()]
    return torch.stack([each.square().sum(1) for each in off]).sum(0) / 2


def search_identity(seen: Observation, attack: Attack) -> tuple[str, ...]:
    """Return everything that the result of a search depends on."""
    victim = hash_of(seen.model.state_dict() | {"mean": seen.model.mean, "std": seen.model.std})
    public = (repr(seen.defense), str(seen.images_per_release), repr(seen.photographs), repr(seen.client))
    return victim, hash_of(dict(seen.gradients)), *public, repr(attack)


def _labels(head: nn.Module, G: Mapping[str, Float[Tensor, "r ..."]], B: int) -> Int[Tensor, " rB"]:
    """Return the labels of all images as the gradients reveal them; labels that they leave open are guessed."""
    if HEAD_BIAS not in G:
        raise PrivlabError(
            f"gradient-matching needs the labels, and no gradient of {HEAD_BIAS} is released to tell them."
        )
    # The gradient of the head's bias is negative at labels alone.
    told = [told_labels(head, {name: g[i] for name, g in G.items()}, B) for i in range(len(G[HEAD_BIAS]))]
    return torch.tensor([each.labels for each in told if each], device=G[HEAD_BIAS].device).flatten()


def _masked_slots(seen: Observation) -> Bool[Tensor, "rB n"] | None:
    """Return the slots of all images whose position embedding is shared; None if there are none.

    Warns:
        PrivlabWarning: if E_unk is used in some slots, but the gradient does not tell in which.
    """
    B = seen.images_per_release
    # Masked slots are those whose E_pos has no gradient: of one image, or of all if they share one mask.
    if "pos_embed" in seen.gradients and (B == 1 or shares_mask(seen)):
        masked = masked_slots(seen)
        if masked.any():
            return masked.repeat_interleave(B, 0)
    elif "unk_embed" in seen.gradients and seen.gradients["unk_embed"].any():
        warn(
            "gradient-matching: E_unk is at work, and the gradient does not tell in which slots. The search takes "
            "every slot to keep its position embedding: a low score here is no evidence of privacy.",
        )
    return None


def _span(seen: Observation) -> tuple[Float[Tensor, "r n k"], Float[Tensor, "r m k"]] | None:
    """Return what is known of the patches and the span Y of the rest; None if N ≥ D or ∂ℓ/∂W is not released."""
    # For N < D, X = known + C Y with an exact known part (`subspace`), so that the search is for C alone.
    A = slot_gradients(seen)
    if A.shape[1] >= A.shape[2] or "patch_embed.proj.weight" not in seen.gradients:
        return None
    found, dtype = subspace(A, seen.gradients["patch_embed.proj.weight"].flatten(2)), seen.model.mean.dtype
    # Masked slots have no known part: all of their patch lies in the span of Y.
    known = found.known.masked_fill(found.masked[..., None], 0)
    return known.to(dtype), found.Y.to(dtype)
