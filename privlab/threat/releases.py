"""What clients release: a gradient, features, or the update of a round of training."""

from dataclasses import dataclass, field

from privlab.threat.client import Client


@dataclass(frozen=True)
class Gradient:
    """What federated learning releases: the gradient of the mean loss of `batch` images.

    Example:
        >>> Gradient(batch=4).images
        4
    """

    batch: int = 1

    @property
    def images(self) -> int:
        """Return how many images are released together."""
        return self.batch


@dataclass(frozen=True)
class Features:
    """What split learning releases: the tokens after `cut_layer` blocks, of `batch` images at a time.

    Example:
        >>> Features(cut_layer=2).images
        16
    """

    cut_layer: int = 0
    batch: int = 16

    @property
    def images(self) -> int:
        """Return how many images are released together."""
        return self.batch


@dataclass(frozen=True)
class Update:
    """What a federation's client releases: how far a round of local training moved the weights.

    Example:
        >>> Update(Client(lr=0.1, steps=5, images=8)).images
        8
    """

    client: Client = field(default_factory=Client)

    @property
    def images(self) -> int:
        """Return how many images are released together: those of all clients whose mean it is."""
        return self.client.released_images


Release = Gradient | Features | Update
"""What leaves a client."""
