"""A lane: one pipeline between GPU blocks and the store.

Stores: take slots -> gather (and checksum) -> post PUT -> await the answer -> free the slots. The lane goes
on to the next gather while the answer is on its way; slots are the only bound on how far it runs ahead.
Loads: take slots -> post GET -> await the answer -> verify and scatter -> free the slots.

A lane has one GPU stream, so its gathers and scatters take turns (``_gpu``); they run on worker threads, since
they wait for the GPU. A slot is freed when the answer that names it came, not when its chunk is complete. If
no answer came, the slots belong to the connection until it is fenced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel
from anyio import to_thread
from anyio.abc import TaskGroup

from memkv_vllm.engine.api import SlotRef
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.link import ServerLink
from memkv_vllm.engine.schedule import BlockTask
from memkv_vllm.engine.staging import Slot
from memkv_vllm.engine.verify import should_verify, verify
from memkv_vllm.errors import LocalProtocolError, MemkvError, NotSent, StoreError
from memkv_vllm.protocol.checksum import ChecksumAlgorithm
from memkv_vllm.protocol.messages import BadValue, Get, GetItem, GetResult, Put, PutItem, ReportBad, Request
from memkv_vllm.types import Deadline, Direction, Extent, LossReason, Status

if TYPE_CHECKING:
    from memkv_vllm.engine.core import Chunk, EngineCore

R = TypeVar("R")
logger = logging.getLogger("memkv.engine")

SERVER_SHARE = 0.8
"""Share of a request's time that the server may use: its own 'too late' should come before ours."""

_LOAD_LOSS = {
    Status.ABSENT: LossReason.EVICTED,
    Status.BAD_LENGTH: LossReason.TOO_SHORT,
    Status.BAD_LAYOUT: LossReason.LAYOUT,
    Status.TIMEOUT: LossReason.TIMEOUT,
    Status.BUSY: LossReason.TIMEOUT,
    Status.DENIED: LossReason.REFUSED,
}
_STORE_LOSS = {
    Status.PENDING: LossReason.PENDING,
    Status.BAD_CHECKSUM: LossReason.CHECKSUM,
    Status.TIMEOUT: LossReason.TIMEOUT,
    Status.BUSY: LossReason.TIMEOUT,
    Status.TOO_LARGE: LossReason.REFUSED,
    Status.NO_SPACE: LossReason.REFUSED,
    Status.DENIED: LossReason.REFUSED,
}


@dataclass
class _Part:
    """The blocks of a chunk that one server holds. ``checksums`` for stores only."""

    link: ServerLink
    tasks: list[BlockTask]
    slots: list[Slot]
    checksums: list[int]


@dataclass
class _Landing:
    """A value that arrived: where it is and the blocks that it is for."""

    slot: Slot
    result: GetResult
    targets: list[BlockTask]


