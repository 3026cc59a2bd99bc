"""Data: images with names, labels and hashes, each read when it is asked for, wherever they come from."""

import pickle
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from privlab.base import PrivlabError, one_line
from privlab.images.decode import LabelOrigin, NamedImage, Target, file_hash, read_image
from privlab.images.targets import target_of

IMAGE_COLUMNS = ("image", "img", "jpeg", "jpg", "png", "bytes", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "fine_label")
"""The columns in which images and labels are looked for, in this order."""


@dataclass(frozen=True, eq=False)
class Data:
    """Images that are read one at a time, again in each iteration.

    Args:
        description: what the data are, in one line, for reports and errors.
        items: `items[place]` is an image (a path, bytes, one of Pillow's, an array), or an image and its label; an
            `IndexError` ends a `Spool`.
        naming: the name of the image at each place, or the text that comes before the place.
        places: the places of the images that are used, in their order.
        class_names: the name of each label; None where they are not known.
        bit_depth: as `read_image` takes it.
        container: path of the file that holds all images, where there is one.
        changes: what is applied to each image after it was read, in this order; no change reads the pixels.
        turns: a class for each image; a limit takes the first image of each class, then the second of each, and so on.
        stated: the labels that a user stated, each with the place where; they must be classes of the victim.
    """

    description: str
    items: Any = field(repr=False)
    naming: str | Sequence[str] = field(repr=False)
    places: Sequence[int] = field(repr=False)
    class_names: tuple[str, ...] | None = None
    bit_depth: int | None = None
    container: Path | None = field(default=None, repr=False)
    changes: tuple[Callable[[NamedImage], NamedImage], ...] = field(default=(), repr=False)
    turns: Sequence[object] = field(default=(), repr=False)
    stated: Sequence[tuple[str, Target]] = field(default=(), repr=False)

    @property
    def count(self) -> int | None:
        """Return the number of images, unreadable ones included; None for a stream that may end anywhere."""
        may_end = isinstance(self.items, Spool) and self.items.count is None and isinstance(self.places, range)
        return None if may_end else len(self.places)

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """Return the name of each image; None for a stream, which may end anywhere."""
        return None if isinstance(self.items, Spool) else tuple(map(self._name, self.places))

    @property
    def files(self) -> list[Path] | None:
        """Return the path of each image if all are whole files."""
        whole = isinstance(self.items, tuple) and all(isinstance(item, Path) for item in self.items)
        return [self.items[place] for place in self.places] if whole else None

    def choose(self, chosen: Sequence[int]) -> "Data":
        """Return the data of the images at some positions, in their order."""
        return replace(self, places=[self.places[position] for position in chosen], turns=())

    def by_turns(self) -> "Data":
        """Return the data with the first image of each class first, then the second of each, and so on."""
        met: Counter[object] = Counter()
        round_of: list[int] = []
        for name in self.turns:
            round_of.append(met[name])
            met[name] += 1
        return self.choose(sorted(range(len(round_of)), key=round_of.__getitem__)) if round_of else self

    def transform(self, change: Callable[[NamedImage], NamedImage]) -> "Data":
        """Return the data with `change` applied to each image; it changes no name, pixels or hash."""
        return replace(self, changes=(*self.changes, change))

    def label(self, targets: Sequence[Target], origin: LabelOrigin) -> "Data":
        """Return the data with the label of each image, in their order; an image without one keeps its own."""
        by_name = {self._name(place): target for place, target in zip(self.places, targets, strict=True)}

        def change(image: NamedImage) -> NamedImage:
            target = by_name[image.name]
            return image if target is None else image.labelled(target, origin)

        return self.transform(change)

    def without_pixels(self) -> Iterator[NamedImage]:
        """Yield each image without its pixels; whole files are hashed without being decoded."""
        if self.files is None:
            yield from (replace(image, pixels=None) for image in self)
            return
        for place, (name, path) in enumerate(zip(self.names or (), self.files, strict=True)):
            yield replace(self._changed(NamedImage(name, "", None, place=place)), sha256=file_hash(path))

    def __getitem__(self, position: int) -> NamedImage:
        place = self.places[position]
        image = _read(self.items, place, self._name(place), self.bit_depth)
        return self._changed(replace(image, place=position))

    def __iter__(self) -> Iterator[NamedImage]:
        for position in range(len(self.places)):
            try:
                image = self[position]
            except IndexError:
                if self.stated:
                    raise PrivlabError(
                        f"{self.description} ended after {position} images; labels were stated for {len(self.places)}."
                    ) from None
                return
            yield image
        if self.stated and isinstance(self.items, Spool) and isinstance(self.places, range):
            self._check_end()

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError(f"The length of {self.description} is unknown.")
        return self.count

    def _check_end(self) -> None:
        """Raise an error if a stream goes on after the images for which labels were stated."""
        try:
            self.items[len(self.places)]
        except IndexError:
            return
        raise PrivlabError(
            f"{self.description}: labels were stated for {len(self.places)} images, and more follow. Give a label for "
            "each image, or limit the images."
        )

    def _name(self, place: int) -> str:
        return f"{self.naming}{place}" if isinstance(self.naming, str) else self.naming[place]

    def _changed(self, image: NamedImage) -> NamedImage:
        for change in self.changes:
            image = change(image)
        return image


