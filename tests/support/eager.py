"""A store over tcp and its clients, for tests of eager puts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from memkv_vllm.config import ServerConfig
from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetItem, Put, PutItem
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.loopback import LoopbackServerTransport
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp import TcpServerTransport, mover
from memkv_vllm.transports.tcp.mover import Traffic
from memkv_vllm.types import Extent, Status
from tests.support.harness import MIB, Address, Client, TcpFactory, connected, wait_until
from tests.support.scripted import KEY, fill, soon
from tests.support.store import LAYOUT, NAMESPACE, make_key
from tests.support.tcp_peer import HandMadeClient

FACTORY = TcpFactory()
REGION_BYTES = 64 * MIB
TARGET = 32 * MIB
"""Where in a client's region values are fetched to."""


@contextmanager
def watched_traffic() -> Iterator[list[Traffic]]:
    """What is under way on each server that is started in this block. It never falls below 0, and is 0 at the end."""
    made: list[Traffic] = []
    lowest = [0]

    class Watched(Traffic):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def end(self) -> None:
            super().end()
            lowest.append(min(lowest.pop(), self.num_pieces))

    with patch.object(mover, "Traffic", Watched):
        yield made
    assert made, "a server was started"
    assert [one.num_pieces for one in made] == [0] * len(made)
    assert lowest == [0]


async def until_quiet(traffic: list[Traffic]) -> None:
    """Every piece has ended, while the servers go on."""
    await wait_until(lambda: not any(one.num_pieces for one in traffic), "no piece is under way")


# -- a store and its clients


@dataclass
class Running:
    """A store that serves on tcp, in this process."""

    server: StoreServer
    transport: TcpServerTransport

    @property
    def address(self) -> Address:
        """Where it listens."""
        return "127.0.0.1", self.transport.port


@asynccontextmanager
async def store(
    max_size: int = 96 * MIB,
    faults: FaultPlan | None = None,
    loopback: bool = False,
    storage: Mapping[str, Any] | None = None,
    **limits: Any,
) -> AsyncIterator[Running]:
    """A store in this process, whose clients may write in one namespace alone."""
    keys = {"default": {"key": KEY, "prefix": (b"\x01" + NAMESPACE).hex()}}
    config = ServerConfig.model_validate(
        {
            "network": {"address": "127.0.0.1:0", "auth_keys": keys},
            "memory": {"max_size": max_size},
            "limits": limits,
            "storage": storage or {},
        }
    )
    transport = TcpServerTransport.from_config(config, faults=faults)
    others = [LoopbackServerTransport.from_config(config, port=transport.bind())] if loopback else []
    async with StoreServer(config, [transport, *others], populate=False, drain_timeout_s=0.1) as server:
        yield Running(server, transport)


@asynccontextmanager
async def client_of(running: Running) -> AsyncIterator[Values]:
    """A client of a store."""
    async with connected(FACTORY, running.address, region_bytes=REGION_BYTES) as client:
        yield Values(client)


@asynccontextmanager
async def store_and_client(
    max_size: int = 96 * MIB, faults: FaultPlan | None = None, **limits: Any
) -> AsyncIterator[tuple[Running, Values]]:
    """A store and a client of it."""
    async with store(max_size, faults, **limits) as running, client_of(running) as client:
        yield running, client


def count(running: Running, name: str) -> int:
    """A counter of the store."""
    return int(running.server.statistics()["counters"].get(name, 0))


def arena_of(running: Running) -> HostMemory:
    """The store's memory."""
    memory = running.server._memory
    assert memory is not None
    return memory


def item(block: int, extent: Extent, checksum: int = 0, namespace: bytes = NAMESPACE) -> PutItem:
    """One value of a PUT."""
    return PutItem(make_key(block, namespace=namespace), checksum, LAYOUT, extent)


def laid_out(lengths: Sequence[int], gap: int = 0, start: int = 0) -> list[Extent]:
    """Extents of these lengths one after the other, ``gap`` bytes apart."""
    extents = []
    for length in lengths:
        extents.append(Extent(1, start, length))
        start += length + gap
    return extents


class Values:
    """Puts and gets of a client, whose values' bytes follow from their numbers."""

    def __init__(self, client: Client) -> None:
        self.connection = client.connection
        self.memory = client.memory

    async def put(self, first: int, extents: Sequence[Extent], timeout_ms: int = 20_000) -> list[Status]:
        """Put values ``first``, ``first`` + 1, ... out of ``extents``, with checksums."""
        items = []
        for block, extent in enumerate(extents, first):
            fill(self.memory, extent, block)
            items.append(item(block, extent, digest(self.memory.view(extent.offset, extent.length))))
        return await self.connection.request(Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, timeout_ms), soon())

    async def check(self, first: int, lengths: Sequence[int]) -> None:
        """The values are there, and have their own bytes."""
        for block, length in enumerate(lengths, first):
            target = Extent(1, TARGET, length)
            expected = fill(self.memory, target, block)
            self.memory.view(TARGET, length)[:] = bytes(length)
            (result,) = await self.connection.request(Get([GetItem(make_key(block), LAYOUT, target)], 20_000), soon())
            assert result.status is Status.OK, block
            assert bytes(self.memory.view(TARGET, length)) == expected, block

    async def check_next(self, running: Running, first: int, *, eager: bool = True) -> None:
        """Further puts land right, and are eager, or not."""
        before = count(running, "eager_puts")
        for block in (first, first + 10):
            lengths = [70_001, 5, 4096]
            assert await self.put(block, laid_out(lengths, gap=3)) == [Status.OK] * 3
            await self.check(block, lengths)
        assert count(running, "eager_puts") - before == (2 if eager else 0)


async def ask(client: HandMadeClient, put: Put, outcome: list[object] | None = None) -> None:
    """Have a request under way; notes how it ended."""
    try:
        answer: object = await client.channel.request(put, soon(60))
    except MemkvError as error:
        answer = error
    if outcome is not None:
        outcome.append(answer)


def reserved(running: Running) -> int:
    """Values that are being put."""
    return int(running.server.statistics()["table"]["reserved"])
