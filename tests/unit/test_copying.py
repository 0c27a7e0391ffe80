"""Copy batches and crews: a value is OK only when all of it is in place, and nothing copies after ``stop``."""

from __future__ import annotations

import math
import threading

import anyio
import numpy as np
import pytest

from memkv_vllm.transports.loopback.copying import PIECE_BYTES, CopyBatch, CopyCrew, CopyJob, CopyPool
from memkv_vllm.types import Deadline, Status

pytestmark = pytest.mark.anyio

NEVER = Deadline(math.inf)


def job(slot: int, num_pieces: int, value: int = 1) -> CopyJob:
    source = np.full(num_pieces * PIECE_BYTES, value, np.uint8)
    return CopyJob(slot, source, np.zeros_like(source))


class Gate:
    """Stands in for ``numpy.copyto``: holds every copy until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.started = threading.Event()
        self.copies = 0

    def __call__(self, target: object, source: object) -> None:
        self.started.set()
        assert self.opened.wait(10)
        self.copies += 1
        np.ndarray.__setitem__(target, slice(None), source)  # type: ignore[call-overload]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(np, "copyto", made)
    return made


def test_a_value_is_ok_only_when_all_its_pieces_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = CopyBatch(2, [job(0, 1), job(1, 3)], NEVER, threading.Event())
    seen: list[tuple[Status | None, ...]] = []

    def copyto(target: object, source: object) -> None:
        seen.append(tuple(batch.statuses))
        batch.aborted = len(seen) == 3

    monkeypatch.setattr(np, "copyto", copyto)
    batch.work()
    assert seen == [(None, None), (Status.OK, None), (Status.OK, None)]
    assert batch.statuses == [Status.OK, None]
    batch.aborted = False
    batch.work()
    assert batch.statuses == [Status.OK, Status.OK]


@pytest.mark.parametrize("why", ["aborted", "fenced", "deadline"])
def test_no_piece_starts_once_it_is_time_to_stop(why: str) -> None:
    fenced = threading.Event()
    one = job(0, 2)
    batch = CopyBatch(1, [one], Deadline(0) if why == "deadline" else NEVER, fenced)
    batch.aborted = why == "aborted"
    if why == "fenced":
        fenced.set()
    batch.work()
    assert batch.statuses == [None]
    assert not one.target.any()


async def test_pieces_are_spread_over_the_threads(gate: Gate) -> None:
    pool = CopyPool(3)
    crew = CopyCrew(pool)
    batch = CopyBatch(1, [job(0, 8)], NEVER, crew.fenced)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crew.copy, batch)
        await anyio.to_thread.run_sync(gate.started.wait)
        while batch.num_pieces > 5:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        gate.opened.set()
    assert batch.statuses == [Status.OK]
    assert gate.copies == 8
    pool.close()


async def test_a_cancelled_copy_stops_after_its_piece_and_stop_waits_for_it(gate: Gate) -> None:
    pool = CopyPool(1)
    crew = CopyCrew(pool)
    batch = CopyBatch(1, [job(0, 4)], NEVER, crew.fenced)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crew.copy, batch)
        await anyio.to_thread.run_sync(gate.started.wait)
        tasks.cancel_scope.cancel()
    assert batch.aborted
    with anyio.move_on_after(0.05) as scope:
        await crew.stop()
    assert scope.cancelled_caught, "stop returned while a thread was copying"
    gate.opened.set()
    await crew.stop()
    await crew.stop()
    assert gate.copies == 1
    assert batch.statuses == [None]
    pool.close()


async def test_stop_takes_back_what_has_not_started(gate: Gate) -> None:
    pool = CopyPool(1)
    first, second = CopyCrew(pool), CopyCrew(pool)
    held, queued = (CopyBatch(1, [job(0, 2)], NEVER, crew.fenced) for crew in (first, second))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.copy, held)
        await anyio.to_thread.run_sync(gate.started.wait)
        tasks.start_soon(second.copy, queued)
        await anyio.sleep(0.01)
        with anyio.fail_after(5):
            await second.stop()  # although the only thread is busy for somebody else
        assert queued.statuses == [None]
        gate.opened.set()
    assert held.statuses == [Status.OK]
    pool.close()


async def test_a_copy_thread_that_fails_ends_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def copyto(target: object, source: object) -> None:
        raise RuntimeError("a fault of this server")

    monkeypatch.setattr(np, "copyto", copyto)
    pool = CopyPool(2)
    crew = CopyCrew(pool)
    batch = CopyBatch(1, [job(0, 3)], NEVER, crew.fenced)
    with anyio.fail_after(5):
        await crew.copy(batch)
        await crew.stop()
    assert batch.statuses == [None]
    pool.close()


async def test_after_stop_nothing_starts() -> None:
    pool = CopyPool(1)
    crew = CopyCrew(pool)
    await crew.stop()
    one = job(0, 2)
    batch = CopyBatch(1, [one], NEVER, crew.fenced)
    await crew.copy(batch)
    assert not one.target.any()
    pool.close()
