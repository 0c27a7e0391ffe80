"""The journal's bytes: batches that follow each other count, what is torn or left from before does not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from memkv_vllm.store.log.format import BLOCK_BYTES, JOURNAL_OFFSET, Geometry, Superblock
from memkv_vllm.store.log.journal import (
    MAX_BATCH_BYTES,
    Dead,
    DriveOut,
    Entry,
    Manifest,
    Reset,
    batch_size,
    cut,
    entry_bytes,
    pack_batch,
    parse_batch,
    parse_entries,
)
from memkv_vllm.store.log.journaling import JournalWriter
from memkv_vllm.store.log.medium import write_bytes
from memkv_vllm.store.log.scanning import JournalEnd, read_journal
from memkv_vllm.store.log.worker import DriveWorker
from tests.support.log_media import FakeHost, failing

TAG = b"drivetag"
ENTRIES: list[Entry] = [
    Dead(3, 2, (1, 9, 70_000)),
    Reset(b"n" * 32, 1 << 60),
    Manifest(b"f" * 32, b"d" * 32, b"{}"),
    Manifest(b"f" * 32, b"e" * 32, b""),
    DriveOut(b"i" * 16, 99),
]


def test_entries_come_back() -> None:
    data, checksum = pack_batch(TAG, 4, 0, 0, ENTRIES, begins=True)
    batch = parse_batch(data, TAG, 0, None)
    assert batch is not None
    assert (batch.generation, batch.number, batch.checksum, batch.size) == (4, 0, checksum, len(data))
    assert (batch.snapshot_begins, batch.snapshot_ends) == (True, False)
    assert list(parse_entries(batch.body)) == ENTRIES
    assert sum(map(entry_bytes, ENTRIES)) == len(batch.body)


def test_a_torn_batch_is_none() -> None:
    data, _ = pack_batch(TAG, 4, 0, 0, [Manifest(b"f" * 32, b"d" * 32, b"x" * 9000)])
    used = len(data.rstrip(b"\0"))
    for length in range(0, used, 97):
        assert parse_batch(data[:length].ljust(len(data), b"\0"), TAG, 0, None) is None
    for at in range(used):
        changed = bytearray(data)
        changed[at] ^= 16
        assert parse_batch(bytes(changed), TAG, 0, None) is None


def test_a_batch_counts_only_behind_the_one_it_was_written_behind() -> None:
    """What lay behind a torn batch must not come back when another one is written in its place."""
    _, first = pack_batch(TAG, 4, 0, 0, ENTRIES)
    torn, second = pack_batch(TAG, 4, 1, first, [Reset(b"a" * 32, 5)])
    behind, _ = pack_batch(TAG, 4, 2, second, [Reset(b"b" * 32, 6)])
    _, instead = pack_batch(TAG, 4, 1, first, [Reset(b"c" * 32, 7)])
    assert len(torn) == 4096
    assert parse_batch(behind, TAG, 2, second) is not None
    assert parse_batch(behind, TAG, 2, instead) is None


@pytest.mark.parametrize(("tag", "number"), [(b"othertag", 0), (TAG, 1)])
def test_a_batch_of_another_drive_or_place_is_none(tag: bytes, number: int) -> None:
    data, _ = pack_batch(TAG, 4, 0, 0, ENTRIES)
    assert parse_batch(data, tag, number, None) is None


def test_what_is_no_batch_has_no_size() -> None:
    assert batch_size(bytes(64)) is None
    assert batch_size(b"MKVJ") is None


def test_batches_are_cut_by_bytes() -> None:
    entries = [Manifest(b"f" * 32, number.to_bytes(32, "big"), bytes(20_000)) for number in range(10)]
    entries.append(Manifest(b"f" * 32, b"l" * 32, bytes(MAX_BATCH_BYTES)))
    groups = list(cut(entries))
    assert [entry for group in groups for entry in group] == entries
    assert all(sum(map(entry_bytes, group)) <= MAX_BATCH_BYTES or len(group) == 1 for group in groups)
    assert list(cut([])) == [[]]


@pytest.mark.anyio
async def test_behind_a_snapshot_that_may_stand_there_nothing_is_added_to_the_old_half() -> None:
    """The drive says that the snapshot failed, and a start would find it whole and newer: what came later would be
    forgotten with the half that it was written to.
    """
    geometry = Geometry(1 << 20, 1 << 18, 2 * BLOCK_BYTES, JOURNAL_OFFSET + 4 * BLOCK_BYTES)
    host, path = FakeHost(), Path("/fake/0")
    medium = host.open(path, "file")
    medium.resize(geometry.size)
    beginning, checksum = pack_batch(TAG, 0, 0, 0, (), begins=True, ends=True)
    write_bytes(medium, geometry.journal_half(0), beginning)
    worker = DriveWorker(medium, sync=False, max_errors=9, on_out=lambda: None)
    dead: dict[int, list[int]] = {1: list(range(1500)), 2: [7]}
    writer = JournalWriter(
        medium, geometry, TAG, JournalEnd(0, 1, checksum, BLOCK_BYTES), worker,
        lambda: [Dead(segment, 1, tuple(starts)) for segment, starts in dead.items()],
    )  # fmt: skip
    for segment, starts in dead.items():
        for start in starts:
            writer.add_dead(segment, 1, start)
    host.fault = failing("sync", errno.EIO)
    with pytest.raises(OSError, match="injected"):
        await writer.write()
    del dead[1]  # a reclaim: its tombstones need not be remembered any more
    writer.drop_segment(1, 1)
    dead[3] = [8]
    writer.add_dead(3, 1, 8)
    await writer.write()
    assert not writer.pending
    server_id, drive_id = b"s" * 16, TAG + bytes(8)
    found = read_journal(medium, Superblock(1, server_id, drive_id, True, (drive_id,), geometry))
    assert found.dead.get((2, 1)) == {7}
    assert found.dead.get((3, 1)) == {8}
