"""A real store under clients that misuse verbs, and on NICs that do not do their part."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.config import dev_server_config
from memkv_vllm.errors import ConnectionLost, MemkvError, StoreError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.connect import Connect
from memkv_vllm.protocol.messages import Get, GetItem, Ping, Put, PutItem, Register
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.server import StoreServer
from memkv_vllm.topology import read_host
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp import TcpServerTransport
from memkv_vllm.transports.verbs import VerbsDataPath
from memkv_vllm.transports.verbs.client import VerbsConnection
from memkv_vllm.transports.verbs.endpoints import NOWHERE, Endpoint, QueuePairEnd, RegionToken
from memkv_vllm.transports.verbs.opening import Knobs, rail_of
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.fake_verbs import FakeMemoryRegion, FakeQueuePair
from tests.support.harness import wait_until
from tests.support.scripted import soon
from tests.support.store import LAYOUT, make_key
from tests.support.verbs_world import VerbsWorld, verbs_world

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

KEY = b"k" * 32
MIB = 1 << 20
VALUE = 64 << 10


@dataclass
class Site:
    """A store that serves verbs, and its world."""

    world: VerbsWorld
    server: StoreServer
    port: int

    def count(self, name: str) -> int:
        return int(self.server.statistics()["counters"].get(name, 0))

    @property
    def used(self) -> int:
        return int(self.server.statistics()["arena"]["used"])

    def end(self, num_queue_pairs: int = 1) -> PassiveEnd:
        """A client's end without a client."""
        root, library = self.world.client_root, self.world.client_library
        return PassiveEnd(library, rail_of(read_host(root), "cli0"), Knobs(), num_queue_pairs, root)


@asynccontextmanager
async def site(folder: Path, **overrides: Any) -> AsyncIterator[Site]:
    with verbs_world(folder) as world:
        config = dev_server_config(KEY, address="127.0.0.1:0", max_size="4MiB", overrides=overrides)
        path = VerbsDataPath(("srv0",), provider=world.server_library, root=world.server_root)
        transport = TcpServerTransport.from_config(config, data_paths=[path])
        async with StoreServer(config, [transport]) as server:
            yield Site(world, server, transport.port)


class Peer:
    """A client that says what a test wants."""

    def __init__(self, connection: VerbsConnection, memory: HostMemory) -> None:
        self.connection = connection
        self.memory = memory

    async def put(self, numbers: range, *, timeout_ms: int = 5000, extent_at: int | None = None) -> list[Status]:
        items = []
        for place, number in enumerate(numbers):
            view = self.memory.view(place * VALUE, VALUE)
            view[:] = number.to_bytes(2, "big") * (VALUE // 2)
            at = place * VALUE if extent_at is None else extent_at
            items.append(PutItem(make_key(number), digest(view), LAYOUT, Extent(1, at, VALUE)))
        return await self.connection.request(Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, timeout_ms), soon())

    async def get(self, numbers: range, *, timeout_ms: int = 5000) -> list[Status]:
        items = [GetItem(make_key(n), LAYOUT, Extent(1, at * VALUE, VALUE)) for at, n in enumerate(numbers)]
        return [result.status for result in await self.connection.request(Get(items, timeout_ms), soon())]


@asynccontextmanager
async def client(at: Site, *, registered: bool = True) -> AsyncIterator[Peer]:
    """Connected, its own region registered unless told otherwise."""
    transport = at.world.client()
    async with AsyncExitStack() as stack:
        memory = stack.enter_context(HostMemory.create("staging", MIB))
        connection = await transport.connect("127.0.0.1", at.port, Credentials(KEY), PeerKind.ENGINE, soon())
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(run, connection)
        stack.push_async_callback(transport.aclose)
        stack.push_async_callback(connection.aclose)
        if registered:
            await connection.register(Region(1, MemoryKind.HOST, MIB, memory), soon())
        yield Peer(connection, memory)


async def run(connection: VerbsConnection) -> None:
    try:
        await connection.run()
    except MemkvError:
        pass


