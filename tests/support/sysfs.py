"""Trees of ``/sys`` and ``/proc`` of machines that are not here, made by hand, and what a reader of them must know.

:class:`SysTree` writes the files as a kernel would show them, as far as ``memkv_vllm.topology`` reads them; the
functions in ``MACHINES`` write whole machines. GID tables are as mlx5 (RoCE v1 before v2 of each address, link-local
first) and soft-RoCE (v2 only) really order them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from ipaddress import IPv4Interface, IPv6Address, IPv6Interface, ip_address, ip_interface
from pathlib import Path
from typing import NamedTuple

GID_TABLE = 16
"""Entries of each table here; a mlx5 has 255, soft-RoCE 1024."""


class GidEntry(NamedTuple):
    """An entry of a GID table: an IP address, or ``::`` for an empty one."""

    address: str
    kind: str = "RoCE v2"
    netdev: str = ""


def mlx5_gids(netdev: str, link_local: str, *addresses: str) -> list[GidEntry]:
    """A table as mlx5 fills it: each address as v1, then as v2."""
    return [
        GidEntry(address, kind, netdev) for address in (link_local, *addresses) for kind in ("IB/RoCE v1", "RoCE v2")
    ]


class SysTree:
    """Writes a tree below ``root``. Call :meth:`finish` last."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._routes4: list[str] = []
        self._routes6: list[str] = []
        self._addresses4: list[str] = []
        self._addresses6: list[str] = []
        self._num_netdevs = 0
        self.netdev("lo", mtu=65536, flags=0x9, operstate="unknown")

    # -- files

    def write(self, path: str, text: str | int) -> None:
        """A file of one line."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def link(self, path: str, target: str) -> None:
        """A relative symbolic link, both below the root."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        (self.root / target).mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))

    # -- devices

    def pci(self, path: Sequence[str], *, numa: int, vendor: str, kind: str, driver: str = "") -> str:
        """A PCI device at ``path`` (host bridge first); returns its folder."""
        folder = "/".join(("sys/devices", *path))
        self.write(f"{folder}/vendor", vendor)
        self.write(f"{folder}/class", kind)
        self.write(f"{folder}/numa_node", numa)
        self.link(f"sys/bus/pci/devices/{path[-1]}", folder)
        if driver:
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
        return folder

    def gpu(self, path: Sequence[str], *, numa: int, vendor: str = "0x10de") -> None:
        """A data centre GPU (class: 3D controller)."""
        self.pci(path, numa=numa, vendor=vendor, kind="0x030200", driver="nvidia")

    def netdev(
        self,
        name: str,
        *,
        mtu: int = 9000,
        flags: int = 0x1003,
        operstate: str = "up",
        pci: str = "",
        master: str = "",
        dev_port: int = 0,
    ) -> None:
        """A network interface; ``pci`` is the folder of its device."""
        folder = f"{pci}/net/{name}" if pci else f"sys/devices/virtual/net/{name}"
        self._num_netdevs += 1
        self.write(f"{folder}/mtu", mtu)
        self.write(f"{folder}/operstate", operstate)
        self.write(f"{folder}/ifindex", self._num_netdevs)
        self.write(f"{folder}/flags", hex(flags))
        self.write(f"{folder}/dev_port", dev_port)
        self.write(f"{folder}/dev_id", "0x0")
        self.link(f"sys/class/net/{name}", folder)
        if pci:
            self.link(f"{folder}/device", pci)
        if master:
            self.link(f"{folder}/master", f"sys/devices/virtual/net/{master}")

    def rdma(
        self, name: str, pci: str = "", *, node_type: str = "1: CA", description: str = "", parent: str = ""
    ) -> None:
        """An RDMA device, of a PCI device or virtual; ``parent`` is the file that only soft-RoCE has."""
        folder = f"{pci or 'sys/devices/virtual'}/infiniband/{name}"
        self.write(f"{folder}/node_type", node_type)
        self.write(f"{folder}/node_desc", description)
        if parent:
            self.write(f"{folder}/parent", parent)
        self.link(f"sys/class/infiniband/{name}", folder)
        if pci:
            self.link(f"{folder}/device", pci)

    def port(
        self,
        device: str,
        number: int = 1,
        *,
        gids: Sequence[GidEntry] = (),
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        link_layer: str = "Ethernet",
    ) -> None:
        """A port; GID indexes are places in ``gids``, the rest of the table is empty."""
        base = f"sys/class/infiniband/{device}/ports/{number}"
        for file, value in {"state": state, "rate": rate, "link_layer": link_layer}.items():
            self.write(f"{base}/{file}", value)
        for index, entry in enumerate([*gids, *[GidEntry("::")] * (GID_TABLE - len(gids))]):
            self.write(f"{base}/gids/{index}", _gid_text(entry.address))
            if entry.address != "::":  # of an empty entry the kernel refuses to show the rest
                self.write(f"{base}/gid_attrs/types/{index}", entry.kind)
                if entry.netdev:
                    self.write(f"{base}/gid_attrs/ndevs/{index}", entry.netdev)

    # -- networks

    def address(self, netdev: str, text: str) -> None:
        """An address with its prefix length, and the route to its subnet."""
        interface = ip_interface(text)
        if isinstance(interface, IPv4Interface):
            network, mask = int(interface.network.network_address), int(interface.network.netmask)
            self._addresses4.append(str(interface.ip))
            self._routes4.append(_route4(netdev, network, 0, 0x1, 0, mask))
        else:
            self._address6(netdev, interface)

    def _address6(self, netdev: str, interface: IPv6Interface) -> None:
        bits, zero = interface.network.prefixlen, "0" * 32
        self._addresses6.append(f"{interface.ip.packed.hex()} 04 {bits:02x} 00 80 {netdev:>8}")
        network = interface.network.network_address.packed.hex()
        local = interface.ip.packed.hex()
        self._routes6 += [
            f"{network} {bits:02x} {zero} 00 {zero} 00000100 00000001 00000000 00000001 {netdev:>8}",
            f"{local} 80 {zero} 00 {zero} 00000000 00000001 00000000 80200001 {netdev:>8}",
        ]

    def gateway(self, netdev: str, network: str, via: str, metric: int = 0) -> None:
        """A route over a gateway."""
        target, hop = ip_interface(network).network, ip_address(via)
        if target.version == 4:
            numbers = int(target.network_address), int(hop), 0x3, metric, int(target.netmask)
            self._routes4.append(_route4(netdev, *numbers))
        else:
            zero = "0" * 32
            self._routes6.append(
                f"{target.network_address.packed.hex()} {target.prefixlen:02x} {zero} 00 {hop.packed.hex()} "
                f"{metric:08x} 00000001 00000000 00000003 {netdev:>8}"
            )

    def finish(self) -> Path:
        """Writes the tables of ``/proc/net``; returns the root."""
        self.write("proc/net/route", "\n".join(["Iface\tDestination\tGateway \tFlags\tRefCnt", *self._routes4]))
        self.write("proc/net/ipv6_route", "\n".join(self._routes6))
        self.write("proc/net/if_inet6", "\n".join(self._addresses6))
        leaves = "\n".join(
            f"           |-- {address}\n              /32 host LOCAL" for address in ["127.0.0.1", *self._addresses4]
        )
        self.write("proc/net/fib_trie", f"Main:\n  +-- 0.0.0.0/0 3 0 5\n{leaves}\nLocal:\n{leaves}")
        return self.root


