"""What only the tcp transport has: data connections, and everything that can go wrong on them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import (
    ConnectError,
    ConnectionLost,
    EnvironmentFault,
    LocalProtocolError,
    RemoteProtocolError,
    RequestTimeout,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.connect import Attach
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.protocol.session import Limits, PeerKind, Session, State
from memkv_vllm.transports import sockets as tcp_sockets
from memkv_vllm.transports.base import Move, Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.streams import send_all
from memkv_vllm.transports.tcp import TcpClientTransport, TcpServerTransport
from memkv_vllm.transports.tcp.commands import Kind
from memkv_vllm.transports.tcp.mover import LOW_WATER_BYTES, DataConnection
from memkv_vllm.types import Extent, MemoryKind, Role, SessionId, Status
from tests.support.harness import MIB, Running, TcpFactory, connected, server_process, serving, wait_until
from tests.support.peers import raw_stream, replies, shake_hands, until_closed
from tests.support.resources import held
from tests.support.scripted import KEY, LIMITS, ScriptedHandler, fill, soon
from tests.support.tcp_peer import HandMadeClient, hand_made_client

pytestmark = pytest.mark.anyio


class PlainFactory(TcpFactory):
    """Without a plan of faults, as in production."""

    def __init__(self, num_connections: int = 4) -> None:
        self._num_connections = num_connections

    def server(self, faults: Any = None, **options: Any) -> TcpServerTransport:
        return TcpServerTransport("127.0.0.1", 0, **options)

    def client(self) -> TcpClientTransport:
        return TcpClientTransport(self._num_connections)


FACTORY = PlainFactory()


async def until_departed(server: Running) -> None:
    counts = server.handler.counts
    await wait_until(lambda: counts["departed"] == counts["admitted"], "all have departed")
    assert counts["internal_error"] == 0
    assert not server.handler.peers


# -- bytes


@pytest.mark.parametrize("length", [1, 100, 131_072, 131_073, 8 * MIB - 1, 8 * MIB + 1, 64 * MIB])
async def test_values_of_any_size(length: int) -> None:
    async with (
        serving(FACTORY, arena_bytes=65 * MIB) as server,
        connected(FACTORY, server.address, region_bytes=65 * MIB) as client,
    ):
        data = fill(client.memory, Extent(1, 3, length), 5)
        assert await client.put(7, Extent(1, 3, length)) == [Status.OK]
        assert bytes(server.arena.view(7, length)) == data
        assert not any(server.arena.view(0, 7)) and not any(server.arena.view(7 + length, 64))
        client.memory.array[:] = 0
        assert await client.get(7, Extent(1, 3, length)) == [Status.OK]
        assert bytes(client.memory.view(3, length)) == data
        assert not any(client.memory.view(0, 3)) and not any(client.memory.view(3 + length, 64))


@pytest.mark.parametrize("num_connections", [1, 3])
async def test_long_and_short_values_at_once(num_connections: int) -> None:
    factory = PlainFactory(num_connections)
    async with (
        serving(factory, arena_bytes=64 * MIB) as server,
        connected(factory, server.address, region_bytes=64 * MIB) as client,
    ):
        long = Extent(1, 0, 40 * MIB)
        data = fill(client.memory, long, 1)

        async def short(index: int) -> None:
            extent = Extent(1, 40 * MIB + index * MIB, 65_000 + index)
            for turn in range(10):
                sent = fill(client.memory, extent, index + 7 * turn)
                assert await client.put(extent.offset, extent) == [Status.OK]
                client.memory.view(extent.offset, extent.length)[:] = bytes(extent.length)
                assert await client.get(extent.offset, extent) == [Status.OK]
                assert bytes(client.memory.view(extent.offset, extent.length)) == sent

        async with anyio.create_task_group() as tasks:
            for index in range(10):
                tasks.start_soon(short, index)
            for _ in range(3):
                assert await client.put(0, long) == [Status.OK]
                assert await client.get(0, long) == [Status.OK]
        assert bytes(client.memory.view(0, long.length)) == data == bytes(server.arena.view(0, long.length))


async def test_a_client_opens_data_connections_with_its_first_region_only() -> None:
    async with serving(FACTORY) as server, connected(FACTORY, server.address, region_bytes=0) as client:
        assert client.connection.num_data_connections == 0  # type: ignore[attr-defined]
        for region in (1, 2):
            await client.connection.register(Region(region, MemoryKind.HOST, 4096, client.memory), soon())
            assert client.connection.num_data_connections == 5  # type: ignore[attr-defined]
        (peer,) = server.handler.peers.values()
        assert peer.bulk.num_connections == 5, "four and the eager one"  # type: ignore[attr-defined]
        assert server.handler.counts["opened"] == 1
        assert server.handler.counts["departed"] == 5, "a data connection is no session and holds no handshake's place"


async def test_within_a_host_little_waits_in_a_send_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel allows it; with less than that both ends would wait for each other's timers."""

    async def send_buffers() -> set[int]:
        async with serving(FACTORY) as server, connected(FACTORY, server.address) as client:
            (peer,) = server.handler.peers.values()
            ends = [connection._sock for connection in peer.bulk._connections]  # type: ignore[attr-defined]
            ends += [link._sock for link in client.connection._links._links]  # type: ignore[attr-defined]
            return {sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for sock in ends}

    monkeypatch.setattr(tcp_sockets, "_send_buffer_is_to_be_had", lambda: False)
    left_alone = await send_buffers()
    monkeypatch.setattr(tcp_sockets, "_send_buffer_is_to_be_had", lambda: True)
    assert await send_buffers() != left_alone
    assert tcp_sockets.SAME_HOST_SEND_BYTES >= LOW_WATER_BYTES, "twice as much, with room for what the kernel adds"


