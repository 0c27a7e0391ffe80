"""What a host looks like to RDMA: NICs, their ports and GIDs, GPUs, network interfaces and routes. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

__all__ = ["Address", "Gid", "GidKind", "Gpu", "Host", "Netdev", "Network", "Nic", "Port", "Route", "gid_address"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class GidKind(Enum):
    """What packets that name a GID look like. Two ends talk only if their GIDs are of one kind."""

    ROCE_V2 = "rocev2"
    """UDP over IP: can be routed, and marked by DSCP."""
    ROCE_V1 = "rocev1"
    """Ethernet frames of a type of their own: one subnet at most, and no DSCP."""
    INFINIBAND = "ib"


def gid_address(raw: bytes) -> Address:
    """The IP address in the 16 bytes of a GID, as an operator knows it: IPv4 where it is an IPv4-mapped one."""
    address = IPv6Address(raw)
    return address.ipv4_mapped or address


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table that is not empty."""

    index: int
    raw: bytes
    """16 bytes."""
    kind: GidKind
    netdev: str
    """The interface that it belongs to (a bond's or a VLAN's own); empty where the kernel does not say."""

    @property
    def address(self) -> Address:
        """The IP address inside; IPv4 where it is an IPv4-mapped one."""
        return gid_address(self.raw)


@dataclass(frozen=True)
class Netdev:
    """A network interface."""

    name: str
    mtu: int | None
    """Bytes of a frame's payload."""
    is_up: bool
    """Switched on, and not known to be without a carrier."""
    master: str = ""
    """The bond (or bridge) that it is part of."""
    pci: str = ""
    """Its device, such as ``0000:17:00.0``; empty for virtual ones."""
    addresses: tuple[Address, ...] = ()
    """IPv6 only: the kernel shows no file with the IPv4 ones, which are in GIDs and in ``Host.addresses``."""


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device: one rail."""

    device: str
    number: int
    """From 1."""
    state: str
    """``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` ...; empty where unknown."""
    link_layer: str
    """``Ethernet`` or ``InfiniBand``; empty where unknown."""
    rate_bytes_per_s: float | None
    """Nominal, each way. Soft-RoCE's is fiction: see ``Nic.is_software``."""
    netdev: str
    """The interface above it (of a bond the bond's); empty where there is none in this network namespace."""
    netdev_mtu: int | None
    mtu: int | None
    """Largest path MTU that its interface can carry, bytes; the library's active MTU, if asked, has the last word."""
    gids: tuple[Gid, ...]
    down_netdevs: frozenset[str] = frozenset()
    """Interfaces of its GIDs that are down."""
    absent_netdevs: frozenset[str] = frozenset()
    """Interfaces of its GIDs that this network namespace does not have."""
    enslaved_netdevs: frozenset[str] = frozenset()
    """Interfaces of its GIDs that are part of a bond: their own addresses reach nobody."""

    @property
    def name(self) -> str:
        """As settings write it: ``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    @property
    def is_up(self) -> bool:
        """Whether packets can go through it now."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Nic:
    """An RDMA device with its place in the machine."""

    name: str
    pci: str
    """Such as ``0000:17:00.0``; empty where it is no PCI device."""
    pci_path: tuple[str, ...]
    """From the host bridge (``pci0000:16``) down to the device itself; empty where unknown."""
    numa_node: int | None
    driver: str
    """Such as ``mlx5_core``, ``rxe``; empty where unknown."""
    ports: tuple[Port, ...]
    node_type: str = "CA"
    """``CA`` does InfiniBand or RoCE; ``RNIC`` is iWARP, which this product does not speak."""

    @property
    def is_software(self) -> bool:
        """Whether the CPU does its work (soft-RoCE): no rate to expect, no place in the machine."""
        return self.driver in ("rxe", "siw")


@dataclass(frozen=True)
class Gpu:
    """A GPU with its place in the machine."""

    index: int
    """In the order of PCI addresses, which is CUDA's with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""
    pci: str
    pci_path: tuple[str, ...]
    numa_node: int | None
    vendor: str
    """``nvidia`` or ``amd``."""


@dataclass(frozen=True)
class Route:
    """One entry of the kernel's main routing table."""

    network: Network
    netdev: str
    gateway: Address | None
    """None: whoever is in ``network`` is on this link."""
    metric: int


@dataclass(frozen=True)
class Host:
    """All that :func:`memkv_vllm.topology.read_host` found. In the kernel's own order: names by number."""

    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    routes: tuple[Route, ...]
    netdevs: tuple[Netdev, ...] = ()
    addresses: frozenset[Address] = frozenset()
    """This host's own, of all interfaces."""
    has_rdma_class: bool = True
    """Whether ``/sys/class/infiniband`` exists: without it no driver is loaded, or a container does not show it."""
    has_pci: bool = True
    """Whether ``/sys/bus/pci/devices`` exists and shows something."""

    @property
    def ports(self) -> tuple[Port, ...]:
        """The ports of all NICs, in order."""
        return tuple(port for nic in self.nics for port in nic.ports)

    def nic_of(self, port: Port) -> Nic:
        """The NIC that ``port`` is part of."""
        return next(nic for nic in self.nics if nic.name == port.device)

    def netdev(self, name: str) -> Netdev | None:
        """The interface with that name, if this network namespace has one."""
        return next((netdev for netdev in self.netdevs if netdev.name == name), None)
