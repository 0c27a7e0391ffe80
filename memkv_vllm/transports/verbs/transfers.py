"""One pull or push, as it stands on the queue pairs: what was posted, what has ended, and when all of it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from memkv_vllm.transports.verbs.planning import NO_SLOT, Columns
from memkv_vllm.types import Status

__all__ = ["Run", "Transfer"]


class Run:
    """The work requests of a transfer that one queue pair does, in order. They begin and end in the columns' order.

    Args:
        transfer: what it is part of.
        columns: the work requests.
    """

    __slots__ = ("_ends", "columns", "end", "ended", "first", "num_bytes", "posted", "transfer")

    def __init__(self, transfer: Transfer, columns: Columns) -> None:
        self.transfer = transfer
        self.columns = columns
        self.num_bytes = int(columns.lengths.sum())
        self.first = 0
        """Number of its first work request on the queue pair; set by the first post."""
        self.posted = 0
        """Rows that were posted."""
        self.ended = 0
        """Rows that have ended well."""
        self.end = len(columns)
        """Rows that will be posted: all, until the transfer is given up."""
        self._ends: list[int] | None = None

    @property
    def ends(self) -> list[int]:
        """For each row, the bytes of it and of all before it."""
        if self._ends is None:
            self._ends = np.cumsum(self.columns.lengths, dtype=np.uint64).tolist()
        return self._ends

    @property
    def waits(self) -> bool:
        """Whether some of it is not posted yet."""
        return self.posted < self.end


class Transfer:
    """One call of pull or push. Used on the event loop.

    Args:
        num_slots: values of the call.
        proven_by_last: a value is in place only when the last work request of its run has ended (a push, whose last
            one is the READ behind its WRITEs); else each when its own have.
        loop: the event loop.
    """

    def __init__(self, num_slots: int, *, proven_by_last: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.runs: list[Run] = []
        self._num_slots = num_slots
        self._proven_by_last = proven_by_last
        self._loop = loop
        self._left = 0
        self._done: asyncio.Future[None] = loop.create_future()

    def add(self, columns: Columns) -> Run:
        """One queue pair's part; to be called before :meth:`wait`."""
        run = Run(self, columns)
        self.runs.append(run)
        self._left += 1
        return run

    def run_ended(self) -> None:
        """One of its runs has ended well."""
        self._left -= 1
        if not self._left:
            self.wake()

    def wake(self) -> None:
        """Whoever waits need not wait any more."""
        if not self._done.done():
            self._done.set_result(None)

    @property
    def is_complete(self) -> bool:
        """Whether all its runs have ended well."""
        return not self._left

    async def wait(self, timeout_s: float) -> None:
        """Return when it is complete, after ``timeout_s``, or when :meth:`wake` was called."""
        if not self._left:
            return
        # A timer and a future: a cancel scope and an event cost more than a short transfer takes.
        timer = self._loop.call_later(timeout_s, self.wake)
        try:
            await self._done
        finally:
            timer.cancel()

    def statuses(self, missing: Status, bad: Sequence[int] = ()) -> list[Status]:
        """One status for each value.

        Args:
            missing: for values that are not known to be in place.
            bad: slots of which nothing was to be moved.
        """
        statuses = [Status.OK] * self._num_slots
        for slot in bad:
            statuses[slot] = Status.BAD_EXTENT
        if self._left:
            for run in self.runs:
                rows = len(run.columns)
                if run.ended < rows:
                    first = 0 if self._proven_by_last else run.ended
                    for slot in set(run.columns.slots[first:].tolist()) - {NO_SLOT}:
                        statuses[slot] = missing
        return statuses
