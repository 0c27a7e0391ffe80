"""Client side of a control channel: drives a protocol session over any control stream.

Life: :meth:`ControlChannel.open` performs the handshake; the owner starts :meth:`ControlChannel.run` in a task
group; :meth:`ControlChannel.request` may be called from many tasks at once. At most ``max_inflight`` requests
(the server's limit) are on their way, one of them a PING; a request that timed out keeps its place until its late
reply comes, since the server is still busy with it. When ``run`` ends, every pending request fails with
``ConnectionLost``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from struct import error as StructError
from typing import NamedTuple, TypeVar

import anyio

from memkv_vllm.errors import (
    AuthError,
    ConnectError,
    ConnectionLost,
    LocalProtocolError,
    MemkvError,
    NotSent,
    RemoteProtocolError,
    RequestTimeout,
    VersionError,
)
from memkv_vllm.protocol.auth import NONCE_BYTES, Credentials
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Bye, Ping, Request, batch_count
from memkv_vllm.protocol.session import Established, PeerKind, ReplyReceived, Session
from memkv_vllm.transports.base import remaining
from memkv_vllm.transports.licensing import present_license
from memkv_vllm.transports.streams import ControlStream, FrameWriter, send_all
from memkv_vllm.types import Deadline, Role

R = TypeVar("R")

_log = logging.getLogger("memkv.transports.control")


class ChannelStatistics(NamedTuple):
    """What a channel has done: counts."""

    pending: int
    sent: int
    replies: int
    late_replies: int
    waiting_bytes: int


class _Pending(NamedTuple):
    """One request on its way."""

    arrived: asyncio.Future[ReplyReceived | None]
    """None: there will be no reply, because its deadline has passed or the channel has ended."""
    deadline: Deadline
    has_place: bool


class ControlChannel:
    """One authenticated control session, client side. Used on one event loop; owns its stream."""

    def __init__(self, stream: ControlStream, session: Session, established: Established, label: str) -> None:
        """Use :meth:`open`."""
        self.established = established
        self._stream = stream
        self._session = session
        self._label = label
        self._writer = FrameWriter(stream)
        self._pending: dict[int, _Pending] = {}
        # One of the server's places is kept for PING: whether it lives can be asked however busy it is.
        self._places = anyio.Semaphore(max(1, established.server.limits.max_inflight - 1), fast_acquire=True)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closing = False
        self._ended: MemkvError | None = None
        self._sent = self._replies = self._late_replies = 0
        self._otherwise = -1
        """The latest request whose reply came another way."""

    @classmethod
    async def open(
        cls, stream: ControlStream, credentials: Credentials, kind: PeerKind, deadline: Deadline, *, label: str
    ) -> ControlChannel:
        """Authenticate over a fresh ``stream``, which is closed if that fails.

        Args:
            stream: connected, nothing sent yet.
            credentials: key id and key.
            kind: what this client is for.
            deadline: for the whole handshake.
            label: the server's name in messages.

        Raises:
            ConnectError: no answer by ``deadline``, or the server closed or refused the connection.
            AuthError, VersionError, RemoteProtocolError: the handshake failed.
            LicenseError: the server asks for a license that is missing or not valid there.
        """
        session = Session(Role.CLIENT, os.urandom(NONCE_BYTES), credentials=credentials, kind=kind)
        try:
            with anyio.fail_after(remaining(deadline, time.monotonic())):
                await stream.secure()
                session.bind(stream.binding)
                established = await shake_hands(stream, session)
                if established.asks_license:
                    await present_license(stream, session, credentials.license)
        except TimeoutError:
            stream.close()
            raise ConnectError(f"{label} accepted the connection and did not answer by the deadline") from None
        except ConnectionLost as error:
            stream.close()
            raise ConnectError(f"{label} closed the connection during the handshake: {error}") from error
        except (AuthError, VersionError, ConnectError) as error:
            stream.close()
            raise type(error)(f"{label}: {error}") from error
        except BaseException:
            stream.close()
            raise
        return cls(stream, session, established, label)

    @property
    def alive(self) -> bool:
        """False once the channel has ended."""
        return self._ended is None and not self._closing

    @property
    def num_pending(self) -> int:
        """Requests on their way."""
        return len(self._pending)

    def statistics(self) -> ChannelStatistics:
        """What happened so far."""
        waiting = self._writer.waiting_bytes
        return ChannelStatistics(len(self._pending), self._sent, self._replies, self._late_replies, waiting)

    async def run(self) -> None:
        """Read replies until the channel ends; raises what ended it, returns normally after ``close``."""
        error: MemkvError = ConnectionLost(f"the connection to {self._label} was cancelled")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._writer.run)
                try:
                    await self._stream.feed(self._received)
                    if self._ended is None:
                        self._session.receive_eof()
                    error = ConnectionLost(f"{self._label} closed the connection")
                except MemkvError as seen:
                    error = seen
                # At once, so that a request which comes before the writer has ended is told the truth.
                self._end(error)
                tasks.cancel_scope.cancel()
        finally:
            self._end(error)
        if not self._closing:
            raise self._ended or error

    async def request(
        self,
        request: Request[R],
        deadline: Deadline,
        fds: Sequence[int] = (),
        sent: Callable[[Callable[[bytes], None]], None] | None = None,
    ) -> R:
        """Send ``request`` and await its reply; see ``ClientConnection.request``.

        Args:
            request: what to ask.
            deadline: for the reply.
            fds: go with the frame.
            sent: called once the frame is on its way, or will be; not where ``NotSent`` is raised, or what says that
                the request was not sent for its own sake. It is given what takes the reply's body where that comes
                another way.
        """
        body = self._pack(request)
        has_place = request.TYPE is not Ping.TYPE
        if has_place and self._places.value and deadline > time.monotonic():
            self._places.acquire_nowait()
        elif has_place and not await self._take_place(deadline):
            self._check_alive()
            raise NotSent(f"{self._label} had no place for {request.TYPE.name} by its deadline")
        pending = self._send(request.TYPE, body, deadline, fds, has_place)
        if sent is not None:
            sent(partial(self._take_otherwise, self._session.last_request_id, request.TYPE))
        # Nothing but a future and one timer per channel: this is the engine's way to every lookup.
        reply = await pending.arrived
        if reply is None:
            self._check_alive()
            raise RequestTimeout(f"{self._label} did not answer {request.TYPE.name} by its deadline")
        return self._outcome(request, reply)

    def close(self) -> None:
        """End the channel at once; ``run`` returns, pending requests fail. A second call does nothing."""
        if self._ended is None:
            self._closing = True
            self._end(ConnectionLost(f"the connection to {self._label} was closed on this side"))

    def fail(self, error: MemkvError) -> None:
        """End the channel at once because of ``error``, which ``run`` raises. A second call does nothing."""
        self._end(error)

    # -- inside

    def _pack(self, request: Request[R]) -> bytes:
        self._check_alive()
        try:
            body = request.pack()
        except StructError as error:
            raise LocalProtocolError(f"{request.TYPE.name} does not fit its layout: {error}") from error
        limits = self.established.server.limits
        if (count := batch_count(request.TYPE, body)) > limits.max_batch_keys:
            raise LocalProtocolError(f"a {request.TYPE.name} of {count} keys; the server takes {limits.max_batch_keys}")
        return body

    async def _take_place(self, deadline: Deadline) -> bool:
        """False: none was free by ``deadline``."""
        left_s = remaining(deadline, time.monotonic())
        if not left_s:
            return False
        with anyio.move_on_after(left_s):
            await self._places.acquire()
            return True
        return False

    def _send(
        self, type: MessageType, body: bytes, deadline: Deadline, fds: Sequence[int], has_place: bool
    ) -> _Pending:
        try:
            self._check_alive()
            request_id = self._session.send_request(type, body)
        except BaseException:
            if has_place:
                self._places.release()
            raise
        loop = asyncio.get_running_loop()
        pending = self._pending[request_id] = _Pending(loop.create_future(), deadline, has_place)
        self._sent += 1
        self._arm(loop, deadline)
        self._writer.send(self._session.data_to_send(), fds)
        return pending

    def _arm(self, loop: asyncio.AbstractEventLoop, deadline: Deadline) -> None:
        """Have :meth:`_expire` run by ``deadline``. Deadlines mostly grow, so the timer is hardly ever moved."""
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = loop.call_later(remaining(deadline, time.monotonic()), self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waiting of requests whose deadline has passed. They keep their places until their late replies."""
        self._timer = None
        now = time.monotonic()
        waiting = [pending for pending in self._pending.values() if not pending.arrived.done()]
        for pending in waiting:
            if pending.deadline <= now:
                pending.arrived.set_result(None)
        if left := [pending.deadline for pending in waiting if pending.deadline > now]:
            self._arm(loop, min(left))

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise ConnectionLost(str(self._ended))

    def _outcome(self, request: Request[R], reply: ReplyReceived) -> R:
        if reply.error is not None:
            raise reply.error.to_exception()
        try:
            if reply.type is not request.TYPE:
                raise RemoteProtocolError("type", f"a {reply.type.name} in reply to a {request.TYPE.name}")
            return request.reply(reply.body)
        except RemoteProtocolError as error:
            self._end(error)
            raise

    def _received(self, data: bytes) -> None:
        try:
            for event in self._session.receive_data(data):
                if isinstance(event, ReplyReceived):
                    self._take(event)
        except MemkvError as error:
            # At once, so that a request which comes before the owner's task has its turn is told the truth.
            self._end(error)
            raise

    def _take(self, reply: ReplyReceived) -> None:
        pending = self._pending.pop(reply.request_id, None)
        if pending is None and reply.request_id == self._otherwise:
            # It gave the data path up in the very moment in which the answer went.
            raise ConnectionLost(f"{self._label} answered a {reply.type.name} twice: its data path is gone")
        if pending is None:
            raise RemoteProtocolError("request_id", f"a reply to a request {reply.request_id} that was never sent")
        if pending.has_place:
            self._places.release()
        self._replies += 1
        if pending.arrived.done():  # timed out, or cancelled by its caller
            self._late_replies += 1
            _log.debug("%s: a late reply (%s) was dropped", self._label, reply.type.name)
            return
        pending.arrived.set_result(reply)
        if reply.type is Bye.TYPE and reply.error is None:
            self._closing = True

    def _take_otherwise(self, request_id: int, type: MessageType, body: bytes) -> None:
        if request_id in self._pending:
            self._otherwise = request_id
            self._take(ReplyReceived(request_id, type, memoryview(body)))

    def _end(self, error: MemkvError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        self._stream.close()
        self._writer.close()
        if self._timer is not None:
            self._timer.cancel()
        for pending in self._pending.values():
            if pending.has_place:
                self._places.release()
            if not pending.arrived.done():
                pending.arrived.set_result(None)
        self._pending.clear()


async def shake_hands(stream: ControlStream, session: Session) -> Established:
    """Client: the whole handshake over a fresh stream. The caller keeps the deadline and closes the stream.

    Raises:
        ConnectionLost: the server ended it.
        ConnectError, AuthError, VersionError, RemoteProtocolError: it failed.
    """
    session.start()
    while True:
        try:
            if data := session.data_to_send():
                await send_all(stream, data)
        except ConnectionLost:
            pass  # the server may have said why before it closed: read on
        data = await stream.receive()
        if not data:
            try:
                session.receive_eof()
            except RemoteProtocolError as error:
                raise ConnectionLost(str(error)) from None
            raise ConnectionLost("the stream ended")
        for event in session.receive_data(data):
            if isinstance(event, Established):
                return event
