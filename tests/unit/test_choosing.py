"""CONNECT: a session chooses a data path once, before any region; whatever it sends, it is answered or cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.errors import ConnectionLost, MemkvError, StoreError
from memkv_vllm.protocol.connect import Connect
from memkv_vllm.protocol.messages import ErrorCode, Ping, Register
from memkv_vllm.transports.base import ServerTransport
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.tcp import TcpServerTransport
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import FACTORIES, TcpFactory, connected, serving, wait_until
from tests.support.scripted import soon
from tests.support.verbs_host import FakeHost

pytestmark = pytest.mark.anyio


class BothFactory(TcpFactory):
    """A tcp client, and a server that offers verbs too."""

    def __init__(self, host: FakeHost) -> None:
        self.host = host

    def server(self, faults: FaultPlan | None = None, **options: Any) -> ServerTransport:
        return TcpServerTransport("127.0.0.1", 0, data_paths=[self.host.data_path()], **options)


@pytest.mark.parametrize("name", ["loopback", "tcp"])
async def test_a_server_without_other_data_paths_says_so(name: str) -> None:
    factory = FACTORIES[name]
    async with serving(factory) as server, connected(factory, server.address) as client:
        with pytest.raises(StoreError, match="offers no data path called 'verbs'.*rdma.devices") as caught:
            await client.connection.request(Connect("verbs", b"x"), soon())
        assert caught.value.code == ErrorCode.DATA_PATH.name.lower() == "data_path"
        assert server.handler.counts["requests_refused"] == 1
        # Nothing has changed for it.
        assert await client.put(0, Extent(1, 0, 100)) == [Status.OK]


async def test_an_unknown_name_is_told_which_there_are(tmp_path: Path) -> None:
    factory = BothFactory(FakeHost.make(tmp_path))
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        with pytest.raises(StoreError, match="no data path called 'quic': it has verbs;"):
            await client.connection.request(Connect("quic", b""), soon())


async def test_a_tcp_session_beside_it_works_as_ever(tmp_path: Path) -> None:
    factory = BothFactory(FakeHost.make(tmp_path))
    async with serving(factory) as server, connected(factory, server.address) as client:
        assert await client.put(0, Extent(1, 0, 100)) == [Status.OK]
        with pytest.raises(ConnectionLost):
            await client.connection.request(Connect("verbs", b""), soon())
        await wait_until(lambda: server.handler.counts["cut_connect"] == 1, "a session with regions cannot choose")


async def test_connect_twice_cuts(tmp_path: Path) -> None:
    host = FakeHost.make(tmp_path)
    factory = BothFactory(host)
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        wrong = bytes([9]) + bytes(40)
        with pytest.raises(StoreError, match="version 9 of the verbs data path"):
            await client.connection.request(Connect("verbs", wrong), soon())
        with pytest.raises(ConnectionLost):
            await client.connection.request(Connect("verbs", wrong), soon())
        await wait_until(lambda: server.handler.counts["cut_connect"] == 1, "it was cut")
    with host.fabric:
        assert host.provider.num_live() == 0


async def test_data_connections_of_a_session_that_chose_another_path_are_turned_away(tmp_path: Path) -> None:
    factory = BothFactory(FakeHost.make(tmp_path))
    async with serving(factory) as server, connected(factory, server.address, region_bytes=0) as client:
        with pytest.raises(StoreError):
            await client.connection.request(Connect("verbs", bytes([9])), soon())
        with pytest.raises(MemkvError, match="this session has ended"):
            await client.connection._attach(soon())  # type: ignore[attr-defined]


@pytest.mark.fault
async def test_any_token_ends_in_a_clean_error(tmp_path: Path) -> None:
    """P091: what a client sends is never more than numbers to a library that was asked whether it takes them."""
    factory, rng = BothFactory(FakeHost.make(tmp_path)), random.Random(30)
    factory.host.nics[0].troubles.retry_s = 0.01
    good = bytes([1]) + bytes(10) + b"\xff\xff\x7f\0\0\1" + b"\0\0" + b"\0\4" + b"\4\1" + bytes(8)
    async with serving(factory) as server:
        for turn in range(60):
            token = bytearray(good if turn % 2 else rng.randbytes(rng.randrange(64)))
            for _ in range(rng.randrange(3)):
                if token:
                    token[rng.randrange(len(token))] = rng.randrange(256)
            async with connected(factory, server.address, region_bytes=0) as client:
                try:
                    await client.connection.request(Connect("verbs", bytes(token)), soon())
                    await client.connection.request(Ping(), soon())
                    await client.connection.request(Register(1, MemoryKind.HOST, 4096, rng.randbytes(12)), soon())
                except MemkvError:
                    pass
        await wait_until(lambda: not server.handler.peers, "all sessions have ended")
        assert server.handler.counts["internal_error"] == 0
    assert factory.host.provider.num_live() == 0
    factory.host.fabric.close()
