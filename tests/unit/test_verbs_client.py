"""The verbs client over a verbs library in memory and the real server. Faults P067, P070, P072, P073, P074, P078."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from memkv_vllm.errors import (
    AuthError,
    ConnectError,
    ConnectionLost,
    DataPathError,
    EnvironmentFault,
    FenceTimeout,
    RemoteProtocolError,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tls import ServerTls
from memkv_vllm.transports.verbs import VerbsConnection
from memkv_vllm.transports.verbs.client import VerbsClientTransport
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES
from memkv_vllm.transports.verbs.preflight import Memlock
from memkv_vllm.transports.verbs.provider import VerbsError
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.authority import Authority
from tests.support.fake_verbs import RETRY_EXC_ERR, FakeFabric, FakeProvider, FakeQueuePair, Trouble
from tests.support.harness import Client, connected, drive, serving, wait_until
from tests.support.scripted import KEY, soon
from tests.support.verbs_tree import fake_library
from tests.support.verbs_world import CLIENT, SERVER, VerbsWorld, verbs_world

MIB = 1 << 20
MEMLOCK = Memlock(8 * MIB, False)

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(tmp_path: Path) -> Iterator[VerbsWorld]:
    with verbs_world(tmp_path) as made:
        yield made


@asynccontextmanager
async def plain(
    world: VerbsWorld, address: tuple[str, int], kind: PeerKind = PeerKind.ENGINE
) -> AsyncIterator[tuple[VerbsConnection, HostMemory]]:
    """A connection that runs and has registered nothing, with memory to register."""
    connection = await world.client().connect(*address, Credentials(KEY), kind, soon())
    with HostMemory.create("staging-here", MIB) as memory:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, [])
            try:
                yield connection, memory
            finally:
                await connection.aclose()
                tasks.cancel_scope.cancel()


def region(memory: HostMemory) -> Region:
    return Region(1, MemoryKind.HOST, memory.length, memory)


async def refusal(world: VerbsWorld, address: tuple[str, int], deadline_s: float = 10) -> DataPathError:
    """Why the server does not reach this client's memory."""
    async with plain(world, address) as (connection, memory):
        with pytest.raises(DataPathError) as caught:
            await connection.register(region(memory), soon(deadline_s))
    return caught.value


# -- what works


async def test_bytes_go_both_ways(world: VerbsWorld) -> None:
    async with serving(world) as server, connected(world, server.address) as client:
        client.memory.array[:MIB] = 7
        assert await client.put(0, Extent(1, 0, MIB)) == [Status.OK]
        assert (server.arena.array[:MIB] == 7).all()
        assert await client.get(0, Extent(1, MIB, MIB)) == [Status.OK]
        assert (client.memory.array[MIB : 2 * MIB] == 7).all()
    assert world.num_live == 0


async def test_control_leaves_from_the_rails_own_address(world: VerbsWorld) -> None:
    async with serving(world) as server, connected(world, server.address):
        (peer,) = server.handler.peers.values()
        assert CLIENT in peer.label


async def test_a_name_is_resolved_and_then_paired(world: VerbsWorld) -> None:
    async with serving(world) as server, connected(world, ("localhost", server.address[1])) as client:
        assert await client.get(0, Extent(1, 0, 4096)) == [Status.OK]


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6: use one that has")
async def test_ipv6(tmp_path: Path) -> None:
    with verbs_world(tmp_path, server="::1/128", client="") as world:
        world.address = "::1"
        async with serving(world) as server, connected(world, server.address[:2]) as client:
            assert await client.get(0, Extent(1, 0, 4096)) == [Status.OK]
            (peer,) = server.handler.peers.values()
            assert "::1" in peer.label


async def test_several_regions_share_the_queue_pairs(world: VerbsWorld) -> None:
    async with serving(world) as server, plain(world, server.address) as (connection, first):
        with HostMemory.create("second", MIB) as second:
            async with anyio.create_task_group() as tasks:
                for number, memory in enumerate((first, second)):
                    tasks.start_soon(connection.register, Region(number, MemoryKind.HOST, MIB, memory), soon())
            # Device, domain, completion queue, four queue pairs, the landing, two regions.
            assert world.num_live == 10
            await connection.fence(soon())


