"""Which blocks are moved next. A pure queue: no clock, no lock; the engine's loop owns it.

Order: jobs that vLLM waits for, then loads, then stores; within a class by submission. A load and a store never share a
queue. Each block ends exactly once, with exactly one result, whatever happens to its job; jobs whose last block ended
are handed out by :meth:`Schedule.poll_finished`.

Life of a block's task, with the call that moves it::

    add_job --> QUEUED --take--> TAKEN --finish--> ENDED
       |          |
       |          `--cancel_job, expire--> ENDED
       |--over a bound--> ENDED (SHED)
       `--same key already under way--> JOINED --claim_followers(leader)--> TAKEN
                                          |
                                          `--leader ended without claim--> QUEUED (a get of its own)

Joining: a load whose store key is queued or being fetched attaches to that task as a follower. When the bytes are in
the slot the lane calls :meth:`Schedule.claim_followers` right before the scatter and scatters to all of them; whoever
comes after that call gets a get of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memkv_vllm.engine.tasks import BlockTask, Job, JobState, TaskQueue, TaskState
from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.types import Direction, LossReason

__all__ = ["BlockTask", "Job", "JobState", "Schedule", "ScheduleStatistics", "TaskState"]


class ScheduleStatistics(NamedTuple):
    """Gauges; all zero when nothing is under way. Followers count as queued until they are claimed."""

    queued_load_blocks: int
    queued_store_blocks: int
    queued_store_bytes: int
    taken_blocks: int
    jobs: int


class Schedule:
    """All block tasks of a rank that have not ended."""

    def __init__(self, max_store_backlog_bytes: int, max_queued_blocks: int = 65536) -> None:
        """Make an empty schedule.

        Args:
            max_store_backlog_bytes: most bytes of queued stores; what goes over is shed. Loads are not counted.
            max_queued_blocks: most queued blocks per direction; what goes over ends as lost with reason ``SHED``.

        Raises:
            ValueError: a bound is below zero, or no block at all could be queued.
        """
        if max_store_backlog_bytes < 0 or max_queued_blocks < 1:
            raise ValueError(f"bad bounds: {max_store_backlog_bytes} bytes, {max_queued_blocks} blocks")
        self._max_store_backlog_bytes = max_store_backlog_bytes
        self._max_queued_blocks = max_queued_blocks
        self._jobs: dict[int, JobState] = {}
        self._queues = {direction: TaskQueue() for direction in (Direction.LOAD, Direction.STORE)}
        self._leaders: dict[bytes, BlockTask] = {}
        self._finished: list[JobState] = []
        self._sequence = 0
        self._taken = 0

    # -- jobs come and go -------------------------------------------------------------------------------------------

    def add_job(self, job: Job) -> list[BlockTask]:
        """Queue a job's blocks.

        A store that does not fit into the backlog keeps its first blocks (a prefix is useful only from its start) and
        sheds the rest: the newest job is refused, never one that was accepted.

        Returns:
            The tasks that were shed; their result (``SHED``) is already in the job.

        Raises:
            LocalProtocolError: a job of this id has not ended yet.
        """
        if job.job_id in self._jobs:
            raise LocalProtocolError(f"job {job.job_id} is already scheduled")
        state = self._jobs[job.job_id] = JobState(job, waited=job.expedited)
        shed: list[BlockTask] = []
        for index, (key, block_id) in enumerate(job.blocks):
            task = self._make_task(job, index, key, block_id)
            state.tasks.append(task)
            if self._is_over_bound(task):
                task.state = TaskState.ENDED
                state.results[index] = LossReason.SHED
                shed.append(task)
            else:
                self._enter(task)
        self._end_if_done(state)
        return shed

    def cancel_job(self, job_id: int, reason: LossReason) -> list[BlockTask]:
        """End a job's tasks that were not taken yet; mark the taken ones as ``cancelled`` for their lanes.

        Followers of other jobs are not touched: where their leader goes, the first of them takes its place.

        Returns:
            The tasks that ended, in job order; none for a job that is unknown or has ended.
        """
        state = self._jobs.get(job_id)
        if state is None:
            return []
        ended = []
        for task in state.tasks:
            if task.state in (TaskState.QUEUED, TaskState.JOINED):
                self._end(task, reason)
                ended.append(task)
            elif task.state is TaskState.TAKEN and task.cancelled is None:
                task.cancelled = reason
        return ended

    def expire(self, now: float) -> list[BlockTask]:
        """End tasks past their deadline that were not taken yet, with reason ``TIMEOUT``.

        Returns:
            The tasks that ended. Taken ones are their lanes' business (and marked as ``cancelled``).
        """
        late = [job_id for job_id, state in self._jobs.items() if state.job.deadline <= now]
        return [task for job_id in late for task in self.cancel_job(job_id, LossReason.TIMEOUT)]

    def end_unstarted(self, deadline: float) -> list[BlockTask]:
        """End queued tasks of jobs due at ``deadline`` or before, with reason ``TIMEOUT``: too late to start them.

        Joined tasks stay, for their bytes may be on the way already, and taken ones are their lanes' business.

        Returns:
            The tasks that ended.
        """
        ended = []
        for state in [state for state in self._jobs.values() if state.job.deadline <= deadline]:
            for task in state.tasks:
                if task.state is TaskState.QUEUED:
                    self._end(task, LossReason.TIMEOUT)
                    ended.append(task)
        return ended

    def abandon_all(self, reason: LossReason) -> list[BlockTask]:
        """End every task, taken ones too: the engine's loop is over and no lane will come back.

        Returns:
            All tasks that ended. Later calls of :meth:`finish` for them raise.
        """
        ended = []
        for state in list(self._jobs.values()):
            for task in state.tasks:
                if task.state is not TaskState.ENDED:
                    self._end(task, reason)
                    ended.append(task)
        return ended

    def poll_finished(self) -> list[JobState]:
        """Jobs whose last block ended since the last call, each exactly once."""
        finished, self._finished = self._finished, []
        return finished

    # -- lanes ------------------------------------------------------------------------------------------------------

    def next_direction(self, now: float, allowed: Iterable[Direction] = tuple(Direction)) -> Direction | None:
        """What a lane that serves ``allowed`` should take next: waited before others, then loads before stores.

        Returns:
            ``None`` when nothing that can still make its deadline is queued.
        """
        heads = [(d, task) for d in allowed if (task := self._queues[d].peek(now)) is not None]
        if not heads:
            return None
        return min(heads, key=lambda head: (not head[1].waited, head[0] is Direction.STORE))[0]

    def head(self, direction: Direction, now: float) -> BlockTask | None:
        """What :meth:`take` would return first."""
        return self._queues[direction].peek(now)

    def take(self, direction: Direction, max_blocks: int, now: float) -> list[BlockTask]:
        """Take the next blocks of a direction; they are the lane's until it calls :meth:`finish` for each.

        Args:
            direction: which queue.
            max_blocks: at most so many.
            now: monotonic seconds; tasks at or past their deadline stay for :meth:`expire`.
        """
        queue = self._queues[direction]
        tasks: list[BlockTask] = []
        while len(tasks) < max_blocks and (task := queue.peek(now)) is not None:
            self._leave(task)
            task.state = TaskState.TAKEN
            self._taken += 1
            tasks.append(task)
        return tasks

    def claim_followers(self, task: BlockTask) -> list[BlockTask]:
        """Close a taken load to further joiners. Call it when its bytes arrived (or are known to be lost).

        Returns:
            The loads that joined so far: scatter the same bytes to each and :meth:`finish` each.

        Raises:
            LocalProtocolError: the task is not in a lane's hands.
        """
        if task.state is not TaskState.TAKEN:
            raise LocalProtocolError(f"claim_followers: task is {task.state.value}: {task.job_id}/{task.index}")
        self._close(task)
        followers, task.followers = task.followers, []
        for follower in followers:
            self._leave(follower)
            follower.state = TaskState.TAKEN
            self._taken += 1
        return followers

    def finish(self, task: BlockTask, reason: LossReason | None, moved_bytes: int = 0) -> None:
        """End a taken task. Followers that were not claimed are queued for a get of their own.

        Args:
            task: from :meth:`take` or :meth:`claim_followers`.
            reason: why the block was lost; ``None`` for success.
            moved_bytes: bytes that went over the wire for it (0 for a follower, or a put of a present key).

        Raises:
            LocalProtocolError: the task is not in a lane's hands (it was finished before).
        """
        if task.state is not TaskState.TAKEN:
            raise LocalProtocolError(f"finish: task is {task.state.value}: {task.job_id}/{task.index}")
        self._jobs[task.job_id].moved_bytes += moved_bytes
        self._end(task, reason)

    def mark_waited(self, job_ids: Iterable[int]) -> None:
        """Put these jobs before all others; unknown ids are no error. A leader inherits it from its followers."""
        for job_id in job_ids:
            state = self._jobs.get(job_id)
            if state is None or state.waited:
                continue
            state.waited = True
            for task in state.tasks:
                self._raise_priority(task)

    def job(self, job_id: int) -> JobState | None:
        """The state of a job that has not ended."""
        return self._jobs.get(job_id)

    def statistics(self) -> ScheduleStatistics:
        """Gauges now."""
        loads, stores = self._queues[Direction.LOAD], self._queues[Direction.STORE]
        return ScheduleStatistics(loads.waiting, stores.waiting, stores.waiting_bytes, self._taken, len(self._jobs))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _make_task(self, job: Job, index: int, key: bytes, block_id: int) -> BlockTask:
        self._sequence += 1
        return BlockTask(
            job.job_id,
            job.direction,
            key,
            block_id,
            index,
            job.block_bytes,
            job.submitted_at,
            job.deadline,
            job.expedited,
            waited=job.expedited,
            sequence=self._sequence,
        )

    def _is_over_bound(self, task: BlockTask) -> bool:
        queue = self._queues[task.direction]
        if queue.waiting >= self._max_queued_blocks:
            return True
        too_many_bytes = queue.waiting_bytes + task.num_bytes > self._max_store_backlog_bytes
        return task.direction is Direction.STORE and too_many_bytes

    def _enter(self, task: BlockTask) -> None:
        """Queue a task, or join it to the one that fetches its key already."""
        queue = self._queues[task.direction]
        queue.waiting += 1
        queue.waiting_bytes += task.num_bytes
        if task.direction is Direction.LOAD:
            leader = self._leaders.setdefault(task.key, task)
            if leader is not task:
                task.state, task.leader = TaskState.JOINED, leader
                leader.followers.append(task)
                if task.waited:
                    self._raise_priority(leader)
                return
        task.state = TaskState.QUEUED
        queue.queued += 1
        queue.push(task)

    def _leave(self, task: BlockTask) -> None:
        """Take a queued or joined task out of the accounts."""
        queue = self._queues[task.direction]
        queue.waiting -= 1
        queue.waiting_bytes -= task.num_bytes
        queue.queued -= task.state is TaskState.QUEUED
        if task.leader is not None:
            if task in task.leader.followers:
                task.leader.followers.remove(task)
            task.leader = None

    def _end(self, task: BlockTask, reason: LossReason | None) -> None:
        if task.state is TaskState.TAKEN:
            self._taken -= 1
        else:
            self._leave(task)
        task.state = TaskState.ENDED
        self._close(task)
        self._requeue(task)
        state = self._jobs[task.job_id]
        state.results[task.index] = reason
        self._end_if_done(state)

    def _requeue(self, gone: BlockTask) -> None:
        """Give the followers of a task that ended unclaimed a get of their own: one leads, the rest join it."""
        followers, gone.followers = gone.followers, []
        for follower in followers:
            follower.leader = None
            self._leave(follower)
            self._enter(follower)

    def _close(self, task: BlockTask) -> None:
        if self._leaders.get(task.key) is task:
            del self._leaders[task.key]

    def _raise_priority(self, task: BlockTask) -> None:
        if task.waited:
            return
        task.waited = True
        if task.state is TaskState.QUEUED:
            self._queues[task.direction].push(task)
        elif task.leader is not None:
            self._raise_priority(task.leader)

    def _end_if_done(self, state: JobState) -> None:
        if state.remaining == 0 and self._jobs.pop(state.job.job_id, None) is not None:
            self._finished.append(state)
