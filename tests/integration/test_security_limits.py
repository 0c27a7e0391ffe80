"""What a stranger and a holder of a key can make the server spend: every limit is met, and counted (P091, P092)."""

from __future__ import annotations

import resource
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import ConnectError, ConnectionLost, RemoteProtocolError, StoreError
from memkv_vllm.protocol.frame import HEADER_BYTES, MAX_HANDSHAKE_BODY, Flags, Header, MessageType, pack_header
from memkv_vllm.protocol.messages import Admin, Delete, Manifest, Ping, Put, PutItem
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.streams import SocketStream, send_all
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.fuzzing import held_fds
from tests.support.guarded import LAYOUT, VALUE, Guarded, guarded, make_key
from tests.support.harness import FACTORIES, wait_until
from tests.support.peers import client_session, raw_stream, shake_hands, until_closed
from tests.support.scripted import soon

pytestmark = pytest.mark.anyio

OURS = b"A" * 32


@pytest.fixture(params=["loopback", "tcp"])
def over(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def strangers(over: str, site: Guarded, count: int) -> Iterator[list[SocketStream]]:
    """So many connections that say nothing by themselves."""
    streams = [FACTORIES[over].raw_connect(site.address) for _ in range(count)]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.close()


def longest_prefix() -> bytes:
    """Almost a whole handshake frame, as long as one may be before anybody is authenticated."""
    header = Header(1, MessageType.HELLO, Flags.NONE, 0, MAX_HANDSHAKE_BODY, 0)
    return pack_header(header) + bytes(MAX_HANDSHAKE_BODY - 1)


# ------------------------------------------------------------------------------------------------ strangers


async def test_strangers_that_stop_in_the_middle_cost_little_memory(over: str) -> None:
    """All places of strangers taken by the longest legal prefix: well under 64 KiB each, and freed with them."""
    count = 64
    async with guarded(limits={"max_handshakes": count, "handshake_timeout_s": 60}, over=over) as site:
        # Once before measuring: what is made lazily is no stranger's.
        with strangers(over, site, 2) as streams:
            for stream in streams:
                stream.send_nowait(longest_prefix())
            await wait_until(lambda: site.server.statistics()["server"]["connections"] == 2, "they are admitted")
        await site.until_idle()
        tracemalloc.start()
        try:
            with strangers(over, site, count) as streams:
                before, _ = tracemalloc.get_traced_memory()
                for stream in streams:
                    stream.send_nowait(longest_prefix())
                await wait_until(
                    lambda: site.server.statistics()["server"]["connections"] == count, "they are admitted"
                )
                await anyio.sleep(0.05)
                held, _ = tracemalloc.get_traced_memory()
            await site.until_idle()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (held - before) / count < 64 * 1024, (held - before) / count
        assert after - before < (held - before) / 2


async def test_a_flood_of_data_from_a_stranger_is_not_kept(over: str) -> None:
    """A header that announces more than a stranger may say ends it at once, whatever stands behind."""
    async with guarded(over=over) as site:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        header = pack_header(Header(1, MessageType.HELLO, Flags.NONE, 0, 0xFFFF_FFFF, 0))
        for number in range(8):
            async with raw_stream(FACTORIES[over], site.address) as stream:
                try:
                    await send_all(stream, header + bytes(8 << 20))
                except ConnectionLost:
                    pass
                await until_closed(stream)
            await wait_until(lambda: site.count("cut_length") == number + 1, "it is cut")  # noqa: B023
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown_kib < 32 * 1024, f"{grown_kib} KiB"


async def test_one_stranger_holds_its_places_no_longer_than_the_timeout(over: str) -> None:
    """They are cut and counted, and everybody gets in again."""
    limits = {"max_handshakes": 8, "handshake_timeout_s": 0.3}
    async with guarded(limits=limits, over=over) as site:
        healthy = await site.connect("default")
        with strangers(over, site, 8):
            await wait_until(lambda: site.count("handshake_timeout") == 8, "they are cut")
            await healthy.ask(Ping())  # a session is no handshake
            await (await site.connect("default")).ask(Ping())


async def test_a_flood_from_one_host_does_not_keep_others_out() -> None:
    """All places are taken from one address, and would be for a minute: clients of another one get in at once."""
    limits = {"max_handshakes": 8, "handshake_timeout_s": 60}
    async with guarded(limits=limits, over="tcp") as site:
        sockets = [socket.create_connection(site.address, source_address=("127.0.0.2", 0)) for _ in range(8)]
        try:
            await wait_until(lambda: site.server.statistics()["server"]["connections"] == 8, "all places are taken")
            for _ in range(3):
                await (await site.connect("default")).ask(Ping())
            assert site.count("handshake_displaced") >= 1
            assert site.count("refused_busy") == 0
            # The flood goes on, and still competes with itself only.
            sockets += [socket.create_connection(site.address, source_address=("127.0.0.2", 0)) for _ in range(20)]
            await wait_until(lambda: site.count("refused_busy") > 0, "it is refused")
            await (await site.connect("default")).ask(Ping())
        finally:
            for sock in sockets:
                sock.close()


async def test_a_flood_of_connections_is_refused_one_by_one(over: str) -> None:
    async with guarded(limits={"max_handshakes": 4, "handshake_timeout_s": 60}, over=over) as site:
        healthy = await site.connect("default")
        with strangers(over, site, 4):
            await wait_until(lambda: site.server.statistics()["server"]["connections"] == 5, "all places are taken")
            for _ in range(100):
                async with raw_stream(FACTORIES[over], site.address) as stream:
                    refusal = await until_closed(stream)
                    assert len(refusal) < HEADER_BYTES + MAX_HANDSHAKE_BODY
            with pytest.raises(ConnectError, match="busy"):
                await site.connect("default")
            assert site.count("refused_busy") == site.count("refused_handshakes") == 101
            assert site.server.statistics()["server"]["connections"] == 5
            await healthy.ask(Ping())
        await site.until_idle(sessions=1)


async def test_a_stranger_that_speaks_slowly_gains_no_time(over: str) -> None:
    """The deadline counts from accept, not from the last byte."""
    async with guarded(limits={"handshake_timeout_s": 0.3}, over=over) as site:
        async with raw_stream(FACTORIES[over], site.address) as stream, anyio.create_task_group() as tasks:
            session = client_session(site.keys["default"])
            session.start()
            data = session.data_to_send() + longest_prefix()

            async def trickle() -> None:
                try:
                    for byte in data * 10:
                        await send_all(stream, bytes([byte]))
                        await anyio.sleep(0.01)
                except ConnectionLost:
                    pass

            tasks.start_soon(trickle)
            await until_closed(stream)
            tasks.cancel_scope.cancel()
        await site.until_idle()
        assert site.count("handshake_timeout") == 1


# ------------------------------------------------------------------------------------------------ holders of a key


async def test_a_frame_that_is_too_long_is_cut_before_it_is_kept(over: str) -> None:
    async with guarded(limits={"max_frame_bytes": "64KiB", "max_manifest_bytes": "32KiB"}, over=over) as site:
        async with raw_stream(FACTORIES[over], site.address) as stream:
            session = client_session(site.keys["default"])
            await shake_hands(stream, session)
            await send_all(stream, pack_header(Header(1, MessageType.PUT, Flags.NONE, 1, 65537, 0)))
            await until_closed(stream)
        await site.until_idle()
        assert site.count("cut_length") == 1


async def ask_raw(over: str, site: Guarded, kind: MessageType, body: bytes) -> str:
    """One request by hand, past what the client itself would refuse to send; the server's error."""
    async with raw_stream(FACTORIES[over], site.address) as stream:
        session = client_session(site.keys["default"])
        await shake_hands(stream, session)
        session.send_request(kind, body)
        await send_all(stream, session.data_to_send())
        events: list[Any] = []
        while not events:
            events += session.receive_data(await stream.receive())
        return str(events[0].error and events[0].error.text)


async def test_limits_of_requests_are_met_and_counted(over: str) -> None:
    limits = {
        "max_batch_keys": 16,
        "max_value_bytes": 2 * VALUE,
        "max_regions_per_session": 2,
        "max_region_bytes": 32 * VALUE,
        "max_manifests": 1,
        "max_manifest_bytes": 100,
    }
    async with guarded(limits=limits, over=over) as site:
        keys = [make_key(OURS, number) for number in range(17)]
        assert "at most 16 keys" in await ask_raw(over, site, MessageType.DELETE, Delete(keys).pack())
        assert site.count("refused_batch") == 1

        client = await site.connect("default")
        item = PutItem(keys[0], 0, LAYOUT, Extent(0, 0, 2 * VALUE + 1))
        assert await client.ask(Put([item], 0, 1000)) == [Status.TOO_LARGE]
        assert site.count("put_too_large") == 1

        refused = site.count("requests_refused")
        for text, reason in ((b"x" * 101, "max_manifest_bytes"), (b"{}", ""), (b"{}", "max_manifests")):
            request = Manifest(b"F" * 32, bytes([len(text), len(reason)]) * 16, text)
            if reason:
                with pytest.raises(StoreError, match=reason):
                    await client.ask(request)
            else:
                await client.ask(request)
        assert site.count("requests_refused") == refused + 2

        with HostMemory.create("test-more", VALUE) as small, HostMemory.create("test-large", 32 * VALUE) as large:
            with pytest.raises(StoreError, match="may register"):
                await client.connection.register(Region(1, MemoryKind.HOST, large.length, large), soon())
            await client.connection.register(Region(2, MemoryKind.HOST, small.length, small), soon())
            with pytest.raises(StoreError, match="at most 2 regions"):
                await client.connection.register(Region(3, MemoryKind.HOST, small.length, small), soon())
            assert site.count("requests_refused") == refused + 4
        await client.ask(Ping())


async def test_sessions_are_limited_and_a_place_is_free_again_with_its_session(over: str) -> None:
    async with guarded(limits={"max_sessions": 2}, over=over) as site:
        first, second = [await site.connect("default") for _ in range(2)]
        with pytest.raises(ConnectError, match="max_sessions = 2"):
            await site.connect("default")
        assert site.count("refused_sessions") == site.count("refused_session") == 1
        await first.connection.aclose()
        await site.until_idle(sessions=1)
        await (await site.connect("default")).ask(Ping())
        await second.ask(Ping())


async def test_a_command_that_is_too_long_is_cut_before_it_is_parsed(over: str) -> None:
    async with guarded(over=over) as site:
        client = await site.connect("default")
        with pytest.raises((ConnectionLost, RemoteProtocolError)):
            await client.ask(Admin({"command": "x" * 70_000}))
        await site.until_idle()
        assert site.count("cut_length") == 1


async def test_the_file_descriptors_of_strangers_are_given_back(over: str) -> None:
    async with guarded(limits={"handshake_timeout_s": 0.1}, over=over) as site:
        held = []
        for number in range(3):
            with strangers(over, site, 20):
                await wait_until(
                    lambda: site.count("handshake_timeout") == 20 * (number + 1),  # noqa: B023
                    "all are cut",
                )
            await site.until_idle()
            held.append(held_fds())
        assert held[2] <= held[1]
