"""Whether what is to be audited is there at all, which costs no import of torch."""

import os
from errno import ENOENT
from pathlib import Path

from privlab.base import PrivlabError


def session_folders(folder: Path) -> list[Path]:
    """Return the folders of the sessions of a recording, or the folder itself where it is that of one session.

    Raises:
        PrivlabError: if there is no recording.
    """
    if (folder / "session.json").exists():
        return [folder]
    if paths := sorted(path.parent for path in folder.glob("*/session.json")):
        return paths
    raise PrivlabError(f"'{folder}' holds no recording: expected what `privlab split serve --record` writes.")


def check_gradients(path: Path) -> None:
    """Refuse a file of gradients that is not there.

    Raises:
        PrivlabError: if there is nothing at this path.
    """
    if not path.exists():
        raise PrivlabError(f"Cannot read the gradients '{path}': {os.strerror(ENOENT)}.")
