"""A value log for tests: in order, with an arena and a memory of what it said; and stores that are made without one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from memkv_vllm.config import StorageConfig
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.log.api import Location, Record, Recovered, RecoveredValue
from memkv_vllm.store.log.drivelog import DriveLog
from memkv_vllm.store.log.format import (
    BLOCK_BYTES,
    INDEX_DTYPE,
    RecordHeader,
    Superblock,
    build_index,
    index_blocks,
    pack_record_header,
    pack_segment_header,
    parse_superblock,
    record_blocks,
)
from memkv_vllm.store.log.medium import FileMedium, OpenMedium
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline
from tests.support.harness import wait_until

MIB = 1 << 20
LAYOUT = 7
NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(reversed(range(32)))


def key_of(number: int, namespace: bytes = NAMESPACE) -> bytes:
    """A store key as engines make them: 71 bytes."""
    return b"\1" + namespace + hashlib.sha256(number.to_bytes(8, "little")).digest() + bytes(4) + b"\0\0"


def payload_of(number: int, length: int) -> bytes:
    """Bytes that tell values and their pages apart."""
    seed = np.random.PCG64(number)
    return np.random.Generator(seed).bytes(length)


def storage(paths: Sequence[Path], max_size: int | str = "16 MiB", **settings: Any) -> StorageConfig:
    """Section ``storage``; mode ``file`` unless told otherwise."""
    drives = [{"media": str(path), "max_size": max_size} for path in paths]
    return StorageConfig(**{"mode": "file", "drives": drives, **settings})


def soon(seconds: float = 15) -> Deadline:
    """A deadline that only a hang misses."""
    return Deadline(time.monotonic() + seconds)


@dataclass
class OpenLog:
    """A log that runs, and what it said."""

    log: DriveLog
    arena: HostMemory
    allocator: ArenaAllocator
    recovered: Recovered | None = None
    values: list[RecoveredValue] = field(default_factory=list)
    written: dict[int, Location | None] = field(default_factory=dict)
    reclaimed: list[Location] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)
    next_token: int = 1
    also_written: Callable[[int, Location | None], object] | None = None
    also_reclaimed: Callable[[Sequence[Location]], object] | None = None

    def on_written(self, token: int, location: Location | None) -> None:
        assert token not in self.written, "told twice"
        self.written[token] = location
        self.allocator.free(self.extents.pop(token))
        if self.also_written is not None:
            self.also_written(token, location)

    def on_reclaimed(self, locations: Sequence[Location]) -> None:
        self.reclaimed += locations
        if self.also_reclaimed is not None:
            self.also_reclaimed(locations)

    def offer(self, key: bytes, payload: bytes, *, algorithm: int = ChecksumAlgorithm.XXH3_64_TREE_1M) -> int | None:
        """Puts a payload into the arena and offers it; the token, or None when it was refused."""
        offset = self.allocator.allocate(len(payload))
        assert offset is not None, "the test's arena is full"
        self.arena.view(offset, len(payload))[:] = payload
        checksum = digest(payload) if algorithm == ChecksumAlgorithm.XXH3_64_TREE_1M else 0
        record = Record(key, len(payload), checksum, algorithm, LAYOUT)
        token, self.next_token = self.next_token, self.next_token + 1
        self.extents[token], self.records[token] = offset, record
        if self.log.append(record, offset, token):
            return token
        self.allocator.free(self.extents.pop(token))
        return None

    async def put(self, key: bytes, payload: bytes, **options: Any) -> Location | None:
        """Writes a value; its location, or None when that failed."""
        token = self.offer(key, payload, **options)
        assert token is not None, "refused"
        await self.settled(token)
        return self.written[token]

    async def settled(self, *tokens: int) -> None:
        """Until the log has said how these ended."""
        await wait_until(lambda: all(token in self.written for token in tokens), "writes settle")

    def record_at(self, location: Location) -> Record:
        """The record that was written there by this log."""
        for token, found in self.written.items():
            if found == location:
                return self.records[token]
        return next(value.record for value in self.values if value.location == location)

    async def get(self, record: Record, location: Location) -> bytes | None:
        """Reads a value back; None when there is none."""
        offset = self.allocator.allocate(record.length)
        assert offset is not None
        try:
            if not await self.log.read(record, location, offset, soon()):
                return None
            return bytes(self.arena.view(offset, record.length))
        finally:
            self.allocator.free(offset)

    @property
    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.log.statistics()["counters"]
        return counters


@asynccontextmanager
async def opened(
    config: StorageConfig,
    *,
    arena_bytes: int = 64 * MIB,
    open_medium: OpenMedium = FileMedium.open,
    run: bool = True,
) -> AsyncIterator[OpenLog]:
    """A log, started and running; ended without a flush on exit, as after a crash but for the journal's own waits."""
    with HostMemory.create("arena", arena_bytes) as arena:
        held = OpenLog(DriveLog(config, arena, open_medium=open_medium), arena, ArenaAllocator(arena_bytes))
        held.recovered = await held.log.start(on_written=held.on_written, on_reclaimed=held.on_reclaimed)
        held.values = list(held.recovered.values)
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            if run:
                tasks.start_soon(held.log.run)
            try:
                yield held
            except Exception as error:
                failure = error  # raised outside, so that no task group wraps it
            tasks.cancel_scope.cancel()
        await held.log.aclose()
        if failure is not None:
            raise failure


async def start_only(config: StorageConfig, **options: Any) -> OpenLog:
    """Starts a log and ends it; what it found."""
    async with opened(config, run=False, **options) as held:
        return held


def superblock(path: Path) -> Superblock:
    """What stands in a drive's first block."""
    with path.open("rb") as file:
        block = parse_superblock(file.read(BLOCK_BYTES))
    assert block is not None
    return block


def fill_with_records(path: Path, first: int, count: int, length: int = 1) -> None:
    """Writes ``count`` records of ``length`` bytes into an empty drive, without payloads: indexes and headers alone.

    Their sequence numbers are ``first`` and so on. What a start reads is as a log would have written it.
    """
    block = superblock(path)
    geometry, blocks = block.geometry, record_blocks(length)
    key = key_of(0)
    each = 1
    while 1 + (each + 1) * blocks + index_blocks(each + 1, (each + 1) * len(key)) <= geometry.segment_blocks:
        each += 1
    with path.open("r+b") as file:
        for segment in range(-(-count // each)):
            numbers = range(segment * each, min((segment + 1) * each, count))
            _fill_segment(file, block, segment, first, numbers, blocks, length)


def _fill_segment(
    file: Any, block: Superblock, segment: int, first: int, numbers: range, blocks: int, length: int
) -> None:
    geometry = block.geometry
    rows = np.zeros(len(numbers), INDEX_DTYPE)
    rows["start"] = 1 + blocks * np.arange(len(numbers))
    rows["key_bytes"], rows["length"], rows["layout"], rows["algorithm"] = len(key_of(0)), length, LAYOUT, 1
    rows["sequence"] = first + np.arange(numbers.start, numbers.stop)
    keys = [key_of(first + number) for number in numbers]
    file.seek(geometry.at(segment, 0))
    file.write(pack_segment_header(block.tag, segment, 1))
    record = Record(keys[0], length, 0, 1, LAYOUT)
    file.write(pack_record_header(block.tag, RecordHeader(record, segment, 1, 1, int(rows["sequence"][0]), 0)))
    data = build_index(block.tag, segment, 1, rows, b"".join(keys))
    file.seek(geometry.at(segment + 1, 0) - len(data))
    file.write(data)
