"""CONNECT and ATTACH: how a session gets the ways of its bytes (verbs: queue pairs; tcp: data connections)."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

from memkv_vllm.errors import RemoteProtocolError
from memkv_vllm.protocol import codec
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.types import SessionId

__all__ = ["Attach", "Connect"]

_EAGER_CONNECTION = b"\x01"


@dataclass(frozen=True)
class Connect:
    """Bring up a data path of its own for this session, before any region. ``<BH`` lengths; then name and token.

    The transport's name is ASCII; the tokens are its own (verbs: the queue pairs of each end). Without a CONNECT a
    session uses the data path of the transport that it came over. Reply: ``<H`` length, then the server's token.
    """

    TYPE: ClassVar[MessageType] = MessageType.CONNECT
    _HEAD: ClassVar[Struct] = Struct("<BH")
    _REPLY: ClassVar[Struct] = Struct("<H")

    transport: str
    token: bytes

    def pack(self) -> bytes:
        """The body."""
        name = self.transport.encode("ascii")
        return self._HEAD.pack(len(name), len(self.token)) + name + self.token

    @classmethod
    def unpack(cls, body: memoryview) -> Connect:
        """Parse a request body."""
        name_length, token_length = codec.unpack_head(cls._HEAD, body)
        codec.expect_length(body, cls._HEAD.size + name_length + token_length)
        name = bytes(body[cls._HEAD.size : cls._HEAD.size + name_length])
        if not name.isascii():
            raise RemoteProtocolError("transport", "a transport's name is ASCII")
        return cls(name.decode("ascii"), bytes(body[cls._HEAD.size + name_length :]))

    @classmethod
    def pack_reply(cls, token: bytes) -> bytes:
        """The reply's body."""
        return cls._REPLY.pack(len(token)) + token

    def reply(self, body: memoryview) -> bytes:
        """The server's token."""
        (length,) = codec.unpack_head(self._REPLY, body)
        codec.expect_length(body, self._REPLY.size + length)
        return bytes(body[self._REPLY.size :])


@dataclass(frozen=True)
class Attach:
    """Make this connection a data connection of a live session of the same key: ``<16s`` its id. Reply: empty.

    One byte 1 behind the id makes it the session's eager connection. The only request of a connection whose HELLO says
    ``PeerKind.DATA``. After the reply the frames of this protocol end on it, and those of
    ``memkv_vllm.transports.tcp.commands`` begin.
    """

    TYPE: ClassVar[MessageType] = MessageType.ATTACH

    session: SessionId
    eager: bool = False

    def pack(self) -> bytes:
        """The body."""
        return bytes(self.session) + (_EAGER_CONNECTION if self.eager else b"")

    @classmethod
    def unpack(cls, body: memoryview) -> Attach:
        """Parse a request body."""
        if eager := body[16:] == _EAGER_CONNECTION:
            body = body[:16]
        codec.expect_length(body, 16)
        return cls(SessionId(bytes(body)), eager)

    def reply(self, body: memoryview) -> None:
        """Empty."""
        codec.expect_length(body, 0)
