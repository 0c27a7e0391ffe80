"""A host with fake NICs for tests of the verbs transport: a verbs library in memory, and the tree that shows its ports.

Both ends of a connection run in this process and share the library, as they share a NIC on one machine.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from memkv_vllm.transports.verbs.client import VerbsClientTransport
from memkv_vllm.transports.verbs.datapath import VerbsDataPath
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider
from tests.support.sysfs import GidEntry, SysTree

__all__ = ["FakeHost", "fake_tree", "shared_host"]

ADDRESS = "127.0.0.1"


@dataclass
class FakeHost:
    """Fake NICs of one host. ``root`` has its ``/sys`` and ``/proc``, of a process that may pin all memory."""

    root: Path
    fabric: FakeFabric
    provider: FakeProvider
    nics: tuple[FakeNic, ...]

    @classmethod
    def make(cls, root: Path, *addresses: str) -> FakeHost:
        """``fake0``, ``fake1`` ... with one port each, at ``addresses``."""
        nics = tuple(FakeNic(f"fake{number}", address) for number, address in enumerate(addresses or (ADDRESS,)))
        fabric = FakeFabric()
        fake_tree(root, nics, addresses or (ADDRESS,))
        return cls(root, fabric, FakeProvider(fabric, nics), nics)

    def data_path(self, **options: object) -> VerbsDataPath:
        """A server's, on all NICs unless ``devices`` says which."""
        options.setdefault("devices", [nic.name for nic in self.nics])
        return VerbsDataPath(provider=self.provider, root=self.root, **options)  # type: ignore[arg-type]

    def client(self, **options: object) -> VerbsClientTransport:
        """A client transport."""
        return VerbsClientTransport(provider=self.provider, root=self.root, **options)  # type: ignore[arg-type]


def fake_tree(root: Path, nics: Sequence[FakeNic], addresses: Sequence[str]) -> None:
    """What the kernel would show of ``nics``."""
    tree = SysTree(root)
    for number, (nic, address) in enumerate(zip(nics, addresses, strict=True)):
        netdev = f"rail{number}"
        tree.netdev(netdev)
        tree.rdma(nic.name)
        link_local = GidEntry(f"fe80::fa4e:{number:x}", netdev=netdev)
        tree.port(nic.name, gids=[link_local, GidEntry(address, netdev=netdev)])
        tree.address(netdev, f"{address}/32")
    tree.write("proc/self/status", "CapEff:\t000001ffffffffff")
    tree.write("proc/self/uid_map", "0 0 4294967295")
    tree.finish()


@cache
def shared_host() -> FakeHost:
    """One for all tests of this process that break nothing of it."""
    root = Path(tempfile.mkdtemp(prefix="memkv-fake-host-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return FakeHost.make(root)
