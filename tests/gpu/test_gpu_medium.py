"""The ``gpu`` medium on a real GPU, without a NIC: ``tests/gpu/run``.

Allocation, export, gather -> slot -> scatter, checksums through the host, and what the driver says about NICs. Whether
a NIC then reaches the memory is shown by no machine without one: ``docs/rdma.md`` says what was never run.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: run tests/gpu/run on a machine with a GPU")

from memkv_vllm.engine.medium import HostMedium  # noqa: E402
from memkv_vllm.errors import EnvironmentFault  # noqa: E402
from memkv_vllm.integration.cuda_driver import GPU_PAGE_BYTES, CudaDriver, CudaError, Ordering, pci_address  # noqa: E402
from memkv_vllm.integration.gather_cuda import CudaMover  # noqa: E402
from memkv_vllm.integration.gpu_staging import GpuMedium, obstacle  # noqa: E402
from memkv_vllm.integration.layout import BlockLayout  # noqa: E402
from memkv_vllm.protocol.checksum import digest  # noqa: E402
from memkv_vllm.transports.base import Region  # noqa: E402
from memkv_vllm.types import Extent, MemoryKind  # noqa: E402
from tests.support.kv_tensors import SHAPES, fill, make_layout, memory_outside, slots, value_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no NVIDIA GPU here: run tests/gpu/run on a machine that has one"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SLACK = 32 * MIB
"""What the driver may have taken for itself meanwhile; a region that is not given back is larger."""
BLOCKS = 97
CHUNK = [(8192, 8192, 0)] * 80
"""Llama-3.1-70B at TP 8, block 16: 80 layers of 8 KiB."""
MORE_SHAPES = {**SHAPES, "70B": CHUNK, "70B packed": [(80 * 8192, 80 * 8192, 0)], "8 but not 16": [(24, 40, 8)] * 3}


def say(text: str) -> None:
    """A line of the report."""
    sys.stdout.write(f"\n    {text}")


def host_facts() -> str:
    """What a failed registration would say of this host; the package may lack its dependencies here."""
    try:
        from memkv_vllm.transports.verbs.gpu_memory import read_gpu_host
    except ModuleNotFoundError as error:
        return f"kernel {platform.release()} ({error.name} is not installed)"
    return str(read_gpu_host())


@pytest.fixture(scope="module")
def driver() -> Iterator[CudaDriver]:
    """The driver, and once for all tests the conditions under which they run."""
    made = CudaDriver(0)
    facts = made.facts()
    say(f"gpu: {facts.name} at {facts.pci}, {facts.free_bytes / MIB:.0f} of {facts.total_bytes / MIB:.0f} MiB free")
    say(f"rdma_supported={facts.rdma_supported} dmabuf_supported={facts.dmabuf_supported} can_flush={facts.can_flush}")
    say(f"writes_ordering={facts.writes_ordering} obstacle={obstacle(facts)!r}")
    say(f"host: {host_facts()}; python {platform.python_version()} torch {torch.__version__}")
    yield made
    made.close()


@pytest.fixture
def medium(driver: CudaDriver) -> Iterator[GpuMedium]:
    """A medium with a driver of its own, all of whose memory comes back."""
    facts = driver.facts()
    if problem := obstacle(facts):
        pytest.skip(f"this GPU cannot stage for NICs: {problem}")
    made = GpuMedium(CudaDriver(0), lambda _: None)
    yield made
    made.close()


def bytes_of(driver: CudaDriver, region: Region, offset: int, length: int) -> bytes:
    """What stands in a region, read by the driver."""
    copy = driver.host_copy(length)
    try:
        return bytes(copy.read(region.address + offset, length))
    finally:
        copy.close()


def event() -> object:
    """What the worker passes as ``after``."""
    recorded: object = torch.cuda.current_stream().record_event()
    return recorded


# ------------------------------------------------------------------------------------------------ the memory


def test_the_place_of_the_gpu(driver: CudaDriver) -> None:
    assert pci_address(0) == driver.facts().pci
    domain, bus, rest = pci_address(0).split(":")
    assert (len(domain) >= 4, len(bus), rest[-2:]) == (True, 2, ".0")


def test_a_region_is_zero_and_whole_pages_and_comes_back(driver: CudaDriver, medium: GpuMedium) -> None:
    medium.free(medium.make_region(0, MIB))  # what the driver takes for itself at a first call
    before = driver.facts().free_bytes
    region = medium.make_region(0, 510 * MIB + 1)
    assert region.address % GPU_PAGE_BYTES == region.length % GPU_PAGE_BYTES == 0
    assert before - driver.facts().free_bytes >= region.length
    for offset in (0, region.length // 2, region.length - 4096):
        assert bytes_of(driver, region, offset, 4096) == bytes(4096)
    medium.free(region)
    assert driver.facts().free_bytes >= before - SLACK


def test_export(driver: CudaDriver, medium: GpuMedium) -> None:
    """What the driver says it can, it does; where not, the medium goes on without a descriptor."""
    region = medium.make_region(0, 64 * MIB)
    if region.dmabuf_fd >= 0:
        link = os.readlink(f"/proc/self/fd/{region.dmabuf_fd}")
        say(f"export: dmabuf fd {region.dmabuf_fd} -> {link}, size {os.lseek(region.dmabuf_fd, 0, os.SEEK_END)}")
        assert "dmabuf" in link
    else:
        with pytest.raises(CudaError) as failure:
            os.close(driver.export(region.address, region.length))
        say(f"export: none, {failure.value}")
    medium.free(region)
    if region.dmabuf_fd >= 0:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(region.dmabuf_fd)


def test_more_than_there_is_is_refused(driver: CudaDriver, medium: GpuMedium) -> None:
    with pytest.raises(EnvironmentFault, match="for staging") as failure:
        medium.make_region(0, driver.facts().total_bytes)
    say(f"too much: {failure.value}")


def test_flush(driver: CudaDriver) -> None:
    facts = driver.facts()
    if not facts.can_flush:
        assert facts.writes_ordering >= Ordering.OWNER or obstacle(facts), "neither: it is refused"
        say("flush: not offered")
        return
    driver.flush()
    times = []
    for _ in range(200):
        start = time.perf_counter()
        driver.flush()
        times.append(time.perf_counter() - start)
    say(f"flush: median {statistics.median(times) * 1e6:.1f} us of 200, nothing pending")


def test_the_loopback_transport_takes_no_gpu_memory() -> None:
    """So that a configuration of the two together is refused before anything is allocated."""
    missing = "the package's own dependencies are not installed: pip install memkv-vllm"
    loopback = pytest.importorskip("memkv_vllm.transports.loopback", reason=missing)
    assert not loopback.LoopbackClientTransport().capabilities.gpu_memory


EXPANDABLE = """
import torch
from memkv_vllm.integration.cuda_driver import CudaDriver
torchs = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
driver = CudaDriver(0)
ours = driver.allocate(64 << 20)
print("torch's", driver.rdma_capable(torchs.data_ptr()), "staging", driver.rdma_capable(ours))
driver.free(ours)
"""


@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_staging_does_not_depend_on_expandable_segments(driver: CudaDriver, setting: str) -> None:
    """P075: torch's memory may come from cuMemCreate; the medium's never does."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    say(f"{setting}: for NICs, says the driver: {done.stdout.strip()}")
    assert f"staging {driver.facts().rdma_supported}" in done.stdout


