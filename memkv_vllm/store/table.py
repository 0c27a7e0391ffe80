"""What the store holds: a state machine per key over extents and records on disk. Pure: time is an argument.

::

    absent --reserve--> reserved --commit--> complete --pin--> pinned --unpin--> complete
                           |                    |                 |
                         abort               remove            remove (hidden at once)
                           v                    v                 v
                         absent               absent           evicting --last unpin--> absent

    complete, with a record on disk too --demote (its extent is needed)--> on disk --remove--> absent
    on disk --fetch (into a new extent)--> fetching --fetched--> complete;  --unfetch--> on disk;  --remove--> evicting

``remove`` is an eviction, a delete, a bad report or the end of a namespace's epoch. An extent goes back to the
allocator only on entering ``absent`` or by ``demote``; no transition leads there from a reserved entry but the
driver's own ``commit`` or ``abort`` (its pull has ended), none from a pinned one but the last ``unpin`` (its push, or
its write to disk, has), and none from a fetching one but the end of the fetch.

The keys of a namespace live in its current *space*. A reset makes that space stale and starts an empty one, so
it costs the same whatever the namespace holds: everything in a stale space is invisible at once, and is
reclaimed by allocation, which prefers it, or by :meth:`Table.sweep` in bounded steps.

Parts: :mod:`~memkv_vllm.store.content` (entries and what they hold), :mod:`~memkv_vllm.store.room` (allocation and
eviction), :mod:`~memkv_vllm.store.batches` (what a PUT or a GET does), :mod:`~memkv_vllm.store.disk_index` (what a disk
sees).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import mul

from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.batches import Batches, NewValues
from memkv_vllm.store.content import Content
from memkv_vllm.store.disk_index import DiskIndex
from memkv_vllm.store.entries import (
    RESIDENT,
    VISIBLE,
    Entry,
    EntryState,
    PinResult,
    ReserveResult,
    TableLimits,
    TableStatistics,
)
from memkv_vllm.store.eviction import EvictionPolicy
from memkv_vllm.store.room import Room
from memkv_vllm.store.spaces import NAMESPACE, NamespaceStatistics
from memkv_vllm.types import Status

__all__ = ["NAMESPACE", "NamespaceStatistics", "PinResult", "ReserveResult", "Table", "TableLimits", "TableStatistics"]

_RESERVED = EntryState.RESERVED


class Table:
    """Index of the store. Not thread-safe: one event loop owns it.

    Args:
        allocator: extents of the arena; nobody else may use it.
        policy: order of eviction; holds exactly the complete keys of the arena.
        limits: bounds.
    """

    def __init__(self, allocator: ArenaAllocator, policy: EvictionPolicy, limits: TableLimits | None = None) -> None:
        self.limits = TableLimits() if limits is None else limits
        self._content = Content(allocator, policy)
        self._room = Room(self._content, self.limits)
        self.disk = DiskIndex(self._content, self._room, self.limits)
        """For the driver of a disk; without one, nothing is ever on disk."""
        self.batches = Batches(self._content, self._room)
        """For whole requests. The single-value methods of the table are batches of one."""
        self._policy = policy
        self._counters = self._content.counters
        self._namespaces = self._content.namespaces
        self._spaces = self._namespaces.current

    def __repr__(self) -> str:
        content = self._content
        return f"<Table {content.num_visible} complete of {content.num_entries} entries, {len(content.in_use)} in use>"

    @property
    def entries_made(self) -> int:
        """Number of entries that there ever were."""
        return self._content.generation

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
        values = NewValues([key], [length], [checksum], [layout], algorithm, owner)
        statuses, reserved = self.batches.reserve(values, now)
        status, evicted = Status(statuses[0]), self._room.evicted
        if not reserved:
            return ReserveResult(status, evicted=evicted if status is Status.NO_SPACE else 0)
        return ReserveResult(status, reserved[0].offset, reserved[0].generation, evicted)

    def commit(self, key: bytes, generation: int) -> bool:
        """Makes a reserved value visible; all its bytes must be in place and checked.

        Returns:
            False when the namespace was reset since the reservation: the value was freed instead.

        Raises:
            LocalProtocolError: no such reservation.
        """
        (visible,) = self.batches.commit([self._content.held(key, generation)])
        return visible

    def abort(self, key: bytes, generation: int) -> None:
        """Undoes a reservation and frees its bytes: only after its pull has ended or was fenced.

        Raises:
            LocalProtocolError: no such reservation.
        """
        self.batches.abort([self._content.held(key, generation)])

    def release_owner(self, owner: object) -> list[tuple[bytes, int]]:
        """The ``(key, generation)`` of every open reservation of ``owner``; changes nothing. O(values in use)."""
        mine = [e for e in self._content.in_use.values() if e.state is _RESERVED and e.owner == owner]
        return [(entry.key, entry.generation) for entry in mine]

    # Readers

    def pin(self, key: bytes, length: int, layout: int, now: float) -> PinResult:
        """Holds a complete value in place until :meth:`unpin`, and counts as a use of it ``now`` (seconds).

        Returns:
            ``OK`` with offset, checksum and generation; ``ABSENT``; ``BAD_LENGTH`` or ``BAD_LAYOUT`` with the
            generation, so that the reader can report the value; ``PENDING`` when it is on disk alone: nothing is held.
        """
        statuses, (entry,) = self.batches.pin([key], [length], [layout], now)
        status = Status(statuses[0])
        if entry is None:
            return PinResult(status)
        if status is not Status.OK:
            return PinResult(status, generation=entry.generation)
        return PinResult(status, entry.offset, entry.checksum, entry.algorithm, entry.generation)

    def unpin(self, key: bytes, generation: int) -> None:
        """Gives one pin back: only after its push has ended. The last one frees a hidden value.

        Raises:
            LocalProtocolError: no such pin.
        """
        self.batches.unpin([self._content.held(key, generation)])

    def exists(self, block_prefixes: Sequence[bytes], shards: int, now: float) -> bytes:
        """Which shards of which blocks are complete, in the arena or on disk. Pins nothing; counts as a use.

        Args:
            block_prefixes: store keys without their last two bytes (the shard number, big-endian).
            shards: shards per block.
            now: seconds; noted as the last use of each namespace asked for.

        Returns:
            one row of ``ceil(shards / 8)`` bytes per prefix; bit i of a row, lowest first, is shard i.
        """
        # Shard after shard, which is the cheapest way to make the keys of a batch.
        suffixes = [shard.to_bytes(2, "big") for shard in range(shards)]
        keys = [prefix + suffix for suffix in suffixes for prefix in block_prefixes]
        found = self._namespaces.entries(keys, now)
        used = [entry.key for entry in found if entry is not None and entry.state in RESIDENT]
        self._policy.touched_many(used)
        if len(used) == len(found):
            there = b"\1" * len(found)
        else:
            there = bytes([entry is not None and entry.state in VISIBLE for entry in found])
        return there if shards == 1 else _bitmap(there, shards)

    # Removal

    def delete(self, key: bytes) -> bool:
        """Removes a complete value at once; readers in flight finish. False when there is none."""
        entry = self._find(key)
        if entry is None:
            return False
        self._content.remove(entry)
        self._counters.deletes += 1
        return True

    def report_bad(self, key: bytes, generation: int) -> bool:
        """Removes the value whose bytes a reader found wrong. A stale ``generation`` does nothing (False)."""
        entry = self._find(key)
        if entry is None or entry.generation != generation:
            return False
        self._content.remove(entry)
        self._counters.bad_reports += 1
        return True

    def reset_namespace(self, namespace: bytes) -> int:
        """Ends the epoch of a namespace (32 bytes) in O(1): none of its values is visible any more.

        Reservations of the old epoch go on and end invisible.

        Returns:
            number of values that were visible until now.
        """
        self._counters.resets += 1
        space = self._namespaces.retire(namespace)
        if space is None:
            return 0
        self._content.num_visible -= space.complete
        return space.complete

    def gc(self, idle_s: float, now: float, at_most: int | None = None) -> list[NamespaceStatistics]:
        """Ends the epoch of every namespace that was not used for ``idle_s`` seconds, O(1) each (P097).

        Args:
            idle_s: seconds.
            now: seconds.
            at_most: of them, so many; all by default.

        Returns:
            what each held.
        """
        dropped = []
        for namespace in self._namespaces.idle(idle_s, now)[:at_most]:
            dropped.append(self._namespaces.describe(self._spaces[namespace]))
            self.reset_namespace(namespace)
        return dropped

    def evict(self, num_bytes: int, max_values: int) -> tuple[int, int]:
        """Frees at least ``num_bytes`` of the arena now: what resets left first, then by the policy's order.

        Values in use stay. At most ``max_values`` values go, so that a caller can do much of it in steps.

        Returns:
            number of values freed, and bytes of the arena that this freed.
        """
        return self._room.evict(num_bytes, max_values)

    def sweep(self, max_entries: int) -> int:
        """Reclaims up to ``max_entries`` entries of stale spaces; returns how many were looked at."""
        return self._room.sweep(max_entries)

    def namespaces(self) -> list[NamespaceStatistics]:
        """One for each namespace that holds something."""
        return self._namespaces.statistics()

    def statistics(self) -> TableStatistics:
        """Gauges and counters as they are now."""
        content = self._content
        in_use = list(content.in_use.values())
        reserved = [entry.since for entry in in_use if entry.state is _RESERVED]
        fetching = sum(1 for entry in in_use if not entry.pins and entry.state is not _RESERVED)
        return TableStatistics(
            entries=content.num_entries,
            complete=content.num_visible,
            reserved=len(reserved),
            pinned=sum(1 for entry in in_use if entry.pins > entry.writing),
            stale=self._namespaces.num_stale(),
            bytes_used=content.arena_bytes,
            oldest_reservation=min(reserved, default=None),
            on_disk=content.num_on_disk,
            records=len(content.records),
            disk_bytes=content.disk_bytes,
            fetching=fetching,
            writing=sum(1 for entry in in_use if entry.writing),
            counters=replace(self._counters),
        )

    # Inside

    def _find(self, key: bytes) -> Entry | None:
        return self._namespaces.find(key)


def _bitmap(there: bytes, shards: int) -> bytes:
    """A row of ``ceil(shards / 8)`` bytes per block; bit i of a row, lowest first, is shard i.

    Args:
        there: 1 or 0 per value, shard after shard.
        shards: shards per block.
    """
    blocks = len(there) // shards
    bits = [1 << shard for shard in range(shards)]
    width = (shards + 7) // 8
    return b"".join([sum(map(mul, bits, there[block::blocks])).to_bytes(width, "little") for block in range(blocks)])
