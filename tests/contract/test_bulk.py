"""Contract: bytes arrive, and only where they should."""

from __future__ import annotations

import anyio
import pytest

from memkv_vllm.errors import ConnectionLost, RequestTimeout, StoreError
from memkv_vllm.transports.base import Move, Region
from memkv_vllm.transports.faults import BitFlip, Delay, Drop, Fail, FaultPlan, Operation, Short
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import MIB, TransportFactory, connected, serving
from tests.support.scripted import fill, soon

pytestmark = pytest.mark.anyio

SIZES = [0, 1, 63, 4096, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 3 * MIB + 17]


@pytest.mark.parametrize("length", SIZES)
async def test_round_trip_of_one_value(factory: TransportFactory, length: int) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        data = fill(client.memory, Extent(1, 5, length), 3)
        assert await client.put(77, Extent(1, 5, length)) == [Status.OK]
        assert bytes(server.arena.view(77, length)) == data
        assert bytes(server.arena.view(77 + length, 64)) == bytes(64)
        target = Extent(1, 4 * MIB + 1, length)
        assert await client.get(77, target) == [Status.OK]
        assert bytes(client.memory.view(target.offset, length)) == data
        assert bytes(client.memory.view(target.offset + length, 64)) == bytes(64)


@pytest.mark.parametrize(("num_values", "length"), [(1, 70_000), (2, 1), (64, 4097), (256, 300), (5, MIB + 3)])
async def test_round_trip_of_a_batch(factory: TransportFactory, num_values: int, length: int) -> None:
    async with serving(factory) as server, connected(factory, server.address, region_bytes=16 * MIB) as client:
        sources = [Extent(1, i * length, length) for i in range(num_values)]
        sent = [fill(client.memory, extent, 7 * i) for i, extent in enumerate(sources)]
        assert await client.put(0, *sources) == [Status.OK] * num_values
        assert bytes(server.arena.view(0, num_values * length)) == b"".join(sent)
        targets = [Extent(1, 8 * MIB + i * length, length) for i in reversed(range(num_values))]
        assert await client.get(0, *targets) == [Status.OK] * num_values
        assert [bytes(client.memory.view(extent.offset, length)) for extent in targets] == sent


