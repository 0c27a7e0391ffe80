"""Client side of tcp: a control connection, and data connections from the first registered region on."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import anyio

from memkv_vllm.errors import (
    ConnectError,
    FenceTimeout,
    LocalProtocolError,
    RequestTimeout,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Get, GetResult, Put, Register, Request
from memkv_vllm.protocol.session import Established, PeerKind
from memkv_vllm.transports.base import Capabilities, Region, remaining
from memkv_vllm.transports.control import ChannelStatistics, ControlChannel
from memkv_vllm.transports.sockets import Address, dial, dial_address
from memkv_vllm.transports.streams import ControlStream, SocketStream
from memkv_vllm.transports.tcp.attach import attach
from memkv_vllm.transports.tcp.eagerlink import EagerLink
from memkv_vllm.transports.tcp.links import Links
from memkv_vllm.transports.tls import TlsStream, client_context
from memkv_vllm.types import Deadline, MemoryKind, Status

R = TypeVar("R")

_log = logging.getLogger("memkv.transports.tcp")

DEFAULT_NUM_CONNECTIONS = 4


class TcpConnection:
    """One connection; see ``memkv_vllm.transports.base.ClientConnection``."""

    def __init__(
        self,
        channel: ControlChannel,
        credentials: Credentials,
        family: int,
        address: Address,
        num_connections: int,
        label: str,
    ) -> None:
        """Use ``TcpClientTransport.connect``."""
        self._channel = channel
        self._credentials = credentials
        self._family = family
        self._address = address
        self._num_connections = num_connections
        self._label = label
        self._links = Links(channel.fail)
        self._attaching = anyio.Lock()

    @property
    def established(self) -> Established:
        """The handshake's outcome."""
        return self._channel.established

    @property
    def alive(self) -> bool:
        """False once the connection has ended."""
        return self._channel.alive

    @property
    def num_data_connections(self) -> int:
        """Data connections that are open now."""
        return len(self._links)

    @property
    def expected_bytes_per_s(self) -> float | None:
        """Unknown: the kernel chooses the interface, and may choose another one."""
        return None

    def statistics(self) -> ChannelStatistics:
        """What the control channel has done."""
        return self._channel.statistics()

    async def run(self) -> None:
        """Drive the connection until it ends; see the protocol."""
        try:
            await self._channel.run()
        finally:
            self._links.shut_down()

    async def register(self, region: Region, deadline: Deadline) -> None:
        """Let the server name extents of the region; see the protocol."""
        if region.kind is not MemoryKind.HOST:
            raise StoreError("the tcp transport moves host memory only")
        if region.memory is None or region.memory.length != region.length:
            raise LocalProtocolError(f"region {region.id} has no host memory of {region.length} bytes")
        async with self._attaching:
            if not len(self._links) and self._channel.alive:
                await self._attach_all(deadline)
        is_new = region.id not in self._links.regions
        self._links.regions.setdefault(region.id, region.memory)
        try:
            await self._channel.request(Register(region.id, region.kind, region.length), deadline)
        except StoreError:
            if is_new:
                self._links.regions.pop(region.id, None)
            raise

    async def request(self, request: Request[R], deadline: Deadline) -> R:
        """Send a request and await its reply; see the protocol."""
        if isinstance(request, Put | Get):
            if request.eager:
                raise LocalProtocolError("whether a request is eager is chosen here")
            eager = self._links.eager
            # Where others are on their way already, the bytes of this one need not be early.
            if eager is not None and not self._channel.num_pending:
                extents = [item.extent for item in request.items]
                if isinstance(request, Get):
                    if eager.claim_get(extents):
                        return await self._get_eagerly(request, eager, deadline)
                elif eager.claim_put(extents):
                    return await self._put_eagerly(request, eager, deadline)
        return await self._channel.request(request, deadline)

    async def fence(self, deadline: Deadline) -> None:
        """End the data connections; needs nothing from the server. See the protocol.

        Raises:
            FenceTimeout: a thread has not ended by ``deadline``: it was not scheduled for so long.
        """
        self._channel.close()
        self._links.shut_down()
        with anyio.move_on_after(remaining(deadline, time.monotonic())):
            await self._links.stop()
        if len(self._links):
            raise FenceTimeout(f"{self._label}: {len(self._links)} threads of this process have not ended yet")

    async def aclose(self) -> None:
        """End the connection; the threads end by themselves at once."""
        self._channel.close()
        with anyio.CancelScope(shield=True):
            await self._links.stop()

    # -- inside

    async def _put_eagerly(self, put: Put, eager: EagerLink, deadline: Deadline) -> list[Status]:
        try:
            statuses = await self._channel.request(replace(put, eager=True), deadline, sent=lambda _: eager.send())
        except StoreError:
            # Refused before anybody looked at it: nobody takes its bytes off either, so this was the last eager put.
            eager.stop()
            await self._await_sent(eager, deadline)
            raise
        except BaseException:
            eager.release_unsent()
            raise
        await self._await_sent(eager, deadline)
        eager.release(in_vain=Status.OK not in statuses)
        return statuses

    async def _get_eagerly(self, get: Get, eager: EagerLink, deadline: Deadline) -> list[GetResult]:
        try:
            results = await self._channel.request(
                replace(get, eager=True), deadline, sent=lambda take: eager.receive(take, self._channel.fail)
            )
        except StoreError:
            # Refused before anybody looked at it: the server does not know which one the next would be.
            eager.stop()
            raise
        except BaseException:
            eager.release_unsent()
            raise
        if any(result.status is Status.TIMEOUT for result in results):
            eager.stop()  # some of the bytes may still come
        else:
            eager.release()
        return results

    async def _await_sent(self, eager: EagerLink, deadline: Deadline) -> None:
        """The caller may use its memory anew after this."""
        if not await eager.wait_sent(remaining(deadline, time.monotonic())):
            raise RequestTimeout(f"{self._label} did not take the bytes of a PUT by its deadline")

    async def _attach_all(self, deadline: Deadline) -> None:
        try:
            # One after the other: a cluster that starts at once must not fill the server's places for handshakes.
            for _ in range(self._num_connections):
                await self._attach(deadline)
            try:
                # It can be done without: a way that swallows it must leave time for the rest.
                now = time.monotonic()
                await self._attach(Deadline(now + remaining(deadline, now) / 3), eager=True)
            except ConnectError as error:
                # An older server, or one that allows no more connections: it asks for the bytes of every put.
                _log.info("event=not_eager %s", error)
        except BaseException:
            # A session with some of its data connections is none: its owner makes another.
            self._links.shut_down()
            self._channel.close()
            raise

    async def _attach(self, deadline: Deadline, *, eager: bool = False) -> None:
        sock = await dial_address(self._family, self._address, deadline)
        attached = await attach(sock, self._credentials, self.established, deadline, label=self._label, eager=eager)
        self._links.add(*attached, eager=eager)


