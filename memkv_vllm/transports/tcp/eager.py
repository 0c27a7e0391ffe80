"""Eager puts and gets: bytes without READ and WRITTEN, over a connection that has no other use.

What MPI and UCX call the eager protocol, beside the rendezvous of a READ. It saves a small put the trip on which the
server asks for the bytes, and lets them travel while the server makes room. What the server has no room for is sent in
vain, so large puts are not eager. A small get is answered in one go with its bytes: each trip less saves two ends that
would sleep and be woken.

    put: the client sends PUT with the flag on the control connection, and SENT and all bytes, in order of the values,
         on the eager one. The server takes the bytes off when it has its turn, into the arena, or nowhere where it does
         not want a value; then it answers, with all of them off: what comes next belongs to the next put.
    get: the client sends GET with the flag. Where all that is found is in memory the server sends ANSWER, which has the
         answer, and the bytes of the values in their order, on the eager connection. Else it does, and answers, as for
         any other get.

One eager request of a client is under way at a time: then nothing has to say which bytes belong to which PUT, and one
that waits for its turn at the server holds up no other one's bytes. A client may send the next one once it has the
answer to the one before and has sent all of its bytes. One whose bytes have not come by the put's deadline is cut.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError
from memkv_vllm.transports.base import Move
from memkv_vllm.transports.tcp.pieces import Piece, scatter
from memkv_vllm.types import Deadline, Status

MAX_EAGER_BYTES = 8 << 20
MAX_EAGER_GET_BYTES = 512 << 10
"""The client's loop takes them off, in a call or two. Each further one takes the interpreter lock again, for which it
may wait as long as vLLM lets it: beside a thread that computes all the time, gets of 1 MiB took a third longer so, of
4 MiB three times as long."""
MAX_EAGER_VALUES = 256
"""With what is dropped between them in pieces of 256 KiB: far below what one ``recvmsg`` takes (1024)."""


def may_be_eager(lengths: Sequence[int], most_bytes: int = MAX_EAGER_BYTES) -> bool:
    """Whether values of these lengths, in bytes, may be sent so."""
    return len(lengths) <= MAX_EAGER_VALUES and 0 < sum(lengths) <= most_bytes


class TcpEagerPut:
    """One eager put at the server; see ``memkv_vllm.transports.base.EagerPut``.

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


TakeOff = Callable[[TcpEagerPut, Sequence[int], Sequence[Move], Deadline], Awaitable[list[Status]]]


class TcpEagerGet:
    """One eager get at the server; see ``memkv_vllm.transports.base.EagerGet``.

    Args:
        number: of the get, counted from 0 in its session.
        push: pushes moves with an answer before their bytes; says whether that was done.
    """

    def __init__(self, number: int, push: PushWithAnswer) -> None:
        self.answered = False
        self.number = number
        self._push = push

    async def push(self, moves: Sequence[Move], deadline: Deadline, answer: bytes) -> list[Status]:
        """Push, and answer if it can be done; see the protocol."""
        if self.answered:
            raise LocalProtocolError("a get is answered once")
        statuses, self.answered = await self._push(self.number, moves, deadline, answer)
        return statuses


PushWithAnswer = Callable[[int, Sequence[Move], Deadline, bytes], Awaitable[tuple[list[Status], bool]]]
