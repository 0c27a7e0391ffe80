"""A whole server over real loopback connections: traffic, faults, and orderly ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from memkv_vllm.config import dev_server_config
from memkv_vllm.errors import ConnectError, ConnectionLost, EnvironmentFault, LocalProtocolError, MemkvError, StoreError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import digest
from memkv_vllm.protocol.messages import Admin, Bye, Delete, Stat
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.faults import BitFlip, Delay, Drop, LateWrite, Operation
from memkv_vllm.transports.loopback import LoopbackClientTransport, LoopbackServerTransport
from memkv_vllm.types import Status
from tests.support.site import NAMESPACE, make_key, site, soon, start, value

pytestmark = pytest.mark.anyio

KIB = 1 << 10
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def slices_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of these tests are small: without this, most batches would be one slice."""
    monkeypatch.setattr("memkv_vllm.store.bulkqueue.SMALL_SLICE_BYTES", 0)


# Traffic


async def test_values_travel_between_two_clients() -> None:
    async with site() as here:
        writer, reader = await here.connect(), await here.connect()
        assert await writer.put({block: value(block) for block in range(20)}) == [Status.OK] * 20
        assert await reader.exists(0, 19, 20) == [True, True, False]
        results = await reader.get(range(20))
        assert [result.status for result in results] == [Status.OK] * 20
        for block in range(20):
            assert reader.slot(block) == value(block)
            assert results[block].checksum == digest(value(block))
        assert (await writer.ask(Stat()))["table"]["complete"] == 20


async def test_a_full_store_keeps_accepting() -> None:
    async with site(slots=8) as here:
        client = await here.connect()
        for block in range(40):
            assert await client.put({block: value(block)}) == [Status.OK]
        assert await client.exists(*range(40)) == [False] * 32 + [True] * 8
        assert here.state("table")["counters"]["evictions"] == 32


async def test_two_writers_of_one_key() -> None:
    async with site() as here:
        first, second = await here.connect(), await here.connect()
        here.faults.add(Operation.PULL, Delay(0.2), times=1)
        statuses: list[Any] = []
        async with anyio.create_task_group() as tasks:
            await start(tasks, first.put({1: value(1)}), statuses)
            await here.until(lambda: here.state("table")["reserved"] == 1)
            assert await second.put({1: value(1)}) == [Status.PENDING]
            assert await second.exists(1) == [False]
        assert statuses == [[Status.OK]]
        assert await second.exists(1) == [True]


async def test_a_value_is_not_evicted_while_it_is_read() -> None:
    async with site(slots=4) as here:
        reader, writer = await here.connect(), await here.connect()
        await writer.put({0: value(0)})
        here.faults.add(Operation.PUSH, Delay(0.2), times=1)
        results: list[Any] = []
        async with anyio.create_task_group() as tasks:
            await start(tasks, reader.get([0]), results)
            await here.until(lambda: here.state("table")["pinned"] == 1)
            for block in range(1, 12):
                assert await writer.put({block: value(block)}) == [Status.OK]
        assert results[0][0].status is Status.OK
        assert reader.slot(0) == value(0)


async def test_delete_during_a_get() -> None:
    async with site() as here:
        reader, other = await here.connect(), await here.connect()
        await other.put({1: value(1)})
        here.faults.add(Operation.PUSH, Delay(0.2), times=1)
        results: list[Any] = []
        async with anyio.create_task_group() as tasks:
            await start(tasks, reader.get([1]), results)
            await here.until(lambda: here.state("table")["pinned"] == 1)
            assert await other.ask(Delete([make_key(1)])) == [Status.OK]
            assert await other.exists(1) == [False]
            assert await other.put({1: value(2)}) == [Status.OK]
        assert (results[0][0].status, reader.slot(0)) == (Status.OK, value(1))
        assert here.state("table")["entries"] == 1


