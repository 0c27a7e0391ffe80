"""A server's host and a client's, each with a fake NIC on one network: the verbs transport whole, in one process."""

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
    """Both hosts; a ``TransportFactory`` of the harness. ``srv0`` is the server's NIC, ``cli0`` the client's."""

    server_root: Path
    server_library: FakeProvider
    client_root: Path
    client_library: FakeProvider
    address: str = SERVER
    """Where a server listens."""
    offers_verbs: bool = True
    name: str = "verbs-pair"
    fence_needs_peer: bool = False
    maps_regions: bool = False
    between_processes: bool = False

    @property
    def server_nic(self) -> FakeNic:
        """On which everything is posted."""
        return next(iter(self.server_library.nics.values()))

    @property
    def client_nic(self) -> FakeNic:
        """The other one."""
        return next(iter(self.client_library.nics.values()))

    @property
    def num_live(self) -> int:
        """What the client holds of its library."""
        return self.client_library.num_live()

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport:
        """A tcp server that offers verbs too, unless told not to."""
        path = VerbsDataPath(("srv0",), provider=self.server_library, root=self.server_root, faults=faults)
        paths = [path] if self.offers_verbs else []
        return TcpServerTransport(self.address, 0, faults=faults, data_paths=paths, **options)

    def client(self, **options: Any) -> VerbsClientTransport:
        """A client transport on the client's host."""
        return VerbsClientTransport(provider=self.client_library, root=self.client_root, **options)

    def raw_connect(self, address: tuple[str, int]) -> SocketStream:
        """A control stream that says nothing by itself."""
        return SocketStream(socket.create_connection(address))

    def raw_listener(self) -> tuple[socket.socket, tuple[str, int]]:
        """A listening control socket that says nothing by itself."""
        listener = socket.create_server((self.address, 0), backlog=64)
        listener.setblocking(False)
        return listener, listener.getsockname()[:2]


@contextmanager
def verbs_world(folder: Path, *, server: str = f"{SERVER}/8", client: str = f"{CLIENT}/8") -> Iterator[VerbsWorld]:
    """Two hosts; addresses with prefix lengths. Without one for ``client`` both ends are on the server's host."""
    with FakeFabric() as fabric:
        server_root = folder / "server"
        server_library = fake_library(fabric, server_root, {"srv0": server})
        if client:
            client_root = folder / "client"
            yield VerbsWorld(
                server_root, server_library, client_root, fake_library(fabric, client_root, {"cli0": client})
            )
        else:
            yield VerbsWorld(server_root, server_library, server_root, server_library)
