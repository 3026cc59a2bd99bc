"""The private images of a user who audits a release: they are preprocessed as the client did, and scored by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from privlab.base import PrivlabError
from privlab.evaluation import (
    CONTROLS,
    Case,
    Record,
    learned_metrics,
    score_images,
)
from privlab.evaluation.setup import public_of
from privlab.images import NamedImage, Preprocessing, apart_from, common, nearest, open_images
from privlab.metrics import Learned, psnr
from privlab.release import effects_of, is_explained, slots_without_gradient
from privlab.release.explained import explained_share, residual
from privlab.runs.audited import Audited
from privlab.runs.audits import Audit, Row
from privlab.stores import RunDirectory, strip_name, strip_png
from privlab.victims import Victim

Made = Sequence[tuple[Row, Tensor | None]]
"""The row of each attack, and its reconstructions; None where it failed."""

_PSNR_MARGIN = 10.0
"""In dB: by how much the PSNR of one preprocessing must exceed that of another that explains the gradient as well."""


@dataclass(frozen=True, eq=False)
class ReferenceScorer:
    """Scores reconstructions against the private image, or the slices of a private volume, which the user has."""

    named: tuple[NamedImage, ...]
    images: Float[Tensor, "s c h w"]
    public: Float[Tensor, "m c h w"]
    public_sha256: Sequence[str]
    metrics: Sequence[str]
    learned: Mapping[str, Learned]
    missing: Mapping[str, str]

    @classmethod
    def of(cls, reference: Path, spec: Case, base: Victim, count: int) -> "ReferenceScorer":
        """Return the scorer by the private image in a file, or by the slices of a volume.

        An image of the victim's input size is taken as it is; any other one is preprocessed as the victim's inputs are.

        Args:
            reference: the file of the private image; or a volume or a folder, of at most `count` images.
            spec: names the metrics, their weights, and the public photographs of the control.
            base: the victim, with its preprocessing and device.
            count: the number of images behind the release.

        Raises:
            PrivlabError: if the file is not a readable image, or holds more images than the release.
        """
        data = open_images(reference, bit_depth=spec.data.bit_depth)
        first = next(iter(data))
        if data.count is None or data.count > count:
            raise PrivlabError(
                f"'{reference}' holds {data.count or 'several'} images, and the release is of {count}: --reference "
                f"takes as many at most. Take one, such as '{first.name}', or state client.images."
            )
        named = tuple(data)
        device, own = base.model.mean.device, list[Tensor]()
        for image in named:
            if image.pixels is None:
                raise PrivlabError(f"--reference must be a readable image. Found {image.name}: {image.problem}")
            own.append(base.preprocessing(image.pixels).to(device))
        learned, missing = learned_metrics(spec, device, [base])
        public = public_of(spec, base)
        beside = [set(public.beside(image.sha256, x)) for image, x in zip(named, own, strict=True)]
        others = torch.stack([public.images[key] for key in public.images if all(key in keys for keys in beside)])
        metrics = [name for name in spec.metrics if name not in missing]
        whole = replace(base.preprocessing, crop_pct=1.0)
        for i, image in enumerate(named):
            if image.pixels is not None and _fits(image.pixels, base):
                own[i] = whole(image.pixels)
        images = torch.stack([x.to(base.model.mean) for x in own])
        return cls(named, images, others.to(base.model.mean), [*public.images], metrics, learned, missing)

    def __call__(self, images: Float[Tensor, "r c h w"]) -> Row:
        """Return the scores of the reconstruction that is nearest to the private image.

        Of a volume they are the means over its slices, and `slices` has the scores of each.
        """
        places = self.places(images)
        scores = score_images(images[places], self.images[: len(places)], self.metrics, self.learned)
        known = {name: [x for x in values if x is not None] for name, values in scores.items() if values[0] is not None}
        means: Row = {name: sum(values) / len(places) for name, values in known.items()}
        if len(self.named) > 1:
            means["slices"] = [{name: values[i] for name, values in known.items()} for i in range(len(places))]
        return means

    def places(self, images: Float[Tensor, "r c h w"]) -> list[int]:
        """Return the place of the reconstruction of each private image: those whose squared errors have the least sum.

        No reconstruction has two private images. If there are fewer of them than slices, the first slices are scored.
        """
        slices = self.images[: len(images)]
        errors = torch.stack([(images - x).square().mean((1, 2, 3)) for x in slices])
        return [int(place) for place in linear_sum_assignment(errors.cpu().numpy())[1]]

    def is_exact(self, images: Float[Tensor, "r c h w"]) -> bool:
        """Return whether every grey level of a reconstruction is that of its private image."""
        places = self.places(images)
        levels = (images[places] - self.images[: len(places)]).abs() < 0.5 / 255
        return bool(levels.flatten(1).all(1).any())

    def photographs(self, cut: Preprocessing) -> tuple[str, ...] | None:
        """Return the bundled photographs that image priors may learn from; None stands for all of them.

        Some are left out only if the private image is a bundled photograph.
        """
        own = torch.stack([cut(image.pixels) for image in self.named if image.pixels is not None])
        return common(apart_from([image.sha256 for image in self.named], own, cut))

    def control(self) -> Row:
        """Return the row of the mean public photograph: what "nothing leaks" looks like."""
        mean = self.public.mean(0, keepdim=True).expand_as(self.images)
        return {"attack": CONTROLS[0], "status": "ok"} | self(mean)


def write_scores(audit: Audit, scorer: ReferenceScorer, rows: Sequence[Row], made: Made, run: RunDirectory) -> None:
    """Write the records of the private images with their scores, and a strip of each and its reconstructions.

    Args:
        audit: the audit, whose first images are the private ones.
        scorer: scores by the private image.
        rows: those of the control and of all attacks, with scores.
        made: the row of each attack, and its reconstructions; None where it failed.
        run: the run directory.
    """
    (release,) = audit.releases
    own = {attack.name: audit.records(attack, release) for attack in audit.attacks}
    of_control = audit.rows(len(release))
    known, several = release[: len(scorer.named)], len(scorer.named) > 1
    own[CONTROLS[0]] = [of_control.control(image, audit.spec.settings[0], CONTROLS[0]) for image in known]
    records: list[Record] = []
    for row in rows:
        if row["status"] == "ok":
            share = {"explained": explained_share(row["residual"])} if "residual" in row else {}
            metrics = {"metrics": " ".join(sorted(scorer.metrics))}
            for record, scored in zip(own[row["attack"]], row.get("slices", [row]), strict=False):
                scores = {name: scored.get(name) for name in (*scorer.metrics, "levels_wrong")}
                records.append(record | share | scores | metrics)
    run.write_records(records)
    for number, named in enumerate(scorer.named):
        panels = [(f"{own[CONTROLS[0]][number]['cell']}-private", scorer.images[number].cpu(), "private image")]
        for row, images in made:
            if images is None or number >= len(images):
                continue
            cell, nearest = own[row["attack"]][0]["cell"], scorer.places(images)[number]
            for i, image in enumerate(images.cpu()):
                if i == nearest or not several:  # of a volume, each slice has its own strip
                    panels.append((cell if i == nearest else f"{cell}-{i}", image, row["attack"]))
        strip = strip_png([panels], named.sha256)
        run.write_file(f"strips/{strip_name(number, named.name, 'audit')}", strip)


def as_fed(scorer: ReferenceScorer, audited: Audited, made: Made) -> tuple[ReferenceScorer, str | None]:
    """Return the scorer by the reference as the client preprocessed it, and a sentence on that if there is one to say.

    The scorer is returned as it is, without a sentence, for a volume, where no label is known or no reconstruction
    gives what was released, where a defense changed what was fed, and where the reference gives it too and none of the
    usual preprocessings is much nearer to the reconstruction.

    Args:
        scorer: scores by the reference as the victim's preprocessing gives it.
        audited: what was released of one image, by which preprocessings are separated.
        made: the row of each attack, and its reconstruction; None where it failed. Of the rows that what was released
            proves, the one with the least residual is taken for what the client fed.
    """
    base, seen = audited.base, audited.seen
    if audited.labels is None or len(scorer.named) > 1:
        return scorer, None
    label = audited.labels[0] if audited.target is None else audited.target
    proven = [(row["residual"], row["attack"], x) for row, x in made if x is not None and row["proof"] == audited.what]
    effects, pixels = effects_of(seen.model, seen.defense), next(iter(scorer.named)).pixels
    if (
        not proven
        or len(proven[0][2]) > 1
        or not isinstance(pixels, Image.Image)
        or len(base.preprocessing.mean) > 4
        or effects.patches != "kept"
        or effects.other
        or slots_without_gradient(seen).any()
    ):
        return scorer, None
    proof, name, fed = min(proven, key=lambda each: each[0])
    way, image, tried = nearest(pixels, base.preprocessing, fed)
    image, kept = image.to(fed), base.preprocessing
    own, left = (residual(seen, x, label) for x in (scorer.images, image))
    before, after = (float(psnr(fed, x)) for x in (scorer.images, image))
    how = "as it is" if _fits(pixels, base) else f"crop_pct {kept.crop_pct:g}, {kept.interpolation}"
    otherwise = (
        f"the client preprocessed it otherwise than {base.name} does ({how}: residual {own:.2g}, {name} at "
        f"{before:.2f} dB)"
    )
    own_explains = is_explained(own, seen.client)
    if is_explained(left, seen.client) and (not own_explains or after > before + _PSNR_MARGIN):
        return replace(scorer, images=image), (
            f"{otherwise}. It gives the released {audited.what} {way} (residual {left:.2g}, {name} at {after:.2f} "
            "dB): scores are by that."
        )
    if own_explains:
        return scorer, None
    return scorer, (
        f"{otherwise} and in none of {tried} usual ways (the nearest, {way}: residual {left:.2g}, {name} at "
        f"{after:.2f} dB), or it is another image. {name} gives the released {audited.what} (residual {proof:.2g}), "
        "the reference does not: low scores say nothing here."
    )


def _fits(pixels: Image.Image | Tensor, base: Victim) -> bool:
    """Return whether an image has the size of a victim's input: then it is what was fed, and nothing is cut off."""
    size = (pixels.height, pixels.width) if isinstance(pixels, Image.Image) else tuple(pixels.shape[1:])
    return size == base.preprocessing.size
