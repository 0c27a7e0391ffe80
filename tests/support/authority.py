"""A certificate authority for one test."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Pair(NamedTuple):
    """Files of a certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates of servers.

    Args:
        folder: where the files go.
        name: of the authority.
    """

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key, -1, 365)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.file = folder / f"{name.replace(' ', '-')}.pem"
        certificate = builder.add_extension(usage, critical=True).sign(self._key, SHA256())
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        *names: str,
        first_day: int = -1,
        last_day: int = 30,
        passphrase: bytes | None = None,
        file: str = "server",
    ) -> Pair:
        """A certificate for host names and IP addresses, valid from ``first_day`` to ``last_day`` counted from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        entries = x509.SubjectAlternativeName([_general_name(name) for name in names])
        builder = self._builder(subject, key, first_day, last_day).add_extension(entries, critical=False)
        pair = Pair(self.folder / f"{file}.crt", self.folder / f"{file}.key")
        pair.cert.write_bytes(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        lock: KeySerializationEncryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
        pair.key.chmod(0o600)
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, first_day: int, last_day: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + first_day * DAY)
            .not_valid_after(now + last_day * DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(identifier, critical=False)
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
