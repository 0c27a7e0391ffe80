"""Two soft-RoCE devices with a cable between them that can be slow, lossy, narrow or unplugged.

::

    cable = lay()                                   # once per machine; later calls find it
    cable.shape(A, delay_s=0.3)                     # packets that leave A
    cable.shape(B, loss=0.01)
    cable.down(B); cable.up(B)                      # its interface
    cable.narrow(A, 1500)                           # what is larger and leaves A is lost
    cable.set_mtu(A, 1500)                          # its interface's, which its device follows
    cable.repair()                                  # as at first

On one soft-RoCE device all bytes move inside of the post, so nothing of it can be late. Here packets cross a veth pair
between ``rxa`` (10.90.0.1 on ``ra``) and ``rxb`` (10.90.0.2 on ``rb``), through netem, and the kernel goes on sending
what was posted whatever becomes of the process that posted it, as a NIC does.

Both ends are in the first network namespace, where alone rxe of Linux 6.1 works; so policy routing keeps the kernel
from taking the short cut through ``lo``. The control connection between the two addresses crosses the cable too, if it
is bound to its end's address. Needs root and a kernel with rxe, veth and netem; ``make test-rdma`` boots one. It
changes the routes of the machine, and so refuses to run anywhere but there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["A", "B", "Cable", "End", "lay"]

MTU = 9000
"""Of the interfaces: soft-RoCE then has an MTU of 4096."""
_QUEUE_PACKETS = 200_000
"""What waits in netem; its own default of 1000 would drop what a long delay holds."""
_ETHERNET_HEADER, _TCP_HEADERS = 14, 40
"""Bytes before an IP packet, and of IPv4 and TCP in it."""
_IFF_UP = 1


@dataclass(frozen=True)
class End:
    """One end of the cable."""

    device: str
    netdev: str
    address: str
    table: int
    """Of routes, for what leaves here."""

    @property
    def other(self) -> End:
        """The far end."""
        return B if self is A else A


A = End("rxa", "ra", "10.90.0.1", 100)
B = End("rxb", "rb", "10.90.0.2", 101)


class Cable:
    """Made by :func:`lay`. What it does is done when a call returns."""

    def shape(self, end: End, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Delay packets that leave ``end`` and lose a part of them (0 to 1), from now on; nothing named: neither."""
        _run(_shape(end, delay_s, loss))

    def down(self, end: End) -> None:
        """Unplug: the interface is down, for either end no packet passes."""
        _run(f"ip link set {end.netdev} down")

    def up(self, end: End) -> None:
        """Plug in again; routes and neighbours went with it."""
        _run(f"ip link set {end.netdev} up")
        _run(*_ways(end), *_ways(end.other))

    def narrow(self, end: End, mtu: int) -> None:
        """Packets over ``mtu`` bytes that leave ``end`` are lost, and no device knows: a switch that is set up wrongly.

        Those of the other end are not. In place of what :meth:`shape` did to ``end``. A TCP connection made afterwards
        sends smaller ones: the other end asks for them.
        """
        _run(*_narrow(end, mtu), *_ways(end.other, advmss=mtu - _TCP_HEADERS))

    def set_mtu(self, end: End, mtu: int) -> None:
        """The MTU of the interface; its RDMA device follows it, and what is larger is not received either."""
        _run(f"ip link set {end.netdev} mtu {mtu}")

    def repair(self) -> None:
        """Everything as at first; packets that wait in the cable are lost."""
        _run(*(f"ip link set {end.netdev} mtu {MTU} up" for end in (A, B)))
        _run(*(_shape(end) for end in (A, B)), *_ways(A), *_ways(B))


def lay() -> Cable:
    """The cable of this machine, laid now if need be.

    Raises:
        RuntimeError: this is not the machine for it, or a command failed; says which and what it said.
    """
    if not os.environ.get("RDMA_VM"):
        raise RuntimeError("the cable is for the machine that `make test-rdma` boots, and RDMA_VM is not set here")
    for command in ("ip", "tc", "rdma", "sysctl"):
        if shutil.which(command) is None:
            raise RuntimeError(f"the command `{command}` is missing: apt-get install iproute2 procps")
    if not Path("/sys/class/net", A.netdev).exists():
        _run(f"ip link add {A.netdev} type veth peer name {B.netdev}")
        _run(*_policy(10, A), *_policy(11, B), "ip rule add pref 1000 lookup local", "ip rule del pref 0")
        _run(*_ways(A), *_ways(B))
    for end in (A, B):
        if not Path("/sys/class/infiniband", end.device).exists():
            _run(f"rdma link add {end.device} type rxe netdev {end.netdev}")
    return Cable()


def _policy(number: int, end: End) -> list[str]:
    """Commands that bring an end up, with its own table of routes."""
    conf = f"net.ipv4.conf.{end.netdev}"
    return [
        f"sysctl -qw {conf}.accept_local=1 {conf}.rp_filter=0 net.ipv4.conf.all.rp_filter=0",
        # What arrives in bursts waits for the one CPU; by itself the kernel drops packets beyond 1000.
        "sysctl -qw net.core.netdev_max_backlog=100000",
        f"ip link set {end.netdev} mtu {MTU} up",
        f"ip address add {end.address}/24 dev {end.netdev}",
        f"ip rule add pref {number} iif {end.netdev} lookup local",
        f"ip rule add pref {number + 10} from {end.address} to {end.other.address} lookup {end.table}",
        # What a host without this link would say; else the packet goes on to the next table, and through lo.
        f"ip route add unreachable default metric 9999 table {end.table}",
    ]


def _ways(end: End, advmss: int = 0) -> list[str]:
    """Commands that make the way from ``end`` to the other one; none while its interface is down.

    ``advmss``: the largest TCP segment that ``end`` asks the other one for; 0: what its interface takes.
    """
    if not int(Path("/sys/class/net", end.netdev, "flags").read_text(), 16) & _IFF_UP:
        return []
    there = Path("/sys/class/net", end.other.netdev, "address").read_text().strip()
    asks = f" advmss {advmss}" if advmss else ""
    return [
        f"ip route replace {end.other.address} dev {end.netdev} src {end.address} table {end.table}{asks}",
        f"ip neigh replace {end.other.address} lladdr {there} dev {end.netdev} nud permanent",
    ]


def _shape(end: End, delay_s: float = 0.0, loss: float = 0.0) -> str:
    device = f"dev {end.netdev} root"
    if not delay_s and not loss:
        return f"{{ tc qdisc del {device} 2>/dev/null || true; }}"
    return f"tc qdisc replace {device} netem delay {delay_s * 1000:.0f}ms loss {loss:.3%} limit {_QUEUE_PACKETS}"


def _narrow(end: End, mtu: int) -> list[str]:
    """Commands that have packets over ``mtu`` bytes get lost behind ``end``.

    A token bucket drops what is larger than itself. It stands below a netem, which takes everything first: soft-RoCE
    would send again for ever what it is told was dropped, and leave the machine no time for anything else.
    """
    device, size = f"dev {end.netdev}", mtu + _ETHERNET_HEADER
    return [
        _shape(end),
        f"tc qdisc add {device} root handle 1: netem limit {_QUEUE_PACKETS}",
        f"tc qdisc add {device} parent 1:1 tbf rate 1000gbit burst {size} limit {_QUEUE_PACKETS * size}",
    ]


def _run(*commands: str) -> None:
    """One shell for all: a process that is started from a large one takes long in User-Mode Linux."""
    if not commands:
        return
    done = subprocess.run(["sh", "-c", " && ".join(commands)], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"`{' && '.join(commands)}` failed: {done.stderr.strip()}")
