"""Certificates for trying out TLS: a new authority, and one certificate each for server and clients."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from privlab.base import PrivlabError


def make_certificates(folder: Path, hosts: Sequence[str], days: float) -> list[Path]:
    """Write ca.pem, server.pem, server.key, client.pem and client.key; the authority's own key is discarded.

    Args:
        folder: the folder of the files; none of them may exist yet.
        hosts: names and addresses of the server.
        days: the days from now on for which the certificates are valid; if negative, they have expired.

    Raises:
        PrivlabError: if one of the files exists, or cannot be written.
    """
    until = datetime.now(UTC) + timedelta(days=days)
    authority = trustme.CA(organization_name="privlab")
    files = {"ca.pem": authority.cert_pem.bytes()}
    for name, names in (("server", hosts), ("client", ["client"])):
        made = authority.issue_cert(*names, common_name=f"privlab {name}", not_after=until)
        files[f"{name}.pem"] = made.cert_chain_pems[0].bytes()
        files[f"{name}.key"] = made.private_key_pem.bytes()
    for name, data in files.items():
        _write(folder / name, data)
    return [folder / name for name in files]


def _write(path: Path, data: bytes) -> None:
    """Write a new file; a key is readable by its owner alone."""
    mode = 0o600 if path.suffix == ".key" else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise PrivlabError(f"'{path}' cannot be written: {error.strerror}. Give a new folder.") from error
