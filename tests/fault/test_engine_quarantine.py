"""Invariant 2, no late write: a slot that a peer may still write into is handed to nobody before the fence.

Scripted servers decide to the tick when a reply comes and when a fence ends; frozen and killed processes show the same
with the real transport. Faults P039, P040, P041, P046, P048.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

from memkv_vllm.engine.placement import Placement
from memkv_vllm.errors import ConnectionLost, RemoteProtocolError, RequestTimeout
from memkv_vllm.keys import store_key
from memkv_vllm.protocol.messages import Get, GetResult, Put
from memkv_vllm.transports.base import Region
from memkv_vllm.types import Extent, LossReason, Status
from tests.support.fake_mover import ArrayMover
from tests.support.ranks import (
    VALUE,
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

NUMBERS = range(64)


def fill(one: Rank, script: Script) -> None:
    """Every block that was computed is in the script's store."""
    for number in range(one.half):
        script.put(store_key(prefix_of(number), 0), one.computed[number].tobytes())


def key_numbers(request: Get | Put) -> list[int]:
    """Which blocks a request is for."""
    known = {store_key(prefix_of(number), 0): number for number in NUMBERS}
    return [known[item.key] for item in request.items]


def given_up(one: Rank, numbers: Sequence[int]) -> int:
    """Load blocks of a server that does not answer; returns how many were lost.

    The first request that times out ends the connection, and the others with it.
    """
    lost = one.loaded(numbers).lost
    assert LossReason.TIMEOUT in lost and lost.keys() <= {LossReason.TIMEOUT, LossReason.BREAKER}
    return sum(lost.values())


def shares(names: str) -> dict[str, list[int]]:
    """Blocks by owner."""
    placement = Placement(names)
    return {name: [n for n in NUMBERS if placement.owner(prefix_of(n)) == name] for name in names}


