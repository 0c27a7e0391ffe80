"""The journal's bytes: what must be remembered beside the records. Pure.

The journal has two halves. One is written: first a snapshot of everything that still matters, then what happens.
When it is full, a snapshot of the next generation goes into the other half, and counts once all of it is there. So the
half of a generation is ``generation % 2``, and at start the newest whole snapshot wins, with what follows it.

A half is a row of batches, each beginning on a block::

    batch   magic, version, flags (snapshot begins / ends), the drive's tag, generation, number, bytes of the entries,
            checksum of the batch before it, own checksum; then entries; filled up to a whole block
    entry   kind, length, and
      dead       records that were forgotten: segment, incarnation, and the block at which each starts
      reset      a namespace, and the sequence number below which its records are dead
      manifest   family, digest and manifest of the directory
      drive out  id of another drive, and the sequence number below which its records are dead: it failed, and what was
                 forgotten of it since then could not be written there

A batch counts only behind the very batch that it was written behind: what a lost or torn write left there is cut off.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from memkv_vllm.store.log.format import BLOCK_BYTES, FORMAT_VERSION

__all__ = [
    "Batch",
    "Dead",
    "DriveOut",
    "Entry",
    "Manifest",
    "Reset",
    "batch_size",
    "claims",
    "cut",
    "entry_bytes",
    "pack_batch",
    "parse_batch",
    "parse_entries",
]

MAX_DEAD_STARTS = 4096
"""Records of one dead entry."""
MAX_BATCH_BYTES = 64 << 10
"""Entries of one batch, unless a single one is longer."""

_HEAD = struct.Struct("<4sHH8sQIIQQ")
_MAGIC = b"MKVJ"
_ENTRY = struct.Struct("<BxxxI")
_DEAD, _RESET, _MANIFEST, _OUT = 1, 2, 3, 4
_SNAPSHOT_BEGINS, _SNAPSHOT_ENDS = 1, 2
_PLACE = struct.Struct("<II")
_SEQUENCE = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size


class Dead(NamedTuple):
    """Records of one use of a segment that were forgotten."""

    segment: int
    incarnation: int
    starts: tuple[int, ...]


class Reset(NamedTuple):
    """All records of the namespace with a lower sequence number are dead."""

    namespace: bytes
    sequence: int


class Manifest(NamedTuple):
    """A manifest of the directory."""

    family: bytes
    digest: bytes
    manifest: bytes


class DriveOut(NamedTuple):
    """All records of that drive with a lower sequence number are dead."""

    drive_id: bytes
    sequence: int


Entry = Dead | Reset | Manifest | DriveOut


class Batch(NamedTuple):
    """A batch that was read."""

    generation: int
    number: int
    snapshot_begins: bool
    snapshot_ends: bool
    checksum: int
    size: int
    """Bytes on the medium."""
    body: bytes


def _pack_entry(entry: Entry) -> bytes:
    if isinstance(entry, Dead):
        body = _PLACE.pack(entry.segment, entry.incarnation) + struct.pack(f"<{len(entry.starts)}I", *entry.starts)
        kind = _DEAD
    elif isinstance(entry, Reset):
        kind, body = _RESET, entry.namespace + _SEQUENCE.pack(entry.sequence)
    elif isinstance(entry, Manifest):
        kind, body = _MANIFEST, entry.family + entry.digest + entry.manifest
    else:
        kind, body = _OUT, entry.drive_id + _SEQUENCE.pack(entry.sequence)
    return _ENTRY.pack(kind, len(body)) + body


def entry_bytes(entry: Entry) -> int:
    """Bytes of an entry inside of a batch."""
    if isinstance(entry, Dead):
        return _ENTRY.size + _PLACE.size + 4 * len(entry.starts)
    if isinstance(entry, Manifest):
        return _ENTRY.size + 64 + len(entry.manifest)
    return _ENTRY.size + len(entry[0]) + _SEQUENCE.size


def cut(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries in groups of one batch each; at least one group, which may be empty."""
    group: list[Entry] = []
    size = 0
    for entry in entries:
        more = entry_bytes(entry)
        if group and size + more > MAX_BATCH_BYTES:
            yield group
            group, size = [], 0
        group.append(entry)
        size += more
    yield group


def pack_batch(
    tag: bytes,
    generation: int,
    number: int,
    previous: int,
    entries: Iterable[Entry],
    *,
    begins: bool = False,
    ends: bool = False,
) -> tuple[bytes, int]:
    """Whole blocks, and the batch's checksum, which the next one carries as ``previous``."""
    body = b"".join(map(_pack_entry, entries))
    flags = _SNAPSHOT_BEGINS * begins | _SNAPSHOT_ENDS * ends
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, flags, tag, generation, number, len(body), previous, 0)
    checksum = xxhash.xxh3_64_intdigest(head + body)
    data = head[: -_SEQUENCE.size] + _SEQUENCE.pack(checksum) + body
    return data.ljust(-(-len(data) // BLOCK_BYTES) * BLOCK_BYTES, b"\0"), checksum


def batch_size(head: bytes) -> int | None:
    """Bytes of the batch that begins with ``head``; None: no batch begins so."""
    if len(head) < HEAD_BYTES or head[:4] != _MAGIC:
        return None
    body_bytes: int = _HEAD.unpack_from(head)[6]
    return -(-(HEAD_BYTES + body_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def parse_batch(data: bytes, tag: bytes, number: int, previous: int | None) -> Batch | None:
    """The batch at the beginning of ``data``.

    Args:
        data: all of its bytes, and maybe more.
        tag: the drive's.
        number: the one expected here.
        previous: checksum of the batch before it; None at the beginning of a half, where any will do.

    Returns:
        None: it is no batch, it is torn, or it belongs somewhere else.
    """
    size = batch_size(data)
    if size is None or size > len(data):
        return None
    _, version, flags, its_tag, generation, its_number, body_bytes, its_previous, checksum = _HEAD.unpack_from(data)
    if (version, its_tag, its_number) != (FORMAT_VERSION, tag, number) or previous not in (None, its_previous):
        return None
    body = data[HEAD_BYTES : HEAD_BYTES + body_bytes]
    if xxhash.xxh3_64_intdigest(data[: HEAD_BYTES - _SEQUENCE.size] + bytes(_SEQUENCE.size) + body) != checksum:
        return None
    begins, ends = bool(flags & _SNAPSHOT_BEGINS), bool(flags & _SNAPSHOT_ENDS)
    return Batch(generation, its_number, begins, ends, checksum, size, body)


def claims(head: bytes, tag: bytes, generation: int, number: int) -> bool:
    """Whether the bytes say that they are that very batch, true or not: then one was written here, and is not whole."""
    if len(head) < HEAD_BYTES or head[:4] != _MAGIC:
        return False
    return _HEAD.unpack_from(head)[3:6] == (tag, generation, number)


def parse_entries(body: bytes) -> Iterator[Entry]:
    """The entries of a batch whose checksum was right."""
    at = 0
    while at < len(body):
        kind, length = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        data = body[at : at + length]
        at += length
        if kind == _DEAD:
            segment, incarnation = _PLACE.unpack_from(data)
            starts = struct.unpack_from(f"<{(length - _PLACE.size) // 4}I", data, _PLACE.size)
            yield Dead(segment, incarnation, starts)
        elif kind == _RESET:
            yield Reset(data[:32], *_SEQUENCE.unpack_from(data, 32))
        elif kind == _MANIFEST:
            yield Manifest(data[:32], data[32:64], data[64:])
        elif kind == _OUT:
            yield DriveOut(data[:16], *_SEQUENCE.unpack_from(data, 16))
