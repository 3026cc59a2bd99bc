"""What the linear system of the closed forms can determine, and the warnings where it cannot."""

import warnings

from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers.masked_slots import slot_gradients, zero_rows
from privlab.base import PrivlabWarning
from privlab.threat import Observation

__all__ = ["too_many", "warn_of_limits"]


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
        warnings.warn(
            f"{attack}: {n} tokens, but gradients of width {d} determine at most {most}. "
            "The solution of least norm is not exact: a low score here is no evidence of privacy.",
            PrivlabWarning,
            stacklevel=3,
        )
    if not knows_mask and bool(zero_rows(A).any()):
        warnings.warn(
            f"{attack}: some position embeddings received no gradient, as under MJP. The attack takes the zeros "
            "for equations, as in the paper: it does not know the defense, and a low score is no evidence of privacy.",
            PrivlabWarning,
            stacklevel=3,
        )
