"""One image: the bytes of a file become RGB pixels with 8 bits, or a `problem` that says why not.

A file that cannot be used does not end the run: the report says what was skipped, and why.
"""

import hashlib
import io
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from privlab.base import PrivlabError, PrivlabWarning, Unreadable, one_line, open_file, read_bytes, warn

if TYPE_CHECKING:
    from torch import Tensor
else:  # torch is slow to import, and files need none
    Tensor = object

LabelOrigin = Literal["folder", "file", "dataset", "predicted", "released", "none"]
"""Where a label comes from; "predicted" is by the victim, "released" is revealed by the gradient that is audited."""
Target: TypeAlias = int | tuple[int, ...] | tuple[float, ...] | None
"""A class index, the classes of an image that may have several, or a share for each class; None for no label."""

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM", "JPEG2000")  # not EPS: it would run Ghostscript
MAX_BYTES = 512 * 2**20
MAX_PIXELS = 100_000_000
PIXEL_LIMIT = f"at most {MAX_PIXELS // 10**6} million pixels are decoded."
MAX_ASPECT = 100  # the shorter side is resized to the model's input, so a long strip would fill the memory
MIN_SIDE = 8
MAX_CHANNELS = 8
"""An axis of an array with at most so many entries is one of channels."""
_DARK = 2**14
"""An image of 16 bits whose levels are all below this is taken for one of fewer bits, and there is a warning."""
_BITS_PER_SAMPLE = 258
"""The number of TIFF's tag for the bits of a level."""
_STRIPS, _TILES = 273, 324
"""The numbers of TIFF's tags for the places of strips and tiles."""
_MOST_PAGES = 2**14
"""The most pages of a TIFF."""
_MOST_SCANS = 100
"""The most scans of a JPEG of `MAX_PIXELS`; smaller ones may have more."""


@dataclass(frozen=True)
class NamedImage:
    """One image, or the reason why there is none.

    `sha256` is that of the file's bytes; for images that come from no file, of the size and the RGB pixels; empty where
    nothing could be read. `pixels` has mode RGB with 8 bits, or it is c × h × w in [0, 1] where values were given in
    Python; it is None where there is a `problem`, and where they were not read or are kept elsewhere. `targets` are the
    classes of an image that may have several, or none, such as (0, 3), or the shares of a soft label, such as
    (0.25, 0.75); its `label` is then None. `member` says whether the victim saw it in training, "seen" or "not seen";
    None where that is not known. `levels` is the range of the levels of a file with more than 8 bits; None for other
    files. `place` is the image's position in its data.
    """

    name: str
    sha256: str
    pixels: Image.Image | Tensor | None = field(compare=False)
    label: int | None = None
    label_origin: LabelOrigin = "none"
    problem: str | None = None
    member: str | None = None
    levels: tuple[int, int] | None = None
    targets: tuple[int, ...] | tuple[float, ...] | None = None
    place: int = 0

    @property
    def key(self) -> str:
        """Return the hash of the image, or its name where it could not be read."""
        return self.sha256 or self.name

    @property
    def target(self) -> Target:
        """Return the label of any kind."""
        return self.label if self.targets is None else self.targets

    def labelled(self, target: Target, origin: LabelOrigin) -> "NamedImage":
        """Return the image with this label, or without one."""
        label, targets = (None, target) if isinstance(target, tuple) else (target, None)
        return replace(self, label=label, targets=targets, label_origin="none" if target is None else origin)

    @property
    def is_soft(self) -> bool:
        """Return whether the image has a soft label: a share for each class."""
        return any(isinstance(share, float) for share in self.targets or ())


@dataclass(frozen=True)
class Slice:
    """One of the images of a file that holds several: a page, a frame, a slice of a volume."""

    path: Path
    index: int


