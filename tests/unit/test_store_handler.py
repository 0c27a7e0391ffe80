"""The store's handler over fake peers: what each message does, and what is left after every way of failing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError, StoreError
from memkv_vllm.protocol.checksum import ChecksumAlgorithm
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import (
    Admin,
    BadValue,
    Delete,
    Exists,
    GetResult,
    Manifest,
    Ping,
    Put,
    ReportBad,
    Stat,
)
from memkv_vllm.transports.base import Move
from memkv_vllm.types import Deadline, Status
from tests.support.store import LAYOUT, NAMESPACE, VALUE, Hook, Rig, make_key, value

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def slices_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of these tests are tiny: without this, every batch would be one slice."""
    monkeypatch.setattr("memkv_vllm.store.bulkqueue.SMALL_SLICE_BYTES", 0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


def answering(*statuses: Status) -> Hook:
    """Moves end with these statuses; no byte is copied."""

    async def hook(what: str, moves: Sequence[Move]) -> list[Status]:
        return list(statuses)

    return hook


async def forever(what: str, moves: Sequence[Move]) -> None:
    await anyio.sleep_forever()


class Gate:
    """Holds transfers until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = anyio.Event(), anyio.Event()

    async def __call__(self, what: str, moves: Sequence[Move]) -> None:
        self.reached.set()
        await self.open.wait()


# Values


async def test_what_was_put_comes_back(rig: Rig) -> None:
    writer, reader = await rig.connect(), await rig.connect()
    values = {make_key(block): value(block) for block in range(20)}
    assert await rig.put(writer, values) == [Status.OK] * 20
    results = await rig.get(reader, list(values))
    assert [result.status for result in results] == [Status.OK] * 20
    assert bytes(reader.bulk.client[: 20 * VALUE]) == b"".join(values.values())
    assert len({result.generation for result in results}) == 20
    assert results[0].algorithm == ChecksumAlgorithm.XXH3_64_TREE_1M
    assert (rig.count("put_ok"), rig.count("put_bytes"), rig.count("get_ok")) == (20, 20 * VALUE, 20)
    assert rig.handler.statistics()["table"]["pinned"] == 0


async def test_batches_move_in_slices(rig: Rig) -> None:
    peer = await rig.connect()
    values = {make_key(block): value(block) for block in range(20)}
    await rig.put(peer, values)
    await rig.get(peer, list(values))
    assert sorted(peer.bulk.calls) == sorted(
        [("pull", 8), ("pull", 8), ("pull", 4), ("push", 8), ("push", 8), ("push", 4)]
    )


async def test_each_item_of_a_get_has_its_own_status(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1), make_key(2): value(2, 8192)})
    results = await rig.get(peer, [make_key(1), make_key(2), make_key(3)])
    assert [result.status for result in results] == [Status.OK, Status.BAD_LENGTH, Status.ABSENT]
    assert results[2] == GetResult(Status.ABSENT, 0, 0, 0)
    (other,) = await rig.get(peer, [make_key(1)], layout=LAYOUT + 1)
    # A mismatch names the value, so that its reader can report it.
    assert other == GetResult(Status.BAD_LAYOUT, 0, 0, results[0].generation)


async def test_a_push_that_failed_tells_nothing_of_the_value(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1), make_key(2): value(2)})
    peer.bulk.hook = answering(Status.OK, Status.FAILED)
    right, failed = await rig.get(peer, [make_key(1), make_key(2)])
    assert right.status is Status.OK and right.generation
    assert failed == GetResult(Status.FAILED, 0, 0, 0)


async def test_a_present_key_moves_nothing(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1)})
    peer.bulk.calls.clear()
    assert await rig.put(peer, {make_key(1): value(2)}) == [Status.EXISTS]
    assert peer.bulk.calls == []


async def test_of_two_writers_the_first_wins_and_the_second_moves_nothing(rig: Rig) -> None:
    first, second = await rig.connect(), await rig.connect()
    gate = first.bulk.hook = Gate()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.put, first, {make_key(1): value(1)})
        await gate.reached.wait()
        assert await rig.put(second, {make_key(1): value(1)}) == [Status.PENDING]
        assert second.bulk.calls == []
        assert not rig.exists(make_key(1))
        gate.open.set()
    assert rig.exists(make_key(1))


async def test_a_key_twice_in_one_batch_is_stored_once(rig: Rig) -> None:
    peer = await rig.connect()
    request = rig.put_request(peer, {make_key(1): value(1)})
    twice = Put([*request.items, *request.items], request.algorithm, request.timeout_ms)
    assert await rig.ask(peer, twice) == [Status.OK, Status.PENDING]


async def test_empty_values_and_empty_batches(rig: Rig) -> None:
    peer = await rig.connect()
    assert await rig.put(peer, {make_key(1): b""}) == [Status.BAD_LENGTH]
    assert await rig.put(peer, {}) == []
    assert await rig.get(peer, []) == []


async def test_a_full_store_keeps_accepting() -> None:
    with Rig(size=8 * VALUE) as rig:
        peer = await rig.connect()
        for block in range(50):
            assert await rig.put(peer, {make_key(block): value(block)}) == [Status.OK]
        results = await rig.get(peer, [make_key(block) for block in range(50)])
        assert [result.status for result in results] == [Status.ABSENT] * 42 + [Status.OK] * 8


@pytest.mark.parametrize("num_values", [2, 12], ids=["one slice", "several slices"])
async def test_what_is_above_the_watermark_goes_while_the_bytes_of_a_batch_are_on_their_way(
    num_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    eviction = {"eviction": {"high_watermark": 0.75, "low_watermark": 0.25}}
    with Rig(size=64 * VALUE, overrides={"storage": eviction}) as rig:
        peer = await rig.connect()
        await rig.put(peer, {make_key(block): value(block) for block in range(48)})
        used_at_start: list[int] = []
        gate, pull = Gate(), peer.bulk.pull
        peer.bulk.hook = gate

        async def watched(moves: Sequence[Move], deadline: Deadline) -> list[Status]:
            used_at_start.append(rig.arena.used // VALUE)
            return await pull(moves, deadline)

        monkeypatch.setattr(peer.bulk, "pull", watched)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.put, peer, {make_key(block): value(block) for block in range(48, 48 + num_values)})
            await gate.reached.wait()
            await anyio.wait_all_tasks_blocked()
            assert rig.arena.used == max(16, 48 - 15 * num_values) * VALUE  # sixteen more for each at the most
            gate.open.set()
        assert used_at_start[0] == 48 + num_values
        assert rig.exists(make_key(47 + num_values))
        assert not rig.exists(make_key(0))


async def test_however_many_requests_come_the_watermark_costs_one_step_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    eviction = {"eviction": {"high_watermark": 0.75, "low_watermark": 0.25}}
    with Rig(size=64 * VALUE, overrides={"storage": eviction}) as rig:
        peer = await rig.connect()
        await rig.put(peer, {make_key(block): value(block) for block in range(48)})
        monkeypatch.setattr("memkv_vllm.store.room.DRAIN_STEP", 1)
        drain, due, most = rig.handler._transfers._drain, 0, 0
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon

        def watched(callback: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal due, most
            due += callback == drain
            most = max(most, due)
            return call_soon(callback, *arguments, **options)

        def counted() -> bool:
            nonlocal due
            due -= 1
            return step()

        step = rig.handler._transfers._batches.drain
        monkeypatch.setattr(rig.handler._transfers._batches, "drain", counted)
        monkeypatch.setattr(loop, "call_soon", watched)
        async with anyio.create_task_group() as tasks:
            for first in (48, 50, 52):
                tasks.start_soon(rig.put, peer, {make_key(block): value(block) for block in (first, first + 1)})
        with anyio.fail_after(10):
            while due:
                await anyio.lowlevel.checkpoint()
        assert (most, rig.arena.used) == (1, 16 * VALUE)


async def test_a_watermark_that_cannot_be_kept_is_a_fault_of_its_own_and_fails_no_put(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eviction = {"eviction": {"high_watermark": 0.75, "low_watermark": 0.25}}
    with Rig(size=16 * VALUE, overrides={"storage": eviction}) as rig:
        peer = await rig.connect()
        await rig.put(peer, {make_key(block): value(block) for block in range(12)})

        def broken() -> Iterator[bytes]:
            raise LocalProtocolError("the order is lost")

        monkeypatch.setattr(rig.policy, "victims", broken)
        assert await rig.put(peer, {make_key(block): value(block) for block in (12, 13)}) == [Status.OK] * 2
        await anyio.wait_all_tasks_blocked()
        assert "event=drain_failed" in caplog.text
        assert rig.count("internal_error") == 1


async def test_a_value_larger_than_the_arena_is_refused_by_itself() -> None:
    with Rig(size=8 * VALUE) as rig:
        peer = await rig.connect()
        values = {make_key(1): value(1), make_key(2): value(2, 9 * VALUE)}
        assert await rig.put(peer, values) == [Status.OK, Status.TOO_LARGE]


async def test_a_value_that_is_being_read_is_not_evicted() -> None:
    with Rig(size=8 * VALUE) as rig:
        reader, writer = await rig.connect(), await rig.connect()
        await rig.put(writer, {make_key(0): value(0)})
        gate = reader.bulk.hook = Gate()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.get, reader, [make_key(0)])
            await gate.reached.wait()
            for block in range(1, 30):
                assert await rig.put(writer, {make_key(block): value(block)}) == [Status.OK]
            assert rig.exists(make_key(0))
            gate.open.set()
        assert bytes(reader.bulk.client[:VALUE]) == value(0)
        for block in range(30, 40):
            await rig.put(writer, {make_key(block): value(block)})
        assert not rig.exists(make_key(0))


async def test_a_waiting_get_goes_before_the_next_slice_of_a_put() -> None:
    with Rig(overrides={"limits": {"max_transfers": 1, "put_slice_values": 1}}) as rig:
        reader, writer = await rig.connect(), await rig.connect()
        await rig.put(writer, {make_key(99): value(99)})
        order: list[str] = []
        gate = Gate()

        async def ordered(what: str, moves: Sequence[Move]) -> None:
            order.append(what)
            await gate(what, moves)

        reader.bulk.hook = writer.bulk.hook = ordered
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.put, writer, {make_key(block): value(block) for block in range(6)})
            await gate.reached.wait()
            tasks.start_soon(rig.get, reader, [make_key(99)])
            while rig.handler.statistics()["bulk"]["waiting_gets"] == 0:
                await anyio.lowlevel.checkpoint()
            gate.open.set()
        assert order == ["pull", "push"] + ["pull"] * 5


# Failures of a put


async def test_wrong_bytes_are_never_visible(rig: Rig) -> None:
    peer = await rig.connect()
    assert await rig.put(peer, {make_key(1): value(1)}, checksum_xor=1) == [Status.BAD_CHECKSUM]
    assert not rig.exists(make_key(1))
    assert (rig.used, rig.count("put_bad_checksum")) == (0, 1)
    assert await rig.put(peer, {make_key(1): value(1)}) == [Status.OK]


async def test_without_a_checksum_there_is_nothing_to_verify(rig: Rig) -> None:
    peer = await rig.connect()
    none = {"checksum_xor": 5, "algorithm": ChecksumAlgorithm.NONE}
    assert await rig.put(peer, {make_key(1): value(1)}, **none) == [Status.OK]
    assert (await rig.get(peer, [make_key(1)]))[0].algorithm == ChecksumAlgorithm.NONE


async def test_an_unknown_checksum_algorithm_is_refused_as_a_whole(rig: Rig) -> None:
    peer = await rig.connect()
    with pytest.raises(StoreError, match="algorithm 77"):
        await rig.put(peer, {make_key(1): value(1)}, algorithm=77)
    assert (rig.used, peer.bulk.calls) == (0, [])


@pytest.mark.parametrize("status", [Status.FAILED, Status.BAD_EXTENT])
async def test_a_pull_that_failed_leaves_nothing(rig: Rig, status: Status) -> None:
    peer = await rig.connect()
    peer.bulk.hook = answering(status)
    assert await rig.put(peer, {make_key(1): value(1)}) == [status]
    assert (rig.used, rig.exists(make_key(1)), peer.bulk.fences) == (0, False, 0)
    peer.bulk.hook = None
    assert await rig.put(peer, {make_key(1): value(1)}) == [Status.OK]


async def test_the_others_of_a_batch_are_stored(rig: Rig) -> None:
    peer = await rig.connect()
    peer.bulk.hook = answering(Status.OK, Status.FAILED)
    values = {make_key(1): bytes(VALUE), make_key(2): bytes(VALUE)}
    assert await rig.put(peer, values) == [Status.OK, Status.FAILED]
    assert (rig.exists(make_key(1)), rig.exists(make_key(2))) == (True, False)


async def test_after_a_timeout_the_extent_is_reused_only_behind_the_fence(rig: Rig) -> None:
    """P039: bytes may still land, so the order must be fence, then free."""
    peer = await rig.connect()
    peer.bulk.hook = answering(Status.TIMEOUT)
    used_at_fence: list[int] = []
    fence = peer.bulk.fence

    async def watched() -> None:
        used_at_fence.append(rig.used)
        await fence()
        used_at_fence.append(rig.used)

    peer.bulk.fence = watched  # type: ignore[method-assign]
    assert await rig.put(peer, {make_key(1): value(1)}) == [Status.TIMEOUT]
    assert used_at_fence == [VALUE, VALUE]
    assert (rig.used, rig.exists(make_key(1))) == (0, False)
    assert (rig.count("put_given_up"), rig.count("settled_after_fence")) == (1, 1)


async def test_a_get_that_timed_out_unpins_only_behind_the_fence(rig: Rig) -> None:
    writer, reader = await rig.connect(), await rig.connect()
    await rig.put(writer, {make_key(1): value(1)})
    reader.bulk.hook = answering(Status.TIMEOUT)
    pinned_at_fence: list[int] = []
    fence = reader.bulk.fence

    async def watched() -> None:
        await fence()
        pinned_at_fence.append(rig.handler.statistics()["table"]["pinned"])

    reader.bulk.fence = watched  # type: ignore[method-assign]
    assert (await rig.get(reader, [make_key(1)]))[0].status is Status.TIMEOUT
    assert pinned_at_fence == [1]
    assert rig.handler.statistics()["table"]["pinned"] == 0


async def test_a_move_that_fails_while_a_fence_is_on_its_way_is_settled_behind_it() -> None:
    """Another slice has timed out and fences; this one may answer FAILED before its last piece has landed."""
    with Rig(overrides={"limits": {"max_transfers": 2, "put_slice_values": 1}}) as rig:
        peer = await rig.connect()
        fencing, fenced = anyio.Event(), anyio.Event()
        used: list[int] = []

        async def hook(what: str, moves: Sequence[Move]) -> list[Status]:
            if len(peer.bulk.calls) == 1:
                return [Status.TIMEOUT]
            await fencing.wait()
            return [Status.FAILED]

        async def fence() -> None:
            fencing.set()
            await fenced.wait()

        peer.bulk.hook = hook
        peer.bulk.fence = fence  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.put, peer, {make_key(1): value(1), make_key(2): value(2)})
            await anyio.wait_all_tasks_blocked()
            used.append(rig.used)
            fenced.set()
        assert (used, rig.used) == ([2 * VALUE], 0)


async def test_a_get_that_fails_while_a_fence_is_on_its_way_may_still_write(rig: Rig) -> None:
    """P039: what was sent may land in the client's memory after the server's fence: it answers TIMEOUT, not FAILED."""
    writer, reader = await rig.connect(), await rig.connect()
    await rig.put(writer, {make_key(1): value(1), make_key(2): value(2)})
    fencing = anyio.Event()

    async def hook(what: str, moves: Sequence[Move]) -> list[Status]:
        if len(reader.bulk.calls) == 1:
            return [Status.TIMEOUT]
        await fencing.wait()
        return [Status.FAILED]

    async def fence() -> None:
        fencing.set()
        await anyio.lowlevel.checkpoint()

    reader.bulk.hook = hook
    reader.bulk.fence = fence  # type: ignore[method-assign]
    statuses: list[Status] = []

    async def get(number: int) -> None:
        statuses.append((await rig.get(reader, [make_key(number)]))[0].status)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(get, 1)
        tasks.start_soon(get, 2)
    assert statuses == [Status.TIMEOUT, Status.TIMEOUT]


async def test_a_fenced_session_is_cut_when_it_asks_to_move_values_again(rig: Rig) -> None:
    peer = await rig.connect()
    peer.bulk.hook = answering(Status.TIMEOUT)
    await rig.put(peer, {make_key(1): value(1)})
    for call in (rig.put(peer, {make_key(1): value(1)}), rig.get(peer, [make_key(1)])):
        with pytest.raises(RemoteProtocolError, match="fenced") as caught:
            await call
        assert caught.value.kind == "fenced"
    await rig.ask(peer, Ping())


async def test_a_transport_that_raises_counts_as_unknown_and_is_fenced(rig: Rig) -> None:
    async def broken(what: str, moves: Sequence[Move]) -> None:
        raise OSError("a bug of a transport")

    peer = await rig.connect()
    peer.bulk.hook = broken
    assert await rig.put(peer, {make_key(1): value(1)}) == [Status.TIMEOUT]
    assert (rig.used, peer.bulk.fences, rig.count("bulk_error")) == (0, 1, 1)


async def test_a_transport_that_answers_for_too_few_moves_is_fenced(rig: Rig) -> None:
    peer = await rig.connect()
    peer.bulk.hook = answering(Status.OK)
    assert await rig.put(peer, {make_key(1): value(1), make_key(2): value(2)}) == [Status.TIMEOUT] * 2
    assert (rig.used, peer.bulk.fences, rig.count("bulk_wrong_count")) == (0, 1, 1)


async def test_a_transport_that_never_returns_cannot_hold_a_key(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkv_vllm.store.transfers._OVERRUN_S", 0.01)
    peer = await rig.connect()
    peer.bulk.hook = forever
    with anyio.fail_after(2):
        assert await rig.put(peer, {make_key(1): value(1)}, timeout_ms=10) == [Status.TIMEOUT]
    assert (rig.used, peer.bulk.fences, rig.count("bulk_overrun")) == (0, 1, 1)


async def test_a_put_that_got_no_turn_in_time_moved_nothing_and_needs_no_fence() -> None:
    with Rig(overrides={"limits": {"max_transfers": 1}}) as rig:
        busy, late = await rig.connect(), await rig.connect()
        gate = busy.bulk.hook = Gate()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.put, busy, {make_key(1): value(1)})
            await gate.reached.wait()
            assert await rig.put(late, {make_key(2): value(2)}, timeout_ms=10) == [Status.BUSY]
            assert (rig.used, late.bulk.fences, late.bulk.calls) == (VALUE, 0, [])
            gate.open.set()
        assert await rig.put(late, {make_key(2): value(2)}) == [Status.OK]


async def test_the_servers_own_deadline_bounds_that_of_the_request() -> None:
    with Rig(overrides={"limits": {"transfer_timeout_s": 5.0}}) as rig:
        peer = await rig.connect()
        seen: list[float] = []
        pull = peer.bulk.pull

        async def watched(moves: Sequence[Move], deadline: float) -> list[Status]:
            seen.append(deadline - anyio.current_time())
            return await pull(moves, deadline)  # type: ignore[arg-type]

        peer.bulk.pull = watched  # type: ignore[method-assign]
        await rig.put(peer, {make_key(1): value(1)}, timeout_ms=60_000)
        await rig.put(peer, {make_key(2): value(2)}, timeout_ms=1_000)
        assert 4 < seen[0] <= 5
        assert 0.5 < seen[1] <= 1


# Ends of sessions


@pytest.mark.parametrize("operation", ["put", "get"])
async def test_a_client_that_dies_in_a_transfer_holds_its_extents_until_it_is_fenced(rig: Rig, operation: str) -> None:
    peer, other = await rig.connect(), await rig.connect()
    if operation == "get":
        await rig.put(other, {make_key(1): value(1)})
    gate = peer.bulk.hook = Gate()
    async with anyio.create_task_group() as tasks:
        if operation == "put":
            tasks.start_soon(rig.put, peer, {make_key(1): value(1)})
        else:
            tasks.start_soon(rig.get, peer, [make_key(1)])
        await gate.reached.wait()
        tasks.cancel_scope.cancel()  # what a transport does on a lost connection
    await rig.ask(other, Delete([make_key(1)]))
    assert rig.used == VALUE  # bytes may still move
    if operation == "put":
        assert await rig.put(other, {make_key(1): value(1)}) == [Status.PENDING]
    await rig.disconnect(peer)
    assert rig.used == 0
    assert await rig.put(other, {make_key(1): value(1)}) == [Status.OK]
    assert rig.count("leaked_reservations") == 0


async def test_cancellation_at_any_step_leaves_nothing_behind() -> None:
    """P065: cancel at each step of mixed traffic; all gauges return to zero and no key is half there."""
    with Rig(overrides={"limits": {"max_transfers": 2, "put_slice_values": 2}}) as rig:
        for steps in range(120):
            peer = await rig.connect()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rig.put, peer, {make_key(block): value(block) for block in range(5)})
                tasks.start_soon(rig.get, peer, [make_key(block) for block in range(3, 8)])
                tasks.start_soon(rig.put, peer, {make_key(block): value(block) for block in range(5, 9)})
                for _ in range(steps % 60):
                    await anyio.lowlevel.checkpoint()
                if steps > 60:
                    await anyio.sleep(0.0002 * (steps - 60))
                tasks.cancel_scope.cancel()
            await rig.disconnect(peer)
            checker = await rig.connect()
            found = [key for key in (make_key(block) for block in range(9)) if rig.exists(key)]
            results = await rig.get(checker, found)
            assert all(result.status is Status.OK for result in results)
            for at, key in enumerate(found):
                block = int.from_bytes(key[33:65], "big")
                assert bytes(checker.bulk.client[at * VALUE : (at + 1) * VALUE]) == value(block)
            await rig.ask(checker, Delete([make_key(block) for block in range(9)]))
            await rig.disconnect(checker)
            state = rig.handler.statistics()
            assert (rig.used, state["table"]["entries"], state["bulk"]["idle"]) == (0, 0, 2)
            assert (state["server"]["connections"], state["server"]["inflight"]) == (0, 0)
        assert rig.count("leaked_reservations") == 0
        assert rig.count("put_ok") > 0


async def test_closing_a_session_twice_or_before_it_opened_does_nothing(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.handler.closed(peer)
    await rig.handler.closed(peer)
    with pytest.raises(RemoteProtocolError):
        await rig.ask(peer, Ping())


# Lookup, removal, reset


async def test_exists_answers_per_block_whether_all_shards_are_there(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1, 0): value(1), make_key(1, 1): value(2), make_key(2, 0): value(3)})
    prefixes = [make_key(block)[:-2] for block in (1, 2, 3)]
    assert await rig.ask(peer, Exists(prefixes, 2)) == [True, False, False]
    assert await rig.ask(peer, Exists(prefixes, 1)) == [True, True, False]


async def test_an_exists_that_would_hold_the_loop_is_refused() -> None:
    with Rig(overrides={"limits": {"max_batch_keys": 4}}) as rig:
        peer = await rig.connect()
        prefix = make_key(1)[:-2]
        assert await rig.ask(peer, Exists([prefix] * 4, 64)) == [False] * 4
        with pytest.raises(StoreError, match="max_batch_keys"):
            await rig.ask(peer, Exists([prefix] * 4, 65))


async def test_delete_during_a_get_is_immediate_and_the_get_finishes(rig: Rig) -> None:
    reader, other = await rig.connect(), await rig.connect()
    await rig.put(other, {make_key(1): value(1)})
    gate = reader.bulk.hook = Gate()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.get, reader, [make_key(1)])
        await gate.reached.wait()
        assert await rig.ask(other, Delete([make_key(1), make_key(2)])) == [Status.OK, Status.ABSENT]
        assert not rig.exists(make_key(1))
        assert await rig.put(other, {make_key(1): value(9)}) == [Status.OK]
        gate.open.set()
    assert bytes(reader.bulk.client[:VALUE]) == value(1)
    assert rig.used == VALUE


async def test_a_bad_value_is_hidden_once_and_can_be_stored_again(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1)})
    generation = (await rig.get(peer, [make_key(1)]))[0].generation
    report = ReportBad([BadValue(make_key(1), generation), BadValue(make_key(2), 1)])
    assert await rig.ask(peer, report) == [True, False]
    assert await rig.put(peer, {make_key(1): value(1)}) == [Status.OK]
    assert await rig.ask(peer, report) == [False, False]
    assert rig.exists(make_key(1))


async def test_reset_during_traffic_serves_no_old_value_after_its_answer(rig: Rig) -> None:
    """P022: a put in flight ends invisible; everything old is reclaimed."""
    writer, admin = await rig.connect(), await rig.connect()
    await rig.put(writer, {make_key(block): value(block) for block in range(10)})
    other = make_key(1, namespace=b"O" * 32)
    await rig.put(writer, {other: value(1)})
    gate = writer.bulk.hook = Gate()
    statuses: list[Status] = []

    async def late_put() -> None:
        statuses.extend(await rig.put(writer, {make_key(77): value(77)}))

    async with anyio.create_task_group() as sweeper:
        sweeper.start_soon(rig.handler.sweep)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late_put)
            await gate.reached.wait()
            answer = await rig.ask(admin, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
            assert answer == {"command": "reset", "namespace": NAMESPACE.hex(), "hidden": 10}
            results = await rig.get(admin, [make_key(block) for block in range(10)])
            assert {result.status for result in results} == {Status.ABSENT}
            gate.open.set()
        assert statuses == [Status.FAILED]
        assert not rig.exists(make_key(77))
        await anyio.wait_all_tasks_blocked()
        sweeper.cancel_scope.cancel()
    assert rig.used == VALUE
    assert rig.exists(other)
    assert rig.count("put_reset") == 1


@pytest.mark.parametrize(
    "command",
    [
        {},
        {"command": "drop"},
        {"command": "reset"},
        {"command": "reset", "namespace": "zz"},
        {"command": "reset", "namespace": "00"},
    ],
)
async def test_admin_commands_that_are_not_known_are_refused(rig: Rig, command: dict[str, str]) -> None:
    with pytest.raises(StoreError):
        await rig.ask(await rig.connect(), Admin(command))


# Manifests, statistics, regions


async def test_manifests_of_a_family_find_each_other(rig: Rig) -> None:
    peer = await rig.connect()
    one, two = Manifest(b"F" * 32, b"1" * 32, b"{}"), Manifest(b"F" * 32, b"2" * 32, b'{"a":1}')
    assert await rig.ask(peer, one) == []
    assert await rig.ask(peer, two) == [(b"1" * 32, b"{}")]
    assert await rig.ask(peer, one) == [(b"2" * 32, b'{"a":1}')]


async def test_the_siblings_of_a_manifest_fit_a_frame() -> None:
    with Rig(overrides={"limits": {"max_frame_bytes": 65536, "max_manifest_bytes": 20000}}) as rig:
        peer = await rig.connect()
        with pytest.raises(StoreError, match="max_family_bytes"):
            for number in range(4):
                request = Manifest(b"F" * 32, bytes([number]) * 32, b"x" * 20000)
                body = await rig.handler.handle(peer, request.TYPE, memoryview(request.pack()))
                assert body is not None and len(body) <= 65536


async def test_stat_is_json_with_every_part(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1)})
    state = await rig.ask(peer, Stat())
    parts = {"server", "arena", "table", "manifests", "bulk", "counters", "latency", "disk", "sessions"}
    assert set(state) == parts
    assert state["table"]["counters"]["commits"] == 1
    assert state["arena"]["used"] == VALUE
    assert state["sessions"][0]["put_bytes"] == VALUE
    assert state["server"]["server_id"] == (b"s" * 16).hex()
    text = json.dumps(state)
    assert rig.handler.find_key("default").hex() not in text


# Limits, rights, admission


@pytest.mark.parametrize(
    "make",
    [
        lambda rig, peer, keys: rig.put_request(peer, dict.fromkeys(keys, b"x")),
        lambda rig, peer, keys: Exists([key[:-2] for key in keys], 1),
        lambda rig, peer, keys: Delete(keys),
        lambda rig, peer, keys: ReportBad([BadValue(key, 1) for key in keys]),
    ],
    ids=["put", "exists", "delete", "report_bad"],
)
async def test_an_oversize_batch_is_refused_as_a_whole(make: Callable[..., Put | Exists | Delete | ReportBad]) -> None:
    with Rig(overrides={"limits": {"max_batch_keys": 3}}) as rig:
        peer = await rig.connect()
        await rig.ask(peer, make(rig, peer, [make_key(block) for block in range(3)]))
        used = rig.used
        with pytest.raises(StoreError, match="limits.max_batch_keys = 3"):
            await rig.ask(peer, make(rig, peer, [make_key(block) for block in range(10, 14)]))
        assert rig.used == used
        assert (rig.count("refused_batch"), rig.count("requests_refused")) == (1, 1)


@pytest.mark.parametrize(
    "kind", [0, MessageType.REGISTER, MessageType.HELLO, MessageType.PROOF, MessageType.REJECT, 99, 255]
)
async def test_a_message_that_is_no_request_cuts_the_peer(rig: Rig, kind: int) -> None:
    peer = await rig.connect()
    with pytest.raises(RemoteProtocolError) as caught:
        await rig.handler.handle(peer, kind, memoryview(b""))
    assert caught.value.kind == "type"


@pytest.mark.parametrize("kind", [MessageType.PING, MessageType.STAT])
async def test_a_body_where_none_belongs_cuts_the_peer(rig: Rig, kind: MessageType) -> None:
    peer = await rig.connect()
    with pytest.raises(RemoteProtocolError):
        await rig.handler.handle(peer, kind, memoryview(b"x"))


def keys_config(**entries: dict[str, object]) -> dict[str, object]:
    made = {name: {"key": os.urandom(32).hex(), **entry} for name, entry in entries.items()}
    return {"address": "127.0.0.1:0", "auth_keys": made}


async def test_rights_hold_per_operation() -> None:
    network = keys_config(
        all={}, reader={"rights": ["read"]}, writer={"rights": ["write"]}, cleaner={"rights": ["delete"]}
    )
    with Rig(network=network) as rig:
        full, reader, writer, cleaner = [await rig.connect(name) for name in ("all", "reader", "writer", "cleaner")]
        key = make_key(1)
        prefix = [key[:-2]]
        assert await rig.put(reader, {key: value(1)}) == [Status.DENIED]
        assert await rig.put(writer, {key: value(1)}) == [Status.OK]
        assert (await rig.get(writer, [key]))[0].status is Status.DENIED
        assert (await rig.get(reader, [key]))[0].status is Status.OK
        assert await rig.ask(writer, Exists(prefix, 1)) == [False]
        assert await rig.ask(reader, Exists(prefix, 1)) == [True]
        generation = (await rig.get(reader, [key]))[0].generation
        assert await rig.ask(reader, ReportBad([BadValue(key, generation)])) == [False]
        assert await rig.ask(reader, Delete([key])) == [Status.DENIED]
        for peer in (reader, writer, cleaner):
            with pytest.raises(StoreError, match="denied"):
                await rig.ask(peer, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        with pytest.raises(StoreError, match="denied"):
            await rig.ask(cleaner, Manifest(b"F" * 32, NAMESPACE, b"{}"))
        assert await rig.ask(writer, Manifest(b"F" * 32, NAMESPACE, b"{}")) == []
        assert await rig.ask(reader, Manifest(b"F" * 32, b"M" * 32, b"{}")) == [(NAMESPACE, b"{}")]
        assert await rig.ask(full, Manifest(b"F" * 32, b"P" * 32, b"{}")) == [(NAMESPACE, b"{}")]  # reader's not added
        assert await rig.ask(cleaner, Delete([key])) == [Status.OK]


async def test_rights_end_at_the_prefix() -> None:
    mine, other = make_key(1), make_key(1, namespace=b"O" * 32)
    network = keys_config(all={}, tenant={"prefix": (b"\x01" + NAMESPACE).hex()})
    with Rig(network=network) as rig:
        full, tenant = await rig.connect("all"), await rig.connect("tenant")
        assert await rig.put(tenant, {mine: value(1), other: value(2)}) == [Status.OK, Status.DENIED]
        await rig.put(full, {other: value(2)})
        results = await rig.get(tenant, [mine, other])
        assert [result.status for result in results] == [Status.OK, Status.DENIED]
        assert await rig.ask(tenant, Exists([mine[:-2], other[:-2]], 1)) == [True, False]
        assert await rig.ask(tenant, Delete([other])) == [Status.DENIED]
        with pytest.raises(StoreError, match="denied"):
            await rig.ask(tenant, Admin({"command": "reset", "namespace": (b"O" * 32).hex()}))
        answer = await rig.ask(tenant, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        assert answer["hidden"] == 1


async def test_a_prefix_inside_a_namespace_gives_no_right_over_all_of_it() -> None:
    network = keys_config(part={"prefix": make_key(1)[:40].hex()})
    with Rig(network=network) as rig:
        peer = await rig.connect("part")
        with pytest.raises(StoreError, match="denied"):
            await rig.ask(peer, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))


async def test_handshakes_and_sessions_are_bounded() -> None:
    with Rig(overrides={"limits": {"max_handshakes": 2, "max_sessions": 3}}) as rig:
        assert rig.handler.admit() and rig.handler.admit()
        assert not rig.handler.admit()
        rig.handler.departed()
        rig.handler.departed()
        peers = [await rig.connect() for _ in range(3)]  # a session is no handshake any more
        with pytest.raises(StoreError, match="max_sessions = 3"):
            await rig.connect()
        await rig.disconnect(peers[0])
        await rig.connect()
        assert (rig.count("refused_handshakes"), rig.count("refused_sessions")) == (1, 1)


async def test_departed_without_admit_is_a_bug(rig: Rig) -> None:
    with pytest.raises(LocalProtocolError):
        rig.handler.departed()


async def test_a_closing_handler_finishes_what_runs_and_takes_nothing_new(rig: Rig) -> None:
    peer = await rig.connect()
    gate = peer.bulk.hook = Gate()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.put, peer, {make_key(1): value(1)})
        await gate.reached.wait()
        rig.handler.close()
        assert not rig.handler.admit()
        with pytest.raises(StoreError, match="closing"):
            await rig.ask(peer, Ping())
        with anyio.move_on_after(0.01) as waited:
            await rig.handler.wait_idle()
        assert waited.cancelled_caught
        gate.open.set()
        await rig.handler.wait_idle()
    assert rig.exists(make_key(1))


async def test_all_who_wait_for_an_idle_handler_are_woken_and_each_busy_time_is_waited_for(rig: Rig) -> None:
    peer = await rig.connect()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await rig.handler.wait_idle()
        woken.append(number)

    await wait(0)  # nothing is in flight
    for round in (1, 2):
        gate = peer.bulk.hook = Gate()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.put, peer, {make_key(round): value(round)})
            await gate.reached.wait()
            tasks.start_soon(wait, 10 * round)
            tasks.start_soon(wait, 10 * round + 1)
            await anyio.wait_all_tasks_blocked()
            assert woken == [0, 10, 11][: 2 * round - 1]
            gate.open.set()
    assert woken == [0, 10, 11, 20, 21]


def test_limits_told_to_clients_fit_the_wire() -> None:
    with Rig(overrides={"limits": {"max_batch_keys": 65536, "max_inflight_per_session": 1_000_000}}) as rig:
        limits = rig.handler.identity.limits
        assert (limits.max_batch_keys, limits.max_inflight) == (65535, 65535)
        assert limits.max_value_bytes == rig.size


def test_an_unknown_key_id_has_a_key_that_nobody_can_hold(rig: Rig) -> None:
    unknown = [rig.handler.find_key("nobody") for _ in range(3)]
    assert len(set(unknown)) == 3 and {len(key) for key in unknown} == {32}
    assert rig.count("auth_unknown_key") == 0  # a stranger could measure the time that counting takes
    rig.handler.unproven("nobody")
    rig.handler.unproven("default")
    assert rig.count("auth_unknown_key") == 1
    key = rig.handler.find_key("default")
    assert len(key) == 32
    assert key.hex() not in repr(rig.handler)
