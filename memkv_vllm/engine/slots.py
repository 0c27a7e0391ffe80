"""The staging memory of a rank as its loop uses it: the regions, and which slot waits for which connection.

``staging`` knows the state of every slot and ``inflight`` which connection a slot was named over; here the two meet
the memory itself, which its medium makes and reads. Once most slots wait for a server that may never answer, one
replacement region is made, and never a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio
from anyio import to_thread

from memkv_vllm.engine.api import BlockMover, StagingMedium
from memkv_vllm.engine.client import ClusterClient
from memkv_vllm.engine.inflight import Holder, InFlight
from memkv_vllm.engine.plan import StagingPlan
from memkv_vllm.engine.staging import Slot, StagingPool
from memkv_vllm.transports.base import Region
from memkv_vllm.types import Extent

logger = logging.getLogger("memkv.engine")


class SlotKeeper:
    """See the module's text. Everything but ``prepare``, ``arrived``, ``digest`` and ``close`` belongs to the loop.

    Args:
        plan: how many slots of which size.
        medium: makes the regions.
        mover: every region is attached to it.
        client: every region is registered on its connections.
        on_change: called when slots became free.
    """

    def __init__(
        self,
        plan: StagingPlan,
        medium: StagingMedium,
        mover: BlockMover,
        client: ClusterClient,
        on_change: Callable[[], None],
    ) -> None:
        self.pool = StagingPool(plan, region=0)
        self.inflight = InFlight()
        self._plan = plan
        self._medium = medium
        self._mover = mover
        self._client = client
        self._on_change = on_change
        self._num_regions = 0
        self._wanted = anyio.Event()

    def prepare(self) -> None:
        """Make and attach the first region. Called once, before the loop runs.

        Raises:
            EnvironmentFault: not enough memory.
        """
        self._client.regions.append(self._make_region())

    def close(self) -> None:
        """Free the regions, after the loop has ended and the mover was closed."""
        self._medium.close()

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

    def arrived(self) -> None:
        """Bytes of peers are in slots: make sure that what reads them from now on sees them. For a worker thread."""
        self._medium.make_visible()

    def digest(self, lane: int, slot: Slot) -> int:
        """Checksum of the slot's bytes. For a worker thread."""
        return self._medium.digest(lane, Extent(slot.region, slot.offset, slot.length))

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
        region = self._medium.make_region(self._num_regions, self._plan.scratch_bytes)
        try:
            self._mover.attach(region)
        except BaseException:
            self._medium.free(region)
            raise
        self._num_regions += 1
        return region
