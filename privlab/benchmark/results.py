"""Result files: what was measured of an entry, in JSON, with the hash of its contents and, with a key, who signed it.

The SHA-256 shows that a file was edited by hand; whoever edits it can also write a new one. The signature (ed25519)
shows that the holder of a key wrote the file. That the numbers are right, neither shows: `verify` measures some again.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pyarrow as pa

from privlab.base import PrivlabError, first, one_line, parse_json, read_bytes, read_text, warn, write_whole
from privlab.benchmark.cards import Card, parse_card, read_card
from privlab.benchmark.form import Contents, Infinite, Judged, Picture, check_form
from privlab.benchmark.measure import KEPT, score_columns
from privlab.benchmark.standing import PACKAGE, result_texts
from privlab.benchmark.tracks import PARTS, TRACKS, VERSION, Track, photographs, track
from privlab.evaluation import COLUMNS, IDENTITY
from privlab.metrics import DECIBELS

FORMAT = 1
"""The version of the format of result files."""

_DECIMALS = 3
"""How many decimals of a score a result file keeps."""

_INFINITE = get_args(Infinite)

_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
"""How JSON is written."""

_COLUMNS = (
    *("case", *IDENTITY, "victim", "weights", "effort", "geometry", "image", "image_sha256", "status", "reason"),
    *("beyond_range", "batch", "batch_images", "schema"),
)
"""The columns that the rows of every result have; scores depend on the track."""

_OLDEST = 8
"""The oldest version of records whose rows are read: older ones state less, from which the rule concludes otherwise."""

_STATED = ("case", "attack", "geometry", "image_sha256", "status", "draw", "schema")
"""Those of them that no row leaves empty."""


@dataclass(frozen=True, eq=False)
class Result:
    """A result file: its contents, and the path it was read from."""

    data: Mapping[str, Any]
    path: Path

    @cached_property
    def card(self) -> Card:
        """Return the card of the entry, read once."""
        card, name = parse_card(self.data["card"], self.path), self.data["track"]["name"]
        if card.track != name:
            raise PrivlabError(f"'{self.path}' was measured on the track '{name}', and its card names '{card.track}'.")
        return card

    @property
    def entry(self) -> tuple[str, str]:
        """Return the track and the name of the card."""
        return self.card.track, self.card.name

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Return the records, read once: not to be written to."""
        rows, entry = from_rows(self.data["rows"]), ["entry"] if self.card.kind == "attack" else []
        if missing := [name for name in (*_COLUMNS, self.card.of.lead, *entry) if name not in rows]:
            raise PrivlabError(f"'{self.path}' has rows without {first(missing)}. Submit the entry again.")
        if other := [name for name in rows if name not in (*KEPT, *score_columns(self.card.of), *entry)]:
            raise PrivlabError(f"'{self.path}' has rows with {first(other)}, which no rows of its kind have.")
        if empty := [name for name in (*_STATED, *entry) if rows[name].isna().any()]:
            raise PrivlabError(f"'{self.path}' has rows that do not state {first(empty)}. Submit the entry again.")
        _check_scores(rows[rows.columns.intersection(score_columns(self.card.of))], rows, self.card.of, self.path)
        known = {sha256 for part in PARTS for sha256 in photographs(part)}
        if self.card.of.photographs and (others := {*rows.image_sha256} - known):
            raise PrivlabError(
                f"'{self.path}' has rows of {len(others)} photographs that are not the track's. Submit the entry again."
            )
        return rows

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Return the parts of which it has photographs; its field `photographs` may leave out some."""
        return tuple(part for part in PARTS if self.rows.image_sha256.isin(photographs(part)).any())

    @cached_property
    def judged(self) -> Mapping[str, Judged]:
        """Return what the file concludes, by the entries of the defenses: its own, or those that its attack ran on."""
        return check_form(self._by_entry("judged"), dict[str, Judged], self.path)

    @cached_property
    def pictures(self) -> Mapping[str, Mapping[str, Picture]]:
        """Return the pictures that the file shows, by the entries of the defenses, and by "median" and "worst"."""
        return check_form(self._by_entry("pictures"), dict[str, dict[str, Picture]], self.path)

    def _by_entry(self, field: str) -> dict[str, Any]:
        found = self.data.get(field, {})
        return found if self.card.kind == "attack" else {self.card.name: found}

    def rows_on(self, entry: str) -> pd.DataFrame:
        """Return the rows of a defense's entry."""
        return self.rows if "entry" not in self.rows else self.rows[self.rows.entry == entry].drop(columns="entry")

    def concluding(self, judged: Any) -> "Result":  # noqa: ANN401
        """Return the file with another conclusion, in the form that its field `judged` has."""
        return replace(self, data={**self.data, "judged": judged})

    @property
    def signer(self) -> str | None:
        """Return the public key of the signature, which was checked, in hex; None where there is none."""
        signature = self.data["signature"]
        return bytes.fromhex(signature["public_key"]).hex() if "ed25519" in signature else None  # one way to write it