# ------------------------------------------------------------------------------------------------ the bytes


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "copies"])
@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_a_block_goes_out_and_comes_back(driver: CudaDriver, medium: GpuMedium, shape: str, use_kernel: bool) -> None:
    """The bytes in the slot are the value's, those of the host medium, and nothing else changes on the way back."""
    layout = make_layout(MORE_SHAPES[shape], BLOCKS, "cuda:0")
    value, count = layout.value_bytes, 70
    dice = random.Random(shape)
    source, target = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
    offsets = [value * index for index in range(count)]
    expected = [value_of(layout, block) for block in source]
    host = HostMedium()
    on_gpu, on_host = medium.make_region(0, count * value), host.make_region(1, count * value)
    mover = CudaMover(layout, use_kernel=use_kernel)
    try:
        mover.attach(on_gpu)
        assert mover._slots[0].data_ptr() == on_gpu.address, "torch sees the region, not a copy"
        mover.attach(on_host)
        mover.gather(0, slots(source, offsets), event())
        mover.gather(0, slots(source, offsets, region=1), event())
        staged = bytes_of(driver, on_gpu, 0, count * value)
        assert [staged[at : at + value] for at in offsets] == expected
        assert on_host.memory is not None and bytes(on_host.memory.view(0, count * value)) == staged
        for at in offsets[:5]:
            extent = Extent(0, at, value)
            assert medium.digest(0, extent) == digest(staged[at : at + value])
            assert host.digest(0, extent._replace(region=1)) == medium.digest(0, extent)
        fill(layout, 0x55)
        outside = memory_outside(layout, target)
        medium.make_visible()
        mover.scatter(1, slots(target, offsets), event())
        assert [value_of(layout, block) for block in target] == expected
        assert memory_outside(layout, target) == outside
    finally:
        mover.close()
        host.close()


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "copies"])
def test_a_gather_sees_what_the_compute_stream_wrote(driver: CudaDriver, medium: GpuMedium, use_kernel: bool) -> None:
    layout = make_layout(CHUNK, BLOCKS, "cuda:0")
    region = medium.make_region(0, layout.value_bytes)
    mover = CudaMover(layout, use_kernel=use_kernel)
    mover.attach(region)
    for byte in (1, 2, 3):
        torch.cuda._sleep(50_000_000)
        fill(layout, byte)
        mover.gather(0, slots([5], [0]), event())
        assert set(bytes_of(driver, region, 0, layout.value_bytes)) == {byte}
    mover.close()


