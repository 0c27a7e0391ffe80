"""Reclaim: what is given up, what gets a second chance, and that nothing that is read or forgotten goes wrong by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.protocol.checksum import digest
from memkv_vllm.store.log import format
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.format import BLOCK_BYTES
from tests.support.harness import wait_until
from tests.support.log_media import FakeHost, FakeMedium, Gate
from tests.support.logs import MIB, OpenLog, key_of, opened, payload_of, start_only, storage

pytestmark = pytest.mark.anyio

DRIVE = Path("/fake/0")
LENGTH = 250_000
SMALL = storage([DRIVE], 7 * MIB, segment_size="1 MiB")
"""Six segments of three or four values each."""


async def fill(held: OpenLog, first: int, count: int) -> list[Location]:
    """Writes values one after the other."""
    locations = []
    for number in range(first, first + count):
        location = await held.put(key_of(number), payload_of(number, LENGTH))
        assert location is not None
        locations.append(location)
    return locations


def segment_offset(held: OpenLog, location: Location) -> int:
    """Where the segment of a location begins on its drive."""
    return held.log._drives[location.drive].segments.geometry.at(location.segment, 0)


async def test_the_oldest_values_make_room() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        locations = await fill(held, 0, 60)
        lost = [number for number, location in enumerate(locations) if location in held.reclaimed]
        assert lost == list(range(len(lost))), "in order of age"
        assert 60 - len(lost) == held.log.statistics()["records"] >= 12
        for number in range(len(lost), 60):
            assert await held.get(held.record_at(locations[number]), locations[number]) == payload_of(number, LENGTH)
        record = Record(key_of(0), LENGTH, digest(payload_of(0, LENGTH)), 1, 7)
        assert await held.get(record, locations[0]) is None
    left = await start_only(SMALL, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(number) for number in range(len(lost), 60)]


async def test_segments_with_fewer_live_bytes_go_first() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        locations = await fill(held, 0, 16)
        newest = [location for location in locations if location.segment == 3]
        held.log.forget(newest)
        await fill(held, 100, 6)
        assert held.reclaimed == [] or not set(held.reclaimed) & set(locations[:8])
        assert held.counters["segments_reclaimed"] >= 1


async def test_a_value_that_was_read_gets_a_second_chance() -> None:
    """Its location stays good through any number of moves, and the newest place is found after a restart."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        (first,) = await fill(held, 0, 1)
        record = held.record_at(first)
        for number in range(1, 80):
            await fill(held, number, 1)
            held.log.used(first)
        assert held.counters["records_rewritten"] >= 3
        assert first not in held.reclaimed
        assert await held.get(record, first) == payload_of(0, LENGTH)
        assert held.log.statistics()["moved"] == 1
    async with opened(SMALL, open_medium=host.open) as held:
        found = {value.record.key: value for value in held.values}
        assert await held.get(record, found[key_of(0)].location) == payload_of(0, LENGTH)


async def test_reading_alone_earns_a_second_chance() -> None:
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        first, second = await fill(held, 0, 2)
        for number in range(2, 40):
            await fill(held, number, 1)
            assert await held.get(held.record_at(first), first) == payload_of(0, LENGTH)
        assert first not in held.reclaimed
        assert second in held.reclaimed


async def test_a_moved_value_can_be_forgotten() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        (first,) = await fill(held, 0, 1)
        record = held.record_at(first)
        for number in range(1, 40):
            held.log.used(first)
            await fill(held, number, 1)
        assert held.log.statistics()["moved"] == 1
        held.log.forget([first])
        assert await held.get(record, first) is None
        assert held.log.statistics()["moved"] == 0
        await held.log.flush()
    assert key_of(0) not in {value.record.key for value in (await start_only(SMALL, open_medium=host.open)).values}


async def test_a_value_without_use_since_its_move_is_given_up() -> None:
    """One use earns one chance; the caller hears of the loss under the location that it knows."""
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        (first,) = await fill(held, 0, 1)
        held.log.used(first)
        await fill(held, 1, 60)
        assert held.counters["records_rewritten"] == 1
        assert held.reclaimed.count(first) == 1
        assert held.log.statistics()["moved"] == 0