async def test_the_rail_is_logged_with_what_was_chosen(world: VerbsWorld, caplog: pytest.LogCaptureFixture) -> None:
    """P078: which NIC, which GID and why, which MTU; once, however often it is connected over."""
    caplog.set_level(logging.INFO, "memkv.transports.verbs")
    async with serving(world) as server:
        for _ in range(3):
            async with connected(world, server.address):
                pass
        transport = world.client()
        for _ in range(3):
            connection = await transport.connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
            await connection.aclose()
    lines = [record.getMessage() for record in caplog.records if "event=rail " in record.getMessage()]
    assert "device=cli0 port=1 gid=127.0.0.2 gid_index=1 mtu=4096 rate=400Gbit/s" in lines[0]
    assert "RoCE v2, IPv4" in lines[0]
    assert any(
        "event=data_path_up" in r.getMessage() and "queue_pairs=4 mtu=4096" in r.getMessage() for r in caplog.records
    )


async def test_the_control_connection_can_use_tls(world: VerbsWorld, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    async with serving(world, tls=ServerTls(pair.cert, pair.key)) as server:
        with pytest.raises((ConnectError, RemoteProtocolError, AuthError)):
            await world.client().connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        transport = world.client(tls=True, tls_ca=authority.file)
        connection = await transport.connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        with HostMemory.create("staging-here", MIB) as memory:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drive, connection, [])
                await connection.register(region(memory), soon())
                await connection.fence(soon())
                tasks.cancel_scope.cancel()


async def test_what_the_path_should_carry(world: VerbsWorld) -> None:
    async with serving(world) as server, plain(world, server.address) as (connection, _):
        assert connection.expected_bytes_per_s == 400e9 / 8


# -- no NIC needed


@pytest.mark.parametrize("kind", [PeerKind.MANAGER, PeerKind.TOOL])
async def test_control_alone_needs_no_nic_and_opens_nothing(
    world: VerbsWorld, kind: PeerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P072: the scheduler's prober runs where there is no NIC, and no library is even loaded for it."""

    def load() -> FakeProvider:
        raise AssertionError("a verbs library was loaded")

    monkeypatch.setattr("memkv_vllm.transports.verbs.client.load_provider", load)
    transport = VerbsClientTransport(devices=("mlx5_9",), data_path=False)
    async with serving(world) as server:
        connection = await transport.connect(*server.address, Credentials(KEY), kind, soon())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, [])
            await connection.request(Ping(), soon())
            with HostMemory.create("none", 4096) as memory, pytest.raises(StoreError, match="control messages only"):
                await connection.register(region(memory), soon())
            await connection.fence(soon())
            tasks.cancel_scope.cancel()
        await transport.aclose()


async def test_a_tool_of_an_engines_transport_brings_nothing_up(world: VerbsWorld) -> None:
    async with serving(world) as server, plain(world, server.address, PeerKind.TOOL) as (connection, _):
        await connection.request(Ping(), soon())
        assert connection.expected_bytes_per_s is None
        assert world.num_live == 0


# -- what this host lacks


def test_a_host_without_nics_is_refused(tmp_path: Path) -> None:
    with FakeFabric() as fabric:
        library = fake_library(fabric, tmp_path, {})
        with pytest.raises(EnvironmentFault, match="no RDMA device"):
            VerbsClientTransport(provider=library, root=tmp_path)


def test_a_named_device_and_never_another(world: VerbsWorld) -> None:
    """P073."""
    with pytest.raises(EnvironmentFault, match=r"RDMA device mlx5_3 is not on this host: found cli0:1"):
        world.client(devices=("mlx5_3",))
    assert world.client_library.num_opened == 0


def test_a_server_of_the_settings_on_no_rail(world: VerbsWorld) -> None:
    """P070."""
    world.client(servers=[("a", ("127.0.0.1",))])
    with pytest.raises(
        EnvironmentFault, match=r"server b cannot be reached over RDMA: no RDMA port reaches 10\.5\.0\.1"
    ):
        world.client(servers=[("a", ("127.0.0.1",)), ("b", ("10.5.0.1",))])


