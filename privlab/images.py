"""Pictures to evaluate on: bundled samples, folders, files, torchvision and Hugging Face datasets.

A source is read one picture at a time. A file that cannot be used becomes a `Picture` with a `problem`
instead of ending the run: what was skipped, and why, belongs into the report.
"""

import csv
import hashlib
import importlib
import importlib.util
import inspect
import io
import math
import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from privlab.errors import PrivlabError, unknown_name

__all__ = ["Chunk", "ImageSource", "Picture", "Preprocessing", "batches", "open_images", "read_picture"]

LabelOrigin = Literal["folder", "file", "dataset", "none"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2"})
FORMATS = (
    "JPEG",
    "PNG",
    "BMP",
    "WEBP",
    "TIFF",
    "GIF",
    "PPM",
    "JPEG2000",
)  # not EPS: it would run Ghostscript
MAX_BYTES = 512 * 2**20
MAX_PIXELS = 100_000_000
PIXEL_LIMIT = f"at most {MAX_PIXELS // 10**6} million pixels are decoded."
MAX_ASPECT = 100  # the shorter side is resized to the model's input, so a long strip would fill the memory
MIN_SIDE = 8
SPLITS = frozenset({"train", "val", "valid", "validation", "test"})
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

# (name, file that scikit-image's wheel carries, left, top, side): the first nine are nine different scenes.
SAMPLES = (
    ("astronaut-0", "astronaut.png", 96, 0, 256),
    ("chelsea-0", "chelsea.png", 96, 0, 300),
    ("coffee-0", "coffee.png", 96, 0, 400),
    ("rocket-0", "rocket.jpg", 107, 0, 427),
    ("motorcycle-0", "motorcycle_left.png", 150, 0, 500),
    ("camera-0", "camera.png", 110, 30, 288),
    ("retina-0", "retina.jpg", 60, 260, 800),
    ("hubble-0", "hubble_deep_field.jpg", 530, 330, 380),
    ("ihc-0", "ihc.png", 190, 0, 320),
    ("astronaut-1", "astronaut.png", 272, 272, 240),
    ("motorcycle-1", "motorcycle_left.png", 460, 180, 270),
    ("coffee-1", "coffee.png", 270, 150, 240),
    ("camera-1", "camera.png", 250, 60, 240),
    ("rocket-1", "rocket.jpg", 0, 227, 200),
)


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture, or the reason why there is none.

    `sha256` is that of the file's bytes; for pictures that come from no file, of the size and the RGB pixels;
    empty where nothing could be read. `pixels` has mode RGB with 8 bits; it is None where there is a
    `problem` and in the pictures of a `Chunk`.
    """

    name: str
    sha256: str
    pixels: Image.Image | None
    label: int | None = None
    label_origin: LabelOrigin = "none"
    problem: str | None = None


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Pictures that are read one at a time, anew in each iteration.

    `count` is the number of pictures, problems included; None for a stream that does not tell, and `len()` is
    then a TypeError. `names` are those of all pictures where known without reading, else None.
    `class_names[i]` is the name of label i.
    """

    description: str
    count: int | None
    class_names: tuple[str, ...] | None
    names: tuple[str, ...] | None = field(repr=False)
    pictures: Callable[[], Iterator[Picture]] = field(repr=False)

    def __iter__(self) -> Iterator[Picture]:
        return self.pictures()

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError(f"The length of {self.description} is unknown.")
        return self.count


def open_images(
    source: str | Path | Sequence[str | Path],
    *,
    limit: int | None = None,
    split: str | None = None,
    labels: str | Path | None = None,
    class_to_index: Mapping[str, int] | None = None,
) -> ImageSource:
    """Open pictures without reading them.

    Args:
        source: "samples" (photographs that come with scikit-image), a folder (flat, or one sub-folder per
            class), one or several files, "torchvision:NAME", or "hf:NAME". A folder called samples is
            "./samples".
        limit: use the first `limit` pictures only.
        split: sub-folder of the folder, or split of the dataset. Without it, torchvision's datasets give the
            test set where `train=` chooses it, else their own default; Hugging Face's give the test, else the
            validation, else the first split.
        labels: CSV with the columns `file` (a picture's name, or its base name) and `class_index` or `label`;
            replaces all other labels.
        class_to_index: label of each class folder, used if it knows all of them; otherwise labels are the
            positions in the sorted folder names, as in torchvision's ImageFolder.

    Raises:
        PrivlabError: if there is nothing to open, or an option does not fit the source.
    """
    if limit is not None:
        _check_positive("limit", limit)
    opened = _open(source, split, class_to_index)
    if labels is not None:
        opened = _relabelled(opened, Path(labels))
    return opened if limit is None else _limited(opened, limit)


def read_picture(
    path: str | Path, *, name: str | None = None, label: int | None = None, label_origin: LabelOrigin = "none"
) -> Picture:
    """Read one file; whatever keeps it from being a picture is told in `problem`, never raised.

    Grey, palette, CMYK and 1-bit pictures become RGB, transparency becomes white, 16-bit grey is divided by
    257, and the EXIF orientation is applied. Colour profiles are not.
    """
    path = Path(path)
    name = path.as_posix() if name is None else name
    try:
        data = _file_bytes(path)
    except PrivlabError as error:
        return Picture(name, "", None, label, label_origin, str(error))
    return _decoded(data, name, label, label_origin)


@dataclass(frozen=True)
class Preprocessing:
    """timm's evaluation transform (crop mode "center") up to, not including, the normalisation.

    `size` is (h, w); `mean` and `std` are kept for the victim, which normalises by itself.

    Raises:
        PrivlabError: if the size or `crop_pct` is not positive, or the interpolation is unknown.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str

    def __post_init__(self) -> None:
        for side in self.size:
            _check_positive("size", side)
        if not 0 < self.crop_pct <= 1:
            raise PrivlabError(f"crop_pct must be in (0, 1]. Found {self.crop_pct}.")
        if self.interpolation not in INTERPOLATIONS:
            raise unknown_name("interpolation", self.interpolation, INTERPOLATIONS)

    def __call__(self, pixels: Image.Image) -> Float[Tensor, "3 h w"]:
        """Return the resized, centre-cropped picture, in [0, 1]."""
        from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize, ToTensor

        resize = Resize(self._resized(pixels), InterpolationMode(self.interpolation))
        return ToTensor()(Compose([resize, CenterCrop(self.size)])(pixels))

    def _resized(self, pixels: Image.Image) -> list[int]:
        h, w = (math.floor(side / self.crop_pct) for side in self.size)
        if h == w:
            return [h]
        ratio = min(pixels.height / h, pixels.width / w)
        return [round(pixels.height / ratio), round(pixels.width / ratio)]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Readable pictures with their preprocessed pixels in [0, 1], and the unreadable ones met on the way.

    The `pictures` have dropped their `pixels`.
    """

    pictures: tuple[Picture, ...]
    images: Float[Tensor, "b 3 h w"]
    failed: tuple[Picture, ...]


def batches(source: ImageSource, preprocessing: Preprocessing, size: int) -> Iterator[Chunk]:
    """Yield chunks of `size` readable pictures; the last may have fewer, or unreadable ones only.

    Raises:
        PrivlabError: if `size` is not a positive integer.
    """
    _check_positive("size", size)
    return _chunks(source, preprocessing, size)


def _chunks(source: ImageSource, preprocessing: Preprocessing, size: int) -> Iterator[Chunk]:
    pictures: list[Picture] = []
    images: list[Tensor] = []
    failed: list[Picture] = []
    for picture in source:
        if picture.pixels is None:
            failed.append(picture)
            continue
        images.append(preprocessing(picture.pixels))
        pictures.append(replace(picture, pixels=None))
        if len(pictures) == size:
            yield Chunk(tuple(pictures), torch.stack(images), tuple(failed))
            pictures, images, failed = [], [], []
    if pictures:
        yield Chunk(tuple(pictures), torch.stack(images), tuple(failed))
    elif failed:
        yield Chunk((), torch.empty(0, 3, *preprocessing.size), tuple(failed))


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PrivlabError(f"{name} must be a positive integer. Found {value!r}.")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _limited(source: ImageSource, limit: int) -> ImageSource:
    return replace(
        source,
        count=None if source.count is None else min(limit, source.count),
        names=None if source.names is None else source.names[:limit],
        pictures=lambda: islice(source.pictures(), limit),
    )


# Reading one picture


def _file_bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
            raise PrivlabError("Not a regular file.")
        if status.st_size > MAX_BYTES:
            raise PrivlabError(f"{status.st_size / 2**20:.0f} MiB; at most {MAX_BYTES // 2**20} MiB are read.")
        return path.read_bytes()
    except OSError as error:
        raise PrivlabError(f"Cannot be opened: {error.strerror or _one_line(error)}.") from None


def _decoded(data: bytes, name: str, label: int | None, origin: LabelOrigin) -> Picture:
    digest = hashlib.sha256(data).hexdigest()
    try:
        return Picture(name, digest, _decode(data), label, origin)
    except PrivlabError as error:
        return Picture(name, digest, None, label, origin, str(error))


def _in_memory(image: Image.Image, name: str, label: int | None, origin: LabelOrigin) -> Picture:
    try:
        _check_size(image)
        pixels = _rgb(image)
    except PrivlabError as error:
        return Picture(name, "", None, label, origin, str(error))
    header = f"{pixels.width}x{pixels.height}:".encode()
    return Picture(name, hashlib.sha256(header + pixels.tobytes()).hexdigest(), pixels, label, origin)


def _decode(data: bytes) -> Image.Image:
    if not data:
        raise PrivlabError("Empty file: 0 bytes.")
    try:
        with warnings.catch_warnings():
            # The header's size is checked below, and a corrupt EXIF block is no reason to lose the pixels.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image)
                _check_frames(image)
                image.load()
                if image.format == "PNG":
                    _check_end(data)
                return _rgb(_upright(image))
    except PrivlabError:
        raise
    except UnidentifiedImageError:  # Pillow's message holds an address, which differs in every run
        raise PrivlabError(f"Not an image in one of the formats {', '.join(FORMATS)}.") from None
    except Image.DecompressionBombError as error:  # Pillow's own limit is higher than ours
        found = _one_line(error).split(" exceeds")[0]
        raise PrivlabError(f"{found} by its header; {PIXEL_LIMIT}") from None
    except Exception as error:  # on a damaged file, Pillow raises nearly anything
        raise PrivlabError(f"Truncated or damaged: {_one_line(error)}.") from None


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
        raise PrivlabError(f"{frames} frames; only still pictures are read.")


def _upright(image: Image.Image) -> Image.Image:
    turns = Image.Transpose
    turn = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(0x0112, 1)
    except Exception:  # a corrupt EXIF block: no orientation that could be applied
        return 1


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


# Where pictures come from


def _open(
    source: str | Path | Sequence[str | Path], split: str | None, class_to_index: Mapping[str, int] | None
) -> ImageSource:
    several = not isinstance(source, (str, Path))
    if several and len(source) == 1:
        return _open(source[0], split, class_to_index)
    if isinstance(source, str) and source.startswith("torchvision:"):
        return _torchvision(source.removeprefix("torchvision:"), split)
    if isinstance(source, str) and source.startswith("hf:"):
        return _hugging_face(source.removeprefix("hf:"), split)
    if not several and source != "samples" and Path(source).is_dir():
        return _folder(Path(source), split, class_to_index)
    if split is not None:
        raise PrivlabError(f"split is for folders and datasets. Found split '{split}' with {source}.")
    if source == "samples":
        return _samples()
    return _files([Path(path) for path in source] if several else [Path(source)])


def _samples() -> ImageSource:
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise PrivlabError("The samples come with scikit-image, which was not found: pip install scikit-image.")
    folder = Path(package.origin).parent / "data"
    names = tuple(f"samples/{name}" for name, *_ in SAMPLES)
    description = f"{len(SAMPLES)} photographs that come with scikit-image"
    return ImageSource(description, len(SAMPLES), None, names, lambda: map(_sampler(folder), SAMPLES))


def _sampler(folder: Path) -> Callable[[tuple[str, str, int, int, int]], Picture]:
    def read(sample: tuple[str, str, int, int, int]) -> Picture:
        name, file, left, top, side = sample
        whole = read_picture(folder / file, name=f"samples/{name}")
        if whole.pixels is None:
            return whole
        return _in_memory(whole.pixels.crop((left, top, left + side, top + side)), whole.name, None, "none")

    return read


def _files(paths: Sequence[Path]) -> ImageSource:
    if not paths:
        raise PrivlabError("No image given: expected a file, a folder, 'samples', 'torchvision:NAME' or 'hf:NAME'.")
    for path in paths:
        if path.is_dir():
            raise PrivlabError(f"'{path}' is a folder: give one folder alone, or several files.")
        if not path.exists():
            raise PrivlabError(f"No file or folder '{path}'.")
    names = tuple(path.as_posix() for path in paths)
    description = f"file {names[0]}" if len(paths) == 1 else f"{len(paths)} files"
    return ImageSource(description, len(paths), None, names, lambda: map(read_picture, paths))


def _folder(root: Path, split: str | None, class_to_index: Mapping[str, int] | None) -> ImageSource:
    base = root if split is None else root / split
    if not base.is_dir():
        raise PrivlabError(f"No folder '{base}' for split '{split}'. Found: {', '.join(_folders(root)) or 'none'}.")
    paths = _image_files(base)
    if not paths:
        raise PrivlabError(f"No image in the folder '{base}'. Expected files with {', '.join(sorted(SUFFIXES))}.")
    parts = [path.relative_to(base).parts for path in paths]
    folders = _folders(base) if all(len(part) > 1 for part in parts) else ()
    if split is None and folders and SPLITS.issuperset(folders):
        raise PrivlabError(f"'{base}' holds splits, not classes: choose split from {', '.join(folders)}.")
    indices, class_names, rule = _classes(folders, class_to_index)
    names = tuple(path.relative_to(root).as_posix() for path in paths)

    def pictures() -> Iterator[Picture]:
        origin: LabelOrigin = "folder" if folders else "none"
        for name, path, part in zip(names, paths, parts, strict=True):
            yield read_picture(path, name=name, label=indices.get(part[0]), label_origin=origin)

    return ImageSource(f"folder {base}: {len(paths)} images, {rule}", len(paths), class_names, names, pictures)


def _classes(
    folders: Sequence[str], class_to_index: Mapping[str, int] | None
) -> tuple[Mapping[str, int], tuple[str, ...] | None, str]:
    if not folders:
        return {}, None, "no labels"
    if class_to_index is None or not set(folders) <= set(class_to_index):
        indices = {name: index for index, name in enumerate(folders)}
        return indices, tuple(folders), f"{len(folders)} classes labelled in the order of their folders"
    ordered = sorted(class_to_index, key=class_to_index.__getitem__)
    complete = [class_to_index[name] for name in ordered] == list(range(len(ordered)))
    indices = {name: class_to_index[name] for name in folders}
    return (
        indices,
        tuple(ordered) if complete else None,
        f"{len(folders)} classes labelled by the given indices",
    )


def _folders(base: Path) -> tuple[str, ...]:
    # Hidden ones are left out: a stray .ipynb_checkpoints would shift every label.
    return tuple(sorted(path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith(".")))


def _image_files(base: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[Path] = set()
    for folder, folders, files in os.walk(base, onerror=_refuse_folder, followlinks=True):
        real = Path(folder).resolve()
        if real in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES]
    return sorted(found)


def _refuse_folder(error: OSError) -> NoReturn:
    raise PrivlabError(f"Cannot list the folder '{error.filename}': {error.strerror}.")


# Datasets


def _torchvision(name: str, split: str | None) -> ImageSource:
    cls = _torchvision_class(name)
    root = Path(os.environ.get("PRIVLAB_DATA") or "~/.cache/privlab").expanduser()
    parameters = _parameters(cls)
    arguments, used = _torchvision_arguments(name, parameters, split)
    if "root" in parameters:
        arguments["root"] = str(root)
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in arguments]
    if missing:
        raise PrivlabError(
            f"torchvision's {name} also needs {', '.join(missing)}; of such arguments, privlab gives split only."
        )
    try:
        dataset = _construct(cls, arguments, "download" in parameters)
    except Exception as error:  # no network, no such split, a broken archive: each class raises its own
        raise PrivlabError(
            f"Cannot open torchvision's {name}, looked for in '{root}' (set PRIVLAB_DATA to change it): "
            f"{_one_line(error)}."
        ) from error
    prefix = "/".join(filter(None, (name, used)))
    names = getattr(dataset, "classes", None)
    class_names = tuple(map(str, names)) if isinstance(names, Sequence) else None
    return ImageSource(
        f"torchvision {prefix}: {len(dataset)} images",
        len(dataset),
        class_names,
        None,
        lambda: (_torchvision_item(dataset, index, f"{prefix}/{index}") for index in range(len(dataset))),
    )


