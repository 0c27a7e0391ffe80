"""A store that moves no bytes, in a process of its own: the control path alone, over TCP and over a Unix socket.

Beside it an echo server answers frames of a size with frames of a size, bare ``asyncio`` protocols on both ends: what
any request costs here before a byte of it is looked at.

As a program: ``python -m benchmarks.control_server`` with the key in hexadecimal on stdin.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from types import TracebackType

import anyio
from anyio.abc import TaskGroup

from benchmarks.server import IDLE_POLL_US
from memkv_vllm.config import dev_server_config
from memkv_vllm.protocol.messages import Register
from memkv_vllm.protocol.session import Established
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import LruPolicy
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.store.polling import loop_factory
from memkv_vllm.transports.base import Bulk, Move
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.serving import LiveSessions, ServeOptions, serve_control
from memkv_vllm.transports.streams import ControlStream, SocketStream
from memkv_vllm.types import Deadline, MemoryKind, Status

ECHO_HEAD = Struct("<II")
"""Start of every frame to the echo server: bytes of the whole frame, and of the answer."""

_ARENA_BYTES = 64 << 20
_STOP_S = 10.0
_ROOT = Path(__file__).resolve().parent.parent


class NoBulk:
    """A data path on which every move is done at once, and none is made."""

    async def connect(self, transport: str, token: bytes) -> bytes:
        """Nothing to bring up."""
        return b""

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        """Nothing to map."""

    async def pull(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """All OK."""
        return [Status.OK] * len(moves)

    async def push(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """All OK."""
        return [Status.OK] * len(moves)

    async def fence(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class NoBulkPeer:
    """A session whose values go nowhere."""

    established: Established
    bulk: Bulk
    label: str
    data_path: str = "none"

    def offered(self, offer: Register, stream: ControlStream) -> None:
        """No region is looked at."""


class EchoProtocol(asyncio.Protocol):
    """Answers each frame with zeros of the length that it asks for."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._buffer += data
        while len(self._buffer) >= ECHO_HEAD.size:
            length, answer = ECHO_HEAD.unpack_from(self._buffer)
            if len(self._buffer) < length:
                return
            del self._buffer[:length]
            self._transport.write(bytes(answer))


def _listeners() -> dict[str, socket.socket]:
    tcp = socket.create_server(("127.0.0.1", 0), backlog=64)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind("\0memkv-bench-control-" + str(os.getpid()))
    unix.listen(64)
    for listener in (tcp, unix):
        listener.setblocking(False)
    return {"tcp": tcp, "unix": unix}


def _no_delay(sock: socket.socket) -> socket.socket:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def _accept(listener: socket.socket, handler: StoreHandler, tasks: TaskGroup) -> None:
    sessions = LiveSessions()
    while True:
        await anyio.wait_readable(listener)
        stream = SocketStream(_no_delay(listener.accept()[0]))
        serve = partial(serve_control, sessions=sessions, options=ServeOptions(), label="bench")
        tasks.start_soon(serve, stream, handler, lambda established: NoBulkPeer(established, NoBulk(), "bench"))


async def serve(key: bytes) -> None:
    """Serve until killed; prints the addresses once clients may come."""
    config = dev_server_config(key, address="127.0.0.1:0", max_size=_ARENA_BYTES)
    with HostMemory.create("bench-control", _ARENA_BYTES) as memory:
        arena, server_id, boot_id = ArenaAllocator(_ARENA_BYTES), os.urandom(16), os.urandom(16)
        handler = StoreHandler(config, memory, arena, LruPolicy(), server_id=server_id, boot_id=boot_id)
        async with anyio.create_task_group() as tasks:
            listeners = _listeners()
            for listener in listeners.values():
                tasks.start_soon(_accept, listener, handler, tasks)
            echo = await asyncio.get_running_loop().create_server(EchoProtocol, "127.0.0.1", 0)
            ports = listeners["tcp"].getsockname()[1], echo.sockets[0].getsockname()[1]
            print("ready", *ports, listeners["unix"].getsockname()[1:].decode(), flush=True)


class ControlServer:
    """Runs the process until the ``with`` block ends.

    Attributes:
        key: its auth key.
        pid: its process.
    """

    def __init__(self) -> None:
        self.key = os.urandom(32)
        self.pid = 0

    def __enter__(self) -> ControlServer:
        command = [sys.executable, "-m", "benchmarks.control_server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(self.key.hex() + "\n")
        self._process.stdin.close()
        word, *ports = self._process.stdout.readline().split()
        if word != "ready":
            raise RuntimeError("the server did not start; its reason stands above")
        self._tcp_port, self._echo_port, self._unix_name = int(ports[0]), int(ports[1]), ports[2]
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def connect(self, family: str) -> socket.socket:
        """A connected socket: ``tcp``, ``unix``, or ``echo`` (TCP) to the echo server."""
        if family == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect("\0" + self._unix_name)
            return sock
        port = self._echo_port if family == "echo" else self._tcp_port
        return _no_delay(socket.create_connection(("127.0.0.1", port)))


def main() -> None:
    """See the module's text."""
    options = {"loop_factory": loop_factory(IDLE_POLL_US * 1e-6)}
    anyio.run(serve, bytes.fromhex(sys.stdin.readline()), backend_options=options)


if __name__ == "__main__":
    main()
