"""Strips: private image | what the client fed | each reconstruction, with the scores written underneath."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from privlab.evaluate import Panel, Strip

__all__ = ["draw_strip", "strip_name", "to_png"]

_SIDE, _GAP, _LINE, _FONT = 224, 8, 18, 14


def strip_name(index: int, strip: Strip) -> str:
    """Return the file name of the strip of the image with number `index`."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(strip.image).with_suffix("").as_posix()).strip("-")
    victim = re.sub(r"[^A-Za-z0-9_.-]+", "-", strip.victim)
    return f"{victim}-{index:05d}-{stem[-60:]}.png"


def draw_strip(strip: Strip) -> Image.Image:
    """Draw a strip on white; small images are enlarged by whole pixels, so that nothing is smoothed away."""
    height, width = strip.rows[0][0].image.shape[1:]
    scale = max(1, _SIDE // max(height, width))
    cell = (max(width * scale, _SIDE) + _GAP, height * scale + _GAP + _LINE * _lines(strip.rows))
    columns = max(len(row) for row in strip.rows)
    canvas = Image.new("RGB", (_GAP + columns * cell[0], _GAP + len(strip.rows) * cell[1]), "white")
    for r, row in enumerate(strip.rows):
        for c, panel in enumerate(row):
            _draw(canvas, panel, (_GAP + c * cell[0], _GAP + r * cell[1]), scale)
    return canvas


def _lines(rows: Sequence[Sequence[Panel]]) -> int:
    return max(len(panel.caption) for row in rows for panel in row)


def _draw(canvas: Image.Image, panel: Panel, corner: tuple[int, int], scale: int) -> None:
    picture = _picture(panel.image)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    canvas.paste(picture, corner)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(_FONT)
    for i, line in enumerate(panel.caption):
        draw.text((corner[0], corner[1] + picture.height + 2 + i * _LINE), line, "black", font)


def to_png(image: Float[Tensor, "c h w"]) -> bytes:
    """Return an image in [0, 1] as the bytes of a PNG; quick to write rather than small."""
    file = io.BytesIO()
    _picture(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _picture(image: Float[Tensor, "c h w"]) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
