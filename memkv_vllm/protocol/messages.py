"""The messages of protocol version 1: request and reply classes with their exact layouts.

Every request class has ``TYPE``, ``pack()`` and ``unpack(body)``; ``reply(body)`` parses the reply that
belongs to it. Layouts are written as ``struct`` formats (little-endian, no padding); ``{k}`` is the key
length of the batch. Deadlines travel as lengths of time (``timeout_ms``), since clocks differ.

Keys are opaque here: ``memkv_vllm.keys`` says how they are made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.protocol import codec
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.types import Extent, MemoryKind, SessionId, Status

R = TypeVar("R", covariant=True)

MAX_ERROR_TEXT = 1024

_new = tuple.__new__
"""Makes a NamedTuple of all its fields. Its own constructor is a Python function and takes twice as long; values come
in batches of many, a server's by the hundred thousand a second."""


class Request(Protocol[R]):
    """What ``ClientConnection.request`` takes: a request whose reply is an ``R``."""

    TYPE: ClassVar[MessageType]

    def pack(self) -> bytes:
        """The body."""
        ...

    def reply(self, body: memoryview) -> R:
        """Parse the reply to this very request."""
        ...


BATCH_TYPES = frozenset(
    {MessageType.PUT, MessageType.GET, MessageType.EXISTS, MessageType.REPORT_BAD, MessageType.DELETE}
)


def batch_count(type: MessageType, body: bytes | memoryview) -> int:
    """Number of items that a request body announces: every batch starts with it as ``<H``; 0 for other types."""
    return int.from_bytes(body[:2], "little") if type in BATCH_TYPES else 0


class ErrorCode(IntEnum):
    """Why a request was refused as a whole (error replies and REJECT)."""

    INTERNAL = 1
    BAD_REQUEST = 2
    LIMIT = 3
    DENIED = 4
    VERSION = 6
    UNKNOWN_KEY = 7
    BAD_PROOF = 8
    BUSY = 9
    LICENSE = 10
    DATA_PATH = 11
    """CONNECT or REGISTER: the server cannot reach the client's memory over this transport."""


class ErrorReply(NamedTuple):
    """Body of an error reply or REJECT: ``<H`` code, then UTF-8 text of at most 1 KiB."""

    code: ErrorCode
    text: str

    def pack(self) -> bytes:
        """The body."""
        return Struct("<H").pack(self.code) + self.text.encode()[:MAX_ERROR_TEXT]

    @classmethod
    def unpack(cls, body: memoryview) -> ErrorReply:
        """Parse; an unknown code becomes INTERNAL.

        The text ends up in logs and on terminals, and before authentication anybody may have written it: what is
        not printable is replaced.
        """
        (code,) = codec.unpack_head(Struct("<H"), body)
        known = code if code in ErrorCode._value2member_map_ else ErrorCode.INTERNAL
        text = bytes(body[2 : 2 + MAX_ERROR_TEXT]).decode("utf-8", "replace")
        return cls(ErrorCode(known), "".join(char if char.isprintable() else "\ufffd" for char in text))

    def to_exception(self) -> StoreError:
        """The exception that a refused request raises at the client."""
        code = self.code.name.lower()
        return StoreError(f"{code}: {self.text}", code)


class PutItem(NamedTuple):
    """One value to store. ``checksum`` is of the batch's algorithm; ``layout`` is a 64-bit fingerprint."""

    key: bytes
    checksum: int
    layout: int
    extent: Extent


class GetItem(NamedTuple):
    """One value to fetch into ``extent``; its length and layout must agree with the stored ones."""

    key: bytes
    layout: int
    extent: Extent


class GetResult(NamedTuple):
    """Result of one get. ``checksum`` and ``algorithm`` hold for OK only, ``generation`` for a mismatch too."""

    status: Status
    algorithm: int
    checksum: int
    generation: int


_STATUSES = tuple(Status(value) if value in Status._value2member_map_ else Status.FAILED for value in range(256))
"""By the byte on the wire. An unknown status means failure, never success (fault P068)."""


def _statuses(body: memoryview, count: int) -> list[Status]:
    codec.expect_length(body, count)
    return [_STATUSES[value] for value in body]


