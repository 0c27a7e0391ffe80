"""Random operations on a log, and a crash at any write: nothing acknowledged is lost, nothing forgotten comes back.

The machine is a :class:`FakeHost`: a kill leaves what was written, and the write that was going on in part; a power
loss leaves any part of any write since the last sync, in any order.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memkv_vllm.errors import EnvironmentFault, StoreError
from memkv_vllm.keys import namespace_of
from memkv_vllm.store.log import drive, format
from memkv_vllm.store.log.api import Location
from tests.support.harness import wait_until
from tests.support.log_media import FakeHost
from tests.support.logs import NAMESPACE, OTHER_NAMESPACE, OpenLog, key_of, opened, payload_of, start_only, storage

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(240)]

NAMESPACES = (NAMESPACE, OTHER_NAMESPACE)
DRIVES = (Path("/fake/0"), Path("/fake/1"))
SIZES = (1, 4096, 5000, 90_000, 300_000, 500_000)

put = st.tuples(st.just("put"), st.integers(0, 11), st.sampled_from(SIZES))
forget = st.tuples(st.just("forget"), st.integers(0, 11))
reset = st.tuples(st.just("reset"), st.integers(0, 1))
read = st.tuples(st.just("read"), st.integers(0, 11))
flush = st.tuples(st.just("flush"))
churn = st.tuples(st.just("churn"), st.integers(1, 12))
stop = st.tuples(st.just("stop"))
operations = st.lists(st.one_of(put, put, put, forget, forget, reset, read, read, flush, churn, stop), max_size=40)


@dataclass
class Value:
    """One put: what became of it."""

    number: int
    key: bytes
    payload: bytes
    location: Location | None = None
    acknowledged: bool = False
    forgotten: bool = False
    """Forgotten, reset or given up: it need not come back."""
    gone: bool = False
    """It must never come back: forgotten or reset, and that was acknowledged; or absent after a start."""


@dataclass
class Model:
    """What the caller of the log knows."""

    host: FakeHost
    flaky: bool = False
    """Media fail now and then: reads may miss, resets may fail."""
    values: list[Value] = field(default_factory=list)
    by_key: dict[bytes, Value] = field(default_factory=dict)
    by_location: dict[Location, Value] = field(default_factory=dict)
    tokens: dict[int, Value] = field(default_factory=dict)

    def drop(self, value: Value) -> None:
        value.forgotten = True
        if self.by_key.get(value.key) is value:
            del self.by_key[value.key]

    def on_written(self, token: int, location: Location | None) -> None:
        value = self.tokens[token]
        if location is None or self.host.crashed:
            self.drop(value)
            return
        value.location, value.acknowledged = location, True
        self.by_location[location] = value

    def on_reclaimed(self, locations: Sequence[Location]) -> None:
        for location in locations:
            if location in self.by_location:  # one whose bytes are wrong is known to the log alone
                self.drop(self.by_location[location])


async def check_start(model: Model, held: OpenLog, promised: bool) -> None:
    """Everything that came back is whole and may come back; everything that must has."""
    found: dict[bytes, Value] = {}
    model.by_location.clear()
    for recovered in held.values:
        record = recovered.record
        assert record.key not in found, "a key came back twice"
        data = await held.get(record, recovered.location)
        if data is None:
            continue  # wrong bytes are a miss: allowed only for what was not acknowledged, see below
        of = [value for value in model.values if value.key == record.key and value.payload == data]
        assert of, "bytes that nobody wrote"
        value = of[-1]
        assert not promised or not value.gone, f"{value.number} came back"
        value.location = recovered.location
        found[record.key] = model.by_location[recovered.location] = value
    if model.host.crashed:
        return  # while it was looked at: what could not be read says nothing
    for value in model.values:
        back = found.get(value.key) is value
        assert back or not promised or not value.acknowledged or value.forgotten, f"{value.number} was lost"
        value.acknowledged, value.gone = back, not back
        value.forgotten = not back
    model.by_key = dict(found)


async def carry_out(model: Model, held: OpenLog, operation: tuple[object, ...]) -> None:
    name, *arguments = operation
    log = held.log
    if name in ("put", "churn"):
        numbers = [int(str(arguments[0]))] if name == "put" else range(100, 100 + int(str(arguments[0])))
        for number in numbers:
            key = key_of(number, NAMESPACES[number % 2])
            if key in model.by_key:
                continue
            length = int(str(arguments[1])) if name == "put" else 250_000
            value = Value(len(model.values), key, payload_of(len(model.values), length))
            token = held.offer(key, value.payload)
            if token is not None:
                model.values.append(value)
                model.by_key[key] = model.tokens[token] = value
        if name == "churn":
            await log.flush()
            for number in numbers:
                value_or_none = model.by_key.get(key_of(number, NAMESPACES[number % 2]))
                if value_or_none is not None and value_or_none.location is not None and number % 3:
                    forget_one(model, held, value_or_none)
    elif name == "forget":
        value_or_none = at(model, arguments[0])
        if value_or_none is not None:
            forget_one(model, held, value_or_none)
    elif name == "read":
        value_or_none = at(model, arguments[0])
        if value_or_none is not None and value_or_none.location is not None:
            record = held.record_at(value_or_none.location)
            data = await held.get(record, value_or_none.location)
            if data is not None or not (model.host.crashed or value_or_none.forgotten or model.flaky):
                assert data == value_or_none.payload
    elif name == "reset":
        await reset_all(model, held, NAMESPACES[int(str(arguments[0]))])
    else:
        await log.flush()


def at(model: Model, number: object) -> Value | None:
    return model.by_key.get(key_of(int(str(number)), NAMESPACES[int(str(number)) % 2]))


def forget_one(model: Model, held: OpenLog, value: Value) -> None:
    if value.location is None:
        return  # the store waits for the write, then forgets
    model.drop(value)
    held.log.forget([value.location])


async def reset_all(model: Model, held: OpenLog, namespace: bytes) -> None:
    covered = [value for value in model.values if namespace_of(value.key) == namespace]
    for value in covered:
        model.drop(value)
    await held.log.reset(namespace)
    if not model.host.crashed:
        for value in covered:
            value.gone = True


def now_and_then(seed: int) -> Callable[[str, Path, int], None]:
    """A fault: one in twenty reads, writes and syncs fails."""
    choices = random.Random(seed)

    def fault(operation: str, path: Path, offset: int) -> None:
        if operation != "reserve" and choices.random() < 0.05:
            raise OSError(errno.EIO, "injected")

    return fault


async def end_with_a_crash(host: FakeHost, scope: anyio.CancelScope) -> None:
    """Who waits for a machine that is down would wait for ever."""
    await wait_until(lambda: host.crashed, "the machine crashes", 60)
    scope.cancel()


async def until_done_or_crashed(model: Model, held: OpenLog, operation: tuple[object, ...]) -> None:
    """Carries an operation out; nothing hangs."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_with_a_crash, model.host, tasks.cancel_scope)
        with anyio.fail_after(20):
            try:
                await carry_out(model, held, operation)
            except StoreError:
                assert model.flaky or model.host.crashed
        tasks.cancel_scope.cancel()


