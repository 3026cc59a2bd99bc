"""What attacks are, on gradients and on features, and what they must be granted."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.threat.capabilities import FORCEABLE, Capability
from privlab.threat.observations import FeatureObservation, Observation, Stolen

__all__ = ["Attack", "AttackClass", "FeatureAttack", "check_capabilities"]


@runtime_checkable
class Attack(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns an observation into images in [0, 1].

    `parameters` names the gradients that it reads ("*": all that are released), `requires` what it must be granted,
    `paper` its source. One with `named_only` set runs only where it is asked for by name, and one with `stands_in_for`,
    unless it is, only where none of the attacks named there runs. It may read further gradients, `if_released`. `knows`
    names the defenses that it takes into account; with `places` set it puts loose patches in order itself. One that
    needs a defense may name the attack that it is without one, `undefended`: that is its positive control.

    A method `beyond(seen)` says of an observation, from what is public, which condition of its exactness does not hold,
    in a few words, or None. Records keep it. Without the method it has no stated range: nothing is said to be exact.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]
    parameters: ClassVar[tuple[str, ...]]

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"] | Stolen:
        """Reconstruct the images that the clients fed, in [0, 1]; `Stolen` where there is more to say."""
        ...


@runtime_checkable
class FeatureAttack(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns released features into images in [0, 1]."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]

    def __call__(self, seen: FeatureObservation) -> Stolen:
        """Reconstruct the images that the client embedded, in [0, 1]."""
        ...


if TYPE_CHECKING:
    AttackClass: TypeAlias = type[Attack] | type[FeatureAttack]
else:  # Python cannot check classes against a protocol that has data members
    AttackClass = type


def check_capabilities(
    attack: Attack | FeatureAttack,
    grants: Iterable[Capability],
    *,
    force: bool = False,
    because: Mapping[Capability, str] | None = None,
) -> None:
    """Refuse an attack that requires more than is granted; `because` says of a capability why it is not.

    Raises:
        PrivlabError: with the name and the meaning of each missing capability.
    """
    grants = frozenset(grants)
    reads, released = (Capability.RELEASED_FEATURES in what for what in (attack.requires, grants))
    if reads != released:
        kinds = ("gradients", "features")
        raise PrivlabError(
            f"Attack '{attack.name}' reads {kinds[reads]}, and this run releases {kinds[released]} "
            f"(--release {kinds[reads]}, without a defense that acts on {kinds[released]}, or another attack)."
        )
    missing = attack.requires - grants - (FORCEABLE if force else frozenset())
    if missing:
        names = "; ".join(f"{c.value} ({(because or {}).get(c, c.meaning)})" for c in sorted(missing))
        raise PrivlabError(f"Attack '{attack.name}' needs what this observation does not grant: {names}.")
