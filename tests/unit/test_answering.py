"""How the server answers requests: at once or in tasks, in order, bounded, fair, and broken on purpose."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import ConnectionLost, MemkvError, RemoteProtocolError, StoreError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Delete, ErrorCode
from memkv_vllm.protocol.session import Limits, ReplyReceived, Session
from memkv_vllm.transports import answering
from memkv_vllm.transports.answering import MAX_PER_TURN, MAX_REPLY_BYTES, TURN_S, Answering, Channel
from memkv_vllm.transports.faults import BitFlip, ControlFaults, Delay, Fail, FaultPlan, NoReply, Operation
from memkv_vllm.transports.streams import FrameWriter, SocketStream, send_all
from memkv_vllm.types import Role, SessionId
from tests.support.harness import wait_until
from tests.support.scripted import ScriptedHandler
from tests.support.sessions import KEY, LIMITS, Pair

pytestmark = pytest.mark.anyio

PING, STAT, GET, DELETE, BYE = (
    MessageType.PING,
    MessageType.STAT,
    MessageType.GET,
    MessageType.DELETE,
    MessageType.BYE,
)


@pytest.fixture(autouse=True)
def _no_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any turn may be held up; the length of turns is for the one test that is about it."""
    if request.function is not test_slow_answers_end_a_turn_early:
        monkeypatch.setattr(answering, "TURN_S", 3600.0)


class CountingStream(SocketStream):
    """Counts what is given to the socket."""

    sends = 0

    def send_nowait(self, data: Any, fds: Any = ()) -> int:
        self.sends += 1
        return super().send_nowait(data, fds)


class NoData:
    """A data path without regions."""

    async def fence(self) -> None:
        await checkpoint()


@dataclass
class Peer:
    """One session as the driver sees it."""

    bulk: NoData = field(default_factory=NoData)
    label: str = "a test"
    data_path: str = "none"

    def offered(self, offer: object, stream: object) -> None:
        raise AssertionError("no region is offered here")


@dataclass
class Served:
    """One session: its client's end by hand, and what its server did."""

    session: Session
    ours: SocketStream
    theirs: CountingStream
    handler: ScriptedHandler
    faults: FaultPlan
    cuts: list[MemkvError] = field(default_factory=list)
    ended: list[BaseException | None] = field(default_factory=list)

    async def send(self, *types: MessageType, body: bytes = b"") -> list[int]:
        """All in one piece; returns the request ids."""
        ids = [self.session.send_request(type, body) for type in types]
        await send_all(self.ours, self.session.data_to_send())
        return ids

    async def replies(self, count: int) -> list[ReplyReceived]:
        """The next ``count`` replies; the session checks their MACs and sequence numbers."""
        events: list[Any] = []
        with anyio.fail_after(10):
            while len(events) < count:
                data = await self.ours.receive()
                assert data, f"the stream ended after {len(events)} of {count} replies"
                events += self.session.receive_data(data)
        return events

    async def _run(self, answering: Answering) -> None:
        try:
            await answering.run()
            self.ended.append(None)
        except (MemkvError, ConnectionLost) as error:
            self.ended.append(error)

    async def _fence(self, session: SessionId) -> None:
        raise StoreError("nothing to fence")


@asynccontextmanager
async def served(
    handler: ScriptedHandler | None = None, write_timeout_s: float = 5.0, limits: Limits = LIMITS
) -> AsyncIterator[Served]:
    """A session after its handshake, answered until the block ends."""
    a, b = socket.socketpair()
    used = handler or ScriptedHandler(limits=limits)
    theirs = Session(
        Role.SERVER,
        bytes(32),
        identity=used.identity,
        session_id=SessionId(bytes(16)),
        find_key=lambda key_id: KEY,
    )
    pair = Pair(server=theirs).shake_hands()
    it = Served(pair.client, SocketStream(a), CountingStream(b), used, FaultPlan())
    writer = FrameWriter(it.theirs)
    channel = Channel(
        stream=it.theirs,
        writer=writer,
        session=pair.server,
        handler=used,
        faults=ControlFaults(it.faults, lambda: None),
        fence=it._fence,
        cut=it.cuts.append,
        write_timeout_s=write_timeout_s,
        label="a test",
    )
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            tasks.start_soon(it._run, Answering(channel, Peer(), tasks))  # type: ignore[arg-type]
            await checkpoint()
            yield it
            tasks.cancel_scope.cancel()
    finally:
        it.ours.close()
        it.theirs.close()


def at_once(handler: ScriptedHandler, answer: Callable[[MessageType], bytes], *types: MessageType) -> list[MessageType]:
    """Have ``types`` answered at once; returns the list of what was."""
    done: list[MessageType] = []

    def carry_out(type: MessageType, body: memoryview) -> bytes | None:
        if type not in types:
            return None
        done.append(type)
        return answer(type)

    handler.at_once = carry_out
    return done


def noted(order: list[str], name: str) -> bytes:
    """An empty reply that leaves a note."""
    order.append(name)
    return b""


