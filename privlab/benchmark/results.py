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
from typing import TYPE_CHECKING, Any

import pandas as pd

from privlab.base import PrivlabError, first, read_text, warn, write_whole
from privlab.benchmark.cards import Card, parse_card, read_card
from privlab.benchmark.standing import PACKAGE, result_texts
from privlab.benchmark.tracks import TRACKS, VERSION, track

if TYPE_CHECKING:
    from privlab.benchmark.rule import Judged

FORMAT = 1
"""The version of the format of result files."""

_DECIMALS = 3
"""How many decimals of a score a result file keeps."""

_INFINITE = ("inf", "-inf")
"""How JSON has infinite scores."""

_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
"""How JSON is written."""

MOST_ROWS = 1_000_000
"""The most rows of a result that are read; the largest of the package has 10,432."""

MOST_COLUMNS = 100
"""The most columns of a result that are read."""

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("track", "versions", "judged", "rows", "signature", "pictures"), dict),
    **dict.fromkeys(("photographs", "admission"), list),
    "card": str,
    "plugin": (str, type(None)),
    "public_sha256": (str, type(None)),
    "draws": int,
    "utility": (int, float, type(None)),
    "seconds": (int, float),
}
"""The types of the fields of a result."""

_NEEDED = (
    *("format", "track", "created", "card", "plugin", "versions", "photographs", "admission", "judged"),
    *("rows", "signature"),
)


@dataclass(frozen=True, eq=False)
class Result:
    """A result file: its contents, and the path it was read from."""

    data: Mapping[str, Any]
    path: Path

    @cached_property
    def card(self) -> Card:
        """Return the card of the entry, read once."""
        return parse_card(self.data["card"], self.path)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Return the records, read once: not to be written to."""
        return from_rows(self.data["rows"])

    @property
    def judged(self) -> "Mapping[str, Judged]":
        """Return what the file concludes, by the entries of the defenses: its own, or those that its attack ran on."""
        judged = self.data["judged"]
        return judged if self.card.kind == "attack" else {self.card.name: judged}

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
        return signature.get("public_key") if "ed25519" in signature else None


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
    _check_rows(given)
    found: dict[str, pd.Series] = {}
    for name, column in given["columns"].items():
        values = column.get("each", [])
        if "all" in column:
            values = [column["all"]] * given["count"]
        elif "codes" in column:
            values = [column["of"][code] for code in column["codes"]]
        if len(values) != given["count"]:
            raise PrivlabError(f"The column {name} of a result has {len(values)} of {given['count']} values.")
        if "each" in column or isinstance(column.get("all"), int | float) or column.get("all") in _INFINITE:
            found[name] = pd.Series([math.nan if value is None else float(value) for value in values])
        else:
            texts = pd.Series(values)
            found[name] = texts.astype(object).where(texts.notna(), None)
    return pd.DataFrame(found)


def _check_rows(given: Any) -> None:  # noqa: ANN401
    """Raise PrivlabError if rows do not have the form that `to_rows` writes, before memory is taken for them."""
    if not isinstance(given, dict) or not isinstance(given.get("columns"), dict):
        raise PrivlabError("The rows of a result must be a table with count and columns.")
    count = given.get("count")
    if type(count) is not int or not 0 <= count <= MOST_ROWS:
        raise PrivlabError(f"The rows of a result must have a count from 0 to {MOST_ROWS:,}. Found {str(count)[:40]}.")
    if len(given["columns"]) > MOST_COLUMNS:
        raise PrivlabError(f"A result has at most {MOST_COLUMNS} columns. Found {len(given['columns'])}.")
    for name, column in given["columns"].items():
        if not _is_column(column):
            raise PrivlabError(f"The column {name[:60]} of a result is not all, each, or of with codes.")


def _is_column(column: Any) -> bool:  # noqa: ANN401
    if not isinstance(column, dict):
        return False
    if column.keys() == {"all"}:
        return _is_plain(column["all"])
    if column.keys() == {"each"}:
        return isinstance(column["each"], list) and all(
            value is None or value in _INFINITE or (isinstance(value, int | float)) for value in column["each"]
        )
    if column.keys() != {"of", "codes"} or not all(isinstance(values, list) for values in column.values()):
        return False
    kinds = range(len(column["of"]))
    return all(map(_is_plain, column["of"])) and all(type(code) is int and code in kinds for code in column["codes"])


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


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
        private: Any = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise PrivlabError(f"Cannot read the key '{key}': {' '.join(str(error).split())[:120]}.") from None
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
    """Read a result file and check its form, version and signature.

    Raises:
        PrivlabError: if it cannot be read, lacks a field, has another version, or was edited by hand.
    """
    return parse_result(read_text(path, "result"), path)


def parse_result(text: str, path: Path) -> Result:
    """Return the result that the text of a file holds, checked as `read_result` does."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PrivlabError(f"'{path}' is not valid JSON: {error}.") from None
    data = data if isinstance(data, dict) else {}
    _check_result(data, path)
    return Result(data, path)