def read_image(source: Any, *, name: str | None = None, bit_depth: int | None = None) -> NamedImage:  # noqa: ANN401
    """Read one image; `problem` says what keeps it from being one, and nothing is raised.

    Grey, palette, CMYK and 1-bit images become RGB, transparency becomes white, levels of 16 bits are divided by 257,
    and the EXIF orientation of a file is applied. Colour profiles are not.

    Args:
        source: path of a file, or its bytes, which `MAX_BYTES`, `MIN_SIDE`, `MAX_PIXELS` and `MAX_ASPECT` limit; a
            `Slice` of a file; one of Pillow's images; c × h × w values in [0, 1] or bytes; an image that was read; None
            or an error for no image.
        name: name of the image in records; None for the path with slashes.
        bit_depth: number of bits, 1 to 16, that the levels of a file of 16 bits use, such as 12 for most medical
            images: the level 2^bit_depth − 1 is white. None for all 16. Files of 8 bits are read as they are.

    Raises:
        PrivlabError: if `bit_depth` is out of range.
    """
    check_bit_depth(bit_depth)
    if isinstance(source, NamedImage):
        return source
    name = Path(source).as_posix() if name is None else name
    digest, levels = "", None
    try:
        if isinstance(source, str | Path):
            source = file_bytes(Path(source))
        if isinstance(source, bytes):
            digest = hashlib.sha256(source).hexdigest()
            pixels, levels = _decode(source, bit_depth)
        elif isinstance(source, Slice) and _is_tiff(source.path):
            pixels, levels = _decode(file_bytes(source.path), bit_depth, source.index)
            digest = _pixel_hash(pixels)
        elif isinstance(source, Slice):
            from privlab.images.medical import slice_of

            with _QUIET:
                found = slice_of(source.path, source.index)
            return read_image(found, name=name, bit_depth=bit_depth)
        elif isinstance(source, Image.Image):
            check_size(source.size)
            pixels, levels = _rgb(source, bit_depth)
            digest = _pixel_hash(pixels)
        elif hasattr(source, "dtype") and hasattr(source, "ndim"):
            from privlab.images.given import values_of  # this imports torch, which files do not need

            pixels, digest = values_of(source)
        elif isinstance(source, Exception):
            raise source
        else:
            problem = "No image in this row." if source is None else f"Not an image but a {type(source).__name__}."
            raise PrivlabError(problem)
    except PrivlabError as error:
        return NamedImage(name, digest, None, problem=str(error))
    except Exception as error:  # on a damaged file, Pillow raises nearly anything, also when pixels are first used
        return NamedImage(name, digest, None, problem=f"Truncated or damaged: {one_line(error)}.")
    return NamedImage(name, digest, pixels, levels=levels)


def count_slices(path: Path) -> int | None:
    """Return how many images a file holds; None for a file that is one image, or that cannot be read.

    Raises:
        Exception: if a volume is damaged.
    """
    if not path.is_file():
        return None
    if not _is_tiff(path):
        from privlab.images import medical

        with _QUIET:
            return medical.count_slices(path)
    with suppress(Exception), _QUIET, open_file(path, "image", MAX_BYTES) as file:
        frames = _count_frames(Image.open(file, formats=("TIFF",)))
        return frames if frames > 1 else None
    return None


def _is_tiff(path: Path) -> bool:
    return path.suffix.lower() in (".tif", ".tiff")


def _pixel_hash(pixels: Any) -> str:  # noqa: ANN401
    return hashlib.sha256(f"{pixels.width}x{pixels.height}:".encode() + pixels.tobytes()).hexdigest()


def check_bit_depth(bit_depth: int | None) -> None:
    """Check the number of bits that levels use.

    Raises:
        PrivlabError: if it is not an integer in 1 … 16.
    """
    if bit_depth is not None and (type(bit_depth) is not int or not 1 <= bit_depth <= 16):
        raise PrivlabError(f"bit_depth must be an integer from 1 to 16, as 12 for 12-bit levels. Found {bit_depth!r}.")


def warn_if_dark(bit_depth: int | None) -> Callable[[NamedImage], NamedImage]:
    """Return a function that returns each image as it is, and warns of the first one whose levels look misread.

    Its levels of 16 bits do not reach a quarter of their range, as those of fewer bits do that were not scaled. There
    is not a warning where `bit_depth` states the levels.
    """
    seen: list[str] = []

    def check(image: NamedImage) -> NamedImage:
        high = 0 if image.levels is None or image.pixels is None else image.levels[1]
        if bit_depth is None and 0 < high < _DARK and not seen:
            seen.append(image.name)
            low = (image.levels or (0, 0))[0]
            bits = max(8, high.bit_length() + high.bit_length() % 2)
            warn(
                f"'{as_text(image.name)}' has levels from {low} to {high} in 16 bits (0 to 65535), and is read as "
                f"nearly black. If these are levels of {bits} bits, give --bit-depth {bits} (bit_depth={bits} in "
                "Python); if it is that dark, --bit-depth 16. Other images of this source may be affected too.",
            )
        return image

    return check


def as_text(name: str) -> str:
    """Return an image's name as text that can be written; what is not text in a file's name is escaped."""
    return name.encode(errors="backslashreplace").decode()


