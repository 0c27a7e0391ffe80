"""Contract: after a fence no byte of a connection's work lands in its memory; before one, it may.

Each test that proves that nothing lands has a twin that proves that without the fence it does.
"""

from __future__ import annotations

import signal

import anyio
import pytest

from memkv_vllm.errors import ConnectionLost, FenceTimeout, RequestTimeout
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.transports.faults import FaultPlan, LateWrite, NoReply, Operation
from memkv_vllm.types import Extent, Status
from tests.support.harness import MIB, Client, Running, TransportFactory, connected, server_process, serving, wait_until
from tests.support.scripted import soon

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

LATE_S = 0.25
SLOT = Extent(1, 4096, 200_000)
OLD = b"\xaa"
NEW = b"\x55"


def late_get(server: Running, answer: Status, *, reply: bool = True) -> None:
    """Make the next get's bytes land ``LATE_S`` after its answer, or with no answer at all."""
    server.arena.array[: SLOT.length] = OLD[0]
    server.faults.add(Operation.PUSH, LateWrite(LATE_S, answer))
    if not reply:
        server.faults.add(Operation.REPLY, NoReply(), type=MessageType.GET)


def reuse(client: Client) -> None:
    """Give the slot to somebody else."""
    client.memory.view(SLOT.offset, SLOT.length)[:] = NEW * SLOT.length


def landed(client: Client) -> bool:
    return bytes(client.memory.view(SLOT.offset, SLOT.length)) == OLD * SLOT.length


async def get_times_out(client: Client) -> None:
    with pytest.raises(RequestTimeout):
        await client.get(0, SLOT, deadline_s=0.05)


@pytest.mark.parametrize("how", ["timeout status", "no reply", "ok too early"])
async def test_without_a_fence_a_late_write_lands_in_reused_memory(factory: TransportFactory, how: str) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        await _late(server, client, how)
        reuse(client)
        await wait_until(lambda: landed(client), "the late write lands")


@pytest.mark.parametrize("how", ["timeout status", "no reply", "ok too early"])
async def test_after_a_fence_no_late_write_lands_in_reused_memory(factory: TransportFactory, how: str) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        await _late(server, client, how)
        await client.connection.fence(soon())
        reuse(client)
        await anyio.sleep(3 * LATE_S)
        assert bytes(client.memory.view(SLOT.offset, SLOT.length)) == NEW * SLOT.length
        assert server.handler.counts["closed"] >= 1
        assert not client.connection.alive
        with pytest.raises(ConnectionLost):
            await client.connection.request(Ping(), soon())


async def _late(server: Running, client: Client, how: str) -> None:
    if how == "no reply":
        late_get(server, Status.OK, reply=False)
        await get_times_out(client)
    else:
        status = Status.TIMEOUT if how == "timeout status" else Status.OK
        late_get(server, status)
        assert await client.get(0, SLOT) == [status]
        assert not landed(client)


async def test_closing_the_connection_alone_is_no_fence_for_the_client(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        late_get(server, Status.TIMEOUT)
        await client.get(0, SLOT)
        await client.connection.aclose()
        await client.connection.aclose()
        # The server's own end of the session fences; the client may rely on it only after its own fence.
        await client.connection.fence(soon())
        await client.connection.fence(soon())
        reuse(client)
        await anyio.sleep(2 * LATE_S)
        assert not landed(client)


@pytest.mark.parametrize("fenced", [False, True])
async def test_the_servers_fence_protects_its_arena(factory: TransportFactory, fenced: bool) -> None:
    plan = FaultPlan()
    plan.add(Operation.PULL, LateWrite(LATE_S, Status.TIMEOUT))
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        client.memory.array[:] = OLD[0]
        assert await client.put(0, SLOT) == [Status.TIMEOUT]
        (peer,) = server.handler.peers.values()
        if fenced:
            await peer.bulk.fence()
            await anyio.sleep(3 * LATE_S)
            assert not server.arena.array.any()
        else:
            await wait_until(lambda: server.arena.array[: SLOT.length].all(), "the late pull lands")


async def test_fence_during_transfers_that_hang(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.PUSH, LateWrite(60, Status.TIMEOUT))
    plan.add(Operation.REPLY, NoReply(), type=MessageType.GET)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        async with anyio.create_task_group() as tasks:

            async def get(offset: int) -> None:
                with pytest.raises(ConnectionLost):
                    await client.get(0, Extent(1, offset, 1000))

            for index in range(8):
                tasks.start_soon(get, index * 1000)
            await wait_until(lambda: server.handler.counts["GET"] == 8, "all are under way")
            await client.connection.fence(soon())
        # A fence that is local says nothing of the server, which learns of it by itself.
        await wait_until(lambda: not server.handler.peers, "the session is gone")


async def test_fence_of_a_connection_without_regions_needs_nobody(factory: TransportFactory) -> None:
    async with serving(factory) as server:
        async with connected(factory, server.address, region_bytes=0) as client:
            assert server.handler.counts["opened"] == 1
            await client.connection.fence(soon(1))
            await client.connection.fence(soon(0))
        await wait_until(lambda: server.handler.counts["departed"] == server.handler.counts["admitted"], "all gone")


async def test_a_stopped_server_is_not_fenced_and_a_killed_one_is(factory: TransportFactory) -> None:
    if not factory.fence_needs_peer:
        pytest.skip("this transport fences locally")
    with server_process(factory.name) as server:
        async with connected(factory, server.address) as client:
            server.signal(signal.SIGSTOP)
            await get_times_out(client)
            for _ in range(2):
                with pytest.raises(FenceTimeout):
                    await client.connection.fence(soon(0.2))
            server.signal(signal.SIGKILL)
            await client.connection.fence(soon())


async def test_a_stopped_server_that_goes_on_writes_late_unless_fenced(factory: TransportFactory) -> None:
    with server_process(factory.name, late_push_s=LATE_S) as server:
        async with connected(factory, server.address) as client:
            assert await client.get(0, SLOT) == [Status.OK]
            server.signal(signal.SIGSTOP)
            if factory.fence_needs_peer:
                with pytest.raises(FenceTimeout):
                    await client.connection.fence(soon(0.1))
            server.signal(signal.SIGCONT)
            await client.connection.fence(soon())
            reuse(client)
            await anyio.sleep(2 * LATE_S)
            assert bytes(client.memory.view(SLOT.offset, SLOT.length)) == NEW * SLOT.length


async def test_killing_the_server_fails_requests_and_fences(factory: TransportFactory) -> None:
    with server_process(factory.name, die="request", type="GET") as server:
        async with connected(factory, server.address, region_bytes=MIB) as client:
            with pytest.raises(ConnectionLost):
                await client.get(0, Extent(1, 0, 1000))
            await client.connection.fence(soon())
            await wait_until(lambda: client.ended, "the connection ends")
            assert isinstance(client.ended[0], ConnectionLost)