def _check_scores(scores: pd.DataFrame, rows: pd.DataFrame, of: Track, path: Path) -> None:
    """Raise PrivlabError if a score is beyond its metric's range, or a row failed and has one, or says why it did not.

    Weights must not be random: a flag would take the rank of a defense whose track has trained ones.
    """
    for name, found in scores.astype("float64").items():
        low, high = (0.0, math.inf) if str(name).removesuffix("_mirrored") in DECIBELS else (-1.0, 1.0)
        if not (found.isna() | found.between(low, high)).all():
            raise PrivlabError(f"'{path}' has a {name} beyond [{low:g}, {high:g}]. Submit the entry again.")
    ok, scored = rows.status == "ok", scores.notna().any(axis="columns")
    wrong = (ok & (rows.reason.notna() | scores[of.lead].isna())) | (~ok & scored) | (rows.weights == "random")
    if (wrong | (rows.schema < _OLDEST)).any():
        raise PrivlabError(
            f"'{path}' has failed rows with a score, others with a reason or without a score, random weights, or rows "
            "of an old version. Submit it again."
        )


def to_rows(records: pd.DataFrame) -> dict[str, Any]:
    """Return records as JSON by columns: one value where all are equal, texts as codes, scores with three decimals."""
    columns: dict[str, Any] = {}
    for name in records.columns:
        values = [plain(value) for value in records[name].tolist()]
        kinds = list(dict.fromkeys(values))
        if len(kinds) == 1:
            columns[name] = {"all": kinds[0]}
        elif any(isinstance(value, str) and value not in _INFINITE for value in kinds):
            place = {value: i for i, value in enumerate(kinds)}
            columns[name] = {"of": kinds, "codes": [place[value] for value in values]}
        else:
            columns[name] = {"each": values}
    return {"count": len(records), "columns": columns}


