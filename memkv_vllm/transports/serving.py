"""Server side of a control channel: drives one accepted session over any control stream.

Order of a session's life, whatever ends it::

    admit -> handshake -> opened -> license, if asked for -> requests -> tasks cancelled and awaited
    -> bulk fenced -> closed -> departed

(What cannot be fenced is never closed: its session keeps its extents of the arena, and its place among the sessions.)

REGISTER, FENCE and BYE are carried out by the driver, everything else by the :class:`SessionHandler`. How requests
are answered and bounded is :mod:`memkv_vllm.transports.answering`.

Before authentication a peer costs one task, one session object and at most one read's bytes for at most
``handshake_timeout_s``; its first bad frame ends it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from memkv_vllm.errors import (
    AuthError,
    ConnectError,
    ConnectionLost,
    FenceTimeout,
    LicenseError,
    MemkvError,
    RemoteProtocolError,
    StoreError,
    VersionError,
)
from memkv_vllm.protocol.auth import NONCE_BYTES
from memkv_vllm.protocol.messages import ErrorCode
from memkv_vllm.protocol.session import Established, PeerKind, Session, State
from memkv_vllm.transports.answering import Answering, Channel, ControlPeer
from memkv_vllm.transports.base import SessionHandler
from memkv_vllm.transports.faults import ControlFaults, FaultPlan
from memkv_vllm.transports.handshakes import Handshake, Handshakes
from memkv_vllm.transports.licensing import demand_license
from memkv_vllm.transports.streams import ControlStream, FrameWriter, send_all
from memkv_vllm.types import Role, SessionId

__all__ = ["ControlPeer", "LiveSessions", "ServeOptions", "TakeOver", "serve_control"]

_log = logging.getLogger("memkv.transports.serving")

_TLS_ASKED = "this server takes control connections over TLS only: set tls (MEMKV_TLS=true)"


@dataclass(frozen=True)
class ServeOptions:
    """Bounds of a session, in seconds."""

    handshake_timeout_s: float = 5.0
    write_timeout_s: float = 10.0
    requires_tls: bool = False
    """Control connections that come without TLS are refused (data connections carry no control frames)."""


class LiveSessions:
    """The sessions of one server transport that are not fenced yet: what FENCE asks. And those that are to be."""

    def __init__(self) -> None:
        self.handshakes = Handshakes()
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


TakeOver = Callable[[Session, ControlStream], Awaitable[None]]
"""Given an authenticated connection that says it is a data connection; ends when it is attached to its session.

