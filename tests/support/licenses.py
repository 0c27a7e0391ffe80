"""Keys and tokens of an operator who asks for licenses, made for one test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

KINDS = {
    "RS256": lambda: rsa.generate_private_key(65537, 2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class Issuer:
    """Signs licenses.

    Args:
        algorithm: of :data:`KINDS`.
    """

    def __init__(self, algorithm: str = "EdDSA") -> None:
        self.algorithm = algorithm
        self.private: Any = KINDS[algorithm]()

    @property
    def public_pem(self) -> bytes:
        """The public key."""
        pem: bytes = self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return pem

    @property
    def private_pem(self) -> bytes:
        """The private key."""
        pem: bytes = self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return pem

    def write(self, folder: Path) -> Path:
        """The public key in a file."""
        path = folder / f"{self.algorithm}-{id(self)}.pem"
        path.write_bytes(self.public_pem)
        return path

    def license(self, lasts_s: float | None = 3600.0, **claims: Any) -> str:
        """A license that is valid for so long from now; ``claims`` are added."""
        now = time.time()
        ends = {} if lasts_s is None else {"exp": now + lasts_s}
        return jwt.encode({"sub": "cluster", "iat": now, **ends, **claims}, self.private, self.algorithm)
