"""Contract: the control channel. Who gets in, who is cut, and what many requests at once may cost."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import (
    AuthError,
    ConnectError,
    ConnectionLost,
    LocalProtocolError,
    MemkvError,
    NotSent,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeout,
    StoreError,
)
from memkv_vllm.protocol.auth import NONCE_BYTES, Credentials
from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES, Flags, Header, MessageType, pack_header
from memkv_vllm.protocol.messages import Bye, Delete, Exists, Fence, Get, Ping, Stat
from memkv_vllm.protocol.session import Limits, PeerKind, Session, State
from memkv_vllm.transports.faults import BitFlip, Delay, Die, Fail, FaultPlan, NoReply, Operation
from memkv_vllm.transports.streams import SocketStream, send_all
from memkv_vllm.types import Extent, SessionId, Status
from tests.support.harness import TransportFactory, connected, serving, wait_until
from tests.support.peers import client_session, raw_stream, replies, server_session, shake_hands, until_closed
from tests.support.scripted import KEY, LIMITS, ScriptedHandler, soon

pytestmark = pytest.mark.anyio


async def test_the_handshake_tells_both_sides_the_same(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        (peer,) = server.handler.peers.values()
        ours, theirs = client.connection.established, peer.established
        assert ours == theirs
        assert ours.server == server.handler.identity
        assert (ours.kind, ours.key_id) == (PeerKind.ENGINE, "default")
        assert peer.label
        await client.connection.request(Ping(), soon())
        assert client.connection.alive


async def test_bye_ends_in_order(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        await client.connection.request(Bye(), soon())
        await wait_until(lambda: client.ended, "the connection ends")
        assert client.ended == [None]
        assert not client.connection.alive
        await client.connection.fence(soon())
        counts = server.handler.counts
        await wait_until(lambda: counts["departed"] == counts["admitted"], "the session is gone")
        assert not server.handler.peers
        assert not any(event.startswith("cut_") for event in server.handler.counts)


async def test_bye_waits_for_requests_under_way(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.PUSH, Delay(0.1))
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        order: list[str] = []

        async def get() -> None:
            assert await client.get(0, Extent(1, 0, 1000)) == [Status.OK]
            order.append("get")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get)
            await wait_until(lambda: server.handler.counts["GET"], "the get is under way")
            await client.connection.request(Bye(), soon())
            order.append("bye")
        assert order == ["get", "bye"]


# -- who gets in


async def test_nobody_there(factory: TransportFactory) -> None:
    listener, address = factory.raw_listener()
    listener.close()
    with pytest.raises(ConnectError):
        await factory.client().connect(*address, Credentials(KEY), PeerKind.TOOL, soon())


async def test_another_key_is_refused_on_both_sides(factory: TransportFactory) -> None:
    async with serving(factory) as server:
        with pytest.raises(AuthError, match="auth_key"):
            await factory.client().connect(*server.address, Credentials(bytes(32)), PeerKind.TOOL, soon())
        with pytest.raises(AuthError, match="nobody"):
            await factory.client().connect(*server.address, Credentials(KEY, "nobody"), PeerKind.TOOL, soon())
        await wait_until(lambda: server.handler.counts["departed"] == 2, "both are gone")
        assert server.handler.counts["auth_failed"] == 2  # also where the client noticed it first, and left
        assert server.handler.counts["opened"] == 0


async def test_a_forged_proof_is_refused_and_counted(factory: TransportFactory) -> None:
    async with serving(factory) as server, raw_stream(factory, server.address) as stream:
        session = client_session()
        session.start()
        await send_all(stream, session.data_to_send())
        session.receive_data(await stream.receive())
        proof = session.data_to_send()
        await send_all(stream, proof[:-1] + bytes([proof[-1] ^ 1]))
        await until_closed(stream)
        assert server.handler.counts["auth_failed"] == 1
        assert server.handler.counts["opened"] == 0


async def test_a_replayed_handshake_gets_nobody_in(factory: TransportFactory) -> None:
    sent: list[bytes] = []
    async with serving(factory) as server:
        async with raw_stream(factory, server.address) as stream:
            session = client_session()
            session.start()
            for _ in range(2):
                sent.append(session.data_to_send())
                await send_all(stream, sent[-1])
                session.receive_data(await stream.receive())
            assert session.state is State.READY
        async with raw_stream(factory, server.address) as stream:
            await send_all(stream, sent[0])
            assert await stream.receive()
            await send_all(stream, sent[1])
            await until_closed(stream)
        assert server.handler.counts["auth_failed"] == 1
        assert server.handler.counts["opened"] == 1


async def test_a_busy_server_and_one_that_refuses_the_session_say_so(factory: TransportFactory) -> None:
    async with serving(factory) as server:
        server.handler.busy = True
        with pytest.raises(ConnectError, match="busy"):
            await factory.client().connect(*server.address, Credentials(KEY), PeerKind.TOOL, soon())
        server.handler.busy, server.handler.refuse = False, "too many sessions"
        with pytest.raises(ConnectError, match="too many sessions"):
            await factory.client().connect(*server.address, Credentials(KEY), PeerKind.TOOL, soon())
        await wait_until(lambda: server.handler.counts["departed"] == 1, "it has departed")
        assert server.handler.counts["closed"] == server.handler.counts["opened"] == 0
        server.handler.refuse = None
        async with connected(factory, server.address) as client:
            await client.connection.request(Ping(), soon())


async def test_a_server_that_never_answers_is_a_connect_error_by_the_deadline(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.CONNECT, NoReply())
    async with serving(factory, faults=plan) as server:
        with pytest.raises(ConnectError, match="did not answer"):
            await factory.client().connect(*server.address, Credentials(KEY), PeerKind.TOOL, soon(0.1))
    listener, address = factory.raw_listener()
    with listener, pytest.raises(ConnectError):
        await factory.client().connect(*address, Credentials(KEY), PeerKind.TOOL, soon(0.1))


async def test_the_server_closing_at_each_byte_of_the_handshake_never_hangs(factory: TransportFactory) -> None:
    listener, address = factory.raw_listener()
    with listener, anyio.fail_after(15):
        complete, offset = False, -1
        while not complete:
            offset += 1
            failures: list[MemkvError] = []
            async with anyio.create_task_group() as tasks:

                async def connect() -> None:
                    try:
                        connection = await factory.client().connect(*address, Credentials(KEY), PeerKind.TOOL, soon())
                        await connection.aclose()
                    except MemkvError as error:
                        failures.append(error)  # noqa: B023

                tasks.start_soon(connect)
                complete = await _serve_some_bytes(listener, offset)
            assert complete or isinstance(failures[0], (ConnectError, ProtocolError)), failures
        assert not failures
        assert offset > HEADER_BYTES * 2 + MAC_BYTES


async def _serve_some_bytes(listener: socket.socket, limit: int) -> bool:
    """Perform a server's handshake but close after ``limit`` bytes; returns whether that was all of it."""
    await anyio.wait_readable(listener)
    stream, session = SocketStream(listener.accept()[0]), server_session()
    try:
        while data := await stream.receive():
            if session.receive_data(data):
                session.accept()
            answer = session.data_to_send()
            await send_all(stream, answer[:limit])
            limit -= len(answer)
            if limit < 0 or session.state is State.READY:
                return limit >= 0
    finally:
        stream.close()
    return False


