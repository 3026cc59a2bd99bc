"""Access to a server: bearer tokens, TLS with certificates to try it, and which addresses belong to this machine."""

import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from privlab.base import PrivlabError, first, read_bytes, write_whole

_LEAST_CHARACTERS = 32
"""The fewest characters of a token, so that it cannot be guessed."""
HEALTH = "/grpc.health.v1.Health/Check"
"""The one method that needs no token."""


def make_token(path: Path) -> str:
    """Return the token of a file; if there is no file, write one with 256 bits from the system's CSPRNG.

    Raises:
        PrivlabError: if the file is readable by others, holds no token, or cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise PrivlabError(f"The token file '{path}' cannot be written: {error.strerror}.") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return read_token(path)


def read_token(path: Path) -> str:
    """Return the token of a file.

    Raises:
        PrivlabError: if the file is missing, others than its owner may access it, or it holds no token.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = read_bytes(path, "token file").decode("ascii").strip()
    except FileNotFoundError:
        raise PrivlabError(
            f"There is no token file '{path}': `privlab split serve` makes it; bring a copy, or give --token-file."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PrivlabError(f"The token file '{path}' cannot be read: {error}.") from error
    if mode & 0o077:
        raise PrivlabError(f"The token file '{path}' must have mode 0600. Found {mode:04o}: chmod 600 it.")
    if len(text) < _LEAST_CHARACTERS or not text.isprintable() or " " in text:
        raise PrivlabError(
            f"'{path}' holds no token: expected one line of at least {_LEAST_CHARACTERS} printable characters."
        )
    return text


class RequireToken(grpc.ServerInterceptor):
    """Refuses every call without the token, which is compared in constant time; the health check needs no token."""

    def __init__(self, token: str, refused: Callable[[str], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = refused

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:  # noqa: ANN401
        """Pass a call on, or answer it with UNAUTHENTICATED."""
        metadata: dict[str, Any] = dict(getattr(handler_call_details, "invocation_metadata", None) or ())
        given = metadata.get("authorization")
        known = given is not None and hmac.compare_digest(str(given).encode(), self._expected)
        if known or getattr(handler_call_details, "method", "") == HEALTH:
            return continuation(handler_call_details)
        found = "No bearer" if given is None else "Wrong"

        def abort(requests: object, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{found} token: give the server's with --token-file.")

        self._refused("no token" if given is None else "wrong token")
        return grpc.stream_stream_rpc_method_handler(abort)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" or "[::1]:PORT".

    Raises:
        PrivlabError: if the address has another form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise PrivlabError(f"--server must be HOST:PORT. Found '{address}'.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: whether all addresses that it resolves to are loopback addresses.

    Raises:
        PrivlabError: if the host does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PrivlabError(f"The host '{host}' is not known here: {error}.") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


@dataclass(frozen=True)
class ServerTls:
    """A server's certificate chain and key; with `client_ca`, clients must have a certificate of that authority."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for gRPC.

        Raises:
            PrivlabError: if a file cannot be read or holds no certificate or key, or if cert and key do not match.
        """
        pair = _key_and_certificate(self.key, self.cert)
        authority = None if self.client_ca is None else _authority(self.client_ca)
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


@dataclass(frozen=True)
class ClientTls:
    """The authority that a client trusts, None for the system's, and the client's certificate and key, if needed."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for gRPC.

        Raises:
            PrivlabError: if a file cannot be read or holds no certificate or key, or if cert and key do not match.
        """
        if (self.cert is None) != (self.key is None):
            raise PrivlabError("A client's certificate needs its key: give both --tls-cert and --tls-key.")
        pair = () if self.cert is None or self.key is None else _key_and_certificate(self.key, self.cert)
        return grpc.ssl_channel_credentials(None if self.ca is None else _authority(self.ca), *pair)


def _key_and_certificate(key: Path, cert: Path) -> tuple[bytes, bytes]:
    chain = _read(cert)
    pair = _read(key), chain
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise PrivlabError(f"'{cert}' and '{key}' are not a certificate with its key, in PEM: {reason}.") from error
    return pair


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _authority(path: Path) -> bytes:
    text = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise PrivlabError(f"'{path}' holds no certificate in PEM: {getattr(error, 'reason', error)}.") from error
    return text


def _read(path: Path) -> bytes:
    return read_bytes(path, "TLS file")


def make_certificates(folder: Path, hosts: Sequence[str], days: float) -> list[Path]:
    """Write ca.pem, server.pem, server.key, client.pem and client.key; the authority's own key is discarded.

    Args:
        folder: the folder of the files; none of them may exist yet.
        hosts: names and addresses of the server.
        days: the days from now on for which the certificates are valid; if negative, they have expired.

    Raises:
        PrivlabError: if one of the files exists, or cannot be written.
    """
    import trustme

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
