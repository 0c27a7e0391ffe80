"""The transfer engine of one rank, as its vLLM worker sees it.

This object belongs to vLLM's worker thread. It hands jobs to the loop thread, where :class:`EngineCore` owns
everything else, and takes results from a queue. ``submit_*`` and ``poll_finished`` take microseconds whatever
the network does; ``wait`` guards GPU blocks only. If the loop thread dies, all open jobs end at once with
their load blocks reported as bad, and so does every later job: the engine's death is never vLLM's.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence

from memkv_vllm.engine.api import BlockMover, BlockRef, EngineStatistics, JobResult, StagingMedium
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.engine.core import EngineCore, EngineSettings, Submission, failed_result
from memkv_vllm.engine.medium import HostMedium
from memkv_vllm.engine.plan import StagingPlan
from memkv_vllm.engine.portal import LoopThread
from memkv_vllm.errors import EngineStopped, EnvironmentFault, LocalProtocolError
from memkv_vllm.types import Direction, LossReason

__all__ = ["EngineSettings", "TransferEngine"]

logger = logging.getLogger("memkv.engine")

START_VERDICT_S = 4.5
"""How long a start waits for servers that have not shown yet whether they reach this host's memory: a server takes up
to 3 s to find that a path carries no packets, and an engine that refuses to start is to have ended within 5."""


class TransferEngine:
    """See :class:`memkv_vllm.engine.api.Engine`. Call ``start`` once, then from one thread only.

    Args:
        cluster: servers, credentials, timeouts.
        plan: lanes and slots.
        mover: moves blocks between KV tensors and slots.
        shard: this rank's shard index in store keys.
        settings: deadlines and budgets.
        name: for the thread and logs, for example ``rank0``.
        medium: makes and reads the slots' memory, and is closed with the engine; None: host memory.
    """

    def __init__(
        self,
        *,
        cluster: ClusterSettings,
        plan: StagingPlan,
        mover: BlockMover,
        shard: int,
        settings: EngineSettings,
        name: str,
        medium: StagingMedium | None = None,
    ) -> None:
        self._settings = settings
        self._verdict_s = min(cluster.connect_timeout_s, START_VERDICT_S)
        self._close_timeout_s = cluster.connect_timeout_s + 5.0
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._open: dict[int, Submission] = {}
        self._core = EngineCore(
            cluster=cluster,
            plan=plan,
            medium=HostMedium() if medium is None else medium,
            mover=mover,
            shard=shard,
            settings=settings,
            finished=self._finished.put,
        )
        self._mover = mover
        self._thread = LoopThread(f"memkv-{name}", lambda _: self._core.run())
        self._closed = False

    def start(self) -> None:
        """Make the staging pool and start the loop; servers are connected in the background.

        Over RDMA it waits until every server was tried once, at most ``START_VERDICT_S`` or the connect timeout. One
        that does not answer is no reason not to start: its blocks are missed until it is there.

        Raises:
            EnvironmentFault: no memory for the staging pool, or a server answers and cannot reach this host's memory,
                which no waiting mends. Everything is closed then.
        """
        self._core.slots.prepare()
        self._thread.start()
        if self._core.client.may_be_half_reachable and (problems := self._first_problems()):
            self.close()
            servers = "; ".join(f"server {name}: {problem}" for name, problem in problems.items())
            raise EnvironmentFault(
                f"{self._thread.name} does not start, for {len(problems)} of {len(self._core.client.links)} servers "
                f"answer but cannot reach this host's memory, and nothing else is used in place of RDMA: {servers}"
            )

    def _first_problems(self) -> dict[str, str]:
        try:
            return self._thread.call(self._core.client.first_problems, self._verdict_s, timeout_s=self._verdict_s + 1.0)
        except (EngineStopped, TimeoutError) as error:
            logger.error("event=no_first_verdict thread=%s reason=%r", self._thread.name, str(error))
            return {}

    def submit_store(self, job_id: int, blocks: Sequence[BlockRef], after: object | None = None) -> None:
        """Hand over a store; returns in microseconds.

        Raises:
            LocalProtocolError: a job of this id has not been reported yet; it is not touched.
        """
        self._submit(job_id, Direction.STORE, blocks, after, expedited=False)

    def submit_load(
        self, job_id: int, blocks: Sequence[BlockRef], after: object | None = None, *, expedited: bool = False
    ) -> None:
        """Hand over a load; ``expedited`` loads are awaited by ``wait`` instead of cancelled. Raises as stores do."""
        self._submit(job_id, Direction.LOAD, blocks, after, expedited=expedited)

    def _submit(
        self, job_id: int, direction: Direction, blocks: Sequence[BlockRef], after: object | None, *, expedited: bool
    ) -> None:
        if job_id in self._open:
            raise LocalProtocolError(f"job {job_id} has not been reported as finished yet")
        submission = Submission(job_id, direction, blocks, time.monotonic(), after, expedited)
        self._open[job_id] = submission
        self._thread.post(self._core.add_job, submission)

    def poll_finished(self) -> list[JobResult]:
        """Jobs finished since the last call, each exactly once."""
        results: list[JobResult] = []
        if self._open and not self._thread.alive:
            self._drain(results)
            self._fail_open(results)
        else:
            self._drain(results)
        return results

    def _drain(self, results: list[JobResult]) -> None:
        while not self._finished.empty():
            result = self._finished.get_nowait()
            if self._open.pop(result.job_id, None) is not None:
                results.append(result)

    def _fail_open(self, results: list[JobResult]) -> None:
        """The loop is dead: every open job ends here, load blocks reported as bad."""
        results += [failed_result(submission, LossReason.ENGINE) for submission in self._open.values()]
        self._open.clear()

    def wait(self, job_ids: set[int]) -> None:
        """Return once none of these jobs reads or writes GPU blocks any more.

        Stores: gathered blocks are done for it, ungathered ones are gathered at once where slots are free, else
        dropped. Loads: cancelled before their scatter, unless expedited: those are awaited to their deadline.
        """
        known = {job_id for job_id in job_ids if job_id in self._open}
        if not known:
            return
        try:
            # A gather or scatter ends by itself and an expedited load by its deadline; the loop's death ends the call.
            self._thread.call(self._core.flush, known, timeout_s=self._settings.wait_timeout_s + 60.0)
        except EngineStopped:
            logger.warning("event=wait_after_engine_end jobs=%d: nothing touches their blocks any more", len(known))
        except TimeoutError:
            logger.error("event=wait_timeout jobs=%d: a GPU copy does not end; the GPU may hang", len(known))

    def statistics(self) -> EngineStatistics:
        """A snapshot of counters and gauges."""
        return self._core.statistics()

    def close(self) -> None:
        """Orderly end, bounded in time; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread.stop(self._close_timeout_s):
            self._mover.close()
            self._core.slots.close()
        else:
            logger.error("event=engine_slow_stop thread=%s: its memory stays mapped", self._thread.name)
