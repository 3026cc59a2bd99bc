"""How photographs are cut into jigsaws: the protocols of other papers, and one's own."""

import re
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, check_name, check_range


@dataclass(frozen=True)
class Protocol:
    """How a photograph is cut: grid × grid pieces of piece × piece pixels, gap pixels apart, around its centre.

    Raises:
        PrivlabError: if there are fewer than two pieces a side, a piece has a side below 4 pixels, or they do not fit.
    """

    name: str
    side: int
    grid: int
    piece: int
    gap: int = 0

    def __post_init__(self) -> None:
        """Check that the pieces fit into the image."""
        check_range(self.grid >= 2, f"pieces a side of {self.name}", "two or more", self.grid)
        check_range(self.gap >= 0, f"gap of {self.name}", "0 or more pixels", self.gap)
        check_range(self.piece >= 4, f"side of a piece of {self.name}", "4 pixels or more", self.piece)
        used = self.grid * self.piece + (self.grid - 1) * self.gap
        check_range(used <= self.side, f"pixels a side that {self.name} needs", f"at most {self.side}", used)

    @property
    def slots(self) -> int:
        """Return the number of slots, n."""
        return self.grid**2

    def cut(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n c p p"]:
        """Return the pieces of each image, row by row."""
        margin = (self.side - self.grid * self.piece - (self.grid - 1) * self.gap) // 2
        starts = [margin + i * (self.piece + self.gap) for i in range(self.grid)]
        return torch.stack([images[..., y : y + self.piece, x : x + self.piece] for y in starts for x in starts], 1)


PROTOCOLS: dict[str, Protocol] = {
    made.name: made
    for made in (
        Protocol("3x3", 288, 3, 96),
        Protocol("3x3-gap11", 225, 3, 64, 11),
        Protocol("3x3-gap21", 255, 3, 64, 21),
        Protocol("jpwleg-3", 398, 3, 96, 48),
        Protocol("jpwleg-5", 534, 5, 96, 12),
        Protocol("7x7", 224, 7, 32),
        Protocol("14x14", 224, 14, 16),
    )
}
"""Protocols by name: JPDVT's code without a gap, FCViT's, JPDVT's paper, the geometry of JPwLEG-3 and JPwLEG-5, and two
of a ViT of 224 pixels with patches of 32 and 16."""


def protocol(text: str) -> Protocol:
    """Return the protocol of a name, or of GRIDxGRID@SIDE or GRIDxGRID@SIDE-GAP: eroded by GAP pixels between pieces.

    Raises:
        PrivlabError: if the text is neither, or the pieces do not divide the image.
    """
    if text in PROTOCOLS:
        return PROTOCOLS[text]
    found = re.fullmatch(r"(\d+)x(\d+)@(\d+)(?:-(\d+))?", text)
    if found is None:
        check_name("protocol", text, PROTOCOLS)
    grid, other, side, gap = (int(part or 0) for part in found.groups())  # pyright: ignore[reportOptionalMemberAccess]
    if grid != other or grid == 0 or side % grid:
        raise PrivlabError(
            f"A protocol GxG@SIDE cuts a square image whose side is a multiple of the pieces a side. Found {text}."
        )
    return Protocol(text, side, grid, side // grid - gap, gap)
