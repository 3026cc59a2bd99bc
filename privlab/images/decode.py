"""One image: the bytes of a file become RGB pixels with 8 bits, or a `problem` that says why not.

A file that cannot be used does not end the run: the report says what was skipped, and why.
"""

import hashlib
import io
import stat
import threading
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from privlab.base import PrivlabError

__all__ = ["LabelOrigin", "NamedImage", "as_text", "damage_of", "one_line"]
__all__ += ["image_from_bytes", "image_from_pil", "read_image"]

LabelOrigin = Literal["folder", "file", "dataset", "predicted", "released", "none"]
"""Where a label comes from; "predicted" is by the victim, "released" is given away by the gradient that is audited."""

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM", "JPEG2000")  # not EPS: it would run Ghostscript
MAX_BYTES = 512 * 2**20
MAX_PIXELS = 100_000_000
PIXEL_LIMIT = f"at most {MAX_PIXELS // 10**6} million pixels are decoded."
MAX_ASPECT = 100  # the shorter side is resized to the model's input, so a long strip would fill the memory
MIN_SIDE = 8


@dataclass(frozen=True, eq=False)
class NamedImage:
    """One image, or the reason why there is none.

    `sha256` is that of the file's bytes; for images that come from no file, of the size and the RGB pixels;
    empty where nothing could be read. `pixels` has mode RGB with 8 bits; it is None where there is a
    `problem` and in the images of a `Chunk`. `member` says whether the victim saw it in training, "seen" or
    "not seen"; None where that is not known.
    """

    name: str
    sha256: str
    pixels: Image.Image | None
    label: int | None = None
    label_origin: LabelOrigin = "none"
    problem: str | None = None
    member: str | None = None


def read_image(
    path: str | Path, *, name: str | None = None, label: int | None = None, label_origin: LabelOrigin = "none"
) -> NamedImage:
    """Read one file; `problem` says what keeps it from being an image, and nothing is raised.

    Grey, palette, CMYK and 1-bit images become RGB, transparency becomes white, 16-bit grey is divided by 257, and the
    EXIF orientation is applied. Colour profiles are not.

    Args:
        path: path of the file; its size is limited by `MAX_BYTES`, that of its image by `MIN_SIDE`, `MAX_PIXELS` and
            `MAX_ASPECT`.
        name: name of the image in records; None for the path with slashes.
        label: its class index; None where it has no label.
        label_origin: where the label comes from; "none" where there is no label.
    """
    path = Path(path)
    name = path.as_posix() if name is None else name
    try:
        data = _file_bytes(path)
    except PrivlabError as error:
        return NamedImage(name, "", None, label, label_origin, str(error))
    return image_from_bytes(data, name, label, label_origin)


def image_from_bytes(data: bytes, name: str, label: int | None, origin: LabelOrigin) -> NamedImage:
    """Decode the bytes of a file, as `read_image` does.

    Args:
        data: the whole file, whose SHA-256 is that of the image.
        name: name of the image in records.
        label: its class index; None where it has no label.
        origin: where the label comes from; "none" where there is no label.
    """
    digest = hashlib.sha256(data).hexdigest()
    try:
        return NamedImage(name, digest, _decode(data), label, origin)
    except PrivlabError as error:
        return NamedImage(name, digest, None, label, origin, str(error))


def image_from_pil(image: Image.Image, name: str, label: int | None = None, origin: LabelOrigin = "none") -> NamedImage:
    """Check an image that another library opened, and convert it to RGB; its hash is over its size and RGB pixels.

    Args:
        image: the opened image; its EXIF orientation is not applied.
        name: name of the image in records.
        label: its class index; None where it has no label.
        origin: where the label comes from; "none" where there is no label.
    """
    try:
        _check_size(image)
        pixels = _rgb(image)
    except PrivlabError as error:
        return NamedImage(name, "", None, label, origin, str(error))
    except Exception as error:  # Pillow reads the pixels when they are first used
        return NamedImage(name, "", None, label, origin, damage_of(error))
    header = f"{pixels.width}x{pixels.height}:".encode()
    return NamedImage(name, hashlib.sha256(header + pixels.tobytes()).hexdigest(), pixels, label, origin)


