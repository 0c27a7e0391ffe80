"""Makes room: an extent for a value, by evicting what it takes, within watermarks and quotas. Pure.

Order: what resets left, then (over its quota) the namespace's own values, then the policy's victims. A victim with a
record on disk only loses its copy in the arena. Values in use are never taken.

Victims stand anywhere, so the bytes that they free may be many small holes. Once as many as the value needs are free
through it and there is still no hole for it, what stands beside one of the longest holes goes, whatever the order:
without this, values of 8 MiB among ones of 64 KiB were seen to leave a fifth of the arena free and useless.

What one allocation evicts is thus about twice its own bytes, and at most ``EXTRA_EVICTIONS`` values more: above the
high watermark those go on with every allocation until the low one is reached, so that the room that later values need
is mostly there, and no single one pays for all of it. A batch owes them: its caller frees them in steps
(:meth:`Room.drain`) while the batch's bytes are on their way; a step of what is left then goes before the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.content import Content
from memkv_vllm.store.entries import Entry, EntryState, TableLimits
from memkv_vllm.store.policies import NamespacePolicies
from memkv_vllm.store.spaces import NAMESPACE

__all__ = ["DRAIN_STEP", "EXTRA_EVICTIONS", "Room"]

EXTRA_EVICTIONS = 16
"""Some 50 us of the loop."""
DRAIN_STEP = 128
"""Of those that a batch owes, how many at a time: some 0.25 ms of the loop."""
_WINDOW_HOLES = 8
"""Holes that are looked at for one that can be made long enough."""
_RECORD_SCAN = 16
"""Entries looked at for one that is on disk alone, when the number of entries is what is short."""

_COMPLETE, _ON_DISK = EntryState.COMPLETE, EntryState.ON_DISK


class Room:
    """Allocates in the arena of one table.

    Args:
        content: what is there.
        limits: bounds.

    Raises:
        LocalProtocolError: a quota, and a policy that keeps no order per namespace.
    """

    def __init__(self, content: Content, limits: TableLimits) -> None:
        size = content.allocator.size
        self._content = content
        self._limits = limits
        self._high = int(size * limits.high_watermark)
        self._low = int(size * limits.low_watermark)
        self._quota = int(size * limits.namespace_quota)
        self._own_order: NamespacePolicies | None = None
        self._draining = False
        self._owed = 0
        """Evictions above the watermark that batches have left to :meth:`drain`."""
        self.evicted = 0
        """Values that had to go for the last allocation, from the arena at least; not those for a watermark."""
        if limits.namespace_quota < 1:
            if not isinstance(content.policy, NamespacePolicies):
                raise LocalProtocolError("a namespace quota needs a policy with an order per namespace")
            self._own_order = content.policy

    def __repr__(self) -> str:
        return f"<Room{' above the watermark' if self._draining else ''} {self._content.allocator!r}>"

    @property
    def largest(self) -> int:
        """Bytes of the largest value that may ever fit."""
        return min(self._limits.max_value_bytes, self._quota, self._content.allocator.size)

    @property
    def owes(self) -> bool:
        """Whether there is something for :meth:`drain` to do."""
        return self._owed > 0

    def allocate(self, length: int, namespace: bytes, new_entries: int, *, owe: bool = False) -> int | None:
        """Takes an extent for a value of ``namespace``; :attr:`evicted` tells what it cost.

        Args:
            length: bytes.
            namespace: 32 bytes.
            new_entries: 1 if it is for an entry that is yet to be made, else 0.
            owe: leave what is to be freed above the watermark to :meth:`drain`.

        Returns:
            its offset in bytes; None when there is nothing left to evict for it.
        """
        content, arena = self._content, self._content.allocator
        self.evicted = 0
        if arena.rounded(length) > arena.size - content.in_use_bytes:
            return None  # evicting everything would not help
        if self._own_order is not None and not self._make_room_in_quota(length, namespace, self._own_order):
            content.counters.refused_quota += 1
            return None
        while content.num_entries + new_entries > self._limits.max_entries:
            if not (self.sweep(1) or self._drop_one()):
                return None
            self.evicted += 1
        offset = arena.allocate(length)
        if offset is None:
            offset = self._make_room(length)
        if self._draining or arena.used > self._high:
            if owe:
                self._owed += EXTRA_EVICTIONS
            else:
                self._drain(EXTRA_EVICTIONS)
        return offset

    def allocate_many(self, length: int, namespace: bytes, count: int) -> list[int]:
        """Takes extents for ``count`` new values of one length, as far as no single one needs to be looked after.

        What is to be freed above the watermark is left to :meth:`drain`.

        Args:
            length: bytes of each.
            namespace: 32 bytes.
            count: of them.

        Returns:
            their offsets; what is missing, maybe all, is for :meth:`allocate`, one by one.
        """
        content, arena = self._content, self._content.allocator
        need = arena.rounded(length)
        count = min(count, (arena.size - content.in_use_bytes) // need, self._limits.max_entries - content.num_entries)
        if self._own_order is not None:
            space = content.namespaces.current.get(namespace)
            count = min(count, (self._quota - (space.arena_bytes if space is not None else 0)) // need)
        if count <= 0:
            return []
        self.drain()
        missing = count * need - (arena.size - arena.used)
        if missing > 0:
            self.evict(missing, 2 * count)
        offsets = arena.allocate_many(length, count)
        if self._draining or arena.used > self._high:
            self._owed += EXTRA_EVICTIONS * len(offsets)
        return offsets

    def drain(self) -> bool:
        """Frees a step of what batches left to be freed above the watermark; whether there is more of it."""
        step = min(self._owed, DRAIN_STEP)
        if step:
            self._drain(step)
            self._owed = self._owed - step if self._draining else 0
        return self.owes

    def sweep(self, max_entries: int) -> int:
        """Reclaims up to ``max_entries`` entries of stale spaces; returns how many were looked at."""
        content, seen = self._content, 0
        while seen < max_entries and (entry := content.namespaces.stale_entry()) is not None:
            content.reclaim(entry)
            seen += 1
        return seen

    def evict(self, num_bytes: int, max_values: int) -> tuple[int, int]:
        """Frees ``num_bytes`` of the arena, or as much as ``max_values`` values give; values and bytes freed."""
        content, values = self._content, 0
        before = content.allocator.used
        target = max(0, before - num_bytes)
        while content.allocator.used > target and values < max_values and self.sweep(1):
            values += 1
        left, most = content.allocator.used - target, max_values - values
        if left > 0 and most > 0:
            values += self._evict_victims(left, most)
        return values, before - content.allocator.used

    def drop_oldest_record(self) -> bool:
        """Drops the value that is on disk alone, of those written or fetched longest ago; False when there is none."""
        records = self._content.records
        for _ in range(min(_RECORD_SCAN, len(records))):
            location, entry = next(iter(records.items()))
            if entry.state is _ON_DISK:
                self._count_eviction(entry)
                self._content.remove(entry)
                return True
            records.move_to_end(location)
        return False

    # Inside

    def _make_room_in_quota(self, length: int, namespace: bytes, order: NamespacePolicies) -> bool:
        content = self._content
        need = content.allocator.rounded(length)
        # The space goes with its last entry, so it is looked up again after each.
        while (space := content.namespaces.current.get(namespace)) is not None and (
            space.arena_bytes + need > self._quota
        ):
            if not self._evict_one(order.victims_of(namespace)):
                return False
            self.evicted += 1
        return True

    def _make_room(self, length: int) -> int | None:
        """Frees until there is a hole for a value, and takes it; None: there is nothing left to free."""
        content, arena = self._content, self._content.allocator
        before, need = arena.used, arena.rounded(length)
        offset = None
        while offset is None:
            if self.sweep(1):
                pass
            elif before - arena.used >= need and (window := self._window(need)):
                for entry in window:
                    self._free_extent(entry)
                content.counters.window_evictions += len(window)
                self.evicted += len(window)
            elif self._evict_one(content.policy.victims()):
                self.evicted += 1
            else:
                return None
            offset = arena.allocate(length)
        return offset

    def _window(self, need: int) -> list[Entry]:
        """Entries that stand right behind one of the longest holes, so that without them ``need`` bytes are free there.

        Empty: something that is in use, or the end of the arena, stands behind each of them.
        """
        content, arena = self._content, self._content.allocator
        for offset, length in arena.longest_free(_WINDOW_HOLES):
            found: list[Entry] = []
            while length < need and (entry := content.extents.get(offset + length)) is not None:
                if entry.state is not _COMPLETE or not entry.space.current:
                    break
                found.append(entry)
                length += entry.extent_bytes
                length += arena.free_length(offset + length)
            if length >= need:
                return found
        return []

    def _drain(self, max_values: int) -> None:
        arena = self._content.allocator
        self.evict(arena.used - self._low, max_values)
        self._draining = arena.used > self._low

    def _evict_victims(self, num_bytes: int, max_values: int) -> int:
        """Frees the extents of the first victims that are not in use, up to so many bytes; returns their number."""
        content, policy, spaces = self._content, self._content.policy, self._content.namespaces.current
        gone: list[Entry] = []
        demoted = 0
        for key in policy.victims():
            # What the policy knows is in a current space or stale: not worth a call for each of so many.
            space = spaces.get(key[NAMESPACE])
            entry = None if space is None else space.entries.get(key)
            if entry is None or entry.state is not _COMPLETE:
                continue
            num_bytes -= entry.extent_bytes
            if entry.location is not None:
                self._free_extent(entry)
                demoted += 1
            else:
                policy.removed(key)
                gone.append(entry)
            if num_bytes <= 0 or len(gone) + demoted == max_values:
                break
        content.discard(gone)
        content.counters.evictions += len(gone)
        content.counters.evicted_bytes += sum([entry.length for entry in gone])
        return len(gone) + demoted

    def _evict_one(self, victims: Iterable[bytes]) -> bool:
        """Frees the extent of the first victim that is not in use."""
        content = self._content
        for key in victims:
            entry = content.namespaces.entry(key)
            if entry is not None and entry.state is _COMPLETE:
                self._free_extent(entry)
                return True
        return False

    def _free_extent(self, entry: Entry) -> None:
        """Takes an unused value out of the arena: altogether, unless it is on disk too."""
        content = self._content
        if entry.location is not None:
            content.counters.demotions += 1
            content.counters.demoted_bytes += entry.length
            content.demote(entry)
        else:
            self._count_eviction(entry)
            content.remove(entry)

    def _drop_one(self) -> bool:
        """Makes room for one more entry."""
        if self.drop_oldest_record():
            return True
        for key in self._content.policy.victims():
            entry = self._content.namespaces.entry(key)
            if entry is not None and entry.state is _COMPLETE:
                self._count_eviction(entry)
                self._content.remove(entry)
                return True
        return False

    def _count_eviction(self, entry: Entry) -> None:
        self._content.counters.evictions += 1
        self._content.counters.evicted_bytes += entry.length
