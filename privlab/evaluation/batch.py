"""The private images of one batch: their labels and random draws, and what their clients feed and send of them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base import check_range, draw_for, full_precision, warn
from privlab.images import Data, NamedImage, Preprocessing, apart_from, common, problem_of_label
from privlab.threat import FeatureObservation, Feed, Observation, Sent
from privlab.victims import VictimModel

Seen = Observation | FeatureObservation


def batch_key(sha256: Iterable[str]) -> str:
    """Return a short hash of the images of a client's batch, whatever their order."""
    return hashlib.sha256("/".join(sorted(sha256)).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Batch:
    """Private images on their way from a file to a score; an attack sees nothing of it.

    `named` are the images that can be used, with their pixels in `images`; `failed` are those that cannot. `labels` are
    empty until `labelled` fills them in, on the model's device: class indices; with multi-label targets a 1 for each
    class of an image and 0 for the others; with soft labels the share of each class.

    The other fields say what the clients do in one `setting`. `feed` is what they feed their models, None before
    `Clients.feed`; `sent` is what they send in split learning, None where gradients are released. `known` marks the
    slots that the adversary knows to hold their own patch; None where the release does not say.
    """

    named: Sequence[NamedImage]
    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, " l"] | Float[Tensor, "b y"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    failed: Sequence[NamedImage] = ()
    setting: str = "c"
    feed: Feed | None = None
    sent: Sent | None = None
    known: Bool[Tensor, "b n"] | None = None

    @property
    def fed(self) -> Feed:
        """Return what the clients feed their models, which `Clients.feed` has computed."""
        assert self.feed is not None
        return self.feed

    @property
    def reference(self) -> Float[Tensor, "b c h w"]:
        """Return what reconstructions are compared with: in setting b what was fed (MJP, section 5.4)."""
        return self.fed.images if self.setting == "b" else self.images

    @property
    def together(self) -> str:
        """Return the hashes of these images in their order, as one text."""
        return "/".join(image.sha256 for image in self.named)

    def take(self, rows: Sequence[int]) -> "Batch":
        """Return the batch of some of the images; what was sent can be taken only as a whole."""
        if len(rows) == len(self.named):
            return self
        return replace(
            self,
            named=[self.named[i] for i in rows],
            images=self.images[rows],
            labels=self.labels[rows] if len(self.labels) else self.labels,
            feed=None if self.feed is None else self.feed.take(rows),
            known=None if self.known is None else self.known[rows],
        )

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
            reason = "fewer were left or could be used, and the fewer, the easier (`batch_images` says which)"
            warn(f"A gradient of {b} instead of {together} images: {reason}.")
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

    def stated(self, together: int | None) -> dict[str, Any]:
        """Return what the rows state of a batch that is released as one; nothing if images are released one by one.

        Its key names all images, those that failed included, since what a client draws depends on its whole batch.
        """
        if together is None:
            return {}
        key = batch_key(image.sha256 for image in (*self.named, *self.failed))
        return {"batch": key, "batch_images": len(self.named)}


def batches(data: Data, preprocessing: Preprocessing, size: int) -> Iterator[Batch]:
    """Yield the images of data in batches of `size` readable ones, preprocessed and without labels.

    The last batch may have fewer images, or unreadable ones only.

    Args:
        data: the images, read one at a time as the batches are asked for.
        preprocessing: makes the pixels of each image, c × h × w in [0, 1].
        size: the number of readable images in a batch, at least 1.

    Raises:
        PrivlabError: if `size` is not a positive integer.
    """
    check_range(type(size) is int and size >= 1, "size", "a positive integer", size)
    left = iter(data)
    found = iter(lambda: batch_of(left, preprocessing, size), None)
    return takewhile(lambda batch: batch.named or batch.failed, found)


def batch_of(found: Iterable[NamedImage], preprocessing: Preprocessing, size: int | None = None) -> Batch:
    """Return images as one batch without labels.

    Args:
        found: the images.
        preprocessing: as `batches` takes it.
        size: the number of readable images after which no more are taken; None for all.
    """
    fine: list[NamedImage] = []
    images: list[Tensor] = []
    failed: list[NamedImage] = []
    for image in found:
        if image.pixels is None:
            failed.append(image)
        else:
            images.append(preprocessing(image.pixels))
            fine.append(replace(image, pixels=None))
        if len(fine) == size:
            break
    empty = torch.empty(0, len(preprocessing.mean), *preprocessing.size)
    return Batch(fine, torch.stack(images) if images else empty, failed=failed)


def labelled(batch: Batch, model: VictimModel, *, predicted: bool, multi_label: bool = False) -> Batch:
    """Return the batch on the model's device and with labels.

    Images fail too whose label is not below the model's number of classes, and those with multi-label targets where the
    loss does not take these. A model without classifier reads no label: the numbers in the batch stand for none.

    Args:
        batch: images as the victim's preprocessing gives them, and those that could not be read.
        model: the victim's model; its own prediction is the label of an image that has none.
        predicted: whether the prediction replaces every label.
        multi_label: whether the client's loss takes any number of classes for an image.
    """
    classes, images, named = model.vit.num_classes, batch.images.to(model.mean), list(batch.named)
    if not classes:
        return replace(batch, images=images, labels=torch.zeros(len(images), dtype=torch.long, device=images.device))
    lacking = [i for i, p in enumerate(named) if predicted or p.target is None]
    if lacking:
        with torch.no_grad(), full_precision():
            found = model(images).argmax(1).tolist()
        for i in lacking:
            named[i] = replace(named[i], label=found[i], targets=None, label_origin="predicted")
    if not multi_label:  # a list of one class is that class
        named = [
            replace(image, label=image.targets[0], targets=None)
            if image.targets and len(image.targets) == 1 and not image.is_soft
            else image
            for image in named
        ]
    named = [replace(image, problem=_problem_of_label(image, classes, multi_label=multi_label)) for image in named]
    fine = [i for i, image in enumerate(named) if image.problem is None]
    usable, wrong = [named[i] for i in fine], [image for image in named if image.problem is not None]
    labels = _labels_of(usable, classes).to(images.device)
    labels = labels.to(images.dtype) if labels.is_floating_point() else labels
    return replace(batch, named=usable, images=images[fine], labels=labels, failed=[*batch.failed, *wrong])


def each_release(rows: list[int], seen: Seen) -> list[tuple[list[int], Seen]]:
    """Return a group of `attacked_together` as groups of one release each."""
    releases = seen.each()
    B = len(rows) // len(releases)
    return [(rows[i * B : (i + 1) * B], release) for i, release in enumerate(releases)]


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
        ([r * B + i for r in own for i in range(B)], replace(seen.take(own), photographs=names))
        for names, own in groups.items()
    ]


def _problem_of_label(image: NamedImage, classes: int, *, multi_label: bool) -> str | None:
    if image.targets is not None and not image.is_soft and not multi_label:
        return (
            f"Its label is a list of classes, {list(image.targets)}, which needs a loss for each class: give a client "
            "with client.loss=binary, or --labels predicted."
        )
    return problem_of_label(image.target, classes)


def _labels_of(named: Sequence[NamedImage], classes: int) -> Int[Tensor, " b"] | Float[Tensor, "b y"]:
    if all(image.targets is None for image in named):
        return torch.tensor([image.label for image in named], dtype=torch.long)
    labels = torch.zeros(len(named), classes)
    for row, image in zip(labels, named, strict=True):
        if image.is_soft:
            row[:] = torch.tensor(image.targets)
        else:
            indices = (image.label or 0,) if image.targets is None else image.targets
            row[[int(index) for index in indices]] = 1
    return labels