# -- who is cut


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (b"GET / HTTP/1.1\r\nHost: memkv\r\n\r\n", "cut_magic"),
        (b"\x00" * 100, "cut_magic"),
        (pack_header(Header(1, MessageType.HELLO, Flags.NONE, 0, 513, 0)), "cut_length"),
        (pack_header(Header(1, MessageType.HELLO, Flags.NONE, 0, 1 << 31, 0)), "cut_length"),
        (pack_header(Header(1, MessageType.HELLO, Flags.NONE, 0, 3, 0)) + b"abc", "cut_length"),
        (pack_header(Header(1, MessageType.GET, Flags.NONE, 1, 0, 0)), "cut_state"),
        (pack_header(Header(1, MessageType.PROOF, Flags.NONE, 0, 32, 0)) + bytes(32), "cut_state"),
    ],
)
async def test_an_unauthenticated_peer_is_cut_after_one_frame(
    factory: TransportFactory, data: bytes, event: str
) -> None:
    """P091: nothing of it is parsed beyond the frame's header; for random bytes see below."""
    async with serving(factory) as server, raw_stream(factory, server.address) as stream:
        await send_all(stream, data)
        assert await until_closed(stream) == b""
        await wait_until(lambda: server.handler.counts["departed"] == 1, "it has departed")
        assert server.handler.counts[event] == 1
        assert server.handler.counts["opened"] == 0


async def test_another_version_is_refused_with_a_reason(factory: TransportFactory) -> None:
    async with serving(factory) as server, raw_stream(factory, server.address) as stream:
        session = client_session()
        session.start()
        hello = bytearray(session.data_to_send())
        hello[HEADER_BYTES : HEADER_BYTES + 2] = b"\x07\x09"
        await send_all(stream, bytes(hello))
        assert b"versions 7-9" in await until_closed(stream)
        assert server.handler.counts["cut_version"] == 1


