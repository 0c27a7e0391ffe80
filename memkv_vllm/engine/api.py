"""What the vLLM side sees of the engine, and what the engine needs of it. Protocols and values only.

The engine knows no tensor: blocks are moved between live KV memory and staging slots by a
:class:`BlockMover`, which ``integration/`` implements for CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from memkv_vllm.transports.base import Region
from memkv_vllm.types import Direction, LossReason


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
