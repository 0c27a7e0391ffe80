"""A few hundred random jobs over servers that break at random: nothing wrong, nothing twice, nothing left behind.

The harness plays vLLM: GPU blocks belong to a job until it has been reported or waited for, and are reused at once
after that. Faults P028, P035, P038, P040, P042, P064, P065, P095.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from memkv_vllm.engine.api import BlockRef, EngineStatistics, JobResult
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import (
    Action,
    BitFlip,
    Delay,
    Die,
    Drop,
    Fail,
    FaultPlan,
    LateWrite,
    NoReply,
    Operation,
    Short,
)
from memkv_vllm.types import Direction, LossReason, Status
from tests.support.ranks import VALUE, Cluster, Rank, eventually, prefix_of, rank, staging_plan

pytestmark = pytest.mark.fault

BLOCKS = 256
KEYS = 40

MOVE_FAULTS: tuple[Action, ...] = (
    BitFlip(100, 3),
    Short(1000),
    Fail(Status.FAILED),
    LateWrite(0.05),
    LateWrite(0.05, Status.FAILED),
    Delay(0.02),
    Die(),
    Drop(),
)
MESSAGE_FAULTS: tuple[Action, ...] = (Delay(0.05), NoReply(), Fail(), Die())


def break_at_random(plan: FaultPlan, rng: random.Random) -> None:
    """Some of everything, each now and then."""
    plan.clear()
    for operation in (Operation.PULL, Operation.PUSH):
        for action in MOVE_FAULTS:
            # A write that lands after its answer said FAILED is the server's lie: the checksum cannot see it coming.
            if not (operation is Operation.PUSH and action == LateWrite(0.05, Status.FAILED)):
                plan.add(operation, action, every=rng.randrange(20, 60))
    for type in (MessageType.GET, MessageType.PUT, MessageType.REPORT_BAD):
        for action in MESSAGE_FAULTS:
            plan.add(Operation.REQUEST, action, type=type, every=rng.randrange(30, 80))
        plan.add(Operation.REPLY, NoReply(), type=type, every=rng.randrange(30, 80))


class Player:
    """Plays vLLM's part with random moves."""

    def __init__(self, one: Rank, rng: random.Random) -> None:
        self.one, self.rng = one, rng
        self.free = list(range(BLOCKS))
        self.blocks = one.mover.blocks
        self.blocks[:] = 0
        self.marks = [0] * BLOCKS
        """The byte that fills each free block; who reuses it checks that nobody wrote meanwhile."""
        self.open: dict[int, tuple[Direction, list[int], list[int]]] = {}
        """Jobs not reported yet: direction, numbers and the blocks that still belong to them."""
        self.ended: dict[int, JobResult] = {}
        self.good_loads = 0
        self.next_job = 1

    def content(self, number: int) -> np.ndarray:
        """What block number ``number`` of the model holds."""
        return self.one.computed[number]

    def submit(self) -> None:
        """A store or a load of some consecutive numbers, now and then with one twice."""
        count = self.rng.randrange(1, 9)
        if len(self.free) < count:
            return
        start = self.rng.randrange(KEYS - count)
        numbers = list(range(start, start + count))
        if self.rng.random() < 0.1:
            numbers[-1] = numbers[0]
        direction = self.rng.choice((Direction.LOAD, Direction.LOAD, Direction.STORE))
        blocks = [self.take(self.content(number) if direction is Direction.STORE else None) for number in numbers]
        refs = [BlockRef(prefix_of(number), block) for number, block in zip(numbers, blocks, strict=True)]
        job, self.next_job = self.next_job, self.next_job + 1
        self.open[job] = (direction, numbers, blocks)
        if direction is Direction.STORE:
            self.one.engine.submit_store(job, refs)
        else:
            self.one.engine.submit_load(job, refs, expedited=self.rng.random() < 0.1)

    def take(self, content: np.ndarray | None) -> int:
        block = self.free.pop(self.rng.randrange(len(self.free)))
        assert (self.blocks[block] == self.marks[block]).all(), f"block {block} was written after it was given back"
        self.blocks[block] = 0 if content is None else content
        return block

    def give_back(self, blocks: list[int]) -> None:
        """vLLM uses these for somebody else from now on."""
        for block in blocks:
            self.marks[block] = self.rng.randrange(256)
            self.blocks[block] = self.marks[block]
        self.free += blocks

    def wait(self) -> None:
        """Preempt some requests: their blocks are reused when ``wait`` has returned."""
        jobs = {job for job in self.open if self.rng.random() < 0.3} | {10**9}
        self.one.engine.wait(jobs)
        for job in jobs & self.open.keys():
            direction, numbers, blocks = self.open[job]
            self.give_back(blocks)
            self.open[job] = (direction, numbers, [])

    def poll(self) -> int:
        """Check what was reported, and reuse its blocks; returns how many jobs are open."""
        for result in self.one.engine.poll_finished():
            assert result.job_id not in self.ended, "reported twice"
            self.ended[result.job_id] = result
            direction, numbers, blocks = self.open.pop(result.job_id)
            assert result.direction is direction
            assert sum(result.lost.values()) <= len(numbers)
            if direction is Direction.LOAD and blocks:
                self.check_load(result, numbers, blocks)
            self.give_back(blocks)
        return len(self.open)

    def check_load(self, result: JobResult, numbers: list[int], blocks: list[int]) -> None:
        assert len(result.bad_block_ids) == sum(result.lost.values())
        assert set(result.bad_block_ids) <= set(blocks)
        for number, block in zip(numbers, blocks, strict=True):
            if block not in result.bad_block_ids:
                self.good_loads += 1
                assert np.array_equal(self.blocks[block], self.content(number)), "wrong bytes in a good block"