def _torchvision_class(name: str) -> type:
    from torchvision import datasets

    bases = {"VisionDataset", "DatasetFolder", "ImageFolder"}
    exported = {key: getattr(datasets, key) for key in datasets.__all__ if key not in bases}
    classes = {key: value for key, value in exported.items() if inspect.isclass(value)}
    if name not in classes:
        raise unknown_name("torchvision dataset", name, classes)
    return classes[name]


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    own = inspect.signature(cls).parameters
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    inherited = _parameters(cls.__mro__[1]) if passes_on else {}
    return inherited | {key: p for key, p in own.items() if p.kind not in variadic}


def _torchvision_arguments(
    name: str, parameters: Mapping[str, inspect.Parameter], split: str | None
) -> tuple[dict[str, Any], str | None]:
    if "split" in parameters:
        default = parameters["split"].default
        return ({}, default if isinstance(default, str) else None) if split is None else ({"split": split}, split)
    if "train" in parameters:
        if split not in (None, "train", "test"):
            raise unknown_name(f"split of torchvision's {name}", split, ("train", "test"))
        return {"train": split == "train"}, split or "test"
    if split is not None:
        raise PrivlabError(f"torchvision's {name} has no splits. Found split '{split}'; leave it out.")
    return {}, None


def _construct(cls: type, arguments: Mapping[str, Any], downloads: bool) -> Any:  # noqa: ANN401
    try:
        return cls(**arguments)
    except (RuntimeError, OSError):  # the data are not there
        if not downloads:
            raise
        return cls(**arguments, download=True)


