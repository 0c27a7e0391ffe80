"""A value log in memory: what a disk does, with a test deciding when and how each step ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel

from memkv_vllm.errors import StoreError
from memkv_vllm.store.log.api import Location, Record, Recovered, RecoveredValue
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline


@dataclass
class FakeMedium:
    """What outlives a process: give it to a second log to restart."""

    records: dict[Location, tuple[Record, bytes]] = field(default_factory=dict)
    manifests: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    server_id: bytes = b"D" * 16
    written: int = 0


class FakeLog:
    """Implements ``ValueLog``. Appends are written when :meth:`write` is called, or at once by :meth:`run`.

    ``arena`` is set by whoever makes it. ``gate`` holds reads until it is set, from ``gated_drive`` alone if that
    is set; ``journal_gate`` tombstones and resets. ``lost`` are locations that read as False; ``refuse`` makes appends
    answer False; ``broken`` makes tombstones, resets and manifests fail. Records go to ``drives`` drives by turns.
    """

    def __init__(self, medium: FakeMedium | None = None, *, by_hand: bool = False) -> None:
        self.medium = FakeMedium() if medium is None else medium
        self.by_hand = by_hand
        self.arena: HostMemory | None = None
        self.waiting: list[tuple[Record, int, int]] = []
        self.forgotten: list[Location] = []
        self.resets: list[bytes] = []
        self.uses: list[Location] = []
        self.reads: list[bytes] = []
        self.reading = 0
        self.most_reading = 0
        self.lost: set[Location] = set()
        self.refuse = self.broken = self.closed = False
        self.fail_writes = False
        self.error: Exception | None = None
        self.gate: anyio.Event | None = None
        self.gated_drive: int | None = None
        self.drives = 1
        self.journal_gate: anyio.Event | None = None
        self._wake = anyio.Event()

    async def start(
        self,
        *,
        on_written: Callable[[int, Location | None], None],
        on_reclaimed: Callable[[Sequence[Location]], None],
    ) -> Recovered:
        await anyio.lowlevel.checkpoint()
        self.on_written, self.on_reclaimed = on_written, on_reclaimed
        values = [RecoveredValue(record, location) for location, (record, _) in self.medium.records.items()]
        manifests = [(*names, manifest) for names, manifest in self.medium.manifests.items()]
        return Recovered(iter(values), manifests, self.medium.server_id)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            if not self.by_hand:
                self.write()

    def write(self) -> None:
        """Writes all that waits."""
        waiting, self.waiting = self.waiting, []
        for record, offset, token in waiting:
            if self.fail_writes:
                self.on_written(token, None)
                continue
            assert self.arena is not None
            number = self.medium.written // self.drives
            location = Location(self.medium.written % self.drives, number // 4, 1, number % 4 * 4096)
            self.medium.written += 1
            self.medium.records[location] = (record, bytes(self.arena.view(offset, record.length)))
            self.on_written(token, location)

    def append(self, record: Record, arena_offset: int, token: int) -> bool:
        if self.refuse:
            return False
        self.waiting.append((record, arena_offset, token))
        self._wake.set()
        return True

    async def read(self, record: Record, location: Location, arena_offset: int, deadline: Deadline) -> bool:
        self.reads.append(record.key)
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        stored = self.medium.records.get(location)  # now: what is being read is not overwritten
        try:
            await anyio.lowlevel.checkpoint()
            if self.gate is not None and self.gated_drive in (None, location.drive):
                await self.gate.wait()
            if self.error is not None:
                raise self.error
            if stored is None or stored[0] != record or location in self.lost:
                return False
            assert self.arena is not None
            self.arena.view(arena_offset, record.length)[:] = stored[1]
            return True
        finally:
            self.reading -= 1

    def used(self, location: Location) -> None:
        self.uses.append(location)

    def forget(self, locations: Sequence[Location]) -> None:
        self.forgotten += locations
        for location in locations:
            self.medium.records.pop(location, None)

    def reclaim(self, *locations: Location) -> None:
        """The space of these records is used again."""
        for location in locations:
            self.medium.records.pop(location, None)
        self.on_reclaimed(locations)

    async def flush_forgotten(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.journal_gate is not None:
            await self.journal_gate.wait()
        if self.broken:
            raise StoreError("drive /dev/fake: I/O error")

    async def reset(self, namespace: bytes) -> None:
        if self.broken:
            raise StoreError("drive /dev/fake: I/O error")
        self.resets.append(namespace)
        for location, (record, _) in list(self.medium.records.items()):
            if record.key[1:33] == namespace:
                del self.medium.records[location]
        await anyio.lowlevel.checkpoint()
        if self.journal_gate is not None:
            await self.journal_gate.wait()

    async def add_manifest(self, family: bytes, digest: bytes, manifest: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self.broken:
            raise StoreError("drive /dev/fake: I/O error")
        self.medium.manifests[family, digest] = manifest

    async def flush(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.write()

    def statistics(self) -> dict[str, Any]:
        return {"records": len(self.medium.records), "capacity": 1 << 40}

    def health(self) -> list[str]:
        return ["drive /dev/fake: I/O error"] if self.broken else []

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed = True
