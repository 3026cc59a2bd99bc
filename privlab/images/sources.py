"""Sources of images, and those on this machine: the samples, a folder, files."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import NoReturn

from privlab.base import PrivlabError
from privlab.images.decode import MAX_BYTES, LabelOrigin, NamedImage, image_from_pil, read_image

__all__ = ["ImageSource", "files", "folder", "sample_file", "samples"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2"})
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

    `count` is the number of images, unreadable ones included; it is None for a stream of unknown length, and `len()` is
    then a TypeError. `names` are those of all images where they are known without reading, else None. `class_names[i]`
    is the name of label i. `at` reads the image at a place, where that takes no reading of the others. `file` returns
    the path of the image at a place, where images are whole files; `about` returns what is known of it without reading
    it. `container` is the path of the one file that holds all images, where there is one.
    """

    description: str
    count: int | None
    class_names: tuple[str, ...] | None
    names: tuple[str, ...] | None = field(repr=False)
    read: Callable[[], Iterator[NamedImage]] = field(repr=False)
    at: Callable[[int], NamedImage] | None = field(default=None, repr=False)
    file: Callable[[int], Path] | None = field(default=None, repr=False)
    container: Path | None = field(default=None, repr=False)
    about: Callable[[int], NamedImage] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        description: str,
        count: int,
        class_names: tuple[str, ...] | None,
        names: tuple[str, ...] | None,
        at: Callable[[int], NamedImage],
        file: Callable[[int], Path] | None = None,
        container: Path | None = None,
        about: Callable[[int], NamedImage] | None = None,
    ) -> "ImageSource":
        """Return a source whose images are read by their place, in any order.

        Args:
            description: what the source is, in one line, for reports and errors.
            count: the number of images, unreadable ones included.
            class_names: the name of each label; None where they are not known.
            names: the name of each image, `count` of them; None where they are not known without reading.
            at: reads the image at a place in [0, count).
            file: returns the path of the image at a place, where images are whole files.
            container: path of the file that holds all images, where there is one.
            about: returns what is known of the image at a place without reading it.
        """
        return cls(description, count, class_names, names, lambda: map(at, range(count)), at, file, container, about)

    def choose(self, places: Sequence[int]) -> "ImageSource":
        """Return the source of the images at these places, in this order; a stream has no places, and is an error."""
        at, file, about, names = self.at, self.file, self.about, self.names
        assert at is not None
        return ImageSource.of(
            self.description,
            len(places),
            self.class_names,
            None if names is None else tuple(names[place] for place in places),
            lambda i: at(places[i]),
            None if file is None else lambda i: file(places[i]),
            self.container,
            None if about is None else lambda i: about(places[i]),
        )

    def transform(self, change: Callable[[NamedImage], NamedImage]) -> "ImageSource":
        """Return the source with `change` applied to each image; it changes no name, pixels or hash."""
        at, about = self.at, self.about
        return replace(
            self,
            read=lambda: map(change, self),
            at=None if at is None else lambda place: change(at(place)),
            about=None if about is None else lambda place: change(about(place)),
        )

    def without_pixels(self) -> Iterator[NamedImage]:
        """Yield each image without its pixels; whole files are hashed without being decoded."""
        if self.file is None or self.about is None or self.count is None:
            yield from (replace(image, pixels=None) for image in self)
            return
        for place in range(self.count):
            yield replace(self.about(place), sha256=_file_hash(self.file(place)))

    def pick(self, places: Sequence[int]) -> list[NamedImage]:
        """Return the images at these places, read one by one; of a stream, all up to the last are read."""
        if self.at is not None:
            return [self.at(place) for place in places]
        wanted = set(places)
        found = {i: image for i, image in enumerate(islice(self, max(wanted, default=-1) + 1)) if i in wanted}
        return [found[place] for place in places]

    def __iter__(self) -> Iterator[NamedImage]:
        return self.read()

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError(f"The length of {self.description} is unknown.")
        return self.count


def _file_hash(path: Path) -> str:
    try:
        fine = path.is_file() and path.stat().st_size <= MAX_BYTES  # a pipe would be read for ever
        return hashlib.sha256(path.read_bytes()).hexdigest() if fine else ""
    except OSError:
        return ""


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
        name, file, left, top, side = SAMPLES[place]
        whole = read_image(data / file, name=f"samples/{name}")
        if whole.pixels is None:
            return whole
        return image_from_pil(whole.pixels.crop((left, top, left + side, top + side)), whole.name)

    names = tuple(f"samples/{name}" for name, *_ in SAMPLES)
    description = f"{len(SAMPLES)} photographs that come with scikit-image"
    return ImageSource.of(description, len(SAMPLES), None, names, at)


def files(paths: Sequence[Path]) -> ImageSource:
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
    return ImageSource.of(
        description,
        len(paths),
        None,
        names,
        lambda i: read_image(paths[i]),
        lambda i: paths[i],
        about=lambda i: NamedImage(names[i], "", None),
    )


def folder(root: Path, split: str | None, class_to_index: Mapping[str, int] | None, *, spread: bool) -> ImageSource:
    """Open a folder, flat or with one sub-folder per class.

    Args:
        root: path of the folder; the names of the images are their paths below it.
        split: sub-folder to open; None for the folder itself.
        class_to_index: label of each class folder, used if it knows all of them; otherwise, and for None, labels are
            the positions in the sorted folder names.
        spread: whether the first image of each class comes first, then the second of each, and so on; otherwise the
            images come in the order of their paths.

    Raises:
        PrivlabError: if the folder or the split is not there or cannot be listed, holds no image, or holds splits of
            which none is chosen.
    """
    base = root if split is None else root / split
    if not base.is_dir():
        raise PrivlabError(f"No folder '{base}' for split '{split}'. Found: {', '.join(_folders(root)) or 'none'}.")
    paths = _image_files(base)
    if not paths:
        raise PrivlabError(f"No image in the folder '{base}'. Expected files with {', '.join(sorted(SUFFIXES))}.")
    folders = () if any(path.parent == base for path in paths) else _folders(base)
    if split is None and folders and SPLITS.issuperset(folders):
        raise PrivlabError(f"'{base}' holds splits, not classes: choose split from {', '.join(folders)}.")
    if spread and folders:
        paths = _interleave(paths, base)
    indices, class_names, rule = _classes(folders, class_to_index)
    names = tuple(path.relative_to(root).as_posix() for path in paths)

    origin: LabelOrigin = "folder" if folders else "none"

    def label(place: int) -> int | None:
        return indices.get(_top(paths[place], base))

    return ImageSource.of(
        f"folder {base}: {len(paths)} images, {rule}",
        len(paths),
        class_names,
        names,
        lambda i: read_image(paths[i], name=names[i], label=label(i), label_origin=origin),
        lambda i: paths[i],
        about=lambda i: NamedImage(names[i], "", None, label(i), origin),
    )


def _top(path: Path, base: Path) -> str:
    return path.relative_to(base).parts[0]


def _interleave(paths: Sequence[Path], base: Path) -> list[Path]:
    classes = [list(group) for _, group in groupby(paths, key=lambda path: _top(path, base))]
    return [path for row in zip_longest(*classes) for path in row if path is not None]


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
    # Hidden folders are left out: a stray .ipynb_checkpoints would shift every label.
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
