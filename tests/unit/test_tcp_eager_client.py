"""Eager puts at the client: when its memory is its own again, and with which servers and after what it makes none."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

import anyio
import pytest

from memkv_vllm.errors import ConnectionLost, LocalProtocolError, MemkvError, NotSent, RequestTimeout, StoreError
from memkv_vllm.protocol import codec
from memkv_vllm.protocol.connect import Attach
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Delete, Put
from memkv_vllm.protocol.session import Session
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.faults import Action, Delay, Die, Drop, Fail, FaultPlan, Operation
from memkv_vllm.transports.streams import ControlStream
from memkv_vllm.transports.tcp.attach import Attachable
from memkv_vllm.transports.tcp.commands import FIRST_BYTES
from memkv_vllm.transports.tcp.eager import MAX_EAGER_BYTES
from memkv_vllm.transports.tcp.eagerlink import HOLD_OFF, EagerLink
from memkv_vllm.transports.tcp.mover import EagerConnection, Traffic
from memkv_vllm.types import Extent, MemoryKind, SessionId, Status
from tests.support.eager import (
    FACTORY,
    Running,
    client_of,
    count,
    item,
    laid_out,
    reserved,
    store,
    store_and_client,
    until_quiet,
    watched_traffic,
)
from tests.support.harness import MIB, connected, serving, wait_until
from tests.support.harness import Running as Scripted
from tests.support.resources import held, num_mappings
from tests.support.scripted import ScriptedHandler, soon
from tests.support.store import make_key
from tests.support.tcp_peer import DataPeer

pytestmark = pytest.mark.anyio

UNWANTED = 0xFE


@pytest.fixture(autouse=True)
def traffic() -> Iterator[list[Traffic]]:
    """What is under way on each server of the test; see ``watched_traffic``."""
    with watched_traffic() as made:
        yield made


def eager_end(server: Scripted) -> socket.socket:
    """A second handle of the server's end of the only eager connection: it outlives the session."""
    (peer,) = server.handler.peers.values()
    (found,) = [one for one in peer.bulk._connections if isinstance(one, EagerConnection)]  # type: ignore[attr-defined]
    return found._sock.dup()


async def rest_of(sock: socket.socket) -> bytes:
    """Whatever still comes."""
    return await DataPeer(sock, None, None).receive(1 << 25)  # type: ignore[arg-type]


