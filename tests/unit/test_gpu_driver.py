"""The calls into ``libcuda``, over a library in Python that keeps books: every call in a context, everything undone.

What it cannot show, that the numbers and signatures are CUDA's, ``tests/gpu`` does on a GPU.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memkv_vllm.integration import cuda_driver
from memkv_vllm.integration.cuda_driver import CudaDriver, CudaError, GpuFacts, pci_address

MADE = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2": "cuCtxPopCurrent_v2",
    "cuMemAlloc_v2": "cuMemFree_v2",
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuStreamCreate": "cuStreamDestroy_v2",
    "cuEventCreate": "cuEventDestroy_v2",
}
"""Calls that make something, and those that undo it."""
WITHOUT_CONTEXT = {"cuInit", "cuGetErrorName", "cuCtxPushCurrent_v2"}
"""And all that begins with cuDevice."""
ATTRIBUTES = {116: 1, 117: 3, 118: 100, 124: 1}


class BookKeeper:
    """Stands in for ``ctypes.CDLL("libcuda.so.1")``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        self.lacks: set[str] = set()
        self._functions: dict[str, Any] = {}
        self._host: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.lacks:
            raise AttributeError(name)
        if name not in self._functions:
            self._functions[name] = self._function(name)
        return self._functions[name]

    def live(self) -> Counter[str]:
        """What was made and not undone."""
        made = Counter(call for call in self.calls if call in MADE)
        made.subtract({maker: self.calls.count(undo) for maker, undo in MADE.items()})
        return +made

    def _function(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.fails:
                return self.fails[name]
            in_context = self.live()["cuCtxPushCurrent_v2"] > 0
            if not (in_context or name in WITHOUT_CONTEXT or name.startswith("cuDevice")):
                return 201  # CUDA_ERROR_INVALID_CONTEXT
            self.calls.append(name)
            self._answer(name, [getattr(argument, "_obj", argument) for argument in arguments])
            return 0

        return call

    def _answer(self, name: str, out: list[Any]) -> None:
        if name == "cuDeviceGetAttribute":
            out[0].value = ATTRIBUTES[out[1]]
        elif name == "cuMemGetInfo_v2":
            out[0].value, out[1].value = 5 << 30, 9 << 30
        elif name in ("cuDeviceGetName", "cuDeviceGetPCIBusId"):
            out[0].value = b"GPU" if name == "cuDeviceGetName" else b"0000:1B:00.0"
        elif name == "cuMemAlloc_v2":
            out[0].value = 0x7F0000000200
        elif name == "cuMemHostAlloc":
            self._host.append(ctypes.create_string_buffer(out[1]))
            out[0].value = ctypes.addressof(self._host[-1])
        elif name == "cuMemcpyDtoHAsync_v2":
            ctypes.memset(out[0], 7, out[2])
        elif name == "cuPointerGetAttribute":
            out[0].value = 1
        elif name == "cuMemGetHandleForAddressRange":
            out[0].value = 77
        elif name == "cuGetErrorName":
            out[1].value = b"CUDA_ERROR_" + str(out[0]).encode()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[BookKeeper]:
    made = BookKeeper()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    yield made
    assert not made.live(), "everything was undone"


def test_the_whole_life_of_a_region(library: BookKeeper) -> None:
    driver = CudaDriver(0)
    assert driver.facts() == GpuFacts("GPU", "0000:1b:00.0", 9 << 30, 5 << 30, True, True, 100, True)
    address = driver.allocate(1 << 20)
    assert driver.rdma_capable(address) and driver.export(address, 1 << 16) == 77
    driver.flush()
    copy = driver.host_copy(4096)
    assert bytes(copy.read(address, 100)) == b"\7" * 100
    copy.close()
    driver.free(address)
    driver.close()
    driver.close()
    assert library.calls.index("cuMemsetD8Async") < library.calls.index("cuEventSynchronize"), "zeroed, and awaited"
    assert library.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuMemsetD8Async", "cuStreamCreate", "cuEventCreate"])
def test_an_allocation_that_fails_leaves_nothing(library: BookKeeper, call: str) -> None:
    driver = CudaDriver(0)
    library.fails[call] = 2
    with pytest.raises(CudaError, match=rf"{call}: CUDA_ERROR_2 \(2\)"):
        driver.allocate(1 << 20)
    driver.close()


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"])
def test_a_copier_that_fails_leaves_nothing(library: BookKeeper, call: str) -> None:
    driver = CudaDriver(0)
    library.fails[call] = 2
    with pytest.raises(CudaError, match=call):
        driver.host_copy(4096)
    driver.close()


def test_a_copy_that_fails_is_waited_for(library: BookKeeper) -> None:
    driver = CudaDriver(0)
    copy = driver.host_copy(4096)
    library.fails["cuMemcpyDtoHAsync_v2"] = 719
    before = library.calls.count("cuEventSynchronize")
    with pytest.raises(CudaError, match="719"):
        copy.read(0x7F0000000000, 10)
    assert library.calls.count("cuEventSynchronize") == before + 1
    copy.close()
    driver.close()


def test_an_old_driver_has_less(library: BookKeeper) -> None:
    library.lacks = {"cuMemGetHandleForAddressRange", "cuFlushGPUDirectRDMAWrites"}
    library.fails = {"cuDeviceGetAttribute": 1, "cuPointerGetAttribute": 1}
    driver = CudaDriver(0)
    facts = driver.facts()
    assert (facts.rdma_supported, facts.dmabuf_supported, facts.writes_ordering, facts.can_flush) == (0, 0, 0, 0)
    assert not driver.rdma_capable(4096)
    for call in (lambda: driver.export(0, 1), driver.flush):
        with pytest.raises(CudaError, match="not in this driver"):
            call()
    driver.close()


def test_where_a_device_is(library: BookKeeper) -> None:
    assert pci_address(3) == "0000:1b:00.0"
    library.fails["cuDeviceGet"] = 101
    assert pci_address(3) == ""
    assert cuda_driver.GPU_PAGE_BYTES == 65536
