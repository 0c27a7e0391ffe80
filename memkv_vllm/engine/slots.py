"""The staging memory of a rank as its loop uses it: the regions, and which slot waits for which connection.

``staging`` knows the state of every slot and ``inflight`` which connection a slot was named over; here the two meet
the memory itself. Once most slots wait for a server that may never answer, one replacement region is made, and never
a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio
from anyio import to_thread

from memkv_vllm.engine.api import BlockMover
from memkv_vllm.engine.client import ClusterClient
from memkv_vllm.engine.inflight import Holder, InFlight
from memkv_vllm.engine.plan import StagingPlan
from memkv_vllm.engine.staging import Slot, StagingPool
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import MemoryKind

logger = logging.getLogger("memkv.engine")


class SlotKeeper:
    """See the module's text. Everything but ``prepare``, ``view`` and ``close`` belongs to the engine's loop.

    Args:
        plan: how many slots of which size.
        mover: every region is attached to it.
        client: every region is registered on its connections.
        on_change: called when slots became free.
    """

    def __init__(
        self, plan: StagingPlan, mover: BlockMover, client: ClusterClient, on_change: Callable[[], None]
    ) -> None:
        self.pool = StagingPool(plan, region=0)
        self.inflight = InFlight()
        self._plan = plan
        self._mover = mover
        self._client = client
        self._on_change = on_change
        self._memories: list[HostMemory] = []
        self._wanted = anyio.Event()

    def prepare(self) -> None:
        """Make and attach the first region. Called once, before the loop runs.

        Raises:
            EnvironmentFault: not enough memory.
        """
        self._client.regions.append(self._make_region())

    def close(self) -> None:
        """Unmap the regions, after the loop has ended and the mover was closed."""
        for memory in self._memories:
            memory.close()

    async def run(self) -> None:
        """Make the replacement region when it is wanted; ends with that."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            try:
                region = await to_thread.run_sync(self._make_region)
                break
            except Exception as error:
                # No memory, or it cannot be pinned; with the next slots in quarantine it is tried again.
                logger.error("event=no_replacement_pool reason=%r: transfers wait for the fence", str(error))
        logger.warning("event=replacement_pool bytes=%d: made while the first is in quarantine", region.length)
        await self._client.add_region(region)
        self.pool.add_region(region.id, self._plan.num_slots)
        self._on_change()

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes."""
        return self._memories[slot.region].view(slot.offset, slot.length)

    def release(self, slots: Sequence[Slot]) -> None:
        """No peer can touch these any more: give them back."""
        self.pool.release(slots)
        self._on_change()

    def abandon(self, holder: Holder) -> None:
        """A connection was given up with requests in flight: its slots stay out of everyone's hands until fenced."""
        self.quarantine(self.inflight.abandoned(holder), holder)

    def quarantine(self, slots: Sequence[Slot], holder: Holder) -> None:
        """Keep ``slots`` until ``holder`` is fenced; in the same breath in which its request returned."""
        if not slots:
            return
        self.pool.quarantine(slots, holder)
        statistics = self.pool.statistics()
        logger.warning(
            "event=quarantine server=%s generation=%d slots=%d in_quarantine=%d of=%d",
            holder.server,
            holder.generation,
            len(slots),
            statistics.quarantined,
            statistics.total,
        )
        if self.pool.mostly_quarantined:
            self._wanted.set()

    def fenced(self, holder: Holder) -> None:
        """A connection can touch nothing any more: its slots come out of quarantine."""
        if freed := self.pool.fenced(holder):
            logger.info("event=fenced server=%s generation=%d slots=%d", *holder, freed)
        self._on_change()

    def _make_region(self) -> Region:
        number = len(self._memories)
        memory = HostMemory.create(f"staging{number}", self._plan.scratch_bytes)
        region = Region(number, MemoryKind.HOST, memory.length, memory)
        try:
            memory.populate(0, memory.length)
            self._mover.attach(region)
        except BaseException:
            memory.close()
            raise
        self._memories.append(memory)
        return region
