"""Which slots a defense masked, as MJP does, read off ∂ℓ/∂E_pos, and what its linear system can determine.

MJP shuffles some patches and removes the position embeddings of their slots, so that these get no gradient. Known is
A = ∂ℓ/∂E_pos; sought are the masked slots: rows of A that are zero, or no larger than the noise. The functions at the
end say whether Aᵀ X = ∂ℓ/∂W can determine the patches X.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.noisy_gradients import NoisyGradients
from privlab.base import warn
from privlab.release import effects_of
from privlab.threat import Capability, GradientDefense, Observation
from privlab.victims import VictimModel


def slot_gradients(seen: Observation) -> Float[Tensor, "b n d"]:
    """Return A = ∂ℓ/∂E_pos without the rows of class and register tokens."""
    return seen.gradients["pos_embed"].squeeze(1)[:, -seen.model.vit.patch_embed.num_patches :]


def slot_rows(model: VictimModel, pe: Float[Tensor, "1 t d"]) -> Float[Tensor, "n d"]:
    """Return the rows of position embeddings, or of what is given for each of them, that belong to patches."""
    return pe[0, -model.vit.patch_embed.num_patches :]


def token_count(model: VictimModel) -> int:
    """Return N + p, the number of patches and of class and register tokens."""
    return model.vit.patch_embed.num_patches + model.vit.num_prefix_tokens


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
    # E_unk has the shape 1 × 1 × D; without it, or where the defense says so, zero takes its place.
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


ONE_IMAGE = frozenset({Capability.LEARNABLE_PE_GRADIENT, Capability.BATCH_SIZE_ONE})
"""What the closed forms of one image's position embeddings need."""


def too_many(seen: Observation) -> str | None:
    """Return a text if N ≥ D: Aᵀ X = ∂ℓ/∂W then does not determine X, because A·1 = 0 and A has rank D − 1 at most."""
    _, n, d = slot_gradients(seen).shape
    return None if n < d else f"N = {n} ≥ D = {d}"


def warn_of_limits(attack: str, A: Float[Tensor, "b n d"], most: int, *, knows_mask: bool = False) -> None:
    """Warn if Aᵀ X = G cannot determine X: there are more than `most` tokens, or masked ones that the attack ignores.

    Args:
        attack: name of the attack, with which the warning begins.
        A: ∂ℓ/∂E_pos of the tokens; a row of zeros is a masked token.
        most: the largest number of tokens that the attack can recover.
        knows_mask: whether the attack treats masked tokens as such, so that they need no warning.

    Warns:
        PrivlabWarning: with the numbers found.
    """
    _, n, d = A.shape
    if n > most:
        warn(
            f"{attack}: {n} tokens, but gradients of width {d} determine at most {most}. "
            "The solution of least norm is not exact: a low score here is no evidence of privacy.",
        )
    if not knows_mask and bool(zero_rows(A).any()):
        warn(
            f"{attack}: some position embeddings received no gradient, as under MJP, which this attack does not know: "
            "a low score is no evidence of privacy.",
        )
