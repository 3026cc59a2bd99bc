"""`patch-update`: the image from the update of a client's local training by SGD, its rounding foreseen."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import fit_decay, slot_gradients, slot_rows, too_many, warn_of_limits, weighted_patches
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
    2. Rounding is no chance: the client is trained again on the reconstruction, with the label that the head's bias
       gives away, once in the number format of its weights and once in float64. The difference is its rounding, and is
       subtracted from the release. Rounding of steps that are about as large as an ulp cannot be foreseen, so that a
       round may make things worse: the reconstruction is kept that explains the released update best.

    Adam and AdamW divide by the gradient's magnitude, so their updates have no such form, and are refused.

    Args:
        decay: "known" takes weight decay from the client's settings, "fitted" fits one number, without them.
        rounds: times that rounding is foreseen; 0 leaves it out, and takes a twentieth of the time. What it brings is
            in docs/studies/updates.md. It is left out too where dropout is private, where the decay is not known, or
            where the head's bias is not released.
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
    rounds: int = 2

    def __post_init__(self) -> None:
        """Raise PrivlabError if an option is out of range."""
        check_name("decay", self.decay, ("known", "fitted"))
        if self.rounds < 0:
            raise PrivlabError(f"patch-update takes rounds ≥ 0. Found {self.rounds}.")

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

        def solve(of: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
            A, dA = (slot_rows(model, each[_PE]) for each in (of, deviations))
            G, dG = (each[_PROJECTION].flatten(1) for each in (of, deviations))
            return weighted_patches(A, G, dA, dG)

        X = solve(moved)
        private = client.dropout or client.drop_path
        if not self.rounds or private or self.decay == "fitted" or "head.bias" not in moved:
            return X
        label = int(moved["head.bias"].argmin())
        unrounded, plain = copy.deepcopy(model).double(), replace(client, sends="difference", sent_as="float32")
        best, least = X, float("inf")
        for _ in range(self.rounds + 1):
            made = update_on(model, client, model.to_images(X[None]), label)
            stored = {name: u.double() for name, u in made.items()}
            off = sum(float(((stored[name] - update[name]) / dev).square().sum()) for name, dev in deviations.items())
            if off < least:
                best, least = X, off
            exact = update_on(unrounded, plain, unrounded.to_images(X[None]), label)
            X = solve({name: moved[name] - (stored[name] - exact[name]) for name in deviations})
        return best
