"""One drive of the log: what waits to be written, the segment that is written, and the task that writes.

All state belongs to the event loop; threads get what they need as arguments and touch nothing else. One task writes
(:meth:`Drive.run`), so records, seals, reclaim and the journal never get in each other's way; reads go on beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import anyio

from memkv_vllm.errors import StoreError
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.format import BLOCK_BYTES, index_blocks
from memkv_vllm.store.log.handles import Handles
from memkv_vllm.store.log.journal import Entry
from memkv_vllm.store.log.journaling import JournalFullError, JournalWriter, Waiter, dead_entries
from memkv_vllm.store.log.medium import AlignedBuffer
from memkv_vllm.store.log.opening import OpenDrive
from memkv_vllm.store.log.reading import Reader
from memkv_vllm.store.log.reclaiming import Reclaimer
from memkv_vllm.store.log.rolling import Roller
from memkv_vllm.store.log.scanning import JournalEnd
from memkv_vllm.store.log.segments import Segment, SegmentMap
from memkv_vllm.store.log.shared import Shared
from memkv_vllm.store.log.transfer import Place, Written, write_records
from memkv_vllm.store.log.worker import DriveWorker
from memkv_vllm.types import Deadline

__all__ = ["Drive"]

BATCH_RECORDS = 128
BATCH_BYTES = 16 << 20
"""Bytes of one write: large enough for any drive's rate, small enough for a delete to be on the medium soon."""
HANGS_AFTER_S = 10.0
"""A call that takes longer is shown as a problem: a drive that hangs reports no error, and no reader of it either."""
RETRY_PAUSE_S = 0.1
"""After a write to the journal failed."""


class Waiting(NamedTuple):
    """A value that waits to be written."""

    record: Record
    sequence: int
    arena_offset: int
    token: int
    blocks: int