def test_a_smaller_send_buffer_than_was_asked_for_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_sockets, "SAME_HOST_SEND_BYTES", 1 << 30)
    assert not tcp_sockets._send_buffer_is_to_be_had.__wrapped__()
    monkeypatch.setattr(tcp_sockets, "SAME_HOST_SEND_BYTES", 64 << 10)
    assert tcp_sockets._send_buffer_is_to_be_had.__wrapped__()


async def test_between_hosts_the_send_buffer_is_left_to_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as near:
        near.bind(("127.0.0.2", 0))
        near.connect(listener.getsockname())
        before = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tcp_sockets.tune_data(near)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


async def test_sockets_notice_a_peer_whose_host_is_gone() -> None:
    """A half-open connection ends by itself. What ends it is the kernel; this is what it is told."""
    async with serving(FACTORY) as server, connected(FACTORY, server.address) as client:
        (peer,) = server.handler.peers.values()
        ends = [connection._sock for connection in peer.bulk._connections]  # type: ignore[attr-defined]
        ends += [link._sock for link in client.connection._links._links]  # type: ignore[attr-defined]
        ends.append(client.connection._channel._stream._sock)  # type: ignore[attr-defined]
        assert len(ends) == 11
        eager = client.connection._links.eager._sock  # type: ignore[attr-defined]
        for sock in ends:
            # Nobody takes from the eager one while its put waits for a turn.
            timeout_ms = 0 if sock is eager else tcp_sockets.USER_TIMEOUT_MS
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == timeout_ms
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == tcp_sockets.KEEPALIVE_IDLE_S
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


# -- attaching


async def _attach_by_hand(server: Running, session_id: bytes, credentials: Credentials) -> object:
    async with raw_stream(FACTORY, server.address) as stream:
        session = Session(Role.CLIENT, os.urandom(32), credentials=credentials, kind=PeerKind.DATA)
        await shake_hands(stream, session)
        session.send_request(Attach.TYPE, Attach(SessionId(session_id)).pack())
        await send_all(stream, session.data_to_send())
        (event,) = await replies(stream, session, 1)
        assert await until_closed(stream) == b""
        return event