async def test_extents_that_a_queue_pair_may_still_write_are_never_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P039: the device does not give a queue pair up. Its READs may land whenever it pleases."""
    async with site(tmp_path) as at:
        nic = at.world.server_nic
        async with client(at) as peer:
            nic.troubles.silent = True
            nic.troubles.refuse |= {"ibv_destroy_qp": errno.EIO, "ibv_modify_qp": errno.EIO}
            with pytest.raises(ConnectionLost):
                await peer.put(range(4), timeout_ms=200)
        await wait_until(lambda: at.count("not_fenced") == 1, "the session has ended")
        assert at.count("rdma_not_destroyed") == 1 and "event=rdma_not_destroyed" in caplog.text
        nic.troubles.silent = False
        nic.troubles.refuse.clear()
        statistics = at.server.statistics()
        assert statistics["table"]["reserved"] == 4
        kept = {(entry.offset, entry.length) for entry in at.server.handler._table._content.in_use.values()}
        async with client(at) as peer:
            for first in range(100, 260, 16):  # 10 MiB through an arena of 4
                statuses = await peer.put(range(first, first + 16))
                assert statuses == [Status.OK] * 16
        still = {(entry.offset, entry.length) for entry in at.server.handler._table._content.in_use.values()}
        assert kept == still and len(kept) == 4
        ledger = at.world.server_library.ledger
        for owned in [owned for owned in ledger._live if isinstance(owned, FakeQueuePair) and owned.closed]:
            ledger.closed(owned)
    assert at.world.server_library.num_live() == 0


async def test_duplicates_of_a_key_in_one_batch(tmp_path: Path) -> None:
    async with site(tmp_path) as at, client(at) as peer:
        memory = peer.memory.view(0, VALUE)
        item = PutItem(make_key(1), digest(memory), LAYOUT, Extent(1, 0, VALUE))
        request = Put([item] * 3, ChecksumAlgorithm.XXH3_64_TREE_1M, 5000)
        statuses = await peer.connection.request(request, soon())
        assert statuses == [Status.OK, Status.PENDING, Status.PENDING]
        items = [GetItem(make_key(1), LAYOUT, Extent(1, 0, VALUE))] * 3
        results = await peer.connection.request(Get(items, 5000), soon())
        assert [result.status for result in results] == [Status.OK] * 3
        assert at.server.statistics()["table"]["pinned"] == 0


async def test_good_and_bad_extents_in_one_batch(tmp_path: Path) -> None:
    """Bad: outside of the region, at the end of the number space, in a region that there is none of."""
    async with site(tmp_path) as at, client(at) as peer:
        checksum = digest(peer.memory.view(0, VALUE))
        extents = [
            Extent(1, 0, VALUE),
            Extent(1, MIB - VALUE + 1, VALUE),
            Extent(1, (1 << 64) - VALUE, VALUE),
            Extent(7, 0, VALUE),
            Extent(1, VALUE, VALUE),
        ]
        items = [PutItem(make_key(n), checksum, LAYOUT, extent) for n, extent in enumerate(extents)]
        statuses = await peer.connection.request(Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, 5000), soon())
        bad = Status.BAD_EXTENT
        assert statuses == [Status.OK, bad, bad, bad, Status.OK]
        assert at.used == 2 * VALUE and at.server.statistics()["table"]["reserved"] == 0
        assert (at.count("put_ok"), at.count("put_bad_extent")) == (2, 3)
        assert at.count("put_bytes") == 2 * VALUE


async def refused(peer: Peer, request: Any) -> MemkvError:
    with pytest.raises(MemkvError) as caught:
        await peer.connection.request(request, soon())
    return caught.value


async def test_messages_out_of_order_end_the_session_alone(tmp_path: Path) -> None:
    """CONNECT twice, CONNECT after REGISTER, REGISTER before CONNECT: whoever does it is cut, the others go on."""
    async with site(tmp_path) as at, client(at) as other:
        made = at.end()
        token = made.make().pack()
        async with client(at) as peer:
            await refused(peer, Connect("verbs", token))
            assert at.count("cut_connect") == 1
        async with client(at, registered=False) as peer:  # it has chosen tcp by that, which knows no addresses
            await peer.connection.request(Register(1, MemoryKind.HOST, MIB, RegionToken(0, 0).pack()), soon())
            await refused(peer, Connect("verbs", token))
        await wait_until(lambda: at.count("cut_connect") == 2, "it is cut")
        async with client(at, registered=False) as peer:
            assert isinstance(await refused(peer, Connect("infiniband", b"")), StoreError)
            await peer.connection.request(Ping(), soon())
        assert made.close(5.0)
        assert await other.put(range(2)) == [Status.OK] * 2


async def test_connect_while_a_transfer_runs(tmp_path: Path) -> None:
    async with site(tmp_path) as at, client(at) as peer, anyio.create_task_group() as tasks:
        at.world.server_nic.troubles.delay_s = 0.3
        made = at.end()
        token = made.make().pack()
        lost: list[MemkvError] = []

        async def put() -> None:
            with pytest.raises(MemkvError) as caught:
                await peer.put(range(4))
            lost.append(caught.value)

        tasks.start_soon(put)
        await wait_until(lambda: at.server.statistics()["table"]["reserved"] == 4, "it is under way")
        await refused(peer, Connect("verbs", token))
        await wait_until(lambda: at.used == 0, "its extents are free again")
        assert made.close(5.0)
    assert isinstance(lost[0], ConnectionLost)


async def test_foreign_keys_reach_nothing(tmp_path: Path) -> None:
    """The keys and addresses of another client's memory, and queue pairs of its: neither is read nor written."""
    async with site(tmp_path) as at, client(at) as other:
        token = memory_of(at, other)
        end = at.end(2)
        async with client(at, registered=False) as peer:
            ours = end.make()
            answer = await peer.connection.request(Connect("verbs", ours.pack()), soon())
            end.connect(Endpoint.unpack(answer))
            error = await refused(peer, Register(1, MemoryKind.HOST, MIB, token.pack()))
            assert isinstance(error, StoreError) and "REM_ACCESS_ERR" in str(error)
        assert end.close(5.0)
        # The numbers of another session's queue pairs.
        numbers = [owned.number for owned in at.world.client_library.ledger._live if isinstance(owned, FakeQueuePair)]
        stolen = Endpoint(ours.gid, 0, ours.mtu, 16, tuple(QueuePairEnd(number, 5) for number in numbers))
        at.world.server_nic.troubles.retry_s = 0.05
        async with client(at, registered=False) as peer:
            await peer.connection.request(Connect("verbs", stolen.pack()), soon())
            error = await refused(peer, Register(1, MemoryKind.HOST, MIB, token.pack()))
            assert isinstance(error, StoreError) and "RETRY_EXC_ERR" in str(error)
        assert bytes(other.memory.view(0, MIB)) == b"\x5a" * MIB
        assert await other.put(range(2)) == [Status.OK] * 2


