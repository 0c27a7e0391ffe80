"""Server side of a control channel: drives one accepted session over any control stream.

Order of a session's life, whatever ends it::

    admit -> handshake -> opened -> requests -> tasks cancelled and awaited -> bulk fenced -> closed -> departed

REGISTER, FENCE and BYE are carried out here, everything else by the :class:`SessionHandler`. Each request runs in
a task of its own, at most ``max_inflight`` at once; beyond, nothing is read any more, so a client can never make
the server hold more requests or replies than that. A request's place is free again once its reply is sent; a
client that does not read its replies is cut after ``write_timeout_s``.

Before authentication a peer costs one task, one session object and at most one read's bytes for at most
``handshake_timeout_s``; its first bad frame ends it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio

from memkv_vllm.errors import (
    AuthError,
    ConnectionLost,
    LocalProtocolError,
    MemkvError,
    RemoteProtocolError,
    StoreError,
    VersionError,
)
from memkv_vllm.protocol.auth import NONCE_BYTES
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply, Fence, Register, batch_count
from memkv_vllm.protocol.session import Established, RequestReceived, Session, State
from memkv_vllm.transports.base import ServerPeer, SessionHandler
from memkv_vllm.transports.faults import ControlFaults, FaultPlan, NoReply, spoilt
from memkv_vllm.transports.streams import ControlStream, FrameWriter, send_all
from memkv_vllm.types import Role, SessionId

_log = logging.getLogger("memkv.transports.serving")

_MOVES_BYTES = frozenset({MessageType.PUT, MessageType.GET})


class ControlPeer(ServerPeer, Protocol):
    """What a transport's peer adds for this module."""

    def offered(self, offer: Register, stream: ControlStream) -> None:
        """A REGISTER came in and will be carried out; called in order of arrival.

        A transport that passes file descriptors takes the region's from ``stream`` here.
        """
        ...


@dataclass(frozen=True)
class ServeOptions:
    """Bounds of a session, in seconds."""

    handshake_timeout_s: float = 5.0
    write_timeout_s: float = 10.0


class LiveSessions:
    """The sessions of one server transport that are not fenced yet: what FENCE asks."""

    def __init__(self) -> None:
        self._live: dict[SessionId, tuple[str, Callable[[], None], anyio.Event]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, session: SessionId, key_id: str, end: Callable[[], None]) -> None:
        """``session`` of ``key_id`` is live; ``end`` makes it end."""
        self._live[session] = (key_id, end, anyio.Event())

    def fenced(self, session: SessionId) -> None:
        """``session`` has ended and nothing of it can still land."""
        self._live.pop(session)[2].set()

    async def fence(self, session: SessionId, key_id: str) -> None:
        """End ``session`` and return once it is fenced; at once for one that is not known.

        Raises:
            StoreError: it belongs to another key.
        """
        if session not in self._live:
            return
        owner, end, event = self._live[session]
        if owner != key_id:
            raise StoreError("this session belongs to another key")
        end()
        await event.wait()


async def serve_control(
    stream: ControlStream,
    handler: SessionHandler,
    make_peer: Callable[[Established], ControlPeer],
    *,
    sessions: LiveSessions,
    options: ServeOptions,
    label: str,
    faults: FaultPlan | None = None,
) -> None:
    """Serve one accepted connection until it ends and is fenced. Owns ``stream``; never raises.

    Args:
        stream: just accepted, nothing read yet.
        handler: the store.
        make_peer: makes the transport's peer of an authenticated session.
        sessions: shared by all sessions of the transport.
        options: time limits.
        label: where the connection comes from, for logs.
        faults: what to break, in tests.
    """
    if not handler.admit():
        _refuse(stream, handler)
        return
    try:
        await _ServerChannel(stream, handler, make_peer, sessions, options, label, faults or FaultPlan()).run()
    except Exception:
        _log.exception("%s: a session ended by a fault of this server", label)
        handler.counted("internal_error")
    finally:
        stream.close()
        handler.departed()