def test_an_unusable_second_rail_is_a_warning(world: VerbsWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.client(servers=[("a", ("127.0.0.1", "10.5.0.1"))])
    (line,) = [record for record in caplog.records if "event=rail_unusable" in record.getMessage()]
    assert line.levelno == logging.WARNING and "address=10.5.0.1" in line.getMessage()


def test_an_mtu_that_the_port_does_not_carry(world: VerbsWorld) -> None:
    world.client_nic.ports[1].active_mtu = 1024
    with pytest.raises(EnvironmentFault, match="mtu is 4096, but cli0:1 carries at most 1024"):
        world.client(mtu=4096)
    assert world.num_live == 0


def test_a_memlock_that_is_too_small(world: VerbsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """P074."""
    monkeypatch.setattr("memkv_vllm.transports.verbs.preflight.read_memlock", lambda _: MEMLOCK)
    with pytest.raises(EnvironmentFault, match=r"memlock is too small .*needs 1024\.0 MiB.*ulimit -l unlimited"):
        world.client(staging_bytes=512 * MIB, servers=[("a", ("127.0.0.1",)), ("b", ("127.0.0.1",))])


# -- what the server says


async def test_a_server_without_verbs(world: VerbsWorld) -> None:
    world.offers_verbs = False
    async with serving(world) as server:
        error = await refusal(world, server.address)
    assert "offers no data path called 'verbs'" in str(error) and "rdma.devices" in str(error)
    assert "answers, but does not reach this host's memory" in str(error)
    assert world.num_live == 0


async def test_a_server_reached_beside_its_nic(world: VerbsWorld) -> None:
    world.address = "127.0.0.9"
    async with serving(world) as server:
        error = await refusal(world, server.address)
    assert "127.0.0.9" in str(error) and "of none of its RDMA ports" in str(error)


async def test_a_path_that_carries_no_packets_is_found_at_once(world: VerbsWorld) -> None:
    """The server's probe fails: both ends are in the message, and nothing is left behind."""
    async with serving(world) as server:
        world.server_nic.troubles.requests[0] = Trouble(RETRY_EXC_ERR)
        error = await refusal(world, server.address)
    for part in (SERVER, "GID 127.0.0.2", "cli0:1", "MTU"):
        assert part in str(error)
    assert world.num_live == 0


async def test_a_server_on_no_rail_of_this_host(world: VerbsWorld) -> None:
    """Nothing is sent over another interface: not even the control connection is made."""
    with pytest.raises(
        DataPathError, match=r"no RDMA port reaches 10\.99\.0\.1: found cli0:1 on rail0 in 127\.0\.0\.0/8"
    ):
        await world.client().connect("10.99.0.1", 9900, Credentials(KEY), PeerKind.ENGINE, soon())


async def test_a_connection_never_takes_another_nic_than_the_named_ones(tmp_path: Path) -> None:
    """P073: the server is in the other NIC's subnet, which would do."""
    with FakeFabric() as fabric:
        library = fake_library(fabric, tmp_path, {"cli0": "127.0.0.2/8", "cli1": "10.9.0.1/24"})
        transport = VerbsClientTransport(devices=("cli1",), provider=library, root=tmp_path)
        with pytest.raises(DataPathError, match=r"no RDMA port reaches 127\.0\.0\.1: found cli1:1"):
            await transport.connect("127.0.0.1", 1, Credentials(KEY), PeerKind.ENGINE, soon())


async def test_a_port_that_goes_down_later_is_a_problem_of_the_way(world: VerbsWorld) -> None:
    async with serving(world) as server:
        transport = world.client()
        (world.client_root / "sys/class/infiniband/cli0/ports/1/state").write_text("1: DOWN\n")
        transport.facts.forget()  # some seconds have passed
        with pytest.raises(DataPathError, match="cli0:1 is in state DOWN"):
            await transport.connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())


async def test_no_server_there(world: VerbsWorld) -> None:
    with socket.create_server((SERVER, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectError, match="Connection refused"):
        await world.client().connect(SERVER, port, Credentials(KEY), PeerKind.ENGINE, soon())


# -- what the library says


@pytest.mark.parametrize(
    "call", ["ibv_open_device", "ibv_alloc_pd", "ibv_create_cq", "ibv_create_qp", "ibv_modify_qp", "ibv_reg_mr"]
)
@pytest.mark.parametrize("spared_bytes", [0, LANDING_BYTES])
async def test_a_call_that_fails_is_a_problem_of_the_data_path(world: VerbsWorld, call: str, spared_bytes: int) -> None:
    """Also where the first registration, of the landing, goes well and the second does not."""
    async with serving(world) as server:
        transport = world.client()
        connection = await transport.connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        world.client_nic.troubles.refuse[call] = errno.EIO
        world.client_nic.troubles.spared_bytes = spared_bytes
        with HostMemory.create("staging-here", MIB) as memory:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drive, connection, [])
                with pytest.raises(DataPathError, match=call if call != "ibv_open_device" else "cannot be opened"):
                    await connection.register(region(memory), soon())
                await connection.fence(soon())
                tasks.cancel_scope.cancel()
    assert world.num_live == 0


async def test_a_registration_over_the_limit_names_memlock(world: VerbsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """P074: where the kernel says no more than 'cannot allocate memory'."""
    async with serving(world) as server, plain(world, server.address) as (connection, memory):
        world.client_nic.troubles.refuse["ibv_reg_mr"] = errno.ENOMEM
        world.client_nic.troubles.spared_bytes = LANDING_BYTES
        monkeypatch.setattr("memkv_vllm.transports.verbs.preflight.read_memlock", lambda _: MEMLOCK)
        with pytest.raises(DataPathError, match=r"memlock is 8\.0 MiB.*LimitMEMLOCK=infinity"):
            await connection.register(region(memory), soon())


# -- fencing


async def test_after_the_fence_no_byte_lands(world: VerbsWorld) -> None:
    async with serving(world) as server, connected(world, server.address) as client:
        late = await _give_up_on_a_get(world, client)
        await client.connection.fence(soon())
        assert world.num_live == 0
        await anyio.sleep(late)
        assert not client.memory.array.any()


async def test_without_the_fence_it_would(world: VerbsWorld) -> None:
    """The control of the test above: the bytes were really under way."""
    async with serving(world) as server, connected(world, server.address) as client:
        await _give_up_on_a_get(world, client)
        await wait_until(lambda: client.memory.array.any(), "the late bytes land")


async def _give_up_on_a_get(world: VerbsWorld, client: Client) -> float:
    """A get whose bytes come late, given up; returns when they would surely be there."""
    world.server_nic.troubles.delay_s = 0.3
    peers = world.server_nic.num_posted
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ignore, client)
        await wait_until(lambda: world.server_nic.num_posted > peers, "the server has posted")
        tasks.cancel_scope.cancel()
    return 0.6


async def _ignore(client: Client) -> None:
    await client.get(0, Extent(1, 0, MIB))


@pytest.fixture(autouse=True)
def _arena_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh arenas hold ones, so that bytes which land can be seen."""
    create = HostMemory.create

    def filled(name: str, length: int, hugepages: str = "advise") -> HostMemory:
        memory = create(name, length, hugepages)  # type: ignore[arg-type]
        if name == "arena":
            memory.array[:] = 1
        return memory

    monkeypatch.setattr(HostMemory, "create", filled)


async def test_a_fence_waits_for_a_registration_under_way(world: VerbsWorld) -> None:
    async with serving(world) as server, plain(world, server.address) as (connection, memory):
        world.client_nic.troubles.slow_s["ibv_reg_mr"] = 0.5
        world.client_nic.troubles.spared_bytes = LANDING_BYTES
        with pytest.raises(DataPathError, match=r"registering 1\.0 MiB with cli0 took longer than the deadline"):
            await connection.register(region(memory), soon(0.1))
        with pytest.raises(FenceTimeout, match="not released yet; the memory stays in quarantine"):
            await connection.fence(soon(0.05))
        await connection.fence(soon())
        assert world.num_live == 0
        with pytest.raises(ConnectionLost):
            await connection.register(region(memory), soon())
        assert world.num_live == 0, "nothing begins after the fence"


async def test_fences_from_everywhere_at_once_release_once(world: VerbsWorld) -> None:
    async with serving(world) as server, plain(world, server.address) as (connection, memory):
        world.client_nic.troubles.slow_s["ibv_create_qp"] = 0.05
        async with anyio.create_task_group() as tasks:

            async def register() -> None:
                with pytest.raises((DataPathError, ConnectionLost)):
                    await connection.register(region(memory), soon())

            tasks.start_soon(register)
            await wait_until(lambda: world.num_live > 0, "it has begun")
            for _ in range(5):
                tasks.start_soon(connection.fence, soon())
            tasks.start_soon(connection.aclose)
        assert world.num_live == 0
        await connection.fence(soon())


async def test_closing_alone_releases_too(world: VerbsWorld) -> None:
    """At an engine's end nobody fences: what a connection holds of the NIC goes with it."""
    async with serving(world) as server, connected(world, server.address):
        assert world.num_live > 0
    assert world.num_live == 0


async def test_a_transport_releases_what_its_connections_could_not(
    world: VerbsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memkv_vllm.transports.verbs.client.CLOSE_S", 0.02)
    async with serving(world) as server:
        transport = world.client()
        connection = await transport.connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        world.client_nic.troubles.slow_s["ibv_reg_mr"] = 0.4
        world.client_nic.troubles.spared_bytes = LANDING_BYTES
        with HostMemory.create("staging-here", MIB) as memory:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drive, connection, [])
                with pytest.raises(DataPathError):
                    await connection.register(region(memory), soon(0.1))
                await connection.aclose()
                assert world.num_live > 0
                monkeypatch.setattr("memkv_vllm.transports.verbs.client.CLOSE_S", 5.0)
                await transport.aclose()
                assert world.num_live == 0
                tasks.cancel_scope.cancel()


async def test_what_cannot_be_destroyed_is_never_called_fenced(
    world: VerbsWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: FakeQueuePair) -> None:
        raise VerbsError("ibv_destroy_qp", errno.EIO)

    async with serving(world) as server, connected(world, server.address) as client:
        with monkeypatch.context() as broken:
            broken.setattr(FakeQueuePair, "_destroy", refuse)
            with pytest.raises(FenceTimeout):
                await client.connection.fence(soon(0.5))
        for _ in range(2):
            with pytest.raises(FenceTimeout):
                await client.connection.fence(soon(0.1))
    assert sum("event=release_failed" in record.getMessage() for record in caplog.records) == 1


def _mapped(name: str) -> bool:
    return f"memkv-{name}" in Path("/proc/self/maps").read_text()


async def test_registered_memory_stays_mapped(world: VerbsWorld) -> None:
    """Pages are pinned, not addresses: whoever closes the memory too early must not have the NIC write into nowhere."""
    async with serving(world) as server:
        connection = await world.client().connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
        memory = HostMemory.create("staging-early", MIB)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, [])
            await connection.register(region(memory), soon())
            memory.close()
            del memory
            gc.collect()
            assert _mapped("staging-early")
            await connection.fence(soon())
            tasks.cancel_scope.cancel()
        gc.collect()
        assert not _mapped("staging-early")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_thousand_connections_leave_nothing(world: VerbsWorld) -> None:
    """P067: descriptors, threads and verbs objects are the same after as before."""
    async with serving(world) as server:
        transport = world.client()
        with HostMemory.create("staging-here", 4096) as memory:

            async def once() -> None:
                connection = await transport.connect(*server.address, Credentials(KEY), PeerKind.ENGINE, soon())
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(drive, connection, [])
                    await connection.register(region(memory), soon())
                    await connection.fence(soon())
                    tasks.cancel_scope.cancel()

            for _ in range(20):
                await once()
            await wait_until(lambda: not server.handler.peers, "the server has seen them go")
            before = _held()
            for _ in range(1000):
                await once()
            await wait_until(lambda: not server.handler.peers, "the server has seen them go")
            assert _held() == before
            assert world.num_live == 0


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


async def test_connecting_gives_up_at_the_deadline(world: VerbsWorld) -> None:
    listener, address = world.raw_listener()
    with listener:
        started = time.monotonic()
        with pytest.raises(ConnectError):
            await world.client().connect(*address, Credentials(KEY), PeerKind.ENGINE, soon(0.2))
        assert time.monotonic() - started < 5