async def test_bad_extents_have_a_status_each_and_move_nothing(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        size, top = client.memory.length, (1 << 64) - 1
        fill(client.memory, Extent(1, 0, size), 1)
        bad = [
            Extent(2, 0, 16),
            Extent(1, size, 1),
            Extent(1, size - 15, 16),
            Extent(1, top, 16),
            Extent(1, 16, top),
            Extent(1, top - 15, 16),
        ]
        for extent in bad:
            assert await client.put(0, extent) == [Status.BAD_EXTENT], extent
            assert await client.get(0, extent) == [Status.BAD_EXTENT], extent
        assert not server.arena.array.any()
        mixed = [Extent(1, 0, 16), Extent(9, 0, 16), Extent(1, size - 16, 16)]
        assert await client.put(0, *mixed) == [Status.OK, Status.BAD_EXTENT, Status.OK]
        assert not server.arena.array[16:32].any()


async def test_one_session_cannot_name_the_regions_of_another(factory: TransportFactory) -> None:
    async with (
        serving(factory) as server,
        connected(factory, server.address) as first,
        connected(factory, server.address, region_bytes=0) as second,
    ):
        fill(first.memory, Extent(1, 0, 64), 1)
        assert await second.put(0, Extent(1, 0, 64)) == [Status.BAD_EXTENT]
        assert await first.put(0, Extent(1, 0, 64)) == [Status.OK]


async def test_many_requests_at_once_keep_their_bytes_apart(factory: TransportFactory) -> None:
    length, num_tasks = 200_000, 20
    async with serving(factory) as server, connected(factory, server.address) as client:

        async def put_and_get(index: int) -> None:
            extent = Extent(1, index * length, length)
            for turn in range(5):
                data = fill(client.memory, extent, index + 13 * turn)
                assert await client.put(extent.offset, extent) == [Status.OK]
                client.memory.view(extent.offset, length)[:] = bytes(length)
                assert await client.get(extent.offset, extent) == [Status.OK]
                assert bytes(client.memory.view(extent.offset, length)) == data

        async with anyio.create_task_group() as tasks:
            for index in range(num_tasks):
                tasks.start_soon(put_and_get, index)
        assert server.handler.max_running > 1


async def test_several_clients_at_once(factory: TransportFactory) -> None:
    async with serving(factory) as server, anyio.create_task_group() as tasks:

        async def one_client(index: int) -> None:
            async with connected(factory, server.address, region_bytes=2 * MIB) as client:
                extent = Extent(1, 0, 2 * MIB)
                data = fill(client.memory, extent, index)
                assert await client.put(index * 2 * MIB, extent) == [Status.OK]
                client.memory.array[:] = 0
                assert await client.get(index * 2 * MIB, extent) == [Status.OK]
                assert bytes(client.memory.view(0, 2 * MIB)) == data

        for index in range(6):
            tasks.start_soon(one_client, index)


async def test_a_second_region_and_a_region_twice(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        with HostMemory.create("second", MIB) as memory:
            await client.connection.register(Region(2, MemoryKind.HOST, MIB, memory), soon())
            data = fill(memory, Extent(2, 0, 100), 9)
            assert await client.put(0, Extent(2, 0, 100)) == [Status.OK]
            assert bytes(server.arena.view(0, 100)) == data
            with pytest.raises(ConnectionLost):
                await client.connection.register(Region(2, MemoryKind.HOST, MIB, memory), soon())
        assert server.handler.counts["cut_region"] == 1


async def test_gpu_regions_are_refused_where_they_are_not_a_capability(factory: TransportFactory) -> None:
    if factory.client().capabilities.gpu_memory:
        pytest.skip("this transport registers GPU memory")
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        with pytest.raises(StoreError, match="host memory only"):
            await client.connection.register(Region(3, MemoryKind.GPU, MIB, address=4096), soon())
        assert client.connection.alive


async def test_moves_after_the_fence_answer_failed(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        (peer,) = server.handler.peers.values()
        await peer.bulk.fence()
        await peer.bulk.fence()
        assert await peer.bulk.pull([Move(Extent(1, 0, 8), 0)], soon()) == [Status.FAILED]
        assert await client.get(0, Extent(1, 0, 8)) == [Status.FAILED]


async def test_a_deadline_that_has_passed_moves_nothing(factory: TransportFactory) -> None:
    async with serving(factory) as server, connected(factory, server.address) as client:
        fill(client.memory, Extent(1, 0, 2 * MIB), 1)
        (peer,) = server.handler.peers.values()
        assert await peer.bulk.pull([Move(Extent(1, 0, 2 * MIB), 0)], soon(-1)) == [Status.TIMEOUT]
        assert not server.arena.array[: 2 * MIB].any()


@pytest.mark.parametrize("length", [1000, 3 * MIB])
async def test_injected_faults_on_moves(factory: TransportFactory, length: int) -> None:
    plan = FaultPlan()
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        extents = [Extent(1, i * length, length) for i in range(2)]
        sent = [fill(client.memory, extent, 1 + i) for i, extent in enumerate(extents)]

        def arrived() -> list[bytes]:
            return [bytes(server.arena.view(extent.offset, length)) for extent in extents]

        rules = [plan.add(Operation.PULL, Fail(Status.FAILED), nth=2)]
        assert await client.put(0, *extents) == [Status.OK, Status.FAILED]
        assert arrived() == [sent[0], bytes(length)]
        plan.clear()
        rules.append(plan.add(Operation.PULL, Short(10), nth=2))
        assert await client.put(0, *extents) == [Status.OK, Status.OK]
        assert arrived() == [sent[0], sent[1][:10] + bytes(length - 10)]
        plan.clear()
        rules.append(plan.add(Operation.PULL, BitFlip(offset=3, bit=6), nth=1))
        assert await client.put(0, *extents) == [Status.OK, Status.OK]
        assert arrived() == [sent[0][:3] + bytes([sent[0][3] ^ 64]) + sent[0][4:], sent[1]]
        plan.clear()
        rules.append(plan.add(Operation.PULL, Drop(), nth=1))
        assert await client.put(0, *extents, timeout_ms=50) == [Status.TIMEOUT, Status.OK]
        plan.clear()
        rules.append(plan.add(Operation.PULL, Delay(30), times=1))
        assert await client.put(0, *extents, timeout_ms=50) == [Status.TIMEOUT, Status.TIMEOUT]
        plan.clear()
        assert [rule.fired for rule in rules] == [1] * 5
        assert await client.put(0, *extents) == [Status.OK, Status.OK]
        assert arrived() == sent


async def test_a_slow_push_ends_in_a_request_timeout_at_the_client(factory: TransportFactory) -> None:
    plan = FaultPlan()
    plan.add(Operation.PUSH, Delay(30))
    async with serving(factory, faults=plan) as server, connected(factory, server.address) as client:
        with pytest.raises(RequestTimeout):
            await client.get(0, Extent(1, 0, 100), timeout_ms=60_000, deadline_s=0.05)
