"""A store with a disk that a test controls: write-behind, gets from disk, start, end, resets and what fails in each."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import StoreError
from memkv_vllm.protocol.messages import Admin, BadValue, Delete, Manifest, ReportBad
from memkv_vllm.store.log.api import Location
from memkv_vllm.types import Status
from tests.support.fake_log import FakeLog, FakeMedium
from tests.support.harness import wait_until
from tests.support.store import NAMESPACE, VALUE, FakePeer, Rig, make_key, value

pytestmark = pytest.mark.anyio

ARENA = 16 * VALUE


@asynccontextmanager
async def store(log: FakeLog, size: int = ARENA, **limits: Any) -> AsyncIterator[Rig]:
    """A handler with a running disk."""
    with Rig(size=size, log=log, overrides={"limits": limits}) as rig:
        log.arena = rig.memory
        await rig.handler.start()
        assert rig.handler.residency is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.handler.residency.run)
            tasks.start_soon(rig.handler.sweep)
            await anyio.wait_all_tasks_blocked()
            yield rig
            tasks.cancel_scope.cancel()


def disk(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = rig.handler.statistics()["disk"]
    return found


def table(rig: Rig, name: str) -> int:
    state = rig.handler.statistics()["table"]
    return int(state[name] if name in state else state["counters"][name])


async def put(rig: Rig, peer: FakePeer, *blocks: int) -> None:
    values = {make_key(block): value(block) for block in blocks}
    assert await rig.put(peer, values) == [Status.OK] * len(blocks)
    await anyio.wait_all_tasks_blocked()


async def put_on_disk(rig: Rig, peer: FakePeer, *blocks: int) -> None:
    """Puts values and takes their copies in the arena."""
    for block in blocks:
        await put(rig, peer, block)
    await rig.handler.evict(rig.size)
    assert rig.used == 0


async def get(rig: Rig, peer: FakePeer, *blocks: int, **options: Any) -> list[Status]:
    results = await rig.get(peer, [make_key(block) for block in blocks], **options)
    for at, (block, result) in enumerate(zip(blocks, results, strict=True)):
        if result.status is Status.OK:
            assert bytes(peer.bulk.client[at * VALUE : (at + 1) * VALUE]) == value(block)
    return [result.status for result in results]


# Write-behind and gets


async def test_what_was_evicted_from_the_arena_comes_back_from_disk() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, *range(6))
        assert rig.exists(make_key(3))
        assert await get(rig, peer, *range(6)) == [Status.OK] * 6
        assert await get(rig, peer, *range(6)) == [Status.OK] * 6
        assert sorted(log.reads) == [make_key(block) for block in range(6)]
        assert len(log.uses) == 6
        assert disk(rig)["reasons"]["disk_hits"] == 6
        assert (table(rig, "hits"), table(rig, "pinned"), table(rig, "on_disk")) == (12, 0, 0)


async def test_a_store_larger_than_its_arena_keeps_everything() -> None:
    async with store(FakeLog()) as rig:
        peer = await rig.connect()
        for block in range(64):
            await put(rig, peer, block)
        for block in range(64):
            assert await get(rig, peer, block) == [Status.OK]
        assert table(rig, "evictions") == 0
        assert table(rig, "demotions") > 64


async def test_one_get_of_values_in_both_places_and_of_missing_ones() -> None:
    async with store(FakeLog()) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1, 2)
        await put(rig, peer, 3)
        assert await get(rig, peer, 1, 9, 3, 2) == [Status.OK, Status.ABSENT, Status.OK, Status.OK]


async def test_gets_that_need_no_disk_do_not_wait_for_those_that_do() -> None:
    log = FakeLog()
    async with store(log) as rig:
        slow, quick = await rig.connect(), await rig.connect()
        await put_on_disk(rig, slow, 1)
        await put(rig, slow, 2)
        log.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            statuses: list[list[Status]] = []

            async def both() -> None:
                statuses.append(await get(rig, slow, 1, 2))

            tasks.start_soon(both)
            await anyio.wait_all_tasks_blocked()
            assert log.reading == 1
            assert slow.bulk.calls[-1] == ("push", 1)  # value 2 is there already
            assert rig.handler.statistics()["bulk"]["idle"] == rig.handler.statistics()["bulk"]["lanes"]
            assert await get(rig, quick, 2) == [Status.OK]
            assert statuses == []
            log.gate.set()
        assert statuses == [[Status.OK, Status.OK]]


async def test_gets_of_one_key_share_one_read() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peers = [await rig.connect() for _ in range(5)]
        await put_on_disk(rig, peers[0], 1)
        log.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(get, rig, peer, 1)
            await anyio.wait_all_tasks_blocked()
            log.gate.set()
        assert log.reads == [make_key(1)]
        assert disk(rig)["reasons"]["disk_hits"] == 5
        assert table(rig, "pinned") == 0


async def test_a_reader_that_leaves_does_not_end_the_read_of_the_others() -> None:
    log = FakeLog()
    async with store(log) as rig:
        leaving, staying = await rig.connect(), await rig.connect()
        await put_on_disk(rig, leaving, 1)
        log.gate = anyio.Event()
        statuses: list[list[Status]] = []
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as first:
                first.start_soon(get, rig, leaving, 1)
                await anyio.wait_all_tasks_blocked()

                async def stay() -> None:
                    statuses.append(await get(rig, staying, 1))

                tasks.start_soon(stay)
                await anyio.wait_all_tasks_blocked()
                first.cancel_scope.cancel()
            log.gate.set()
        assert statuses == [[Status.OK]]
        assert (table(rig, "pinned"), table(rig, "fetching")) == (0, 0)


async def test_a_reader_that_leaves_in_the_instant_of_arrival_gives_its_pin_back() -> None:
    class Leaving(FakeLog):
        scope: anyio.CancelScope | None = None

        def used(self, location: Location) -> None:
            assert self.scope is not None
            self.scope.cancel()  # between the end of the read and the answer to those who wait

    log = Leaving()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        with anyio.CancelScope() as log.scope:
            await get(rig, peer, 1)
        assert log.scope.cancelled_caught
        assert rig.count("disk_hits") == 1  # it was pinned for the one who left
        assert table(rig, "pinned") == 0
        assert rig.used == VALUE


async def test_fetches_are_bounded_in_number_and_in_bytes() -> None:
    """M06. A quarter of the arena at most: 16 values, so four at a time."""
    for limits, most in (({"max_fetches": 2}, 2), ({}, 4), ({"max_fetch_bytes": VALUE}, 1)):
        log = FakeLog()
        async with store(log, **limits) as rig:
            peer = await rig.connect()
            await put_on_disk(rig, peer, *range(10))
            log.gate = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(get, rig, peer, *range(10))
                await anyio.wait_all_tasks_blocked()
                assert (log.reading, disk(rig)["fetches_running"], disk(rig)["fetches_waiting"]) == (
                    most,
                    most,
                    10 - most,
                )
                assert await rig.put(peer, {make_key(50): value(50)}) == [Status.OK]  # puts find room
                log.gate.set()
            assert log.most_reading == most
            assert disk(rig)["fetch_bytes"] == 0


@pytest.mark.parametrize("limits", [{"max_fetches": 4}, {}], ids=["number", "bytes"])
async def test_a_drive_that_hangs_does_not_end_the_reads_from_others(limits: dict[str, int]) -> None:
    log = FakeLog()
    log.drives = 2
    async with store(log, **limits) as rig:
        peer, other = await rig.connect(), await rig.connect()
        await put_on_disk(rig, peer, *range(24))  # even ones on drive 0
        assert await get(rig, peer, 20, 21) == [Status.OK] * 2
        log.gate, log.gated_drive = anyio.Event(), 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get, rig, peer, *range(0, 20, 2))
            await anyio.wait_all_tasks_blocked()
            assert disk(rig)["fetches_running"] == 3
            assert await get(rig, other, *range(1, 20, 2), timeout_ms=2000) == [Status.OK] * 10
            assert (disk(rig)["fetches_running"], disk(rig)["fetches_waiting"]) == (3, 7)
            log.gate.set()
        assert (disk(rig)["fetches_running"], disk(rig)["fetch_bytes"]) == (0, 0)


async def test_more_fetches_than_may_wait_are_told_busy() -> None:
    log = FakeLog()
    async with store(log, max_waiting_fetches=3) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, *range(5))
        assert await get(rig, peer, *range(5)) == [Status.OK] * 3 + [Status.BUSY] * 2
        assert rig.count("fetch_refused") == 2
        assert await get(rig, peer, *range(5)) == [Status.OK] * 5


async def test_a_read_that_is_late_is_told_busy_and_its_value_stays() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        log.gate = anyio.Event()
        assert await get(rig, peer, 1, timeout_ms=20) == [Status.BUSY]
        assert (rig.count("fetch_late"), table(rig, "fetching"), peer.bulk.fences) == (1, 1, 0)
        log.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert await get(rig, peer, 1) == [Status.OK]
        assert len(log.reads) == 1


async def test_a_read_that_the_disk_gave_up_in_time_leaves_the_value_there() -> None:
    """The log answers False at its deadline: that says nothing of the record."""
    log = FakeLog()
    async with store(log, transfer_timeout_s=0.02) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        log.gate, log.lost = anyio.Event(), set(log.medium.records)
        assert await get(rig, peer, 1) == [Status.BUSY]
        late = time.monotonic() + 0.05
        await wait_until(lambda: time.monotonic() > late, "the deadline of the read, which began after that of the get")
        log.gate.set()
        await wait_until(lambda: not table(rig, "fetching"), "the fetch ended")
        assert rig.exists(make_key(1))
        assert (table(rig, "fetches_undone"), table(rig, "disk_lost")) == (1, 0)
        log.lost = set()
        assert await get(rig, peer, 1, timeout_ms=10_000) == [Status.OK]


async def test_a_record_that_cannot_be_read_is_a_miss_and_makes_room_for_a_new_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1, 2)
        log.lost = {location for location, (record, _) in log.medium.records.items() if record.key == make_key(1)}
        lost = list(log.lost)
        with caplog.at_level(logging.WARNING):
            assert await get(rig, peer, 1, 2) == [Status.ABSENT, Status.OK]
        assert "disk.value_lost total=1" in caplog.text
        assert (table(rig, "disk_lost"), rig.count("disk_lost")) == (1, 1)
        assert not rig.exists(make_key(1))
        assert log.forgotten == lost
        await put(rig, peer, 1)
        assert await get(rig, peer, 1) == [Status.OK]


async def test_an_error_of_the_log_leaves_the_value_and_ends_nothing() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        log.error = RuntimeError("a bug of the log")
        assert await get(rig, peer, 1) == [Status.BUSY]
        assert rig.count("fetch_error") == 1
        log.error = None
        assert await get(rig, peer, 1) == [Status.OK]


async def test_no_room_for_a_fetch_is_busy_and_not_a_loss() -> None:
    log = FakeLog()
    async with store(log) as rig:
        writer, reader = await rig.connect(), await rig.connect()
        await put_on_disk(rig, writer, 1)
        held = anyio.Event()

        async def hold(what: str, moves: object) -> None:
            await held.wait()

        writer.bulk.hook = hold
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.put, writer, {make_key(block): value(block) for block in range(10, 26)})
            await anyio.wait_all_tasks_blocked()
            assert await get(rig, reader, 1) == [Status.BUSY]
            held.set()
        assert await get(rig, reader, 1) == [Status.OK]


async def test_the_key_was_deleted_while_it_was_read() -> None:
    """M08: delete is immediate; the reader gets a miss, and the extent is free once the read has ended."""
    log = FakeLog()
    async with store(log) as rig:
        reader, other = await rig.connect(), await rig.connect()
        await put_on_disk(rig, reader, 1)
        log.gate = anyio.Event()
        statuses: list[list[Status]] = []
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                statuses.append(await get(rig, reader, 1))

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            assert await rig.ask(other, Delete([make_key(1)])) == [Status.OK]
            assert not rig.exists(make_key(1))
            assert rig.used == VALUE
            log.gate.set()
        assert statuses == [[Status.ABSENT]]
        assert rig.used == 0
        assert len(log.forgotten) == 1


async def test_a_value_of_another_length_or_layout_is_not_fetched() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        assert [r.status for r in await rig.get(peer, [make_key(1)], length=100)] == [Status.BAD_LENGTH]
        assert [r.status for r in await rig.get(peer, [make_key(1)], layout=1)] == [Status.BAD_LAYOUT]
        assert log.reads == []


async def test_a_refused_write_keeps_the_value_in_memory() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        log.refuse = True
        await put(rig, peer, 1)
        assert await get(rig, peer, 1) == [Status.OK]
        await rig.handler.evict(rig.size)
        assert await get(rig, peer, 1) == [Status.ABSENT]


async def test_write_behind_holds_a_quarter_of_the_arena_and_a_bounded_line() -> None:
    """M06: with a disk that writes nothing, puts go on."""
    log = FakeLog(by_hand=True)
    async with store(log, max_waiting_writes=6) as rig:
        peer = await rig.connect()
        for block in range(100):
            await put(rig, peer, block)
        assert disk(rig)["write_bytes"] == len(log.waiting) * VALUE == ARENA // 4
        assert (disk(rig)["writes_waiting"], rig.count("disk_write_delayed"), rig.count("disk_write_shed")) == (
            6,
            6,
            90,
        )
        assert table(rig, "writing") == 4
        log.write()
        await anyio.wait_all_tasks_blocked()
        # Those in the line were evicted before their turn.
        assert (disk(rig)["write_bytes"], disk(rig)["writes_waiting"], table(rig, "records")) == (0, 0, 4)


async def test_values_that_wait_for_write_behind_are_written_in_their_turn() -> None:
    log = FakeLog(by_hand=True)
    async with store(log) as rig:
        await put(rig, await rig.connect(), *range(12))
        for written in (4, 8, 12):
            log.write()
            await anyio.wait_all_tasks_blocked()
            assert table(rig, "records") == written
        assert [record.key for record, _ in log.medium.records.values()] == [make_key(block) for block in range(12)]


async def test_a_log_that_takes_nothing_any_more_does_not_stop_the_line() -> None:
    """Nothing under way would ever wake it again: values later in the line, and new ones, must not wait for ever."""
    log = FakeLog(by_hand=True)
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, *range(6))
        assert disk(rig)["writes_waiting"] == 2
        log.refuse = True
        log.write()
        await anyio.wait_all_tasks_blocked()
        assert (disk(rig)["writes_waiting"], rig.count("disk_write_shed")) == (0, 2)
        log.refuse = False
        await put(rig, peer, 7)
        log.write()
        assert table(rig, "records") == 5


async def test_failed_writes_are_counted_and_cost_nothing_else() -> None:
    log = FakeLog()
    log.fail_writes = True
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        assert (table(rig, "disk_writes_failed"), table(rig, "writing")) == (1, 0)
        assert await get(rig, peer, 1) == [Status.OK]


async def test_a_reclaimed_record_is_a_miss() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1, 2)
        log.reclaim(next(iter(log.medium.records)))
        assert await get(rig, peer, 1, 2) == [Status.ABSENT, Status.OK]
        assert log.forgotten == []


async def test_a_reclaimed_record_of_a_value_that_is_in_memory_is_written_again() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        (first,) = log.medium.records
        log.reclaim(first)
        await anyio.wait_all_tasks_blocked()
        assert [record.key for record, _ in log.medium.records.values()] == [make_key(1)]
        assert list(log.medium.records) != [first]
        await rig.handler.evict(rig.size)
        assert await get(rig, peer, 1) == [Status.OK]


async def test_a_record_reclaimed_while_it_is_read_is_written_again() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        log.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get, rig, peer, 1)
            await anyio.wait_all_tasks_blocked()
            log.reclaim(*log.medium.records)
            log.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert [record.key for record, _ in log.medium.records.values()] == [make_key(1)]
        assert await get(rig, peer, 1) == [Status.OK]


class SmallLog(FakeLog):
    """A log whose drives hold ``capacity`` records: the oldest one makes room."""

    capacity = 4
    enough = 200
    """Writes after which it stops to reclaim, so that a store that would write for ever ends its test."""

    def write(self) -> None:
        super().write()
        while len(self.medium.records) > self.capacity and self.medium.written < self.enough:
            self.reclaim(next(iter(self.medium.records)))


async def test_drives_that_hold_less_than_the_arena_are_not_written_for_ever() -> None:
    """What is written again takes the place of what would be written again: each new value pays for one rewrite."""
    log = SmallLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, *range(8))
        await anyio.wait_all_tasks_blocked()
        assert 8 <= log.medium.written <= 16
        assert await get(rig, peer, *range(8)) == [Status.OK] * 8
        written = log.medium.written
        await put(rig, peer, 8)
        await anyio.wait_all_tasks_blocked()
        assert written < log.medium.written <= written + 2


async def test_deleted_values_are_forgotten_on_disk() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1, 2, 3)
        assert await rig.ask(peer, Delete([make_key(1), make_key(3)])) == [Status.OK] * 2
        await anyio.wait_all_tasks_blocked()
        assert {record.key for record, _ in log.medium.records.values()} == {make_key(2)}


@pytest.mark.parametrize("report", [False, True], ids=["deleted", "reported"])
async def test_a_removal_is_answered_once_a_crash_cannot_undo_it(report: bool) -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        (found,) = await rig.get(peer, [make_key(1)])
        key, answers = make_key(1), list[Any]()
        request = ReportBad([BadValue(key, found.generation)]) if report else Delete([key])
        log.journal_gate = anyio.Event()

        async def remove() -> None:
            answers.append(await rig.ask(peer, request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(remove)
            await anyio.wait_all_tasks_blocked()
            assert not rig.exists(key), "hidden at once (M08)"
            assert answers == [], "its tombstone is not on the medium"
            log.journal_gate.set()
        assert answers == [[True] if report else [Status.OK]]


async def test_a_removal_that_the_disk_did_not_keep_is_an_error() -> None:
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        log.broken = True
        with pytest.raises(StoreError, match="a restart may bring them back.*/dev/fake"):
            await rig.ask(peer, Delete([make_key(1)]))
        assert not rig.exists(make_key(1))
        assert rig.count("disk_removal_failed") == 1


async def test_a_value_deleted_while_it_is_written_is_forgotten_afterwards() -> None:
    """And the delete is answered after that: before its write has ended, nothing on the medium can say it is dead."""
    log = FakeLog(by_hand=True)
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        answers: list[list[Status]] = []

        async def delete() -> None:
            answers.append(await rig.ask(peer, Delete([make_key(1)])))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delete)
            await anyio.wait_all_tasks_blocked()
            assert not rig.exists(make_key(1))
            assert answers == []
            log.write()
        assert answers == [[Status.OK]]
        await anyio.wait_all_tasks_blocked()
        assert log.medium.records == {}
        assert rig.used == 0


async def test_a_delete_does_not_wait_for_the_writes_of_others() -> None:
    log = FakeLog(by_hand=True)
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        log.write()
        await put(rig, peer, 2)
        assert await rig.ask(peer, Delete([make_key(1)])) == [Status.OK]
        assert log.waiting != []


# Start and end


async def test_a_restart_finds_everything_under_the_same_server_id() -> None:
    medium = FakeMedium()
    async with store(FakeLog(medium)) as rig:
        peer = await rig.connect()
        await put(rig, peer, *range(5))
        await rig.ask(peer, Manifest(b"f" * 32, NAMESPACE, b"{}"))
        await anyio.wait_all_tasks_blocked()
    async with store(FakeLog(medium)) as rig:
        assert rig.handler.identity.server_id == medium.server_id
        peer = await rig.connect()
        assert await get(rig, peer, *range(6)) == [Status.OK] * 5 + [Status.ABSENT]
        assert await rig.put(peer, {make_key(1): value(1)}) == [Status.EXISTS]
        siblings = await rig.ask(peer, Manifest(b"f" * 32, b"O" * 32, b"{}"))
        assert [entry.digest for entry in siblings] == [NAMESPACE]


async def test_an_orderly_end_writes_what_only_the_arena_holds() -> None:
    medium = FakeMedium()
    log = FakeLog(medium)
    async with store(log) as rig:
        peer = await rig.connect()
        log.refuse = True
        await put(rig, peer, *range(12))
        log.refuse = False
        assert medium.records == {}
        assert rig.handler.residency is not None
        await rig.handler.residency.finish(5.0)
        assert rig.count("not_written_at_end") == 0
    async with store(FakeLog(medium)) as rig:
        assert await get(rig, await rig.connect(), *range(12)) == [Status.OK] * 12


async def test_an_end_that_cannot_write_says_how_much_it_left(caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    async with store(log) as rig:
        log.refuse = True
        await put(rig, await rig.connect(), *range(3))
        assert rig.handler.residency is not None
        await rig.handler.residency.finish(5.0)
        assert "disk.values_left count=3" in caplog.text
        assert rig.count("not_written_at_end") == 3


async def test_manifests_over_the_limits_do_not_keep_a_store_from_starting(caplog: pytest.LogCaptureFixture) -> None:
    medium = FakeMedium(manifests={(b"f" * 32, bytes([n]) * 32): b"{}" for n in range(3)})
    async with store(FakeLog(medium), max_manifests=2) as rig:
        assert rig.count("manifests_not_recovered") == 1
        assert "manifest.not_recovered" in caplog.text


async def test_a_manifest_that_could_not_be_kept_is_no_error_for_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    async with store(log) as rig:
        log.broken = True
        assert await rig.ask(await rig.connect(), Manifest(b"f" * 32, NAMESPACE, b"{}")) == []
        await anyio.wait_all_tasks_blocked()
        assert rig.count("manifests_not_kept") == 1
        assert rig.handler.health() == ["drive /dev/fake: I/O error"]


# Reset and gc


async def test_a_reset_is_answered_once_it_is_on_disk() -> None:
    """P022."""
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1, 2)
        await put(rig, peer, 3)
        answer = await rig.ask(peer, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        assert answer["hidden"] == 3
        assert (log.resets, log.medium.records) == ([NAMESPACE], {})
        assert await get(rig, peer, 1, 2, 3) == [Status.ABSENT] * 3
        assert log.forgotten == []  # the reset ended them, not one tombstone each


async def test_a_reset_that_a_drive_did_not_keep_fails_by_name() -> None:
    """P023: success only after all tiers confirm."""
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        log.broken = True
        with pytest.raises(StoreError, match=r"restart may bring them back.*reset again.*/dev/fake"):
            await rig.ask(peer, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        assert await get(rig, peer, 1) == [Status.ABSENT]
        assert rig.count("disk_reset_failed") == 1
        log.broken = False
        answer = await rig.ask(peer, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        assert answer["hidden"] == 0
        assert log.medium.records == {}


@pytest.mark.parametrize(
    "request_",
    [Admin({"command": "reset", "namespace": NAMESPACE.hex()}), Delete([make_key(1)])],
    ids=["reset", "delete"],
)
async def test_a_disk_that_hangs_ends_in_an_error_and_not_in_a_wait(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(log: FakeLog, *_: object) -> None:
        await anyio.sleep_forever()

    async with store(FakeLog(), transfer_timeout_s=0.02) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        monkeypatch.setattr(FakeLog, "reset", hang)
        monkeypatch.setattr(FakeLog, "flush_forgotten", hang)
        with anyio.fail_after(5):
            with pytest.raises(StoreError, match=r"hidden now.*transfer_timeout_s = 0.02 s"):
                await rig.ask(peer, request_)
        assert not rig.exists(make_key(1))
        assert rig.count("disk_late") == 1


async def test_gc_ends_idle_namespaces_on_disk_too() -> None:
    """P097."""
    log = FakeLog()
    async with store(log) as rig:
        peer = await rig.connect()
        await put_on_disk(rig, peer, 1)
        answer = await rig.ask(peer, Admin({"command": "gc", "idle_s": 0}))
        assert [row["namespace"] for row in answer["dropped"]] == [NAMESPACE.hex()]
        assert answer["dropped"][0]["disk_bytes"] == VALUE
        assert log.resets == [NAMESPACE]
        assert not rig.exists(make_key(1))


async def test_what_is_put_while_gc_waits_for_the_disk_is_not_collected() -> None:
    """Neither in memory nor on disk; and a gc that is given up has ended no namespace in memory alone."""
    log, other = FakeLog(), b"O" * 32
    key, again = make_key(1, namespace=other), make_key(2, namespace=other)
    async with store(log) as rig:
        peer = await rig.connect()
        await put(rig, peer, 1)
        assert await rig.put(peer, {key: value(1)}) == [Status.OK]
        await anyio.wait_all_tasks_blocked()
        log.journal_gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.ask, peer, Admin({"command": "gc", "idle_s": 0}))
            await anyio.wait_all_tasks_blocked()
            assert log.resets == [NAMESPACE]
            assert await rig.put(peer, {again: value(2)}) == [Status.OK]
            await anyio.wait_all_tasks_blocked()
            log.journal_gate.set()
        assert log.resets == [NAMESPACE]
        on_disk = {record.key for record, _ in log.medium.records.values()}
        assert on_disk == {key, again}
        assert rig.exists(key) and rig.exists(again)
        log.journal_gate = anyio.Event()
        await put(rig, peer, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.ask, peer, Admin({"command": "gc", "idle_s": 0}))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        ended = set(log.resets[1:])
        assert len(ended) == 1
        assert rig.exists(again) == (other not in ended)
        assert rig.exists(make_key(1)) == (NAMESPACE not in ended)


async def test_without_a_disk_there_is_none_in_the_statistics() -> None:
    with Rig() as rig:
        assert rig.handler.statistics()["disk"] is None
        assert rig.handler.health() == []
