"""What comes late costs nobody else: a block that reaches a lane too late, a server that registers memory slowly."""

from __future__ import annotations

import anyio
import pytest

from memkv_vllm.protocol.messages import Put
from memkv_vllm.types import LossReason
from tests.support.ranks import eventually, rank, staging_plan
from tests.support.scripted_transport import Gate, ScriptedConnection, scripted

pytestmark = pytest.mark.fault

WAIT_S = 2.0


def test_a_backlog_that_is_too_old_costs_its_own_blocks_only() -> None:
    """A server that takes 0.3 s for each two values: of twenty that queue for two slots some come too late."""

    async def slow(connection: ScriptedConnection, request: Put) -> None:
        await anyio.sleep(0.3)

    with (
        scripted("a") as (settings, scripts),
        rank(settings, plan=staging_plan(2, lanes=1), wait_timeout_s=WAIT_S) as one,
    ):
        one.ready().stored(range(2))
        scripts["a"].on_put = slow
        stored = one.result(one.store(range(10, 30)))
        assert stored.lost and set(stored.lost) == {LossReason.TIMEOUT}
        assert stored.lost[LossReason.TIMEOUT] < 20
        result = one.loaded(range(2))
        assert (result.lost, one.wrong(result, range(2))) == ({}, [])
        statistics = one.statistics
        assert (statistics.reconnects, statistics.fences, statistics.slots_quarantined) == (0, 0, 0)


def test_waiting_for_a_store_that_comes_too_late_ends() -> None:
    """Its blocks are queued but will not be started: ``wait`` must not sit there until their deadline."""
    gate = Gate(is_open=False)

    async def stuck(connection: ScriptedConnection, request: Put) -> None:
        await gate.passed()

    with (
        scripted("a") as (settings, scripts),
        rank(settings, plan=staging_plan(2, lanes=1), wait_timeout_s=WAIT_S) as one,
    ):
        one.ready()
        scripts["a"].on_put = stuck
        first = one.store(range(10, 20))
        one.engine.wait({first})
        gate.open()
        assert set(one.result(first).lost) == {LossReason.FLUSHED}


def test_servers_that_register_memory_slowly_hold_up_neither_the_start_nor_each_other() -> None:
    """P086: the engine is up at once and misses; the pool is registered with all servers side by side."""
    with scripted("a", "b") as (settings, scripts):
        for script in scripts.values():
            script.registers.shut()
        with rank(settings) as one:
            eventually(lambda: all(script.registers.waiting for script in scripts.values()), "both register at a time")
            result = one.loaded(range(4))
            assert set(result.lost) == {LossReason.BREAKER}, "an engine that waits for nobody"
            scripts["a"].registers.open()
            one.ready()
            assert one.engine.statistics().servers_ready == 1
            scripts["b"].registers.open()
            one.ready(2).stored(range(4))
            assert one.loaded(range(4)).lost == {}
