"""What stands on a medium: places and bytes of version 1. Pure.

A drive, everything little-endian, everything in blocks of 4 KiB::

    0            superblock, copy A        who this drive is, and of which store; see Superblock
    4 KiB        superblock, copy B
    64 KiB       journal, half 0           see journal.py
                 journal, half 1
                 segment 0, 1, 2 ...       each segment_bytes long

    a segment    block 0                   header: number and incarnation (how often the segment was started)
                 record, record ...        appended
                 index                     at the end, once sealed: rows, keys, and a footer in its last 64 bytes
    a record     one block                 header: key, length, checksums, layout, sequence; and where it stands
                 payload                   the value's bytes, filled up to a whole block

A header carries the drive's tag, its segment, incarnation and place: bytes of an earlier use of the same blocks, of
an earlier format or of another drive are never taken for a record. A record's sequence number orders all records of a
store; a record that is moved keeps it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from memkv_vllm.store.log.api import Record

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "INDEX_DTYPE",
    "MAX_DRIVES",
    "MAX_KEY_BYTES",
    "Geometry",
    "Index",
    "RecordHeader",
    "Superblock",
    "default_segment_bytes",
    "index_blocks",
    "num_blocks",
    "pack_index",
    "pack_record_header",
    "pack_segment_header",
    "pack_superblock",
    "parse_index",
    "parse_record_header",
    "parse_segment_header",
    "parse_superblock",
    "record_blocks",
    "superblock_version",
]

BLOCK_BYTES = 4096
"""Unit of everything on a medium: the page of the arena, and the largest logical block of today's drives."""
FORMAT_VERSION = 1
SUPERBLOCK_COPIES = 2
JOURNAL_OFFSET = 64 << 10
MAX_DRIVES = 192
"""Drive ids that fit a superblock."""
MAX_KEY_BYTES = 255
"""As on the wire."""
MIN_JOURNAL_HALF_BYTES, JOURNAL_DIVISOR = 256 << 10, 1024
MIN_SEGMENTS = 4
"""One that is written, one in reserve, and two to choose from."""

_SUPERBLOCK_MAGIC, _SEGMENT_MAGIC, _RECORD_MAGIC, _INDEX_MAGIC = b"MEMKVDRV", b"MKVS", b"MKVR", b"MKVI"
_SUPERBLOCK = struct.Struct("<8sHHIQ16s16sIIQQQQQ")
_SEGMENT = struct.Struct("<4sHxx8sII")
_RECORD = struct.Struct("<4sHH8sIIIBxxxQQQQQ")
_FOOTER = struct.Struct("<4sHxx8sIIIIQ16x")
_CHECKSUM = struct.Struct("<Q")
FOOTER_BYTES = _FOOTER.size + _CHECKSUM.size
TAG_BYTES = 8

