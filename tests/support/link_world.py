"""A link over scripted connections, on the test's own loop: :class:`World` is its server, network and owner."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine import link as link_module
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.link import LinkSettings, ServerLink
from memkv_vllm.engine.routes import routes_of
from memkv_vllm.errors import (
    ConnectError,
    ConnectionLost,
    FenceTimeout,
    MemkvError,
    RequestTimeout,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Ping, Stat
from memkv_vllm.protocol.session import Established, Limits, PeerKind, ServerIdentity
from memkv_vllm.transports.base import Capabilities, Region
from memkv_vllm.transports.registry import Transports
from memkv_vllm.types import Deadline, MemoryKind, SessionId

Step = Callable[[], Awaitable[Any]]


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnects and fences are tried again after a millisecond."""
    monkeypatch.setattr(link_module, "RECONNECT_FIRST_S", 0.001)
    monkeypatch.setattr(link_module, "RECONNECT_MAX_S", 0.002)


class FakeConnection:
    """``replies`` are taken in order: a value, an exception, or a coroutine function that makes one of them."""

    def __init__(self, world: World, host: str = "rail0") -> None:
        self.world = world
        self.host = host
        self.number = len(world.connections) + 1
        server_id = world.server_ids.get(host, b"s" * 16)
        self.established = Established(
            SessionId(bytes(16)), ServerIdentity(server_id, b"b" * 16, Limits(1, 77, 1, 1)), "", PeerKind.ENGINE, 1
        )
        self.pings = 0
        self.lives = True
        self.ended = anyio.Event()
        self.failure: MemkvError | None = None
        self.registered: list[int] = []
        self.replies: list[Any] = []
        self.fence_tries = 0

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def expected_bytes_per_s(self) -> float | None:
        return self.world.expected_bytes_per_s

    async def run(self) -> None:
        await self.ended.wait()
        if self.failure is not None:
            raise self.failure

    async def register(self, region: Region, deadline: Deadline) -> None:
        self.registered.append(region.id)
        await self.world.on_register()

    async def request(self, request: Any, deadline: Deadline) -> Any:
        await anyio.lowlevel.checkpoint()
        if isinstance(request, Ping):
            return await self._ping(deadline)
        reply = self.replies.pop(0) if self.replies else None
        if callable(reply):
            reply = await reply()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _ping(self, deadline: Deadline) -> None:
        self.pings += 1
        with anyio.move_on_after(deadline - time.monotonic()):
            while not self.lives:  # noqa: ASYNC110 - a test changes it
                await anyio.sleep(0.001)
            if not self.alive:
                raise ConnectionLost("cut")
            return
        raise RequestTimeout("no answer to a PING")

    async def fence(self, deadline: Deadline) -> None:
        self.fence_tries += 1
        self.ended.set()
        await anyio.lowlevel.checkpoint()
        if self.number in self.world.unfenced:
            raise FenceTimeout("not yet")

    async def aclose(self) -> None:
        self.ended.set()
        await anyio.lowlevel.checkpoint()

    def cut(self, error: MemkvError | None = None) -> None:
        """The server ends it."""
        self.failure = error or ConnectionLost("cut")
        self.ended.set()


async def at_once() -> None:
    """What registering and greeting do unless told otherwise."""
    await anyio.lowlevel.checkpoint()


@dataclass
class World:
    """A fake transport, the link over it, and what the link told."""

    regions: list[Region] = field(default_factory=list)
    refusals: list[MemkvError] = field(default_factory=list)
    """Errors of the next connects."""
    unfenced: set[int] = field(default_factory=set)
    """Connections whose fence times out."""
    connections: list[FakeConnection] = field(default_factory=list)
    fenced: list[Holder] = field(default_factory=list)
    changes: int = 0
    on_register: Step = at_once
    on_greet: Step = at_once
    connects: int = 0
    name: str = "fake"
    capabilities: Capabilities = Capabilities(True, False, True)
    rails: tuple[str, ...] = ("rail0",)
    """Hosts, by rail."""
    preferred: int = 0
    cut_rails: set[str] = field(default_factory=set)
    """Hosts that no connection can be made to."""
    tried: list[str] = field(default_factory=list)
    """Hosts of all attempts to connect."""
    server_ids: dict[str, bytes] = field(default_factory=dict)
    expected_bytes_per_s: float | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        settings = LinkSettings(Credentials(bytes(32)), PeerKind.ENGINE, 5.0, 5.0, self.ranks)
        self.link = ServerLink(
            "a",
            routes_of(ServerAddress("a", tuple(RailAddress(host, 1) for host in self.rails)), ["fake"], self.preferred),
            Transports(["fake"], lambda _: self),
            settings,
            regions=self.regions,
            greet=self._greet,
            on_change=self._changed,
            on_fenced=self.fenced.append,
        )

    async def connect(
        self, host: str, port: int, credentials: Credentials, kind: PeerKind, deadline: Deadline
    ) -> FakeConnection:
        await anyio.lowlevel.checkpoint()
        self.connects += 1
        self.tried.append(host)
        if self.refusals:
            raise self.refusals.pop(0)
        if host in self.cut_rails:
            raise ConnectError(f"no way to {host}")
        self.connections.append(FakeConnection(self, host))
        return self.connections[-1]

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def _greet(self, link: ServerLink, connection: Any) -> None:
        await self.on_greet()

    def _changed(self) -> None:
        self.changes += 1

    @property
    def now(self) -> FakeConnection:
        """The latest connection."""
        return self.connections[-1]

    async def ready(self, number: int = 1) -> FakeConnection:
        """Wait until connection ``number`` is ready."""
        await until(lambda: self.link.connected and len(self.connections) >= number)
        return self.now

    async def ask(self, *, names_memory: bool = True, gave_up: Callable[[Any], int] = lambda _: 0) -> Any:
        """A request."""
        return await self.link.request(Stat(), soon(), names_memory=names_memory, gave_up=gave_up)


def soon() -> Deadline:
    return Deadline(time.monotonic() + 5)


async def until(condition: Callable[[], Any]) -> None:
    """Wait for ``condition``."""
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - the point of a test is to look from outside
            await anyio.sleep(0.001)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[World]:
    """A world whose link runs."""
    world = World(**options)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.link.run)
        try:
            yield world
        except Exception as error:
            failure = error  # raised outside, so that no task group wraps it
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def region(number: int) -> Region:
    return Region(number, MemoryKind.HOST, 4096)