def damage_of(error: Exception) -> str:
    """Return the problem of an image whose decoding raised `error`."""
    return f"Truncated or damaged: {one_line(error)}."


def one_line(error: BaseException) -> str:
    """Return the error's message without line breaks and without the full stop, or its type where it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def as_text(name: str) -> str:
    """Return an image's name as text that can be written; what is no text in a file's name is escaped."""
    return name.encode(errors="backslashreplace").decode()


def _file_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
            raise PrivlabError("Not a regular file.")
        if status.st_size > MAX_BYTES:
            raise PrivlabError(f"{status.st_size / 2**20:.0f} MiB; at most {MAX_BYTES // 2**20} MiB are read.")
        return path.read_bytes()
    except OSError as error:
        raise PrivlabError(f"Cannot be opened: {error.strerror or one_line(error)}.") from None


class _Quiet:
    """Warnings are ignored while any thread is inside.

    `warnings.catch_warnings` saves and restores the state of the whole process. If two threads were inside it, the one
    that leaves last would restore what the other had set.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.close()


_QUIET = _Quiet()


def _decode(data: bytes) -> Image.Image:
    if not data:
        raise PrivlabError("Empty file: 0 bytes.")
    try:
        # The header's size is checked below, and a corrupt EXIF block is no reason to lose the pixels.
        with _QUIET, Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image)
            _check_frames(image)
            image.load()
            if image.format == "PNG":
                _check_end(data)
            _turn_upright(image)
            return _rgb(image)
    except PrivlabError:
        raise
    except UnidentifiedImageError:  # Pillow's message holds an address, which differs in every run
        raise PrivlabError(f"Not an image in one of the formats {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError as error:  # Pillow's own limit is higher than ours
        found = one_line(error).split(" exceeds")[0]
        raise PrivlabError(f"{found} by its header; {PIXEL_LIMIT}") from None
    except Exception as error:  # on a damaged file, Pillow raises nearly anything
        raise PrivlabError(damage_of(error)) from None


def _check_end(data: bytes) -> None:
    # Pillow decodes a PNG that lacks its last bytes without a word.
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        image.verify()


def _check_size(image: Image.Image) -> None:
    short, long = sorted(image.size)
    size = f"{image.width}×{image.height} pixels"
    if short < MIN_SIDE:
        raise PrivlabError(f"{size}; each side must have at least {MIN_SIDE}.")
    if short * long > MAX_PIXELS:
        raise PrivlabError(f"{size} by its header; {PIXEL_LIMIT}")
    if long > MAX_ASPECT * short:
        raise PrivlabError(f"{size}; the longer side must be at most {MAX_ASPECT} times the shorter.")


def _check_frames(image: Image.Image) -> None:
    frames = getattr(image, "n_frames", 1)
    # In the MPO files of phones, the further frames are a preview or a brightness map of the first.
    if frames > 1 and image.format != "MPO":
        raise PrivlabError(f"{frames} frames; only still images are read.")


def _turn_upright(image: Image.Image) -> None:
    with suppress(Exception):  # a corrupt EXIF block: no orientation that could be applied
        ImageOps.exif_transpose(image, in_place=True)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise PrivlabError("Floating-point pixels (mode F), whose range is unknown; 8 or 16 bits are read.")
    if image.mode.startswith("I"):
        return _from_integers(image).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _from_integers(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips at 255.
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise PrivlabError(f"Integer pixels from {low} to {high}; 8 or 16 bits without sign are read.")
    if image.mode != "I" or image.format in ("PNG", "PPM") or high > 255:
        values = (values + 128) // 257
    return Image.fromarray(values.astype(np.uint8))
