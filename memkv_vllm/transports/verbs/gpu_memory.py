"""Registering a staging region with a device, whether it lies in host or in GPU memory.

Host memory has one way. GPU memory has two, tried in this order:

1. *dmabuf*: ``integration/`` exported the memory as a descriptor, and the NIC's driver imports it; work requests name
   its bytes from 0 on. Needs Linux 5.12, a NIC driver that can, libibverbs of rdma-core 34, and NVIDIA's open kernel
   modules.
2. *peermem*: the address is registered like host memory, and the kernel module ``nvidia_peermem`` resolves it.

Where both fail, :class:`~memkv_vllm.errors.EnvironmentFault` says what each step answered, what that means on this host
and what to do. There is no third way in here: that an ``auto`` pool goes to host memory then is decided before a pool
is in use (``integration/scratch.py``, over :func:`try_registration`).

Access: the peer may read and write and the NIC may write, nothing else. Relaxed ordering is not asked for. It would let
PCIe put a WRITE's bytes in place after bytes of later WRITEs, and a get's answer is only right because a READ that
follows its WRITEs on the same queue pair finds them all in place.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.verbs.provider import Access, MemoryRegion, ProtectionDomain, Provider, VerbsError
from memkv_vllm.types import MemoryKind

__all__ = [
    "REGION_ACCESS",
    "GpuHost",
    "Refusal",
    "Way",
    "explain",
    "read_gpu_host",
    "register_region",
    "try_registration",
]

REGION_ACCESS = Access.LOCAL | Access.REMOTE_WRITE | Access.REMOTE_READ
"""What a server needs: it READs puts out of a region and WRITEs gets into it."""

_PEERMEM_MODULES = ("nvidia_peermem", "nv_peer_mem")
"""The driver's own, and its predecessor that was installed apart."""


class Way(Enum):
    """How a region was registered."""

    HOST = "host"
    DMABUF = "dmabuf"
    PEERMEM = "peermem"


class Refusal(NamedTuple):
    """A step that failed."""

    way: Way
    errno: int
    """0 where it was not even tried: there is no descriptor."""


class GpuHost(NamedTuple):
    """What this host has for GPU memory registration, as far as files tell."""

    kernel: str
    """Release, such as ``6.1.0-18-amd64``; empty where unknown."""
    peermem: str
    """The module that is loaded, or empty."""
    driver: str
    """``open`` or ``proprietary``: NVIDIA's kernel modules; empty where there are none or they are not shown."""


def read_gpu_host(root: Path = Path("/")) -> GpuHost:
    """Read the facts below ``root``. Files that are absent or unreadable leave their fact empty."""
    modules = [name for name in _PEERMEM_MODULES if (root / "sys/module" / name).is_dir()]
    version = _text(root / "proc/driver/nvidia/version")
    driver = "" if not version else "open" if "Open Kernel Module" in version else "proprietary"
    return GpuHost(_text(root / "proc/sys/kernel/osrelease").strip(), modules[0] if modules else "", driver)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def register_region(
    domain: ProtectionDomain, region: Region, *, device: str = "", root: Path = Path("/")
) -> tuple[MemoryRegion, Way]:
    """Register ``region`` in ``domain``. May take seconds: for a worker thread.

    The memory must stay as it is until the memory region is closed; for a dmabuf that includes the descriptor.

    Args:
        domain: of the session.
        region: its ``dmabuf_fd`` is -1 where the GPU's driver exported none.
        device: the NIC's name, for the message.
        root: where ``/sys`` and ``/proc`` are read, to explain a failure.

    Raises:
        VerbsError: host memory was refused.
        EnvironmentFault: GPU memory was refused in every way; says why, and the fix.
        LocalProtocolError: the region is none (a bug here).
    """
    if region.kind is MemoryKind.HOST:
        if region.memory is None or region.memory.length != region.length:
            raise LocalProtocolError(f"region {region.id} has no host memory of {region.length} bytes")
        return domain.register(region.memory.address, region.length, REGION_ACCESS), Way.HOST
    if region.address <= 0 or region.length <= 0:
        raise LocalProtocolError(f"GPU region {region.id} has address {region.address} and {region.length} bytes")
    refusals: list[Refusal] = []
    if region.dmabuf_fd < 0:
        refusals.append(Refusal(Way.DMABUF, 0))
    else:
        try:
            # Named by offset and not by address: pyverbs can no other, and no peer needs to know the address.
            return domain.register_dmabuf(region.dmabuf_fd, 0, region.length, 0, REGION_ACCESS), Way.DMABUF
        except VerbsError as error:
            refusals.append(Refusal(Way.DMABUF, error.errno))
    try:
        return domain.register(region.address, region.length, REGION_ACCESS), Way.PEERMEM
    except VerbsError as error:
        refusals.append(Refusal(Way.PEERMEM, error.errno))
    raise EnvironmentFault(explain(device, region.length, refusals, read_gpu_host(root)))


