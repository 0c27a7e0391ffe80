"""The store's data path: puts and gets between the sessions' regions and the arena.

    put:  reserve -> wait for a turn -> pull -> check -> commit
    get:  pin -> wait for a turn -> push -> unpin

An extent is given back only after its transfer has ended. When that is not known (a deadline passed, the
request was cancelled, the transport failed), its *use* goes into the session's limbo, and is settled (the
reservation aborted, the pin given back) after the session's data path was fenced: here at once after a
deadline, else when the transport reports the session as closed. So no late write ever meets a new owner.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import anyio.to_thread

from memkv_vllm.config import LimitsConfig, Right
from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetResult, Put
from memkv_vllm.store.bulkqueue import BulkKind, BulkTicket
from memkv_vllm.store.latency import Latency
from memkv_vllm.store.residency import Residency
from memkv_vllm.store.sessions import StoreSession, Use, UseKind
from memkv_vllm.store.table import Table
from memkv_vllm.store.turns import BulkTurns
from memkv_vllm.transports.base import Move, remaining
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Status

__all__ = ["Transfers"]

logger = logging.getLogger("memkv.store")

INLINE_CHECK_BYTES = 512 << 10
"""Less than this is checked on the loop (some 30 us): handing it to a thread costs the loop alone more than that."""
_OVERRUN_S = 5.0
"""A transport keeps its deadlines itself; one that is late by this much is abandoned and fenced."""

_Operation = Callable[[Sequence[Move], Deadline], Awaitable[list[Status]]]


class _Moved(NamedTuple):
    status: Status
    ended: bool
    """False: bytes may still move; only a fence ends it."""


_NOT_STARTED = _Moved(Status.BUSY, ended=True)
_ABANDONED = _Moved(Status.TIMEOUT, ended=False)


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way."""

    session: StoreSession
    kind: BulkKind
    ticket: BulkTicket
    deadline: Deadline
    algorithm: int
    statuses: list[Status]
    started: float
    """On the clock of the deadline."""


