"""What the clients of one batch feed and send in one setting, and what a reconstruction is compared with."""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base import PrivlabWarning, draw_for, full_precision
from privlab.evaluation.records import Record
from privlab.images import Chunk, NamedImage, Preprocessing, apart_from, common
from privlab.threat import FeatureObservation, Feed, Observation, Sent
from privlab.victims import VictimModel

__all__ = ["Batch", "Seen", "Trial", "attacked_together", "batch_key", "labelled", "taken"]

Seen = Observation | FeatureObservation


def batch_key(sha256: Iterable[str]) -> str:
    """Return a short hash of the images of a client's batch, whatever their order."""
    return hashlib.sha256("/".join(sorted(sha256)).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Batch:
    """The usable images of a chunk, on the model's device, with their labels, which `named` state too.

    `key` names all images of the chunk, unreadable ones included, since what a client draws depends on its whole batch.
    """

    named: Sequence[NamedImage]
    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, " b"]
    key: str

    @property
    def together(self) -> str:
        """Return the hashes of these images in their order, as one text."""
        return "/".join(image.sha256 for image in self.named)

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return the batch of some of the images."""
        return Batch([self.named[i] for i in rows], self.images[rows], self.labels[rows], self.key)

    def draws(self, seed: int, purpose: str, draw: int) -> list[Generator]:
        """Return a random generator for each image, seeded by SHA-256 of "seed/hash of the image/purpose/draw".

        Args:
            seed: the seed of the run.
            purpose: what is drawn, such as "defense" or "control"; different purposes have independent generators.
            draw: the number of the draw, from 0; each gives other random numbers for the same image.
        """
        return [draw_for(seed, image.sha256, purpose, draw) for image in self.named]

    def images_per_release(self, together: int | None) -> int:
        """Return how many of the images make one gradient: one, or all of them where images are released `together`.

        Warns:
            PrivlabWarning: if the batch has fewer images than `together`.
        """
        if together is None:
            return 1
        if (b := len(self.named)) < together:
            told = "fewer were left or could be used, and the fewer, the easier (`batch_images` says which)"
            warnings.warn(f"A gradient of {b} instead of {together} images: {told}.", PrivlabWarning, stacklevel=2)
        return b

    def release_draws(self, seed: int, draw: int, images_per_release: int) -> list[Generator]:
        """Return a random generator for each release, seeded by the hashes of all its images.

        Args:
            seed: the seed of the run.
            draw: the number of the draw, from 0; each gives other random numbers for the same release.
            images_per_release: B, at least 1; the first B images make the first release, the next B the second.
        """
        names, B = [image.sha256 for image in self.named], images_per_release
        return [draw_for(seed, "/".join(names[i : i + B]), "release", draw) for i in range(0, len(names), B)]

    def stated(self, together: int | None) -> Record:
        """Return what the rows state of a batch that is released as one; nothing if images are released one by one."""
        return {} if together is None else {"batch": self.key, "batch_images": len(self.named)}


def taken(seen: Observation, releases: Sequence[int]) -> Observation:
    """Return the observation of some of the releases."""
    return replace(seen, gradients={name: g[releases] for name, g in seen.gradients.items()})


def attacked_together(
    seen: Seen, batch: Batch, preprocessing: Preprocessing, *, one_key: bool = False
) -> list[tuple[list[int], Seen]]:
    """Return the groups of images that are attacked in one call: the places in the batch, and the observation, of each.

    All images form one group, unless bundled photographs are among those whose gradients are released. Image priors
    learn from these photographs, so each of them is attacked with a prior that has learned from the others. An attack
    that reads all releases under one key gets them in one call, with the photographs that are left for all of them.
    Attacks on features get their public images with the batch.

    Args:
        seen: the observation of the whole batch.
        batch: the images, to find out which are bundled photographs; attacks do not see it.
        preprocessing: that of the images; photographs are compared with them after it.
        one_key: whether the attack reads all releases under one key.
    """
    every = list(range(len(batch.named)))
    if not isinstance(seen, Observation):
        return [(every, seen)]
    B = seen.images_per_release
    left = apart_from([image.sha256 for image in batch.named], batch.images, preprocessing)
    if one_key:
        return [(every, replace(seen, photographs=common(left)))]
    groups: dict[tuple[str, ...] | None, list[int]] = {}
    for release in range(len(every) // B):
        groups.setdefault(common(left[release * B : (release + 1) * B]), []).append(release)
    if groups.keys() == {None}:
        return [(every, seen)]
    return [
        ([r * B + i for r in own for i in range(B)], replace(taken(seen, own), photographs=names))
        for names, own in groups.items()
    ]


def labelled(chunk: Chunk, model: VictimModel, *, predicted: bool) -> tuple[Batch, list[NamedImage]]:
    """Return the usable images of a chunk, on the model's device and with labels, and those that cannot be used.

    The second are the images that could not be read, and those whose label is not below the model's number of classes.
    A model without classifier reads no label: the numbers in the batch stand for none.

    Args:
        chunk: images as the victim's preprocessing gives them, and those that could not be read.
        model: the victim's model; its own prediction is the label of an image that has none.
        predicted: whether the prediction replaces every label.
    """
    classes = model.vit.num_classes
    if not classes:
        labels = torch.zeros(len(chunk.images), dtype=torch.long, device=model.mean.device)
        key = batch_key(image.sha256 for image in (*chunk.named, *chunk.failed))
        return Batch(list(chunk.named), chunk.images.to(model.mean), labels, key), list(chunk.failed)
    images, named = chunk.images.to(model.mean), list(chunk.named)
    if predicted or any(image.label is None for image in named):
        with torch.no_grad(), full_precision():
            found = model(images).argmax(1).tolist()
        named = [
            replace(image, label=label, label_origin="predicted") if predicted or image.label is None else image
            for image, label in zip(named, found, strict=True)
        ]
    about = f"is out of range: the victim has {classes} classes (0 to {classes - 1})."
    fine = [i for i, image in enumerate(named) if (image.label or 0) < classes]
    wrong = [replace(p, problem=f"Label {p.label} {about}") for p in named if (p.label or 0) >= classes]
    labels = torch.tensor([image.label for image in named], dtype=torch.long, device=images.device)
    key = batch_key(image.sha256 for image in (*chunk.named, *chunk.failed))
    return Batch(named, images, labels, key).take(fine), [*chunk.failed, *wrong]


@dataclass(frozen=True, eq=False)
class Trial:
    """One setting of one batch: what is fed and sent, and what a reconstruction is compared with.

    `known` marks the slots that the adversary knows to hold their own patch; it is None where the release does not say.
    """

    setting: str
    feed: Feed
    reference: Float[Tensor, "b c h w"]
    sent: Sent | None = None  # None: gradients are released
    known: Bool[Tensor, "b n"] | None = None

    def take(self, rows: Sequence[int]) -> "Trial":
        """Return the trial of some of the images, whose gradients are released."""
        feed = self.feed
        masked = None if feed.masked_pe is None else feed.masked_pe[rows]
        taken = replace(
            feed, images=feed.images[rows], order=feed.order[rows], moved=feed.moved[rows], masked_pe=masked
        )
        known = None if self.known is None else self.known[rows]
        return Trial(self.setting, taken, self.reference[rows], known=known)
