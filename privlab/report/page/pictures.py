"""The images that the page holds: thumbnails of all, and as many in full size as a budget allows."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from PIL import Image

from privlab.images import data_uri
from privlab.report.page.data import Scores
from privlab.report.tables import Results
from privlab.stores import Place, pngs

FULL_BUDGET, SMALL_BUDGET = 40_000_000, 24_000_000
"""The most characters of a page that images in full size, and thumbnails, may take. The thumbnail of a private image is
always kept, whatever the budget."""

_THUMBNAIL_SIDE = 112  # the longer side of a thumbnail, in pixels
_SMALL_QUALITY, _FULL_QUALITY = 60, 80


@dataclass(frozen=True, eq=False)
class Album:
    """The private image, the fed one and the reconstructions of one image, as data URIs; equal ones are held once.

    `of` gives the place of "CASE/WHAT" in both lists. `full` is None where only the thumbnail is held, and empty where
    the thumbnail is the image itself, unchanged. `unread` is the number of files that could not be read as images.
    """

    of: Mapping[str, int]
    small: Sequence[str]
    full: Sequence[str | None]
    unread: int = 0

    @property
    def whole(self) -> bool:
        """Return whether all images are held in full size."""
        return None not in self.full


def order_of(scores: Sequence[Scores], metric: str, images: int) -> list[int]:
    """Return 0 to `images` − 1, those first that have the least, the median or the greatest score of an attack.

    Args:
        scores: the rows of the table, with the scores of each image; those of controls are skipped.
        metric: the one that scores are taken of.
        images: the number of all images; their numbers are 0 to `images` − 1.
    """
    extremes = []
    for one in scores:
        if one.row.kind != "control":
            found = one.values[metric].dropna().sort_values(kind="stable").index
            extremes += [int(found[i]) for i in (0, len(found) // 2, -1) if len(found)]
    return list(dict.fromkeys([*extremes, *range(images)]))


def albums(results: Results, hashes: Sequence[str], scores: Sequence[Scores], order: Iterable[int]) -> dict[int, Album]:
    """Return the album of each image that has a file, by the number of the image.

    An album holds the private image, the fed image and the reconstructions: in full size until `FULL_BUDGET` is spent,
    as thumbnails until `SMALL_BUDGET` is spent, and after that only the thumbnail of the private image. The budgets are
    spent in the `order` of the numbers of the images.

    Args:
        results: the cases, and the directory in which image files are looked for.
        hashes: those of the images, by their numbers.
        scores: the rows of the table; they say which attacks ran on which case.
        order: the numbers of the images, in the order in which the budgets are spent.
    """
    wanted = {case: ["private", "fed"] for case in range(len(results.cases))}
    for one in scores:
        if one.row.kind == "attack" and one.row.attack and one.row.attack not in wanted[one.row.case]:
            wanted[one.row.case].append(one.row.attack)

    def read(number: int, *, small: bool, full: bool) -> Album:
        return _album(_places(results, hashes[number], wanted, private=not small), full=full)

    found: dict[int, Album] = {}
    left_small, left_full = SMALL_BUDGET, FULL_BUDGET
    numbers, workers = iter(order), min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(islice(numbers, 2 * workers)):
            small = left_small > 0
            made = pool.map(partial(read, small=small, full=left_full > 0), batch)
            for number, album in zip(batch, made, strict=True):
                if (spent := sum(len(one or "") for one in album.full)) > left_full:
                    album, left_full = replace(album, full=[one and None for one in album.full]), 0
                else:
                    left_full -= spent
                if small and (spent := sum(map(len, album.small))) > left_small:
                    album, left_small = read(number, small=False, full=False), 0
                elif small:
                    left_small -= spent
                if album.of or album.unread:
                    found[number] = album
    return found


def _places(
    results: Results, sha: str, wanted: Mapping[int, Sequence[str]], *, private: bool
) -> dict[Path, dict[str, Place]]:
    """Return where the files of an image lie, grouped by file, since a strip holds several images."""
    found: dict[Path, dict[str, Place]] = {}
    for case, whats in wanted.items() if sha else ():
        for what in whats[:1] if private else whats:
            if place := results.picture(case, sha, what):
                found.setdefault(place.file, {})[f"{case}/{what}"] = place
    return found


def _album(places: Mapping[Path, Mapping[str, Place]], *, full: bool) -> Album:
    of: dict[str, int] = {}
    small: list[str] = []
    large: list[str | None] = []
    known: dict[bytes, int] = {}
    unread = 0
    for of_file in places.values():
        try:
            for what, data in zip(of_file, pngs([*of_file.values()]), strict=True):
                if data not in known:
                    pair = _encode(data, full=full)
                    known[data] = len(small)
                    small.append(pair[0])
                    large.append(pair[1])
                of[what] = known[data]
        except (OSError, ValueError, SyntaxError):  # as Pillow says that a file is torn
            unread += 1
    return Album(of, small, large, unread)


def _encode(data: bytes, *, full: bool) -> tuple[str, str | None]:
    """Return the thumbnail and, if it is wanted, the image in full size; a small image is its own thumbnail."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as opened:
        if max(opened.size) <= _THUMBNAIL_SIDE:
            opened.load()
            return data_uri("png", data), ""
        picture = opened.convert("RGB")
    large = _jpeg(picture, _FULL_QUALITY) if full else None
    picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), reducing_gap=1.0)
    return _jpeg(picture, _SMALL_QUALITY), large


def _jpeg(picture: Image.Image, quality: int) -> str:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return data_uri("jpeg", file.getvalue())
