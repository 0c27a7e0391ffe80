"""A real store over tcp: what its limits do to clients, and what dead clients do to living ones."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from memkv_vllm.config import ServerConfig, dev_server_config
from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetItem, Ping, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.base import ClientConnection, Region, ServerTransport
from memkv_vllm.transports.loopback import LoopbackClientTransport, LoopbackServerTransport
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.transports.tcp import TcpClientTransport, TcpServerTransport
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import MIB, drive, wait_until
from tests.support.scripted import KEY, fill, soon
from tests.support.store import LAYOUT, make_key
from tests.support.tcp_peer import HandMadeClient, hand_made_client

pytestmark = pytest.mark.anyio


@dataclass
class Running:
    """A store that serves on tcp, in this process."""

    server: StoreServer
    transport: TcpServerTransport

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.transport.port


def config_of(**limits: object) -> ServerConfig:
    sections = {"memory": {"max_size": 96 * MIB}, "limits": limits}
    return dev_server_config(KEY, address="127.0.0.1:0", overrides=sections)


@asynccontextmanager
async def store(**limits: object) -> AsyncIterator[Running]:
    config = config_of(**limits)
    transport = TcpServerTransport.from_config(config)
    async with StoreServer(config, [transport], populate=False, drain_timeout_s=0.1) as server:
        yield Running(server, transport)


@asynccontextmanager
async def client_of(store: Running, memory: HostMemory) -> AsyncIterator[ClientConnection]:
    transport = client_transport("tcp", num_connections=2)
    connection = await transport.connect(*store.address, Credentials(KEY), PeerKind.ENGINE, soon())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive, connection, [])
        try:
            await connection.register(Region(1, MemoryKind.HOST, memory.length, memory), soon())
            yield connection
        finally:
            await connection.aclose()
            tasks.cancel_scope.cancel()


def put(block: int, extent: Extent, checksum: int = 0, algorithm: int = 0, timeout_ms: int = 20_000) -> Put:
    return Put([PutItem(make_key(block), checksum, LAYOUT, extent)], algorithm, timeout_ms)


def get(block: int, extent: Extent, timeout_ms: int = 20_000) -> Get:
    return Get([GetItem(make_key(block), LAYOUT, extent)], timeout_ms)


async def test_values_go_round_with_checksums_at_every_length() -> None:
    async with store() as running:
        with HostMemory.create("staging", 64 * MIB) as memory:
            async with client_of(running, memory) as client:
                for number, length in enumerate([1, 4095, 65_537, 300_001, 8 * MIB + 7, 30 * MIB]):
                    extent, target = Extent(1, 5, length), Extent(1, 32 * MIB + 3, length)
                    fill(memory, extent, number)
                    checksum = digest(memory.view(5, length))
                    message = put(number, extent, checksum, ChecksumAlgorithm.XXH3_64_TREE_1M)
                    assert await client.request(message, soon()) == [Status.OK]
                    (result,) = await client.request(get(number, target), soon())
                    assert (result.status, result.checksum) == (Status.OK, checksum)
                    assert digest(memory.view(target.offset, length)) == checksum
                    wrong = put(100 + number, extent, checksum ^ 1, ChecksumAlgorithm.XXH3_64_TREE_1M)
                    assert await client.request(wrong, soon()) == [Status.BAD_CHECKSUM]


async def test_a_value_over_the_limit_is_refused_and_nothing_moves() -> None:
    """A GiB is the limit; the region is larger than that and has no pages, which is what shows that none was read."""
    size = (1 << 30) + 4096
    async with store() as running:
        with HostMemory.create("staging", size) as memory:
            async with client_of(running, memory) as client:
                assert await client.request(put(1, Extent(1, 0, (1 << 30) + 1)), soon()) == [Status.TOO_LARGE]
                assert os.fstat(memory.fd).st_blocks == 0
                assert await client.request(put(1, Extent(1, 0, 4096)), soon()) == [Status.OK]


async def test_a_missing_key_is_answered_while_nothing_else_moves() -> None:
    """M02: a miss needs no data connection, no lane and no timeout."""
    async with store(max_transfers=1, max_transfers_per_session=1) as running, frozen(running) as dead:
        with HostMemory.create("staging", MIB) as memory:
            async with client_of(running, memory) as client:
                await wait_until(lambda: _idle(running) == 0, "the only lane is taken")
                (result,) = await client.request(get(7, Extent(1, 0, 4096), timeout_ms=20_000), soon())
                assert result.status is Status.ABSENT
                await client.request(Ping(), soon())
        assert not dead.ended


def _idle(running: Running) -> int:
    return int(running.server.statistics()["bulk"]["idle"])


def _inflight(running: Running) -> int:
    return int(running.server.statistics()["server"]["inflight"])


@asynccontextmanager
async def frozen(running: Running, first: int = 1000, puts: int = 6) -> AsyncIterator[HandMadeClient]:
    """A client whose host is as good as dead: it has many puts under way and answers to none."""
    async with hand_made_client(running.address, num_connections=2) as client, anyio.create_task_group() as tasks:
        before = _inflight(running)

        async def hang(block: int) -> None:
            try:
                await client.channel.request(put(block, Extent(1, 0, 20 * 1024)), soon(60))
            except MemkvError:
                pass  # it ends with the client

        for block in range(first, first + puts):
            tasks.start_soon(hang, block)
        await wait_until(lambda: _inflight(running) >= before + puts, "all puts are under way")
        try:
            yield client
        finally:
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("num_frozen", [2, 4])
async def test_frozen_clients_make_no_other_wait(num_frozen: int) -> None:
    """A dead client holds its own lanes to the deadline of its transfers, and nobody else's."""
    async with store() as running:
        with HostMemory.create("staging", 32 * MIB) as memory:
            async with client_of(running, memory) as client, AsyncExitStack() as stack:
                dead = [await stack.enter_async_context(frozen(running, 1000 * n)) for n in range(1, num_frozen + 1)]
                lanes = 32 - 4 * num_frozen
                await wait_until(lambda: _idle(running) == lanes, "each has as many lanes as one may have")
                for block in range(10):
                    extent = Extent(1, 0, 3 * MIB)
                    assert await client.request(put(block, extent), soon()) == [Status.OK]
                    (result,) = await client.request(get(block, extent), soon())
                    assert result.status is Status.OK
                # All of this went on while the dead ones sat out their deadlines.
                assert not any(one.ended for one in dead)
                assert _idle(running) == lanes


