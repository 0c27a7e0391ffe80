"""One connection of a link, from its set-up until it is fenced: what is under way on it, and whether its peer lives.

A server that has died closes its connections; one that is frozen, or cut off by the network, says nothing at all, and
each request to it would hold its staging slots until its own deadline. So a connection that owes an answer for
``QUIET_S`` and has heard nothing meanwhile sends a PING, which a healthy server answers at once however many
transfers it is busy with: it is told nothing else from a slow one by this. One that is idle is asked now and then, so
that the first request after a pause does not find out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from memkv_vllm.engine.breaker import Backoff
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.routes import Route
from memkv_vllm.errors import ConnectionLost, MemkvError, NotSent, RequestTimeout, StoreError
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.transports.base import ClientConnection
from memkv_vllm.types import Deadline

__all__ = ["IDLE_S", "PING_TIMEOUT_S", "PING_TRIES", "QUIET_S", "Generation"]

QUIET_S = 2.0
"""Silence, while an answer is owed, after which the server is asked whether it lives. A batch takes milliseconds."""

IDLE_S = 10.0
"""The same while nothing is owed: one message per server and process in so many seconds."""

PING_TIMEOUT_S = 1.5
PING_TRIES = 2
"""Two, because this process may have stood still itself (a long hold of the interpreter lock): then the first one's
answer comes too late by our own fault, and the second one's does not. A frozen server is found out after
``QUIET_S + PING_TRIES * PING_TIMEOUT_S`` = 5 s, well before ``op_timeout_s``."""


class Generation:
    """See the module's text. Belongs to its link's event loop.

    Args:
        connection: after its handshake.
        holder: its name among the holders of slots.
        route: the way it goes.
    """

    def __init__(self, connection: ClientConnection, holder: Holder, route: Route) -> None:
        self.connection = connection
        self.holder = holder
        self.route = route
        self.registered: set[int] = set()
        """Regions that the server was offered."""
        self.owes = False
        """A request that names memory ended without the server's word that its bytes are done."""
        self.useful = False
        """A request was answered."""
        self.settled = anyio.Event()
        """It is ready, or has ended before."""
        self.retired = anyio.Event()
        """Nothing is sent on it any more; its link's task closes and fences it."""
        self.reason: MemkvError = ConnectionLost(f"server {holder.server} ({route}) closed the connection")
        """Why it was retired."""
        self._under_way = 0
        self._quiet: anyio.Event | None = None
        self._silent_since: float | None = None
        self._parked = False
        self._asked = anyio.Event()

    def retire(self, reason: MemkvError) -> None:
        """Stop using it; only the first reason counts."""
        if not self.retired.is_set():
            self.reason = reason
            self.retired.set()
            self.settled.set()

    # -- requests

    def begin(self) -> None:
        """A request leaves."""
        self._under_way += 1
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            if self._parked:
                self._asked.set()

    def heard(self) -> None:
        """The server answered."""
        self._silent_since = time.monotonic() if self._under_way > 1 else None
        self.useful = True

    def end(self) -> None:
        """A request returns to its caller, who goes on at once."""
        self._under_way -= 1
        if not self._under_way and self._quiet is not None:
            self._quiet.set()

    async def quiet(self) -> None:
        """Return when no request is under way."""
        while self._under_way:
            # Made here and not per request: this is waited for once in a connection's life.
            if self._quiet is None or self._quiet.is_set():
                self._quiet = anyio.Event()
            await self._quiet.wait()

    # -- its own tasks

    async def read(self) -> None:
        """Drive the connection; its end retires this."""
        try:
            await self.connection.run()
        except MemkvError as error:
            self.retire(error)
        self.retire(self.reason)

    async def watch(self) -> MemkvError:
        """Return what the silence means, once the server has shown no sign of life."""
        while True:
            if self._silent_since is None:
                await self._park()
            since = self._silent_since
            if since is not None and (left := since + QUIET_S - time.monotonic()) > 0:
                await anyio.sleep(left)
            elif (error := await self._ping()) is not None:
                return error

    async def _park(self) -> None:
        """Return when a request leaves, or ``IDLE_S`` after none has."""
        self._asked = anyio.Event()
        self._parked = True
        with anyio.move_on_after(IDLE_S):
            await self._asked.wait()
        self._parked = False

    async def _ping(self) -> MemkvError | None:
        """None when the server lives."""
        for _ in range(PING_TRIES):
            try:
                await self.connection.request(Ping(), Deadline(time.monotonic() + PING_TIMEOUT_S))
            except RequestTimeout:
                continue
            except NotSent:
                return None  # this side is too busy to ask, which says nothing about the server
            except StoreError:
                pass  # it does not like it, so it lives
            except MemkvError as error:
                return error
            self._silent_since = time.monotonic() if self._under_way else None
            return None
        return RequestTimeout(
            f"no sign of life for {QUIET_S + PING_TRIES * PING_TIMEOUT_S:g} s, not to a PING either: the server is "
            f"frozen or the network is cut"
        )

    # -- the end

    async def fence(self, try_s: float, backoff: Backoff, say_pending: Callable[[Holder, MemkvError], None]) -> bool:
        """Fence for as long as it takes where a slot waits for it: quarantine is cheaper than a wrong byte.

        Args:
            try_s: deadline of one attempt.
            backoff: pauses between attempts.
            say_pending: told once when the first attempt failed and slots wait.

        Returns:
            Whether it is proven that the connection can touch nothing any more; false only where nobody waits for
            that. Every request has returned to its caller before.
        """
        while (problem := await self._try_fence(try_s)) is not None:
            await self.quiet()
            if not self.owes:
                # Every request was answered: no slot waits for the proof, and nobody else needs it.
                return False
            if not backoff.attempts:
                say_pending(self.holder, problem)
            await anyio.sleep(backoff.next_delay())
        await self.quiet()
        return True

    async def _try_fence(self, try_s: float) -> MemkvError | None:
        try:
            await self.connection.fence(Deadline(time.monotonic() + try_s))
        except MemkvError as error:
            return error
        return None

    def __repr__(self) -> str:
        state = "retired" if self.retired.is_set() else "live"
        return f"<Generation {self.holder.generation} over {self.route} {state}, {self._under_way} under way>"