def _check_count(count: int) -> None:
    if count > codec.MAX_BATCH:
        raise StoreError(f"a batch of {count} items; at most {codec.MAX_BATCH} fit in one message")


EAGER = 0x80
"""In a PUT's algorithm: its bytes come by themselves. Only to a server that took an eager connection."""


@dataclass(frozen=True)
class Put:
    """Store values out of the client's registered memory. Reply: a status per key.

    Head ``<HBBI``: count, key length, checksum algorithm and :data:`EAGER`, timeout_ms. Item ``<{k}sQQIQQ``: key,
    checksum, layout, region, offset, length.
    """

    TYPE: ClassVar[MessageType] = MessageType.PUT
    HEAD: ClassVar[Struct] = Struct("<HBBI")
    ITEM: ClassVar[str] = "{k}sQQIQQ"

    items: Sequence[PutItem]
    algorithm: int
    timeout_ms: int
    eager: bool = False
    """The bytes come by themselves, over the session's eager connection (tcp)."""

    def pack(self) -> bytes:
        """The body."""
        _check_count(len(self.items))
        algorithm = self.algorithm | EAGER if self.eager else self.algorithm
        if not self.items:
            return self.HEAD.pack(0, 0, algorithm, self.timeout_ms)
        keys, checksums, layouts, extents = zip(*self.items, strict=True)
        k = codec.common_key_length(keys)
        head = self.HEAD.pack(len(self.items), k, algorithm, self.timeout_ms)
        return head + codec.pack_columns(self.ITEM, (keys, checksums, layouts, *zip(*extents, strict=True)), k)

    @classmethod
    def unpack(cls, body: memoryview) -> Put:
        """Parse a request body."""
        count, k, algorithm, timeout_ms = codec.unpack_head(cls.HEAD, body)
        rows = codec.unpack_rows(cls.ITEM, k, count, body, cls.HEAD.size)
        items = [
            _new(PutItem, (key, checksum, layout, _new(Extent, (region, offset, length))))
            for key, checksum, layout, region, offset, length in rows
        ]
        return cls(items, algorithm & ~EAGER, timeout_ms, bool(algorithm & EAGER))

    def reply(self, body: memoryview) -> list[Status]:
        """One status per item, in the order sent: ``<B`` each."""
        return _statuses(body, len(self.items))


@dataclass(frozen=True)
class Get:
    """Fetch values into the client's registered memory. Reply: a :class:`GetResult` per key.

    Head ``<HBBI``: count, key length, 0 or :data:`EAGER`, timeout_ms. Item ``<{k}sQIQQ``: key, layout, region,
    offset, length. Reply item ``<BBQQ``: status, algorithm, checksum, generation.
    """

    TYPE: ClassVar[MessageType] = MessageType.GET
    HEAD: ClassVar[Struct] = Struct("<HBBI")
    ITEM: ClassVar[str] = "{k}sQIQQ"
    RESULT: ClassVar[str] = "BBQQ"
    RESULT_BYTES: ClassVar[int] = Struct("<" + RESULT).size

    items: Sequence[GetItem]
    timeout_ms: int
    eager: bool = False
    """The bytes come without an acknowledgement, over the session's eager connection (tcp)."""

    def pack(self) -> bytes:
        """The body."""
        _check_count(len(self.items))
        flags = EAGER if self.eager else 0
        if not self.items:
            return self.HEAD.pack(0, 0, flags, self.timeout_ms)
        keys, layouts, extents = zip(*self.items, strict=True)
        k = codec.common_key_length(keys)
        head = self.HEAD.pack(len(self.items), k, flags, self.timeout_ms)
        return head + codec.pack_columns(self.ITEM, (keys, layouts, *zip(*extents, strict=True)), k)

    @classmethod
    def unpack(cls, body: memoryview) -> Get:
        """Parse a request body."""
        count, k, flags, timeout_ms = codec.unpack_head(cls.HEAD, body)
        rows = codec.unpack_rows(cls.ITEM, k, count, body, cls.HEAD.size)
        items = [
            _new(GetItem, (key, layout, _new(Extent, (region, offset, length))))
            for key, layout, region, offset, length in rows
        ]
        return cls(items, timeout_ms, bool(flags & EAGER))

    @classmethod
    def pack_reply(cls, results: Sequence[GetResult]) -> bytes:
        """The reply's body."""
        return codec.pack_items(cls.RESULT, 0, results)

    def reply(self, body: memoryview) -> list[GetResult]:
        """One result per item, in the order sent."""
        rows = codec.unpack_rows(self.RESULT, 0, len(self.items), body, 0)
        return [
            _new(GetResult, (_STATUSES[status], algorithm, checksum, generation))
            for status, algorithm, checksum, generation in rows
        ]


