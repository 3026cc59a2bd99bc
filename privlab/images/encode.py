"""Images as PNG, and as HTML that holds them: for strips, pages and notebooks."""

import base64
import io
from collections.abc import Mapping
from html import escape

from jaxtyping import Float
from PIL import Image
from torch import Tensor

_SHOWN, _SIDE = 8, 112
"""How many images a notebook shows of a batch, and how many pixels wide each one is."""


def to_pil(image: Float[Tensor, "c h w"]) -> Image.Image:
    """Return an image in [0, 1] as 8-bit colours: its first three channels, or the first alone as grey."""
    levels = (image[: 3 if len(image) >= 3 else 1] * 255).round().byte()
    return Image.fromarray(levels.expand(3, -1, -1).permute(1, 2, 0).numpy())


def png_bytes(image: Image.Image) -> bytes:
    """Return an image as the bytes of a PNG; quick to write rather than small."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def to_png(image: Float[Tensor, "c h w"]) -> bytes:
    """Return an image in [0, 1] as the bytes of a PNG; quick to write rather than small."""
    return png_bytes(to_pil(image))


def data_uri(kind: str, data: bytes) -> str:
    """Return the bytes of a file as an address that holds them.

    Args:
        kind: "png" or "jpeg".
        data: the bytes.
    """
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def images_html(images: Float[Tensor, "b c h w"], what: str) -> str:
    """Return a row of the first images for a notebook; pixels outside [0, 1] are clipped, and NaN is black.

    Args:
        images: any number of them.
        what: the word for one of them, for readers who do not see it.
    """
    shown = images[:_SHOWN].detach().cpu().float().nan_to_num(0.0).clamp(0, 1)
    style = f"width:{_SIDE}px;height:auto;margin:2px;image-rendering:pixelated"
    row = "".join(
        f'<img src="{data_uri("png", to_png(image))}" alt="{escape(what)} {i}" title="{i}" style="{style}">'
        for i, image in enumerate(shown)
    )
    more = f"<p>and {len(images) - len(shown)} more</p>" if len(images) > len(shown) else ""
    return f'<div style="display:flex;flex-wrap:wrap">{row}</div>{more}'


def facts_html(heading: str, facts: Mapping[str, object]) -> str:
    """Return facts with their names as a table for a notebook.

    Args:
        heading: what the facts describe.
        facts: anything with a text, by name; None is left out.
    """
    style = 'style="text-align:left"'
    rows = "".join(
        f"<tr><th {style}>{escape(name)}</th><td {style}>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f"<table><thead><tr><th colspan=2 {style}>{escape(heading)}</th></tr></thead><tbody>{rows}</tbody></table>"
