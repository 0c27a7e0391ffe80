"""Copies between mappings in worker threads: bounded, abortable between pieces, outside the interpreter lock.

Who touches what: a :class:`CopyBatch` is made on the event loop and worked on by threads; its ``statuses`` are written
by threads and read by the loop; everything else of :class:`CopyCrew` belongs to the loop. A thread holds views of both
mappings only while it runs, and numpy views keep a mapping alive, so a copy can never touch unmapped memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import numpy as np
import numpy.typing as npt

from memkv_vllm.types import Deadline, Status

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 1 << 20
"""Between two pieces the abort flag and the deadline are looked at: a fence waits for no more than this."""
INLINE_BYTES = 64 << 10
"""Less than this is copied on the loop: handing it to a thread and back takes longer (about 60 us) than copying."""

_MAX_LATE_THREADS = 64

_log = logging.getLogger("memkv.transports.loopback")


class CopyPool:
    """The copy threads of one server transport. Owner: ``serve``, which closes it after the last session."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="memkv-copy")
        # All threads start now: their number is then a constant, and no first request waits for one.
        together = threading.Barrier(threads)
        for _ in range(threads):
            self._executor.submit(together.wait)
        self._late: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` on a copy thread."""
        return self._executor.submit(work)

    def submit_late(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work``, which waits first (injected faults), without taking a copy thread from others."""
        if self._late is None:
            self._late = ThreadPoolExecutor(_MAX_LATE_THREADS, thread_name_prefix="memkv-late")
        return self._late.submit(work)

    def close(self) -> None:
        """Join the threads; nothing may be left to do."""
        self._executor.shutdown()
        if self._late is not None:
            self._late.shutdown()


@dataclass(slots=True)
class CopyJob:
    """One value to copy: where its status goes, from where, to where; ``flip`` inverts a bit afterwards (faults)."""

    slot: int
    source: Bytes
    target: Bytes
    flip: tuple[int, int] | None = None


class _Piece(NamedTuple):
    slot: int
    source: Bytes
    target: Bytes


class CopyBatch:
    """The copies of one pull or push. ``statuses`` holds None for a value that is not all in place."""

    def __init__(self, num_slots: int, jobs: list[CopyJob], deadline: Deadline, fenced: threading.Event) -> None:
        self.statuses: list[Status | None] = [None] * num_slots
        self.aborted = False
        self._deadline = deadline
        self._fenced = fenced
        self._lock = threading.Lock()
        self._flips = {job.slot: (job.target, *job.flip) for job in jobs if job.flip is not None}
        self._pieces: deque[_Piece] = deque()
        self._left: dict[int, int] = {}
        self.num_bytes = 0
        for job in jobs:
            self._add(job)

    @property
    def num_pieces(self) -> int:
        """Pieces that nobody has taken yet."""
        return len(self._pieces)

    def _add(self, job: CopyJob) -> None:
        length = len(job.source)
        self.num_bytes += length
        if length <= PIECE_BYTES:
            self._left[job.slot] = 1
            self._pieces.append(_Piece(job.slot, job.source, job.target))
            return
        starts = range(0, length, PIECE_BYTES)
        self._left[job.slot] = len(starts)
        for start in starts:
            end = start + PIECE_BYTES
            self._pieces.append(_Piece(job.slot, job.source[start:end], job.target[start:end]))

    def work(self) -> None:
        """Copy pieces until none is left or it is time to stop. Runs in several threads at once."""
        while not self._must_stop():
            try:
                slot, source, target = self._pieces.popleft()
            except IndexError:
                return
            np.copyto(target, source)
            with self._lock:
                self._left[slot] -= 1
                complete = not self._left[slot]
            if complete:
                self._complete(slot)

    def drop(self) -> None:
        """Let go of the mappings; no thread works on this batch any more."""
        self._pieces.clear()
        self._flips.clear()

    def _must_stop(self) -> bool:
        return self.aborted or self._fenced.is_set() or time.monotonic() >= self._deadline

    def _complete(self, slot: int) -> None:
        flip = self._flips.get(slot)
        if flip is not None:
            target, offset, bit = flip
            target[offset] ^= 1 << bit
        self.statuses[slot] = Status.OK


class CopyCrew:
    """The copies of one peer: starts batches on a pool, and knows when none of them runs any more."""

    def __init__(self, pool: CopyPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._running: dict[Future[None], Callable[[], None]] = {}
        self._idle = anyio.Event()
        self.fenced = threading.Event()
        """Set for good by :meth:`stop`; the threads look at it."""

    async def copy(self, batch: CopyBatch) -> None:
        """Carry out ``batch``; returns when no thread works on it. If cancelled, threads may still finish a piece."""
        if batch.num_bytes <= INLINE_BYTES or self.fenced.is_set():
            batch.work()
            batch.drop()
            return
        # A thread is worth its hand-over from about a piece's bytes on.
        workers = min(self._pool.threads, -(-batch.num_bytes // PIECE_BYTES))
        done = anyio.Event()
        left = workers

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                batch.drop()
                done.set()

        for _ in range(workers):
            self._start(self._pool.submit, batch.work, one_done)
        try:
            await done.wait()
        finally:
            batch.aborted = not done.is_set()

    def copy_late(self, batch: CopyBatch, after_s: float) -> None:
        """Carry out ``batch`` in ``after_s`` seconds unless the peer is fenced by then; nobody waits for it."""

        def work() -> None:
            # Only a fence keeps a late write from landing: neither a deadline nor a cancelled request does.
            if not self.fenced.wait(after_s):
                batch.work()

        self._start(self._pool.submit_late, work, batch.drop)

    async def stop(self) -> None:
        """Let no further piece start and return when no thread touches a mapping of this peer."""
        self.fenced.set()
        for future, ended in list(self._running.items()):
            if future.cancel():
                self._ended(future, ended)
        if self._running:
            await self._idle.wait()

    def _start(
        self,
        submit: Callable[[Callable[[], None]], Future[None]],
        work: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        holder: list[Future[None]] = []

        def run() -> None:
            try:
                work()
            except Exception:
                _log.exception("a copy thread failed")
            finally:
                self._loop.call_soon_threadsafe(lambda: self._ended(holder[0], ended))

        future = submit(run)
        holder.append(future)
        self._running[future] = ended

    def _ended(self, future: Future[None], ended: Callable[[], None]) -> None:
        del self._running[future]
        ended()
        if self.fenced.is_set() and not self._running:
            self._idle.set()
