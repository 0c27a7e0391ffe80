"""Server side of tcp's data path: one peer's data connections, and the pulls and pushes that go over them.

A broken data connection, a bad frame on one, or bytes that nobody asked for end the whole session: it is the simple
thing to do, and the client makes a new one. A connection that stops in the middle of a piece holds up that piece alone;
its transfer ends with TIMEOUT, after which the store fences the session.

About pushes that are given up: their bytes may still reach the client's regions until the session is fenced, and after
that may stand in its socket's buffers. They are never used: the request was not answered with OK, and what the kernel
holds are copies, so the arena's extents may be used anew at once. (The last bytes of an eager get may leave, with the
answer, a moment after it was given up here: then its client has whole values, and ends the session at the second
answer.)
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import anyio

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError, StoreError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.transports.base import Move, Moves, remaining
from memkv_vllm.transports.choosing import refuse_connect
from memkv_vllm.transports.faults import Action, FaultPlan, Operation, strike_moves
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.regions import check_region
from memkv_vllm.transports.sockets import tune_data
from memkv_vllm.transports.tcp.batch import Batch
from memkv_vllm.transports.tcp.eager import TcpEagerGet, TcpEagerPut, may_be_eager
from memkv_vllm.transports.tcp.mover import CLOSED, DataConnection, EagerConnection, Movers
from memkv_vllm.transports.tcp.pieces import columns, cut
from memkv_vllm.transports.tcp.queue import PieceQueue
from memkv_vllm.types import Deadline, MemoryKind, Status

_log = logging.getLogger("memkv.transports.tcp")


class _Coming(NamedTuple):
    """A pull whose bytes come without a READ."""

    expected: TcpEagerPut
    places: Sequence[int]
    """Of the moves, among the put's values."""


_Run = Callable[[Batch, Deadline], Awaitable[None]]


