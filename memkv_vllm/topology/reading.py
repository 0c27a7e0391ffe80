"""Reads what the kernel shows of this host below ``/sys`` and ``/proc``. The only I/O of this package.

Nothing raises: a file that is absent, odd or not readable is a fact left out. Nothing outside of ``root`` is read,
whatever its links point to, so that a tree made by hand or copied from another machine reads the same anywhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from memkv_vllm.topology.marking import ib_mtu, ipoib_mtu
from memkv_vllm.topology.model import Address, Gid, GidKind, Gpu, Host, Netdev, Nic, Port, Route

__all__ = ["read_host"]

MAX_FILE_BYTES = 1 << 20
GPU_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D controller, display controller, processing accelerator: what data centre GPUs call themselves."""
ROUTE_UP, ROUTE_GATEWAY, ROUTE_REJECT = 0x1, 0x2, 0x200
ROUTE6_SKIP = 0x80000000 | 0x01000000 | 0x00100000 | 0x200
"""Local, cached, anycast and rejecting entries."""


class _Tree:
    """The files below a root."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))

    def resolve(self, *parts: str) -> Path | None:
        """Where links lead, if it exists and is below the root."""
        path = Path(os.path.realpath(self._root.joinpath(*parts)))
        inside = path == self._root or self._root in path.parents
        return path if inside and path.exists() else None

    def text(self, *parts: str) -> str:
        """The file without surrounding space; empty if it cannot be had."""
        path = self.resolve(*parts)
        return "" if path is None else _read(path)

    def texts(self, *parts: str) -> dict[str, str]:
        """All files of a directory by name, in order. For GID tables: up to a thousand files that are no links."""
        path = self.resolve(*parts)
        if path is None:
            return {}
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return {}
        try:
            return {name: _read_attribute(name, directory) for name in self.names(*parts)}
        finally:
            os.close(directory)

    def number(self, *parts: str) -> int | None:
        """The file as a decimal or 0x number; None if it is none."""
        try:
            return int(self.text(*parts), 0)
        except ValueError:
            return None

    def names(self, *parts: str) -> tuple[str, ...]:
        """Entries of a directory, numbers inside of names in numerical order."""
        path = self.resolve(*parts)
        try:
            return tuple(sorted(os.listdir(path), key=_natural)) if path is not None else ()
        except OSError:
            return ()

    def pci_path(self, *parts: str) -> tuple[str, ...]:
        """From the host bridge down to the device; empty where it is not on a PCI bus."""
        path = self.resolve(*parts)
        names = () if path is None else path.relative_to(self._root).parts
        start = next((at for at, name in enumerate(names) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", name)), None)
        if start is None:
            return ()
        below = [name for name in names[start + 1 :] if _PCI.fullmatch(name)]
        return (names[start], *below) if below else ()


_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _read(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        content = b""
        while len(content) < MAX_FILE_BYTES and (piece := os.read(fd, 1 << 16)):
            content += piece
    except OSError:
        return ""
    finally:
        os.close(fd)
    return content.decode("utf-8", "replace").strip()


def _read_attribute(name: str, directory: int) -> str:
    """A file of sysfs, which one read gives whole; with as few system calls as can be, for there may be thousands."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def read_host(root: Path = Path("/")) -> Host:
    """What this host has, as far as its kernel shows it.

    Args:
        root: the tree to read instead of this machine's.
    """
    tree = _Tree(root)
    netdevs = _read_netdevs(tree)
    return Host(
        nics=tuple(_read_nic(tree, name, netdevs) for name in tree.names("sys/class/infiniband")),
        gpus=_read_gpus(tree),
        routes=(*_read_routes4(tree), *_read_routes6(tree)),
        netdevs=tuple(netdevs.values()),
        addresses=frozenset((*_read_local4(tree), *(address for n in netdevs.values() for address in n.addresses))),
        has_rdma_class=tree.resolve("sys/class/infiniband") is not None,
        has_pci=bool(tree.names("sys/bus/pci/devices")),
    )


# ---------------------------------------------------------------------------------------------------- interfaces