def test_lanes_at_once(driver: CudaDriver, medium: GpuMedium) -> None:
    """Four lanes, each from a thread of its own: gather, checksum, scatter."""
    layout = make_layout(CHUNK, BLOCKS, "cuda:0")
    value = layout.value_bytes
    mover = CudaMover(layout)
    mover.attach(medium.make_region(0, 4 * 16 * value))
    expected = [digest(value_of(layout, block)) for block in range(BLOCKS)]
    wrong: list[str] = []

    def work(lane: int) -> None:
        for turn in range(10):
            blocks = [(lane * 17 + turn + index) % BLOCKS for index in range(16)]
            offsets = [(lane * 16 + index) * value for index in range(16)]
            mover.gather(lane, slots(blocks, offsets), None)
            for block, at in zip(blocks, offsets, strict=True):
                if medium.digest(lane, Extent(0, at, value)) != expected[block]:
                    wrong.append(f"lane {lane} turn {turn} block {block}")
            mover.scatter(lane, slots(blocks, offsets), None)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [digest(value_of(layout, block)) for block in range(BLOCKS)] == expected
    mover.close()


def test_an_engine_end_leaves_no_memory_behind(driver: CudaDriver) -> None:
    before, fds = 0, 0
    for life in range(20):
        if life == 1:  # the first one pays for what the driver keeps
            before, fds = driver.facts().free_bytes, len(os.listdir("/proc/self/fd"))
        made = GpuMedium(CudaDriver(0), lambda _: None)
        made.make_region(0, 64 * MIB)
        for lane in range(4):
            made.digest(lane, Extent(0, 0, 8 * MIB))
        made.close()
    assert driver.facts().free_bytes >= before - SLACK
    assert len(os.listdir("/proc/self/fd")) == fds


# ------------------------------------------------------------------------------------------------ what it costs


def rate(moved_bytes: int, call: Callable[[], object]) -> str:
    """A line about one second of calls, after a warm-up."""
    for _ in range(5):
        call()
    times, end = [], time.perf_counter() + 1.0
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    return f"{moved_bytes / middle / 1e9:7.1f} GB/s, median {middle * 1e3:.3f} ms of {len(times)} x {moved_bytes} bytes"


def test_what_it_costs(medium: GpuMedium) -> None:
    """No bound: the figures are for ``docs/rdma.md``."""
    layout: BlockLayout = make_layout(CHUNK, 512, "cuda:0")
    value, count = layout.value_bytes, 64
    blocks = random.Random(0).sample(range(512), count)
    host = HostMedium()
    regions = [medium.make_region(0, count * value), host.make_region(1, count * value)]
    mover = CudaMover(layout)
    for region in regions:
        mover.attach(region)
    for region in regions:
        kind = region.kind
        plan = slots(blocks, [value * index for index in range(count)], region=region.id)
        reader = medium if kind is MemoryKind.GPU else host
        extents = [Extent(region.id, value * index, value) for index in range(count)]
        say(f"{kind.value:<4} gather   {rate(count * value, lambda plan=plan: mover.gather(0, plan, None))}")  # type: ignore[misc]
        say(f"{kind.value:<4} scatter  {rate(count * value, lambda plan=plan: mover.scatter(0, plan, None))}")  # type: ignore[misc]

        def hash_all(reader: GpuMedium | HostMedium = reader, extents: list[Extent] = extents) -> None:
            for extent in extents:
                reader.digest(0, extent)

        say(f"{kind.value:<4} checksum {rate(count * value, hash_all)}")
    mover.close()
    host.close()
