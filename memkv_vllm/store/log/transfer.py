"""Moves records between arena and medium. Blocking; for worker threads, which touch nothing else of the log."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.format import (
    BLOCK_BYTES,
    Geometry,
    RecordHeader,
    num_blocks,
    pack_record_header,
    parse_record_header,
)
from memkv_vllm.store.log.medium import AlignedBuffer, Medium
from memkv_vllm.store.log.scanning import verified
from memkv_vllm.transports.memory import HostMemory

__all__ = ["Copied", "Copy", "Place", "ReadResult", "Written", "copy_records", "read_value", "write_records"]

COPY_BYTES = 4 << 20
"""Bounce buffer of records that are written again."""


class Place(NamedTuple):
    """A drive as far as a transfer needs it."""

    medium: Medium
    tag: bytes
    geometry: Geometry


class Written(NamedTuple):
    """A record to write: the value's bytes are at ``arena_offset``."""

    record: Record
    sequence: int
    start: int
    arena_offset: int


def _own_checksum(record: Record, payload: memoryview) -> int:
    """Where the writer's checksum cannot be computed here, ours: a torn payload must always be seen."""
    return 0 if record.algorithm == ChecksumAlgorithm.XXH3_64_TREE_1M else digest(payload)


def write_records(
    place: Place, arena: HostMemory, heads: AlignedBuffer, segment: int, incarnation: int, records: Sequence[Written]
) -> None:
    """Writes adjacent records in as few calls as possible.

    The payload goes from the arena to the medium without a copy, up to the end of its last page.

    Raises:
        OSError: none of them counts as written.
    """
    buffers: list[memoryview] = []
    for number, (record, sequence, start, offset) in enumerate(records):
        own = _own_checksum(record, arena.view(offset, record.length))
        header = RecordHeader(record, segment, incarnation, start, sequence, own)
        head = heads.block(number)
        head[:] = pack_record_header(place.tag, header)
        buffers += (head, arena.view(offset, num_blocks(record.length) * BLOCK_BYTES))
    place.medium.writev(buffers, place.geometry.at(segment, records[0].start))


class ReadResult(Enum):
    """How a read ended."""

    OK = "ok"
    GONE = "gone"
    """Another record, or none, stands there."""
    WRONG = "wrong"
    """The record is there, and its bytes are not those that were written."""


def read_value(
    place: Place, arena: HostMemory, head: memoryview, record: Record, location: Location, arena_offset: int
) -> ReadResult:
    """Reads a record's payload to ``arena_offset`` and checks it.

    Raises:
        OSError: the medium failed; what is in the arena there is undefined.
    """
    payload = arena.view(arena_offset, num_blocks(record.length) * BLOCK_BYTES)
    at = place.geometry.at(location.segment, location.offset // BLOCK_BYTES)
    place.medium.readv([head, payload], at)
    header = parse_record_header(bytes(head), place.tag)
    if header is None:
        return ReadResult.WRONG
    found = (header.segment, header.incarnation, header.start * BLOCK_BYTES)
    if found != (location.segment, location.incarnation, location.offset) or header.record != record:
        return ReadResult.GONE
    return ReadResult.OK if verified(header, payload[: record.length]) else ReadResult.WRONG


class Copy(NamedTuple):
    """A record to write again at another place of the same drive."""

    source: Location
    target: Location
    blocks: int


class Copied(NamedTuple):
    """A record that was written again."""

    copy: Copy
    header: RecordHeader


def _copy_record(place: Place, buffer: AlignedBuffer, copy: Copy) -> RecordHeader | None:
    geometry, source, target = place.geometry, copy.source, copy.target
    block = source.offset // BLOCK_BYTES
    head = buffer.block(0)
    place.medium.readv([head], geometry.at(source.segment, block))
    old = parse_record_header(bytes(head), place.tag)
    if old is None or (old.segment, old.incarnation, old.start) != (source.segment, source.incarnation, block):
        return None
    start = target.offset // BLOCK_BYTES
    new = old._replace(segment=target.segment, incarnation=target.incarnation, start=start)
    # Not verified here: the header keeps the checksum, so a read will see it if the payload was damaged.
    payload_blocks, step = copy.blocks - 1, len(buffer.view) // BLOCK_BYTES
    for first in range(0, payload_blocks, step):
        piece = buffer.view[: min(step, payload_blocks - first) * BLOCK_BYTES]
        place.medium.readv([piece], geometry.at(source.segment, block + 1 + first))
        place.medium.writev([piece], geometry.at(target.segment, start + 1 + first))
    head[:] = pack_record_header(place.tag, new)
    place.medium.writev([head], geometry.at(target.segment, start))
    return new


def copy_records(place: Place, copies: Sequence[Copy], done: list[Copied]) -> None:
    """Writes adjacent records again, up to the first that cannot be found; ``done`` gets each that succeeded.

    Raises:
        OSError: the medium failed; ``done`` has what was copied until then.
    """
    buffer = AlignedBuffer(COPY_BYTES)
    try:
        for copy in copies:
            header = _copy_record(place, buffer, copy)
            if header is None:
                return  # the log must have no gap: what comes next is written in this one's place
            done.append(Copied(copy, header))
    finally:
        buffer.close()
