"""What a session's data connections have to move, shared by the event loop and the movers' threads.

Transfers stand in a ring: each connection that has nothing to do takes the first one's next piece and puts the transfer
at the end, so transfers of a session share its connections piece by piece. A connection that finds nothing is parked
here until the loop has work for it. One lock, held for a few instructions.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from memkv_vllm.transports.faults import Operation
from memkv_vllm.transports.tcp.pieces import Piece, views

C = TypeVar("C")


class Transfer:
    """One pull or push.

    Attributes:
        operation: PULL or PUSH.
        pieces: all of it; ``done`` of each is written by a mover's thread.
        memory: what the pieces' local spans lie in; given up with :meth:`PieceQueue.drop`.
        completed: called in a mover's thread when the last piece is done.
    """

    __slots__ = ("completed", "left", "memory", "operation", "pieces", "started")

    def __init__(
        self, operation: Operation, pieces: Sequence[Piece], memory: memoryview, completed: Callable[[], None]
    ) -> None:
        self.operation = operation
        self.pieces = pieces
        self.memory: memoryview | None = memory
        self.completed = completed
        self.started = 0
        self.left = len(pieces)


class Work(NamedTuple):
    """One piece for one connection."""

    transfer: Transfer
    piece: Piece
    buffers: list[memoryview]


class PieceQueue(Generic[C]):
    """The transfers of one session, and its connections ``C`` that have nothing to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ring: deque[Transfer] = deque()
        self._idle: list[C] = []
        self._closed = False

    def add(self, transfer: Transfer) -> list[tuple[C, Work]]:
        """Put ``transfer`` into the ring; what connections that were idle must begin with now."""
        with self._lock:
            if self._closed:
                return []
            self._ring.append(transfer)
            starts = []
            while self._idle and (work := self._next()) is not None:
                starts.append((self._idle.pop(), work))
            return starts

    def take(self, connection: C) -> Work | None:
        """The next piece for ``connection``; None parks it until :meth:`add` names it."""
        with self._lock:
            work = None if self._closed else self._next()
            if work is None:
                self._idle.append(connection)
            return work

    def done(self, work: Work) -> None:
        """A mover has moved a piece; all its bytes are in place."""
        with self._lock:
            work.piece.done = True
            work.transfer.left -= 1
            completed = not work.transfer.left
        if completed:
            work.transfer.completed()

    def drop(self, transfer: Transfer) -> None:
        """Start no further piece of ``transfer``; pieces that are under way go on."""
        with self._lock:
            transfer.memory = None
            if transfer in self._ring:
                self._ring.remove(transfer)

    def close(self) -> None:
        """Start nothing any more."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            while self._ring:
                self._ring.popleft().memory = None

    def _next(self) -> Work | None:
        while self._ring:
            transfer = self._ring.popleft()
            if transfer.memory is None:
                continue
            piece = transfer.pieces[transfer.started]
            transfer.started += 1
            if transfer.started < len(transfer.pieces):
                self._ring.append(transfer)
            return Work(transfer, piece, views(transfer.memory, piece.local))
        return None