def hold_back_bytes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Bytes of eager puts are sent once the second event is set; the first says that they are due."""
    sending, may_send = threading.Event(), threading.Event()
    original = EagerLink._send

    def slow(link: EagerLink, buffers: list[memoryview]) -> None:
        sending.set()
        may_send.wait(10)
        original(link, buffers)

    monkeypatch.setattr(EagerLink, "_send", slow)
    return sending, may_send


def answers_at_once(statuses: bytes) -> ScriptedHandler:
    """A server that answers every PUT and never looks at its bytes."""
    handler = ScriptedHandler()
    handler.at_once = lambda type, _: statuses if type is MessageType.PUT else None
    return handler


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memkv-data"]


async def test_a_server_that_answers_and_does_not_take_the_bytes_is_waited_for_to_the_deadline() -> None:
    """Until then, and until the fence, the memory is read; after the fence it is not."""
    async with serving(FACTORY, handler=answers_at_once(bytes([Status.OK]))) as server:
        async with connected(FACTORY, server.address) as client:
            with eager_end(server) as end:
                client.memory.array[:] = 0xAA
                with pytest.raises(RequestTimeout, match="did not take the bytes of a PUT"):
                    await client.put(0, Extent(1, 0, MAX_EAGER_BYTES), deadline_s=0.2)
                assert server.handler.counts["PUT"] == 0, "it was answered at once"
                assert await client.put(0, Extent(1, 0, 1000)) == [Status.OK], "the connection goes on"
                await client.connection.fence(soon())
                assert not data_threads()
                client.memory.array[:] = 0x55
                came = (await rest_of(end))[FIRST_BYTES:]
                assert 0 < len(came) < MAX_EAGER_BYTES
                assert set(came) == {0xAA}


async def test_a_put_returns_only_when_its_memory_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """P039: also where the server has answered before; its caller puts other values there at once."""
    sending, may_send = hold_back_bytes(monkeypatch)
    async with serving(FACTORY, handler=answers_at_once(bytes([Status.EXISTS]))) as server:
        async with connected(FACTORY, server.address) as client:
            with eager_end(server) as end:
                client.memory.array[:] = 0xAA
                done: list[list[Status]] = []

                async def put() -> None:
                    done.append(await client.put(0, Extent(1, 0, 100_000)))
                    client.memory.array[:] = 0x55

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(put)
                    channel = client.connection._channel  # type: ignore[attr-defined]
                    await wait_until(lambda: sending.is_set() and not channel.num_pending, "the answer is there")
                    await anyio.sleep(0.05)
                    assert not done
                    may_send.set()
                assert done == [[Status.EXISTS]]
                await client.connection.fence(soon())
                came = (await rest_of(end))[FIRST_BYTES:]
                assert (len(came), set(came)) == (100_000, {0xAA})


async def test_a_refused_put_returns_only_when_its_memory_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sending, may_send = hold_back_bytes(monkeypatch)

    def refuse(type: MessageType, _: memoryview) -> bytes | None:
        if type is MessageType.PUT:
            raise StoreError("not today")
        return None

    handler = ScriptedHandler()
    handler.at_once = refuse
    async with serving(FACTORY, handler=handler) as server, connected(FACTORY, server.address) as client:
        with eager_end(server) as end:
            client.memory.array[:] = 0xAA
            done: list[str] = []

            async def put() -> None:
                try:
                    await client.put(0, Extent(1, 0, 100_000))
                except StoreError as error:
                    done.append(str(error))
                client.memory.array[:] = 0x55

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                channel = client.connection._channel  # type: ignore[attr-defined]
                await wait_until(lambda: sending.is_set() and not channel.num_pending, "the answer is there")
                await anyio.sleep(0.05)
                assert not done
                may_send.set()
            assert "not today" in done[0]
            await client.connection.fence(soon())
            came = (await rest_of(end))[FIRST_BYTES:]
            assert set(came) <= {0xAA}


async def test_a_server_without_room_for_the_eager_connection_is_used_without() -> None:
    async with store_and_client(max_connections_per_session=4) as (running, client):
        assert client.connection.num_data_connections == 4  # type: ignore[attr-defined]
        assert count(running, "refused_attach") == 1
        await client.check_next(running, 1, eager=False)
        assert count(running, "eager_puts") == 0


async def test_after_a_put_that_was_refused_as_a_whole_none_is_eager(traffic: list[Traffic]) -> None:
    """Nobody has taken its bytes off, and nobody will."""
    plan = FaultPlan()
    async with store_and_client(faults=plan) as (running, client):
        plan.add(Operation.REQUEST, Fail(), type=MessageType.PUT, times=1)
        with pytest.raises(StoreError, match="injected"):
            await client.put(0, laid_out([70_000]))
        assert count(running, "eager_puts") == 0, "the store has not seen it"
        live = client.connection
        await wait_until(lambda: live.num_data_connections == 4, "its thread has ended")  # type: ignore[attr-defined]
        await client.check_next(running, 10, eager=False)
        await until_quiet(traffic)
        async with client_of(running) as another:
            await another.check_next(running, 100)


async def test_after_a_put_in_vain_some_are_not_eager() -> None:
    """Where values are there already, all bytes would travel for nothing."""
    async with store_and_client() as (running, client):
        assert await client.put(1, laid_out([4096])) == [Status.OK]
        assert await client.put(1, laid_out([4096, 4096])) == [Status.EXISTS, Status.OK]
        assert await client.put(3, laid_out([4096])) == [Status.OK]
        assert count(running, "eager_puts") == 3, "not all of it was in vain"
        for turn in range(2):
            assert await client.put(1, laid_out([4096])) == [Status.EXISTS]
            for block in range(HOLD_OFF):
                assert await client.put(100 + HOLD_OFF * turn + block, laid_out([10])) == [Status.OK]
            assert count(running, "eager_puts") == 4 + turn
        await client.check_next(running, 500)


async def test_after_a_put_that_was_not_sent_the_next_one_is_eager() -> None:
    async with store_and_client(max_batch_keys=100) as (running, client):
        too_late = Put([item(1, Extent(1, 0, 4096))], 0, 20_000)
        with pytest.raises(NotSent):
            await client.connection.request(too_late, soon(-1))
        await client.check_next(running, 10)
        with pytest.raises(LocalProtocolError, match="101 keys"):
            await client.put(200, laid_out([10] * 101))
        await client.check_next(running, 400)


@pytest.mark.parametrize("end", ["cancelled", "timed out"])
async def test_a_put_that_is_given_up_does_not_break_the_connection(end: str, traffic: list[Traffic]) -> None:
    """The server still takes its bytes, for its own value; the client's next puts are not eager, and right."""
    plan = FaultPlan()
    async with store_and_client(faults=plan) as (running, client):
        plan.add(Operation.PULL, Delay(0.3), times=1)
        client.memory.array[: 2 * MIB] = UNWANTED
        put = Put([item(1, Extent(1, 0, 2 * MIB))], 0, 20_000)
        if end == "cancelled":
            with anyio.move_on_after(0.1) as scope:
                await client.connection.request(put, soon())
            assert scope.cancelled_caught
        else:
            with pytest.raises(RequestTimeout):
                await client.connection.request(put, soon(0.1))
        await client.check_next(running, 10, eager=False)
        await wait_until(lambda: count(running, "put_ok") == 7, "it ends by itself")
        await until_quiet(traffic)
        await client.check_next(running, 40, eager=False)
        assert count(running, "eager_puts") == 1


async def test_an_eager_connection_that_breaks_while_nobody_looks_is_not_used_any_more() -> None:
    """A middlebox may end it alone. No put is lost with it, nor the session."""
    async with store_and_client() as (running, client):
        await client.check_next(running, 10)
        (live,) = running.transport._attachable._live.values()
        (eager,) = [one for one in live[1]._connections if isinstance(one, EagerConnection)]
        eager._sock.shutdown(socket.SHUT_RDWR)
        assert await client.put(1, laid_out([4096])) == [Status.OK]
        await client.check_next(running, 40, eager=False)
        assert client.connection.alive


