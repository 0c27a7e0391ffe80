"""What the vLLM side sees of the engine, and what the engine needs of it. Protocols and values only.

The engine knows no tensor: blocks are moved between live KV memory and staging slots by a
:class:`BlockMover`, which ``integration/`` implements for CPU and CUDA. Nor does it know what staging memory is made
of: it names slots by region, offset and length, and a :class:`StagingMedium` makes the regions and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from memkv_vllm.transports.base import Region
from memkv_vllm.types import Direction, Extent, LossReason, MemoryKind


class BlockRef(NamedTuple):
    """One block of a job: its store key prefix (namespace, hash, group) and vLLM's GPU block id."""

    prefix: bytes
    block_id: int


class SlotRef(NamedTuple):
    """Where a block is staged: byte ``offset`` in staging region ``region``; ``value_bytes`` long."""

    block_id: int
    region: int
    offset: int


class BlockMover(Protocol):
    """Copies blocks between live KV tensors and staging slots. The only code that touches KV tensors.

    ``gather`` and ``scatter`` block until the bytes are in place; the engine calls them on worker threads,
    at most one call per lane at a time, never on its event loop. They must release the interpreter lock for
    the bulk of their time. ``after`` is what the caller of ``submit_*`` passed: on CUDA an event recorded on
    the compute stream, which the lane's own stream waits for.
    """

    @property
    def value_bytes(self) -> int:
        """Bytes of one block over all layers of the group, for this rank."""
        ...

    @property
    def layout(self) -> int:
        """64-bit fingerprint of the layout as allocated (refs, page bytes, order)."""
        ...

    def attach(self, region: Region) -> None:
        """Make a staging region usable (CUDA: pin it). Called before any slot of it is used."""
        ...

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each block's pages, in layout order, into its slot."""
        ...

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each slot into its block's pages. Several blocks may name one slot."""
        ...

    def close(self) -> None:
        """Undo ``attach`` for every region. Nothing is called afterwards."""
        ...


class StagingMedium(Protocol):
    """The memory that staging slots lie in: the host's is in ``engine.medium``, a GPU's in ``integration``.

    All but ``kind`` may block and is called on worker threads, or before the loop runs and after it has ended.
    """

    @property
    def kind(self) -> MemoryKind:
        """Where it is."""
        ...

    def make_region(self, number: int, length: int) -> Region:
        """Make region ``number`` of ``length`` bytes, all zero.

        Raises:
            EnvironmentFault: there is not so much memory, or it cannot be had in the shape that transports need.
        """
        ...

    def free(self, region: Region) -> None:
        """Give a region's memory back. No transport has it registered and no mover attached any more."""
        ...

    def make_visible(self) -> None:
        """After this, what peers wrote before is what ``digest`` and a mover's ``scatter`` read.

        The engine calls it once an answer says that bytes have arrived, before anything reads them.
        """
        ...

    def digest(self, lane: int, extent: Extent) -> int:
        """The checksum (``protocol.checksum.digest``) of the bytes that the extent holds now.

        Calls of one lane come one at a time. Releases the interpreter lock for the bulk of its time.
        """
        ...

    def close(self) -> None:
        """Free everything. Nothing is called afterwards."""
        ...


@dataclass(frozen=True)
class JobResult:
    """A finished job. vLLM is always told success; what was lost stands in ``bad_block_ids`` and ``lost``."""

    job_id: int
    direction: Direction
    num_blocks: int
    moved_bytes: int
    elapsed_s: float
    bad_block_ids: tuple[int, ...] = ()
    """Loads: GPU blocks whose bytes did not arrive; vLLM recomputes them. Empty for stores."""
    lost: Mapping[LossReason, int] = field(default_factory=dict)
    """Blocks lost per reason, loads and stores."""


class EngineStatistics(NamedTuple):
    """A snapshot; counters never decrease."""

    queued_load_blocks: int
    queued_store_blocks: int
    queued_store_bytes: int
    inflight_requests: int
    slots_free: int
    slots_held: int
    slots_quarantined: int
    loaded_blocks: int
    stored_blocks: int
    already_present_blocks: int
    loaded_bytes: int
    stored_bytes: int
    joined_loads: int
    lost: Mapping[str, int]
    """Blocks lost per ``<direction>_<reason>``."""
    servers_ready: int
    reconnects: int
    fences: int
    slow_paths: int = 0
    """Times that a server's large transfers were found to be far slower than its rail should carry."""


class Engine(Protocol):
    """One rank's engine, as its vLLM worker uses it. All calls come from one thread."""

    def submit_store(self, job_id: int, blocks: Sequence[BlockRef], after: object | None = None) -> None:
        """Hand over a store; returns in microseconds, whatever the state of the network."""
        ...

    def submit_load(
        self, job_id: int, blocks: Sequence[BlockRef], after: object | None = None, *, expedited: bool = False
    ) -> None:
        """Hand over a load."""
        ...

    def poll_finished(self) -> list[JobResult]:
        """Jobs finished since the last call, each exactly once."""
        ...

    def wait(self, job_ids: set[int]) -> None:
        """Return once none of these jobs reads or writes GPU blocks any more (they may still finish later)."""
        ...

    def statistics(self) -> EngineStatistics:
        """A snapshot of counters and gauges."""
        ...

    def close(self) -> None:
        """Orderly end, bounded in time: fences, unmaps, joins the thread."""
        ...
