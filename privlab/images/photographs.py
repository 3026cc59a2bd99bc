"""The photographs that come with scikit-image, used as public ones; which of them are left when one is under attack.

Image priors learn from them. So do controls and attacks on features by default (`--public samples`). Several are crops
of one file. Nothing may learn from a private image, so all crops of its file are left out with it.
"""

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.images.decode import read_image
from privlab.images.open import Preprocessing, open_images
from privlab.images.sources import SAMPLES, sample_file
from privlab.images.twins import Thumbnails, thumbnails, twins

_FILES = {f"samples/{name}": file for name, file, *_ in SAMPLES}
"""The file of each bundled photograph, by its name."""


def photographs(
    size: tuple[int, int], names: Sequence[str] | None = None, channels: int = 3
) -> Float[Tensor, "m c h w"]:
    """Return the bundled photographs at a size, m × c × h × w in [0, 1], in float64.

    Args:
        size: (h, w) in pixels; the photographs are resized and centre-cropped to it.
        names: names of those to return, such as "samples/chelsea-0"; None for all.
        channels: c: 3 for colours, 1 for grey.

    Raises:
        PrivlabError: if `names` is empty.
    """
    if names is not None and not names:
        raise PrivlabError("An image prior learns from bundled photographs. Found all of them under attack in one.")
    cut = Preprocessing(size=size, mean=(0.5,) * channels, std=(0.5,) * channels, crop_pct=1.0, interpolation="bicubic")
    found = [each for each in open_images("samples") if names is None or each.name in names]
    return torch.stack([cut(image.pixels) for image in found if image.pixels]).double()


def kin(sha256: Iterable[str]) -> frozenset[str]:
    """Return these hashes, and those of the bundled photographs that are crops of the same files."""
    given = frozenset(sha256)
    files = {file for key, file in _file_of().items() if key in given}
    return given | {key for key, name in _crops().items() if _FILES[name] in files}


def apart_from(
    sha256: Sequence[str], images: Float[Tensor, "b c h w"], preprocessing: Preprocessing
) -> list[tuple[str, ...] | None]:
    """Return, for each private image, the names of the bundled photographs that are crops of other files than it is.

    None stands for an image that is no bundled photograph: all may be learned from. Crops and whole files are
    recognised by their hash, or by their pixels after `preprocessing` (`twins`); crops of another kind are not.

    Args:
        sha256: the hash of each private image, b of them, in hex.
        images: the private images, preprocessed, in [0, 1].
        preprocessing: the preprocessing that the images had; the photographs get the same before they are compared.

    Raises:
        PrivlabError: if scikit-image is not installed.
    """
    found: list[tuple[str, ...] | None] = []
    names, table = _table(preprocessing)
    for key, near in zip(sha256, twins(images, table).tolist(), strict=True):
        files = {file for file, is_near in zip(names, near, strict=True) if is_near}
        if key in _file_of():
            files.add(_file_of()[key])
        left = tuple(name for name in _crops().values() if _FILES[name] not in files)
        found.append(left if files else None)
    return found


def common(left: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Return the names that are left for all images of one gradient; None where all photographs are."""
    given = [set(names) for names in left if names is not None]
    return tuple(name for name in _crops().values() if name in set.intersection(*given)) if given else None


@cache
def _crops() -> dict[str, str]:
    """Return the name of every bundled photograph that can be read, by its hash."""
    return {each.sha256: each.name for each in open_images("samples") if each.pixels}


@cache
def _file_of() -> dict[str, str]:
    """Return the file of every crop and of every whole photograph, by its hash."""
    crops = {key: _FILES[name] for key, name in _crops().items()}
    return crops | {read_image(sample_file(file)).sha256: file for file in {*crops.values()}}


@lru_cache(maxsize=2)
def _table(preprocessing: Preprocessing) -> tuple[tuple[str, ...], Thumbnails]:
    """Return the file of each crop, and of each whole, with their thumbnails after a preprocessing."""
    crops = [image for image in open_images("samples") if image.pixels]
    files = dict.fromkeys(_FILES[each.name] for each in crops)
    wholes = [read_image(sample_file(file)) for file in files]
    images = [preprocessing(each.pixels) for each in (*crops, *wholes) if each.pixels]
    return (*(_FILES[each.name] for each in crops), *files), thumbnails(torch.stack(images))