async def test_reset_during_traffic() -> None:
    """P022: after its answer no old value is served, whatever was on its way."""
    async with site() as here:
        writer, reader, admin = await here.connect(), await here.connect(), await here.connect()
        stop = False
        served: list[tuple[float, int]] = []

        async def read() -> None:
            while not stop:
                began = time.monotonic()
                results = await reader.get(range(8))
                served.extend((began, result.generation) for result in results if result.status is Status.OK)

        for block in range(8):
            await writer.put({block: value(block)})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await here.until(lambda: len(served) > 50)
            answer = await admin.ask(Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
            answered = time.monotonic()
            await writer.put({3: value(3)})
            await anyio.sleep(0.1)
            stop = True
        assert answer["hidden"] == 8
        old = max(generation for began, generation in served if began < answered)
        assert {generation for began, generation in served if began > answered} <= {old + 1}
        await here.until(lambda: here.state("table")["entries"] == 1)


# Faults


async def test_a_flipped_bit_is_never_visible() -> None:
    async with site() as here:
        client = await here.connect()
        flip = here.faults.add(Operation.PULL, BitFlip(offset=12345, bit=3), nth=2)
        statuses = await client.put({block: value(block) for block in range(3)})
        assert (sorted(statuses), flip.fired) == ([Status.OK, Status.OK, Status.BAD_CHECKSUM], 1)
        bad = statuses.index(Status.BAD_CHECKSUM)
        assert await client.exists(bad) == [False]
        assert here.count("put_bad_checksum") == 1
        assert await client.put({bad: value(bad)}) == [Status.OK]


async def test_a_late_write_never_meets_a_new_owner() -> None:
    """P039: the pull times out and writes later; its extent must not have been handed out by then."""
    async with site(slots=4) as here:
        client = await here.connect()
        late = here.faults.add(Operation.PULL, LateWrite(after_s=0.2), times=1)
        assert await client.put({1: value(1)}) == [Status.TIMEOUT]
        assert late.fired == 1
        other = await here.connect()
        for block in range(2, 6):
            assert await other.put({block: value(block)}) == [Status.OK]
        await anyio.sleep(0.4)
        await other.get(range(2, 6))
        assert [other.slot(number) for number in range(4)] == [value(block) for block in range(2, 6)]
        with pytest.raises(ConnectionLost):
            await client.put({1: value(1)})
        assert here.count("cut_fenced") == 1


async def test_a_client_that_leaves_in_the_middle_of_a_put() -> None:
    async with site() as here:
        client, other = await here.connect(), await here.connect()
        here.faults.add(Operation.PULL, Delay(30), times=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_failing, client.put({1: value(1)}))
            await here.until(lambda: here.state("table")["reserved"] == 1)
            await client.connection.aclose()
        await here.until(lambda: here.state("table")["entries"] == 0)
        assert await other.put({1: value(1)}) == [Status.OK]
        assert here.count("leaked_reservations") == 0


CHILD = """
import sys, time, anyio
from tests.support.site import *

async def main():
    key, port = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
    connection = await LoopbackClientTransport().connect("127.0.0.1", port, Credentials(key), PeerKind.ENGINE, soon())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        memory = HostMemory.create("child", SLOTS * VALUE)
        await connection.register(Region(0, MemoryKind.HOST, memory.length, memory), soon())
        await Client(connection, memory).put({block: value(block) for block in range(20)}, 60000)

anyio.run(main)
"""


async def test_a_client_that_is_killed_in_the_middle_of_a_put() -> None:
    async with site() as here:
        other = await here.connect()
        here.faults.add(Operation.PULL, Delay(60), nth=9)
        port = here.server.addresses[0][1]
        command = [sys.executable, "-c", CHILD, here.key.hex(), str(port)]
        child = await anyio.to_thread.run_sync(lambda: subprocess.Popen(command, cwd=ROOT))
        try:
            await here.until(lambda: here.count("sessions") == 2 and 0 < here.state("table")["reserved"] <= 12)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(child.wait)
        await here.until(lambda: here.state("table")["reserved"] == 0)
        found = await other.exists(*range(20))
        assert 0 < found.count(True) < 20
        results = await other.get(range(20))
        assert [result.status is Status.OK for result in results] == found
        for block in range(20):
            assert not found[block] or other.slot(block) == value(block)
        statuses = await other.put({block: value(block) for block in range(20)})
        assert statuses == [Status.EXISTS if there else Status.OK for there in found]


async def test_a_push_that_never_ends_is_fenced_and_the_client_too() -> None:
    async with site() as here:
        client = await here.connect()
        await client.put({1: value(1)})
        here.faults.add(Operation.PUSH, Drop(), times=1)
        assert (await client.get([1], timeout_ms=100))[0].status is Status.TIMEOUT
        assert here.state("table")["pinned"] == 0
        await client.connection.fence(soon())
        again = await here.connect()
        assert (await again.get([1]))[0].status is Status.OK


async def _failing(call: Awaitable[Any]) -> None:
    with pytest.raises(MemkvError):
        await call


class Unknown:
    """A request of a type that no version knows."""

    TYPE: ClassVar[int] = 99

    def pack(self) -> bytes:
        return b""


async def test_an_unknown_message_cuts_its_sender_and_nobody_else() -> None:
    async with site() as here:
        bad, good = await here.connect(), await here.connect()
        with pytest.raises(ConnectionLost):
            await bad.ask(Unknown())
        await here.until(lambda: here.state("server")["sessions"] == 1)
        assert here.count("cut_type") == 1
        assert await good.put({1: value(1)}) == [Status.OK]


async def test_an_oversize_batch_is_refused_on_both_sides() -> None:
    async with site(max_batch_keys=4) as here:
        client = await here.connect()
        with pytest.raises(LocalProtocolError, match="takes 4"):
            await client.put({block: value(block) for block in range(5)})
        limits = client.connection.established.server.limits._replace(max_batch_keys=5)
        channel = client.connection._channel
        established = channel.established
        object.__setattr__(established, "server", _with_limits(established.server, limits))
        with pytest.raises(StoreError, match="4"):
            await client.put({block: value(block) for block in range(5)})
        assert here.state("table")["counters"]["reservations"] == 0
        assert await client.put({block: value(block) for block in range(4)}) == [Status.OK] * 4


def _with_limits(server: Any, limits: Any) -> Any:
    return type(server)(server.server_id, server.boot_id, limits)


async def test_sessions_are_bounded() -> None:
    async with site(max_sessions=2) as here:
        first = await here.connect()
        await here.connect()
        with pytest.raises(MemkvError, match="max_sessions = 2"):
            await here.connect()
        await first.ask(Bye())
        await here.until(lambda: here.state("server")["sessions"] == 1)
        await here.connect()


# Ends


async def test_a_server_that_ends_lets_requests_in_flight_finish() -> None:
    statuses: list[Any] = []
    async with anyio.create_task_group() as tasks:
        async with site() as here:
            client = await here.connect()
            here.faults.add(Operation.PULL, Delay(0.2), times=1)
            await start(tasks, client.put({1: value(1)}), statuses)
            await here.until(lambda: here.state("table")["reserved"] == 1)
    assert statuses == [[Status.OK]]


async def test_a_server_ends_in_bounded_time_whatever_hangs() -> None:
    async with anyio.create_task_group() as tasks:
        async with site(drain_timeout_s=0.1) as here:
            client = await here.connect()
            here.faults.add(Operation.PULL, Drop())
            tasks.start_soon(_failing, client.put({1: value(1)}, timeout_ms=30_000))
            await here.until(lambda: here.state("table")["reserved"] == 1)
            began = time.monotonic()
        # The pull would hang for 30 s.
        assert time.monotonic() - began < 15
    assert here.count("drain_timeout") == 1
    assert here.state("table")["entries"] == 0
    assert here.state("server")["connections"] == 0
    assert here.server._memory is not None and here.server._memory.closed


async def test_serve_runs_until_cancelled_and_the_port_is_free_again() -> None:
    key = os.urandom(32)
    config = dev_server_config(key, address="127.0.0.1:0", max_size="4 MiB")
    transport = LoopbackServerTransport(0)
    server = StoreServer(config, [transport])
    async with anyio.create_task_group() as tasks:
        addresses = await tasks.start(server.serve)
        assert addresses == [("127.0.0.1", transport.port)]
        tasks.cancel_scope.cancel()
    with pytest.raises(ConnectError):
        await LoopbackClientTransport().connect("127.0.0.1", transport.port, Credentials(key), PeerKind.TOOL, soon())
    with pytest.raises(LocalProtocolError, match="once"):
        await server.__aenter__()


async def test_a_transport_that_cannot_start_leaves_nothing_behind() -> None:
    async with site() as here:
        port = here.server.addresses[0][1]
        config = dev_server_config(os.urandom(32), address="127.0.0.1:0", max_size="4 MiB")
        second = StoreServer(config, [LoopbackServerTransport(0), LoopbackServerTransport(port)])
        with pytest.raises(EnvironmentFault, match="taken by another server"):
            async with second:
                pass
        assert second._memory is not None and second._memory.closed


async def test_descriptors_and_threads_are_constant_over_connections() -> None:
    """P067: connecting and leaving many times leaves nothing behind."""
    async with site() as here:

        async def once(block: int) -> None:
            client = await here.connect()
            await client.put({block: value(block)})
            if block % 2:
                await client.ask(Bye())
            await client.connection.aclose()
            await client.connection.fence(soon())
            here.memories.pop().close()

        await once(0)
        await here.until(lambda: here.state("server")["connections"] == 0)
        before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        for block in range(1, 50):
            await once(block)
        await here.until(lambda: here.state("server")["connections"] == 0)
        await here.until(lambda: len(os.listdir("/proc/self/fd")) <= before[0])
        assert len(os.listdir("/proc/self/task")) <= before[1] + 2


async def test_the_errors_of_the_body_come_out_as_they_are() -> None:
    config = dev_server_config(os.urandom(32), address="127.0.0.1:0", max_size="4 MiB")
    with pytest.raises(KeyError, match="mine"):
        async with StoreServer(config, [LoopbackServerTransport(0)]):
            raise KeyError("mine")


async def test_a_transport_that_fails_ends_the_server_with_its_error() -> None:
    class Failing(LoopbackServerTransport):
        async def serve(self, handler: Any, memory: Any, *, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
            task_status.started(("nowhere", 0))
            raise EnvironmentFault("the NIC is gone")

    config = dev_server_config(os.urandom(32), address="127.0.0.1:0", max_size="4 MiB")
    server = StoreServer(config, [LoopbackServerTransport(0), Failing(0)])
    with pytest.raises(EnvironmentFault, match="NIC"):
        async with server:
            await anyio.sleep(5)
    assert server._memory is not None and server._memory.closed