async def test_second_chances_are_bounded() -> None:
    """When everything was used, a quarter of a segment is kept and the rest goes: writes still find room."""
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        for number in range(60):
            (location,) = await fill(held, number, 1)
            held.log.used(location)
        written, rewritten = held.counters["records_written"], held.counters["records_rewritten"]
        assert 0 < rewritten < written
        assert held.log.health() == []


async def test_second_chances_leave_room_for_what_is_written() -> None:
    """A value of most of a segment must not find it taken by what was saved, again and again."""
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        for number in range(30):
            (location,) = await fill(held, number, 1)
            held.log.used(location)
        before = held.log.statistics()["counters"]["segments_reclaimed"]
        assert await held.put(key_of(100), payload_of(100, 1_000_000)) is not None
        assert held.counters["segments_reclaimed"] <= before + 1


async def test_a_segment_that_is_being_read_is_not_overwritten() -> None:
    """The read begins after the segment was chosen, and lasts while the whole drive is written anew."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        locations = await fill(held, 0, 3)
        begin = segment_offset(held, locations[0])
        # The header is the first block of the record: the gate holds the read of the value.
        reading = Gate("read", lambda offset: offset == begin + locations[0].offset)
        reclaiming = Gate("write", lambda offset: offset == begin)
        got: list[bytes | None] = []

        def both(operation: str, path: Path, offset: int) -> None:
            reading(operation, path, offset)
            reclaiming(operation, path, offset)

        async def read() -> None:
            got.append(await held.get(held.record_at(locations[0]), locations[0]))

        host.fault = both
        async with anyio.create_task_group() as tasks:
            number = 3
            while not reclaiming.reached:
                held.offer(key_of(number), payload_of(number, LENGTH))
                number += 1
                await anyio.sleep(0.002)
            tasks.start_soon(read)
            await wait_until(lambda: reading.reached, "the read begins")
            reclaiming.open()
            await held.log.flush()
            assert locations[0] in held.reclaimed
            await fill(held, 100, 40)
            assert held.log.statistics()["segments"]["draining"] == 1
            reading.open()
        assert got == [payload_of(0, LENGTH)]
        assert held.log.statistics()["segments"]["draining"] == 0
        await fill(held, 200, 20)


async def test_what_is_forgotten_while_it_is_moved_does_not_come_back() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        locations = await fill(held, 0, 3)
        first, begin = locations[0], segment_offset(held, locations[0])
        held.log.used(first)
        gate = host.fault = Gate("read", lambda offset: offset == begin + first.offset)
        number = 3
        while not gate.reached:
            held.offer(key_of(number), payload_of(number, LENGTH))
            number += 1
            await anyio.sleep(0.002)
        held.log.forget([first])
        gate.open()
        await held.log.flush()
        assert held.counters["segments_reclaimed"] >= 1
    assert key_of(0) not in {value.record.key for value in (await start_only(SMALL, open_medium=host.open)).values}


async def test_a_crash_between_move_and_reclaim_leaves_one_value_that_can_be_forgotten() -> None:
    """Both places hold the record then: the one that loses gets a tombstone, or it would outlive the winner."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        (first,) = await fill(held, 0, 1)
        held.log.used(first)
        begin = segment_offset(held, first)

        def crash(operation: str, path: Path, offset: int) -> None:
            if operation == "write" and offset == begin:
                host.crashed = True
                raise OSError(5, "the machine is down")

        host.fault = crash
        number = 1
        while not host.crashed:
            held.offer(key_of(number), payload_of(number, LENGTH))
            number += 1
            await anyio.sleep(0.002)
    host.fault = None
    host.restart(power_lost=False, seed=0)
    async with opened(SMALL, open_medium=host.open) as held:
        (value,) = [value for value in held.values if value.record.key == key_of(0)]
        assert await held.get(value.record, value.location) == payload_of(0, LENGTH)
        held.log.forget([value.location])
        await held.log.flush()
    assert key_of(0) not in {value.record.key for value in (await start_only(SMALL, open_medium=host.open)).values}


