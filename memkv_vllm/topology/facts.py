"""What ``memkv net topo`` shows, as plain values for JSON: the same facts that the transport decides by. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memkv_vllm.errors import RailError
from memkv_vllm.topology.affinity import affinity, choose
from memkv_vllm.topology.gids import rank_gids
from memkv_vllm.topology.model import Gpu, Host, Nic, Port
from memkv_vllm.topology.ports import no_device, port_state
from memkv_vllm.topology.rails import pair

__all__ = ["describe"]


def describe(
    host: Host,
    *,
    servers: Mapping[str, str] | None = None,
    num_ranks: int = 0,
    devices: Sequence[str] = (),
    gid_index: int | None = None,
) -> dict[str, Any]:
    """All facts about a host, and what follows for its ranks and for addresses of servers.

    Args:
        host: as read.
        servers: IP address (or, where a name has none, an empty text) by what the operator wrote.
        num_ranks: ranks to place, GPU by GPU; 0: as many as there are GPUs.
        devices: the setting ``rdma_devices``.
        gid_index: the setting of that name.

    Returns:
        JSON values: ``nics`` (with ``ports``), ``gpus``, ``ranks``, ``servers``, ``problems``.
    """
    num_ranks = num_ranks or len(host.gpus)
    return {
        "nics": [_nic(host, nic) for nic in host.nics],
        "gpus": [_gpu(host, gpu) for gpu in host.gpus],
        "ranks": [_rank(host, rank, num_ranks, devices) for rank in range(num_ranks)],
        "servers": [_server(host, name, address, devices, gid_index) for name, address in (servers or {}).items()],
        "problems": [] if host.nics else [str(no_device(host))],
    }


def _nic(host: Host, nic: Nic) -> dict[str, Any]:
    return {
        "name": nic.name,
        "pci": nic.pci,
        "pci_path": list(nic.pci_path),
        "numa_node": nic.numa_node,
        "driver": nic.driver,
        "software": nic.is_software,
        "ports": [_port(host, port) for port in nic.ports],
    }


def _port(host: Host, port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "state": port.state,
        "link_layer": port.link_layer,
        "rate_bytes_per_s": port.rate_bytes_per_s,
        "netdev": port.netdev,
        "netdev_mtu": port.netdev_mtu,
        "mtu": port.mtu,
        "gids": [
            {
                "index": entry.gid.index,
                "gid": entry.gid.raw.hex(),
                "address": str(entry.gid.address),
                "kind": entry.gid.kind.value,
                "netdev": entry.gid.netdev,
                "usable": entry.usable,
                "reason": entry.reason,
            }
            for entry in rank_gids(port)
        ],
        "problem": port_state(host, port),
    }


def _gpu(host: Host, gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "pci": gpu.pci,
        "pci_path": list(gpu.pci_path),
        "numa_node": gpu.numa_node,
        "vendor": gpu.vendor,
        "affinity": {nic.name: affinity(gpu, nic).name for nic in host.nics},
    }


def _rank(host: Host, rank: int, num_ranks: int, devices: Sequence[str]) -> dict[str, Any]:
    gpu = rank if rank < len(host.gpus) else None
    try:
        choices = choose(host, gpu, rank, num_ranks, devices)
    except RailError as error:
        return {"rank": rank, "gpu": gpu, "ports": [], "reason": str(error)}
    return {"rank": rank, "gpu": gpu, "ports": [choice.name for choice in choices], "reason": choices[0].reason}


def _server(host: Host, name: str, address: str, devices: Sequence[str], gid_index: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"server": name, "address": address, "port": "", "reason": ""}
    if not address:
        return {**row, "reason": f"{name} has no IP address here: give one, or mend name resolution"}
    try:
        rail = pair(host, address, devices=devices, gid_index=gid_index)
    except RailError as error:
        return {**row, "reason": str(error)}
    return {
        **row,
        "port": rail.name,
        "netdev": rail.netdev,
        "gid_index": rail.gid_index,
        "local_address": None if rail.address is None else str(rail.address),
        "mtu": rail.mtu,
        "gateway": rail.is_behind_gateway,
        "reason": rail.reason,
    }
