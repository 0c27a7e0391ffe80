"""What stands on a medium: every header is refused when a single bit of it is wrong, and stays what it is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from memkv_vllm.store.log.api import Record
from memkv_vllm.store.log.format import (
    BLOCK_BYTES,
    FORMAT_VERSION,
    MAX_DRIVES,
    Geometry,
    RecordHeader,
    Superblock,
    default_segment_bytes,
    index_blocks,
    index_size,
    pack_index,
    pack_record_header,
    pack_segment_header,
    pack_superblock,
    parse_index,
    parse_record_header,
    parse_segment_header,
    parse_superblock,
    record_blocks,
    superblock_version,
)

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
TAG = b"drivetag"
RECORD = Record(b"k" * 71, 1_000_000, 0x1122334455667788, 1, 0x99AABBCCDDEEFF00)
HEADER = RecordHeader(RECORD, 3, 2, 17, 123456789, 0)
GEOMETRY = Geometry.for_size(8 * GIB, 128 * MIB)
BLOCK = Superblock(5, b"S" * 16, b"D" * 16, True, (b"A" * 16, b"D" * 16), GEOMETRY)


def flipped(data: bytes, used: int) -> list[bytes]:
    """The bytes with one bit wrong, for each of the first ``used`` bytes."""
    found = []
    for at in range(used):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        found.append(bytes(changed))
    return found


def test_a_superblock_comes_back() -> None:
    data = pack_superblock(BLOCK)
    assert len(data) == BLOCK_BYTES
    assert parse_superblock(data) == BLOCK
    assert superblock_version(data) == FORMAT_VERSION


def test_a_superblock_with_a_wrong_bit_is_none() -> None:
    data = pack_superblock(BLOCK)
    assert all(parse_superblock(bad) is None for bad in flipped(data, 104 + 2 * 16 + 8))


def test_the_largest_list_of_drives_fits_a_superblock() -> None:
    ids = tuple(number.to_bytes(16, "little") for number in range(MAX_DRIVES))
    block = BLOCK._replace(drives=ids, drive_id=ids[-1])
    assert parse_superblock(pack_superblock(block)) == block
    assert len(pack_superblock(block)) == BLOCK_BYTES


def test_a_record_header_comes_back() -> None:
    data = pack_record_header(TAG, HEADER)
    assert len(data) == BLOCK_BYTES
    assert parse_record_header(data, TAG) == HEADER


def test_a_record_header_with_a_wrong_bit_is_none() -> None:
    data = pack_record_header(TAG, HEADER)
    assert all(parse_record_header(bad, TAG) is None for bad in flipped(data, 72 + 71 + 8))


def test_a_record_of_another_drive_is_none() -> None:
    assert parse_record_header(pack_record_header(TAG, HEADER), b"othertag") is None


@pytest.mark.parametrize("key_bytes", [1, 71, 255])
def test_keys_of_any_length_fit_a_header(key_bytes: int) -> None:
    header = HEADER._replace(record=RECORD._replace(key=bytes(range(1, key_bytes + 1))))
    assert parse_record_header(pack_record_header(TAG, header), TAG) == header


def test_a_segment_header_is_of_its_drive_segment_and_incarnation() -> None:
    data = pack_segment_header(TAG, 5, 9)
    assert parse_segment_header(data, TAG, 5) == 9
    assert parse_segment_header(data, TAG, 4) is None
    assert parse_segment_header(data, b"othertag", 5) is None
    assert parse_segment_header(bytes(BLOCK_BYTES), TAG, 5) is None
    assert all(parse_segment_header(bad, TAG, 5) is None for bad in flipped(data, 24 + 8))


@pytest.mark.parametrize("lengths", [[], [71], [71] * 700, [16, 1, 255, 71] * 50])
def test_an_index_comes_back(lengths: list[int]) -> None:
    entries = [(1 + 2 * at, 100 + at, RECORD._replace(key=bytes([at % 251]) * n)) for at, n in enumerate(lengths)]
    data = pack_index(TAG, 2, 7, entries)
    assert len(data) == index_blocks(len(entries), sum(lengths)) * BLOCK_BYTES
    size = index_size(data[-BLOCK_BYTES:], TAG, 2, 7)
    assert size is not None
    index = parse_index(data, *size)
    assert index is not None
    assert index.keys == [record.key for _, _, record in entries]
    assert index.rows["start"].tolist() == [start for start, _, _ in entries]
    assert index.rows["sequence"].tolist() == [sequence for _, sequence, _ in entries]
    assert np.all(index.rows["length"] == RECORD.length)
    assert np.all(index.rows["checksum"] == RECORD.checksum)


def test_an_index_of_another_use_or_with_a_wrong_bit_is_none() -> None:
    data = pack_index(TAG, 2, 7, [(1, 5, RECORD)])
    assert index_size(data, TAG, 2, 6) is None
    assert index_size(data, TAG, 1, 7) is None
    assert all(index_size(bad[::-1], TAG, 2, 7) is None for bad in flipped(data[::-1], 48 + 8))
    size = index_size(data, TAG, 2, 7)
    assert size is not None
    assert all(parse_index(bad, *size) is None for bad in flipped(data, 40 + 71))


def test_the_format_is_the_one_of_version_1() -> None:
    """A change of any byte is a new format version: stores that were written must go on to be read."""
    digest = hashlib.sha256()
    for data in (
        pack_superblock(BLOCK),
        pack_record_header(TAG, HEADER),
        pack_segment_header(TAG, 5, 9),
        pack_index(TAG, 2, 7, [(1, 5, RECORD)]),
    ):
        digest.update(data)
    assert FORMAT_VERSION == 1
    assert digest.hexdigest() == "f7448675b97f9954f50cc91dd8ec662228fc9bfa70d215f8c3bf85cab0c33f1a"


@pytest.mark.parametrize(
    ("size", "segment"),
    [(8 * MIB, MIB), (GIB, 16 * MIB), (10 * GIB, 128 * MIB), (16 * GIB, 256 * MIB), (4 * TIB, 256 * MIB)],
)
def test_segments_grow_with_the_drive(size: int, segment: int) -> None:
    assert default_segment_bytes(size) == segment
    geometry = Geometry.for_size(size, segment)
    assert geometry.at(geometry.num_segments, 0) <= size < geometry.at(geometry.num_segments + 1, 0)


@pytest.mark.parametrize("size", [64 * MIB, 10 * GIB, 4 * TIB])
def test_half_a_journal_holds_the_worst_tombstones_twice(size: int) -> None:
    """All records of the smallest size dead, in every segment: the journal is bounded by the drive alone."""
    geometry = Geometry.for_size(size, default_segment_bytes(size))
    records = geometry.num_segments * (geometry.segment_blocks // record_blocks(1))
    assert 2 * 4 * records <= geometry.journal_half_bytes
    assert 2 * geometry.journal_half_bytes <= max(size // 250, 1 << 19)
