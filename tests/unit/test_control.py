"""The client's control channel: deadlines without a scope per request, and a request given up at every moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import ConnectionLost, MemkvError, NotSent, RemoteProtocolError, RequestTimeout
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Exists, Stat
from memkv_vllm.protocol.session import RequestReceived
from memkv_vllm.transports.control import ControlChannel
from memkv_vllm.transports.streams import Take
from memkv_vllm.types import Deadline
from tests.support.harness import wait_until
from tests.support.sessions import LIMITS, Pair

pytestmark = pytest.mark.anyio

PLACES = LIMITS.max_inflight - 1


@dataclass
class ScriptedStream:
    """A stream whose other end is a test: it sees the requests, and its replies arrive when it says so."""

    pair: Pair = field(default_factory=lambda: Pair().shake_hands())
    requests: list[RequestReceived] = field(default_factory=list)
    closed: anyio.Event = field(default_factory=anyio.Event)
    take: Take | None = None

    async def feed(self, take: Take) -> None:
        self.take = take
        await self.closed.wait()

    def send_nowait(self, data: Any, fds: Any = ()) -> int:
        self.requests += self.pair.server.receive_data(bytes(data))  # type: ignore[arg-type]
        return len(data)

    def reply(self, index: int) -> None:
        """The reply to request number ``index`` arrives now."""
        request = self.requests[index]
        self.pair.server.send_reply(request.request_id, request.type, b"{}")
        assert self.take is not None
        self.take(self.pair.server.data_to_send())

    def end(self) -> None:
        self.closed.set()

    close = end


@asynccontextmanager
async def channel() -> AsyncIterator[tuple[ControlChannel, ScriptedStream]]:
    """A channel that is driven."""
    stream = ScriptedStream()
    established = stream.pair.client.established
    assert established is not None
    made = ControlChannel(stream, stream.pair.client, established, "a test")  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        await wait_until(lambda: stream.take is not None, "it reads")
        yield made, stream
        made.close()


def soon(seconds: float = 10) -> Deadline:
    return Deadline(time.monotonic() + seconds)


async def all_places_are_free(made: ControlChannel, stream: ScriptedStream) -> None:
    """As many requests as there are places can be under way at once, and one more cannot."""
    first = len(stream.requests)
    async with anyio.create_task_group() as tasks:
        for _ in range(PLACES):
            tasks.start_soon(made.request, Stat(), soon())
        await wait_until(lambda: len(stream.requests) == first + PLACES, "all are sent")
        with pytest.raises(NotSent):
            await made.request(Stat(), soon(0.01))
        for index in range(first, first + PLACES):
            stream.reply(index)
    assert made.statistics().pending == 0


async def test_replies_reach_their_requests_in_any_order() -> None:
    async with channel() as (made, stream):
        done: list[int] = []

        async def ask(number: int) -> None:
            await made.request(Stat(), soon())
            done.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(ask, number)
            await wait_until(lambda: len(stream.requests) == 5, "all are sent")
            for index in (3, 0, 4, 1, 2):
                stream.reply(index)
                await wait_until(lambda: done, "it returns")
                assert done.pop() == index
        await all_places_are_free(made, stream)


async def test_each_request_ends_at_its_own_deadline_whatever_the_order() -> None:
    async with channel() as (made, stream):
        ended: list[str] = []

        async def ask(name: str, seconds: float) -> None:
            with pytest.raises(RequestTimeout, match="did not answer"):
                await made.request(Stat(), soon(seconds))
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            for name, seconds in (("last", 0.12), ("first", 0.02), ("second", 0.07)):
                tasks.start_soon(ask, name, seconds)
        assert ended == ["first", "second", "last"]
        assert made.statistics().pending == 3, "late replies may still come"
        for index in range(3):
            stream.reply(index)
        assert made.statistics().late_replies == 3
        await all_places_are_free(made, stream)


async def test_a_request_past_its_deadline_is_not_sent() -> None:
    async with channel() as (made, stream):
        with pytest.raises(NotSent):
            await made.request(Stat(), soon(-1))
        assert not stream.requests
        await all_places_are_free(made, stream)


async def test_a_reply_before_the_timer_counts_although_the_deadline_has_passed() -> None:
    async with channel() as (made, stream):
        task = asyncio.ensure_future(made.request(Stat(), soon(0.2)))
        await checkpoint()
        assert stream.requests
        time.sleep(0.25)  # noqa: ASYNC251 - the loop is held up, so timer and reply are due in one turn
        stream.reply(0)
        assert await task == {}


@pytest.mark.parametrize("moment", ["waiting for a place", "sent", "with the reply", "with the deadline", "at the end"])
async def test_a_request_that_is_cancelled_leaves_the_channel_whole(moment: str) -> None:
    async with channel() as (made, stream):
        held = []
        if moment == "waiting for a place":
            held = [asyncio.ensure_future(made.request(Stat(), soon())) for _ in range(PLACES)]
            await wait_until(lambda: len(stream.requests) == PLACES, "all places are taken")
        sent = len(stream.requests)
        task = asyncio.ensure_future(made.request(Stat(), soon(0.2 if moment == "with the deadline" else 10)))
        await checkpoint()
        await checkpoint()
        if moment == "with the reply":
            stream.reply(sent)
        elif moment == "with the deadline":
            time.sleep(0.25)  # noqa: ASYNC251 - as above
            made._expire(asyncio.get_running_loop())
        elif moment == "at the end":
            made.fail(RemoteProtocolError("test", "the end"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if moment == "at the end":
            for each in (made.request(Stat(), soon()), made.request(Exists([], 1), soon())):
                with pytest.raises(ConnectionLost):
                    await each
            made._closing = True  # so that its owner's task ends without a word
            return
        for index in range(PLACES if held else 0):
            stream.reply(index)
        await asyncio.gather(*held)
        if moment in ("sent", "with the deadline"):
            stream.reply(sent)
            assert made.statistics().late_replies == 1
        await all_places_are_free(made, stream)


@pytest.mark.parametrize("request_id", [0, 99])
async def test_the_end_is_known_at_once_to_whoever_asks_next(request_id: int) -> None:
    async with channel() as (made, stream):
        task = asyncio.ensure_future(made.request(Stat(), soon()))
        await wait_until(lambda: stream.requests, "it is sent")
        stream.pair.server.send_reply(request_id, MessageType.STAT, b"{}")
        assert stream.take is not None
        with pytest.raises(RemoteProtocolError):
            stream.take(stream.pair.server.data_to_send())
        # In the same turn of the loop: the channel's own task has not run yet.
        with pytest.raises(ConnectionLost, match="never sent"):
            await made.request(Stat(), soon())
        with pytest.raises(MemkvError, match="never sent"):
            await task
        assert not made.alive
        made._closing = True  # so that its owner's task ends without a word
        await checkpoint()
