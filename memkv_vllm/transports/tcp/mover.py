"""The server's threads that move bytes, each for many data connections that never block it.

Who touches what: a connection that moves a long piece belongs to its mover's thread until the session has no more work
for it. Idle ones, and short pieces, are the event loop's; it hands a connection over when it begins with a piece. Both
hold the connection's lock, which is held for one system call at a time: so ``close`` waits for at most one copy of what
the socket holds, and after it nothing of this connection lands any more.

All bytes are copied by the kernel inside of ``sendmsg`` and ``recvmsg``, without the interpreter lock. ``sendfile``
would hand out pages of the arena instead, to be read when the peer reads them, which may be after a fence and after
their reuse; measured over loopback it also took more CPU than the copy (0.6 against 0.3 s per GB).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from enum import Enum

from memkv_vllm.errors import RemoteProtocolError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.transports.faults import Operation
from memkv_vllm.transports.sockets import reset
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandOpener, CommandSealer, Kind
from memkv_vllm.transports.tcp.pieces import advance, first_bytes
from memkv_vllm.transports.tcp.queue import PieceQueue, Work

_log = logging.getLogger("memkv.transports.tcp")

LOOP_BYTES = 512 << 10
"""A piece of no more is moved by the event loop (below 100 us of copying): waking a thread costs the loop more."""
STEP_BYTES = 1 << 20
"""Most that the loop copies in one call (some 200 us): then it looks at whatever else is ready."""
LOW_WATER_BYTES = 512 << 10
"""Who waits is woken for so many bytes, or for the rest of a piece: fewer wake-ups, at no cost for what is shorter."""
_FEW_BYTES = 32 << 10
"""For less the mark is left as it is, where it does no harm: waking up once more costs as much as changing it."""

Lost = Callable[[str, str], None]
"""Called in any thread with a short reason and a text: the connection is of no use any more."""
CLOSED = "closed"
"""The reason when nothing was under way: a client that goes ends its connections in any order."""


NOTHING, READ, WRITE = 0, select.EPOLLIN, select.EPOLLOUT
"""What a socket is watched for; one of these at a time."""


class LoopWatch:
    """Watches one socket with the event loop, on which all of this is called."""

    def __init__(self, fd: int, ready: Callable[[], None]) -> None:
        self._fd = fd
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self._armed = NOTHING

    def arm(self, events: int) -> None:
        """Call ``ready`` when the socket is ready for ``events``, again and again."""
        if events == self._armed:
            return
        if self._armed == READ:
            self._loop.remove_reader(self._fd)
        elif self._armed == WRITE:
            self._loop.remove_writer(self._fd)
        if events == READ:
            self._loop.add_reader(self._fd, self._ready)
        elif events == WRITE:
            self._loop.add_writer(self._fd, self._ready)
        self._armed = events


class MoverWatch:
    """Watches one socket with a mover's thread. Called with the connection's lock held, in any thread."""

    def __init__(self, fd: int, mover: Mover, connection: DataConnection) -> None:
        self._fd = fd
        self._mover = mover
        self._connection = connection
        self._armed = NOTHING

    def arm(self, events: int) -> None:
        """Have the connection stepped when the socket is ready for ``events``, again and again."""
        if events == self._armed:
            return
        if self._armed == NOTHING:
            self._mover.connections[self._fd] = self._connection
            self._mover.epoll.register(self._fd, events)
        elif events == NOTHING:
            # Not just disarmed: a broken socket would go on waking the thread.
            self._mover.epoll.unregister(self._fd)
            self._mover.connections.pop(self._fd, None)
        else:
            self._mover.epoll.modify(self._fd, events)
        self._armed = events


class _State(Enum):
    IDLE = "idle"
    SENDING = "sending"
    RECEIVING = "receiving"
    BROKEN = "broken"


class DataConnection:
    """One data connection of one session, server side. Owns its socket. Made on the event loop.

    Args:
        sock: attached, nothing under way on it.
        ours: seal of what is sent.
        theirs: seal of what comes.
        queue: the session's; where the next piece comes from.
        mover: whose thread moves the long pieces.
        lost: see ``Lost``.
    """

    def __init__(
        self,
        sock: socket.socket,
        ours: Sealer,
        theirs: Sealer,
        queue: PieceQueue[DataConnection],
        mover: Mover,
        lost: Lost,
    ) -> None:
        self._sock = sock
        self._sealer = CommandSealer(ours)
        self._opener = CommandOpener(theirs)
        self._queue = queue
        self._lost = lost
        self._lock = threading.Lock()
        self._by_loop = LoopWatch(sock.fileno(), self.step)
        self._by_mover = MoverWatch(sock.fileno(), mover, self)
        self._watch: LoopWatch | MoverWatch = self._by_loop
        self._state = _State.IDLE
        self._closed = False
        self._work: Work | None = None
        self._out: list[memoryview] = []
        self._in: list[memoryview] = []
        self._in_bytes = 0
        self._reply = bytearray(FIRST_BYTES)
        self._replied = False
        self._low_water = 1
        self._traffic = mover.traffic

    def start(self) -> None:
        """Look for work."""
        with self._lock:
            self._rest()
            if (work := self._queue.take(self)) is not None:
                self._guarded(lambda: self._begin_on_loop(work))

    def begin(self, work: Work) -> None:
        """Start with ``work``; called on the event loop for a connection that the queue had parked."""
        with self._lock:
            if not self._closed and self._state is _State.IDLE:
                self._guarded(lambda: self._begin_on_loop(work))

    def step(self) -> None:
        """Go on as far as one system call gets; called by who watches the socket, when it is ready."""
        with self._lock:
            if not self._closed:
                self._guarded(self._step)

    def step_in_mover(self) -> None:
        """The same from the mover's thread, which may come late: after the loop has taken the connection back."""
        with self._lock:
            if not self._closed and self._watch is self._by_mover:
                self._guarded(self._step)

    def close(self) -> None:
        """Close, dropping what was not sent. When this returns, nothing of this connection lands any more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._watch.arm(NOTHING)
                reset(self._sock)
                self._out, self._in = [], []
                self._drop_work()

    # -- inside, with the lock

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except RemoteProtocolError as error:
            self._give_up(error.kind, str(error))
        except OSError as error:
            self._give_up("lost", str(error))
        except Exception:
            _log.exception("a data connection failed by a fault of this server")
            self._give_up("internal", "a fault of this server")

    def _give_up(self, reason: str, text: str) -> None:
        # The session's end closes it; until then nobody may be woken for it again and again.
        self._state = _State.BROKEN
        self._drop_work()
        self._watch.arm(NOTHING)
        self._lost(reason, text)

    def _begin_on_loop(self, work: Work) -> None:
        """On the event loop: choose who moves ``work``."""
        # A piece that is a whole transfer, and alone on this server: somebody waits for it, and nobody else does.
        alone = len(work.transfer.pieces) == 1 and not self._traffic.num_pieces
        short = alone or work.piece.num_bytes <= LOOP_BYTES
        watch = self._by_loop if short else self._by_mover
        if watch is not self._watch:
            self._watch.arm(NOTHING)
            self._watch = watch
        self._prepare(work)
        if short or work.transfer.operation is Operation.PULL:
            self._send()
        else:
            self._watch.arm(WRITE)

    def _rest(self) -> None:
        """Nothing is to be moved: notice when the client goes."""
        self._watch.arm(READ)

    def _command(self, work: Work) -> list[memoryview]:
        """What tells the client that ``work`` begins."""
        kind = Kind.READ if work.transfer.operation is Operation.PULL else Kind.WRITE
        return [memoryview(self._sealer.pack(kind, work.piece.remote))]

    def _prepare(self, work: Work) -> None:
        self._traffic.begin()
        self._work, self._replied, self._state = work, False, _State.SENDING
        self._out, self._in = self._command(work), [memoryview(self._reply)]
        self._in_bytes = FIRST_BYTES
        if work.transfer.operation is Operation.PULL:
            self._in += work.buffers
            self._in_bytes += work.piece.num_bytes
        else:
            self._out += work.buffers

    def _step(self) -> None:
        if self._state is _State.SENDING:
            self._send()
        elif self._state is _State.RECEIVING:
            self._receive()
        elif self._state is _State.IDLE:
            self._expect_nothing()

    def _send(self) -> None:
        try:
            if self._out:
                advance(self._out, self._sock.sendmsg(self._step_of(self._out), (), socket.MSG_NOSIGNAL))
        except (BlockingIOError, InterruptedError):
            pass
        if self._out:
            self._watch.arm(WRITE)
        elif self._in_bytes:
            self._state = _State.RECEIVING
            self._await_bytes()
            self._watch.arm(READ)
        else:
            self._finish(at_once=False)

    def _receive(self) -> None:
        try:
            received = self._sock.recvmsg_into(self._step_of(self._in))[0]
        except (BlockingIOError, InterruptedError):
            return
        if not received:
            raise OSError("the client closed a data connection")
        self._in_bytes -= received
        advance(self._in, received)
        if not self._replied and (not self._in or self._in[0].obj is not self._reply):
            self._check_reply()
        if self._in_bytes:
            self._await_bytes()
        else:
            self._finish()

    def _expect_nothing(self) -> None:
        try:
            data = self._sock.recv(1)
        except (BlockingIOError, InterruptedError):
            return
        if data:
            raise RemoteProtocolError("unasked", "bytes on a data connection that nobody asked for")
        self._give_up(CLOSED, "the client closed a data connection")

    def _check_reply(self) -> None:
        self._replied = True
        if self._opener.more_bytes(self._reply):
            raise RemoteProtocolError("length", "an answer with spans")
        pull = self._work is not None and self._work.transfer.operation is Operation.PULL
        self._opener.open(self._reply, Kind.SENT if pull else Kind.WRITTEN)

    def _finish(self, *, at_once: bool = True) -> None:
        """Nothing is left of a piece: begin with the next one, or when the socket is ready for it."""
        work, self._state = self._drop_work(), _State.IDLE
        following = self._queue.take(self)
        if work is not None:
            self._queue.done(work)
        if following is None:
            self._rest()
            return
        if not at_once:
            # Any number of pieces that nobody answers may wait: neither in one call of the loop, nor within each other.
            self._prepare(following)
            self._watch.arm(WRITE)
            return
        if self._watch is self._by_loop:
            self._begin_on_loop(following)
        else:
            self._prepare(following)
            self._send()

    def _drop_work(self) -> Work | None:
        """Nothing is under way any more; returns what was."""
        work, self._work = self._work, None
        if work is not None:
            self._traffic.end()
        return work

    def _step_of(self, buffers: list[memoryview]) -> list[memoryview]:
        """What one system call is to copy of ``buffers``."""
        return first_bytes(buffers, STEP_BYTES) if self._watch is self._by_loop else buffers

    def _await_bytes(self) -> None:
        if self._low_water <= self._in_bytes < _FEW_BYTES:
            return
        wanted = min(self._in_bytes, LOW_WATER_BYTES)
        if wanted != self._low_water:
            self._low_water = wanted
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)


class EagerConnection(DataConnection):
    """The one data connection whose client sends by itself, before or after it is known what for, and answers nothing.

    Nobody looks at it in between. Bytes that nobody asked for yet wait in the kernel, as many as it takes, and that the
    client has gone is seen on the other connections.
    """

    def _rest(self) -> None:
        self._watch.arm(NOTHING)

    def _command(self, work: Work) -> list[memoryview]:
        if work.transfer.operation is Operation.PULL:
            return []
        return [memoryview(self._sealer.pack_answer(work.piece.number, work.piece.answer))]

    def _prepare(self, work: Work) -> None:
        super()._prepare(work)
        if work.transfer.operation is Operation.PUSH:
            self._in, self._in_bytes = [], 0  # the client's memory is its own business

    def _check_reply(self) -> None:
        # What the client sent for another put would be stored as this one's, and be right by every other check.
        if self._work is not None and self._work.piece.number != self._opener.due:
            text = f"the bytes of eager put {self._opener.due} where those of {self._work.piece.number} are due"
            raise RemoteProtocolError("sequence", text)
        super()._check_reply()


class Traffic:
    """How many pieces are under way on a server. Used in any thread."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """One more."""
        with self._lock:
            self.num_pieces += 1

    def end(self) -> None:
        """One less."""
        with self._lock:
            self.num_pieces -= 1


class Mover:
    """One thread over many data connections. Owner: ``serve``, which stops it after the last session."""

    def __init__(self, name: str, traffic: Traffic) -> None:
        self.traffic = traffic
        self.epoll = select.epoll()
        self.connections: dict[int, DataConnection] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.epoll.register(self._wake, select.EPOLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after every connection was closed."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopping:
            for fd, _ in self.epoll.poll():
                connection = self.connections.get(fd)
                # One that was closed meanwhile, or another that got its number: then its socket is just not ready.
                if connection is not None:
                    connection.step_in_mover()


class Movers:
    """All movers of one server transport."""

    def __init__(self, threads: int) -> None:
        traffic = Traffic()
        self._movers = [Mover(f"memkv-mover-{index}", traffic) for index in range(threads)]
        self._next = 0

    def choose(self) -> Mover:
        """The mover for the next connection, in turn."""
        self._next = (self._next + 1) % len(self._movers)
        return self._movers[self._next]

    def stop(self) -> None:
        """End all threads."""
        for mover in self._movers:
            mover.stop()
