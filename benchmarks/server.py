"""A store in a process of its own: what ``memkv start`` runs, with the benchmark's arena.

As a program: ``python -m benchmarks.server HOST ARENA_BYTES POPULATE TRANSPORT IDLE_POLL_US``, the key in
hexadecimal on stdin. Any other transport than ``loopback`` and ``tcp`` is the name of an RDMA device, on which it
serves verbs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import anyio

from memkv_vllm.config import NetworkConfig, ServerConfig, dev_server_config
from memkv_vllm.store.polling import loop_factory
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.loopback import LoopbackServerTransport
from memkv_vllm.transports.tcp import TcpServerTransport
from memkv_vllm.transports.verbs.datapath import VerbsDataPath

READY = "ready"
IDLE_POLL_US: int = NetworkConfig.model_fields["idle_poll_us"].default
_STOP_S, _POPULATE_S = 10.0, 120.0
_ROOT = Path(__file__).resolve().parent.parent


class ServerProcess:
    """Runs a server until the ``with`` block ends.

    Args:
        arena_bytes: size of the arena.
        populate: as for ``StoreServer``; the server is ready for use when the arena is populated.
        transport: ``loopback``, ``tcp``, or the name of an RDMA device.
        host: where it listens.
        idle_poll_us: the setting ``network.idle_poll_us``.

    Attributes:
        port: where it listens.
        key: its auth key.
        pid: its process.
    """

    def __init__(
        self,
        arena_bytes: int,
        *,
        populate: bool = True,
        transport: str = "loopback",
        host: str = "127.0.0.1",
        idle_poll_us: int = IDLE_POLL_US,
    ) -> None:
        self.idle_poll_us = idle_poll_us
        self.transport = transport
        self.host = host
        self.key = os.urandom(32)
        self.port = 0
        self.pid = 0
        self._arena_bytes = arena_bytes
        self._populate = populate
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ServerProcess:
        arguments = [self.host, str(self._arena_bytes), str(int(self._populate)), self.transport]
        arguments.append(str(self.idle_poll_us))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self.key.hex() + "\n")
        process.stdin.close()
        try:
            word, _, port = process.stdout.readline().partition(" ")
            if word != READY:
                raise RuntimeError("the server did not start; its reason stands above")
            self.pid, self.port = process.pid, int(port)
            if self._populate:
                self._await_populated()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _await_populated(self) -> None:
        deadline = time.monotonic() + _POPULATE_S
        while self._resident_bytes() < self._arena_bytes:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the arena was not populated within {_POPULATE_S:g} s")
            time.sleep(0.02)

    def _resident_bytes(self) -> int:
        """Bytes of the arena that have pages, as the kernel counts them."""
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            if os.readlink(link).startswith("/memfd:memkv-arena"):
                return os.stat(link).st_blocks * 512
        return 0


async def serve(config: ServerConfig, populate: bool, transport_name: str) -> None:
    """Serve until killed; prints the port once clients may come."""
    transport: LoopbackServerTransport | TcpServerTransport
    if transport_name == "loopback":
        transport = LoopbackServerTransport.from_config(config)
    else:
        paths = [] if transport_name == "tcp" else [VerbsDataPath([transport_name])]
        transport = TcpServerTransport.from_config(config, data_paths=paths)
    async with StoreServer(config, [transport], populate=populate):
        print(f"{READY} {transport.port}", flush=True)
        await anyio.sleep_forever()


def main(arguments: list[str]) -> None:
    """See the module's text."""
    host, arena_bytes, populate, transport, idle_poll_us = arguments
    overrides = {"network": {"idle_poll_us": int(idle_poll_us)}}
    key = bytes.fromhex(sys.stdin.readline())
    config = dev_server_config(key, address=f"{host}:0", max_size=int(arena_bytes), overrides=overrides)
    options = {"loop_factory": loop_factory(config.network.idle_poll_us * 1e-6)}
    anyio.run(serve, config, bool(int(populate)), transport, backend_options=options)


if __name__ == "__main__":
    main(sys.argv[1:])
