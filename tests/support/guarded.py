"""A real server with several keys, limits and licenses, and clients that hold one key each."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from memkv_vllm.config import ServerConfig
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetItem, Put, PutItem, Request
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.base import ClientConnection, ClientTransport, Region
from memkv_vllm.transports.loopback import LoopbackClientTransport, LoopbackServerTransport
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp import TcpClientTransport, TcpServerTransport
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import Address, drive, wait_until
from tests.support.scripted import soon

KIB, MIB = 1 << 10, 1 << 20
VALUE = 4 * KIB
SLOTS = 16
LAYOUT = 7
SERVERS: dict[str, Any] = {"loopback": LoopbackServerTransport, "tcp": TcpServerTransport}
CLIENTS: dict[str, Any] = {"loopback": LoopbackClientTransport, "tcp": TcpClientTransport}


def make_key(namespace: bytes, block: int, shard: int = 0) -> bytes:
    """A store key of 69 bytes, as with sha256 block hashes."""
    return b"\x01" + namespace + block.to_bytes(32, "big") + b"\0\0" + shard.to_bytes(2, "big")


def value(seed: int) -> bytes:
    """Bytes that differ for each seed."""
    return bytes((seed * 31 + i) % 251 for i in range(VALUE))


@dataclass(eq=False)
class GuardedClient:
    """One session with a region of ``SLOTS`` values."""

    connection: ClientConnection
    memory: HostMemory
    ended: list[BaseException | None] = field(default_factory=list)

    async def ask(self, request: Request[Any]) -> Any:
        """A request and its parsed reply."""
        return await self.connection.request(request, soon())

    async def put(self, key: bytes, data: bytes) -> Status:
        """Store one value."""
        self.memory.view(0, VALUE)[:] = data
        item = PutItem(key, digest(data), LAYOUT, Extent(0, 0, VALUE))
        (status,) = await self.ask(Put([item], ChecksumAlgorithm.XXH3_64_TREE_1M, 5000))
        return Status(status)

    async def get(self, key: bytes) -> bytes | Status:
        """The bytes of one value, or why not."""
        (result,) = await self.ask(Get([GetItem(key, LAYOUT, Extent(0, VALUE, VALUE))], 5000))
        return bytes(self.memory.view(VALUE, VALUE)) if result.status is Status.OK else result.status

    async def generation(self, key: bytes) -> int:
        """The generation of one value that may be read."""
        (result,) = await self.ask(Get([GetItem(key, LAYOUT, Extent(0, VALUE, VALUE))], 5000))
        return int(result.generation)


@dataclass(eq=False)
class Guarded:
    """A running server and its keys."""

    server: StoreServer
    address: Address
    keys: dict[str, bytes]
    tasks: anyio.abc.TaskGroup
    transport: ClientTransport
    memories: list[HostMemory] = field(default_factory=list)

    def credentials(self, key_id: str, license: str | None = None) -> Credentials:
        """What a client under ``key_id`` holds."""
        return Credentials(self.keys[key_id], key_id, license)

    async def connect(self, key_id: str, license: str | None = None) -> GuardedClient:
        """A new session with its region registered."""
        credentials = self.credentials(key_id, license)
        connection = await self.transport.connect(*self.address, credentials, PeerKind.ENGINE, soon())
        memory = HostMemory.create("test-staging", SLOTS * VALUE)
        self.memories.append(memory)
        client = GuardedClient(connection, memory)
        self.tasks.start_soon(drive, connection, client.ended)
        await connection.register(Region(0, MemoryKind.HOST, memory.length, memory), soon())
        return client

    def count(self, name: str) -> int:
        """A counter of the server."""
        return int(self.server.statistics()["counters"].get(name, 0))

    async def until_idle(self, sessions: int = 0) -> None:
        """Wait until only ``sessions`` are left, and check that nothing else is."""
        part = self.server.statistics
        await wait_until(lambda: part()["server"]["sessions"] == sessions, "the sessions end")
        await wait_until(lambda: part()["server"]["connections"] == sessions, "the connections end")
        assert part()["table"]["reserved"] == part()["table"]["pinned"] == part()["server"]["inflight"] == 0


@asynccontextmanager
async def guarded(
    entries: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    limits: Mapping[str, Any] | None = None,
    license: Mapping[str, Any] | None = None,
    network: Mapping[str, Any] | None = None,
    over: str = "loopback",
    transport: ClientTransport | None = None,
) -> AsyncIterator[Guarded]:
    """A server, and a transport for its clients.

    Args:
        entries: key id -> rights, prefix; every id gets a key of its own. By default one id, ``default``.
        limits: section of the yaml.
        license: section of the yaml.
        network: more of the section of the yaml.
        over: ``loopback`` or ``tcp``.
        transport: the clients'.
    """
    keys = {name: os.urandom(32) for name in entries or {"default": {}}}
    held = {name: {"key": key, **(entries or {}).get(name, {})} for name, key in keys.items()}
    net = {"address": "127.0.0.1:0", "auth_keys": held, **(network or {})}
    sections = {"memory": {"max_size": 8 * MIB}, "limits": {"copy_threads": 2, **(limits or {})}}
    config = ServerConfig.model_validate({"network": net, "license": license or {}, **sections})
    failure: Exception | None = None
    memories: list[HostMemory] = []
    async with anyio.create_task_group() as tasks:
        async with StoreServer(config, [SERVERS[over].from_config(config)]) as server:
            address = server.addresses[0]
            try:
                yield Guarded(server, address, keys, tasks, transport or CLIENTS[over](), memories)
            except Exception as error:
                failure = error  # raised outside, so that no task group wraps it
        tasks.cancel_scope.cancel()
    for memory in memories:
        memory.close()
    if failure is not None:
        raise failure
