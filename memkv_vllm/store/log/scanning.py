"""Reads a drive's journal and indexes at start. Blocking; one worker thread per drive.

Sealed segments give their index in one read; only a segment that was being written is read record by record, and there
payloads are checked too, since a record's header and payload are written by one call and any part of it may be lost.
Such a segment is sealed afterwards with what was found whole: what lies behind a torn record is never looked at again,
so that it cannot come back later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.store.log.api import Record
from memkv_vllm.store.log.format import (
    BLOCK_BYTES,
    Geometry,
    Index,
    RecordHeader,
    Superblock,
    index_blocks,
    index_size,
    num_blocks,
    pack_index,
    pack_segment_header,
    parse_index,
    parse_record_header,
    parse_segment_header,
    record_blocks,
)
from memkv_vllm.store.log.journal import (
    HEAD_BYTES,
    Batch,
    Dead,
    DriveOut,
    Manifest,
    Reset,
    batch_size,
    claims,
    parse_batch,
    parse_entries,
)
from memkv_vllm.store.log.medium import AlignedBuffer, Medium, read_bytes

__all__ = ["DriveContent", "JournalContent", "JournalEnd", "SegmentContent", "read_drive", "verified"]

logger = logging.getLogger("memkv.store.log")

INDEX_READ_BYTES = 64 << 10
"""Read from the end of a segment at first: the whole index of some 580 records."""
JOURNAL_READ_BYTES = 1 << 20


class JournalEnd(NamedTuple):
    """Where the journal goes on."""

    generation: int
    number: int
    previous: int
    offset: int
    """Bytes into the half."""


@dataclass
class JournalContent:
    """What a drive's journal remembers."""

    dead: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Starts by segment and incarnation."""
    resets: dict[bytes, int] = field(default_factory=dict)
    manifests: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    drives_out: dict[bytes, int] = field(default_factory=dict)
    end: JournalEnd = JournalEnd(0, 0, 0, 0)

    def take(self, batch: Batch) -> None:
        """Adds a batch's entries."""
        for entry in parse_entries(batch.body):
            if isinstance(entry, Dead):
                self.dead.setdefault((entry.segment, entry.incarnation), set()).update(entry.starts)
            elif isinstance(entry, Reset):
                self.resets[entry.namespace] = max(entry.sequence, self.resets.get(entry.namespace, 0))
            elif isinstance(entry, Manifest):
                self.manifests[entry.family, entry.digest] = entry.manifest
            elif isinstance(entry, DriveOut):
                self.drives_out[entry.drive_id] = max(entry.sequence, self.drives_out.get(entry.drive_id, 0))


@dataclass(frozen=True)
class SegmentContent:
    """A segment with records."""

    number: int
    incarnation: int
    index: Index


@dataclass
class DriveContent:
    """All that a drive says."""

    journal: JournalContent
    segments: list[SegmentContent]
    incarnations: list[int]
    """Of every segment; 0: never started."""
    repairs: list[tuple[int, bytes]] = field(default_factory=list)
    """What is to be written where, once the start is sure to go on: indexes and headers of what was being written."""
    scanned: int = 0
    """Segments that had to be read record by record."""
    torn: int = 0
    """Records that were not whole."""


def verified(header: RecordHeader, payload: memoryview) -> bool:
    """Whether the payload is the one that the header was written with."""
    if header.record.algorithm == ChecksumAlgorithm.XXH3_64_TREE_1M:
        return digest(payload) == header.record.checksum
    return digest(payload) == header.payload_checksum


# ------------------------------------------------------------------------------------------------ journal


def _batches(medium: Medium, geometry: Geometry, tag: bytes, half: int) -> Iterator[Batch]:
    """The batches of a half, up to the first that does not belong behind the one before it."""
    start, size = geometry.journal_half(half), geometry.journal_half_bytes
    window, base, at, number = b"", 0, 0, 0
    before: Batch | None = None
    while at < size:
        here = at - base
        need = batch_size(window[here : here + HEAD_BYTES]) if here < len(window) else BLOCK_BYTES
        if need is None or at + need > size:
            return
        if here + need > len(window):
            base, window = at, read_bytes(medium, start + at, min(max(JOURNAL_READ_BYTES, need), size - at))
            continue
        data = window[here : here + need]
        batch = parse_batch(data, tag, number, before.checksum if before is not None else None)
        if batch is None or before is not None and batch.generation != before.generation:
            if before is not None and claims(data, tag, before.generation, number):
                logger.warning(
                    "journal.torn media=%s batch=%d at=%d: what was written from there on is cut off; the last deletes "
                    "may be undone", medium.name, number, start + at,
                )  # fmt: skip
            return
        yield batch
        at, number, before = at + batch.size, number + 1, batch


def _read_half(medium: Medium, geometry: Geometry, tag: bytes, half: int) -> JournalContent | None:
    """A half's content; None: there is no whole snapshot in it."""
    content, whole, offset = JournalContent(), False, 0
    for batch in _batches(medium, geometry, tag, half):
        if not offset and (not batch.snapshot_begins or batch.generation % 2 != half):
            return None
        content.take(batch)
        whole = whole or batch.snapshot_ends
        offset += batch.size
        content.end = JournalEnd(batch.generation, batch.number + 1, batch.checksum, offset)
    return content if whole else None


