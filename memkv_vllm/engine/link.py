"""One server as a client sees it: connected in the background, given up at once when it does not answer.

A link goes round: connect -> register the staging regions -> greet -> ready -> (the connection ends) -> wait
-> connect. While it is not ready, or its breaker is open, requests fail at once without touching the network.

Every connection has a *generation*. When one ends with requests in flight, or a request's deadline passes,
the connection is *condemned*: nothing more is sent on it, and a task of its own fences it, for as long as it
takes, and then reports the generation as fenced. Only then may the slots that it could write be reused.
Reconnecting does not wait for that.

A generation is reported as fenced only after every request on it has returned to its caller, so a caller that
puts its slots into quarantine in the same breath always does it before. Generations are fenced in any order.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import anyio
from anyio.abc import TaskGroup

from memkv_vllm.engine.breaker import Backoff, Breaker, BreakerState
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.errors import (
    ConnectError,
    ConnectionLost,
    FenceTimeout,
    MemkvError,
    RemoteProtocolError,
    RequestTimeout,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Request
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, ClientTransport, Region
from memkv_vllm.types import Deadline

R = TypeVar("R")
logger = logging.getLogger("memkv.engine")

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 2.0
"""A server that comes back is used again within about this time; an attempt costs one connect."""

FENCE_TRY_S = 5.0
"""One attempt to fence; a condemned connection is tried again and again until it is fenced."""

MAX_UNFENCED = 16
"""Connections to one server that may wait for their fence; with so many its data path is broken."""


class LinkSettings(NamedTuple):
    """What a link needs to know; timeouts in seconds."""

    credentials: Credentials
    kind: PeerKind
    connect_timeout_s: float
    op_timeout_s: float


class LinkStatistics(NamedTuple):
    """Counters of one link; they never decrease."""

    ready: bool
    generation: int
    connects: int
    connect_failures: int
    fences: int


class _Generation:
    """One connection, from its set-up until it is fenced."""

    def __init__(self, connection: ClientConnection, holder: Holder) -> None:
        self.connection = connection
        self.holder = holder
        self.registered: set[int] = set()
        self.owes = False
        """A request that names memory ended without the server's word that its bytes are done."""
        self._under_way = 0
        self._quiet = anyio.Event()

    def begin(self) -> None:
        """A request leaves."""
        self._under_way += 1

    def end(self) -> None:
        """It returns to its caller, who goes on at once."""
        self._under_way -= 1
        if not self._under_way:
            self._quiet.set()
            self._quiet = anyio.Event()

    async def quiet(self) -> None:
        """Return when no request is under way."""
        while self._under_way:
            await self._quiet.wait()


