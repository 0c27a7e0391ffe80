"""A verbs server and its clients in this process, each with a NIC of its own, on one made-up fabric.

The NICs' addresses are 127.0.0.1 (server) and 127.0.0.2 (client), so that control connections are real ones between
them. ``world.server_nic.troubles`` and ``world.client_nic.troubles`` break things, see ``tests.support.fake_verbs``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memkv_vllm.transports.base import ServerTransport
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.transports.tcp import TcpServerTransport
from memkv_vllm.transports.verbs import VerbsClientTransport, VerbsDataPath
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider
from tests.support.verbs_tree import fake_library

__all__ = ["CLIENT", "SERVER", "VerbsWorld", "verbs_world"]

SERVER, CLIENT = "127.0.0.1", "127.0.0.2"


@dataclass
class VerbsWorld:
    """Takes part as a ``TransportFactory`` of ``tests.support.harness``."""

    fabric: FakeFabric
    server_root: Path
    client_root: Path
    server_library: FakeProvider
    client_library: FakeProvider

    name = "verbs"
    fence_needs_peer = False
    unmaps_at_fence = True
    between_processes = False
    offers_verbs = True
    """Whether servers that are made from now on do."""
    address = SERVER
    """Where they listen."""

    @property
    def server_nic(self) -> FakeNic:
        """``srv0``."""
        return self.server_library.nics["srv0"]

    @property
    def client_nic(self) -> FakeNic:
        """``cli0``, where the client has one of its own."""
        return next(iter(self.client_library.nics.values()))

    @property
    def num_live(self) -> int:
        """Verbs objects of the client."""
        return self.client_library.num_live()

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport:
        path = VerbsDataPath(("srv0",), provider=self.server_library, root=self.server_root, faults=faults)
        paths = [path] if self.offers_verbs else []
        return TcpServerTransport(self.address, 0, faults=faults, data_paths=paths, **options)

    def client(self, **options: Any) -> VerbsClientTransport:
        return VerbsClientTransport(provider=self.client_library, root=self.client_root, **options)

    def raw_connect(self, address: tuple[str, int]) -> SocketStream:
        return SocketStream(socket.create_connection(address))

    def raw_listener(self) -> tuple[socket.socket, tuple[str, int]]:
        listener = socket.create_server((self.address, 0), backlog=64)
        listener.setblocking(False)
        return listener, listener.getsockname()[:2]


@contextmanager
def verbs_world(root: Path, server: str = f"{SERVER}/8", client: str = f"{CLIENT}/8") -> Iterator[VerbsWorld]:
    """A world whose hosts' trees are below ``root``; without ``client`` there is one host, whose NIC both ends use."""
    with FakeFabric() as fabric:
        server_library = fake_library(fabric, root / "server", {"srv0": server})
        if not client:
            yield VerbsWorld(fabric, root / "server", root / "server", server_library, server_library)
            return
        client_library = fake_library(fabric, root / "client", {"cli0": client})
        yield VerbsWorld(fabric, root / "server", root / "client", server_library, client_library)
