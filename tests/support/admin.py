"""Store servers with admin HTTP for tests: on the test's own event loop, or on a thread of their own."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio

from memkv_vllm.config import ServerConfig, dev_server_config
from memkv_vllm.engine.portal import LoopThread
from memkv_vllm.store.admin.server import AdminServer
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.loopback import LoopbackServerTransport

TOKEN = "test-token-0123456789"
MIB = 1 << 20


def admin_config(max_size: str = "8MiB", **overrides: Any) -> ServerConfig:
    """A server on any free ports with the token :data:`TOKEN`; ``overrides`` are sections of its yaml."""
    network = {"admin_address": "127.0.0.1:0", "admin_token": TOKEN, **overrides.pop("network", {})}
    sections = {"network": network, **overrides}
    return dev_server_config(secrets.token_hex(32), address="127.0.0.1:0", max_size=max_size, overrides=sections)


def find_errors(error: BaseException, kind: type[BaseException]) -> list[BaseException]:
    """All errors of ``kind`` in ``error`` and the groups inside of it."""
    found = [error] if isinstance(error, kind) else []
    for inner in getattr(error, "exceptions", ()):
        found += find_errors(inner, kind)
    return found


@dataclass
class Said:
    """An answer of admin HTTP."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        """Its body."""
        return json.loads(self.text)


@dataclass
class Running:
    """A store that serves, and its admin HTTP."""

    server: StoreServer
    admin: AdminServer
    address: str
    """Of admin HTTP."""
    session: aiohttp.ClientSession
    scheme: str = "http"
    options: dict[str, Any] = field(default_factory=dict)

    async def ask(self, path: str, method: str = "GET", **options: Any) -> Said:
        """One request."""
        url = f"{self.scheme}://{self.address}{path}"
        async with self.session.request(method, url, **self.options, **options) as response:
            return Said(response.status, dict(response.headers), await response.text())

    async def command(self, name: str, body: Any, token: str | None = TOKEN) -> Said:
        """One command."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.ask(f"/v1/{name}", "POST", json=body, headers=headers)


@asynccontextmanager
async def serving_admin(config: ServerConfig | None = None, *, attach: bool = True) -> AsyncIterator[Running]:
    """A store and its admin HTTP on this loop; ended in order."""
    config = config or admin_config()
    admin = AdminServer(config)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as session:
        address = await tasks.start(admin.serve)
        async with StoreServer(config, [LoopbackServerTransport.from_config(config)], populate=False) as server:
            if attach:
                admin.attach(server)
            try:
                yield Running(server, admin, str(address), session)
            except Exception as error:
                failure = error  # raised outside, so that no task group wraps it
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class AdminThread:
    """The same on a thread of its own, for tests that block."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._thread: LoopThread | None = None
        self.server: StoreServer
        self.address = ""

    def start(self) -> None:
        """Start, and wait until it listens."""
        started: Future[str] = Future()

        async def main(_: LoopThread) -> None:
            async with serving_admin(self._config) as running:
                self.server = running.server
                started.set_result(running.address)
                await anyio.sleep_forever()

        self._thread = LoopThread("memkv-test-admin", main)
        self._thread.start()
        self.address = started.result(10)

    def stop(self) -> None:
        """End it."""
        thread, self._thread = self._thread, None
        assert thread is None or thread.stop(10)

    def call(self, function: Any) -> Any:
        """The result of ``function()``, called on the server's loop."""
        assert self._thread is not None
        answer: Future[Any] = Future()
        self._thread.post(lambda: answer.set_result(function()))
        return answer.result(10)


@contextmanager
def admin_threads(*configs: ServerConfig) -> Iterator[list[AdminThread]]:
    """Several servers, ended on exit."""
    servers: list[AdminThread] = []
    try:
        for config in configs:
            servers.append(AdminThread(config))
            servers[-1].start()
        yield servers
    finally:
        for server in servers:
            server.stop()
