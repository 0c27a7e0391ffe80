"""The cluster client: which server owns a block, and a link to each.

Used by the engine (a rank's data path, with staging regions) and by the prober (scheduler side, control only).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from memkv_vllm.config import ClientConfig, Mode, ServerAddress
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.link import LinkSettings, ServerLink
from memkv_vllm.engine.placement import Placement
from memkv_vllm.engine.routes import routes_of
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, Region
from memkv_vllm.transports.registry import Transports, client_transports
from memkv_vllm.types import Deadline


@dataclass(frozen=True)
class ClusterSettings:
    """How to reach the cluster; timeouts in seconds."""

    servers: tuple[ServerAddress, ...]
    credentials: Credentials
    transport: str
    """``auto``, or one by name: then no other is used, whatever happens."""
    connect_timeout_s: float
    op_timeout_s: float
    num_connections: int = 4
    """Connections per server of the tcp transport."""
    tls: bool = False
    """Of the tcp transport's control connections; the next two say what its certificates must be."""
    tls_ca: Path | None = None
    tls_server_name: str | None = None
    rail: int = 0
    """The rail that this process prefers, counted from 0 and taken modulo each server's number of rails."""

    @classmethod
    def from_config(cls, config: ClientConfig, mode: Mode) -> ClusterSettings:
        """From the client's configuration, for ``direct`` or ``tier``."""
        return cls(
            servers=tuple(config.servers),
            credentials=Credentials(config.auth_key.get_secret_value(), config.auth_key_id, config.license_text),
            transport=config.transport_for(mode).value,
            connect_timeout_s=config.connect_timeout_s,
            op_timeout_s=config.op_timeout_s,
            num_connections=config.num_connections,
            tls=config.tls,
            tls_ca=config.tls_ca,
            tls_server_name=config.tls_server_name,
        )

    def on_rail(self, rail: int) -> ClusterSettings:
        """The same for the process number ``rail`` of those that share out the rails (its rank)."""
        return replace(self, rail=rail)

    def transports(self) -> Transports:
        """What the settings allow, made for one event loop.

        Raises:
            EnvironmentFault: the named transport cannot run on this host.
        """
        names = ("num_connections", "tls", "tls_ca", "tls_server_name")
        return client_transports(self.transport, {"tcp": {name: getattr(self, name) for name in names}})


class ClusterClient:
    """Links to every server. Belongs to one event loop; ``run`` owns all its tasks.

    Args:
        settings: servers and timeouts.
        transports: makes the connections.
        kind: what this client is for.
        greet, on_change, on_fenced: see :class:`memkv_vllm.engine.link.ServerLink`.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        transports: Transports,
        kind: PeerKind,
        *,
        greet: Callable[[ServerLink, ClientConnection], Awaitable[None]] | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_fenced: Callable[[Holder], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._transports = transports
        self.regions: list[Region] = []
        """Registered on every connection; more through ``add_region`` once the client runs."""
        link_settings = LinkSettings(settings.credentials, kind, settings.connect_timeout_s, settings.op_timeout_s)
        self.links: dict[str, ServerLink] = {
            server.name: ServerLink(
                server.name,
                routes_of(server, transports.names, settings.rail),
                transports,
                link_settings,
                regions=self.regions,
                greet=greet,
                on_change=on_change,
                on_fenced=on_fenced,
            )
            for server in settings.servers
        }
        self._placement = Placement([server.name for server in settings.servers])

    def owner(self, prefix: bytes) -> ServerLink:
        """The link to the server that holds all shards of this block."""
        return self.links[self._placement.owner(prefix)]

    def split(self, prefixes: Sequence[bytes]) -> dict[ServerLink, list[int]]:
        """Indices of ``prefixes`` by owning server."""
        return {self.links[name]: indices for name, indices in self._placement.split(prefixes).items()}

    def deadline(self, limit: Deadline | None = None) -> Deadline:
        """``op_timeout_s`` from now, or ``limit`` if that is sooner."""
        end = time.monotonic() + self._settings.op_timeout_s
        return Deadline(end if limit is None else min(end, limit))

    async def add_region(self, region: Region) -> None:
        """Register ``region`` on every connection, present and future; returns when the present ones have it."""
        self.regions.append(region)
        async with anyio.create_task_group() as tasks:
            for link in self.links.values():
                tasks.start_soon(link.register, region)

    async def run(self) -> None:
        """Keep all servers connected until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                for link in self.links.values():
                    tasks.start_soon(link.run)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._settings.connect_timeout_s):
                await self._transports.aclose()

    @property
    def num_ready(self) -> int:
        """Servers with a ready connection."""
        return sum(link.connected for link in self.links.values())

    @property
    def connects(self) -> Counter[str]:
        """Connections that became ready so far, by the transport that was chosen."""
        found: Counter[str] = Counter()
        for link in self.links.values():
            found.update(link.statistics().by_transport)
        return found