class TcpBulk:
    """One peer's data path; see ``memkv_vllm.transports.base.Bulk``. Used on one event loop.

    Args:
        arena: the server's local memory.
        movers: the transport's threads.
        max_regions: regions that the peer may register.
        max_region_bytes: bytes of all of them together.
        max_connections: data connections that the peer may attach.
        faults: what to break, in tests.
        cut: ends the peer's session.
        counted: counts an event by name.
    """

    def __init__(
        self,
        arena: HostMemory,
        movers: Movers,
        *,
        max_regions: int,
        max_region_bytes: int,
        max_connections: int,
        faults: FaultPlan | None,
        cut: Callable[[], None],
        counted: Callable[[str], None],
    ) -> None:
        self._arena = arena
        self._movers = movers
        self._max_regions = max_regions
        self._max_region_bytes = max_region_bytes
        self._max_connections = max_connections
        self._faults = faults
        self._cut = cut
        self._counted = counted
        self._loop = asyncio.get_running_loop()
        self._regions: dict[int, int] = {}
        self._queue: PieceQueue[DataConnection] = PieceQueue()
        self._eager: PieceQueue[DataConnection] = PieceQueue()
        """For the eager connection, which takes what comes in the order in which it was sent."""
        self._has_eager = False
        self._expected: TcpEagerPut | None = None
        self._num_expected = self._num_eager_gets = 0
        self._connections: list[DataConnection] = []
        self._late: list[asyncio.TimerHandle] = []
        self._gone = anyio.Event()
        self._failed = False
        self._batches: set[Batch] = set()

    @property
    def num_connections(self) -> int:
        """Data connections that are attached now."""
        return len(self._connections)

    async def connect(self, transport: str, token: bytes) -> bytes:
        """Refuse: this is the only data path here. See the protocol."""
        refuse_connect(transport, ())

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        """Remember the region's length; the client checks every span itself. See the protocol."""
        if kind is not MemoryKind.HOST:
            raise StoreError("the tcp transport moves host memory only")
        check_region(
            region,
            length,
            self._regions,
            ended=self._gone.is_set(),
            max_regions=self._max_regions,
            max_region_bytes=self._max_region_bytes,
        )
        self._regions[region] = length

    def check_room(self, *, eager: bool = False) -> None:
        """Whether one more data connection may be attached. Raises ``StoreError`` if not."""
        if self._gone.is_set():
            raise StoreError("this session has ended")
        if len(self._connections) >= self._max_connections:
            raise StoreError(f"at most {self._max_connections} data connections per session")
        if eager and self._has_eager:
            raise StoreError("one eager connection per session")

    def attach(self, sock: socket.socket, ours: Sealer, theirs: Sealer, *, eager: bool = False) -> None:
        """Use ``sock`` from now on, for eager requests or all else; owns it. After :meth:`fence` it is closed."""
        if self._gone.is_set() or (eager and self._has_eager):
            sock.close()  # two that asked at the same time have both been told that there is room
            return
        tune_data(sock)
        mover = self._movers.choose()
        if eager:
            connection: DataConnection = EagerConnection(sock, ours, theirs, self._eager, mover, self._report_lost)
        else:
            connection = DataConnection(sock, ours, theirs, self._queue, mover, self._report_lost)
        self._has_eager |= eager
        self._connections.append(connection)
        connection.start()

    def eager_put(self, lengths: Sequence[int]) -> TcpEagerPut:
        """The peer sends values of these lengths; see ``memkv_vllm.transports.base.EagerBulk``."""
        self._check_eager("put", lengths)
        if self._expected is not None and not self._expected.finished:
            raise RemoteProtocolError("eager", "an eager put beside another one")
        self._expected = TcpEagerPut(self._num_expected, lengths, self._take_off, self._gone.is_set)
        self._num_expected += 1
        return self._expected

    def eager_get(self, lengths: Sequence[int]) -> TcpEagerGet:
        """The peer awaits values of these lengths; see ``memkv_vllm.transports.base.EagerBulk``."""
        self._check_eager("get", lengths)
        self._num_eager_gets += 1
        return TcpEagerGet(self._num_eager_gets - 1, self._push_with_answer)

    async def pull(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Copy out of the peer's memory; see the protocol."""
        return await self._transfer(Operation.PULL, moves, deadline)

    async def push(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Copy into the peer's memory; see the protocol."""
        return await self._transfer(Operation.PUSH, moves, deadline)

    async def fence(self) -> None:
        """Close the data connections; see the protocol."""
        self._gone.set()
        self._queue.close()
        self._eager.close()
        while self._late:
            self._late.pop().cancel()
        while self._connections:
            self._connections.pop().close()
        self._regions.clear()
        for batch in self._batches:
            batch.wake()

    # -- transfers

    def _check_eager(self, what: str, lengths: Sequence[int]) -> None:
        if not self._has_eager:
            raise RemoteProtocolError("eager", f"an eager {what} of a session without a connection for it")
        if not may_be_eager(lengths):
            raise RemoteProtocolError("eager", f"an eager {what} of {len(lengths)} values, {sum(lengths)} bytes")

    async def _push_with_answer(
        self, number: int, moves: Sequence[Move], deadline: Deadline, answer: bytes
    ) -> tuple[list[Status], bool]:
        batch = Batch(Operation.PUSH, len(moves), self._arena, self._loop, self._cut)
        every = columns(moves)
        slots = self._allowed(batch, every)
        is_whole = self._faults is None or self._faults.idle
        if not is_whole or not slots or len(slots) < len(every):
            # What is broken is broken after the answer was made; and what is refused has another answer.
            return await self.push(moves, deadline), False
        (piece,) = cut(slots, every)
        piece.number, piece.answer = number, answer
        batch.seal_eager(piece)
        statuses = await self._carry_out(batch, deadline)
        return statuses, statuses.count(Status.OK) == len(statuses)

    async def _take_off(
        self, expected: TcpEagerPut, places: Sequence[int], moves: Sequence[Move], deadline: Deadline
    ) -> list[Status]:
        return await self._transfer(Operation.PULL, moves, deadline, _Coming(expected, places))

    async def _transfer(
        self, operation: Operation, moves: Sequence[Move], deadline: Deadline, coming: _Coming | None = None
    ) -> list[Status]:
        batch = Batch(operation, len(moves), self._arena, self._loop, self._cut)
        if self._faults is None:
            if remaining(deadline, time.monotonic()) and not self._gone.is_set():
                self._fill(batch, moves, {}, coming)
            return await self._carry_out(batch, deadline)
        return await self._carry_out(batch, deadline, partial(self._run_with_faults, operation, moves, coming))

    async def _carry_out(self, batch: Batch, deadline: Deadline, run: _Run | None = None) -> list[Status]:
        if remaining(deadline, time.monotonic()) and not self._gone.is_set():
            self._batches.add(batch)
            try:
                if run is None:
                    await self._run(batch, deadline)
                else:
                    with anyio.move_on_after(remaining(deadline, time.monotonic())):
                        await run(batch, deadline)
            finally:
                self._batches.discard(batch)
                for transfer in batch.transfers:
                    # What comes by itself is never left out: its bytes would be taken for those of the next put.
                    if not batch.is_eager or not transfer.left:
                        self._queue.drop(transfer)
        # FAILED promises that nothing moves any more; pieces that are under way may.
        return batch.statuses(Status.TIMEOUT if self._connections and not self._gone.is_set() else Status.FAILED)

    def _fill(
        self, batch: Batch, moves: Sequence[Move], faults: Mapping[int, Action], coming: _Coming | None = None
    ) -> None:
        every = columns(moves)
        slots = self._allowed(batch, every)
        if coming is not None:
            batch.seal_eager(coming.expected.scatter({coming.places[slot]: slot for slot in slots}, every))
            return
        if faults:
            for slot in slots:
                if slot in faults:
                    batch.add_faulty(slot, every[slot], faults[slot])
            slots = [slot for slot in slots if slot not in faults]
        batch.seal(slots, every if len(slots) == len(every) else [every[slot] for slot in slots])

    def _allowed(self, batch: Batch, moves: Moves) -> Sequence[int]:
        """Slots of the moves whose extents are registered; the others are refused."""
        region_bytes, arena_bytes = self._regions, self._arena.length
        allowed = []
        rows = zip(moves.regions, moves.offsets, moves.lengths, moves.local_offsets, strict=True)
        for slot, (region, offset, length, local_offset) in enumerate(rows):
            if offset < 0 or length < 0 or offset + length > region_bytes.get(region, -1):
                batch.refuse(slot, Status.BAD_EXTENT)
            elif local_offset < 0 or local_offset + length > arena_bytes:
                raise LocalProtocolError(f"{length} bytes at {local_offset} are outside the arena of {arena_bytes}")
            else:
                allowed.append(slot)
        return allowed

    async def _run(self, batch: Batch, deadline: Deadline) -> None:
        if self._connections:
            self._start(batch)
            await batch.wait(remaining(deadline, time.monotonic()))

    async def _run_with_faults(
        self, operation: Operation, moves: Sequence[Move], coming: _Coming | None, batch: Batch, deadline: Deadline
    ) -> None:
        delay_s, faults = strike_moves(self._faults, operation, moves)
        if delay_s:
            await anyio.sleep(delay_s)
        if faults and coming is not None:
            # What is broken is broken in moves of its own: these bytes are dropped, and asked for again.
            await self._take_off(coming.expected, (), (), deadline)
            coming = None
        if not self._gone.is_set():
            self._fill(batch, moves, faults, coming)
            self._start_late(operation, batch)
            await self._run(batch, deadline)
            if batch.has_drops:
                await self._gone.wait()

    def _start(self, batch: Batch) -> None:
        queue = self._eager if batch.is_eager else self._queue
        for transfer in batch.transfers:
            if transfer.pieces:
                for connection, work in queue.add(transfer):
                    connection.begin(work)

    def _start_late(self, operation: Operation, batch: Batch) -> None:
        for move, after_s in batch.late:
            alone = Batch(operation, 1, self._arena, self._loop, self._cut)
            alone.plain.append((0, move))
            alone.seal()
            self._late.append(self._loop.call_later(after_s, self._start, alone))

    # -- failures

    def _report_lost(self, reason: str, text: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._on_lost, reason, text)

    def _on_lost(self, reason: str, text: str) -> None:
        if not self._gone.is_set() and not self._failed:
            self._failed = True
            self._counted("data_closed" if reason == CLOSED else f"cut_data_{reason}")
            _log.info("a data connection ended its session: %s", text)
            self._cut()
