"""What is wrong with the ports that a server serves on: at its start, and while it runs. Pure.

A server goes on when a port fails: its clients have other rails, or miss. So it has to be said where people look, in
the log and in the server's health, until it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from memkv_vllm.topology import Rail
from memkv_vllm.transports.verbs.provider import AsyncEvent

__all__ = ["PortWatch", "doubtful_address"]


def doubtful_address(rail: Rail, listen_host: str) -> str:
    """Why clients will hardly reach a port at the address that was chosen on it, with the fix; empty where they do.

    Args:
        rail: the server's.
        listen_host: where control connections can come to; empty: everywhere.
    """
    address, netdev = rail.address, rail.netdev or "its interface"
    if address is None:
        return ""
    if address.is_link_local:
        return (
            f"{address} is a link-local address, {netdev} had no better one: clients that come to another address of "
            f"it may be refused; give {netdev} an IPv4 or global IPv6 address in its rail's subnet, then restart this "
            f"server"
        )
    try:
        listening = ip_address(listen_host)
    except ValueError:
        return ""  # everywhere, or a name that only a resolver knows
    if listening.is_unspecified or listening == address:
        return ""
    return (
        f"network.address is {listening}, so no client can come to {address}: listen on all addresses "
        f"(network.address: 0.0.0.0:PORT), or leave {rail.name} out of rdma.devices"
    )


class PortWatch:
    """Which ports are in trouble now, as their devices' events tell.

    Args:
        rails: what is served on; all of them are well at first, for a start is refused otherwise.
    """

    def __init__(self, rails: Sequence[Rail]) -> None:
        self._rails = tuple(rails)
        self._troubles: dict[str, str] = {}
        """By name of a port; what to do is part of the text."""

    def note(self, device: str, event: AsyncEvent) -> str:
        """Take an event of ``device`` into account; returns what it means for a port served on, and the fix, or ''."""
        text = ""
        for rail in self._rails:
            if rail.device != device:
                continue
            if event.name == "device_fatal":
                text = f"RDMA device {device} has failed: see dmesg, then restart this server"
                self._troubles[rail.name] = text
            elif event.element == rail.port and event.name == "port_active":
                self._troubles.pop(rail.name, None)
            elif event.element == rail.port and event.name == "port_err":
                text = self._troubles[rail.name] = _down(rail)
        return text

    def lost(self, device: str, reason: str) -> str:
        """The kernel has taken ``device`` away; returns what that means, and the fix."""
        text = f"RDMA device {device} is gone ({reason}): see dmesg, then restart this server"
        self._troubles |= {rail.name: text for rail in self._rails if rail.device == device}
        return text

    def health(self) -> list[str]:
        """What is wrong now, one line for each port."""
        names = dict.fromkeys(rail.name for rail in self._rails)
        return [self._troubles[name] for name in names if name in self._troubles]


def _down(rail: Rail) -> str:
    return (
        f"RDMA port {rail.name} ({rail.address or 'InfiniBand'}) is down: clients go over to this server's other "
        f"rails, or miss; check its cable and the switch's port (ip link set {rail.netdev or 'ITS-INTERFACE'} up; "
        f"ibv_devinfo)"
    )
