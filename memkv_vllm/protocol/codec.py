"""Fixed-layout batches: a head, then ``count`` equal items, packed and parsed by ``struct`` at C speed.

The keys of one batch have one length, so an item has a fixed size that the head tells. Every length is
checked before anything is allocated; a body that does not add up is the peer's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import starmap
from struct import Struct
from typing import Any, TypeVar

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError

T = TypeVar("T")

MAX_KEY_BYTES = 255
MAX_BATCH = 65535


@lru_cache(maxsize=64)
def item_struct(template: str, key_bytes: int) -> Struct:
    """The struct of one item; ``{k}`` in ``template`` stands for the key's length in bytes."""
    return Struct("<" + template.format(k=key_bytes))


def common_key_length(keys: Sequence[bytes]) -> int:
    """The one length of all ``keys`` (0 for none).

    Raises:
        LocalProtocolError: the lengths differ, or a key is empty or longer than 255 bytes.
    """
    if not keys:
        return 0
    lengths = set(map(len, keys))
    if len(lengths) != 1:
        raise LocalProtocolError(f"keys of one batch must have one length, got {sorted(lengths)}")
    (length,) = lengths
    if not 1 <= length <= MAX_KEY_BYTES:
        raise LocalProtocolError(f"a key of {length} bytes; 1 to {MAX_KEY_BYTES} are allowed")
    return length


def pack_items(template: str, key_bytes: int, items: Iterable[tuple[Any, ...]]) -> bytes:
    """All items, one after the other."""
    return b"".join(starmap(item_struct(template, key_bytes).pack, items))


def unpack_items(
    template: str, key_bytes: int, count: int, body: memoryview, offset: int, make: Callable[..., T]
) -> list[T]:
    """Parse ``count`` items that must fill ``body`` from ``offset`` to its end.

    Raises:
        RemoteProtocolError: the body's length does not fit, or the keys are empty.
    """
    if not count:
        expect_length(body, offset)
        return []
    if not key_bytes and "{k}" in template:
        raise RemoteProtocolError("keys", "a batch of empty keys")
    layout = item_struct(template, key_bytes)
    expect_length(body, offset + count * layout.size)
    return list(starmap(make, layout.iter_unpack(body[offset:])))


def expect_length(body: memoryview | bytes, length: int) -> None:
    """Refuse a body of another length than ``length`` bytes."""
    if len(body) != length:
        raise RemoteProtocolError("length", f"a body of {len(body)} bytes where {length} were expected")


def unpack_head(layout: Struct, body: memoryview) -> tuple[Any, ...]:
    """Parse the head at the start of ``body``; a shorter body is the peer's fault."""
    if len(body) < layout.size:
        raise RemoteProtocolError("length", f"a body of {len(body)} bytes, shorter than its head of {layout.size}")
    return layout.unpack_from(body)
