"""Invariants 6 and 7, bounded and loads before stores; and the vLLM side never waits for the network.

Faults P046, P048, P085, P094.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkv_vllm.keys import store_key
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Get, Put
from memkv_vllm.transports.faults import Delay, NoReply, Operation
from memkv_vllm.types import LossReason
from tests.support.ranks import (
    VALUE,
    Cluster,
    Rank,
    cluster_settings,
    eventually,
    prefix_of,
    rank,
    staging_plan,
)
from tests.support.scripted_transport import Gate, Script, ScriptedConnection, scripted
from tests.support.store_process import StoreProcess

pytestmark = pytest.mark.fault


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as stores:
        yield stores


class AtOnce:
    """While it is held, the engine's loop stands still; then it finds everything that was submitted meanwhile."""

    def __init__(self, one: Rank) -> None:
        self._go, self._held = threading.Event(), threading.Event()
        one.engine._thread.post(self._hold)
        assert self._held.wait(5)

    def _hold(self) -> None:
        self._held.set()
        self._go.wait(10)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._go.set()


class Recorder:
    """The order in which requests reach a script: ``put`` or ``get`` with the block's number."""

    def __init__(self, script: Script, half: int) -> None:
        self.seen: list[tuple[str, int]] = []
        self._numbers = {store_key(prefix_of(number), 0): number for number in range(half)}
        script.on_request = self._note

    async def _note(self, connection: ScriptedConnection, request: Get | Put) -> None:
        kind = "get" if isinstance(request, Get) else "put"
        self.seen += [(kind, self._numbers[item.key]) for item in request.items]


# ------------------------------------------------------------------------------------------------ order


def test_loads_go_before_stores_that_came_first() -> None:
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(4, lanes=1)) as one:
        one.ready().stored(range(4))
        recorder = Recorder(scripts["a"], one.half)
        with AtOnce(one):
            jobs = [one.store(range(10, 30)), one.load(range(4))]
        for job in jobs:
            assert one.result(job).lost == {}
        assert [kind for kind, _ in recorder.seen[:4]] == ["get"] * 4


def test_stores_leave_slots_for_loads() -> None:
    """Stores that wait for a slow server hold three quarters of the slots; a load that comes later is served."""
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(8, lanes=2)) as one:
        one.ready().stored(range(4))
        gate = Gate(is_open=False)

        async def slow(connection: ScriptedConnection, request: Put) -> None:
            await gate.passed()

        scripts["a"].on_put = slow
        store = one.store(range(10, 40))
        eventually(lambda: one.statistics.slots_held == 6, "stores hold what they may")
        for _ in range(3):
            result = one.loaded(range(4))
            assert (result.lost, one.wrong(result, range(4))) == ({}, [])
        assert store not in one.poll()
        assert one.statistics.slots_held == 6
        gate.open()
        assert one.result(store).lost == {}


def test_a_job_that_is_waited_for_goes_before_all_others() -> None:
    with scripted("a") as (settings, _), rank(settings, plan=staging_plan(8, lanes=1)) as one:
        one.ready()
        one.mover.delay_s = 0.01
        with AtOnce(one):
            first = one.store(range(40))
            second = one.store(range(50, 54))
        one.engine.wait({second})
        gathered = list(one.mover.gathered)
        assert set(range(50, 54)) <= set(gathered)
        assert len(gathered) < 44, "wait did not wait for the job before"
        assert one.result(first).lost == one.result(second).lost == {}


def test_an_expedited_load_goes_before_other_loads() -> None:
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(4, lanes=1)) as one:
        one.ready().stored(range(40))
        recorder = Recorder(scripts["a"], one.half)
        with AtOnce(one):
            jobs = [one.load(range(20)), one.load(range(30, 34), expedited=True)]
        for job in jobs:
            assert one.result(job).lost == {}
        assert recorder.seen[:4] == [("get", number) for number in range(30, 34)]


def test_a_store_flood_does_not_hold_loads_up(cluster: Cluster) -> None:
    """P048: each of these loads came after hundreds of stores, and is done before them."""
    cluster.only.faults.add(Operation.PULL, Delay(0.02))
    with rank(cluster.settings(), blocks=600, plan=staging_plan(16)) as one:
        one.ready().stored(range(8))
        flood = [one.store(range(start, start + 100)) for start in range(8, 608 - 100, 100)]
        for _ in range(20):
            result = one.loaded(range(8))
            assert (result.lost, one.wrong(result, range(8))) == ({}, [])
        assert flood[-1] not in one.poll()
        queued = one.statistics.queued_store_blocks
        assert queued > 200
        for job in flood:
            assert one.result(job).lost == {}


