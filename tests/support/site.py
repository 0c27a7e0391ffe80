"""A running store server in this process, and small engines that talk to it over real loopback connections."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from memkv_vllm.config import dev_server_config
from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Exists, Get, GetItem, GetResult, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.loopback import LoopbackClientTransport, LoopbackConnection, LoopbackServerTransport
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status

KIB, MIB = 1 << 10, 1 << 20
VALUE = 256 * KIB
SLOTS = 32
NAMESPACE = b"N" * 32
LAYOUT = 7


def make_key(block: int, shard: int = 0) -> bytes:
    return b"\x01" + NAMESPACE + block.to_bytes(32, "big") + b"\0\0" + shard.to_bytes(2, "big")


def value(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(VALUE)


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline(time.monotonic() + seconds)


@dataclass(eq=False)
class Client:
    """An engine in small: a region of slots, and one connection."""

    connection: LoopbackConnection
    memory: HostMemory

    async def ask(self, request: Any) -> Any:
        return await self.connection.request(request, soon(10))

    async def put(self, values: dict[int, bytes], timeout_ms: int = 5000, first_slot: int = 0) -> list[Status]:
        items = []
        for slot, (block, data) in enumerate(values.items(), first_slot):
            self.memory.view(slot * VALUE, VALUE)[:] = data
            items.append(PutItem(make_key(block), digest(data), LAYOUT, Extent(0, slot * VALUE, VALUE)))
        statuses: list[Status] = await self.ask(Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, timeout_ms))
        return statuses

    async def get(self, blocks: Sequence[int], timeout_ms: int = 5000, first_slot: int = 0) -> list[GetResult]:
        items = [
            GetItem(make_key(block), LAYOUT, Extent(0, slot * VALUE, VALUE))
            for slot, block in enumerate(blocks, first_slot)
        ]
        results: list[GetResult] = await self.ask(Get(items, timeout_ms))
        return results

    async def exists(self, *blocks: int) -> list[bool]:
        answer: list[bool] = await self.ask(Exists([make_key(block)[:-2] for block in blocks], 1))
        return answer

    def slot(self, number: int) -> bytes:
        return bytes(self.memory.view(number * VALUE, VALUE))


@dataclass(eq=False)
class Site:
    """A running server and its clients."""

    server: StoreServer
    key: bytes
    faults: FaultPlan
    tasks: anyio.abc.TaskGroup
    memories: list[HostMemory] = field(default_factory=list)

    async def connect(self) -> Client:
        host, port = self.server.addresses[0]
        transport = LoopbackClientTransport()
        connection = await transport.connect(host, port, Credentials(self.key), PeerKind.ENGINE, soon())
        self.tasks.start_soon(self._drive, connection)
        memory = HostMemory.create("test-staging", SLOTS * VALUE)
        self.memories.append(memory)
        await connection.register(Region(0, MemoryKind.HOST, memory.length, memory), soon())
        return Client(connection, memory)

    @staticmethod
    async def _drive(connection: LoopbackConnection) -> None:
        try:
            await connection.run()
        except MemkvError:
            pass

    def state(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.statistics()[part]
        return found

    def count(self, name: str) -> int:
        return int(self.state("counters").get(name, 0))

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(5):
            while not condition():  # noqa: ASYNC110 - nothing tells
                await anyio.sleep(0.002)


@asynccontextmanager
async def site(
    slots: int = 64, drain_timeout_s: float = 5.0, storage: dict[str, Any] | None = None, **limits: Any
) -> AsyncIterator[Site]:
    """A server whose arena holds ``slots`` values; ``storage``: section of its settings."""
    key, faults = os.urandom(32), FaultPlan()
    overrides = {
        "memory": {"max_size": slots * VALUE, "block_size": 4 * KIB},
        "limits": {"copy_threads": 2, **limits},
        # Arenas of a few values: without this, the watermark would keep one of them free.
        "storage": {"eviction": {"high_watermark": 1.0, "low_watermark": 0.99}, **(storage or {})},
    }
    config = dev_server_config(key, address="127.0.0.1:0", overrides=overrides)
    transport = LoopbackServerTransport(0, copy_threads=2, faults=faults)
    async with anyio.create_task_group() as tasks:
        async with StoreServer(config, [transport], drain_timeout_s=drain_timeout_s) as server:
            made = Site(server, key, faults, tasks)
            yield made
        tasks.cancel_scope.cancel()
    for memory in made.memories:
        memory.close()


async def start(tasks: anyio.abc.TaskGroup, call: Awaitable[Any], into: list[Any]) -> None:
    async def run() -> None:
        into.append(await call)

    tasks.start_soon(run)
