"""Which GID of a port to use (P071). Pure.

A RoCE port has several GIDs for each address, and a connection works only over two of one kind whose addresses reach
each other. The best first: RoCE v2 with an IPv4 address, with a global IPv6 one, with a link-local one, then RoCE v1.
Worse than all of those: a GID whose interface is part of a bond (the bond has the address) or is down. Empty entries
are never used.
"""

from __future__ import annotations

from typing import NamedTuple

from memkv_vllm.errors import RailError
from memkv_vllm.topology.model import Gid, GidKind, Port

__all__ = ["RankedGid", "choose_gid", "rank_gids"]


class RankedGid(NamedTuple):
    """A GID and why it stands where it does."""

    gid: Gid
    reason: str
    """Such as ``RoCE v2, IPv4``."""
    usable: bool
    """False: nothing sent with it arrives as things are now (its interface is down, or belongs to a bond)."""


def rank_gids(port: Port) -> tuple[RankedGid, ...]:
    """The GIDs of ``port`` that are not empty, the best first; equal ones by index."""
    ranked = [(_order(port, gid), _describe(port, gid)) for gid in port.gids if any(gid.raw)]
    return tuple(gid for _, gid in sorted(ranked, key=lambda entry: entry[0]))


def choose_gid(port: Port, index: int | None = None) -> RankedGid:
    """The GID to use: the best, or the one that the setting ``gid_index`` names.

    Raises:
        RailError: the port has no usable one, or nothing at ``index``.
    """
    ranked = rank_gids(port)
    table = (
        "; ".join(f"{entry.gid.index}: {entry.gid.address} ({entry.reason})" for entry in ranked) or "an empty table"
    )
    if index is not None:
        for entry in ranked:
            if entry.gid.index == index:
                return entry._replace(reason=f"{entry.reason}; index {index} is configured")
        raise RailError(
            f"{port.name} has no GID at index {index}",
            found=f"GIDs {table}",
            wanted="an index with an address; leave out gid_index to have the best one chosen",
        )
    if ranked and ranked[0].usable:
        return ranked[0]
    netdev = port.netdev or "the port's interface"
    raise RailError(
        f"{port.name} has no usable GID",
        found=f"GIDs {table}",
        wanted=f"an IP address on {netdev}, and {netdev} up (ip link set {netdev} up; ip addr add ADDRESS/BITS dev "
        f"{netdev}); in a container, one that sees that interface: network_mode: host, or hostNetwork: true",
    )


def _order(port: Port, gid: Gid) -> tuple[bool, bool, int, int]:
    dead = gid.netdev in port.down_netdevs or gid.netdev in port.absent_netdevs
    return dead, gid.netdev in port.enslaved_netdevs, _kind_order(gid), gid.index


def _kind_order(gid: Gid) -> int:
    if gid.kind is GidKind.ROCE_V1:
        return 3
    if gid.kind is GidKind.INFINIBAND or gid.address.version == 4:
        return 0
    return 2 if gid.address.is_link_local else 1


def _describe(port: Port, gid: Gid) -> RankedGid:
    words = {GidKind.ROCE_V2: "RoCE v2", GidKind.ROCE_V1: "RoCE v1", GidKind.INFINIBAND: "InfiniBand"}
    reason = words[gid.kind]
    if gid.kind is not GidKind.INFINIBAND:
        scope = "IPv4" if gid.address.version == 4 else "link-local" if gid.address.is_link_local else "global IPv6"
        reason = f"{reason}, {scope}"
    usable = True
    if gid.netdev in port.down_netdevs:
        reason, usable = f"{reason}, {gid.netdev} is down", False
    elif gid.netdev in port.absent_netdevs:
        reason, usable = f"{reason}, {gid.netdev} is not in this network namespace", False
    elif gid.netdev in port.enslaved_netdevs:
        reason, usable = f"{reason}, {gid.netdev} is part of a bond", False
    return RankedGid(gid, reason, usable)