def _torchvision_item(dataset: Any, index: int, name: str) -> Picture:  # noqa: ANN401
    try:
        item = dataset[index]
    except Exception as error:  # one damaged picture must not end the run
        return Picture(name, "", None, problem=f"Truncated or damaged: {_one_line(error)}.")
    image, target = (item[0], item[1]) if isinstance(item, tuple) and len(item) > 1 else (item, None)
    label, origin = _dataset_label(target)
    if not isinstance(image, Image.Image):
        return Picture(name, "", None, label, origin, f"Not a picture but a {type(image).__name__}.")
    return _in_memory(image, name, label, origin)


def _dataset_label(target: object) -> tuple[int | None, LabelOrigin]:
    # Test sets without labels say −1.
    if isinstance(target, (int, np.integer)) and not isinstance(target, bool) and target >= 0:
        return int(target), "dataset"
    return None, "none"


def _hugging_face(name: str, split: str | None) -> ImageSource:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise PrivlabError(f"'hf:{name}' needs the extra: pip install 'privlab[datasets]'.") from None
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # no network, no such dataset, a private one: each raises its own
        raise PrivlabError(f"Cannot open the Hugging Face dataset '{name}': {_one_line(error)}.") from error
    chosen = split or next((key for key in ("test", "validation", "val") if key in splits), next(iter(splits)))
    if chosen not in splits:
        raise unknown_name(f"split of '{name}'", chosen, splits)
    data = splits[chosen]
    if data.features is None:  # datasets has no public way to infer them from the first rows
        data = data._resolve_features()
    column, label_column = _columns(data.features, datasets, name)
    image_type, label_type = data.features[column], data.features.get(label_column)
    # Undecoded, so that one damaged picture does not end the stream.
    rows = data.cast_column(column, datasets.Image(decode=False))
    known = (data.info.splits or {}).get(chosen)
    class_names = tuple(label_type.names) if isinstance(label_type, datasets.ClassLabel) else None

    def pictures() -> Iterator[Picture]:
        for index, row in enumerate(_rows(rows, name)):
            yield _hugging_face_item(row[column], row.get(label_column), image_type, f"{name}/{chosen}/{index}")

    number = (known.num_examples or None) if known is not None else None
    return ImageSource(f"Hugging Face {name}/{chosen}", number, class_names, None, pictures)


