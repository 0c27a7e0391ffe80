"""What is loopback's own: this machine only, memfds and their limits, and what counts as proof in a fence."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import anyio
import pytest
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import (
    ConnectError,
    ConnectionLost,
    EnvironmentFault,
    FenceTimeout,
    LocalProtocolError,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Ping, Register
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.faults import FaultPlan, LateWrite, NoReply, Operation, Throttle
from memkv_vllm.transports.loopback import LoopbackClientTransport, LoopbackConnection, LoopbackServerTransport
from memkv_vllm.transports.loopback.client import ProcessWatch
from memkv_vllm.transports.loopback.copying import INLINE_BYTES, PIECE_BYTES
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.transports.streams import send_all
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import FACTORIES, MIB, connected, server_process, serving, wait_until
from tests.support.peers import client_session, raw_stream, replies, shake_hands, until_closed
from tests.support.resources import num_fds
from tests.support.scripted import KEY, ScriptedHandler, fill, soon

pytestmark = pytest.mark.anyio

LOOPBACK = FACTORIES["loopback"]


def test_the_registry_knows_it() -> None:
    transport = client_transport("loopback")
    assert isinstance(transport, LoopbackClientTransport)
    assert transport.capabilities.same_host
    assert not transport.capabilities.gpu_memory


# -- addresses


@pytest.mark.parametrize("host", ["10.0.0.1", "store-3", "0.0.0.0", "::", "fe80::1", "", "127.0.0.1.example"])
async def test_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConnectError, match="this machine only"):
        await LoopbackClientTransport().connect(host, 1, Credentials(KEY), PeerKind.TOOL, soon())


async def test_the_names_of_this_machine_reach_it() -> None:
    async with serving(LOOPBACK) as server:
        for host in ("127.0.0.1", "127.3.2.1", "localhost", "::1"):
            async with connected(LOOPBACK, (host, server.address[1]), region_bytes=0) as client:
                await client.connection.request(Ping(), soon())


async def test_a_port_has_one_server_and_is_free_after_it() -> None:
    async with serving(LOOPBACK) as server:
        other = LoopbackServerTransport(server.address[1])
        with HostMemory.create("other", 4096) as memory, pytest.raises(EnvironmentFault, match="taken"):
            await other.serve(ScriptedHandler(), memory)
    with HostMemory.create("other", 4096) as memory:
        async with anyio.create_task_group() as tasks:
            await tasks.start(other.serve, ScriptedHandler(), memory)
            tasks.cancel_scope.cancel()


async def test_a_killed_servers_port_is_free_at_once() -> None:
    with server_process("loopback") as server:
        server.signal(signal.SIGKILL)
        server.process.wait()
        again = LoopbackServerTransport(server.address[1])
        with HostMemory.create("other", 4096) as memory:
            async with anyio.create_task_group() as tasks:
                await tasks.start(again.serve, ScriptedHandler(), memory)
                tasks.cancel_scope.cancel()


async def test_a_full_backlog_is_waited_for() -> None:
    listener, address = LOOPBACK.raw_listener()
    with listener:
        listener.listen(0)
        held = LOOPBACK.raw_connect(address)
        with pytest.raises(ConnectError, match="does not accept"):
            await LOOPBACK.client().connect(*address, Credentials(KEY), PeerKind.TOOL, soon(0.1))
        held.close()


# -- regions


def offered_fd(length: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("offered", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@pytest.mark.parametrize(
    ("length", "fds"),
    [
        (4096, []),
        (4096, [(4096, False)]),
        (4096, [(8192, True)]),
        (1 << 63, [(4096, True)]),
        (0, [(0, True)]),
        (4096, [(4096, True)] * 30),
    ],
)
async def test_a_region_that_is_not_as_it_should_be_cuts_the_session(length: int, fds: list[tuple[int, bool]]) -> None:
    before = num_fds()
    async with serving(LOOPBACK, max_region_bytes=1 << 64) as server:
        async with raw_stream(LOOPBACK, server.address) as stream:
            session = client_session()
            await shake_hands(stream, session)
            session.send_request(MessageType.REGISTER, Register(1, MemoryKind.HOST, length).pack())
            offered = [offered_fd(size, sealed=sealed) for size, sealed in fds]
            frame = session.data_to_send()
            # One descriptor per message: beside the first bytes of the frame, the others beside single bytes.
            for fd in offered[1:]:
                stream.send_nowait(memoryview(frame[:1]), (fd,))
                frame = frame[1:]
            stream.send_nowait(memoryview(frame), offered[:1])
            for fd in offered:
                os.close(fd)
            await until_closed(stream)
        await wait_until(lambda: server.handler.counts["departed"] == 1, "it has departed")
        assert server.handler.counts["cut_region"] + server.handler.counts["cut_fds"] == 1
    assert num_fds() == before


async def test_limits_on_regions_are_refusals_not_cuts() -> None:
    async with serving(LOOPBACK, max_regions=2, max_region_bytes=3 * MIB) as server:
        async with connected(LOOPBACK, server.address, region_bytes=MIB) as client:
            with HostMemory.create("more", MIB) as memory, HostMemory.create("large", 3 * MIB) as large:
                fds = num_fds()
                with pytest.raises(StoreError, match="a session may register"):
                    await client.connection.register(Region(2, MemoryKind.HOST, large.length, large), soon())
                assert num_fds() == fds
                await client.connection.register(Region(2, MemoryKind.HOST, MIB, memory), soon())
                with pytest.raises(StoreError, match="at most 2 regions"):
                    await client.connection.register(Region(3, MemoryKind.HOST, MIB, memory), soon())
            await client.connection.request(Ping(), soon())


async def test_a_gpu_region_is_refused_by_the_server_too() -> None:
    async with serving(LOOPBACK) as server, raw_stream(LOOPBACK, server.address) as stream:
        session = client_session()
        await shake_hands(stream, session)
        session.send_request(MessageType.REGISTER, Register(1, MemoryKind.GPU, 4096).pack())
        await send_all(stream, session.data_to_send())
        (event,) = await replies(stream, session, 1)
        assert "host memory only" in str(event)


async def test_a_region_without_its_memory_is_our_own_fault() -> None:
    async with serving(LOOPBACK) as server, connected(LOOPBACK, server.address) as client:
        with pytest.raises(LocalProtocolError):
            await client.connection.register(Region(2, MemoryKind.HOST, 4096), soon())
        with pytest.raises(LocalProtocolError):
            await client.connection.register(Region(2, MemoryKind.HOST, 4096, client.memory), soon())


async def test_an_unauthenticated_peer_leaves_no_descriptors_here() -> None:
    async with serving(LOOPBACK) as server:
        before = num_fds()
        for _ in range(10):
            async with raw_stream(LOOPBACK, server.address) as stream:
                stream.send_nowait(memoryview(b"mKV1"), (0, 1, 2))
                await checkpoint()
        await wait_until(lambda: server.handler.counts["departed"] == 10, "all have departed")
        assert num_fds() == before


# -- copies


async def test_a_copy_stops_at_its_deadline_between_pieces() -> None:
    plan = FaultPlan()
    plan.add(Operation.PULL, Throttle(bytes_per_s=MIB / 100))
    async with serving(LOOPBACK, faults=plan) as server, connected(LOOPBACK, server.address) as client:
        client.memory.array[:] = 1
        assert await client.put(0, Extent(1, 0, 2 * MIB), timeout_ms=50) == [Status.TIMEOUT]
        assert not server.arena.array.any()


async def test_throttled_moves_share_one_rate() -> None:
    plan = FaultPlan()
    plan.add(Operation.PULL, Throttle(bytes_per_s=40 * MIB))
    async with serving(LOOPBACK, faults=plan) as server, connected(LOOPBACK, server.address) as client:
        started = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(client.put, index * MIB, Extent(1, index * MIB, MIB))
        assert anyio.current_time() - started >= 0.09


async def test_one_copy_thread_serves_many() -> None:
    async with serving(LOOPBACK, copy_threads=1) as server:
        async with connected(LOOPBACK, server.address) as first, connected(LOOPBACK, server.address) as second:
            done: list[list[Status]] = []

            async def put(client: object, offset: int) -> None:
                done.append(await client.put(offset, Extent(1, 0, 4 * PIECE_BYTES + 1)))  # type: ignore[attr-defined]

            async with anyio.create_task_group() as tasks:
                for index, client in enumerate((first, second, first)):
                    tasks.start_soon(put, client, index * 5 * PIECE_BYTES)
            assert done == [[Status.OK]] * 3


async def test_a_fence_does_not_wait_for_copies_that_have_not_started() -> None:
    plan = FaultPlan()
    late = plan.add(Operation.PUSH, LateWrite(60))
    async with serving(LOOPBACK, faults=plan) as server, connected(LOOPBACK, server.address) as client:
        extents = [Extent(1, i * 1000, 1000) for i in range(100)]
        assert set(await client.get(0, *extents)) == {Status.TIMEOUT}
        assert late.fired == 100
        with anyio.fail_after(10):
            await client.connection.fence(soon())


@pytest.mark.parametrize("length", [INLINE_BYTES, INLINE_BYTES + 1])
async def test_a_region_of_the_arena_that_is_none_is_a_fault_of_the_server(length: int) -> None:
    async with serving(LOOPBACK, arena_bytes=MIB) as server, connected(LOOPBACK, server.address) as client:
        assert await client.put(MIB - length, Extent(1, 0, length)) == [Status.OK]
        # Not an answer: it would say that nothing of the request can move any more. The session ends and is fenced.
        with pytest.raises(ConnectionLost):
            await client.put(MIB - length + 1, Extent(1, 0, length))
        assert server.handler.counts["internal_error"] == 1
        await client.connection.fence(soon())


# -- what proves that a server has let go


async def late_write_pending(client: object) -> None:
    assert await client.get(0, Extent(1, 0, 5000)) == [Status.TIMEOUT]  # type: ignore[attr-defined]


async def test_another_process_on_the_port_proves_nothing() -> None:
    plan = FaultPlan()
    plan.add(Operation.PUSH, LateWrite(60))
    newcomer = ScriptedHandler(boot_id=b"n" * 16)
    async with serving(LOOPBACK, faults=plan) as server, serving(LOOPBACK, handler=newcomer) as other:
        async with connected(LOOPBACK, server.address) as client:
            connection = client.connection
            assert isinstance(connection, LoopbackConnection)
            await late_write_pending(client)
            connection._address = other.address
            with pytest.raises(FenceTimeout):
                await connection.fence(soon(0.1))
            connection._watch, watch = None, connection._watch
            with pytest.raises(FenceTimeout):
                await connection.fence(soon(0.1))
            assert newcomer.counts["opened"] == 2
            connection._watch = watch
            connection._address = server.address
            await connection.fence(soon())


async def test_another_process_on_the_port_and_the_old_one_dead_is_proof() -> None:
    newcomer = ScriptedHandler(boot_id=b"n" * 16)
    with server_process("loopback", late_push_s=60) as server:
        async with serving(LOOPBACK, handler=newcomer) as other, connected(LOOPBACK, server.address) as client:
            connection = client.connection
            assert isinstance(connection, LoopbackConnection)
            connection._address = other.address
            with pytest.raises(FenceTimeout):
                await connection.fence(soon(0.1))
            server.signal(signal.SIGKILL)
            await connection.fence(soon())


async def test_without_a_pidfd_only_the_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with server_process("loopback") as server:
        async with connected(LOOPBACK, server.address) as client:
            server.signal(signal.SIGKILL)
            server.process.wait()
            await wait_until(lambda: client.ended, "the connection ends")
            with pytest.raises(FenceTimeout):
                await client.connection.fence(soon(0.1))
    async with serving(LOOPBACK) as running, connected(LOOPBACK, running.address) as client:
        await client.connection.fence(soon())


async def test_a_fence_is_asked_again_until_the_server_has_room() -> None:
    async with serving(LOOPBACK) as server, connected(LOOPBACK, server.address) as client:
        server.handler.busy = True
        with pytest.raises(FenceTimeout):
            await client.connection.fence(soon(0.1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.connection.fence, soon())
            tasks.start_soon(client.connection.fence, soon())
            await anyio.sleep(0.05)
            server.handler.busy = False
        assert server.handler.counts["refused_busy"] >= 2


async def test_an_unanswered_fence_is_no_fence() -> None:
    plan = FaultPlan()
    plan.add(Operation.REPLY, NoReply(), type=MessageType.FENCE, nth=1)
    async with serving(LOOPBACK, faults=plan) as server, connected(LOOPBACK, server.address) as client:
        with pytest.raises(FenceTimeout, match="quarantine"):
            await client.connection.fence(soon(0.2))
        await client.connection.fence(soon())
        with pytest.raises(ConnectionLost):
            await client.connection.request(Ping(), soon())


def waiting_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


async def test_a_process_watch_sees_the_end_and_closes_its_descriptor() -> None:
    before = num_fds()
    with waiting_process() as process:
        watch = ProcessWatch(os.pidfd_open(process.pid))
        with anyio.move_on_after(0.05) as scope:
            await watch.died()
        assert scope.cancelled_caught
        process.kill()
        with anyio.fail_after(10):
            await watch.died()
    watch.close()
    watch.close()
    forgotten = ProcessWatch(os.pidfd_open(os.getpid()))
    del forgotten
    assert num_fds() == before


async def test_copies_run_outside_the_interpreter_lock() -> None:
    """A thread that copies leaves the loop free: many turns of the loop pass during one long copy."""
    length = 64 * MIB
    async with serving(LOOPBACK, arena_bytes=length, copy_threads=1) as server:
        async with connected(LOOPBACK, server.address, region_bytes=length) as client:
            fill(client.memory, Extent(1, 0, length), 1)
            turns, done = 0, anyio.Event()

            async def put() -> None:
                await client.put(0, Extent(1, 0, length), timeout_ms=60_000, deadline_s=60)
                done.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                await wait_until(lambda: server.arena.array[0] or done.is_set(), "it has begun")
                while not done.is_set():
                    await client.connection.request(Ping(), soon())
                    turns += 1
            assert turns >= 5
