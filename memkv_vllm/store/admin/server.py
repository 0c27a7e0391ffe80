"""Admin HTTP of one store server: owns what it remembers, and serves before, while and after the store does.

It starts first, so that "starting" can be seen while a store reads its disks, and ends last, so that a drain can be
seen. The store is attached once its transports listen; from then on everything is read on the same event loop, so
nothing needs a lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskStatus

from memkv_vllm import __version__
from memkv_vllm.config import RailAddress, ServerConfig
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.admin.collector import MetricsPage
from memkv_vllm.store.admin.health import Facts, Reason, degraded, not_ready
from memkv_vllm.store.admin.listener import HttpListener
from memkv_vllm.store.admin.peers import Peers
from memkv_vllm.store.admin.routes import Routes
from memkv_vllm.store.admin.servers import read_row, tabulate
from memkv_vllm.store.admin.watch import HISTORY_STEP_S, History, LagWindow, Sample
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.store.server import StoreServer

__all__ = ["AdminServer"]

logger = logging.getLogger("memkv.admin")

_LAG_STEP_S = 0.5


class AdminServer:
    """Serves admin HTTP; implements what :class:`~memkv_vllm.store.admin.routes.Source` asks for.

    Args:
        config: the server's settings.
        clock: seconds since the epoch, for the charts.

    Raises:
        EnvironmentFault: ``network.admin_peers_ca`` cannot be used.
    """

    def __init__(self, config: ServerConfig, *, clock: Callable[[], float] = time.time) -> None:
        network = config.network
        token = network.admin_token
        self._routes = Routes(
            self,
            token=None if token is None else token.get_secret_value(),
            timeout_s=network.admin_timeout_s,
        )
        self._listener = HttpListener(network, self._routes.handle)
        self._peers = Peers(network)
        self._address = network.admin
        self._page = MetricsPage(self._statistics)
        self._max_lag_s = network.admin_max_lag_s
        self._lag = LagWindow()
        self._history = History(network.admin_history_s)
        self._clock = clock
        self._server: StoreServer | None = None

    def __repr__(self) -> str:
        return f"<AdminServer {self._listener!r}>"

    async def serve(self, *, task_status: TaskStatus[RailAddress] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; ``task_status.started(address)`` once it listens.

        After that nothing that goes wrong here ends the store: it is logged, and the store goes on without.

        Raises:
            EnvironmentFault: the address or the TLS files cannot be used.
        """
        started = False
        try:
            async with anyio.create_task_group() as tasks:
                self._address = address = await tasks.start(self._listener.serve)
                tasks.start_soon(self._watch_lag)
                tasks.start_soon(self._sample)
                logger.info("admin.started address=%s", address)
                started = True
                task_status.started(address)
        except Exception:
            if not started:
                raise
            logger.exception("admin.failed: the store goes on without admin HTTP; restart it when you can")

    def attach(self, server: StoreServer) -> None:
        """Shows ``server`` from now on: its transports listen."""
        self._server = server
        self._history.add(Sample.of(server.statistics(), self._clock()))

    def reload(self) -> None:
        """Reads the certificates again; one that cannot be used leaves the old one in force, and is logged."""
        for part in (self._listener, self._peers):
            try:
                part.reload()
            except EnvironmentFault as error:
                logger.error("admin.reload_failed reason=%r: the certificate stays as it was", str(error))

    # What the routes ask

    @property
    def store(self) -> StoreHandler | None:
        """The store; None before it has started."""
        return None if self._server is None else self._server.handler

    def not_ready(self) -> list[Reason]:
        """Why clients may not come; empty when they may."""
        return not_ready(self._facts())

    def degraded(self) -> list[Reason]:
        """What is wrong; empty when all is well."""
        return degraded(self._facts())

    def status(self) -> dict[str, Any]:
        """The store's statistics with health, rates and what admin HTTP counts itself."""
        if self._server is None:
            return {"admin": self._own()}
        return {**self._statistics(), "rates": self._history.rates(), **self._history.newest()}

    def history(self) -> dict[str, Any]:
        """The rows of the charts."""
        return self._history.statistics()

    async def servers(self) -> list[dict[str, Any]]:
        """A row for each server of the cluster, this one first; the others are asked now, or were just before."""
        others = await self._peers.rows()
        return tabulate(read_row(str(self._address), self.status(), is_this=True), others)

    def metrics(self) -> bytes:
        """The metrics page."""
        return self._page.render()

    # Inside

    def _facts(self) -> Facts:
        server = self._server
        return Facts(
            started=server is not None,
            draining=server is not None and server.handler.closing,
            arena_slow=server is not None and server.arena_slow,
            lag_s=self._lag.worst_s,
            max_lag_s=self._max_lag_s,
            reported=[] if server is None else self._reported(server),
        )

    @staticmethod
    def _reported(server: StoreServer) -> list[Reason]:
        step = "do what the detail says; the log of the server has more"
        disks = [Reason("disk", line, step) for line in server.health()]
        return [*disks, *(Reason("rail", line, step) for line in server.transport_health())]

    def _statistics(self) -> dict[str, Any]:
        assert self._server is not None
        return {**self._server.statistics(), "admin": self._own()}

    def _own(self) -> dict[str, Any]:
        reasons = self.degraded()
        return {
            "version": __version__,
            "ready": int(not self.not_ready()),
            "healthy": int(not reasons),
            "reasons": [reason.reason for reason in reasons],
            "details": [reason._asdict() for reason in reasons],
            "lag_s": round(self._lag.worst_s, 6),
            "responses": dict(self._routes.responses),
            "connections_refused": self._listener.refused,
            "clamped": self._page.clamped,
        }

    async def _watch_lag(self) -> None:
        while True:
            before = time.monotonic()
            await anyio.sleep(_LAG_STEP_S)
            self._lag.add(_LAG_STEP_S, time.monotonic() - before)

    async def _sample(self) -> None:
        while True:
            await anyio.sleep(HISTORY_STEP_S)
            if self._server is not None:
                self._history.add(Sample.of(self._server.statistics(), self._clock()))