class Drive:
    """A drive in service.

    Args:
        number: as in locations.
        opened: its medium and superblock.
        segments: what it holds.
        end: where its journal goes on.
        shared: of the whole log.
        on_out: called with the drive when too many errors end its use.
    """

    def __init__(
        self,
        number: int,
        opened: OpenDrive,
        segments: SegmentMap,
        end: JournalEnd,
        shared: Shared,
        on_out: Callable[[Drive], None],
    ) -> None:
        self.number = number
        self.medium = opened.medium
        self.superblock = opened.member.superblock
        self.segments = segments
        self.waiting_bytes = 0
        """Bytes of values that were accepted and are not settled yet."""
        self._shared = shared
        self._on_out = on_out
        self._place = Place(self.medium, self.superblock.tag, segments.geometry)
        self.worker = DriveWorker(self.medium, sync=shared.sync, max_errors=shared.max_errors, on_out=self._went_out)
        self.handles = Handles()
        self.journal = JournalWriter(
            self.medium, segments.geometry, self.superblock.tag, end, self.worker, self._snapshot
        )
        self._reclaimer = Reclaimer(number, self._place, segments, self.handles, self.worker, self.journal, shared)
        self._roller = Roller(self._place, segments, self.worker, self._reclaimer, shared)
        self._reader = Reader(self._place, segments, self.handles, self.worker, shared)
        self._heads = AlignedBuffer(BATCH_RECORDS * BLOCK_BYTES)
        self._queue: deque[Waiting] = deque()
        self._unsettled: dict[int, None] = {}
        self._accepted = self._settled = 0
        self.stopped = False
        """The writing task has ended: nothing is accepted any more."""
        self._wake = anyio.Event()
        self._progress = anyio.Event()

    def __repr__(self) -> str:
        return f"<Drive {self.number} {self.medium.name} {self.segments!r} {len(self._queue)} waiting>"

    @property
    def largest_blocks(self) -> int:
        """Blocks of the largest record that fits a segment with its header and index."""
        return self.segments.geometry.segment_blocks - 1 - index_blocks(1, 255)

    @property
    def num_waiting(self) -> int:
        """Values that wait."""
        return self._accepted - self._settled

    def statistics(self) -> dict[str, Any]:
        """Plain values."""
        segments, geometry = self.segments, self.segments.geometry
        return {
            "media": self.medium.name,
            "id": self.superblock.drive_id.hex(),
            "in_service": not self.worker.out,
            "direct": self.medium.direct,
            "size": geometry.size,
            "capacity": geometry.num_segments * geometry.segment_bytes,
            "segment_bytes": geometry.segment_bytes,
            "used": segments.totals.used_bytes,
            "live": segments.totals.live_bytes,
            "records": segments.totals.live_records,
            "waiting": self.num_waiting,
            "waiting_bytes": self.waiting_bytes,
            "segments": segments.counts(),
            "moved": len(self.handles),
            "journal_bytes": self.journal.used_bytes,
            "journal_size": geometry.journal_half_bytes,
            "compactions": self.journal.compactions,
            "errors": dict(self.worker.errors),
        }

    def health(self) -> list[str]:
        """What is wrong with it."""
        name, errors = self.medium.name, self.worker.errors
        lines = []
        if self.worker.out:
            lines.append(
                f"drive {name} is out of service after {sum(errors.values())} errors (last: {self.worker.last_error}); "
                f"check it (dmesg, smartctl), then restart the server, or remove it from storage.drives"
            )
        elif errors:
            what = ", ".join(f"{count} {reason}" for reason, count in sorted(errors.items()))
            lines.append(f"drive {name} had errors: {what} (last: {self.worker.last_error})")
        hangs_s = self.worker.longest_call_s()
        if hangs_s >= HANGS_AFTER_S:
            lines.append(
                f"drive {name}: a read or write has not ended for {hangs_s:.0f} s; gets of its values end as misses "
                f"meanwhile; check it (dmesg, smartctl)"
            )
        if self._roller.full_file_system:
            lines.append(f"drive {name}: its file system is full; free some space there, or lower max_size")
        return lines

    @property
    def oldest_waiting(self) -> int | None:
        """Sequence number of the first value that is not settled."""
        return next(iter(self._unsettled), None)

    # Called by the log

    def append(self, item: Waiting) -> None:
        """Queues a value."""
        self._queue.append(item)
        self._unsettled[item.sequence] = None
        self._accepted += 1
        self.waiting_bytes += item.record.length
        self.wake()

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def forget(self, handle: Location) -> None:
        """The record is dead; queues its tombstone."""
        place = self.handles.drop_handle(handle)
        segment = self.segments.find(place)
        if segment is None:
            return
        start = place.offset // BLOCK_BYTES
        segment.mark_dead(start)
        self.journal.add_dead(place.segment, place.incarnation, start)
        self._shared.counters["records_forgotten"] += 1
        self.wake()

    def used(self, handle: Location) -> None:
        """The record was read: it earns a second chance."""
        place = self.handles.place(handle)
        segment = self.segments.find(place)
        if segment is not None:
            segment.mark_used(place.offset // BLOCK_BYTES)

    async def read(self, record: Record, handle: Location, arena_offset: int, deadline: Deadline) -> bool:
        """As :meth:`ValueLog.read`."""
        return await self._reader.read(record, handle, arena_offset, deadline)

    async def flush(self) -> None:
        """Returns when all that was accepted until now is settled, and its journal written (or never will be)."""
        target = self._accepted
        while self._settled < target and not self.worker.out:
            await self._progress.wait()
        while (barrier := self.barrier()) is not None:
            try:
                await barrier.wait()
            except StoreError:
                continue  # it is tried again, until it succeeds or the drive is out
            return

    def barrier(self) -> Waiter | None:
        """Somebody who waits for all of the journal that is not written yet; None: nothing is written any more."""
        if self.worker.out or self.stopped:
            return None
        barrier = self.journal.barrier()
        self.wake()
        return barrier

    async def aclose(self) -> None:
        """Gives everything back. The writing task must have ended."""
        await self._reader.aclose()
        self._heads.close()
        self.medium.close()

    # The writing task

    async def run(self) -> None:
        """Writes until cancelled; what then waits is not written."""
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                while (self._queue or self.journal.pending) and not self.worker.out:
                    await self._round()
        finally:
            self.stopped = True
            self._refuse(self._queue, "stopped")
            self._queue.clear()
            self.journal.fail(f"{self.medium.name}: the server stops")

    async def _round(self) -> None:
        if self.journal.pending:
            try:
                await self.journal.write()
            except OSError:
                await anyio.sleep(RETRY_PAUSE_S)
            except JournalFullError as error:
                if not await self._reclaimer.relieve():
                    self.worker.count("journal_full", str(error))
                    await anyio.sleep(RETRY_PAUSE_S)
        while self._queue and self._shared.is_reset(self._queue[0].record, self._queue[0].sequence):
            self._refuse([self._queue.popleft()], "reset")
        if self._queue:
            await self._write_some()

    async def _write_some(self) -> None:
        first = self._queue[0]
        fits = self.segments.room(1, first.blocks, len(first.record.key))
        if not fits and not await self._roller.next_segment(first.blocks):
            if self._queue:
                self._refuse([self._queue.popleft()], "no_space")
            return
        batch, records = self._take()
        current = self.segments.current
        if current is None or not batch:
            return
        try:
            await self.worker.write(
                "write", write_records, self._place, self._shared.arena, self._heads, current.number,
                current.incarnation, records,
            )  # fmt: skip
        except OSError:
            # Part of it may be there; it must not be found at the next start.
            for item, written in zip(batch, records, strict=True):
                self.segments.break_off(written.start, item.blocks)
                self.journal.add_dead(current.number, current.incarnation, written.start)
            self._refuse(batch, "failed")
        except BaseException:
            self._refuse(batch, "stopped")
            raise
        else:
            self._commit(current, batch, records)

    def _take(self) -> tuple[list[Waiting], list[Written]]:
        """As many of those who wait as make one write, with their places."""
        batch: list[Waiting] = []
        records: list[Written] = []
        current = self.segments.current
        blocks = key_bytes = size = 0
        while current is not None and self._queue and len(batch) < BATCH_RECORDS and size < BATCH_BYTES:
            item = self._queue[0]
            if self._shared.is_reset(item.record, item.sequence):
                self._refuse([self._queue.popleft()], "reset")
                continue
            blocks, key_bytes = blocks + item.blocks, key_bytes + len(item.record.key)
            if not self.segments.room(len(batch) + 1, blocks, key_bytes):
                break
            start = current.next_block + blocks - item.blocks
            batch.append(self._queue.popleft())
            records.append(Written(item.record, item.sequence, start, item.arena_offset))
            size += item.record.length
        return batch, records

    def _commit(self, segment: Segment, batch: list[Waiting], records: list[Written]) -> None:
        counters = self._shared.counters
        for item, (record, sequence, start, _) in zip(batch, records, strict=True):
            dead = self.worker.out or self._shared.is_reset(record, sequence)
            self.segments.add(start, sequence, record, dead=dead)
            if dead:
                self._refuse([item], "failed" if self.worker.out else "reset")
                continue
            counters["records_written"] += 1
            counters["bytes_written"] += record.length
            self._settle(item)
            at = Location(self.number, segment.number, segment.incarnation, start * BLOCK_BYTES)
            self._shared.on_written(item.token, at)

    def _refuse(self, items: Iterable[Waiting], reason: str) -> None:
        for item in list(items):
            self._shared.counters[f"log_{reason}"] += 1
            self._settle(item)
            self._shared.on_written(item.token, None)

    def _settle(self, item: Waiting) -> None:
        self._settled += 1
        del self._unsettled[item.sequence]
        self.waiting_bytes -= item.record.length
        self._progress.set()
        self._progress = anyio.Event()

    def _snapshot(self) -> Iterable[Entry]:
        for segment in self.segments.segments:
            yield from dead_entries(segment.number, segment.incarnation, segment.dead_starts())
        yield from self._shared.remembered()

    # The end of a drive

    def _went_out(self) -> None:
        self._refuse(self._queue, "failed")
        self._queue.clear()
        self.journal.fail(f"{self.medium.name}: the drive was left out after too many errors; see its health")
        for segment in self.segments.segments:
            self._reclaimer.report_lost(segment)
            self.segments.spoil(segment)
        self._on_out(self)
        self._progress.set()
        self._progress = anyio.Event()