async def test_only_a_live_session_of_the_same_key_can_be_attached_to() -> None:
    handler = ScriptedHandler(keys={"default": KEY, "other": bytes(32)})
    async with serving(FACTORY, handler=handler) as server, connected(FACTORY, server.address) as client:
        own = client.connection.established.session
        for session_id, credentials in [
            (bytes(16), Credentials(KEY)),
            (os.urandom(16), Credentials(KEY)),
            (own, Credentials(bytes(32), "other")),
        ]:
            event = await _attach_by_hand(server, session_id, credentials)
            assert "no such session of this key" in str(event)
        assert handler.counts["refused_attach"] == 3
        await client.connection.fence(soon())
        await wait_until(lambda: not handler.peers, "the session is gone")
        assert "no such session" in str(await _attach_by_hand(server, own, Credentials(KEY)))
        await until_departed(server)


async def test_a_session_has_no_more_data_connections_than_the_limit() -> None:
    async with serving(FACTORY, max_connections=2) as server:
        async with hand_made_client(server.address, num_connections=2) as client:
            with pytest.raises(ConnectError, match="at most 2 data connections"):
                await client.attach()
        with pytest.raises(ConnectError, match="at most 2 data connections"):
            async with connected(FACTORY, server.address):
                pass
        await until_departed(server)


@pytest.mark.parametrize("say", ["nothing", "ping", "twice"])
async def test_a_data_connection_that_does_not_attach_is_cut(say: str) -> None:
    """An authenticated stranger to every session costs what one that is not authenticated does."""
    async with serving(FACTORY, handshake_timeout_s=0.2) as server, raw_stream(FACTORY, server.address) as stream:
        session = Session(Role.CLIENT, os.urandom(32), credentials=Credentials(KEY), kind=PeerKind.DATA)
        await shake_hands(stream, session)
        for _ in range({"nothing": 0, "ping": 1, "twice": 2}[say]):
            session.send_request(Ping.TYPE if say == "ping" else Attach.TYPE, b"" if say == "ping" else bytes(16))
        await send_all(stream, session.data_to_send())
        await until_closed(stream)
        await until_departed(server)
        event = {"nothing": "handshake_timeout", "ping": "cut_attach", "twice": "refused_attach"}[say]
        assert server.handler.counts[event] == 1
        assert server.handler.counts["opened"] == 0


async def test_bytes_that_do_not_wait_for_the_attachment_are_refused() -> None:
    async with serving(FACTORY) as server, connected(FACTORY, server.address) as client:
        async with raw_stream(FACTORY, server.address) as stream:
            session = Session(Role.CLIENT, os.urandom(32), credentials=Credentials(KEY), kind=PeerKind.DATA)
            await shake_hands(stream, session)
            session.send_request(Attach.TYPE, Attach(client.connection.established.session).pack())
            await send_all(stream, session.data_to_send() + b"x")
            await until_closed(stream)
        await wait_until(lambda: server.handler.counts["cut_handover"] == 1, "it is cut")
        await client.connection.request(Ping(), soon())


async def test_a_server_that_takes_data_connections_and_says_nothing_fails_the_registration() -> None:
    """P085: by its deadline, with a reason."""
    async with serving(FACTORY) as server:
        listener, address = FACTORY.raw_listener()
        connection = await FACTORY.client().connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        connection._address = address
        with listener, HostMemory.create("staging", 4096) as memory:
            with pytest.raises(ConnectError, match="did not answer"):
                await connection.register(Region(1, MemoryKind.HOST, 4096, memory), soon(0.1))
            assert not connection.alive, "half a session is none"
            with pytest.raises(ConnectionLost):
                await connection.register(Region(1, MemoryKind.HOST, 4096, memory), soon(0.1))
            await connection.aclose()
        await until_departed(server)


