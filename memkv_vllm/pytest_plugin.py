"""pytest fixtures for code that talks to a memkv server: a real store, on this machine, over loopback.

pytest finds this module through its entry point; installing ``memkv-vllm`` is enough::

    def test_restores(memkv_loopback, monkeypatch):
        for name, value in memkv_loopback.environ.items():
            monkeypatch.setenv(name, value)
        ...                                         # start an engine, a client, a subprocess
        memkv_loopback.stop()                       # the server is gone, all at once
        memkv_loopback.start()                      # and back on the same port, empty
        assert memkv_loopback.statistics()["table"]["complete"] == 0

The server runs on an event loop of its own in a thread of its own, so the fixtures serve synchronous tests and
asynchronous ones under any plugin (anyio, pytest-asyncio). ``stop`` and ``start`` block for some milliseconds; on an
event loop use ``await astop()`` and ``await astart()``.

Nothing but pytest is imported until a fixture is used.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memkv_vllm.engine.portal import LoopThread
    from memkv_vllm.store.server import StoreServer
    from memkv_vllm.transports.faults import FaultPlan

START_TIMEOUT_S = 10.0
"""Starting takes milliseconds; a machine under load may need more."""


class LoopbackServer:
    """A real store server in this process, reachable through the loopback transport by this and other processes.

    Args:
        folder: where the key file goes.
        max_size: memory for values.
        port: 0 takes a free port at the first start and keeps it for later ones.
        faults: what the server's transport breaks on itself; an empty plan by default.
        overrides: more sections of the server yaml, such as ``{"limits": {"max_sessions": 2}}``.

    Attributes:
        auth_key: 64 hexadecimal characters.
        key_file: a private file with the key.
        faults: the plan; rules may be added while the server runs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_size: str = "64MiB",
        port: int = 0,
        faults: FaultPlan | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        from memkv_vllm.transports.faults import FaultPlan

        self.auth_key = secrets.token_hex(32)
        self.key_file = folder / "memkv.key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(self.auth_key + "\n", encoding="utf-8")
        self.faults = FaultPlan() if faults is None else faults
        self._port = port
        self._max_size = max_size
        self._overrides = overrides
        self._thread: LoopThread | None = None
        self._server: StoreServer | None = None

    def __repr__(self) -> str:
        return f"<LoopbackServer {self.address} {'running' if self.running else 'stopped'}>"

    @property
    def running(self) -> bool:
        """Whether it serves now."""
        return self._thread is not None and self._thread.alive

    @property
    def port(self) -> int:
        """Its port, the same over restarts; 0 before the first start."""
        return self._port

    @property
    def address(self) -> str:
        """What goes into ``MEMKV_SERVERS``."""
        return f"127.0.0.1:{self._port}"

    @property
    def environ(self) -> dict[str, str]:
        """The environment that makes a client use this server."""
        return {
            "MEMKV_SERVERS": self.address,
            "MEMKV_AUTH_KEY_FILE": str(self.key_file),
            "MEMKV_TRANSPORT": "loopback",
        }

    def start(self) -> None:
        """Starts it, empty, on the same port as before; nothing when it runs.

        Raises:
            MemkvError: It could not start; what the server raised.
        """
        from memkv_vllm.engine.portal import LoopThread

        if self.running:
            return
        started: Future[int] = Future()

        async def main(_: LoopThread) -> None:
            await self._serve(started)

        self._thread = LoopThread("memkv-loopback-server", main)
        self._thread.start()
        self._port = started.result(START_TIMEOUT_S)

    def stop(self) -> None:
        """Ends it in order and forgets its content; nothing when it does not run."""
        thread, self._thread = self._thread, None
        if thread is not None and not thread.stop(START_TIMEOUT_S):
            raise TimeoutError(f"the loopback server did not end within {START_TIMEOUT_S:g} s")

    async def astart(self) -> None:
        """:meth:`start` for a coroutine: the event loop goes on meanwhile."""
        import anyio.to_thread

        await anyio.to_thread.run_sync(self.start)

    async def astop(self) -> None:
        """:meth:`stop` for a coroutine."""
        import anyio.to_thread

        await anyio.to_thread.run_sync(self.stop)

    def statistics(self) -> dict[str, Any]:
        """The store's counters and gauges now; they begin anew with each start.

        Raises:
            RuntimeError: It does not run.
        """
        thread, server = self._thread, self._server
        if thread is None or server is None:
            raise RuntimeError("the loopback server does not run")

        answer: Future[dict[str, Any]] = Future()
        # Read on the server's own loop: nothing of it may be looked at from another thread.
        thread.post(lambda: answer.set_result(server.statistics()))
        return answer.result(START_TIMEOUT_S)

    async def _serve(self, started: Future[int]) -> None:
        import anyio

        from memkv_vllm.config import dev_server_config
        from memkv_vllm.store.server import StoreServer
        from memkv_vllm.transports.loopback import LoopbackServerTransport

        try:
            config = dev_server_config(
                self.auth_key, address=self.address, max_size=self._max_size, overrides=self._overrides
            )
            transport = LoopbackServerTransport.from_config(config, port=self._port, faults=self.faults)
            async with StoreServer(config, [transport]) as server:
                self._server = server
                started.set_result(transport.port)
                await anyio.sleep_forever()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            self._server = None


@pytest.fixture
def memkv_loopback_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LoopbackServer]]:
    """Makes and starts servers: ``memkv_loopback_factory(max_size="8MiB", ...)``, see :class:`LoopbackServer`."""
    servers: list[LoopbackServer] = []

    def make(**options: Any) -> LoopbackServer:
        server = LoopbackServer(tmp_path_factory.mktemp("memkv"), **options)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def memkv_loopback(memkv_loopback_factory: Callable[..., LoopbackServer]) -> LoopbackServer:
    """A running store server with 64 MiB of memory, for one test."""
    return memkv_loopback_factory()