class Lane:
    """One lane; belongs to the core's event loop.

    Args:
        index: number of the lane and of its GPU stream.
        directions: what it moves.
        piece: most blocks of one chunk.
        core: what all lanes share.
    """

    def __init__(self, index: int, directions: Sequence[Direction], piece: int, core: EngineCore) -> None:
        self._index = index
        self._directions = directions
        self._piece = piece
        self._core = core
        self._gpu = anyio.Lock()

    async def run(self) -> None:
        """Take chunk after chunk until cancelled."""
        async with anyio.create_task_group() as posts:
            while True:
                chunk = self._core.take(self._directions, self._piece)
                if chunk is None:
                    await self._core.changed()
                elif chunk.direction is Direction.STORE:
                    await self._store(chunk, posts)
                else:
                    for part in self._split(chunk, []):
                        posts.start_soon(self._load, part, posts)
                    # Let the posts go out before the next chunk is taken.
                    await anyio.lowlevel.checkpoint()

    def _split(self, chunk: Chunk, checksums: Sequence[int]) -> list[_Part]:
        """By server, and no larger than it takes."""
        parts: list[_Part] = []
        filling: dict[ServerLink, _Part] = {}
        for index, (task, slot) in enumerate(zip(chunk.tasks, chunk.slots, strict=True)):
            link = self._core.owner(task)
            part = filling.get(link)
            if part is None or len(part.tasks) >= link.max_batch_keys:
                part = filling[link] = _Part(link, [], [], [])
                parts.append(part)
            part.tasks.append(task)
            part.slots.append(slot)
            part.checksums += checksums[index : index + 1]
        return parts

    # -- stores

    async def _store(self, chunk: Chunk, posts: TaskGroup) -> None:
        core, after = self._core, self._core.after(chunk.tasks)
        core.begin_touch(chunk.tasks)
        try:
            async with self._gpu:
                checksums = await to_thread.run_sync(self._gather, chunk, after)
        except Exception:
            logger.exception("event=gather_failed lane=%d blocks=%d", self._index, len(chunk.tasks))
            core.slots.release(chunk.slots)
            self._finish_all(chunk.tasks, LossReason.FAILED)
            return
        finally:
            core.end_touch(chunk.tasks)
        for part in self._split(chunk, checksums):
            posts.start_soon(self._put, part)

    def _gather(self, chunk: Chunk, after: object | None) -> list[int]:
        """On a worker thread: fill the slots and checksum them."""
        self._core.mover.gather(self._index, _refs(chunk.tasks, chunk.slots), after)
        return [self._core.slots.digest(self._index, slot) for slot in chunk.slots]

    async def _put(self, part: _Part) -> None:
        core, deadline = self._core, self._deadline(part.tasks)
        items = [
            PutItem(task.key, checksum, core.mover.layout, Extent(slot.region, slot.offset, slot.length))
            for task, slot, checksum in zip(part.tasks, part.slots, part.checksums, strict=True)
        ]
        request = Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, _server_ms(deadline))
        statuses = await self._request(part, request, deadline, list)
        if statuses is None:
            return
        # A server that gave up may go on reading, but it commits nothing of it: the slots are free all the same.
        core.slots.release(part.slots)
        for task, slot, status in zip(part.tasks, part.slots, statuses, strict=True):
            if status is Status.OK:
                core.finish(task, None, slot.length)
            elif status is Status.EXISTS:
                core.counts["already_present"] += 1
                core.finish(task, None)
            else:
                core.finish(task, _STORE_LOSS.get(status, LossReason.FAILED))
        core.report()

    # -- loads

    async def _load(self, part: _Part, posts: TaskGroup) -> None:
        core, deadline = self._core, self._deadline(part.tasks)
        items = [
            GetItem(task.key, core.mover.layout, Extent(slot.region, slot.offset, slot.length))
            for task, slot in zip(part.tasks, part.slots, strict=True)
        ]
        holder = part.link.holder
        request = Get(items, _server_ms(deadline))
        results = await self._request(part, request, deadline, lambda results: [result.status for result in results])
        if results is None:
            return
        landings = self._sort_out(part, results, holder)
        if strange := _of_another_layout(part, results):
            posts.start_soon(self._report_bad, part.link, strange)
        if landings:
            await self._land(part.link, landings, posts)
        core.report()

    def _sort_out(self, part: _Part, results: Sequence[GetResult], holder: Holder) -> list[_Landing]:
        """End what did not arrive; returns what did and is still wanted."""
        core = self._core
        landings: list[_Landing] = []
        idle: list[Slot] = []
        late: list[Slot] = []
        for task, slot, result in zip(part.tasks, part.slots, results, strict=True):
            if result.status is not Status.OK:
                core.lose(task, _LOAD_LOSS.get(result.status, LossReason.FAILED))
                (late if result.status is Status.TIMEOUT else idle).append(slot)
            elif wanted := self._wanted(task):
                landings.append(_Landing(slot, result, wanted))
            else:
                idle.append(slot)
        if idle:
            core.slots.release(idle)
        if late:
            # The server gave up on these, but their bytes may still land: only a fence ends that.
            core.slots.quarantine(late, holder)
        return landings

    def _wanted(self, task: BlockTask) -> list[BlockTask]:
        """The blocks that an arrived value is for; ends those that nobody wants any more."""
        followers = self._core.schedule.claim_followers(task)
        self._core.counts["joined"] += len(followers)
        wanted = []
        for each in (task, *followers):
            if each.cancelled is None:
                wanted.append(each)
            else:
                self._core.finish(each, each.cancelled)
        return wanted

    async def _land(self, link: ServerLink, landings: list[_Landing], posts: TaskGroup) -> None:
        core = self._core
        targets = [task for landing in landings for task in landing.targets]
        after = core.after(targets)
        core.begin_touch(targets)
        verdicts: list[LossReason | None] = [LossReason.FAILED] * len(landings)
        try:
            async with self._gpu:
                verdicts = await to_thread.run_sync(self._scatter, landings, after)
        except Exception:
            logger.exception("event=scatter_failed lane=%d blocks=%d", self._index, len(targets))
        finally:
            core.end_touch(targets)
            core.slots.release([landing.slot for landing in landings])
        bad: list[BadValue] = []
        for landing, verdict in zip(landings, verdicts, strict=True):
            first, *others = landing.targets
            core.finish(first, verdict, 0 if verdict else landing.slot.length)
            for task in others:
                core.finish(task, verdict)
            if verdict is LossReason.CHECKSUM:
                bad.append(BadValue(first.key, landing.result.generation))
        if bad:
            posts.start_soon(self._report_bad, link, bad)

    def _scatter(self, landings: list[_Landing], after: object | None) -> list[LossReason | None]:
        """On a worker thread: check each value, then scatter the good ones to all blocks that want them."""
        core = self._core
        core.slots.arrived()
        verdicts: list[LossReason | None] = []
        refs: list[SlotRef] = []
        for landing in landings:
            slot, result = landing.slot, landing.result
            checked = should_verify(core.verify_mode, next(core.verify_turns))
            arrived = partial(core.slots.digest, self._index, slot)
            verdict = verify(arrived, result.checksum, result.algorithm) if checked else None
            verdicts.append(verdict)
            if verdict is None:
                refs += [SlotRef(task.block_id, slot.region, slot.offset) for task in landing.targets]
        if refs:
            core.mover.scatter(self._index, refs, after)
        return verdicts

    async def _report_bad(self, link: ServerLink, bad: list[BadValue]) -> None:
        """Hide wrong values at the server, so that the recomputed block can be stored again."""
        logger.error(
            "event=bad_value server=%s values=%d first=%s: wrong checksum (check that server's memory) or another KV "
            "layout (set memkv_spec_prefix apart); refused, hidden at the server and recomputed",
            link.name,
            len(bad),
            bad[0].key[-16:].hex(),
        )
        try:
            await link.request(ReportBad(bad), self._core.client.deadline())
        except MemkvError as error:
            logger.warning("event=report_bad_failed server=%s reason=%r", link.name, str(error))

    # -- both

    async def _request(
        self, part: _Part, request: Request[R], deadline: Deadline, statuses: Callable[[R], list[Status]]
    ) -> R | None:
        """Post; on failure ends the tasks, deals with the slots and returns None. ``statuses`` of a reply, per slot."""
        core, link, holder = self._core, part.link, part.link.holder
        if not link.connected:
            core.slots.release(part.slots)
            self._lose_all(part.tasks, LossReason.BREAKER)
            return None
        core.slots.inflight.posted(holder, part.slots)
        core.counts["posted"] += 1
        try:
            reply = await link.request(
                request,
                deadline,
                names_memory=True,
                size_bytes=sum(slot.length for slot in part.slots),
                moved=lambda reply: statuses(reply).count(Status.OK) * part.slots[0].length,
                gave_up=lambda reply: statuses(reply).count(Status.TIMEOUT),
            )
        except (StoreError, LocalProtocolError, NotSent) as error:
            # No byte moves, now or later. A request that was not sent was neither refused nor answered.
            reason = error.reason if isinstance(error, NotSent) else LossReason.REFUSED
            logger.warning("event=refused server=%s values=%d reason=%r", link.name, len(part.tasks), str(error))
            core.slots.inflight.settled(holder, part.slots)
            core.slots.release(part.slots)
            self._lose_all(part.tasks, reason)
            return None
        except MemkvError as error:
            core.slots.abandon(holder)
            self._lose_all(part.tasks, error.reason)
            return None
        finally:
            core.counts["answered"] += 1
        if not core.slots.inflight.settled(holder, part.slots):
            # The connection was given up while this answer was on its way: the fence frees these slots at any moment.
            self._lose_all(part.tasks, LossReason.BREAKER)
            return None
        return reply

    def _finish_all(self, tasks: Sequence[BlockTask], reason: LossReason) -> None:
        for task in tasks:
            self._core.finish(task, reason)
        self._core.report()

    def _lose_all(self, tasks: Sequence[BlockTask], reason: LossReason) -> None:
        for task in tasks:
            self._core.lose(task, reason)
        self._core.report()

    def _deadline(self, tasks: Sequence[BlockTask]) -> Deadline:
        return self._core.client.deadline(Deadline(min(task.deadline for task in tasks)))


def _refs(tasks: Sequence[BlockTask], slots: Sequence[Slot]) -> list[SlotRef]:
    return [SlotRef(task.block_id, slot.region, slot.offset) for task, slot in zip(tasks, slots, strict=True)]


def _of_another_layout(part: _Part, results: Sequence[GetResult]) -> list[BadValue]:
    """Values that nobody with this layout can use: hidden, so that the recomputed block can be stored."""
    return [
        BadValue(task.key, result.generation)
        for task, result in zip(part.tasks, results, strict=True)
        if result.status is Status.BAD_LAYOUT
    ]


def _server_ms(deadline: Deadline) -> int:
    """What the server is told, in milliseconds."""
    return max(1, int(1000 * SERVER_SHARE * (deadline - time.monotonic())))
