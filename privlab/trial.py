"""What the clients of one batch feed and send in one setting, and what a reconstruction is compared with."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.decode import Picture
from privlab.draws import draw_for
from privlab.threat import Feed, Sent

__all__ = ["Batch", "Trial", "batch_key"]


def batch_key(sha256: Iterable[str]) -> str:
    """Return a short hash of the images of a client's batch, whatever their order."""
    return hashlib.sha256("/".join(sorted(sha256)).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Batch:
    """Readable pictures on the device; their labels stand in `pictures` too.

    `key` names the chunk that they come from, unreadable pictures included: what a client draws depends on its batch.
    """

    pictures: Sequence[Picture]
    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, " b"]
    key: str

    @property
    def together(self) -> str:
        """Return what names these images, in this order."""
        return "/".join(picture.sha256 for picture in self.pictures)

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return some of the pictures."""
        return Batch([self.pictures[i] for i in rows], self.images[rows], self.labels[rows], self.key)

    def draws(self, seed: int, purpose: str, draw: int) -> list[Generator]:
        """Return a generator for each picture."""
        return [draw_for(seed, picture.sha256, purpose, draw) for picture in self.pictures]


@dataclass(frozen=True, eq=False)
class Trial:
    """One setting of one batch: what is fed and sent, and what a reconstruction is compared with."""

    setting: str
    feed: Feed
    reference: Float[Tensor, "b c h w"]
    sent: Sent | None = None  # None: gradients are released

    def take(self, rows: Sequence[int]) -> "Trial":
        """Return the trial of some of the images, whose gradients are released."""
        feed = self.feed
        masked = None if feed.masked_pe is None else feed.masked_pe[rows]
        taken = replace(
            feed, images=feed.images[rows], order=feed.order[rows], moved=feed.moved[rows], masked_pe=masked
        )
        return Trial(self.setting, taken, self.reference[rows])
