"""PUT and GET as a server reads and answers them: a batch in columns, without an object for each value.

The layouts are those of :class:`~memkv_vllm.protocol.messages.Put` and ``Get``, whose items a client fills in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memkv_vllm.protocol import codec
from memkv_vllm.protocol.messages import EAGER, Get, Put

__all__ = ["GetColumns", "PutColumns", "pack_get_reply"]


class PutColumns(NamedTuple):
    """The values of a PUT; columns of equal length."""

    keys: Sequence[bytes]
    checksums: Sequence[int]
    layouts: Sequence[int]
    regions: Sequence[int]
    offsets: Sequence[int]
    """Bytes, in the regions."""
    lengths: Sequence[int]
    """Bytes."""
    algorithm: int
    timeout_ms: int
    eager: bool = False
    """The bytes of all values come by themselves, in this order."""

    @classmethod
    def unpack(cls, body: memoryview) -> PutColumns:
        """Parse a request body. Raises ``RemoteProtocolError``."""
        count, k, algorithm, timeout_ms = codec.unpack_head(Put.HEAD, body)
        columns = codec.unpack_columns(Put.ITEM, k, count, body, Put.HEAD.size, 6)
        keys, checksums, layouts, regions, offsets, lengths = columns
        eager = bool(algorithm & EAGER)
        return cls(keys, checksums, layouts, regions, offsets, lengths, algorithm & ~EAGER, timeout_ms, eager)


class GetColumns(NamedTuple):
    """The values of a GET; columns of equal length."""

    keys: Sequence[bytes]
    layouts: Sequence[int]
    regions: Sequence[int]
    offsets: Sequence[int]
    """Bytes, in the regions."""
    lengths: Sequence[int]
    """Bytes."""
    timeout_ms: int
    eager: bool = False
    """The bytes go without an acknowledgement, before the answer."""

    @classmethod
    def unpack(cls, body: memoryview) -> GetColumns:
        """Parse a request body. Raises ``RemoteProtocolError``."""
        count, k, flags, timeout_ms = codec.unpack_head(Get.HEAD, body)
        keys, layouts, regions, offsets, lengths = codec.unpack_columns(Get.ITEM, k, count, body, Get.HEAD.size, 5)
        return cls(keys, layouts, regions, offsets, lengths, timeout_ms, bool(flags & EAGER))


def pack_get_reply(
    statuses: Sequence[int], algorithms: Sequence[int], checksums: Sequence[int], generations: Sequence[int]
) -> bytes:
    """The body of the reply to a GET: a :class:`~memkv_vllm.protocol.messages.GetResult` per value."""
    return codec.pack_columns(Get.RESULT, (statuses, algorithms, checksums, generations))
