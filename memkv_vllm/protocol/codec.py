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


_MAX_KEYS_AT_ONCE = 256


@lru_cache(maxsize=256)
def _keys_struct(key_bytes: int, count: int) -> Struct:
    """All keys of a batch: three times as fast as one after the other. The cache holds 2 MiB at most."""
    return Struct("<" + f"{key_bytes}s" * count)


_ROWS_AT_ONCE = 64
"""Rows that one struct takes: the engine's batches have no more. A cached struct of them takes some 10 KiB."""


@lru_cache(maxsize=256)
def _rows_struct(template: str, key_bytes: int, count: int) -> Struct:
    """All items of a batch: columns out of it cost half as much as rows, and no object per item."""
    return Struct("<" + template.format(k=key_bytes) * count)


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


def unpack_rows(template: str, key_bytes: int, count: int, body: memoryview, offset: int) -> Iterable[tuple[Any, ...]]:
    """Parse ``count`` items that must fill ``body`` from ``offset`` to its end; all is checked before the first.

    Raises:
        RemoteProtocolError: the body's length does not fit, or the keys are empty.
    """
    if not count:
        expect_length(body, offset)
        return ()
    if not key_bytes and "{k}" in template:
        raise RemoteProtocolError("keys", "a batch of empty keys")
    layout = item_struct(template, key_bytes)
    expect_length(body, offset + count * layout.size)
    return layout.iter_unpack(body[offset:])


def unpack_columns(
    template: str, key_bytes: int, count: int, body: memoryview, offset: int, fields: int
) -> list[list[Any]]:
    """Parse ``count`` items that must fill ``body`` from ``offset`` to its end into columns, one per field.

    Args:
        template: of one item, with ``fields`` fields.
        key_bytes: what ``{k}`` stands for.
        count: items.
        body: of a message.
        offset: where the first item begins.
        fields: columns to return.

    Raises:
        RemoteProtocolError: as :func:`unpack_rows` does.
    """
    unpack_rows(template, key_bytes, count, body, offset)  # checks all lengths
    columns: list[list[Any]] = [[] for _ in range(fields)]
    for start in range(0, count, _ROWS_AT_ONCE):
        layout = _rows_struct(template, key_bytes, min(_ROWS_AT_ONCE, count - start))
        flat = layout.unpack_from(body, offset)
        for field, column in enumerate(columns):
            column += flat[field::fields]
        offset += layout.size
    return columns


def pack_columns(template: str, columns: Sequence[Sequence[Any]], key_bytes: int = 0) -> bytes:
    """The reverse of :func:`unpack_columns`: all items, one after the other."""
    count, fields, parts = len(columns[0]), len(columns), []
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, count - start)
        flat: list[Any] = [0] * (rows * fields)
        for field, column in enumerate(columns):
            flat[field::fields] = column[start : start + rows]
        parts.append(_rows_struct(template, key_bytes, rows).pack(*flat))
    return b"".join(parts)


def unpack_items(
    template: str, key_bytes: int, count: int, body: memoryview, offset: int, make: Callable[..., T]
) -> list[T]:
    """The same, each made into what ``make`` says."""
    return list(starmap(make, unpack_rows(template, key_bytes, count, body, offset)))


def unpack_keys(key_bytes: int, count: int, body: memoryview, offset: int) -> list[bytes]:
    """Parse ``count`` keys that must fill ``body`` from ``offset`` to its end. Raises as :func:`unpack_rows` does."""
    if not count:
        expect_length(body, offset)
        return []
    if not key_bytes:
        raise RemoteProtocolError("keys", "a batch of empty keys")
    expect_length(body, offset + count * key_bytes)
    if count <= _MAX_KEYS_AT_ONCE:
        return list(_keys_struct(key_bytes, count).unpack_from(body, offset))
    return [key for (key,) in item_struct("{k}s", key_bytes).iter_unpack(body[offset:])]


def expect_length(body: memoryview | bytes, length: int) -> None:
    """Refuse a body of another length than ``length`` bytes."""
    if len(body) != length:
        raise RemoteProtocolError("length", f"a body of {len(body)} bytes where {length} were expected")


def unpack_head(layout: Struct, body: memoryview) -> tuple[Any, ...]:
    """Parse the head at the start of ``body``; a shorter body is the peer's fault."""
    if len(body) < layout.size:
        raise RemoteProtocolError("length", f"a body of {len(body)} bytes, shorter than its head of {layout.size}")
    return layout.unpack_from(body)
