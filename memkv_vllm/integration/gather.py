"""Movers: copy blocks between the paged KV tensors and staging slots. The only code that touches KV tensors.

:class:`TorchMover` serves KV memory on the CPU; :func:`make_mover` picks it or the one for CUDA
(``gather_cuda.CudaMover``). Both are called on the engine's worker threads, block until the bytes are in place, and
release the interpreter lock while they move them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from memkv_vllm.engine.api import BlockMover, SlotRef
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.integration.layout import BlockLayout, Page
from memkv_vllm.transports.base import Region
from memkv_vllm.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Iterator

Ids = npt.NDArray[np.int64]


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


def by_region(blocks: Sequence[SlotRef]) -> Iterator[tuple[int, list[SlotRef]]]:
    """The blocks of each staging region; nearly always one region."""

    def region_of(block: SlotRef) -> int:
        return block.region

    for region, group in groupby(sorted(blocks, key=region_of), key=region_of):
        yield region, list(group)


class TorchMover:
    """Moves blocks of KV tensors in host memory: one vectorised copy per layer, whatever the number of blocks.

    Slots may lie anywhere; where their distances share a stride of at least a value (slots of a pool do), they are
    addressed as rows of one table. torch's index operations run outside the interpreter lock.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._regions: dict[int, torch.Tensor] = {}

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
        self._regions[region.id] = torch.from_numpy(region.memory.array)

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each block's pages into its slot."""
        for table, rows, ids in self._tables(blocks):
            for page in self._layout.pages:
                source, target = _columns(page, table)
                target.index_copy_(0, rows, source.index_select(0, ids))

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each slot into its block's pages."""
        for table, rows, ids in self._tables(blocks):
            for page in self._layout.pages:
                target, source = _columns(page, table)
                target.index_copy_(0, ids, source.index_select(0, rows))

    def close(self) -> None:
        """Drop the views of all regions."""
        self._regions.clear()

    def _tables(self, blocks: Sequence[SlotRef]) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per region (and, for odd offsets, per slot): a table of slots, their rows in it, and the block ids."""
        lengths = {region: len(tensor) for region, tensor in self._regions.items()}
        for region, group in by_region(blocks):
            ids, offsets = checked_plan(self._layout, group, lengths)
            staging, value = self._regions[region], self.value_bytes
            base = int(offsets.min())
            stride = math.gcd(*(offsets - base).tolist()) or value
            if stride >= value:
                rows = (offsets - base) // stride
                table = staging.as_strided((int(rows.max()) + 1, value), (stride, 1), base)
                yield table, torch.from_numpy(rows), torch.from_numpy(ids)
            else:
                for block_id, offset in zip(ids.tolist(), offsets.tolist(), strict=True):
                    table = staging.as_strided((1, value), (value, 1), offset)
                    yield table, torch.zeros(1, dtype=torch.int64), torch.tensor([block_id])


def _columns(page: Page, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page's bytes in the KV tensor and in the table of slots, as 8-byte elements where everything allows it."""
    kv = page.tensor[:, : page.page_bytes]
    slots = table[:, page.offset : page.offset + page.page_bytes]
    places = (page.page_bytes, page.row_stride, kv.data_ptr(), slots.data_ptr(), table.stride(0))
    element = torch.int64 if all(place % 8 == 0 for place in places) else torch.uint8
    return kv.view(element), slots.view(element)