def _read_netdevs(tree: _Tree) -> dict[str, Netdev]:
    addresses: dict[str, list[Address]] = {}
    for name, address in _read_addresses6(tree):
        addresses.setdefault(name, []).append(address)
    netdevs = {}
    for name in tree.names("sys/class/net"):
        base = f"sys/class/net/{name}"
        if tree.number(base, "ifindex") is None and not tree.text(base, "mtu"):
            continue  # a file such as bonding_masters
        master = tree.resolve(base, "master")
        pci_path = tree.pci_path(base, "device")
        netdevs[name] = Netdev(
            name=name,
            mtu=tree.number(base, "mtu"),
            is_up=_is_up(tree, base),
            master="" if master is None else master.name,
            pci=pci_path[-1] if pci_path else "",
            addresses=tuple(addresses.get(name, ())),
        )
    return netdevs


def _is_up(tree: _Tree, base: str) -> bool:
    flags, state = tree.number(base, "flags"), tree.text(base, "operstate")
    if flags is not None and not flags & 1:
        return False
    # Virtual interfaces say "unknown" for ever; only a plain no counts.
    return state not in ("down", "lowerlayerdown", "notpresent", "dormant")


def _read_addresses6(tree: _Tree) -> Iterator[tuple[str, IPv6Address]]:
    for line in tree.text("proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6 and re.fullmatch(r"[0-9a-f]{32}", fields[0]):
            yield fields[5], IPv6Address(bytes.fromhex(fields[0]))


def _read_local4(tree: _Tree) -> Iterator[IPv4Address]:
    """IPv4 addresses of this host: ``fib_trie`` has each on the line before its ``host LOCAL``."""
    before = ""
    for line in tree.text("proc/net/fib_trie").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "|--":
            before = words[1]
        elif words == ["/32", "host", "LOCAL"]:
            try:
                yield IPv4Address(before)
            except ValueError:
                continue


# ---------------------------------------------------------------------------------------------------- routes


def _read_routes4(tree: _Tree) -> Iterator[Route]:
    for line in tree.text("proc/net/route").splitlines()[1:]:
        fields = line.split()
        try:
            name, target, gateway, flags, metric, mask = (fields[at] for at in (0, 1, 2, 3, 6, 7))
            bits = int(flags, 16)
            if not bits & ROUTE_UP or bits & ROUTE_REJECT:
                continue
            network = IPv4Network((_host_order(target), str(_host_order(mask))))
            via = _host_order(gateway) if bits & ROUTE_GATEWAY else None
            yield Route(network, name, via, int(metric))
        except (ValueError, IndexError):
            continue


def _host_order(text: str) -> IPv4Address:
    """The kernel prints these as numbers of its own byte order."""
    return IPv4Address(int(text, 16).to_bytes(4, sys.byteorder))


def _read_routes6(tree: _Tree) -> Iterator[Route]:
    for line in tree.text("proc/net/ipv6_route").splitlines():
        fields = line.split()
        try:
            target, bits, gateway, metric, flags, name = (fields[at] for at in (0, 1, 4, 5, 8, 9))
            if int(flags, 16) & ROUTE6_SKIP or name == "lo":
                continue
            network = IPv6Network((bytes.fromhex(target), int(bits, 16)))
            if network.is_multicast:
                continue
            via = IPv6Address(bytes.fromhex(gateway)) if int(flags, 16) & ROUTE_GATEWAY else None
            yield Route(network, name, via, int(metric, 16))
        except (ValueError, IndexError):
            continue


# ---------------------------------------------------------------------------------------------------- NICs


def _read_nic(tree: _Tree, name: str, netdevs: dict[str, Netdev]) -> Nic:
    base = f"sys/class/infiniband/{name}"
    pci_path = tree.pci_path(base, "device") or tree.pci_path(base)
    node = tree.number(base, "device/numa_node")
    numbers = [number for number in tree.names(base, "ports") if number.isdecimal()]
    return Nic(
        name=name,
        pci=pci_path[-1] if pci_path else "",
        pci_path=pci_path,
        numa_node=node if node is not None and node >= 0 else None,
        driver=_driver(tree, base),
        ports=tuple(_read_port(tree, name, int(number), netdevs) for number in numbers),
        node_type=tree.text(base, "node_type").partition(":")[2].strip() or "CA",
    )


def _driver(tree: _Tree, base: str) -> str:
    """Software devices have no driver link; they are told by their description, or as rxe by its ``parent`` file."""
    described = tree.text(base, "node_desc").lower()
    if tree.text(base, "parent") or described.startswith("rxe"):
        return "rxe"
    if described.startswith(("siw", "software iwarp")):
        return "siw"
    driver = tree.resolve(base, "device/driver")
    return "" if driver is None else driver.name


def _read_port(tree: _Tree, device: str, number: int, netdevs: dict[str, Netdev]) -> Port:
    base = f"sys/class/infiniband/{device}/ports/{number}"
    link_layer = tree.text(base, "link_layer")
    gids = tuple(_read_gids(tree, base, link_layer))
    netdev = _port_netdev(tree, device, number, gids, netdevs)
    above = netdevs.get(netdev)
    netdev_mtu = None if above is None else above.mtu
    to_ib = ipoib_mtu if link_layer == "InfiniBand" else ib_mtu
    named = {gid.netdev for gid in gids if gid.netdev}
    return Port(
        device=device,
        number=number,
        state=tree.text(base, "state").partition(":")[2].strip(),
        link_layer=link_layer,
        rate_bytes_per_s=_rate(tree.text(base, "rate")),
        netdev=netdev,
        netdev_mtu=netdev_mtu,
        mtu=None if netdev_mtu is None else to_ib(netdev_mtu),
        gids=gids,
        down_netdevs=frozenset(name for name in named if name in netdevs and not netdevs[name].is_up),
        absent_netdevs=frozenset(named - netdevs.keys()),
        enslaved_netdevs=frozenset(name for name in named if name in netdevs and netdevs[name].master),
    )


def _read_gids(tree: _Tree, base: str, link_layer: str) -> Iterator[Gid]:
    for index, text in tree.texts(base, "gids").items():
        digits = text.replace(":", "")
        if not index.isdecimal() or not re.fullmatch(r"[0-9a-fA-F]{32}", digits) or not int(digits, 16):
            continue
        kind = tree.text(base, "gid_attrs/types", index)
        netdev = tree.text(base, "gid_attrs/ndevs", index)
        yield Gid(int(index), bytes.fromhex(digits), _kind(kind, link_layer), netdev)


def _kind(text: str, link_layer: str) -> GidKind:
    if link_layer == "InfiniBand":
        return GidKind.INFINIBAND
    return GidKind.ROCE_V2 if "v2" in text.lower() else GidKind.ROCE_V1


def _port_netdev(tree: _Tree, device: str, number: int, gids: tuple[Gid, ...], netdevs: dict[str, Netdev]) -> str:
    """The interface above a port: what most of its GIDs say, else the device's own; then the bond, if it is in one."""
    name = tree.text(f"sys/class/infiniband/{device}", "parent")
    if not name:
        named = [gid.netdev for gid in gids if gid.netdev in netdevs]
        name = next((n for n in named if not netdevs[n].master and netdevs[n].pci), named[0] if named else "")
    if not name:
        for candidate in tree.names(f"sys/class/infiniband/{device}/device/net"):
            base = f"sys/class/net/{candidate}"
            at = max(tree.number(base, "dev_port") or 0, tree.number(base, "dev_id") or 0)
            if at == number - 1 and candidate in netdevs:
                name = candidate
    master = netdevs[name].master if name in netdevs else ""
    return master if master in netdevs else name


def _rate(text: str) -> float | None:
    """Bytes per second of ``100 Gb/sec (4X EDR)``."""
    match = re.match(r"([\d.]+)\s*Gb/sec", text)
    try:
        return float(match[1]) * 1e9 / 8 if match else None
    except ValueError:
        return None


# ---------------------------------------------------------------------------------------------------- GPUs


def _read_gpus(tree: _Tree) -> tuple[Gpu, ...]:
    found = []
    for pci in tree.names("sys/bus/pci/devices"):
        base = f"sys/bus/pci/devices/{pci}"
        vendor = GPU_VENDORS.get(tree.text(base, "vendor"))
        if vendor is None or not tree.text(base, "class").startswith(GPU_CLASSES):
            continue
        node = tree.number(base, "numa_node")
        found.append((pci, tree.pci_path(base), node if node is not None and node >= 0 else None, vendor))
    return tuple(Gpu(index, *facts) for index, facts in enumerate(sorted(found, key=lambda facts: facts[0])))
