"""Mutual authentication and the keys of a session.

Both sides prove that they hold the shared key over the whole transcript of the handshake: the client's
HELLO body (versions, role, key id, its nonce) and the server's HELLO body (chosen version, server id,
session id, limits, its nonce). All proofs and keys are HMAC-SHA256 (RFC 2104) with distinct labels, so that
a proof can never be replayed as the other side's, nor a key be mistaken for a proof.
"""

from __future__ import annotations

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
    """What a client presents: the id of its key (at most 32 ASCII bytes) and the key itself (32 bytes)."""

    key: bytes = field(repr=False)
    key_id: str = "default"

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


def check(expected: bytes, seen: bytes) -> bool:
    """Compare two proofs or MACs in constant time."""
    return hmac.compare_digest(expected, seen)


class Sealer:
    """Makes the MACs of one direction of one session."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes, sender: Role, transcript: bytes) -> None:
        self._key = _label(key, f"memkv session {sender.value}", transcript)

    def mac(self, header: bytes, body: bytes | memoryview) -> bytes:
        """The MAC of a frame: the header carries the sequence number, so nothing replays or reorders."""
        return hmac.digest(self._key, b"".join((header, body)), "sha256")[:MAC_BYTES]

    def __repr__(self) -> str:
        return "<Sealer>"
