"""What TCP of this machine can do: one process sends to another over one connection, nothing else.

As a program: the other end, ``python -m benchmarks.tcp_limit PORT BYTES``.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from benchmarks.geometry import Durations, Shape
from benchmarks.rows import Measurement, Stopwatch
from memkv_vllm.transports.memory import HostMemory

_ORDER = struct.Struct("<cQ")
_ROOT = Path(__file__).resolve().parent.parent


class TcpLimit:
    """Sends to and receives from a process of its own; ``put`` and ``get`` are the two directions.

    Args:
        most_bytes: of one call.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def __enter__(self) -> TcpLimit:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            command = [sys.executable, "-m", "benchmarks.tcp_limit", port, str(self._most_bytes)]
            self._process = subprocess.Popen(command, cwd=_ROOT)
            listener.settimeout(30)
            self._sock, _ = listener.accept()
        self._sock.settimeout(None)
        self._memory = _touched(self._most_bytes)
        self._sock.recv(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()
        self._process.wait(10)
        self._memory.close()

    def measure(self, op: str, shape: Shape, times: Durations) -> Measurement:
        """Time calls of a batch's bytes, each answered before the next."""
        for _ in range(2):
            self._call(op, shape.batch_bytes)
        end = time.perf_counter() + times.timed_s
        with Stopwatch(self._process.pid) as seen:
            while time.perf_counter() < end:
                start_ns = time.perf_counter_ns()
                self._call(op, shape.batch_bytes)
                seen.latencies_ns.append(time.perf_counter_ns() - start_ns)
        return seen

    def _call(self, op: str, num_bytes: int) -> None:
        view = self._memory.view(0, num_bytes)
        self._sock.sendall(_ORDER.pack(op[:1].encode(), num_bytes))
        if op == "put":
            self._sock.sendall(view)
            self._sock.recv(1)
        else:
            receive(self._sock, view)


def receive(sock: socket.socket, view: memoryview) -> bool:
    """Fill ``view``; False at the end of the stream."""
    while view:
        received = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not received:
            return False
        view = view[received:]
    return True


def _touched(num_bytes: int) -> HostMemory:
    memory = HostMemory.create("bench-limit", num_bytes)
    memory.array[:] = 1
    return memory


def main(arguments: list[str]) -> None:
    """The other end, until the stream ends."""
    port, most_bytes = (int(text) for text in arguments)
    order = bytearray(_ORDER.size)
    with socket.create_connection(("127.0.0.1", port)) as sock, _touched(most_bytes) as memory:
        sock.sendall(b".")
        while receive(sock, memoryview(order)):
            op, num_bytes = _ORDER.unpack(order)
            view = memory.view(0, num_bytes)
            if op == b"p":
                receive(sock, view)
                sock.sendall(b".")
            else:
                sock.sendall(view)
            del view


if __name__ == "__main__":
    main(sys.argv[1:])
