"""Which ports may be used at all: the names that settings give (P073), and what rules a port out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memkv_vllm.errors import RailError
from memkv_vllm.topology.gids import rank_gids
from memkv_vllm.topology.model import Host, Port

__all__ = ["CONTAINER_STEP", "allowed_ports", "is_usable", "no_device", "port_state", "usable_ports"]

CONTAINER_STEP = (
    "docker: --device=/dev/infiniband --cap-add=IPC_LOCK --network=host; kubernetes: hostNetwork: true, an RDMA device "
    "plugin's resource in resources.limits (such as rdma/hca: 1), capabilities: add: [IPC_LOCK]"
)
"""What a container lacks that sees no NIC, or cannot use one."""


def no_device(host: Host) -> RailError:
    """The error for a host without any RDMA device (P076)."""
    found = "no /sys/class/infiniband" if not host.has_rdma_class else "an empty /sys/class/infiniband"
    return RailError(
        "no RDMA device",
        found=found,
        wanted="a NIC whose driver is loaded (lspci; modprobe mlx5_ib; rdma link), or for a trial soft-RoCE (rdma link "
        f"add rxe0 type rxe netdev ETH); in a container that hides it: {CONTAINER_STEP}",
    )


def allowed_ports(host: Host, devices: Sequence[str] = ()) -> tuple[Port, ...]:
    """The ports that ``devices`` names (``mlx5_0``: all of its ports; ``mlx5_0:1``: that one), in that order.

    Args:
        host: where.
        devices: names; none: every port of the host.

    Raises:
        RailError: the host has no device, or a named one is missing; another is never taken for it.
    """
    if not host.nics:
        raise no_device(host)
    if not devices:
        return host.ports
    ports: list[Port] = []
    for wanted in devices:
        named = [port for port in host.ports if wanted in (port.device, port.name)]
        if not named:
            raise _missing(host, wanted)
        ports += [port for port in named if port not in ports]
    return tuple(ports)


def _missing(host: Host, wanted: str) -> RailError:
    above = next((port.name for port in host.ports if port.netdev == wanted), "")
    hint = f"; {wanted} is the interface of {above}, and the device is to be named" if above else ""
    return RailError(
        f"RDMA device {wanted} is not on this host",
        found=(", ".join(port.name for port in host.ports) or "devices without ports") + hint,
        wanted="names of these in rdma_devices (MEMKV_RDMA_DEVICES; a server's rdma.devices). Without rdma_devices an "
        "engine chooses; a server serves verbs on none",
    )


def is_usable(host: Host, port: Port) -> bool:
    """Whether it speaks RoCE or InfiniBand, is up, and has a GID that works."""
    return _is_ib(host, port) and port.is_up and any(entry.usable for entry in rank_gids(port))


def _is_ib(host: Host, port: Port) -> bool:
    return host.nic_of(port).node_type == "CA"


def usable_ports(host: Host, ports: Sequence[Port], *, any_gid: bool = False) -> tuple[Port, ...]:
    """Those of ``ports`` that can be used now.

    Args:
        host: theirs.
        ports: in order.
        any_gid: whether a port without a usable GID counts: the caller names an index.

    Raises:
        RailError: none of them; says why, port by port.
    """
    usable = [port for port in ports if is_usable(host, port) or (any_gid and port.is_up and _is_ib(host, port))]
    if not usable:
        problems = "; ".join(port_state(host, port) for port in ports) or "devices without ports"
        raise RailError("no RDMA port can be used", found=problems, wanted="one that is up and has an IP address")
    return tuple(usable)


def port_state(host: Host, port: Port) -> str:
    """Why ``port`` cannot be used, with the fix; empty when it can."""
    if not _is_ib(host, port):
        return f"{port.name} speaks {host.nic_of(port).node_type}, not RoCE or InfiniBand"
    if not port.is_up:
        state = port.state or "unknown"
        step = f"ip link set {port.netdev} up" if port.netdev else "see: rdma link"
        return f"{port.name} is in state {state} (cable, switch port; {step})"
    if not is_usable(host, port):
        best = next(iter(rank_gids(port)), None)
        missing = f"an IP address on {port.netdev or 'its interface'} is missing"
        why = f"{best.gid.address}: {best.reason}" if best else missing
        return f"{port.name} has no usable GID ({why})"
    return ""