def plain(value: Any) -> Any:  # noqa: ANN401
    """Return a value as JSON has it: NaN is null, infinity a text, and other reals have three decimals."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float):
        return ("inf" if value > 0 else "-inf") if math.isinf(value) else round(value, _DECIMALS)
    return value


def from_rows(given: Mapping[str, Any]) -> pd.DataFrame:
    """Return the records that `to_rows` wrote."""
    found: dict[str, pd.Series] = {}
    texts = {"case", "entry", *(each.name for each in COLUMNS if each.type == pa.string())}
    for name, column in given["columns"].items():
        _check_column(name, column, given["count"])
        values = column.get("each", [])
        if "all" in column:
            values = [column["all"]] * given["count"]
        elif "codes" in column:
            values = [column["of"][code] for code in column["codes"]]
        is_text = "each" not in column and isinstance(column.get("all", ""), str | None)
        is_text = is_text and column.get("all") not in _INFINITE
        if set(values) != {None} and is_text != (name in texts):
            raise PrivlabError(f"The column {name!r} of a result holds values of another type.")
        if not is_text:
            found[name] = pd.Series([math.nan if value is None else float(value) for value in values])
        else:
            stated = pd.Series(values)
            found[name] = stated.astype(object).where(stated.notna(), None)
    return pd.DataFrame(found)


def _check_column(name: str, column: Mapping[str, Any], count: int) -> None:
    """Raise PrivlabError if a column, whose types `Contents` states, is not one of three kinds with `count` values."""
    kind = {*column}
    is_coded = kind == {"of", "codes"} and max(column["codes"], default=-1) < len(column["of"])
    if not is_coded and kind not in ({"all"}, {"each"}):
        raise PrivlabError(f"The column {name[:60]!r} of a result is not all, each, or of with codes.")
    values = column.get("codes", column.get("each"))
    if values is not None and len(values) != count:
        raise PrivlabError(f"The column {name[:60]!r} of a result has {len(values)} of {count} values.")


def canonical(data: Mapping[str, Any]) -> bytes:
    """Return what is hashed and signed: the contents without the signature, as JSON with sorted keys and no spaces."""
    signed = {name: value for name, value in data.items() if name != "signature"}
    return json.dumps(signed, sort_keys=True, **_COMPACT).encode()


def write_result(data: Mapping[str, Any], path: Path, key: Path | None = None) -> Result:
    """Write a result file, hashed, and signed where a key is given.

    Args:
        data: the contents, without a signature.
        path: the file to write.
        key: an ed25519 private key in PEM, as `openssl genpkey -algorithm ed25519` writes it.
    """
    text = canonical(data)
    signature = {"sha256": hashlib.sha256(text).hexdigest()} | ({} if key is None else _signed(text, key))
    whole = {**data, "signature": signature}
    lines = ",\n".join(f"{json.dumps(name)}:{json.dumps(value, **_COMPACT)}" for name, value in whole.items())
    write_whole(path, lambda draft: draft.write_text(f"{{\n{lines}\n}}\n", "utf-8"))
    return Result(whole, path)


def _signed(text: bytes, key: Path) -> dict[str, str]:
    keys, serialization = _cryptography()
    try:
        private: Any = serialization.load_pem_private_key(read_bytes(key, "key"), password=None)
    except (ValueError, TypeError) as error:
        raise PrivlabError(f"Cannot read the key '{key}': {one_line(error)}.") from None
    if not isinstance(private, keys.Ed25519PrivateKey):
        raise PrivlabError(f"'{key}' is not an ed25519 key. Make one: openssl genpkey -algorithm ed25519 -out {key}.")
    return {"public_key": private.public_key().public_bytes_raw().hex(), "ed25519": private.sign(text).hex()}


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise PrivlabError("Signing with a key needs the package cryptography: pip install 'privlab[split]'.") from None
    return ed25519, serialization


def read_result(path: Path) -> Result:
    """Read a result file; raise PrivlabError if it lacks a field, has another version, or was edited by hand."""
    return parse_result(read_text(path, "result"), path)


def parse_result(text: str, path: Path) -> Result:
    """Return the result that the text of a file holds, checked as `read_result` does."""
    data = parse_json(text, f"'{path}'")
    check_form(data, Contents, path)
    _check_result(data, path)
    return Result(data, path)


def _check_result(data: Mapping[str, Any], path: Path) -> None:
    """Check the version, the track, the signature and the columns of the contents of a file."""
    name, version, sha256 = (data["track"][key] for key in ("name", "version", "sha256"))
    if data["format"] != FORMAT or version != VERSION or name not in TRACKS:
        raise PrivlabError(
            f"{path} has format {data['format']} and track {name} of '{version}'. This package reads format {FORMAT} "
            f"of '{VERSION}': submit it again."
        )
    for column_name, column in data["rows"]["columns"].items():
        _check_column(column_name, column, data["rows"]["count"])
    try:
        text, signature = canonical(data), data["signature"]
    except ValueError as error:  # NaN, infinity, or half a character
        raise PrivlabError(f"'{path}' holds what no result does: {error}.") from None
    if (digest := hashlib.sha256(text).hexdigest()) != signature["sha256"]:
        raise PrivlabError(
            f"{path} was edited after it was written: its contents have SHA-256 {digest[:12]}…, and its signature says "
            f"{signature['sha256'][:12]}…. Submit the entry again."
        )
    if "ed25519" in signature and not _verifies(signature, text):
        raise PrivlabError(f"{path}: the ed25519 signature does not match its public key. Submit the entry again.")
    if (wanted := track(name).sha256) != sha256:
        raise PrivlabError(
            f"{path} was measured on another track '{name}' (SHA-256 {sha256[:12]}…; this package's has "
            f"{wanted[:12]}…): submit it again."
        )


def _verifies(signature: Mapping[str, str], text: bytes) -> bool:
    keys, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        public = keys.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        public.verify(bytes.fromhex(signature["ed25519"]), text)
    except (InvalidSignature, ValueError, KeyError):
        return False
    return True


def entries(folders: Sequence[Path] = ()) -> list[Result]:
    """Return the results of this package and of other folders, checked; what cannot be read is left out with a warning.

    A result from elsewhere replaces the package's own of the same entry, with a warning.

    Raises:
        PrivlabError: if a folder does not exist, or an entry has two results from elsewhere.
    """
    found: dict[tuple[str, str], Result] = {}
    for results in (of_package(), *map(entries_of, folders)):
        for result in results:
            if (before := found.get(result.entry)) and before.path.resolve() != result.path.resolve():
                _check_replaces(before, result)
            found[result.entry] = result
    return list(found.values())


@cache
def of_package() -> tuple[Result, ...]:
    """Return the results of this package, which are read and checked once in a process."""
    return tuple(parse_result(text.decode(), PACKAGE / "results" / name) for name, text in result_texts().items())


def _check_replaces(before: Result, result: Result) -> None:
    """Warn if a result replaces the package's own of its kind; two others of one name are an error."""
    entry = f"'{result.card.name}' of the track '{result.card.track}'"
    replaces = before.path.is_relative_to(PACKAGE) and not result.path.is_relative_to(PACKAGE)
    if not replaces or before.card.kind != result.card.kind:
        raise PrivlabError(
            f"'{before.path}' and '{result.path}' are results of the same entry, {entry}. Keep one, or rename one."
        )
    warn(f"{result.path} replaces the package's own result of {entry}. Give the entry another name to keep both.")


