"""Jobs, their block tasks, and the queue of one direction: the data that ``schedule`` works on. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from memkv_vllm.types import Direction, LossReason

__all__ = ["BlockTask", "Job", "JobState", "TaskQueue", "TaskState"]

_COMPACT_AT = 64
"""Stale heap entries below this number are not worth a sweep."""


class TaskState(Enum):
    """Where a task stands; see the picture in ``schedule``."""

    QUEUED = "queued"
    JOINED = "joined"
    TAKEN = "taken"
    ENDED = "ended"


@dataclass(frozen=True)
class Job:
    """A transfer job as it is handed over. ``blocks`` holds (store key, GPU block id), prefix order first."""

    job_id: int
    direction: Direction
    blocks: Sequence[tuple[bytes, int]]
    block_bytes: int
    submitted_at: float
    deadline: float
    expedited: bool = False
    """vLLM is going to block on it: it counts as waited from the start."""


@dataclass(eq=False, slots=True)
class BlockTask:
    """One block of one job. Owned by the :class:`Schedule`; others read it."""

    job_id: int
    direction: Direction
    key: bytes
    """Store key; equal keys of loads are joined."""
    block_id: int
    index: int
    """Position in the job's block list."""
    num_bytes: int
    submitted_at: float
    deadline: float
    expedited: bool
    waited: bool
    sequence: int
    """Order of submission over all jobs."""
    state: TaskState = TaskState.QUEUED
    leader: BlockTask | None = None
    followers: list[BlockTask] = field(default_factory=list)
    cancelled: LossReason | None = None
    """Set when the job was cancelled after the task was taken. A lane that has not scattered (or gathered) it yet skips
    that and finishes it with this reason; a store whose block is gathered may go on."""


@dataclass(eq=False, slots=True)
class JobState:
    """Progress of a job. ``results`` maps a block's position to why it was lost, or to ``None`` for success."""

    job: Job
    waited: bool
    tasks: list[BlockTask] = field(default_factory=list)
    results: dict[int, LossReason | None] = field(default_factory=dict)
    moved_bytes: int = 0

    @property
    def remaining(self) -> int:
        """Blocks without a result."""
        return len(self.job.blocks) - len(self.results)

    @property
    def lost(self) -> list[tuple[int, LossReason]]:
        """(GPU block id, reason) of each lost block, in job order."""
        results = sorted(self.results.items())
        return [(self.job.blocks[index][1], reason) for index, reason in results if reason is not None]


class TaskQueue:
    """Tasks of one direction: two heaps by submission, waited ones first. Entries of gone tasks are skipped lazily."""

    __slots__ = ("_heaps", "queued", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self._heaps: dict[bool, list[tuple[int, BlockTask]]] = {True: [], False: []}
        self.queued = 0
        self.waiting = 0
        """Queued and joined tasks: what the bound counts."""
        self.waiting_bytes = 0

    def push(self, task: BlockTask) -> None:
        """Enter a task under its current class; again after its class changed."""
        heap = self._heaps[task.waited]
        if len(heap) > 2 * self.queued + _COMPACT_AT:
            heap[:] = [entry for entry in heap if self._is_live(entry[1], task.waited)]
            heapq.heapify(heap)
        heapq.heappush(heap, (task.sequence, task))

    def peek(self, now: float) -> BlockTask | None:
        """The next task that can still make it; drops entries of others (``expire`` ends the late ones)."""
        for waited, heap in self._heaps.items():
            while heap:
                task = heap[0][1]
                if self._is_live(task, waited) and task.deadline > now:
                    return task
                heapq.heappop(heap)
        return None

    @staticmethod
    def _is_live(task: BlockTask, waited: bool) -> bool:
        return task.state is TaskState.QUEUED and task.waited is waited
