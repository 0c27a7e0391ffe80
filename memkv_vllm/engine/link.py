"""One server as a client sees it: connected in the background, given up at once when it does not answer.

A link goes round: connect over the best way that works (``routes``) -> greet -> register the staging regions -> ready
-> (the connection ends) -> wait -> connect. While it is not ready, or its breaker is open, requests fail at once
without touching the network.

While a connection over a second choice is in use, better ways are tried beside it from time to time. The first one
that is ready takes over: requests go there from then on, and the old connection ends when those under way on it have
been answered. So nothing is lost by going back to a repaired rail, or from tcp to verbs.

Every connection has a *generation*. When one ends with requests in flight, or a request's deadline passes, or the
server shows no sign of life, the connection is *condemned*: nothing more is sent on it, and a task of its own fences
it, for as long as it takes, and then reports the generation as fenced. Only then may the slots that it could write be
reused. Reconnecting does not wait for that.

A generation is reported as fenced only after every request on it has returned to its caller, so a caller that
puts its slots into quarantine in the same breath always does it before. Generations are fenced in any order.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import anyio
from anyio.abc import TaskGroup

from memkv_vllm.engine.breaker import Backoff, Breaker, BreakerState
from memkv_vllm.engine.generation import Generation
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.linklog import LinkLog
from memkv_vllm.engine.pace import Pace, PaceChange
from memkv_vllm.engine.routes import Route, Routes
from memkv_vllm.engine.verdict import FirstVerdict
from memkv_vllm.errors import (
    ConnectError,
    ConnectionLost,
    FenceTimeout,
    MemkvError,
    NotSent,
    RemoteProtocolError,
    RequestTimeout,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Ping, Request
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, Region
from memkv_vllm.transports.registry import Transports
from memkv_vllm.types import Deadline

R = TypeVar("R")

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 2.0
"""A server that comes back is used again within about this time; an attempt costs one connect per way."""

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
    ranks: int = 1
    """Of this host: they share out the rails, so each can expect its part of them."""


class LinkStatistics(NamedTuple):
    """What one link has done. Counters never decrease."""

    ready: bool
    generation: int
    connects: int
    connect_failures: int
    fences: int
    moves: int
    """Connections that took over from one that still worked, because their way is better."""
    silences: int
    """Connections given up because the server showed no sign of life."""
    slow_paths: int
    """Times that transfers were found to be far slower than their way should be."""
    by_transport: Mapping[str, int]
    """``connects`` by what was chosen."""
    route: Route | None
    """The way of the ready connection."""


class ServerLink:
    """Keeps one server connected. Belongs to the owner's event loop.

    Args:
        name: the server's name (placement hashes it).
        routes: the ways to it, best first.
        transports: makes the connections.
        settings: credentials, timeouts.
        regions: the staging regions to register on every connection; the list is the owner's and may grow.
        greet: awaited on every new connection before it counts as ready.
        on_change: called when the link became ready or stopped being so, or moved.
        on_fenced: called with a holder that can touch nothing any more.
    """

    def __init__(
        self,
        name: str,
        routes: Sequence[Route],
        transports: Transports,
        settings: LinkSettings,
        *,
        regions: list[Region],
        greet: Callable[[ServerLink, ClientConnection], Awaitable[None]] | None,
        on_change: Callable[[], None],
        on_fenced: Callable[[Holder], None],
    ) -> None:
        self.name = name
        self._routes = Routes(routes, random.random)
        self._transports = transports
        self._settings = settings
        self._regions = regions
        self._greet = greet
        self._on_change = on_change
        self._on_fenced = on_fenced
        self._breaker = Breaker(random.random)
        self._backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S, random.random)
        self._log = LinkLog(name, routes)
        self.verdict = FirstVerdict()
        self._pace = Pace()
        self._share = min(1.0, len({route.rail for route in routes}) / settings.ranks)
        self._ready: Generation | None = None
        self._down = anyio.Event()
        self._unfenced: dict[Holder, Generation] = {}
        self._tasks: TaskGroup | None = None
        self._generation = 0
        self._counts: Counter[str] = Counter()
        self._by_transport: Counter[str] = Counter()

    def __repr__(self) -> str:
        state = "down" if self._ready is None else f"ready over {self._ready.route}"
        return f"<ServerLink {self.name} {state} generation={self._generation}>"

    @property
    def holder(self) -> Holder:
        """The connection that a request would go over, as a slot holder; else the latest one."""
        return Holder(self.name, self._generation) if self._ready is None else self._ready.holder

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
        counts, ready = self._counts, self._ready
        return LinkStatistics(
            ready=ready is not None,
            generation=self._generation,
            connects=counts["connects"],
            connect_failures=counts["connect_failures"],
            fences=counts["fences"],
            moves=counts["moves"],
            silences=counts["silences"],
            slow_paths=counts["slow_paths"],
            by_transport=dict(self._by_transport),
            route=None if ready is None else ready.route,
        )

    # -- requests

    async def request(
        self,
        request: Request[R],
        deadline: Deadline,
        *,
        names_memory: bool = False,
        size_bytes: int = 0,
        moved: Callable[[R], int] = lambda _: 0,
        gave_up: Callable[[R], int] = lambda _: 0,
    ) -> R:
        """Send a request on the current connection.

        Args:
            request: what to send.
            deadline: when to give up.
            names_memory: whether it names staging extents. If so, a missed deadline condemns the connection: the
                server may still move bytes. Otherwise it only counts against the server.
            size_bytes: of all the extents that it names.
            moved: how many of them a reply says were moved.
            gave_up: how many of a reply's transfers the server gave up on. It moves nothing more over such a
                connection, which is condemned; the reply is returned all the same.

        Raises:
            ConnectError: not connected; nothing was sent.
            NotSent: too many requests are on their way; nothing was sent.
            RequestTimeout, ConnectionLost, RemoteProtocolError: bytes may still move under :attr:`holder` as it was
                before the call; it will be reported as fenced, after this call has returned.
            StoreError, LocalProtocolError: refused as a whole; no byte moves.
        """
        ready = self._ready
        if ready is None:
            raise ConnectError(f"server {self.name} is not connected: {self._log.last_problem or 'not tried yet'}")
        ready.begin()
        self._pace.begin(size_bytes, time.monotonic())
        moved_bytes = 0
        try:
            reply = await ready.connection.request(request, deadline)
            ready.heard()
            moved_bytes = moved(reply)
        except (RequestTimeout, NotSent, ConnectionLost, RemoteProtocolError) as error:
            # What was not sent moves nothing; only several in a row, with no answer in between, open the breaker.
            self._failed(ready, error, names_memory and not isinstance(error, NotSent))
            raise
        except StoreError:
            ready.heard()
            self._breaker.succeeded(time.monotonic())
            raise
        finally:
            ready.end()
            self._measure(size_bytes, moved_bytes)
        if count := gave_up(reply):
            self._failed(ready, RequestTimeout(f"server {self.name} gave up on {count} transfers"), names_memory)
        else:
            self._breaker.succeeded(time.monotonic())
        return reply

    def _measure(self, size_bytes: int, moved_bytes: int) -> None:
        change = self._pace.end(size_bytes, moved_bytes, time.monotonic())
        if change is not None:
            self._counts["slow_paths"] += change is PaceChange.SLOW
            self._log.pace_changed(change, self._pace)

    def _failed(self, generation: Generation, error: MemkvError, names_memory: bool) -> None:
        if self._ready is generation:
            # However many requests end with a connection, it is one failure of the server.
            self._breaker.failed(time.monotonic())
        generation.owes |= names_memory
        if names_memory or not generation.connection.alive or self._breaker.state is BreakerState.OPEN:
            self._condemn(generation, error)

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
                if await self._connect():
                    await self._keep()
                await anyio.sleep(self._backoff.next_delay())

    async def _connect(self) -> bool:
        """Try every way once, within one connect timeout in all; whether one is ready."""
        if len(self._unfenced) >= MAX_UNFENCED:
            self._log.down(FenceTimeout(f"{MAX_UNFENCED} of its connections are not fenced; no other is made before"))
            return False
        end = time.monotonic() + self._settings.connect_timeout_s
        order = self._routes.order(time.monotonic())
        failures: dict[Route, MemkvError] = {}
        for index, route in enumerate(order):
            now = time.monotonic()
            # What one leaves over, because it was refused at once, the others have.
            share_s = max(0.0, end - now) / (len(order) - index)
            if (error := await self._try(route, Deadline(now + share_s))) is None:
                better = self._routes.above(route)
                self._log.second_choice(route, [error for way, error in failures.items() if way in better])
                return True
            failures[route] = error
            self.verdict.failed(error)
        self.verdict.round_over()
        self._log.down(*failures.values())
        return False

    async def _keep(self) -> None:
        """Return when no connection is ready any more; meanwhile look for a better way."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._improve)
            while self._ready is not None:
                await self._down.wait()
            tasks.cancel_scope.cancel()

    async def _improve(self) -> None:
        """Try ways that are better than the one in use whenever they have rested, until the best is in use."""
        while (ready := self._ready) is not None:
            due = self._routes.next_probe(ready.route)
            if due is None:
                return
            await anyio.sleep(max(0.0, due - time.monotonic()))
            for route in self._routes.better(ready.route, time.monotonic()):
                if len(self._unfenced) >= MAX_UNFENCED:
                    self._routes.failed(route, time.monotonic())
                    continue
                if await self._try(route, _deadline(self._settings.connect_timeout_s)) is None:
                    break

    async def _try(self, route: Route, deadline: Deadline) -> MemkvError | None:
        """Connect over ``route`` and make that the ready connection; else say why not, and let the way rest."""
        settings = self._settings
        try:
            transport = self._transports.get(route.transport)
            connection = await transport.connect(route.host, route.port, settings.credentials, settings.kind, deadline)
        except MemkvError as error:
            self._counts["connect_failures"] += 1
            self._routes.failed(route, time.monotonic())
            return error
        assert self._tasks is not None
        self._generation += 1
        generation = Generation(connection, Holder(self.name, self._generation), route)
        self._unfenced[generation.holder] = generation
        self._tasks.start_soon(self._live, generation)
        try:
            await generation.settled.wait()
        except BaseException:
            generation.retire(ConnectionLost("given up during its set-up"))
            raise
        if generation is self._ready:
            return None
        self._routes.failed(route, time.monotonic())
        return generation.reason

    # -- one connection

    async def _live(self, generation: Generation) -> None:
        """The whole life of a connection after its handshake."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generation.read)
                tasks.start_soon(self._use, generation)
                await generation.retired.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._drop(generation)
            generation.retire(generation.reason)
            with anyio.CancelScope(shield=True), anyio.move_on_after(FENCE_TRY_S):
                await generation.connection.aclose()
        await self._fence(generation)

    async def _use(self, generation: Generation) -> None:
        """Set it up, then watch over it until it shows no sign of life."""
        try:
            await self._set_up(generation)
        except MemkvError as error:
            generation.retire(error)
            return
        # Nothing is awaited between the last region's registration and this.
        self._adopt(generation)
        silence = await generation.watch()
        self._counts["silences"] += isinstance(silence, RequestTimeout)
        if self._ready is generation:
            self._breaker.failed(time.monotonic())
        self._condemn(generation, silence)

    async def _set_up(self, generation: Generation) -> None:
        if self._ready is not None:
            await _refuse_a_stranger(self._ready, generation, self._settings.connect_timeout_s, self._log)
        if self._greet is not None:
            await self._greet(self, generation.connection)
        # Regions may be added meanwhile: ready means that the server has them all.
        while missing := [region for region in self._regions if region.id not in generation.registered]:
            await self._register(generation, missing[0])

    async def _register(self, generation: Generation, region: Region) -> None:
        generation.registered.add(region.id)
        await generation.connection.register(region, _deadline(self._settings.connect_timeout_s))

    def _adopt(self, generation: Generation) -> None:
        """From now on requests go over ``generation``; one that was ready before ends when it is quiet."""
        if generation.retired.is_set():
            return
        old, self._ready = self._ready, generation
        route = generation.route
        self._routes.worked(route)
        self._counts["connects"] += 1
        self._by_transport[route.transport] += 1
        self._log.connected(generation.holder, route)
        self.verdict.ready()
        rate = generation.connection.expected_bytes_per_s
        self._pace.expect(None if rate is None else rate * self._share)
        if old is None:
            self._down = anyio.Event()
        elif self._tasks is not None:
            self._counts["moves"] += 1
            self._log.moved(old.route, route)
            self._tasks.start_soon(self._drain, old)
        self._on_change()
        generation.settled.set()

    async def _drain(self, generation: Generation) -> None:
        """Every request has a deadline; this one is for a caller that gave it a longer one than the settings do."""
        with anyio.move_on_after(self._settings.op_timeout_s):
            await generation.quiet()
        generation.retire(ConnectionLost("a better way to the server took over"))

    def _drop(self, generation: Generation) -> None:
        if self._ready is not generation:
            return
        self._ready = None
        if generation.useful:
            # A server that is connected to and is gone before it answered anything is not come back to at once.
            self._backoff.reset()
        if generation.retired.is_set():  # else this process is ending, which is nobody's problem
            self._log.down(generation.reason)
        self._down.set()
        self._on_change()

    def _condemn(self, generation: Generation, error: MemkvError) -> None:
        """Stop using a connection; its task closes and fences it."""
        if isinstance(error, RequestTimeout):
            self._routes.failed(generation.route, time.monotonic())
        generation.retire(error)
        self._drop(generation)

    async def _fence(self, generation: Generation) -> None:
        """Report a connection that ended as fenced, after its requests have returned."""
        backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S, random.random)
        proven = await generation.fence(FENCE_TRY_S, backoff, self._log.fence_pending)
        del self._unfenced[generation.holder]
        if proven:
            self._counts["fences"] += 1
            self._on_fenced(generation.holder)


def _deadline(timeout_s: float) -> Deadline:
    return Deadline(time.monotonic() + timeout_s)


async def _refuse_a_stranger(ready: Generation, new: Generation, timeout_s: float, log: LinkLog) -> None:
    """Two rails of one entry must lead to one server, or its blocks would be looked for on another.

    Raises:
        RemoteProtocolError: another server answers on ``new`` than on ``ready``, the connection in use, which lives.
    """
    used, found = ready.connection.established.server, new.connection.established.server
    if used.server_id == found.server_id:
        return
    try:
        await ready.connection.request(Ping(), _deadline(timeout_s))
    except MemkvError:
        return  # the one in use is gone: this is what came after it
    error = RemoteProtocolError(
        "server_id",
        f"{new.route} leads to server {found.server_id.hex()}, {ready.route} to {used.server_id.hex()}: "
        f"list only addresses of one server under {new.holder.server!r}",
    )
    log.rails_differ(error)
    raise error
