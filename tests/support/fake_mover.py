"""A BlockMover over plain arrays: CPU memory in place of GPU KV tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memkv_vllm.engine.api import SlotRef
from memkv_vllm.transports.base import Region


class ArrayMover:
    """Blocks are rows of ``blocks``; ``delay_s`` slows each gather and scatter down.

    Attributes:
        blocks: (num_blocks, value_bytes) uint8, the "GPU" memory.
        scattered: block ids in the order in which they were written.
    """

    def __init__(self, num_blocks: int, value_bytes: int, *, seed: int = 0, layout: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.blocks: npt.NDArray[np.uint8] = rng.integers(0, 256, (num_blocks, value_bytes), dtype=np.uint8)
        self.value_bytes = value_bytes
        self.layout = layout
        self.delay_s = 0.0
        self.fail = False
        self.scattered: list[int] = []
        self.gathered: list[int] = []
        self.active = 0
        self.closed = False
        self._lock = threading.Lock()
        self._regions: dict[int, npt.NDArray[np.uint8]] = {}

    def attach(self, region: Region) -> None:
        """Remember the region's bytes."""
        assert region.memory is not None
        self._regions[region.id] = region.memory.array

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Rows into slots."""
        with self._busy():
            for block_id, region, offset in blocks:
                self._regions[region][offset : offset + self.value_bytes] = self.blocks[block_id]
                self.gathered.append(block_id)

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Slots into rows."""
        with self._busy():
            for block_id, region, offset in blocks:
                self.blocks[block_id] = self._regions[region][offset : offset + self.value_bytes]
                self.scattered.append(block_id)

    def close(self) -> None:
        """Forget the regions."""
        self.closed = True
        self._regions.clear()

    def _busy(self) -> _Busy:
        if self.fail:
            raise RuntimeError("injected GPU copy failure")
        return _Busy(self)


class _Busy:
    """Counts running copies, so that a test can tell whether ``wait`` returned too early."""

    def __init__(self, mover: ArrayMover) -> None:
        self._mover = mover

    def __enter__(self) -> None:
        with self._mover._lock:
            self._mover.active += 1
        if self._mover.delay_s:
            time.sleep(self._mover.delay_s)

    def __exit__(self, *_: object) -> None:
        with self._mover._lock:
            self._mover.active -= 1
