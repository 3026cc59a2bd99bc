"""Public photographs: attacks may use them, and negative controls show what "nothing leaks" looks like."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import warn
from privlab.evaluation.batch import Batch
from privlab.evaluation.records import CLASS_MEAN, CONTROLS
from privlab.images import Others
from privlab.patches import permute


@dataclass(frozen=True, eq=False)
class Public:
    """The public `photographs` of a run: attacks may use them, and negative controls are made of them.

    Those that show a private image are left out. `colour` is the mean by which the victim normalises.
    """

    photographs: Others
    colour: Float[Tensor, "c 1 1"]

    def to_attacks(self, batch: Batch) -> Float[Tensor, "m c h w"]:
        """Return the photographs without those of a batch and other crops of their files."""
        names = [*self.photographs.images]
        if not names:
            return batch.images.new_empty(0, *batch.images.shape[1:])
        left = set(self.photographs.without([image.sha256 for image in batch.named], batch.images))
        return self._all if len(left) == len(names) else self._all[[i for i, key in enumerate(names) if key in left]]

    @cached_property
    def _all(self) -> Float[Tensor, "m c h w"]:
        """Return all photographs as one tensor, the same for all batches: attacks cache what they compute from it."""
        return torch.stack([*self.photographs.images.values()]).to(self.colour)

    def warn_of_copies(self, batch: Batch) -> None:
        """Say how many photographs are left out because they show a private image in another file."""
        found = self.photographs.copies([image.sha256 for image in batch.named], batch.images)
        if found:
            ones = "photograph shows a private image" if len(found) == 1 else "photographs show private images"
            warn(f"{len(found)} public {ones} in another file, such as resized, mirrored or recompressed: left out.")

    def controls(
        self, batch: Batch, patch: int, draws: Sequence[Generator], *, together: bool
    ) -> dict[str, Float[Tensor, "b c h w"]]:
        """Return the negative controls of a batch by their names in `CONTROLS`: of each, one for every image.

        They are the mean of the photographs, one photograph, the private image with its patches shuffled, and one
        colour everywhere: an attack that finds nothing leaves grey, and that must not count as a leak. Where no public
        photograph is left for an image, only the last two are returned. Where gradients are released, which show
        labels, and photographs have labels, there is also the mean of the photographs of the image's class, or of all
        photographs if none has that class.

        Args:
            batch: the private images; the controls of an image are never made of the image itself, nor of other crops
                of its file.
            patch: side of a patch, in pixels.
            draws: one generator per image; it draws the order of the image's shuffled patches.
            together: whether the images are attacked as one. Then no image of the batch is used as a photograph, and
                each has its own photograph next to it, as long as there are enough.

        Warns:
            PrivlabWarning: if there are too few photographs.
        """
        count = (batch.images.shape[2] // patch) * (batch.images.shape[3] // patch)
        drawn = torch.stack([torch.randperm(count, generator=draw) for draw in draws])
        kept = (drawn == torch.arange(count)).all(1, keepdim=True)  # of few patches, an order that moves none
        order = torch.where(kept, drawn.roll(1, 1), drawn).to(batch.images.device)
        flat = self.colour.to(batch.images).clamp(0, 1).expand_as(batch.images)
        always = {CONTROLS[2]: permute(batch.images, order, patch), CONTROLS[3]: flat}
        names, photographs = [image.sha256 for image in batch.named], self.photographs.images
        if together:
            each = [self.photographs.without(names, batch.images)] * len(names)
            wanted = len(names)
        else:
            without = self.photographs.without
            each = [without([name], image[None]) for name, image in zip(names, batch.images, strict=True)]
            wanted = 1
        found = min(map(len, each))
        if found < wanted:
            problem = f"{found} public photographs are not under attack, for {wanted} images in one release"
            what = "repeat them" if found else "are not scored"
            warn(f"{problem}: the controls made of them {what}.")
        if not found:
            return always
        others = [photographs[left[i % len(left) if together else 0]] for i, left in enumerate(each)]
        made = {CONTROLS[0]: [self._mean(left) for left in each], CONTROLS[1]: others}
        if (labels := self.photographs.labels) and batch.sent is None:
            pairs = zip(batch.named, each, strict=True)
            of_class = [[key for key in left if labels.get(key, -1) == image.label] or left for image, left in pairs]
            made[CLASS_MEAN] = [self._mean(left) for left in of_class]
        return {name: torch.stack(images).to(batch.images) for name, images in made.items()} | always

    def _mean(self, left: Sequence[str]) -> Float[Tensor, "c h w"]:
        """Return the mean of these photographs; the mean of all is computed once, as they may be thousands."""
        if len(left) == len(self.photographs.images):
            return self._mean_of_all
        return torch.stack([self.photographs.images[key] for key in left]).mean(0)

    @cached_property
    def _mean_of_all(self) -> Float[Tensor, "c h w"]:
        return torch.stack([*self.photographs.images.values()]).mean(0)
