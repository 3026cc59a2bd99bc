"""Pictures that no attack made: what "nothing leaks" looks like under each metric."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.patches import permute
from privlab.photographs import kin
from privlab.records import CONTROLS
from privlab.threat import PrivlabWarning
from privlab.trial import Batch

__all__ = ["Controls"]


@dataclass(frozen=True, eq=False)
class Controls:
    """Makes the negative controls of `CONTROLS` from `public` photographs, by their hash; never from one under attack.

    The mean of the photographs, one of them, and the private image with its patches shuffled.
    """

    public: Mapping[str, Float[Tensor, "c h w"]]

    def of(
        self, batch: Batch, patch: int, draws: Sequence[Generator], *, together: bool
    ) -> dict[str, Float[Tensor, "b c h w"]]:
        """Return the pictures of a batch by the name of their control; without a photograph that is left, one alone.

        Where images are attacked `together`, none of them is among the photographs, and each has a photograph of its
        own beside it, as long as there are so many.

        Warns:
            PrivlabWarning: if photographs are too few.
        """
        count = (batch.images.shape[2] // patch) * (batch.images.shape[3] // patch)
        order = torch.stack([torch.randperm(count, generator=draw) for draw in draws]).to(batch.images.device)
        shuffled = {CONTROLS[2]: permute(batch.images, order, patch)}
        names = [picture.sha256 for picture in batch.pictures]
        if together:
            private = kin(names)
            left = [image for sha256, image in self.public.items() if sha256 not in private]
            pairs = [(torch.stack(left).mean(0), left[i % len(left)]) for i in range(len(names))] if left else []
            if len(left) < len(names):
                told = f"{len(left)} public photographs are not under attack, for {len(names)} images in one release"
                what = "are not scored" if not left else "repeat them"
                warnings.warn(f"{told}: the controls made of them {what}.", PrivlabWarning, stacklevel=2)
        else:
            pairs = [pair for name in names if (pair := self._without(name)) is not None]
        if len(pairs) < len(names):
            return shuffled
        mean, other = (torch.stack(images).to(batch.images) for images in zip(*pairs, strict=True))
        return {CONTROLS[0]: mean, CONTROLS[1]: other} | shuffled

    def _without(self, sha256: str) -> tuple[Tensor, Tensor] | None:
        """Return the mean and the first of the photographs, without the private image if it is one of them."""
        private = kin([sha256])
        if not private & self.public.keys():
            return self._all
        left = [image for name, image in self.public.items() if name not in private]
        return (torch.stack(left).mean(0), left[0]) if left else None

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """Return them for all that are not: public images may be thousands, too many to be gathered for each."""
        images = [*self.public.values()]
        return torch.stack(images).mean(0), images[0]
