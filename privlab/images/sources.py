"""Sources of images, and those on this machine: the samples, a folder, files."""

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NoReturn

from PIL import Image

from privlab.base import PrivlabError, first, warn
from privlab.images.decode import NamedImage, file_hash, image_from_pil, read_image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2"})
_OF_TOOLS = frozenset({"__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"})
SPLITS = frozenset({"train", "val", "valid", "validation", "test"})

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
class ImageSource:
    """Images that are read one at a time, anew in each iteration.

    Args:
        description: what the source is, in one line, for reports and errors.
        count: the number of images, unreadable ones included; None for a stream of unknown length, whose `len()` is a
            TypeError.
        class_names: the name of each label; None where they are not known.
        names: the name of each image, `count` of them; None where they are not known without reading.
        read: yields the images of a stream; None where `at` reads them.
        at: reads the image at a place in [0, count), where that takes no reading of the others.
        files: the path of each image, where images are whole files.
        container: path of the file that holds all images, where there is one.
        changes: what is applied to each image, in this order, after `read` or `at`.
    """

    description: str
    count: int | None
    class_names: tuple[str, ...] | None
    names: tuple[str, ...] | None = field(repr=False)
    read: Callable[[], Iterator[NamedImage]] | None = field(default=None, repr=False)
    at: Callable[[int], NamedImage] | None = field(default=None, repr=False)
    files: Sequence[Path] | None = field(default=None, repr=False)
    container: Path | None = field(default=None, repr=False)
    changes: tuple[Callable[[NamedImage], NamedImage], ...] = field(default=(), repr=False)

    def choose(self, places: Sequence[int]) -> "ImageSource":
        """Return the source of the images at these places, in this order; a stream has no places, and is an error."""
        at, files, names = self.at, self.files, self.names
        assert at is not None
        return replace(
            self,
            count=len(places),
            names=None if names is None else tuple(names[place] for place in places),
            at=lambda i: at(places[i]),
            files=None if files is None else [files[place] for place in places],
        )

    def transform(self, change: Callable[[NamedImage], NamedImage]) -> "ImageSource":
        """Return the source with `change` applied to each image; it changes no name, pixels or hash."""
        return replace(self, changes=(*self.changes, change))

    def _changed(self, image: NamedImage) -> NamedImage:
        for change in self.changes:
            image = change(image)
        return image

    def without_pixels(self) -> Iterator[NamedImage]:
        """Yield each image without its pixels; whole files are hashed without being decoded."""
        if self.files is None or self.names is None:
            yield from (replace(image, pixels=None) for image in self)
            return
        for name, path in zip(self.names, self.files, strict=True):
            yield replace(self._changed(NamedImage(name, "", None)), sha256=file_hash(path))

    def pick(self, places: Sequence[int]) -> list[NamedImage]:
        """Return the images at these places, read one by one; of a stream, all up to the last are read."""
        if self.at is not None:
            return [self._changed(self.at(place)) for place in places]
        wanted = set(places)
        found = {i: image for i, image in enumerate(islice(self, max(wanted, default=-1) + 1)) if i in wanted}
        return [found[place] for place in places]

    def __iter__(self) -> Iterator[NamedImage]:
        if self.read is not None:
            return map(self._changed, self.read())
        assert self.at is not None
        return map(self._changed, map(self.at, range(len(self))))

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError(f"The length of {self.description} is unknown.")
        return self.count


@dataclass(frozen=True)
class Opening:
    """How a source is opened: the arguments of `open_images` that one kind of source or another needs.

    `spread` says that the first image of each class comes first, then the second of each, and so on; otherwise images
    come in the order of their paths or rows. `own_labels` says that the source's own labels are used; if not, it does
    not matter what they are.
    """

    split: str | None = None
    class_to_index: Mapping[str, int] | None = None
    spread: bool = False
    bit_depth: int | None = None
    own_labels: bool = True


def sample_file(name: str) -> Path:
    """Return where scikit-image keeps a photograph.

    Raises:
        PrivlabError: if it is not installed.
    """
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise PrivlabError("The samples come with scikit-image, which was not found: pip install scikit-image.")
    return Path(package.origin).parent / "data" / name


def samples() -> ImageSource:
    """Open the photographs that come with scikit-image."""
    data = sample_file("")

    def at(place: int) -> NamedImage:
        image = _sample(data, place)
        return replace(image, pixels=image.pixels.copy()) if isinstance(image.pixels, Image.Image) else image

    names = tuple(f"samples/{name}" for name, *_ in SAMPLES)
    description = f"{len(SAMPLES)} photographs that come with scikit-image"
    return ImageSource(description, len(SAMPLES), None, names, at=at)


@lru_cache(maxsize=len(SAMPLES))
def _sample(data: Path, place: int) -> NamedImage:
    """Return a photograph of scikit-image, decoded once in a process: each attack has them as public images."""
    name, file, left, top, side = SAMPLES[place]
    whole = read_image(data / file, name=f"samples/{name}")
    if not isinstance(whole.pixels, Image.Image):
        return whole
    return image_from_pil(whole.pixels.crop((left, top, left + side, top + side)), whole.name)