def _gid_text(address: str) -> str:
    one = ip_address(address)
    raw = one.packed if isinstance(one, IPv6Address) else b"\0" * 10 + b"\xff\xff" + one.packed
    digits = raw.hex()
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4))


def _route4(netdev: str, network: int, gateway: int, flags: int, metric: int, mask: int) -> str:
    def turned(number: int) -> str:
        return f"{int.from_bytes(number.to_bytes(4, 'big'), sys.byteorder):08X}"

    return f"{netdev}\t{turned(network)}\t{turned(gateway)}\t{flags:04X}\t0\t0\t{metric}\t{turned(mask)}\t0\t0\t0"


# ---------------------------------------------------------------------------------------------------- machines


def _mlx5(tree: SysTree, name: str, path: Sequence[str], numa: int, netdev: str, address: str, number: int) -> None:
    """A NIC of one port with its interface and an IPv4 address."""
    folder = tree.pci(path, numa=numa, vendor="0x15b3", kind="0x020000", driver="mlx5_core")
    tree.rdma(name, folder)
    tree.netdev(netdev, pci=folder)
    tree.port(name, gids=mlx5_gids(netdev, f"fe80::a00:{number:x}", address.partition("/")[0]))
    tree.address(netdev, address)


def _management(tree: SysTree) -> None:
    """An interface without RDMA, with the default route."""
    folder = tree.pci(
        ["pci0000:00", "0000:00:1c.0", "0000:03:00.0"], numa=0, vendor="0x8086", kind="0x020000", driver="ixgbe"
    )
    tree.netdev("eth0", mtu=1500, pci=folder)
    tree.address("eth0", "192.168.1.10/24")
    tree.gateway("eth0", "0.0.0.0/0", "192.168.1.1", metric=100)