async def live(model: Model, config, todo: list[tuple[object, ...]], promised: bool, flaky: int | None) -> None:
    """One life of the server: until the operations end, one of them is a stop, or the machine crashes."""
    host = model.host
    async with opened(config, open_medium=host.open, arena_bytes=24 << 20) as held:
        await check_start(model, held, promised)
        model.tokens.clear()
        held.also_written, held.also_reclaimed = model.on_written, model.on_reclaimed
        host.fault = None if flaky is None else now_and_then(flaky)
        while todo and not host.crashed:
            operation = todo.pop(0)
            forgotten = [value for value in model.values if value.forgotten and value.location is not None]
            await until_done_or_crashed(model, held, operation)
            if operation[0] in ("flush", "stop") and not host.crashed:
                for value in forgotten:
                    value.gone = True
            if operation[0] == "stop":
                return
        if not host.crashed:
            await until_done_or_crashed(model, held, ("flush",))


async def run(
    sync: str,
    drives: int,
    power_lost: bool,
    todo: list[tuple[object, ...]],
    crashes: list[tuple[int, int]],
    flaky: int | None = None,
) -> None:
    host = FakeHost()
    config = storage(
        DRIVES[:drives], 7 << 20, sync=sync, segment_size="1 MiB", max_write_behind="16 MiB", max_drive_errors=9999
    )
    model, promised = Model(host, flaky is not None), sync == "batch" or not power_lost
    with pytest.MonkeyPatch.context() as patch:
        # A journal of some batches, so that it is compacted again and again.
        patch.setattr(format, "MIN_JOURNAL_HALF_BYTES", 24 << 10)
        await start_only(config, open_medium=host.open)  # a crash in the middle of formatting is another test
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "RETRY_PAUSE_S", 0.002)
        while todo:
            crash_after, seed = crashes.pop() if crashes else (0, 0)
            host.crash_at = host.writes + crash_after if crash_after else None
            try:
                await live(model, config, todo, promised, flaky)
            except EnvironmentFault:
                if not host.crashed:
                    raise
            host.fault = None
            host.restart(power_lost=power_lost and host.crashed, seed=seed)
        async with opened(config, open_medium=host.open, run=False) as held:
            await check_start(model, held, promised)


crashes = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1 << 30)), max_size=4)


@pytest.mark.parametrize("drives", [1, 2])
@given(todo=operations, crashes=crashes)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_killed_server_loses_nothing_that_was_logged(drives: int, todo, crashes) -> None:
    anyio.run(run, "none", drives, False, todo, crashes)


@pytest.mark.parametrize("drives", [1, 2])
@given(todo=operations, crashes=crashes)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_power_loss_loses_nothing_that_was_synced(drives: int, todo, crashes) -> None:
    anyio.run(run, "batch", drives, True, todo, crashes)


@given(todo=operations, crashes=crashes)
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
def test_a_power_loss_without_sync_shows_nothing_wrong_and_starts_again(todo, crashes) -> None:
    """Nothing is promised of what was not synced, but bytes are right or absent, and no start is refused."""
    anyio.run(run, "none", 2, True, todo, crashes)


@given(todo=operations, crashes=crashes, seed=st.integers(0, 1 << 30))
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
def test_media_that_fail_now_and_then_lose_nothing_that_was_acknowledged(todo, crashes, seed: int) -> None:
    """A write that failed was not acknowledged, a read that failed was a miss; the rest holds as without faults."""
    anyio.run(run, "batch", 2, True, todo, crashes, seed)
