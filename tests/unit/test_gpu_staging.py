"""The ``gpu`` medium over a driver without a GPU: allocation, export, refusals, checksums, and that nothing is left."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration import cuda_driver
from memkv_vllm.integration.cuda_driver import GPU_PAGE_BYTES, CudaError, LibCuda, Ordering
from memkv_vllm.integration.gpu_staging import BOUNCE_BYTES, GpuMedium, obstacle, uses_expandable_segments
from memkv_vllm.protocol.checksum import digest
from memkv_vllm.types import Extent, MemoryKind
from tests.support.fake_cuda import H200, NOT_SUPPORTED, FakeDriver

MIB = 1 << 20


def medium_of(driver: FakeDriver) -> GpuMedium:
    return GpuMedium(driver, lambda facts: None)


def test_a_region_is_whole_pages_of_its_own() -> None:
    driver = FakeDriver()
    medium = medium_of(driver)
    region = medium.make_region(3, 5 * MIB + 1)
    assert (region.id, region.kind, region.memory) == (3, MemoryKind.GPU, None)
    assert region.address % GPU_PAGE_BYTES == 0 and region.length % GPU_PAGE_BYTES == 0
    assert 5 * MIB + 1 <= region.length < 5 * MIB + 1 + GPU_PAGE_BYTES
    assert driver.bytes_at(region.address, region.length).any() == np.False_, "all zero"
    assert os.fstat(region.dmabuf_fd).st_size >= region.length
    medium.free(region)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.dmabuf_fd)
    medium.close()
    assert driver.live == 0


@pytest.mark.parametrize(
    ("facts", "fails", "words"),
    [
        (H200._replace(dmabuf_supported=False), {}, "this driver exports none"),
        (H200, {"export": NOT_SUPPORTED}, "cu_export: CUDA_ERROR_FAKE"),
    ],
    ids=["not supported", "fails"],
)
def test_what_cannot_be_exported_is_left_to_peermem(
    caplog: pytest.LogCaptureFixture, facts: Any, fails: dict[str, int], words: str
) -> None:
    """P075: the next step of the ladder is the transport's."""
    driver = FakeDriver(facts)
    driver.fails = fails
    medium = medium_of(driver)
    with caplog.at_level(logging.INFO, "memkv.integration"):
        assert medium.make_region(0, MIB).dmabuf_fd == -1
    assert words in caplog.text and "event=gpu_region" in caplog.text
    medium.close()
    assert driver.live == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rdma_supported": False}, "VM without GPUDirect RDMA"),
        ({"writes_ordering": Ordering.NONE, "can_flush": False}, "neither orders"),
        ({"free_bytes": MIB}, "has no 64.0 MiB for staging"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(change: dict[str, Any], words: str) -> None:
    driver = FakeDriver(H200._replace(**change))
    medium = medium_of(driver)
    with pytest.raises(EnvironmentFault, match=words):
        medium.make_region(0, 64 * MIB)
    medium.close()
    assert driver.live == 0


def test_memory_that_nics_cannot_reach_is_refused_and_freed() -> None:
    driver = FakeDriver()
    driver.capable = False
    with pytest.raises(EnvironmentFault, match="IS_GPU_DIRECT_RDMA_CAPABLE is 0"):
        medium_of(driver).make_region(0, MIB)
    assert driver.log == ["allocate", "free"]


def test_what_does_not_fit_is_not_allocated() -> None:
    driver = FakeDriver()
    with pytest.raises(EnvironmentFault, match="too much"):
        GpuMedium(driver, lambda facts: "too much").make_region(0, MIB)
    assert driver.log == []


@pytest.mark.parametrize(
    ("ordering", "can_flush", "flushes"),
    [(Ordering.NONE, True, True), (Ordering.OWNER, True, False), (Ordering.ALL_DEVICES, False, False)],
)
def test_a_flush_only_where_the_gpu_does_not_order(ordering: Ordering, can_flush: bool, flushes: bool) -> None:
    facts = H200._replace(writes_ordering=ordering, can_flush=can_flush)
    assert obstacle(facts) is None
    driver = FakeDriver(facts)
    medium_of(driver).make_visible()
    assert driver.log == (["flush"] if flushes else [])


@pytest.mark.parametrize(
    "length",
    [1, MIB - 1, MIB, MIB + 1, BOUNCE_BYTES, BOUNCE_BYTES + 1, 2 * BOUNCE_BYTES + 3 * MIB + 7],
)
def test_the_checksum_is_that_of_the_bytes_in_host_memory(length: int) -> None:
    """Read in pieces or in one: the same number, or no value could be verified by a host of the other medium."""
    driver = FakeDriver()
    medium = medium_of(driver)
    region = medium.make_region(0, length + 512)
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    driver.bytes_at(region.address + 512, length)[:] = data
    assert medium.digest(0, Extent(0, 512, length)) == digest(data.tobytes())
    assert driver.num_read == length
    medium.close()


def test_each_lane_has_one_buffer_of_its_own() -> None:
    driver = FakeDriver()
    medium = medium_of(driver)
    medium.make_region(0, MIB)
    for lane in (0, 1, 0, 1, 1):
        medium.digest(lane, Extent(0, 0, MIB))
    assert driver.log.count("host_copy") == 2
    medium.close()
    assert driver.live == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:512, expandable_segments : true", True),
        ("expandable_segments:False", False),
        ("backend:cudaMallocAsync", False),
    ],
)
def test_expandable_segments_are_seen(settings: str, expected: bool) -> None:
    assert uses_expandable_segments(settings) is expected


def test_a_host_without_a_driver() -> None:
    with pytest.raises(EnvironmentFault, match="docker run --gpus all"):
        LibCuda("libcuda-that-is-not-there.so.1")


def test_a_function_that_a_library_lacks_is_an_error_with_its_name() -> None:
    library = LibCuda("libc.so.6")  # any library will do: it has none of them
    with pytest.raises(CudaError, match=r"cuMemAlloc_v2: not in this driver \(500\)"):
        library("cuMemAlloc_v2")


def test_without_a_driver_no_device_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LibCuda", lambda: LibCuda("libcuda-that-is-not-there.so.1"))
    assert cuda_driver.pci_address(0) == ""
