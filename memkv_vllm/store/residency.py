"""Drives the disk behind the arena: writes committed values behind, brings values back for gets, recovers at start.

::

    put: ... -> commit -> offer -> the log writes -> its callback -> the record is known
    get: pin -> on disk alone -> wait for the fetch (one per key, whoever asks) -> pinned for each that waits

A write-behind holds its extent like a pin, a fetch like a reservation, so both are bounded: in number, and in bytes
to a quarter of the arena at most, so that puts find room. What does not fit into write-behind waits its turn in a
bounded line that holds nothing: evicted before its turn, it is gone, as without a disk. Whoever waits for a fetch
holds nothing either; gets of values in the arena do not wait here at all.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from memkv_vllm.config import LimitsConfig
from memkv_vllm.errors import StoreError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.entries import PinResult
from memkv_vllm.store.fetching import Fetches
from memkv_vllm.store.garbage import collection_paused
from memkv_vllm.store.log.api import Location, ValueLog
from memkv_vllm.store.manifests import ManifestDirectory
from memkv_vllm.store.table import Table
from memkv_vllm.types import Deadline

__all__ = ["Residency"]

logger = logging.getLogger("memkv.store")

_RECOVER_STEP = 20_000
_PROGRESS_S = 2.0
_ARENA_PART = 4
"""Write-behind and fetches may each hold this part (a quarter) of the arena."""
_REASONS = (
    "disk_hits",
    "disk_misses",
    "disk_write_delayed",
    "disk_write_shed",
    "fetch_refused",
    "fetch_late",
    "fetch_error",
)


class Residency:
    """One store's disk. Used once: ``start``, ``run`` in a task, ``finish``, ``aclose``.

    Args:
        table: what the store holds.
        allocator: of its arena, for its size.
        log: the disk.
        manifests: the directory that is kept there too.
        limits: bounds of fetches, and ``transfer_timeout_s`` for each.
        counters: counts by reason are added here.
        clock: seconds on the clock of ``Deadline``.
    """

    def __init__(
        self,
        table: Table,
        allocator: ArenaAllocator,
        log: ValueLog,
        manifests: ManifestDirectory,
        limits: LimitsConfig,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._disk = table.disk
        self._log = log
        self._manifests = manifests
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._rounded, self._arena_bytes = allocator.rounded, allocator.size
        self._max_write_bytes = self._arena_bytes // _ARENA_PART
        max_fetch_bytes = min(limits.max_fetch_bytes, allocator.size // _ARENA_PART)
        self._fetches = Fetches(table, log, max_fetch_bytes, limits, counters, clock, self.offer)
        self._writes: dict[int, int] = {}
        """Bytes of the arena of each accepted write, by generation."""
        self._write_bytes = 0
        self._unwritten: deque[tuple[bytes, int]] = deque()
        """``(key, generation)`` of values that wait for room in write-behind, the oldest first."""
        self._rewrites = 0
        """Reclaimed values that may be written again: one for each that is new, so that drives which hold less than the
        arena do not write for ever."""
        self._something_to_do = anyio.Event()
        self._written = anyio.Event()
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Residency {len(self._writes)} writes, {len(self._unwritten)} waiting, {self._fetches!r}>"

    # Life

    async def start(self) -> bytes:
        """Opens the disk and takes up what survived; returns the server id that was written on it.

        Raises:
            EnvironmentFault: a medium cannot be used; the message names it and the fix.
        """
        started = reported = self._clock()
        recovered = await self._log.start(on_written=self._on_written, on_reclaimed=self._on_reclaimed)
        num_values, values = 0, iter(recovered.values)
        with collection_paused():
            while step := list(islice(values, _RECOVER_STEP)):
                num_values += self._disk.recover(step, self._clock())
                if self._clock() - reported >= _PROGRESS_S:
                    reported = self._clock()
                    logger.info("disk.recovering values=%d elapsed_s=%.1f", num_values, reported - started)
                await anyio.lowlevel.checkpoint()
        for family, digest, manifest in recovered.manifests:
            try:
                self._manifests.add(family, digest, manifest, self._clock())
            except StoreError as error:
                self._counters["manifests_not_recovered"] += 1
                logger.warning("manifest.not_recovered namespace=%s: %s", digest.hex(), error)
        self._manifests.on_added = self._keep_manifest
        self._disk.watch_dead(lambda: self._something_to_do.set())
        self._tell_recovered(num_values, self._clock() - started)
        return recovered.server_id

    async def run(self) -> None:
        """Runs the log, the fetches, the line of write-behind, and tells the log what is dead, until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._log.run)
                tasks.start_soon(self._fetches.run)
                tasks.start_soon(self._tend)
        except Exception:
            logger.exception("disk.failed: the server stops")
            raise
        finally:
            self._tasks = None

    async def finish(self, timeout_s: float) -> None:
        """Before the end, when nothing is put any more: writes what only the arena holds, up to ``timeout_s``."""
        with anyio.move_on_after(timeout_s, shield=True) as scope:
            await self._log.flush()
            rest = deque(self._disk.unwritten())
            refused = 0
            while rest and refused < 2:
                if self._write(*rest[0]):
                    rest.popleft()
                    refused = 0
                else:
                    await self._log.flush()
                    refused += 1
            self._log.forget(self._disk.take_dead())
            await self._log.flush()
        left = len(self._disk.unwritten())
        if left:
            self._counters["not_written_at_end"] += left
            why = f"no time within {timeout_s} s" if scope.cancelled_caught else "the disk refused them"
            logger.warning("disk.values_left count=%d: they end with this process (%s)", left, why)

    async def aclose(self) -> None:
        """Closes the media, once."""
        await self._log.aclose()

    # Write-behind

    def offer(self, key: bytes, generation: int) -> None:
        """A value was committed: it is written behind, as soon as there is room for it there."""
        self._rewrites = min(self._rewrites + 1, self._limits.max_waiting_writes)
        if not self._unwritten and self._write(key, generation):
            return
        # With nothing under way nothing will make room: the log has no drive in service, or none that is large enough.
        if not self._writes or len(self._unwritten) >= self._limits.max_waiting_writes:
            self._counters["disk_write_shed"] += 1
            return
        self._unwritten.append((key, generation))
        self._counters["disk_write_delayed"] += 1

    def _write(self, key: bytes, generation: int) -> bool:
        """Whether there is nothing left to do for it now: False when there is no room for it in write-behind."""
        begun = self._disk.begin_write(key, generation)
        if begun is None:
            return True
        record, offset, _ = begun
        num_bytes = self._rounded(record.length)
        fits = not self._write_bytes or self._write_bytes + num_bytes <= self._max_write_bytes
        if fits and self._log.append(record, offset, generation):
            self._writes[generation] = num_bytes
            self._write_bytes += num_bytes
            return True
        self._disk.cancel_write(generation)
        return False

    def _on_written(self, token: int, location: Location | None) -> None:
        self._write_bytes -= self._writes.pop(token)
        self._disk.end_write(token, location)
        self._written.set()
        self._written = anyio.Event()
        if self._unwritten:
            self._something_to_do.set()

    def _on_reclaimed(self, locations: Sequence[Location]) -> None:
        """What the arena still holds is in use, or was lately: it is written again, lest its eviction lose it."""
        kept = self._disk.reclaimed(locations)
        room = min(self._rewrites, self._limits.max_waiting_writes - len(self._unwritten))
        self._unwritten.extend(kept[:room])
        self._rewrites -= len(kept[:room])
        self._counters["disk_write_delayed"] += len(kept[:room])
        self._counters["disk_write_shed"] += len(kept[room:])
        if self._unwritten:
            self._something_to_do.set()

    async def pin(self, key: bytes, length: int, layout: int, deadline: Deadline) -> PinResult:
        """See :meth:`Fetches.pin`."""
        return await self._fetches.pin(key, length, layout, deadline)

    # What is dead

    async def _tend(self) -> None:
        while True:
            await self._something_to_do.wait()
            self._something_to_do = anyio.Event()
            self._log.forget(self._disk.take_dead())
            self._refill()

    def _refill(self) -> None:
        """Takes values out of the line as far as there is room. Never in the log's callback: see its queue."""
        while self._unwritten:
            if not self._write(*self._unwritten[0]):
                if self._writes:
                    return
                self._counters["disk_write_shed"] += 1
            self._unwritten.popleft()

    async def keep_removals(self) -> None:
        """Returns when a crash cannot bring back what was deleted or reported until now.

        A value that is being written has no place yet that could be marked as dead: its write is awaited.

        Raises:
            StoreError: the disk did not keep it; the message says what this means.
        """
        try:
            await self._in_time(self._keep_removals())
        except StoreError as error:
            self._counters["disk_removal_failed"] += 1
            raise StoreError(
                f"the values are hidden now, but the disk did not keep that, so a restart may bring them back; mend "
                f"the drive and delete them again. {error}"
            ) from error

    async def _keep_removals(self) -> None:
        hidden = self._disk.hidden_writes()
        while any(generation in self._writes for generation in hidden):
            await self._written.wait()
        self._log.forget(self._disk.take_dead())
        await self._log.flush_forgotten()

    async def _in_time(self, work: Awaitable[None]) -> None:
        """Awaits what the disk is to keep, up to the deadline of any transfer.

        Raises:
            StoreError: it did not come to an end; it may later.
        """
        timeout_s = self._limits.transfer_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                await work
        except TimeoutError:
            self._counters["disk_late"] += 1
            raise StoreError(f"no drive confirmed it within limits.transfer_timeout_s = {timeout_s:g} s") from None

    async def reset(self, namespace: bytes) -> None:
        """Makes the records of a namespace (32 bytes) dead on the medium; the table has hidden them just now.

        Raises:
            StoreError: it could not be written; the message says what this means.
        """
        try:
            await self._in_time(self._log.reset(namespace))
        except StoreError as error:
            self._counters["disk_reset_failed"] += 1
            logger.error("disk.reset_failed namespace=%s: %s", namespace.hex(), error)
            raise StoreError(
                f"the values are hidden now, but the disk did not keep the reset, so a restart may bring them back; "
                f"mend the drive and reset again. {namespace.hex()}: {error}"
            ) from error

    def _keep_manifest(self, family: bytes, digest: bytes, manifest: bytes) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._log_manifest, family, digest, manifest)

    async def _log_manifest(self, family: bytes, digest: bytes, manifest: bytes) -> None:
        try:
            await self._log.add_manifest(family, digest, manifest)
        except StoreError as error:
            self._counters["manifests_not_kept"] += 1
            logger.warning("manifest.not_kept namespace=%s: %s; a restart forgets it", digest.hex(), error)

    # What can be seen

    def statistics(self) -> dict[str, Any]:
        """Plain values: those of the log, bytes of the arena in write-behind, fetches, and counters by reason.

        Of these, ``disk_hits`` are values that a get had to wait for the disk for, and got.
        """
        log = self._log.statistics()
        return {
            **log,
            "used_bytes": log.get("used", 0),
            "size_bytes": log.get("size", 0),
            **self._fetches.statistics()._asdict(),
            "write_bytes": self._write_bytes,
            "writes_waiting": len(self._unwritten),
            "reasons": {name: self._counters[name] for name in _REASONS},
        }

    def health(self) -> list[str]:
        """What is wrong with the disk, one line each."""
        return self._log.health()

    def _tell_recovered(self, num_values: int, elapsed_s: float) -> None:
        counters = self._table.statistics().counters
        logger.info("disk.recovered values=%d elapsed_s=%.1f", num_values, elapsed_s)
        if (capacity := self._log.statistics()["capacity"]) < self._arena_bytes:
            logger.warning(
                "disk.smaller_than_arena capacity=%d arena=%d: what memory holds does not fit, so a restart finds "
                "a part of it; raise storage.drives[].max_size or lower memory.max_size",
                capacity,
                self._arena_bytes,
            )
        if counters.recovered_too_large:
            logger.warning(
                "disk.values_unseen count=%d: larger than the arena, limits.max_value_bytes or the quota allow; "
                "raise memory.max_size to see them again",
                counters.recovered_too_large,
            )
        if counters.evictions:
            logger.warning(
                "disk.values_dropped count=%d: more than limits.max_entries = %d; the oldest went",
                counters.evictions,
                self._limits.max_entries,
            )
