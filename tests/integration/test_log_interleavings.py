"""Rare orders of events in the log: a read, a forget or an error in the middle of a step of the writing task."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest

from memkv_vllm.store.log import drive
from memkv_vllm.store.log.format import BLOCK_BYTES
from tests.support.harness import wait_until
from tests.support.log_media import FakeHost, Gate, failing
from tests.support.logs import MIB, NAMESPACE, OpenLog, key_of, opened, payload_of, start_only, storage

pytestmark = pytest.mark.anyio

ONE, TWO = Path("/fake/1"), Path("/fake/2")
LENGTH = 250_000
SMALL = storage([ONE], 7 * MIB, segment_size="1 MiB")
"""Six segments of three or four values each."""


def segment_offset(held: OpenLog, segment: int, drive: int = 0) -> int:
    """Where a segment begins on its drive."""
    return held.log._drives[drive].segments.geometry.at(segment, 0)


async def keys_in(host: FakeHost, config=SMALL) -> set[bytes]:
    """What a start finds."""
    return {value.record.key for value in (await start_only(config, open_medium=host.open)).values}


async def test_a_read_that_ends_while_a_new_segment_is_made_ready_does_not_end_the_log() -> None:
    """The segment that it frees has a lower number than the one that is being made ready."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        host.full = sum(host.reserved.values()) + 3 * MIB
        first = await held.put(key_of(0), payload_of(0, LENGTH))
        assert first is not None
        begin = segment_offset(held, first.segment)
        reading = Gate("read", lambda offset: offset == begin + first.offset)
        reclaiming = Gate("write", lambda offset: offset == begin)
        reserving = Gate("reserve")

        def fault(operation: str, path: Path, offset: int) -> None:
            reading(operation, path, offset)
            reclaiming(operation, path, offset)
            if host.full is None:
                reserving(operation, path, offset)

        async def read() -> None:
            assert await held.get(held.record_at(first), first) == payload_of(0, LENGTH)
            reserving.open()

        host.fault = fault
        number = 1
        async with anyio.create_task_group() as tasks:
            while not reclaiming.reached:
                held.offer(key_of(number), payload_of(number, LENGTH))
                number += 1
                await anyio.sleep(0.002)
            tasks.start_soon(read)
            await wait_until(lambda: reading.reached, "the read begins")
            reclaiming.open()
            await held.log.flush()
            assert held.log.statistics()["segments"]["draining"] == 1
            host.full = None  # space for new segments is asked for again
            while not reserving.reached:
                held.offer(key_of(number), payload_of(number, LENGTH))
                number += 1
                await anyio.sleep(0.002)
            reading.open()
        await held.log.flush()
        last = await held.put(key_of(number), payload_of(number, LENGTH))
        assert last is not None
        assert await held.get(held.record_at(last), last) == payload_of(number, LENGTH)


async def test_a_moved_value_does_not_come_back_from_a_segment_that_could_not_be_started_anew() -> None:
    """Its old place still has a good header there: without a tombstone a start would take it up."""
    host = FakeHost()
    config = storage([ONE], 7 * MIB, segment_size="1 MiB", max_drive_errors=100)
    async with opened(config, open_medium=host.open) as held:
        first = await held.put(key_of(0), payload_of(0, LENGTH))
        assert first is not None
        held.log.used(first)
        begin = segment_offset(held, first.segment)

        def fault(operation: str, path: Path, offset: int) -> None:
            if operation == "write" and offset == begin:
                raise OSError(errno.EIO, "injected")

        host.fault = fault
        number = 1
        while not held.log.health():
            await held.put(key_of(number), payload_of(number, LENGTH))
            number += 1
        assert held.counters["records_rewritten"] == 1
        held.log.forget([first])
        await held.log.flush_forgotten()
    host.fault = None
    assert key_of(0) not in await keys_in(host, config)


