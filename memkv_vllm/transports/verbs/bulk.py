"""Server side of the verbs data path: one peer's queue pairs and regions, and the READs and WRITEs over them.

A pull is RDMA READs out of the peer's regions into the arena. A push is RDMA WRITEs, and on each queue pair it used a
small READ behind them: their bytes are in place when that one has ended, and only then the values are OK.

Any failure ends the session: its queue pairs are made to fail, the peer is cut, and its client makes a new session.
What was under way is answered FAILED once nothing of it can touch memory any more; by then no answer reaches the peer.
Before a region is accepted, bytes of it are READ and others WRITTEN beside it over every queue pair (the probe): a way
that does not work, or in one direction only, is found before anything depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import anyio
import numpy as np

from memkv_vllm.errors import (
    ConnectionLost,
    FenceTimeout,
    LocalProtocolError,
    MemkvError,
    RemoteProtocolError,
    StoreError,
)
from memkv_vllm.transports.base import Move, Moves, remaining
from memkv_vllm.transports.faults import FaultPlan, Operation, strike_moves
from memkv_vllm.transports.regions import check_region
from memkv_vllm.transports.verbs.active import ActiveEnd
from memkv_vllm.transports.verbs.endpoints import DATA_PATH, Endpoint, RegionToken
from memkv_vllm.transports.verbs.injecting import Injected, inject
from memkv_vllm.transports.verbs.planning import Columns, Pieces, Plan, RemoteRegion, Slots, columns_of, share, split
from memkv_vllm.transports.verbs.probing import Step, probe_steps
from memkv_vllm.transports.verbs.provider import Opcode, VerbsError
from memkv_vllm.transports.verbs.queuepairs import QueuePairs
from memkv_vllm.transports.verbs.rails import Rails
from memkv_vllm.transports.verbs.statuses import Outcome, error_of
from memkv_vllm.transports.verbs.transfers import Transfer
from memkv_vllm.types import Deadline, MemoryKind, Status

__all__ = ["PROBE_TIMEOUT_S", "BulkOptions", "VerbsBulk"]

logger = logging.getLogger("memkv.transports.verbs")

PROBE_TIMEOUT_S = 3.0
"""For the probe of a region, all queue pairs and both directions. A NIC gives a peer up after half a second to two."""

SPREAD_BYTES = 1 << 20
"""A batch of fewer bytes goes over one queue pair: a NIC moves it in 20 us at 400 Gb/s, and a post costs as much."""

_CUT_AFTER_S = 1.0
"""After a failed probe: the client has its answer by then, and goes by itself."""


_SAY_PENDING_S = 10.0
_FENCE_PENDING = (
    "event=rdma_fence_pending %s: the library takes long to destroy its queue pairs; what they may touch stays out of "
    "use until then, and this server cannot end: see dmesg for the device's firmware or driver"
)


@dataclass(frozen=True)
class BulkOptions:
    """Bounds of a session, and what to break in tests."""

    max_regions: int
    max_region_bytes: int
    faults: FaultPlan | None = None
    probe_timeout_s: float = PROBE_TIMEOUT_S
    spread_bytes: int = SPREAD_BYTES


class VerbsBulk:
    """One peer's data path; see ``memkv_vllm.transports.base.Bulk``. Used on one event loop.

    Args:
        rails: the ports that this server serves on.
        local_host: the address of this host at which the session's control connection arrived.
        options: bounds.
        cut: ends the peer's session.
        counted: counts an event by name.
    """

    def __init__(
        self,
        rails: Rails,
        local_host: str,
        options: BulkOptions,
        *,
        cut: Callable[[], None],
        counted: Callable[[str], None],
    ) -> None:
        self._rails = rails
        self._local_host = local_host
        self._options = options
        self._cut = cut
        self._counted = counted
        self._loop = asyncio.get_running_loop()
        self._setting_up = anyio.Lock()
        self._end: ActiveEnd | None = None
        self._pairs: QueuePairs | None = None
        self._regions: dict[int, RemoteRegion] = {}
        self._taken: dict[int, int] = {}
        """Length by id of the regions that were offered, also those that are being probed."""
        self._later: set[asyncio.TimerHandle] = set()
        self._failing: asyncio.Future[None] | None = None
        self._failure: MemkvError | None = None
        self._unanswered = False
        """Whether that was for want of any answer from the peer's NIC."""
        self._num_probes = 0
        self._gone = anyio.Event()
        self._fenced = False
        self._undead: FenceTimeout | None = None
        """Queue pairs that could not be destroyed, and may move bytes as long as this process lives."""

    # -- bring-up

    async def connect(self, transport: str, token: bytes) -> bytes:
        """Make as many queue pairs as the peer has, and connect them to its own; see the protocol."""
        peer = Endpoint.unpack(token)
        async with self._setting_up:
            self._check_here()
            if self._end is not None:
                raise RemoteProtocolError("connect", "CONNECT comes once")
            # Not lost if this task is cancelled meanwhile: then it goes on to here first, and the fence finds them.
            self._end = await self._rails.connect(self._local_host, peer)
            self._pairs = QueuePairs(
                self._end.completions, self._end.queue_pairs, self._end.depth, self._report_failure
            )
        logger.info("event=rdma_session %s", self._end)
        return self._end.endpoint.pack()

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        """Bind a region, host or GPU memory, once the probe went well over every queue pair; see the protocol."""
        if length < 1:
            raise RemoteProtocolError("region", f"region {region} has {length} bytes")
        check_region(
            region,
            length,
            self._taken,
            ended=self._gone.is_set(),
            max_regions=self._options.max_regions,
            max_region_bytes=self._options.max_region_bytes,
        )
        if self._pairs is None or self._end is None:
            raise RemoteProtocolError("region", "a region of verbs was offered before CONNECT")
        remote = RegionToken.parse(token, length)
        self._taken[region] = length
        await self._probe(self._pairs, self._end, RemoteRegion(remote.address, length, remote.rkey))
        self._regions[region] = RemoteRegion(remote.address, length, remote.rkey)

    async def _probe(self, pairs: QueuePairs, end: ActiveEnd, region: RemoteRegion) -> None:
        until = Deadline(time.monotonic() + self._options.probe_timeout_s)
        for step in probe_steps(end, region):
            transfer = Transfer(0, proven_by_last=True, loop=self._loop)
            if not await self._probe_with(pairs, step.columns, transfer, until):
                self._refuse(pairs, end, step, transfer)

    async def _probe_with(self, pairs: QueuePairs, columns: Columns, transfer: Transfer, until: Deadline) -> bool:
        """Whether ``columns`` went well on every queue pair."""
        if pairs.failed or self._gone.is_set():
            return False
        self._num_probes += 1
        try:
            pairs.begin(transfer, [(index, columns) for index in range(len(pairs))])
            await transfer.wait(remaining(until, time.monotonic()))
        finally:
            self._num_probes -= 1
            pairs.drop(transfer)
        return transfer.is_complete

    def _refuse(self, pairs: QueuePairs, end: ActiveEnd, step: Step, transfer: Transfer) -> NoReturn:
        """Say why a step of the probe, ``transfer``, did not end well."""
        self._check_here()
        self._counted("rdma_probe_failed")
        if self._failure is None:
            # Behind other work it may just have been too late: no packet need be lost then.
            alone = pairs.num_transfers <= self._num_probes
            what = step.explain(f"no answer within {self._options.probe_timeout_s:g} s", unanswered=alone)
            self._end_by(ConnectionLost(what))
        elif pairs.failed_first is transfer:
            what = step.explain(self._failure, unanswered=self._unanswered)
        else:
            what = str(self._failure)  # of other work: it says nothing of this step's direction
        logger.warning("event=rdma_probe_failed reason=%r %s", what, end)
        raise StoreError(f"the RDMA probe failed: {what}; {end.advice}", DATA_PATH)

    # -- transfers

    async def pull(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """RDMA READs out of the peer's memory; see the protocol."""
        return await self._transfer(Operation.PULL, moves, deadline)

    async def push(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """RDMA WRITEs into the peer's memory; see the protocol."""
        return await self._transfer(Operation.PUSH, moves, deadline)

    async def _transfer(self, operation: Operation, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        if self._options.faults is None:
            return await self._run(operation, columns_of(moves), None, len(moves), deadline)
        return await self._run_with_faults(self._options.faults, operation, moves, deadline)

    async def _run(
        self, operation: Operation, moves: Moves, slots: Slots | None, num_slots: int, deadline: Deadline
    ) -> list[Status]:
        """Carry out ``moves``, at ``slots`` of a batch of ``num_slots``; at all of them in order for None."""
        timeout_s = remaining(deadline, time.monotonic())
        pairs, end = self._pairs, self._end
        if self._gone.is_set() or not timeout_s:
            return [Status.FAILED if self._gone.is_set() else Status.TIMEOUT] * num_slots
        if pairs is None or end is None:
            return [Status.BAD_EXTENT] * num_slots
        plan = Pieces.plan(moves, self._regions, end.arena, slots)
        transfer = Transfer(num_slots, proven_by_last=operation is Operation.PUSH, loop=self._loop)
        parts = _parts(operation, plan, pairs, end, self._options.spread_bytes)
        if parts and pairs.failed:
            return [Status.FAILED] * num_slots
        if parts:
            try:
                pairs.begin(transfer, parts)
                await transfer.wait(timeout_s)
            finally:
                pairs.drop(transfer)
        # FAILED promises that nothing of it moves any more.
        missing = Status.FAILED if self._fenced or pairs.quiet else Status.TIMEOUT
        return transfer.statuses(missing, plan.bad)

    # -- the end

    async def fence(self) -> None:
        """Destroy the queue pairs, in a worker thread; see the protocol.

        Raises:
            FenceTimeout: the library refused to destroy one of them, this time or before: it is never fenced.
        """
        self._gone.set()
        with anyio.CancelScope(shield=True):
            while self._later:
                self._later.pop().cancel()
            async with self._setting_up:
                pairs, end, self._pairs = self._pairs, self._end, None
                if pairs is not None and end is not None:
                    pairs.stop()
                    late = self._loop.call_later(_SAY_PENDING_S, logger.error, _FENCE_PENDING, end)
                    if self._failing is not None:
                        await asyncio.wait([self._failing])
                    self._destroyed(end, await self._rails.start_ending(end, pairs.destroy))
                    late.cancel()
                self._regions.clear()
                self._fenced = self._undead is None
                if pairs is not None:
                    pairs.wake_all()
        if self._undead is not None:
            raise self._undead

    # -- failures

    def _report_failure(self, cause: Outcome | VerbsError | LocalProtocolError, what: str) -> None:
        if isinstance(cause, Outcome):
            reason, error = cause.reason, error_of(cause, what)
            self._unanswered = cause.unanswered
        else:
            reason = "refused" if isinstance(cause, VerbsError) else "completion"
            error = LocalProtocolError(f"{what} failed: {cause}")
        self._counted(f"rdma_{reason}")
        self._end_by(error)

    def _end_by(self, error: MemkvError) -> None:
        pairs, end = self._pairs, self._end
        if pairs is None or end is None or self._failure is not None:
            return
        self._failure = error
        pairs.failed = True
        logger.warning("event=rdma_session_failed reason=%r %s", str(error), self._end)
        if pairs.num_transfers > self._num_probes:
            # Bytes are under way to the client, and may still land there: no answer may leave any more.
            self._cut()
        else:
            # Nothing but a probe, whose client is to learn why; in case that it does not go by itself then.
            self._call_later(_CUT_AFTER_S, self._cut)
        self._failing = self._rails.start_ending(end, pairs.fail)

    def _destroyed(self, end: ActiveEnd, failures: Sequence[VerbsError]) -> None:
        if not failures:
            return
        why = "; ".join(dict.fromkeys(map(str, failures)))
        self._undead = FenceTimeout(
            f"{len(failures)} of {len(end.queue_pairs)} queue pairs on {end.port.rail.name} could not be "
            f"destroyed ({why}): what they may read or write is never used again; the device may be broken (dmesg), "
            f"restart this server"
        )
        self._counted("rdma_not_destroyed")
        logger.error("event=rdma_not_destroyed reason=%r", str(self._undead))

    def _check_here(self) -> None:
        if self._gone.is_set():
            raise StoreError("this session has ended")

    def _call_later(self, after_s: float, call: Callable[[], None]) -> None:
        self._later.add(self._loop.call_later(after_s, call))

    # -- faults, in tests

    async def _run_with_faults(
        self, plan: FaultPlan, operation: Operation, moves: Sequence[Move], deadline: Deadline
    ) -> list[Status]:
        missing, statuses = Status.TIMEOUT, [Status.TIMEOUT] * len(moves)
        delay_s, faults = strike_moves(plan, operation, moves)
        if delay_s >= remaining(deadline, time.monotonic()):
            with anyio.move_on_after(remaining(deadline, time.monotonic())):
                await self._gone.wait()
                return [Status.FAILED] * len(moves)
            return statuses
        await anyio.sleep(delay_s)
        injected = inject(moves, faults, self._cut)
        for late in injected.late:
            self._call_later(late.after_s, partial(self._start_late, operation, late.move))
        slots = np.array(injected.slots, np.intp)
        statuses = await self._run(operation, columns_of(injected.plain), slots, len(moves), deadline)
        await self._flip_bits(operation, injected, deadline)
        if injected.dropped:
            with anyio.move_on_after(remaining(deadline, time.monotonic())):
                await self._gone.wait()
                missing = Status.FAILED
        fixed = dict.fromkeys(injected.dropped, missing) | injected.fixed
        return [fixed.get(slot, status) for slot, status in enumerate(statuses)]

    def _start_late(self, operation: Operation, move: Move) -> None:
        pairs, end = self._pairs, self._end
        if pairs is not None and end is not None and not pairs.failed:
            plan = Pieces.plan(columns_of([move]), self._regions, end.arena)
            transfer = Transfer(1, proven_by_last=False, loop=self._loop)
            pairs.begin(transfer, _parts(operation, plan, pairs, end, self._options.spread_bytes))

    async def _flip_bits(self, operation: Operation, injected: Injected, deadline: Deadline) -> None:
        for move, action in injected.flips:
            pairs, end = self._pairs, self._end
            if pairs is None or end is None or pairs.failed:
                return
            at = action.offset % move.remote.length
            spoilt = int(end.memory.array[move.local_offset + at]) ^ 1 << action.bit
            if operation is Operation.PULL:
                end.memory.array[move.local_offset + at] = spoilt
                continue
            region = self._regions[move.remote.region]
            transfer = Transfer(1, proven_by_last=True, loop=self._loop)
            try:
                pairs.begin(transfer, [(0, end.scratch.write_byte(region, move.remote.offset + at, spoilt))])
                await transfer.wait(remaining(deadline, time.monotonic()))
            finally:
                pairs.drop(transfer)


def _parts(
    operation: Operation, plan: Plan, pairs: QueuePairs, end: ActiveEnd, spread_bytes: int
) -> list[tuple[int, Columns]]:
    """What each queue pair does for a batch; a batch of fewer than ``spread_bytes`` goes over one."""
    pieces = plan.pieces
    if not len(pieces):
        return []
    opcode = Opcode.READ if operation is Operation.PULL else Opcode.WRITE
    ours = _queue_pairs_of(operation, len(pairs))
    count = len(ours) if pieces.num_bytes >= spread_bytes else 1
    shares = share(split(pieces, end.most_bytes), count, pairs.least_busy(ours) - ours.start)
    parts = [(ours[at], Columns.of(part, opcode, end.arena.lkey)) for at, part in shares]
    if operation is Operation.PUSH:
        return [(index, columns.flushed(end.scratch.address, end.scratch.lkey)) for index, columns in parts]
    return parts


def _queue_pairs_of(operation: Operation, count: int) -> range:
    """Which of ``count`` queue pairs an operation uses: puts and gets have their own, where there are two or more.

    The two go in opposite directions of the wire and hardly disturb each other there. But a queue pair is answered in
    order: the READ behind a get's WRITEs would wait for the bytes of all READs before it.
    """
    middle = count // 2
    return range(max(1, middle)) if operation is Operation.PULL else range(middle, count)