async def test_a_transfer_that_times_out_fences_its_session_and_gives_its_space_back() -> None:
    async with store(transfer_timeout_s=0.3) as running, hand_made_client(running.address) as client:
        assert await client.channel.request(put(1, Extent(1, 0, MIB)), soon()) == [Status.TIMEOUT]
        assert await client.data[0].command()
        assert await client.data[0].closed(), "fenced: its data connections are gone"
        table = running.server.statistics()["table"]
        assert (table["complete"], table["reserved"]) == (0, 0)


async def test_one_port_serves_loopback_and_tcp() -> None:
    config = config_of()
    tcp = TcpServerTransport.from_config(config)
    transports: list[ServerTransport] = [tcp, LoopbackServerTransport.from_config(config, port=tcp.bind())]
    async with StoreServer(config, transports, populate=False) as server:
        assert [port for _, port in server.addresses] == [tcp.port] * 2
        for transport in (TcpClientTransport(), LoopbackClientTransport()):
            connection = await transport.connect("127.0.0.1", tcp.port, Credentials(KEY), PeerKind.TOOL, soon())
            assert connection.established.server.boot_id == server.boot_id
            await connection.aclose()


def test_the_limits_of_the_configuration_reach_the_transport() -> None:
    config = config_of(copy_threads=3, max_connections_per_session=5, max_regions_per_session=2, handshake_timeout_s=7)
    transport = TcpServerTransport.from_config(config)
    assert (transport._num_movers, transport._max_connections, transport._max_regions) == (3, 5, 2)
    assert transport._options.handshake_timeout_s == 7
