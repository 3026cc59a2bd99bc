"""The form of a result file, which is checked before anything of it is used."""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from privlab.base import PrivlabError

MOST_ROWS = 2**16
"""The most rows of a result that are read: one value may stand for all of a column. The package's most are 10,432."""

MOST_COLUMNS = 100
"""The most columns of a result that are read."""

Infinite = Literal["inf", "-inf"]
"""How JSON has infinite scores."""


class Worst(TypedDict):
    """The mean over `images` of the worst case of each, with its interval; None is not known."""

    mean: float | None
    low: float | None
    high: float | None
    images: int


class Judged(TypedDict):
    """What the records of an entry say, as the field `judged` of a result file has it.

    `worst` is the worst case of each case by the track's first metric, and `leakiest` the case that leaks most, of
    which the score is. `known_by` are the attacks that ran there and know every part of the defense, `by` the attacks
    behind its worst case with the photographs of each, `median` and `worst_image` the hashes of two photographs there.
    `knows` says of an attack that was run on a defense whether it knows it.
    """

    known_by: list[str]
    worst: dict[str, Worst]
    leakiest: str
    by: dict[str, int]
    verdict: str
    why: str
    flags: list[str]
    images: int
    median: str
    worst_image: str
    knows: NotRequired[bool]


class Picture(TypedDict):
    """A photograph and what leaks most of it, both as data URIs, with the row that they show."""

    private: str
    made: str
    image: str
    attack: str
    geometry: str
    case: NotRequired[str]
    draw: NotRequired[int]
    score: Annotated[str, msgspec.Meta(pattern=r"^(-?[0-9]{1,20}(\.[0-9]{1,20})?|-?inf|nan)$")]


class _Column(TypedDict, total=False):
    """A column of rows: one value for all, a number for each, or codes of the values that occur."""

    all: str | float | None
    each: list[float | Infinite | None]
    of: list[str | float | None]
    codes: list[Annotated[int, msgspec.Meta(ge=0)]]


class Rows(TypedDict):
    """The rows of a result, by columns."""

    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)]
    columns: Annotated[dict[str, _Column], msgspec.Meta(max_length=MOST_COLUMNS)]


class _Track(TypedDict):
    name: str
    version: str
    sha256: str


class _Check(TypedDict):
    name: str
    passed: bool
    text: str


class _Signature(TypedDict):
    sha256: str
    public_key: NotRequired[str]
    ed25519: NotRequired[str]


class Contents(TypedDict):
    """A result file. `judged` is a `Judged`, for an attack one for each entry, and so are `pictures`."""

    format: int
    track: _Track
    created: int
    card: str
    plugin: str | None
    versions: dict[str, str | None]
    photographs: list[Literal["bundled", "public", "hidden"]]
    admission: list[_Check]
    judged: dict[str, Any]
    rows: Rows
    signature: _Signature
    pictures: NotRequired[dict[str, dict[str, Any]]]
    public_sha256: NotRequired[str | None]
    draws: NotRequired[int]
    utility: NotRequired[float | None]
    seconds: NotRequired[float]
    refused: NotRequired[list[str]]


def check_form(value: object, form: Any, where: Path) -> Any:  # noqa: ANN401
    """Return a value from JSON if it has a form.

    Args:
        value: what JSON holds.
        form: the type that it must have.
        where: the file, for the error.

    Raises:
        PrivlabError: if a field is missing or has another type; the message names the field.
    """
    try:
        return msgspec.convert(value, form)
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: half a character
        raise PrivlabError(f"'{where}' does not have the form of a result: {error}.") from None