class Hang:
    """Gets of these blocks never get an answer; where they would have landed is remembered."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)
        self.extents: list[tuple[ScriptedConnection, Extent]] = []

    async def __call__(self, connection: ScriptedConnection, request: Get) -> None:
        if self.numbers & set(key_numbers(request)):
            self.extents += [(connection, item.extent) for item in request.items]
            await Gate(is_open=False).passed()

    def write_late(self, byte: int = 0xEE) -> None:
        """What the peer was about to write arrives now."""
        for connection, extent in self.extents:
            connection.memory(extent)[:] = bytes((byte,)) * extent.length


# ------------------------------------------------------------------------------------------------ the fence decides


def test_a_slot_with_a_late_write_is_reissued_only_after_the_fence() -> None:
    """P039. The connection is given up, a new one serves; the write lands into quarantine, and no load sees it."""
    with scripted("a", op_timeout_s=0.2) as (settings, scripts), rank(settings, plan=staging_plan(8)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        fence = script.fences[1] = Gate(is_open=False)
        script.on_get = late = Hang(0)
        assert one.loaded([0]).lost == {LossReason.TIMEOUT: 1}
        assert one.statistics.slots_quarantined == 1
        (hung,) = [extent for _, extent in late.extents]
        one.ready()
        script.named.clear()
        for _ in range(4):
            late.write_late()
            result = one.loaded(range(1, 20))
            assert result.lost == {}
            assert one.wrong(result, range(1, 20)) == []
        assert hung not in [extent for _, extent in script.named]
        assert one.statistics.slots_quarantined == 1
        assert one.gpu(one.half) == bytes(VALUE), "the block of the load that failed was not written"
        fence.open()
        one.idle()
        script.named.clear()
        script.on_get = None
        result = one.loaded(range(64))
        assert (result.lost, one.wrong(result, range(64))) == ({}, [])
        assert hung in [extent for _, extent in script.named], "after the fence the slot is used again"


def test_a_fence_that_ends_before_the_request_has_failed() -> None:
    """The proof may come first: the slots still pass through it, and none is lost for good."""
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(8)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        script.fails_at_close = False
        gate = Gate(is_open=False)

        async def fail(connection: ScriptedConnection, request: Get) -> None:
            if connection.number == 1:
                await (gate.passed() if 1 in key_numbers(request) else connection.closed.wait())
                raise ConnectionLost("closed")

        script.on_get = fail
        first = one.load([1])
        eventually(lambda: gate.waiting, "the first get is under way")
        second = one.load([2])
        eventually(lambda: len(script.named) == 2, "the second get is under way")
        script.connections[0].cut()
        assert one.result(second).lost == {LossReason.BREAKER: 1}
        assert one.ready().loaded([3]).lost == {}, "fenced long ago, as far as the transport is concerned"
        assert one.statistics.fences == 0
        gate.open()
        assert one.result(first).lost == {LossReason.BREAKER: 1}
        eventually(lambda: one.statistics.fences == 1, "the fence is told")
        one.idle()


def test_a_reply_over_a_connection_that_was_given_up_changes_nothing() -> None:
    """P041. Its slot may be another load's by the time its bytes are looked at: it must not be scattered."""
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(4, lanes=4)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        script.fails_at_close = False
        gate = Gate(is_open=False)

        async def overtaken(connection: ScriptedConnection, request: Get) -> list[GetResult] | None:
            if connection.number > 1:
                return None
            if key_numbers(request) == [0]:
                reply = connection.push(request)
                await gate.passed()
                return reply
            raise RequestTimeout("no answer")

        script.on_get = overtaken
        stale = one.load([0])
        eventually(lambda: gate.waiting, "the get is under way")
        assert one.loaded([1]).lost == {LossReason.TIMEOUT: 1}
        one.ready()
        # The scatter of the stale reply, if there were one, would see what these put into its slot.
        one.mover.delay_s = 0.05
        gate.open()
        jobs = [one.load([number]) for number in range(2, 14)]
        result = one.result(stale)
        for job, number in zip(jobs, range(2, 14), strict=True):
            assert one.wrong(one.result(job), [number]) == []
        assert one.wrong(result, [0]) == []
        assert result.lost == {LossReason.BREAKER: 1}
        assert one.gpu(one.half) == bytes(VALUE)
        one.mover.delay_s = 0
        one.idle()


