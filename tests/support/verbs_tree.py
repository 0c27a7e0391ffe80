"""Trees of hosts with RoCE NICs for the verbs client's checks, and fake verbs libraries that show the same NICs."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider, ipv4_gid
from tests.support.sysfs import GidEntry, SysTree

__all__ = ["fake_library", "host_tree", "write_process"]

MTU = 9000


def host_tree(root: Path, addresses: Mapping[str, str], *, device_files: bool = True, **port: Any) -> SysTree:
    """A tree with a RoCE NIC per address (``10.77.0.1/24``), each on an interface ``rail0``, ``rail1`` ...

    ``finish()`` it. An address of 127.0.0.0/8 is on this machine too, so real sockets can be bound to it.
    """
    tree = SysTree(root)
    for number, (name, text) in enumerate(addresses.items()):
        netdev = f"rail{number}"
        tree.netdev(netdev, mtu=MTU)
        tree.rdma(name)
        gids = [GidEntry(f"fe80::{number + 1:x}", netdev=netdev)]
        if text:
            gids.append(GidEntry(text.partition("/")[0], netdev=netdev))
            tree.address(netdev, text)
        tree.port(name, gids=gids, **port)
    if device_files:
        (root / "dev/infiniband").mkdir(parents=True)
    return tree


def fake_library(fabric: FakeFabric, root: Path, addresses: Mapping[str, str]) -> FakeProvider:
    """A provider whose NICs are those of the tree that this writes, of a process that may pin all memory."""
    host_tree(root, addresses).finish()
    write_process(root, ipc_lock=True)
    nics = []
    for number, (name, text) in enumerate(addresses.items()):
        nic = FakeNic(name, "")
        nic.ports[1].gids[0] = b"\xfe\x80" + bytes(12) + (number + 1).to_bytes(2, "big")
        if text:
            nic.ports[1].gids.append(_gid(text.partition("/")[0]))
        nic.ports[1].active_mtu = 4096
        nics.append(nic)
    return FakeProvider(fabric, nics)


def _gid(address: str) -> bytes:
    return ip_address(address).packed if ":" in address else ipv4_gid(address)


def write_process(root: Path, *, ipc_lock: bool, uid_map: str = "0 0 4294967295") -> None:
    """``/proc/self`` of a process with or without CAP_IPC_LOCK."""
    folder = root / "proc/self"
    folder.mkdir(parents=True, exist_ok=True)
    capabilities = 1 << 14 if ipc_lock else 0
    (folder / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities:016x}\n", encoding="utf-8")
    (folder / "uid_map").write_text(f"{uid_map}\n", encoding="utf-8")
