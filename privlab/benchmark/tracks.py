"""Tracks: frozen files that fix the victims, photographs, attacks, metrics and draws of a comparison."""

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from privlab.base import check_name, parse_toml
from privlab.benchmark.standing import with_tuples

VERSION = "privlab/1"
"""The version of the tracks of this package. Whatever changes a number of theirs makes a new version."""

TRACKS = ("gradients", "updates", "local-training", "features", "weights", "dishonest-server")
"""The names of the tracks."""

BUNDLED = "bundled"
"""The part of the photographs that comes with privlab's dependencies; the files of the others are the user's."""

PARTS = (BUNDLED, "public", "hidden")
"""The parts of the photographs of all tracks that have some."""


@dataclass(frozen=True)
class TrackVictim:
    """A victim of a track: its name, the SHA-256 of its weights, and the side of its input in pixels."""

    name: str
    weights_sha256: str
    img_size: int


@dataclass(frozen=True)
class TrackCase:
    """What a client of a track releases: fields of `Case` by name; only the track `weights` has `base`."""

    name: str
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Track:
    """A track, as its file states it.

    `photographs` names the parts of the public half; `draws` is the number of draws of a random defense, of which the
    worst counts; `tolerance_db` is how far a score that is measured again may be from the first one. `least_kept` is
    the least that releases of an entry must be worth for a rank, and `honest` says which weights of a server are
    honest. `sha256` is that of the file and of the lists of photographs.
    """

    name: str
    version: str
    title: str
    release: str
    threat: str
    attacks: tuple[str, ...]
    metrics: tuple[str, ...]
    effort: str
    seed: int
    draws: int
    rounds: int
    tolerance_db: float
    photographs: tuple[str, ...]
    cases: tuple[TrackCase, ...]
    victims: tuple[TrackVictim, ...]
    sha256: str
    client_batch: int = 1
    least_kept: float = -1.0
    honest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lead(self) -> str:
        """Return the metric by which the track ranks: the first one."""
        return self.metrics[0]

    @property
    def unit(self) -> str:
        """Return the unit of a score, behind a space; none for a share of a key."""
        return " dB" if self.lead == "psnr" else ""

    def victim(self, name: str) -> TrackVictim:
        """Return a victim of the track by its name."""
        known = {each.name: each for each in self.victims}
        check_name(f"victim of the track '{self.name}'", name, known)
        return known[name]


@cache
def track(name: str) -> Track:
    """Return a track by its name; raise PrivlabError if there is no such track."""
    check_name("track", name, TRACKS)
    text = _text(f"{name}.toml")
    given = with_tuples(parse_toml(text, f"{name}.toml"))
    parts = given["photographs"]
    lists = [_text(f"{part}.csv") for part in (*parts, *(("hidden",) if parts else ()))]
    digest = hashlib.sha256("\0".join((text, *lists)).encode()).hexdigest()
    victims = tuple(TrackVictim(**each) for each in given.pop("victim"))
    cases = tuple(TrackCase(each.pop("name"), each) for each in given.pop("case"))
    return Track(**given, cases=cases, victims=victims, sha256=digest)


def _text(name: str) -> str:
    return (files("privlab.benchmark") / "tracks" / name).read_text("utf-8")


@cache
def photographs(part: str) -> Mapping[str, str]:
    """Return the name of each photograph of a part by the SHA-256 of its file.

    The parts are "bundled", "public" and "hidden". The hidden half has no names: there, the first digits of the hash
    stand in.
    """
    rows = csv.DictReader(_text(f"{part}.csv").splitlines())
    return {row["sha256"]: row.get("name") or f"hidden-{row['sha256'][:12]}" for row in rows}
