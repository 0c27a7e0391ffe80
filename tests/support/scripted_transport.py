"""A client transport whose server is a script: a test decides when a reply comes, when a byte lands, when a fence ends.

An engine uses it as transport ``tests.support.scripted_transport:ScriptedTransport``; server ``name`` on port ``p`` is
the :class:`Script` registered under ``p``. Everything of it runs on the engine's loop; a test steers it from its own
thread with :class:`Gate` objects and reads plain counters. Bytes move between ``Script.values`` and the real staging
memory of the engine, so a late write lands where a real one would.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import anyio

from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import ConnectError, ConnectionLost, FenceTimeout, RequestTimeout
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetResult, Ping, Put, Request
from memkv_vllm.protocol.session import Established, Limits, PeerKind, ServerIdentity
from memkv_vllm.transports.base import Capabilities, Region
from memkv_vllm.types import Deadline, Extent, SessionId, Status
from tests.support.ranks import cluster_settings

R = TypeVar("R")
LIMITS = Limits(max_frame_bytes=1 << 20, max_batch_keys=256, max_inflight=64, max_value_bytes=64 << 20)


class Gate:
    """Something that a script waits for and a test opens, from any thread. Open at first."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self.waiting = 0

    def open(self) -> None:
        """Let everybody through."""
        self.is_open = True

    def shut(self) -> None:
        """Let nobody through any more."""
        self.is_open = False

    async def passed(self) -> None:
        """Return when it is open."""
        self.waiting += 1
        try:
            while not self.is_open:  # noqa: ASYNC110 - a test opens it from a thread of its own
                await anyio.sleep(0.001)
        finally:
            self.waiting -= 1


class Value(NamedTuple):
    """What a script has under a key."""

    data: bytes
    checksum: int
    layout: int
    generation: int


Hook = Callable[["ScriptedConnection", Any], Awaitable[Any]]


@dataclass
class Script:
    """One server. ``on_get`` and ``on_put`` may answer, raise, wait, or return None for the normal course."""

    values: dict[bytes, Value] = field(default_factory=dict)
    on_get: Hook | None = None
    on_put: Hook | None = None
    on_request: Hook | None = None
    accepts: Gate = field(default_factory=Gate)
    accepts_verbs: Gate = field(default_factory=Gate)
    """The same for :class:`ScriptedVerbs`."""
    lives: Gate = field(default_factory=Gate)
    """Shut: no PING is answered. Requests are the hooks' business."""
    pings: int = 0
    server_id: bytes = b"s" * 16
    registers: Gate = field(default_factory=Gate)
    fences: dict[int, Gate] = field(default_factory=dict)
    """By number of the connection, from 1; those without a gate are fenced at once."""
    expected_bytes_per_s: float | None = None
    fails_at_close: bool = True
    """Requests under way fail when their connection is closed; else only when their hook does."""
    limits: Limits = LIMITS
    connections: list[ScriptedConnection] = field(default_factory=list)
    named: list[tuple[int, Extent]] = field(default_factory=list)
    """Every extent that a get named, with the number of its connection."""
    registered: list[tuple[int, int]] = field(default_factory=list)
    """(connection, region) of every REGISTER."""
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def put(self, key: bytes, data: bytes, layout: int = 7) -> None:
        """Store a value."""
        self.values[key] = Value(data, digest(data), layout, next(self.generations))


_SCRIPTS: dict[int, Script] = {}


@contextmanager
def scripted(
    *names: str, connect_timeout_s: float = 5.0, op_timeout_s: float = 5.0
) -> Iterator[tuple[ClusterSettings, dict[str, Script]]]:
    """Scripts by server name, and the settings of an engine that uses them."""
    ports = {name: port for port, name in enumerate(names, start=1)}
    scripts = {name: Script() for name in names}
    _SCRIPTS.update({ports[name]: script for name, script in scripts.items()})
    real = cluster_settings(b"k" * 32, ports, connect_timeout_s, op_timeout_s)
    transport = f"{__name__}:{ScriptedTransport.__name__}"
    try:
        yield ClusterSettings(real.servers, real.credentials, transport, connect_timeout_s, op_timeout_s), scripts
    finally:
        _SCRIPTS.clear()


