"""Staging slots in GPU memory: the ``gpu`` medium, whose regions a NIC reads and writes without the host.

*Allocation* is ``cuMemAlloc``'s, apart from torch's allocator: under PyTorch's expandable segments torch's memory comes
from ``cuMemCreate``, and peermem cannot register that. A region is whole pages of 64 KiB that it shares with nobody,
so that a registration never covers anybody else's bytes.

*Export*: the region as a dmabuf descriptor where the driver can. Where it cannot, the transport has peermem left.

*Order*: that a NIC's completion was seen does not say by itself that work launched on the GPU now reads what the NIC
wrote. A GPU that promises it (``Ordering.OWNER``) needs nothing; others are flushed before the first look at arrived
bytes; one that can do neither is refused (``obstacle``).

*Checksums* need the bytes on the host: each lane has a pinned buffer of ``BOUNCE_BYTES`` and a stream, and a value is
read through it piece by piece. So a store always costs one more trip over the bus, and a load one where
``memkv_verify`` asks for it (``docs/rdma.md`` has the figures). The bytes and keys are those of the host medium.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration.cuda_driver import GPU_PAGE_BYTES, CudaError, Driver, GpuFacts, HostCopy, Ordering
from memkv_vllm.protocol.checksum import LEAF_BYTES, leaf_digest, root_digest
from memkv_vllm.transports.base import Region
from memkv_vllm.types import Extent, MemoryKind

__all__ = ["BOUNCE_BYTES", "GpuMedium", "obstacle", "uses_expandable_segments"]

logger = logging.getLogger("memkv.integration.gpu_staging")

BOUNCE_BYTES = 4 * LEAF_BYTES
"""Pinned host memory of a lane; whole leaves of the checksum. Large enough for the bus, small beside the slots."""


class _Allocation(NamedTuple):
    region: Region
    base: int
    """What the driver allocated; the region begins at the first whole page of it."""


def obstacle(facts: GpuFacts) -> str | None:
    """Why no NIC can use this GPU's memory, or why it could not be trusted; ``None`` where neither is known. Pure."""
    if not facts.rdma_supported:
        return (
            f"{facts.name} says that NICs cannot reach its memory (GPU_DIRECT_RDMA_SUPPORTED is 0: a GeForce, a vGPU, "
            "or a VM without GPUDirect RDMA)"
        )
    if facts.writes_ordering < Ordering.OWNER and not facts.can_flush:
        return (
            f"{facts.name} neither orders a NIC's writes before work launched after them nor can be flushed, so a "
            "block could be filled with bytes that have not arrived"
        )
    return None


def uses_expandable_segments(settings: str) -> bool:
    """Whether torch's allocator maps memory by ``cuMemCreate``, by its settings' text (``name:value,...``). Pure."""
    pairs = (pair.partition(":") for pair in settings.replace(" ", "").split(","))
    return any(name == "expandable_segments" and value.lower() == "true" for name, _, value in pairs)


class GpuMedium:
    """See :class:`memkv_vllm.engine.api.StagingMedium` and the module.

    Args:
        driver: of the KV tensors' device; closed with this.
        misfit: asked with the GPU's state before each allocation; why it does not fit, or None.
    """

    def __init__(self, driver: Driver, misfit: Callable[[GpuFacts], str | None]) -> None:
        self._driver = driver
        self._misfit = misfit
        facts = driver.facts()
        self._flushes = facts.writes_ordering < Ordering.OWNER
        self._exports = facts.dmabuf_supported
        self._allocations: dict[int, _Allocation] = {}
        self._copies: dict[int, HostCopy] = {}
        self._copies_lock = threading.Lock()

    @property
    def kind(self) -> MemoryKind:
        """GPU memory."""
        return MemoryKind.GPU

    def make_region(self, number: int, length: int) -> Region:
        """Allocate, and export where the driver can.

        Raises:
            EnvironmentFault: it does not fit, the driver refuses it, or NICs cannot reach it; with the numbers.
        """
        facts = self._driver.facts()
        if problem := obstacle(facts) or self._misfit(facts):
            raise EnvironmentFault(problem)
        whole = _whole_pages(length)
        try:
            base = self._driver.allocate(whole + GPU_PAGE_BYTES)
        except CudaError as error:
            raise EnvironmentFault(
                f"{facts.name} has no {whole / 2**20:.1f} MiB for staging ({error}; {facts.free_bytes / 2**20:.0f} MiB "
                "are free); lower memkv_scratch_mb_per_thread or gpu_memory_utilization, or set memkv_scratch_medium: "
                "host"
            ) from error
        try:
            region = self._describe(number, _whole_pages(base), whole, facts)
        except BaseException:
            self._driver.free(base)
            raise
        self._allocations[number] = _Allocation(region, base)
        return region

    def _describe(self, number: int, address: int, length: int, facts: GpuFacts) -> Region:
        if not self._driver.rdma_capable(address):
            raise EnvironmentFault(
                f"memory of {facts.name} at {address:#x} is not for NICs, says its driver "
                "(IS_GPU_DIRECT_RDMA_CAPABLE is 0); set memkv_scratch_medium: host"
            )
        fd, how = -1, "no: this driver exports none (NVIDIA's open kernel modules do)"
        if self._exports:
            try:
                fd, how = self._driver.export(address, length), "yes"
            except CudaError as error:
                how = f"no: {error}"
        logger.info(
            "event=gpu_region region=%d gpu=%s pci=%s bytes=%d dmabuf=%r flush=%s",
            number,
            facts.name,
            facts.pci,
            length,
            how,
            "before each look" if self._flushes else "not needed",
        )
        return Region(number, MemoryKind.GPU, length, None, address, fd)

    def free(self, region: Region) -> None:
        """Close the descriptor and free the memory."""
        made = self._allocations.pop(region.id)
        if made.region.dmabuf_fd >= 0:
            os.close(made.region.dmabuf_fd)
        self._driver.free(made.base)

    def make_visible(self) -> None:
        """Flush what NICs wrote, where this GPU needs that."""
        if self._flushes:
            self._driver.flush()

    def digest(self, lane: int, extent: Extent) -> int:
        """Read the extent through the lane's buffer and hash it there."""
        start, copy = self._allocations[extent.region].region.address + extent.offset, self._copy(lane)
        leaves = []
        for at in range(0, extent.length, BOUNCE_BYTES):
            piece = copy.read(start + at, min(BOUNCE_BYTES, extent.length - at))
            leaves += [leaf_digest(piece[leaf : leaf + LEAF_BYTES]) for leaf in range(0, len(piece), LEAF_BYTES)]
        return root_digest(leaves, extent.length)

    def _copy(self, lane: int) -> HostCopy:
        with self._copies_lock:
            if lane not in self._copies:
                self._copies[lane] = self._driver.host_copy(BOUNCE_BYTES)
            return self._copies[lane]

    def close(self) -> None:
        """Free everything and let go of the driver."""
        while self._copies:
            self._copies.popitem()[1].close()
        for made in list(self._allocations.values()):
            self.free(made.region)
        self._driver.close()


def _whole_pages(number: int) -> int:
    return -(-number // GPU_PAGE_BYTES) * GPU_PAGE_BYTES