def _refuse(stream: ControlStream, handler: SessionHandler) -> None:
    handler.counted("refused_busy")
    session = Session(Role.SERVER, bytes(NONCE_BYTES))
    session.reject(ErrorCode.BUSY, "too many connections; try again later")
    FrameWriter(stream).send(session.data_to_send())
    stream.close()


class _ServerChannel:
    """One accepted connection."""

    def __init__(
        self,
        stream: ControlStream,
        handler: SessionHandler,
        make_peer: Callable[[Established], ControlPeer],
        sessions: LiveSessions,
        options: ServeOptions,
        label: str,
        faults: FaultPlan,
    ) -> None:
        self._stream = stream
        self._handler = handler
        self._make_peer = make_peer
        self._sessions = sessions
        self._options = options
        self._label = label
        self._faults = ControlFaults(faults, self.abort)
        self._limits = handler.identity.limits
        self._session_id = SessionId(os.urandom(16))
        self._session = Session(
            Role.SERVER,
            os.urandom(NONCE_BYTES),
            identity=handler.identity,
            session_id=self._session_id,
            find_key=handler.find_key,
        )
        self._writer = FrameWriter(stream)
        self._places = anyio.Semaphore(self._limits.max_inflight, fast_acquire=True)
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """The whole life after ``admit``."""
        established = await self._authenticate()
        if established is None:
            return
        peer = self._make_peer(established)
        self._sessions.add(self._session_id, established.key_id, self._scope.cancel)
        opened = True
        try:
            with self._scope:
                opened = await self._open(peer)
                if opened:
                    await self._drive(peer)
        finally:
            with anyio.CancelScope(shield=True):
                self._stream.close()
                self._writer.close()
                await peer.bulk.fence()
                self._sessions.fenced(self._session_id)
                if opened:
                    await self._handler.closed(peer)

    # -- handshake

    async def _authenticate(self) -> Established | None:
        try:
            with anyio.fail_after(self._options.handshake_timeout_s):
                await self._faults.connected()
                try:
                    return await self._shake_hands()
                except (AuthError, VersionError):
                    await send_all(self._stream, self._session.data_to_send())
                    raise
        except TimeoutError:
            self._note("handshake_timeout")
        except AuthError as error:
            self._note("auth_failed", error)
        except VersionError as error:
            self._note("cut_version", error)
        except RemoteProtocolError as error:
            self._note(f"cut_{error.kind}", error)
        except ConnectionLost as error:
            self._note("cut_lost", error)
        return None

    async def _shake_hands(self) -> Established:
        while data := await self._stream.receive():
            for event in self._session.receive_data(data):
                if isinstance(event, Established):
                    return event
            await send_all(self._stream, self._session.data_to_send())
        self._session.receive_eof()
        raise ConnectionLost("the stream ended in the handshake")

    async def _open(self, peer: ControlPeer) -> bool:
        try:
            await self._handler.opened(peer)
        except StoreError as error:
            self._note("refused_session", error)
            self._session.reject(ErrorCode.LIMIT, str(error))
            self._writer.send(self._session.data_to_send())
            return False
        self._stream.accept_fds()
        self._session.accept()
        self._writer.send(self._session.data_to_send())
        return True

    # -- requests

    async def _drive(self, peer: ControlPeer) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._writer.run)
            try:
                await self._read_requests(peer, tasks)
            except (RemoteProtocolError, ConnectionLost) as error:
                self._cut(error)
            tasks.cancel_scope.cancel()

    async def _read_requests(self, peer: ControlPeer, tasks: anyio.abc.TaskGroup) -> None:
        while data := await self._stream.receive():
            for event in self._session.receive_data(data):
                if not isinstance(event, RequestReceived):
                    continue
                if event.type is MessageType.REGISTER:
                    peer.offered(Register.unpack(event.body), self._stream)
                if event.type is MessageType.BYE:
                    await self._say_bye(peer, event)
                    return
                await self._places.acquire()
                tasks.start_soon(self._serve, peer, event)
        self._session.receive_eof()

    async def _serve(self, peer: ControlPeer, event: RequestReceived) -> None:
        try:
            answer = await self._carry_out(peer, event)
            if answer is not None:
                await self._reply(event, answer)
        except (RemoteProtocolError, ConnectionLost) as error:
            self._cut(error)
        finally:
            self._places.release()

    async def _carry_out(self, peer: ControlPeer, event: RequestReceived) -> bytes | ErrorReply | None:
        verdict = await self._faults.requested(event.type)
        if verdict is not None:
            return verdict.answer
        if batch_count(event.type, event.body) > self._limits.max_batch_keys:
            return ErrorReply(ErrorCode.LIMIT, f"at most {self._limits.max_batch_keys} keys per batch")
        try:
            return await self._dispatch(peer, event)
        except StoreError as error:
            return ErrorReply(ErrorCode.BAD_REQUEST, str(error))
        except RemoteProtocolError:
            raise
        except Exception:
            _log.exception("%s: %s failed by a fault of this server", self._label, event.type.name)
            self._handler.counted("internal_error")
            if event.type in _MOVES_BYTES:
                # An answer would say that nothing moves any more; here only the fence at the session's end knows.
                raise ConnectionLost("a transfer failed by a fault of this server") from None
            return ErrorReply(ErrorCode.INTERNAL, "the server failed to carry this out; its log says why")

    async def _dispatch(self, peer: ControlPeer, event: RequestReceived) -> bytes:
        if event.type is MessageType.REGISTER:
            offer = Register.unpack(event.body)
            await peer.bulk.register(offer.region, offer.kind, offer.length, offer.token)
            return b""
        if event.type is MessageType.FENCE:
            session = Fence.unpack(event.body).session
            if session == self._session_id:
                raise StoreError("a session is fenced over another connection than its own")
            await self._sessions.fence(session, peer.established.key_id)
            return b""
        return await self._handler.handle(peer, event.type, event.body)

    async def _reply(self, event: RequestReceived, answer: bytes | ErrorReply) -> None:
        fault = await self._faults.replying(event.type)
        if isinstance(fault, NoReply):
            return
        if self._session.state is not State.READY:
            return  # it ended meanwhile
        # From here to the writer nothing may be awaited: frames leave in the order of their sequence numbers.
        try:
            if isinstance(answer, ErrorReply):
                self._session.send_error(event.request_id, event.type, answer)
            else:
                self._session.send_reply(event.request_id, event.type, answer)
        except LocalProtocolError as error:
            _log.error("%s: the reply to %s: %s", self._label, event.type.name, error)
            self._session.send_error(event.request_id, event.type, ErrorReply(ErrorCode.INTERNAL, str(error)))
        mark = self._writer.send(spoilt(self._session.data_to_send(), fault))
        if self._writer.sent >= mark:
            return
        with anyio.move_on_after(self._options.write_timeout_s):
            await self._writer.wait_sent(mark)
            return
        raise RemoteProtocolError("write_timeout", "the client does not read its replies")

    async def _say_bye(self, peer: ControlPeer, event: RequestReceived) -> None:
        for _ in range(self._limits.max_inflight):
            await self._places.acquire()
        await peer.bulk.fence()
        await self._reply(event, b"")

    # -- ends and counts

    def abort(self) -> None:
        """End the connection abruptly (injected faults)."""
        self._stream.end()
        self._scope.cancel()

    def _cut(self, error: MemkvError) -> None:
        if not self._scope.cancel_called:
            self._note(f"cut_{error.kind}" if isinstance(error, RemoteProtocolError) else "cut_lost", error)
            self._scope.cancel()

    def _note(self, event: str, error: Exception | None = None) -> None:
        self._handler.counted(event)
        _log.info("%s: %s%s", self._label, event, f": {error}" if error else "")
