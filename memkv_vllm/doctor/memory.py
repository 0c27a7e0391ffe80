"""Memory that must be pinned: how much, whether it may be, and whether a GPU's can be (P074, P075). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memkv_vllm.doctor.devices import severity
from memkv_vllm.doctor.facts import Facts
from memkv_vllm.doctor.findings import Finding, Level, ok, warn
from memkv_vllm.transports.verbs.preflight import memlock_problem

__all__ = ["check_gpu_memory", "check_memlock"]

MIB = 1 << 20
DMABUF_KERNEL = (5, 12)


def check_memlock(facts: Facts) -> Iterator[Finding]:
    """The limit of locked memory beside what will be registered (P074)."""
    memlock = facts.memlock
    needed = f"{facts.pinned_bytes / MIB:.0f} MiB: {facts.pinned_purpose}" if facts.pinned_bytes else "unknown"
    problem = memlock_problem(memlock, facts.pinned_bytes, facts.pinned_purpose) if facts.pinned_bytes else ""
    if problem:
        seen, _, fix = problem.partition("; ")
        yield Finding(severity(facts), "memlock", seen, fix)
    elif memlock.is_exempt:
        yield ok("memlock", f"no limit holds for this process (CAP_IPC_LOCK); needed {needed}")
    elif memlock.limit_bytes is None:
        yield ok("memlock", f"unlimited; needed {needed}")
    else:
        yield ok("memlock", f"{memlock.limit_bytes / MIB:.0f} MiB; needed {needed}")


def check_gpu_memory(facts: Facts) -> Iterator[Finding]:
    """Whether a NIC could reach GPU memory, where there is both (P075)."""
    gpus = [gpu for gpu in facts.host.gpus if gpu.vendor == "nvidia"]
    if facts.medium != "host" and facts.host.nics and all(nic.is_software for nic in facts.host.nics):
        seen = f"memkv_scratch_medium is {facts.medium}, but no NIC here can reach GPU memory: all are software"
        yield warn("gpu memory", seen, "set it to host")
        return
    if not gpus or not facts.host.nics:
        return
    host = facts.gpu_host
    if host.peermem:
        yield ok("gpu memory", f"{host.peermem} is loaded: GPU memory can be registered by address")
        return
    if host.driver == "open" and _kernel(host.kernel) >= DMABUF_KERNEL:
        yield ok("gpu memory", f"dmabuf: NVIDIA's open kernel modules on Linux {host.kernel}")
        return
    modules = host.driver or "none"
    found = f"nvidia_peermem is not loaded, and dmabuf needs NVIDIA's open kernel modules (found: {modules})"
    if facts.medium == "host":
        yield ok("gpu memory", f"{found}; memkv_scratch_medium: host does not need either")
        return
    seen = f"memkv_scratch_medium is {facts.medium}, but {found}"
    fix = "modprobe nvidia-peermem on the host, or install the driver's open kernel modules, or set host"
    yield Finding(Level.FAIL if facts.medium == "gpu" else Level.WARN, "gpu memory", seen, fix)


def _kernel(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)
