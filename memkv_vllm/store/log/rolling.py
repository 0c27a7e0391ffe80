"""Rolls a drive's log on: seals the segment that is full and opens the next, which others may have to make room for."""

from __future__ import annotations

import errno
import logging

import anyio

from memkv_vllm.store.log.format import pack_index, pack_segment_header
from memkv_vllm.store.log.medium import write_bytes
from memkv_vllm.store.log.reclaiming import Reclaimer
from memkv_vllm.store.log.segments import Segment, SegmentMap
from memkv_vllm.store.log.shared import Shared
from memkv_vllm.store.log.transfer import Place
from memkv_vllm.store.log.worker import DriveWorker

__all__ = ["Roller"]

logger = logging.getLogger("memkv.store.log")

RESERVE_SEGMENTS = 1
"""Free segments that are kept: records of a victim are written again into the one that is open."""
OFFER_EVERY = 8
"""Segments after which space for new ones is asked for again, once a file system had none."""
DRAIN_PAUSE_S = 0.01
DRAIN_PAUSES = 10
"""A segment that was given up and is still being read is waited for so often, before another one is given up too."""


class Roller:
    """The open segment of one drive; belongs to its writing task."""

    def __init__(
        self, place: Place, segments: SegmentMap, worker: DriveWorker, reclaimer: Reclaimer, shared: Shared
    ) -> None:
        self.full_file_system = False
        """The file system had no space for another segment."""
        self._place = place
        self._segments = segments
        self._worker = worker
        self._reclaimer = reclaimer
        self._shared = shared
        self._opened = 0

    async def next_segment(self, blocks: int) -> bool:
        """Seals the open segment and opens another, with room for a record of ``blocks``. False: there is none."""
        if self._segments.current is not None:
            await self._seal()
        self._opened += 1
        if self.full_file_system and self._opened % OFFER_EVERY == 0:
            self._segments.offer()
        patience = DRAIN_PAUSES
        while (segment := self._segments.next_free()) is None or not await self._start(segment):
            if self._worker.out:
                return False
            if self._segments.next_free() is not None:
                continue
            if self._segments.num_draining and patience:
                patience -= 1
                await anyio.sleep(DRAIN_PAUSE_S)
            elif not await self._reclaimer.reclaim(blocks):
                return False
        self._segments.open(segment)
        while self._segments.num_free < RESERVE_SEGMENTS and not self._segments.num_draining:
            if not await self._reclaimer.reclaim(blocks):
                break
        return self._segments.current is not None

    async def _start(self, segment: Segment) -> bool:
        """Makes a free segment ready: one that was never used needs space, and a header."""
        if segment.incarnation:
            return True
        geometry = self._segments.geometry

        def work() -> bool:
            try:
                self._place.medium.reserve(geometry.at(segment.number, 0), geometry.segment_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return False
                raise
            header = pack_segment_header(self._place.tag, segment.number, 1)
            write_bytes(self._place.medium, geometry.at(segment.number, 0), header)
            return True

        try:
            if await self._worker.write("write", work):
                segment.incarnation = 1
                self.full_file_system = False
                return True
        except OSError:
            self._segments.spoil_free(segment)
            return False
        self._shared.counters["file_system_full"] += 1
        if not self.full_file_system:  # once: it is asked again and again under load
            logger.warning(
                "drive.file_system_full media=%s: its file system has no space for another segment of %d bytes; older "
                "values make room. Free some space, or lower max_size", self._place.medium.name, geometry.segment_bytes,
            )  # fmt: skip
        self.full_file_system = True
        self._segments.withhold()
        return False

    async def _seal(self) -> None:
        current, entries = self._segments.current, self._segments.entries
        if current is None:
            return
        geometry, tag = self._segments.geometry, self._place.tag

        def work() -> None:
            data = pack_index(tag, current.number, current.incarnation, entries)
            write_bytes(self._place.medium, geometry.at(current.number + 1, 0) - len(data), data)

        try:
            await self._worker.write("write", work)
        except OSError:
            pass  # counted; the next start reads the segment record by record
        self._segments.seal()
