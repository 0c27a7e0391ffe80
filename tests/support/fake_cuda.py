"""A CUDA driver without a GPU: device memory is a memfd, at addresses that nobody can read by accident.

:class:`FakeDriver` is what ``memkv_vllm.integration.cuda_driver.CudaDriver`` is to the ``gpu`` medium;
:class:`GpuArrayMover` gathers and scatters where a kernel would; :class:`ReachingTransport` is a NIC that reaches the
memory through its dmabuf descriptor, and through nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from memkv_vllm.engine.api import SlotRef
from memkv_vllm.integration.cuda_driver import GPU_PAGE_BYTES, CudaError, GpuFacts, HostCopy
from memkv_vllm.transports.base import Capabilities, Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, MemoryKind
from tests.support.fake_mover import ArrayMover
from tests.support.scripted_transport import ScriptedConnection, ScriptedTransport

GIB = 1 << 30
H200 = GpuFacts(
    name="NVIDIA H200",
    pci="0000:1b:00.0",
    total_bytes=140 * GIB,
    free_bytes=14 * GIB,
    rdma_supported=True,
    dmabuf_supported=True,
    writes_ordering=100,
    can_flush=True,
)
NOT_SUPPORTED, OUT_OF_MEMORY = 801, 2
FIRST = 0x7F00_0000_0000
"""Addresses begin here, each allocation 512 bytes past a page, as ``cuMemAlloc`` may give them."""


class FakeDriver:
    """See ``memkv_vllm.integration.cuda_driver.Driver``.

    Attributes:
        now: what ``facts`` says; tests change it.
        fails: calls that fail, by method, with this ``CUresult``.
        log: calls in order, without ``facts``.
        live: things that were made and not freed.
        num_read: bytes that were copied to the host.
    """

    def __init__(self, facts: GpuFacts = H200) -> None:
        self.now = facts
        self.capable = True
        self.fails: dict[str, int] = {}
        self.log: list[str] = []
        self.live = 1
        self.num_read = 0
        self._allocated: dict[int, HostMemory] = {}

    def facts(self) -> GpuFacts:
        self._enter("facts", logged=False)
        return self.now

    def allocate(self, length: int) -> int:
        self._enter("allocate")
        if length > self.now.free_bytes:
            raise CudaError("cuMemAlloc_v2", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        base = FIRST + (1 + len(self.log)) * (1 << 32) + 512
        self._allocated[base] = HostMemory.create("hbm", length)
        self.now = self.now._replace(free_bytes=self.now.free_bytes - length)
        self.live += 1
        return base

    def rdma_capable(self, address: int) -> bool:
        self.bytes_at(address, 1)
        return self.capable

    def export(self, address: int, length: int) -> int:
        self._enter("export")
        assert address % GPU_PAGE_BYTES == 0 and length % GPU_PAGE_BYTES == 0, "only whole pages can be exported"
        self.bytes_at(address, length)
        return os.dup(self._memory(address)[0].fd)

    def free(self, address: int) -> None:
        self._enter("free")
        memory = self._allocated.pop(address)
        self.now = self.now._replace(free_bytes=self.now.free_bytes + memory.length)
        self.live -= 1
        memory.close()

    def flush(self) -> None:
        self._enter("flush")

    def host_copy(self, length: int) -> HostCopy:
        self._enter("host_copy")
        self.live += 1
        return FakeCopy(self, length)

    def close(self) -> None:
        self._enter("close")
        self.live -= 1

    def bytes_at(self, address: int, length: int) -> npt.NDArray[np.uint8]:
        """The bytes of device memory: the first whole page of an allocation is where its memfd begins."""
        memory, start = self._memory(address)
        assert 0 <= start and start + length <= memory.length, "outside of the allocation"
        return memory.array[start : start + length]

    def _memory(self, address: int) -> tuple[HostMemory, int]:
        base = max(base for base in self._allocated if base <= address)
        first_page = -(-base // GPU_PAGE_BYTES) * GPU_PAGE_BYTES
        return self._allocated[base], address - first_page

    def _enter(self, call: str, *, logged: bool = True) -> None:
        if logged:
            self.log.append(call)
        if call in self.fails:
            raise CudaError(f"cu_{call}", self.fails[call], "CUDA_ERROR_FAKE")


class FakeCopy:
    """See ``memkv_vllm.integration.cuda_driver.HostCopy``."""

    def __init__(self, driver: FakeDriver, length: int) -> None:
        self._driver = driver
        self._buffer = bytearray(length)

    def read(self, address: int, length: int) -> memoryview:
        self._driver._enter("read")
        self._driver.num_read += length
        self._buffer[:length] = self._driver.bytes_at(address, length).tobytes()
        return memoryview(self._buffer)[:length]

    def close(self) -> None:
        self._driver.live -= 1


class GpuArrayMover(ArrayMover):
    """An ``ArrayMover`` between "GPU" blocks and a region of GPU memory, which it knows by its address alone."""

    def __init__(self, driver: FakeDriver, num_blocks: int, value_bytes: int, *, seed: int = 0) -> None:
        super().__init__(num_blocks, value_bytes, seed=seed)
        self._driver = driver

    def attach(self, region: Region) -> None:
        assert region.kind is MemoryKind.GPU and region.memory is None
        self._regions[region.id] = self._driver.bytes_at(region.address, region.length)

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        self._driver.log.append("scatter")
        super().scatter(lane, blocks, after)


class ReachingConnection(ScriptedConnection):
    """Puts in the place of a GPU region a mapping of its descriptor, until it is closed."""

    async def register(self, region: Region, deadline: Deadline) -> None:
        assert region.kind is MemoryKind.GPU and region.memory is None
        memory = HostMemory.adopt(os.dup(region.dmabuf_fd), os.fstat(region.dmabuf_fd).st_size)
        await super().register(Region(region.id, MemoryKind.HOST, region.length, memory), deadline)

    async def aclose(self) -> None:
        await super().aclose()
        for region in self.regions.values():
            assert region.memory is not None
            region.memory.close()


class ReachingTransport(ScriptedTransport):
    """A ``ScriptedTransport`` for GPU memory."""

    capabilities: ClassVar[Capabilities] = Capabilities(one_sided=True, gpu_memory=True, same_host=False)
    connection: ClassVar[type[ScriptedConnection]] = ReachingConnection