async def test_a_landing_in_anothers_memory(tmp_path: Path) -> None:
    """A client has the server WRITE to where another client of the same host keeps its bytes: its own NIC refuses."""
    async with site(tmp_path) as at, client(at) as other:
        stolen = memory_of(at, other)
        end = at.end(2)
        async with client(at, registered=False) as peer:
            ours = replace(end.make(), landing=stolen)
            answer = Endpoint.unpack(await peer.connection.request(Connect("verbs", ours.pack()), soon()))
            assert answer.landing == NOWHERE, "nobody reaches the server's memory"
            end.connect(answer)
            token = end.register(Region(1, MemoryKind.HOST, MIB, peer.memory))
            error = await refused(peer, Register(1, MemoryKind.HOST, MIB, token.pack()))
            assert isinstance(error, StoreError)
            assert "the server's WRITE to the client" in str(error) and "REM_ACCESS_ERR" in str(error)
            assert end.close(5.0)
        assert bytes(other.memory.view(0, MIB)) == b"\x5a" * MIB
        assert await other.put(range(2)) == [Status.OK] * 2


def regions_of(at: Site) -> list[FakeMemoryRegion]:
    """All that is registered on the clients' host."""
    return [owned for owned in at.world.client_library.ledger._live if isinstance(owned, FakeMemoryRegion)]


