"""Driver of :mod:`memkv_vllm.store.bulkqueue`: waits for a lane, in its order, up to a deadline.

A lane is held from the first byte to the last, by a peer whose link is dead up to the transfer's deadline. So there
are many more lanes than threads that copy, no session has more than a few of them, and puts leave a quarter of them to
gets: it takes many dead peers at once to make a living one wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import anyio

from memkv_vllm.store.bulkqueue import BulkKind, BulkQueue, BulkQueueStatistics, BulkTicket

__all__ = ["BulkTurns", "Turn", "TurnStatistics", "Waiter"]


class TurnStatistics(NamedTuple):
    """State of the lanes and of the line before them."""

    lanes: int
    idle: int
    queue: BulkQueueStatistics


class Waiter(NamedTuple):
    """Who waits for a lane; ``turn`` is set when it holds one."""

    ticket: BulkTicket
    turn: anyio.Event


class BulkTurns:
    """As many turns at once as there are lanes; who waits, waits in a :class:`BulkQueue`.

    Args:
        lanes: transfers that run at once.
        queue: the line; nobody else uses it.
        lanes_per_owner: of them, most that one owner has; all by default.
    """

    def __init__(self, lanes: int, queue: BulkQueue[Waiter], lanes_per_owner: int | None = None) -> None:
        self._lanes = lanes
        self._idle = lanes
        self._lanes_of_puts = max(1, lanes - lanes // 4)
        self._lanes_per_owner = lanes if lanes_per_owner is None else lanes_per_owner
        self._queue = queue
        self._held: Counter[Hashable] = Counter()
        self._puts = 0

    def __repr__(self) -> str:
        return f"<BulkTurns {self._lanes - self._idle}/{self._lanes} lanes busy, {len(self._queue)} waiting>"

    def ticket(self, kind: BulkKind, owner: Hashable = None) -> BulkTicket:
        """A place in the line for a batch of ``owner``."""
        return self._queue.ticket(kind, owner)

    def slices(self, kind: BulkKind, lengths: Sequence[int]) -> list[slice]:
        """How a batch of values of these ``lengths`` is cut into turns."""
        return self._queue.slices(kind, lengths)

    def turn(self, ticket: BulkTicket, timeout_s: float) -> Turn:
        """Holds a lane for an ``async with`` block; see :class:`Turn`."""
        return Turn(self, ticket, timeout_s)

    def statistics(self) -> TurnStatistics:
        """Lanes, idle lanes and the line."""
        return TurnStatistics(self._lanes, self._idle, self._queue.statistics())

    async def take(self, ticket: BulkTicket, timeout_s: float) -> bool:
        """Takes a lane, to be given back by :meth:`give`; False: nothing is held."""
        if self._may_go(ticket):
            self._hold(ticket, 1)
            return True
        waiter = Waiter(ticket, anyio.Event())
        if not self._queue.push(ticket, waiter):
            return False
        try:
            with anyio.move_on_after(timeout_s):
                await waiter.turn.wait()
        except BaseException:
            # Cancelled; the lane may have been handed to us in the same instant.
            if not self._queue.discard(waiter):
                self.give(ticket)
            raise
        return not self._queue.discard(waiter)

    def _may_go(self, ticket: BulkTicket) -> bool:
        if not self._idle or self._held[ticket.owner] >= self._lanes_per_owner:
            return False
        return ticket.kind is not BulkKind.PUT or self._puts < self._lanes_of_puts

    def _hold(self, ticket: BulkTicket, lanes: int) -> None:
        """Takes ``lanes`` (1) or gives them back (-1)."""
        self._idle -= lanes
        self._held[ticket.owner] += lanes
        if not self._held[ticket.owner]:
            del self._held[ticket.owner]
        if ticket.kind is BulkKind.PUT:
            self._puts += lanes

    def give(self, ticket: BulkTicket) -> None:
        """Gives a lane back: to who waits for one."""
        self._hold(ticket, -1)
        while (waiting := self._queue.pop(self._may_go)) is not None:
            waiting.turn.set()
            self._hold(waiting.ticket, 1)


class Turn:
    """Holds a lane for an ``async with`` block, whose value says whether it does.

    False when no lane was free within ``timeout_s`` or the line is full: then nothing is held.
    """

    __slots__ = ("_granted", "_ticket", "_timeout_s", "_turns")

    def __init__(self, turns: BulkTurns, ticket: BulkTicket, timeout_s: float) -> None:
        self._turns, self._ticket, self._timeout_s = turns, ticket, timeout_s
        self._granted = False

    async def __aenter__(self) -> bool:
        self._granted = await self._turns.take(self._ticket, self._timeout_s)
        return self._granted

    async def __aexit__(self, *_: object) -> None:
        if self._granted:
            self._turns.give(self._ticket)
