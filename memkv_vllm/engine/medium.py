"""Staging slots in host memory: what a rank uses unless its vLLM side brings another medium (``api.StagingMedium``)."""

from __future__ import annotations

from memkv_vllm.protocol.checksum import digest
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Extent, MemoryKind

__all__ = ["HostMedium"]


class HostMedium:
    """See :class:`memkv_vllm.engine.api.StagingMedium`. Regions are shared mappings; the mover pins them for a GPU."""

    def __init__(self) -> None:
        self._memories: dict[int, HostMemory] = {}

    @property
    def kind(self) -> MemoryKind:
        """Host memory."""
        return MemoryKind.HOST

    def make_region(self, number: int, length: int) -> Region:
        """Make a mapping with memory behind all of it.

        Raises:
            EnvironmentFault: not enough memory.
        """
        memory = HostMemory.create(f"staging{number}", length)
        try:
            memory.populate(0, length)
        except BaseException:
            memory.close()
            raise
        self._memories[number] = memory
        return Region(number, MemoryKind.HOST, length, memory)

    def free(self, region: Region) -> None:
        """Unmap."""
        self._memories.pop(region.id).close()

    def make_visible(self) -> None:
        """Nothing to do: the processor's caches are coherent with what devices write."""

    def digest(self, lane: int, extent: Extent) -> int:
        """Checksum where the bytes lie."""
        return digest(self._memories[extent.region].view(extent.offset, extent.length))

    def close(self) -> None:
        """Unmap everything."""
        while self._memories:
            self._memories.popitem()[1].close()