class ServerLink:
    """Keeps one server connected. All methods belong to the owner's event loop.

    Args:
        name: the server's name (placement hashes it).
        host, port: the address of the rail in use.
        transport: makes the connections.
        settings: credentials, timeouts.
        regions: the staging regions to register on every connection; the list is the owner's and may grow.
        greet: awaited on every new connection before it counts as ready.
        on_change: called when the link became ready or stopped being so.
        on_fenced: called with a holder that can touch nothing any more.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        transport: ClientTransport,
        settings: LinkSettings,
        *,
        regions: list[Region],
        greet: Callable[[ServerLink, ClientConnection], Awaitable[None]] | None,
        on_change: Callable[[], None],
        on_fenced: Callable[[Holder], None],
    ) -> None:
        self.name = name
        self.address = f"{host}:{port}"
        self._host, self._port = host, port
        self._transport = transport
        self._settings = settings
        self._regions = regions
        self._greet = greet
        self._on_change = on_change
        self._on_fenced = on_fenced
        self._breaker = Breaker(random.random)
        self._backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S, random.random)
        self._ready: _Generation | None = None
        self._unfenced: dict[Holder, _Generation] = {}
        self._tasks: TaskGroup | None = None
        self._generation = 0
        self._connects = self._connect_failures = self._fences = 0
        self._last_problem = ""
        self._ended: MemkvError = ConnectionLost("not connected yet")

    def __repr__(self) -> str:
        state = "ready" if self._ready is not None else "down"
        return f"<ServerLink {self.name} {state} generation={self._generation}>"

    @property
    def holder(self) -> Holder:
        """The current connection as a slot holder."""
        return Holder(self.name, self._generation)

    @property
    def connected(self) -> bool:
        """Whether a connection is ready, whatever its breaker says."""
        return self._ready is not None

    @property
    def max_batch_keys(self) -> int:
        """Most keys of one request, as the server said; where none is connected, nothing is sent anyway."""
        return 1 if self._ready is None else self._ready.connection.established.server.limits.max_batch_keys

    def available(self, now: float) -> bool:
        """Whether a request would be sent now. O(1); half-open lets a single probe through."""
        return self._ready is not None and self._breaker.allow(now)

    def statistics(self) -> LinkStatistics:
        """A snapshot."""
        return LinkStatistics(self.connected, self._generation, self._connects, self._connect_failures, self._fences)

    # -- requests

    async def request(
        self,
        request: Request[R],
        deadline: Deadline,
        *,
        names_memory: bool = False,
        gave_up: Callable[[R], int] = lambda _: 0,
    ) -> R:
        """Send a request on the current connection.

        Args:
            request: what to send.
            deadline: when to give up.
            names_memory: whether it names staging extents. If so, a missed deadline condemns the connection: the
                server may still move bytes. Otherwise it only counts against the server.
            gave_up: how many of a reply's transfers the server gave up on. It moves nothing more over such a
                connection, which is condemned; the reply is returned all the same.

        Raises:
            ConnectError: not connected; nothing was sent.
            RequestTimeout, ConnectionLost, RemoteProtocolError: bytes may still move under :attr:`holder` as it was
                before the call; it will be reported as fenced, after this call has returned.
            StoreError, LocalProtocolError: refused as a whole; no byte moves.
        """
        ready = self._ready
        if ready is None:
            raise ConnectError(f"server {self.name} ({self.address}) is not connected: {self._last_problem}")
        ready.begin()
        try:
            reply = await ready.connection.request(request, deadline)
        except (RequestTimeout, ConnectionLost, RemoteProtocolError) as error:
            self._failed(ready, error, names_memory)
            raise
        except StoreError:
            self._breaker.succeeded(time.monotonic())
            raise
        finally:
            ready.end()
        if count := gave_up(reply):
            self._failed(ready, RequestTimeout(f"server {self.name} gave up on {count} transfers"), names_memory)
        else:
            self._breaker.succeeded(time.monotonic())
        return reply

    def _failed(self, ready: _Generation, error: MemkvError, names_memory: bool) -> None:
        if self._ready is ready:
            # However many requests end with a connection, it is one failure of the server.
            self._breaker.failed(time.monotonic())
        ready.owes |= names_memory
        if names_memory or not ready.connection.alive or self._breaker.state is BreakerState.OPEN:
            self._condemn(ready, error)

    async def register(self, region: Region) -> None:
        """Register a further region on the ready connection, which is condemned if that fails."""
        ready = self._ready
        if ready is None or region.id in ready.registered:
            return
        try:
            await self._register(ready, region)
        except MemkvError as error:
            self._condemn(ready, error)

    # -- the round

    async def run(self) -> None:
        """Keep the server connected until cancelled; on the way out every connection is closed."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            while True:
                connection = await self._connect()
                if connection is not None:
                    await self._serve(connection)
                await anyio.sleep(self._backoff.next_delay())

    async def _connect(self) -> ClientConnection | None:
        settings = self._settings
        if len(self._unfenced) >= MAX_UNFENCED:
            self._problem(FenceTimeout(f"{MAX_UNFENCED} of its connections are not fenced; no other is made before"))
            return None
        deadline = self._deadline(settings.connect_timeout_s)
        try:
            return await self._transport.connect(self._host, self._port, settings.credentials, settings.kind, deadline)
        except MemkvError as error:
            self._connect_failures += 1
            self._problem(error)
            return None

    async def _serve(self, connection: ClientConnection) -> None:
        """Drive one connection from its set-up to its end."""
        self._generation += 1
        generation = _Generation(connection, self.holder)
        self._unfenced[generation.holder] = generation
        self._ended = ConnectionLost(f"server {self.name} ({self.address}) closed the connection")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._drive, connection, tasks)
                if await self._set_up(generation):
                    logger.info("event=connected server=%s generation=%d address=%s", *generation.holder, self.address)
                    self._ready = generation
                    self._on_change()
                    await anyio.sleep_forever()
                tasks.cancel_scope.cancel()
        finally:
            self._drop(generation)
            with anyio.CancelScope(shield=True), anyio.move_on_after(FENCE_TRY_S):
                await connection.aclose()
        self._problem(self._ended)
        if self._tasks is not None:
            self._tasks.start_soon(self._fence, generation)

    async def _drive(self, connection: ClientConnection, tasks: TaskGroup) -> None:
        """The connection's reader; its end is the end of the connection's task group."""
        try:
            await connection.run()
        except MemkvError as error:
            self._ended = error
        tasks.cancel_scope.cancel()

    async def _set_up(self, generation: _Generation) -> bool:
        """Greet and register the regions; False when that failed, with the reason in ``_ended``."""
        try:
            if self._greet is not None:
                await self._greet(self, generation.connection)
            # Regions may be added meanwhile: ready means that the server has them all.
            while missing := [region for region in self._regions if region.id not in generation.registered]:
                await self._register(generation, missing[0])
        except MemkvError as error:
            self._ended = error
            return False
        self._connects += 1
        self._backoff.reset()
        self._last_problem = ""
        return True

    async def _register(self, generation: _Generation, region: Region) -> None:
        generation.registered.add(region.id)
        await generation.connection.register(region, self._deadline(self._settings.connect_timeout_s))

    def _drop(self, generation: _Generation) -> None:
        if self._ready is generation:
            self._ready = None
            self._on_change()

    def _condemn(self, generation: _Generation, error: MemkvError) -> None:
        """Stop using a connection; closing it ends its round, which fences it."""
        if self._ready is not generation:
            return
        self._ended = error
        self._drop(generation)
        if self._tasks is not None:
            self._tasks.start_soon(self._close, generation.connection)

    @staticmethod
    async def _close(connection: ClientConnection) -> None:
        with anyio.move_on_after(FENCE_TRY_S):
            await connection.aclose()

    async def _fence(self, generation: _Generation) -> None:
        """Fence for as long as it takes where a slot waits for it: quarantine is cheaper than a wrong byte."""
        backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S, random.random)
        while (problem := await self._try_fence(generation)) is not None:
            await generation.quiet()
            if not generation.owes:
                # Every request was answered: no slot waits for the proof, and nobody else needs it.
                break
            if not backoff.attempts:
                logger.warning(
                    "event=fence_pending server=%s generation=%d reason=%r: its staging slots stay in quarantine until "
                    "the server answers or its process has ended",
                    *generation.holder,
                    str(problem),
                )
            await anyio.sleep(backoff.next_delay())
        await generation.quiet()
        del self._unfenced[generation.holder]
        if problem is None:
            self._fences += 1
            self._on_fenced(generation.holder)

    async def _try_fence(self, generation: _Generation) -> MemkvError | None:
        try:
            await generation.connection.fence(self._deadline(FENCE_TRY_S))
        except MemkvError as error:
            return error
        return None

    def _problem(self, error: MemkvError) -> None:
        """One line per new problem, not one per attempt."""
        text = str(error)
        if text == self._last_problem:
            return
        self._last_problem = text
        logger.warning(
            "event=server_down server=%s address=%s reason=%r: its share of lookups and loads misses until it is "
            "back; reconnecting in the background",
            self.name,
            self.address,
            text,
        )

    @staticmethod
    def _deadline(timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s)
