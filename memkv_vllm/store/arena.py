"""Allocation of extents inside the store's arena. Pure: numbers in, numbers out; the bytes are elsewhere.

Exact best fit, lowest address first, with coalescing of neighbours. Extents start and end on a granule, so
the bytes lost inside an extent are fewer than one granule; those lost between extents are measured
(:meth:`ArenaAllocator.statistics`) and won back by whoever frees what stands beside a long one
(:meth:`ArenaAllocator.longest_free`) until an allocation fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from memkv_vllm.errors import LocalProtocolError

__all__ = ["ArenaAllocator", "ArenaStatistics"]


class ArenaStatistics(NamedTuple):
    """State of an arena; all sizes in bytes, counted in whole granules, so that ``used + free == size``."""

    size: int
    used: int
    free: int
    largest_free: int
    """Length of the longest value that fits without freeing anything."""
    extents: int
    """Number of extents handed out."""
    fragmentation: float
    """``1 - largest_free / free``: 0 when the free bytes are one extent (or there are none)."""


class _Bin:
    """Free extents of one length: a heap of offsets in which an offset that was taken is skipped later."""

    __slots__ = ("_heap", "live")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self.live: set[int] = set()

    def add(self, offset: int) -> None:
        self.live.add(offset)
        heappush(self._heap, offset)
        # Skipped offsets may pile up behind a low one that is never taken; rebuilding is O(1) amortized.
        if len(self._heap) > 2 * len(self.live) + 16:
            self._heap = list(self.live)
            heapify(self._heap)

    def discard(self, offset: int) -> None:
        self.live.remove(offset)

    def pop_lowest(self) -> int:
        while (offset := heappop(self._heap)) not in self.live:
            pass
        self.live.remove(offset)
        return offset


class ArenaAllocator:
    """Hands out extents of any length inside ``[0, size)``.

    A call costs O(log n) comparisons. The ordered list of distinct free lengths that it searches holds at most
    ``sqrt(2 * size / granule)`` of them, because they must add up to no more than the arena.

    Args:
        size: bytes of the arena; what is over the last whole granule is not used.
        granule: bytes; every offset is a multiple of it.

    Raises:
        LocalProtocolError: ``granule`` is not positive, or the arena holds no whole granule.
    """

    def __init__(self, size: int, granule: int = 4096) -> None:
        if granule <= 0 or size < granule:
            raise LocalProtocolError(f"arena of {size} bytes with a granule of {granule}: need size >= granule > 0")
        self.granule = granule
        self.size = size - size % granule
        self._used = 0
        self._extents: dict[int, int] = {}
        self._free_at: dict[int, int] = {}
        self._free_end: dict[int, int] = {}
        self._lengths: list[int] = []
        self._bins: dict[int, _Bin] = {}
        self._insert(0, self.size)

    def __repr__(self) -> str:
        return f"<ArenaAllocator {self._used}/{self.size} bytes in {len(self._extents)} extents>"

    @property
    def used(self) -> int:
        """Bytes of all extents that are handed out."""
        return self._used

    def rounded(self, length: int) -> int:
        """Bytes of the arena that a value of ``length`` bytes takes: the next multiple of the granule."""
        return -(-length // self.granule) * self.granule

    def allocate(self, length: int) -> int | None:
        """Takes an extent for ``length`` bytes.

        Returns:
            its offset in bytes, or None when no free extent is long enough.

        Raises:
            LocalProtocolError: ``length`` is not positive.
        """
        found = self.allocate_many(length, 1)
        return found[0] if found else None

    def allocate_many(self, length: int, count: int) -> list[int]:
        """Takes ``count`` extents for ``length`` bytes each, just as so many calls of :meth:`allocate` would.

        The rest of a hole that was cut is the best fit for the next one, so each hole is cut once for all it holds.

        Returns:
            their offsets; fewer than ``count`` when no free extent is long enough any more.

        Raises:
            LocalProtocolError: ``length`` is not positive.
        """
        if length <= 0:
            raise LocalProtocolError(f"allocation of {length} bytes: must be positive")
        need = self.rounded(length)
        offsets: list[int] = []
        while len(offsets) < count and (at := bisect_left(self._lengths, need)) < len(self._lengths):
            found = self._lengths[at]
            offset = self._take_lowest(found, at)
            taken = min(count - len(offsets), found // need) * need
            offsets += range(offset, offset + taken, need)
            if found > taken:
                self._insert(offset + taken, found - taken)
        self._extents.update(dict.fromkeys(offsets, need))
        self._used += need * len(offsets)
        return offsets

    def free(self, offset: int) -> None:
        """Gives back the extent that :meth:`allocate` returned as ``offset`` and joins it with free neighbours.

        Raises:
            LocalProtocolError: no extent that is handed out starts there (a double free, or a wrong offset).
        """
        self._join(offset, self._give_back(offset))

    def free_many(self, offsets: Iterable[int]) -> None:
        """:meth:`free` for each of ``offsets``; those that lie side by side are joined first, and inserted once."""
        start = end = -1
        for offset in sorted(offsets):
            length = self._give_back(offset)
            if offset != end:
                if end > start:
                    self._join(start, end - start)
                start = offset
            end = offset + length
        if end > start:
            self._join(start, end - start)

    def _give_back(self, offset: int) -> int:
        """The extent is not handed out any more; returns its length."""
        length = self._extents.pop(offset, None)
        if length is None:
            raise LocalProtocolError(f"free of offset {offset}: no extent in use starts there (double free?)")
        self._used -= length
        return length

    def _join(self, offset: int, length: int) -> None:
        """Inserts free bytes, joined with free neighbours."""
        before = self._free_end.get(offset)
        if before is not None:
            length += self._remove(before)
            offset = before
        if offset + length in self._free_at:
            length += self._remove(offset + length)
        self._insert(offset, length)

    def longest_free(self, count: int) -> list[tuple[int, int]]:
        """``(offset, length)`` of the ``count`` longest free extents, the longest first."""
        found: list[tuple[int, int]] = []
        for length in reversed(self._lengths):
            for offset in self._bins[length].live:
                found.append((offset, length))
                if len(found) == count:
                    return found
        return found

    def free_length(self, offset: int) -> int:
        """Bytes of the free extent that starts at ``offset``; 0 when none does."""
        return self._free_at.get(offset, 0)

    def statistics(self) -> ArenaStatistics:
        """Sizes, number of extents and fragmentation as they are now."""
        free = self.size - self._used
        largest = self._lengths[-1] if self._lengths else 0
        fragmentation = 1 - largest / free if free else 0.0
        return ArenaStatistics(self.size, self._used, free, largest, len(self._extents), fragmentation)

    def _insert(self, offset: int, length: int) -> None:
        self._free_at[offset] = length
        self._free_end[offset + length] = offset
        bin_ = self._bins.get(length)
        if bin_ is None:
            bin_ = self._bins[length] = _Bin()
            insort(self._lengths, length)
        bin_.add(offset)

    def _remove(self, offset: int) -> int:
        length = self._free_at.pop(offset)
        del self._free_end[offset + length]
        bin_ = self._bins[length]
        bin_.discard(offset)
        if not bin_.live:
            self._drop_bin(length, bisect_left(self._lengths, length))
        return length

    def _take_lowest(self, length: int, at: int) -> int:
        bin_ = self._bins[length]
        offset = bin_.pop_lowest()
        if not bin_.live:
            self._drop_bin(length, at)
        del self._free_at[offset]
        del self._free_end[offset + length]
        return offset

    def _drop_bin(self, length: int, at: int) -> None:
        del self._bins[length]
        del self._lengths[at]
