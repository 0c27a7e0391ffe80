"""Movers: copy blocks between the paged KV tensors and staging slots. The only code that touches KV tensors.

:class:`TorchMover` serves KV memory on the CPU; :func:`make_mover` picks it or the one for CUDA
(``gather_cuda.CudaMover``). Both are called on the engine's worker threads, block until the bytes are in place, and
release the interpreter lock while they move them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from memkv_vllm.engine.api import BlockMover, SlotRef
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.integration.layout import BlockLayout
from memkv_vllm.transports.base import Region
from memkv_vllm.types import MemoryKind

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def make_mover(layout: BlockLayout) -> BlockMover:
    """The mover for the device on which the KV tensors live.

    Raises:
        EnvironmentFault: a device that is neither CPU nor CUDA.
    """
    kind = layout.device.type
    if kind == "cpu":
        return TorchMover(layout)
    if kind == "cuda":
        from memkv_vllm.integration.gather_cuda import CudaMover

        return CudaMover(layout)
    raise EnvironmentFault(f"the KV cache lives on a device of type {kind!r}; memkv-vllm moves it for cpu and cuda")


def checked_plan(layout: BlockLayout, blocks: Sequence[SlotRef], lengths: dict[int, int]) -> tuple[Ids, Ids]:
    """Block ids and slot offsets of one call, after checking that every byte named lies inside its memory.

    Args:
        layout: the KV memory.
        blocks: at least one.
        lengths: bytes of each attached region.

    Returns:
        Two int64 arrays of ``len(blocks)`` elements.

    Raises:
        LocalProtocolError: a block, slot or region that does not exist.
    """
    ids = np.fromiter((block.block_id for block in blocks), dtype=np.int64, count=len(blocks))
    offsets = np.fromiter((block.offset for block in blocks), dtype=np.int64, count=len(blocks))
    if len(ids) == 0:
        raise LocalProtocolError("a gather or scatter of no blocks")
    if ids.min() < 0 or ids.max() >= layout.num_blocks:
        raise LocalProtocolError(f"GPU blocks {ids.min()} to {ids.max()}; the KV cache has {layout.num_blocks}")
    for block in blocks:
        length = lengths.get(block.region)
        if length is None:
            raise LocalProtocolError(f"staging region {block.region} was not attached")
        if block.offset < 0 or block.offset + layout.value_bytes > length:
            raise LocalProtocolError(
                f"slot at {block.offset} of {layout.value_bytes} bytes is outside region {block.region} of {length}"
            )
    return ids, offsets


def by_region(blocks: Sequence[SlotRef]) -> Iterator[tuple[int, list[int]]]:
    """Indices of the blocks in each staging region; nearly always one region."""
    members: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        members.setdefault(block.region, []).append(index)
    yield from members.items()


class TorchMover:
    """Moves blocks of KV tensors in host memory: one vectorised copy per layer, whatever the number of blocks.

    Slots may lie anywhere; where their distances share a stride of at least a value (slots of a pool do), they are
    addressed as rows of one table. The copies are numpy's, on byte rows: those run outside the interpreter lock and
    on the calling thread alone, where torch's would fight the model for the same OpenMP threads (measured on two
    busy cores: 3.7 GB/s against 0.1 to 3).
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._rows = [page.tensor[:, : page.page_bytes].numpy().view(np.uint8) for page in layout.pages]
        self._regions: dict[int, Bytes] = {}

    @property
    def value_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._layout.value_bytes

    @property
    def layout(self) -> int:
        """64-bit fingerprint of the layout."""
        return self._layout.fingerprint

    def attach(self, region: Region) -> None:
        """Map a host staging region."""
        if region.kind is not MemoryKind.HOST or region.memory is None:
            raise EnvironmentFault("KV memory on the CPU is staged in host memory; set memkv_scratch_medium to host")
        self._regions[region.id] = region.memory.array

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each block's pages into its slot."""
        for table, places, ids in self._tables(blocks):
            for page, kv in zip(self._layout.pages, self._rows, strict=True):
                table[places, page.offset : page.offset + page.page_bytes] = kv[ids]

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each slot into its block's pages."""
        for table, places, ids in self._tables(blocks):
            for page, kv in zip(self._layout.pages, self._rows, strict=True):
                kv[ids] = table[places, page.offset : page.offset + page.page_bytes]

    def close(self) -> None:
        """Drop the views of all regions and tensors."""
        self._regions.clear()
        self._rows.clear()

    def _tables(self, blocks: Sequence[SlotRef]) -> Iterator[tuple[Bytes, Ids, Ids]]:
        """Per region (and, for odd offsets, per slot): a table of slots, their rows in it, and the block ids."""
        lengths = {region: len(array) for region, array in self._regions.items()}
        ids, offsets = checked_plan(self._layout, blocks, lengths)
        value = self.value_bytes
        for region, members in by_region(blocks):
            base = int(offsets[members].min())
            distances = offsets[members] - base
            stride = math.gcd(*distances.tolist()) or value
            if stride >= value:
                yield self._table(region, base, stride, distances // stride), distances // stride, ids[members]
            else:
                first = np.zeros(1, dtype=np.int64)
                for member in members:
                    yield self._table(region, int(offsets[member]), value, first), first, ids[member : member + 1]

    def _table(self, region: int, base: int, stride: int, places: Ids) -> Bytes:
        shape = (int(places.max()) + 1, self.value_bytes)
        return np.lib.stride_tricks.as_strided(self._regions[region][base:], shape, (stride, 1))
