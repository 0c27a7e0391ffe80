"""Server side of loopback: listens on an abstract Unix socket, one task per accepted connection."""

from __future__ import annotations

import errno
import logging
import random
import socket
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from memkv_vllm.config import ServerConfig
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.protocol.messages import Register
from memkv_vllm.protocol.session import Established
from memkv_vllm.transports.accepting import accept_forever
from memkv_vllm.transports.base import SessionHandler
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.loopback.address import peer_pid, socket_address
from memkv_vllm.transports.loopback.bulk import LoopbackBulk
from memkv_vllm.transports.loopback.copying import CopyPool
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.regions import DEFAULT_MAX_REGION_BYTES, DEFAULT_MAX_REGIONS
from memkv_vllm.transports.serving import LiveSessions, ServeOptions, serve_control
from memkv_vllm.transports.streams import ControlStream, SocketStream
from memkv_vllm.types import MemoryKind

_log = logging.getLogger("memkv.transports.loopback")

DEFAULT_COPY_THREADS = 4

_BACKLOG = 256
_DYNAMIC_PORTS = (49152, 65535)


@dataclass(frozen=True)
class LoopbackPeer:
    """One authenticated session; see ``memkv_vllm.transports.base.ServerPeer``."""

    established: Established
    bulk: LoopbackBulk
    label: str
    data_path: str = "loopback"

    def offered(self, offer: Register, stream: ControlStream) -> None:
        """Take the descriptor that came beside a REGISTER."""
        if offer.kind is MemoryKind.HOST:
            self.bulk.offer(offer.region, stream.take_fd())


class LoopbackServerTransport:
    """Serves clients of this machine; see ``memkv_vllm.transports.base.ServerTransport``.

    Args:
        port: number in the abstract socket's name; 0 takes a free one, see :attr:`port`.
        copy_threads: threads that copy, for all sessions together.
        handshake_timeout_s: a peer that has not authenticated by then is cut.
        write_timeout_s: a client that does not take a reply for so long is cut.
        max_regions: regions per session.
        max_region_bytes: bytes of all regions of one session.
        faults: what to break, in tests.
    """

    name = "loopback"

    def __init__(
        self,
        port: int,
        *,
        copy_threads: int = DEFAULT_COPY_THREADS,
        handshake_timeout_s: float = 5.0,
        write_timeout_s: float = 10.0,
        max_regions: int = DEFAULT_MAX_REGIONS,
        max_region_bytes: int = DEFAULT_MAX_REGION_BYTES,
        faults: FaultPlan | None = None,
    ) -> None:
        self.port = port
        self._copy_threads = copy_threads
        self._options = ServeOptions(handshake_timeout_s, write_timeout_s)
        self._max_regions = max_regions
        self._max_region_bytes = max_region_bytes
        self._faults = faults
        self._sessions = LiveSessions()

    @classmethod
    def from_config(
        cls, config: ServerConfig, *, port: int | None = None, faults: FaultPlan | None = None
    ) -> LoopbackServerTransport:
        """With the bounds of ``config.limits``, on its port unless ``port`` says another."""
        limits = config.limits
        return cls(
            config.network.address.port if port is None else port,
            copy_threads=limits.copy_threads,
            handshake_timeout_s=limits.handshake_timeout_s,
            max_regions=limits.max_regions_per_session,
            max_region_bytes=limits.max_region_bytes,
            faults=faults,
        )

    def reload(self) -> None:
        """Nothing here comes from a file."""

    def health(self) -> list[str]:
        """Shared memory has no parts that fail one by one; see the protocol."""
        return []

    async def serve(
        self, handler: SessionHandler, memory: HostMemory, *, task_status: Any = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen and serve until cancelled; ``task_status.started(("127.0.0.1", port))`` once listening.

        Raises:
            EnvironmentFault: another server listens on this port.
        """
        listener = self._listen()
        pool = CopyPool(self._copy_threads)
        try:
            async with anyio.create_task_group() as tasks:
                task_status.started(("127.0.0.1", self.port))
                serve = partial(self._serve, handler=handler, memory=memory, pool=pool)
                await accept_forever(listener, lambda sock, _: tasks.start_soon(serve, sock), handler.counted, _log)
        finally:
            listener.close()
            pool.close()

    # -- inside

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        attempts = [self.port] if self.port else random.sample(range(*_DYNAMIC_PORTS), 64)
        for port in attempts:
            try:
                listener.bind(socket_address(port))
                listener.listen(_BACKLOG)
                self.port = port
                return listener
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    listener.close()
                    raise EnvironmentFault(f"cannot listen on loopback port {port}: {error}") from error
        listener.close()
        raise EnvironmentFault(f"loopback port {attempts[-1]} is taken by another server: stop it or use another port")

    async def _serve(self, sock: socket.socket, handler: SessionHandler, memory: HostMemory, pool: CopyPool) -> None:
        label = f"loopback client (pid {peer_pid(sock)})"
        stream = SocketStream(sock)

        def make_peer(established: Established) -> LoopbackPeer:
            bulk = LoopbackBulk(
                memory,
                pool,
                max_regions=self._max_regions,
                max_region_bytes=self._max_region_bytes,
                faults=self._faults,
                cut=stream.end,
            )
            return LoopbackPeer(established, bulk, label)

        await serve_control(
            stream,
            handler,
            make_peer,
            sessions=self._sessions,
            options=self._options,
            label=label,
            faults=self._faults,
        )
