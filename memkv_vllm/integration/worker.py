"""The worker side: vLLM's ``OffloadingWorker`` on a rank's transfer engine.

vLLM dies of a job that fails (``assert success``, in all releases), so none ever does: every job is taken, every job
ends with success, and what was lost stands in two other places: blocks of a load that did not arrive are handed to
the connector's load-error hook (``compat.install_load_error_hook``) at the very moment at which the job is reported,
so that the scheduler recomputes them; and every lost block is counted and logged by reason.

An error inside the engine becomes lost blocks too. Before such a load is reported, the engine is told to let go of
the job's GPU blocks: vLLM gives them to the recomputation, and nothing may write into them any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from memkv_vllm.engine.api import BlockRef, Engine, EngineStatistics, JobResult
from memkv_vllm.errors import MemkvError
from memkv_vllm.integration import compat
from memkv_vllm.integration.compat import MemKVLoadStoreSpec, TransferResult
from memkv_vllm.integration.metrics import LossLog
from memkv_vllm.keys import block_prefix
from memkv_vllm.types import Direction, LossReason

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("memkv.integration.worker")


class MemKVOffloadingWorker(compat.OffloadingWorker):
    """See the module. All calls come from the model runner's thread; none of them waits for the network.

    Args:
        engine: started; closed by ``shutdown``.
        namespace: digest that this rank derives by itself; jobs carry the manager's, and a change is logged.
        device: where the KV tensors live.
        rank: for logs.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        namespace: bytes,
        device: torch.device,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._namespace = namespace
        self._device = device
        self._rank = rank
        self._clock = clock
        self._losses = LossLog(rank)
        self._open: dict[int, tuple[Direction, tuple[int, ...]]] = {}
        self._ended: list[JobResult] = []
        self._load_errors: set[int] = set()
        self._dead = False
        self._closed = False

    # -- jobs in

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Take a store; True whatever happens to it."""
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Take a load; True whatever happens to it. ``expedited`` (0.33+): the step waits for it."""
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec, expedited=expedited)

    def _submit(self, job_id: int, direction: Direction, gpu_spec: Any, spec: Any, *, expedited: bool = False) -> bool:
        block_ids = tuple(int(block_id) for block_id in gpu_spec.block_ids)
        self._open[job_id] = (direction, block_ids)
        try:
            if self._dead or self._closed:
                raise MemkvError("the transfer engine has ended")
            blocks = self._blocks(block_ids, spec)
        except Exception as error:
            self._refuse(job_id, direction, block_ids, error)
            return True
        try:
            after = self._compute_event()
            if direction is Direction.STORE:
                self._engine.submit_store(job_id, blocks, after)
            else:
                self._engine.submit_load(job_id, blocks, after, expedited=expedited)
        except Exception:
            # Whether the engine has the job is unknown: only its end makes sure that it writes no block later.
            logger.exception("event=engine_error rank=%d call=submit_%s job=%d", self._rank, direction.value, job_id)
            self._abandon()
        return True

    def _blocks(self, block_ids: tuple[int, ...], spec: Any) -> list[BlockRef]:
        if not isinstance(spec, MemKVLoadStoreSpec):
            raise MemkvError(f"a job for another medium: {spec!r}")
        if len(spec.keys) != len(block_ids):
            # vLLM leaves out null blocks (sliding windows): which key goes with which block is then unknown.
            raise MemkvError(f"a job of {len(block_ids)} GPU blocks and {len(spec.keys)} keys")
        if spec.namespace != self._namespace:
            # Right after a cache reset; at the first job it would mean that the two sides read the configuration apart.
            logger.warning(
                "event=namespace_changed rank=%d from=%s to=%s",
                self._rank,
                self._namespace.hex()[:12],
                spec.namespace.hex()[:12],
            )
            self._namespace = spec.namespace
        return [
            BlockRef(block_prefix(spec.namespace, *compat.split_offload_key(key)), block_id)
            for key, block_id in zip(spec.keys, block_ids, strict=True)
        ]

    def _compute_event(self) -> object | None:
        """On CUDA an event on the compute stream: the KV of a store is written, a load's blocks are zeroed, before."""
        if self._device.type != "cuda":
            return None
        import torch

        event: object = torch.cuda.current_stream(self._device).record_event()
        return event

    def _refuse(self, job_id: int, direction: Direction, block_ids: tuple[int, ...], error: Exception) -> None:
        """End a job that never reached the engine: nothing touches its GPU blocks."""
        if not self._dead:
            logger.error(
                "event=job_refused rank=%d job=%d direction=%s blocks=%d reason=%r",
                self._rank,
                job_id,
                direction.value,
                len(block_ids),
                str(error),
                exc_info=not isinstance(error, MemkvError),
            )
        self._ended.append(_lost_job(job_id, direction, block_ids))

    # -- jobs out

    def get_finished(self) -> list[Any]:
        """Jobs that ended since the last call, each once and with success; see :meth:`take_load_errors`."""
        finished: list[JobResult] = []
        if not self._dead and not self._closed:
            try:
                finished = self._engine.poll_finished()
            except Exception:
                logger.exception("event=engine_error rank=%d call=poll_finished", self._rank)
                self._abandon()
        ended, self._ended = finished + self._ended, []
        results = []
        for job in ended:
            if self._open.pop(job.job_id, None) is None:
                logger.debug("event=unknown_job rank=%d job=%d", self._rank, job.job_id)
            else:
                results.append(self._report(job))
        if not results and any(direction is Direction.LOAD for direction, _ in self._open.values()):
            # Somebody waits for a load. A step with nothing to compute comes round in microseconds, and each turn of
            # the engine's loop would wait 5 ms for the interpreter lock (measured: 0.4 s instead of 0.25). Stores do
            # not hold up the model.
            time.sleep(0)
        return results

    def _report(self, job: JobResult) -> Any:
        self._load_errors.update(job.bad_block_ids)
        if job.lost:
            self._losses.count(job.direction, job.lost, self._clock())
        moved = job.moved_bytes > 0
        return TransferResult(
            job_id=job.job_id,
            success=True,
            transfer_size=job.moved_bytes if moved else None,
            transfer_time=job.elapsed_s if moved else None,
        )

    def statistics(self) -> EngineStatistics:
        """The engine's counters and gauges: what was moved, and what was lost by reason."""
        return self._engine.statistics()

    def take_load_errors(self) -> set[int]:
        """GPU block ids that the loads reported since the last call did not fill. Called by the connector's hook."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def wait(self, job_ids: Collection[int]) -> None:
        """Return once none of these jobs touches GPU memory; unknown and finished ones are no error."""
        waited = {job_id for job_id in job_ids if job_id in self._open}
        if not waited or self._dead or self._closed:
            return
        try:
            self._engine.wait(waited)
        except Exception:
            logger.exception("event=engine_error rank=%d call=wait jobs=%d", self._rank, len(waited))
            self._abandon()

    def _abandon(self) -> None:
        """The engine is broken: end it, so that nothing writes any more, then give up all open jobs."""
        self._dead = True
        try:
            self._engine.close()
        except Exception:
            logger.exception("event=engine_error rank=%d call=close", self._rank)
        reported = {job.job_id for job in self._ended}
        for job_id, (direction, block_ids) in self._open.items():
            if job_id not in reported:
                self._ended.append(_lost_job(job_id, direction, block_ids))

    def shutdown(self) -> None:
        """Close the engine, in bounded time; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._dead:
            try:
                logger.info("event=worker_end rank=%d %s", self._rank, _summary(self._engine.statistics()))
                self._engine.close()
            except Exception:
                logger.exception("event=engine_error rank=%d call=close", self._rank)


def _summary(statistics: EngineStatistics) -> str:
    """What is not zero, as ``name=value`` words."""
    counts = {**statistics._asdict(), "lost": None}
    counts |= {f"lost_{name}": count for name, count in statistics.lost.items()}
    return " ".join(f"{name}={count}" for name, count in counts.items() if count)


def _lost_job(job_id: int, direction: Direction, block_ids: tuple[int, ...]) -> JobResult:
    """A job of which nothing came through, because of this process itself."""
    bad = block_ids if direction is Direction.LOAD else ()
    return JobResult(job_id, direction, len(block_ids), 0, 0.0, bad, {LossReason.ENGINE: len(block_ids)})