def file_hash(path: Path) -> str:
    """Return the hash that an image has that is read from this file; "" if the file cannot be read."""
    with suppress(PrivlabError):
        return hashlib.sha256(file_bytes(path)).hexdigest()
    return ""


def file_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file of at most `MAX_BYTES`.

    Raises:
        PrivlabError: if it is none, or cannot be opened.
    """
    try:
        return read_bytes(path, "image", MAX_BYTES)
    except Unreadable as error:  # what is said of images names them already
        raise PrivlabError(f"Cannot be read: {error.reason}.") from None


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
                warnings.simplefilter("default", PrivlabWarning)  # those of other threads
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.close()


_QUIET = _Quiet()


def _decode(
    data: bytes, bit_depth: int | None, page: int | None = None
) -> tuple[Image.Image | Tensor, tuple[int, int] | None]:
    """Return the RGB pixels with 8 bits, or an array's values, and the range of the levels if these have more bits.

    Args:
        data: the bytes of a file.
        bit_depth: as `read_image` takes it.
        page: the page of a TIFF; None for a file of one image.
    """
    if not data:
        raise PrivlabError("Empty file: 0 bytes.")
    from privlab.images import medical

    with _QUIET:
        found = medical.whole_image(data)
    if isinstance(found, Image.Image):
        return _rgb(found, bit_depth)
    if found is not None:
        from privlab.images.given import values_of

        return values_of(found)[0], None
    try:
        # The header's size is checked below, and a corrupt EXIF block is no reason to lose the pixels.
        with _QUIET, Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.seek(page or 0)
            check_size(image.size)
            if page is None:
                _check_frames(image)
            _check_scans(image, data)
            mode = _raw_mode(image)
            image.load()
            if image.format == "PNG":  # Pillow decodes one that lacks its last bytes without a word
                with Image.open(io.BytesIO(data), formats=("PNG",)) as again:
                    again.verify()
            levels = None
            if ";16" in mode and image.mode in ("RGB", "RGBA"):
                image, levels = _from_colours(image, data, mode, bit_depth, page or 0)
            with suppress(Exception):  # a corrupt EXIF block: no orientation that could be applied
                ImageOps.exif_transpose(image, in_place=True)
            if mode == "I;12":  # a TIFF that states its depth
                return _rgb(image, 12)[0], None
            pixels, of_grey = _rgb(image, bit_depth)
            return pixels, levels or of_grey
    except UnidentifiedImageError:  # Pillow's message holds an address, which differs in every run
        raise PrivlabError(f"Not an image in one of the formats {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError as error:  # Pillow's own limit is higher than ours
        found = one_line(error).split(" exceeds")[0]
        raise PrivlabError(f"{found} by its header; {PIXEL_LIMIT}") from None


def check_size(sides: tuple[int, int]) -> None:
    """Check the width and height of an image against `MIN_SIDE`, `MAX_PIXELS` and `MAX_ASPECT`.

    Raises:
        PrivlabError: if they are outside.
    """
    short, long = sorted(sides)
    size = f"{sides[0]}×{sides[1]} pixels"
    if short < MIN_SIDE:
        raise PrivlabError(f"{size}; each side must have at least {MIN_SIDE}.")
    if short * long > MAX_PIXELS:
        raise PrivlabError(f"{size} by its header; {PIXEL_LIMIT}")
    if long > MAX_ASPECT * short:
        raise PrivlabError(f"{size}; the longer side must be at most {MAX_ASPECT} times the shorter.")


def _check_frames(image: Image.Image) -> None:
    frames = _count_frames(image)
    # In the MPO files of phones, the further frames are a preview or a brightness map of the first.
    if frames > 1 and image.format != "MPO":
        raise PrivlabError(f"{frames} frames; only still images are read.")


def _count_frames(image: Image.Image) -> int:
    """Return the number of frames; Pillow goes from one page of a TIFF to the next."""
    if image.format == "TIFF":
        pages: Any = image  # Pillow has no public way to count them up to a limit
        with suppress(EOFError):
            for page in range(1, _MOST_PAGES + 1):
                pages._seek(page)
            raise PrivlabError(f"More than {_MOST_PAGES} pages; files of fewer are read.")
        image.seek(0)
    return getattr(image, "n_frames", 1)


def _check_scans(image: Image.Image, data: bytes) -> None:
    """Check how often the pixels are gone through: each scan of a progressive JPEG may do so, and takes 100 bytes."""
    scans = data.count(b"\xff\xda") if image.format in ("JPEG", "MPO", "TIFF") else 0
    tags = getattr(image, "tag_v2", {})
    parts = max(np.size(tags.get(name, 0)) for name in (_STRIPS, _TILES))  # of a TIFF, each of which has its scans
    if scans * image.width * image.height > _MOST_SCANS * MAX_PIXELS * parts:
        raise PrivlabError(f"{scans} scans of {image.width}×{image.height} pixels, which take too long to decode.")


def _raw_mode(image: ImageFile) -> str:
    """Return how Pillow unpacks the pixels of a file that it opened and did not load, as "RGB;16B"; "" if unknown."""
    if not image.tile:
        return ""
    given = image.tile[0].args
    mode = str(given[0] if isinstance(given, tuple) and given else given)
    bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (8,))
    if image.mode not in ("L", "P", "1") and "16" not in mode and bits[0] == 16:  # Pillow takes each byte for a pixel
        raise PrivlabError("16-bit colours in separate planes are not read. Save them interleaved, or with 8 bits.")
    return mode


def _from_colours(
    image: Image.Image, data: bytes, mode: str, bit_depth: int | None, page: int
) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image of 16-bit colours with the stated depth, and the range of its levels.

    Pillow keeps the upper byte of each level. The lower bytes are those that it reads in the other byte order; they
    matter only where a depth is stated, or the upper bytes are nearly black.
    """
    upper = np.asarray(image)[..., :3]
    about = 256 * int(upper.min()), 256 * int(upper.max()) + 255
    if bit_depth in (None, 16) and about[1] >= _DARK:
        return image, about
    kind, _, order = mode.partition(";16")
    native = "L" if sys.byteorder == "little" else "B"
    other = {"L": "B", "B": "L"}[native if order == "N" else order]
    with Image.open(io.BytesIO(data), formats=FORMATS) as again:
        again.seek(page)
        swapped = f"{kind};16{other}"
        again.tile = [
            tile._replace(args=(swapped, *tile.args[1:]) if isinstance(tile.args, tuple) else swapped)
            for tile in again.tile
        ]
        try:
            lower = np.asarray(again)[..., :3]
        except ValueError:  # Pillow knows one byte order of grey with transparency
            if bit_depth in (None, 16):
                return image, about
            raise PrivlabError("16-bit grey with transparency: --bit-depth needs it without transparency.") from None
    values = upper.astype(np.uint16) << 8 | lower
    levels = int(values.min()), int(values.max())
    if bit_depth is not None:
        scaled = Image.fromarray(_scaled(values, bit_depth))
        if image.mode == "RGBA":
            scaled.putalpha(image.getchannel("A"))
        image.paste(scaled)  # into the opened image, which knows its orientation
    return image, levels


