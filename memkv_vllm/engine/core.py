"""The loop side of the engine: owns the schedule, the slots, the links and the lanes. One event loop.

What a lane does with a chunk stands in ``lanes``, which slots may be reused in ``slots``; here is what all lanes
share besides: which blocks are next and whether there is room for them, what became of each, and which jobs still
touch GPU blocks.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from memkv_vllm.config import DirectConfig
from memkv_vllm.engine.api import BlockMover, BlockRef, EngineStatistics, JobResult, StagingMedium
from memkv_vllm.engine.client import ClusterClient, ClusterSettings
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.lanes import Lane
from memkv_vllm.engine.link import ServerLink
from memkv_vllm.engine.plan import StagingPlan
from memkv_vllm.engine.schedule import BlockTask, Job, JobState, Schedule, TaskState
from memkv_vllm.engine.slots import SlotKeeper
from memkv_vllm.engine.staging import Slot
from memkv_vllm.keys import store_key
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.types import Direction, LossReason, MemoryKind, VerifyMode

logger = logging.getLogger("memkv.engine")

START_MARGIN = 0.1
"""Share of a job's time (but no more than half of ``op_timeout_s``) that a transfer must have left to be started."""

SHARD_BYTES = 2
"""The shard's suffix of a store key; what stands before it is hashed by placement."""


@dataclass(frozen=True)
class EngineSettings:
    """How the engine behaves; times in seconds."""

    wait_timeout_s: float
    """Deadline of a job from its submission."""
    verify: VerifyMode
    max_store_backlog_bytes: int
    """Bytes of stores that may queue; more are shed."""
    max_queued_blocks: int = 65_536
    """Blocks of one direction that may queue."""

    @classmethod
    def from_config(cls, direct: DirectConfig) -> EngineSettings:
        """From vLLM's extra configuration, parsed."""
        return cls(direct.wait_timeout_s, direct.verify, direct.max_store_backlog_mb << 20)


class Submission(NamedTuple):
    """A job as vLLM's thread hands it over. ``after`` orders GPU work, see ``api.BlockMover``."""

    job_id: int
    direction: Direction
    blocks: Sequence[BlockRef]
    submitted_at: float
    after: object | None
    expedited: bool


def failed_result(submission: Submission, reason: LossReason) -> JobResult:
    """The result of a job of which no block was moved."""
    count = len(submission.blocks)
    bad = tuple(block.block_id for block in submission.blocks) if submission.direction is Direction.LOAD else ()
    elapsed_s = time.monotonic() - submission.submitted_at
    return JobResult(submission.job_id, submission.direction, count, 0, elapsed_s, bad, {reason: count})


class Chunk(NamedTuple):
    """Blocks of one direction that a lane moves as one group, each with its slot."""

    direction: Direction
    tasks: list[BlockTask]
    slots: list[Slot]