def try_registration(provider: Provider, devices: Sequence[str], region: Region, *, root: Path = Path("/")) -> Way:
    """Register ``region`` with each of ``devices`` and deregister it again, before anything depends on it.

    Opens and closes the devices (``NAME`` or ``NAME:PORT``); makes no connection. May take seconds: for start-up.

    Returns:
        The way that worked; of several devices the one of the last.

    Raises:
        EnvironmentFault: one of them cannot be opened, or refuses; says which and the fix.
    """
    if not devices:
        raise EnvironmentFault("no RDMA device to register staging memory with; name one in rdma_devices")
    way = Way.HOST
    for name in dict.fromkeys(wanted.partition(":")[0] for wanted in devices):
        try:
            device = provider.open(name)
        except VerbsError as error:
            raise EnvironmentFault(f"RDMA device {name} cannot be opened: {error}") from error
        try:
            try:
                way = register_region(device.protection_domain(), region, device=name, root=root)[1]
            finally:
                device.close()
        except VerbsError as error:
            size = f"{region.length / 2**20:.1f} MiB of {region.kind.value} memory"
            raise EnvironmentFault(f"{size} cannot be registered with {name}: {error}") from error
    return way


def explain(device: str, length: int, refusals: Sequence[Refusal], host: GpuHost) -> str:
    """One message for a region that every way refused: each step, what it means here, and what to do. Pure."""
    steps = "; ".join(f"{refusal.way.value}: {_meaning(refusal, host)}" for refusal in refusals)
    found = ", ".join(
        (
            f"kernel {host.kernel or 'unknown'}",
            f"module {host.peermem} loaded" if host.peermem else "no nvidia_peermem module",
            f"NVIDIA's {host.driver} kernel modules" if host.driver else "no NVIDIA driver shown in /proc",
        )
    )
    fixes = [*_fixes(refusals, host), "or set memkv_scratch_medium: host"]
    name = f" with {device}" if device else ""
    return (
        f"{length / 2**20:.1f} MiB of GPU memory cannot be registered{name}. {steps}. Found: {found}. "
        f"Fix: {'; '.join(fixes)}"
    )


_MEANINGS = {
    (Way.DMABUF, errno.EOPNOTSUPP): "this NIC's driver imports no dmabuf (soft-RoCE never does; mlx5 does from 5.12)",
    (Way.DMABUF, errno.ENOSYS): "this libibverbs has no ibv_reg_dmabuf_mr, which came with rdma-core 34",
    (Way.DMABUF, errno.EINVAL): "the range was refused (not whole pages of the GPU, or access flags that it cannot)",
    (Way.DMABUF, errno.EBADF): "the descriptor is no dmabuf, or was closed",
    (Way.DMABUF, errno.ENOMEM): "no memory for it: the GPU's BAR1 window or the NIC's tables are full",
    (Way.PEERMEM, errno.EINVAL): "the range was refused",
    (Way.PEERMEM, errno.ENOMEM): "no memory for it: memlock, the GPU's BAR1 window or the NIC's tables",
}
_UNREACHABLE = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.EPERM, errno.EACCES)
"""What drivers answer where the two devices cannot reach each other; they do not agree on one."""


def _meaning(refusal: Refusal, host: GpuHost) -> str:
    way, number = refusal
    if number == 0:
        return "the GPU's driver exported no descriptor"
    text = f"errno {number} ({os.strerror(number)})"
    if way is Way.PEERMEM and number == errno.EFAULT:
        if not host.peermem:
            return f"{text}, for the module nvidia_peermem is not loaded and nobody resolves a GPU address"
        return (
            f"{text}: {host.peermem} does not know the address (memory of cuMemCreate, as under PyTorch's expandable "
            "segments, is not its; or another container's driver)"
        )
    if number in _UNREACHABLE:
        return f"{text}: NIC and GPU cannot reach each other (a VM without GPUDirect RDMA, or IOMMU and ACS between)"
    meaning = _MEANINGS.get((way, number))
    return f"{text}: {meaning}" if meaning else text


def _fixes(refusals: Sequence[Refusal], host: GpuHost) -> list[str]:
    fixes = []
    if not host.peermem:
        fixes.append("load peermem on the host, not in the container (modprobe nvidia-peermem)")
    if host.driver == "proprietary":
        fixes.append("or install NVIDIA's open kernel modules, which dmabuf needs")
    if _older(host.kernel, (5, 12)):
        fixes.append(f"or run Linux 5.12 or newer, which dmabuf needs (here {host.kernel})")
    if any(refusal.errno == errno.ENOSYS for refusal in refusals):
        fixes.append("or install rdma-core 34 or newer in this container")
    if any(refusal.errno in _UNREACHABLE for refusal in refusals):
        fixes.append("give the VM its GPU and NIC under one virtual switch, or switch ACS off between them")
    if any(refusal.errno == errno.ENOMEM for refusal in refusals):
        fixes.append("lower memkv_scratch_mb_per_thread, or raise memlock (ulimit -l unlimited)")
    return fixes


def _older(kernel: str, than: tuple[int, int]) -> bool:
    numbers = kernel.split("-")[0].split(".")[:2]
    return len(numbers) == 2 and all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) < than
