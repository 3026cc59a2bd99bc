"""The protocols of defenses on images, on features and on gradients."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.threat.client_data import Draws, Feed, Sent

Gradients: TypeAlias = Mapping[str, Float[Tensor, "b ..."]]
"""The gradients of parameters by name, with the images or releases in the first dimension."""


@runtime_checkable
class Defense(Protocol):
    """A frozen dataclass of hyper-parameters; calling it turns private images into what the client feeds.

    A defense of any kind may declare its effects as `acts_as: Effects`; otherwise attacks rely on measured effects.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return what the clients feed instead of b private images.

        Args:
            images: the private images in [0, 1].
            patch: the side of a patch, in pixels.
            draws: the clients' secret generators, one for each image; a defense with `per` = "batch" gets one for each
                of r releases, each of b / r images; one with `per` = "model" gets that of the client alone.
        """
        ...


@runtime_checkable
class FeatureDefense(Protocol):
    """A frozen dataclass of hyper-parameters; it changes the embedded tokens before they are sent."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return what the client sends instead of `sent`."""
        ...


@runtime_checkable
class GradientDefense(Protocol):
    """A frozen dataclass of hyper-parameters; it changes the gradients of all released parameters before they leave.

    They are those of one step, or what a client's local training moved. A defense may have a method `expected` that
    returns the mean of its releases of given gradients, such as what clipping leaves, a method `at_bound` that returns
    which entries of a release were cut to a bound, and a method `withholds` that names the parameters that it leaves
    out.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return what is released instead of `gradients`, for each image separately and with its own draw."""
        ...

    def variance(self, released: Gradients) -> Gradients:
        """Return the variance of what this adds to each entry, as an adversary knows it from a part of the release.

        An entry that was released as zero, but may have another value, is taken as uniform around zero.
        """
        ...


if TYPE_CHECKING:
    DefenseClass: TypeAlias = type[Defense] | type[FeatureDefense] | type[GradientDefense]
else:  # Python cannot check classes against a protocol that has data members
    DefenseClass = type
    """The class of a defense, of images, of features or of gradients."""