# ------------------------------------------------------------------------------------------------ budgets


def test_stores_beyond_the_backlog_are_shed_and_loads_never() -> None:
    """P048, P094: the newest go, by bytes, and are counted; what was accepted stays."""
    with scripted("a") as (settings, scripts):
        with rank(settings, plan=staging_plan(4, lanes=1), max_store_backlog_bytes=8 * VALUE) as one:
            one.ready().stored(range(8))
            gate = Gate(is_open=False)

            async def slow(connection: ScriptedConnection, request: Put) -> None:
                await gate.passed()

            scripts["a"].on_put = slow
            with AtOnce(one):
                stores = [one.store(range(10, 15)), one.store(range(20, 25))]
                loads = [one.load(range(8)) for _ in range(10)]
            for job in loads:
                assert one.result(job).lost == {}
            eventually(lambda: one.statistics.queued_store_blocks == 5, "three blocks have slots, five wait")
            assert one.statistics.queued_store_bytes == 5 * VALUE
            third = one.store(range(30, 35))
            assert third not in one.poll()
            gate.open()
            lost = [dict(one.result(job).lost) for job in (*stores, third)]
            assert lost == [{}, {LossReason.SHED: 2}, {LossReason.SHED: 2}]
            assert one.lost("store_shed") == 4
            one.idle()


def test_a_job_larger_than_the_queue_is_cut_not_refused() -> None:
    with scripted("a") as (settings, _), rank(settings, max_store_backlog_bytes=10 * VALUE) as one:
        result = one.ready().stored(range(64))
        assert sum(result.lost.values()) == 64 - one.statistics.stored_blocks
        assert result.lost.keys() == {LossReason.SHED}
        assert one.statistics.stored_blocks >= 10


# ------------------------------------------------------------------------------------------------ deadlines


@pytest.mark.parametrize("type", [MessageType.GET, MessageType.PUT])
def test_a_job_ends_at_its_deadline_whatever_the_server_does(cluster: Cluster, type: MessageType) -> None:
    """P046: ``memkv_wait_timeout_s`` holds although ``op_timeout_s`` is much longer, for queued blocks too."""
    with rank(cluster.settings(op_timeout_s=600), plan=staging_plan(4, lanes=1), wait_timeout_s=0.5) as one:
        one.ready().stored(range(20))
        cluster.only.faults.add(Operation.REQUEST, NoReply(), type=type)
        result = one.loaded(range(20)) if type is MessageType.GET else one.stored(range(20, 40))
        assert result.lost.keys() <= {LossReason.TIMEOUT, LossReason.BREAKER}
        assert result.lost[LossReason.TIMEOUT] >= 16, "those that never got a slot"
        assert sum(result.lost.values()) == 20
        assert result.elapsed_s >= 0.5
        cluster.only.faults.clear()
        one.ready().idle()


def test_a_follower_ends_at_its_own_deadline(cluster: Cluster) -> None:
    """A load that joined an older one is not held by it, nor ended by it without a reason."""
    with rank(cluster.settings(op_timeout_s=600), wait_timeout_s=0.4) as one:
        one.ready().stored([1])
        silent = cluster.only.faults.add(Operation.REQUEST, NoReply(), type=MessageType.GET)
        first = one.load([1])
        eventually(lambda: silent.fired, "the get is under way")
        second = one.load([1], into=[one.half + 2])
        assert one.result(first).lost == {LossReason.TIMEOUT: 1}
        assert one.result(second).lost == {LossReason.TIMEOUT: 1}
        assert not one.mover.blocks[one.half :].any()


# ------------------------------------------------------------------------------------------------ the vLLM side


def seconds_per_call(one: Rank, rounds: int = 60) -> float:
    """The median time of a submit of each kind and a poll, in vLLM's thread."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        one.store(range(8))
        one.load(range(8))
        one.poll()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@pytest.mark.timeout(60)
def test_submit_and_poll_do_not_wait_for_a_network_that_stands_still() -> None:
    key = os.urandom(32)
    with StoreProcess(key) as store:
        settings = cluster_settings(key, {"a": store.port}, op_timeout_s=600)
        with rank(settings, plan=staging_plan(8)) as one:
            one.ready().stored(range(8))
            healthy = seconds_per_call(one)
            one.idle()
            store.freeze()
            frozen = seconds_per_call(one)
            eventually(lambda: one.statistics.slots_free == 0, "every slot waits for the network")
            # Of which kind depends on who got the slots: loads of blocks that are on their way join those.
            assert one.statistics.queued_load_blocks + one.statistics.queued_store_blocks > 0
            assert frozen < 25 * healthy
            store.thaw()
            one.idle()
