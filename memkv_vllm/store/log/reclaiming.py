"""Makes a drive's segment free: saves what earned a second chance, starts the segment anew, reports what is lost.

In this order, so that a crash at any point loses nothing that was not given up, and nothing comes back that was::

    1   used records of the victim are written again, at the end of the log
    2   the victim's header gets a new incarnation: from here on what stands in it is dead after any restart
    3   the caller hears which records are lost, and forgets them
    4   once nobody reads the segment any more it is free

A record that is forgotten between 1 and 2 may come back at its old place or at its new one: both get a tombstone, by
the same write of the journal, since the task that does all this writes that too.
"""

from __future__ import annotations

from memkv_vllm.store.log.api import Location
from memkv_vllm.store.log.format import BLOCK_BYTES, pack_segment_header
from memkv_vllm.store.log.handles import Handles
from memkv_vllm.store.log.journaling import JournalWriter
from memkv_vllm.store.log.medium import write_bytes
from memkv_vllm.store.log.reclaim import choose_second_chances, choose_victim
from memkv_vllm.store.log.segments import Segment, SegmentMap, SegmentState
from memkv_vllm.store.log.shared import Shared
from memkv_vllm.store.log.transfer import Copied, Copy, Place, copy_records
from memkv_vllm.store.log.worker import DriveWorker

__all__ = ["Reclaimer"]


class Reclaimer:
    """Reclaim of one drive; belongs to its writing task."""

    def __init__(
        self,
        number: int,
        place: Place,
        segments: SegmentMap,
        handles: Handles,
        worker: DriveWorker,
        journal: JournalWriter,
        shared: Shared,
    ) -> None:
        self._number = number
        self._place = place
        self._segments = segments
        self._handles = handles
        self._worker = worker
        self._journal = journal
        self._shared = shared

    async def reclaim(self, keep_blocks: int) -> bool:
        """Gives one segment up; what is saved of it leaves ``keep_blocks`` of the open one free.

        Returns:
            False: there is none, or the medium failed.
        """
        geometry = self._segments.geometry
        victim = choose_victim(self._segments.segments, geometry.segment_bytes)
        if victim is None:
            return False
        await self._save(victim, keep_blocks)
        return await self.give_up(victim)

    async def relieve(self) -> bool:
        """Gives the sealed segment with the most tombstones up, so that they need not be remembered. False: none."""
        segments = self._segments.segments
        sealed = [segment for segment in segments if segment.state is SegmentState.SEALED]
        victim = max(sealed, key=lambda segment: len(segment.dead_starts()), default=None)
        return victim is not None and await self.give_up(victim)

    async def give_up(self, segment: Segment) -> bool:
        """Ends a segment with all records that are still in it. False: the medium failed."""
        incarnation = segment.incarnation
        header = pack_segment_header(self._place.tag, segment.number, incarnation + 1)
        at = self._segments.geometry.at(segment.number, 0)
        try:
            await self._worker.write("write", write_bytes, self._place.medium, at, header)
        except OSError:
            self.report_lost(segment)
            self._segments.spoil(segment)
            # The header that stands there may still be the old one: what is in the segment must not come back, least
            # of all what was moved, since that is known by its new place from now on.
            for start in segment.dead_starts():
                self._journal.add_dead(segment.number, incarnation, start)
            return False
        self.report_lost(segment)
        self._journal.drop_segment(segment.number, incarnation)
        self._segments.give_up(segment)
        self._shared.counters["segments_reclaimed"] += 1
        return True

    def report_lost(self, segment: Segment) -> None:
        """Tells the caller which records of the segment are gone."""
        lost = [
            self._handles.drop(Location(self._number, segment.number, segment.incarnation, start * BLOCK_BYTES))
            for start, _, _ in segment.live()
        ]
        if lost:
            self._shared.counters["records_reclaimed"] += len(lost)
            self._shared.on_reclaimed(lost)

    async def _save(self, victim: Segment, keep_blocks: int) -> None:
        copies = self._plan(victim, keep_blocks)
        if not copies:
            return
        done: list[Copied] = []
        try:
            await self._worker.write("write", copy_records, self._place, copies, done)
        except OSError:
            # What is not stable is lost with the victim; its place stays unused.
            self._abandon(copies)
        else:
            self._commit(victim, done)

    def _plan(self, victim: Segment, keep_blocks: int) -> list[Copy]:
        current = self._segments.current
        if current is None:
            return []
        geometry = self._segments.geometry
        # One record more than the victim's own: the index has a row for the one that room is made for.
        room = self._segments.copy_room(victim.live_records + 1) - keep_blocks
        chosen = choose_second_chances(victim, geometry.segment_bytes, room)
        copies, block = [], current.next_block
        for start, blocks in chosen:
            source = Location(self._number, victim.number, victim.incarnation, start * BLOCK_BYTES)
            target = Location(self._number, current.number, current.incarnation, block * BLOCK_BYTES)
            copies.append(Copy(source, target, blocks))
            block += blocks
        return copies

    def _abandon(self, copies: list[Copy]) -> None:
        for copy in copies:
            start = copy.target.offset // BLOCK_BYTES
            self._segments.break_off(start, copy.blocks)
            self._journal.add_dead(copy.target.segment, copy.target.incarnation, start)

    def _commit(self, victim: Segment, done: list[Copied]) -> None:
        for (source, target, _), header in done:
            start = source.offset // BLOCK_BYTES
            alive = victim.is_live(start) and not self._shared.is_reset(header.record, header.sequence)
            self._segments.add(target.offset // BLOCK_BYTES, header.sequence, header.record, dead=not alive)
            if not alive:
                self._journal.add_dead(target.segment, target.incarnation, target.offset // BLOCK_BYTES)
                continue
            victim.mark_dead(start)
            self._handles.moved(source, target)
            self._shared.counters["records_rewritten"] += 1
