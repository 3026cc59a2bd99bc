"""Public photographs: nothing may learn from the private image that it is compared with, nor from a copy of it.

Image priors learn from the photographs that come with scikit-image. So do controls and attacks on features by default
(`--public samples`). Several are crops of one file: all crops of a private file are left out with it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError
from privlab.images.decode import read_image
from privlab.images.open import Preprocessing, open_images
from privlab.images.sources import SAMPLES, sample_file
from privlab.images.twins import BLOCK, Thumbnails, thumbnails, twins

_FILES = {f"samples/{name}": file for name, file, *_ in SAMPLES}
"""The file of each bundled photograph, by its name."""


@dataclass(frozen=True, eq=False)
class Others:
    """Public photographs by the hash of their file, preprocessed as the private images are.

    A public photograph counts as a private one where the hashes agree, or where both show one photograph (`twins`):
    resized, mirrored, recompressed, made grey or cut a little differently. Of the bundled photographs all crops of a
    file go together. `labels` has the class of those whose source states one.
    """

    images: Mapping[str, Float[Tensor, "c h w"]]
    labels: Mapping[str, int] = field(default_factory=dict[str, int])

    def without(self, sha256: Iterable[str], private: Float[Tensor, "b c h w"]) -> list[str]:
        """Return the hashes of the public photographs that are none of the private images; there may be none."""
        private_ones = kin({*sha256}.union(*map(self.shown_by, private)))
        return [key for key in self.images if key not in private_ones]

    def copies(self, sha256: Iterable[str], private: Float[Tensor, "b c h w"]) -> list[str]:
        """Return the hashes of the public photographs that show a private image in another file."""
        found, known = set().union(*map(self.shown_by, private)), kin(sha256)
        return [key for key in self.images if key in found - known]

    def beside(self, sha256: str, private: Float[Tensor, "c h w"]) -> list[str]:
        """Return the hashes of the public photographs other than this private image; its controls are made of them.

        Raises:
            PrivlabError: if there is none.
        """
        left = self.without([sha256], private[None])
        if not left:
            raise PrivlabError(
                "--public needs a photograph other than the private image, for the controls. Found "
                f"{len(self.images)}, and no other: name more."
            )
        return left

    def shown_by(self, private: Float[Tensor, "c h w"]) -> frozenset[str]:
        """Return the hashes of the public photographs that show this image; attacks and controls ask several times."""
        key = hashlib.sha256(private.cpu().numpy().tobytes()).digest()
        if key not in self._found:
            marked = twins(private[None], self._thumbnails)[0].tolist() if self.images else []
            self._found[key] = frozenset(name for name, is_twin in zip(self.images, marked, strict=True) if is_twin)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[bytes, frozenset[str]]:
        return {}

    @cached_property
    def _thumbnails(self) -> Thumbnails:
        """Return the thumbnails of all photographs, in blocks: there may be thousands."""
        images = [*self.images.values()]
        parts = [thumbnails(torch.stack(images[i : i + BLOCK])) for i in range(0, len(images), BLOCK)]
        return Thumbnails(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Thumbnails)))


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

    None stands for an image that is not a bundled photograph: all may be learned from. Crops and whole files are
    recognised by their hash, or by their pixels after `preprocessing` (`twins`); crops of another kind are not.

    Args:
        sha256: the hash of each private image, b of them, in hex.
        images: the private images, preprocessed, in [0, 1].
        preprocessing: the preprocessing that the images had; the photographs get the same before they are compared.

    Raises:
        PrivlabError: if scikit-image is not installed.
    """
    bundled, found = _bundled(preprocessing), []
    for key, image in zip(sha256, images, strict=True):
        private_ones = kin({key} | bundled.shown_by(image))
        left = tuple(name for crop, name in _crops().items() if crop not in private_ones)
        found.append(left if len(left) < len(_crops()) else None)
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
def _bundled(preprocessing: Preprocessing) -> Others:
    """Return each crop and each whole photograph after a preprocessing."""
    crops = [image for image in open_images("samples") if image.pixels]
    wholes = [read_image(sample_file(file)) for file in dict.fromkeys(_FILES[each.name] for each in crops)]
    return Others({each.sha256: preprocessing(each.pixels) for each in (*crops, *wholes) if each.pixels})
