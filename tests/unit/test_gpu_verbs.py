"""GPU staging over the verbs transport: a real client and server, a NIC that is not there, and memory that no mapping
of the client's shows. What the NIC reaches, it reaches through the descriptor (P075)."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.errors import DataPathError, EnvironmentFault
from memkv_vllm.transports.base import ClientTransport, DataPath, Region, RegistrationTrial
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import MIB, Client, FakeVerbsFactory, Running, connected, serving
from tests.support.scripted import soon
from tests.support.verbs_host import FakeHost

pytestmark = pytest.mark.anyio
ADDRESS = 0x7F4000010000
"""Of the GPU's memory in this process: nothing is mapped there."""


NOTHING: dict[str, int] = {"ibv_reg_dmabuf_mr": errno.EOPNOTSUPP, "ibv_reg_mr": errno.EFAULT}
"""What a NIC refuses that cannot reach a GPU."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    made = FakeHost.make(tmp_path)
    yield made
    made.fabric.close()
    assert made.provider.num_live() == 0


@pytest.fixture
def refuse(host: FakeHost) -> Iterator[dict[str, int]]:
    """Calls that the NIC refuses; nothing, until a test says otherwise."""
    host.nics[0].troubles.spared_bytes = LANDING_BYTES  # host memory, which any NIC reaches
    refused = host.nics[0].troubles.refuse = {}
    yield refused


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with HostMemory.create("hbm", 2 * MIB) as made:
        yield made


def region_of(memory: HostMemory, number: int = 3) -> Region:
    return Region(number, MemoryKind.GPU, memory.length, None, ADDRESS, memory.fd)


class _Factory(FakeVerbsFactory):
    def __init__(self, host: FakeHost) -> None:
        self.host = host

    def data_path(self, **options: Any) -> DataPath:
        return self.host.data_path(**options)

    def client(self) -> ClientTransport:
        return self.host.client()


@asynccontextmanager
async def both(host: FakeHost) -> AsyncIterator[tuple[Running, Client]]:
    factory = _Factory(host)
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        yield server, client


async def test_bytes_go_into_and_out_of_gpu_memory(host: FakeHost, refuse: dict[str, int], memory: HostMemory) -> None:
    async with both(host) as (server, client):
        await client.connection.register(region_of(memory), soon())
        memory.array[:MIB] = 7
        assert await client.put(0, Extent(3, 0, MIB)) == [Status.OK]
        assert (server.arena.array[:MIB] == 7).all()
        assert await client.get(0, Extent(3, MIB, MIB)) == [Status.OK]
        assert (memory.array == 7).all()
        assert await client.get(0, Extent(3, 2 * MIB - 1, 2)) == [Status.BAD_EXTENT]


async def test_a_nic_without_dmabuf_and_peermem_says_both(
    host: FakeHost, refuse: dict[str, int], memory: HostMemory
) -> None:
    """P075: and the connection goes on to say it, rather than to move bytes some other way."""
    async with both(host) as (_, client):
        refuse.update(NOTHING)
        with pytest.raises(DataPathError, match=r"dmabuf: errno 95 .*peermem: errno 14") as failure:
            await client.connection.register(region_of(memory), soon())
        assert "memkv_scratch_medium: host" in str(failure.value)


async def test_the_trial_uses_the_nic_that_connections_use(
    host: FakeHost, refuse: dict[str, int], memory: HostMemory
) -> None:
    transport: RegistrationTrial = host.client()
    assert list(transport.devices) == ["fake0:1"]
    assert transport.try_registration(region_of(memory)) == "dmabuf"
    refuse.update(NOTHING)
    with pytest.raises(EnvironmentFault, match="cannot be registered with fake0"):
        transport.try_registration(region_of(memory))
    assert host.provider.num_live() == 0
