"""What goes on an RDMA packet: how long it may be, and the class that switches see. Pure."""

from __future__ import annotations

__all__ = ["MTUS", "dscp_of", "ib_mtu", "ipoib_mtu", "traffic_class", "traffic_class_problem"]

MTUS = (256, 512, 1024, 2048, 4096)
"""Path MTUs that InfiniBand and RoCE know, bytes."""

ROCE_HEADER_BYTES = 96
"""What the kernel keeps free in an Ethernet frame for the longest RoCE headers: IP 40, UDP 8, transport 12, extended
ones 32, check sum 4."""

IPOIB_HEADER_BYTES = 4


def ib_mtu(netdev_mtu: int) -> int | None:
    """The largest path MTU that frames of an Ethernet interface carry: 1024 for 1500, 4096 from 4192 on.

    Args:
        netdev_mtu: the interface's, bytes.

    Returns:
        Bytes; None where not even the smallest fits.
    """
    return _largest(netdev_mtu - ROCE_HEADER_BYTES)


def ipoib_mtu(netdev_mtu: int) -> int | None:
    """The path MTU behind an IP-over-InfiniBand interface in datagram mode: 2048 for 2044, 4096 for 4092."""
    return _largest(netdev_mtu + IPOIB_HEADER_BYTES)


def _largest(room: int) -> int | None:
    return next((mtu for mtu in reversed(MTUS) if mtu <= room), None)


def traffic_class(dscp: int) -> int:
    """The byte to set for a DSCP: it stands in the upper six bits.

    Raises:
        ValueError: ``dscp`` is not 0 to 63.
    """
    if not 0 <= dscp <= 63:
        raise ValueError(f"DSCP {dscp}: expected 0 to 63")
    return dscp << 2


def dscp_of(traffic_class: int) -> int:
    """The DSCP inside of a traffic class byte."""
    return traffic_class >> 2


def traffic_class_problem(value: int) -> str:
    """What is odd about a ``traffic_class`` setting, with the likely fix; empty when nothing is.

    The usual mistake is to give the DSCP itself: switches then see another class and drop under load.
    """
    if not 0 <= value <= 255:
        return f"traffic_class = {value}: expected 0 to 255, DSCP << 2"
    if value & 3:
        meant = f"if {value} is the DSCP, set traffic_class: {traffic_class(value)}" if value <= 63 else ""
        step = meant or f"set traffic_class: {value & ~3} for DSCP {dscp_of(value)}"
        return (
            f"traffic_class = {value}: its two lowest bits are for congestion marks (ECN) and belong to the network; "
            f"DSCP << 2 was expected; {step}"
        )
    return ""
