"""Stores and loads through the engine of a rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from benchmarks.geometry import LAYOUT, Durations, KeyRing, Shape
from benchmarks.rows import Measurement, Stopwatch
from benchmarks.staging import fill
from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine.api import BlockRef, JobResult, SlotRef
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.engine.engine import EngineSettings, TransferEngine
from memkv_vllm.engine.plan import plan_staging
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.transports.base import Region
from memkv_vllm.types import VerifyMode

TIMEOUT_S = 30.0
POLL_S = 50e-6
"""Between two looks for finished jobs: part of a latency, and of the client's CPU."""


class EngineDriver:
    """Stores and loads through ``TransferEngine``, as vLLM's worker makes them: a job is a batch.

    Its mover copies nothing (a GPU's copies cost no CPU): what is timed is staging, checksums, control and the server.
    """

    def __init__(self, port: int, key: bytes, server_pid: int, value_bytes: int) -> None:
        self._server_pid = server_pid
        self._jobs = 0
        self._ended: list[JobResult] = []
        self._engine = TransferEngine(
            cluster=ClusterSettings(
                (ServerAddress("bench", (RailAddress("127.0.0.1", port),)),),
                Credentials(key),
                "loopback",
                5.0,
                TIMEOUT_S,
            ),
            plan=plan_staging(value_bytes, tokens_per_block=16),
            mover=_NoCopy(value_bytes),
            shard=0,
            settings=EngineSettings(120.0, VerifyMode.FULL, 4 << 30),
            name="bench",
        )

    def __enter__(self) -> EngineDriver:
        self._engine.start()
        end = time.monotonic() + TIMEOUT_S
        while not self._engine.statistics().servers_ready:
            if time.monotonic() > end:
                raise RuntimeError("the engine did not reach the server")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def measure(self, op: str, shape: Shape, rings: Sequence[KeyRing], *, times: Durations) -> Measurement:
        """Time ``op``; gets ask for what was put before with the same ``rings``."""
        if op == "get":
            for ring in rings:
                for prefixes in ring.working_set():
                    self._engine.submit_store(self._next_job(), _block_refs(prefixes))
                    self._wait_one()
        self._run(op, rings, times.warm_s, Measurement())
        with Stopwatch(self._server_pid) as seen:
            self._run(op, rings, times.timed_s, seen)
        return seen

    def _run(self, op: str, rings: Sequence[KeyRing], seconds: float, seen: Measurement) -> None:
        """Keep one job of each ring on its way for ``seconds``, then await the last ones."""
        end = time.perf_counter() + seconds
        started: dict[int, tuple[int, int, int]] = {}
        for worker, ring in enumerate(rings):
            started[self._submit(op, ring, 0)] = worker, 0, time.perf_counter_ns()
        while started:
            result = self._wait_one()
            worker, index, start_ns = started.pop(result.job_id)
            now_ns = time.perf_counter_ns()
            seen.latencies_ns.append(now_ns - start_ns)
            if time.perf_counter() < end:
                started[self._submit(op, rings[worker], index + 1)] = worker, index + 1, now_ns

    def _submit(self, op: str, ring: KeyRing, index: int) -> int:
        job_id = self._next_job()
        if op == "put":
            self._engine.submit_store(job_id, _block_refs(ring.fresh()))
        else:
            self._engine.submit_load(job_id, _block_refs(ring.stored(index)))
        return job_id

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _wait_one(self) -> JobResult:
        """The next job that ends. Several at once are given one by one."""
        while not self._ended:
            self._ended += self._engine.poll_finished()
            if not self._ended:
                time.sleep(POLL_S)
        result = self._ended.pop(0)
        if result.lost:
            raise RuntimeError(f"the engine lost blocks of a {result.direction.value}: {dict(result.lost)}")
        return result


class _NoCopy:
    """A ``BlockMover`` whose blocks are in the slots already."""

    layout = LAYOUT

    def __init__(self, value_bytes: int) -> None:
        self.value_bytes = value_bytes

    def attach(self, region: Region) -> None:
        """Put the blocks' bytes there."""
        assert region.memory is not None
        fill(region.memory.array)

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Nothing to copy."""

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Nothing to copy."""

    def close(self) -> None:
        """Nothing to undo."""


def _block_refs(prefixes: Sequence[bytes]) -> list[BlockRef]:
    return [BlockRef(prefix, block_id) for block_id, prefix in enumerate(prefixes)]
