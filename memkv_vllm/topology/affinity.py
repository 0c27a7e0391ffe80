"""How near a GPU and a NIC are, and which NICs a rank should use (P069). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from memkv_vllm.topology.model import Gpu, Host, Nic, Port
from memkv_vllm.topology.ports import allowed_ports, usable_ports

__all__ = ["Affinity", "Choice", "affinity", "choose"]


class Affinity(IntEnum):
    """What lies between a GPU and a NIC, the nearest first; named as the field's tools name it."""

    PIX = 0
    """One PCIe switch at most: transfers stay below it."""
    PXB = 1
    """Several PCIe switches, but no host bridge."""
    PHB = 2
    """The same host bridge: through the CPU's root complex."""
    NODE = 3
    """Host bridges of one NUMA node."""
    SYS = 4
    """The link between CPU sockets."""
    UNKNOWN = 5
    """The PCI tree does not show one of them."""

    @property
    def words(self) -> str:
        """For log lines."""
        return _WORDS[self]


_WORDS = {
    Affinity.PIX: "one PCIe switch",
    Affinity.PXB: "several PCIe switches",
    Affinity.PHB: "the same host bridge",
    Affinity.NODE: "the same NUMA node",
    Affinity.SYS: "across NUMA nodes",
    Affinity.UNKNOWN: "place unknown",
}

SWITCH_HOPS = 2
"""Steps from a device up to the upstream port of its switch: downstream port, device."""


def affinity(gpu: Gpu, nic: Nic) -> Affinity:
    """What lies between them, by their paths in the PCI tree."""
    if not gpu.pci_path or not nic.pci_path:
        return Affinity.UNKNOWN
    shared = 0
    for one, other in zip(gpu.pci_path, nic.pci_path, strict=False):
        if one != other:
            break
        shared += 1
    if shared >= 2:
        longest = max(len(gpu.pci_path), len(nic.pci_path)) - shared
        return Affinity.PIX if longest <= SWITCH_HOPS else Affinity.PXB
    if shared == 1:
        return Affinity.PHB
    # Without NUMA both are None: one node, then.
    return Affinity.NODE if gpu.numa_node == nic.numa_node else Affinity.SYS


class Choice(NamedTuple):
    """A port that a rank may use."""

    port: Port
    affinity: Affinity
    reason: str

    @property
    def name(self) -> str:
        """As ``pair``'s ``prefer`` and the settings write it: ``mlx5_0:1``."""
        return self.port.name


def choose(
    host: Host, gpu_index: int | None, rank: int, num_ranks: int, devices: Sequence[str] = ()
) -> tuple[Choice, ...]:
    """The ports that can be used, in the order in which a rank should use them.

    Among ports equally near, ranks take turns: by the GPU's place among the GPUs that have the same ports nearest (so
    that eight engines of one rank each spread too); without a GPU, neighbouring ranks share a port, as neighbouring
    GPUs do. Software devices come last.

    Args:
        host: where.
        gpu_index: the rank's GPU in ``host.gpus``; None: none, or not known.
        rank: 0 to ``num_ranks`` - 1.
        num_ranks: of this host, at least 1.
        devices: the only ones allowed; none: all.

    Raises:
        RailError: no device, a named one missing, or no port that can be used.
    """
    usable = usable_ports(host, allowed_ports(host, devices))
    gpu = host.gpus[gpu_index] if gpu_index is not None and 0 <= gpu_index < len(host.gpus) else None
    near = {port.name: _near(host, gpu, port) for port in usable}
    groups = [
        [port for port in usable if near[port.name] is level and host.nic_of(port).is_software is software]
        for software in (False, True)
        for level in Affinity
    ]
    choices: list[Choice] = []
    for group in (group for group in groups if group):
        if gpu is None:
            turn = rank * len(group) // max(1, num_ranks)
        else:
            # Where to go when the nearest fail: each GPU to another one.
            turn = gpu.index if choices else _turn(host, gpu, usable)
        start = turn % len(group)
        for at, port in enumerate((*group[start:], *group[:start])):
            reason = _reason(gpu, near[port.name], len(group), start if at == 0 else None)
            choices.append(Choice(port, near[port.name], reason))
    return tuple(choices)


def _near(host: Host, gpu: Gpu | None, port: Port) -> Affinity:
    return Affinity.UNKNOWN if gpu is None else affinity(gpu, host.nic_of(port))


def _turn(host: Host, gpu: Gpu, ports: Sequence[Port]) -> int:
    def nearest(one: Gpu) -> list[str]:
        levels = [_near(host, one, port) for port in ports]
        return [port.name for port, level in zip(ports, levels, strict=True) if level is min(levels)]

    mine = nearest(gpu)
    return sum(1 for other in host.gpus[: gpu.index] if nearest(other) == mine)


def _reason(gpu: Gpu | None, level: Affinity, num_equal: int, turn: int | None) -> str:
    place = "no GPU to be near to" if gpu is None else f"GPU {gpu.index}: {level.name}, {level.words}"
    if num_equal == 1:
        return place
    return f"{place}, one of {num_equal}" if turn is None else f"{place}, turn {turn + 1} of {num_equal}"