class TcpClientTransport:
    """Connects to servers over TCP; see ``memkv_vllm.transports.base.ClientTransport``.

    Args:
        num_connections: data connections per server.
        tls: use TLS for control connections, see ``memkv_vllm.transports.tls``.
        tls_ca: whose certificates are accepted; None: those of this host's authorities.
        tls_server_name: the name that certificates must be for; None: the host that is connected to.

    Raises:
        ConfigError: ``tls_ca`` cannot be used.
    """

    name = "tcp"
    capabilities = Capabilities(one_sided=True, gpu_memory=False, same_host=False)

    def __init__(
        self,
        num_connections: int = DEFAULT_NUM_CONNECTIONS,
        *,
        tls: bool = False,
        tls_ca: Path | None = None,
        tls_server_name: str | None = None,
    ) -> None:
        if num_connections < 1:
            raise LocalProtocolError(f"num_connections is {num_connections}; at least 1 is needed")
        self._num_connections = num_connections
        self._tls = client_context(tls_ca) if tls else None
        self._tls_server_name = tls_server_name

    async def connect(
        self, host: str, port: int, credentials: Credentials, kind: PeerKind, deadline: Deadline
    ) -> TcpConnection:
        """Connect and authenticate; see the protocol."""
        label = f"tcp server {host}:{port}"
        sock = await dial(host, port, deadline)
        family = sock.family
        try:
            # Data connections go to the very address that answered, whatever its name resolves to by then.
            address = sock.getpeername()
        except OSError as error:
            sock.close()
            raise ConnectError(f"{label} closed the connection at once: {error}") from error
        inner = SocketStream(sock)
        stream: ControlStream = inner
        if self._tls is not None:
            stream = TlsStream(inner, self._tls, server_name=self._tls_server_name or host)
        channel = await ControlChannel.open(stream, credentials, kind, deadline, label=label)
        return TcpConnection(channel, credentials, family, address, self._num_connections, label)

    async def aclose(self) -> None:
        """Nothing to release."""