def ids(replies: list[ReplyReceived]) -> list[int]:
    return [reply.request_id for reply in replies]


# -- at once


async def test_what_came_in_one_read_is_answered_in_order_with_one_send() -> None:
    async with served() as it:
        at_once(it.handler, lambda _: b"", PING)
        sent = await it.send(*[PING] * MAX_PER_TURN)
        assert ids(await it.replies(MAX_PER_TURN)) == sent
        assert it.theirs.sends == 1
        assert it.handler.counts["PING"] == 0, "a task was made"


async def test_a_flood_is_answered_in_order_and_in_turns() -> None:
    async with served() as it:
        done = at_once(it.handler, lambda _: b"", PING)
        sent = await it.send(*[PING] * 1000)
        assert ids(await it.replies(1000)) == sent
        assert len(done) == 1000
        assert it.theirs.sends >= 1000 // MAX_PER_TURN


async def test_a_flood_does_not_keep_another_session_waiting() -> None:
    order: list[str] = []
    async with served() as flood, served() as other:
        at_once(flood.handler, lambda _: noted(order, "flood"), PING)
        at_once(other.handler, lambda _: noted(order, "other"), PING)
        for it, count in ((flood, 900), (other, 1)):
            it.ours.send_nowait(b"".join(_frames(it, count)))
        await other.replies(1)
        await flood.replies(900)
    assert order.index("other") <= 2 * MAX_PER_TURN, "it had to wait for more than a turn of the other session"
    assert len(order) == 901


def _frames(it: Served, count: int) -> list[bytes]:
    for _ in range(count):
        it.session.send_request(PING, b"")
    return [it.session.data_to_send()]


async def test_large_replies_end_a_turn_early() -> None:
    size = 100 * 1024
    async with served(limits=LIMITS._replace(max_frame_bytes=size)) as it:
        done = at_once(it.handler, lambda _: bytes(size), PING)
        largest = 0
        send = it.theirs.send_nowait

        def note(data: Any, fds: Any = ()) -> int:
            nonlocal largest
            largest = max(largest, len(data))
            return send(data, fds)

        it.theirs.send_nowait = note  # type: ignore[method-assign]
        await it.send(*[PING] * 20)
        await it.replies(20)
        assert len(done) == 20
        assert size < largest <= MAX_REPLY_BYTES + 2 * size


async def test_slow_answers_end_a_turn_early() -> None:
    async with served() as it:

        def answer(_: MessageType) -> bytes:
            time.sleep(1.2 * TURN_S)
            return b""

        at_once(it.handler, answer, PING)
        await it.send(*[PING] * 5)
        await it.replies(5)
        assert it.theirs.sends == 5


async def test_requests_begin_in_order_even_where_some_need_no_task() -> None:
    begun: list[str] = []
    handler = ScriptedHandler(limits=LIMITS)

    async def note(type: MessageType) -> None:
        begun.append(type.name)
        await checkpoint()
        if type is DELETE:
            raise StoreError("no")

    handler.on_request = note
    async with served(handler) as it:
        at_once(handler, lambda type: noted(begun, type.name), PING)
        await it.send(PING, DELETE, PING, PING)
        replies = await it.replies(4)
        assert begun == ["PING", "DELETE", "PING", "PING"]
        assert sorted(ids(replies)) == [1, 2, 3, 4]


async def test_a_task_that_has_answered_takes_the_next_request() -> None:
    async with served() as it:
        tasks: list[int] = []

        async def note(type: MessageType) -> None:
            tasks.append(anyio.get_current_task().id)
            await checkpoint()

        it.handler.on_request = note
        for _ in range(3):
            await it.send(PING)
            await it.replies(1)
        await it.send(PING, PING)
        await it.replies(2)
        await it.send(PING, PING)
        await it.replies(2)
    assert len(tasks) == 7
    assert len(set(tasks)) == 2, "as many as were needed at once"


async def test_refusals_faults_and_limits_are_answered_at_once_too() -> None:
    async with served() as it:

        def fail(type: MessageType) -> bytes:
            if type is STAT:
                raise ZeroDivisionError("a fault of this server")
            raise StoreError("not today")

        at_once(it.handler, fail, PING, STAT, DELETE)
        await it.send(PING, STAT)
        await it.send(DELETE, body=Delete([bytes([i]) for i in range(LIMITS.max_batch_keys + 1)]).pack())
        refused, failed, limited = await it.replies(3)
        assert refused.error is not None and refused.error.code is ErrorCode.BAD_REQUEST
        assert failed.error is not None and failed.error.code is ErrorCode.INTERNAL
        assert limited.error is not None and limited.error.code is ErrorCode.LIMIT
        assert it.handler.counts["internal_error"] == 1
        assert not it.cuts
        assert not it.ended


async def test_a_breach_ends_the_session_after_what_was_answered_before_it() -> None:
    async with served() as it:

        def answer(type: MessageType) -> bytes:
            if type is STAT:
                raise RemoteProtocolError("length", "a body that does not add up")
            return b""

        done = at_once(it.handler, answer, PING, STAT)
        await it.send(PING, STAT, PING)
        assert ids(await it.replies(1)) == [1]
        await wait_until(lambda: it.ended, "the session ends")
        assert isinstance(it.ended[0], RemoteProtocolError)
        assert done == [PING, STAT]