class Spool:
    """The items of a stream, each read once and kept in a temporary file: it then has a place, as in a list.

    Only the item that is asked for is in memory.

    Args:
        begin: begins the stream; it is called again after an error, and what was read is skipped.
        count: the number of items; None where it is not known.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], count: int | None = None) -> None:
        """Read nothing yet."""
        self.count, self._begin, self._rest, self._starts = count, begin, None, list[int]()
        self._file = tempfile.TemporaryFile(prefix="privlab-")  # noqa: SIM115
        self._lock = threading.Lock()
        weakref.finalize(self, self._file.close)

    def __getitem__(self, place: int) -> Any:  # noqa: ANN401
        with self._lock:
            while place >= len(self._starts):
                self._read_on()
            self._file.seek(self._starts[place])
            return pickle.load(self._file)

    def __len__(self) -> int:
        return sys.maxsize if self.count is None else self.count

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream, which other processes do not have")

    def _read_on(self) -> None:
        if self._rest is None:
            self._rest = islice(self._begin(), len(self._starts), None)
        try:
            item = pickle.dumps(next(self._rest))
        except StopIteration:
            raise IndexError("The stream has ended.") from None
        except Exception:
            self._rest = None
            raise
        start = self._file.seek(0, 2)
        try:
            self._file.write(item)
            self._file.flush()
        except OSError as error:
            raise PrivlabError(f"A stream of images is kept in {tempfile.gettempdir()}: {one_line(error)}.") from error
        self._starts.append(start)


def split_item(item: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the image and the label of an item: a pair, columns by name, or an image alone.

    Raises:
        PrivlabError: if no column holds an image.
    """
    if isinstance(item, Mapping):
        image = next((item[name] for name in IMAGE_COLUMNS if name in item), None)
        label = next((item[name] for name in LABEL_COLUMNS if name in item), None)
        if image is None:
            raise PrivlabError(f"an item needs a column {', '.join(IMAGE_COLUMNS)}; found {', '.join(map(str, item))}")
        return image, label
    if isinstance(item, tuple | list) and len(item) > 1:
        return item[0], item[1]
    return item, None


def _read(items: Any, place: int, name: str, bit_depth: int | None) -> NamedImage:  # noqa: ANN401
    """Return the image at a place; one that cannot be read has a problem, and does not end the run."""
    try:
        image, target = split_item(items[place])
    except Exception as error:  # each data set raises its own errors
        if isinstance(items, Spool):  # the stream has ended, or broke
            raise
        image, target = error, None
    read, known = read_image(image, name=name, bit_depth=bit_depth), target_of(target)
    return read if known is None else read.labelled(known, "dataset")
