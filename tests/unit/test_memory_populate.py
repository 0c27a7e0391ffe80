"""Backing host memory ahead of its use: pages are there afterwards, contents stay, and every refusal is told apart."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from memkv_vllm.config import dev_server_config
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports import memory as memory_module
from memkv_vllm.transports.memory import POPULATE_STEP_BYTES, HostMemory

MIB = 1 << 20


def resident_bytes(memory: HostMemory) -> int:
    """Bytes of the memfd that have pages."""
    return os.fstat(memory.fd).st_blocks * 512


def reserved_hugepages() -> int:
    """Hugepages that are free on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return 0


class Kernel:
    """Stands in for the C library's madvise: notes calls, fails with ``number`` from call ``fail_at`` on."""

    def __init__(self, number: int, fail_at: int = 0) -> None:
        self.number = number
        self.fail_at = fail_at
        self.calls: list[tuple[int, int]] = []

    def madvise(self, address: int, length: int, advice: int) -> int:
        self.calls.append((address, length))
        return -1 if self.number and len(self.calls) > self.fail_at else 0


def test_populate_backs_the_pages_named_and_no_others() -> None:
    with HostMemory.create("test", 8 * MIB, "off") as memory:
        assert resident_bytes(memory) == 0
        assert memory.populate(2 * MIB, MIB)
        assert resident_bytes(memory) == MIB


def test_populate_keeps_contents_and_takes_any_range() -> None:
    with HostMemory.create("test", MIB, "off") as memory:
        memory.array[5000:6000] = 7
        assert memory.populate(4999, 3)
        assert memory.populate(0, memory.length)
        assert memory.populate(memory.length, 0)
        assert memory.array[5000:6000].min() == 7 and memory.array.sum() == 7 * 1000
        assert resident_bytes(memory) == MIB


def test_populate_refuses_what_is_outside() -> None:
    with HostMemory.create("test", MIB) as memory, pytest.raises(LocalProtocolError):
        memory.populate(MIB - 10, 11)


def test_populate_goes_in_steps_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(0)
    with HostMemory.create("test", 2 * POPULATE_STEP_BYTES + 5000) as memory:
        monkeypatch.setattr(memory_module, "_libc", kernel)
        assert memory.populate(100, memory.length - 100)
        lengths = [length for _, length in kernel.calls]
        assert lengths == [POPULATE_STEP_BYTES, POPULATE_STEP_BYTES, 5000]
        assert all(address % mmap.PAGESIZE == 0 for address, _ in kernel.calls)
        assert kernel.calls[0][0] == memory.address


def test_populate_tells_an_old_kernel_from_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostMemory.create("test", MIB) as memory:
        monkeypatch.setattr(memory_module, "_libc", Kernel(errno.EINVAL))
        monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
        assert not memory.populate(0, MIB)
        monkeypatch.setattr(ctypes, "get_errno", lambda: errno.ENOMEM)
        with pytest.raises(EnvironmentFault, match="no memory"):
            memory.populate(0, MIB)


@pytest.mark.skipif(reserved_hugepages() > 0, reason="this machine has reserved hugepages")
def test_hugepages_on_is_refused_and_auto_goes_without() -> None:
    with pytest.raises(EnvironmentFault, match="nr_hugepages"):
        HostMemory.create("test", 4 * MIB, "on")
    with HostMemory.create("test", 4 * MIB, "auto") as memory:
        assert memory.populate(0, memory.length)


def test_hugepages_auto_goes_without_for_a_length_that_does_not_fit_them() -> None:
    with HostMemory.create("test", 5000, "auto") as memory:
        assert memory.length == 5000


def test_no_descriptor_is_left_behind_by_a_refusal() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentFault):
        HostMemory.create("test", 1 << 62, "auto")
    assert len(set(os.listdir("/proc/self/fd"))) == len(before)


@pytest.mark.anyio
async def test_a_server_populates_its_arena() -> None:
    """P086: in the background; clients are served meanwhile."""
    config = dev_server_config(os.urandom(32), address="127.0.0.1:0", max_size=f"{3 * POPULATE_STEP_BYTES + 2 * MIB}")
    async with StoreServer(config, []) as server:
        memory = server._memory
        assert memory is not None
        for _ in range(1000):
            if resident_bytes(memory) == memory.length:
                break
            await anyio.sleep(0.01)
        assert resident_bytes(memory) == memory.length


@pytest.mark.anyio
async def test_a_server_ends_while_its_arena_is_populated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def populate(memory: HostMemory, offset: int, length: int) -> bool:
        calls.append(offset)
        return True

    monkeypatch.setattr(HostMemory, "populate", populate)
    config = dev_server_config(os.urandom(32), address="127.0.0.1:0", max_size=100 * POPULATE_STEP_BYTES)
    async with StoreServer(config, []):
        for _ in range(1000):
            if calls:
                break
            await anyio.lowlevel.checkpoint()
    assert 0 < len(calls) < 100


@pytest.mark.anyio
async def test_a_server_without_memory_behind_its_arena_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    def populate(memory: HostMemory, offset: int, length: int) -> bool:
        raise EnvironmentFault("this host has no memory")

    monkeypatch.setattr(HostMemory, "populate", populate)
    config = dev_server_config(os.urandom(32), address="127.0.0.1:0", max_size="4 MiB")
    with pytest.raises(EnvironmentFault, match="no memory"):
        async with StoreServer(config, []):
            await anyio.sleep(10)
