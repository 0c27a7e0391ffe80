"""Requests of one opened session on the server: carried out, answered, bounded.

A request that needs no waiting (EXISTS, PING, DELETE ...; see ``SessionHandler.answer``) is carried out straight from
the loop's read callback; all that came in one read are answered with one send. Every other one runs in a task of its
own. Requests begin in the order in which they came; answers leave as they are ready.

Bounds, whatever a client sends:

- At most ``max_inflight`` requests are carried out or have unsent replies. Beyond, nothing is read any more.
- One turn of the loop carries out at most ``MAX_PER_TURN`` requests of a session, begins none after ``TURN_S``, and
  queues little more than ``MAX_REPLY_BYTES`` of replies; then the other sessions have their turn.
- While replies wait for room in the socket nothing more is answered at once and nothing is read; a client that does
  not take a reply for ``write_timeout_s`` is cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import (
    ConnectionLost,
    FenceTimeout,
    LocalProtocolError,
    MemkvError,
    RemoteProtocolError,
    StoreError,
)
from memkv_vllm.protocol.connect import Connect
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply, Fence, Register, batch_count
from memkv_vllm.protocol.session import RequestReceived, Session, State
from memkv_vllm.transports.base import ServerPeer, SessionHandler
from memkv_vllm.transports.faults import ControlFaults, NoReply, spoilt
from memkv_vllm.transports.streams import ControlStream, FrameWriter, Rest
from memkv_vllm.types import SessionId

__all__ = ["MAX_PER_TURN", "Answering", "Channel", "ControlPeer"]

# The name of the drivers' logger: one for all of a session.
_log = logging.getLogger("memkv.transports.serving")

MAX_PER_TURN = 16
"""Requests of a session between two looks at the other sessions: a quarter of the default ``max_inflight``."""

TURN_S = 0.005
"""Seconds after which a turn ends: the largest lookup takes longer than that, sixteen of them would be a stall."""

MAX_REPLY_BYTES = 256 * 1024
"""Queued replies after which a turn ends; about what a socket takes at once."""

_MOVES_BYTES = frozenset({MessageType.PUT, MessageType.GET})
_OURS = frozenset({MessageType.CONNECT, MessageType.REGISTER, MessageType.FENCE})
"""Carried out here: the handler, which counts what it refuses, does not see them."""
_ERROR_CODES = {"data_path": ErrorCode.DATA_PATH}
"""Codes of a ``StoreError`` that its answer keeps; the others are all the same to a client."""


class ControlPeer(ServerPeer, Protocol):
    """What a transport's peer adds for the drivers of its control channel."""

    def offered(self, offer: Register, stream: ControlStream) -> None:
        """A REGISTER came in and will be carried out; called in order of arrival.

        A transport that passes file descriptors takes the region's from ``stream`` here.
        """
        ...


@dataclass(frozen=True)
class Channel:
    """What the driver of a connection lends to its requests."""

    stream: ControlStream
    writer: FrameWriter
    session: Session
    handler: SessionHandler
    faults: ControlFaults
    fence: Callable[[SessionId], Awaitable[None]]
    """Carries out a FENCE; raises ``StoreError`` to refuse it."""
    cut: Callable[[MemkvError], None]
    """Ends the session with a reason."""
    write_timeout_s: float
    label: str