def test_generations_are_fenced_in_any_order() -> None:
    with scripted("a", op_timeout_s=0.2) as (settings, scripts), rank(settings, plan=staging_plan(8)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        first, second = script.fences[1], script.fences[2] = Gate(is_open=False), Gate(is_open=False)
        script.on_get = late = Hang(0)
        one.loaded([0])
        one.ready().loaded([0, 5])
        one.ready()
        assert one.statistics.slots_quarantined == 3
        (_, oldest), *_ = late.extents
        second.open()
        eventually(lambda: one.statistics.slots_quarantined == 1, "the younger generation is fenced")
        script.named.clear()
        late.write_late()
        result = one.loaded(range(1, 30))
        assert (result.lost, one.wrong(result, range(1, 30))) == ({}, [])
        assert oldest not in [extent for _, extent in script.named]
        first.open()
        one.idle()


def test_slots_of_an_answer_that_breaks_the_rules_wait_for_the_fence() -> None:
    """A peer whose answers make no sense proves nothing by answering."""
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(8)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        fence = script.fences[1] = Gate(is_open=False)

        async def nonsense(connection: ScriptedConnection, request: Get) -> None:
            if connection.number == 1:
                raise RemoteProtocolError("type", "a PONG in reply to a GET")

        script.on_get = nonsense
        assert one.loaded([0, 1]).lost == {LossReason.FAILED: 2}
        assert one.statistics.slots_quarantined == 2
        one.ready()
        assert one.loaded([0, 1]).lost == {}
        fence.open()
        one.idle()


def test_values_that_the_server_gave_up_on_wait_for_the_fence_and_others_do_not() -> None:
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(8, lanes=1)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        fence = script.fences[1] = Gate(is_open=False)

        async def second_is_late(connection: ScriptedConnection, request: Get) -> list[GetResult] | None:
            if connection.number > 1:
                return None
            results = connection.push(request)
            return [results[0], GetResult(Status.TIMEOUT, 0, 0, 0), *results[2:]]

        script.on_get = second_is_late
        result = one.loaded([0, 1, 2])
        assert (result.lost, result.bad_block_ids) == ({LossReason.TIMEOUT: 1}, (one.half + 1,))
        assert one.wrong(result, [0, 1, 2]) == []
        assert one.statistics.slots_quarantined == 1
        assert one.ready().statistics.reconnects == 1
        fence.open()
        one.idle()


# ------------------------------------------------------------------------------------------------ replacement pool


def test_one_replacement_pool_for_a_batch_of_late_values(caplog: pytest.LogCaptureFixture) -> None:
    """P046: most of the pool waits for a fence, so a second one is made, and never a third."""
    with scripted("a") as (settings, scripts), rank(settings, plan=staging_plan(16, lanes=1)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        script.fences |= {number: Gate(is_open=False) for number in range(1, 20)}

        async def late(connection: ScriptedConnection, request: Get) -> list[GetResult] | None:
            good = key_numbers(request) == [63]
            return None if good else [GetResult(Status.TIMEOUT, 0, 0, 0)] * len(request.items)

        script.on_get = late
        while one.statistics.slots_quarantined < 31:
            one.ready()
            assert one.loaded([63]).lost == {}, "what can be answered keeps the breaker closed"
            free = one.statistics.slots_free
            given_up = one.loaded(range(min(8, free - 1))).lost
            assert given_up == {LossReason.TIMEOUT: min(8, free - 1)}
            if one.statistics.slots_quarantined >= 12:
                eventually(lambda: one.slots == 32, "a replacement pool")
        assert one.slots == 32
        assert sum("event=replacement_pool" in record.getMessage() for record in caplog.records) == 1
        script.on_get = None
        for gate in script.fences.values():
            gate.open()
        one.idle()
        result = one.ready().loaded(range(64))
        assert (result.lost, one.wrong(result, range(64))) == ({}, [])


class SlowToAttach(ArrayMover):
    """Pinning a second region takes a while."""

    def attach(self, region: Region) -> None:
        if region.id:
            time.sleep(0.3)
        super().attach(region)


def test_two_servers_that_fail_at_once_make_one_replacement_pool(caplog: pytest.LogCaptureFixture) -> None:
    """The second is given up while the replacement is being made; the engine lives."""
    mover = SlowToAttach(128, VALUE)
    with scripted("a", "b", "c", op_timeout_s=0.3) as (settings, scripts):
        with rank(settings, plan=staging_plan(8), mover=mover) as one:
            one.ready(3)
            for script in scripts.values():
                fill(one, script)
            for name in "ab":
                scripts[name].on_get = Hang(*NUMBERS)
                scripts[name].fences[1] = Gate(is_open=False)
            by_name = shares("abc")
            jobs = one.load(by_name["a"][:6]), one.load(by_name["b"][:2])
            assert [sum(one.result(job).lost.values()) for job in jobs] == [6, 2]
            assert one.statistics.slots_quarantined == 8
            eventually(lambda: one.slots > 8, "a replacement pool")
            result = one.loaded(by_name["c"])
            assert (result.lost, one.wrong(result, by_name["c"])) == ({}, [])
            assert one.slots == 16
            assert sum("event=replacement_pool" in record.getMessage() for record in caplog.records) == 1
            assert [region for _, region in scripts["c"].registered] == [0, 1]


def test_with_lanes_of_their_own_one_direction_in_quarantine_is_enough() -> None:
    """All slots for loads wait for a server; loads from the others go on in a replacement."""
    with scripted("a", "b", op_timeout_s=0.3) as (settings, scripts):
        with rank(settings, plan=staging_plan(16, lanes=2, split=True)) as one:
            one.ready(2)
            for script in scripts.values():
                fill(one, script)
            scripts["a"].on_get = Hang(*NUMBERS)
            scripts["a"].fences[1] = Gate(is_open=False)
            owner = one.engine._core.client.owner
            ours = [number for number in NUMBERS if owner(prefix_of(number)).name == "a"]
            assert given_up(one, ours[:8]) == 8
            others = [number for number in NUMBERS if number not in ours]
            result = one.loaded(others)
            assert (result.lost, one.wrong(result, others)) == ({}, [])


def test_a_replacement_pool_that_cannot_be_made_is_not_the_end() -> None:
    """CUDA refuses to pin it: transfers wait for the fence, and it is tried again."""

    class Refusing(ArrayMover):
        refusals = 1

        def attach(self, region: Region) -> None:
            if region.id and self.refusals:
                self.refusals -= 1
                raise RuntimeError("cudaHostRegister: out of memory")
            super().attach(region)

    plan = staging_plan(8, lanes=1)
    with scripted("a") as (settings, scripts), rank(settings, plan=plan, mover=Refusing(128, VALUE)) as one:
        script = scripts["a"]
        fill(one.ready(), script)
        script.fences |= {number: Gate(is_open=False) for number in range(1, 5)}

        async def late(connection: ScriptedConnection, request: Get) -> list[GetResult]:
            return [GetResult(Status.TIMEOUT, 0, 0, 0)] * len(request.items)

        script.on_get = late
        one.loaded(range(6))
        assert one.slots == 8
        one.ready().loaded(range(2))
        eventually(lambda: one.slots == 16, "the second try succeeds")


def test_a_region_that_comes_while_a_server_is_being_set_up_is_registered_once() -> None:
    """The replacement pool is made while another server is in the middle of its registration."""
    with scripted("a", "b") as (settings, scripts), rank(settings, plan=staging_plan(4, lanes=1)) as one:
        one.ready(2)
        for script in scripts.values():
            fill(one, script)
        a, b = scripts["a"], scripts["b"]
        a.fences[1] = Gate(is_open=False)
        b.registers.shut()
        b.connections[0].cut()
        eventually(lambda: b.registers.waiting, "the new connection registers the first region")

        async def late(connection: ScriptedConnection, request: Get) -> list[GetResult] | None:
            return [GetResult(Status.TIMEOUT, 0, 0, 0)] * len(request.items) if connection.number == 1 else None

        a.on_get = late
        owner = one.engine._core.client.owner
        at_a = [number for number in NUMBERS if owner(prefix_of(number)).name == "a"]
        at_b = [number for number in NUMBERS if owner(prefix_of(number)).name == "b"]
        one.loaded(at_a[:4])
        eventually(lambda: one.slots == 8, "a replacement pool")
        b.registers.open()
        one.ready(2)
        # All slots that are free are in the new region, so these need it.
        for numbers in (at_b, at_a):
            result = one.loaded(numbers)
            assert (result.lost, one.wrong(result, numbers)) == ({}, [])
        assert [region for number, region in b.registered if number == 2] == [0, 1]


# ------------------------------------------------------------------------------------------------ real processes


@pytest.fixture
def key() -> bytes:
    return os.urandom(32)


@pytest.mark.timeout(60)
def test_a_frozen_server_keeps_its_slots_and_nothing_else(key: bytes) -> None:
    """SIGSTOP: nothing proves that it writes no more, until it answers again or is dead. P041, P046."""
    by_name = shares("ab")
    with StoreProcess(key) as a, StoreProcess(key) as b:
        settings = cluster_settings(key, {"a": a.port, "b": b.port}, connect_timeout_s=0.5, op_timeout_s=0.4)
        with rank(settings, plan=staging_plan(8), wait_timeout_s=5) as one:
            one.ready(2).stored(NUMBERS)
            a.freeze()
            assert given_up(one, by_name["a"][:8]) == 8
            assert one.statistics.slots_quarantined == 8
            eventually(lambda: one.slots == 16, "a replacement pool")
            for _ in range(3):
                result = one.loaded(by_name["b"])
                assert (result.lost, one.wrong(result, by_name["b"])) == ({}, [])
                assert one.loaded(by_name["a"]).lost == {LossReason.BREAKER: len(by_name["a"])}, "at once"
            assert (one.slots, one.statistics.slots_quarantined) == (16, 8)
            a.thaw()
            one.ready(2).idle()
            result = one.loaded(NUMBERS)
            assert (result.lost, one.wrong(result, NUMBERS)) == ({}, [])
            assert one.slots == 16


@pytest.mark.timeout(60)
def test_a_killed_server_is_fenced_by_its_death(key: bytes) -> None:
    """SIGKILL while frozen: no answer will ever come, and the end of the process proves enough."""
    by_name = shares("ab")
    with StoreProcess(key) as a, StoreProcess(key) as b:
        settings = cluster_settings(key, {"a": a.port, "b": b.port}, connect_timeout_s=0.5, op_timeout_s=0.4)
        with rank(settings, plan=staging_plan(8), wait_timeout_s=5) as one:
            one.ready(2).stored(NUMBERS)
            a.freeze()
            one.loaded(by_name["a"][:8])
            assert one.statistics.slots_quarantined == 8
            fences = one.statistics.fences
            a.kill()
            eventually(lambda: one.statistics.fences > fences, "the death is seen")
            one.idle()
            result = one.loaded(NUMBERS)
            assert result.lost == {LossReason.BREAKER: len(by_name["a"])}
            assert one.wrong(result, NUMBERS) == []
            a.start()
            assert one.ready(2).stored(by_name["a"]).lost == {}
            result = one.loaded(NUMBERS)
            assert (result.lost, one.wrong(result, NUMBERS)) == ({}, [])


@pytest.mark.timeout(60)
def test_when_every_slot_waits_for_a_fence_jobs_still_end(key: bytes) -> None:
    """Both pools in quarantine: no third one, and the deadline of a job holds (``memkv_wait_timeout_s``)."""
    by_name = shares("ab")
    with StoreProcess(key) as a, StoreProcess(key) as b:
        settings = cluster_settings(key, {"a": a.port, "b": b.port}, connect_timeout_s=0.5, op_timeout_s=0.4)
        with rank(settings, plan=staging_plan(4), wait_timeout_s=1.0) as one:
            one.ready(2).stored(NUMBERS)
            for process, name in ((a, "a"), (b, "b")):
                process.freeze()
                one.loaded(by_name[name][:4])
                eventually(lambda: one.slots == 8, "a replacement pool")
            assert one.slots == one.statistics.slots_quarantined == 8
            b.thaw()
            one.ready(1)
            a.kill()
            one.idle()
            result = one.loaded(by_name["b"])
            assert (result.lost, one.wrong(result, by_name["b"])) == ({}, [])


@pytest.mark.timeout(60)
def test_close_does_not_wait_for_a_frozen_server(key: bytes) -> None:
    """Neither for its answers nor for its fence: the memory is never used again, whoever still writes into it."""
    with StoreProcess(key) as a:
        settings = cluster_settings(key, {"a": a.port}, connect_timeout_s=600, op_timeout_s=600)
        with rank(settings, plan=staging_plan(8), wait_timeout_s=600) as one:
            one.ready().stored(NUMBERS)
            a.freeze()
            job = one.load(NUMBERS)
            eventually(lambda: one.statistics.slots_free == 0, "gets are under way")
            one.engine.close()
            assert len(one.result(job).bad_block_ids) == 64
            assert one.mover.closed
