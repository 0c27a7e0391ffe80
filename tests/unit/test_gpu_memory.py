"""Registering GPU memory: which ways are tried in which order, and what is said when none works (P075)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.gpu_memory import (
    REGION_ACCESS,
    GpuHost,
    Refusal,
    Way,
    explain,
    read_gpu_host,
    register_region,
    try_registration,
)
from memkv_vllm.transports.verbs.provider import Access, VerbsError
from memkv_vllm.types import MemoryKind
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider

LENGTH = 128 * 1024
DMABUF, PEERMEM = "ibv_reg_dmabuf_mr", "ibv_reg_mr"
OPEN_MODULES = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\nGCC version: gcc 12\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC version: gcc 12\n"


@pytest.fixture
def nic() -> FakeNic:
    return FakeNic("fake0", "127.0.0.1")


@pytest.fixture
def provider(nic: FakeNic) -> Iterator[FakeProvider]:
    with FakeFabric() as fabric:
        made = FakeProvider(fabric, [nic, FakeNic("fake1", "127.0.0.2")])
        yield made
        assert made.num_live() == 0, "everything that was opened is closed"


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with HostMemory.create("hbm", LENGTH) as made:
        yield made


def root(tmp_path: Path, *, kernel: str = "6.1.0-18-amd64", module: str = "", driver: str = OPEN_MODULES) -> Path:
    """``/sys`` and ``/proc`` of a host."""
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(kernel + "\n")
    if driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(driver)
    if module:
        (tmp_path / "sys/module" / module).mkdir(parents=True)
    return tmp_path


def gpu(memory: HostMemory, fd: int | None = None) -> Region:
    """A region whose descriptor is ``memory``'s, at an address of its own, as a GPU's is."""
    return Region(7, MemoryKind.GPU, LENGTH, None, 0x7F0000010000, memory.fd if fd is None else fd)


@pytest.mark.parametrize(
    ("refused", "exported", "way"),
    [
        ({}, True, Way.DMABUF),
        ({}, False, Way.PEERMEM),
        ({DMABUF: errno.EOPNOTSUPP}, True, Way.PEERMEM),
        ({DMABUF: errno.EOPNOTSUPP}, False, Way.PEERMEM),
        ({PEERMEM: errno.EFAULT}, True, Way.DMABUF),
        ({PEERMEM: errno.EFAULT}, False, None),
        ({DMABUF: errno.EOPNOTSUPP, PEERMEM: errno.EFAULT}, True, None),
        ({DMABUF: errno.ENOSYS, PEERMEM: errno.EFAULT}, True, None),
        ({DMABUF: errno.EINVAL, PEERMEM: errno.ENOMEM}, True, None),
    ],
)
def test_the_ladder(
    nic: FakeNic,
    provider: FakeProvider,
    memory: HostMemory,
    tmp_path: Path,
    refused: dict[str, int],
    exported: bool,
    way: Way | None,
) -> None:
    """P075: dmabuf, then peermem, over every combination of what the host can; no step is left out or repeated."""
    nic.troubles.refuse = refused
    device = provider.open("fake0")
    domain = device.protection_domain()
    region = gpu(memory, None if exported else -1)
    if way is None:
        with pytest.raises(EnvironmentFault) as failure:
            register_region(domain, region, device="fake0", root=root(tmp_path))
        for step, number in refused.items():
            if exported or step != DMABUF:
                assert f"errno {number} ({os.strerror(number)})" in str(failure.value), "each step that was tried"
        assert "memkv_scratch_medium: host" in str(failure.value)
    else:
        made, how = register_region(domain, region, device="fake0", root=root(tmp_path))
        # A dmabuf's bytes have no address but their offset: pyverbs has no other way to name them.
        assert (how, made.address, made.length) == (way, 0 if way is Way.DMABUF else region.address, LENGTH)
    device.close()


def test_what_is_registered_is_the_memory_behind_the_descriptor(
    nic: FakeNic, provider: FakeProvider, memory: HostMemory
) -> None:
    nic.troubles.refuse = {}
    device = provider.open("fake0")
    made, _ = register_region(device.protection_domain(), gpu(memory))
    memory.array[:] = 5
    place = made.place  # type: ignore[attr-defined]
    assert ctypes.string_at(place + LENGTH - 4, 4) == b"\5\5\5\5"
    device.close()


def test_host_memory_has_one_way(nic: FakeNic, provider: FakeProvider, memory: HostMemory) -> None:
    device = provider.open("fake0")
    domain = device.protection_domain()
    region = Region(1, MemoryKind.HOST, LENGTH, memory)
    made, how = register_region(domain, region)
    assert (how, made.address) == (Way.HOST, memory.address)
    nic.troubles.refuse = {PEERMEM: errno.ENOMEM}
    with pytest.raises(VerbsError) as failure:
        register_region(domain, region)
    assert failure.value.errno == errno.ENOMEM, "the transport has its own words for memlock"
    device.close()


@pytest.mark.parametrize(
    "region",
    [
        Region(1, MemoryKind.HOST, LENGTH),
        Region(1, MemoryKind.GPU, LENGTH, None, 0, 5),
        Region(1, MemoryKind.GPU, 0, None, 0x1000, 5),
    ],
    ids=["host without memory", "no address", "no bytes"],
)
def test_what_is_no_region_is_a_bug(provider: FakeProvider, region: Region) -> None:
    device = provider.open("fake0")
    with pytest.raises(LocalProtocolError):
        register_region(device.protection_domain(), region)
    device.close()


def test_the_peer_may_read_and_write_and_nothing_is_reordered() -> None:
    """A READ behind the WRITEs must find them in place: see the module."""
    assert REGION_ACCESS == Access.LOCAL | Access.REMOTE_READ | Access.REMOTE_WRITE


# ------------------------------------------------------------------------------------------------ the trial


def test_a_trial_leaves_nothing_behind(nic: FakeNic, provider: FakeProvider, memory: HostMemory) -> None:
    nic.troubles.refuse = {}
    assert try_registration(provider, ["fake0:1", "fake0:2"], gpu(memory)) is Way.DMABUF
    assert provider.num_live() == 0


def test_a_trial_asks_every_device(nic: FakeNic, provider: FakeProvider, memory: HostMemory, tmp_path: Path) -> None:
    """One NIC that cannot is one too many: a connection over it could never register."""
    nic.troubles.refuse = {}
    provider.nics["fake1"].troubles.refuse = {DMABUF: errno.EOPNOTSUPP, PEERMEM: errno.EFAULT}
    with pytest.raises(EnvironmentFault, match="cannot be registered with fake1"):
        try_registration(provider, ["fake0", "fake1"], gpu(memory), root=root(tmp_path))
    assert provider.num_live() == 0


def test_a_trial_of_host_memory_says_how_much(nic: FakeNic, provider: FakeProvider, memory: HostMemory) -> None:
    nic.troubles.refuse = {PEERMEM: errno.ENOMEM}
    with pytest.raises(EnvironmentFault, match=r"0\.1 MiB of host memory cannot be registered with fake0: ibv_reg_mr"):
        try_registration(provider, ["fake0"], Region(1, MemoryKind.HOST, LENGTH, memory))


def test_a_trial_without_a_device_that_can_be_opened(provider: FakeProvider, memory: HostMemory) -> None:
    with pytest.raises(EnvironmentFault, match="rdma_devices"):
        try_registration(provider, [], gpu(memory))
    with pytest.raises(EnvironmentFault, match="RDMA device nothere cannot be opened"):
        try_registration(provider, ["nothere"], gpu(memory))


# ------------------------------------------------------------------------------------------------ facts and words


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({"module": "nvidia_peermem"}, GpuHost("6.1.0-18-amd64", "nvidia_peermem", "open")),
        ({"module": "nv_peer_mem", "driver": PROPRIETARY}, GpuHost("6.1.0-18-amd64", "nv_peer_mem", "proprietary")),
        ({"driver": "", "kernel": "5.4.0"}, GpuHost("5.4.0", "", "")),
    ],
)
def test_facts_of_a_host(tmp_path: Path, files: dict[str, str], facts: GpuHost) -> None:
    assert read_gpu_host(root(tmp_path, **files)) == facts


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    assert read_gpu_host(tmp_path) == GpuHost("", "", "")


BOTH = [Refusal(Way.DMABUF, errno.EOPNOTSUPP), Refusal(Way.PEERMEM, errno.EFAULT)]
HOST = GpuHost("6.1.0", "", "open")


@pytest.mark.parametrize(
    ("refusals", "host", "words", "absent"),
    [
        (BOTH, HOST, ["imports no dmabuf", "nvidia_peermem is not loaded", "modprobe nvidia-peermem"], ["install"]),
        (BOTH, HOST._replace(driver="proprietary"), ["install NVIDIA's open kernel modules"], []),
        (BOTH, HOST._replace(kernel="5.4.0-150-generic"), ["run Linux 5.12 or newer", "5.4.0-150-generic"], []),
        (BOTH, HOST._replace(peermem="nvidia_peermem"), ["expandable segments"], ["modprobe", "is not loaded"]),
        ([Refusal(Way.DMABUF, errno.ENOSYS), BOTH[1]], HOST, ["rdma-core 34"], []),
        ([Refusal(Way.DMABUF, 0), BOTH[1]], HOST, ["driver exported no descriptor"], ["dmabuf: errno"]),
        ([Refusal(Way.DMABUF, errno.EIO), BOTH[1]], HOST, ["VM without GPUDirect RDMA", "ACS"], []),
        ([BOTH[0], Refusal(Way.PEERMEM, errno.ENOMEM)], HOST, ["memlock", "memkv_scratch_mb_per_thread"], []),
        ([BOTH[0], Refusal(Way.PEERMEM, 12345)], HOST, ["errno 12345"], []),
    ],
)
def test_each_failure_has_its_meaning_and_its_fix(
    refusals: list[Refusal], host: GpuHost, words: list[str], absent: list[str]
) -> None:
    """P075: peermem missing, expandable segments, VM without GPUDirect: one line of why, and what to do."""
    text = explain("mlx5_0", 160 << 20, refusals, host)
    assert text.startswith("160.0 MiB of GPU memory cannot be registered with mlx5_0. ") and "\n" not in text
    assert [word for word in words if word not in text] == []
    assert [word for word in absent if word in text] == []
    assert text.endswith("or set memkv_scratch_medium: host")
