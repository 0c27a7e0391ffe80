"""Driver of :mod:`memkv_vllm.store.bulkqueue`: waits for a lane, in its order, up to a deadline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from memkv_vllm.store.bulkqueue import BulkKind, BulkQueue, BulkQueueStatistics, BulkTicket

__all__ = ["BulkTurns", "TurnStatistics"]


class TurnStatistics(NamedTuple):
    """State of the lanes and of the line before them."""

    lanes: int
    idle: int
    queue: BulkQueueStatistics


class BulkTurns:
    """As many turns at once as there are lanes; who waits, waits in a :class:`BulkQueue`.

    Args:
        lanes: transfers that run at once.
        queue: the line; nobody else uses it.
    """

    def __init__(self, lanes: int, queue: BulkQueue[anyio.Event]) -> None:
        self._lanes = lanes
        self._idle = lanes
        self._queue = queue

    def __repr__(self) -> str:
        return f"<BulkTurns {self._lanes - self._idle}/{self._lanes} lanes busy, {len(self._queue)} waiting>"

    def ticket(self, kind: BulkKind) -> BulkTicket:
        """A batch's place in the line."""
        return self._queue.ticket(kind)

    def slices(self, kind: BulkKind, lengths: Sequence[int]) -> list[slice]:
        """How a batch of values of these ``lengths`` is cut into turns."""
        return self._queue.slices(kind, lengths)

    @asynccontextmanager
    async def turn(self, ticket: BulkTicket, timeout_s: float) -> AsyncIterator[bool]:
        """Holds a lane for the ``async with`` block.

        Yields:
            True; False when no lane was free within ``timeout_s`` or the line is full: then nothing is held.
        """
        granted = await self._take(ticket, timeout_s)
        try:
            yield granted
        finally:
            if granted:
                self._give()

    def statistics(self) -> TurnStatistics:
        """Lanes, idle lanes and the line."""
        return TurnStatistics(self._lanes, self._idle, self._queue.statistics())

    async def _take(self, ticket: BulkTicket, timeout_s: float) -> bool:
        if self._idle:
            self._idle -= 1
            return True
        turn = anyio.Event()
        if not self._queue.push(ticket, turn):
            return False
        try:
            with anyio.move_on_after(timeout_s):
                await turn.wait()
        except BaseException:
            # Cancelled; the lane may have been handed to us in the same instant.
            if not self._queue.discard(turn):
                self._give()
            raise
        return not self._queue.discard(turn)

    def _give(self) -> None:
        waiting = self._queue.pop()
        if waiting is None:
            self._idle += 1
        else:
            waiting.set()
