"""What papers print of jigsaws, as `privlab study jigsaw` sets it beside its own measurements."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One figure of others, in per cent, with the setting that is known and where it was found."""

    protocol: str
    missing: int
    known: int
    method: str
    placed: float
    solved: float | None
    setting: str
    found: str


_PUZLM = "trained; the gap is not said there, so that the figure stands beside all 3 × 3 jigsaws of ImageNet"
_PUZLM_AT = "PuzLM (arXiv 2511.06315), as listed at wizwand.com/paper/6912c2f32828b7cc6937da56"
_MET = "trained on JPwLEG: paintings, engravings and artifacts of the Met Museum, resized to the square"
_DROPPOS = "ViT-B/16 trained on ImageNet; top-1 accuracy of the positions that are dropped"
_DROPPOS_AT = "DropPos (Wang et al., NeurIPS 2023), Table S3 (d)"

PUBLISHED: tuple[Published, ...] = (
    *(
        Published(cut, missing, 0, "PuzLM", placed, None, _PUZLM, _PUZLM_AT)
        for cut in ("3x3", "3x3-gap11", "3x3-gap21")
        for missing, placed in enumerate((92.2, 86.0, 73.8, 61.2))
    ),
    Published(
        "3x3-gap11",
        0,
        0,
        "FCViT",
        90.6,
        None,
        "ViT-B trained on ImageNet; 225 pixels, pieces of 75 cropped to 64 (from its code)",
        "FCViT (Kim et al. 2025), the authors' overview (github.com/HiMyNameIsDavidKim/fcvit)",
    ),
    Published(
        "3x3-gap21",
        0,
        0,
        "JPDVT",
        83.3,
        68.7,
        "trained on ImageNet; 255 pixels, pieces of 85 cropped to 64; the published code has 288, 96 and 64",
        "JPDVT (Liu et al., CVPR 2024), Table 1, as a reader's summary on GitHub gives it",
    ),
    Published("jpwleg-3", 0, 0, "JPDVT", 71.3, None, _MET, "JPDVT (Liu et al., CVPR 2024), Table 1, as above"),
    Published("jpwleg-3", 0, 0, "PuzLM", 91.9, None, _MET, _PUZLM_AT),
    Published("jpwleg-5", 0, 0, "PuzLM", 72.1, None, _MET, _PUZLM_AT),
    Published("14x14", 0, 10, "DropPos", 92.30, None, _DROPPOS, _DROPPOS_AT),
    Published("14x14", 98, 5, "DropPos", 89.12, None, _DROPPOS, _DROPPOS_AT),
)
"""Figures of others; none of them is measured here."""


def published_for(protocols: Sequence[str]) -> list[Published]:
    """Return the published figures of some protocols, in the order of the protocols."""
    return [row for name in protocols for row in PUBLISHED if row.protocol == name]
