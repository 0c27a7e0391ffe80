"""The store's data path: puts and gets between the sessions' regions and the arena.

    put:  reserve -> wait for a turn -> pull -> check -> commit
    get:  pin -> wait for a turn -> push -> unpin

A request goes through this as a whole, in columns: nothing is made or awaited per value where all goes well.

An extent is given back only after its transfer has ended. When that is not known (a deadline passed, the
request was cancelled, the transport failed), its *use* goes into the session's limbo, and is settled (the
reservation aborted, the pin given back) after the session's data path was fenced: here at once after a
deadline, else when the transport reports the session as closed. So no late write ever meets a new owner.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import anyio
import anyio.to_thread

from memkv_vllm.config import LimitsConfig, Right
from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.columns import GetColumns, PutColumns, pack_get_reply
from memkv_vllm.store.batches import NewValues, pick
from memkv_vllm.store.bulkqueue import BulkKind, BulkTicket
from memkv_vllm.store.entries import Entry
from memkv_vllm.store.latency import Latency
from memkv_vllm.store.residency import Residency
from memkv_vllm.store.sessions import StoreSession, Use
from memkv_vllm.store.table import Table
from memkv_vllm.store.turns import BulkTurns
from memkv_vllm.transports.base import Bulk, EagerBulk, EagerGet, EagerPut, Move, Moves, remaining
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Status

__all__ = ["Transfers"]

logger = logging.getLogger("memkv.store")

INLINE_CHECK_BYTES = 512 << 10
"""Less than this is checked on the loop (some 30 us): handing it to a thread costs the loop alone more than that."""
_OVERRUN_S = 5.0
"""A transport keeps its deadlines itself; one that is late by this much is abandoned and fenced."""
_FINISH_S, _FINISH_SHARE = 1.0, 0.25
"""How long after its deadline the unwanted bytes of an eager put may take to come: a second, or that share of its
timeout. An engine waits that much longer than it tells its server, and a busy link is no reason to cut it."""

_Operation = Callable[[Sequence[Move], Deadline], Awaitable[list[Status]]]


class _Names(NamedTuple):
    """Counters of one kind of request: those of every request, whose names are not made each time."""

    statuses: tuple[str, ...]
    """By status; these are numbered from 0."""
    bytes: str


def _names(kind: str) -> _Names:
    return _Names(tuple(f"{kind}_{status.name.lower()}" for status in Status), f"{kind}_bytes")


_NAMES = {kind: _names(kind.name.lower()) for kind in BulkKind}
_OK, _FAILED = bytes([Status.OK]), bytes([Status.FAILED])
_NAMED = (Status.OK, Status.BAD_LENGTH, Status.BAD_LAYOUT)
"""Statuses of a GET that come with the value's generation."""


