"""What the store holds: a state machine per key over extents of the arena. Pure: time is an argument.

::

    absent --reserve--> reserved --commit--> complete --pin--> pinned --unpin--> complete
                           |                    |                 |
                         abort               remove            remove (hidden at once)
                           v                    v                 v
                         absent               absent           evicting --last unpin--> absent

``remove`` is an eviction, a delete, a bad report or the end of a namespace's epoch. An extent goes back to the
allocator only on entering ``absent``; no transition leads there from a reserved entry but the driver's own
``commit`` or ``abort`` (its pull has ended), and none from a pinned one but the last ``unpin`` (its push has).

The keys of a namespace live in its current *space*. A reset makes that space stale and starts an empty one, so
it costs the same whatever the namespace holds: everything in a stale space is invisible at once, and is
reclaimed by allocation, which prefers it, or by :meth:`Table.sweep` in bounded steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.entries import (
    VISIBLE,
    Entry,
    EntryEvent,
    EntryState,
    PinResult,
    ReserveResult,
    Space,
    TableCounters,
    TableLimits,
    TableStatistics,
)
from memkv_vllm.store.eviction import EvictionPolicy
from memkv_vllm.types import Status

__all__ = ["NAMESPACE", "PinResult", "ReserveResult", "Table", "TableLimits", "TableStatistics"]

NAMESPACE = slice(1, 33)
"""Where the namespace digest stands in a store key."""


class Table:
    """Index of the store. Not thread-safe: one event loop owns it.

    Args:
        allocator: extents of the arena; nobody else may use it.
        policy: order of eviction; holds exactly the complete keys.
        limits: bounds.
    """

    def __init__(self, allocator: ArenaAllocator, policy: EvictionPolicy, limits: TableLimits | None = None) -> None:
        self.limits = TableLimits() if limits is None else limits
        self._allocator = allocator
        self._policy = policy
        self._spaces: dict[bytes, Space] = {}
        self._stale: deque[Space] = deque()
        self._held: dict[int, Entry] = {}
        """Entries that a transfer uses (reserved or with pins), by generation."""
        self._held_bytes = 0
        """Bytes of those, in whole granules: what no eviction can free."""
        self._owned: dict[object, dict[int, bytes]] = {}
        self._entries = 0
        self._bytes = 0
        self._complete = 0
        self._generation = 0
        self._counters = TableCounters()

    def __repr__(self) -> str:
        return f"<Table {self._complete} complete of {self._entries} entries, {len(self._held)} in use>"

    # Writers

    def reserve(
        self, key: bytes, length: int, checksum: int, algorithm: int, layout: int, owner: object, now: float
    ) -> ReserveResult:
        """Takes an extent for a value that ``owner`` is about to write; the key does not exist until commit.

        Args:
            key: store key; bytes 1 to 33 are the namespace digest.
            length: bytes of the value.
            checksum, algorithm, layout: stored with the value, for the reader.
            owner: hashable; names the session in :meth:`release_owner`.
            now: seconds, for :attr:`TableStatistics.oldest_reservation`.

        Returns:
            ``OK`` with offset and generation; ``EXISTS`` (complete already), ``PENDING`` (reserved by an earlier
            writer), ``TOO_LARGE`` (more than the arena or the limit) or ``NO_SPACE`` (nothing left to evict).
        """
        refused = self._refusal(key, length)
        if refused is not None:
            return ReserveResult(refused)
        self._reclaim_older(key)
        offset, evicted = self._allocate(length)
        if offset is None:
            self._counters.refused_no_space += 1
            return ReserveResult(Status.NO_SPACE, evicted=evicted)
        self._generation += 1
        space = self._spaces.setdefault(key[NAMESPACE], Space())
        entry = Entry(key, length, checksum, algorithm, layout, owner, now, offset, self._generation, space)
        entry.move(EntryEvent.RESERVE)
        space.entries[key] = entry
        self._owned.setdefault(owner, {})[entry.generation] = key
        self._entries += 1
        self._bytes += length
        self._hold(entry)
        self._counters.reservations += 1
        return ReserveResult(Status.OK, offset, entry.generation, evicted)

    def commit(self, key: bytes, generation: int) -> bool:
        """Makes a reserved value visible; all its bytes must be in place and checked.

        Returns:
            False when the namespace was reset since the reservation: the value was freed instead.

        Raises:
            LocalProtocolError: no such reservation.
        """
        entry = self._held_entry(key, generation)
        entry.move(EntryEvent.COMMIT)
        self._disown(entry)
        self._unhold(entry)
        if not entry.space.current:
            entry.move(EntryEvent.REMOVE)
            self._detach(entry)
            self._release(entry)
            self._counters.commits_hidden += 1
            return False
        entry.space.complete += 1
        self._complete += 1
        self._policy.added(key)
        self._counters.commits += 1
        return True

    def abort(self, key: bytes, generation: int) -> None:
        """Undoes a reservation and frees its bytes: only after its pull has ended or was fenced.

        Raises:
            LocalProtocolError: no such reservation.
        """
        entry = self._held_entry(key, generation)
        entry.move(EntryEvent.ABORT)
        self._disown(entry)
        self._unhold(entry)
        self._detach(entry)
        self._release(entry)
        self._counters.aborts += 1

    def release_owner(self, owner: object) -> list[tuple[bytes, int]]:
        """The ``(key, generation)`` of every open reservation of ``owner``; changes nothing."""
        return [(key, generation) for generation, key in self._owned.get(owner, {}).items()]

    # Readers

    def pin(self, key: bytes, length: int, layout: int) -> PinResult:
        """Holds a complete value in place until :meth:`unpin`, and counts as a use of it.

        Returns:
            ``OK`` with offset, checksum and generation; ``ABSENT``; ``BAD_LENGTH`` or ``BAD_LAYOUT`` with the
            generation, so that the reader can report the value.
        """
        entry = self._find(key)
        if entry is None:
            self._counters.misses += 1
            return PinResult(Status.ABSENT)
        if entry.length != length or entry.layout != layout:
            self._counters.mismatches += 1
            status = Status.BAD_LENGTH if entry.length != length else Status.BAD_LAYOUT
            return PinResult(status, generation=entry.generation)
        entry.move(EntryEvent.PIN)
        entry.pins += 1
        if entry.pins == 1:
            self._hold(entry)
        self._policy.touched(key)
        self._counters.hits += 1
        return PinResult(Status.OK, entry.offset, entry.checksum, entry.algorithm, entry.generation)

    def unpin(self, key: bytes, generation: int) -> None:
        """Gives one pin back: only after its push has ended. The last one frees a hidden value.

        Raises:
            LocalProtocolError: no such pin.
        """
        entry = self._held_entry(key, generation)
        entry.move(EntryEvent.UNPIN if entry.pins > 1 else EntryEvent.LAST_UNPIN)
        entry.pins -= 1
        if entry.pins:
            return
        self._unhold(entry)
        if entry.state is EntryState.ABSENT:
            self._release(entry)
        elif not entry.space.current:
            self._remove(entry)
            self._counters.reclaimed += 1

    def exists(self, block_prefixes: list[bytes], shards: int) -> bytes:
        """Which shards of which blocks are complete. Pins nothing; counts as a use of what is found.

        Args:
            block_prefixes: store keys without their last two bytes (the shard number, big-endian).
            shards: shards per block.

        Returns:
            one row of ``ceil(shards / 8)`` bytes per prefix; bit i of a row, lowest first, is shard i.
        """
        suffixes = [shard.to_bytes(2, "big") for shard in range(shards)]
        width = (shards + 7) // 8
        rows = []
        for prefix in block_prefixes:
            space = self._spaces.get(prefix[NAMESPACE])
            row = 0
            for shard, suffix in enumerate(suffixes if space is not None else ()):
                entry = space.entries.get(prefix + suffix) if space is not None else None
                if entry is not None and entry.state in VISIBLE:
                    row |= 1 << shard
                    self._policy.touched(entry.key)
            rows.append(row.to_bytes(width, "little"))
        return b"".join(rows)

    # Removal

    def delete(self, key: bytes) -> bool:
        """Removes a complete value at once; readers in flight finish. False when there is none."""
        entry = self._find(key)
        if entry is None:
            return False
        self._remove(entry)
        self._counters.deletes += 1
        return True

    def report_bad(self, key: bytes, generation: int) -> bool:
        """Removes the value whose bytes a reader found wrong. A stale ``generation`` does nothing (False)."""
        entry = self._find(key)
        if entry is None or entry.generation != generation:
            return False
        self._remove(entry)
        self._counters.bad_reports += 1
        return True

    def reset_namespace(self, namespace: bytes) -> int:
        """Ends the epoch of a namespace (32 bytes) in O(1): none of its values is visible any more.

        Reservations of the old epoch go on and end invisible.

        Returns:
            number of values that were visible until now.
        """
        self._counters.resets += 1
        space = self._spaces.pop(namespace, None)
        if space is None:
            return 0
        space.current = False
        self._complete -= space.complete
        self._stale.append(space)
        return space.complete

    def sweep(self, max_entries: int) -> int:
        """Reclaims up to ``max_entries`` entries of stale spaces; returns how many were looked at."""
        seen = 0
        while seen < max_entries and self._stale:
            space = self._stale[0]
            if not space.entries:
                self._stale.popleft()
                continue
            self._reclaim(next(iter(space.entries.values())))
            seen += 1
        return seen

    def statistics(self) -> TableStatistics:
        """Gauges and counters as they are now."""
        reserved = [entry.since for entry in self._held.values() if entry.state is EntryState.RESERVED]
        return TableStatistics(
            entries=self._entries,
            complete=self._complete,
            reserved=len(reserved),
            pinned=len(self._held) - len(reserved),
            stale=sum(len(space.entries) for space in self._stale),
            bytes_used=self._bytes,
            oldest_reservation=min(reserved, default=None),
            counters=replace(self._counters),
        )

    # Inside

    def _find(self, key: bytes) -> Entry | None:
        space = self._spaces.get(key[NAMESPACE])
        entry = space.entries.get(key) if space is not None else None
        return entry if entry is not None and entry.state in VISIBLE else None

    def _refusal(self, key: bytes, length: int) -> Status | None:
        space = self._spaces.get(key[NAMESPACE])
        entry = space.entries.get(key) if space is not None else None
        if entry is not None:
            if entry.state is EntryState.RESERVED:
                self._counters.refused_pending += 1
                return Status.PENDING
            self._policy.touched(key)
            self._counters.refused_exists += 1
            return Status.EXISTS
        if length > min(self.limits.max_value_bytes, self._allocator.size):
            self._counters.refused_too_large += 1
            return Status.TOO_LARGE
        return None

    def _allocate(self, length: int) -> tuple[int | None, int]:
        """Offset (None: no room) and number of evictions: stale entries go first, then victims, until it fits."""
        evicted = 0
        if self._allocator.rounded(length) > self._allocator.size - self._held_bytes:
            return None, 0  # evicting everything would not help
        while True:
            if self._entries < self.limits.max_entries:
                offset = self._allocator.allocate(length)
                if offset is not None:
                    return offset, evicted
            if self.sweep(1):
                continue
            if not self._evict_one():
                return None, evicted
            evicted += 1

    def _evict_one(self) -> bool:
        for key in self._policy.victims():
            entry = self._find(key)
            if entry is not None and entry.state is EntryState.COMPLETE:
                self._counters.evictions += 1
                self._counters.evicted_bytes += entry.length
                self._remove(entry)
                return True
        return False

    def _remove(self, entry: Entry) -> None:
        """Hides a complete or pinned entry; frees it unless it is pinned."""
        entry.move(EntryEvent.REMOVE)
        entry.space.complete -= 1
        if entry.space.current:
            self._complete -= 1
        self._policy.removed(entry.key)
        self._detach(entry)
        if entry.state is EntryState.ABSENT:
            self._release(entry)

    def _reclaim(self, entry: Entry) -> None:
        """Takes an entry out of its stale space; what a transfer uses is freed when that ends."""
        if entry.state is EntryState.RESERVED:
            self._detach(entry)
            return
        self._remove(entry)
        self._counters.reclaimed += 1

    def _reclaim_older(self, key: bytes) -> None:
        """A policy holds a key once, so an older epoch's value must go before the key is reserved again."""
        for space in self._stale:
            entry = space.entries.get(key)
            if entry is not None:
                self._reclaim(entry)

    def _detach(self, entry: Entry) -> None:
        space = entry.space
        if space.entries.get(entry.key) is entry:
            del space.entries[entry.key]
            if not space.entries and space.current:
                del self._spaces[entry.key[NAMESPACE]]

    def _release(self, entry: Entry) -> None:
        self._allocator.free(entry.offset)
        self._entries -= 1
        self._bytes -= entry.length

    def _hold(self, entry: Entry) -> None:
        self._held[entry.generation] = entry
        self._held_bytes += self._allocator.rounded(entry.length)

    def _unhold(self, entry: Entry) -> None:
        del self._held[entry.generation]
        self._held_bytes -= self._allocator.rounded(entry.length)

    def _held_entry(self, key: bytes, generation: int) -> Entry:
        entry = self._held.get(generation)
        if entry is None or entry.key != key:
            raise LocalProtocolError(f"key {key.hex()}: generation {generation} is not in use")
        return entry

    def _disown(self, entry: Entry) -> None:
        owned = self._owned[entry.owner]
        del owned[entry.generation]
        if not owned:
            del self._owned[entry.owner]
