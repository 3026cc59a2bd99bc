"""TOML files."""

import sys
from pathlib import Path
from typing import Any

from privlab.base.errors import PrivlabError
from privlab.base.files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  # of Python 3.10

__all__ = ["parse_toml", "read_toml"]


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Args:
        path: path of the file, in UTF-8.
        what: the word for it in the error, such as "card".

    Raises:
        PrivlabError: if it cannot be read, or is no TOML.
    """
    return parse_toml(read_text(path, what), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the contents of a text in TOML.

    Raises:
        PrivlabError: if it is none; the message begins with `where`.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PrivlabError(f"{where} is no TOML: {error}.") from None
