"""The segments of one drive in memory: what each holds, what of it is live, which one is written. Pure.

A segment goes around::

    FREE -> OPEN -> SEALED -> DRAINING -> FREE
                           -> BAD          its header could not be written: never used again by this process

OPEN is the one that records are appended to; there is at most one. DRAINING is one whose records were given up while
some are still being read. Records are known by the block at which they start; nothing here knows a key.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappush

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.format import BLOCK_BYTES, MAX_KEY_BYTES, Geometry, index_blocks, record_blocks

__all__ = ["Segment", "SegmentMap", "SegmentState", "Totals"]

_DEAD, _USED = 1, 2


class SegmentState(Enum):
    """What a segment is for at the moment."""

    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"
    DRAINING = "draining"
    BAD = "bad"


@dataclass
class Totals:
    """Sums over the segments of a drive, kept up to date by each."""

    live_records: int = 0
    live_bytes: int = 0
    used_bytes: int = 0


class Segment:
    """One segment: its records by start, ascending, and sums over the live ones.

    Attributes:
        number: which one of its drive.
        state: what it is for.
        incarnation: how often it was started; 0: never, its header is not there yet.
        live_records: records that are not dead.
        live_bytes: bytes of their blocks, headers included.
        next_block: first block that no record takes.
        oldest: lowest sequence number of any record in it.
        newest: highest one.
        readers: reads that are going on.
        recovered: its records were found by the start, and not written since.
    """

    __slots__ = (
        "_blocks", "_flags", "_starts", "_totals", "incarnation", "live_bytes", "live_records", "newest", "next_block",
        "number", "oldest", "readers", "recovered", "state",
    )  # fmt: skip

    def __init__(self, number: int, totals: Totals, incarnation: int = 0) -> None:
        self._totals = totals
        self.live_records = self.live_bytes = 0
        self.next_block = 1
        self.number = number
        self.incarnation = incarnation
        self.state = SegmentState.FREE
        self.readers = 0
        self.clear()

    def __repr__(self) -> str:
        return f"<Segment {self.number}.{self.incarnation} {self.state.value} {self.live_records}/{len(self._starts)}>"

    def clear(self) -> None:
        """Forgets all records."""
        self._starts, self._blocks, self._flags = array("I"), array("I"), bytearray()
        self._count(-self.live_records, -self.live_bytes, 1)
        self.oldest = self.newest = 0
        self.recovered = False

    def load(self, starts: bytes, blocks: bytes, dead: bytes, oldest: int, newest: int) -> None:
        """Takes a whole segment's records, as arrays of the machine's ``uint32`` and of one byte each."""
        self._starts.frombytes(starts)
        self._blocks.frombytes(blocks)
        self._flags = bytearray(dead)
        live = [count for count, flag in zip(self._blocks, dead, strict=True) if not flag]
        self._count(len(live), sum(live) * BLOCK_BYTES, self._starts[-1] + self._blocks[-1] if self._starts else 1)
        self.oldest, self.newest = oldest, newest
        self.recovered = True

    def add(self, start: int, blocks: int, sequence: int, *, dead: bool = False) -> None:
        """Notes a record behind all others. A dead one only takes room."""
        if start < self.next_block:
            raise LocalProtocolError(f"{self!r}: a record at block {start} would cover others")
        if not self._starts or sequence < self.oldest:
            self.oldest = sequence
        self.newest = max(self.newest, sequence)
        self._starts.append(start)
        self._blocks.append(blocks)
        self._flags.append(_DEAD if dead else 0)
        self._count(int(not dead), 0 if dead else blocks * BLOCK_BYTES, start + blocks)

    def _count(self, records: int, live_bytes: int, next_block: int) -> None:
        self.live_records += records
        self.live_bytes += live_bytes
        self._totals.live_records += records
        self._totals.live_bytes += live_bytes
        self._totals.used_bytes += (next_block - self.next_block) * BLOCK_BYTES
        self.next_block = next_block

    def _find(self, start: int) -> int | None:
        at = bisect_left(self._starts, start)
        return at if at < len(self._starts) and self._starts[at] == start else None

    def is_live(self, start: int) -> bool:
        """Whether a record starts there and was not forgotten."""
        at = self._find(start)
        return at is not None and not self._flags[at] & _DEAD

    def mark_dead(self, start: int) -> bool:
        """False: there is no live record."""
        at = self._find(start)
        if at is None or self._flags[at] & _DEAD:
            return False
        self._flags[at] |= _DEAD
        self._count(-1, -self._blocks[at] * BLOCK_BYTES, self.next_block)
        return True

    def mark_used(self, start: int) -> None:
        """The record was read: it earns a second chance."""
        at = self._find(start)
        if at is not None:
            self._flags[at] |= _USED

    def live(self) -> Iterator[tuple[int, int, bool]]:
        """``(start, blocks, used)`` of every live record, in order of place."""
        for start, blocks, flags in zip(self._starts, self._blocks, self._flags, strict=True):
            if not flags & _DEAD:
                yield start, blocks, bool(flags & _USED)

    def dead_starts(self) -> list[int]:
        """Where the dead records start."""
        if self.live_records == len(self._starts):
            return []  # most segments, and a snapshot of the journal asks all of them
        return [start for start, flags in zip(self._starts, self._flags, strict=True) if flags & _DEAD]


class SegmentMap:
    """All segments of a drive; finds free ones, keeps the open one's room, adds up.

    Args:
        geometry: of the drive.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.totals = Totals()
        self.segments = [Segment(number, self.totals) for number in range(geometry.num_segments)]
        self.current: Segment | None = None
        """The open segment."""
        self.entries: list[tuple[int, int, Record]] = []
        """Start, sequence and record of what is in the open segment: its index, once it is sealed."""
        self._key_bytes = 0
        self._broken = False
        self._free = list(range(len(self.segments)))
        self._withheld: list[int] = []
        self._num_draining = 0

    def __repr__(self) -> str:
        return f"<SegmentMap {len(self.segments)} segments, {self.num_free} free, open {self.current!r}>"

    # At start

    def recovered(self) -> None:
        """To be called once when all segments were loaded: those without records are free."""
        for segment in self.segments:
            segment.state = SegmentState.SEALED if segment.next_block > 1 else SegmentState.FREE
        self._free = [segment.number for segment in self.segments if segment.state is SegmentState.FREE]
        heapify(self._free)

    # Writing

    @property
    def num_free(self) -> int:
        """Segments that can be opened now."""
        return len(self._free)

    def next_free(self) -> Segment | None:
        """The free segment with the lowest number, which stays free: low ones first, so that a drive can be shrunk."""
        return self.segments[self._free[0]] if self._free else None

    def open(self, segment: Segment) -> None:
        """Makes a free segment the one that records are appended to.

        It need not be that of :meth:`next_free` any more: a read may have ended while it was made ready.
        """
        if self.current is not None or segment.number not in self._free:
            raise LocalProtocolError(f"{segment!r} cannot be opened beside {self.current!r}")
        self._take_free(segment)
        segment.state = SegmentState.OPEN
        self.current = segment
        self.entries = []
        self._key_bytes = 0
        self._broken = False

    def room(self, records: int, blocks: int, key_bytes: int) -> bool:
        """Whether records of that many blocks and bytes of keys together fit the open segment with its index."""
        current = self.current
        if current is None or self._broken:
            return False
        index = index_blocks(len(current._starts) + records, self._key_bytes + key_bytes)
        return current.next_block + blocks + index <= self.geometry.segment_blocks

    def copy_room(self, records: int) -> int:
        """Blocks that ``records`` records, whatever their keys, may take of the open segment."""
        current = self.current
        if current is None or self._broken:
            return 0
        index = index_blocks(len(current._starts) + records, self._key_bytes + records * MAX_KEY_BYTES)
        return max(0, self.geometry.segment_blocks - index - current.next_block)

    def add(self, start: int, sequence: int, record: Record, *, dead: bool = False) -> None:
        """Notes a record of the open segment. A dead one takes room and is in no index."""
        if self.current is None:
            raise LocalProtocolError("no segment is open")
        self.current.add(start, record_blocks(record.length), sequence, dead=dead)
        # A start that reads record by record lists it all the same: its index must not cover the last record then.
        self._key_bytes += len(record.key)
        if not dead:
            self.entries.append((start, sequence, record))

    def break_off(self, start: int, blocks: int) -> None:
        """Nobody knows what stands in these blocks: nothing more is appended to the open segment.

        A start reads it up to the first block that is no record, if it has no index.
        """
        if self.current is None:
            raise LocalProtocolError("no segment is open")
        self.current.add(start, blocks, self.current.newest, dead=True)
        self._broken = True

    def seal(self) -> Segment:
        """Ends the open segment."""
        segment = self.current
        if segment is None:
            raise LocalProtocolError("no segment is open")
        segment.state = SegmentState.SEALED
        self.current = None
        return segment

    # Reclaim

    def give_up(self, segment: Segment) -> None:
        """All its records are gone; its header says so (a new incarnation). Free once nobody reads it any more."""
        segment.incarnation += 1
        segment.clear()
        segment.state = SegmentState.DRAINING
        self._num_draining += 1
        self._free_if_idle(segment)

    def spoil(self, segment: Segment) -> None:
        """Takes the segment out of use; all its records are dead."""
        for start, _, _ in list(segment.live()):
            segment.mark_dead(start)
        segment.state = SegmentState.BAD

    def spoil_free(self, segment: Segment) -> None:
        """Takes a free segment out of use."""
        self._take_free(segment)
        segment.state = SegmentState.BAD

    def _take_free(self, segment: Segment) -> None:
        self._free.remove(segment.number)
        heapify(self._free)

    def withhold(self) -> None:
        """Segments that were never started are not free for now: the file system has no space for them."""
        fresh = {number for number in self._free if not self.segments[number].incarnation}
        self._withheld += sorted(fresh)
        self._free = [number for number in self._free if number not in fresh]
        heapify(self._free)

    def offer(self) -> None:
        """What was withheld is free again."""
        self._free += self._withheld
        self._withheld = []
        heapify(self._free)

    @property
    def num_withheld(self) -> int:
        """Segments without space behind them."""
        return len(self._withheld)

    @property
    def num_draining(self) -> int:
        """Segments that become free when reads end."""
        return self._num_draining

    # Readers and records

    def find(self, location: Location) -> Segment | None:
        """The segment of a live record; None: it is gone."""
        if not 0 <= location.segment < len(self.segments):
            return None
        segment = self.segments[location.segment]
        if segment.incarnation != location.incarnation or not segment.is_live(location.offset // BLOCK_BYTES):
            return None
        return segment

    def begin_read(self, segment: Segment) -> None:
        """The segment's blocks are not written anew until :meth:`end_read`."""
        segment.readers += 1

    def end_read(self, segment: Segment) -> None:
        """Ends one read."""
        segment.readers -= 1
        self._free_if_idle(segment)

    def _free_if_idle(self, segment: Segment) -> None:
        if segment.state is SegmentState.DRAINING and not segment.readers:
            segment.state = SegmentState.FREE
            self._num_draining -= 1
            heappush(self._free, segment.number)

    # Sums

    def counts(self) -> dict[str, int]:
        """Number of segments by state."""
        counts = {state.value: 0 for state in SegmentState}
        for segment in self.segments:
            counts[segment.state.value] += 1
        return counts

    def oldest(self) -> int | None:
        """Lowest sequence number of any record that is on the drive; None: there is none."""
        found = [segment.oldest for segment in self.segments if segment.next_block > 1]
        return min(found, default=None)
