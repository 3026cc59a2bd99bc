"""What defenses are: on images, on features, on gradients."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.threat.client import Draws, Feed, Sent

__all__ = ["Defense", "DefenseClass", "FeatureDefense", "GradientDefense"]


@runtime_checkable
class Defense(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns private images into what the client feeds.

    What it does may be declared, `acts_as: Effects`; without it, attacks go by what is measured. So for all defenses.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Transform b images by one draw each; one with `per` = "batch" is given a draw for each release of b / r."""
        ...


@runtime_checkable
class FeatureDefense(Protocol):
    """A frozen dataclass of hyper-parameters; it changes the embedded tokens before they are sent."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return what is sent instead of `sent`."""
        ...


@runtime_checkable
class GradientDefense(Protocol):
    """A frozen dataclass of hyper-parameters; it changes the gradients of all released parameters before they leave.

    One with a method `expected` says what it releases on average of given gradients, such as what clipping leaves.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> Mapping[str, Float[Tensor, "b ..."]]:
        """Return what is released instead of `gradients`, each image's by itself and with its own draw."""
        ...

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> Mapping[str, Float[Tensor, "b ..."]]:
        """Return the variance of what this adds to each entry, as an adversary knows it from some of the release.

        An entry that was released as zero, and may be something else, is taken to be evenly spread around zero.
        """
        ...


if TYPE_CHECKING:
    DefenseClass: TypeAlias = type[Defense] | type[FeatureDefense] | type[GradientDefense]
else:  # Python cannot check classes against a protocol that has data members
    DefenseClass = type