class ScriptedConnection:
    """See ``memkv_vllm.transports.base.ClientConnection``."""

    def __init__(self, script: Script, number: int, transport: str = "scripted") -> None:
        identity = ServerIdentity(script.server_id, b"b" * 16, script.limits)
        self.transport = transport
        self.established = Established(SessionId(os.urandom(16)), identity, "default", PeerKind.ENGINE, 1)
        self.script = script
        self.number = number
        self.closed = anyio.Event()
        self.requests = 0
        self._loop = asyncio.get_running_loop()
        self.regions: dict[int, Region] = {}

    @property
    def alive(self) -> bool:
        return not self.closed.is_set()

    @property
    def expected_bytes_per_s(self) -> float | None:
        return self.script.expected_bytes_per_s

    async def run(self) -> None:
        await self.closed.wait()

    async def register(self, region: Region, deadline: Deadline) -> None:
        self.script.registered.append((self.number, region.id))
        await self.script.registers.passed()
        assert region.id not in self.regions, "a region was registered twice"
        self.regions[region.id] = region

    async def request(self, request: Request[R], deadline: Deadline) -> R:
        if not self.alive:
            raise ConnectionLost("closed")
        self.requests += 1
        replies: list[Any] = []
        failure: list[Exception] = []

        async def answer(scope: anyio.CancelScope) -> None:
            try:
                replies.append(await self._answer(request))
            except Exception as error:
                failure.append(error)
            scope.cancel()

        with anyio.move_on_at(anyio.current_time() + max(0.0, deadline - time.monotonic())):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer, tasks.cancel_scope)
                if self.script.fails_at_close:
                    await self.closed.wait()
                    tasks.cancel_scope.cancel()
        if failure:
            raise failure[0]
        if not replies:
            raise ConnectionLost("closed") if self.closed.is_set() else RequestTimeout("no answer")
        reply: R = replies[0]
        return reply

    async def fence(self, deadline: Deadline) -> None:
        await self.aclose()
        gate = self.script.fences.get(self.number)
        if gate is not None:
            with anyio.move_on_at(anyio.current_time() + max(0.0, deadline - time.monotonic())) as scope:
                await gate.passed()
            if scope.cancelled_caught:
                raise FenceTimeout("not yet")

    async def aclose(self) -> None:
        self.closed.set()
        await anyio.lowlevel.checkpoint()

    def cut(self) -> None:
        """The server ends this connection; from any thread."""
        self._loop.call_soon_threadsafe(self.closed.set)

    def memory(self, extent: Extent) -> memoryview:
        """The bytes of an extent, to write whenever a test likes."""
        memory = self.regions[extent.region].memory
        assert memory is not None
        return memory.view(extent.offset, extent.length)

    async def _answer(self, request: Request[Any]) -> Any:
        script = self.script
        if isinstance(request, Ping):
            script.pings += 1
            return await script.lives.passed()
        if isinstance(request, Get):
            script.named += [(self.number, item.extent) for item in request.items]
        hook = script.on_get if isinstance(request, Get) else script.on_put if isinstance(request, Put) else None
        for each in (hook, script.on_request):
            if each is not None and (reply := await each(self, request)) is not None:
                return reply
        if isinstance(request, Get):
            return self.push(request)
        assert isinstance(request, Put), f"no script for {request}"
        return self._pull(request)

    def push(self, request: Get) -> list[GetResult]:
        """The normal course of a get."""
        results = []
        for key, layout, extent in request.items:
            value = self.script.values.get(key)
            if value is None or value.layout != layout:
                status = Status.ABSENT if value is None else Status.BAD_LAYOUT
                results.append(GetResult(status, 0, 0, 0))
                continue
            self.memory(extent)[:] = value.data
            algorithm = int(ChecksumAlgorithm.XXH3_64_TREE_1M)
            results.append(GetResult(Status.OK, algorithm, value.checksum, value.generation))
        return results

    def _pull(self, request: Put) -> list[Status]:
        for key, checksum, layout, extent in request.items:
            data = bytes(self.memory(extent))
            assert digest(data) == checksum
            self.script.put(key, data, layout)
        return [Status.OK] * len(request.items)


class ScriptedTransport:
    """See ``memkv_vllm.transports.base.ClientTransport``."""

    name: ClassVar[str] = "scripted"
    connection: ClassVar[type[ScriptedConnection]] = ScriptedConnection
    capabilities: ClassVar[Capabilities] = Capabilities(one_sided=True, gpu_memory=False, same_host=True)

    def __init__(self, **options: Any) -> None:
        self.options = options

    async def connect(
        self, host: str, port: int, credentials: Credentials, kind: PeerKind, deadline: Deadline
    ) -> ScriptedConnection:
        script = _SCRIPTS[port]
        await anyio.lowlevel.checkpoint()
        if not (script.accepts_verbs if self.name == "verbs" else script.accepts).is_open:
            raise ConnectError(f"no server there over {self.name}")
        script.connections.append(self.connection(script, len(script.connections) + 1, self.name))
        return script.connections[-1]

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


class ScriptedTcp(ScriptedTransport):
    """What a test puts in the place of ``tcp``."""

    name: ClassVar[str] = "tcp"


class ScriptedVerbs(ScriptedTransport):
    """Another way to the same scripts, in the place of ``verbs``."""

    name: ClassVar[str] = "verbs"