@dataclass(frozen=True)
class Exists:
    """Which shards of which blocks are complete. Reply: one bitmap row per block.

    ``prefixes`` are store keys without their shard suffix (namespace, hash, group). Head ``<HBxH``: count,
    prefix length, number of shards. Item ``<{k}s``. Reply: per block ``ceil(shards / 8)`` bytes, shard ``i``
    is bit ``i % 8`` (least significant first) of byte ``i // 8``.
    """

    TYPE: ClassVar[MessageType] = MessageType.EXISTS
    HEAD: ClassVar[Struct] = Struct("<HBxH")

    prefixes: Sequence[bytes]
    shards: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one bitmap row."""
        return (self.shards + 7) // 8

    def pack(self) -> bytes:
        """The body."""
        _check_count(len(self.prefixes))
        k = codec.common_key_length(self.prefixes)
        return self.HEAD.pack(len(self.prefixes), k, self.shards) + b"".join(self.prefixes)

    @classmethod
    def unpack(cls, body: memoryview) -> Exists:
        """Parse a request body."""
        count, k, shards = codec.unpack_head(cls.HEAD, body)
        if shards == 0:
            raise RemoteProtocolError("shards", "EXISTS for zero shards")
        return cls(codec.unpack_keys(k, count, body, cls.HEAD.size), shards)

    def reply(self, body: memoryview) -> list[bool]:
        """Per block: are all its shards there?"""
        count, width = len(self.prefixes), self.row_bytes
        codec.expect_length(body, count * width)
        if width == 1:
            every = (1 << self.shards) - 1
            return [True] * count if body == bytes((every,)) * count else [row == every for row in body]
        full = ((1 << self.shards) - 1).to_bytes(width, "little")
        return [bytes(body[at : at + width]) == full for at in range(0, len(body), width)] if width else []


class BadValue(NamedTuple):
    """A value whose bytes were wrong at the reader; ``generation`` is the one that its get returned."""

    key: bytes
    generation: int


@dataclass(frozen=True)
class ReportBad:
    """Hide values whose checksum or layout was wrong. Head ``<HB``, item ``<{k}sQ``. Reply: ``<B`` 0/1 each."""

    TYPE: ClassVar[MessageType] = MessageType.REPORT_BAD
    HEAD: ClassVar[Struct] = Struct("<HB")
    ITEM: ClassVar[str] = "{k}sQ"

    items: Sequence[BadValue]

    def pack(self) -> bytes:
        """The body."""
        _check_count(len(self.items))
        k = codec.common_key_length([item.key for item in self.items])
        return self.HEAD.pack(len(self.items), k) + codec.pack_items(self.ITEM, k, self.items)

    @classmethod
    def unpack(cls, body: memoryview) -> ReportBad:
        """Parse a request body."""
        count, k = codec.unpack_head(cls.HEAD, body)
        return cls(codec.unpack_items(cls.ITEM, k, count, body, cls.HEAD.size, BadValue))

    def reply(self, body: memoryview) -> list[bool]:
        """Per value: was it hidden by this report?"""
        codec.expect_length(body, len(self.items))
        return [bool(value) for value in body]


@dataclass(frozen=True)
class Delete:
    """Delete keys at once; readers in flight finish. Head ``<HB``, item ``<{k}s``. Reply: a status per key."""

    TYPE: ClassVar[MessageType] = MessageType.DELETE
    HEAD: ClassVar[Struct] = Struct("<HB")

    keys: Sequence[bytes]

    def pack(self) -> bytes:
        """The body."""
        _check_count(len(self.keys))
        k = codec.common_key_length(self.keys)
        return self.HEAD.pack(len(self.keys), k) + b"".join(self.keys)

    @classmethod
    def unpack(cls, body: memoryview) -> Delete:
        """Parse a request body."""
        count, k = codec.unpack_head(cls.HEAD, body)
        return cls(codec.unpack_keys(k, count, body, cls.HEAD.size))

    def reply(self, body: memoryview) -> list[Status]:
        """OK or ABSENT (or DENIED) per key."""
        return _statuses(body, len(self.keys))


_KINDS: tuple[MemoryKind, ...] = (MemoryKind.HOST, MemoryKind.GPU)


@dataclass(frozen=True)
class Register:
    """Offer a memory region to this session. ``<IBQH`` region id, kind, length, token length; then the token.

    The token is the transport's own (verbs: address and remote key). Loopback sends the region's memfd beside
    the frame. Reply: empty.
    """

    TYPE: ClassVar[MessageType] = MessageType.REGISTER
    _HEAD: ClassVar[Struct] = Struct("<IBQH")

    region: int
    kind: MemoryKind
    length: int
    token: bytes = b""

    def pack(self) -> bytes:
        """The body."""
        return self._HEAD.pack(self.region, _KINDS.index(self.kind), self.length, len(self.token)) + self.token

    @classmethod
    def unpack(cls, body: memoryview) -> Register:
        """Parse a request body."""
        region, kind, length, token_length = codec.unpack_head(cls._HEAD, body)
        codec.expect_length(body, cls._HEAD.size + token_length)
        if kind >= len(_KINDS):
            raise RemoteProtocolError("kind", f"unknown memory kind {kind}")
        return cls(region, _KINDS[kind], length, bytes(body[cls._HEAD.size :]))

    def reply(self, body: memoryview) -> None:
        """Empty."""
        codec.expect_length(body, 0)


class ManifestEntry(NamedTuple):
    """A namespace in a family: its 32-byte digest and its manifest (JSON text, UTF-8)."""

    digest: bytes
    manifest: bytes


@dataclass(frozen=True)
class Manifest:
    """Add a namespace to its family; the reply lists the others. ``<32s32sI`` family, digest, length; then JSON.

    Reply: ``<I`` count, then per sibling ``<32sI`` digest, length and the JSON text.
    """

    TYPE: ClassVar[MessageType] = MessageType.MANIFEST
    _HEAD: ClassVar[Struct] = Struct("<32s32sI")
    _ENTRY: ClassVar[Struct] = Struct("<32sI")

    family: bytes
    digest: bytes
    manifest: bytes

    def pack(self) -> bytes:
        """The body."""
        return self._HEAD.pack(self.family, self.digest, len(self.manifest)) + self.manifest

    @classmethod
    def unpack(cls, body: memoryview) -> Manifest:
        """Parse a request body."""
        family, digest, length = codec.unpack_head(cls._HEAD, body)
        codec.expect_length(body, cls._HEAD.size + length)
        return cls(family, digest, bytes(body[cls._HEAD.size :]))

    @classmethod
    def pack_reply(cls, siblings: Sequence[ManifestEntry]) -> bytes:
        """The reply's body."""
        parts = [Struct("<I").pack(len(siblings))]
        for digest, manifest in siblings:
            parts += (cls._ENTRY.pack(digest, len(manifest)), manifest)
        return b"".join(parts)

    def reply(self, body: memoryview) -> list[ManifestEntry]:
        """The other namespaces of the family."""
        (count,) = codec.unpack_head(Struct("<I"), body)
        rest, siblings = body[4:], []
        for _ in range(count):
            digest, length = codec.unpack_head(self._ENTRY, rest)
            end = self._ENTRY.size + length
            if len(rest) < end:
                raise RemoteProtocolError("length", "a manifest entry ends after its message")
            siblings.append(ManifestEntry(digest, bytes(rest[self._ENTRY.size : end])))
            rest = rest[end:]
        codec.expect_length(rest, 0)
        return siblings


