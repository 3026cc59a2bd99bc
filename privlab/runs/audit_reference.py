"""The private image that a user has beside a released gradient: it is preprocessed as the client did, and scored by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from privlab.base import PrivlabError, full_precision
from privlab.evaluation import CONTROLS, Panel, Specification, Strip, learned_metrics, public_images
from privlab.images import NamedImage, Others, Preprocessing, apart_from, nearest, open_images
from privlab.metrics import Learned, psnr, score
from privlab.release import EXPLAINED_RESIDUAL, effects_of, slots_without_gradient
from privlab.release.residual import explained_share, residual
from privlab.runs.audit_case import AuditCase
from privlab.stores import RunDirectory, strip_name, strip_png
from privlab.threat import Observation
from privlab.victims import Victim

__all__ = ["ReferenceScorer", "Row", "as_fed", "write_scores"]

Row = dict[str, Any]

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
    def of(cls, reference: Path, spec: Specification, base: Victim) -> "ReferenceScorer":
        """Return the scorer by the private image in a file.

        An image of the victim's input size is taken as it is; any other one is preprocessed as the victim's inputs are.

        Args:
            reference: the file of the private image.
            spec: names the metrics, their weights, and the public photographs of the control.
            base: the victim, with its preprocessing and device.

        Raises:
            PrivlabError: if the file is no readable image.
        """
        named = next(iter(open_images(reference)))
        if named.pixels is None:
            raise PrivlabError(f"--reference must be one readable image. Found {named.name}: {named.problem}")
        device = base.model.mean.device
        learned, missing = learned_metrics(spec, device, [base])
        public = public_images(spec.public, spec.public_limit, base.preprocessing, device)
        own = base.preprocessing(named.pixels).to(device)
        others = torch.stack([public[key] for key in Others(public).beside(named.sha256, own)])
        metrics = [name for name in spec.metrics if name not in missing]
        fed = replace(base.preprocessing, crop_pct=1.0) if _fits(named.pixels, base) else base.preprocessing
        image = fed(named.pixels)[None].to(base.model.mean)
        return cls(named, image, others.to(base.model.mean), [*public], metrics, learned, missing)

    def __call__(self, images: Float[Tensor, "r c h w"]) -> Row:
        """Return the scores of the reconstruction that is nearest to the private image."""
        at = self.nearest(images)
        with full_precision():
            scores = score(images[at : at + 1], self.image, self.metrics, self.learned)
        return {name: float(value) for name, value in scores.items()}

    def nearest(self, images: Float[Tensor, "r c h w"]) -> int:
        """Return the place of the reconstruction that is nearest to the private image."""
        return int((images - self.image).square().mean((1, 2, 3)).argmin())

    def photographs(self, cut: Preprocessing) -> tuple[str, ...] | None:
        """Return the bundled photographs that image priors may learn from; None stands for all of them.

        Some are left out only if the private image is a bundled photograph.
        """
        assert self.named.pixels is not None
        return apart_from([self.named.sha256], cut(self.named.pixels)[None], cut)[0]

    def control(self) -> Row:
        """Return the row of the mean public photograph: what "nothing leaks" looks like."""
        return {"attack": CONTROLS[0], "status": "ok"} | self(self.public.mean(0, keepdim=True))

    def strip(self, name: str, panels: Sequence[Panel]) -> Strip:
        """Return a strip of the private image, whose panel has this name, and the reconstructions."""
        private = Panel(name, self.image[0].cpu(), ("private image",))
        return Strip(self.named.name, self.named.sha256, "audit", ((private, *panels),))


def write_scores(
    case: AuditCase,
    scorer: ReferenceScorer,
    rows: Sequence[Row],
    made: Sequence[tuple[Row, Tensor | None]],
    run: RunDirectory,
) -> None:
    """Write the records of the private image with its scores, and a strip of it and the reconstructions.

    Args:
        case: the case, whose first image is the private one.
        scorer: scores by the private image.
        rows: those of the control and of all attacks, with scores.
        made: the row of each attack, and its reconstructions; None where it failed.
        run: the run directory.
    """
    (release,) = case.releases
    metrics = {"metrics": " ".join(sorted(scorer.metrics))}
    own = {attack.name: case.rows(attack, release)[0] for attack in case.group.attacks}
    own[CONTROLS[0]] = case.control(CONTROLS[0], release)
    scored = ((own[row["attack"]] | _share(row), row) for row in rows if row["status"] == "ok")
    run.write_records([record | {name: row[name] for name in scorer.metrics} | metrics for record, row in scored])
    panels: list[Panel] = []
    for row, images in made:
        cell, nearest = own[row["attack"]]["cell"], None if images is None else scorer.nearest(images)
        for i, image in enumerate(() if images is None else images.cpu()):
            panels.append(Panel(cell if i == nearest else f"{cell}-{i}", image, (row["attack"],)))
    strip = scorer.strip(f"{own[CONTROLS[0]]['cell']}-private", panels)
    run.write_file(f"strips/{strip_name(0, strip)}", strip_png(strip))


def _share(row: Row) -> Row:
    """Return what the record of a checked reconstruction states: the share of the release that it explains."""
    return {"explained": explained_share(row["residual"])} if "residual" in row else {}


def as_fed(
    scorer: ReferenceScorer, base: Victim, seen: Observation, label: int, made: Sequence[tuple[Row, Tensor | None]]
) -> tuple[ReferenceScorer, str | None]:
    """Return the scorer by the reference as the client preprocessed it, and a sentence on that if there is one to say.

    The scorer is returned as it is, without a sentence, where no reconstruction gives the released gradient, where a
    defense changed what was fed, and where the reference gives that gradient too and none of the usual preprocessings
    is much nearer to the reconstruction.

    Args:
        scorer: scores by the reference as the victim's preprocessing gives it.
        base: the victim.
        seen: the released gradient of one image, by which preprocessings are told apart.
        label: the class index of the image.
        made: the row of each attack, and its reconstruction; None where it failed. Of the rows that are "explained",
            the one with the least residual is taken for what the client fed.
    """
    proven = [(row["residual"], row["attack"], x) for row, x in made if x is not None and row.get("explained")]
    effects, pixels = effects_of(seen.model, seen.defense), scorer.named.pixels
    if not proven or pixels is None or effects.patches != "kept" or effects.other or slots_without_gradient(seen).any():
        return scorer, None
    proof, name, fed = min(proven, key=lambda each: each[0])
    found, tried = nearest(pixels, base.preprocessing, fed)
    image, kept = found.image.to(fed), base.preprocessing
    (own, left), (before, after) = (
        [residual(seen, x, label) for x in (scorer.image, image)],
        [float(psnr(fed, x)) for x in (scorer.image, image)],
    )
    what = "gradient" if seen.client is None else "update"
    how = "as it is" if _fits(pixels, base) else f"crop_pct {kept.crop_pct:g}, {kept.interpolation}"
    otherwise = (
        f"the client preprocessed it otherwise than {base.name} does ({how}: residual {own:.2g}, {name} at "
        f"{before:.2f} dB)"
    )
    if left < EXPLAINED_RESIDUAL and (own >= EXPLAINED_RESIDUAL or after > before + _PSNR_MARGIN):
        return replace(scorer, image=image), (
            f"{otherwise}. It gives the released {what} {found.how} (residual {left:.2g}, {name} at {after:.2f} dB): "
            "scores are by that."
        )
    if own < EXPLAINED_RESIDUAL:
        return scorer, None
    return scorer, (
        f"{otherwise} and in none of {tried} usual ways (the nearest, {found.how}: residual {left:.2g}, {name} at "
        f"{after:.2f} dB), or it is another image. {name} gives the released {what} (residual {proof:.2g}), the "
        "reference does not: low scores say nothing here."
    )


def _fits(pixels: Image.Image, base: Victim) -> bool:
    """Return whether an image has the size of a victim's input: then it is what was fed, and nothing is cut off."""
    return (pixels.height, pixels.width) == base.preprocessing.size