async def test_a_reply_that_does_not_fit_becomes_an_error() -> None:
    async with served() as it:
        at_once(it.handler, lambda _: bytes(LIMITS.max_frame_bytes + 1), PING)
        await it.send(PING)
        (reply,) = await it.replies(1)
        assert reply.error is not None and reply.error.code is ErrorCode.INTERNAL


# -- bounds


async def test_beyond_max_inflight_nothing_is_answered_at_once() -> None:
    gate = anyio.Event()
    handler = ScriptedHandler(limits=LIMITS)

    async def hold(_: MessageType) -> None:
        await gate.wait()

    handler.on_request = hold
    async with served(handler) as it:
        done = at_once(handler, lambda _: b"", PING)
        for _ in range(LIMITS.max_inflight):
            await it.send(DELETE)
        await wait_until(lambda: handler.running == LIMITS.max_inflight, "all places are taken")
        await it.send(PING)
        await it.send(PING)
        for _ in range(20):
            await checkpoint()
        assert not done
        gate.set()
        replies = await it.replies(LIMITS.max_inflight + 2)
        assert len(done) == 2
        assert sorted(ids(replies)) == list(range(1, LIMITS.max_inflight + 3))


async def test_a_client_that_reads_nothing_is_cut_and_costs_a_few_replies() -> None:
    async with served(write_timeout_s=0.1) as it:
        size = LIMITS.max_frame_bytes
        done = at_once(it.handler, lambda _: bytes(size), PING)
        it.ours.send_nowait(b"".join(_frames(it, 1000)))
        await wait_until(lambda: it.ended, "it is cut")
        assert isinstance(it.ended[0], RemoteProtocolError)
        assert it.ended[0].kind == "write_timeout"
        buffer = it.theirs._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert len(done) * size <= buffer + MAX_PER_TURN * size, "it went on while replies had to wait"


async def test_requests_that_come_one_by_one_wait_for_room_too() -> None:
    async with served(write_timeout_s=0.2) as it:
        size = LIMITS.max_frame_bytes
        done = at_once(it.handler, lambda _: bytes(size), PING)
        buffer = it.theirs._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for _ in range(3 * buffer // size):
            await it.send(PING)
            await checkpoint()
        assert len(done) * size <= buffer, "it read on while a reply had to wait"
        await wait_until(lambda: it.ended, "it is cut")
        assert isinstance(it.ended[0], RemoteProtocolError)


async def test_a_slow_reader_gets_every_reply_in_order() -> None:
    async with served() as it:
        at_once(it.handler, lambda _: bytes(LIMITS.max_frame_bytes), PING)
        sent = await it.send(*[PING] * 500)
        assert ids(await it.replies(500)) == sent
        assert not it.ended


# -- faults


@pytest.mark.parametrize(
    ("operation", "action"),
    [
        (Operation.REQUEST, Fail()),
        (Operation.REQUEST, NoReply()),
        (Operation.REPLY, NoReply()),
        (Operation.REPLY, BitFlip(-1)),
        (Operation.REPLY, Delay(0.01)),
    ],
)
async def test_a_fault_plan_strikes_what_would_be_answered_at_once(operation: Operation, action: Any) -> None:
    async with served() as it:
        at_once(it.handler, lambda _: b"", PING)
        rule = it.faults.add(operation, action, type=PING, times=1)
        await it.send(PING)
        await wait_until(lambda: rule.fired == 1, "the fault strikes")
        if isinstance(action, BitFlip):
            with pytest.raises(RemoteProtocolError):
                await it.replies(1)
            return
        it.faults.clear()
        if isinstance(action, Fail):
            assert (await it.replies(1))[0].error is not None
        elif isinstance(action, Delay):
            assert (await it.replies(1))[0].error is None
        await it.send(PING)
        assert ids(await it.replies(1)) == [2]


# -- the end


async def test_bye_waits_for_what_came_before_and_ends_what_comes_after() -> None:
    gate = anyio.Event()
    handler = ScriptedHandler(limits=LIMITS)

    async def hold(_: MessageType) -> None:
        await gate.wait()

    handler.on_request = hold
    async with served(handler) as it:
        done = at_once(handler, lambda _: b"", PING)
        await it.send(PING, DELETE, BYE, PING)
        assert ids(await it.replies(1)) == [1]
        assert not it.ended
        gate.set()
        assert ids(await it.replies(2)) == [2, 3]
        await wait_until(lambda: it.ended, "the session ends")
        assert it.ended == [None]
        assert done == [PING]


async def test_the_end_of_the_stream_within_a_frame_is_a_breach() -> None:
    async with served() as it:
        await send_all(it.ours, b"mKV1")
        it.ours.end()
        await wait_until(lambda: it.ended, "the session ends")
        assert isinstance(it.ended[0], RemoteProtocolError)
        assert it.ended[0].kind == "truncated"
