"""The server of the demo: ``memkv start --dev`` in a process of its own, seen from outside.

Nothing in the server knows of the demo. Its statistics are asked for over its protocol, as a tool would; its memory
is damaged as a failing machine would damage it, behind its back: the kernel lets a process's owner open the memory of
its store through ``/proc``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from memkv_vllm.config import load_client_config
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Stat
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Deadline

ARENA_SIZE = "256MiB"
PAGE_BYTES = 4096
REQUEST_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 15.0


class StoreProcess:
    """A running ``memkv start --dev``, on a free port and with a key in ``folder``.

    Attributes:
        exports: what it said is to be set where vLLM runs.
    """

    def __init__(self, folder: Path) -> None:
        self._log_path = folder / "store.log"
        command = [sys.executable, "-m", "memkv_vllm", "start", "--dev", "--address=127.0.0.1:0"]
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [*command, f"--max-size={ARENA_SIZE}", f"--key-file={folder / 'store.key'}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.exports: dict[str, str] = {}

    def __enter__(self) -> StoreProcess:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                return self
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                self.exports[name] = value
        self._process.wait()
        raise EnvironmentFault(f"memkv start --dev did not start:\n{self._log_path.read_text()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def stop(self) -> int:
        """Asks it to end in order; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def statistics(self) -> dict[str, Any]:
        """Its counters, over its protocol."""
        import anyio

        return anyio.run(self._ask)

    async def _ask(self) -> dict[str, Any]:
        import anyio

        config = load_client_config(self.exports)
        transport = client_transport(self.exports["MEMKV_TRANSPORT"])
        rail = config.servers[0].rails[0]
        credentials = Credentials(config.auth_key.get_secret_value(), config.auth_key_id, config.license_text)
        deadline = Deadline(time.monotonic() + REQUEST_TIMEOUT_S)
        connection = await transport.connect(rail.host, rail.port, credentials, PeerKind.TOOL, deadline)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            answer = await connection.request(Stat(), deadline)
            await connection.aclose()
            tasks.cancel_scope.cancel()
        await transport.aclose()
        return answer

    def damage(self, value_bytes: int) -> int:
        """Flips one bit of one byte in every stored value, behind the server's back; the number of bytes changed.

        Whatever the addresses of the values are: of bytes that stand ``value_bytes`` apart, exactly one is in each.
        """
        fd = self._open_arena()
        try:
            size, changed = os.fstat(fd).st_size, 0
            for offset in range(value_bytes // 2, size, value_bytes):
                page = os.pread(fd, PAGE_BYTES, offset - offset % PAGE_BYTES)
                if any(page):  # pages that hold no value were never written
                    os.pwrite(fd, bytes([page[offset % PAGE_BYTES] ^ 0x10]), offset)
                    changed += 1
            return changed
        finally:
            os.close(fd)

    def _open_arena(self) -> int:
        folder = Path(f"/proc/{self.pid}/fd")
        for entry in folder.iterdir():
            if os.readlink(entry).startswith("/memfd:memkv-arena"):
                return os.open(entry, os.O_RDWR)
        raise EnvironmentFault(f"no arena among the open files of the store (process {self.pid})")