@dataclass(frozen=True)
class Fence:
    """Answered once no byte of the named session's bulk work can still land. ``<16s`` session id; empty reply.

    A session that the server does not know has ended and is fenced: the answer comes at once.
    """

    TYPE: ClassVar[MessageType] = MessageType.FENCE

    session: SessionId

    def pack(self) -> bytes:
        """The body."""
        return bytes(self.session)

    @classmethod
    def unpack(cls, body: memoryview) -> Fence:
        """Parse a request body."""
        codec.expect_length(body, 16)
        return cls(SessionId(bytes(body)))

    def reply(self, body: memoryview) -> None:
        """Empty."""
        codec.expect_length(body, 0)


MAX_COMMAND_BYTES = 65536
"""An ADMIN command is a name and a few numbers."""

MAX_LICENSE_BYTES = 8192
"""A signed license with a handful of claims has some 500 bytes."""


@dataclass(frozen=True)
class License:
    """The client's license, as the first request to a server that asked for one in its PROOF. Reply: empty.

    Body: the text of a JWT, ASCII. A license that is not valid ends the session with an error reply that says why.
    """

    TYPE: ClassVar[MessageType] = MessageType.LICENSE

    token: str = field(repr=False)

    def pack(self) -> bytes:
        """The body."""
        return self.token.encode("ascii", "replace")

    @classmethod
    def unpack(cls, body: memoryview) -> License:
        """Parse a request body."""
        if len(body) > MAX_LICENSE_BYTES:
            raise RemoteProtocolError("length", f"a license of {len(body)} bytes; at most {MAX_LICENSE_BYTES}")
        return cls(bytes(body).decode("ascii", "replace"))

    def reply(self, body: memoryview) -> None:
        """Empty."""
        codec.expect_length(body, 0)


