"""An engine without threads, network or staging: jobs run when they are polled. For tests of vLLM's worker side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memkv_vllm.engine.api import BlockRef, EngineStatistics, JobResult
from memkv_vllm.types import Direction, LossReason


@dataclass
class FakeEngine:
    """Implements :class:`memkv_vllm.engine.api.Engine`.

    Attributes:
        values: prefix -> the GPU block id that was stored under it.
        unreadable: prefixes whose loads fail.
        held: jobs do not end while this is set.
        broken: names of calls that raise.
        calls: every call, in order.
    """

    values: dict[bytes, int] = field(default_factory=dict)
    unreadable: set[bytes] = field(default_factory=set)
    held: bool = False
    broken: set[str] = field(default_factory=set)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    closed: bool = False
    _jobs: list[Callable[[], JobResult]] = field(default_factory=list)

    def _call(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        if name in self.broken:
            raise RuntimeError(f"injected failure of {name}")

    def submit_store(self, job_id: int, blocks: Sequence[BlockRef], after: object | None = None) -> None:
        """Queue a store."""
        self._call("submit_store", job_id, tuple(blocks), after)

        def run() -> JobResult:
            self.values.update(blocks)
            return JobResult(job_id, Direction.STORE, len(blocks), 100 * len(blocks), 0.5)

        self._jobs.append(run)

    def submit_load(
        self, job_id: int, blocks: Sequence[BlockRef], after: object | None = None, *, expedited: bool = False
    ) -> None:
        """Queue a load."""
        self._call("submit_load", job_id, tuple(blocks), after, expedited)

        def run() -> JobResult:
            bad = tuple(b.block_id for b in blocks if b.prefix not in self.values or b.prefix in self.unreadable)
            moved = 100 * (len(blocks) - len(bad))
            lost = {LossReason.CHECKSUM: len(bad)} if bad else {}
            return JobResult(job_id, Direction.LOAD, len(blocks), moved, 0.25, bad, lost)

        self._jobs.append(run)

    def poll_finished(self) -> list[JobResult]:
        """Run what is queued, unless held."""
        self._call("poll_finished")
        if self.held:
            return []
        jobs, self._jobs = self._jobs, []
        return [run() for run in jobs]

    def wait(self, job_ids: set[int]) -> None:
        """Nothing touches GPU memory here."""
        self._call("wait", frozenset(job_ids))

    def statistics(self) -> EngineStatistics:
        """Zeros, but for the number of values."""
        counts = dict.fromkeys(EngineStatistics._fields, 0)
        return EngineStatistics(**{**counts, "stored_blocks": len(self.values), "lost": {}})  # type: ignore[arg-type]

    def close(self) -> None:
        """Remember it."""
        self._call("close")
        self.closed = True