It may raise ``RemoteProtocolError``, ``ConnectionLost`` or ``StoreError``: the connection is then cut.
"""


async def serve_control(
    stream: ControlStream,
    handler: SessionHandler,
    make_peer: Callable[[Established], ControlPeer],
    *,
    sessions: LiveSessions,
    options: ServeOptions,
    label: str,
    faults: FaultPlan | None = None,
    take_over: TakeOver | None = None,
    origin: str = "",
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
        take_over: takes data connections; without, they are cut.
        origin: the host that it comes from: among hosts, places of handshakes are shared out fairly.
    """
    if not handler.admit() and not (await sessions.handshakes.make_room(origin) and handler.admit()):
        _refuse(stream, handler)
        return
    handshake = sessions.handshakes.begin(origin)
    try:
        channel = _ServerChannel(stream, handler, make_peer, sessions, options, label, faults or FaultPlan(), take_over)
        await channel.run(handshake)
    except Exception:
        _log.exception("%s: a session ended by a fault of this server", label)
        handler.counted("internal_error")
    finally:
        sessions.handshakes.end(handshake)
        stream.close()
        handler.departed()
        handshake.departed.set()


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
        take_over: TakeOver | None,
    ) -> None:
        self._take_over = take_over
        self._stream = stream
        self._handler = handler
        self._make_peer = make_peer
        self._sessions = sessions
        self._options = options
        self._label = label
        self._faults = ControlFaults(faults, self.abort)
        self._session_id = SessionId(os.urandom(16))
        self._session = Session(
            Role.SERVER,
            os.urandom(NONCE_BYTES),
            identity=handler.identity,
            session_id=self._session_id,
            find_key=self._find_key,
        )
        self._key: bytes | None = None
        self._key_id = ""
        self._writer = FrameWriter(stream)
        self._scope = anyio.CancelScope()

    async def run(self, handshake: Handshake) -> None:
        """The whole life after ``admit``."""
        established: Established | None = None
        with handshake.scope:
            established = await self._authenticate()
        self._sessions.handshakes.end(handshake)
        if handshake.was_cut:
            self._note("handshake_displaced")
            return
        if established is None:
            return
        if established.kind is PeerKind.DATA:
            await self._attach()
            return
        if self._options.requires_tls and not self._stream.secured:
            self._note("refused_plain", ConnectError(_TLS_ASKED))
            self._session.reject(ErrorCode.DENIED, _TLS_ASKED)
            self._writer.send(self._session.data_to_send())
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
                if await self._fence_bulk(peer):
                    self._sessions.fenced(self._session_id)
                    if opened:
                        await self._handler.closed(peer)

    async def _fence_bulk(self, peer: ControlPeer) -> bool:
        """Whether nothing of the session can land any more. If not, it keeps what it has, and nobody is told so."""
        try:
            await peer.bulk.fence()
        except FenceTimeout as error:
            self._note("not_fenced")
            _log.error("event=session_not_fenced peer=%r reason=%r", self._label, str(error))
            return False
        return True

    # -- handshake

    def _find_key(self, key_id: str) -> bytes | None:
        self._key, self._key_id = self._handler.find_key(key_id), key_id
        return self._key

    def _check_key(self, key_id: str) -> None:
        """Keys may be replaced at any moment: what was proven must be in force when the session opens."""
        proven, self._key = self._key, None
        if proven != self._handler.find_key(key_id):
            error = AuthError("the key was replaced during the handshake")
            self._session.reject(ErrorCode.UNKNOWN_KEY, str(error))
            raise error

    async def _authenticate(self) -> Established | None:
        try:
            with anyio.fail_after(self._options.handshake_timeout_s):
                await self._faults.connected()
                await self._stream.secure()
                self._session.bind(self._stream.binding)
                try:
                    return await self._shake_hands()
                except (AuthError, VersionError):
                    await send_all(self._stream, self._session.data_to_send())
                    raise
        except TimeoutError:
            self._note("handshake_timeout")
        except AuthError as error:
            self._note("auth_failed", error)
            self._handler.unproven(self._key_id)
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
                    self._check_key(event.key_id)
                    return event
            await send_all(self._stream, self._session.data_to_send())
        proven_to_it = self._session.state is State.PROOF_AWAITED
        try:
            self._session.receive_eof()
        except RemoteProtocolError as error:
            if proven_to_it and error.kind == "handshake":
                # What an honest client does whose key differs: it checks our proof before it gives its own.
                raise AuthError("it left after this server's proof: its key for that id is another one") from None
            raise
        raise ConnectionLost("the stream ended in the handshake")

    async def _attach(self) -> None:
        try:
            if self._take_over is None:
                raise RemoteProtocolError("attach", "a data connection to a transport that has none")
            with anyio.fail_after(self._options.handshake_timeout_s):
                await self._take_over(self._session, self._stream)
        except TimeoutError:
            self._note("handshake_timeout")
        except StoreError as error:
            self._note("refused_attach", error)
        except (RemoteProtocolError, ConnectionLost) as error:
            self._note(_event(error), error)

    async def _open(self, peer: ControlPeer) -> bool:
        try:
            await self._handler.opened(peer)
        except StoreError as error:
            self._note("refused_session", error)
            self._session.reject(ErrorCode.LIMIT, str(error))
            self._writer.send(self._session.data_to_send())
            return False
        self._stream.accept_fds()
        self._session.accept(asks_license=self._handler.asks_license)
        self._writer.send(self._session.data_to_send())
        return True

    # -- requests

    async def _drive(self, peer: ControlPeer) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._writer.run)
            try:
                if self._handler.asks_license:
                    timeout_s = self._options.handshake_timeout_s
                    await demand_license(self._stream, self._writer, self._session, self._handler, peer, timeout_s)
                tasks.start_soon(self._watch, peer)
                await Answering(self._channel(), peer, tasks).run()
            except LicenseError as error:
                self._note("refused_license", error)
            except (RemoteProtocolError, ConnectionLost, FenceTimeout) as error:
                self._cut(error)
            tasks.cancel_scope.cancel()

    async def _watch(self, peer: ControlPeer) -> None:
        try:
            await self._handler.watch(peer)
        except RemoteProtocolError as error:
            self._cut(error)

    def _channel(self) -> Channel:
        return Channel(
            self._stream,
            self._writer,
            self._session,
            self._handler,
            self._faults,
            self._fence,
            self._cut,
            self._options.write_timeout_s,
            self._label,
        )

    async def _fence(self, session: SessionId) -> None:
        if session == self._session_id:
            raise StoreError("a session is fenced over another connection than its own")
        established = self._session.established
        await self._sessions.fence(session, established.key_id if established is not None else "")

    # -- ends and counts

    def abort(self) -> None:
        """End the connection abruptly (injected faults)."""
        self._stream.end()
        self._scope.cancel()

    def _cut(self, error: MemkvError) -> None:
        if not self._scope.cancel_called:
            self._note(_event(error), error)
            self._scope.cancel()

    def _note(self, event: str, error: Exception | None = None) -> None:
        self._handler.counted(event)
        _log.info("%s: %s%s", self._label, event, f": {error}" if error else "")


def _event(error: MemkvError) -> str:
    """The counter of what ended a session."""
    return f"cut_{error.kind}" if isinstance(error, RemoteProtocolError) else "cut_lost"
