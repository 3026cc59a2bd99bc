"""Strips: private image | what the client fed | each reconstruction, with the scores written underneath.

The PNG of a strip says in its text which panel lies where, so that a page can cut the images out again. So do contact
sheets, which show reconstructions of several images.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.transforms.functional import to_tensor
from torchvision.utils import make_grid

from privlab.evaluation import Panel, Strip
from privlab.images import png_bytes, to_pil

_SIDE, _GAP, _LINE, _FONT = 224, 8, 18, 14
_ROW, _BORDER = 8, 4
"""Of a contact sheet: the images in a row, and the pixels between them."""
_TEXT = "privlab strip"  # the keyword of a strip's text

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""


@dataclass(frozen=True)
class Place:
    """Where an image lies: in a PNG of its own, or in a `box` of a strip, which shows it `scale` times as large."""

    file: Path
    box: Box | None = None
    scale: int = 1


def strip_name(index: int, strip: Strip) -> str:
    """Return the file name of the strip of the image with number `index`."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(strip.image).with_suffix("").as_posix()).strip("-")
    victim = re.sub(r"[^A-Za-z0-9_.-]+", "-", strip.victim)
    return f"{victim}-{index:05d}-{stem[-60:]}.png"


def strip_png(strip: Strip) -> bytes:
    """Return a strip on white as the bytes of a PNG, with a text from which `places_of` reads where its panels lie.

    Small images are enlarged by whole pixels, so that nothing is smoothed away.
    """
    height, width = strip.rows[0][0].image.shape[1:]
    scale = max(1, _SIDE // max(height, width))
    cell = (max(width * scale, _SIDE) + _GAP, height * scale + _GAP + _LINE * _lines(strip.rows))
    columns = max(len(row) for row in strip.rows)
    canvas = Image.new("RGB", (_GAP + columns * cell[0], _GAP + len(strip.rows) * cell[1]), "white")
    boxes = {
        panel.name: _draw(canvas, panel, (_GAP + c * cell[0], _GAP + r * cell[1]), scale)
        for r, row in enumerate(strip.rows)
        for c, panel in enumerate(row)
    }
    return _told(canvas, {"image": strip.image_sha256, "scale": scale, "panels": boxes})


def sheet_png(images: Float[Tensor, "b c h w"], sha256: Sequence[str], panel: str) -> bytes:
    """Return images as the bytes of a PNG, eight in a row on white, with a text that `places_of` reads.

    Args:
        images: at least one, in [0, 1]; one alone has no border.
        sha256: the hash of the private image that each belongs to.
        panel: the name of every panel, the key of the attack's cell.
    """
    grid = make_grid(images.cpu(), nrow=_ROW, padding=_BORDER, pad_value=1.0)
    levels = grid.mul(255).add(0.5).clamp(0, 255).byte().permute(1, 2, 0).numpy()
    height, width = images.shape[2:]
    border = _BORDER if len(images) > 1 else 0
    boxes: dict[str, dict[str, Box]] = {}
    for i, image in enumerate(sha256):
        x, y = border + i % _ROW * (width + border), border + i // _ROW * (height + border)
        boxes[image] = {panel: (x, y, x + width, y + height)}
    return _told(Image.fromarray(levels), {"scale": 1, "images": boxes})


def _told(canvas: Image.Image, what: Mapping[str, object]) -> bytes:
    """Return the bytes of a PNG whose text says what lies where."""
    text = PngInfo()
    text.add_text(_TEXT, json.dumps(what))
    png = io.BytesIO()
    canvas.save(png, "PNG", pnginfo=text)
    return png.getvalue()


def places_of(path: Path) -> dict[tuple[str, str], Place]:
    """Return where the panels of a strip or a contact sheet lie, by their name and the hash of the image.

    A strip of an earlier version has none, nor has a file that is damaged, foreign or contradicts itself.
    """
    try:
        with Image.open(path, formats=["PNG"]) as png:  # pixels are not read yet
            told, (width, height) = json.loads(png.info[_TEXT]), png.size
        of, scale = told.get("images") or {told["image"]: told["panels"]}, int(told["scale"])
        boxes = {
            (str(name), str(image)): (int(x0), int(y0), int(x1), int(y1))
            for image, panels in of.items()
            for name, (x0, y0, x1, y1) in panels.items()
        }
    except Exception:  # a foreign file may say anything
        return {}
    inside = all(0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height for x0, y0, x1, y1 in boxes.values())
    whole = scale > 0 and all((x1 - x0) % scale == (y1 - y0) % scale == 0 for x0, y0, x1, y1 in boxes.values())
    return {panel: Place(path, box, scale) for panel, box in boxes.items()} if inside and whole else {}


def pngs(places: Sequence[Place]) -> list[bytes]:
    """Return images of one file, each as the bytes of a PNG in its own size; a strip is decoded once.

    Raises:
        OSError, SyntaxError or ValueError: by Pillow, if a strip is damaged.
    """
    file = places[0].file
    if places[0].box is None:
        return [file.read_bytes()]
    with Image.open(file, formats=["PNG"]) as strip:
        return [png_bytes(_cut(strip, place)) for place in places]


def pixels_of(place: Place) -> Float[Tensor, "c h w"]:
    """Return an image that a run kept, in [0, 1]."""
    return to_tensor(Image.open(io.BytesIO(pngs([place])[0])))


def _cut(strip: Image.Image, place: Place) -> Image.Image:
    found = strip.crop(place.box)
    return found.resize((found.width // place.scale, found.height // place.scale), Image.Resampling.NEAREST)


def _lines(rows: Sequence[Sequence[Panel]]) -> int:
    return max(len(panel.caption) for row in rows for panel in row)


def _draw(canvas: Image.Image, panel: Panel, corner: tuple[int, int], scale: int) -> Box:
    """Draw a panel with its lines, and return where its image lies."""
    image = to_pil(panel.image)
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    canvas.paste(image, corner)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(_FONT)
    for i, line in enumerate(panel.caption):
        draw.text((corner[0], corner[1] + image.height + 2 + i * _LINE), line, "black", font)
    return (*corner, corner[0] + image.width, corner[1] + image.height)
