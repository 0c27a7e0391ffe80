"""Waiting for a lane."""

from __future__ import annotations

import anyio
import pytest

from memkv_vllm.store.bulkqueue import BulkKind, BulkQueue
from memkv_vllm.store.turns import BulkTurns

pytestmark = pytest.mark.anyio
GET, PUT = BulkKind.GET, BulkKind.PUT


def make_turns(lanes: int = 1, max_waiting: int = 100) -> BulkTurns:
    return BulkTurns(lanes, BulkQueue(max_waiting=max_waiting))


async def run(turns: BulkTurns, kind: BulkKind, name: str, done: list[str], hold_s: float = 0.0) -> None:
    async with turns.turn(turns.ticket(kind), 10.0) as granted:
        assert granted
        done.append(name)
        await anyio.sleep(hold_s)


async def test_a_waiting_get_takes_the_next_free_lane_before_waiting_puts() -> None:
    turns = make_turns()
    done: list[str] = []
    async with anyio.create_task_group() as tasks:
        for kind, name in [(PUT, "p1"), (PUT, "p2"), (PUT, "p3"), (GET, "g")]:
            tasks.start_soon(run, turns, kind, name, done, 0.01)
            await anyio.wait_all_tasks_blocked()
    assert done == ["p1", "g", "p2", "p3"]
    assert turns.statistics().idle == 1


async def test_no_more_turns_at_once_than_lanes() -> None:
    turns, running, most = make_turns(lanes=3), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with turns.turn(turns.ticket(PUT), 10.0):
            running += 1
            most = max(most, running)
            await anyio.sleep(0.001)
            running -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(work)
    assert most == 3
    assert turns.statistics().idle == 3


async def test_a_turn_that_does_not_come_in_time_holds_nothing() -> None:
    turns = make_turns()
    async with turns.turn(turns.ticket(PUT), 1.0) as first:
        assert first
        async with turns.turn(turns.ticket(GET), 0.01) as second:
            assert not second
        assert turns.statistics().queue.waiting_gets == 0
    assert turns.statistics().idle == 1


async def test_a_full_line_grants_nothing() -> None:
    turns = make_turns(max_waiting=1)
    done: list[str] = []
    async with anyio.create_task_group() as tasks, turns.turn(turns.ticket(PUT), 1.0):
        tasks.start_soon(run, turns, PUT, "waits", done)
        await anyio.wait_all_tasks_blocked()
        async with turns.turn(turns.ticket(GET), 1.0) as granted:
            assert not granted
    assert done == ["waits"]


async def test_cancellation_at_any_moment_loses_no_lane() -> None:
    turns = make_turns(lanes=2)
    for rounds in range(200):
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(run, turns, GET if number % 2 else PUT, "", [], 0.0)
            for _ in range(rounds % 12):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert turns.statistics().idle == 2
        assert turns.statistics().queue[:2] == (0, 0)


async def test_a_lane_handed_over_to_a_cancelled_waiter_goes_on_to_the_next() -> None:
    turns = make_turns()
    done: list[str] = []
    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as tasks:
            holder = turns.turn(turns.ticket(PUT), 1.0)
            assert await holder.__aenter__()
            tasks.start_soon(run, turns, PUT, "cancelled", done)
            await anyio.wait_all_tasks_blocked()
            outer.start_soon(run, turns, PUT, "next", done)
            await anyio.wait_all_tasks_blocked()
            await holder.__aexit__(None, None, None)  # hands the lane to the first waiter ...
            tasks.cancel_scope.cancel()  # ... which never gets to run
    assert done[-1] == "next"
    assert turns.statistics().idle == 1


async def test_an_owner_that_holds_its_share_makes_no_other_wait() -> None:
    turns = BulkTurns(4, BulkQueue(), lanes_per_owner=2)
    done: list[str] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(hold, turns, PUT, "dead", done)
        await anyio.wait_all_tasks_blocked()
        assert done == ["dead", "dead"]
        async with turns.turn(turns.ticket(PUT, "alive"), 1.0) as granted:
            assert granted
        assert len(done) == 2, "the lane that came back is not for the one with its share"
        tasks.cancel_scope.cancel()
    assert turns.statistics().idle == 4


async def test_a_turn_of_another_owner_goes_before_one_that_may_not() -> None:
    turns = BulkTurns(1, BulkQueue(), lanes_per_owner=1)
    done: list[str] = []
    async with anyio.create_task_group() as tasks:
        async with turns.turn(turns.ticket(GET, "a"), 1.0):
            for owner in ("b", "a"):
                tasks.start_soon(run_as, turns, GET, owner, done)
                await anyio.wait_all_tasks_blocked()
    assert done == ["b", "a"]


async def test_puts_leave_lanes_to_gets() -> None:
    turns = BulkTurns(8, BulkQueue())
    done: list[str] = []
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(hold, turns, PUT, f"put {number}", done)
        await anyio.wait_all_tasks_blocked()
        assert len(done) == 6
        for number in range(4):
            tasks.start_soon(hold, turns, GET, f"get {number}", done)
        await anyio.wait_all_tasks_blocked()
        assert done[6:] == ["get 0", "get 1"]
        tasks.cancel_scope.cancel()
    assert turns.statistics().idle == 8


async def hold(turns: BulkTurns, kind: BulkKind, owner: str, done: list[str]) -> None:
    """Take a lane and keep it."""
    async with turns.turn(turns.ticket(kind, owner), 10.0) as granted:
        assert granted
        done.append(owner)
        await anyio.sleep_forever()


async def run_as(turns: BulkTurns, kind: BulkKind, owner: str, done: list[str]) -> None:
    async with turns.turn(turns.ticket(kind, owner), 10.0):
        done.append(owner)