@dataclass(slots=True, eq=False)
class _Job:
    """One request on its way. Columns of equal length; a value is known by its place in them."""

    session: StoreSession
    kind: BulkKind
    ticket: BulkTicket
    deadline: Deadline
    started: float
    """On the clock of the deadline."""
    request: PutColumns | GetColumns
    statuses: bytearray
    eager_put: EagerPut | None = None
    """What takes the bytes of an eager put off."""
    eager_get: EagerGet | None = None
    """What sends the bytes of an eager get, and the answer before them."""
    found: Sequence[Entry | None] = ()
    """Of an eager get: what the answer tells of each value."""
    uses: dict[int, Entry] = field(default_factory=dict)
    """Extents of the arena that the request uses, by place: until they are given back to the table or given up."""

    def note(self, places: Sequence[int], statuses: bytes | bytearray) -> None:
        """What the table said of the values at ``places``; those that may be moved have failed until they were."""
        statuses = statuses.replace(_OK, _FAILED)
        if len(places) == len(self.statuses):
            self.statuses[:] = statuses
        else:
            for place, status in zip(places, statuses, strict=True):
                self.statuses[place] = status

    def moves(self, places: Sequence[int]) -> Moves:
        """What the data path is to do for the values at ``places``."""
        request, uses = self.request, self.uses
        offsets = [uses[place].offset for place in places]
        return Moves(
            pick(places, request.regions), pick(places, request.offsets), pick(places, request.lengths), offsets
        )

    def operation(self, bulk: Bulk, places: Sequence[int]) -> _Operation:
        """What moves the values at ``places``."""
        if self.kind is BulkKind.PUT:
            return bulk.pull if self.eager_put is None else partial(self.eager_put.pull, places)
        if self.eager_get is None:
            return bulk.push
        statuses = bytearray(self.statuses)
        for place in places:
            statuses[place] = Status.OK
        return partial(self.eager_get.push, answer=_pack_results(statuses, self.found))

    def take(self, places: Sequence[int]) -> list[Entry]:
        """The uses at ``places``, which the caller ends."""
        return list(map(self.uses.pop, places))


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
        self._batches = table.batches
        self._residency = residency
        self._memory = memory
        self._turns = turns
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._threads = anyio.CapacityLimiter(limits.copy_threads)
        self._drain_is_due = False
        """One step for all requests in each turn of the loop."""
        self.latencies = {BulkKind.PUT: Latency(), BulkKind.GET: Latency()}
        """How long batches took that were answered, from :meth:`put` or :meth:`get` on."""

    async def put(self, session: StoreSession, request: PutColumns) -> bytes:
        """Stores the values that a PUT names.

        Returns:
            the reply's body: one status per value; ``OK`` only for one that is visible now through this request.

        Raises:
            StoreError: the checksum algorithm is not known; nothing moved.
            RemoteProtocolError: the session was fenced.
        """
        self._require_data_path(session)
        deadline = self._deadline(request)
        if not request.eager:
            return await self._put(session, request, deadline)
        expected = _eager_bulk(session, "put").eager_put(request.lengths)
        self._counters["eager_puts"] += 1
        try:
            statuses = await self._put(session, request, deadline, expected)
        except StoreError:
            await self._finish(expected, request, deadline)
            raise
        await self._finish(expected, request, deadline)
        return statuses

    async def get(self, session: StoreSession, request: GetColumns) -> bytes | None:
        """Fetches the values that a GET names into the session's regions.

        Returns:
            the reply's body: one result per value; the bytes are in place where its status is ``OK``. None: it went
            with the bytes (an eager get).

        Raises:
            RemoteProtocolError: the session was fenced.
        """
        self._require_data_path(session)
        eager = None
        if request.eager:
            eager = _eager_bulk(session, "get").eager_get(request.lengths)
            self._counters["eager_gets"] += 1
        job = self._job(session, BulkKind.GET, request, self._deadline(request))
        try:
            found, on_disk = self._pin(job, request)
            if on_disk and self._residency is not None:
                await self._run_with_disk(job, request, found, on_disk, self._residency)
            else:
                job.eager_get, job.found = eager, found
                await self._run(job, list(job.uses))
        finally:
            if job.uses:
                self._give_up(job, list(job.uses))
        self._count(job)
        return None if eager is not None and eager.answered else _pack_results(job.statuses, found)

    async def fence(self, session: StoreSession) -> None:
        """Stops the session's data path for good and settles its limbo; returns when no byte can move any more."""
        session.fenced = True
        async with session.fencing:
            await session.peer.bulk.fence()
        self.settle(session)

    def settle(self, session: StoreSession) -> None:
        """Gives back every extent in the session's limbo: only after its peer was fenced."""
        uses, session.limbo = session.limbo, []
        for kind, entry in uses:
            self._give_back(kind, [entry])
            self._counters["settled_after_fence"] += 1

    # Steps of a request

    async def _finish(self, expected: EagerPut, request: PutColumns, deadline: Deadline) -> None:
        """Takes off what was not wanted: also what waited for its turn up to the deadline."""
        most_s = max(_FINISH_S, _FINISH_SHARE * min(request.timeout_ms / 1000, self._limits.transfer_timeout_s))
        await expected.finish(Deadline(max(deadline, self._clock() + most_s)))

    async def _put(
        self, session: StoreSession, request: PutColumns, deadline: Deadline, eager: EagerPut | None = None
    ) -> bytes:
        if request.algorithm not in ChecksumAlgorithm._value2member_map_:
            self._counters["put_unknown_algorithm"] += 1
            raise StoreError(f"PUT with checksum algorithm {request.algorithm}, which this server does not know")
        job = self._job(session, BulkKind.PUT, request, deadline, eager)
        try:
            self._reserve(job, request)
            await self._run(job, list(job.uses))
        finally:
            if job.uses:
                self._give_up(job, list(job.uses))
        self._count(job)
        return bytes(job.statuses)

    def _reserve(self, job: _Job, request: PutColumns) -> None:
        places = self._allowed(job, Right.WRITE)
        if 0 in request.lengths:
            for place in [place for place in places if not request.lengths[place]]:
                job.statuses[place] = Status.BAD_LENGTH
            places = [place for place in places if request.lengths[place]]
        values = NewValues(
            pick(places, request.keys),
            pick(places, request.lengths),
            pick(places, request.checksums),
            pick(places, request.layouts),
            request.algorithm,
            job.session.peer.established.session,
        )
        statuses, reserved = self._batches.reserve(values, self._clock())
        job.note(places, statuses)
        job.uses = {places[index]: entry for index, entry in reserved.items()}

    def _pin(self, job: _Job, request: GetColumns) -> tuple[list[Entry | None], list[int]]:
        """Pins what is in the arena; returns the entry of each value, and the places of what is on disk alone."""
        places = self._allowed(job, Right.READ)
        statuses, entries = self._batches.pin(
            pick(places, request.keys), pick(places, request.lengths), pick(places, request.layouts), self._clock()
        )
        job.note(places, statuses)
        found: list[Entry | None] = [None] * len(request.keys)
        for place, status, entry in zip(places, statuses, entries, strict=True):
            found[place] = entry
            if entry is not None and not status:
                job.uses[place] = entry
        if Status.PENDING not in statuses:
            return found, []
        return found, [place for place, status in zip(places, statuses, strict=True) if status == Status.PENDING]

    def _allowed(self, job: _Job, right: Right) -> Sequence[int]:
        """Places of the values that the session has ``right`` for; the others are denied."""
        keys, (rights, within) = job.request.keys, job.session.access
        if right in rights and not within:
            return range(len(keys))
        allowed = [place for place, key in enumerate(keys) if right in rights and key.startswith(within)]
        for place in set(range(len(keys))).difference(allowed):
            job.statuses[place] = Status.DENIED
        return allowed

    async def _run(self, job: _Job, places: list[int]) -> None:
        slices = self._turns.slices(job.kind, pick(places, job.request.lengths))
        if slices and (job.eager_put is not None or job.eager_get is not None):
            slices = [slice(None)]  # they move in one piece, which is short
        if len(slices) == 1:
            self._drain_soon()
            await self._slice(job, places)
        elif slices:
            async with anyio.create_task_group() as tasks:
                for part in slices:
                    tasks.start_soon(self._slice, job, places[part])
                self._drain_soon()

    def _drain_soon(self) -> None:
        """Has what is owed to the watermark freed behind what was begun just now, when bytes are on their way."""
        if self._batches.owes and not self._drain_is_due:
            self._drain_is_due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_is_due = False
        try:
            self._batches.drain()
        except Exception:
            # In no request, and what is not freed now is freed when it is needed.
            logger.exception("event=drain_failed")
            self._counters["internal_error"] += 1
        else:
            self._drain_soon()

    async def _run_with_disk(
        self,
        job: _Job,
        request: GetColumns,
        found: list[Entry | None],
        on_disk: list[int],
        residency: Residency,
    ) -> None:
        """Pushes what is in the arena at once, and the rest as it comes back; nobody holds a lane while waiting."""

        async def bring(place: int) -> None:
            key = request.keys[place]
            pinned = await residency.pin(key, request.lengths[place], request.layouts[place], job.deadline)
            job.note([place], bytes([pinned.status]))
            found[place] = None
            if pinned.status is Status.OK:
                found[place] = job.uses[place] = self._batches.held(key, pinned.generation)
                await self._slice(job, [place])

        present = list(job.uses)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, job, present)
            for place in on_disk:
                tasks.start_soon(bring, place)

    async def _slice(self, job: _Job, places: list[int]) -> None:
        bulk = job.session.peer.bulk
        async with self._turns.turn(job.ticket, remaining(job.deadline, self._clock())) as granted:
            if granted:
                moved = await self._move(job.operation(bulk, places), job, places)
            else:
                moved = [Status.BUSY] * len(places)
                self._counters[f"{job.kind.name.lower()}_no_turn"] += 1
        if len(places) == len(job.statuses):
            job.statuses[:] = moved
        else:
            for place, status in zip(places, moved, strict=True):
                job.statuses[place] = status
        arrived, ended = _sorted_out(places, moved, job.session)
        if job.kind is BulkKind.PUT:
            self._give_back(job.kind, job.take(ended))
            if arrived:
                await self._commit(job, arrived)
        else:
            self._give_back(job.kind, job.take([*arrived, *ended]))
        if len(arrived) + len(ended) < len(places):
            # A push may still move bytes in the client's memory: it is told TIMEOUT, and fences for its part. FAILED
            # would say that nothing moves any more.
            for place in set(places).difference(arrived, ended):
                job.statuses[place] = Status.TIMEOUT
            if self._give_up(job, places):
                await self.fence(job.session)

    async def _move(self, operation: _Operation, job: _Job, places: Sequence[int]) -> list[Status]:
        """Moves the values; ``TIMEOUT`` of what may still be moving."""
        problem = "bulk_overrun"
        try:
            with anyio.move_on_after(remaining(job.deadline, self._clock()) + _OVERRUN_S):
                statuses = await operation(job.moves(places), job.deadline)
                if len(statuses) == len(places):
                    return statuses
                problem = "bulk_wrong_count"
        except Exception:
            logger.exception("bulk.failed peer=%s", job.session.peer.label)
            problem = "bulk_error"
        logger.error("bulk.abandoned peer=%s reason=%s: the session is fenced", job.session.peer.label, problem)
        self._counters[problem] += 1
        return [Status.TIMEOUT] * len(places)

    async def _commit(self, job: _Job, places: Sequence[int]) -> None:
        request, right = job.request, [True] * len(places)
        if isinstance(request, PutColumns) and request.algorithm != ChecksumAlgorithm.NONE:
            entries = [job.uses[place] for place in places]
            if sum([entry.length for entry in entries]) <= INLINE_CHECK_BYTES:
                right = self._check(entries)
            else:
                right = await anyio.to_thread.run_sync(self._check, entries, limiter=self._threads)
        if not all(right):
            wrong = [place for place, is_right in zip(places, right, strict=True) if not is_right]
            for place in wrong:
                job.statuses[place] = Status.BAD_CHECKSUM
            self._give_back(job.kind, job.take(wrong))
            places = [place for place in places if place in job.uses]
        entries = job.take(places)
        visible = self._batches.commit(entries)
        if not all(visible):
            for place in [place for place, is_visible in zip(places, visible, strict=True) if not is_visible]:
                job.statuses[place] = Status.FAILED
                self._counters["put_reset"] += 1
        if self._residency is not None:
            for entry, is_visible in zip(entries, visible, strict=True):
                if is_visible:
                    self._residency.offer(entry.key, entry.generation)

    def _check(self, entries: list[Entry]) -> list[bool]:
        """On the loop or in a thread, which cancellation awaits: it never reads an extent that was given back."""
        view = self._memory.view
        return [digest(view(entry.offset, entry.length)) == entry.checksum for entry in entries]

    # Small things

    def _deadline(self, request: PutColumns | GetColumns) -> Deadline:
        return Deadline(self._clock() + min(request.timeout_ms / 1000, self._limits.transfer_timeout_s))

    def _job(
        self,
        session: StoreSession,
        kind: BulkKind,
        request: PutColumns | GetColumns,
        deadline: Deadline,
        eager: EagerPut | None = None,
    ) -> _Job:
        ticket = self._turns.ticket(kind, session.peer.established.session)
        statuses = bytearray(_FAILED * len(request.keys))
        return _Job(session, kind, ticket, deadline, self._clock(), request, statuses, eager)

    def _give_back(self, kind: BulkKind, entries: Sequence[Entry]) -> None:
        if kind is BulkKind.PUT:
            self._batches.abort(entries)
        else:
            self._batches.unpin(entries)

    def _give_up(self, job: _Job, places: Sequence[int]) -> int:
        """Moves the uses at ``places`` that are left into the session's limbo; returns how many these are."""
        given_up = [Use(job.kind, job.uses.pop(place)) for place in places if place in job.uses]
        job.session.limbo += given_up
        self._counters[f"{job.kind.name.lower()}_given_up"] += len(given_up)
        return len(given_up)

    def _require_data_path(self, session: StoreSession) -> None:
        if session.fenced:
            raise RemoteProtocolError("fenced", "this session was fenced: a new connection is needed to move values")

    def _count(self, job: _Job) -> None:
        names, statuses, lengths = _NAMES[job.kind], job.statuses, job.request.lengths
        if any(statuses):
            for status, number in Counter(statuses).items():
                self._counters[names.statuses[status]] += number
            lengths = [length for length, status in zip(lengths, statuses, strict=True) if not status]
        else:
            self._counters[names.statuses[Status.OK]] += len(statuses)
        moved_bytes = sum(lengths)
        self._counters[names.bytes] += moved_bytes
        self.latencies[job.kind].observe(self._clock() - job.started)
        if job.kind is BulkKind.PUT:
            job.session.put_bytes += moved_bytes
        else:
            job.session.get_bytes += moved_bytes


