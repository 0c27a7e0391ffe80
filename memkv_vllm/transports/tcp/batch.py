"""One call of pull or push: which moves go on the wire, and what becomes of each.

Injected faults (see ``memkv_vllm.transports.faults``) are carried out here, on what is handed to the movers; without a
plan of faults a batch is the moves whose extents are registered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.faults import Action, BitFlip, Die, Drop, Fail, LateWrite, Operation, Short, die
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp.pieces import Piece, cut, outcome
from memkv_vllm.transports.tcp.queue import Transfer
from memkv_vllm.types import Extent, Status


class Late(NamedTuple):
    """A move that is answered before it is carried out (injected)."""

    move: Move
    after_s: float


class Batch:
    """The moves of one call. Used on the event loop.

    Args:
        operation: PULL or PUSH.
        num_slots: number of moves.
        arena: where local offsets point.
        loop: the event loop.
        cut: ends the peer's session, for faults.
    """

    def __init__(
        self,
        operation: Operation,
        num_slots: int,
        arena: HostMemory,
        loop: asyncio.AbstractEventLoop,
        cut: Callable[[], None],
    ) -> None:
        self.plain: list[tuple[int, Move]] = []
        """Moves to carry out beside those that :meth:`seal` is given, each with its slot."""
        self.late: list[Late] = []
        self.transfers: list[Transfer] = []
        self.is_eager = False
        self._operation = operation
        self._num_slots = num_slots
        self._arena = arena
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._cut = cut
        self._fixed: dict[int, Status] = {}
        self._dropped: set[int] = set()
        self._flips: list[tuple[int, int]] = []
        self._left = 0
        self._done: asyncio.Future[None] = loop.create_future()

    @property
    def has_drops(self) -> bool:
        """Whether some move is never carried out (injected)."""
        return bool(self._dropped)

    def refuse(self, slot: int, status: Status) -> None:
        """The answer for ``slot`` is ``status``; nothing moves."""
        self._fixed[slot] = status

    def add_faulty(self, slot: int, move: Move, action: Action) -> None:
        """Carry out ``move`` as ``action`` says."""
        if isinstance(action, Short):
            self.plain.append((slot, _shortened(move, action.length)))
        elif isinstance(action, BitFlip):
            self._flip(slot, move, action)
        elif isinstance(action, LateWrite):
            self.refuse(slot, action.answer)
            self.late.append(Late(move, action.after_s))
        elif isinstance(action, Fail):
            self.refuse(slot, action.status)
        elif isinstance(action, Die):
            die(action, self._cut)
            self._dropped.add(slot)
        elif isinstance(action, Drop):
            self._dropped.add(slot)

    def seal(self, slots: Sequence[int] = (), moves: Sequence[Move] = ()) -> None:
        """Carry out ``moves`` too, each with its slot. No move is added any more: make the transfers."""
        memory = self._arena.array.data
        self._append(slots, moves, memory)
        if self.plain:
            self._append([slot for slot, _ in self.plain], [move for _, move in self.plain], memory)

    def seal_eager(self, piece: Piece) -> None:
        """Carry out ``piece`` and nothing else, over the eager connection."""
        self.is_eager = True
        self._add([piece], self._arena.array.data)

    async def wait(self, timeout_s: float) -> None:
        """Return when every transfer is complete, after ``timeout_s``, or when :meth:`wake` was called."""
        if self._left:
            # A timer and a future: a cancel scope and an event cost more than a short piece takes to move.
            timer = self._loop.call_later(timeout_s, self.wake)
            try:
                await self._done
            finally:
                timer.cancel()
        if not self._left:
            while self._flips:
                offset, bit = self._flips.pop()
                self._arena.array[offset] ^= 1 << bit

    def wake(self) -> None:
        """Whoever waits need not wait any more."""
        if not self._done.done():
            self._done.set_result(None)

    def statuses(self, missing: Status) -> list[Status]:
        """The answer; ``missing`` for what has not ended."""
        if not self.transfers:
            statuses = [missing] * self._num_slots
        else:
            pieces = [piece for transfer in self.transfers for piece in transfer.pieces]
            statuses = outcome(self._num_slots, pieces, missing)
        for slot in self._dropped:
            statuses[slot] = missing
        for slot, status in self._fixed.items():
            statuses[slot] = status
        return statuses

    # -- inside

    def _append(self, slots: Sequence[int], moves: Sequence[Move], memory: memoryview) -> None:
        self._add(cut(slots, moves), memory)

    def _add(self, pieces: Sequence[Piece], memory: memoryview) -> None:
        self.transfers.append(Transfer(self._operation, pieces, memory, self._report_completed))
        if pieces:
            self._left += 1

    def _report_completed(self) -> None:
        """In a mover's thread or on the loop."""
        if threading.get_ident() == self._loop_thread:
            self._completed()
        else:
            self._loop.call_soon_threadsafe(self._completed)

    def _completed(self) -> None:
        self._left -= 1
        if not self._left:
            self.wake()

    def _flip(self, slot: int, move: Move, action: BitFlip) -> None:
        extent, offset = move
        at = action.offset % extent.length
        if self._operation is Operation.PULL:
            self.plain.append((slot, move))
            self._flips.append((offset + at, action.bit))
            return
        spoilt = bytearray(self._arena.view(offset, extent.length))
        spoilt[at] ^= 1 << action.bit
        self._append([slot], [Move(extent, 0)], memoryview(spoilt))


def _shortened(move: Move, length: int) -> Move:
    region, offset, whole = move.remote
    return Move(Extent(region, offset, min(length, whole)), move.local_offset)
