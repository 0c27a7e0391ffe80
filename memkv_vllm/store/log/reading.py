"""Reads of one drive: a bounded number at a time, each with its own place for a header."""

from __future__ import annotations

import anyio

from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.format import BLOCK_BYTES
from memkv_vllm.store.log.handles import Handles
from memkv_vllm.store.log.medium import AlignedBuffer
from memkv_vllm.store.log.segments import SegmentMap
from memkv_vllm.store.log.shared import Shared
from memkv_vllm.store.log.transfer import Place, ReadResult, read_value
from memkv_vllm.store.log.worker import DriveWorker
from memkv_vllm.types import Deadline

__all__ = ["Reader"]


class Reader:
    """Reads records of one drive into the arena."""

    def __init__(
        self, place: Place, segments: SegmentMap, handles: Handles, worker: DriveWorker, shared: Shared
    ) -> None:
        self._place = place
        self._segments = segments
        self._handles = handles
        self._worker = worker
        self._shared = shared
        self._threads = anyio.CapacityLimiter(shared.read_threads)
        self._turns = anyio.Semaphore(shared.read_threads)
        self._heads = AlignedBuffer(shared.read_threads * BLOCK_BYTES)
        self._free_heads = list(range(shared.read_threads))
        self._active = 0
        self._ended = anyio.Event()
        self._closed = False

    async def read(self, record: Record, location: Location, arena_offset: int, deadline: Deadline) -> bool:
        """As :meth:`ValueLog.read`."""
        # A deadline is on time.monotonic, which is the event loop's clock.
        with anyio.CancelScope(deadline=deadline) as scope:
            await self._turns.acquire()
        if scope.cancelled_caught:
            self._shared.counters["read_timeout"] += 1
            return False
        if self._closed:
            self._turns.release()
            return False
        head = self._free_heads.pop()
        self._active += 1
        try:
            return await self._read(record, self._handles.place(location), arena_offset, self._heads.block(head))
        finally:
            self._active -= 1
            self._free_heads.append(head)
            self._turns.release()
            self._ended.set()

    async def _read(self, record: Record, location: Location, arena_offset: int, head: memoryview) -> bool:
        counters = self._shared.counters
        segment = self._segments.find(location)
        if segment is None:
            counters["read_gone"] += 1
            return False
        recovered = segment.recovered
        self._segments.begin_read(segment)
        try:
            result = await self._worker.read(
                read_value, self._place, self._shared.arena, head, record, location, arena_offset,
                limiter=self._threads,
            )  # fmt: skip
        except OSError:
            counters["read_failed"] += 1
            return False
        finally:
            head.release()
            self._segments.end_read(segment)
        counters[f"read_{result.value}"] += 1
        if result is ReadResult.OK:
            counters["read_bytes"] += record.length
            segment.mark_used(location.offset // BLOCK_BYTES)
        elif result is ReadResult.WRONG and (self._shared.sync or not recovered):
            # Else a power loss may have torn it: many such values must not cost the drive, and thereby all others.
            self._worker.count("read_wrong_bytes", f"{self._place.medium.name}: wrong bytes at {location}")
        return result is ReadResult.OK

    async def aclose(self) -> None:
        """Waits for the reads that go on, and gives the memory back."""
        self._closed = True
        while self._active:
            self._ended = anyio.Event()
            await self._ended.wait()
        self._heads.close()
