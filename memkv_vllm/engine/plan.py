"""How much staging memory a rank has: the arithmetic, the start-up line and its warning, a GPU's room for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from memkv_vllm.errors import ConfigError
from memkv_vllm.types import MemoryKind

__all__ = [
    "GPU_MARGIN_BYTES",
    "MAX_CHUNK_BLOCKS",
    "MIB",
    "GpuRoom",
    "StagingPlan",
    "budget_warning",
    "load_reserve",
    "misfit",
    "plan_staging",
    "startup_line",
]

MIB = 1024 * 1024
MAX_CHUNK_BLOCKS = 64
"""Largest group of blocks that one lane moves at once, whatever the budget."""

GPU_MARGIN_BYTES = 512 * MIB
"""Left alone on a GPU: CUDA graphs and libraries take memory after staging was made, and vLLM does not count all of it
in ``gpu_memory_utilization``. How much they take depends on the model; this is a choice, not a measurement."""


@dataclass(frozen=True)
class StagingPlan:
    """Lanes, chunk and slots that follow from the settings. Memory in bytes, one slot per block in a chunk.

    With ``shared`` the two directions use one pool: ``lanes_load == lanes_store == num_lanes``, ``slots_load`` is all
    of it and ``slots_store`` the most that stores may hold. Otherwise each direction has its own, and they add up.
    """

    value_bytes: int
    budget_bytes: int
    """Per lane, as configured."""
    chunk_blocks: int
    shared: bool
    lanes_load: int
    lanes_store: int
    tokens_per_block: int
    total_gpu_bytes: int | None

    @property
    def num_lanes(self) -> int:
        """All lanes."""
        return self.lanes_load if self.shared else self.lanes_load + self.lanes_store

    @property
    def num_slots(self) -> int:
        """All slots: a chunk for each lane."""
        return self.num_lanes * self.chunk_blocks

    @property
    def slots_load(self) -> int:
        """Most slots that loads may hold."""
        return self.lanes_load * self.chunk_blocks

    @property
    def slots_store(self) -> int:
        """Most slots that stores may hold."""
        return self.lanes_store * self.chunk_blocks - (load_reserve(self.num_slots) if self.shared else 0)

    @property
    def scratch_bytes(self) -> int:
        """All staging memory of the rank."""
        return self.num_slots * self.value_bytes

    @property
    def headroom(self) -> float | None:
        """Share of GPU memory that the scratch takes at the ``gpu`` medium; ``None`` where the total is not known."""
        return None if self.total_gpu_bytes is None else self.scratch_bytes / self.total_gpu_bytes

    @property
    def tokens_lost(self) -> int:
        """KV-cache tokens that the scratch displaces at the ``gpu`` medium."""
        return self.num_slots * self.tokens_per_block


@dataclass(frozen=True)
class GpuRoom:
    """The memory of a GPU at one moment, in bytes."""

    total_bytes: int
    free_bytes: int
    """Free now, for whoever asks."""
    planned_share: float | None
    """Share of the total that vLLM takes for itself, sooner or later (``gpu_memory_utilization``), or ``None``: then
    what is free now is taken for free."""

    @property
    def promised_bytes(self) -> int:
        """What vLLM has not taken yet of its share: activations of the largest batch, above all."""
        used = self.total_bytes - self.free_bytes
        return max(0, math.ceil(self.total_bytes * (self.planned_share or 0.0)) - used)

    @property
    def room_bytes(self) -> int:
        """What staging may take."""
        return max(0, self.free_bytes - self.promised_bytes - GPU_MARGIN_BYTES)


def load_reserve(num_slots: int) -> int:
    """Slots of a shared pool that only loads may use: a quarter, at least one where there are two."""
    return -(-num_slots // 4) if num_slots >= 2 else 0


def _problems(load_threads: int, store_threads: int, sizes: Mapping[str, int]) -> list[str]:
    problems = [f"{name} must be at least 1, got {size}" for name, size in sizes.items() if size < 1]
    if min(load_threads, store_threads) < 0 or (load_threads > 0) != (store_threads > 0):
        problems.append(
            "memkv_load_threads and memkv_store_threads must both be set or both be 0, "
            f"got {load_threads} and {store_threads}"
        )
    return problems


def plan_staging(
    value_bytes: int,
    num_threads: int = 4,
    scratch_mb_per_thread: int = 128,
    load_threads: int = 0,
    store_threads: int = 0,
    *,
    tokens_per_block: int,
    total_gpu_bytes: int | None = None,
) -> StagingPlan:
    """Work out the staging memory of a rank.

    Args:
        value_bytes: bytes of one block over all layers of the group for this rank, from the live tensors.
        num_threads: lanes (``memkv_num_threads``); unused when each direction has lanes of its own.
        scratch_mb_per_thread: staging budget of a lane in MiB (``memkv_scratch_mb_per_thread``).
        load_threads: lanes for loads only (``memkv_load_threads``); set together with ``store_threads`` or not at all.
        store_threads: lanes for stores only (``memkv_store_threads``).
        tokens_per_block: tokens of one block.
        total_gpu_bytes: memory of the GPU, where the share of it is wanted.

    Raises:
        ConfigError: numbers that make no pool; all problems at once.
    """
    sizes = {
        "value_bytes": value_bytes,
        "memkv_num_threads": num_threads,
        "memkv_scratch_mb_per_thread": scratch_mb_per_thread,
        "tokens_per_block": tokens_per_block,
    }
    if problems := _problems(load_threads, store_threads, sizes):
        raise ConfigError("staging", problems)
    budget = scratch_mb_per_thread * MIB
    shared = load_threads == 0
    return StagingPlan(
        value_bytes=value_bytes,
        budget_bytes=budget,
        chunk_blocks=max(1, min(budget // value_bytes, MAX_CHUNK_BLOCKS)),
        shared=shared,
        lanes_load=num_threads if shared else load_threads,
        lanes_store=num_threads if shared else store_threads,
        tokens_per_block=tokens_per_block,
        total_gpu_bytes=total_gpu_bytes,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.3f}".rstrip("0").rstrip(".") + "MiB"


def startup_line(rank: int, num_tensors: int, layers_per_block: int, plan: StagingPlan, medium: MemoryKind) -> str:
    """The line that each rank logs at start, with the field names that operators look for."""
    return (
        f"rank={rank} tensors={num_tensors} layers/block={layers_per_block} value={_mib(plan.value_bytes)} "
        f"threads={plan.num_lanes} chunk={plan.chunk_blocks} scratch={_mib(plan.scratch_bytes)} medium={medium.value}"
    )


def budget_warning(plan: StagingPlan) -> str | None:
    """The warning for a chunk of one block, which makes every transfer a round trip of its own; else ``None``."""
    if plan.chunk_blocks > 1:
        return None
    needed = math.ceil(2 * plan.value_bytes / MIB)
    return (
        f"chunk=1: memkv_scratch_mb_per_thread={plan.budget_bytes // MIB} holds "
        f"{'one block' if plan.value_bytes <= plan.budget_bytes else 'less than one block'} of "
        f"{_mib(plan.value_bytes)}, so every block is a round trip of its own; set memkv_scratch_mb_per_thread to "
        f"at least {needed} (chunk=2), better {math.ceil(8 * plan.value_bytes / MIB)} (chunk=8)"
    )


def misfit(plan: StagingPlan, room: GpuRoom) -> str | None:
    """Why a rank's staging does not fit on its GPU, with all the numbers and what to change; ``None`` if it does."""
    needed, total = plan.scratch_bytes, room.total_bytes
    if needed <= room.room_bytes:
        return None
    promised = f"{_mib(room.promised_bytes)} promised to vLLM"
    if room.planned_share is not None:
        promised += f" (gpu_memory_utilization={room.planned_share:g})"
    return (
        f"staging needs {_mib(needed)} (threads={plan.num_lanes} x chunk={plan.chunk_blocks} x "
        f"value={_mib(plan.value_bytes)}; {100 * needed / total:.2f} % of the GPU, {plan.tokens_lost} tokens of KV "
        f"cache) and {_mib(room.room_bytes)} is there for it: {_mib(total)} in all, {_mib(room.free_bytes)} free, of "
        f"it {promised} and {_mib(GPU_MARGIN_BYTES)} left for CUDA graphs and libraries; {_ways_to_fit(plan, room)}"
    )


def _ways_to_fit(plan: StagingPlan, room: GpuRoom) -> str:
    ways = []
    if room.planned_share is not None:
        # vLLM would take so much less at its next start, whether it has taken its share by now or not.
        short = plan.scratch_bytes + GPU_MARGIN_BYTES + room.promised_bytes - room.free_bytes
        share = math.floor(100 * (room.planned_share - short / room.total_bytes)) / 100
        if share > 0:
            ways.append(f"lower gpu_memory_utilization to {share:g}")
    budget = room.room_bytes // plan.num_lanes // MIB
    if budget * MIB >= plan.value_bytes:
        ways.append(f"set memkv_scratch_mb_per_thread to {budget}")
    return ", or ".join([*ways, "set memkv_scratch_medium: host"])
