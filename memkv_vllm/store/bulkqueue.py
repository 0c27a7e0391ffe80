"""Order in which bulk work takes its turns: gets before puts, first come first served in each class. Pure.

A driver runs at most as many turns at once as it has lanes, and of one owner no more than it likes: then a turn of
another goes first. A put batch is cut into slices and asks for a turn
per slice; since a waiting get goes before the next slice of any put, it waits for at most one slice in each
lane. Slices of one batch keep the place in the line that the batch took when it came.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from memkv_vllm.errors import LocalProtocolError

__all__ = ["BulkKind", "BulkQueue", "BulkQueueStatistics", "BulkTicket"]

T = TypeVar("T")

SMALL_SLICE_BYTES = 4 << 20
"""A slice of small values goes on beyond its number of values up to so many bytes (half a millisecond of copying): each
turn costs some 300 us of CPU, which is more than eight values of 64 KiB do."""


class BulkKind(IntEnum):
    """Class of bulk work; the lower number goes first."""

    GET = 0
    PUT = 1


class BulkTicket(NamedTuple):
    """A batch's place in the line, and whose it is."""

    kind: BulkKind
    order: int
    owner: Hashable = None


class BulkQueueStatistics(NamedTuple):
    """State of a :class:`BulkQueue`; the last three never decrease."""

    waiting_gets: int
    waiting_puts: int
    popped_gets: int
    popped_puts: int
    refused: int


class BulkQueue(Generic[T]):
    """Bounded line of waiting turns; ``T`` is whatever wakes the one who waits.

    Args:
        put_slice_values: most values of a put batch that are moved in one turn; more if they are small, see
            ``SMALL_SLICE_BYTES``.
        get_slice_values: the same for a get batch; None moves it whole.
        max_waiting: most turns that may wait; a push beyond it is refused.

    Raises:
        LocalProtocolError: an argument is not positive.
    """

    def __init__(self, put_slice_values: int = 8, max_waiting: int = 4096, get_slice_values: int | None = None) -> None:
        if min(put_slice_values, max_waiting, get_slice_values or 1) < 1:
            raise LocalProtocolError("bulk queue: slices and max_waiting must be positive")
        self._slice_values = {BulkKind.PUT: put_slice_values, BulkKind.GET: get_slice_values}
        self.max_waiting = max_waiting
        self._orders = count()
        self._turns = count()
        self._line: list[tuple[BulkKind, int, int, BulkTicket, T]] = []
        self._popped = {BulkKind.GET: 0, BulkKind.PUT: 0}
        self._refused = 0

    def __len__(self) -> int:
        return len(self._line)

    def __repr__(self) -> str:
        return f"<BulkQueue {len(self._line)}/{self.max_waiting} waiting>"

    def slices(self, kind: BulkKind, lengths: Sequence[int]) -> list[slice]:
        """How a batch of values of these ``lengths`` in bytes is cut into turns."""
        most = self._slice_values[kind] or len(lengths)
        if 0 < len(lengths) and (len(lengths) <= most or sum(lengths) <= SMALL_SLICE_BYTES):
            return [slice(0, len(lengths))]
        parts: list[slice] = []
        start = num_bytes = 0
        for index, length in enumerate(lengths):
            if index - start >= most and num_bytes + length > SMALL_SLICE_BYTES:
                parts.append(slice(start, index))
                start, num_bytes = index, 0
            num_bytes += length
        return [*parts, slice(start, len(lengths))] if lengths else []

    def ticket(self, kind: BulkKind, owner: Hashable = None) -> BulkTicket:
        """Takes a place in the line for a batch of ``owner`` that comes now; each of its turns is pushed with it."""
        return BulkTicket(kind, next(self._orders), owner)

    def push(self, ticket: BulkTicket, work: T) -> bool:
        """Puts one turn into the line; returns False when the line is full."""
        if len(self._line) >= self.max_waiting:
            self._refused += 1
            return False
        insort(self._line, (ticket.kind, ticket.order, next(self._turns), ticket, work))
        return True

    def pop(self, may_go: Callable[[BulkTicket], bool] | None = None) -> T | None:
        """Takes the first turn that ``may_go`` out of the line, or None when there is none."""
        for index, (kind, _, _, ticket, work) in enumerate(self._line):
            if may_go is None or may_go(ticket):
                del self._line[index]
                self._popped[kind] += 1
                return work
        return None

    def discard(self, work: T) -> bool:
        """Takes a turn that no longer waits out of the line; returns False when it is not in it."""
        for index, (_, _, _, _, waiting) in enumerate(self._line):
            if waiting is work:
                del self._line[index]
                return True
        return False

    def statistics(self) -> BulkQueueStatistics:
        """Numbers of waiting, taken and refused turns."""
        gets = sum(1 for turn in self._line if turn[0] is BulkKind.GET)
        popped = self._popped
        return BulkQueueStatistics(
            gets, len(self._line) - gets, popped[BulkKind.GET], popped[BulkKind.PUT], self._refused
        )
