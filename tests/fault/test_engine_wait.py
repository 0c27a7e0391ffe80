"""``wait`` guards GPU blocks, not the network: after it vLLM may write into the blocks of the jobs that it named.

Faults P040, P042, P043, P038; design section 5.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memkv_vllm.keys import store_key
from memkv_vllm.protocol.messages import Get, Put
from memkv_vllm.types import LossReason
from tests.support.ranks import VALUE, Rank, eventually, prefix_of, rank, staging_plan
from tests.support.scripted_transport import Gate, Script, ScriptedConnection, scripted

pytestmark = pytest.mark.fault

MARK = 0xAB
"""What vLLM writes into a block once ``wait`` has returned."""


@contextmanager
def one_rank(slots: int = 4, lanes: int = 1, wait_timeout_s: float = 30.0) -> Iterator[tuple[Rank, Script, Gate]]:
    """A rank, its server, and a gate that its gets and puts pass once they are under way."""
    gate = Gate()

    async def gated(connection: ScriptedConnection, request: Get | Put) -> None:
        await gate.passed()

    with scripted("a", op_timeout_s=600) as (settings, scripts):
        with rank(settings, plan=staging_plan(slots, lanes=lanes), wait_timeout_s=wait_timeout_s) as one:
            scripts["a"].on_get = scripts["a"].on_put = gated
            yield one.ready(), scripts["a"], gate


def reuse(one: Rank, blocks: range) -> None:
    """vLLM gives these GPU blocks to somebody else."""
    assert one.mover.active == 0 or not set(blocks) & set(range(one.half)), "a copy of these blocks still runs"
    one.mover.blocks[blocks.start : blocks.stop] = MARK


def stored_as_computed(one: Rank, script: Script, number: int) -> bool:
    """Whether the server holds what block ``number`` had before it was reused."""
    return script.values[store_key(prefix_of(number), 0)].data == one.computed[number].tobytes()


# ------------------------------------------------------------------------------------------------ stores


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_ungathered_blocks_are_gathered_before_it_returns(delay_s: float) -> None:
    with one_rank(slots=16, lanes=2) as (one, script, gate):
        one.mover.delay_s = delay_s
        gate.shut()
        job = one.store(range(10))
        one.engine.wait({job})
        assert sorted(one.mover.gathered) == list(range(10))
        assert one.mover.active == 0
        reuse(one, range(10))
        assert job not in one.poll(), "wait did not wait for the network"
        gate.open()
        assert one.result(job).lost == {}
        assert all(stored_as_computed(one, script, number) for number in range(10))


def test_blocks_without_a_slot_are_dropped_and_counted() -> None:
    """All slots are on their way to a server that does not answer: wait returns all the same."""
    with one_rank() as (one, script, gate):
        gate.shut()
        job = one.store(range(10))
        eventually(lambda: one.statistics.slots_held == 3, "stores hold what they may")
        one.engine.wait({job})
        assert gate.waiting, "the network still stands"
        assert one.mover.gathered == [0, 1, 2]
        reuse(one, range(10))
        gate.open()
        assert one.result(job).lost == {LossReason.FLUSHED: 7}
        assert one.lost("store_flushed") == 7
        assert [stored_as_computed(one, script, number) for number in range(3)] == [True] * 3
        assert len(script.values) == 3
        one.idle()


def test_only_the_named_store_loses_blocks() -> None:
    with one_rank() as (one, _, gate):
        gate.shut()
        first, second = one.store(range(10)), one.store(range(20, 25))
        eventually(lambda: one.statistics.slots_held == 3, "stores hold what they may")
        one.engine.wait({second})
        gate.open()
        assert one.result(second).lost == {LossReason.FLUSHED: 5}
        assert one.result(first).lost == {}


def test_a_store_is_not_kept_waiting_by_a_load_that_has_no_slot() -> None:
    """An expedited load stands before it in the queue and waits for the network; the store must not."""
    with one_rank() as (one, script, gate):
        for number in range(20):
            script.put(store_key(prefix_of(number), 0), one.computed[number].tobytes())
        gate.shut()
        stuck = one.load(range(4))
        eventually(lambda: one.statistics.slots_free == 0, "loads hold every slot")
        expedited, store = one.load(range(10, 15), expedited=True), one.store(range(30, 35))
        one.engine.wait({store})
        assert gate.waiting, "the network still stands"
        reuse(one, range(30, 35))
        gate.open()
        assert one.result(store).lost == {LossReason.FLUSHED: 5}
        for job, numbers in ((stuck, range(4)), (expedited, range(10, 15))):
            assert (one.result(job).lost, one.wrong(one.result(job), numbers)) == ({}, [])


def test_a_store_for_a_server_that_is_down_is_no_reason_to_wait() -> None:
    with one_rank() as (one, script, gate):
        gate.shut()
        store = one.store(range(10))
        eventually(lambda: gate.waiting, "a put is under way")
        script.accepts.shut()
        script.connections[0].cut()
        one.engine.wait({store})
        assert one.result(store).lost.keys() <= {LossReason.BREAKER, LossReason.FLUSHED}


# ------------------------------------------------------------------------------------------------ loads


def test_a_flushed_load_is_never_scattered() -> None:
    """P040: the bytes arrive after the block was given away; they reach the slot, and stay there."""
    with one_rank(slots=8) as (one, script, gate):
        for number in range(20):
            script.put(store_key(prefix_of(number), 0), one.computed[number].tobytes())
        gate.shut()
        job = one.load(range(20))
        eventually(lambda: one.statistics.slots_free == 0, "gets are under way")
        one.engine.wait({job})
        assert gate.waiting, "the network still stands"
        reuse(one, range(one.half, one.half + 20))
        gate.open()
        result = one.result(job)
        assert result.lost == {LossReason.FLUSHED: 20}
        assert result.bad_block_ids == tuple(range(one.half, one.half + 20))
        one.idle()
        assert (one.mover.blocks[one.half : one.half + 20] == MARK).all()
        assert one.mover.scattered == []
        assert one.lost("load_flushed") == 20


def test_a_flushed_load_does_not_take_those_with_it_that_joined() -> None:
    with one_rank() as (one, script, gate):
        script.put(store_key(prefix_of(1), 0), one.computed[1].tobytes())
        gate.shut()
        flushed = one.load([1])
        eventually(lambda: gate.waiting, "the get is under way")
        kept, also_flushed = one.load([1], into=[one.half + 5]), one.load([1], into=[one.half + 6])
        one.engine.wait({flushed, also_flushed})
        reuse(one, range(one.half + 1, one.half + 2))
        reuse(one, range(one.half + 6, one.half + 7))
        gate.open()
        assert one.result(kept).lost == {}
        assert one.gpu(one.half + 5) == one.computed[1].tobytes()
        for job, block in ((flushed, one.half + 1), (also_flushed, one.half + 6)):
            assert one.result(job).bad_block_ids == (block,)
            assert (one.mover.blocks[block] == MARK).all()
        one.idle()


def test_it_returns_only_after_a_scatter_that_has_begun() -> None:
    with one_rank(slots=8) as (one, script, _):
        for number in range(4):
            script.put(store_key(prefix_of(number), 0), one.computed[number].tobytes())
        one.mover.delay_s = 0.2
        job = one.load(range(4))
        eventually(lambda: one.mover.active, "a scatter runs")
        one.engine.wait({job})
        assert one.mover.active == 0
        seen = one.mover.blocks[one.half : one.half + 4].copy()
        result = one.result(job)
        assert one.wrong(result, range(4)) == []
        assert (one.mover.blocks[one.half : one.half + 4] == seen).all(), "nothing was written after it returned"


def test_an_expedited_load_is_awaited() -> None:
    with one_rank() as (one, script, gate):
        for number in range(10):
            script.put(store_key(prefix_of(number), 0), one.computed[number].tobytes())
        gate.shut()
        job = one.load(range(10), expedited=True)
        eventually(lambda: gate.waiting, "a get is under way")
        returned = threading.Event()

        def open_when_waited_for() -> None:
            eventually(lambda: one.engine._core.schedule.job(job) is not None, "the job is known")
            assert not returned.wait(0.1), "wait came back before the load had ended"
            gate.open()

        opener = threading.Thread(target=open_when_waited_for)
        opener.start()
        one.engine.wait({job})
        returned.set()
        opener.join()
        assert [one.gpu(one.half + number) for number in range(10)] == [one.computed[n].tobytes() for n in range(10)]
        assert one.result(job).lost == {}


def test_an_expedited_load_is_awaited_to_its_deadline_only() -> None:
    with one_rank(wait_timeout_s=0.3) as (one, script, gate):
        gate.shut()
        job = one.load(range(10), expedited=True)
        one.engine.wait({job})
        reuse(one, range(one.half, one.half + 10))
        result = one.result(job)
        assert sum(result.lost.values()) == 10 and result.lost.keys() <= {LossReason.TIMEOUT, LossReason.BREAKER}
        assert result.elapsed_s >= 0.3
        gate.open()
        one.idle()
        assert (one.mover.blocks[one.half : one.half + 10] == MARK).all()


# ------------------------------------------------------------------------------------------------ ids


def test_unknown_and_finished_jobs_are_no_error() -> None:
    """P038, P042, P043: never started, ended but not reported yet, reported."""
    with one_rank() as (one, _, gate):
        one.engine.wait(set())
        one.engine.wait({17, 18})
        store = one.store([1])
        eventually(lambda: one.statistics.stored_blocks == 1, "the store has ended")
        one.engine.wait({store, 99})
        assert one.result(store).lost == {}
        one.engine.wait({store})
        gate.shut()
        load = one.load([1])
        one.engine.wait({store, load, 99})
        one.engine.wait({load})
        gate.open()
        assert one.result(load).lost == {LossReason.FLUSHED: 1}
        assert one.gpu(one.half + 1) == bytes(VALUE)