def entries_of(folder: Path) -> Iterator[Result]:
    """Yield the results of one folder, in the order of their names; each file that cannot be read is left out."""
    if not folder.is_dir():
        raise PrivlabError(f"No folder at '{folder}'. Give one with result files.")
    for path in sorted({*folder.glob("*.json"), *folder.glob("results/*.json")}):
        try:
            result = read_result(path)
            _ = result.card, result.judged, result.pictures  # each is checked when it is first read
        except PrivlabError as error:
            warn_left_out(path, error)
        else:
            yield result


def warn_left_out(path: Path, error: PrivlabError) -> None:
    """Warn of a result that is left out, in one line with its path, which an error about its columns does not name."""
    warn(f"{error} It is left out." if str(path) in str(error) else f"'{path}': {error} It is left out.")


def defense_entries(track: str, names: Sequence[str] = ()) -> list[Card]:
    """Return the cards of this package's defenses of a track: those of these names, or all."""
    own = {card.name: card for card in _defenses() if card.track == track}
    for name in names:
        if name not in own:
            raise PrivlabError(f"The track '{track}' has no entry '{name}'. It has {first(sorted(own), 20)}.")
    return [own[name] for name in names or own]


@cache
def _defenses() -> tuple[Card, ...]:
    """Return the cards of this package's defenses, of all tracks, which are read once in a process."""
    cards = (read_card(path) for path in sorted((PACKAGE / "cards").glob("*.toml")))
    return tuple(card for card in cards if card.kind == "defense")