async def test_a_peer_that_says_nothing_is_cut(factory: TransportFactory) -> None:
    async with serving(factory, handshake_timeout_s=0.05) as server:
        async with raw_stream(factory, server.address) as stream:
            await until_closed(stream)
        async with raw_stream(factory, server.address) as stream:
            await send_all(stream, b"mKV1")
            await until_closed(stream)
        await wait_until(lambda: server.handler.counts["departed"] == 2, "both have departed")
        assert server.handler.counts["handshake_timeout"] == 2


def _replay(frame: bytes) -> bytes:
    return frame + frame


def _truncate(frame: bytes) -> bytes:
    return frame[:-1]


def _drop_mac(frame: bytes) -> bytes:
    return frame[:-MAC_BYTES] + frame


def _skip(frame: bytes) -> bytes:
    return frame[:20] + (1).to_bytes(8, "little") + frame[28:]


@pytest.mark.parametrize(
    ("spoil", "event", "served"),
    [
        (_replay, "cut_sequence", 1),
        (_truncate, "cut_truncated", 0),
        (_drop_mac, "cut_mac", 0),
        (_skip, "cut_sequence", 0),
        (lambda frame: frame[:-1] + bytes([frame[-1] ^ 128]), "cut_mac", 0),
        (lambda frame: frame[:8] + b"\x09" + frame[9:], "cut_mac", 0),
    ],
)
async def test_a_spoilt_frame_cuts_the_session(
    factory: TransportFactory, spoil: Callable[[bytes], bytes], event: str, served: int
) -> None:
    async with serving(factory) as server, raw_stream(factory, server.address) as stream:
        session = client_session()
        await shake_hands(stream, session)
        session.send_request(MessageType.PING, b"")
        frame = session.data_to_send()
        await send_all(stream, spoil(frame))
        if event == "cut_truncated":
            stream.end()
        await until_closed(stream)
        await wait_until(lambda: server.handler.counts["departed"] == 1, "it has departed")
        assert server.handler.counts[event] == 1
        assert server.handler.counts["PING"] <= served
        assert server.handler.counts["closed"] == 1


async def test_a_body_that_does_not_parse_cuts_the_session(factory: TransportFactory) -> None:
    for type, event in [(MessageType.GET, "cut_length"), (MessageType.REGISTER, "cut_length")]:
        async with serving(factory) as server, raw_stream(factory, server.address) as stream:
            session = client_session()
            await shake_hands(stream, session)
            session.send_request(type, b"\x01\x00\x20")
            await send_all(stream, session.data_to_send())
            await until_closed(stream)
            assert server.handler.counts[event] == 1


async def test_random_bytes_never_hurt_the_server(factory: TransportFactory) -> None:
    async with (
        serving(factory, handshake_timeout_s=0.2) as server,
        connected(factory, server.address, region_bytes=0) as client,
    ):
        for length in (1, 27, 28, 29, 200, 5000):
            for prefix in (b"", b"mKV1", b"mKV1\x01\x01\x00\x00"):
                async with raw_stream(factory, server.address) as stream:
                    await send_all(stream, prefix + os.urandom(length))
                    stream.end()
        await client.connection.request(Ping(), soon())
        await wait_until(lambda: server.handler.counts["departed"] == 18, "all have departed")
        assert server.handler.counts["internal_error"] == 0


# -- requests


async def test_refusals_and_faults_of_the_server_fail_one_request_only(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.REQUEST, Fail(), type=MessageType.PING, nth=1)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        with pytest.raises(StoreError, match="nothing is deleted"):
            await client.connection.request(Delete([bytes(32)]), soon())
        with pytest.raises(StoreError, match="internal") as refused:
            await client.connection.request(Stat(), soon())
        assert refused.value.code == "internal", "what a client may act on, without reading the text"
        with pytest.raises(StoreError, match="injected"):
            await client.connection.request(Ping(), soon())
        await client.connection.request(Ping(), soon())
        assert server.handler.counts["internal_error"] == 1