async def test_what_stood_behind_a_lost_record_does_not_come_back() -> None:
    """An unsynced write may survive a power loss although the one before it did not."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        first, second = await fill(held, 0, 2)
        begin = segment_offset(held, first)
    host.restart(power_lost=False, seed=0)
    host.disks[DRIVE].volatile[begin + first.offset : begin + first.offset + BLOCK_BYTES] = bytes(BLOCK_BYTES)
    async with opened(SMALL, open_medium=host.open) as held:
        assert held.values == []
        # Of the same length, so that the next record would begin where the lost one's neighbour still stands.
        (again,) = await fill(held, 5, 1)
        assert again.offset == first.offset and again.segment == first.segment
    left = await start_only(SMALL, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(5)]


async def test_the_journal_never_outgrows_its_place() -> None:
    """Deletes for ever: tombstones go with the segments that they are about."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        for number in range(400):
            location = await held.put(key_of(number), payload_of(number, 20_000))
            assert location is not None
            held.log.forget([location])
            await held.log.flush()
        drive = held.log.statistics()["drives"][0]
        assert drive["compactions"] >= 5
        assert drive["journal_bytes"] <= drive["journal_size"]
        assert held.log.health() == []
        kept = await held.put(key_of(1000), payload_of(1000, 20_000))
        assert kept is not None
    left = await start_only(SMALL, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(1000)]


async def test_tombstones_that_outgrow_the_journal_cost_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a drive has grown by far: rather than failing, the segment with the most of them goes."""
    host = FakeHost()
    monkeypatch.setattr(format, "MIN_JOURNAL_HALF_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(format, "JOURNAL_DIVISOR", 1 << 20)
    config = storage([DRIVE], 24 * MIB, segment_size="1 MiB")
    async with opened(config, open_medium=host.open) as held:
        tokens = [held.offer(key_of(number), b"x") for number in range(2500)]
        await held.log.flush()
        places = {number: held.written[token or 0] for number, token in enumerate(tokens)}
        locations = {number: location for number, location in places.items() if location is not None}
        assert len(locations) == 2500
        held.log.forget([location for number, location in locations.items() if number % 40])
        await held.log.flush()
        assert held.log.health() == []
        statistics = held.log.statistics()
        assert statistics["segments"]["free"] >= 2, "no segment was needed"
        assert held.counters["segments_reclaimed"] >= 1
        assert statistics["drives"][0]["journal_bytes"] <= 2 * BLOCK_BYTES
        left = {key_of(number) for number in range(0, 2500, 40) if locations[number] not in held.reclaimed}
        assert len(left) >= 30
    found = {value.record.key for value in (await start_only(config, open_medium=host.open)).values}
    assert found == left


class SparseMedium(FakeMedium):
    """Keeps blocks alone, not payloads: the arena is all zeros."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._blocks: dict[int, bytes] = {}
        self._size = 0

    def size(self) -> int:
        return self._size

    def resize(self, size: int) -> None:
        self._size = size

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            for at in range(0, len(buffer), BLOCK_BYTES):
                buffer[at : at + BLOCK_BYTES] = self._blocks.get(offset + at, bytes(BLOCK_BYTES))
            offset += len(buffer)

    def writev(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        for buffer in buffers:
            if len(buffer) == BLOCK_BYTES:
                self._blocks[offset] = bytes(buffer)
            offset += len(buffer)

    def sync(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_a_full_drive_holds_97_percent_of_its_size_in_values() -> None:
    """Values of 1,000,000 bytes on 32 GiB: superblock, journal, headers, padding, ends and the reserve are the rest."""
    size, length = 32 << 30, 1_000_000
    host = FakeHost()
    media: list[SparseMedium] = []

    def open_sparse(path: Path, mode: Any) -> SparseMedium:
        media.append(SparseMedium(host, path, host.open(path, mode)._disk, created=True))
        return media[-1]

    config = storage([DRIVE], size, max_write_behind="1 GiB")
    async with opened(config, open_medium=open_sparse, arena_bytes=2 * MIB) as held:
        checksum = digest(bytes(length))
        number = 0
        held.allocator.free = lambda offset: None  # type: ignore[method-assign]
        while not held.reclaimed:
            for _ in range(64):
                number += 1
                held.extents[number] = 0
                assert held.log.append(Record(key_of(number), length, checksum, 1, 7), 0, number)
            await held.settled(number)
        statistics = held.log.statistics()
        stored = (statistics["records"] + len(held.reclaimed)) * length
        assert statistics["size"] == size
        waste = 1 - stored / size
        assert 0 < waste < 0.03, f"{waste:.4f}"
