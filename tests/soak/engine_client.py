"""A rank's engine and a scheduler's prober at work: stores, loads, flushes, lookups, resets of a private namespace.

Ranks with one ``space`` share their blocks, and so hit what another one stored. A rank that is ``private`` resets its
namespace now and then; what it stored before must not come back. Every block that a load reports as good is compared
with what its key demands. ``python -m tests.soak.engine_client ORDERS``.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from memkv_vllm.config.client import Mode, load_client_config
from memkv_vllm.engine.api import BlockRef, JobResult
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.keys import block_prefix, store_key
from memkv_vllm.types import Direction, LossReason, VerifyMode
from tests.soak.client_process import Findings, Journal, Orders, begin
from tests.soak.content import content, first_difference
from tests.support.fake_mover import ArrayMover
from tests.support.ranks import Lookups, Rank, lookups, rank, staging_plan

JOBS, JOB_BLOCKS = 4, 12
"""Jobs under way at a time, and blocks of the largest."""
JOB_S = 8.0
"""Deadline of a job."""
OVERDUE_S = JOB_S + 30.0
"""A job that has not ended by then hangs."""
LOOKUP_BLOCKS, RESET_S, RESET_EVERY_S = 48, 3.0, 10.0
CERTAIN = {LossReason.PENDING, LossReason.SHED, LossReason.REFUSED}
"""Losses after which it is known that nothing was stored and nothing will be."""
MAX_REMOVED = 40


@dataclass
class Space:
    """The blocks of one namespace, numbered."""

    digest: bytes
    stored: set[int] = field(default_factory=set)
    """Numbers that this process has tried to store."""
    unsure: set[int] = field(default_factory=set)
    """Those of which a store ended without a word from the server: it may still be carried out."""

    def prefix(self, number: int) -> bytes:
        """Of block ``number``."""
        return block_prefix(self.digest, hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)

    def key(self, number: int) -> bytes:
        """The store key of its only value."""
        return store_key(self.prefix(number), 0)

    def must_be_gone(self) -> list[int]:
        """After a reset that all servers confirmed."""
        return sorted(self.stored - self.unsure)


@dataclass
class Job:
    """One job under way: what it moves, and its rows in the fake GPU's memory."""

    direction: Direction
    space: Space
    numbers: Sequence[int]
    place: range
    due: float

    @property
    def rows(self) -> range:
        """One for each block."""
        return self.place[: len(self.numbers)]


