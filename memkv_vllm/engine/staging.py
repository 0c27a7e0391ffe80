"""Staging memory of one rank: who has which slot of it. Pure. How much there is, says ``plan``.

A slot stages one block's value. Its life::

    free --try_acquire--> held --release--> free
                           |
                           `--quarantine(holder)--> quarantined --all holders fenced--> free

Each time that a slot comes back to free its generation grows, so that a stale :class:`Slot` is told from a fresh one.
No timer frees a slot: out of quarantine leads only the proof that no holder can write into it any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memkv_vllm.engine.plan import (
    MAX_CHUNK_BLOCKS,
    StagingPlan,
    budget_warning,
    load_reserve,
    plan_staging,
    startup_line,
)
from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.types import Direction

__all__ = [
    "MAX_CHUNK_BLOCKS",
    "Slot",
    "StagingPlan",
    "StagingPool",
    "StagingStatistics",
    "budget_warning",
    "plan_staging",
    "startup_line",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """One hold of one staging slot: ``length`` bytes at ``offset`` of ``region``."""

    index: int
    region: int
    offset: int
    length: int
    generation: int


class StagingStatistics(NamedTuple):
    """Slots by state; ``high_water`` is the most that were ever not free at once."""

    free: int
    held: int
    quarantined: int
    total: int
    high_water: int


class _Share:
    """Slots that follow one rule: a direction's own, or the pool that both share."""

    __slots__ = ("free", "held_by_stores", "quarantined", "total")

    def __init__(self) -> None:
        self.free: deque[_Record] = deque()
        self.total = 0
        self.quarantined = 0
        self.held_by_stores = 0


class _Record:
    """State of one slot. Free: no owner; held: an owner; quarantined: ``holders`` (the owner is gone)."""

    __slots__ = ("fenced_off", "holders", "owner", "share", "slot")

    def __init__(self, slot: Slot, share: _Share) -> None:
        self.slot = slot
        self.share = share
        self.owner: Direction | None = None
        self.holders: set[Hashable] = set()
        self.fenced_off: Slot | None = None
        """The last hold that ended in quarantine; its owner's own release comes late and means nothing."""


