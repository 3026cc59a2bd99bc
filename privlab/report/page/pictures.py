"""The images that the page holds: thumbnails of all, and as many in full size as a budget allows."""

import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from privlab.images import data_uri
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


def albums(results: Results, images: pd.DataFrame, sets: Sequence[Mapping[str, Any]]) -> dict[int, Album]:
    """Return the album of each image that has a file, by the number of the image.

    An album holds the private image, the fed image and the reconstructions: in full size until `FULL_BUDGET` is spent,
    as thumbnails until `SMALL_BUDGET` is spent, and after that only the thumbnail of the private image. The images that
    have the least, the median or the greatest score of an attack come first.

    Args:
        results: the cases, and the directory in which image files are looked for.
        images: the images, as `images_of` returns them.
        sets: the rows of the table with the scores of each image, as `sets_of` returns them; they say which attacks ran
            on which case.
    """
    wanted = {case: ["private", "fed"] for case in range(len(results.cases))}
    extremes: list[int] = []
    for one in sets:
        if one["kind"] == "attack" and one["attack"] not in wanted[one["case"]]:
            wanted[one["case"]].append(one["attack"])
        ranked = pd.Series(one["values"][results.lead], one["at"]).dropna().sort_values(kind="stable").index
        if one["kind"] != "control" and len(ranked):
            extremes += [int(ranked[place]) for place in (0, len(ranked) // 2, -1)]
    order = list(dict.fromkeys([*extremes, *range(len(images))]))

    def read(number: int, *, small: bool, full: bool) -> Album:
        whats = wanted if small else {case: of_case[:1] for case, of_case in wanted.items()}
        return _album(_places(results, images.image_sha256.iloc[number], whats), full=full)

    found: dict[int, Album] = {}
    left_small, left_full = SMALL_BUDGET, FULL_BUDGET
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(order), 2 * workers):
            batch, small = order[start : start + 2 * workers], left_small > 0
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


def _places(results: Results, sha: str, whats: Mapping[int, Sequence[str]]) -> dict[Path, dict[str, Place]]:
    """Return where the images of cases lie, by "CASE/WHAT", grouped by file, since a strip holds several images."""
    found: dict[Path, dict[str, Place]] = {}
    for case, of_case in whats.items() if sha else ():
        for what in of_case:
            if place := results.picture(case, sha, what):
                found.setdefault(place.file, {})[f"{case}/{what}"] = place
    return found


def _album(places: Mapping[Path, Mapping[str, Place]], *, full: bool) -> Album:
    """Return the images at these places, equal ones once."""
    of: dict[str, int] = {}
    held: dict[bytes, tuple[str, str | None]] = {}
    unread = 0
    for of_file in places.values():
        try:
            for what, data in zip(of_file, pngs([*of_file.values()]), strict=True):
                if data not in held:
                    held[data] = _encode(data, full=full)
                of[what] = [*held].index(data)
        except (OSError, ValueError, SyntaxError):  # as Pillow says that a file is torn
            unread += 1
    return Album(of, [small for small, _ in held.values()], [large for _, large in held.values()], unread)


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