def _columns(features: Mapping[str, Any], datasets: Any, name: str) -> tuple[str, str]:  # noqa: ANN401
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    if not images:
        raise PrivlabError(f"The dataset '{name}' has no image column. Found: {', '.join(features)}.")
    labels = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    return images[0], "label" if "label" in features or not labels else labels[0]


def _rows(data: Any, name: str) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401
    rows = iter(data)
    for index in count():
        try:
            row = next(rows, None)
        except Exception as error:  # the network, mostly
            raise PrivlabError(f"The stream of '{name}' broke at picture {index}: {_one_line(error)}.") from error
        if row is None:
            return
        yield row


def _hugging_face_item(value: Any, target: object, image_type: Any, name: str) -> Picture:  # noqa: ANN401
    label, origin = _dataset_label(target)
    if value is None:
        return Picture(name, "", None, label, origin, "No picture in this row.")
    if value["bytes"] is not None:
        return _decoded(value["bytes"], name, label, origin)
    try:
        image = image_type.decode_example(value)
    except Exception as error:  # one damaged picture must not end the run
        return Picture(name, "", None, label, origin, f"Truncated or damaged: {_one_line(error)}.")
    return _in_memory(image, name, label, origin)


# Labels from a file


def _relabelled(source: ImageSource, path: Path) -> ImageSource:
    table = _read_labels(path)
    if source.names is not None:
        _check_labels(table, source.names, path)

    def pictures() -> Iterator[Picture]:
        for picture in source:
            label = table.get(picture.name, table.get(PurePosixPath(picture.name).name))
            yield replace(picture, label=label, label_origin="none" if label is None else "file")

    return replace(source, class_names=None, pictures=pictures)


