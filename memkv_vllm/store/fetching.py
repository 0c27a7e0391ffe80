"""Brings values back from disk for gets: one read per key, whoever asks, in order, within bounds.

A fetch holds an extent like a reservation, so the running ones are bounded in number and in bytes. Whoever waits for
one holds nothing. With several drives none may hold more than three quarters of what may run: one that hangs does not
end the reads from the others.

A record that turns out unreadable costs its value: it is gone, counted as ``disk_lost``, and the reader is told
``ABSENT``, a miss. A fetch that found no room or no time leaves the value on disk, and the reader is told ``BUSY``.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from memkv_vllm.config import LimitsConfig
from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.disk_index import FetchOutcome, FetchResult
from memkv_vllm.store.entries import PinResult
from memkv_vllm.store.log.api import ValueLog
from memkv_vllm.store.table import Table
from memkv_vllm.transports.base import remaining
from memkv_vllm.types import Deadline, Status

__all__ = ["FetchStatistics", "Fetches"]

logger = logging.getLogger("memkv.store")

_TIMER_SLACK_S = 0.01
"""A read that ended this close to its deadline ended for it: timers may fire a little early."""


_LEFT_TO_OTHERS = 4
"""Of what may run, in number and in bytes, this part (a quarter) is not for one drive alone."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A get that waits for a value; ``result`` is set when ``done`` is, and holds a pin if it is ``OK``."""

    length: int
    layout: int
    done: anyio.Event = field(default_factory=anyio.Event)
    result: PinResult | None = None


@dataclass(slots=True, eq=False)
class _Fetch:
    """A value on its way back, and who waits for it."""

    key: bytes
    length: int
    line: _Line
    order: int
    waiters: list[_Waiter] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Line:
    """The fetches from one drive."""

    waiting: deque[_Fetch] = field(default_factory=deque)
    running: int = 0
    bytes: int = 0
    """Of the running ones."""


class FetchStatistics(NamedTuple):
    """State of :class:`Fetches`."""

    fetches_running: int
    fetches_waiting: int
    fetch_bytes: int
    """Bytes of the running ones."""