@dataclass(frozen=True)
class _Empty(Generic[R]):
    """A request without a body."""

    def pack(self) -> bytes:
        """Empty."""
        return b""


@dataclass(frozen=True)
class Ping(_Empty[None]):
    """Liveness. Empty request, empty reply."""

    TYPE: ClassVar[MessageType] = MessageType.PING

    def reply(self, body: memoryview) -> None:
        """Empty."""
        codec.expect_length(body, 0)


@dataclass(frozen=True)
class Bye(_Empty[None]):
    """Orderly end: the server answers once the session's bulk work has ended, then closes."""

    TYPE: ClassVar[MessageType] = MessageType.BYE

    def reply(self, body: memoryview) -> None:
        """Empty."""
        codec.expect_length(body, 0)


def _json_object(body: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError("json", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RemoteProtocolError("json", "a JSON object was expected")
    return value


@dataclass(frozen=True)
class Stat(_Empty[dict[str, Any]]):
    """Statistics of the server, as a JSON object."""

    TYPE: ClassVar[MessageType] = MessageType.STAT

    def reply(self, body: memoryview) -> dict[str, Any]:
        """The JSON object."""
        return _json_object(body)


@dataclass(frozen=True)
class Admin:
    """A command that changes the server's state, as a JSON object ``{"command": ..., ...}``; JSON reply.

    ``{"command": "reset", "namespace": "<64 hex>"}`` is an O(1) epoch bump, ``{"command": "gc", "idle_s": number}``
    does it to idle namespaces, ``{"command": "evict", "bytes": integer}`` frees that much of the arena,
    ``{"command": "namespaces"}`` lists what is held.
    """

    TYPE: ClassVar[MessageType] = MessageType.ADMIN

    command: dict[str, Any]

    def pack(self) -> bytes:
        """The body."""
        return json.dumps(self.command, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, body: memoryview) -> Admin:
        """Parse a request body: JSON takes many times its length when parsed, so it is bounded apart from the frame."""
        if len(body) > MAX_COMMAND_BYTES:
            raise RemoteProtocolError("length", f"a command of {len(body)} bytes; at most {MAX_COMMAND_BYTES}")
        return cls(_json_object(body))

    def reply(self, body: memoryview) -> dict[str, Any]:
        """The JSON object."""
        return _json_object(body)
