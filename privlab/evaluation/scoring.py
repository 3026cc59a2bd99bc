"""The scores of a reconstruction in every geometry, that is, every layout of its patches, and what it explains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.gradients.patch_gradient_adaptive import PatchGradientAdaptive
from privlab.attacks.solvers import NoisyGradients, shares_mask
from privlab.base import full_precision, warn
from privlab.evaluation.batch import Batch, Seen
from privlab.evaluation.records import GEOMETRIES
from privlab.metrics import (
    MIRRORED,
    Learned,
    adjacent_share,
    crosses,
    displaced_slots,
    in_best_order,
    key_recovered,
    levels_wrong,
    neighbour_accuracy,
    placed_share,
    placement_accuracy,
    psnr_region,
    score,
)
from privlab.patches import permute, slots_to_pixels
from privlab.reassembly import Borders, Reassembly, rearrange
from privlab.release import effects_of, labels_that_rise, undecayed
from privlab.release.explained import (
    explained_share,
    is_explained,
    residual,
    residual_of_clients,
    residual_of_head,
    soft_targets,
    tells_images,
)
from privlab.release.labels import label_of_update
from privlab.threat import Observation, Reconstruction, Sent, Stack
from privlab.victims import VictimModel

Scores = dict[str, list[float | None]]
"""The values of each metric, one for each image; None where it was not measured."""


UNDEFINED = {"fft2d_mjp": "undefined where a reconstruction or its image is black"}
"""The reason why a metric may have no value for an image although it can be computed here."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores images at the resolution of a victim, by the metrics that can be computed here.

    `several` says that reconstructions have been put in the order of the images that they are nearest to.
    """

    model: VictimModel
    metrics: Sequence[str]
    learned: Mapping[str, Learned]
    reassembly: Reassembly = field(default_factory=Borders)
    several: bool = False

    def laid(
        self,
        reconstruction: Reconstruction,
        batch: Batch,
        names: Sequence[str] = GEOMETRIES[:2],
        *,
        placed: bool = False,
    ) -> tuple[list[Scores], Float[Tensor, "b c h w"] | None]:
        """Return the scores in place, under the oracle, and reassembled if asked for, in this order, and these images.

        The reassembled images are None where they are those in place.

        Args:
            reconstruction: what the attack returned: b images, and what it says of the places of patches or rows.
            batch: the references, and which patches the defense moved.
            names: the geometries; only whether "reassembled" is among them is read, as the other two are always scored.
            placed: whether the attack has already put its loose patches in order; "reassembled" is then the same as in
                place.
        """
        images, moved = reconstruction.images, batch.fed.moved
        places: Scores = {}
        if batch.sent is not None:
            places = self._places(batch.sent, reconstruction)
        elif reconstruction.loose is not None:
            places["tokens_found"] = _numbers(reconstruction.tokens, len(moved))
            places["tokens_sure"] = _numbers(reconstruction.tokens_sure, len(moved))
        in_place = self.score(images, batch.reference, moved) | self._mirrored(images, batch) | places
        under_oracle = in_place
        if (home := self.oracle(images, batch)) is not None:
            under_oracle = self.score(home, batch.reference, moved) | self._mirrored(images, batch, True) | places
        scores = [in_place, under_oracle]
        if "reassembled" not in names:
            return scores, None
        if placed and reconstruction.loose is not None:
            return [*scores, in_place], None
        own, ordered = self._reassembled(reconstruction, batch, in_place)
        return [*scores, own], ordered

    def oracle(
        self, images: Float[Tensor, "b c h w"], batch: Batch, reference: Float[Tensor, "b c h w"] | None = None
    ) -> Float[Tensor, "b c h w"] | None:
        """Return images with each `moved` patch put where it fits the reference best; None if no patch was moved.

        The same rule holds for controls and for all attacks, whatever they say of places.

        Args:
            images: reconstructions or controls.
            batch: the private images, and which patches the defense moved.
            reference: what patches have to fit; None for the reference of the batch.
        """
        moved = self.moved(batch)
        if not moved.any():
            return None
        across = batch.sent is not None and crosses(batch.sent)
        reference = batch.reference if reference is None else reference
        return in_best_order(images, reference, moved, self.model.patch, across=across)

    def moved(self, batch: Batch) -> Bool[Tensor, "b n"]:
        """Mark the slots whose patches the oracle puts in order.

        They are the slots that a defense shuffled (in setting b the reference is shuffled too, by a mere draw), and all
        slots of images whose rows were sent in another order. Where gradients of a model without position embeddings
        are released, they are all slots: such gradients are the same for any order of the patches.
        """
        if batch.sent is not None:
            return batch.fed.moved | displaced_slots(batch.sent)
        hears = self.model.vit.pos_embed is not None
        return batch.fed.moved if hears else torch.ones_like(batch.fed.moved)

    def _reassembled(
        self, reconstruction: Reconstruction, batch: Batch, in_place: Scores
    ) -> tuple[Scores, Float[Tensor, "b c h w"]]:
        """Score reconstructions with the patches in the adversary's order, and that order; return these images too.

        The order is scored only where the attack keeps the order of what was fed: only then is it certain which patch a
        slot holds.
        """
        feed, patch, loose = batch.fed, self.model.patch, reconstruction.loose
        order = rearrange(reconstruction, batch.known, self.reassembly, self.model.grid, patch)
        images = permute(reconstruction.images, order, patch)
        scores = in_place | self.score(images, batch.reference, feed.moved) | self._mirrored(images, batch)
        if loose is None:
            held = feed.order.gather(1, order)
            scores["placement_accuracy"] = _nullable(placed_share(held, feed.moved))
            scores["neighbour_accuracy"] = _nullable(adjacent_share(held, feed.moved, self.model.grid))
        return scores, images

    def score(
        self,
        images: Float[Tensor, "b c h w"],
        reference: Float[Tensor, "b c h w"],
        moved: Bool[Tensor, "b n"] | None = None,
    ) -> Scores:
        """Return the scores of `score_images`, and the PSNR within the slots that a defense `moved` and the others.

        Args:
            images: b reconstructions or controls in [0, 1].
            reference: the b images that they are compared with, in the same order.
            moved: marks the slots whose patches a defense moved. The PSNR by region has no value for an image without
                one.
        """
        scores = score_images(images, reference, self.metrics, self.learned)
        if moved is not None and "psnr" in self.metrics:
            scores["psnr_masked"] = scores["psnr_unmasked"] = [None] * len(images)
            if (masked := moved.any(1)).any():  # without a mask there is only one region
                region = slots_to_pixels(moved, self.model.grid, self.model.patch)
                unmasked = psnr_region(images, reference, ~region).where(masked, torch.nan)
                scores["psnr_masked"] = _nullable(psnr_region(images, reference, region))
                scores["psnr_unmasked"] = _nullable(unmasked)
        return scores

    def _mirrored(self, images: Float[Tensor, "b c h w"], batch: Batch, oracle: bool = False) -> Scores:
        """Score images against mirrored references; with `oracle`, patches are first put in order by these references.

        Reconstructions that were assigned to images by the references themselves have no such score.
        """
        if self.several or (batch.sent is not None and crosses(batch.sent)):
            return {}
        names = [name for name in MIRRORED if name in self.metrics]
        away = batch.reference.flip(-1)
        home = self.oracle(images, batch, away) if oracle else None
        scores = score(images if home is None else home, away, names)
        return {MIRRORED[name]: _nullable(values) for name, values in scores.items()}

    def _places(self, sent: Sent, reconstruction: Reconstruction) -> Scores:
        """Score what the adversary says of the places of rows and columns."""
        b, key = len(sent.source), key_recovered(sent, reconstruction)
        placed = placement_accuracy(sent, reconstruction)
        neighbours = neighbour_accuracy(sent, reconstruction, self.model.grid)
        return {
            "placement_accuracy": [None] * b if placed is None else list(placed.tolist()),
            "neighbour_accuracy": [None] * b if neighbours is None else list(neighbours.tolist()),
            "key_recovered": [key] * b,
        }


def score_images(
    images: Float[Tensor, "b c h w"],
    reference: Float[Tensor, "b c h w"],
    metrics: Sequence[str],
    learned: Mapping[str, Learned],
) -> Scores:
    """Return the scores of images as they are, and the number of their grey levels that are wrong.

    Args:
        images: b reconstructions or controls in [0, 1].
        reference: the b images that they are compared with, in the same order.
        metrics: the names of the scores.
        learned: the metrics with trained weights among them, by name.

    Warns:
        PrivlabWarning: where a metric of `UNDEFINED` has no value for an image.
    """
    with full_precision():
        scores = score(images, reference, metrics, learned)
    scores["levels_wrong"] = levels_wrong(images, reference)
    for name in UNDEFINED.keys() & scores.keys():
        if scores[name].isnan().any():
            warn(f"{name} is n/a for some images: {UNDEFINED[name]}.")
    return {name: _nullable(values) for name, values in scores.items()}


def known_slots(seen: Observation) -> Bool[Tensor, "b n"] | None:
    """Return which slots an adversary knows to hold their own patch; None where the release does not say.

    MJP replaces the position embeddings of the slots that it shuffles, so these embeddings get no gradient (MJP, Eq.
    4). That shows in the gradient of one image, and in that of several images with a common mask (`per` batch). It does
    not show under the jigsaw alone, nor where images have different masks, over which their gradient sums.
    """
    read = set(PatchGradientAdaptive.parameters) <= seen.gradients.keys()
    hidden = effects_of(seen.model, seen.defense).patches == "masked"
    if not hidden or not read or not shares_mask(seen):
        return None
    return (~NoisyGradients.of(seen).silent_slots).repeat_interleave(seen.images_per_release, 0)


def explained_by(seen: Seen, images: Float[Tensor, "k c h w"], i: int) -> float | None:
    """Return the share of a release that reconstructions explain, of clients with one image or volume; None for others.

    None too where the attacks read the head alone, which many images explain, where a defense of images made draws that
    nobody can repeat, and where filters leave no entry exact.

    The adversary can compute it: it takes public settings, and the label that the update shows. Of a mean of several
    clients, and where the head's bias is not released, the classes are tried whose logits of an image rise most
    (`labels_that_rise`), of a mean of K also the K whose biases moved most as those of labels. The largest share
    counts.

    Args:
        seen: the observation of several releases.
        images: the reconstructions of one release, those of all its clients.
        i: the number of the release.
    """
    if not isinstance(seen, Observation) or seen.client is None:
        return None
    if seen.client.images > 1 and not (seen.client.fuses and seen.client.clients == 1):
        return None
    if not tells_images(seen) or Stack(tuple(seen.defense)).changes_images:
        return None
    own, client = seen.take([i]), seen.client
    if not client.has_labels or client.fuses:
        of_head = residual_of_head(own, images) if len(images) == 1 or client.fuses else None
        return None if of_head is None else explained_share(of_head)
    label = label_of_update(own) if len(images) == 1 else None
    update = {name: u[0] for name, u in own.gradients.items()}
    rising = (labels_that_rise(seen.model, update, x[None]) for x in images)
    labels = [[label]] if label is not None else list(rising)
    if len(images) > 1:
        if "head.bias" in update:  # of a mean of K it falls at their labels, and rises nearly everywhere else
            bias = undecayed(seen.model, {"head.bias": update["head.bias"]}, seen.client)["head.bias"]
            fall = bias.argsort()[: len(images)].tolist()
            labels = [list(dict.fromkeys([*rise, *fall])) for rise in labels]
        return explained_share(residual_of_clients(own, images, labels))
    targets: list[int | Tensor] = [*labels[0]]
    if client.is_for_each_class and (several := soft_targets(own, images)) is not None:
        targets.append(several)  # an image may have any number of classes
    left = min(residual(own, images, each) for each in targets)
    if not is_explained(left, client) and (of_head := residual_of_head(own, images)) is not None:
        left = of_head if is_explained(of_head, client) else left  # of a soft label, or a weighted one
    return explained_share(left)


def _numbers(counts: Tensor | None, b: int) -> list[float | None]:
    return [None] * b if counts is None else [float(value) for value in counts.tolist()]


def _nullable(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
