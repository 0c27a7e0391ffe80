"""A server that is busy is not a server that is broken: what was not sent, and what takes long. P046."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from memkv_vllm.engine import generation as generation_module
from memkv_vllm.errors import NotSent
from memkv_vllm.types import LossReason
from tests.support.ranks import eventually, rank, staging_plan
from tests.support.scripted_transport import Gate, ScriptedConnection, scripted

pytestmark = pytest.mark.fault

NUMBERS = range(8)


def test_a_get_that_found_no_place_costs_its_own_blocks_and_no_connection() -> None:
    """Nothing was sent, so no byte can land: its slots are free at once, and other requests go on."""
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(16)) as one:
        script = scripts["a"]
        one.ready().stored(NUMBERS)
        gate = Gate(is_open=False)
        crowded = [True]

        async def crowd(connection: ScriptedConnection, request: Any) -> None:
            if gate.waiting:
                if crowded:
                    raise NotSent("no place")
                return
            await gate.passed()

        script.on_get = crowd
        under_way = one.load([0])
        eventually(lambda: gate.waiting, "a get is under way")
        assert one.loaded([1, 2]).lost == {LossReason.TIMEOUT: 2}
        assert one.statistics.slots_quarantined == 0
        crowded.clear()
        assert one.loaded([3]).lost == {}
        gate.open()
        result = one.result(under_way)
        assert (result.lost, one.wrong(result, [0])) == ({}, [])
        one.idle()
        assert (one.statistics.reconnects, one.statistics.fences, len(script.connections)) == (0, 0, 1)


def test_a_slow_transfer_of_a_server_that_answers_pings_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the silence that is noticed, several times over."""
    monkeypatch.setattr(generation_module, "QUIET_S", 0.02)
    monkeypatch.setattr(generation_module, "PING_TIMEOUT_S", 0.5)
    with scripted("a", op_timeout_s=60.0) as (settings, scripts), rank(settings, plan=staging_plan(16)) as one:
        script = scripts["a"]
        one.ready().stored(NUMBERS)
        gate = Gate(is_open=False)

        async def slow(connection: ScriptedConnection, request: Any) -> None:
            await gate.passed()

        script.on_get = slow
        job = one.load(NUMBERS)
        eventually(lambda: script.pings >= 5, "it is asked whether it lives")
        gate.open()
        result = one.result(job)
        assert (result.lost, one.wrong(result, NUMBERS)) == ({}, [])
        assert len(script.connections) == 1


def test_slots_of_a_silent_server_stay_in_quarantine_until_it_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """P041: the missing sign of life ends the waiting and proves nothing: a late write lands in nobody's slot."""
    monkeypatch.setattr(generation_module, "QUIET_S", 0.02)
    monkeypatch.setattr(generation_module, "PING_TIMEOUT_S", 0.05)
    with scripted("a", op_timeout_s=600.0) as (settings, scripts), rank(settings, plan=staging_plan(16)) as one:
        script = scripts["a"]
        script.fences[1] = Gate(is_open=False)
        one.ready().stored(NUMBERS)
        late: list[tuple[ScriptedConnection, Any]] = []

        async def silent(connection: ScriptedConnection, request: Any) -> None:
            if connection.number == 1:
                late.append((connection, request))
                script.lives.shut()
                await anyio.sleep_forever()

        script.on_get = silent
        assert one.loaded(NUMBERS).lost == {LossReason.BREAKER: 8}
        assert one.statistics.slots_quarantined == 8
        script.lives.open()
        one.ready()
        for connection, request in late:
            for item in request.items:
                connection.memory(item.extent)[:] = bytes([0xEE]) * item.extent.length
        result = one.loaded(NUMBERS)
        assert (result.lost, one.wrong(result, NUMBERS)) == ({}, [])
        taken = {extent for number, extent in script.named if number == 2}
        assert taken.isdisjoint({item.extent for _, request in late for item in request.items})
        script.fences[1].open()
        one.idle()
