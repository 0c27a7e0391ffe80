"""Any sequence of jobs, lanes, cancels and expiries: each block ends once, and the accounts return to zero."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memkv_vllm.engine.schedule import BlockTask, Job, JobState, Schedule, ScheduleStatistics, TaskState
from memkv_vllm.types import Direction, LossReason

LOAD, STORE = Direction.LOAD, Direction.STORE
SIZE = 10
BACKLOG = 8 * SIZE
MAX_BLOCKS = 12


class ScheduleMachine(RuleBasedStateMachine):
    """Lanes and vLLM at once, in any order, against the schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(BACKLOG, MAX_BLOCKS)
        self.now = 0.0
        self.jobs: dict[int, Job] = {}
        self.finished: dict[int, JobState] = {}
        self.waited: set[int] = set()
        self.in_hands: list[BlockTask] = []
        self.results: Counter[tuple[int, int]] = Counter()

    def count(self, tasks: list[BlockTask]) -> None:
        self.results.update((task.job_id, task.index) for task in tasks)

    @rule(
        direction=st.sampled_from(Direction),
        keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=6),
        timeout=st.integers(1, 10),
        expedited=st.booleans(),
    )
    def add(self, direction: Direction, keys: list[bytes], timeout: int, expedited: bool) -> None:
        job_id = len(self.jobs)
        blocks = [(key, job_id * 100 + index) for index, key in enumerate(keys)]
        self.jobs[job_id] = job = Job(job_id, direction, blocks, SIZE, self.now, self.now + timeout, expedited)
        if expedited:
            self.waited.add(job_id)
        before = self.schedule.statistics()
        shed = self.schedule.add_job(job)
        self.count(shed)
        if direction is LOAD:
            assert len(shed) == max(0, before.queued_load_blocks + len(keys) - MAX_BLOCKS)

    @rule(direction=st.sampled_from(Direction), count=st.integers(1, 4))
    def take(self, direction: Direction, count: int) -> None:
        tasks = self.schedule.take(direction, count, self.now)
        assert all(task.direction is direction and task.deadline > self.now for task in tasks)
        order = [(not task.waited, task.sequence) for task in tasks]
        assert order == sorted(order)
        left = [task for state in self.open_states() for task in state.tasks if task.state is TaskState.QUEUED]
        for task in left:
            if tasks and task.direction is direction and task.deadline > self.now:
                assert (not task.waited, task.sequence) > order[-1], "overtaken"
        self.in_hands += tasks

    def open_states(self) -> list[JobState]:
        states = (self.schedule.job(job_id) for job_id in self.jobs)
        return [state for state in states if state is not None]

    @rule(allowed=st.sets(st.sampled_from(Direction), min_size=1))
    def loads_come_first(self, allowed: set[Direction]) -> None:
        ready = [
            task
            for state in self.open_states()
            for task in state.tasks
            if task.state is TaskState.QUEUED and task.deadline > self.now and task.direction in allowed
        ]
        best = min(ready, key=lambda task: (not task.waited, task.direction is STORE), default=None)
        assert self.schedule.next_direction(self.now, allowed) is (best and best.direction)

    @rule(data=st.data(), claim=st.booleans(), reason=st.sampled_from([None, LossReason.ABSENT]))
    def finish(self, data: st.DataObject, claim: bool, reason: LossReason | None) -> None:
        if not self.in_hands:
            return
        task = data.draw(st.sampled_from(self.in_hands))
        followers = self.schedule.claim_followers(task) if claim else []
        assert all(other.key == task.key and other.direction is LOAD for other in followers)
        for ended in (task, *followers):
            self.schedule.finish(ended, ended.cancelled or reason, SIZE)
        self.count([task, *followers])
        self.in_hands.remove(task)

    @rule(data=st.data())
    def claim_only(self, data: st.DataObject) -> None:
        if self.in_hands:
            self.in_hands += self.schedule.claim_followers(data.draw(st.sampled_from(self.in_hands)))

    @rule(data=st.data(), reason=st.sampled_from([LossReason.FLUSHED, LossReason.TIMEOUT]))
    def cancel(self, data: st.DataObject, reason: LossReason) -> None:
        if self.jobs:
            self.count(self.schedule.cancel_job(data.draw(st.sampled_from(sorted(self.jobs))), reason))

    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        if self.jobs:
            chosen = data.draw(st.sets(st.sampled_from(sorted(self.jobs))))
            self.waited |= chosen
            self.schedule.mark_waited(chosen)

    @rule(seconds=st.integers(0, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        late = self.schedule.expire(self.now)
        assert all(task.deadline <= self.now for task in late)
        self.count(late)

    @rule()
    def poll(self) -> None:
        for state in self.schedule.poll_finished():
            assert state.job.job_id not in self.finished, "handed out twice"
            self.finished[state.job.job_id] = state

    @invariant()
    def bounded_and_prioritised(self) -> None:
        stats = self.schedule.statistics()
        assert stats.queued_store_bytes <= BACKLOG
        assert max(stats.queued_load_blocks, stats.queued_store_blocks) <= MAX_BLOCKS
        assert stats.taken_blocks == len(self.in_hands)
        assert not self.results or max(self.results.values()) == 1, "ended twice"
        for state in self.open_states():
            assert state.remaining > 0
            assert all(
                task.waited
                for task in state.tasks
                if state.job.job_id in self.waited and task.state in (TaskState.QUEUED, TaskState.JOINED)
            )

    def teardown(self) -> None:
        for _ in range(100):
            if not self.in_hands and not self.schedule.statistics().jobs:
                break
            for task in self.in_hands:
                self.schedule.finish(task, None)
            self.count(self.in_hands)
            self.in_hands = self.schedule.take(LOAD, 3, self.now) + self.schedule.take(STORE, 3, self.now)
            if not self.in_hands:
                self.expire()
        self.poll()
        assert self.schedule.statistics() == ScheduleStatistics(0, 0, 0, 0, 0)
        assert not self.schedule._leaders
        assert set(self.finished) == set(self.jobs), "a job was lost"
        for job_id, job in self.jobs.items():
            assert sorted(self.finished[job_id].results) == list(range(len(job.blocks)))
            assert all(self.results[job_id, index] == 1 for index in range(len(job.blocks)))


ScheduleMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestSchedule = ScheduleMachine.TestCase