def never_decreased(before: EngineStatistics, after: EngineStatistics) -> bool:
    """P095."""
    names = ("loaded_blocks", "stored_blocks", "loaded_bytes", "stored_bytes", "joined_loads", "reconnects", "fences")
    counters = all(getattr(after, name) >= getattr(before, name) for name in names)
    return counters and all(after.lost[name] >= count for name, count in before.lost.items())


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seed", range(4))
def test_random_jobs_over_servers_that_break(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Cluster(tmp_path, ("a", "b"), max_size="16MiB") as cluster:
        settings = cluster.settings(op_timeout_s=0.25, connect_timeout_s=1.0)
        # Small values are copied on the server's loop, large ones by its threads.
        plan = staging_plan(12, value=VALUE if seed < 2 else 128 << 10, lanes=2, split=seed % 2 == 1)
        with rank(settings, blocks=BLOCKS // 2, plan=plan, wait_timeout_s=3.0) as one:
            one.ready(2)
            player = Player(one, rng)
            before = one.statistics
            for step in range(400):
                if step % 100 == 0:
                    for server in cluster.servers.values():
                        break_at_random(server.faults, rng)
                if rng.random() < 0.5:
                    one.ready(2)
                player.submit()
                one.mover.delay_s = rng.choice((0, 0, 0, 0.002))
                if rng.random() < 0.08:
                    player.wait()
                if rng.random() < 0.6:
                    player.poll()
                if not player.free or rng.random() < 0.1:
                    eventually(lambda: player.poll() < 12, "jobs end")
            for server in cluster.servers.values():
                server.faults.clear()
            eventually(lambda: not player.poll(), "every job ends")
            assert set(player.ended) == set(range(1, player.next_job))
            one.idle()
            for _ in range(BLOCKS):
                player.take(None)
            assert never_decreased(before, one.statistics)
            lost = Counter(reason for result in player.ended.values() for reason in result.lost)
            assert player.good_loads > 100 and len(lost) >= 5, (player.good_loads, lost)
            counted = {name: count for name, count in one.statistics.lost.items() if count}
            expected: Counter[str] = Counter()
            for result in player.ended.values():
                expected.update({f"{result.direction.value}_{reason.value}": n for reason, n in result.lost.items()})
            assert counted == dict(expected)
            assert LossReason.ENGINE not in lost


def test_cancelled_at_random_points_nothing_is_left(tmp_path: Path) -> None:
    """P065: thousands of loads, flushed at whatever point they are."""
    rng = random.Random(7)
    with Cluster(tmp_path) as cluster, rank(cluster.settings(), plan=staging_plan(8)) as one:
        one.ready().stored(range(20))
        jobs = []
        for _ in range(1000):
            jobs.append(one.load(range(rng.randrange(10), 20)))
            if rng.random() < 0.7:
                one.engine.wait({jobs[-1]} if rng.random() < 0.8 else set(jobs[-5:]))
            one.poll()
        results = [one.result(job) for job in jobs]
        assert {reason for result in results for reason in result.lost} == {LossReason.FLUSHED}
        one.idle()
        assert one.engine._core.schedule.statistics().jobs == 0
        assert not one.engine._core._after and not one.engine._open and not one.engine._core._touching
