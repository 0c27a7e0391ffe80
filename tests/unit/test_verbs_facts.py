"""What a client knows of this host: read once for many connections, and again when it may be out of date."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from memkv_vllm.errors import ConnectError, DataPathError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.topology import Host, read_host
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.client import VerbsClientTransport
from memkv_vllm.transports.verbs.facts import FRESH_S, HostFacts
from memkv_vllm.types import MemoryKind
from tests.support.harness import drive, serving
from tests.support.scripted import KEY, soon
from tests.support.verbs_world import SERVER, verbs_world

pytestmark = pytest.mark.anyio


class Reader:
    """Reads an empty tree; counts."""

    def __init__(self) -> None:
        self.reads = 0
        self.now_s = 100.0

    def read(self, root: Path) -> Host:
        self.reads += 1
        return read_host(root)

    def clock(self) -> float:
        return self.now_s


def test_it_is_read_again_when_it_is_old_or_forgotten(tmp_path: Path) -> None:
    reader = Reader()
    facts = HostFacts(tmp_path, reader.clock, reader.read)
    first = facts.get()
    reader.now_s += FRESH_S - 0.1
    assert facts.get() is first
    reader.now_s += 0.1
    assert facts.get() is not first
    assert reader.reads == 2
    facts.forget()
    facts.forget()
    facts.get()
    assert reader.reads == 3


def test_of_threads_that_come_at_once_one_reads(tmp_path: Path) -> None:
    reader = Reader()
    started = threading.Barrier(8)
    facts = HostFacts(tmp_path, reader.clock, reader.read)

    def get() -> Host:
        started.wait(10)
        return facts.get()

    with ThreadPoolExecutor(8) as threads:
        hosts = [future.result() for future in [threads.submit(get) for _ in range(8)]]
    assert reader.reads == 1
    assert all(host is hosts[0] for host in hosts)


def test_a_read_that_fails_is_tried_again(tmp_path: Path) -> None:
    def broken(root: Path) -> Host:
        raise PermissionError(root)

    facts = HostFacts(tmp_path, read=broken)
    for _ in range(2):
        with pytest.raises(PermissionError):
            facts.get()


@asynccontextmanager
async def brought_up(transport: VerbsClientTransport, address: tuple[str, int]) -> AsyncIterator[None]:
    connection = await transport.connect(*address, Credentials(KEY), PeerKind.ENGINE, soon())
    with HostMemory.create("staging-here", 1 << 20) as memory:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, [])
            try:
                await connection.register(Region(1, MemoryKind.HOST, memory.length, memory), soon())
                yield
            finally:
                await connection.aclose()
                tasks.cancel_scope.cancel()


async def test_connections_share_one_look_at_the_host_until_one_fails(tmp_path: Path) -> None:
    with verbs_world(tmp_path) as world:
        async with serving(world) as server:
            transport, reader = world.client(), Reader()
            transport.facts = HostFacts(world.client_root, reader.clock, reader.read)
            for _ in range(3):
                async with brought_up(transport, server.address):
                    pass
            assert reader.reads == 1
            world.client_nic.troubles.refuse["ibv_create_qp"] = errno.EIO
            with pytest.RaisesGroup(DataPathError):
                async with brought_up(transport, server.address):
                    pass
            del world.client_nic.troubles.refuse["ibv_create_qp"]
            async with brought_up(transport, server.address):
                assert reader.reads == 2


async def test_a_server_that_is_not_there_makes_for_another_look(tmp_path: Path) -> None:
    with verbs_world(tmp_path) as world, socket.create_server((SERVER, 0)) as listener:
        host, port = listener.getsockname()[:2]
        listener.close()
        transport, reader = world.client(), Reader()
        transport.facts = HostFacts(world.client_root, reader.clock, reader.read)
        for reads in (1, 2):
            with pytest.raises(ConnectError):
                await transport.connect(host, port, Credentials(KEY), PeerKind.ENGINE, soon())
            assert reader.reads == reads


async def test_an_address_on_no_rail_makes_for_another_look_at_once(tmp_path: Path) -> None:
    """P073: the NIC came after this process had looked."""
    with verbs_world(tmp_path) as world:
        async with serving(world) as server:
            transport, reader = world.client(), Reader()

            def read(root: Path) -> Host:
                host = reader.read(root)
                return replace(host, nics=()) if reader.reads == 1 else host

            transport.facts = HostFacts(world.client_root, reader.clock, read)
            async with brought_up(transport, server.address):
                assert reader.reads == 2
