"""What an attack brings home, looked at before anything is made of it: it may come from another package."""

from collections.abc import Sequence

from torch import Tensor

from privlab.base import PrivlabError
from privlab.threat import Attack, FeatureAttack, FeatureObservation, Observation, Stolen, declared_by_attack

__all__ = ["beyond_range", "brought", "check_reconstruction"]


def brought(attack: Attack | FeatureAttack, seen: Observation | FeatureObservation) -> Stolen:
    """Run an attack on what it is for, and return what it brought home."""
    return Stolen.of(attack(seen))  # pyright: ignore[reportArgumentType]  # the plan gave each its kind of observation


def check_reconstruction(images: Tensor, shape: Sequence[int]) -> None:
    """Check that an attack returned images of this shape, b × c × h × w, in [0, 1].

    Raises:
        PrivlabError: if it returned anything else, or a value that is not finite.
    """
    if images.shape != tuple(shape):
        raise PrivlabError(f"the attack returned {tuple(images.shape)} instead of {tuple(shape)}")
    if not images.isfinite().all():
        raise PrivlabError("the attack returned values that are not finite")
    if images.min() < 0 or images.max() > 1:
        low, high = images.aminmax()
        raise PrivlabError(f"the attack returned values in [{low:.3g}, {high:.3g}] instead of [0, 1]")


def beyond_range(attack: Attack | FeatureAttack, seen: Observation | FeatureObservation) -> str | None:
    """Return why an attack runs outside the range in which it is said to be exact, from what is public; else None.

    The range is stated by the attack's own method `beyond`; an attack without that method has none. An attack that was
    forced to run without a capability that it requires is always outside its range.
    """
    if missing := attack.requires - seen.grants:
        return "forced without " + ", ".join(sorted(capability.value for capability in missing))
    return declared_by_attack(attack).beyond(seen)
