"""The rows of the standing table, and those of the package's own entries, which are kept in a file.

`list` reads the file alone, without torch. It holds for the result files whose hash it names: where one of them, or
the file itself, was edited, every entry is concluded again.
"""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privlab.benchmark.form import Judged
    from privlab.benchmark.results import Result

PACKAGE = Path(str(files("privlab.experiments") / "benchmark"))
"""The folder of the entries that come with privlab: cards/*.toml and results/*.json, packed in results.tar.xz."""

CONCLUDED = PACKAGE / "concluded" / "standing.json"
"""The file with the rows of these entries, which `.ci/conclude_entries.py` writes."""

IDENTITY = PACKAGE / "concluded" / "identity.json"
"""The file that says how often the photographs of these entries are recognised, which the same script writes."""


@dataclass(frozen=True)
class Recognised:
    """How often an adversary names the photograph of an entry among candidates, by the best of what was compared.

    `rate` is the rank-1 rate among `among` candidates, and `low` and `high` its 95 % interval of Clopper and Pearson,
    over `images` photographs; chance is 1 / `among`, and `control` the highest rate of a control, over all that was
    compared. `by` says what was compared, and `commands` measure it again. `compared` names all that was looked at,
    "pictures" and "releases": what was not compared may say more.
    """

    rate: float
    low: float
    high: float
    images: int
    among: int
    control: float
    by: str
    commands: tuple[str, ...]
    compared: tuple[str, ...]

    @property
    def above_control(self) -> bool:
        """Return whether the interval lies above every control, and above chance: the rate is the best of several."""
        return self.low > max(self.control, 1 / self.among)


@dataclass(frozen=True)
class Standing:
    """A row of the table. `rank` is None for an entry without one; `unreliable` holds the reasons.

    `score` is that of `best_attack`, the best single one, and decides the rank. `worst_case` takes the leakiest attack
    and draw of each photograph. Both are in the case that leaks most, each with its interval.

    `identity` says how often the photograph is named among candidates, for entries of this package where that was
    measured. `listed_half` and `hidden_half` are the worst cases of the track's attacks on the photographs that it
    lists and on the hidden ones, where both were attacked; the score is that of the listed ones. `judged` is what the
    rows of all attacks say; `result` is the entry's, and `entered` are those of the attacks that were added.
    """

    track: str
    name: str
    paper: str
    victim: str
    known_by: tuple[str, ...]
    score: float | None
    score_interval: tuple[float | None, float | None]
    best_attack: str
    worst_case: float | None
    interval: tuple[float | None, float | None]
    ours: float | None
    external: float | None
    external_by: tuple[str, ...]
    external_photographs: int
    reported: str
    verdict: str
    why: str
    unreliable: tuple[str, ...]
    utility: str
    measured_utility: float | None
    epsilon: str
    secret_bits: float | None
    photographs: int
    draws: int
    signer: str | None
    judged: "Judged" = field(repr=False, compare=False)
    photograph_parts: tuple[str, ...] = ()
    identity: Recognised | None = None
    listed_half: float | None = None
    hidden_half: float | None = None
    rank: int | None = None
    dominated: bool = False
    result: "Result | None" = field(default=None, repr=False, compare=False)
    entered: "Sequence[Result]" = field(default=(), repr=False, compare=False)

    @property
    def concluded(self) -> str:
        """Return the verdict, and where it holds in how many cases the photograph is recognised among candidates."""
        if self.verdict != "holds" or self.identity is None or not self.identity.above_control:
            return self.verdict
        return f"{self.verdict}, the photograph is recognised in {100 * self.identity.rate:.0f} %"

    @property
    def best_known_by(self) -> str | None:
        """Return the attack that knows the defense and leaks most of the most photographs; None without any."""
        return max(self.known_by, key=lambda name: self.judged["by"].get(name, 0), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        row = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return row | {"identity": None if self.identity is None else asdict(self.identity)}


def with_tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass, with tuples where JSON has lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def result_texts() -> dict[str, bytes]:
    """Return the contents of this package's result files, by name."""
    archive = PACKAGE / "results.tar.xz"
    if not archive.exists():  # a clone, or an editable install
        return {path.name: path.read_bytes() for path in sorted((PACKAGE / "results").glob("*.json"))}
    with tarfile.open(archive) as packed:
        members = [(each.name, packed.extractfile(each)) for each in packed]
        return {name: content.read() for name, content in members if content is not None}


def evidence() -> str:
    """Return the SHA-256 of what the rows of this package rest on: results, identities, and the tracks' files."""
    digest = hashlib.sha256()
    texts = [*result_texts().values()]
    tracks = Path(str(files("privlab.benchmark") / "tracks"))
    texts += [path.read_bytes() for path in (IDENTITY, *sorted(tracks.glob("*.*")))]
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    return digest.hexdigest()


@cache
def concluded_rows() -> tuple[Standing, ...]:
    """Return the kept rows of this package's entries; none if any file was edited."""
    try:
        kept = json.loads(CONCLUDED.read_text("utf-8"))
        if kept["sha256"] != hash_of(kept["rows"]) or kept["evidence"] != evidence():
            return ()
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    rows: list[Standing] = []
    for row, judged in kept["rows"]:
        identity = row["identity"] and Recognised(**with_tuples(row["identity"]))
        rows.append(Standing(**with_tuples(row) | {"identity": identity, "judged": judged}))
    return tuple(rows)


def hash_of(rows: Sequence[Any]) -> str:
    """Return the SHA-256 of kept rows, by which an edited file is known."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


@cache
def recognised_of_package() -> Mapping[tuple[str, str], Recognised]:
    """Return how often the photographs of this package's entries are recognised, by track and name."""
    rows = json.loads(IDENTITY.read_text("utf-8"))
    return {(row.pop("track"), row.pop("name")): Recognised(**with_tuples(row)) for row in rows}


def listed(folders: Sequence[Path] = ()) -> list[Standing]:
    """Return the rows of the table; without folders they are read from the file of this package, if it holds.

    Folders and errors are those of `entries` and `standings`.
    """
    if not folders and (kept := concluded_rows()):
        return [*kept]
    from privlab.benchmark.results import entries  # these import torch
    from privlab.benchmark.rule import standings

    return standings(entries(folders))
