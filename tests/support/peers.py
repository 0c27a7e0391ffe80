"""Protocol sessions driven by hand over raw streams, to misbehave on purpose."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from memkv_vllm.errors import ConnectionLost
from memkv_vllm.protocol.auth import NONCE_BYTES, Credentials
from memkv_vllm.protocol.session import Event, PeerKind, ServerIdentity, Session, State
from memkv_vllm.transports.streams import SocketStream, send_all
from memkv_vllm.types import Role, SessionId
from tests.support.harness import Address, TransportFactory
from tests.support.scripted import KEY, LIMITS

IDENTITY = ServerIdentity(b"s" * 16, b"b" * 16, LIMITS)


def client_session(key: bytes = KEY, key_id: str = "default") -> Session:
    """A client's session with fresh nonce."""
    return Session(Role.CLIENT, os.urandom(NONCE_BYTES), credentials=Credentials(key, key_id), kind=PeerKind.TOOL)


def server_session(key: bytes | None = KEY) -> Session:
    """A server's session; ``key=None`` knows no key."""
    return Session(
        Role.SERVER,
        os.urandom(NONCE_BYTES),
        identity=IDENTITY,
        session_id=SessionId(os.urandom(16)),
        find_key=lambda key_id: key if key_id == "default" else None,
    )


@asynccontextmanager
async def raw_stream(factory: TransportFactory, address: Address) -> AsyncIterator[SocketStream]:
    """A connected stream that says nothing by itself."""
    stream = factory.raw_connect(address)
    try:
        yield stream
    finally:
        stream.close()


async def shake_hands(stream: SocketStream, session: Session) -> None:
    """Bring a client's session to READY by hand."""
    session.start()
    while session.state is not State.READY:
        await send_all(stream, session.data_to_send())
        data = await stream.receive()
        if not data:
            raise ConnectionLost("the server closed in the handshake")
        session.receive_data(data)


async def replies(stream: SocketStream, session: Session, count: int) -> list[Event]:
    """Read until ``count`` events came."""
    events: list[Event] = []
    while len(events) < count and (data := await stream.receive()):
        events += session.receive_data(data)
    return events


async def until_closed(stream: SocketStream, timeout_s: float = 10) -> bytes:
    """Everything that comes until the server closes."""
    received = b""
    with anyio.fail_after(timeout_s):
        # A reset is an end, too.
        with contextlib.suppress(ConnectionLost):
            while data := await stream.receive():
                received += data
    return received
