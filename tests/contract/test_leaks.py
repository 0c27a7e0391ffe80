"""Contract: whatever ends a connection, nothing of it stays: descriptors, threads, mappings, sessions."""

from __future__ import annotations

import random

import anyio
import pytest
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.faults import Delay, Die, FaultPlan, Operation
from memkv_vllm.types import Extent, Status
from tests.support.harness import MIB, Client, Running, TransportFactory, connected, server_process, serving, wait_until
from tests.support.resources import Held, held
from tests.support.scripted import KEY, soon

pytestmark = pytest.mark.anyio


async def settled(server: Running) -> None:
    """Every connection that was let in has departed."""
    counts = server.handler.counts
    await wait_until(lambda: counts["departed"] == counts["admitted"], "all have departed")
    assert counts["opened"] == counts["closed"]
    assert not server.handler.peers
    assert server.handler.running == 0
    assert counts["internal_error"] == 0


async def use(client: Client) -> None:
    """Move something both ways, in the copy threads too."""
    extent = Extent(1, 0, 256 * 1024)
    assert await client.put(0, extent) == [Status.OK]
    assert await client.get(0, extent) == [Status.OK]


@pytest.mark.slow
@pytest.mark.parametrize("fenced", [False, True])
async def test_200_connections_leave_nothing_behind(factory: TransportFactory, fenced: bool) -> None:
    async with serving(factory) as server:

        async def connections(count: int) -> None:
            for _ in range(count):
                async with connected(factory, server.address, region_bytes=MIB) as client:
                    await use(client)
                    if fenced:
                        await client.connection.fence(soon())
            await settled(server)

        await connections(8)
        before = held()
        await connections(200)
        assert held() == before


async def test_a_server_that_stops_leaves_nothing_behind(factory: TransportFactory) -> None:
    before: list[Held] = []
    for _ in range(3):
        async with serving(factory) as server, connected(factory, server.address, region_bytes=MIB) as client:
            await use(client)
            if not before:
                before.append(held())
        await checkpoint()
    after = held()
    assert after.mappings == 0
    assert after.fds < before[0].fds
    assert after.threads < before[0].threads


async def test_each_region_is_unmapped_exactly_once(factory: TransportFactory) -> None:
    async with serving(factory) as server:
        async with connected(factory, server.address, region_bytes=MIB) as client:
            await use(client)
            left = held().mappings - factory.unmaps_at_fence
            (peer,) = server.handler.peers.values()
            await client.connection.fence(soon())
            assert held().mappings == left
            await peer.bulk.fence()
            await client.connection.fence(soon())
            assert held().mappings == left
            assert bytes(client.memory.view(0, 8)) == bytes(8)
        await settled(server)


@pytest.mark.slow
async def test_cancelling_at_random_points_leaves_nothing_behind(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.PULL, Delay(0.002), every=3)
    plan.add(Operation.REPLY, Delay(0.002), every=4)
    rng = random.Random(20)
    async with serving(factory, faults=plan) as server:

        async def one(limit_s: float) -> None:
            with anyio.move_on_after(limit_s):
                async with connected(factory, server.address, region_bytes=MIB) as client:
                    while True:
                        await use(client)

        await one(0.1)
        await settled(server)
        before = held()
        for _ in range(15):
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(one, rng.random() * 0.05)
        await settled(server)
        await wait_until(lambda: held().mappings == before.mappings, "all regions are unmapped")
        assert held().fds == before.fds


@pytest.mark.slow
async def test_cancelled_requests_leave_a_connection_that_can_be_used_and_fenced(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.PUSH, Delay(0.003), every=2)
    rng = random.Random(21)
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:

        async def one(index: int) -> None:
            for _ in range(20):
                with anyio.move_on_after(rng.random() * 0.02):
                    await client.get(0, Extent(1, index * 300_000, 300_000))

        async with anyio.create_task_group() as tasks:
            for index in range(20):
                tasks.start_soon(one, index)
        assert await client.get(0, Extent(1, 0, 100)) == [Status.OK]
        statistics = client.connection.statistics  # type: ignore[attr-defined]
        await wait_until(lambda: statistics().pending == 0, "every late reply has come")
        await client.connection.fence(soon())
        await settled(server)


@pytest.mark.fault
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("type", [MessageType.REGISTER, MessageType.PUT, MessageType.GET])
async def test_a_cut_at_any_step_is_an_error_and_leaves_nothing_behind(
    factory: TransportFactory, operation: Operation, type: MessageType
) -> None:
    plan = FaultPlan()
    async with serving(factory, faults=plan) as server:
        async with connected(factory, server.address) as client:
            await use(client)
        await settled(server)
        before = held()
        kind = type if operation in (Operation.REQUEST, Operation.REPLY) else None
        rule = plan.add(operation, Die(), type=kind)
        with pytest.raises(MemkvError):
            async with connected(factory, server.address) as client:
                await use(client)
        assert rule.fired >= 1
        await settled(server)
        assert held() == before


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "type"),
    [
        ("connect", None),
        ("request", "REGISTER"),
        ("reply", "REGISTER"),
        ("pull", None),
        ("reply", "PUT"),
        ("push", None),
    ],
)
async def test_a_server_that_dies_at_any_step_is_an_error_and_fenced(
    factory: TransportFactory, operation: str, type: str | None
) -> None:
    with server_process(factory.name, die=operation, type=type) as server:
        if operation == "connect":
            with pytest.raises(MemkvError):
                await factory.client().connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
            return
        with pytest.raises(MemkvError):
            async with connected(factory, server.address) as client:
                try:
                    await use(client)
                finally:
                    await client.connection.fence(soon())
        assert server.process.wait() == 70