def memory_of(at: Site, peer: Peer) -> RegionToken:
    """Where a client's staging memory is, and the key to it, as a thief would have them; it is filled with 5a."""
    peer.memory.view(0, MIB)[:] = b"\x5a" * MIB
    (rkey,) = [region.rkey for region in regions_of(at) if region.address == peer.memory.address]
    return RegionToken(peer.memory.address, rkey)


@pytest.mark.parametrize("limit", [{"max_queue_pairs": 10}, {"max_completions": 1}])
async def test_a_device_that_is_full_refuses_new_sessions_and_keeps_the_others(
    tmp_path: Path, limit: dict[str, int]
) -> None:
    """Nothing stays of a session that was refused, and the place of one that ended is free."""
    async with site(tmp_path) as at, client(at) as first:
        nic = at.world.server_nic
        before = at.world.server_library.num_live()
        nic.limit(**limit)
        ends = [at.end(6) for _ in range(4)]
        refusals = 0
        for end in ends:
            token = end.make().pack()
            async with client(at, registered=False) as peer:
                try:
                    await peer.connection.request(Connect("verbs", token), soon())
                except StoreError as error:
                    refusals += 1
                    assert "too many sessions" in str(error) or "did not connect" in str(error)
            await wait_until(lambda: at.world.server_library.num_live() == before, "all of it is gone")
            assert end.close(5.0)
        assert refusals == (0 if "max_queue_pairs" in limit else 4)
        assert await first.put(range(2)) == [Status.OK] * 2


async def test_sessions_that_end_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    """A client that goes after 0 to 0.3 s: in the handshake, CONNECT, the probe, a put."""
    async with site(tmp_path) as at:
        nic = at.world.server_nic
        nic.troubles.slow_s = {"ibv_create_qp": 0.001, "ibv_modify_qp": 0.001, "ibv_destroy_qp": 0.002}
        before = at.world.server_library.num_live()
        outcomes: Counter[str] = Counter()

        async def one(after_s: float) -> None:
            with anyio.move_on_after(after_s):
                try:
                    async with client(at) as peer:
                        outcomes["connected"] += 1
                        nic.troubles.delay_s = 0.002
                        while True:
                            await peer.put(range(8))
                            await peer.get(range(8))
                            outcomes["moved"] += 1
                except MemkvError:
                    outcomes["failed"] += 1

        for round in range(30):
            await one(0.01 * round)
        await wait_until(lambda: not at.server.statistics()["sessions"], "all sessions have ended")
        await wait_until(lambda: at.world.server_library.num_live() == before, "nothing of them stays")
        table = at.server.statistics()["table"]
        assert (table["reserved"], table["pinned"]) == (0, 0)
        assert outcomes["connected"] and outcomes["moved"]
        assert at.count("internal_error") == at.count("leaked_reservations") == 0
        assert at.world.client_library.num_live() == 0


async def test_a_batch_of_the_largest_size_with_a_send_queue_of_four(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        at.world.server_nic.limit(max_work_requests=4)
        async with client(at) as peer:
            value = 512
            count = at.server.handler.identity.limits.max_batch_keys
            checksums = []
            for n in range(count):
                view = peer.memory.view(n * value, value)
                view[:] = n.to_bytes(2, "big") * (value // 2)
                checksums.append(digest(view))
            put = [PutItem(make_key(n), checksums[n], LAYOUT, Extent(1, n * value, value)) for n in range(count)]
            started = time.monotonic()
            statuses = await peer.connection.request(Put(put, ChecksumAlgorithm.XXH3_64_TREE_1M, 9000), soon())
            assert set(statuses) <= {Status.OK, Status.NO_SPACE} and statuses.count(Status.OK) >= count // 2
            peer.memory.view(0, MIB)[:] = bytes(MIB)
            get = [GetItem(make_key(n), LAYOUT, Extent(1, n * value, value)) for n in range(count)]
            results = await peer.connection.request(Get(get, 9000), soon())
            for n, result in enumerate(results):
                if result.status is Status.OK:
                    assert digest(peer.memory.view(n * value, value)) == checksums[n] == result.checksum
            assert time.monotonic() - started < 15
