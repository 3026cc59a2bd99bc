"""`patch-update`: the image from the update of a client's local training by SGD, its rounding foreseen."""

import copy
import math
from collections.abc import Mapping
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
from privlab.release import (
    EXPLAINED_RESIDUAL,
    each_release,
    errors_of_filters,
    labels_that_rise,
    scale_of,
    scales,
    update_on,
    without_decay,
)
from privlab.threat import Capability, Client, Observation, Stack
from privlab.victims import VictimModel

__all__ = ["PatchUpdate"]

_PE, _PROJECTION = "pos_embed", "patch_embed.proj.weight"

_LABELS = 3
"""Labels that are tried where none is told."""


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

    A filter, a defense of the release, that multiplies all entries by one factor, as clipping by the norm does, takes
    nothing: the factor is fitted to the client's own update in step 3, and decay is fitted before. Where a filter
    leaves out the head, no label is told. Those whose logits rise most along the update are tried (`labels_that_rise`),
    and step 3 is left out if none explains it.

    Behind other filters entries have the variance that these state. Where they leave some entries exact, those that
    they set to zero or clipped are missing, and those of A are found from the others: `complete`. They are left as they
    are if there are more than 6,000. Rounding is not foreseen then.

    Adam and AdamW divide by the gradient's magnitude, so their updates have no such form, and are refused.

    Args:
        decay: "known" takes weight decay from the client's settings, "fitted" fits one number, without them.
        rounds: the most times that rounding is foreseen; 0 leaves out steps 2 and 3, and takes a twentieth of the time.
            What they bring is in docs/studies/updates.md. They are left out too where dropout is private, where the
            decay is not known, where no label is found, or where a defense of images made private draws. Of updates
            that are sent as int8 the result of step 3 is taken where it is the release bit for bit, or not at all.
        levels: grey levels above black of a stored image, 255 for eight bits; 0 leaves out step 2. Images that a client
            does not feed as they are stored, such as rescaled or jittered tensors, have none, and step 3 finds that.
    """

    name: ClassVar[str] = "patch-update"
    paper: ClassVar[str] = "ours: patch-gradient on the linear map of SGD, with the client's rounding foreseen"
    knows: ClassVar[frozenset[str]] = frozenset(
        {
            *("gradient-noise", "gradient-pruning", "gradient-quantisation"),
            *("percentile-privacy", "svt-privacy", "exclude-vars", "binary-weights", "adaptive-clipping"),
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
        errors = errors_of_filters(seen, (_PE, _PROJECTION))
        most = max(int(_missing(slot_rows(seen.model, of[_PE])).sum()) for of in errors)
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
        stack, errors = Stack(tuple(seen.defense)), errors_of_filters(seen, (_PE, _PROJECTION))
        nothing = [name for name in (_PE, _PROJECTION) if not all(update[name].any() for update in releases)]
        if stack.on_gradients and nothing:
            raise PrivlabError(
                f"{self.name} has nothing to solve for: the filter left no entry of {' and '.join(nothing)}. That it "
                "does not apply is no evidence of privacy."
            )
        scaled = scales(stack.on_gradients)
        if any(bool(variance.any()) for of_one in errors for variance in of_one.values()):
            found = [self._behind(seen.model, client, *of_one, scaled) for of_one in zip(releases, errors, strict=True)]
        else:  # filters that leave parameters out, or scale the others, take nothing of these
            own = replace(self, rounds=0) if stack.changes_images else self
            found = [own._patches(seen.model, client, update, scaled) for update in releases]
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
        self, model: VictimModel, client: Client, update: Mapping[str, Float[Tensor, "..."]], scaled: bool
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image; `scaled` says whether a filter scaled its update."""
        lost = self._lost(model, client, update, scaled=scaled)
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

        moved = without_decay(model, update, lost)
        found = solve(moved)
        private = client.dropout or client.drop_path
        if not self.rounds or private or self.decay == "fitted" or not client.has_labels:
            return found[0].X
        told = "head.bias" in moved
        labels = [int(moved["head.bias"].argmin())] if told else labels_that_rise(model, moved, found[0].image, _LABELS)
        unrounded, plain = copy.deepcopy(model).double(), replace(client, sends="difference", sent_as="float32")
        first = best = found[0].X
        least = math.inf
        for left in reversed(range(self.rounds + 1)):
            tried = [_Tried.of(model, client, update, one, y, scaled) for one in found for y in labels]
            offs = [_distance(each.made, update, deviations) for each in tried]
            off, now = min(zip(offs, tried, strict=True), key=lambda of: of[0])
            if not told and len(labels) > 1 and _residual(now.made, update) >= EXPLAINED_RESIDUAL:
                break
            if off < least:
                best, least = now.candidate.X, off
            if not (left and off):
                break
            labels = [now.label]
            exact = update_on(unrounded, plain, now.candidate.image.double(), now.label)
            foreseen = {n: update[n] - (now.made[n].double() - now.scale * exact[n]) for n in deviations}
            found = solve(without_decay(model, foreseen, now.scale * (1 - client.kept_share)))
        # Rounding as large as int8's follows from an exact image alone: others are nearer to the release by chance.
        return first if least and client.sent_as == "int8" else best


class _Candidate(NamedTuple):
    """Normalised patches that may be the client's, and the image that they make."""

    X: Float[Tensor, "n k"]
    image: Float[Tensor, "1 c h w"]


class _Tried(NamedTuple):
    """A candidate with a label, and the update that a client of both would send, times the factor of a filter."""

    candidate: _Candidate
    label: int
    scale: float
    made: Mapping[str, Float[Tensor, "..."]]

    @classmethod
    def of(
        cls, model: VictimModel, client: Client, update: Mapping[str, Tensor], one: _Candidate, label: int, scaled: bool
    ) -> "_Tried":
        """Train the client again; the factor is fitted if the update is `scaled`, and rounded as filters round it."""
        made = update_on(model, client, one.image, label)
        if not scaled:
            return cls(one, label, 1.0, made)
        kept = {name: torch.ones_like(u, dtype=torch.bool) for name, u in update.items()}
        s = torch.tensor(scale_of(made, update, kept)).to(update[_PE])
        return cls(one, label, float(s), {name: s * u for name, u in made.items()})


def _distance(made: Mapping[str, Tensor], update: Mapping[str, Tensor], deviations: Mapping[str, Tensor]) -> float:
    """Return the squared distance of two updates, in standard deviations of rounding; 0 if they are equal."""
    parts = [
        (made[name].double() - update[name]).square() / (dev.square() + (RTOL * update[name]).square())
        for name, dev in deviations.items()
    ]
    return sum(float(part.nan_to_num().sum()) for part in parts)


def _residual(made: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> float:
    """Return the relative distance of two updates of the embedding."""
    off, size = (
        sum(float(part.double().square().sum()) for part in parts)
        for parts in ([made[n] - update[n] for n in (_PE, _PROJECTION)], [update[n] for n in (_PE, _PROJECTION)])
    )
    return math.sqrt(off / size) if size else math.inf


def _missing(variance: Float[Tensor, "n d"]) -> Bool[Tensor, "n d"]:
    """Return the entries that filters did not leave exact; none where all have an error, as under noise."""
    return (variance > 0) & (variance == 0).any()
