"""Invariant 7 on the queue pairs of one session: a get does not stand behind the bytes of puts."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.verbs import bulk as bulk_module
from memkv_vllm.transports.verbs.provider import Opcode, WorkRequests
from memkv_vllm.types import Extent, Status
from tests.support.fake_verbs import FakeQueuePair, Trouble
from tests.support.harness import wait_until
from tests.support.scripted import soon
from tests.support.verbs_session import paired

pytestmark = pytest.mark.anyio

MOVES = [Move(Extent(1, i * 100, 100), i * 100) for i in range(8)]


@pytest.mark.parametrize("num_queue_pairs", [2, 3, 4, 8])
async def test_a_get_does_not_wait_for_puts_that_are_under_way(tmp_path: Path, num_queue_pairs: int) -> None:
    """On one queue pair the READ behind a get's WRITEs is answered after all READs before it, megabytes of them."""
    slow_s = 1.0
    async with paired(tmp_path, num_queue_pairs=num_queue_pairs) as pair, anyio.create_task_group() as tasks:
        first = pair.nic.num_posted
        pair.nic.troubles.requests = {first + at: Trouble(delay_s=slow_s) for at in range(32)}
        for _ in range(4):
            tasks.start_soon(pair.bulk.pull, MOVES, soon())
        await wait_until(lambda: pair.nic.num_posted == first + 32, "the puts are under way")
        started = time.monotonic()
        assert await pair.bulk.push(MOVES, soon()) == [Status.OK] * 8
        assert time.monotonic() - started < slow_s / 2


@pytest.mark.parametrize("num_queue_pairs", [1, 2, 3, 4, 8])
async def test_every_queue_pair_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_queue_pairs: int) -> None:
    used: dict[int, set[Opcode]] = {}
    post = FakeQueuePair.post

    def noted(queue_pair: FakeQueuePair, work: WorkRequests) -> None:
        # The READ behind WRITEs is part of a get.
        used.setdefault(queue_pair.number, set()).add(Opcode(int(work.opcodes[0])))
        post(queue_pair, work)

    async with paired(tmp_path, num_queue_pairs=num_queue_pairs) as pair:
        monkeypatch.setattr(FakeQueuePair, "post", noted)
        options = pair.bulk._options
        pair.bulk._options = bulk_module.BulkOptions(options.max_regions, options.max_region_bytes, spread_bytes=1)
        assert await pair.bulk.push(MOVES, soon()) == [Status.OK] * 8
        assert await pair.bulk.pull(MOVES, soon()) == [Status.OK] * 8
        assert len(used) == num_queue_pairs
        if num_queue_pairs > 1:
            assert all(len(opcodes) == 1 for opcodes in used.values())
