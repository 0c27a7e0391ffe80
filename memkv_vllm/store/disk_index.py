"""The side of the table that a disk sees: values written behind, brought back, recovered, reclaimed. Pure.

::

    begin_write -> the extent is in use -> end_write(location): the value is in both, or its record is dead at once,
                                           when the value was removed meanwhile
    begin_fetch -> a new extent is in use -> end_fetch(outcome): the value is in both; or stays on disk; or is gone

:mod:`memkv_vllm.store.residency` drives it, with a :class:`~memkv_vllm.store.log.api.ValueLog`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.content import Content
from memkv_vllm.store.entries import NO_OFFSET, RESIDENT, Entry, EntryEvent, EntryState, TableLimits
from memkv_vllm.store.log.api import Location, Record, RecoveredValue
from memkv_vllm.store.room import Room
from memkv_vllm.store.spaces import NAMESPACE
from memkv_vllm.types import Status

__all__ = ["DiskIndex", "FetchOutcome", "FetchResult", "WriteResult"]

_EVICTING, _FETCHING, _ON_DISK = EntryState.EVICTING, EntryState.FETCHING, EntryState.ON_DISK


class FetchOutcome(Enum):
    """How a fetch ended."""

    ARRIVED = auto()
    LOST = auto()
    """The record cannot be read: the value is gone."""
    UNDONE = auto()
    """It did not come to a result; the record may be good."""


class WriteResult(NamedTuple):
    """A value to be written: its bytes stay where they are until ``end_write(generation)``."""

    record: Record
    offset: int
    """Bytes, in the arena."""
    generation: int


class FetchResult(NamedTuple):
    """All but ``status`` mean something only with ``Status.OK``.

    ``ABSENT``: no such value. ``EXISTS``: its bytes are in the arena. ``PENDING``: somebody fetches it already.
    ``NO_SPACE``: there is no room for it now.
    """

    status: Status
    record: Record | None = None
    location: Location | None = None
    offset: int = 0
    """Bytes, in the arena: where its bytes must go."""
    generation: int = 0


class DiskIndex:
    """Part of one table.

    Args:
        content: what the table holds.
        room: allocates in its arena.
        limits: its bounds.
    """

    def __init__(self, content: Content, room: Room, limits: TableLimits) -> None:
        self._content = content
        self._room = room
        self._limits = limits

    def __repr__(self) -> str:
        return f"<DiskIndex {len(self._content.records)} records>"

    # Write-behind

    def begin_write(self, key: bytes, generation: int) -> WriteResult | None:
        """Holds a value's extent for its write to disk; None when there is nothing to write any more."""
        entry = self._content.namespaces.entry(key)
        if entry is None or entry.generation != generation or entry.state not in RESIDENT:
            return None
        if entry.location is not None or entry.writing:
            return None
        entry.writing = True
        self._content.pin([entry])
        return WriteResult(_record(entry), entry.offset, generation)

    def end_write(self, generation: int, location: Location | None) -> None:
        """The write has ended: the bytes of the extent are not read any more.

        Args:
            generation: of the value.
            location: where its record is; None: it was not written.

        Raises:
            LocalProtocolError: no such write.
        """
        content = self._content
        entry = content.in_use.get(generation)
        if entry is None or not entry.writing:
            raise LocalProtocolError(f"generation {generation} is not being written")
        entry.writing = False
        if location is None:
            content.counters.disk_writes_failed += 1
        elif entry.state is _EVICTING or not entry.space.current:
            content.note_dead(location)  # removed while it was being written
        else:
            content.add_record(entry, location)
            content.counters.disk_writes += 1
        content.unpin([entry])

    def hidden_writes(self) -> list[int]:
        """Generations of values that are being written and were removed meanwhile; O(values in use)."""
        in_use = self._content.in_use
        return [number for number, entry in in_use.items() if entry.writing and entry.state is _EVICTING]

    def cancel_write(self, generation: int) -> None:
        """Undoes :meth:`begin_write` for a value that nobody is going to write."""
        entry = self._content.in_use[generation]
        entry.writing = False
        self._content.unpin([entry])

    def unwritten(self) -> list[tuple[bytes, int]]:
        """``(key, generation)`` of the values that the arena alone holds; O(entries)."""
        spaces = list(self._content.namespaces.current.values())
        entries = [entry for space in spaces for entry in space.entries.values()]
        return [(e.key, e.generation) for e in entries if e.state in RESIDENT and e.location is None]

    # Fetch

    def drive_of(self, key: bytes) -> int:
        """Number of the drive that the record of ``key`` is on; 0 if it has none."""
        entry = self._content.namespaces.entry(key)
        return 0 if entry is None or entry.location is None else entry.location.drive

    def begin_fetch(self, key: bytes) -> FetchResult:
        """Takes an extent for a value that is on disk alone."""
        content = self._content
        entry = content.namespaces.find(key)
        if entry is None:
            return FetchResult(Status.ABSENT)
        if entry.state is not _ON_DISK:
            return FetchResult(Status.PENDING if entry.state is _FETCHING else Status.EXISTS)
        offset = self._room.allocate(entry.length, key[NAMESPACE], 0)
        if offset is None:
            content.counters.fetches_undone += 1
            return FetchResult(Status.NO_SPACE)
        entry.move(EntryEvent.FETCH)
        content.settle(entry, offset)
        content.hold(entry)
        if entry.location is not None:
            content.records.move_to_end(entry.location)
        return FetchResult(Status.OK, _record(entry), entry.location, entry.offset, entry.generation)

    def end_fetch(self, generation: int, outcome: FetchOutcome) -> bool:
        """The fetch has ended: nothing writes into its extent any more.

        Returns:
            whether the arena alone holds the value now: its record was reclaimed while it was read.

        Raises:
            LocalProtocolError: no such fetch.
        """
        content = self._content
        entry = content.in_use.get(generation)
        if entry is None or entry.pins or entry.state not in (_FETCHING, _EVICTING):
            raise LocalProtocolError(f"generation {generation} is not being fetched")
        content.unhold([entry])
        if entry.state is _FETCHING and entry.space.current:
            if outcome is FetchOutcome.ARRIVED:
                content.arrived(entry)
                content.counters.fetches += 1
                return entry.location is None
            if outcome is FetchOutcome.UNDONE and entry.location is not None:
                entry.move(EntryEvent.UNFETCH)
                content.free_extent(entry)
                content.counters.fetches_undone += 1
                return False
            content.counters.disk_lost += 1
        if entry.state is _FETCHING:
            content.remove(entry)
        entry.move(EntryEvent.LAST_UNPIN)
        content.release(entry)
        return False

    # What the disk tells

    def reclaimed(self, locations: Sequence[Location]) -> list[tuple[bytes, int]]:
        """These records are gone; values that were nowhere else are too.

        Returns:
            ``(key, generation)`` of those that are in the arena: it alone holds them now.
        """
        content, kept = self._content, []
        for location in locations:
            entry = content.records.get(location)
            if entry is None:
                continue
            content.drop_record(entry, forget=False)
            if entry.state is _ON_DISK:
                content.counters.disk_reclaimed += 1
                content.remove(entry)
            elif entry.state in RESIDENT and entry.space.current:
                kept.append((entry.key, entry.generation))
        return kept

    def recover(self, values: Iterable[RecoveredValue], now: float) -> int:
        """Takes up values that a start found, oldest first; returns their number.

        Beyond ``max_entries`` the oldest go again. A value that the arena cannot hold is left on disk unseen.
        """
        content, num_before = self._content, self._content.counters.recovered
        entries, open_space = content.namespaces.current, content.namespaces.open
        largest, most, rounded = self._room.largest, self._limits.max_entries, content.allocator.rounded
        for (key, length, checksum, algorithm, layout), location in values:
            if length > largest:
                content.counters.recovered_too_large += 1
                continue
            older = content.namespaces.entry(key)
            if older is not None:
                content.remove(older)
            if content.num_entries >= most and not self._room.drop_oldest_record():
                content.note_dead(location)
                continue
            space = entries.get(key[NAMESPACE]) or open_space(key, now)
            generation, extent_bytes = content.next_generation(), rounded(length)
            entry = Entry(
                key, length, checksum, algorithm, layout, None, now, NO_OFFSET, generation, space, extent_bytes
            )
            content.insert(entry)
            content.publish(entry)
            content.add_record(entry, location)
            content.counters.recovered += 1
        return content.counters.recovered - num_before

    def watch_dead(self, on_dead: Callable[[], None]) -> None:
        """``on_dead`` is called when :meth:`take_dead` has something to give, once until it was taken."""
        self._content.on_dead = on_dead
        if self._content.num_dead:
            on_dead()

    def take_dead(self) -> list[Location]:
        """Records that died since the last call: the log is to forget them."""
        return self._content.take_dead()


def _record(entry: Entry) -> Record:
    return Record(entry.key, entry.length, entry.checksum, entry.algorithm, entry.layout)
