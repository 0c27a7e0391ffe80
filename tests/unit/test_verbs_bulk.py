"""Pulls and pushes over queue pairs: right bytes, on devices with small limits too, and no answer before the bytes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import anyio
import numpy as np
import pytest

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.verbs import queuepairs
from memkv_vllm.transports.verbs.provider import Opcode, WorkRequests
from memkv_vllm.transports.verbs.queuepairs import TURN_S, Pace
from memkv_vllm.types import Deadline, Extent, Status
from tests.support.fake_verbs import FakeQueuePair, Trouble
from tests.support.scripted import soon
from tests.support.verbs_host import FakeHost
from tests.support.verbs_session import CLIENT_ADDRESS, SERVER_ADDRESS, Pair, paired

pytestmark = pytest.mark.anyio

OK, TIMEOUT, FAILED = Status.OK, Status.TIMEOUT, Status.FAILED


def fill(pair: Pair, seed: int = 1) -> None:
    """Random bytes in the client's memory, zeros in the arena."""
    pair.memory.array[:] = np.random.default_rng(seed).integers(0, 256, pair.memory.length, np.uint8)
    pair.arena.array[:] = 0


def batch(count: int, length: int, *, step: int = 0) -> list[Move]:
    """Values one after the other, in both memories."""
    return [Move(Extent(1, i * (step or length), length), i * (step or length)) for i in range(count)]


class Posts:
    """What was posted on the fake NIC: per post the opcodes, and how many work requests were outstanding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        post = FakeQueuePair.post

        def recorded(queue_pair: FakeQueuePair, work: WorkRequests) -> None:
            self.batches.append((queue_pair.number, work.opcodes.tolist()))
            post(queue_pair, work)

        monkeypatch.setattr(FakeQueuePair, "post", recorded)


@pytest.mark.parametrize("num_queue_pairs", [1, 2, 3, 8])
async def test_bytes_arrive_both_ways(tmp_path: Path, num_queue_pairs: int) -> None:
    async with paired(tmp_path, num_queue_pairs=num_queue_pairs) as pair:
        fill(pair)
        moves = batch(64, 20_001)
        assert await pair.bulk.pull(moves, soon()) == [OK] * 64
        end = 64 * 20_001
        assert bytes(pair.arena.view(0, end)) == bytes(pair.memory.view(0, end))
        assert not pair.arena.array[end:].any()
        pair.memory.array[:] = 0
        assert await pair.bulk.push(moves, soon()) == [OK] * 64
        assert bytes(pair.memory.view(0, end)) == bytes(pair.arena.view(0, end))
        assert not pair.memory.array[end:].any()


@pytest.mark.parametrize("places", [1, 2, 4, 5])
async def test_a_device_with_small_limits(tmp_path: Path, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """P077: few places, few completions, small messages, one READ at a time."""
    host = FakeHost.make(tmp_path, SERVER_ADDRESS, CLIENT_ADDRESS)
    host.nics[0].limit(max_work_requests=places, max_completions=4 * places, max_sges=1, max_reads_initiated=1)
    host.nics[0].ports[1].max_message_bytes = 1000
    posts = Posts(monkeypatch)
    async with paired(tmp_path, host=host) as pair:
        fill(pair)
        moves = batch(30, 5_003)
        assert await pair.bulk.pull(moves, soon()) == [OK] * 30
        assert bytes(pair.arena.view(0, 30 * 5_003)) == bytes(pair.memory.view(0, 30 * 5_003))
        pair.memory.array[:] = 0
        assert await pair.bulk.push(moves, soon()) == [OK] * 30
        assert bytes(pair.memory.view(0, 30 * 5_003)) == bytes(pair.arena.view(0, 30 * 5_003))
        assert max(len(opcodes) for _, opcodes in posts.batches) <= places
        assert sum(len(opcodes) for _, opcodes in posts.batches) == 8 + 30 * 6 * 2 + 2


async def test_a_batch_is_shared_out_and_posted_in_bulk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts = Posts(monkeypatch)
    async with paired(tmp_path) as pair:
        posts.batches.clear()
        await pair.bulk.push(batch(64, 1000), soon())
        read, write = int(Opcode.READ), int(Opcode.WRITE)
        assert sorted(opcodes for _, opcodes in posts.batches) == [[write] * 32 + [read]] * 2
        assert len({number for number, _ in posts.batches}) == 2
        posts.batches.clear()
        for _ in range(4):
            await pair.bulk.pull(batch(1, 1000), soon())
        assert [opcodes for _, opcodes in posts.batches] == [[read]] * 4


async def test_a_batch_of_few_bytes_goes_over_one_queue_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts = Posts(monkeypatch)
    async with paired(tmp_path, spread_bytes=6400) as pair:
        posts.batches.clear()
        await pair.bulk.pull(batch(64, 99), soon())
        assert [len(opcodes) for _, opcodes in posts.batches] == [64]
        posts.batches.clear()
        await pair.bulk.pull(batch(64, 100), soon())
        assert [len(opcodes) for _, opcodes in posts.batches] == [32, 32]


async def test_the_read_behind_writes_is_posted_with_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each WRITE is a post of its own, since the post carries the bytes."""
    posts, post = Posts(monkeypatch), FakeQueuePair.post

    def slow(queue_pair: FakeQueuePair, work: WorkRequests) -> None:
        time.sleep(2 * TURN_S)
        post(queue_pair, work)

    monkeypatch.setattr(FakeQueuePair, "post", slow)
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        await pair.bulk.push(batch(1, 1 << 18), soon())
        posts.batches.clear()
        await pair.bulk.push(batch(3, 1 << 18), soon())
        read, write = int(Opcode.READ), int(Opcode.WRITE)
        assert [opcodes for _, opcodes in posts.batches] == [[write], [write], [write, read]]