async def test_data_connections_never_go_to_another_server() -> None:
    """Nor to the same one after it was started anew: its sessions are others."""
    async with serving(FACTORY) as server, serving(FACTORY, handler=ScriptedHandler(boot_id=b"n" * 16)) as other:
        connection = await FACTORY.client().connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        connection._address = other.address
        with HostMemory.create("staging", 4096) as memory, pytest.raises(ConnectError, match="another server"):
            await connection.register(Region(1, MemoryKind.HOST, 4096, memory), soon())
        await connection.aclose()


async def test_a_client_that_goes_in_order_is_counted_as_no_failure() -> None:
    async with serving(FACTORY) as server:
        for _ in range(20):
            async with connected(FACTORY, server.address) as client:
                assert await client.put(0, Extent(1, 0, 1000)) == [Status.OK]
        await until_departed(server)
        assert not [event for event in server.handler.counts if event.startswith("cut_")]


# -- clients that misbehave or die on a data connection


async def _answer_wrongly(client: HandMadeClient, how: str) -> None:
    (peer,) = client.data
    if how == "unasked":
        await peer.send(b"x")
        return
    kind, spans = await peer.command()
    assert (kind, spans) == (Kind.READ, [Extent(1, 0, 1000)])
    answer = peer.sealer.pack(Kind.SENT)
    if how == "garbage":
        answer = os.urandom(len(answer))
    elif how == "kind":
        client.data[0].sealer._sequence -= 1
        answer = peer.sealer.pack(Kind.WRITTEN)
    elif how == "mac":
        answer = answer[:-1] + bytes([answer[-1] ^ 1])
    elif how == "sequence":
        answer = peer.sealer.pack(Kind.SENT)
    elif how == "spans":
        client.data[0].sealer._sequence -= 1
        answer = peer.sealer.pack(Kind.SENT, spans * 2)
    await peer.send(answer + bytes(1000))


@pytest.mark.parametrize(
    ("how", "event"),
    [
        ("garbage", "magic"),
        ("kind", "type"),
        ("mac", "mac"),
        ("sequence", "sequence"),
        ("spans", "length"),
        ("unasked", "unasked"),
    ],
)
async def test_a_bad_frame_on_a_data_connection_cuts_its_session_and_no_other(how: str, event: str) -> None:
    """P091, P092: counted by reason; nothing of it is taken for a value."""
    async with serving(FACTORY) as server, connected(FACTORY, server.address) as bystander:
        async with hand_made_client(server.address) as client:
            async with anyio.create_task_group() as tasks:

                async def put() -> None:
                    with pytest.raises(ConnectionLost):
                        await client.put(Extent(1, 0, 1000))

                if how != "unasked":
                    tasks.start_soon(put)
                await _answer_wrongly(client, how)
            await wait_until(lambda: client.ended, "the session is cut")
            assert await client.data[0].closed()
        assert server.handler.counts[f"cut_data_{event}"] == 1
        assert await bystander.put(0, Extent(1, 0, 1000)) == [Status.OK]
        assert server.handler.counts["internal_error"] == 0


STAGES = ["idle", "read not answered", "in the answer's frame", "in the bytes", "write not taken", "write not answered"]


