"""Real client and server pairs for tests: a transport factory, and context managers around serve and connect."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import anyio
import pytest

from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES, unpack_header
from memkv_vllm.protocol.messages import Get, GetItem, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, ClientTransport, DataPath, Region, ServerTransport
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.loopback import LoopbackClientTransport, LoopbackServerTransport
from memkv_vllm.transports.loopback.address import socket_address
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.transports.tcp import TcpClientTransport, TcpServerTransport
from memkv_vllm.transports.verbs.client import VerbsClientTransport
from memkv_vllm.transports.verbs.datapath import VerbsDataPath
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.scripted import KEY, ScriptedHandler, key_at, soon
from tests.support.verbs_host import shared_host

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]

Address = tuple[str, int]


class TransportFactory(Protocol):
    """What a transport brings to take part in the contract suite: both ends, and raw sockets to misuse them."""

    name: str
    address: str
    """Where servers listen."""
    fence_needs_peer: bool
    """A client's fence waits for the server's answer or death (loopback); else it is local (tcp, verbs)."""
    unmaps_at_fence: bool
    """A fence ends a mapping: the server's of a client's region (loopback), or a client's landing (verbs)."""
    between_processes: bool
    """Server and client may be different processes; else tests that need that say why they are skipped."""

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport: ...

    def client(self) -> ClientTransport: ...

    def raw_connect(self, address: Address) -> SocketStream:
        """A control stream that says nothing by itself."""
        ...

    def raw_listener(self) -> tuple[socket.socket, Address]:
        """A listening control socket that says nothing by itself."""
        ...


class LoopbackFactory:
    """The loopback transport."""

    name = "loopback"
    address = "127.0.0.1"
    fence_needs_peer = True
    unmaps_at_fence = True
    between_processes = True

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport:
        return LoopbackServerTransport(0, faults=faults, **options)

    def client(self) -> ClientTransport:
        return LoopbackClientTransport()

    def raw_connect(self, address: Address) -> SocketStream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(socket_address(address[1]))
        return SocketStream(sock)

    def raw_listener(self) -> tuple[socket.socket, Address]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        port = 100_000 + os.getpid() * 1000 + id(listener) // 64 % 1000
        listener.bind(socket_address(port))
        listener.listen(64)
        return listener, ("127.0.0.1", port)


class TcpFactory:
    """The tcp transport."""

    name = "tcp"
    address = "127.0.0.1"
    fence_needs_peer = False
    unmaps_at_fence = False
    between_processes = True

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport:
        return TcpServerTransport("127.0.0.1", 0, faults=faults, **options)

    def client(self) -> ClientTransport:
        return TcpClientTransport()

    def raw_connect(self, address: Address) -> SocketStream:
        return SocketStream(socket.create_connection(address))

    def raw_listener(self) -> tuple[socket.socket, Address]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        listener.setblocking(False)
        return listener, listener.getsockname()


class VerbsFactory(TcpFactory):
    """The verbs transport, over one NIC of this host."""

    name = "verbs"
    unmaps_at_fence = True
    address = "10.77.0.1"
    device = "rxe0"
    """Of the machine that ``scripts/test-rdma`` boots."""

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport:
        bounds = {name: options[name] for name in ("max_regions", "max_region_bytes") if name in options}
        path = self.data_path(faults=faults, **bounds)
        return TcpServerTransport(self.address, 0, faults=faults, data_paths=[path], **options)

    def data_path(self, **options: Any) -> DataPath:
        """What the server's sessions choose."""
        return VerbsDataPath([self.device], **options)

    def client(self) -> ClientTransport:
        return VerbsClientTransport([self.device])

    def raw_listener(self) -> tuple[socket.socket, Address]:
        listener = socket.create_server((self.address, 0), backlog=64)
        listener.setblocking(False)
        return listener, listener.getsockname()


class FakeVerbsFactory(VerbsFactory):
    """The same over a NIC that is not there, on any machine."""

    name = "verbs-fake"
    address = "127.0.0.1"
    between_processes = False

    def data_path(self, **options: Any) -> DataPath:
        return shared_host().data_path(**options)

    def client(self) -> ClientTransport:
        return shared_host().client()


@dataclass
class Running:
    """A server that runs in this process."""

    factory: TransportFactory
    address: Address
    arena: HostMemory
    handler: ScriptedHandler
    faults: FaultPlan = field(default_factory=FaultPlan)