class Answering:
    """Answers the requests of one session until it ends.

    Args:
        channel: the connection's parts.
        peer: the session.
        tasks: own the requests that wait; cancelled by the driver at the session's end.
    """

    def __init__(self, channel: Channel, peer: ControlPeer, tasks: TaskGroup) -> None:
        self._channel = channel
        self._session = channel.session
        self._writer = channel.writer
        self._handler = channel.handler
        self._faults = channel.faults
        self._peer = peer
        self._tasks = tasks
        limits = channel.handler.identity.limits
        self._max_inflight, self._max_batch_keys = limits.max_inflight, limits.max_batch_keys
        self._places = anyio.Semaphore(self._max_inflight, fast_acquire=True)
        self._waiting: deque[RequestReceived] = deque()
        """Came and has not begun; no more than one read holds."""
        self._unstarted = 0
        """Requests that were handed to a task and have not begun: what comes after them must not overtake them."""
        self._resting: list[asyncio.Future[RequestReceived]] = []
        """Of tasks that have answered their request: each is given another, for a new task costs more than it does."""
        self._mark = 0
        """The writer's mark after the last reply that was made at once."""
        self._said_bye = False

    async def run(self) -> None:
        """Answer until the stream ends or after BYE.

        Raises:
            RemoteProtocolError: the client broke the protocol, or does not read its replies.
            ConnectionLost: the stream broke.
        """
        await self._channel.stream.feed(self._take)
        if not self._said_bye:
            self._session.receive_eof()

    # -- in order, without waiting

    def _take(self, data: bytes) -> Rest | None:
        for event in self._session.receive_data(data):
            if isinstance(event, RequestReceived):
                self._waiting.append(event)
        return None if self._turn() else self._catch_up

    def _turn(self) -> bool:
        """Begin what waits, as far as that needs no waiting; True when nothing is left and all is sent."""
        waiting, places = self._waiting, self._places
        last, queued_bytes = len(waiting) - MAX_PER_TURN, 0
        end = time.monotonic() + TURN_S
        try:
            while waiting and len(waiting) > last and places.value and queued_bytes < MAX_REPLY_BYTES:
                event = waiting[0]
                if event.type is MessageType.BYE or time.monotonic() > end:
                    break
                waiting.popleft()
                answer = self._at_once(event)
                if answer is None:
                    self._start(event)
                else:
                    queued_bytes += self._queue(event, answer)
        finally:
            if queued_bytes:
                self._mark = self._writer.send(self._session.data_to_send())
        return not waiting and self._writer.sent >= self._mark

    def _at_once(self, event: RequestReceived) -> bytes | ErrorReply | None:
        """The answer to a request that needs no waiting; None for the others, of which nothing has happened yet."""
        if self._unstarted or not self._faults.idle:
            return None
        try:
            return self._refusal(event) or self._handler.answer(self._peer, event.type, event.body)
        except Exception as error:
            return self._problem(event, error)

    def _start(self, event: RequestReceived) -> None:
        if event.type is MessageType.REGISTER:
            self._peer.offered(Register.unpack(event.body), self._channel.stream)
        self._places.acquire_nowait()
        self._unstarted += 1
        if self._resting:
            self._resting.pop().set_result(event)
        else:
            self._tasks.start_soon(self._work, event)

    async def _catch_up(self) -> bool:
        """Where a turn could not do everything: wait for what it lacked. Nothing is read meanwhile."""
        while True:
            await self._await_sent(self._mark)
            if self._waiting and self._waiting[0].type is MessageType.BYE:
                await self._say_bye(self._waiting.popleft())
                return False
            if self._places.value:
                await checkpoint()  # the other sessions' turn
            else:
                await self._places.acquire()
                self._places.release()
            if self._turn():
                return True

    # -- in a task of its own

    async def _work(self, event: RequestReceived) -> None:
        """Serve one request after the other, until cancelled at the session's end."""
        loop = asyncio.get_running_loop()
        while True:
            await self._serve(event)
            next_one: asyncio.Future[RequestReceived] = loop.create_future()
            self._resting.append(next_one)
            event = await next_one

    async def _serve(self, event: RequestReceived) -> None:
        self._unstarted -= 1
        try:
            answer = await self._carry_out(event)
            if answer is not None:
                await self._reply(event, answer)
        except (RemoteProtocolError, ConnectionLost, FenceTimeout) as error:
            self._channel.cut(error)
        finally:
            self._places.release()

    async def _carry_out(self, event: RequestReceived) -> bytes | ErrorReply | None:
        verdict = None if self._faults.idle else await self._faults.requested(event.type)
        if verdict is not None:
            return verdict.answer
        try:
            return self._refusal(event) or await self._dispatch(event)
        except Exception as error:
            return self._problem(event, error)

    async def _dispatch(self, event: RequestReceived) -> bytes | None:
        if event.type is MessageType.CONNECT:
            wish = Connect.unpack(event.body)
            return Connect.pack_reply(await self._peer.bulk.connect(wish.transport, wish.token))
        if event.type is MessageType.REGISTER:
            offer = Register.unpack(event.body)
            await self._peer.bulk.register(offer.region, offer.kind, offer.length, offer.token)
            return b""
        if event.type is MessageType.FENCE:
            await self._channel.fence(Fence.unpack(event.body).session)
            return b""
        return await self._handler.handle(self._peer, event.type, event.body)

    async def _reply(self, event: RequestReceived, answer: bytes | ErrorReply) -> None:
        fault = None if self._faults.idle else await self._faults.replying(event.type)
        if isinstance(fault, NoReply):
            return
        # From here to the writer nothing may be awaited: frames leave in the order of their sequence numbers.
        if self._queue(event, answer):
            await self._await_sent(self._writer.send(spoilt(self._session.data_to_send(), fault)))

    async def _say_bye(self, event: RequestReceived) -> None:
        self._said_bye = True
        for _ in range(self._max_inflight):
            await self._places.acquire()
        await self._peer.bulk.fence()
        await self._reply(event, b"")

    # -- both

    def _refusal(self, event: RequestReceived) -> ErrorReply | None:
        """Why a request is not even looked at."""
        if batch_count(event.type, event.body) > self._max_batch_keys:
            self._handler.counted("refused_batch")
            return ErrorReply(ErrorCode.LIMIT, f"at most {self._max_batch_keys} keys per batch")
        return None

    def _problem(self, event: RequestReceived, error: Exception) -> ErrorReply:
        """What a request that failed with ``error`` is answered; raises where the session must end instead."""
        if isinstance(error, RemoteProtocolError | FenceTimeout):
            raise error
        if isinstance(error, StoreError):
            if event.type in _OURS:
                self._handler.counted("requests_refused")
            return ErrorReply(_ERROR_CODES.get(error.code, ErrorCode.BAD_REQUEST), str(error))
        _log.error("%s: %s failed by a fault of this server", self._channel.label, event.type.name, exc_info=error)
        self._handler.counted("internal_error")
        if event.type in _MOVES_BYTES:
            # An answer would say that nothing moves any more; here only the fence at the session's end knows.
            raise ConnectionLost("a transfer failed by a fault of this server") from None
        return ErrorReply(ErrorCode.INTERNAL, "the server failed to carry this out; its log says why")

    def _queue(self, event: RequestReceived, answer: bytes | ErrorReply) -> int:
        """Seal the reply; returns its size, about, and 0 if the session has ended meanwhile."""
        session = self._session
        if session.state is not State.READY:
            return 0
        try:
            if isinstance(answer, ErrorReply):
                session.send_error(event.request_id, event.type, answer)
            else:
                session.send_reply(event.request_id, event.type, answer)
        except LocalProtocolError as error:
            _log.error("%s: the reply to %s: %s", self._channel.label, event.type.name, error)
            session.send_error(event.request_id, event.type, ErrorReply(ErrorCode.INTERNAL, str(error)))
        return 1 + len(answer)

    async def _await_sent(self, mark: int) -> None:
        if self._writer.sent >= mark:
            return
        with anyio.move_on_after(self._channel.write_timeout_s):
            await self._writer.wait_sent(mark)
            return
        raise RemoteProtocolError("write_timeout", "the client does not read its replies")
