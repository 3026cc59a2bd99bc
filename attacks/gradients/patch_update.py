"""`patch-update`: the image from the update of a client's local training by SGD, its rounding foreseen."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import (
    RTOL,
    fit_decay,
    patches_of_levels,
    slot_gradients,
    slot_rows,
    too_many,
    warn_of_limits,
    weighted_patches,
)
from privlab.base import PrivlabError, check_name
from privlab.release import rounding_deviation, update_on, without_decay
from privlab.threat import Capability, Client, Observation
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
    2. Pixels have grey levels: of the solutions near that one, one of 256 levels is tried too (`patches_of_levels`).
    3. Rounding is no chance: the client is trained again on both, with the label that the head's bias gives away. The
       nearer that update is to the release, the better; if it is the release bit for bit, it is that of the image. Else
       the client is trained in float64 too, the difference is its rounding, and is subtracted from the release for
       another round. Rounding of steps that are about as large as an ulp cannot be foreseen, so that a round may make
       things worse: the best of all rounds stays.

    Adam and AdamW divide by the gradient's magnitude, so their updates have no such form, and are refused.

    Args:
        decay: "known" takes weight decay from the client's settings, "fitted" fits one number, without them.
        rounds: the most times that rounding is foreseen; 0 leaves out steps 2 and 3, and takes a twentieth of the time.
            What they bring is in docs/studies/updates.md. They are left out too where dropout is private, where the
            decay is not known, or where the head's bias is not released.
        levels: grey levels of a stored image, evenly spaced from 0 to 1; 0 leaves out step 2. Images that a client
            does not feed as they are stored, such as rescaled or jittered tensors, have none, and step 3 finds that.
    """

    name: ClassVar[str] = "patch-update"
    paper: ClassVar[str] = "ours: patch-gradient on the linear map of SGD, with the client's rounding foreseen"
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
    levels: int = 256

    def __post_init__(self) -> None:
        """Raise PrivlabError if an option is out of range."""
        check_name("decay", self.decay, ("known", "fitted"))
        if self.rounds < 0:
            raise PrivlabError(f"patch-update takes rounds ≥ 0. Found {self.rounds}.")
        if self.levels < 0 or self.levels == 1:
            raise PrivlabError(f"patch-update takes levels ≥ 2, or 0 for none. Found {self.levels}.")

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N < D with its numbers if it does not hold."""
        return too_many(seen)

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
        releases = zip(*seen.gradients.values(), strict=True)
        found = [self._patches(seen.model, client, dict(zip(seen.gradients, each, strict=True))) for each in releases]
        return seen.model.to_images(torch.stack(found))

    def _patches(
        self, model: VictimModel, client: Client, update: Mapping[str, Float[Tensor, "..."]]
    ) -> Float[Tensor, "n k"]:
        """Return the normalised patches of one client's image."""
        E = slot_rows(model, model.vit.get_parameter(_PE).detach().double())
        if self.decay == "known":
            lost = 1 - client.kept_share
        else:
            lost = fit_decay(model, update, slot_rows(model, update[_PE].double()), E)
        moved = without_decay(model, update, lost)
        deviations = {
            name: rounding_deviation(θ := model.vit.get_parameter(name).detach(), θ - update[name], client)
            for name in (_PE, _PROJECTION)
        }

        def solve(of: Mapping[str, Tensor]) -> list[_Candidate]:
            A, dA = (slot_rows(model, each[_PE]) for each in (of, deviations))
            G, dG = (each[_PROJECTION].flatten(1) for each in (of, deviations))
            X = weighted_patches(A, G, dA, dG)
            found = [_Candidate(X, model.to_images(X[None]))]
            if self.levels:
                variance = (dG.square() + dA.square().mT @ X.square()).mean(1)
                X = patches_of_levels(model, A, G, 1 / variance, self.levels)
                most = self.levels - 1
                found.append(_Candidate(X, (model.to_images(X[None]) * most).round() / most))
            return found

        found = solve(moved)
        private = client.dropout or client.drop_path
        if not self.rounds or private or self.decay == "fitted" or "head.bias" not in moved:
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
