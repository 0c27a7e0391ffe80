"""The entries of a table with their extents and records, and each step by which an entry gets or loses one. Pure.

An extent goes back to the allocator only in :meth:`Content.release`, which is reached only by entries that no
transfer uses, and in :meth:`Content.demote`, whose transition starts from an unused one. A record that is dead is
noted, so that whoever drives the disk can tell it (:meth:`Content.take_dead`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.entries import (
    NO_OFFSET,
    RESIDENT,
    Entry,
    EntryEvent,
    EntryState,
    Space,
    TableCounters,
    move_all,
)
from memkv_vllm.store.eviction import EvictionPolicy
from memkv_vllm.store.log.api import Location
from memkv_vllm.store.spaces import Spaces

__all__ = ["Content"]

_ABSENT, _RESERVED = EntryState.ABSENT, EntryState.RESERVED
_PIN, _UNPIN, _LAST_UNPIN = EntryEvent.PIN, EntryEvent.UNPIN, EntryEvent.LAST_UNPIN


class Content:
    """What a store holds. The parts of the table share one; nobody else changes it.

    Args:
        allocator: extents of the arena.
        policy: order of eviction over the values in the arena.
    """

    def __init__(self, allocator: ArenaAllocator, policy: EvictionPolicy) -> None:
        self.allocator = allocator
        self.policy = policy
        self.counters = TableCounters()
        self.namespaces = Spaces()
        self.in_use: dict[int, Entry] = {}
        """Entries whose extent somebody uses (reserved, pinned, fetching), by generation."""
        self.in_use_bytes = 0
        """Bytes of those, in whole granules: what no eviction can free."""
        self.extents: dict[int, Entry] = {}
        """Entries with an extent, by its offset."""
        self.records: OrderedDict[Location, Entry] = OrderedDict()
        """Entries with a record on disk, the one written or fetched longest ago first."""
        self.num_entries = 0
        self.num_visible = 0
        self.arena_bytes = 0
        """Bytes of the values with an extent, without rounding."""
        self.disk_bytes = 0
        self.num_on_disk = 0
        """Values whose bytes are on disk alone, those being fetched included."""
        self.on_dead: Callable[[], None] = lambda: None
        """Called when a dead record is noted and none was before."""
        self.generation = 0
        """The last one that was given to an entry."""
        self._dead: list[Location] = []

    def __repr__(self) -> str:
        return f"<Content {self.num_visible} visible of {self.num_entries} entries, {len(self.in_use)} in use>"

    # An entry comes

    def next_generation(self) -> int:
        """A number that no entry had before."""
        self.generation += 1
        return self.generation

    def next_generations(self, count: int) -> range:
        """So many of them."""
        first = self.generation + 1
        self.generation += count
        return range(first, first + count)

    def insert(self, entry: Entry) -> None:
        """Takes up an entry that a start found on disk."""
        entry.move(EntryEvent.RECOVER)
        entry.space.entries[entry.key] = entry
        self.num_entries += 1
        self.num_on_disk += 1

    def insert_reserved(self, space: Space, entries: Sequence[Entry]) -> None:
        """Takes up new entries of one space, each with an extent, and holds them."""
        move_all(entries, EntryEvent.RESERVE)
        space.entries.update(zip([entry.key for entry in entries], entries, strict=True))
        self.extents.update(zip([entry.offset for entry in entries], entries, strict=True))
        self.in_use.update(zip([entry.generation for entry in entries], entries, strict=True))
        self.num_entries += len(entries)
        self.arena_bytes += sum([entry.length for entry in entries])
        num_bytes = sum([entry.extent_bytes for entry in entries])
        space.arena_bytes += num_bytes
        self.in_use_bytes += num_bytes

    def publish(self, entry: Entry) -> None:
        """Makes an entry that just became visible count as such, and known to the policy if it is in the arena."""
        entry.space.complete += 1
        self.num_visible += 1
        if entry.state in RESIDENT:
            self.policy.added(entry.key)

    def publish_all(self, entries: Sequence[Entry]) -> None:
        """The same for entries in the arena."""
        for entry in entries:
            entry.space.complete += 1
        self.num_visible += len(entries)
        self.policy.added_many([entry.key for entry in entries])

    def settle(self, entry: Entry, offset: int) -> None:
        """Gives an extent to an entry that had none."""
        entry.offset = offset
        self.extents[offset] = entry
        self.arena_bytes += entry.length
        entry.space.arena_bytes += entry.extent_bytes

    def arrived(self, entry: Entry) -> None:
        """The bytes of a value that was on disk alone are in its extent."""
        entry.move(EntryEvent.FETCHED)
        self.num_on_disk -= 1
        self.policy.added(entry.key)

    # An extent is in use

    def hold(self, entry: Entry) -> None:
        """The extent of ``entry`` is in use from now on."""
        self.in_use[entry.generation] = entry
        self.in_use_bytes += entry.extent_bytes

    def unhold(self, entries: Sequence[Entry]) -> None:
        """The extents of ``entries`` are not in use any more."""
        in_use = self.in_use
        for entry in entries:
            del in_use[entry.generation]
        self.in_use_bytes -= sum([entry.extent_bytes for entry in entries])

    def held(self, key: bytes, generation: int) -> Entry:
        """The entry in use under this key and generation.

        Raises:
            LocalProtocolError: there is none.
        """
        entry = self.in_use.get(generation)
        if entry is None or entry.key != key:
            raise LocalProtocolError(f"key {key.hex()}: generation {generation} is not in use")
        return entry

    def pin(self, entries: Sequence[Entry]) -> None:
        """One more use of the extent of each of these values in the arena; a value may come twice."""
        move_all(entries, _PIN)
        in_use, num_bytes = self.in_use, 0
        for entry in entries:
            entry.pins += 1
            if entry.pins == 1:
                in_use[entry.generation] = entry
                num_bytes += entry.extent_bytes
        self.in_use_bytes += num_bytes

    def unpin(self, entries: Sequence[Entry]) -> None:
        """One use less of each; the last one frees a value that was hidden or whose epoch has ended."""
        if [entry.pins for entry in entries].count(1) < len(entries):
            for entry in entries:  # one by one: a value may come twice, and then goes from two pins to none
                if entry.pins > 1:
                    entry.move(_UNPIN)
                    entry.pins -= 1
                else:
                    self._unpin_last([entry])
        else:
            self._unpin_last(entries)

    def _unpin_last(self, entries: Sequence[Entry]) -> None:
        """The last use of each has ended."""
        move_all(entries, _LAST_UNPIN)
        in_use, num_bytes = self.in_use, 0
        for entry in entries:
            entry.pins = 0
            del in_use[entry.generation]
            num_bytes += entry.extent_bytes
        self.in_use_bytes -= num_bytes
        for entry in [entry for entry in entries if entry.state is _ABSENT or not entry.space.current]:
            self._outlived(entry)

    def _outlived(self, entry: Entry) -> None:
        """The last use of a value has ended that was hidden, or whose epoch was ended, meanwhile."""
        if entry.state is _ABSENT:
            self.release(entry)
        else:
            self.remove(entry)
            self.counters.reclaimed += 1

    # An entry goes

    def remove(self, entry: Entry) -> None:
        """Hides a visible entry; frees it unless its extent is in use. Its record is dead."""
        resident = entry.state in RESIDENT
        entry.move(EntryEvent.REMOVE)
        entry.space.complete -= 1
        if entry.space.current:
            self.num_visible -= 1
        if resident:
            self.policy.removed(entry.key)
        else:
            self.num_on_disk -= 1
        self.namespaces.detach(entry)
        if entry.location is not None:
            # The log's own reset has ended all records of an epoch that is over.
            self.drop_record(entry, forget=entry.space.current)
        if entry.state is _ABSENT:
            self.release(entry)

    def discard(self, entries: Sequence[Entry]) -> None:
        """Removes values that nobody uses and that have no record, from current spaces; the policy forgot them already.

        Their extents go back to the allocator together, since neighbours cost it one step.
        """
        move_all(entries, EntryEvent.REMOVE)
        self.allocator.free_many([entry.offset for entry in entries])
        extents, spaces = self.extents, set[Space]()
        for entry in entries:
            space = entry.space
            space.complete -= 1
            space.arena_bytes -= entry.extent_bytes
            del space.entries[entry.key], extents[entry.offset]
            entry.offset = NO_OFFSET
            spaces.add(space)
        for space in spaces:
            self.namespaces.drop_empty(space)
        self.arena_bytes -= sum([entry.length for entry in entries])
        self.num_visible -= len(entries)
        self.num_entries -= len(entries)

    def reclaim(self, entry: Entry) -> None:
        """Takes an entry out of its stale space; what a transfer uses is freed when that ends."""
        if entry.state is _RESERVED:
            self.namespaces.detach(entry)
            return
        self.remove(entry)
        self.counters.reclaimed += 1

    def release(self, entry: Entry) -> None:
        """Frees what an entry had that is hidden and not in use."""
        if entry.offset != NO_OFFSET:
            self.free_extent(entry)
        self.num_entries -= 1

    def demote(self, entry: Entry) -> None:
        """Frees the extent of an unused value that is on disk too."""
        entry.move(EntryEvent.DEMOTE)
        self.num_on_disk += 1
        self.policy.removed(entry.key)
        self.free_extent(entry)

    # Records on disk

    def add_record(self, entry: Entry, location: Location) -> None:
        """The bytes of ``entry`` are on disk at ``location``."""
        entry.location = location
        self.records[location] = entry
        self.disk_bytes += entry.length
        entry.space.disk_bytes += entry.length

    def drop_record(self, entry: Entry, *, forget: bool) -> None:
        """They are not, or must not be found there again: then ``forget`` notes the record as dead."""
        location = entry.location
        if location is None:
            raise LocalProtocolError(f"key {entry.key.hex()} has no record on disk")
        entry.location = None
        del self.records[location]
        self.disk_bytes -= entry.length
        entry.space.disk_bytes -= entry.length
        if forget:
            self.note_dead(location)

    def note_dead(self, location: Location) -> None:
        """The record there is dead."""
        self._dead.append(location)
        if len(self._dead) == 1:
            self.on_dead()

    @property
    def num_dead(self) -> int:
        """Number of dead records that were not taken yet."""
        return len(self._dead)

    def take_dead(self) -> list[Location]:
        """Records that died since the last call."""
        dead, self._dead = self._dead, []
        return dead

    def free_extent(self, entry: Entry) -> None:
        """Gives the extent of ``entry`` back; nobody uses it."""
        self.allocator.free(entry.offset)
        del self.extents[entry.offset]
        self.arena_bytes -= entry.length
        entry.space.arena_bytes -= entry.extent_bytes
        entry.offset = NO_OFFSET