class Transfers:
    """Carries out puts and gets.

    Args:
        table: index of the arena.
        memory: the arena's bytes.
        turns: lanes; gets go first.
        limits: ``transfer_timeout_s`` and ``copy_threads``.
        counters: counts by reason are added here.
        clock: seconds on the clock of :class:`Deadline`.
        residency: the disk behind the arena, if there is one.
    """

    def __init__(
        self,
        table: Table,
        memory: HostMemory,
        turns: BulkTurns,
        limits: LimitsConfig,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        residency: Residency | None = None,
    ) -> None:
        self._table = table
        self._residency = residency
        self._memory = memory
        self._turns = turns
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._threads = anyio.CapacityLimiter(limits.copy_threads)
        self.latencies = {BulkKind.PUT: Latency(), BulkKind.GET: Latency()}
        """How long batches took that were answered, from :meth:`put` or :meth:`get` on."""

    async def put(self, session: StoreSession, request: Put) -> list[Status]:
        """Stores the values that a PUT names.

        Returns:
            one status per item; ``OK`` only for a value that is visible now through this request.

        Raises:
            StoreError: the checksum algorithm is not known; nothing moved.
            RemoteProtocolError: the session was fenced.
        """
        self._require_data_path(session)
        if request.algorithm not in ChecksumAlgorithm._value2member_map_:
            self._counters["put_unknown_algorithm"] += 1
            raise StoreError(f"PUT with checksum algorithm {request.algorithm}, which this server does not know")
        job = self._job(session, BulkKind.PUT, request.timeout_ms, len(request.items), request.algorithm)
        uses: list[Use] = []
        try:
            self._reserve(job, request, uses)
            await self._run(job, uses)
        finally:
            self._give_up(job, uses)
        self._count(job, sum(request.items[i].extent.length for i, s in enumerate(job.statuses) if s is Status.OK))
        return job.statuses

    async def get(self, session: StoreSession, request: Get) -> list[GetResult]:
        """Fetches the values that a GET names into the session's regions.

        Returns:
            one result per item; the bytes are in place where its status is ``OK``.

        Raises:
            RemoteProtocolError: the session was fenced.
        """
        self._require_data_path(session)
        job = self._job(session, BulkKind.GET, request.timeout_ms, len(request.items), 0)
        results = [GetResult(Status.FAILED, 0, 0, 0)] * len(request.items)
        uses: list[Use] = []
        try:
            on_disk = self._pin(job, request, uses, results)
            if on_disk and self._residency is not None:
                await self._run_with_disk(job, request, uses, results, on_disk, self._residency)
            else:
                await self._run(job, uses)
        finally:
            self._give_up(job, uses)
        self._count(job, sum(request.items[i].extent.length for i, s in enumerate(job.statuses) if s is Status.OK))
        return [
            result if result.status is status else GetResult(status, 0, 0, 0)
            for result, status in zip(results, job.statuses, strict=True)
        ]

    async def fence(self, session: StoreSession) -> None:
        """Stops the session's data path for good and settles its limbo; returns when no byte can move any more."""
        session.fenced = True
        async with session.fencing:
            await session.peer.bulk.fence()
        self.settle(session)

    def settle(self, session: StoreSession) -> None:
        """Gives back every extent in the session's limbo: only after its peer was fenced."""
        uses, session.limbo = session.limbo, []
        for use in uses:
            self._give_back(use)
            self._counters["settled_after_fence"] += 1

    # Steps of a request

    def _reserve(self, job: _Job, request: Put, uses: list[Use]) -> None:
        owner, now = job.session.peer.established.session, self._clock()
        for index, (key, checksum, layout, extent) in enumerate(request.items):
            if not job.session.access.may(Right.WRITE, key):
                job.statuses[index] = Status.DENIED
            elif extent.length == 0:
                job.statuses[index] = Status.BAD_LENGTH
            else:
                status, offset, generation, _ = self._table.reserve(
                    key, extent.length, checksum, request.algorithm, layout, owner, now
                )
                job.statuses[index] = status
                if status is Status.OK:
                    job.statuses[index] = Status.FAILED  # until it is committed
                    uses.append(Use(UseKind.RESERVED, index, key, generation, offset, extent, checksum))

    def _pin(self, job: _Job, request: Get, uses: list[Use], results: list[GetResult]) -> list[int]:
        """Pins what is in the arena; returns the indexes of what is on disk alone."""
        now, on_disk = self._clock(), []
        for index, (key, layout, extent) in enumerate(request.items):
            if not job.session.access.may(Right.READ, key):
                job.statuses[index] = Status.DENIED
                continue
            status, offset, checksum, algorithm, generation = self._table.pin(key, extent.length, layout, now)
            job.statuses[index] = status
            results[index] = GetResult(status, algorithm, checksum, generation)
            if status is Status.OK:
                job.statuses[index] = Status.FAILED  # until it was pushed
                uses.append(Use(UseKind.PINNED, index, key, generation, offset, extent, checksum))
            elif status is Status.PENDING:
                on_disk.append(index)
        return on_disk

    async def _run(self, job: _Job, uses: list[Use]) -> None:
        slices = [uses[part] for part in self._turns.slices(job.kind, [use.remote.length for use in uses])]
        if len(slices) == 1:
            await self._slice(job, slices[0])
        elif slices:
            async with anyio.create_task_group() as tasks:
                for part in slices:
                    tasks.start_soon(self._slice, job, part)

    async def _run_with_disk(
        self,
        job: _Job,
        request: Get,
        uses: list[Use],
        results: list[GetResult],
        on_disk: list[int],
        residency: Residency,
    ) -> None:
        """Pushes what is in the arena at once, and the rest as it comes back; nobody holds a lane while waiting."""

        async def bring(index: int) -> None:
            key, layout, extent = request.items[index]
            pinned = await residency.pin(key, extent.length, layout, job.deadline)
            status, offset, checksum, algorithm, generation = pinned
            job.statuses[index] = status
            results[index] = GetResult(status, algorithm, checksum, generation)
            if status is Status.OK:
                job.statuses[index] = Status.FAILED  # until it was pushed
                use = Use(UseKind.PINNED, index, key, generation, offset, extent, checksum)
                uses.append(use)  # so that it is given up with the others
                await self._slice(job, [use])

        present = list(uses)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, job, present)
            for index in on_disk:
                tasks.start_soon(bring, index)

    async def _slice(self, job: _Job, uses: list[Use]) -> None:
        bulk = job.session.peer.bulk
        async with self._turns.turn(job.ticket, remaining(job.deadline, self._clock())) as granted:
            if granted:
                moved = await self._move(bulk.pull if job.kind is BulkKind.PUT else bulk.push, job, uses)
            else:
                moved = [_NOT_STARTED] * len(uses)
                self._counters[f"{job.kind.name.lower()}_no_turn"] += 1
        arrived = []
        for use, (status, ended) in zip(uses, moved, strict=True):
            job.statuses[use.index] = status
            if ended and use.kind is UseKind.RESERVED and status is Status.OK:
                arrived.append(use)
            elif ended:
                self._give_back(use)
        if arrived:
            await self._commit(job, arrived)
        if self._give_up(job, uses):
            await self.fence(job.session)

    async def _move(self, operation: _Operation, job: _Job, uses: list[Use]) -> list[_Moved]:
        moves = [Move(use.remote, use.offset) for use in uses]
        problem = "bulk_overrun"
        try:
            with anyio.move_on_after(remaining(job.deadline, self._clock()) + _OVERRUN_S):
                statuses = await operation(moves, job.deadline)
                if len(statuses) == len(moves):
                    # While a fence is on its way a move may fail before its last piece has landed.
                    unsure = (Status.TIMEOUT, Status.FAILED) if job.session.fenced else (Status.TIMEOUT,)
                    return [_Moved(status, status not in unsure) for status in statuses]
                problem = "bulk_wrong_count"
        except Exception:
            logger.exception("bulk.failed peer=%s", job.session.peer.label)
            problem = "bulk_error"
        logger.error("bulk.abandoned peer=%s reason=%s: the session is fenced", job.session.peer.label, problem)
        self._counters[problem] += 1
        return [_ABANDONED] * len(moves)

    async def _commit(self, job: _Job, uses: list[Use]) -> None:
        right = [True] * len(uses)
        if job.algorithm != ChecksumAlgorithm.NONE:
            if sum(use.remote.length for use in uses) <= INLINE_CHECK_BYTES:
                right = self._check(uses)
            else:
                right = await anyio.to_thread.run_sync(self._check, uses, limiter=self._threads)
        for use, is_right in zip(uses, right, strict=True):
            if not is_right:
                job.statuses[use.index] = Status.BAD_CHECKSUM
                self._give_back(use)
                continue
            use.open = False
            if not self._table.commit(use.key, use.generation):
                job.statuses[use.index] = Status.FAILED
                self._counters["put_reset"] += 1
            elif self._residency is not None:
                self._residency.offer(use.key, use.generation)

    def _check(self, uses: list[Use]) -> list[bool]:
        """On the loop or in a thread, which cancellation awaits: it never reads an extent that was given back."""
        view = self._memory.view
        return [digest(view(use.offset, use.remote.length)) == use.checksum for use in uses]

    # Small things

    def _job(self, session: StoreSession, kind: BulkKind, timeout_ms: int, num_items: int, algorithm: int) -> _Job:
        timeout_s = min(timeout_ms / 1000, self._limits.transfer_timeout_s)
        now = self._clock()
        deadline, statuses = Deadline(now + timeout_s), [Status.FAILED] * num_items
        ticket = self._turns.ticket(kind, session.peer.established.session)
        return _Job(session, kind, ticket, deadline, algorithm, statuses, now)

    def _give_back(self, use: Use) -> None:
        use.open = False
        if use.kind is UseKind.RESERVED:
            self._table.abort(use.key, use.generation)
        else:
            self._table.unpin(use.key, use.generation)

    def _give_up(self, job: _Job, uses: list[Use]) -> int:
        given_up = job.session.give_up(uses)
        self._counters[f"{job.kind.name.lower()}_given_up"] += given_up
        return given_up

    def _require_data_path(self, session: StoreSession) -> None:
        if session.fenced:
            raise RemoteProtocolError("fenced", "this session was fenced: a new connection is needed to move values")

    def _count(self, job: _Job, moved_bytes: int) -> None:
        name = job.kind.name.lower()
        for status, number in Counter(job.statuses).items():
            self._counters[f"{name}_{status.name.lower()}"] += number
        self._counters[f"{name}_bytes"] += moved_bytes
        self.latencies[job.kind].observe(self._clock() - job.started)
        if job.kind is BulkKind.PUT:
            job.session.put_bytes += moved_bytes
        else:
            job.session.get_bytes += moved_bytes
