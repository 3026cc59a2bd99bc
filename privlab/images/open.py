"""Images to evaluate on: opened by name, and preprocessed as the victim expects them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from privlab.base import PrivlabError, check_name, check_range
from privlab.images import archives, datasets, sources
from privlab.images.data import Data
from privlab.images.decode import check_bit_depth, warn_if_dark
from privlab.images.manifest import check_choice, choose_images, relabel

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")


def open_images(
    source: str | Path | Sequence[str | Path] | Data,
    *,
    limit: int | None = None,
    every: int | None = None,
    offset: int | None = None,
    manifest: str | Path | None = None,
    split: str | None = None,
    labels: str | Path | None = None,
    class_to_index: Mapping[str, int] | None = None,
    bit_depth: int | None = None,
    check: bool = True,
) -> Data:
    """Open images without reading them.

    Args:
        source: "samples" (photographs that come with scikit-image), a folder (flat, or one sub-folder per class), one
            or several files, a Parquet file with the bytes of images or a folder of them, an npz file of arrays, tar
            files of WebDataset (such as "shard-{000..003}.tar", or their folder), "torchvision:NAME", or "hf:NAME". A
            folder called samples is "./samples". Data that are open already are taken as they are.
        limit: use the first `limit` images only. Of a folder with one sub-folder per class, these are the first image
            of each class in the order of their names, then the second of each, and so on.
        every: use every `every`-th image only, in the order in which `limit` takes them; `limit` counts what is left.
        offset: number of images to leave out before the first: the images at the positions offset, offset + every, …,
            counted from 0, are used.
        manifest: CSV file that names the images to use (`privlab.images.manifest.read_manifest`), in its order, instead
            of `limit`, `every` and `offset`; its labels replace the source's own.
        split: sub-folder of the folder, or split of the dataset. Without it, torchvision's datasets give the test set
            where `train=` chooses it, else their own default; Hugging Face's give the test, else the validation, else
            the first split.
        labels: CSV with the columns `file` (an image's name, or its base name) and `class_index` or `label`; replaces
            all other labels. "predicted" says that the victim's predictions will; those of the source need not be
            class indices then.
        class_to_index: label of each class folder, used if it knows all of them; otherwise labels are the positions in
            the sorted names of the folders that hold images, as in torchvision's ImageFolder.
        bit_depth: number of bits, 1 to 16, that the levels of files of 16 bits use, such as 12 for most medical images;
            None for all 16. Files of 8 bits are read as they are.
        check: whether the hash of each image is compared with the manifest's; the images are read for it.

    Raises:
        PrivlabError: if there is nothing to open, or an option does not fit the source or another option.

    Warns:
        PrivlabWarning: if a folder next to class folders holds no image; when images are read, if one has levels of 16
            bits that do not reach a quarter of their range, and no `bit_depth` is given.
    """
    check_choice(limit, every, offset, manifest)
    check_bit_depth(bit_depth)
    spread = (limit, every, offset) != (None, None, None)
    opened = _open(source, split, class_to_index, own_labels=labels is None)
    opened = opened.by_turns() if spread else opened
    if bit_depth is not None:
        described = f"{opened.description}, files of 16 bits read as {bit_depth}"
        opened = replace(opened, description=described, bit_depth=bit_depth)
    opened = opened.transform(warn_if_dark(bit_depth))
    if manifest is not None:
        opened = choose_images(opened, Path(manifest), check=check)
    if labels not in (None, "predicted"):
        opened = relabel(opened, Path(labels), class_to_index)
    start, step = offset or 0, every or 1
    if start:
        try:
            opened[start]
        except IndexError:
            number = f" of {opened.description}" if opened.count is None else f", {opened.count}"
            raise PrivlabError(f"offset must be less than the number of images{number}. Found {start}.") from None
    if (every, offset) != (None, None):
        opened = replace(opened, description=f"{opened.description}; one in {step}, from position {start} on")
    return replace(opened, places=opened.places[start : None if limit is None else start + step * limit : step])


def _open(
    source: str | Path | Sequence[str | Path] | Data,
    split: str | None,
    class_to_index: Mapping[str, int] | None,
    *,
    own_labels: bool,
) -> Data:
    several = [source] if isinstance(source, str | Path | Data) else source
    first = several[0] if len(several) == 1 else None
    if isinstance(first, str) and first.startswith("torchvision:"):
        return datasets.torchvision(first.removeprefix("torchvision:"), split)
    if isinstance(first, str) and first.startswith("hf:"):
        return datasets.hugging_face(first.removeprefix("hf:"), split)
    if isinstance(first, str | Path) and first != "samples" and Path(first).is_dir():
        return _folder(Path(first), split, class_to_index, own_labels=own_labels)
    path = Path(first) if isinstance(first, str | Path) else Path()
    if path.suffix.lower() == ".parquet" and path.is_file():
        return datasets.parquet(path, split, own_labels=own_labels)
    if path.suffix.lower() == ".npz" and path.is_file():
        return archives.arrays(path, split)
    if isinstance(first, Data):
        opened = first
    elif first == "samples":
        opened = sources.samples()
    elif path.suffix.lower() == ".tar":
        files = {tar.name: tar for tar in archives.expand(path)}
        opened = archives.tars(files, sources.SUFFIXES, class_to_index, own_labels=own_labels)
    else:
        opened = sources.files([Path(path) for path in several if not isinstance(path, Data)])
    if split is not None:
        found = opened.description if isinstance(source, Data) else source
        raise PrivlabError(f"split is for folders and datasets. Found split '{split}' with {found}.")
    return opened


def _folder(root: Path, split: str | None, class_to_index: Mapping[str, int] | None, *, own_labels: bool) -> Data:
    """Open a folder of images, or of the Parquet or tar files that hold them."""
    base = root if split is None or not (root / split).is_dir() else root / split
    if not sources.files_below(base, sources.SUFFIXES):
        if shards := sources.files_below(root, {".parquet"}):
            return datasets.parquet_folder(root, shards, split, own_labels=own_labels)
        if tars := sources.files_below(base, {".tar"}):
            files = {path.relative_to(root).as_posix(): path for path in tars}
            return archives.tars(files, sources.SUFFIXES, class_to_index, own_labels=own_labels)
    return sources.folder(root, split, class_to_index)


@dataclass(frozen=True)
class Preprocessing:
    """timm's evaluation transform (crop mode "center") up to, not including, the normalisation.

    `size` is (h, w). `mean` and `std` are kept for the victim, which normalises them; they have one entry for each
    channel: grey (PIL's luma), red and green, red, green and blue, or these and the luma, as a stand-in for each band
    that photographs do not have.

    Raises:
        PrivlabError: if the size is not positive, `crop_pct` is not in (0, 1], or the interpolation is unknown.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str

    def __post_init__(self) -> None:
        for side in self.size:
            check_range(type(side) is int and side >= 1, "size", "a positive integer", side)
        check_range(0 < self.crop_pct <= 1, "crop_pct", "in (0, 1]", self.crop_pct)
        check_name("interpolation", self.interpolation, INTERPOLATIONS)

    def __call__(self, pixels: Image.Image | Tensor) -> Float[Tensor, "c h w"]:
        """Return the resized, centre-cropped image, in [0, 1]; values of the input's size are taken as they are.

        Values are resized without rounding.
        """
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize, ToTensor

        is_tensor = isinstance(pixels, Tensor)
        if is_tensor and len(pixels) != len(self.mean):
            raise PrivlabError(
                f"Images must have {len(self.mean)} channels, as the model takes them. Found {len(pixels)}: take a "
                f"model with in_chans={len(pixels)}, or images with {len(self.mean)} channels."
            )
        height, width = pixels.shape[1:] if is_tensor else (pixels.height, pixels.width)
        resize = Resize(self.resize_to(height, width), InterpolationMode(self.interpolation))
        cut = Compose([resize, CenterCrop(self.size)])
        if is_tensor:  # bicubic interpolation overshoots
            return pixels if (height, width) == self.size else cut(pixels).clamp(0, 1)
        made = ToTensor()(cut(self.convert_colours(pixels)))[: len(self.mean)]
        further = len(self.mean) - len(made)
        luma = ToTensor()(cut(pixels.convert("L"))) if further else made
        return torch.cat([made, luma.expand(further, -1, -1)]) if further else made

    def convert_colours(self, pixels: Image.Image) -> Image.Image:
        """Return an image in as many colours as the input has, or in three where it has two."""
        if len(self.mean) == 4:
            return Image.merge("CMYK", (*pixels.split(), pixels.convert("L")))  # RGBA's fourth band would be a weight
        return pixels.convert("L") if len(self.mean) == 1 else pixels

    def resize_to(self, height: int, width: int) -> list[int]:
        """Return the side, or the height and width, that an image is resized to before it is cropped."""
        h, w = (math.floor(side / self.crop_pct) for side in self.size)
        if h == w:
            return [h]
        ratio = min(height / h, width / w)
        return [round(height / ratio), round(width / ratio)]