def rail_optimised(root: Path) -> Path:
    """8 GPUs and 8 NICs, each pair below a PCIe switch of its own, four pairs to a socket; a subnet for each rail."""
    tree = SysTree(root)
    _management(tree)
    for number in range(8):
        bus = 0x10 + 0x1A * number
        switch = [f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"]
        tree.gpu([*switch, f"0000:{bus + 2:02x}:00.0", f"0000:{bus + 3:02x}:00.0"], numa=number // 4)
        nic = [*switch, f"0000:{bus + 2:02x}:01.0", f"0000:{bus + 4:02x}:00.0"]
        _mlx5(tree, f"mlx5_{number}", nic, number // 4, f"rail{number}", f"10.10.{number}.1/24", number)
    return tree.finish()


def eight_gpus_two_nics(root: Path) -> Path:
    """8 GPUs in pairs below switches, two switches to a socket; one NIC a socket, below the first of its switches."""
    tree = SysTree(root)
    _management(tree)
    for pair in range(4):
        bus = 0x10 + 0x30 * pair
        switch = [f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"]
        for slot in range(2):
            path = [*switch, f"0000:{bus + 2:02x}:{slot:02x}.0", f"0000:{bus + 3 + slot:02x}:00.0"]
            tree.gpu(path, numa=pair // 2)
        if pair % 2 == 0:
            # A second switch below the first: the way to it leads through two.
            nic = [*switch, f"0000:{bus + 2:02x}:08.0", f"0000:{bus + 8:02x}:00.0", f"0000:{bus + 9:02x}:00.0"]
            nic.append(f"0000:{bus + 10:02x}:00.0")
            name = f"mlx5_{pair // 2}"
            _mlx5(tree, name, nic, pair // 2, f"ens{pair // 2}np0", f"10.20.{pair // 2}.1/24", pair)
    return tree.finish()


def bonded(root: Path) -> Path:
    """A NIC whose two ports are one bond: empty entries and a slave's come before the good ones."""
    tree = SysTree(root)
    tree.gpu(["pci0000:97", "0000:97:01.0", "0000:98:00.0"], numa=1)
    first = tree.pci(
        ["pci0000:97", "0000:97:02.0", "0000:99:00.0"], numa=1, vendor="0x15b3", kind="0x020000", driver="mlx5_core"
    )
    second = tree.pci(
        ["pci0000:97", "0000:97:02.0", "0000:99:00.1"], numa=1, vendor="0x15b3", kind="0x020000", driver="mlx5_core"
    )
    tree.netdev("bond0", mtu=9000)
    tree.netdev("ens1f0np0", pci=first, master="bond0")
    tree.netdev("ens1f1np1", pci=second, master="bond0")
    tree.write("sys/class/net/bonding_masters", "bond0")
    tree.rdma("mlx5_bond_0", first)
    empty = GidEntry("::")
    slave = mlx5_gids("ens1f0np0", "fe80::99:f0")
    tree.port(
        "mlx5_bond_0",
        gids=[empty, empty, *slave, empty, *mlx5_gids("bond0", "fe80::99:b0", "10.30.0.1")],
        rate="200 Gb/sec (4X HDR)",
    )
    tree.address("bond0", "10.30.0.1/16")
    tree.address("bond0", "fe80::99:b0/64")
    tree.gateway("bond0", "0.0.0.0/0", "10.30.255.254")
    return tree.finish()


def vm_without_pci(root: Path) -> Path:
    """A virtual machine whose NIC hangs on a bus of the hypervisor's: no PCI tree at all, MTU 1500."""
    tree = SysTree(root)
    folder = "sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/f8615163-0000-1000-2000-00224805cbf1"
    tree.write(f"{folder}/vendor", "0x1414")
    tree.rdma("mana_0", folder)
    tree.netdev("eth1", mtu=1500, pci=folder)
    tree.port("mana_0", gids=mlx5_gids("eth1", "fe80::222:48ff:fe05:cbf1", "10.40.0.4"), rate="100 Gb/sec (4X EDR)")
    tree.address("eth1", "10.40.0.4/24")
    tree.gateway("eth1", "0.0.0.0/0", "10.40.0.1", metric=100)
    return tree.finish()


def container_without_rdma(root: Path) -> Path:
    """A container with GPUs, and neither ``/sys/class/infiniband`` nor ``/dev/infiniband``."""
    tree = SysTree(root)
    tree.gpu(["pci0000:10", "0000:10:01.0", "0000:11:00.0"], numa=0)
    tree.netdev("eth0", mtu=1500)
    tree.address("eth0", "172.17.0.2/16")
    tree.gateway("eth0", "0.0.0.0/0", "172.17.0.1")
    return tree.finish()


def dual_port(root: Path) -> Path:
    """One device with two ports on two subnets, as older NICs have them; beside it a card with a dead port."""
    tree = SysTree(root)
    tree.gpu(["pci0000:20", "0000:20:01.0", "0000:21:00.0"], numa=0)
    tree.gpu(["pci0000:40", "0000:40:01.0", "0000:41:00.0"], numa=1)
    folder = tree.pci(
        ["pci0000:20", "0000:20:03.0", "0000:22:00.0"], numa=0, vendor="0x15b3", kind="0x020000", driver="mlx4_core"
    )
    tree.rdma("mlx4_0", folder)
    for number in (1, 2):
        netdev = f"enp34s0d{number}"
        tree.netdev(netdev, mtu=4200 if number == 1 else 1500, pci=folder, dev_port=number - 1)
        tree.port(
            "mlx4_0",
            number,
            gids=mlx5_gids(netdev, f"fe80::22:{number}", f"10.50.{number}.1"),
            rate="40 Gb/sec (4X QDR)",
        )
        tree.address(netdev, f"10.50.{number}.1/24")
    dead = tree.pci(
        ["pci0000:40", "0000:40:03.0", "0000:42:00.0"], numa=1, vendor="0x15b3", kind="0x020000", driver="mlx5_core"
    )
    tree.rdma("mlx5_0", dead)
    tree.netdev("enp66s0", pci=dead, operstate="down")
    tree.port("mlx5_0", gids=mlx5_gids("enp66s0", "fe80::42:0"), state="1: DOWN", rate="10 Gb/sec (1X QDR)")
    return tree.finish()


def ipv6_only(root: Path) -> Path:
    """Two rails with global IPv6 addresses and no IPv4 at all."""
    tree = SysTree(root)
    for number in range(2):
        bus = 0x20 * (number + 1)
        tree.gpu([f"pci0000:{bus:x}", f"0000:{bus:x}:01.0", f"0000:{bus + 1:x}:00.0"], numa=number)
        path = [f"pci0000:{bus:x}", f"0000:{bus:x}:02.0", f"0000:{bus + 2:x}:00.0"]
        folder = tree.pci(path, numa=number, vendor="0x15b3", kind="0x020000", driver="mlx5_core")
        netdev = f"ens{number}"
        tree.rdma(f"mlx5_{number}", folder)
        tree.netdev(netdev, pci=folder)
        tree.port(f"mlx5_{number}", gids=mlx5_gids(netdev, f"fe80::6:{number}", f"2001:db8:6:{number}::1"))
        tree.address(netdev, f"fe80::6:{number}/64")
        tree.address(netdev, f"2001:db8:6:{number}::1/64")
    return tree.finish()


def soft_roce(root: Path) -> Path:
    """Two soft-RoCE devices: virtual, no driver link, a nominal rate that means nothing."""
    tree = SysTree(root)
    for number in range(2):
        netdev, device = f"rail{number}", f"rxe{number}"
        tree.netdev(netdev, mtu=9000, flags=0x83, operstate="unknown")
        tree.rdma(device, description="rxe", parent=netdev)
        gids = [GidEntry(f"fe80::77:{number}", netdev=netdev), GidEntry(f"10.{77 + number}.0.1", netdev=netdev)]
        tree.port(device, gids=gids, rate="2.5 Gb/sec (1X SDR)")
        tree.address(netdev, f"10.{77 + number}.0.1/24")
        tree.address(netdev, f"fe80::77:{number}/64")
    return tree.finish()


def infiniband(root: Path) -> Path:
    """InfiniBand: GIDs are of the fabric, addresses stand on the IP interface above it."""
    tree = SysTree(root)
    tree.gpu(["pci0000:20", "0000:20:01.0", "0000:21:00.0"], numa=0)
    folder = tree.pci(
        ["pci0000:20", "0000:20:02.0", "0000:22:00.0"], numa=0, vendor="0x15b3", kind="0x020700", driver="mlx5_core"
    )
    tree.rdma("mlx5_0", folder)
    tree.netdev("ib0", mtu=4092, pci=folder)
    tree.port("mlx5_0", gids=[GidEntry("fe80::b8ce:f603:5:1", "IB/RoCE v1")], link_layer="InfiniBand")
    tree.address("ib0", "10.60.0.1/16")
    return tree.finish()


MACHINES: dict[str, Callable[[Path], Path]] = {
    "rail_optimised": rail_optimised,
    "eight_gpus_two_nics": eight_gpus_two_nics,
    "bonded": bonded,
    "vm_without_pci": vm_without_pci,
    "container_without_rdma": container_without_rdma,
    "dual_port": dual_port,
    "ipv6_only": ipv6_only,
    "soft_roce": soft_roce,
    "infiniband": infiniband,
}
"""Shapes of machines by name."""