async def test_a_push_is_answered_after_the_read_behind_its_writes(tmp_path: Path) -> None:
    """The answer must not overtake the bytes: a WRITE's own completion does not say that they are in place."""
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        pair.nic.troubles.requests = {pair.nic.num_posted + 3: Trouble(delay_s=0.3)}  # three WRITEs, then the READ
        started = time.monotonic()
        assert await pair.bulk.push(batch(3, 100), soon()) == [OK] * 3
        assert time.monotonic() - started >= 0.3


async def test_a_push_whose_last_read_never_ends_is_not_ok(tmp_path: Path) -> None:
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        pair.nic.troubles.requests = {pair.nic.num_posted + 3: Trouble(completes=False)}
        assert await pair.bulk.push(batch(3, 100), soon(0.2)) == [TIMEOUT] * 3


async def test_a_completion_that_never_comes_is_a_timeout_of_what_it_would_have_said(tmp_path: Path) -> None:
    """P068, P085: what had ended before is OK, nothing else is, and nobody waits longer than the deadline."""
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        fill(pair)
        assert await pair.bulk.pull(batch(2, 100), soon()) == [OK] * 2
        pair.nic.troubles.requests = {pair.nic.num_posted + 64: Trouble(completes=False)}
        statuses = await pair.bulk.pull(batch(200, 100), soon(0.3))
        assert statuses == [OK] * 64 + [TIMEOUT] * 136
        assert pair.cuts == []  # the store fences after a TIMEOUT


async def test_nothing_more_is_posted_after_the_deadline(tmp_path: Path) -> None:
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        pair.nic.troubles.delay_s = 0.3
        before = pair.nic.num_posted
        assert await pair.bulk.pull(batch(1000, 100), soon(0.1)) == [TIMEOUT] * 1000
        outstanding = pair.nic.num_posted - before
        assert 0 < outstanding <= 128
        pair.nic.troubles.delay_s = 0.0
        # What was posted goes on, what was not is given up, and others have their turn behind it.
        assert await pair.bulk.pull(batch(2, 100), soon()) == [OK] * 2
        assert pair.nic.num_posted - before == outstanding + 2