def _rgb(image: Image.Image, bit_depth: int | None) -> tuple[Image.Image, tuple[int, int] | None]:
    """Return the RGB pixels with 8 bits, and the range of the levels of 16-bit grey."""
    if image.mode == "F":
        raise PrivlabError("Floating-point pixels (mode F), whose range is unknown; 8 or 16 bits are read.")
    if image.mode.startswith("I"):
        pixels, levels = _from_integers(image, bit_depth)
        return pixels.convert("RGB"), levels
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"), None
    return image.convert("RGB"), None


def _from_integers(image: Image.Image, bit_depth: int | None) -> tuple[Image.Image, tuple[int, int] | None]:
    # Pillow's own conversion clips at 255.
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise PrivlabError(f"Integer pixels from {low} to {high}; 8 or 16 bits without sign are read.")
    if bit_depth is None and image.mode == "I" and image.format not in ("PNG", "PPM") and high <= 255:
        return Image.fromarray(values.astype(np.uint8)), None  # 8-bit levels in a file of 32
    return Image.fromarray(_scaled(values, bit_depth or 16)), (low, high)


def _scaled(values: np.ndarray, bit_depth: int) -> np.ndarray:
    """Return levels of a number of bits, in 0 … 2^bit_depth − 1, as the nearest levels of 8 bits."""
    white = 2**bit_depth - 1
    if (high := int(values.max())) > white:
        raise PrivlabError(f"Levels up to {high} do not fit into --bit-depth {bit_depth}, whose largest is {white}.")
    levels = np.arange(white + 1)
    scaled = ((2 * 255 * levels + white) // (2 * white)).astype(np.uint8)
    return np.stack([scaled[row] for row in values])  # row by row, since indices take 8 bytes each