def files(paths: Sequence[Path], how: Opening = Opening()) -> ImageSource:
    """Open files, in the order given."""
    if not paths:
        raise PrivlabError("No image given: expected a file, a folder, 'samples', 'torchvision:NAME' or 'hf:NAME'.")
    for path in paths:
        if path.is_dir():
            raise PrivlabError(f"'{path}' is a folder: give one folder alone, or several files.")
        if not path.exists():
            raise PrivlabError(
                f"No file or folder '{path}'. Give samples, a folder, files, torchvision:NAME or hf:NAME."
            )
    names = tuple(path.as_posix() for path in paths)
    description = f"file {names[0]}" if len(paths) == 1 else f"{len(paths)} files"
    return _of_paths(description, paths, names, how.bit_depth)


def _of_paths(description: str, paths: Sequence[Path], names: tuple[str, ...], bit_depth: int | None) -> ImageSource:
    def at(place: int) -> NamedImage:
        return read_image(paths[place], name=names[place], bit_depth=bit_depth)

    return ImageSource(description, len(paths), None, names, at=at, files=paths)


def folder(root: Path, how: Opening) -> ImageSource:
    """Open a folder, flat or with one sub-folder per class; the names of the images are their paths below it.

    Raises:
        PrivlabError: if the folder or the split is not there or cannot be listed, holds no image, or holds splits of
            which none is chosen.

    Warns:
        PrivlabWarning: if a folder beside the class folders holds no image: it is no class, and takes no label.
    """
    base = root if how.split is None else root / how.split
    if not base.is_dir():
        raise PrivlabError(f"No folder '{base}' for split '{how.split}'. Found: {', '.join(_folders(root)) or 'none'}.")
    paths = _image_files(base)
    if not paths:
        raise PrivlabError(f"No image in the folder '{base}'. Expected files with {', '.join(sorted(SUFFIXES))}.")
    with_images = {_top(path, base) for path in paths}
    folders = () if any(path.parent == base for path in paths) else tuple(sorted(with_images))
    if how.split is None and folders and SPLITS.issuperset(folders):
        raise PrivlabError(f"'{base}' holds splits, not classes: choose split from {', '.join(folders)}.")
    if how.spread and folders:
        paths = [paths[place] for place in by_turns([_top(path, base) for path in paths])]
    indices, class_names, rule = _classes(folders, how.class_to_index)
    if class_names == folders and (empty := [name for name in _folders(base) if name not in with_images]):
        warn(
            f"{first(empty, 3)} in '{base}' holds no image and is not counted as a class: the labels 0 to "
            f"{len(folders) - 1} are those of {first(folders, 3)}. If it is a class, give --labels.",
            3,
        )
    names = tuple(path.relative_to(root).as_posix() for path in paths)

    opened = _of_paths(f"folder {base}: {len(paths)} images, {rule}", paths, names, how.bit_depth)

    def with_label(image: NamedImage) -> NamedImage:
        return replace(image, label=indices.get(_top(root / image.name, base)), label_origin="folder")

    return replace(opened.transform(with_label), class_names=class_names) if folders else opened


def _top(path: Path, base: Path) -> str:
    return path.relative_to(base).parts[0]


def by_turns(labels: Sequence[object]) -> list[int]:
    """Return the places of all labels: the first of each label, then the second of each, and so on."""
    met: Counter[object] = Counter()
    turns = []
    for label in labels:
        turns.append(met[label])
        met[label] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)


def _classes(
    folders: Sequence[str], class_to_index: Mapping[str, int] | None
) -> tuple[Mapping[str, int], tuple[str, ...] | None, str]:
    if not folders:
        return {}, None, "no labels"
    if class_to_index is None or not class_to_index.keys() >= set(folders):
        indices = {name: index for index, name in enumerate(folders)}
        return indices, tuple(folders), f"{len(folders)} classes labelled in the order of their folders"
    complete = sorted(class_to_index.values()) == list(range(len(class_to_index)))
    class_names = tuple(sorted(class_to_index, key=class_to_index.__getitem__)) if complete else None
    return class_to_index, class_names, f"{len(folders)} classes labelled by the given indices"


def _folders(base: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in base.iterdir() if path.is_dir() and not _is_of_a_tool(path.name)))


def _is_of_a_tool(name: str) -> bool:
    """Return whether a file or folder is not the user's: hidden, or made beside the data by a system or a tool."""
    return name.startswith(".") or name in _OF_TOOLS


def _image_files(base: Path) -> list[Path]:
    found: list[Path] = []
    seen: set[Path] = set()
    for folder, folders, files in os.walk(base, onerror=_refuse_folder, followlinks=True):
        real = Path(folder).resolve()
        if real in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _is_of_a_tool(name))
        paths = (Path(folder, name) for name in files if not _is_of_a_tool(name))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES]
    return sorted(found)


def _refuse_folder(error: OSError) -> NoReturn:
    raise PrivlabError(f"Cannot list the folder '{error.filename}': {error.strerror}.")
