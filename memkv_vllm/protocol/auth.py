"""Mutual authentication and the keys of a session.

Both sides prove that they hold the shared key over the whole transcript of the handshake: the client's
HELLO body (versions, role, key id, its nonce) and the server's HELLO body (chosen version, server id,
session id, limits, its nonce). All proofs and keys are HMAC-SHA256 (RFC 2104) with distinct labels, so that
a proof can never be replayed as the other side's, nor a key be mistaken for a proof.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.protocol.frame import MAC_BYTES
from memkv_vllm.types import Role

KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_KEY_ID_BYTES = 32


@dataclass(frozen=True)
class Credentials:
    """What a client presents: the id of its key (at most 32 ASCII bytes), the key itself (32 bytes), and its license.

    The license (the text of a JWT) leaves this process only towards a server that proved the key and asks for one.
    """

    key: bytes = field(repr=False)
    key_id: str = "default"
    license: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise LocalProtocolError(f"a key of {len(self.key)} bytes; {KEY_BYTES} are needed")
        if not (self.key_id.isascii() and self.key_id.isprintable() and 1 <= len(self.key_id) <= MAX_KEY_ID_BYTES):
            raise LocalProtocolError(
                f"key id {self.key_id!r}: 1 to {MAX_KEY_ID_BYTES} printable ASCII characters are needed"
            )


def _label(key: bytes, label: str, transcript: bytes) -> bytes:
    return hmac.digest(key, label.encode() + b"\0" + transcript, "sha256")


def proof(key: bytes, role: Role, transcript: bytes) -> bytes:
    """The 32-byte proof that the side ``role`` holds ``key``, over ``transcript``."""
    return _label(key, f"memkv proof {role.value}", transcript)


def check(expected: bytes, seen: bytes | memoryview) -> bool:
    """Compare two proofs or MACs in constant time."""
    return hmac.compare_digest(expected, seen)


_BLOCK_BYTES = 64
"""Of SHA-256: what HMAC pads its key to."""


class Sealer:
    """Makes the MACs of one direction of one session.

    HMAC is two hashes that begin with the padded key (RFC 2104). Both beginnings are hashed once and copied for each
    frame: a short frame's MAC takes a third of the time of ``hmac.digest``, which sets up the key again each time.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes, sender: Role, transcript: bytes) -> None:
        padded = _label(key, f"memkv session {sender.value}", transcript).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def mac(self, header: bytes | memoryview, body: bytes | memoryview = b"") -> bytes:
        """The MAC of a frame: the header carries the sequence number, so nothing replays or reorders.

        A frame whose header and body lie side by side may be given as one.
        """
        inner = self._inner.copy()
        inner.update(header)
        if body:
            inner.update(body)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()[:MAC_BYTES]

    def __repr__(self) -> str:
        return "<Sealer>"
