"""Eager puts: the client sends the bytes right behind the PUT, over a connection that has no other use.

What MPI and UCX call the eager protocol, beside the rendezvous of a READ: it saves a small put the trip on which the
server asks for the bytes, and lets them travel while the server makes room. What the server has no room for is sent in
vain, so large puts are not eager. One eager put is under way at a time per session: then nothing has to say which bytes
belong to which PUT, and a put that waits for its turn at the server holds up no other one's bytes.

    client: PUT with the flag, on the control connection; SENT and all bytes in order of the values, on the eager one
    server: takes the bytes off when it has its turn, into the arena, or nowhere where it does not want a value; then it
            answers, with all of them off: what comes next on the connection belongs to the next put

A client may send the next eager put once it has the answer to the one before and has sent all of its bytes. One whose
bytes have not come by the put's deadline is cut.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError
from memkv_vllm.transports.base import Move
from memkv_vllm.transports.tcp.pieces import Piece, scatter
from memkv_vllm.types import Deadline, Status

MAX_EAGER_BYTES = 8 << 20
MAX_EAGER_VALUES = 256
"""With what is dropped between them in pieces of 256 KiB: far below what one ``recvmsg`` takes (1024)."""


def may_be_eager(lengths: Sequence[int]) -> bool:
    """Whether values of these lengths, in bytes, may be sent so."""
    return len(lengths) <= MAX_EAGER_VALUES and 0 < sum(lengths) <= MAX_EAGER_BYTES


class ExpectedPut:
    """One eager put at the server; see ``memkv_vllm.transports.base.Expected``.

    Args:
        number: of the put, counted from 0 in its session.
        lengths: bytes of its values.
        take_off: takes all bytes off the connection, those of the values at some places to where moves say.
        fenced: whether nothing moves any more.
    """

    def __init__(self, number: int, lengths: Sequence[int], take_off: TakeOff, fenced: Callable[[], bool]) -> None:
        self.piece: Piece | None = None
        """What takes the bytes off, once it has begun."""
        self.finished = False
        self._number = number
        self._lengths = lengths
        self._take_off = take_off
        self._fenced = fenced
        self._pulled = False

    def scatter(self, slots: Mapping[int, int], moves: Sequence[Move]) -> Piece:
        """The piece that takes the bytes off; see ``memkv_vllm.transports.tcp.pieces.scatter``. Once."""
        if self.piece is not None:
            raise LocalProtocolError("the bytes of an eager put come once")
        self.piece = scatter(self._number, self._lengths, slots, moves)
        return self.piece

    async def pull(self, places: Sequence[int], moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Take the values at ``places``; see the protocol."""
        if self._pulled:
            raise LocalProtocolError("an eager put is pulled once")
        self._pulled = True
        return await self._take_off(self, places, moves, deadline)

    async def finish(self, deadline: Deadline) -> None:
        """Return when all bytes have come; see the protocol."""
        if self.piece is None:
            await self._take_off(self, (), (), deadline)
        if not self._fenced() and (self.piece is None or not self.piece.done):
            raise RemoteProtocolError("eager", "the bytes of an eager put have not come by its deadline")
        self.finished = True


TakeOff = Callable[[ExpectedPut, Sequence[int], Sequence[Move], Deadline], Awaitable[list[Status]]]