async def test_an_eager_connection_that_breaks_under_a_put_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is not seen before. No value is taken for stored."""
    async with store_and_client() as (running, client):
        await client.check_next(running, 10)
        (live,) = running.transport._attachable._live.values()
        (eager,) = [one for one in live[1]._connections if isinstance(one, EagerConnection)]
        link = client.connection._links.eager  # type: ignore[attr-defined]
        monkeypatch.setattr(link, "_hung_up", select.poll())
        eager._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionLost):
            await client.put(1, laid_out([4096]))
        assert not client.connection.alive
        await wait_until(lambda: not reserved(running), "the session has ended")


async def test_a_server_that_is_older_is_asked_for_no_eager_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes an ATTACH with one more byte for a broken request, and refuses it."""

    def unpack(body: memoryview) -> Attach:
        codec.expect_length(body, 16)
        return Attach(SessionId(bytes(body)))

    monkeypatch.setattr(Attach, "unpack", unpack)
    async with store_and_client() as (running, client):
        assert client.connection.num_data_connections == 4  # type: ignore[attr-defined]
        assert count(running, "cut_length") == 1
        await client.check_next(running, 10, eager=False)
        assert count(running, "eager_puts") == 0


async def test_an_eager_connection_that_is_swallowed_does_not_cost_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A middlebox with a limit of connections per host accepts it and says nothing more."""
    taken, take_over = [0], Attachable.take_over

    async def swallow_the_fifth(self: Attachable, session: Session, stream: ControlStream) -> None:
        taken[0] += 1
        if taken[0] == 5:
            await anyio.sleep(10)
        await take_over(self, session, stream)

    monkeypatch.setattr(Attachable, "take_over", swallow_the_fifth)
    async with store() as running, connected(FACTORY, running.address, region_bytes=0) as client:
        await client.connection.register(Region(1, MemoryKind.HOST, client.memory.length, client.memory), soon(1.5))
        assert taken == [5]
        assert client.connection.num_data_connections == 4  # type: ignore[attr-defined]
        put = Put([item(1, Extent(1, 0, 100))], 0, 20_000)
        assert await client.connection.request(put, soon()) == [Status.OK]
        assert count(running, "eager_puts") == 0


@pytest.mark.parametrize("end", ["arrived", "not sent", "refused", "timed out and fenced"])
async def test_a_put_that_is_over_holds_no_memory(end: str) -> None:
    """Neither the connection, which lives on, nor the error, which its caller may keep."""
    plan = FaultPlan()
    async with store_and_client(faults=plan) as (running, client):
        if "fenced" in end:
            plan.add(Operation.REQUEST, Delay(5), type=MessageType.PUT)
        put = Put([item(1, Extent(1, 0, MAX_EAGER_BYTES))], 77 if end == "refused" else 0, 20_000)
        kept: MemkvError | None = None
        try:
            await client.connection.request(put, soon({"not sent": -1, "timed out and fenced": 0.2}.get(end, 10)))
        except MemkvError as error:
            kept = error
        if "fenced" in end:
            await client.connection.fence(soon())
        client.memory.close()
        assert num_mappings("staging") == 0
        assert type(kept) is {"arrived": type(None), "not sent": NotSent, "refused": StoreError}.get(
            end, RequestTimeout
        )
        assert count(running, "eager_puts") == (1 if end in ("arrived", "refused") else 0)


async def test_nothing_is_left_of_eager_puts_however_they_end(traffic: list[Traffic]) -> None:
    """P067: no descriptor, mapping or thread, on either side."""
    plan = FaultPlan()

    async def end_in(running: Running, end: str) -> None:
        async with client_of(running) as client:
            put = Put([item(1, Extent(1, 0, 2 * MIB))], 77 if end == "refused" else 0, 100)
            actions: dict[str, Action] = {"cancelled": Delay(0.05), "timed out": Drop(), "died": Die()}
            rule = plan.add(Operation.PULL, actions[end], times=1) if end in actions else None
            with anyio.move_on_after(0.02 if end == "cancelled" else 5), contextlib.suppress(MemkvError):
                await client.connection.request(put, soon())
            if rule is not None:
                await wait_until(lambda: rule.fired, "the fault has struck")
                plan.remove(rule)
            with contextlib.suppress(MemkvError):
                await client.connection.request(Delete([make_key(1)]), soon())

    async def each_end(running: Running) -> None:
        for end in ("arrived", "refused", "cancelled", "timed out", "died"):
            await end_in(running, end)
        await wait_until(lambda: not running.server.statistics()["server"]["connections"], "all are gone")
        await until_quiet(traffic)

    async with store(faults=plan) as running:
        await each_end(running)
        before = held()
        for _ in range(3):
            await each_end(running)
        assert held() == before
        assert count(running, "eager_puts") == 20
        assert reserved(running) == count(running, "internal_error") == 0