class Fetches:
    """All fetches of one store.

    Args:
        table: what the store holds.
        log: the disk.
        max_bytes: most bytes of the running fetches; one value larger than this still goes, alone.
        limits: ``max_fetches``, ``max_waiting_fetches``, and ``transfer_timeout_s`` for each read.
        counters: counts by reason are added here.
        clock: seconds on the clock of ``Deadline``.
        offer: takes key and generation of a value that came back and lost its record meanwhile: to be written again.
    """

    def __init__(
        self,
        table: Table,
        log: ValueLog,
        max_bytes: int,
        limits: LimitsConfig,
        counters: Counter[str],
        clock: Callable[[], float],
        offer: Callable[[bytes, int], None],
    ) -> None:
        self._table = table
        self._disk = table.disk
        self._log = log
        self._max_bytes = max_bytes
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._offer = offer
        self._fetches: dict[bytes, _Fetch] = {}
        self._lines: dict[int, _Line] = {}
        """By drive."""
        self._orders = count()
        self._running = 0
        self._bytes = 0
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Fetches {self._running} running, {self._num_waiting} waiting>"

    async def run(self) -> None:
        """Carries out fetches until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._pump()
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    def statistics(self) -> FetchStatistics:
        """How many run and wait."""
        return FetchStatistics(self._running, self._num_waiting, self._bytes)

    @property
    def _num_waiting(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    async def pin(self, key: bytes, length: int, layout: int, deadline: Deadline) -> PinResult:
        """Pins a value that ``Table.pin`` found to be on disk alone, once it is back.

        Returns:
            as ``Table.pin``; ``BUSY`` when it did not come back by the deadline, or there is no room for it now.
            With ``OK`` the pin is the caller's, who gives it back.
        """
        fetch = self._fetches.get(key)
        if fetch is None:
            if len(self._fetches) >= self._limits.max_waiting_fetches:
                self._counters["fetch_refused"] += 1
                return PinResult(Status.BUSY)
            line = self._lines.setdefault(self._disk.drive_of(key), _Line())
            fetch = self._fetches[key] = _Fetch(key, length, line, next(self._orders))
            line.waiting.append(fetch)
        waiter = _Waiter(length, layout)
        fetch.waiters.append(waiter)
        self._pump()
        try:
            with anyio.move_on_after(remaining(deadline, self._clock())):
                await waiter.done.wait()
        except BaseException:
            # Cancelled; the value may have been pinned for us in the same instant.
            if waiter.result is not None and waiter.result.status is Status.OK:
                self._table.unpin(key, waiter.result.generation)
            self._leave(fetch, waiter)
            raise
        if waiter.result is None:
            self._leave(fetch, waiter)
            self._counters["fetch_late"] += 1
            return PinResult(Status.BUSY)
        return waiter.result

    @staticmethod
    def _leave(fetch: _Fetch, waiter: _Waiter) -> None:
        if waiter in fetch.waiters:
            fetch.waiters.remove(waiter)

    def _pump(self) -> None:
        """Starts fetches in their order, as many as the bounds allow."""
        while self._tasks is not None and (fetch := self._next()) is not None:
            fetch.line.waiting.popleft()
            if not fetch.waiters:
                del self._fetches[fetch.key]
                continue
            self._count(fetch, 1)
            self._tasks.start_soon(self._fetch, fetch)

    def _next(self) -> _Fetch | None:
        """The first in order, passing by those whose drive has its share; None: it must wait."""
        heads = [line.waiting[0] for line in self._lines.values() if line.waiting]
        for fetch in sorted(heads, key=lambda fetch: fetch.order):
            if not fetch.waiters:
                return fetch  # to be dropped
            if len(self._lines) > 1 and not self._fits(fetch, fetch.line.running, fetch.line.bytes, _LEFT_TO_OTHERS):
                continue
            return fetch if self._fits(fetch, self._running, self._bytes) else None
        return None

    def _fits(self, fetch: _Fetch, running: int, num_bytes: int, left: int | None = None) -> bool:
        """Whether it may run beside so many; of the bounds a part (one in ``left``) is kept."""
        most, most_bytes = self._limits.max_fetches, self._max_bytes
        if left is not None:
            most, most_bytes = most - most // left, most_bytes - most_bytes // left
        return running < most and (not num_bytes or num_bytes + fetch.length <= most_bytes)

    def _count(self, fetch: _Fetch, sign: int) -> None:
        self._running += sign
        self._bytes += sign * fetch.length
        fetch.line.running += sign
        fetch.line.bytes += sign * fetch.length

    async def _fetch(self, fetch: _Fetch) -> None:
        try:
            begun = self._disk.begin_fetch(fetch.key)
            if begun.status is Status.OK:
                outcome = FetchOutcome.UNDONE
                try:
                    outcome = await self._read(begun)
                finally:
                    if self._disk.end_fetch(begun.generation, outcome):
                        self._offer(fetch.key, begun.generation)
        finally:
            self._count(fetch, -1)
            del self._fetches[fetch.key]
            self._answer(fetch)
            self._pump()

    async def _read(self, begun: FetchResult) -> FetchOutcome:
        if begun.record is None or begun.location is None:
            raise LocalProtocolError("a fetch of a value without a record")
        deadline = Deadline(self._clock() + self._limits.transfer_timeout_s)
        try:
            arrived = await self._log.read(begun.record, begun.location, begun.offset, deadline)
        except Exception:
            logger.exception("disk.read_failed location=%s", begun.location)
            self._counters["fetch_error"] += 1
            return FetchOutcome.UNDONE
        if arrived:
            self._log.used(begun.location)
            return FetchOutcome.ARRIVED
        if self._clock() >= deadline - _TIMER_SLACK_S:
            return FetchOutcome.UNDONE
        self._tell_lost()
        return FetchOutcome.LOST

    def _answer(self, fetch: _Fetch) -> None:
        now = self._clock()
        for waiter in fetch.waiters:
            result = self._table.pin(fetch.key, waiter.length, waiter.layout, now)
            if result.status is Status.PENDING:
                result = PinResult(Status.BUSY)
            self._counters["disk_hits" if result.status is Status.OK else "disk_misses"] += 1
            waiter.result = result
            waiter.done.set()

    def _tell_lost(self) -> None:
        self._counters["disk_lost"] += 1
        lost = self._counters["disk_lost"]
        if not lost & (lost - 1):  # 1, 2, 4, 8...: a dead drive loses thousands
            logger.warning("disk.value_lost total=%d: its record cannot be read; health names the drive", lost)