def _check_result(data: Mapping[str, Any], path: Path) -> None:
    """Check the form, the version, the track and the signature of the contents of a file."""
    if lacking := [name for name in _NEEDED if name not in data]:
        raise PrivlabError(f"{path} lacks {lacking[0]}: a result file has {', '.join(_NEEDED)}.")
    for field, types in _TYPES.items():
        if field in data and not isinstance(data[field], types):
            raise PrivlabError(f"{path}: {field} has the wrong type. Found {type(data[field]).__name__}.")
    _check_rows(data["rows"])
    name, version, sha256 = (data["track"].get(key) for key in ("name", "version", "sha256"))
    if data["format"] != FORMAT or version != VERSION or name not in TRACKS:
        raise PrivlabError(
            f"{path} has format {data['format']} and track {name} of '{version}'. This package reads format {FORMAT} "
            f"of '{VERSION}': submit it again."
        )
    text, signature = canonical(data), data["signature"]
    if (digest := hashlib.sha256(text).hexdigest()) != signature.get("sha256"):
        raise PrivlabError(
            f"{path} was edited after it was written: its contents have SHA-256 {digest[:12]}…, and its signature says "
            f"{str(signature.get('sha256'))[:12]}…. Submit the entry again."
        )
    if "ed25519" in signature and not _verifies(signature, text):
        raise PrivlabError(f"{path}: the ed25519 signature does not match its public key. Submit the entry again.")
    if (wanted := track(name).sha256) != sha256:
        raise PrivlabError(
            f"{path} was measured on another track '{name}' (SHA-256 {str(sha256)[:12]}…; this package's has "
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
    """Return the results of this package and of other folders, checked.

    A result from elsewhere replaces the package's own of the same entry, with a warning.

    Args:
        folders: each with *.json, or with results/*.json.

    Raises:
        PrivlabError: if a folder does not exist, a result was edited or has another version, or an entry has two.
    """
    found: dict[tuple[str, str], Result] = {}
    for results in (of_package(), *map(entries_of, folders)):
        for result in results:
            before = found.get(key := (result.card.track, result.card.name))
            if before is not None and before.path.resolve() != result.path.resolve():
                _check_replaces(before, result)
            found[key] = result
    return list(found.values())


@cache
def of_package() -> tuple[Result, ...]:
    """Return the results of this package, which are read and checked once in a process."""
    return tuple(parse_result(text.decode(), PACKAGE / "results" / name) for name, text in result_texts().items())


def _check_replaces(before: Result, result: Result) -> None:
    """Warn if a result replaces the package's own; two from elsewhere are an error."""
    entry = f"'{result.card.name}' of the track '{result.card.track}'"
    if not before.path.is_relative_to(PACKAGE):
        raise PrivlabError(
            f"'{before.path}' and '{result.path}' are results of the same entry, {entry}. Keep one of them."
        )
    warn(
        f"{result.path} replaces the package's own result of {entry}. Give the entry another name to keep both.",
    )


def entries_of(folder: Path) -> Iterator[Result]:
    """Yield the results of one folder, in the order of their names."""
    if not folder.is_dir():
        raise PrivlabError(f"No folder at '{folder}'. Give one with result files.")
    for path in sorted({*folder.glob("*.json"), *folder.glob("results/*.json")}):
        yield read_result(path)


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
