"""Server side of loopback's data path: one peer's mapped regions, and the copies into and out of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

import anyio

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError, StoreError
from memkv_vllm.transports.base import Move, remaining
from memkv_vllm.transports.choosing import refuse_connect
from memkv_vllm.transports.faults import (
    Action,
    BitFlip,
    Die,
    Drop,
    Fail,
    FaultPlan,
    LateWrite,
    Operation,
    Short,
    die,
    strike_moves,
)
from memkv_vllm.transports.loopback.copying import Bytes, CopyBatch, CopyCrew, CopyJob, CopyPool
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.regions import check_region
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status


class LoopbackBulk:
    """One peer's data path; see ``memkv_vllm.transports.base.Bulk``. Used on one event loop.

    Args:
        arena: the server's local memory.
        pool: the transport's copy threads.
        max_regions: regions that the peer may register.
        max_region_bytes: bytes of all of them together.
        faults: what to break, in tests.
        cut: ends the peer's connection abruptly, for faults.
    """

    def __init__(
        self,
        arena: HostMemory,
        pool: CopyPool,
        *,
        max_regions: int,
        max_region_bytes: int,
        faults: FaultPlan | None,
        cut: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._crew = CopyCrew(pool)
        self._max_regions = max_regions
        self._max_region_bytes = max_region_bytes
        self._faults = faults
        self._cut = cut
        self._offered: dict[int, int] = {}
        self._regions: dict[int, HostMemory] = {}
        self._gone = anyio.Event()

    def offer(self, region: int, fd: int | None) -> None:
        """Keep the descriptor that came beside a REGISTER until it is carried out. Owns ``fd``."""
        if fd is None or region in self._offered:
            if fd is not None:
                os.close(fd)
            raise RemoteProtocolError("region", f"region {region} came with no file descriptor, or twice")
        self._offered[region] = fd

    async def connect(self, transport: str, token: bytes) -> bytes:
        """Refuse: this is the only data path here. See the protocol."""
        refuse_connect(transport, ())

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        """Map the offered region; see the protocol."""
        fd = self._offered.pop(region, -1)
        if kind is not MemoryKind.HOST:
            raise StoreError("the loopback transport moves host memory only")
        if fd < 0:
            raise RemoteProtocolError("region", f"region {region} came with no file descriptor")
        try:
            self._check_limits(region, length)
        except Exception:
            os.close(fd)
            raise
        self._regions[region] = HostMemory.adopt(fd, length)

    async def pull(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Copy out of the peer's memory; see the protocol."""
        return await self._transfer(Operation.PULL, moves, deadline)

    async def push(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Copy into the peer's memory; see the protocol."""
        return await self._transfer(Operation.PUSH, moves, deadline)

    async def fence(self) -> None:
        """Stop the copies and unmap; see the protocol."""
        self._gone.set()
        with anyio.CancelScope(shield=True):
            await self._crew.stop()
        while self._offered:
            os.close(self._offered.popitem()[1])
        while self._regions:
            self._regions.popitem()[1].close()

    # -- inside

    def _check_limits(self, region: int, length: int) -> None:
        check_region(
            region,
            length,
            {region: memory.length for region, memory in self._regions.items()},
            ended=self._gone.is_set(),
            max_regions=self._max_regions,
            max_region_bytes=self._max_region_bytes,
        )

    async def _transfer(self, operation: Operation, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        fixed: dict[int, Status] = {}
        batch: CopyBatch | None = None
        with anyio.move_on_after(remaining(deadline, time.monotonic())):
            delay_s, faults = strike_moves(self._faults, operation, moves)
            if delay_s:
                await anyio.sleep(delay_s)
            if not self._gone.is_set():
                batch = self._start(operation, moves, deadline, faults, fixed)
                await self._crew.copy(batch)
                if any(isinstance(action, Drop) for action in faults.values()):
                    await self._gone.wait()
        # FAILED promises that nothing moves any more; a thread that was left in the middle of a piece still does.
        left = batch is not None and batch.aborted
        late = time.monotonic() >= deadline and not self._gone.is_set()
        missing = Status.TIMEOUT if left or late else Status.FAILED
        done = batch.statuses if batch is not None else [None] * len(moves)
        return [fixed.get(slot, missing if status is None else status) for slot, status in enumerate(done)]

    def _start(
        self,
        operation: Operation,
        moves: Sequence[Move],
        deadline: Deadline,
        faults: Mapping[int, Action],
        fixed: dict[int, Status],
    ) -> CopyBatch:
        # Views of a region live in the batch only, which lets go of them: one in a waiting frame would keep it mapped.
        jobs = []
        for slot, move in enumerate(moves):
            remote = self._remote(move.remote)
            if remote is None:
                fixed[slot] = Status.BAD_EXTENT
                continue
            local = self._local(move)
            source, target = (remote, local) if operation is Operation.PULL else (local, remote)
            job = CopyJob(slot, source, target)
            if slot not in faults or self._twist(job, faults[slot], fixed):
                jobs.append(job)
        return CopyBatch(len(moves), jobs, deadline, self._crew.fenced)

    # -- faults, in tests

    def _twist(self, job: CopyJob, action: Action, fixed: dict[int, Status]) -> bool:
        """Carry out a fault on ``job``; False if it is not to be copied in this batch."""
        if isinstance(action, Short):
            job.source, job.target = job.source[: action.length], job.target[: action.length]
        elif isinstance(action, BitFlip):
            job.flip = (action.offset % len(job.target), action.bit)
        elif isinstance(action, LateWrite):
            fixed[job.slot] = action.answer
            batch = CopyBatch(job.slot + 1, [job], Deadline(math.inf), self._crew.fenced)
            self._crew.copy_late(batch, action.after_s)
        elif isinstance(action, Fail):
            fixed[job.slot] = action.status
        elif isinstance(action, Die):
            die(action, self._cut)
        return isinstance(action, (Short, BitFlip))

    def _remote(self, extent: Extent) -> Bytes | None:
        memory = self._regions.get(extent.region)
        if memory is None or extent.offset < 0 or extent.length < 0 or extent.offset + extent.length > memory.length:
            return None
        return memory.array[extent.offset : extent.offset + extent.length]

    def _local(self, move: Move) -> Bytes:
        end = move.local_offset + move.remote.length
        if move.local_offset < 0 or end > self._arena.length:
            raise LocalProtocolError(f"[{move.local_offset}, {end}) is outside the arena of {self._arena.length} bytes")
        return self._arena.array[move.local_offset : end]