async def _die_at(client: HandMadeClient, stage: str, reset: bool) -> None:
    (peer,) = client.data
    if stage != "idle":
        kind, spans = await peer.command()
        if kind is Kind.READ and stage != "read not answered":
            frame = peer.sealer.pack(Kind.SENT)
            await peer.send(frame[:20] if stage == "in the answer's frame" else frame + bytes(100_000))
        elif stage == "write not answered":
            await peer.receive(sum(span.length for span in spans))
    peer.die(reset=reset)


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_dies_at_any_stage_ends_its_session_and_no_other(stage: str, reset: bool) -> None:
    async with serving(FACTORY, arena_bytes=32 * MIB) as server, connected(FACTORY, server.address) as bystander:
        async with hand_made_client(server.address) as client:
            async with anyio.create_task_group() as tasks:

                async def move() -> None:
                    (peer,) = (p for p in server.handler.peers.values() if p.bulk.num_connections == 1)  # type: ignore[attr-defined]
                    operation = peer.bulk.push if "write" in stage else peer.bulk.pull
                    statuses = await operation([Move(Extent(1, 0, 20_000_000), 0)], soon())
                    assert statuses == [Status.FAILED]

                if stage != "idle":
                    tasks.start_soon(move)
                await _die_at(client, stage, reset)
            await wait_until(lambda: client.ended, "the session is cut")
        event = "data_closed" if stage == "idle" and not reset else "cut_data_lost"
        assert server.handler.counts[event] == 1
        assert await bystander.put(0, Extent(1, 0, 1000)) == [Status.OK]
        assert server.handler.counts["internal_error"] == 0


async def test_a_client_process_that_is_killed_leaves_nothing_behind() -> None:
    script = """
import sys, anyio
from tests.support.harness import FACTORIES, connected, MIB
from memkv_vllm.types import Extent
async def main():
    async with connected(FACTORIES["tcp"], ("127.0.0.1", int(sys.argv[1]))) as client:
        print("ready", flush=True)
        while True:
            await client.put(0, Extent(1, 0, 8 * MIB))
            await client.get(0, Extent(1, 0, 8 * MIB))
anyio.run(main)
"""
    async with serving(FACTORY) as server:
        before = held()
        command = [sys.executable, "-c", script, str(server.address[1])]
        for _ in range(3):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])  # noqa: ASYNC220
            assert process.stdout is not None
            try:
                await anyio.to_thread.run_sync(process.stdout.readline)
                puts = server.handler.counts["GET"]
                await wait_until(lambda seen=puts: server.handler.counts["GET"] > seen, "it is at work")
                process.send_signal(signal.SIGKILL)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
            await until_departed(server)
        assert held().fds == before.fds


# -- fences


class Gate:
    """Holds every receive of the server's data connections back while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.shut = threading.Event()
        original = DataConnection._receive

        def receive(connection: DataConnection) -> None:
            if connection._state.value == "receiving" and not self.open.is_set():
                self.shut.set()
                if not self.open.wait(0.002):
                    return
            original(connection)

        monkeypatch.setattr(DataConnection, "_receive", receive)


@pytest.mark.parametrize("fenced", [False, True])
async def test_reused_memory_is_stored_for_an_old_put_unless_it_was_fenced(
    fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P039, of a put: with no checksum, only the fence keeps the server from taking new bytes for an old value."""
    gate = Gate(monkeypatch)
    size = 15 * MIB
    async with (
        serving(FACTORY) as server,
        connected(FACTORY, server.address, region_bytes=size) as client,
        anyio.create_task_group() as tasks,
    ):
        client.memory.array[:] = 0xAA
        outcome: list[object] = []

        async def put() -> None:
            try:
                outcome.append(await client.put(0, Extent(1, 0, size)))
            except ConnectionLost as error:
                outcome.append(error)

        tasks.start_soon(put)
        await wait_until(gate.shut.is_set, "bytes are on their way")
        if fenced:
            await client.connection.fence(soon())
        client.memory.array[:] = 0x55
        gate.open.set()
        await wait_until(lambda: outcome, "the put ends")
        if fenced:
            assert isinstance(outcome[0], ConnectionLost)
            await wait_until(lambda: not server.handler.peers, "the session is gone")
            assert Status.OK not in server.handler.statuses
        else:
            assert outcome == [[Status.OK]]
            assert {0xAA, 0x55} == set(bytes(server.arena.view(0, size)))