class StagingPool:
    """Slots of one rank's staging regions. Not thread-safe: the engine's loop owns it."""

    def __init__(self, plan: StagingPlan, region: int, max_regions: int = 2) -> None:
        """Make a pool of ``plan.num_slots`` slots at offset 0 of a region of ``plan.scratch_bytes``.

        Args:
            plan: the arithmetic.
            region: id of the registered region.
            max_regions: how many regions the pool may ever have: the first, and replacements for one that is in
                quarantine as a whole.
        """
        self._plan = plan
        self._max_regions = max_regions
        self._regions: set[int] = set()
        self._records: list[_Record] = []
        self._by_holder: dict[Hashable, set[int]] = {}
        shared = _Share()
        self._shares = {
            direction: shared if plan.shared else _Share() for direction in (Direction.LOAD, Direction.STORE)
        }
        self._high_water = 0
        self.add_region(region, plan.num_slots)

    def add_region(self, region: int, slots: int) -> None:
        """Add ``slots`` slots at offset 0 of another region. With shares of their own, both directions grow alike.

        Raises:
            LocalProtocolError: the region is in the pool already, or the pool may have no more.
        """
        if region in self._regions or len(self._regions) >= self._max_regions or slots < 1:
            raise LocalProtocolError(
                f"cannot add region {region} with {slots} slots to {sorted(self._regions)}, limit {self._max_regions}"
            )
        self._regions.add(region)
        for_loads = math.ceil(slots * self._plan.lanes_load / self._plan.num_lanes)
        for number in range(slots):
            share = self._shares[Direction.LOAD if number < for_loads else Direction.STORE]
            size = self._plan.value_bytes
            record = _Record(Slot(len(self._records), region, number * size, size, 0), share)
            self._records.append(record)
            share.total += 1
            share.free.append(record)

    def available(self, direction: Direction) -> int:
        """Slots that :meth:`try_acquire` would give this direction now, at most."""
        share = self._shares[direction]
        if not self._plan.shared or direction is Direction.LOAD:
            return len(share.free)
        live = share.total - share.quarantined
        return max(0, min(len(share.free), live - load_reserve(live) - share.held_by_stores))

    def try_acquire(self, direction: Direction, max_count: int) -> list[Slot]:
        """Take up to ``max_count`` slots; fewer, or none, where the pool or the load reserve ends."""
        share = self._shares[direction]
        slots = []
        for _ in range(min(max_count, self.available(direction))):
            record = share.free.popleft()
            record.owner = direction
            share.held_by_stores += direction is Direction.STORE
            slots.append(record.slot)
        self._high_water = max(self._high_water, len(self._records) - self._count_free())
        return slots

    def release(self, slots: Sequence[Slot]) -> int:
        """Give held slots back. All or none: nothing changes when it raises.

        A hold that went into quarantine is skipped, before and after its fence, so that its owner can release in a
        ``finally`` without asking; only :meth:`fenced` frees it.

        Returns:
            How many slots became free.

        Raises:
            LocalProtocolError: a slot was released before, belongs to an older generation, or stands there twice.
        """
        records = self._records_of(slots, "release", passed=True)
        for record in records:
            self._end_hold(record)
            self._free(record)
        return len(records)

    def quarantine(self, slots: Sequence[Slot], holder: Hashable) -> None:
        """Take held slots out of their owner's hands until ``holder`` is fenced. All or none.

        Args:
            slots: held slots, or such as are in quarantine already: these wait for all their holders.
            holder: names the connection (server, generation) that may still write into them.

        Raises:
            LocalProtocolError: a slot is free, belongs to an older generation, or stands there twice.
        """
        for record in self._records_of(slots, "quarantine", passed=False):
            if not record.holders:
                self._end_hold(record)
                record.share.quarantined += 1
                record.fenced_off = record.slot
            record.holders.add(holder)
            self._by_holder.setdefault(holder, set()).add(record.slot.index)

    def fenced(self, holder: Hashable) -> int:
        """Note the proof that ``holder`` can write nothing any more.

        Returns:
            How many slots became free, under a new generation; those with other holders left stay where they are.
        """
        freed = 0
        for index in sorted(self._by_holder.pop(holder, ())):
            record = self._records[index]
            record.holders.discard(holder)
            if not record.holders:
                record.share.quarantined -= 1
                self._free(record)
                freed += 1
        return freed

    @property
    def mostly_quarantined(self) -> bool:
        """Whether three quarters of the slots of a direction, or of the pool that both share, wait for a fence."""
        return any(4 * share.quarantined >= 3 * share.total for share in self._distinct_shares() if share.total)

    def statistics(self) -> StagingStatistics:
        """Counts by state now."""
        total, free = len(self._records), self._count_free()
        quarantined = sum(share.quarantined for share in self._distinct_shares())
        return StagingStatistics(free, total - free - quarantined, quarantined, total, self._high_water)

    def _records_of(self, slots: Sequence[Slot], verb: str, *, passed: bool) -> list[_Record]:
        """Look all slots up before anything changes. With ``passed``, holds that ended in quarantine are left out."""
        records = []
        seen: set[int] = set()
        for slot in slots:
            record = self._records[slot.index] if 0 <= slot.index < len(self._records) else None
            if record is None or slot.index in seen:
                raise LocalProtocolError(f"{verb}: {slot} is unknown or named twice")
            seen.add(slot.index)
            if passed and record.fenced_off == slot:
                continue
            if record.slot != slot or (record.owner is None and not record.holders):
                raise LocalProtocolError(f"{verb}: {slot} is not held; the slot is now {record.slot}")
            records.append(record)
        return records

    def _end_hold(self, record: _Record) -> None:
        record.share.held_by_stores -= record.owner is Direction.STORE
        record.owner = None

    def _free(self, record: _Record) -> None:
        record.slot = replace(record.slot, generation=record.slot.generation + 1)
        record.share.free.append(record)

    def _distinct_shares(self) -> set[_Share]:
        return set(self._shares.values())

    def _count_free(self) -> int:
        return sum(len(share.free) for share in self._distinct_shares())

    def __repr__(self) -> str:
        return f"StagingPool({self.statistics()})"
