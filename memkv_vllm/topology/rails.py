"""Which port of this host reaches an address (P070). Pure.

A rail is a subnet: a server's address belongs to the port whose interface has a route to its subnet. Traffic from
another port would cross to that subnet somewhere else in the network, or nowhere, and stall.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from memkv_vllm.errors import RailError
from memkv_vllm.topology.gids import RankedGid, choose_gid, rank_gids
from memkv_vllm.topology.marking import ib_mtu
from memkv_vllm.topology.model import Address, Gid, GidKind, Host, Port, Route
from memkv_vllm.topology.ports import allowed_ports, port_state, usable_ports

__all__ = ["Rail", "pair"]

logger = logging.getLogger("memkv.topology")


@dataclass(frozen=True)
class Rail:
    """A port of this host with all that is chosen on it, to reach one address."""

    device: str
    port: int
    gid_index: int
    gid: bytes
    """16 bytes."""
    address: Address | None
    """This end's IP address; None on InfiniBand, whose GID has none."""
    netdev: str
    mtu: int | None
    """Largest path MTU of its interface, bytes; the device's active MTU may be smaller."""
    rate_bytes_per_s: float | None
    """Nominal; None where unknown (soft-RoCE's is)."""
    reason: str
    """Why this port, then why this GID: for one log line."""
    is_behind_gateway: bool = False
    """The address is in no subnet of this port: packets to it take a router, if the fabric has one."""

    @property
    def name(self) -> str:
        """As settings write it: ``mlx5_0:1``."""
        return f"{self.device}:{self.port}"

    @property
    def rate(self) -> str:
        """Its nominal rate for a log line, such as ``400Gbit/s``."""
        return "unknown" if self.rate_bytes_per_s is None else f"{self.rate_bytes_per_s * 8e-9:g}Gbit/s"


class _Way(NamedTuple):
    """How a port reaches an address; smaller is better."""

    order: tuple[int, int, int]
    """Kind of way (own address, link, gateway), longer prefixes first, metric."""
    netdev: str
    route: Route | None
    reason: str


def pair(
    host: Host,
    address: str | Address,
    *,
    devices: Sequence[str] = (),
    prefer: Sequence[str] = (),
    gid_index: int | None = None,
) -> Rail:
    """The rail to ``address``: a server's for a client, this end's own for a server.

    Args:
        host: as :func:`memkv_vllm.topology.read_host` found it.
        address: an IP address, never a name.
        devices: the only ones allowed (``mlx5_0`` or ``mlx5_0:1``); none: all.
        prefer: names, the best first, among ports that reach ``address`` equally well; then the host's order.
        gid_index: this entry of the port's GID table rather than the best.

    Raises:
        RailError: a named device is missing, no port is up, no usable GID, or none of them reaches ``address``.
        ValueError: ``address`` is no IP address.
    """
    target, scope = _split_scope(ip_address(address) if isinstance(address, str) else address)
    ports = allowed_ports(host, devices)
    usable = usable_ports(host, ports, any_gid=gid_index is not None)
    ways = [(way, port) for port in usable if (way := _way(host, port, target, scope)) is not None]
    if not ways:
        raise _no_way(host, usable, target, [port for port in ports if port not in usable])
    # Stable: after the preference comes the order of ``devices``, or the host's.
    ways.sort(key=lambda entry: (entry[0].order, _place(entry[1], prefer)))
    way, port = ways[0]
    equal = [other.name for others, other in ways[1:] if others.order == way.order]
    if equal:
        reason = "preferred" if _place(port, prefer) < len(prefer) else "first"
        logger.info(
            "event=rail_ambiguous address=%s chosen=%s reason=%s others=%s", target, port.name, reason, ",".join(equal)
        )
        way = way._replace(reason=f"{way.reason}, {reason} of {len(equal) + 1} ports there")
    return _rail(host, port, way, _gid_on(port, way, target, gid_index))


def _place(port: Port, prefer: Sequence[str]) -> int:
    return next((at for at, name in enumerate(prefer) if name in (port.device, port.name)), len(prefer))


def _split_scope(address: Address) -> tuple[Address, str]:
    """A link-local address names its interface after a ``%``."""
    if isinstance(address, IPv6Address) and address.scope_id:
        return IPv6Address(address.packed), address.scope_id
    return address, ""