async def test_a_request_beyond_the_servers_limits_is_never_sent(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        with pytest.raises(LocalProtocolError, match="257 keys"):
            await client.connection.request(Exists([bytes([i % 256] * 31) for i in range(257)], 1), soon())
        with pytest.raises(LocalProtocolError, match="layout"):
            await client.connection.request(Get([], -1), soon())
        await client.connection.request(Ping(), soon())
        assert server.handler.counts["EXISTS"] == server.handler.counts["GET"] == 0


async def test_a_batch_beyond_the_limits_is_refused_by_the_server_too(factory: TransportFactory) -> None:
    async with serving(factory) as server, raw_stream(factory, server.address) as stream:
        session = client_session()
        await shake_hands(stream, session)
        session.send_request(MessageType.DELETE, Delete([bytes(32)] * 257).pack())
        await send_all(stream, session.data_to_send())
        (event,) = await replies(stream, session, 1)
        assert "at most 256 keys" in str(event)
        assert server.handler.counts["DELETE"] == 0


async def test_a_late_reply_is_dropped_and_the_connection_goes_on(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.REPLY, Delay(0.15), type=MessageType.PING, nth=1)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        with pytest.raises(RequestTimeout):
            await client.connection.request(Ping(), soon(0.03))
        await client.connection.request(Ping(), soon())
        await wait_until(lambda: client.connection.statistics().late_replies == 1, "the late reply")  # type: ignore[attr-defined]
        assert client.connection.statistics().pending == 0  # type: ignore[attr-defined]
        assert client.connection.alive


async def test_a_cancelled_request_leaves_the_connection_whole(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.REQUEST, Delay(0.05), type=MessageType.PING, times=5)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        for _ in range(5):
            with anyio.move_on_after(0.01) as scope:
                await client.connection.request(Ping(), soon())
            assert scope.cancelled_caught
        await client.connection.request(Ping(), soon())


async def test_a_reply_to_nobody_ends_the_connection(factory: TransportFactory) -> None:
    ended: list[BaseException | None] = []

    async def answer_wrongly(session: Session, request_id: int) -> None:
        session.send_reply(request_id + 1, MessageType.PING, b"")

    await _with_fake_server(factory, answer_wrongly, ended)
    assert isinstance(ended[0], RemoteProtocolError)
    assert ended[0].kind == "request_id"


async def test_a_reply_of_another_type_or_shape_ends_the_connection(factory: TransportFactory) -> None:
    async def another_type(session: Session, request_id: int) -> None:
        session.send_reply(request_id, MessageType.STAT, b"")

    async def another_shape(session: Session, request_id: int) -> None:
        session.send_reply(request_id, MessageType.PING, b"x")

    for answer in (another_type, another_shape):
        ended: list[BaseException | None] = []
        await _with_fake_server(factory, answer, ended)
        assert isinstance(ended[0], RemoteProtocolError)


async def _with_fake_server(
    factory: TransportFactory,
    answer: Callable[[Session, int], Awaitable[None]],
    ended: list[BaseException | None],
) -> None:
    """A client's PING against a server whose reply is up to ``answer``."""
    listener, address = factory.raw_listener()

    async def serve() -> None:
        await anyio.wait_readable(listener)
        stream, session = SocketStream(listener.accept()[0]), server_session()
        try:
            while data := await stream.receive():
                for event in session.receive_data(data):
                    if session.state is State.PROVEN:
                        session.accept()
                    else:
                        await answer(session, event.request_id)  # type: ignore[union-attr]
                await send_all(stream, session.data_to_send())
        finally:
            stream.close()

    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            async with connected(factory, address, region_bytes=0) as client:
                with pytest.raises((ConnectionLost, RemoteProtocolError)):
                    await client.connection.request(Ping(), soon())
                await wait_until(lambda: client.ended, "the connection ends")
                ended += client.ended


async def test_a_spoilt_reply_ends_the_connection(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.REPLY, BitFlip(-1), type=MessageType.PING)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        with pytest.raises(ConnectionLost, match="MAC"):
            await client.connection.request(Ping(), soon())
        await wait_until(lambda: client.ended, "the connection ends")
        assert isinstance(client.ended[0], RemoteProtocolError)


async def test_at_most_max_inflight_requests_are_carried_out_at_once(factory: TransportFactory) -> None:
    gate = anyio.Event()
    handler = ScriptedHandler(limits=Limits(1 << 20, 256, 3, 1 << 20))

    async def hold(type: MessageType) -> None:
        if type is not MessageType.PING:
            await gate.wait()

    handler.on_request = hold
    async with serving(factory, handler=handler) as server:
        async with connected(factory, server.address, region_bytes=0) as client, anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(client.connection.request, Get([], 5000), soon())
            await wait_until(lambda: handler.running == 2, "all places but the one for PING are taken")
            with pytest.raises(NotSent, match="no place"):
                await client.connection.request(Get([], 5000), soon(0.05))
            await client.connection.request(Ping(), soon())
            gate.set()
        assert (handler.max_running, handler.counts["GET"], handler.counts["PING"]) == (3, 9, 1)


async def test_the_server_stops_reading_beyond_max_inflight(factory: TransportFactory) -> None:
    gate = anyio.Event()
    handler = ScriptedHandler(limits=Limits(1 << 20, 256, 3, 1 << 20))

    async def hold(_: MessageType) -> None:
        await gate.wait()

    handler.on_request = hold
    async with serving(factory, handler=handler) as server, raw_stream(factory, server.address) as stream:
        session = client_session()
        await shake_hands(stream, session)
        for _ in range(10):
            session.send_request(MessageType.PING, b"")
        await send_all(stream, session.data_to_send())
        await wait_until(lambda: handler.running == 3, "three are under way")
        await anyio.sleep(0.05)
        assert handler.counts["PING"] == 3
        gate.set()
        assert len(await replies(stream, session, 10)) == 10
        assert handler.max_running == 3


async def test_a_client_that_does_not_read_its_replies_is_cut(factory: TransportFactory) -> None:
    handler = ScriptedHandler(limits=Limits(4 << 20, 256, 4, 1 << 20))

    async def big_reply(peer: object, type: int, body: memoryview) -> bytes:
        handler.counts["big"] += 1
        return bytes(3 << 20)  # more than a socket holds for a peer that does not read

    handler.handle = big_reply  # type: ignore[method-assign]
    async with serving(factory, handler=handler, write_timeout_s=0.1) as server:
        async with raw_stream(factory, server.address) as stream:
            session = client_session()
            await shake_hands(stream, session)
            for _ in range(20):
                session.send_request(MessageType.PING, b"")
            await send_all(stream, session.data_to_send())
            await wait_until(lambda: handler.counts["departed"] == 1, "it is cut")
            assert handler.counts["cut_write_timeout"] == 1
            assert handler.counts["big"] <= 5


async def test_a_slow_reader_that_keeps_reading_gets_everything(factory: TransportFactory) -> None:
    handler = ScriptedHandler(limits=Limits(4 << 20, 256, 4, 1 << 20))

    async def big_reply(peer: object, type: int, body: memoryview) -> bytes:
        return bytes(1 << 20)

    handler.handle = big_reply  # type: ignore[method-assign]
    async with serving(factory, handler=handler) as server, raw_stream(factory, server.address) as stream:
        session = client_session()
        await shake_hands(stream, session)
        for _ in range(12):
            session.send_request(MessageType.PING, b"")
        await send_all(stream, session.data_to_send())
        events = await replies(stream, session, 12)
        assert sorted(event.request_id for event in events) == list(range(1, 13))  # type: ignore[union-attr]


async def test_pending_requests_fail_when_the_connection_is_cut(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.REQUEST, Delay(30), type=MessageType.GET)
    plan.add(Operation.REQUEST, Die(), type=MessageType.STAT)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        async with anyio.create_task_group() as tasks:

            async def get() -> None:
                with pytest.raises(ConnectionLost):
                    await client.connection.request(Get([], 5000), soon(3600))

            for _ in range(LIMITS.max_inflight + 4):
                tasks.start_soon(get)
            most = LIMITS.max_inflight - 1
            await wait_until(lambda: client.connection.statistics().pending == most, "all places are taken")  # type: ignore[attr-defined]
            await _raw_cut(server.handler)
        await wait_until(lambda: client.ended, "the connection ends")
        assert isinstance(client.ended[0], ConnectionLost)
        assert not client.connection.alive


async def _raw_cut(handler: ScriptedHandler) -> None:
    (peer,) = handler.peers.values()
    bulk: Any = getattr(peer.bulk, "chosen", peer.bulk)
    bulk._cut()


async def test_fence_of_ones_own_or_another_keys_session_is_refused(factory: TransportFactory) -> None:
    handler = ScriptedHandler(keys={"default": KEY, "other": bytes(32)})
    async with serving(factory, handler=handler) as server, connected(factory, server.address) as client:
        own = client.connection.established.session
        with pytest.raises(StoreError, match="another connection"):
            await client.connection.request(Fence(own), soon())
        other = Credentials(bytes(32), "other")
        async with connected(factory, server.address, region_bytes=0, credentials=other) as stranger:
            with pytest.raises(StoreError, match="another key"):
                await stranger.connection.request(Fence(own), soon())
            await stranger.connection.request(Fence(SessionId(bytes(16))), soon())
        async with connected(factory, server.address, region_bytes=0) as friend:
            await friend.connection.request(Fence(own), soon())
            assert own not in handler.peers
        await wait_until(lambda: client.ended, "the fenced session ends")


def test_nonces_have_the_promised_length() -> None:
    assert NONCE_BYTES == 32
