"""The protocols of attacks on gradients and on features, and the check of the capabilities that they need."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.threat.capabilities import FORCEABLE, Capability
from privlab.threat.client import Client
from privlab.threat.observations import FeatureObservation, Observation, Reconstruction
from privlab.victims import VictimModel


@runtime_checkable
class Attack(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns an observation into images in [0, 1].

    `parameters` names the gradients that the attack reads ("*": all that are released), `requires` the capabilities
    that it needs, `paper` its source. An attack with `named_only` runs only if it is asked for by name. An attack with
    `stands_in_for` runs without being named only if none of the attacks listed there runs. It may read further
    gradients, `if_released`. `knows` names the defenses that it takes into account; with `places` it puts loose patches
    in order itself. An attack that needs a defense may name its counterpart without one as `undefended`: that is its
    positive control.

    A method `beyond(seen)` returns, from public knowledge, the condition of the attack's exactness that an observation
    violates, in a few words, or None. Records keep it. An attack without the method states no range in which it is
    exact.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]
    parameters: ClassVar[tuple[str, ...]]

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"] | Reconstruction:
        """Return the reconstructed images in [0, 1], or a `Reconstruction` if the attack found more than images."""
        ...


@runtime_checkable
class DishonestAttack(Attack, Protocol):
    """An attack of a server that chooses the weights: it requires `chooses_weights`, and must be named.

    What it is called with was released by clients that got the weights of `choose`. No other attack sees that release.
    """

    def choose(self, model: VictimModel, images: int, client: Client | None) -> Mapping[str, Tensor]:
        """Return weights of the victim's architecture by timm's names; those that are left out stay as they are.

        Args:
            model: the honest model, which must not be changed.
            images: B, the images of one release, at least 1.
            client: the public settings of the clients that train; None where they release gradients.
        """
        ...


@runtime_checkable
class FeatureAttack(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns released features into images in [0, 1]."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    requires: ClassVar[frozenset[Capability]]

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Return the reconstructed images that the client embedded, in [0, 1]."""
        ...


if TYPE_CHECKING:
    AttackClass: TypeAlias = type[Attack] | type[FeatureAttack]
else:  # Python cannot check classes against a protocol that has data members
    AttackClass = type
    """The class of an attack, on gradients or on features."""


def check_capabilities(
    attack: Attack | FeatureAttack,
    grants: Iterable[Capability],
    *,
    force: bool = False,
    because: Mapping[Capability, str] | None = None,
) -> None:
    """Refuse an attack that requires more than is granted.

    Args:
        attack: the attack, with the capabilities that it requires.
        grants: the capabilities that the observation grants.
        force: whether the capabilities in `FORCEABLE` may be missing.
        because: why a capability is not granted, for the error message; by default the message gives its meaning.

    Raises:
        PrivlabError: if the attack reads gradients and features are released, or the reverse, or if a capability is
            missing; the message names each missing one.
    """
    grants = frozenset(grants)
    reads, released = (Capability.RELEASED_FEATURES in what for what in (attack.requires, grants))
    if reads != released:
        kinds = ("gradients", "features")
        raise PrivlabError(
            f"Attack '{attack.name}' reads {kinds[reads]}, and this run releases {kinds[released]}. "
            f"Give --release {kinds[reads]} and no defense that acts on {kinds[released]}, or name another attack."
        )
    missing = attack.requires - grants - (FORCEABLE if force else frozenset())
    if missing:
        names = "; ".join(f"{c.value} ({(because or {}).get(c, c.meaning)})" for c in sorted(missing))
        raise PrivlabError(f"Attack '{attack.name}' needs what this observation does not grant: {names}.")
