"""What no transport can beat: numpy copies of the same shapes, in threads of one process."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from benchmarks.geometry import MAX_CONCURRENCY, Durations, Shape
from benchmarks.rows import Measurement, Stopwatch

Bytes = npt.NDArray[np.uint8]


class MemcpyDriver:
    """Copies between a large store and small local memory, a thread per worker: what no transport can beat.

    Args:
        store: a put's target and a get's source.
        local: the other side; worker ``w`` uses the part from ``w * MAX_BATCH_BYTES`` on, as the transport does.
    """

    def __init__(self, store: Bytes, local: Bytes) -> None:
        self._store = store
        self._local = local

    def measure(self, op: str, shape: Shape, times: Durations) -> Measurement:
        """Time ``op``."""
        barrier = threading.Barrier(shape.workers + 1)
        latencies: list[list[int]] = [[] for _ in range(shape.workers)]
        threads = [
            threading.Thread(target=self._work, args=(op, shape, worker, times, barrier, latencies[worker]))
            for worker in range(shape.workers)
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        with Stopwatch() as seen:
            barrier.wait()
            for thread in threads:
                thread.join()
        seen.latencies_ns = [latency for each in latencies for latency in each]
        return seen

    def _work(
        self, op: str, shape: Shape, worker: int, times: Durations, barrier: threading.Barrier, latencies: list[int]
    ) -> None:
        index = 0
        end = time.perf_counter() + times.warm_s
        while time.perf_counter() < end:
            self._copy(op, shape, worker, index)
            index += 1
        barrier.wait()
        barrier.wait()
        end = time.perf_counter() + times.timed_s
        while True:
            start_ns = time.perf_counter_ns()
            self._copy(op, shape, worker, index)
            latencies.append(time.perf_counter_ns() - start_ns)
            index += 1
            if time.perf_counter() > end:
                return

    def _copy(self, op: str, shape: Shape, worker: int, index: int) -> None:
        share = len(self._store) // MAX_CONCURRENCY
        batches = max(1, share // shape.batch_bytes)
        far = worker * share + index % batches * shape.batch_bytes
        near = worker * (len(self._local) // MAX_CONCURRENCY)
        for start in range(0, shape.batch_bytes, shape.value_bytes):
            stored = self._store[far + start : far + start + shape.value_bytes]
            local = self._local[near + start : near + start + shape.value_bytes]
            if op == "put":
                np.copyto(stored, local)
            else:
                np.copyto(local, stored)