def read_journal(medium: Medium, block: Superblock) -> JournalContent:
    """The newest whole snapshot with what follows it.

    Raises:
        EnvironmentFault: neither half has one, although the drive was formatted: what was forgotten is not known.
    """
    halves = [_read_half(medium, block.geometry, block.tag, half) for half in (0, 1)]
    found = [half for half in halves if half is not None]
    if not found:
        raise EnvironmentFault(
            f"storage: the journal of {medium.name} is damaged: which values were deleted cannot be known; check the "
            f"drive (dmesg, smartctl), then wipe it, or remove it and set storage.missing_drives: forget"
        )
    return max(found, key=lambda content: content.end.generation)


# ------------------------------------------------------------------------------------------------ segments


def _read_index(medium: Medium, block: Superblock, segment: int, incarnation: int) -> Index | None:
    geometry = block.geometry
    end = geometry.at(segment + 1, 0)
    tail = read_bytes(medium, end - INDEX_READ_BYTES, INDEX_READ_BYTES)
    size = index_size(tail, block.tag, segment, incarnation)
    if size is None:
        return None
    records, key_bytes, checksum = size
    length = index_blocks(records, key_bytes) * BLOCK_BYTES
    if length > geometry.segment_bytes - BLOCK_BYTES:
        return None
    data = tail[-length:] if length <= len(tail) else read_bytes(medium, end - length, length)
    return parse_index(data, records, key_bytes, checksum)


class _Scan:
    """One segment, record by record. Holds a buffer that grows with the largest record."""

    def __init__(self, medium: Medium, block: Superblock) -> None:
        self._medium, self._block = medium, block
        self._buffer = AlignedBuffer(BLOCK_BYTES)
        self.torn = 0

    def close(self) -> None:
        self._buffer.close()

    def _read(self, offset: int, length: int) -> memoryview:
        if len(self._buffer.view) < length:
            self._buffer.close()
            self._buffer = AlignedBuffer(length)
        view = self._buffer.view[:length]
        self._medium.readv([view], offset)
        return view

    def records(self, segment: int, incarnation: int) -> Iterator[tuple[int, int, Record]]:
        geometry, at = self._block.geometry, 1
        while at < geometry.segment_blocks:
            head = bytes(self._read(geometry.at(segment, at), BLOCK_BYTES))
            header = parse_record_header(head, self._block.tag)
            if header is None or (header.segment, header.incarnation, header.start) != (segment, incarnation, at):
                return
            length = header.record.length
            if at + record_blocks(length) > geometry.segment_blocks:
                return
            payload = self._read(geometry.at(segment, at + 1), num_blocks(length) * BLOCK_BYTES)[:length]
            if verified(header, payload):
                yield at, header.sequence, header.record
            else:
                self.torn += 1
            at += record_blocks(length)


def _scan_segment(
    medium: Medium, block: Superblock, segment: int, incarnation: int, content: DriveContent
) -> Index | None:
    """The index of an unsealed segment, which is to be sealed with it; None: there is no whole record in it."""
    scan = _Scan(medium, block)
    try:
        entries = list(scan.records(segment, incarnation))
    finally:
        scan.close()
    content.scanned += 1
    content.torn += scan.torn
    if not entries:
        return None
    data = pack_index(block.tag, segment, incarnation, entries)
    content.repairs.append((block.geometry.at(segment + 1, 0) - len(data), data))
    records, key_bytes, checksum = index_size(data, block.tag, segment, incarnation) or (0, 0, 0)
    return parse_index(data, records, key_bytes, checksum)


def read_drive(medium: Medium, block: Superblock) -> DriveContent:
    """All that a drive says. Changes nothing: see ``repairs``.

    Args:
        medium: of the drive.
        block: its superblock, with a size that covers every segment that may be in use.

    Raises:
        EnvironmentFault: it cannot be read, or its journal is damaged.
    """
    try:
        content = DriveContent(read_journal(medium, block), [], [])
        for segment in range(block.geometry.num_segments):
            _read_segment(medium, block, segment, content)
    except OSError as error:
        raise EnvironmentFault(
            f"storage: {medium.name} cannot be read: {error}; check the drive (dmesg, smartctl); if it is lost, remove "
            f"it and set storage.missing_drives: forget"
        ) from error
    return content


def _read_segment(medium: Medium, block: Superblock, segment: int, content: DriveContent) -> None:
    start = block.geometry.at(segment, 0)
    incarnation = parse_segment_header(read_bytes(medium, start, BLOCK_BYTES), block.tag, segment) or 0
    if incarnation:
        index = _read_index(medium, block, segment, incarnation)
        if index is None:
            index = _scan_segment(medium, block, segment, incarnation, content)
        if index is None or not index.keys:
            # Nothing in it counts. Started anew even so: a record may stand behind a first one that was lost.
            incarnation += 1
            content.repairs.append((start, pack_segment_header(block.tag, segment, incarnation)))
        else:
            content.segments.append(SegmentContent(segment, incarnation, index))
    content.incarnations.append(incarnation)