class EngineClient:
    """One process's work.

    Args:
        orders: ``options``: value_bytes, blocks (how many the space has), space, private, verify.
        findings: where counts and findings go.
        one: the engine.
        questions: the prober.
    """

    def __init__(self, orders: Orders, findings: Findings, one: Rank, questions: Lookups) -> None:
        self._findings, self._one, self._questions = findings, one, questions
        self._dice = random.Random(f"{orders.seed}:{orders.name}:{orders.life}")
        self._journal = Journal(orders.journal)
        self._blocks, self._private = int(orders.options["blocks"]), bool(orders.options["private"])
        self._label = f"{orders.seed}:{orders.options['space']}" + (f":{orders.life}" if self._private else "")
        self._epochs = itertools.count()
        self._space = self._next_space()
        self._removed: list[Space] = []
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count(1)
        self._places = [range(place * JOB_BLOCKS, (place + 1) * JOB_BLOCKS) for place in range(JOBS)]
        self._reset_at = time.monotonic() + RESET_EVERY_S

    def run(self) -> None:
        """Until SIGTERM; then everything that is under way ends, and nothing may be left."""
        while not self._findings.ending.is_set():
            self._finish_jobs()
            if self._private and time.monotonic() > self._reset_at:
                self._reset()
            elif self._places and self._dice.random() < 0.8:
                self._start_job()
            else:
                self._look()
            self._findings.ending.wait(self._dice.uniform(0, 0.02))
        self._finish_all()
        self._one.idle()

    # -- jobs

    def _start_job(self) -> None:
        numbers = self._some_numbers(JOB_BLOCKS)
        if self._removed and self._dice.random() < 0.1:
            space = self._dice.choice(self._removed)
            self._submit_load(space, self._some_gone(space, JOB_BLOCKS))
        elif self._dice.random() < 0.4:
            self._submit_store(numbers)
        else:
            self._submit_load(self._space, numbers)

    def _some_numbers(self, most: int) -> list[int]:
        """Small numbers more often: about half of the loads want an eighth of the blocks."""
        return sorted({int(self._blocks * self._dice.random() ** 3) for _ in range(self._dice.randint(1, most))})

    def _some_gone(self, space: Space, most: int) -> list[int]:
        gone = space.must_be_gone()
        return self._dice.sample(gone, min(most, len(gone)))

    def _submit_store(self, numbers: Sequence[int]) -> None:
        space, number = self._space, next(self._ids)
        job = self._take_place(number, Direction.STORE, space, numbers)
        for row, block in zip(job.rows, numbers, strict=True):
            self._one.mover.blocks[row] = content(space.key(block), self._one.mover.value_bytes)
        space.stored.update(numbers)
        blocks = [BlockRef(space.prefix(block), row) for row, block in zip(job.rows, numbers, strict=True)]
        self._one.engine.submit_store(number, blocks)
        self._sometimes_wait(number)

    def _submit_load(self, space: Space, numbers: Sequence[int]) -> None:
        number, half = next(self._ids), self._one.half
        job = self._take_place(number, Direction.LOAD, space, numbers)
        self._one.mover.blocks[half + job.place.start : half + job.place.stop] = 0xEE
        blocks = [BlockRef(space.prefix(block), half + row) for row, block in zip(job.rows, numbers, strict=True)]
        self._one.engine.submit_load(number, blocks)
        self._sometimes_wait(number)

    def _take_place(self, number: int, direction: Direction, space: Space, numbers: Sequence[int]) -> Job:
        self._jobs[number] = job = Job(direction, space, numbers, self._places.pop(), time.monotonic() + OVERDUE_S)
        return job

    def _sometimes_wait(self, number: int) -> None:
        """VLLM takes the GPU blocks back now and then."""
        if self._dice.random() < 0.03:
            self._one.engine.wait({number})
            self._findings.counts["waits"] += 1

    def _finish_jobs(self) -> None:
        for result in self._one.engine.poll_finished():
            job = self._jobs.pop(result.job_id)
            self._count(job, result)
            if job.direction is Direction.LOAD:
                self._compare(job, result)
            elif not set(result.lost) <= CERTAIN:
                job.space.unsure.update(job.numbers)
            self._places.append(job.place)
            self._findings.operation()
        for number, job in self._jobs.items():
            if time.monotonic() > job.due:
                job.due = float("inf")
                self._findings.wrong(f"job {number} did not end within {OVERDUE_S:g} s: {self._one.statistics}")

    def _count(self, job: Job, result: JobResult) -> None:
        for reason, count in result.lost.items():
            self._findings.counts[f"{job.direction.value}_lost_{reason.value}"] += count
        self._findings.counts[f"{job.direction.value}_good"] += result.num_blocks - sum(result.lost.values())
        self._findings.counts[f"{job.direction.value}_bytes"] += result.moved_bytes

    def _compare(self, job: Job, result: JobResult) -> None:
        bad, half = set(result.bad_block_ids), self._one.half
        for row, block in zip(job.rows, job.numbers, strict=True):
            if half + row in bad:
                continue
            key = job.space.key(block)
            at = first_difference(key, self._one.mover.blocks[half + row])
            if at is not None:
                self._findings.wrong(f"wrong bytes were loaded: block {block}, {key.hex()}, first at {at}")
            if job.space is not self._space and block not in job.space.unsure:
                self._findings.wrong(f"a value of a namespace that was reset was loaded: {key.hex()}")

    def _finish_all(self) -> None:
        """Every job ends by its own deadline; one that does not is a finding."""
        end = time.monotonic() + OVERDUE_S + 5
        while self._jobs and time.monotonic() < end:
            self._finish_jobs()
            time.sleep(0.005)

    # -- lookups and resets

    def _look(self) -> None:
        space = self._dice.choice(self._removed) if self._removed and self._dice.random() < 0.4 else self._space
        if space is self._space:
            numbers = self._some_numbers(LOOKUP_BLOCKS)
        else:
            numbers = self._some_gone(space, LOOKUP_BLOCKS)
        for number, answer in self._questions.ask(numbers, space.digest).items():
            self._findings.counts[f"lookup_{answer.present}"] += 1
            if answer.present and space is not self._space:
                self._findings.wrong(f"a value of a namespace that was reset is found: {space.key(number).hex()}")
        self._findings.operation()

    def _reset(self) -> None:
        """Reset the namespace and go on in another one, if all servers confirm; else try again later."""
        self._finish_all()
        self._reset_at = time.monotonic() + RESET_EVERY_S
        if self._questions.prober.reset_namespace(self._space.digest, RESET_S):
            self._findings.counts["resets_unconfirmed"] += 1
            return
        old, self._space = self._space, self._next_space()
        self._journal.dead("*", [old.key(number) for number in old.must_be_gone()])
        self._findings.counts["resets"] += 1
        self._removed = [*self._removed[-MAX_REMOVED:], old]

    def _next_space(self) -> Space:
        name = f"{self._label}:{next(self._epochs)}" if self._private else self._label
        return Space(hashlib.sha256(name.encode()).digest())


def main() -> None:
    """Run until SIGTERM."""
    orders, findings = begin()
    mode: Mode = "direct" if orders.mode == "direct" else "tier"
    settings = ClusterSettings.from_config(load_client_config(orders.environ), mode)
    value_bytes = int(orders.options["value_bytes"])
    plan = staging_plan(16, value=value_bytes, lanes=4)
    mover = ArrayMover(2 * JOBS * JOB_BLOCKS, value_bytes)
    verify = VerifyMode(orders.options["verify"])
    with (
        rank(settings, plan=plan, blocks=JOBS * JOB_BLOCKS, wait_timeout_s=JOB_S, verify=verify, mover=mover) as one,
        lookups(settings) as questions,
    ):
        EngineClient(orders, findings, one, questions).run()
    findings.beat(final=True)


if __name__ == "__main__":
    main()
