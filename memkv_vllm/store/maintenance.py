"""What an operator does to a store while it serves: list namespaces, reset one, drop idle ones, free bytes.

Admin HTTP and the ADMIN message call the same methods here. Each is one step of the table, or many small ones with
the loop free in between, so that none holds up requests for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from memkv_vllm.store.manifests import ManifestDirectory
from memkv_vllm.store.residency import Residency
from memkv_vllm.store.table import NamespaceStatistics, Table

__all__ = ["Maintenance"]

logger = logging.getLogger("memkv.store")

_STEP_VALUES = 256
"""Values that are freed in one step: some half a millisecond of the loop."""


class Maintenance:
    """Operator's commands of one store.

    Args:
        table: what the store holds.
        manifests: directory of namespaces.
        clock: seconds; the one that the table's callers use.
        residency: the disk behind the arena, if there is one.
    """

    def __init__(
        self,
        table: Table,
        manifests: ManifestDirectory,
        clock: Callable[[], float],
        residency: Residency | None = None,
    ) -> None:
        self._table = table
        self._residency = residency
        self._manifests = manifests
        self._clock = clock
        self._stale = anyio.Event()
        self.keep_removals = None if residency is None else residency.keep_removals
        """With a disk: returns when a crash cannot bring back what was deleted or reported until now."""

    def namespaces(self) -> list[dict[str, Any]]:
        """Every namespace that holds values or has a manifest, the most recently used first; plain values.

        ``namespace`` (hex), ``values``, ``arena_bytes``, ``disk_bytes``, ``idle_s``, ``manifests`` (families, hex).
        """
        now = self._clock()
        rows = {statistics.namespace: self._row(statistics, now) for statistics in self._table.namespaces()}
        for family, digest, used in self._manifests.uses():
            unused = NamespaceStatistics(digest, 0, 0, 0, used)
            row = rows.setdefault(digest, self._row(unused, now))
            row["manifests"].append(family.hex())
            row["idle_s"] = min(row["idle_s"], round(now - used, 3))
        return sorted(rows.values(), key=lambda row: row["idle_s"])

    async def reset(self, namespace: bytes) -> int:
        """Makes every value of a namespace (32 bytes) invisible before it returns, on disk too.

        Returns:
            number of values that were visible until now.

        Raises:
            StoreError: the disk did not keep it; the message names the drive. In memory it is done.
        """
        hidden = self._table.reset_namespace(namespace)
        self._stale.set()
        logger.warning("namespace.reset namespace=%s values=%d", namespace.hex(), hidden)
        await self._end_records(namespace)
        return hidden

    async def gc(self, idle_s: float) -> list[dict[str, Any]]:
        """Drops the values of namespaces that were not used for ``idle_s`` seconds (P097); rows as they were.

        Raises:
            StoreError: as for :meth:`reset`; namespaces whose turn had not come are as they were.
        """
        now, rows = self._clock(), []
        # One at a time, in memory and on disk: a value that is put right behind it must be newer than its end on disk.
        while dropped := self._table.gc(idle_s, now, at_most=1):
            self._stale.set()
            row = self._row(dropped[0], now)
            logger.warning("namespace.collected namespace=%(namespace)s values=%(values)d idle_s=%(idle_s)s", row)
            rows.append(row)
            await self._end_records(dropped[0].namespace)
        return rows

    async def evict(self, num_bytes: int) -> tuple[int, int]:
        """Frees at least ``num_bytes`` of the arena, as far as they are not in use.

        Returns:
            values freed, bytes freed.
        """
        total_values = total_bytes = 0
        while total_bytes < num_bytes:
            values, freed = self._table.evict(num_bytes - total_bytes, _STEP_VALUES)
            total_values, total_bytes = total_values + values, total_bytes + freed
            if not values:
                break
            await anyio.lowlevel.checkpoint()
        logger.warning("arena.evicted values=%d bytes=%d", total_values, total_bytes)
        return total_values, total_bytes

    async def sweep(self) -> None:
        """Reclaims what resets left behind, in small steps; runs until cancelled."""
        while True:
            await self._stale.wait()
            self._stale = anyio.Event()
            while self._table.sweep(_STEP_VALUES):
                await anyio.lowlevel.checkpoint()

    async def _end_records(self, namespace: bytes) -> None:
        """Called in the same step as the table's own reset: nothing may be put in between."""
        if self._residency is None:
            await anyio.lowlevel.checkpoint()
        else:
            await self._residency.reset(namespace)

    @staticmethod
    def _row(statistics: NamespaceStatistics, now: float) -> dict[str, Any]:
        return {
            "namespace": statistics.namespace.hex(),
            "values": statistics.values,
            "arena_bytes": statistics.arena_bytes,
            "disk_bytes": statistics.disk_bytes,
            "idle_s": round(now - statistics.last_used, 3),
            "manifests": [],
        }
