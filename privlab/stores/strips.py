"""Strips: private image | what the client fed | each reconstruction, with the scores written underneath.

The PNG of a strip says in its text which panel lies where, so that a page can cut the images out again. So do contact
sheets, which show reconstructions of several images.
"""

import io
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from privlab.base import PrivlabError, open_file, parse_json, read_bytes
from privlab.evaluation import Strip
from privlab.images import png_bytes, to_pil

_SIDE, _GAP, _LINE, _FONT = 224, 8, 18, 14
_LETTERS = 31  # the most of a line, which is then no wider than its image
_ROW, _BORDER = 8, 4
"""Of a contact sheet: the images in a row, and the pixels between them."""
_TEXT = "privlab strip"  # the keyword of a strip's text
_MOST_BYTES = 2**29
"""The most bytes of a PNG that is read."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""


@dataclass(frozen=True)
class Place:
    """Where an image lies: in a separate PNG, or in a `box` of a strip, which shows it `scale` times as large."""

    file: Path
    box: Box | None = None
    scale: int = 1

    def open(self) -> Image.Image:
        """Return the image in its own size.

        Raises:
            PrivlabError: if the file cannot be read as an image.
        """
        try:
            with open_file(self.file, "image", _MOST_BYTES) as file, Image.open(file, formats=["PNG"]) as png:
                return self.cut(png)
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow says that a file is torn
            reason = getattr(error, "strerror", None) or error
            raise PrivlabError(f"'{self.file}' cannot be read as an image: {reason}.") from None

    def cut(self, png: Image.Image) -> Image.Image:
        """Return the image out of the opened file."""
        image = png.crop(self.box)
        return image.resize((image.width // self.scale, image.height // self.scale), Image.Resampling.NEAREST)


def strip_name(index: int, image: str, victim: str, case: int = 0) -> str:
    """Return the file name of a strip.

    Args:
        index: the number of the image.
        image: the name of the image.
        victim: the name of the victim.
        case: the number of the case among those on this victim; each has its own strips.
    """
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(image).with_suffix("").as_posix()).strip("-")
    victim = re.sub(r"[^A-Za-z0-9_.-]+", "-", victim)
    return f"{victim}-{index:05d}-{stem[-60:]}" + (f"-case{case}" if case else "") + ".png"


def strip_png(strip: Strip, sha256: str) -> bytes:
    """Return a strip on white as the bytes of a PNG, with a text from which `places_of` reads where its panels are.

    Small images are enlarged by whole pixels, so that nothing is smoothed away.

    Args:
        strip: a row of panels for each setting.
        sha256: the hash of the private image.
    """
    height, width = strip[0][0][1].shape[1:]
    scale = max(1, _SIDE // max(height, width))
    lines = max(len(_lines(caption)) for row in strip for _, _, caption in row)
    cell = (max(width * scale, _SIDE) + _GAP, height * scale + _GAP + _LINE * lines)
    canvas, boxes = _draw(strip, cell, _GAP, scale)
    return _with_text(canvas, {"image": sha256, "scale": scale, "panels": boxes})


def sheet_png(images: Float[Tensor, "b c h w"], sha256: Sequence[str], panel: str) -> bytes:
    """Return images as the bytes of a PNG, eight in a row on white, with a text that `places_of` reads.

    Args:
        images: at least one, in [0, 1]; one alone has no border.
        sha256: the hash of the private image that each belongs to.
        panel: the name of every panel, the key of the attack's cell.
    """
    panels = [(sha, image.cpu(), "") for sha, image in zip(sha256, images, strict=True)]
    rows = [panels[start : start + _ROW] for start in range(0, len(panels), _ROW)]
    border = _BORDER if len(images) > 1 else 0
    height, width = images.shape[2:]
    canvas, boxes = _draw(rows, (width + border, height + border), border, scale=1)
    return _with_text(canvas, {"scale": 1, "images": {sha: {panel: box} for sha, box in boxes.items()}})


def _draw(strip: Strip, cell: tuple[int, int], gap: int, scale: int) -> tuple[Image.Image, dict[str, Box]]:
    """Draw panels with the lines under them, and return the canvas and where the image of each panel lies."""
    columns = max(len(row) for row in strip)
    canvas = Image.new("RGB", (gap + columns * cell[0], gap + len(strip) * cell[1]), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(_FONT)
    boxes: dict[str, Box] = {}
    for r, row in enumerate(strip):
        for c, (name, pixels, caption) in enumerate(row):
            image = to_pil(pixels)
            image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
            x, y = gap + c * cell[0], gap + r * cell[1]
            canvas.paste(image, (x, y))
            for i, line in enumerate(_lines(caption)):
                draw.text((x, y + image.height + 2 + i * _LINE), line, "black", font)
            boxes[name] = (x, y, x + image.width, y + image.height)
    return canvas, boxes


def _lines(caption: str) -> list[str]:
    return [part for line in caption.split("\n") for part in textwrap.wrap(line, _LETTERS)]


def _with_text(canvas: Image.Image, content: Mapping[str, object]) -> bytes:
    """Return the bytes of a PNG whose text says what lies where."""
    text = PngInfo()
    text.add_text(_TEXT, json.dumps(content))
    png = io.BytesIO()
    canvas.save(png, "PNG", pnginfo=text)
    return png.getvalue()


def places_of(path: Path) -> dict[tuple[str, str], Place]:
    """Return where the panels of a strip or a contact sheet lie, by their name and the hash of the image.

    A strip of an earlier version has none, nor has a file that is damaged, foreign or contradicts itself.
    """
    try:
        with open_file(path, "strip", _MOST_BYTES) as file, Image.open(file, formats=["PNG"]) as png:
            content, (width, height) = parse_json(png.info[_TEXT], "what it shows"), png.size  # no pixels are read yet
        of, scale = content.get("images") or {content["image"]: content["panels"]}, int(content["scale"])
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
        return [read_bytes(file, "image", _MOST_BYTES)]
    with open_file(file, "strip", _MOST_BYTES) as opened, Image.open(opened, formats=["PNG"]) as strip:
        return [png_bytes(place.cut(strip)) for place in places]
