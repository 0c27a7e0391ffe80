"""The mover for KV tensors on a CUDA device, with staging slots in pinned host memory or on the same device.

One kernel launch moves a whole chunk, all layers at once, straight between the paged tensors and the slots: a
value is cut into segments of at most 16 KiB, a work item is one segment of one block, and a fixed, small number of
programs walks through the items. Few programs are enough to fill the bus (each keeps 16 KiB in flight) and leave
the other multiprocessors to the model. Where triton is missing or pages are not aligned to 8 bytes, each layer is
selected on the device and copied by the copy engine instead: right, and a third as fast.

Each lane has a stream and an event of its own. A call waits for ``after`` on the stream, launches, records the
event and blocks on it; the wait is a blocking one (no spinning) and releases the interpreter lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from memkv_vllm.engine.api import SlotRef
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration.gather import Ids, by_region, checked_plan
from memkv_vllm.integration.layout import BlockLayout
from memkv_vllm.transports.base import Region
from memkv_vllm.types import MemoryKind

if TYPE_CHECKING:
    from memkv_vllm.integration.gather_kernel import MoveKernel

logger = logging.getLogger("memkv.integration.gather")

SEGMENT_BYTES = 16 * 1024
NUM_PROGRAMS = 32
"""Programs per launch; 32 of the H200's 132 multiprocessors at most. ``benchmarks/gpu/check_gather.py`` sweeps it."""

FALLBACK_STAGE_BYTES = 16 * 1024 * 1024
"""Device memory per lane of the path without the kernel."""

_REGISTER_PORTABLE_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped."""


class _DeviceBytes:
    """A region of the device's memory, as torch takes memory that is not its own. It keeps nothing alive."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.length,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


class Segments(NamedTuple):
    """A value cut into pieces, as device arrays of int64, all of one length."""

    bases: torch.Tensor
    """Address of the piece in row 0 of its KV tensor."""
    strides: torch.Tensor
    """Bytes from one block's row to the next."""
    offsets: torch.Tensor
    """Where the piece stands in the value."""
    lengths: torch.Tensor
    """Bytes of the piece."""
    alignment: int
    """16, 8 or 1: what every base, stride, offset and length is a multiple of."""
    longest: int
    """Bytes of the longest piece."""


def cut_segments(layout: BlockLayout, device: torch.device, limit: int = SEGMENT_BYTES) -> Segments:
    """Cut the pages of a value into segments of at most ``limit`` bytes."""
    rows = [
        (page.tensor.data_ptr() + start, page.row_stride, page.offset + start, min(limit, page.page_bytes - start))
        for page in layout.pages
        for start in range(0, page.page_bytes, limit)
    ]
    table = np.array(rows, dtype=np.int64)
    bits = int(np.bitwise_or.reduce(table, axis=None))
    alignment = next(size for size in (16, 8, 1) if bits % size == 0)
    columns = [torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in table.T]
    return Segments(columns[0], columns[1], columns[2], columns[3], alignment, int(table[:, 3].max()))


class _Lane:
    """What one lane keeps on the device between calls; used by one thread at a time."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.stream = torch.cuda.Stream(device)
        # Blocking: the waiting thread sleeps instead of spinning on a core that the model runner needs.
        self.done = torch.cuda.Event(blocking=True)
        self.plan_host = torch.empty((2, capacity), dtype=torch.int64, pin_memory=True)
        # On this stream: the caching allocator orders the reuse of memory only within one stream.
        with torch.cuda.stream(self.stream):
            self.plan_device = torch.empty((2, capacity), dtype=torch.int64, device=device)
        self.stage: torch.Tensor | None = None

    def load_plan(self, ids: Ids, addresses: Ids) -> torch.Tensor:
        """Copy block ids and slot addresses to the device, on this lane's stream."""
        count = len(ids)
        self.plan_host[0, :count] = torch.from_numpy(ids)
        self.plan_host[1, :count] = torch.from_numpy(addresses)
        self.plan_device.copy_(self.plan_host, non_blocking=True)
        return self.plan_device


