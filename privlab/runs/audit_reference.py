"""The private image of a user who audits a release: it is preprocessed as the client did, and scored by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
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
from privlab.images import NamedImage, Others, Preprocessing, apart_from, nearest, open_images
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
    """Scores reconstructions against the private image, which the user has."""

    named: NamedImage
    image: Float[Tensor, "1 c h w"]
    public: Float[Tensor, "m c h w"]
    public_sha256: Sequence[str]
    metrics: Sequence[str]
    learned: Mapping[str, Learned]
    missing: Mapping[str, str]

    @classmethod
    def of(cls, reference: Path, spec: Case, base: Victim) -> "ReferenceScorer":
        """Return the scorer by the private image in a file.

        An image of the victim's input size is taken as it is; any other one is preprocessed as the victim's inputs are.

        Args:
            reference: the file of the private image.
            spec: names the metrics, their weights, and the public photographs of the control.
            base: the victim, with its preprocessing and device.

        Raises:
            PrivlabError: if the file is not a readable image.
        """
        data = open_images(reference, bit_depth=spec.data.bit_depth)
        named = next(iter(data))
        if data.count != 1:
            raise PrivlabError(f"'{reference}' holds several images. --reference takes one, such as '{named.name}'.")
        if named.pixels is None:
            raise PrivlabError(f"--reference must be one readable image. Found {named.name}: {named.problem}")
        device = base.model.mean.device
        learned, missing = learned_metrics(spec, device, [base])
        public = public_of(spec, base)
        own = base.preprocessing(named.pixels).to(device)
        others = torch.stack([public[key] for key in Others(public).beside(named.sha256, own)])
        metrics = [name for name in spec.metrics if name not in missing]
        fed = replace(base.preprocessing, crop_pct=1.0) if _fits(named.pixels, base) else base.preprocessing
        image = fed(named.pixels)[None].to(base.model.mean)
        return cls(named, image, others.to(base.model.mean), [*public], metrics, learned, missing)

    def __call__(self, images: Float[Tensor, "r c h w"]) -> Row:
        """Return the scores of the reconstruction that is nearest to the private image."""
        at = self.nearest(images)
        scores = score_images(images[at : at + 1], self.image, self.metrics, self.learned)
        return {name: value for name, (value,) in scores.items() if value is not None}

    def nearest(self, images: Float[Tensor, "r c h w"]) -> int:
        """Return the place of the reconstruction that is nearest to the private image."""
        return int((images - self.image).square().mean((1, 2, 3)).argmin())

    def is_exact(self, images: Float[Tensor, "r c h w"]) -> bool:
        """Return whether every grey level of the nearest reconstruction is that of the private image."""
        return bool(((images[self.nearest(images)] - self.image[0]).abs() < 0.5 / 255).all())

    def photographs(self, cut: Preprocessing) -> tuple[str, ...] | None:
        """Return the bundled photographs that image priors may learn from; None stands for all of them.

        Some are left out only if the private image is a bundled photograph.
        """
        assert self.named.pixels is not None
        return apart_from([self.named.sha256], cut(self.named.pixels)[None], cut)[0]

    def control(self) -> Row:
        """Return the row of the mean public photograph: what "nothing leaks" looks like."""
        return {"attack": CONTROLS[0], "status": "ok"} | self(self.public.mean(0, keepdim=True))


def write_scores(audit: Audit, scorer: ReferenceScorer, rows: Sequence[Row], made: Made, run: RunDirectory) -> None:
    """Write the records of the private image with its scores, and a strip of it and the reconstructions.

    Args:
        audit: the audit, whose first image is the private one.
        scorer: scores by the private image.
        rows: those of the control and of all attacks, with scores.
        made: the row of each attack, and its reconstructions; None where it failed.
        run: the run directory.
    """
    (release,) = audit.releases
    own = {attack.name: audit.records(attack, release)[0] for attack in audit.attacks}
    own[CONTROLS[0]] = audit.rows(len(release)).control(release[0], audit.spec.settings[0], CONTROLS[0])
    records: list[Record] = []
    for row in rows:
        if row["status"] == "ok":
            scores = {name: row.get(name) for name in (*scorer.metrics, "levels_wrong")}
            share = {"explained": explained_share(row["residual"])} if "residual" in row else {}
            metrics = {"metrics": " ".join(sorted(scorer.metrics))}
            records.append(own[row["attack"]] | share | scores | metrics)
    run.write_records(records)
    panels = [(f"{own[CONTROLS[0]]['cell']}-private", scorer.image[0].cpu(), "private image")]
    for row, images in made:
        if images is not None:
            cell, nearest = own[row["attack"]]["cell"], scorer.nearest(images)
            for i, image in enumerate(images.cpu()):
                panels.append((cell if i == nearest else f"{cell}-{i}", image, row["attack"]))
    strip = strip_png([panels], scorer.named.sha256)
    run.write_file(f"strips/{strip_name(0, scorer.named.name, 'audit')}", strip)


def as_fed(scorer: ReferenceScorer, audited: Audited, made: Made) -> tuple[ReferenceScorer, str | None]:
    """Return the scorer by the reference as the client preprocessed it, and a sentence on that if there is one to say.

    The scorer is returned as it is, without a sentence, where no label is known or no reconstruction gives what was
    released, where a defense changed what was fed, and where the reference gives it too and none of the usual
    preprocessings is much nearer to the reconstruction.

    Args:
        scorer: scores by the reference as the victim's preprocessing gives it.
        audited: what was released of one image, by which preprocessings are separated.
        made: the row of each attack, and its reconstruction; None where it failed. Of the rows that what was released
            proves, the one with the least residual is taken for what the client fed.
    """
    base, seen = audited.base, audited.seen
    if audited.labels is None:
        return scorer, None
    label = audited.labels[0] if audited.target is None else audited.target
    proven = [(row["residual"], row["attack"], x) for row, x in made if x is not None and row["proof"] == audited.what]
    effects, pixels = effects_of(seen.model, seen.defense), scorer.named.pixels
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
    own, left = (residual(seen, x, label) for x in (scorer.image, image))
    before, after = (float(psnr(fed, x)) for x in (scorer.image, image))
    how = "as it is" if _fits(pixels, base) else f"crop_pct {kept.crop_pct:g}, {kept.interpolation}"
    otherwise = (
        f"the client preprocessed it otherwise than {base.name} does ({how}: residual {own:.2g}, {name} at "
        f"{before:.2f} dB)"
    )
    own_explains = is_explained(own, seen.client)
    if is_explained(left, seen.client) and (not own_explains or after > before + _PSNR_MARGIN):
        return replace(scorer, image=image), (
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
