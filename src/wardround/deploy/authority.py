"""Certificates and keys: a certificate authority of the federation's own, the server's certificate, clients' key pairs.

The server proves itself by a certificate of this authority, a client by signing with a key that the server was given
when the federation was founded.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wardround.errors import InputError

AUTHORITY_DAYS, SERVER_DAYS = 3650, 730
CLOCK_SLACK = timedelta(minutes=10)  # a new certificate is good at once on clocks that are a little behind
PrivateKey = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Certified:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: PrivateKey

    @property
    def pem(self) -> bytes:
        """The certificate, as it is handed out."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def private_pem(self) -> bytes:
        """The key, as it is kept."""
        return private_pem(self.key)


def new_key() -> PrivateKey:
    """A private key on the curve P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def private_pem(key: PrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def public_pem(key: PrivateKey) -> bytes:
    """The public half of a key as PEM."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def new_authority(name: str, days: int = AUTHORITY_DAYS) -> Certified:
    """A certificate authority that signs for itself."""
    key, subject = new_key(), _named(name)
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = _builder(subject, subject, key, days).add_extension(usage, critical=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Certified(builder.sign(key, hashes.SHA256()), key)


def server_certificate(authority: Certified, hosts: Sequence[str], days: float = SERVER_DAYS) -> Certified:
    """A certificate for a server that is reached under any of `hosts`, names or addresses.

    Args:
        authority: signs it.
        hosts: the first one is its name.
        days: until it expires; negative for one that has expired already.
    """
    key = new_key()
    builder = _builder(_named(hosts[0]), authority.certificate.subject, key, days)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return Certified(builder.add_extension(issuer, critical=False).sign(authority.key, hashes.SHA256()), key)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: PrivateKey, days: float) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + timedelta(days=days)
    begin = min(datetime.now(UTC), end) - CLOCK_SLACK
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(identifier, critical=False)
    )


def write_private(file: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, and that never was anything else (mode 0600)."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(data)


def read_private(file: Path) -> PrivateKey:
    """A client's private key.

    Raises:
        InputError: missing, readable by others, or no such key.
    """
    try:
        data, mode = file.read_bytes(), file.stat().st_mode
    except OSError as error:
        raise InputError(f"{file}: the private key cannot be read ({error.strerror or error})") from error
    if os.name == "posix" and mode & 0o077:
        raise InputError(
            f"{file}: others may read this private key (mode {mode & 0o777:04o}); allowed: chmod 600 {file}"
        )
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise InputError(f"{file}: is no private key without a password in PEM ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{file}: holds a {type(key).__name__}, expected one of an elliptic curve")
    return key


def check_dates(file: Path, now: datetime | None = None) -> x509.Certificate:
    """The certificate in `file`, if it is valid by this machine's clock.

    Raises:
        InputError: missing, no certificate, expired or not yet valid; the message gives the dates and the clock.
    """
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file}: the certificate cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise InputError(f"{file}: is no certificate in PEM ({error})") from error
    begin, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, now or datetime.now(UTC)
    if not begin <= now <= end:
        what = "has expired" if now > end else "is not valid yet"
        raise InputError(
            f"{file}: the certificate {what}: valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, this "
            f"machine's clock says {now:%Y-%m-%d %H:%M} UTC. Renew it (`wardround deploy renew`), or set the clock."
        )
    return certificate
