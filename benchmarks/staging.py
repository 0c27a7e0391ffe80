"""Memory to put from and to get into, with bytes that are not all the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.geometry import MAX_BATCH_BYTES, MAX_CONCURRENCY, MIB
from memkv_vllm.transports.memory import HostMemory

_PATTERN_BYTES = 41 * MIB
"""No multiple of a value's size: values at different places differ."""


def fill(array: npt.NDArray[np.uint8]) -> None:
    """Random bytes, the same each time."""
    pattern = np.frombuffer(np.random.default_rng(0).bytes(min(_PATTERN_BYTES, len(array))), np.uint8)
    for start in range(0, len(array), len(pattern)):
        array[start : start + len(pattern)] = pattern[: len(array) - start]


def staging_memory(name: str) -> HostMemory:
    """Memory for the largest batch of every worker, backed by pages."""
    memory = HostMemory.create(name, MAX_BATCH_BYTES * MAX_CONCURRENCY)
    memory.populate(0, memory.length)
    fill(memory.array)
    return memory
