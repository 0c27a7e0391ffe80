"""Writes one drive's journal: batches behind each other, a snapshot into the other half when one is full.

Belongs to the drive's writing task: nothing here runs twice at a time. What is to be written collects meanwhile, so
that a flood of deletes costs few writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import anyio

from memkv_vllm.errors import StoreError
from memkv_vllm.store.log.format import Geometry
from memkv_vllm.store.log.journal import MAX_DEAD_STARTS, Dead, Entry, cut, pack_batch
from memkv_vllm.store.log.medium import Medium, write_bytes
from memkv_vllm.store.log.scanning import JournalEnd
from memkv_vllm.store.log.worker import DriveWorker

__all__ = ["JournalFullError", "JournalWriter", "Waiter", "dead_entries"]


class JournalFullError(Exception):
    """A snapshot does not fit: records must go for good, so that their tombstones can."""


class Waiter:
    """Somebody who waits until an entry is on the medium."""

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._error: str | None = None

    def settle(self, error: str | None = None) -> None:
        """The entry is there, or could not be written."""
        self._error = error
        self._done.set()

    async def wait(self) -> None:
        """Returns when the entry is on the medium.

        Raises:
            StoreError: it could not be written.
        """
        await self._done.wait()
        if self._error is not None:
            raise StoreError(self._error)


def _settle(waiters: Iterable[Waiter], error: str | None = None) -> None:
    for waiter in waiters:
        waiter.settle(error)


def dead_entries(segment: int, incarnation: int, starts: Iterable[int]) -> Iterable[Dead]:
    """Entries for any number of records of one segment."""
    left = iter(starts)
    while part := tuple(islice(left, MAX_DEAD_STARTS)):
        yield Dead(segment, incarnation, part)


class JournalWriter:
    """The journal of one drive.

    Args:
        medium: of the drive.
        geometry: of the drive.
        tag: of the drive.
        end: where the journal that was read at start goes on.
        worker: the drive's worker.
        snapshot: everything that still matters now, what waits to be written included.
    """

    def __init__(
        self,
        medium: Medium,
        geometry: Geometry,
        tag: bytes,
        end: JournalEnd,
        worker: DriveWorker,
        snapshot: Callable[[], Iterable[Entry]],
    ) -> None:
        self._medium, self._geometry, self._tag = medium, geometry, tag
        self._worker = worker
        self._snapshot = snapshot
        self._end = end
        self._dead: dict[tuple[int, int], list[int]] = {}
        self._entries: list[Entry] = []
        self._waiters: list[Waiter] = []
        self._in_flight = False
        self._half_ended = False
        """A newer snapshot may stand in the other half, whole: what is added to this one might never be read."""
        self._failed: str | None = None
        self.compactions = 0
        """Snapshots that were written."""

    @property
    def pending(self) -> bool:
        """Whether anything is to be written."""
        return bool(self._dead or self._entries or self._waiters)

    @property
    def used_bytes(self) -> int:
        """Bytes of the half that is written."""
        return self._end.offset

    def add_dead(self, segment: int, incarnation: int, start: int) -> None:
        """Queues a tombstone."""
        self._dead.setdefault((segment, incarnation), []).append(start)

    def add(self, entry: Entry) -> Waiter:
        """Queues an entry that somebody waits for."""
        if self._failed is None:
            self._entries.append(entry)
        return self.barrier()

    def barrier(self) -> Waiter:
        """Somebody who waits for all that is queued until now; for nothing if all of it is on the medium."""
        waiter = Waiter()
        if self._failed is not None or not (self.pending or self._in_flight):
            waiter.settle(self._failed)
        else:
            self._waiters.append(waiter)
        return waiter

    def drop_segment(self, segment: int, incarnation: int) -> None:
        """Tombstones of a use of a segment that is over need not be written."""
        self._dead.pop((segment, incarnation), None)

    def fail(self, message: str) -> None:
        """Nothing will be written any more, for the reason in ``message``."""
        self._failed = message
        self._dead.clear()
        self._entries.clear()
        waiters, self._waiters = self._waiters, []
        _settle(waiters, message)

    async def write(self) -> None:
        """Writes all that is queued. A failure leaves it queued, and tells those who wait.

        Raises:
            OSError: it could not be written; counted already.
            JournalFullError: what must be remembered is more than half of the journal holds.
        """
        dead, entries, waiters = self._dead, self._entries, self._waiters
        self._dead, self._entries, self._waiters = {}, [], []
        every: list[Entry] = [*entries]
        for (segment, incarnation), starts in dead.items():
            every += dead_entries(segment, incarnation, starts)
        self._in_flight = True
        try:
            if every:
                await self._append(every)
        except BaseException as error:
            for place, starts in dead.items():
                self._dead[place] = starts + self._dead.get(place, [])
            self._entries = entries + self._entries
            if isinstance(error, JournalFullError):
                self._waiters = waiters + self._waiters  # it is tried again at once, when there is room
                raise
            what = f"could not be written: {error}" if isinstance(error, OSError) else "is ended with the server"
            _settle(waiters, f"{self._medium.name}: the journal {what}; see the server's log and health")
            raise
        finally:
            self._in_flight = False
        _settle(waiters)

    async def _append(self, entries: Iterable[Entry]) -> None:
        for group in cut(entries):
            generation, number, previous, offset = self._end
            data, checksum = pack_batch(self._tag, generation, number, previous, group)
            if self._half_ended or offset + len(data) > self._geometry.journal_half_bytes:
                # The snapshot holds what is left to write, too: it is taken of what is in memory.
                await self._compact()
                return
            await self._write(generation % 2, offset, data)
            self._end = JournalEnd(generation, number + 1, checksum, offset + len(data))

    async def _write(self, half: int, offset: int, data: bytes) -> None:
        at = self._geometry.journal_half(half) + offset
        await self._worker.write("journal", write_bytes, self._medium, at, data)

    async def _compact(self) -> None:
        """Writes a snapshot to the other half, and makes it stable whatever ``storage.sync`` says.

        The half that it replaces is overwritten by the next one: by then this one must be there after any crash.
        """
        generation, offset, previous = self._end.generation + 1, 0, 0
        groups = list(cut(self._snapshot()))
        for number, group in enumerate(groups):
            last = number == len(groups) - 1
            data, checksum = pack_batch(self._tag, generation, number, previous, group, begins=number == 0, ends=last)
            if offset + len(data) > self._geometry.journal_half_bytes:
                raise JournalFullError(f"{self._medium.name}: the journal is full")
            self._half_ended = self._half_ended or last
            await self._write(generation % 2, offset, data)
            offset, previous = offset + len(data), checksum
        await self._worker.write("journal", self._medium.sync)
        self._end = JournalEnd(generation, len(groups), previous, offset)
        self._half_ended = False
        self.compactions += 1
