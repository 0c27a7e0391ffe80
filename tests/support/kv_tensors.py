"""KV tensors in the shapes that vLLM makes, on any device, with random bytes. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from memkv_vllm.engine.api import SlotRef
from memkv_vllm.integration.layout import BlockLayout

SHAPES: dict[str, list[tuple[int, int, int]]] = {
    # Per layer: page bytes, bytes of a row in memory, bytes before the first row.
    "one layer": [(64, 64, 0)],
    "llama": [(512, 512, 0)] * 4,
    "mixed pages": [(96, 96, 0), (32, 32, 0), (160, 160, 0)],
    "padded": [(100, 128, 0), (100, 128, 0)],
    "odd": [(37, 41, 3), (5, 7, 1)],
    "odd rows": [(64, 72, 4)] * 2,
    "packed": [(5000, 5000, 0)],
    "large pages": [(40_000, 40_960, 64)] * 2,
}


def make_layout(
    shape: Sequence[tuple[int, int, int]], num_blocks: int, device: str = "cpu", seed: int = 0
) -> BlockLayout:
    """Tensors of ``num_blocks`` rows for ``shape``, filled with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    tensors, refs = [], []
    for index, (page, row, start) in enumerate(shape):
        length = start + num_blocks * row
        storage = torch.randint(-128, 128, (length,), dtype=torch.int8, generator=generator).to(device)
        tensors.append(SimpleNamespace(tensor=storage.as_strided((num_blocks, page), (row, 1), start)))
        refs.append(SimpleNamespace(tensor_idx=index, page_size_bytes=page))
    return BlockLayout.from_caches(SimpleNamespace(tensors=tensors, group_data_refs=[refs]), "float32")


def value_of(layout: BlockLayout, block_id: int) -> bytes:
    """The value of one block, put together byte by byte as the contract says."""
    return b"".join(bytes(page.tensor[block_id, : page.page_bytes].cpu().numpy().tobytes()) for page in layout.pages)


def fill(layout: BlockLayout, byte: int) -> None:
    """Set all KV memory, padding included, to one byte."""
    for page in layout.pages:
        page.tensor.untyped_storage().fill_(byte)


def slots(block_ids: Sequence[int], offsets: Sequence[int], region: int = 0) -> list[SlotRef]:
    """Pairs of a block and where it is staged."""
    return [SlotRef(block_id, region, offset) for block_id, offset in zip(block_ids, offsets, strict=True)]


def memory_outside(layout: BlockLayout, block_ids: Sequence[int]) -> list[Any]:
    """All bytes that a scatter into ``block_ids`` must not touch, per page."""
    parts = []
    for page in layout.pages:
        empty = torch.tensor([], dtype=torch.int8, device=page.tensor.device)
        whole = empty.set_(page.tensor.untyped_storage()).clone().cpu()
        start = page.tensor.storage_offset()
        for block_id in block_ids:
            at = start + block_id * page.row_stride
            whole[at : at + page.page_bytes] = 0
        parts.append(whole.numpy().tobytes())
    return parts
