"""Server side of tcp: one listening socket for control and data connections, one task per control connection.

A session is one control connection and the data connections that its client attaches; see
``memkv_vllm.transports.tcp``. Or it asks by CONNECT for one of the other data paths that the server was given
(verbs); then its bytes go there.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from memkv_vllm.config import ServerConfig
from memkv_vllm.protocol.messages import Register
from memkv_vllm.protocol.session import Established
from memkv_vllm.transports.accepting import accept_forever
from memkv_vllm.transports.base import Bulk, DataPath, SessionHandler
from memkv_vllm.transports.choosing import ChosenBulk
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.regions import DEFAULT_MAX_REGION_BYTES, DEFAULT_MAX_REGIONS
from memkv_vllm.transports.serving import LiveSessions, ServeOptions, serve_control
from memkv_vllm.transports.sockets import Address, listen, tune
from memkv_vllm.transports.streams import ControlStream, SocketStream
from memkv_vllm.transports.tcp.attach import Attachable
from memkv_vllm.transports.tcp.bulk import TcpBulk
from memkv_vllm.transports.tcp.mover import Movers
from memkv_vllm.transports.tls import ServerTls

_log = logging.getLogger("memkv.transports.tcp")

DEFAULT_MOVERS = 2
DEFAULT_MAX_CONNECTIONS = 16
NAME = "tcp"


@dataclass(frozen=True)
class TcpPeer:
    """One authenticated session; see ``memkv_vllm.transports.base.ServerPeer``."""

    established: Established
    bulk: Bulk
    label: str

    @property
    def data_path(self) -> str:
        """What the session has chosen; see the protocol."""
        return self.bulk.name if isinstance(self.bulk, ChosenBulk) else NAME

    def offered(self, offer: Register, stream: ControlStream) -> None:
        """Nothing comes beside a REGISTER."""


class TcpServerTransport:
    """Serves clients over TCP; see ``memkv_vllm.transports.base.ServerTransport``.

    Args:
        host: name or address to listen on.
        port: 0 takes a free one, see :attr:`port`.
        movers: threads that move bytes, for all sessions together.
        handshake_timeout_s: a peer that has not authenticated by then is cut.
        write_timeout_s: a client that does not take a reply for so long is cut.
        max_regions: regions per session.
        max_region_bytes: bytes of all regions of one session.
        max_connections: data connections per session.
        tls: the certificate that control connections must use TLS with.
        data_paths: what sessions may choose in place of tcp's own; owned from :meth:`serve` on.
        faults: what to break, in tests.
    """

    name = NAME

    def __init__(
        self,
        host: str,
        port: int,
        *,
        movers: int = DEFAULT_MOVERS,
        handshake_timeout_s: float = 5.0,
        write_timeout_s: float = 10.0,
        max_regions: int = DEFAULT_MAX_REGIONS,
        max_region_bytes: int = DEFAULT_MAX_REGION_BYTES,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        tls: ServerTls | None = None,
        data_paths: Sequence[DataPath] = (),
        faults: FaultPlan | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._num_movers = movers
        self._tls = tls
        self._options = ServeOptions(handshake_timeout_s, write_timeout_s, requires_tls=tls is not None)
        self._max_regions = max_regions
        self._max_region_bytes = max_region_bytes
        self._max_connections = max_connections
        self._data_paths = tuple(data_paths)
        self._faults = faults
        self._sessions = LiveSessions()
        self._attachable = Attachable()
        self._listener: socket.socket | None = None

    @classmethod
    def from_config(
        cls, config: ServerConfig, *, data_paths: Sequence[DataPath] = (), faults: FaultPlan | None = None
    ) -> TcpServerTransport:
        """On the address of ``config.network``, with the bounds of ``config.limits``.

        Raises:
            ConfigError: ``network.tls_control`` is on, and the certificate or its key cannot be used.
        """
        limits, address, network = config.limits, config.network.address, config.network
        tls = None
        if network.tls_control and network.tls_cert is not None and network.tls_key is not None:
            tls = ServerTls(network.tls_cert, network.tls_key)
        return cls(
            address.host,
            address.port,
            movers=limits.copy_threads,
            handshake_timeout_s=limits.handshake_timeout_s,
            max_regions=limits.max_regions_per_session,
            max_region_bytes=limits.max_region_bytes,
            max_connections=limits.max_connections_per_session,
            tls=tls,
            data_paths=data_paths,
            faults=faults,
        )

    def bind(self) -> int:
        """Take the address now rather than in :meth:`serve`; returns the port.

        Raises:
            EnvironmentFault: the address is not of this host or is taken.
        """
        if self._listener is None:
            self._listener = listen(self.host, self.port)
            self.port = self._listener.getsockname()[1]
        return self.port

    def reload(self) -> None:
        """Read a renewed certificate; connections that are up keep theirs.

        Raises:
            ConfigError: it cannot be used; the one before stays in force.
        """
        if self._tls is not None:
            self._tls.reload()

    def health(self) -> list[str]:
        """What is wrong with the data paths; see the protocol."""
        return [line for path in self._data_paths for line in path.health()]

    def close(self) -> None:
        """Give the address back if :meth:`serve` was not reached after :meth:`bind`."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def serve(
        self, handler: SessionHandler, memory: HostMemory, *, task_status: Any = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen and serve until cancelled; ``task_status.started((host, port))`` once listening.

        Raises:
            EnvironmentFault: the address is not of this host or is taken, or a data path cannot be had here.
        """
        self.bind()
        listener = self._listener
        assert listener is not None
        movers = Movers(self._num_movers)
        try:
            async with AsyncExitStack() as stack:
                for path in self._data_paths:
                    stack.push_async_callback(_close_path, path)
                    await path.open(memory)
                async with anyio.create_task_group() as tasks:
                    serve = partial(self._serve, handler=handler, memory=memory, movers=movers)
                    task_status.started((self.host, self.port))
                    await accept_forever(listener, partial(tasks.start_soon, serve), handler.counted, _log, tune=tune)
        finally:
            self.close()
            movers.stop()

    # -- inside

    async def _serve(
        self, sock: socket.socket, address: Address, *, handler: SessionHandler, memory: HostMemory, movers: Movers
    ) -> None:
        label = f"tcp client {address[0]}:{address[1]}"
        inner = SocketStream(sock)
        stream = inner if self._tls is None else self._tls.stream(inner)
        peers: list[TcpPeer] = []

        def make_peer(established: Established) -> TcpPeer:
            bulk = TcpBulk(
                memory,
                movers,
                max_regions=self._max_regions,
                max_region_bytes=self._max_region_bytes,
                max_connections=self._max_connections,
                faults=self._faults,
                cut=stream.end,
                counted=handler.counted,
            )
            self._attachable.add(established, bulk)
            peers.append(TcpPeer(established, self._with_choice(bulk, sock, stream, handler), label))
            return peers[0]

        try:
            await serve_control(
                stream,
                handler,
                make_peer,
                sessions=self._sessions,
                options=self._options,
                label=label,
                faults=self._faults,
                take_over=self._attachable.take_over,
                origin=label.rpartition(":")[0],
            )
        finally:
            for peer in peers:
                self._attachable.discard(peer.established.session)

    def _with_choice(self, bulk: TcpBulk, sock: socket.socket, stream: ControlStream, handler: SessionHandler) -> Bulk:
        """``bulk``, or what lets the session choose another data path."""
        if not self._data_paths:
            return bulk
        try:
            local_host = str(sock.getsockname()[0])
        except OSError:
            local_host = ""  # the peer is gone; its session ends before it asks for anything
        return ChosenBulk(
            NAME,
            bulk,
            {
                path.name: partial(path.make, local_host, cut=stream.end, counted=handler.counted)
                for path in self._data_paths
            },
        )


async def _close_path(path: DataPath) -> None:
    with anyio.CancelScope(shield=True):
        await path.aclose()
