"""A store's handler with fake peers: the client's memory is an array, and a test decides how a transfer ends."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from memkv_vllm.config import DEFAULT_KEY_ID, ServerConfig, dev_server_config
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetItem, GetResult, Put, PutItem, Request
from memkv_vllm.protocol.session import Established, PeerKind
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import LruPolicy
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.store.log.api import ValueLog
from memkv_vllm.transports.base import Move
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, SessionId, Status

MIB = 1 << 20
VALUE = 4096
NAMESPACE = b"N" * 32
LAYOUT = 7
Hook = Callable[[str, Sequence[Move]], Awaitable[list[Status] | None]]


def make_key(block: int, shard: int = 0, namespace: bytes = NAMESPACE) -> bytes:
    """A store key of 69 bytes, as with sha256 block hashes."""
    return b"\x01" + namespace + block.to_bytes(32, "big") + b"\0\0" + shard.to_bytes(2, "big")


def value(seed: int, length: int = VALUE) -> bytes:
    """Bytes that differ for each seed."""
    return np.random.default_rng(seed).bytes(length)


class FakeBulk:
    """Copies at once between ``client`` and the arena; ``hook`` may wait, fail, or answer in its place."""

    def __init__(self, arena: HostMemory, client_bytes: int) -> None:
        self.client = bytearray(client_bytes)
        self.hook: Hook | None = None
        self.calls: list[tuple[str, int]] = []
        self.fences = 0
        self._arena = arena

    async def connect(self, transport: str, token: bytes) -> bytes:
        await anyio.lowlevel.checkpoint()
        return b""

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    async def pull(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        return await self._run("pull", moves)

    async def push(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        return await self._run("push", moves)

    async def fence(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.fences += 1

    async def _run(self, what: str, moves: Sequence[Move]) -> list[Status]:
        await anyio.lowlevel.checkpoint()
        self.calls.append((what, len(moves)))
        answer = await self.hook(what, moves) if self.hook is not None else None
        if self.fences:
            return [Status.FAILED] * len(moves)
        if answer is not None:
            return answer
        for remote, offset in moves:
            local = self._arena.view(offset, remote.length)
            there = memoryview(self.client)[remote.offset : remote.offset + remote.length]
            if what == "pull":
                local[:] = there
            else:
                there[:] = local
        return [Status.OK] * len(moves)


@dataclass(eq=False)
class FakePeer:
    """One session as the handler sees it."""

    established: Established
    bulk: FakeBulk
    label: str = "fake"
    data_path: str = "fake"


@dataclass(eq=False)
class Rig:
    """A handler, its arena, and shorthands for what a client does. Use as ``with Rig() as rig:``."""

    size: int = MIB
    overrides: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] | None = None
    log: ValueLog | None = None

    def __post_init__(self) -> None:
        self.config = self._config()
        self.memory = HostMemory.create("test-arena", self.size)
        self.policy = LruPolicy()
        self.arena = ArenaAllocator(self.size)
        self.handler = StoreHandler(
            self.config, self.memory, self.arena, self.policy, server_id=b"s" * 16, boot_id=b"b" * 16, log=self.log
        )

    def _config(self) -> ServerConfig:
        # Arenas of a few values: without this, the watermark would keep one of them free.
        whole = {"eviction": {"high_watermark": 1.0, "low_watermark": 0.99}}
        sections = {"memory": {"max_size": max(self.size, 2 * MIB)}, "storage": whole, **self.overrides}
        if self.network is None:
            return dev_server_config(os.urandom(32), address="127.0.0.1:0", overrides=sections)
        return ServerConfig.model_validate({**sections, "network": self.network})

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()

    async def connect(self, key_id: str = DEFAULT_KEY_ID, client_bytes: int = MIB) -> FakePeer:
        """A new open session with a region as long as ``client_bytes``."""
        assert self.handler.admit()
        session = SessionId(os.urandom(16))
        established = Established(session, self.handler.identity, key_id, PeerKind.ENGINE, 1)
        peer = FakePeer(established, FakeBulk(self.memory, client_bytes))
        try:
            await self.handler.opened(peer)
        except BaseException:
            self.handler.departed()
            raise
        return peer

    async def disconnect(self, peer: FakePeer) -> None:
        """What a transport does at the end of a session, its requests being over."""
        await peer.bulk.fence()
        await self.handler.closed(peer)
        self.handler.departed()

    async def ask(self, peer: FakePeer, request: Request[Any]) -> Any:
        """A request through its wire form, both ways."""
        body = await self.handler.handle(peer, request.TYPE, memoryview(request.pack()))
        assert body is not None
        return request.reply(memoryview(body))

    async def put(self, peer: FakePeer, values: dict[bytes, bytes], **changes: Any) -> list[Status]:
        """Puts ``values``, lying one after the other in the peer's region."""
        statuses: list[Status] = await self.ask(peer, self.put_request(peer, values, **changes))
        return statuses

    def put_request(
        self,
        peer: FakePeer,
        values: dict[bytes, bytes],
        *,
        checksum_xor: int = 0,
        timeout_ms: int = 10_000,
        algorithm: int = ChecksumAlgorithm.XXH3_64_TREE_1M,
    ) -> Put:
        items, at = [], 0
        for key, data in values.items():
            peer.bulk.client[at : at + len(data)] = data
            items.append(PutItem(key, digest(data) ^ checksum_xor, LAYOUT, Extent(0, at, len(data))))
            at += len(data)
        return Put(items, algorithm, timeout_ms)

    async def get(
        self, peer: FakePeer, keys: Sequence[bytes], length: int = VALUE, layout: int = LAYOUT, timeout_ms: int = 10_000
    ) -> list[GetResult]:
        """Gets ``keys`` into the peer's region, one after the other."""
        items = [GetItem(key, layout, Extent(0, at * length, length)) for at, key in enumerate(keys)]
        results: list[GetResult] = await self.ask(peer, Get(items, timeout_ms))
        return results

    def exists(self, key: bytes) -> bool:
        """Asks the index itself."""
        return self.handler._table._find(key) is not None

    def count(self, name: str) -> int:
        """A counter of the handler."""
        return int(self.handler.statistics()["counters"].get(name, 0))

    @property
    def used(self) -> int:
        """Bytes of the arena in use."""
        return self.arena.statistics().used
