"""The value log on drives: spreads records over them, keeps what they have in common, starts and ends them.

Everything here runs on the event loop; :mod:`.drive` has the parts that wait for a medium. See :mod:`.api` for what it
promises, :mod:`.format` for what stands on a medium.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread

from memkv_vllm.config import StorageConfig
from memkv_vllm.errors import LocalProtocolError, StoreError
from memkv_vllm.store.log.api import Location, Record, Recovered
from memkv_vllm.store.log.drive import Drive, Waiting
from memkv_vllm.store.log.format import BLOCK_BYTES, MAX_KEY_BYTES, record_blocks
from memkv_vllm.store.log.journal import DriveOut, Entry, Manifest, Reset, entry_bytes
from memkv_vllm.store.log.journaling import Waiter
from memkv_vllm.store.log.medium import FileMedium, OpenMedium
from memkv_vllm.store.log.opening import OpenDrive, close_all, open_drives
from memkv_vllm.store.log.recovery import load_segments, manifests, values
from memkv_vllm.store.log.segments import SegmentMap
from memkv_vllm.store.log.shared import Shared
from memkv_vllm.store.log.starting import Content, read_all, settle
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline

__all__ = ["DriveLog"]

logger = logging.getLogger("memkv.store.log")


class DriveLog:
    """One store's disk: implements :class:`memkv_vllm.store.log.api.ValueLog`.

    Args:
        config: section ``storage``, with mode ``file`` or ``direct``.
        arena: the store's arena; values are written from it and read into it.
        open_medium: how media are opened; tests give faulty ones.
        new_id: makes 16 random bytes for a store or a drive.
    """

    def __init__(
        self,
        config: StorageConfig,
        arena: HostMemory,
        *,
        open_medium: OpenMedium = FileMedium.open,
        new_id: Callable[[], bytes] | None = None,
    ) -> None:
        self._config = config
        self._arena = arena
        self._open_medium = open_medium
        self._new_id = new_id
        self._drives: list[Drive] = []
        self._shared: Shared | None = None
        self._next_sequence = 1
        self._start_s = 0.0
        self._scanned = self._torn = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<DriveLog {self._drives}{' closed' if self._closed else ''}>"

    # Start and end

    async def start(
        self,
        *,
        on_written: Callable[[int, Location | None], None],
        on_reclaimed: Callable[[Sequence[Location]], None],
    ) -> Recovered:
        """Opens, checks and scans the drives.

        Raises:
            EnvironmentFault: a medium cannot be used, holds something else, or belongs to another store. What was
                stored on it is unchanged.
        """
        if self._shared is not None:
            raise LocalProtocolError("a log is started once")
        began = time.monotonic()
        shared = self._shared = Shared(
            self._arena, self._config.sync == "batch", self._config.read_threads, self._config.max_drive_errors,
            on_written, on_reclaimed,
        )  # fmt: skip
        server_id, opened = await anyio.to_thread.run_sync(open_drives, self._config, self._open_medium, self._new_id)
        try:
            content = await read_all(opened)
            shared.memory = content.memory
            await anyio.to_thread.run_sync(settle, opened, content)
            await self._make_drives(opened, content, shared)
        except BaseException:
            close_all([one.medium for one in opened], failed=True)
            raise
        self._start_s = time.monotonic() - began
        survivors = content.survivors
        logger.info(
            "log.started store=%s drives=%d records=%d scanned=%d torn=%d elapsed_s=%.2f", server_id.hex(),
            len(self._drives), len(survivors.order), self._scanned, self._torn, self._start_s,
        )  # fmt: skip
        return Recovered(values(survivors), manifests(content.memory.manifests), server_id)

    async def _make_drives(self, opened: Sequence[OpenDrive], content: Content, shared: Shared) -> None:
        survivors = content.survivors
        self._next_sequence = max(survivors.newest, content.memory.newest()) + 1
        self._scanned = sum(drive.scanned for drive in content.drives)
        self._torn = sum(drive.torn for drive in content.drives)
        maps = [SegmentMap(one.member.superblock.geometry) for one in opened]
        await anyio.to_thread.run_sync(load_segments, survivors, content.drives, maps)
        drives = [
            Drive(number, one, segments, drive.journal.end, shared, self._drive_out)
            for number, (one, segments, drive) in enumerate(zip(opened, maps, content.drives, strict=True))
        ]
        shared.oldest = self._oldest
        self._drives = drives
        for out in (DriveOut(*item) for item in content.memory.drives_out.items()):
            for drive, found in zip(drives, content.drives, strict=True):
                if found.journal.drives_out.get(out.drive_id) != out.sequence:
                    # Not least that of the drive itself: the one that remembered it may be lost next.
                    drive.journal.add(out)
                    drive.wake()
        for location in survivors.superseded:
            drives[location.drive].journal.add_dead(
                location.segment, location.incarnation, location.offset // BLOCK_BYTES
            )
            drives[location.drive].wake()

    async def run(self) -> None:
        """Writes what waits, until cancelled; what then still waits is reported as not written."""
        async with anyio.create_task_group() as tasks:
            for drive in self._drives:
                tasks.start_soon(drive.run)

    async def aclose(self) -> None:
        """Ends its threads and closes the media, once. ``run`` must have ended."""
        if self._closed:
            return
        self._closed = True
        for drive in self._drives:
            with anyio.CancelScope(shield=True):
                await drive.aclose()

    # Values

    def append(self, record: Record, arena_offset: int, token: int) -> bool:
        """Queues a value for writing. False: refused, and counted with its reason."""
        shared = self._started()
        blocks = record_blocks(record.length)
        able = [drive for drive in self._drives if not (drive.worker.out or drive.stopped)]
        if not able:
            shared.counters["log_no_drive"] += 1
            return False
        able = [drive for drive in able if blocks <= drive.largest_blocks]
        if not able or not 0 < len(record.key) <= MAX_KEY_BYTES:
            shared.counters["log_too_large"] += 1
            return False
        # Each drive may have its share: one that is slow does not fill the queue of the others.
        share = self._config.max_write_behind // self._num_in_service
        able = [drive for drive in able if drive.waiting_bytes + record.length <= share or not drive.num_waiting]
        if not able:
            shared.counters["log_shed"] += 1
            shared.counters["log_shed_bytes"] += record.length
            return False
        drive = min(able, key=_filled)
        drive.append(Waiting(record, self._next_sequence, arena_offset, token, blocks))
        self._next_sequence += 1
        return True

    async def read(self, record: Record, location: Location, arena_offset: int, deadline: Deadline) -> bool:
        """Copies the payload of ``record`` to the arena at ``arena_offset`` (a multiple of 4096)."""
        return await self._drives[location.drive].read(record, location, arena_offset, deadline)

    def used(self, location: Location) -> None:
        """The value was read or found: it earns a second chance when its segment is reclaimed."""
        self._drives[location.drive].used(location)

    def forget(self, locations: Sequence[Location]) -> None:
        """These records are dead. Queues a tombstone for each."""
        for location in locations:
            self._drives[location.drive].forget(location)

    async def flush_forgotten(self) -> None:
        """Returns when the tombstones of all records forgotten until now are on their drives.

        Raises:
            StoreError: one could not be written; the message names the drive.
        """
        for waiter in [waiter for drive in self._drives if (waiter := drive.barrier()) is not None]:
            await waiter.wait()

    # What all journals hold

    async def reset(self, namespace: bytes) -> None:
        """All records of the namespace (32 bytes) that exist now are dead; returns when that is on every drive.

        Raises:
            StoreError: it could not be written to a drive, which the message names; it is tried again there.
        """
        shared = self._started()
        sequence = self._next_sequence
        self._next_sequence += 1
        shared.memory.resets[namespace] = sequence
        shared.counters["resets"] += 1
        await self._write_everywhere(Reset(namespace, sequence))

    async def add_manifest(self, family: bytes, digest: bytes, manifest: bytes) -> None:
        """Keeps a manifest of the directory.

        Raises:
            StoreError: it could not be written, or the journals have no room for it.
        """
        kept = self._started().memory.manifests
        if (family, digest) in kept:
            return
        entry = Manifest(family, digest, manifest)
        taken = sum(entry_bytes(Manifest(*place, known)) for place, known in kept.items())
        for drive in self._drives:
            # The rest is for tombstones: see Geometry.for_size.
            room = drive.segments.geometry.journal_half_bytes // 2
            if taken + entry_bytes(entry) > room:
                raise StoreError(
                    f"manifests take {taken} of {room} bytes that the journal of {drive.medium.name} has for them; "
                    f"use a larger drive"
                )
        kept[family, digest] = manifest
        await self._write_everywhere(entry)

    async def _write_everywhere(self, entry: Entry) -> None:
        """Adds an entry to every journal in service: any that survives will do."""
        waiters: list[Waiter] = []
        for drive in self._drives:
            if not drive.worker.out:
                waiters.append(drive.journal.add(entry))
                drive.wake()
        if not waiters:
            raise StoreError("no drive is in service: see the server's health")
        for waiter in waiters:
            await waiter.wait()

    def _drive_out(self, out: Drive) -> None:
        entry = DriveOut(out.superblock.drive_id, self._next_sequence)
        self._started().memory.drives_out[entry.drive_id] = entry.sequence
        for drive in self._drives:
            if not drive.worker.out:
                drive.journal.add(entry)
                drive.wake()

    # State

    async def flush(self) -> None:
        """Returns when everything accepted until now was written or refused, and every tombstone until now written."""
        for drive in self._drives:
            await drive.flush()

    def statistics(self) -> dict[str, Any]:
        """Plain values: sizes in bytes, records, segments by state, counters by reason; sums, and for each drive."""
        drives = [drive.statistics() for drive in self._drives]
        sums = ("size", "capacity", "used", "live", "records", "waiting", "waiting_bytes", "moved")
        segments: Counter[str] = Counter()
        for drive in drives:
            segments.update(drive["segments"])
        counters = dict(self._shared.counters) if self._shared is not None else {}
        return {
            **{name: sum(drive[name] for drive in drives) for name in sums},
            "segments": dict(segments),
            "max_write_behind": self._config.max_write_behind,
            "manifests": len(self._shared.memory.manifests) if self._shared is not None else 0,
            "resets_kept": len(self._shared.memory.resets) if self._shared is not None else 0,
            "start_s": self._start_s,
            "segments_scanned": self._scanned,
            "records_torn": self._torn,
            "buffered_drives": sum(not drive["direct"] for drive in drives),
            "drives": drives,
            "counters": counters,
        }

    def health(self) -> list[str]:
        """What is wrong, one line each; empty when nothing is."""
        return [line for drive in self._drives for line in drive.health()]

    @property
    def _num_in_service(self) -> int:
        return sum(not drive.worker.out for drive in self._drives)

    def _oldest(self) -> int:
        found = [oldest for drive in self._drives if (oldest := drive.segments.oldest()) is not None]
        waiting = [item for drive in self._drives if (item := drive.oldest_waiting) is not None]
        return min([*found, *waiting], default=self._next_sequence)

    def _started(self) -> Shared:
        if self._shared is None:
            raise LocalProtocolError("the log was not started")
        return self._shared


def _filled(drive: Drive) -> float:
    """How full a drive is with what waits for it; the least full one gets the next record."""
    geometry = drive.segments.geometry
    return (drive.segments.totals.live_bytes + drive.waiting_bytes) / (geometry.num_segments * geometry.segment_bytes)
