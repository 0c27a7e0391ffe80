"""Real stores in processes of their own, that can be frozen and killed.

``python -m tests.support.store_process`` is a nursery: for each line ``PORT KEY_HEX MAX_SIZE`` on its standard input it
forks a store that serves over loopback and tcp and prints ``PID PORT`` once it listens. So a store starts in
milliseconds, and a test may restart one twenty times. At the end of its input the nursery ends, and every store with
it.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import anyio

from memkv_vllm.config import dev_server_config
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.loopback import LoopbackServerTransport
from memkv_vllm.transports.tcp import TcpServerTransport

ROOT = Path(__file__).resolve().parents[2]


async def serve(port: int, key: str, max_size: str) -> None:
    """Serve for ever, over tcp and loopback under one number."""
    tcp = TcpServerTransport("127.0.0.1", port)
    port = tcp.bind()
    config = dev_server_config(key, address=f"127.0.0.1:{port}", max_size=max_size)
    async with StoreServer(config, [tcp, LoopbackServerTransport(port)]):
        sys.stdout.write(f"{os.getpid()} {port}\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


def nursery() -> None:
    """Fork stores until the input ends, then kill them all (they are this process's group)."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        port, key, max_size = line.split()
        if os.fork() == 0:
            anyio.run(serve, int(port), key, max_size)
            os._exit(0)
    os.killpg(0, signal.SIGKILL)


@lru_cache(maxsize=1)
def _the_nursery() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_process"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class StoreProcess:
    """A store; as a context manager it is started, and killed on exit, frozen or not.

    Args:
        key: the auth key.
        port: 0 takes a free one, kept for later starts.
        max_size: of its arena.
    """

    def __init__(self, key: bytes, port: int = 0, max_size: str = "8MiB") -> None:
        self.port = port
        self._key, self._max_size = key, max_size
        self._pid = 0

    def start(self) -> None:
        """Start it, empty, and wait until it listens."""
        process = _the_nursery()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{self.port} {self._key.hex()} {self._max_size}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the nursery has ended"
        self._pid, self.port = map(int, line.split())

    def freeze(self) -> None:
        """SIGSTOP: its socket still accepts (the kernel does), and nobody answers."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for its end; nothing when it does not run."""
        pid, self._pid = self._pid, 0
        if not pid:
            return
        watch = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            select.select([watch], [], [])
        finally:
            os.close(watch)

    def __enter__(self) -> StoreProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    nursery()