def _way(host: Host, port: Port, target: Address, scope: str) -> _Way | None:
    for entry in rank_gids(port):
        if entry.usable and entry.gid.kind is not GidKind.INFINIBAND and entry.gid.address == target:
            return _Way((0, 0, 0), entry.gid.netdev, None, f"{target} is its own address")
    netdevs = _netdevs(port) & {scope} if scope else _netdevs(port)
    own = next((n for n in host.netdevs if n.name in netdevs and target in n.addresses), None)
    if own is not None:
        return _Way((0, 0, 0), own.name, None, f"{target} is its own address")
    ways = []
    for route in host.routes:
        if route.netdev not in netdevs or target.version != route.network.version or target not in route.network:
            continue
        if route.gateway is None:
            order, how = 1, f"{target} is in its subnet {route.network}"
        else:
            order, how = 2, f"{target} is behind the gateway {route.gateway} of {route.netdev}, not in a subnet of it"
        ways.append(_Way((order, -route.network.prefixlen, route.metric), route.netdev, route, how))
    return min(ways, key=lambda way: way.order, default=None)


def _netdevs(port: Port) -> frozenset[str]:
    """Interfaces whose routes are the port's: the one above it, and those of its GIDs (VLANs have their own)."""
    names = {port.netdev, *(gid.netdev for gid in port.gids)}
    return frozenset(names - port.down_netdevs - port.absent_netdevs - port.enslaved_netdevs - {""})


def _gid_on(port: Port, way: _Way, target: Address, gid_index: int | None) -> RankedGid:
    """The best GID of the interface that the way goes over; one in the target's own subnet before all others."""
    if gid_index is not None:
        return choose_gid(port, gid_index)
    ranked = [entry for entry in rank_gids(port) if entry.usable]
    here = [entry for entry in ranked if entry.gid.netdev in ("", way.netdev)] or ranked
    for entry in here:
        if entry.gid.kind is GidKind.ROCE_V2 and _is_near(entry.gid, way, target):
            return entry
    return here[0]


def _is_near(gid: Gid, way: _Way, target: Address) -> bool:
    if way.route is None:
        return gid.address == target
    return gid.address.version == target.version and gid.address in way.route.network


def _rail(host: Host, port: Port, way: _Way, chosen: RankedGid) -> Rail:
    gid, nic = chosen.gid, host.nic_of(port)
    netdev = host.netdev(gid.netdev) if gid.netdev else None
    mtu = port.mtu
    if netdev is not None and netdev.name != port.netdev and netdev.mtu is not None:
        mtu = ib_mtu(netdev.mtu)
    return Rail(
        device=port.device,
        port=port.number,
        gid_index=gid.index,
        gid=gid.raw,
        address=None if gid.kind is GidKind.INFINIBAND else gid.address,
        netdev=gid.netdev or port.netdev,
        mtu=mtu,
        rate_bytes_per_s=None if nic.is_software else port.rate_bytes_per_s,
        reason=f"{way.reason}; GID {gid.index}: {chosen.reason}",
        is_behind_gateway=way.route is not None and way.route.gateway is not None,
    )


def _no_way(host: Host, ports: Sequence[Port], target: Address, others: Sequence[Port]) -> RailError:
    found = []
    for port in ports:
        over = _netdevs(port)
        subnets = [
            str(route.network)
            for route in host.routes
            if route.netdev in over and route.gateway is None and not route.network.is_link_local
        ]
        found.append(f"{port.name} on {port.netdev or 'no interface'} in {', '.join(subnets) or 'no subnet'}")
    # A rail that is down is the likelier reason, and its subnet cannot be told.
    found += [f"not usable now: {port_state(host, port)}" for port in others]
    wanted = "a server's address in the subnet of one of these ports (servers: name=addr0|addr1, one address for "
    wanted += "each rail), or an address of this host in the server's subnet"
    if target.is_loopback:
        wanted = "for a server on this host the address of one of these ports, or without RDMA transport: loopback "
        wanted += "(MEMKV_TRANSPORT=loopback)"
    return RailError(f"no RDMA port reaches {target}", found="; ".join(found), wanted=wanted)
