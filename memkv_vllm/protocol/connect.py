"""CONNECT: how a session gets a data path that is brought up by messages (verbs: its queue pairs)."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar

from memkv_vllm.errors import RemoteProtocolError
from memkv_vllm.protocol import codec
from memkv_vllm.protocol.frame import MessageType

__all__ = ["Connect"]


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
