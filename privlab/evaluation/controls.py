"""Negative controls: images that no attack made, which show what "nothing leaks" looks like under each metric."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import warn
from privlab.evaluation.batch import Batch
from privlab.evaluation.records import CONTROLS
from privlab.images import Others
from privlab.patches import permute


@dataclass(frozen=True, eq=False)
class Controls:
    """Makes the negative controls of `CONTROLS` from `public` photographs; for an image, never from that image itself.

    They are the mean of the photographs, one photograph, the private image with its patches shuffled, and one `colour`
    everywhere: an attack that finds nothing leaves grey, and that must not count as a leak.
    """

    public: Others
    colour: Float[Tensor, "c 1 1"]

    def of(
        self, batch: Batch, patch: int, draws: Sequence[Generator], *, together: bool
    ) -> dict[str, Float[Tensor, "b c h w"]]:
        """Return the negative controls of a batch by their names in `CONTROLS`: of each, one for every image.

        Where no public photograph is left for an image, only the two controls that need none are returned: shuffled
        patches and one colour.

        Args:
            batch: the private images; the controls of an image are never made of the image itself, nor of other crops
                of its file.
            patch: side of a patch, in pixels.
            draws: one generator per image; it draws the order of the image's shuffled patches.
            together: whether the images are attacked as one. Then no image of the batch is used as a photograph, and
                each has a photograph of its own beside it, as long as there are enough.

        Warns:
            PrivlabWarning: if there are too few photographs.
        """
        count = (batch.images.shape[2] // patch) * (batch.images.shape[3] // patch)
        drawn = torch.stack([torch.randperm(count, generator=draw) for draw in draws])
        kept = (drawn == torch.arange(count)).all(1, keepdim=True)  # of few patches, an order that moves none
        order = torch.where(kept, drawn.roll(1, 1), drawn).to(batch.images.device)
        flat = self.colour.to(batch.images).clamp(0, 1).expand_as(batch.images)
        always = {CONTROLS[2]: permute(batch.images, order, patch), CONTROLS[3]: flat}
        names, photographs = [image.sha256 for image in batch.named], self.public.images
        if together:
            left = self.public.without(names, batch.images)
            wanted, found = len(names), len(left)
            pairs = [(self._mean(left), photographs[left[i % found]]) for i in range(wanted)] if left else []
        else:
            each = [self.public.without([name], image[None]) for name, image in zip(names, batch.images, strict=True)]
            wanted, found = 1, min(map(len, each))
            pairs = [(self._mean(left), photographs[left[0]]) for left in each if left]
        if found < wanted:
            told = f"{found} public photographs are not under attack, for {wanted} images in one release"
            what = "repeat them" if found else "are not scored"
            warn(f"{told}: the controls made of them {what}.")
        if len(pairs) < len(names):
            return always
        mean, other = (torch.stack(images).to(batch.images) for images in zip(*pairs, strict=True))
        return {CONTROLS[0]: mean, CONTROLS[1]: other} | always

    def _mean(self, left: Sequence[str]) -> Float[Tensor, "c h w"]:
        """Return the mean of these photographs; the mean of all is computed once, as they may be thousands."""
        if len(left) == len(self.public.images):
            return self._mean_of_all
        return torch.stack([self.public.images[key] for key in left]).mean(0)

    @cached_property
    def _mean_of_all(self) -> Float[Tensor, "c h w"]:
        return torch.stack([*self.public.images.values()]).mean(0)
