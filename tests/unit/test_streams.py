"""Socket streams and the frame writer: order, back pressure, descriptors, and closing under somebody's feet."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import ConnectionLost, RemoteProtocolError
from memkv_vllm.transports.streams import FrameWriter, Rest, SocketStream, Take, feed_by_receive, send_all
from tests.support.harness import wait_until
from tests.support.resources import num_fds

pytestmark = pytest.mark.anyio


def stream_pair() -> tuple[SocketStream, SocketStream]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return SocketStream(a), SocketStream(b)


async def read_exactly(stream: SocketStream, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = await stream.receive()
        assert piece, "the stream ended"
        data += piece
    return data


async def test_bytes_and_the_end() -> None:
    ours, theirs = stream_pair()
    await send_all(ours, b"hello")
    assert await theirs.receive() == b"hello"
    await send_all(ours, b"bye")
    ours.close()
    ours.close()
    assert await theirs.receive() == b"bye"
    assert await theirs.receive() == b""
    assert await theirs.receive() == b""
    assert await ours.receive() == b""
    with pytest.raises(ConnectionLost):
        ours.send_nowait(memoryview(b"x"))
    with pytest.raises(ConnectionLost):
        await ours.wait_writable()
    with pytest.raises(ConnectionLost):
        await send_all(theirs, bytes(10))
    theirs.close()


async def test_what_comes_while_nobody_reads_waits() -> None:
    ours, theirs = stream_pair()
    await send_all(ours, b"1")
    assert await theirs.receive() == b"1"
    await send_all(ours, b"2")
    await anyio.sleep(0.02)  # the loop sees it, and that nobody reads
    await send_all(ours, b"3")
    assert await theirs.receive() == b"23"
    ours.close()
    theirs.close()


async def test_a_cancelled_reader_loses_nothing() -> None:
    ours, theirs = stream_pair()
    with anyio.move_on_after(0.01):
        await theirs.receive()
    # The data and the cancellation come in the same turn of the loop.
    task = asyncio.ensure_future(theirs.receive())
    await anyio.sleep(0.01)
    await send_all(ours, b"kept")
    theirs._on_readable()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with anyio.fail_after(5):
        assert await theirs.receive() == b"kept"
    ours.close()
    theirs.close()


async def test_closing_wakes_the_reader_and_the_writer() -> None:
    before = num_fds()
    ours, theirs = stream_pair()
    woken: list[str] = []

    async def read() -> None:
        assert await ours.receive() == b""
        woken.append("reader")

    async def write() -> None:
        while True:
            try:
                if not ours.send_nowait(memoryview(bytes(1 << 20))):
                    await ours.wait_writable()
            except ConnectionLost:
                break
        woken.append("writer")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        await anyio.sleep(0.02)
        ours.close()
    assert sorted(woken) == ["reader", "writer"]
    theirs.close()
    assert num_fds() == before


async def test_a_reset_is_a_lost_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    listener.close()
    stream = SocketStream(accepted)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    with pytest.raises(ConnectionLost):
        await stream.receive()
    stream.close()


# -- feed

Feed = Callable[[SocketStream, Take], Coroutine[Any, Any, None]]
both_ways = pytest.mark.parametrize("feed", [SocketStream.feed, feed_by_receive])


@both_ways
async def test_feed_hands_over_everything_up_to_the_end(feed: Feed) -> None:
    ours, theirs = stream_pair()
    taken = bytearray()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, theirs, taken.extend)
        for number in range(50):
            await send_all(ours, bytes([number]) * 5000)
        ours.close()
    assert bytes(taken) == b"".join(bytes([number]) * 5000 for number in range(50))
    theirs.close()


@both_ways
async def test_nothing_is_read_while_a_rest_is_awaited_nor_after_its_no(feed: Feed) -> None:
    ours, theirs = stream_pair()
    gate = anyio.Event()
    taken: list[bytes] = []

    async def wait() -> bool:
        await gate.wait()
        return len(taken) < 2

    def take(data: bytes) -> Rest | None:
        taken.append(data)
        return wait

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed, theirs, take)
        await send_all(ours, b"1")
        await wait_until(lambda: taken, "the first bytes")
        await send_all(ours, b"2")
        await anyio.sleep(0.02)  # the loop sees it, and that nobody wants it
        assert taken == [b"1"]
        gate.set()
    await send_all(ours, b"3")
    assert taken == [b"1", b"2"]
    assert await theirs.receive() == b"3"
    ours.close()
    theirs.close()


@both_ways
async def test_what_a_taker_raises_is_raised_to_the_feeder(feed: Feed) -> None:
    ours, theirs = stream_pair()

    def take(data: bytes) -> Rest | None:
        raise RemoteProtocolError("mac", "no")

    await send_all(ours, b"x")
    with pytest.raises(RemoteProtocolError):
        await feed(theirs, take)
    await send_all(ours, b"y")
    assert await theirs.receive() == b"y"
    ours.close()
    theirs.close()


@both_ways
async def test_closing_ends_feed_from_outside_and_from_the_taker_itself(feed: Feed) -> None:
    before = num_fds()
    for within in (True, False):
        ours, theirs = stream_pair()
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed, theirs, lambda data, stream=theirs: stream.close())
                await anyio.lowlevel.checkpoint()
                if within:
                    await send_all(ours, b"x")
                else:
                    theirs.close()
        ours.close()
    assert num_fds() == before


@both_ways
async def test_a_reset_ends_feed_as_a_lost_connection(feed: Feed) -> None:
    ours, theirs = stream_pair()
    ours.send_nowait(b"left unread")
    theirs.send_nowait(b"left unread, too")
    ours.close()
    with pytest.raises(ConnectionLost):
        await feed(theirs, lambda data: None)
    theirs.close()


async def test_what_a_cancelled_receive_left_is_fed_first() -> None:
    ours, theirs = stream_pair()
    task = asyncio.ensure_future(theirs.receive())
    await anyio.sleep(0.01)
    await send_all(ours, b"kept")
    theirs._on_readable()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await send_all(ours, b"next")
    ours.close()
    taken: list[bytes] = []
    await theirs.feed(taken.append)
    assert b"".join(taken) == b"keptnext"
    theirs.close()


async def test_what_was_given_back_is_fed_first_and_then_what_came_while_nobody_read() -> None:
    ours, theirs = stream_pair()
    await send_all(ours, b"1")
    theirs.unread(await theirs.receive())
    await send_all(ours, b"2")
    await wait_until(lambda: not theirs._watching, "the loop sees that nobody reads")
    taken: list[bytes] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(theirs.feed, taken.append)
        await wait_until(lambda: b"".join(taken) == b"12", "both arrive")
        ours.close()
    theirs.close()


# -- the writer


async def test_frames_keep_their_order_whatever_has_to_wait() -> None:
    ours, theirs = stream_pair()
    writer = FrameWriter(ours)
    frames = [bytes([i]) * size for i, size in enumerate((10, 1 << 20, 3, 700_000, 0, 1, 1 << 21))]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        marks = [writer.send(frame) for frame in frames]
        assert writer.waiting_bytes > 0
        assert marks == [sum(len(frame) for frame in frames[: i + 1]) for i in range(len(frames))]
        await writer.wait_sent(marks[0])
        assert await read_exactly(theirs, marks[-1]) == b"".join(frames)
        await writer.wait_sent(marks[-1])
        assert writer.waiting_bytes == 0
        tasks.cancel_scope.cancel()
    ours.close()
    theirs.close()


async def test_a_broken_stream_ends_the_writer_and_whoever_waits() -> None:
    ours, theirs = stream_pair()
    writer = FrameWriter(ours)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            mark = writer.send(bytes(4 << 20))
            tasks.start_soon(writer.wait_sent, mark)
            await anyio.sleep(0.01)
            theirs.close()
    assert writer.waiting_bytes == 0
    await writer.wait_sent(writer.send(b"into the void"))
    with pytest.raises(ConnectionLost):
        await ours.receive()  # a reset, since the peer left bytes unread
    ours.close()


# -- descriptors


async def test_descriptors_travel_with_their_frames() -> None:
    before = num_fds()
    ours, theirs = stream_pair()
    theirs.accept_fds()
    writer = FrameWriter(ours)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        sent = []
        for index in range(4):
            reader, end = os.pipe()
            writer.send(bytes(600_000), (reader,))  # the second one has to wait already
            os.close(reader)
            os.write(end, str(index).encode())
            os.close(end)
            sent.append(index)
        await read_exactly(theirs, 4 * 600_000)
        for index in sent:
            fd = theirs.take_fd()
            assert fd is not None
            assert not os.get_inheritable(fd)
            assert os.read(fd, 10) == str(index).encode()
            os.close(fd)
        assert theirs.take_fd() is None
        tasks.cancel_scope.cancel()
    ours.close()
    theirs.close()
    assert num_fds() == before


async def test_descriptors_that_nobody_asked_for_are_dropped() -> None:
    before = num_fds()
    ours, theirs = stream_pair()
    for _ in range(20):
        ours.send_nowait(memoryview(b"x"), (0, 1, 2))
        assert await theirs.receive() == b"x"
    assert num_fds() == before + 2
    theirs.accept_fds()
    ours.send_nowait(memoryview(b"y"), (0,))
    assert await theirs.receive() == b"y"
    assert num_fds() == before + 3
    theirs.close()
    ours.close()
    assert num_fds() == before


async def test_too_many_descriptors_are_the_peers_fault() -> None:
    before = num_fds()
    ours, theirs = stream_pair()
    theirs.accept_fds()
    with pytest.raises(RemoteProtocolError) as caught:
        for _ in range(20):
            ours.send_nowait(memoryview(b"x"), (0,) * 5)
            await theirs.receive()
    assert caught.value.kind == "fds"
    theirs.close()
    ours.close()
    assert num_fds() == before


async def test_a_writer_that_is_closed_gives_its_descriptors_back() -> None:
    before = num_fds()
    ours, theirs = stream_pair()
    writer = FrameWriter(ours)
    writer.send(bytes(4 << 20))
    writer.send(b"x", (0,))
    assert num_fds() == before + 3
    writer.close()
    assert num_fds() == before + 2
    ours.close()
    theirs.close()