async def test_a_deadline_that_has_passed_and_nothing_to_move(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        before = pair.nic.num_posted
        assert await pair.bulk.pull(batch(2, 100), Deadline(time.monotonic() - 1)) == [TIMEOUT] * 2
        assert await pair.bulk.push([Move(Extent(1, 0, 0), 0)], soon()) == [OK]
        assert await pair.bulk.push([], soon()) == []
        assert await pair.bulk.pull([Move(Extent(9, 0, 5), 0)], soon()) == [Status.BAD_EXTENT]
        assert pair.nic.num_posted == before


async def test_a_cancelled_transfer_leaves_the_others_alone(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        fill(pair)
        pair.nic.troubles.delay_s = 0.05
        with anyio.move_on_after(0.02):
            await pair.bulk.pull(batch(500, 100), soon())
        assert await pair.bulk.pull(batch(4, 100), soon()) == [OK] * 4
        assert bytes(pair.arena.view(0, 400)) == bytes(pair.memory.view(0, 400))


async def test_several_transfers_at_once(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        fill(pair)
        pair.nic.troubles.delay_s = 0.001
        done: list[int] = []

        async def one(index: int) -> None:
            moves = [Move(Extent(1, (index * 50 + i) * 300, 300), (index * 50 + i) * 300) for i in range(50)]
            assert await pair.bulk.pull(moves, soon()) == [OK] * 50
            assert await pair.bulk.push(moves, soon()) == [OK] * 50
            done.append(index)

        async with anyio.create_task_group() as tasks:
            for index in range(20):
                tasks.start_soon(one, index)
        assert sorted(done) == list(range(20))
        assert bytes(pair.arena.view(0, 300_000)) == bytes(pair.memory.view(0, 300_000))


@pytest.mark.fault
@pytest.mark.parametrize("fenced", [False, True])
async def test_the_fence_ends_what_is_under_way(tmp_path: Path, fenced: bool) -> None:
    """Nothing lands in the arena after it; without it, it does."""
    async with paired(tmp_path) as pair:
        fill(pair)
        pair.nic.troubles.delay_s = 0.2
        statuses: list[Status] = []

        async def pull() -> None:
            statuses.extend(await pair.bulk.pull(batch(100, 100), soon(5 if fenced else 0.1)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await anyio.sleep(0.05)
            if fenced:
                await pair.bulk.fence()
                await pair.bulk.fence()
        assert statuses == [FAILED if fenced else TIMEOUT] * 100
        await anyio.sleep(0.3)
        assert pair.arena.array.any() != fenced
        if fenced:
            assert await pair.bulk.pull(batch(1, 100), soon()) == [FAILED]


async def test_posts_that_take_long_give_the_loop_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft-RoCE moves all bytes inside of the post: a long batch must not hold up every other session."""
    post = FakeQueuePair.post

    def slow(queue_pair: FakeQueuePair, work: WorkRequests) -> None:
        time.sleep(2 * TURN_S)
        post(queue_pair, work)

    async with paired(tmp_path) as pair:
        monkeypatch.setattr(FakeQueuePair, "post", slow)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            assert await pair.bulk.pull(batch(600, 100), soon()) == [OK] * 600
            tasks.cancel_scope.cancel()
        assert turns >= 600 // queuepairs.SLICE_ROWS


def test_the_size_of_a_slice_follows_how_long_posts_take() -> None:
    pace = Pace()
    first = pace.slice_bytes
    for _ in range(40):  # a NIC: a post takes no time, whatever it asks for
        pace.took(1e-5, pace.slice_bytes)
    assert pace.slice_bytes == 1 << 34
    for _ in range(40):  # soft-RoCE: 650 MB/s
        pace.took(pace.slice_bytes / 650e6, pace.slice_bytes)
    assert pace.slice_bytes / 650e6 <= TURN_S < first * 32 / 650e6
    for _ in range(40):
        pace.took(1.0, 8)
    assert pace.slice_bytes == 1 << 16
    pace.took(1e-6, 8)  # a short one says nothing of long ones
    assert pace.slice_bytes == 1 << 16