class CudaMover:
    """See :class:`memkv_vllm.engine.api.BlockMover` and the module.

    Args:
        layout: KV tensors on one CUDA device.
        max_blocks: most blocks of one call; more are moved in several launches.
        num_programs: programs per launch.
        use_kernel: False forces the path without the kernel.
    """

    def __init__(
        self, layout: BlockLayout, *, max_blocks: int = 64, num_programs: int = NUM_PROGRAMS, use_kernel: bool = True
    ) -> None:
        self._layout = layout
        self._device = layout.device
        self._max_blocks = max_blocks
        self._num_programs = num_programs
        self._lanes: dict[int, _Lane] = {}
        self._lanes_lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._starts: dict[int, int] = {}
        self._slots: dict[int, torch.Tensor] = {}
        """The same as tensors of bytes, for the path without the kernel."""
        with torch.cuda.device(self._device):
            self._segments = cut_segments(layout, self._device)
            self._kernel = self._make_kernel() if use_kernel else None

    def _make_kernel(self) -> MoveKernel | None:
        try:
            from memkv_vllm.integration.gather_kernel import MoveKernel
        except ImportError as error:
            logger.warning(
                "event=no_gather_kernel reason=%r: pages are copied layer by layer, about a third as fast; "
                "install triton",
                str(error),
            )
            return None
        if self._segments.alignment < 8:
            logger.warning(
                "event=unaligned_pages: KV pages are not multiples of 8 bytes; the slower byte kernel is used"
            )
        return MoveKernel(self._segments, self._num_programs)

    @property
    def value_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._layout.value_bytes

    @property
    def layout(self) -> int:
        """64-bit fingerprint of the layout."""
        return self._layout.fingerprint

    def attach(self, region: Region) -> None:
        """Make a staging region known: pin a host's, so that the device reads and writes it directly; take a GPU's.

        Raises:
            EnvironmentFault: CUDA refuses to pin it.
        """
        if region.kind is MemoryKind.GPU:
            self._starts[region.id] = region.address
            self._slots[region.id] = torch.as_tensor(_DeviceBytes(region), device=self._device)
        else:
            self._starts[region.id], self._slots[region.id] = self._pin(region)
        self._regions[region.id] = region

    def _pin(self, region: Region) -> tuple[int, torch.Tensor]:
        assert region.memory is not None
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(
                region.memory.address, region.length, _REGISTER_PORTABLE_MAPPED
            )
        if int(error) != 0:
            raise EnvironmentFault(
                f"CUDA cannot pin {region.length / 2**20:.1f} MiB of staging memory (cudaHostRegister: error "
                f"{int(error)}); raise the memlock limit (ulimit -l unlimited; docker run --ulimit memlock=-1) or "
                "lower memkv_scratch_mb_per_thread"
            )
        return region.memory.address, torch.from_numpy(region.memory.array)

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each block's pages into its slot; returns when the bytes are there."""
        self._move(lane, blocks, after, gather=True)

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Copy each slot into its block's pages; returns when the bytes are there."""
        self._move(lane, blocks, after, gather=False)

    def close(self) -> None:
        """Wait for all lanes and let go of every region; those of the host are unpinned."""
        with torch.cuda.device(self._device):
            for lane in self._lanes.values():
                lane.stream.synchronize()
            self._lanes.clear()
            self._slots.clear()
            for region in self._regions.values():
                if region.memory is not None and not region.memory.closed:
                    torch.cuda.cudart().cudaHostUnregister(region.memory.address)
            self._regions.clear()

    def _move(self, lane: int, blocks: Sequence[SlotRef], after: object | None, *, gather: bool) -> None:
        lengths = {number: region.length for number, region in self._regions.items()}
        # Checked as a whole first: a bad plan moves nothing.
        ids, offsets = checked_plan(self._layout, blocks, lengths)
        with torch.cuda.device(self._device):
            state = self._lane(lane)
            with torch.cuda.stream(state.stream):
                if after is not None:
                    state.stream.wait_event(after)
                try:
                    if self._kernel is not None:
                        self._run_kernel(state, self._kernel, blocks, ids, offsets, gather)
                    else:
                        for region, members in by_region(blocks):
                            group = [blocks[index] for index in members]
                            self._copy_by_layer(state, self._slots[region], group, gather)
                finally:
                    # Also after an error: what was launched may still move bytes, and the caller frees the slots.
                    state.done.record(state.stream)
                    state.done.synchronize()

    def _lane(self, lane: int) -> _Lane:
        with self._lanes_lock:
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(self._device, self._max_blocks)
            return self._lanes[lane]

    def _run_kernel(
        self, state: _Lane, kernel: MoveKernel, blocks: Sequence[SlotRef], ids: Ids, offsets: Ids, gather: bool
    ) -> None:
        starts = np.fromiter((self._starts[block.region] for block in blocks), dtype=np.int64, count=len(blocks))
        addresses = starts + offsets
        for first in range(0, len(ids), self._max_blocks):
            if first:
                # The plan's host copy is about to be written again.
                state.stream.synchronize()
            part = slice(first, first + self._max_blocks)
            plan = state.load_plan(ids[part], addresses[part])
            kernel.launch(plan, len(ids[part]), int(np.bitwise_or.reduce(addresses[part])), gather)

    def _copy_by_layer(self, state: _Lane, region: torch.Tensor, group: Sequence[SlotRef], gather: bool) -> None:
        """Without the kernel: select each layer's rows on the device, and one copy per block over the bus."""
        value = self.value_bytes
        rows = max(1, min(self._max_blocks, FALLBACK_STAGE_BYTES // value))
        if state.stage is None:
            state.stage = torch.empty((rows, value), dtype=torch.int8, device=self._device)
        for first in range(0, len(group), rows):
            part = group[first : first + rows]
            ids = torch.tensor([block.block_id for block in part], dtype=torch.int64).to(self._device)
            stage = state.stage[: len(part)]
            slots = [region[block.offset : block.offset + value].view(torch.int8) for block in part]
            if gather:
                self._select(stage, ids)
                for row, slot in zip(stage, slots, strict=True):
                    slot.copy_(row, non_blocking=True)
            else:
                for row, slot in zip(stage, slots, strict=True):
                    row.copy_(slot, non_blocking=True)
                for page in self._layout.pages:
                    source = stage[:, page.offset : page.offset + page.page_bytes]
                    page.tensor[:, : page.page_bytes].index_copy_(0, ids, source)

    def _select(self, stage: torch.Tensor, ids: torch.Tensor) -> None:
        for page in self._layout.pages:
            rows: Any = page.tensor[:, : page.page_bytes].index_select(0, ids)
            stage[:, page.offset : page.offset + page.page_bytes].copy_(rows)