async def test_a_fence_ends_threads_that_wait_in_the_middle_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that is stopped, too: nothing is needed from it."""
    calls = 0
    original = DataConnection._send

    def send(connection: DataConnection) -> None:
        nonlocal calls
        calls += 1
        if calls <= 1:
            original(connection)
        # afterwards nothing is sent any more

    async with (
        serving(FACTORY) as server,
        connected(PlainFactory(1), server.address, region_bytes=15 * MIB) as client,
        anyio.create_task_group() as tasks,
    ):
        server.arena.array[:] = 0xAA
        monkeypatch.setattr(DataConnection, "_send", send)

        async def get() -> None:
            with contextlib.suppress(ConnectionLost):
                await client.get(0, Extent(1, 0, 15 * MIB))

        tasks.start_soon(get)
        await wait_until(lambda: client.memory.array[0] == 0xAA, "the first bytes are there")
        await client.connection.fence(soon())
        assert not [thread for thread in threading.enumerate() if thread.name == "memkv-data"]
        client.memory.array[:] = 0x55
        monkeypatch.setattr(DataConnection, "_send", original)
        await wait_until(lambda: not server.handler.peers, "the session is gone")
        assert (client.memory.array == 0x55).all()


async def test_a_fence_needs_nothing_from_a_server_that_is_stopped() -> None:
    with server_process("tcp") as server:
        async with connected(FACTORY, server.address) as client:
            assert await client.get(0, Extent(1, 0, 8 * MIB)) == [Status.OK]
            server.signal(signal.SIGSTOP)
            with pytest.raises(RequestTimeout):
                await client.put(0, Extent(1, 0, 8 * MIB), deadline_s=0.05)
            await client.connection.fence(soon())
            assert not [thread for thread in threading.enumerate() if thread.name == "memkv-data"]


async def test_the_arena_is_free_after_the_servers_fence_although_the_client_never_reads() -> None:
    """A push that was given up stands in socket buffers as a copy: its extent may be used anew."""
    async with serving(FACTORY, arena_bytes=32 * MIB) as server, hand_made_client(server.address) as client:
        server.arena.array[:] = 0xAA
        (peer,) = server.handler.peers.values()
        assert await peer.bulk.push([Move(Extent(1, 0, 16 * MIB), 0)], soon(0.2)) == [Status.TIMEOUT]
        # Read half of what is there, fence, let the arena have new values, and read the rest.
        kind, _ = await client.data[0].command()
        assert kind is Kind.WRITE
        assert set(await client.data[0].receive(100_000)) == {0xAA}
        await peer.bulk.fence()
        server.arena.array[:] = 0x55
        assert set(await client.data[0].receive(64 * MIB)) <= {0xAA}


async def test_moves_after_a_fence_and_after_a_deadline_answer_what_they_promise() -> None:
    """As in the contract, where every server has a plan of faults: here without one."""
    move = Move(Extent(1, 0, 1000), 0)
    async with serving(FACTORY) as server, connected(FACTORY, server.address) as client:
        (peer,) = server.handler.peers.values()
        assert await peer.bulk.pull([move, Move(Extent(2, 0, 8), 0)], soon()) == [Status.OK, Status.BAD_EXTENT]
        assert await peer.bulk.push([move], soon(-1)) == [Status.TIMEOUT]
        with pytest.raises(LocalProtocolError, match="outside the arena"):
            await peer.bulk.pull([Move(Extent(1, 0, 1000), server.arena.length - 999)], soon())
        await peer.bulk.fence()
        await peer.bulk.fence()
        for operation in (peer.bulk.pull, peer.bulk.push):
            assert await operation([move, Move(Extent(2, 0, 8), 0)], soon()) == [Status.FAILED] * 2
        assert await client.get(0, Extent(1, 0, 8)) == [Status.FAILED]


async def test_a_session_without_data_connections_moves_nothing_and_does_not_wait() -> None:
    async with serving(FACTORY) as server, hand_made_client(server.address, num_connections=0) as client:
        assert await client.put(Extent(1, 0, 8), timeout_ms=60_000) == [Status.FAILED]


# -- servers that misbehave


async def test_a_client_ends_the_connection_when_the_server_names_memory_that_it_did_not_register() -> None:
    """The server checks extents; a client never relies on that."""
    for extent in [Extent(1, 8 * MIB - 8, 16), Extent(9, 0, 16), Extent(1, (1 << 64) - 8, 16)]:
        async with serving(FACTORY) as server, connected(FACTORY, server.address) as client:
            (peer,) = server.handler.peers.values()
            bulk: Any = peer.bulk
            bulk._regions = {extent.region: 1 << 65}
            before = bytes(client.memory.view(0, 4096))
            with pytest.raises(ConnectionLost):
                await client.put(0, extent)
            await wait_until(lambda: client.ended, "the connection ends")
            assert isinstance(client.ended[0], RemoteProtocolError)
            assert client.ended[0].kind == "extent"
            assert bytes(client.memory.view(0, 4096)) == before


# -- connecting


async def test_names_and_both_families_of_addresses() -> None:
    for host in ("localhost", "127.0.0.1", "::1"):
        try:
            server = TcpServerTransport(host, 0)
            server.bind()
        except EnvironmentFault:
            if host == "::1":
                continue  # a host without IPv6
            raise
        with HostMemory.create("arena", MIB) as arena:
            async with anyio.create_task_group() as tasks:
                address = await tasks.start(server.serve, ScriptedHandler(), arena)
                async with connected(FACTORY, address) as client:
                    assert await client.put(0, Extent(1, 0, 1000)) == [Status.OK]
                tasks.cancel_scope.cancel()


async def test_why_no_connection_could_be_made_is_said() -> None:
    client = FACTORY.client()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectError, match=rf"127\.0\.0\.1:{port}.*refused"):
        await client.connect("127.0.0.1", port, Credentials(KEY), PeerKind.TOOL, soon())
    with pytest.raises(ConnectError, match=r"nowhere\.invalid"):
        await client.connect("nowhere.invalid", port, Credentials(KEY), PeerKind.TOOL, soon())
    with pytest.raises(LocalProtocolError, match="at least 1"):
        TcpClientTransport(num_connections=0)


async def test_an_address_that_is_taken_or_not_ours_is_an_error_with_the_next_step() -> None:
    async with serving(FACTORY) as server:
        with pytest.raises(EnvironmentFault, match="taken by another program"):
            TcpServerTransport(*server.address).bind()
    with pytest.raises(EnvironmentFault, match=r"network\.address"):
        TcpServerTransport("192.0.2.1", 0).bind()
    with pytest.raises(EnvironmentFault, match="cannot listen on nowhere"):
        TcpServerTransport("nowhere.invalid", 0).bind()


async def test_a_server_binds_once_and_gives_its_port_back() -> None:
    server = TcpServerTransport("127.0.0.1", 0)
    port = server.bind()
    assert port == server.bind() == server.port > 0
    server.close()
    server.close()
    again = TcpServerTransport("127.0.0.1", port)
    assert again.bind() == port
    again.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_1000_connections_leave_nothing_behind() -> None:
    """P067."""
    factory = PlainFactory(1)
    async with serving(factory, handler=ScriptedHandler(limits=Limits(*LIMITS))) as server:

        async def connections(count: int) -> None:
            for _ in range(count):
                async with connected(factory, server.address, region_bytes=4096) as client:
                    assert await client.put(0, Extent(1, 0, 100)) == [Status.OK]
            await until_departed(server)

        await connections(10)
        before = held()
        await connections(1000)
        assert held() == before


def test_the_session_hands_its_seals_over_only_when_it_is_established() -> None:
    session = Session(Role.CLIENT, bytes(32), credentials=Credentials(KEY))
    with pytest.raises(LocalProtocolError):
        session.hand_over()
    assert session.state is State.IDLE
