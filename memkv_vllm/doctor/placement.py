"""Whether each GPU has a NIC near it (P069). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from memkv_vllm.doctor.facts import Facts
from memkv_vllm.doctor.findings import Finding, ok, warn
from memkv_vllm.errors import RailError
from memkv_vllm.topology import Affinity, choose

__all__ = ["check_placement"]


def check_placement(facts: Facts) -> Iterator[Finding]:
    """One line for each kind of nearness, and what to do about far ones."""
    host = facts.host
    if not host.gpus:
        yield ok("placement", "no GPU in the PCI tree: which NIC is near to one is not known")
        return
    try:
        nearest = {gpu.index: choose(host, gpu.index, gpu.index, len(host.gpus), facts.devices)[0] for gpu in host.gpus}
    except RailError:
        return  # said by other checks
    by_level: dict[Affinity, list[str]] = {}
    for index, choice in nearest.items():
        by_level.setdefault(choice.affinity, []).append(f"GPU {index}: {choice.name}")
    for level, pairs in sorted(by_level.items()):
        seen = f"{level.name} ({level.words}): {', '.join(pairs)}"
        if level is Affinity.SYS:
            fix = "they cross the link between sockets: allow a NIC of their node in rdma_devices, or put one there"
            yield warn("placement", seen, f"{fix} (memkv net topo)")
        elif level is Affinity.UNKNOWN:
            yield ok("placement", f"{seen}; a virtual machine may hide where they are")
        else:
            yield ok("placement", seen)
