"""Certificates for trying out TLS: a new authority, and one certificate each for server and clients."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privlab.base import PrivlabError

_Key = ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, hosts: Sequence[str], days: float) -> list[Path]:
    """Write ca.pem, server.pem, server.key, client.pem and client.key; the authority's own key is discarded.

    Args:
        folder: the folder of the files; none of them may exist yet.
        hosts: names and addresses of the server.
        days: the days from now on for which the certificates are valid, starting an hour ago; if negative, they have
            expired.

    Raises:
        PrivlabError: if one of the files exists, or cannot be written.
    """
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    authority = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("privlab authority", authority, None, until)
    files: dict[str, bytes] = {"ca.pem": ca.public_bytes(Encoding.PEM)}
    for name, names in (("server", hosts), ("client", ())):
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _certificate(f"privlab {name}", key, (ca, authority), until, names)
        files[f"{name}.pem"] = signed.public_bytes(Encoding.PEM)
        files[f"{name}.key"] = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, data in files.items():
        _write(folder / name, data)
    return [folder / name for name in files]


def _certificate(
    name: str,
    key: _Key,
    issuer: tuple[x509.Certificate, _Key] | None,
    until: datetime.datetime,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """Return a certificate that is signed by its issuer, or by itself if it has none."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer = key if issuer is None else issuer[1]
    hour = datetime.timedelta(hours=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.datetime.now(datetime.UTC), until) - hour)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is not None:
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        made = made.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
    return made.sign(signer, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes) -> None:
    """Write a new file; a key is readable by its owner alone."""
    mode = 0o600 if path.suffix == ".key" else 0o644
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise PrivlabError(f"'{path}' cannot be written: {error.strerror}. Give a new folder.") from error
