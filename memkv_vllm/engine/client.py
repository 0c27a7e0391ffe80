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
from memkv_vllm.transports.base import ClientConnection, RailPreference, Region
from memkv_vllm.transports.registry import AUTO_NAME, Transports, client_transports
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
    """Of control connections over TCP (tcp, verbs); the next two say what the servers' certificates must be."""
    tls_ca: Path | None = None
    tls_server_name: str | None = None
    rail: int = 0
    """The rail that this process prefers, counted from 0 and taken modulo each server's number of rails; where the
    transport knows which NIC is near this process's GPU, it says which rail that is instead."""
    ranks: int = 1
    """Processes of this host that share out the rails, this one being number ``rail``."""
    gpu: str = ""
    """PCI address of this process's GPU, for the choice of a NIC near it; empty: none, or not known."""
    rdma_devices: tuple[str, ...] = ()
    """Of the verbs transport, as the next four: the only NICs that may be used; none: whichever reaches a server."""
    gid_index: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    mtu: int | None = None

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
            rdma_devices=config.rdma_devices,
            gid_index=config.gid_index,
            traffic_class=config.traffic_class,
            service_level=config.service_level,
            mtu=config.mtu,
        )

    def on_rail(self, rail: int, ranks: int = 1, gpu: str = "") -> ClusterSettings:
        """The same for the process number ``rail`` of ``ranks`` on this host, whose GPU has the PCI address ``gpu``."""
        return replace(self, rail=rail, ranks=max(1, ranks), gpu=gpu)

    def transports(self, kind: PeerKind = PeerKind.TOOL, staging_bytes: int = 0) -> Transports:
        """What the settings allow, made for one event loop.

        Args:
            kind: what the client is for; only an engine moves bytes, and needs a NIC where the transport does.
            staging_bytes: an engine's, which it registers with every server.

        Raises:
            EnvironmentFault: the named transport cannot run on this host.
        """
        tls = {name: getattr(self, name) for name in ("tls", "tls_ca", "tls_server_name")}
        verbs = {name: getattr(self, name) for name in ("gid_index", "traffic_class", "service_level", "mtu", "gpu")}
        verbs |= {"devices": self.rdma_devices, "rank": self.rail, "num_ranks": self.ranks}
        verbs |= {"data_path": kind is PeerKind.ENGINE, "staging_bytes": staging_bytes}
        # Where it is one choice of two, a server that it does not reach is no reason to do without it for the others.
        named = self.servers if self.transport != AUTO_NAME else ()
        verbs["servers"] = [(server.name, tuple(rail.host for rail in server.rails)) for server in named]
        tcp = {"num_connections": self.num_connections}
        return client_transports(self.transport, {"tcp": tcp | tls, "verbs": verbs | tls})


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
        link_settings = LinkSettings(
            settings.credentials, kind, settings.connect_timeout_s, settings.op_timeout_s, settings.ranks
        )
        self.links: dict[str, ServerLink] = {
            server.name: ServerLink(
                server.name,
                routes_of(server, transports.names, self._first_rail(server)),
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

    def _first_rail(self, server: ServerAddress) -> int:
        """The rail that this process tries first: the transport's choice, where it knows NICs and GPUs."""
        names = self._transports.names
        if len(names) == 1 and isinstance(transport := self._transports.get(names[0]), RailPreference):
            chosen = transport.first_rail([rail.host for rail in server.rails])
            if chosen is not None:
                return chosen
        return self._settings.rail

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

    async def first_problems(self, limit_s: float) -> dict[str, str]:
        """Servers that answer and cannot reach this host's memory, and why, once every way to each was tried.

        Args:
            limit_s: seconds after which a server that is silent so far is left out.
        """
        with anyio.move_on_after(limit_s):
            for link in self.links.values():
                await link.verdict.wait_known()
        return {name: link.verdict.problem for name, link in self.links.items() if link.verdict.problem}

    @property
    def may_be_half_reachable(self) -> bool:
        """Whether a server may answer and yet not reach this host's memory, and nothing else can be used then."""
        names = self._transports.names
        return len(names) == 1 and self._transports.get(names[0]).capabilities.separate_data_path

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
