"""Certificates for trying out TLS: a new authority, and one certificate each for server and clients."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from privlab.base import PrivlabError, first, write_whole


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
    paths = {folder / name: data for name, data in files.items()}
    if there := first(path.name for path in paths if path.exists()):
        raise PrivlabError(f"'{folder}' already holds {there}. Give a new folder.")
    for path, data in paths.items():
        write_whole(path, lambda part, data=data: part.write_bytes(data), private=path.suffix == ".key", place="folder")
    return list(paths)