async def test_a_tombstone_for_a_move_that_was_not_made_costs_no_other_value() -> None:
    """The move ends at a record that is damaged; what is written next stands where it would have gone."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        locations = [await held.put(key_of(number), payload_of(number, 100_000)) for number in range(3)]
        first, second, third = locations
        assert first is not None and second is not None and third is not None
        begin = segment_offset(held, first.segment)
        held.log.used(first)
        held.log.used(second)
        damaged = begin + second.offset
        host.disks[ONE].volatile[damaged : damaged + BLOCK_BYTES] = bytes(BLOCK_BYTES)
        gate = host.fault = Gate("read", lambda offset: offset == begin + first.offset)
        number = 3
        while not gate.reached:
            held.offer(key_of(number), payload_of(number, 100_000))
            number += 1
            await anyio.sleep(0.002)
        held.log.forget([second])
        gate.open()
        await held.log.flush()
        assert held.counters["records_rewritten"] == 1
        kept = {
            held.records[token].key
            for token, location in held.written.items()
            if location is not None and location not in (*held.reclaimed, second)
        }
    assert await keys_in(host) == kept


async def test_an_index_that_a_start_writes_covers_no_value() -> None:
    """What was reset while it was written is in no index of ours; a start that reads record by record lists it."""
    host = FakeHost()
    config = storage([ONE], 16 * MIB, segment_size="2 MiB")
    other = bytes(32)
    async with opened(config, open_medium=host.open) as held:
        segments = held.log._drives[0].segments
        gate = host.fault = Gate("write", lambda offset: offset > segment_offset(held, 0))
        for number in range(200):
            held.offer(key_of(number), b"x")
        await wait_until(lambda: gate.reached, "the write begins")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(held.log.reset, NAMESPACE)
            await anyio.wait_all_tasks_blocked()
            gate.open()
        await held.log.flush()
        assert segments.current is not None and len(segments.current.dead_starts()) >= 100
        number = 0
        while segments.room(1, 2, len(key_of(0))):  # to the end of the segment, which is not sealed yet
            assert await held.put(key_of(number, other), payload_of(number, 3000)) is not None
            number += 1
    async with opened(config, open_medium=host.open) as held:
        assert held.log.statistics()["segments_scanned"] == 1
        assert len(held.values) == number
        for at, (record, location) in enumerate(held.values):
            assert await held.get(record, location) == payload_of(at, 3000)
        assert held.log.health() == []


async def test_a_delete_does_not_wait_for_a_drive_that_has_nothing_to_remember() -> None:
    """One drive hangs in a write of values; what is deleted lies on the other."""
    host = FakeHost()
    config = storage([ONE, TWO], 8 * MIB, segment_size="1 MiB")
    async with opened(config, open_medium=host.open) as held:
        locations = [await held.put(key_of(number), payload_of(number, 50_000)) for number in range(10)]
        await held.log.flush()
        gate = host.fault = Gate("write", path=ONE)
        number = 10
        while not gate.reached:
            held.offer(key_of(number), payload_of(number, 50_000))
            number += 1
            await anyio.sleep(0.002)
        gone = [at for at, location in enumerate(locations) if location is not None and location.drive == 1]
        held.log.forget([location for location in locations if location is not None and location.drive == 1])
        with anyio.fail_after(5):
            await held.log.flush_forgotten()
        held.log.forget([location for location in locations if location is not None and location.drive == 0][:1])
        with anyio.move_on_after(0.05) as scope:
            await held.log.flush_forgotten()
        assert scope.cancelled_caught, "that one must wait"
        gate.open()
        await held.log.flush_forgotten()
    assert gone and not {key_of(at) for at in gone} & await keys_in(host, config)


async def test_a_drive_that_came_back_knows_by_itself_that_it_had_failed() -> None:
    """The drive that remembered it may be the next to be lost."""
    host = FakeHost()
    config = storage([ONE, TWO], 8 * MIB, segment_size="1 MiB", max_drive_errors=4)
    async with opened(config, open_medium=host.open) as held:
        locations = [await held.put(key_of(number), payload_of(number, 50_000)) for number in range(10)]
        gone = {key_of(number) for number, location in enumerate(locations) if location and location.drive == 0}
        host.fault = failing("write", errno.EIO, path=ONE, times=100)
        number = 100
        while not held.reclaimed:
            await held.put(key_of(number), payload_of(number, 50_000))
            number += 1
        await held.log.flush()
    host.fault = None
    async with opened(config, open_medium=host.open) as held:
        await held.log.flush()
    alone = storage([ONE], 8 * MIB, segment_size="1 MiB", missing_drives="forget")
    assert gone and not gone & await keys_in(host, alone)


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_drive_that_hangs_is_named_by_health(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports no error that could be counted."""
    monkeypatch.setattr(drive, "HANGS_AFTER_S", 0.001)
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        first = await held.put(key_of(0), payload_of(0, LENGTH))
        assert first is not None
        await held.log.flush()
        assert held.log.health() == []
        gate = host.fault = Gate(operation)
        async with anyio.create_task_group() as tasks:
            if operation == "read":
                tasks.start_soon(held.get, held.record_at(first), first)
            else:
                held.offer(key_of(1), payload_of(1, LENGTH))
            await wait_until(lambda: held.log.health(), "the drive is named")
            (line,) = held.log.health()
            assert line.startswith(f"drive {ONE}: a read or write has not ended for ")
            gate.open()
        await held.log.flush()
        assert held.log.health() == []