@asynccontextmanager
async def serving(
    factory: TransportFactory,
    *,
    handler: ScriptedHandler | None = None,
    faults: FaultPlan | None = None,
    arena_bytes: int = 16 * MIB,
    **options: Any,
) -> AsyncIterator[Running]:
    """A server in this process, ended and fenced on exit."""
    plan = faults or FaultPlan()
    with HostMemory.create("arena", arena_bytes) as arena:
        used = handler or ScriptedHandler()
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            address = await tasks.start(factory.server(plan, **options).serve, used, arena)
            try:
                yield Running(factory, address, arena, used, plan)
            except Exception as error:
                failure = error  # raised outside, so that no task group wraps it
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


@dataclass
class Client:
    """A connection that is driven, with one registered region (id 1) unless told otherwise."""

    connection: ClientConnection
    memory: HostMemory
    ended: list[BaseException | None]

    async def put(self, offset: int, *extents: Extent, timeout_ms: int = 5000, deadline_s: float = 10) -> list[Status]:
        """Store ``extents`` one after the other from ``offset`` of the arena on."""
        items = [PutItem(key_at(at), 0, 0, extent) for at, extent in _laid_out(offset, extents)]
        return await self.connection.request(Put(items, 0, timeout_ms), soon(deadline_s))

    async def get(self, offset: int, *extents: Extent, timeout_ms: int = 5000, deadline_s: float = 10) -> list[Status]:
        """Fetch into ``extents`` what stands from ``offset`` of the arena on."""
        items = [GetItem(key_at(at), 0, extent) for at, extent in _laid_out(offset, extents)]
        results = await self.connection.request(Get(items, timeout_ms), soon(deadline_s))
        return [result.status for result in results]


def _laid_out(offset: int, extents: tuple[Extent, ...]) -> Iterator[tuple[int, Extent]]:
    for extent in extents:
        yield offset, extent
        offset += extent.length


class Driven(Protocol):
    """A connection, or what one is made of."""

    async def run(self) -> None: ...


async def drive(connection: Driven, ended: list[BaseException | None]) -> None:
    """Run a connection and note how it ended."""
    try:
        await connection.run()
        ended.append(None)
    except MemkvError as error:
        ended.append(error)


@asynccontextmanager
async def connected(
    factory: TransportFactory,
    address: Address,
    *,
    region_bytes: int = 8 * MIB,
    credentials: Credentials | None = None,
    kind: PeerKind = PeerKind.ENGINE,
) -> AsyncIterator[Client]:
    """A client with one region, closed (not fenced) on exit."""
    connection = await factory.client().connect(*address, credentials or Credentials(KEY), kind, soon())
    with HostMemory.create("staging", region_bytes or 4096) as memory:
        failure: Exception | None = None
        client = Client(connection, memory, [])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, client.ended)
            try:
                if region_bytes:
                    await connection.register(Region(1, MemoryKind.HOST, memory.length, memory), soon())
                yield client
            except Exception as error:
                failure = error  # raised outside, so that no task group wraps it
            finally:
                await connection.aclose()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


async def wait_until(condition: Any, what: str, timeout_s: float = 10) -> None:
    """Poll ``condition`` until it is true."""
    last = time.monotonic() + timeout_s
    for pause in repeat(0.005):
        if condition():
            return
        assert time.monotonic() < last, f"not within {timeout_s} s: {what}"
        await anyio.sleep(pause)


class FrameSplitter:
    """Cuts a byte stream of handshake or sealed frames into frames."""

    def __init__(self, *, sealed: bool) -> None:
        self.sealed = sealed
        self._data = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that ``data`` completes."""
        self._data += data
        frames = []
        while len(self._data) >= HEADER_BYTES:
            end = HEADER_BYTES + unpack_header(self._data).body_length + (MAC_BYTES if self.sealed else 0)
            if len(self._data) < end:
                break
            frames.append(self._data[:end])
            self._data = self._data[end:]
        return frames


@dataclass
class ServerProcess:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    address: Address

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)


@contextmanager
def server_process(transport: str, **options: Any) -> Iterator[ServerProcess]:
    """Start ``tests/support/server_process.py``; killed on exit. ``options``: see there."""
    if not FACTORIES[transport].between_processes:
        pytest.skip(f"{transport} reaches no other process; over soft-RoCE this test runs in make test-rdma")
    command = [sys.executable, "-m", "tests.support.server_process", transport, json.dumps(options)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the server process ended at once"
        yield ServerProcess(process, (FACTORIES[transport].address, int(line)))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


FACTORIES: dict[str, TransportFactory] = {
    factory.name: factory for factory in (LoopbackFactory(), TcpFactory(), FakeVerbsFactory())
}
"""Every transport that takes part in the contract suite; over a real device where this machine has one."""
if Path("/sys/class/infiniband", VerbsFactory.device).exists():
    FACTORIES[VerbsFactory.name] = VerbsFactory()
