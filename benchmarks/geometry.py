"""What the benchmarks move: sizes, batches, working sets, keys; the grid of the comparisons with other systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memkv_vllm.keys import NAMESPACE_BYTES, block_prefix

KIB, MIB = 1 << 10, 1 << 20

SIZES = (64 * KIB, 2560 * KIB)
BATCHES = (1, 8, 32, 64)
CONCURRENCIES = (1, 4)
MAX_BATCH_BYTES = max(SIZES) * max(BATCHES)
MAX_CONCURRENCY = max(CONCURRENCIES)

LAYOUT = 7
"""Layout fingerprint of all values."""

MIN_WORKING_SET_BYTES = 64 * MIB
"""Twice the last-level cache of the machine that this was made on."""
ARENA_BYTES = 1536 * MIB
"""The largest working set, and room for the puts of one round: the store is full, every further put evicts."""


class Durations(NamedTuple):
    """Seconds of a case that are not timed, and that are."""

    warm_s: float
    timed_s: float


@dataclass(frozen=True)
class Shape:
    """How a case moves its values: ``workers`` at once, each with calls of ``batch`` values."""

    value_bytes: int
    batch: int
    workers: int

    @property
    def batch_bytes(self) -> int:
        """Payload of a call."""
        return self.batch * self.value_bytes

    @property
    def batches_per_worker(self) -> int:
        """Batches in a worker's working set: two at least, and no fewer bytes than the cache can hold."""
        return max(2, -(-MIN_WORKING_SET_BYTES // self.batch_bytes))


class KeyRing:
    """Block prefixes of a worker: fresh ones for puts, and the newest again for gets.

    Args:
        name: no two rings of one store may have the same.
        shape: batch and working set.
    """

    def __init__(self, name: str, shape: Shape) -> None:
        self._namespace = name.encode()[:NAMESPACE_BYTES].ljust(NAMESPACE_BYTES, b"-")
        self._batch = shape.batch
        self._keep = shape.batches_per_worker
        self._made = 0

    def fresh(self) -> list[bytes]:
        """The prefixes of a batch that is not in the store."""
        self._made += 1
        return self._batch_of(self._made - 1)

    def working_set(self) -> list[list[bytes]]:
        """The newest batches, which :meth:`stored` gives from now on; who asks puts those that are missing."""
        self._made = max(self._made, self._keep)
        return [self.stored(index) for index in range(self._keep)]

    def stored(self, index: int) -> list[bytes]:
        """The prefixes of one batch of the working set; successive indices go round it, oldest first."""
        return self._batch_of(self._made - self._keep + index % self._keep)

    def _batch_of(self, number: int) -> list[bytes]:
        first = number * self._batch
        return [
            block_prefix(self._namespace, index.to_bytes(32, "big"), 0) for index in range(first, first + self._batch)
        ]
