"""The Triton kernel that moves a chunk's segments between KV rows and slots. Imported only where triton is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from memkv_vllm.integration.gather_cuda import Segments


@triton.jit(do_not_specialize=["num_blocks", "num_segments"])
def _move_segments(  # type: ignore[no-untyped-def]
    ids,
    slots,
    bases,
    strides,
    offsets,
    lengths,
    num_blocks,
    num_segments,
    GATHER: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """One program walks over work items ``(block, segment)``: all segments of a block, then the next block."""
    element = tl.arange(0, ELEMENTS)
    for item in range(tl.program_id(0), num_blocks * num_segments, tl.num_programs(0)):
        block = item // num_segments
        segment = item % num_segments
        kv = tl.load(bases + segment) + tl.load(ids + block) * tl.load(strides + segment)
        slot = tl.load(slots + block) + tl.load(offsets + segment)
        length = tl.load(lengths + segment)
        if WIDE:
            # The hints let two elements travel in one 16-byte access: addresses and the end of the mask are even.
            mask = element < tl.multiple_of(length // 8, ALIGNMENT // 8)
            kv_at = tl.multiple_of(kv.to(tl.pointer_type(tl.int64)), ALIGNMENT) + element
            slot_at = tl.multiple_of(slot.to(tl.pointer_type(tl.int64)), ALIGNMENT) + element
        else:
            mask = element < length
            kv_at = kv.to(tl.pointer_type(tl.int8)) + element
            slot_at = slot.to(tl.pointer_type(tl.int8)) + element
        if GATHER:
            tl.store(slot_at, tl.load(kv_at, mask=mask), mask=mask)
        else:
            tl.store(kv_at, tl.load(slot_at, mask=mask), mask=mask)


class MoveKernel:
    """Launches the kernel for one layout on the current stream.

    Args:
        segments: the pieces of a value.
        num_programs: programs per launch.
    """

    def __init__(self, segments: Segments, num_programs: int) -> None:
        self._segments = segments
        self._num_programs = num_programs
        # Triton compiles at the first launch of a variant; lanes launch from several threads.
        self._lock = threading.Lock()

    def launch(self, plan: torch.Tensor, num_blocks: int, slot_bits: int, gather: bool) -> None:
        """Move ``num_blocks`` blocks.

        Args:
            plan: int64 of shape (2, capacity) on the device: block ids, slot addresses.
            num_blocks: columns of the plan in use.
            slot_bits: bitwise or of all slot addresses; tells their alignment.
            gather: from the KV rows into the slots, or back.
        """
        segments = self._segments
        alignment = segments.alignment
        while slot_bits % alignment:
            alignment = {16: 8, 8: 1}[alignment]
        wide = alignment >= 8
        elements = triton.next_power_of_2(-(-segments.longest // 8) if wide else segments.longest)
        programs = min(self._num_programs, num_blocks * len(segments.bases))
        with self._lock:
            _move_segments[(programs,)](
                plan[0],
                plan[1],
                segments.bases,
                segments.strides,
                segments.offsets,
                segments.lengths,
                num_blocks,
                len(segments.bases),
                GATHER=gather,
                WIDE=wide,
                ALIGNMENT=alignment,
                ELEMENTS=elements,
                num_warps=4,
            )
