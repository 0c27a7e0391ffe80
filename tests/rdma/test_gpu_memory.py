"""Registering "GPU" memory with a real device, and what a kernel without a GPU driver answers (P075).

Soft-RoCE imports no dmabuf, so the first step always fails here, in earnest. The second is a plain registration: of an
address that nothing resolves, as a GPU's is without peermem; and of one that the kernel can resolve.
"""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np
import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs import VerbsClientTransport
from memkv_vllm.transports.verbs.gpu_memory import Way, register_region, try_registration
from memkv_vllm.transports.verbs.provider import Provider
from memkv_vllm.transports.verbs.providers import PROVIDERS, load_provider
from memkv_vllm.types import MemoryKind

NOWHERE = 0x7F0000000000
LENGTH = 1 << 20
BOTH = rf"dmabuf: errno {errno.EOPNOTSUPP} .*; peermem: errno {errno.EFAULT} .*nvidia_peermem is not loaded"


@pytest.fixture(params=sorted(PROVIDERS))
def provider(request: pytest.FixtureRequest) -> Provider:
    return load_provider(request.param)


def region(fd: int, address: int = NOWHERE) -> Region:
    return Region(1, MemoryKind.GPU, LENGTH, None, address, fd)


def test_both_steps_fail_with_their_own_reason(provider: Provider) -> None:
    before = provider.num_live()
    with HostMemory.create("no-dmabuf", LENGTH) as memory:
        with pytest.raises(EnvironmentFault, match=BOTH) as failure:
            try_registration(provider, ["rxe0"], region(memory.fd))
        assert "modprobe nvidia-peermem" in str(failure.value)
        assert f"kernel {os.uname().release}" in str(failure.value)
    with pytest.raises(EnvironmentFault, match="dmabuf: the GPU's driver exported no descriptor; peermem: errno 14"):
        try_registration(provider, ["rxe0"], region(-1))
    assert provider.num_live() == before


def test_the_second_step_registers_what_the_kernel_can_resolve(provider: Provider) -> None:
    with HostMemory.create("no-dmabuf", LENGTH) as memory, mmap.mmap(-1, LENGTH) as mapped:
        address = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        device = provider.open("rxe0")
        made, way = register_region(device.protection_domain(), region(memory.fd, address))
        assert (way, made.address, made.length) == (Way.PEERMEM, address, LENGTH)
        device.close()


def test_the_transport_tries_it_before_any_connection() -> None:
    transport = VerbsClientTransport(["rxe1"])
    with pytest.raises(EnvironmentFault, match="cannot be registered with rxe1"):
        transport.try_registration(region(-1))
    with HostMemory.create("staging", LENGTH) as memory:
        assert transport.try_registration(Region(1, MemoryKind.HOST, LENGTH, memory)) == "host"
