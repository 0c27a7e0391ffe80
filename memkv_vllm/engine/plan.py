"""How much staging memory a rank has: the arithmetic, the start-up line and its warning. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from memkv_vllm.errors import ConfigError
from memkv_vllm.types import MemoryKind

__all__ = ["MAX_CHUNK_BLOCKS", "MIB", "StagingPlan", "budget_warning", "load_reserve", "plan_staging", "startup_line"]

MIB = 1024 * 1024
MAX_CHUNK_BLOCKS = 64
"""Largest group of blocks that one lane moves at once, whatever the budget."""


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
