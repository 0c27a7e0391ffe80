"""Client side of loopback: connects, passes its regions' memfds, and fences.

Fencing: a mapping that a peer has cannot be taken back, so the memory is ours alone again only when

- the server answers FENCE for this session over another connection, after its copy threads have stopped and
  unmapped (a server with another boot id is another process, whose answer proves nothing), or
- the server's process is dead, seen on a pidfd that was opened when this connection was made.

The end of the control stream proves nothing: the process may be stopped, or a copy thread late.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from typing import TypeVar

import anyio

from memkv_vllm.errors import (
    ConnectError,
    FenceTimeout,
    LocalProtocolError,
    MemkvError,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Bye, Fence, Register, Request
from memkv_vllm.protocol.session import Established, PeerKind
from memkv_vllm.transports.base import Capabilities, Region, remaining
from memkv_vllm.transports.control import ChannelStatistics, ControlChannel
from memkv_vllm.transports.loopback.address import is_this_machine, peer_pid, socket_address
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.types import Deadline, MemoryKind

R = TypeVar("R")

_log = logging.getLogger("memkv.transports.loopback")

_RETRY_S = (0.02, 0.5)
"""First and longest pause between two tries to reach a server."""


class ProcessWatch:
    """A pidfd of the server's process. Closed with the object if nobody closes it before."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)

    @classmethod
    def of_peer(cls, sock: socket.socket) -> ProcessWatch | None:
        """Watch the process at the other end; None if it cannot be seen from here (another PID namespace)."""
        try:
            pid = peer_pid(sock)
            return cls(os.pidfd_open(pid)) if pid > 0 else None
        except OSError as error:
            _log.info("the server's process cannot be watched (%s): fencing needs the server's answer", error)
            return None

    async def died(self) -> None:
        """Return when the process has ended and none of its threads runs."""
        await anyio.wait_readable(self._pidfd)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._close()


class LoopbackConnection:
    """One connection; see ``memkv_vllm.transports.base.ClientConnection``."""

    def __init__(
        self,
        channel: ControlChannel,
        watch: ProcessWatch | None,
        transport: LoopbackClientTransport,
        address: tuple[str, int],
        credentials: Credentials,
    ) -> None:
        """Use ``LoopbackClientTransport.connect``."""
        self._channel = channel
        self._watch = watch
        self._transport = transport
        self._address = address
        self._credentials = credentials
        self._offered_regions = False
        self._fenced = False
        self._fencing = anyio.Lock()

    @property
    def established(self) -> Established:
        """The handshake's outcome."""
        return self._channel.established

    @property
    def alive(self) -> bool:
        """False once the connection has ended."""
        return self._channel.alive

    @property
    def expected_bytes_per_s(self) -> float | None:
        """Unknown: as fast as memory is copied."""
        return None

    def statistics(self) -> ChannelStatistics:
        """What the control channel has done."""
        return self._channel.statistics()

    async def run(self) -> None:
        """Drive the connection until it ends; see the protocol."""
        await self._channel.run()

    async def register(self, region: Region, deadline: Deadline) -> None:
        """Pass the region's memfd to the server; see the protocol."""
        if region.kind is not MemoryKind.HOST:
            raise StoreError("the loopback transport moves host memory only")
        if region.memory is None or region.memory.length != region.length:
            raise LocalProtocolError(f"region {region.id} has no host memory of {region.length} bytes")
        self._offered_regions = True
        offer = Register(region.id, region.kind, region.length)
        await self._channel.request(offer, deadline, (region.memory.fd,))

    async def request(self, request: Request[R], deadline: Deadline) -> R:
        """Send a request and await its reply; see the protocol."""
        reply = await self._channel.request(request, deadline)
        if request.TYPE is Bye.TYPE:
            self._fenced = True
        return reply

    async def fence(self, deadline: Deadline) -> None:
        """Wait for the server's answer or its process's end; see the module text.

        Raises:
            FenceTimeout: neither by ``deadline``.
        """
        self._channel.close()
        with anyio.move_on_after(remaining(deadline, time.monotonic())):
            async with self._fencing:
                if not self._fenced and self._offered_regions:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._await_death, tasks.cancel_scope)
                        tasks.start_soon(self._await_answer, tasks.cancel_scope, deadline)
                self._fenced = self._fenced or not self._offered_regions
        if not self._fenced:
            raise FenceTimeout(
                f"{self._label}: it has not confirmed that it let go of our memory, and its process is not known to be "
                f"dead; the memory stays in quarantine"
            )
        self._release()

    async def aclose(self) -> None:
        """End the connection without fencing."""
        self._channel.close()
        if self._fenced or not self._offered_regions:
            self._release()

    # -- inside

    @property
    def _label(self) -> str:
        return f"loopback server {self._address[0]}:{self._address[1]}"

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    async def _await_death(self, done: anyio.CancelScope) -> None:
        if self._watch is not None:
            await self._watch.died()
            self._fenced = True
            done.cancel()

    async def _await_answer(self, done: anyio.CancelScope, deadline: Deadline) -> None:
        pause, longest = _RETRY_S
        while True:
            try:
                answered = await self._ask(deadline)
            except MemkvError as error:
                _log.debug("%s: FENCE is not answered yet: %s", self._label, error)
            else:
                if answered:
                    self._fenced = True
                    done.cancel()
                    return
                # Another process has taken the port: only the death of ours, seen by its pidfd, can prove anything.
                await anyio.sleep_forever()
            await anyio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _ask(self, deadline: Deadline) -> bool:
        connection = await self._transport.connect(*self._address, self._credentials, PeerKind.TOOL, deadline)
        try:
            if connection.established.server.boot_id != self.established.server.boot_id:
                return False
            await _request_alone(connection, Fence(self.established.session), deadline)
            return True
        finally:
            await connection.aclose()


