"""Which slots a defense masked, as MJP does: read off the rows of ∂ℓ/∂E_pos that are zero, or below the noise."""

from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.noisy_gradients import NoisyGradients
from privlab.release import effects_of
from privlab.threat import GradientDefense, Observation
from privlab.victims import VictimModel

__all__ = ["feeds_unknown", "hides_places", "masked_slots", "replacement", "shares_mask", "slot_gradients"]
__all__ += ["slot_rows", "zero_rows"]


def slot_gradients(seen: Observation) -> Float[Tensor, "b n d"]:
    """Return A = ∂ℓ/∂E_pos without the rows of class and register tokens."""
    height, width = seen.model.grid
    return seen.gradients["pos_embed"].squeeze(1)[:, -height * width :]


def slot_rows(model: VictimModel, pe: Float[Tensor, "1 t d"]) -> Float[Tensor, "n d"]:
    """Return the rows of position embeddings, or of what is given for each of them, that belong to patches."""
    height, width = model.grid
    return pe[0, -height * width :]


def zero_rows(A: Float[Tensor, "b n d"]) -> Bool[Tensor, "b n"]:
    """Mark the slots whose position embedding has no gradient at all."""
    return (A == 0).all(2)


def hides_places(seen: Observation) -> bool:
    """Return whether a defense removes the position embeddings of the slots that it shuffles (MJP, Equation 4)."""
    return effects_of(seen.model, seen.defense).pe != "slot"


def shares_mask(seen: Observation) -> bool:
    """Return whether such a defense removes them in the same slots of all images of a release (`per` batch)."""
    return hides_places(seen) and (seen.images_per_release == 1 or effects_of(seen.model, seen.defense).one_order)


def feeds_unknown(seen: Observation) -> bool:
    """Return whether E_unk, and not zero, replaces position embeddings that are removed."""
    return seen.model.unk_embed is not None and effects_of(seen.model, seen.defense).pe != "zero"


def replacement(seen: Observation) -> Float[Tensor, "1 d"]:
    """Return what replaces the position embedding of masked slots: E_unk, or zero, as the defense says."""
    unknown = seen.model.unk_embed
    if unknown is None or not feeds_unknown(seen):
        return seen.model.mean.new_zeros(1, seen.model.vit.embed_dim)
    return unknown.detach()[0]


def masked_slots(seen: Observation) -> Bool[Tensor, "r n"]:
    """Return the slots of each release whose position embedding has no gradient, or none above the noise.

    Under MJP these are the masked slots, of one image or of all that share a mask (`shares_mask`).
    """
    defended = any(isinstance(part, GradientDefense) for part in seen.defense)
    if defended and "patch_embed.proj.weight" in seen.gradients:  # zeros may be missing entries
        return NoisyGradients.of(seen).silent_slots & hides_places(seen)
    return zero_rows(slot_gradients(seen))
