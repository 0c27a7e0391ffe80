"""A store reduced to what a transport needs: values under keys at arena offsets, no reservation, no eviction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable

from anyio import sleep_forever
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import LicenseError, RemoteProtocolError, StoreError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Get, GetResult, Put
from memkv_vllm.protocol.session import Limits, ServerIdentity
from memkv_vllm.transports.base import EagerBulk, Move, ServerPeer
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, SessionId, Status

KEY = bytes(range(32))
LIMITS = Limits(max_frame_bytes=1 << 20, max_batch_keys=256, max_inflight=16, max_value_bytes=64 << 20)


def soon(seconds: float = 10.0) -> Deadline:
    """A generous deadline from now."""
    return Deadline(time.monotonic() + seconds)


def offset_of(key: bytes) -> int:
    """Keys of the scripted store say where their value stands: the first 8 bytes are the arena offset."""
    return int.from_bytes(key[:8], "little")


def key_at(offset: int) -> bytes:
    """The key of the value at ``offset`` of the arena."""
    return offset.to_bytes(8, "little") + bytes(24)


class ScriptedHandler:
    """A :class:`SessionHandler` whose puts and gets go straight to an arena, with hooks for tests."""

    def __init__(self, *, limits: Limits = LIMITS, keys: dict[str, bytes] | None = None, boot_id: bytes = b"b" * 16):
        self.identity = ServerIdentity(b"s" * 16, boot_id, limits)
        self.keys = {"default": KEY} if keys is None else keys
        self.counts: Counter[str] = Counter()
        self.peers: dict[SessionId, ServerPeer] = {}
        self.busy = False
        self.refuse: str | None = None
        self.on_request: Callable[[MessageType], Awaitable[None]] | None = None
        self.at_once: Callable[[MessageType, memoryview], bytes | None] | None = None
        self.answers_twice = False
        """Answer an eager get on the control connection, too."""
        self.eager = False
        """Whether the latest eager get was answered with its bytes."""
        self.running = 0
        self.max_running = 0
        self.statuses: list[Status] = []

    asks_license = False

    def find_key(self, key_id: str) -> bytes | None:
        return self.keys.get(key_id)

    def unproven(self, key_id: str) -> None:
        pass

    def licensed(self, peer: ServerPeer, token: str) -> None:
        raise LicenseError("no license is asked for here")

    async def watch(self, peer: ServerPeer) -> None:
        await sleep_forever()

    def admit(self) -> bool:
        if self.busy:
            return False
        self.counts["admitted"] += 1
        return True

    def departed(self) -> None:
        self.counts["departed"] += 1

    def counted(self, event: str) -> None:
        self.counts[event] += 1

    async def opened(self, peer: ServerPeer) -> None:
        if self.refuse is not None:
            raise StoreError(self.refuse)
        self.counts["opened"] += 1
        self.peers[peer.established.session] = peer

    async def closed(self, peer: ServerPeer) -> None:
        await checkpoint()
        self.counts["closed"] += 1
        del self.peers[peer.established.session]

    def answer(self, peer: ServerPeer, type: int, body: memoryview) -> bytes | None:
        """Everything has a task of its own here, unless a test says otherwise."""
        return None if self.at_once is None else self.at_once(MessageType(type), body)

    async def handle(self, peer: ServerPeer, type: int, body: memoryview) -> bytes | None:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await self._handle(peer, MessageType(type), body)
        finally:
            self.running -= 1

    async def _handle(self, peer: ServerPeer, type: MessageType, body: memoryview) -> bytes | None:
        self.counts[type.name] += 1
        if self.on_request is not None:
            await self.on_request(type)
        if type is MessageType.PING:
            return b""
        if type is MessageType.PUT:
            put = Put.unpack(body)
            moves = [Move(item.extent, offset_of(item.key)) for item in put.items]
            deadline = soon(put.timeout_ms / 1000)
            if put.eager:
                assert isinstance(peer.bulk, EagerBulk)
                expected = peer.bulk.eager_put([item.extent.length for item in put.items])
                statuses = await expected.pull(range(len(moves)), moves, deadline)
                await expected.finish(soon())
            else:
                statuses = await peer.bulk.pull(moves, deadline)
            self.statuses = statuses
            return bytes(statuses)
        if type is MessageType.GET:
            get = Get.unpack(body)
            moves = [Move(item.extent, offset_of(item.key)) for item in get.items]
            deadline = soon(get.timeout_ms / 1000)
            if get.eager:
                assert isinstance(peer.bulk, EagerBulk)
                eager = peer.bulk.eager_get([item.extent.length for item in get.items])
                answer = Get.pack_reply([GetResult(Status.OK, 0, 0, 0)] * len(moves))
                statuses = await eager.push(moves, deadline, answer)
                self.eager = eager.answered
                if eager.answered and not self.answers_twice:
                    self.statuses = statuses
                    return None
            else:
                statuses = await peer.bulk.push(moves, deadline)
            self.statuses = statuses
            return Get.pack_reply([GetResult(status, 0, 0, 0) for status in statuses])
        if type is MessageType.DELETE:
            raise StoreError("nothing is deleted here")
        if type is MessageType.STAT:
            raise ZeroDivisionError("a fault of this server")
        raise RemoteProtocolError("type", f"no {type.name} here")


def fill(memory: HostMemory, extent: Extent, seed: int) -> bytes:
    """Write bytes that ``seed`` tells into ``extent`` and return them."""
    data = (bytes((seed + i) % 251 for i in range(251)) * (extent.length // 251 + 1))[: extent.length]
    memory.view(extent.offset, extent.length)[:] = data
    return data
