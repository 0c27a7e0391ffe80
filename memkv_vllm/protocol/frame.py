"""Frame layout: a fixed header, a body, and after the handshake a truncated MAC.

::

    offset  bytes  field
    0       4      magic  b"mKV1"
    4       1      protocol version
    5       1      message type (MessageType)
    6       2      flags: bit 0 reply, bit 1 error reply
    8       8      request id: chosen by the client, echoed by the reply
    16      4      body length in bytes
    20      8      sequence number of this direction (0 in handshake frames)
    28      n      body
    28+n    16     first 16 bytes of HMAC-SHA256 over header + body (absent in handshake frames)

All integers are little-endian. The limit on the body length is checked before anything of it is kept.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from struct import Struct
from typing import NamedTuple

from memkv_vllm.errors import RemoteProtocolError

MAGIC = b"mKV1"
MIN_VERSION = 1
MAX_VERSION = 1
MAC_BYTES = 16
_TLS_RECORD = b"\x16\x03"
MAX_HANDSHAKE_BODY = 512
"""An unauthenticated peer can make us hold no more than this."""

_HEADER = Struct("<4sBBHQIQ")
HEADER_BYTES = _HEADER.size


class MessageType(IntEnum):
    """Message types of protocol version 1."""

    HELLO = 1
    PROOF = 2
    REJECT = 3
    """Server to client, before authentication: why it will not go on."""
    REGISTER = 16
    MANIFEST = 17
    PUT = 18
    GET = 19
    EXISTS = 20
    REPORT_BAD = 21
    DELETE = 22
    STAT = 23
    PING = 24
    ADMIN = 25
    FENCE = 26
    BYE = 27
    ATTACH = 28
    LICENSE = 29
    CONNECT = 30


HANDSHAKE_TYPES = frozenset({MessageType.HELLO, MessageType.PROOF, MessageType.REJECT})


class Flags(IntFlag):
    """Header flags."""

    NONE = 0
    REPLY = 1
    ERROR = 2


_FLAGS = tuple(Flags(value) for value in range(4))
_TYPES = {member.value: member for member in MessageType}


class Header(NamedTuple):
    """A parsed frame header."""

    version: int
    type: MessageType
    flags: Flags
    request_id: int
    body_length: int
    sequence: int


def pack_header(header: Header) -> bytes:
    """The 28 bytes of ``header``."""
    return _HEADER.pack(MAGIC, *header)


def pack_fields(version: int, type: int, flags: int, request_id: int, body_length: int, sequence: int) -> bytes:
    """The 28 bytes of a header, of its fields."""
    return _HEADER.pack(MAGIC, version, type, flags, request_id, body_length, sequence)


def unpack_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Parse the ``HEADER_BYTES`` of ``data`` from ``offset`` on.

    Raises:
        RemoteProtocolError: wrong magic, unknown type or flags.
    """
    magic, version, kind, flags, request_id, body_length, sequence = _HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        what = "begins with TLS, which is off here" if magic[:2] == _TLS_RECORD else "does not speak this protocol"
        raise RemoteProtocolError("magic", f"the peer {what} (wrong magic)")
    message_type = _TYPES.get(kind)
    if message_type is None:
        raise RemoteProtocolError("type", f"unknown message type {kind}")
    if flags & ~3:
        raise RemoteProtocolError("flags", f"unknown header flags {flags:#x}")
    return Header(version, message_type, _FLAGS[flags], request_id, body_length, sequence)
