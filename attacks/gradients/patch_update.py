"""`patch-update`: the image from the update of a client's local training by SGD, its rounding foreseen."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers import (
    MOST_MISSING,
    RTOL,
    complete,
    fit_decay,
    patches_of_levels,
    rounding_of_embedding,
    slot_gradients,
    slot_rows,
    too_many,
    warn_of_limits,
    weighted_patches,
)
from privlab.base import PrivlabError, check_name
from privlab.release import each_release, update_on, without_decay
from privlab.threat import Capability, Client, GradientDefense, Observation, Stack, defense_declarations
from privlab.victims import VictimModel

__all__ = ["PatchUpdate"]

_PE, _PROJECTION = "pos_embed", "patch_embed.proj.weight"


@dataclass(frozen=True)
class PatchUpdate:
    """Solve Aᵀ X = G for the patches X of a client that trained on one image, however many steps it took.

    With decay undone, what SGD moved is Σ_s a_s g_s for known numbers a_s: momentum and schedules are one linear map
    for all parameters. The image stays the same in each step, so G = Σ_s a_s A_sᵀ X = Aᵀ X, where A and G are what
    moved E_pos and W. What is left is the rounding of stored weights.

    1. The entries are weighed by the rounding of the weights that they were subtracted from.
    2. Pixels have grey levels: of the solutions near that one, one of eight bits is tried too (`patches_of_levels`).
    3. Rounding is no chance: the client is trained again on both, with the label that the head's bias gives away. The
       nearer that update is to the release, the better; if it is the release bit for bit, it is that of the image. Else
       the client is trained in float64 too, the difference is its rounding, and is subtracted from the release for
       another round. Rounding of steps that are about as large as an ulp cannot be foreseen, so that a round may make
       things worse: the best of all rounds stays.

    Behind a filter, a defense of the release, entries have the variance that it states. Where it leaves some entries
    exact, those that it set to zero or clipped are missing, and those of A are found from the others: `complete`. They
    are left as they are if there are more than 6,000. Rounding is not foreseen behind a filter that changes entries.
    Decay is fitted where the filter scales the update, as clipping by its norm does.

    Adam and AdamW divide by the gradient's magnitude, so their updates have no such form, and are refused.

    Args:
        decay: "known" takes weight decay from the client's settings, "fitted" fits one number, without them.
        rounds: the most times that rounding is foreseen; 0 leaves out steps 2 and 3, and takes a twentieth of the time.
            What they bring is in docs/studies/updates.md. They are left out too where dropout is private, where the
            decay is not known, where the head's bias is not released, or where a defense of images made private draws.
        levels: grey levels above black of a stored image, 255 for eight bits; 0 leaves out step 2. Images that a client
            does not feed as they are stored, such as rescaled or jittered tensors, have none, and step 3 finds that.
    """

    name: ClassVar[str] = "patch-update"
    paper: ClassVar[str] = "ours: patch-gradient on the linear map of SGD, with the client's rounding foreseen"
    knows: ClassVar[frozenset[str]] = frozenset(
        {
            *("gradient-noise", "gradient-pruning", "gradient-quantisation"),
            *("percentile-privacy", "svt-privacy", "exclude-vars", "binary-weights"),
        }
    )
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.KNOWS_WEIGHTS,
            Capability.LEARNABLE_PE_GRADIENT,
            Capability.BATCH_SIZE_ONE,
            Capability.CLIENT_UPDATE,
        }
    )
    effort: ClassVar[str] = "standard"
    parameters: ClassVar[tuple[str, ...]] = (_PE, _PROJECTION)
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)
    if_released: ClassVar[tuple[str, ...]] = ("head.bias", "head.weight", "blocks.0.attn.qkv.bias")

    decay: str = "known"
    rounds: int = 3
    levels: int = 255

    def __post_init__(self) -> None:
        """Raise PrivlabError if an option is out of range."""
        check_name("decay", self.decay, ("known", "fitted"))
        if self.rounds < 0:
            raise PrivlabError(f"patch-update takes rounds ≥ 0. Found {self.rounds}.")
        if self.levels < 0:
            raise PrivlabError(f"patch-update takes levels ≥ 0. Found {self.levels}.")

    def beyond(self, seen: Observation) -> str | None:
        """Return what violates N < D, or how many entries a filter took where these are too many, with the numbers."""
        found = [too_many(seen)]
        if filters := _filters(seen):
            most = max(int(_missing(slot_rows(seen.model, of[_PE])).sum()) for of in _errors(seen, filters))
            if most > MOST_MISSING:
                found.append(f"{most} missing entries > {MOST_MISSING}")
        return " and ".join(filter(None, found)) or None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients trained on.

        Raises:
            PrivlabError: if the observation has no client, or one that does not train by SGD.
        """
        client = seen.client
        if client is None or client.optimiser != "sgd":
            found = "no client" if client is None else f"client.optimiser={client.optimiser}"
            raise PrivlabError(
                f"patch-update needs the update of a client that trains by sgd. Found {found}. That this attack does "
                "not apply is no evidence of privacy."
            )
        warn_of_limits(self.name, slot_gradients(seen), most=seen.model.vit.embed_dim - 1)
        releases = each_release(seen)
        filters = _filters(seen)
        errors = _errors(seen, filters) if filters else []
        scaled = any(defense_declarations(part).expected is not None for part in filters)
        if scaled or any(bool(variance.any()) for of_one in errors for variance in of_one.values()):
            found = [self._behind(seen.model, client, *of_one, scaled) for of_one in zip(releases, errors, strict=True)]
        else:  # a filter that leaves parameters out leaves the others as they are
            repeatable = not Stack(tuple(seen.defense)).changes_images
            own = self if repeatable else replace(self, rounds=0)
            found = [own._patches(seen.model, client, update) for update in releases]
        return seen.model.to_images(torch.stack(found))

    def _behind(
        self,
        model: VictimModel,
        client: Client,
        update: Mapping[str, Float[Tensor, "..."]],
        errors: Mapping[str, Float[Tensor, "..."]],
        scaled: bool,
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image from what filters left of its update.

        Args:
            model: the server's model.
            client: the public settings.
            update: what was released.
            errors: the variances that the filters state of the embedding's entries.
            scaled: whether a filter scales the update.
        """
        if nothing := [name for name in (_PE, _PROJECTION) if not update[name].any()]:
            raise PrivlabError(
                f"{self.name} has nothing to solve for: the filter left no entry of {' and '.join(nothing)}. That it "
                "does not apply is no evidence of privacy."
            )
        moved = without_decay(model, update, self._lost(model, client, update, scaled=scaled))
        rounding = rounding_of_embedding(model, client, update)
        A, dA, vA = (slot_rows(model, each[_PE]) for each in (moved, rounding, errors))
        G, dG, vG = (each[_PROJECTION].flatten(1) for each in (moved, rounding, errors))
        missing = _missing(vA)
        vA, vG = (v + d.square() + RTOL**2 * M.square().mean() for v, d, M in ((vA, dA, A), (vG, dG, G)))
        if 0 < int(missing.sum()) <= MOST_MISSING:
            A, vA = complete(A, G, vA, vG, missing), vA.masked_fill(missing, 0)
        return weighted_patches(A, G, vA.sqrt(), vG.sqrt())

    def _lost(
        self, model: VictimModel, client: Client, update: Mapping[str, Float[Tensor, "..."]], *, scaled: bool = False
    ) -> float:
        """Return the share of θ_0 that decay took: that of the settings, or fitted where the update is `scaled`."""
        if self.decay == "known" and not (scaled and client.weight_decay):
            return 1 - client.kept_share
        E = slot_rows(model, model.vit.get_parameter(_PE).detach().double())
        return fit_decay(model, update, slot_rows(model, update[_PE].double()), E)

    def _patches(
        self, model: VictimModel, client: Client, update: Mapping[str, Float[Tensor, "..."]]
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image."""
        moved = without_decay(model, update, self._lost(model, client, update))
        deviations = rounding_of_embedding(model, client, update)

        def solve(of: Mapping[str, Tensor]) -> list[_Candidate]:
            A, dA = (slot_rows(model, each[_PE]) for each in (of, deviations))
            G, dG = (each[_PROJECTION].flatten(1) for each in (of, deviations))
            X = weighted_patches(A, G, dA, dG)
            found = [_Candidate(X, model.to_images(X[None]))]
            if self.levels:
                variance = (dG.square() + dA.square().mT @ X.square()).mean(1)
                X = patches_of_levels(model, A, G, 1 / variance, self.levels)
                found.append(_Candidate(X, (model.to_images(X[None]) * self.levels).round() / self.levels))
            return found

        found = solve(moved)
        private = client.dropout or client.drop_path
        if not self.rounds or private or self.decay == "fitted" or "head.bias" not in moved or not client.has_labels:
            return found[0].X
        label = int(moved["head.bias"].argmin())
        unrounded, plain = copy.deepcopy(model).double(), replace(client, sends="difference", sent_as="float32")
        best, least = found[0].X, math.inf
        for left in reversed(range(self.rounds + 1)):
            tried = [(each, update_on(model, client, each.image, label)) for each in found]
            offs = [_distance(made, update, deviations) for _, made in tried]
            off, (one, made) = min(zip(offs, tried, strict=True), key=lambda of: of[0])
            if off < least:
                best, least = one.X, off
            if not (left and off):
                break
            exact = update_on(unrounded, plain, one.image.double(), label)
            found = solve({name: moved[name] - (made[name].double() - exact[name]) for name in deviations})
        return best


class _Candidate(NamedTuple):
    """Normalised patches that may be the client's, and the image that they make."""

    X: Float[Tensor, "n k"]
    image: Float[Tensor, "1 c h w"]


def _distance(made: Mapping[str, Tensor], update: Mapping[str, Tensor], deviations: Mapping[str, Tensor]) -> float:
    """Return the squared distance of two updates, in standard deviations of rounding; 0 if they are equal."""
    parts = [
        (made[name].double() - update[name]).square() / (dev.square() + (RTOL * update[name]).square())
        for name, dev in deviations.items()
    ]
    return sum(float(part.nan_to_num().sum()) for part in parts)


def _filters(seen: Observation) -> list[GradientDefense]:
    """Return the defenses of the release."""
    return [part for part in seen.defense if isinstance(part, GradientDefense)]


def _errors(seen: Observation, filters: Sequence[GradientDefense]) -> list[dict[str, Float[Tensor, "..."]]]:
    """Return the variances that filters state of the embedding's entries, by release; those of several filters add up.

    Each states them of the embedding's part of the release alone.
    """
    released = {name: seen.gradients[name].double() for name in (_PE, _PROJECTION)}
    stated = [part.variance(released) for part in filters]
    return [
        {name: sum((of[name][i] for of in stated[1:]), stated[0][name][i]) for name in released}
        for i in range(len(released[_PE]))
    ]


def _missing(variance: Float[Tensor, "n d"]) -> Bool[Tensor, "n d"]:
    """Return the entries that filters did not leave exact; none where all have an error, as under noise."""
    return (variance > 0) & (variance == 0).any()