class EngineCore:
    """See the module's text. Everything but ``statistics`` runs on the loop.

    Args:
        cluster: servers, credentials, timeouts.
        plan: lanes and slots.
        medium: makes and reads the slots' memory.
        mover: moves blocks between KV tensors and slots.
        shard: this rank's shard index in store keys.
        settings: deadlines and budgets.
        finished: called with each finished job's result; must be thread-safe and not wait.
    """

    def __init__(
        self,
        *,
        cluster: ClusterSettings,
        plan: StagingPlan,
        medium: StagingMedium,
        mover: BlockMover,
        shard: int,
        settings: EngineSettings,
        finished: Callable[[JobResult], None],
    ) -> None:
        self.mover = mover
        self.verify_mode = settings.verify
        self.verify_turns = itertools.count()
        """Numbers the loaded values, so that ``sampled`` reaches each of them in time. Any thread may take the next."""
        self.schedule = Schedule(settings.max_store_backlog_bytes, settings.max_queued_blocks)
        self._start_margin_s = min(START_MARGIN * settings.wait_timeout_s, cluster.op_timeout_s / 2)
        # Memory of a GPU is not locked in the host's.
        locked_bytes = plan.scratch_bytes if medium.kind is MemoryKind.HOST else 0
        self.client = ClusterClient(
            cluster,
            cluster.transports(PeerKind.ENGINE, locked_bytes),
            PeerKind.ENGINE,
            on_change=self.wake,
            on_fenced=self._fenced,
        )
        self.slots = SlotKeeper(plan, medium, mover, self.client, self.wake)
        self.counts: Counter[str] = Counter()
        self._plan = plan
        self._shard = shard
        self._settings = settings
        self._finished = finished
        self._after: dict[int, tuple[object | None, float]] = {}
        self._touching: Counter[int] = Counter()
        self._lost = {f"{direction.value}_{reason.value}": 0 for direction in Direction for reason in LossReason}
        self._event = anyio.Event()
        self._lanes = self._make_lanes()

    def _make_lanes(self) -> list[Lane]:
        plan, piece = self._plan, max(1, -(-self._plan.chunk_blocks // 2))
        # Half a chunk at a time: the gather of the second half overlaps the wire time of the first.
        if plan.shared:
            return [Lane(index, tuple(Direction), piece, self) for index in range(plan.num_lanes)]
        kinds = [Direction.LOAD] * plan.lanes_load + [Direction.STORE] * plan.lanes_store
        return [Lane(index, (direction,), piece, self) for index, direction in enumerate(kinds)]

    # -- life

    async def run(self) -> None:
        """Serve jobs until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.client.run)
                tasks.start_soon(self.slots.run)
                tasks.start_soon(self._expire)
                for lane in self._lanes:
                    tasks.start_soon(lane.run)
        finally:
            self.schedule.abandon_all(LossReason.ENGINE)
            self.report()

    # -- jobs

    def add_job(self, submission: Submission) -> None:
        """Take a job from vLLM's thread."""
        try:
            self._add_job(submission)
        except Exception:
            # A bug here must not leave vLLM waiting for a job that nobody has, nor move a block of one that has ended.
            logger.exception("event=job_refused job=%d", submission.job_id)
            self.schedule.cancel_job(submission.job_id, LossReason.ENGINE)
            self._finished(failed_result(submission, LossReason.ENGINE))

    def _add_job(self, submission: Submission) -> None:
        deadline = submission.submitted_at + self._settings.wait_timeout_s
        job = Job(
            submission.job_id,
            submission.direction,
            [(store_key(prefix, self._shard), block_id) for prefix, block_id in submission.blocks],
            self._plan.value_bytes,
            submission.submitted_at,
            deadline,
            submission.expedited,
        )
        self.schedule.add_job(job)
        self._after[job.job_id] = (submission.after, deadline)
        self.report()

    def finish(self, task: BlockTask, reason: LossReason | None, moved_bytes: int = 0) -> None:
        """End a task; call ``report`` after a group of them."""
        self.schedule.finish(task, reason, moved_bytes)

    def report(self) -> None:
        """Hand finished jobs to vLLM's side and wake whoever waits for progress."""
        for state in self.schedule.poll_finished():
            self._after.pop(state.job.job_id, None)
            self._finished(self._result(state))
        self.wake()

    def _result(self, state: JobState) -> JobResult:
        job, lost = state.job, state.lost
        reasons = Counter(reason for _, reason in lost)
        for reason, count in reasons.items():
            self._lost[f"{job.direction.value}_{reason.value}"] += count
        is_load = job.direction is Direction.LOAD
        self.counts["loaded_blocks" if is_load else "stored_blocks"] += len(job.blocks) - len(lost)
        self.counts["loaded_bytes" if is_load else "stored_bytes"] += state.moved_bytes
        return JobResult(
            job.job_id,
            job.direction,
            len(job.blocks),
            state.moved_bytes,
            time.monotonic() - job.submitted_at,
            tuple(block_id for block_id, _ in lost) if is_load else (),
            dict(reasons),
        )

    async def _expire(self) -> None:
        """End blocks that no lane has taken when it is too late to start them, and jobs at their deadline."""
        while True:
            now = time.monotonic()
            due = min((self._next_due(deadline, now) for _, deadline in self._after.values()), default=None)
            if due is None:
                await self.changed()
                continue
            if due > now:
                await anyio.sleep(due - now)
            now = time.monotonic()
            self.schedule.expire(now)
            self.schedule.end_unstarted(now + self._start_margin_s)
            self.report()
            # A job whose last blocks are in a lane's hands stays past its deadline for a moment.
            await anyio.sleep(0.01)

    def _next_due(self, deadline: float, now: float) -> float:
        start_by = deadline - self._start_margin_s
        return start_by if start_by > now else deadline

    # -- lanes

    def wake(self) -> None:
        """Something changed: jobs, slots or servers."""
        self._event.set()
        self._event = anyio.Event()

    async def changed(self) -> None:
        """Wait for the next ``wake``."""
        await self._event.wait()

    def take(self, directions: Sequence[Direction], max_blocks: int) -> Chunk | None:
        """The next chunk that there is work, room and a server for. Blocks of servers that are down end here.

        Blocks due within the start margin are left to ``_expire``: a request with next to no time of its own would
        miss its deadline and cost a healthy connection, which others use too.
        """
        now = time.monotonic()
        due = now + self._start_margin_s
        usable: dict[ServerLink, bool] = {}
        while (direction := self.schedule.next_direction(due, directions)) is not None:
            room = min(self.slots.pool.available(direction), max_blocks)
            if room == 0:
                # For a load at the head there is no room either, but a waited store behind it need not wait for one.
                if Direction.STORE in directions and self._drop_waited_store(due):
                    continue
                return None
            live = self._reachable(self.schedule.take(direction, room, due), usable, now)
            if live:
                return Chunk(direction, live, self.slots.pool.try_acquire(direction, len(live)))
        return None

    def _reachable(self, tasks: list[BlockTask], usable: dict[ServerLink, bool], now: float) -> list[BlockTask]:
        """Those of ``tasks`` whose server takes requests; the others end here."""
        live: list[BlockTask] = []
        for task in tasks:
            link = self.owner(task)
            if link not in usable:
                usable[link] = link.available(now)
            if usable[link]:
                live.append(task)
            else:
                self.lose(task, LossReason.BREAKER)
        if len(live) < len(tasks):
            self.report()
        return live

    def _drop_waited_store(self, due: float) -> bool:
        """vLLM waits for the next store's GPU blocks and no slot is free for them: drop one, never wait for one."""
        head = self.schedule.head(Direction.STORE, due)
        if head is None or not head.waited:
            return False
        (task,) = self.schedule.take(Direction.STORE, 1, due)
        self.finish(task, LossReason.FLUSHED)
        self.report()
        return True

    def owner(self, task: BlockTask) -> ServerLink:
        """The server that holds the task's block."""
        return self.client.owner(task.key[:-SHARD_BYTES])

    def after(self, tasks: Iterable[BlockTask]) -> object | None:
        """What GPU work on these blocks must wait for: events of one stream, so the newest job's includes the rest."""
        newest = max(tasks, key=lambda task: task.sequence, default=None)
        return None if newest is None else self._after.get(newest.job_id, (None, 0.0))[0]

    def lose(self, task: BlockTask, reason: LossReason) -> None:
        """End a task as lost, and a load's followers with it."""
        followers = self.schedule.claim_followers(task) if task.direction is Direction.LOAD else []
        for each in (task, *followers):
            self.finish(each, each.cancelled or reason)

    def _fenced(self, holder: Holder) -> None:
        self.counts["fences"] += 1
        self.slots.fenced(holder)

    # -- GPU blocks

    def begin_touch(self, tasks: Iterable[BlockTask]) -> None:
        """A gather or scatter of these blocks starts."""
        self._touching.update(task.job_id for task in tasks)

    def end_touch(self, tasks: Iterable[BlockTask]) -> None:
        """It has ended, on the GPU too."""
        self._touching.subtract(task.job_id for task in tasks)
        self._touching += Counter()
        self.wake()

    async def flush(self, job_ids: set[int]) -> None:
        """Return once no gather or scatter of these jobs is pending (``wait`` of vLLM's worker)."""
        for job_id in job_ids:
            state = self.schedule.job(job_id)
            if state is not None and state.job.direction is Direction.LOAD and not state.job.expedited:
                self.schedule.cancel_job(job_id, LossReason.FLUSHED)
        self.schedule.mark_waited(job_ids)
        self.report()
        while any(self._uses_blocks(job_id) for job_id in job_ids):
            await self.changed()

    def _uses_blocks(self, job_id: int) -> bool:
        if self._touching[job_id]:
            return True
        state = self.schedule.job(job_id)
        if state is None:
            return False
        if state.job.direction is Direction.LOAD:
            return state.job.expedited
        return any(task.state is TaskState.QUEUED for task in state.tasks)

    # -- statistics

    def statistics(self) -> EngineStatistics:
        """A snapshot; may be called from another thread (every read is of one object)."""
        queued, slots, counts = self.schedule.statistics(), self.slots.pool.statistics(), self.counts
        return EngineStatistics(
            queued_load_blocks=queued.queued_load_blocks,
            queued_store_blocks=queued.queued_store_blocks,
            queued_store_bytes=queued.queued_store_bytes,
            inflight_requests=-counts["answered"] + counts["posted"],  # read in this order it is never below zero
            slots_free=slots.free,
            slots_held=slots.held,
            slots_quarantined=slots.quarantined,
            loaded_blocks=counts["loaded_blocks"],
            stored_blocks=counts["stored_blocks"],
            already_present_blocks=counts["already_present"],
            loaded_bytes=counts["loaded_bytes"],
            stored_bytes=counts["stored_bytes"],
            joined_loads=counts["joined"],
            lost=dict(self._lost),
            servers_ready=self.client.num_ready,
            reconnects=sum(max(0, link.statistics().connects - 1) for link in self.client.links.values()),
            fences=counts["fences"],
            slow_paths=sum(link.statistics().slow_paths for link in self.client.links.values()),
        )