def _eager_bulk(session: StoreSession, what: str) -> EagerBulk:
    bulk = session.peer.bulk
    if not isinstance(bulk, EagerBulk):
        raise RemoteProtocolError("eager", f"an eager {what} over {session.peer.data_path}")
    return bulk


def _sorted_out(
    places: Sequence[int], moved: Sequence[Status], session: StoreSession
) -> tuple[Sequence[int], Sequence[int]]:
    """The places of what has arrived, and of what ended otherwise. What is in neither may still be moving.

    While a fence is on its way a move may fail before its last piece has landed.
    """
    if moved.count(Status.OK) == len(places):
        return places, ()
    unsure = (Status.TIMEOUT, Status.FAILED) if session.fenced else (Status.TIMEOUT,)
    arrived = [place for place, status in zip(places, moved, strict=True) if status is Status.OK]
    ended = [place for place, status in zip(places, moved, strict=True) if status not in (Status.OK, *unsure)]
    return arrived, ended


def _pack_results(statuses: bytearray, found: Sequence[Entry | None]) -> bytes:
    """The body of the reply to a GET. A mismatch names the value, so that its reader can report it."""
    entries = [entry for entry in found if entry is not None]
    if len(entries) == len(statuses) and not any(statuses):
        algorithms, checksums = [entry.algorithm for entry in entries], [entry.checksum for entry in entries]
        return pack_get_reply(statuses, algorithms, checksums, [entry.generation for entry in entries])
    algorithms, checksums, generations = [0] * len(statuses), [0] * len(statuses), [0] * len(statuses)
    for place, (status, entry) in enumerate(zip(statuses, found, strict=True)):
        if entry is not None and status in _NAMED:
            generations[place] = entry.generation
            if status == Status.OK:
                algorithms[place], checksums[place] = entry.algorithm, entry.checksum
    return pack_get_reply(statuses, algorithms, checksums, generations)
