"""Real stores that serve verbs over a fabric in memory, and engines of this process that reach them so."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.config import dev_server_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.pytest_plugin import LoopbackServer
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports import registry
from memkv_vllm.transports.tcp import TcpServerTransport
from memkv_vllm.transports.verbs import VerbsClientTransport, VerbsDataPath
from tests.support.ranks import cluster_settings
from tests.support.verbs_world import VerbsWorld

__all__ = ["VerbsStores", "verbs_stores"]


class VerbsServer(LoopbackServer):
    """One store that listens on tcp and offers verbs, if ``offers_verbs`` says so when it starts."""

    def __init__(self, folder: Path, world: VerbsWorld, **options: Any) -> None:
        super().__init__(folder, **options)
        self._world = world
        self.offers_verbs = True

    async def _serve(self, started: Future[int]) -> None:
        world = self._world
        paths = [VerbsDataPath(("srv0",), provider=world.server_library, root=world.server_root)]
        try:
            config = dev_server_config(self.auth_key, address=self.address, max_size="16MiB")
            transport = TcpServerTransport.from_config(config, data_paths=paths if self.offers_verbs else ())
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


@dataclass
class VerbsStores:
    """``servers`` by name, under one key."""

    world: VerbsWorld
    servers: dict[str, VerbsServer]
    key: bytes

    def settings(self, transport: str = "verbs", *, connect_timeout_s: float = 5.0) -> ClusterSettings:
        """How an engine reaches them."""
        ports = {name: server.port for name, server in self.servers.items()}
        return replace(cluster_settings(self.key, ports, connect_timeout_s), transport=transport)


@contextmanager
def verbs_stores(
    folder: Path, world: VerbsWorld, patch: pytest.MonkeyPatch, *names: str, without: tuple[str, ...] = ()
) -> Iterator[VerbsStores]:
    """Started stores; those in ``without`` offer no verbs. Transport ``verbs`` is the real one over ``world``'s client.

    ``patch`` undoes the latter.
    """
    key = b"k" * 32
    servers = {}
    for name in names:
        (folder / name).mkdir(parents=True)
        server = servers[name] = VerbsServer(folder / name, world)
        server.auth_key = key.hex()
        server.offers_verbs = name not in without

    def make(**options: Any) -> VerbsClientTransport:
        return world.client(**options)

    patch.setitem(registry._CLIENTS, "verbs", (__name__, "_made"))
    patch.setitem(globals(), "_made", make)
    try:
        for server in servers.values():
            server.start()
        yield VerbsStores(world, servers, key)
    finally:
        for server in servers.values():
            server.stop()
