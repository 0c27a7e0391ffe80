"""The license exchange of a fresh session: after the handshake, before anything else is parsed.

A server that asks for licenses says so in its PROOF; the client's first request is then LICENSE. Until the server has
seen a valid one it carries out nothing: not REGISTER, not FENCE, no request of the store. A license that is missing
or not valid ends the session with an error reply that says why. Both ends' drivers call this module once per session;
servers that ask for nothing never see a license.
"""

from __future__ import annotations

import anyio

from memkv_vllm.config import LICENSE_VARIABLES
from memkv_vllm.errors import ConnectionLost, LicenseError, RemoteProtocolError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply, License
from memkv_vllm.protocol.session import ReplyReceived, RequestReceived, Session
from memkv_vllm.transports.base import ServerPeer, SessionHandler
from memkv_vllm.transports.streams import ControlStream, FrameWriter, send_all

NOT_FOUND = f"no license found (looked in: the yaml's license, {', '.join(LICENSE_VARIABLES)})"


async def present_license(stream: ControlStream, session: Session, token: str | None) -> None:
    """Client: answer a server that asks for a license. The caller keeps the deadline.

    Args:
        stream: nobody else reads it yet.
        session: just established.
        token: the license's text, None when none was found.

    Raises:
        LicenseError: there is none to present, or the server refused it; says why.
        ConnectionLost, RemoteProtocolError: the connection ended instead.
    """
    if token is None:
        raise LicenseError(f"{NOT_FOUND}: this server asks for one; set one of them")
    request = License(token)
    session.send_request(request.TYPE, request.pack())
    await send_all(stream, session.data_to_send())
    while data := await stream.receive():
        for event in session.receive_data(data):
            if not isinstance(event, ReplyReceived) or event.type is not License.TYPE:
                raise RemoteProtocolError("license", "something else than the answer to LICENSE")
            if event.error is not None:
                raise LicenseError(event.error.text)
            return request.reply(event.body)
    session.receive_eof()
    raise ConnectionLost("the server closed before it answered LICENSE")


async def demand_license(
    stream: ControlStream,
    writer: FrameWriter,
    session: Session,
    handler: SessionHandler,
    peer: ServerPeer,
    timeout_s: float,
) -> None:
    """Server: take the client's license, which must be its first request, and answer it.

    Args:
        stream: nobody else reads it yet.
        writer: the stream's writer.
        session: just accepted, with ``asks_license``.
        handler: judges the license.
        peer: whose license it is.
        timeout_s: a client that has presented none by then is cut.

    Raises:
        LicenseError: none came, or the handler refused it; the client was told.
        ConnectionLost, RemoteProtocolError: the connection broke, or more than one request came.
    """
    with anyio.move_on_after(timeout_s):
        request = await _first_request(stream, session)
        try:
            if request.type is not MessageType.LICENSE:
                raise LicenseError(NOT_FOUND)
            handler.licensed(peer, License.unpack(request.body).token)
        except LicenseError as error:
            session.send_error(request.request_id, request.type, ErrorReply(ErrorCode.LICENSE, str(error)))
            writer.send(session.data_to_send())
            raise
        session.send_reply(request.request_id, request.type, b"")
        writer.send(session.data_to_send())
        return
    raise LicenseError(f"none was presented within {timeout_s:g} s")


async def _first_request(stream: ControlStream, session: Session) -> RequestReceived:
    while data := await stream.receive():
        events = session.receive_data(data)
        if len(events) > 1 or not all(isinstance(event, RequestReceived) for event in events):
            # A client that presents its license waits for the answer.
            raise RemoteProtocolError("license", "requests that did not wait for the answer to LICENSE")
        for event in events:
            if isinstance(event, RequestReceived):
                return event
    session.receive_eof()
    # What a client does that has none: it knows, and needs no answer.
    raise LicenseError("none was presented: the client left")