async def _request_alone(connection: LoopbackConnection, request: Request[R], deadline: Deadline) -> R:
    """One request over a connection that nobody drives yet."""
    failure: MemkvError | None = None
    replies: list[R] = []
    async with anyio.create_task_group() as tasks:

        async def drive() -> None:
            try:
                await connection.run()
            except MemkvError:
                pass  # the request fails with it

        tasks.start_soon(drive)
        try:
            replies.append(await connection.request(request, deadline))
        except MemkvError as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return replies[0]


class LoopbackClientTransport:
    """Connects to servers of this machine; see ``memkv_vllm.transports.base.ClientTransport``."""

    name = "loopback"
    capabilities = Capabilities(one_sided=True, gpu_memory=False, same_host=True)

    async def connect(
        self, host: str, port: int, credentials: Credentials, kind: PeerKind, deadline: Deadline
    ) -> LoopbackConnection:
        """Connect and authenticate; see the protocol. ``host`` must name this machine's loopback."""
        if not is_this_machine(host):
            raise ConnectError(
                f"the loopback transport reaches this machine only, not {host}: use 127.0.0.1, or another transport"
            )
        sock = await _dial(host, port, deadline)
        watch = ProcessWatch.of_peer(sock)
        label = f"loopback server {host}:{port}"
        try:
            channel = await ControlChannel.open(SocketStream(sock), credentials, kind, deadline, label=label)
        except BaseException:
            if watch is not None:
                watch.close()
            raise
        return LoopbackConnection(channel, watch, self, (host, port), credentials)

    async def aclose(self) -> None:
        """Nothing to release."""


async def _dial(host: str, port: int, deadline: Deadline) -> socket.socket:
    pause, longest = _RETRY_S
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ConnectError(f"no socket for the loopback server {host}:{port}: {error}") from error
    try:
        with anyio.fail_after(remaining(deadline, time.monotonic())):
            while True:
                try:
                    sock.connect(socket_address(port))
                    return sock
                except BlockingIOError:
                    # The backlog is full; a Unix socket does not become writable when there is room again.
                    await anyio.sleep(pause)
                    pause = min(2 * pause, longest)
    except TimeoutError:
        sock.close()
        raise ConnectError(f"the loopback server {host}:{port} does not accept connections") from None
    except OSError as error:
        sock.close()
        raise ConnectError(f"no loopback server on {host}:{port}: {error}") from error
    except BaseException:
        sock.close()
        raise