INDEX_DTYPE = np.dtype(
    [
        ("start", "<u4"),
        ("key_bytes", "<u2"),
        ("algorithm", "u1"),
        ("spare", "u1"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("layout", "<u8"),
        ("sequence", "<u8"),
    ]
)
"""One row of a sealed segment's index; ``start`` counts blocks of the segment."""


def num_blocks(num_bytes: int) -> int:
    """Blocks that hold ``num_bytes``."""
    return -(-num_bytes // BLOCK_BYTES)


def record_blocks(length: int) -> int:
    """Blocks of a record whose value has ``length`` bytes: a header and the payload."""
    return 1 + num_blocks(length)


def default_segment_bytes(size: int) -> int:
    """Bytes of a segment on a drive of ``size`` bytes: a 64th, a power of two within 1 and 256 MiB."""
    wanted = max(1, size // 64)
    return min(max(1 << wanted.bit_length() - 1, 1 << 20), 256 << 20)


def _sealed(*parts: bytes | memoryview) -> bytes:
    """The parts with their checksum behind them."""
    body = b"".join(parts)
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _opened(data: bytes, size: int) -> bytes | None:
    """The first ``size`` bytes if the checksum behind them is theirs."""
    if len(data) < size + _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, size)
    return data[:size] if xxhash.xxh3_64_intdigest(data[:size]) == checksum else None


# ------------------------------------------------------------------------------------------------ drive


class Geometry(NamedTuple):
    """Where things are on a drive; all in bytes."""

    size: int
    segment_bytes: int
    journal_half_bytes: int
    segments_offset: int

    @classmethod
    def for_size(cls, size: int, segment_bytes: int) -> Geometry:
        """The layout of a new drive of ``size`` bytes.

        A half of the journal has room for the worst set of tombstones (4 bytes for each record of two blocks, a 2048th
        of the drive) and for as many again that are written until the next compaction.
        """
        half = max(MIN_JOURNAL_HALF_BYTES, num_blocks(size // JOURNAL_DIVISOR) * BLOCK_BYTES)
        return cls(size, segment_bytes, half, JOURNAL_OFFSET + 2 * half)

    @property
    def num_segments(self) -> int:
        """Whole segments that the drive holds."""
        return max(0, (self.size - self.segments_offset) // self.segment_bytes)

    @property
    def segment_blocks(self) -> int:
        """Blocks of a segment, its header and index included."""
        return self.segment_bytes // BLOCK_BYTES

    def journal_half(self, half: int) -> int:
        """Where a half of the journal begins."""
        return JOURNAL_OFFSET + half * self.journal_half_bytes

    def at(self, segment: int, block: int) -> int:
        """Where block ``block`` of segment ``segment`` begins."""
        return self.segments_offset + segment * self.segment_bytes + block * BLOCK_BYTES


class Superblock(NamedTuple):
    """Who a drive is."""

    generation: int
    """The newest of a store's superblocks knows its drives."""
    server_id: bytes
    drive_id: bytes
    complete: bool
    """False while a store is being formatted: such a drive counts as blank unless the store names it."""
    drives: tuple[bytes, ...]
    """Ids of all drives of the store, this one among them."""
    geometry: Geometry

    @property
    def tag(self) -> bytes:
        """Stands in every header of the drive."""
        return self.drive_id[:TAG_BYTES]


def pack_superblock(block: Superblock) -> bytes:
    """One block."""
    at = block.drives.index(block.drive_id)
    head = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC, FORMAT_VERSION, int(block.complete), len(block.drives), block.generation, block.server_id,
        block.drive_id, at, BLOCK_BYTES, *block.geometry, JOURNAL_OFFSET,
    )  # fmt: skip
    return _sealed(head, *block.drives).ljust(BLOCK_BYTES, b"\0")


def superblock_version(data: bytes) -> int | None:
    """Format version of what may be a superblock; None: it is not one. Needs no valid checksum."""
    if data[:8] != _SUPERBLOCK_MAGIC:
        return None
    return int.from_bytes(data[8:10], "little")


def parse_superblock(data: bytes) -> Superblock | None:
    """A superblock of this version; None: it is not one, or its checksum is wrong."""
    if superblock_version(data) != FORMAT_VERSION:
        return None
    fields = _SUPERBLOCK.unpack_from(data)
    complete, count, generation, server_id, drive_id = fields[2:7]
    if count > MAX_DRIVES or (body := _opened(data, _SUPERBLOCK.size + 16 * count)) is None:
        return None
    ids = body[_SUPERBLOCK.size :]
    drives = tuple(ids[start : start + 16] for start in range(0, len(ids), 16))
    return Superblock(generation, server_id, drive_id, bool(complete), drives, Geometry(*fields[9:13]))


# ------------------------------------------------------------------------------------------------ segment


def pack_segment_header(tag: bytes, segment: int, incarnation: int) -> bytes:
    """One block: whatever stands behind it belongs to an earlier incarnation unless it says otherwise."""
    return _sealed(_SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, tag, segment, incarnation)).ljust(BLOCK_BYTES, b"\0")


def parse_segment_header(data: bytes, tag: bytes, segment: int) -> int | None:
    """The incarnation; None: this segment was never started on this drive."""
    body = _opened(data, _SEGMENT.size)
    if body is None:
        return None
    magic, version, *rest, incarnation = _SEGMENT.unpack(body)
    if (magic, version, *rest) != (_SEGMENT_MAGIC, FORMAT_VERSION, tag, segment):
        return None
    return int(incarnation)


class RecordHeader(NamedTuple):
    """What a record says about itself."""

    record: Record
    segment: int
    incarnation: int
    start: int
    """Block of the segment at which the record begins."""
    sequence: int
    payload_checksum: int
    """Ours (xxh3-64-tree-1m), where the writer gave none that we can compute; else 0."""


def pack_record_header(tag: bytes, header: RecordHeader) -> bytes:
    """One block."""
    key, length, checksum, algorithm, layout = header.record
    fixed = _RECORD.pack(
        _RECORD_MAGIC, FORMAT_VERSION, len(key), tag, header.segment, header.incarnation, header.start, algorithm,
        length, checksum, layout, header.sequence, header.payload_checksum,
    )  # fmt: skip
    return _sealed(fixed, key).ljust(BLOCK_BYTES, b"\0")


def parse_record_header(data: bytes, tag: bytes) -> RecordHeader | None:
    """A header of this drive; None: it is not one, or its checksum is wrong."""
    if data[:4] != _RECORD_MAGIC or len(data) < _RECORD.size:
        return None
    fields = _RECORD.unpack_from(data)
    key_bytes = fields[2]
    body = _opened(data, _RECORD.size + key_bytes)
    if body is None or fields[1] != FORMAT_VERSION or fields[3] != tag:
        return None
    segment, incarnation, start, algorithm, length, checksum, layout, sequence, own = fields[4:]
    record = Record(body[_RECORD.size :], length, checksum, algorithm, layout)
    return RecordHeader(record, segment, incarnation, start, sequence, own)


# ------------------------------------------------------------------------------------------------ index


class Index(NamedTuple):
    """A segment's records: rows of :data:`INDEX_DTYPE`, and their keys in the same order."""

    rows: npt.NDArray[np.void]
    keys: list[bytes]


def index_blocks(records: int, key_bytes: int) -> int:
    """Blocks of the index of that many records whose keys have ``key_bytes`` bytes together."""
    return num_blocks(records * INDEX_DTYPE.itemsize + key_bytes + FOOTER_BYTES)


def pack_index(tag: bytes, segment: int, incarnation: int, entries: Sequence[tuple[int, int, Record]]) -> bytes:
    """Whole blocks, to stand at the end of the segment. ``entries``: start, sequence and record of each."""
    rows = np.array(
        [
            (start, len(record.key), record.algorithm, 0, record.length, record.checksum, record.layout, sequence)
            for start, sequence, record in entries
        ],
        dtype=INDEX_DTYPE,
    )
    keys = b"".join(record.key for _, _, record in entries)
    return build_index(tag, segment, incarnation, rows, keys)


def build_index(tag: bytes, segment: int, incarnation: int, rows: npt.NDArray[np.void], keys: bytes) -> bytes:
    """As :func:`pack_index`, of columns that are there already."""
    body = rows.tobytes() + keys
    checksum = xxhash.xxh3_64_intdigest(body)
    footer = _FOOTER.pack(
        _INDEX_MAGIC, FORMAT_VERSION, tag, segment, incarnation, len(rows), len(keys), checksum
    )  # fmt: skip
    size = index_blocks(len(rows), len(keys)) * BLOCK_BYTES
    return body.ljust(size - FOOTER_BYTES, b"\0") + _sealed(footer)


def index_size(tail: bytes, tag: bytes, segment: int, incarnation: int) -> tuple[int, int, int] | None:
    """``(records, key bytes, checksum)`` of the index that ends with ``tail``; None: none of this incarnation."""
    footer = _opened(tail[-FOOTER_BYTES:], _FOOTER.size)
    if footer is None:
        return None
    magic, version, *identity, records, key_bytes, checksum = _FOOTER.unpack(footer)
    if (magic, version, *identity) != (_INDEX_MAGIC, FORMAT_VERSION, tag, segment, incarnation):
        return None
    return records, key_bytes, checksum


def parse_index(data: bytes, records: int, key_bytes: int, checksum: int) -> Index | None:
    """The index in ``data`` (its blocks, to the end of the segment); None: its checksum is wrong."""
    size = records * INDEX_DTYPE.itemsize
    body = data[: size + key_bytes]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    rows = np.frombuffer(body, dtype=INDEX_DTYPE, count=records)
    return Index(rows, _split(body[size:], rows["key_bytes"]))


def _split(keys: bytes, lengths: npt.NDArray[np.uint16]) -> list[bytes]:
    if not len(lengths):
        return []
    first = int(lengths[0])
    if first and (lengths == first).all():
        return [keys[at : at + first] for at in range(0, len(keys), first)]
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [keys[start:end] for start, end in zip([0, *ends], ends)]  # noqa: B905
