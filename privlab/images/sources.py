"""Images on this machine: the samples, a folder, files."""

import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from PIL import Image

from privlab.base import PrivlabError, first, warn
from privlab.images import medical
from privlab.images.data import Data
from privlab.images.decode import NamedImage, Slice, count_slices, read_image
from privlab.images.targets import class_indices

_STILL = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".jp2"})
"""The suffixes of files that are one image."""
SUFFIXES = _STILL | {".tif", ".tiff"} | medical.SUFFIXES
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


def sample_file(name: str) -> Path:
    """Return where scikit-image keeps a photograph.

    Raises:
        PrivlabError: if it is not installed.
    """
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise PrivlabError("The samples come with scikit-image, which was not found: pip install scikit-image.")
    return Path(package.origin).parent / "data" / name


def samples() -> Data:
    """Open the photographs that come with scikit-image."""
    names = tuple(f"samples/{name}" for name, *_ in SAMPLES)
    description = f"{len(SAMPLES)} photographs that come with scikit-image"
    return Data(description, _Samples(sample_file("")), names, range(len(names)))


@dataclass(frozen=True)
class _Samples:
    """The photographs of scikit-image, each decoded once in a process: each attack has them as public images."""

    folder: Path

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, place: int) -> NamedImage:
        image = _sample(self.folder, place)
        return replace(image, pixels=image.pixels.copy()) if isinstance(image.pixels, Image.Image) else image


@lru_cache(maxsize=len(SAMPLES))
def _sample(folder: Path, place: int) -> NamedImage:
    name, file, left, top, side = SAMPLES[place]
    whole = read_image(folder / file, name=f"samples/{name}")
    if not isinstance(whole.pixels, Image.Image):
        return whole
    return read_image(whole.pixels.crop((left, top, left + side, top + side)), name=whole.name)


def files(paths: Sequence[Path]) -> Data:
    """Open files, in the order given; of a volume, its slices, or the one that `volume.nii.gz#12` names."""
    if not paths:
        raise PrivlabError("No image given: expected a file, a folder, 'samples', 'torchvision:NAME' or 'hf:NAME'.")
    for path in paths:
        if path.is_dir():
            raise PrivlabError(f"'{path}' is a folder: give one folder alone, or several files.")
        if not path.exists() and _named_slice(path) is None:
            raise PrivlabError(
                f"No file or folder '{path}'. Give samples, a folder, files, torchvision:NAME or hf:NAME."
            )
    items, names, _ = _slices(paths, [path.as_posix() for path in paths])
    description = f"file {paths[0].as_posix()}" if len(paths) == 1 else f"{len(paths)} files"
    if len(items) > len(paths):
        description = f"{description}: {len(items)} images"
    return Data(description, items, names, range(len(items)))


def _named_slice(path: Path) -> Slice | None:
    """Return the slice that a path such as `volume.nii.gz#12` names; None where it names none."""
    before, sign, index = path.as_posix().rpartition("#")
    return Slice(Path(before), int(index)) if sign and index.isdecimal() and Path(before).is_file() else None


def _slices(
    paths: Sequence[Path], names: Sequence[str]
) -> tuple[tuple[Path | Slice | Exception, ...], tuple[str, ...], list[int]]:
    """Return the images of files, their names, and the position of the file of each one.

    Raises:
        PrivlabError: if a slice is named that a file lacks.
    """
    items: list[Path | Slice | Exception] = []
    named: list[str] = []
    files: list[int] = []
    for position, (path, name) in enumerate(zip(paths, names, strict=True)):
        chosen = None if path.exists() else _named_slice(path)
        try:
            file = path if chosen is None else chosen.path
            count = None if file.suffix.lower() in _STILL else count_slices(file)
        except Exception as error:  # a damaged volume must not end the run
            items.append(error)
            named.append(name)
            files.append(position)
            continue
        if chosen is not None:
            if chosen.index >= (count or 0):
                raise PrivlabError(f"'{chosen.path}' has {count or 1} images. Found '{name}'; the first is #0.")
            found, labels = [chosen], [name]
        elif count is None:
            found, labels = [path], [name]
        else:
            found = [Slice(path, index) for index in range(count)]
            labels = [f"{name}#{index}" for index in range(count)]
        items += found
        named += labels
        files += [position] * len(found)
    return tuple(items), tuple(named), files


def folder(root: Path, split: str | None = None, class_to_index: Mapping[str, int] | None = None) -> Data:
    """Open a folder, flat or with one sub-folder per class; the names of the images are their paths below it.

    Args:
        root: the folder.
        split: the sub-folder with the images; None if it is `root` itself.
        class_to_index: as `open_images` takes it.

    Raises:
        PrivlabError: if the folder or the split is not there or cannot be listed, holds no image, or holds splits of
            which none is chosen.

    Warns:
        PrivlabWarning: if a folder next to the class folders holds no image: it is not a class, and takes no label.
    """
    base = root if split is None else root / split
    if not base.is_dir():
        raise PrivlabError(f"No folder '{base}' for split '{split}'. Found: {', '.join(_folders(root)) or 'none'}.")
    paths = files_below(base, SUFFIXES)
    if not paths:
        raise PrivlabError(f"No image in the folder '{base}'. Expected files with {', '.join(sorted(SUFFIXES))}.")
    tops = [path.relative_to(base).parts[0] for path in paths]
    folders = () if any(path.parent == base for path in paths) else tuple(sorted(set(tops)))
    if split is None and folders and SPLITS.issuperset(folders):
        raise PrivlabError(f"'{base}' holds splits, not classes: choose split from {', '.join(folders)}.")
    indices, class_names, rule = class_indices(folders, class_to_index) if folders else ({}, None, "no labels")
    if class_names == folders and (empty := [name for name in _folders(base) if name not in folders]):
        warn(
            f"{first(empty, 3)} in '{base}' holds no image and is not counted as a class: the labels 0 to "
            f"{len(folders) - 1} are those of {first(folders, 3)}. If it is a class, give --labels.",
        )
    items, names, files_of = _slices(paths, [path.relative_to(root).as_posix() for path in paths])
    tops = [tops[position] for position in files_of]
    description = f"folder {base}: {len(items)} images, {rule}"
    turns = tops if folders else ()
    data = Data(description, items, names, range(len(items)), class_names, turns=turns)
    return data.label([indices.get(top) for top in tops], "folder")


def _folders(base: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in base.iterdir() if path.is_dir() and not _is_of_a_tool(path.name)))


def _is_of_a_tool(name: str) -> bool:
    """Return whether a file or folder is not the user's: hidden, or made next to the data by a system or a tool."""
    return name.startswith(".") or name in _OF_TOOLS


def files_below(base: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the files below a folder whose names end so, sorted; those of systems and tools are left out.

    Args:
        base: the folder.
        suffixes: such as ".png".

    Raises:
        PrivlabError: if a folder cannot be listed.
    """
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
        found += [path for path in paths if path.name.lower().endswith(tuple(suffixes))]
    return sorted(found)


def _refuse_folder(error: OSError) -> NoReturn:
    raise PrivlabError(f"Cannot list the folder '{error.filename}': {error.strerror}.")
