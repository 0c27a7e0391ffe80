"""Staging slots in host memory: regions come, are read, and go."""

from __future__ import annotations

import os

import pytest

from memkv_vllm.engine.medium import HostMedium
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.protocol.checksum import digest
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Extent, MemoryKind


def test_a_region_is_a_mapping_that_can_be_hashed_in_place() -> None:
    medium = HostMedium()
    region = medium.make_region(4, 100_000)
    assert (medium.kind, region.id, region.kind, region.length) == (MemoryKind.HOST, 4, MemoryKind.HOST, 100_000)
    assert region.memory is not None and not region.memory.array.any()
    region.memory.array[500:600] = 9
    medium.make_visible()
    assert medium.digest(0, Extent(4, 500, 100)) == digest(b"\t" * 100)
    with pytest.raises(LocalProtocolError):
        medium.digest(0, Extent(4, 99_999, 2))
    medium.free(region)
    assert region.memory.closed
    medium.close()


def test_the_end_unmaps_all_that_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    medium = HostMedium()
    memories = [medium.make_region(number, 4096).memory for number in range(3)]
    medium.close()
    assert all(memory is not None and memory.closed for memory in memories)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_host_without_the_memory_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: HostMemory, offset: int, length: int) -> bool:
        raise EnvironmentFault("no memory behind it")

    monkeypatch.setattr(HostMemory, "populate", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentFault):
        HostMedium().make_region(0, 4096)
    assert len(os.listdir("/proc/self/fd")) == before