def _check_labels(table: Mapping[str, int], names: Sequence[str], path: Path) -> None:
    bases = Counter(PurePosixPath(name).name for name in names)
    known = set(names)
    for file in table:
        if file not in known and bases[file] > 1:
            raise PrivlabError(f"{path}: '{file}' could be {bases[file]} pictures; give the path, as in '{names[0]}'.")
    if not any(file in known or file in bases for file in table):
        raise PrivlabError(f"{path}: none of its {len(table)} files is a picture of the source, as '{names[0]}' is.")


def _read_labels(path: Path) -> dict[str, int]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            column = _label_column(rows.fieldnames or [], path)
            table: dict[str, int] = {}
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                name = PurePosixPath(row["file"] or "").as_posix()
                if name in table:
                    raise PrivlabError(f"{where}: the file '{name}' is listed twice; give it one label.")
                table[name] = _label(row[column], column, where)
            return table
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PrivlabError(f"Cannot read the labels '{path}': {_one_line(error)}.") from None


def _label_column(header: Sequence[str], path: Path) -> str:
    column = next((key for key in ("class_index", "label") if key in header), None)
    if column is None or "file" not in header:
        found = ", ".join(header) or "none"
        raise PrivlabError(f"{path}, line 1: expected the columns file and class_index (or label). Found: {found}.")
    return column


def _label(text: str | None, column: str, where: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if value < 0:
        raise PrivlabError(f"{where}: {column} must be an integer from 0 on. Found {text!r}.")
    return value
