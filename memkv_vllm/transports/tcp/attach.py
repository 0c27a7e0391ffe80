"""How a connection becomes a data connection of a session: the handshake of every connection, then ATTACH.

So a data connection is authenticated as a control connection is, and before that costs the server no more. It can
only be attached to a live session of the same key id. Afterwards both ends hold the bare socket and the seals of its
handshake; frames of the control protocol end there.
"""

from __future__ import annotations

import os
import socket
import time

import anyio

from memkv_vllm.errors import ConnectError, ConnectionLost, RemoteProtocolError, StoreError
from memkv_vllm.protocol.auth import NONCE_BYTES, Credentials, Sealer
from memkv_vllm.protocol.connect import Attach
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply
from memkv_vllm.protocol.session import Established, PeerKind, ReplyReceived, RequestReceived, Session
from memkv_vllm.transports.base import remaining
from memkv_vllm.transports.control import shake_hands
from memkv_vllm.transports.streams import ControlStream, SocketStream, send_all
from memkv_vllm.transports.tcp.bulk import TcpBulk
from memkv_vllm.transports.tls import TlsStream
from memkv_vllm.types import Deadline, Role, SessionId

REFUSED = "no such session of this key"
"""The same for an unknown session as for another key's: who asks learns nothing."""


class Attachable:
    """The sessions of one server transport that data connections may be attached to."""

    def __init__(self) -> None:
        self._live: dict[SessionId, tuple[str, TcpBulk]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, established: Established, bulk: TcpBulk) -> None:
        """A session began."""
        self._live[established.session] = (established.key_id, bulk)

    def discard(self, session: SessionId) -> None:
        """It has ended; one that never began is no error."""
        self._live.pop(session, None)

    async def take_over(self, session: Session, stream: ControlStream) -> None:
        """Attach an authenticated connection; see ``memkv_vllm.transports.serving.TakeOver``."""
        session.accept()
        await send_all(stream, session.data_to_send())
        request = await _only_request(session, stream)
        try:
            asked = Attach.unpack(request.body)
            bulk = self._find(session, asked)
            bulk.check_room(eager=asked.eager)
        except StoreError as error:
            session.send_error(request.request_id, request.type, ErrorReply(ErrorCode.BAD_REQUEST, str(error)))
            await send_all(stream, session.data_to_send())
            raise
        session.send_reply(request.request_id, request.type, b"")
        await send_all(stream, session.data_to_send())
        if not isinstance(stream, SocketStream | TlsStream) or stream.secured:
            raise RemoteProtocolError("attach", "a data connection over a stream that has no socket of its own")
        ours, theirs = session.hand_over()
        bulk.attach(stream.release(), ours, theirs, eager=asked.eager)

    def _find(self, session: Session, attach: Attach) -> TcpBulk:
        key_id, bulk = self._live.get(attach.session, ("", None))
        if bulk is None or session.established is None or session.established.key_id != key_id:
            raise StoreError(REFUSED)
        return bulk


async def _only_request(session: Session, stream: ControlStream) -> RequestReceived:
    while data := await stream.receive():
        for event in session.receive_data(data):
            if not isinstance(event, RequestReceived) or event.type is not MessageType.ATTACH:
                raise RemoteProtocolError("attach", "something else than ATTACH on a data connection")
            return event
    raise ConnectionLost("the stream ended before ATTACH")


async def attach(
    sock: socket.socket,
    credentials: Credentials,
    established: Established,
    deadline: Deadline,
    *,
    label: str,
    eager: bool = False,
) -> tuple[socket.socket, Sealer, Sealer]:
    """Client: make ``sock`` a data connection of the session ``established``.

    Args:
        sock: just connected; closed if this fails.
        credentials: the session's own.
        established: the session.
        deadline: for all of it.
        label: the server's name in messages.
        eager: it is to be the session's eager connection.

    Returns:
        the socket, the seal of what we send and that of what comes.

    Raises:
        ConnectError: the server refused it, is another one, or did not answer by ``deadline``.
        AuthError, VersionError, RemoteProtocolError: the handshake failed.
    """
    stream = SocketStream(sock)
    session = Session(Role.CLIENT, os.urandom(NONCE_BYTES), credentials=credentials, kind=PeerKind.DATA)
    try:
        with anyio.fail_after(remaining(deadline, time.monotonic())):
            seen = await shake_hands(stream, session)
            if seen.server.boot_id != established.server.boot_id:
                raise ConnectError(f"{label}: another server answers at this address now")
            await _ask(session, stream, Attach(established.session, eager))
        ours, theirs = session.hand_over()
        return stream.release(), ours, theirs
    except TimeoutError:
        stream.close()
        raise ConnectError(f"{label} did not answer on a data connection by the deadline") from None
    except (ConnectionLost, StoreError) as error:
        stream.close()
        raise ConnectError(f"{label} refused a data connection: {error}") from error
    except BaseException:
        stream.close()
        raise


async def _ask(session: Session, stream: SocketStream, request: Attach) -> None:
    session.send_request(request.TYPE, request.pack())
    await send_all(stream, session.data_to_send())
    while data := await stream.receive():
        for event in session.receive_data(data):
            if not isinstance(event, ReplyReceived) or event.type is not request.TYPE:
                raise RemoteProtocolError("attach", "something else than the answer to ATTACH")
            if event.error is not None:
                raise event.error.to_exception()
            return request.reply(event.body)
    raise ConnectionLost("the stream ended before ATTACH was answered")
