"""The client's end of the eager connection; what goes over it is told in ``memkv_vllm.transports.tcp.eager``.

Its thread sends the bytes of puts. The answers to gets, which are short, the event loop takes off itself, in calls that
never block: each thread that is woken costs it more than the copy, and takes the interpreter lock once more.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import anyio

from memkv_vllm.errors import ConnectionLost, MemkvError, RemoteProtocolError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.protocol.frame import MAC_BYTES
from memkv_vllm.protocol.messages import Get
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandOpener, Kind
from memkv_vllm.transports.tcp.datalink import DataLink
from memkv_vllm.transports.tcp.eager import MAX_EAGER_BYTES, MAX_EAGER_GET_BYTES, may_be_eager
from memkv_vllm.transports.tcp.pieces import advance, are_disjoint, joined
from memkv_vllm.types import Extent

_log = logging.getLogger("memkv.transports.tcp")

BROKEN_S = 1.0
"""How long the server has to say why it ended the connection of a get."""
HOLD_OFF = 16
"""Where values are there already, or refused, all bytes would travel for nothing, and the answers wait for them."""


class EagerLink(DataLink):
    """The data connection of eager requests, of which there is one at a time.

    The bytes' places are kept here and nowhere else: who has a request under way, or the error of one, holds no memory
    by it. Everything is called on the event loop, but for what says so.
    """

    def __init__(
        self,
        sock: socket.socket,
        ours: Sealer,
        theirs: Sealer,
        regions: dict[int, HostMemory],
        ended: Callable[[DataLink, MemkvError | None], None],
    ) -> None:
        super().__init__(sock, ours, theirs, regions, ended)
        # While a put waits for its turn nobody takes its bytes: its deadline bounds it, not the time for a dead host.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)
        self._loop = asyncio.get_running_loop()
        self._given: SimpleQueue[list[memoryview] | None] = SimpleQueue()
        self._free = True
        self._held_off = 0
        self._claimed: list[memoryview] = []
        self._is_sending = False
        self._sent: asyncio.Future[None] | None = None
        self._answer: _Answer | None = None
        self._answered: Callable[[bytes], None] = _ignore
        self._lost: Callable[[MemkvError], None] = _ignore
        self._num_gets = 0
        self._failure: Exception | None = None
        """What the loop met; the thread ends with it."""

    def stop(self) -> None:
        """Take nothing more off, and make the thread end soon."""
        self._end_receiving()
        super().stop()
        self._given.put(None)

    def claim_put(self, extents: Sequence[Extent]) -> bool:
        """Begin an eager put of ``extents``, to be ended by :meth:`release`; False: it is to be none."""
        if not self._may_begin(extents, MAX_EAGER_BYTES):
            return False
        if self._held_off:
            self._held_off -= 1
            return False
        return self._claim(joined(extents))

    def claim_get(self, extents: Sequence[Extent]) -> bool:
        """Begin an eager get into ``extents``, to be ended by :meth:`release`; False: it is to be none."""
        return self._may_begin(extents, MAX_EAGER_GET_BYTES) and are_disjoint(extents) and self._claim(extents)

    def release(self, *, in_vain: bool = False) -> None:
        """Both ends are through with it: another one may begin. One that is never released stays the last.

        Args:
            in_vain: the server wanted no value of a put: ``HOLD_OFF`` puts are asked for then.
        """
        if self._answer is not None and self._answer.has_begun:
            self.stop()  # bytes of one that was answered otherwise
        self._end_receiving()
        self._claimed = []
        self._free = True
        if in_vain:
            self._held_off = HOLD_OFF

    def release_unsent(self) -> None:
        """The request has failed: if nothing of it was sent, another one may begin."""
        if self._claimed:
            self.release()

    # -- puts

    def send(self) -> None:
        """Have the thread send what was claimed, once the PUT is on its way."""
        views, self._claimed = self._claimed, []
        with self._lock:
            if not self._stopping:
                self._is_sending = True
                self._given.put(views)

    async def wait_sent(self, timeout_s: float) -> bool:
        """Return when nothing reads the memory any more; False: the thread still does after ``timeout_s``."""
        with self._lock:
            if not self._is_sending:
                return True
            sent = self._sent = self._loop.create_future()
        with anyio.move_on_after(timeout_s):
            await sent
            return True
        return False

    # -- gets

    def receive(self, answered: Callable[[bytes], None], lost: Callable[[MemkvError], None]) -> None:
        """Take off the answer if it comes here, once the GET is on its way.

        Args:
            answered: called with it when all bytes are in place.
            lost: called when the connection has ended before, and the server had time to say why on its other one.
        """
        number, self._num_gets = self._num_gets, self._num_gets + 1
        if self._stopping:
            return
        self._opener.expect(number)
        self._answer, self._claimed = _Answer(self._opener, self._claimed), []
        self._answered, self._lost = answered, lost
        self._loop.add_reader(self._sock, self._on_readable)

    # -- inside

    def _may_begin(self, extents: Sequence[Extent], most_bytes: int) -> bool:
        return self._free and not self._stopping and may_be_eager([extent.length for extent in extents], most_bytes)

    def _claim(self, spans: Sequence[Extent]) -> bool:
        if self._hung_up.poll(0):
            self.stop()  # broken while nobody looked; what a put would send would be lost, and the session with it
            return False
        try:
            self._claimed = [self._view(span) for span in spans]
        except RemoteProtocolError:
            return False  # the server says what is wrong with them
        self._free = False
        return True

    def _on_readable(self) -> None:
        answer, answered = self._answer, self._answered
        if answer is None:
            return
        try:
            if not answer.take_off(self._sock):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # The server ends data connections when it fences us; what it means for us it says on the control channel.
            self._loop.call_later(BROKEN_S, self._lost, ConnectionLost(f"the eager connection ended: {error}"))
            self.stop()
            return
        except Exception as error:
            if not isinstance(error, MemkvError):
                _log.exception("an eager connection failed by a fault of this client")
            # Without its traceback, in which the places of the bytes are: whoever keeps the error holds no memory.
            self._failure = error.with_traceback(None)
            self.stop()
            return
        self._end_receiving()
        answered(answer.body)

    def _end_receiving(self) -> None:
        if self._answer is not None:
            self._answer = None
            self._answered = self._lost = _ignore
            self._loop.remove_reader(self._sock)

    def _serve(self) -> None:
        """In the thread."""
        try:
            while (views := self._given.get()) is not None:
                self._send([memoryview(self._sealer.pack(Kind.SENT)), *views])
                views = []  # nothing is held while waiting
                self._note_sent()
            if self._failure is not None:
                raise self._failure
        finally:
            with self._lock:
                self._stopping = True
                self._claimed, self._given = [], SimpleQueue()
            self._note_sent()

    def _note_sent(self) -> None:
        """In the thread."""
        with self._lock:
            self._is_sending = False
            sent, self._sent = self._sent, None
        if sent is not None:
            try:
                self._loop.call_soon_threadsafe(_set, sent)
            except RuntimeError:
                pass  # the loop has ended: nobody waits


class _Answer:
    """The answer to one eager get: ANSWER, and the bytes of the values that are OK.

    Most often all are: then one call takes off everything, to where it belongs. What else has come by then is moved.

    Args:
        opener: of what comes.
        places: memory of each value.
    """

    def __init__(self, opener: CommandOpener, places: Sequence[memoryview]) -> None:
        self.body = b""
        """Of the reply."""
        self._opener = opener
        self._places = places
        self._body_bytes = len(places) * Get.RESULT_BYTES
        self._frame = bytearray(FIRST_BYTES + self._body_bytes)
        self._left = [memoryview(self._frame), *places]
        self._num_received = 0

    @property
    def has_begun(self) -> bool:
        """Whether something of it is there."""
        return self._num_received > 0

    def take_off(self, sock: socket.socket) -> bool:
        """Take off what is there; True: that was all.

        Raises:
            BlockingIOError: nothing is there.
            OSError: the connection is broken.
            RemoteProtocolError: something else came than an answer, or more bytes.
        """
        received = sock.recvmsg_into(self._left, 0, socket.MSG_DONTWAIT)[0]
        if not received:
            raise OSError("the server closed the eager connection")
        advance(self._left, received)
        self._num_received += received
        if not self.body and self._num_received >= len(self._frame):
            self._open()
        return not self._left

    def _open(self) -> None:
        if self._opener.more_bytes(self._frame):
            raise RemoteProtocolError("length", "an answer with spans")
        self._opener.open(self._frame, Kind.ANSWER, answer_bytes=self._body_bytes)
        self.body = bytes(self._frame[-MAC_BYTES - self._body_bytes : -MAC_BYTES])
        statuses = self.body[:: Get.RESULT_BYTES]
        if any(statuses):
            come = bytes(memoryview(b"".join(self._places))[: self._num_received - len(self._frame)])
            self._left = [place for place, status in zip(self._places, statuses, strict=True) if not status]
            self._move(come)

    def _move(self, come: bytes) -> None:
        """To the values that have bytes, in whose places those of others may stand now."""
        rest = memoryview(come)
        for place in self._left:
            part = rest[: len(place)]
            place[: len(part)] = part
            rest = rest[len(part) :]
        if rest:
            raise RemoteProtocolError("length", f"{len(rest)} bytes more than the values of an answer have")
        advance(self._left, len(come))


def _ignore(_: object) -> None:
    """Nobody awaits an answer."""


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
