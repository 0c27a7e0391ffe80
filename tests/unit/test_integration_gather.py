"""The mover for KV tensors on the CPU, and the plan of the one for CUDA."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from memkv_vllm.engine.api import SlotRef  # noqa: E402
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError  # noqa: E402
from memkv_vllm.integration.gather import TorchMover, make_mover  # noqa: E402
from memkv_vllm.integration.gather_cuda import cut_segments  # noqa: E402
from memkv_vllm.integration.layout import BlockLayout  # noqa: E402
from memkv_vllm.transports.base import Region  # noqa: E402
from memkv_vllm.transports.memory import HostMemory  # noqa: E402
from memkv_vllm.types import MemoryKind  # noqa: E402
from tests.support.kv_tensors import SHAPES, fill, make_layout, memory_outside, slots, value_of  # noqa: E402

BLOCKS = 23
REGION_BYTES = 2**20


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    with HostMemory.create("test", REGION_BYTES) as made:
        yield made


def attached(layout: BlockLayout, memory: HostMemory) -> TorchMover:
    mover = make_mover(layout)
    assert isinstance(mover, TorchMover)
    mover.attach(Region(0, MemoryKind.HOST, memory.length, memory))
    return mover


def places(layout: BlockLayout, how: str, count: int) -> list[int]:
    """Offsets of ``count`` slots: a run, every third slot of a pool, shuffled, or anywhere."""
    value = layout.value_bytes
    if how == "run":
        return [value * index for index in range(count)]
    if how == "every third":
        return [3 * value * index + 64 for index in range(count)]
    if how == "shuffled":
        return random.Random(5).sample([value * index for index in range(2 * count)], count)
    gaps = random.Random(6)
    offsets, at = [], 1
    for _ in range(count):
        offsets.append(at)
        at += value + gaps.randrange(1, 50)
    return offsets


@pytest.mark.parametrize("how", ["run", "every third", "shuffled", "anywhere"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_makes_the_value_of_each_block(memory: HostMemory, shape: str, how: str) -> None:
    layout = make_layout(SHAPES[shape], BLOCKS)
    mover = attached(layout, memory)
    block_ids = [7, 0, 22, 3, 3]
    offsets = places(layout, how, len(block_ids))
    mover.gather(0, slots(block_ids, offsets), None)
    for block_id, offset in zip(block_ids, offsets, strict=True):
        assert memory.view(offset, layout.value_bytes).tobytes() == value_of(layout, block_id)


@pytest.mark.parametrize("how", ["run", "every third", "shuffled", "anywhere"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_restores_what_gather_took_and_touches_nothing_else(memory: HostMemory, shape: str, how: str) -> None:
    layout = make_layout(SHAPES[shape], BLOCKS)
    mover = attached(layout, memory)
    source, target = [7, 0, 22, 3], [1, 22, 4, 9]
    values = [value_of(layout, block_id) for block_id in source]
    offsets = places(layout, how, len(source))
    mover.gather(0, slots(source, offsets), None)
    fill(layout, 0x55)
    outside = memory_outside(layout, target)
    mover.scatter(1, slots(target, offsets), None)
    assert [value_of(layout, block_id) for block_id in target] == values
    assert memory_outside(layout, target) == outside


def test_several_blocks_may_be_scattered_from_one_slot(memory: HostMemory) -> None:
    layout = make_layout(SHAPES["llama"], BLOCKS)
    mover = attached(layout, memory)
    value = value_of(layout, 7)
    mover.gather(0, slots([7], [4096]), None)
    mover.scatter(0, slots([1, 2, 3], [4096, 4096, 4096]), None)
    assert [value_of(layout, block_id) for block_id in (1, 2, 3)] == [value] * 3


def test_slots_of_several_regions_in_one_call(memory: HostMemory) -> None:
    layout = make_layout(SHAPES["mixed pages"], BLOCKS)
    mover = attached(layout, memory)
    with HostMemory.create("second", 4096) as second:
        mover.attach(Region(5, MemoryKind.HOST, second.length, second))
        mover.gather(0, [SlotRef(2, 5, 288), SlotRef(4, 0, 0), SlotRef(6, 5, 0)], None)
        assert second.view(288, layout.value_bytes).tobytes() == value_of(layout, 2)
        assert second.view(0, layout.value_bytes).tobytes() == value_of(layout, 6)
        assert memory.view(0, layout.value_bytes).tobytes() == value_of(layout, 4)
        mover.close()
        assert second.array.base is not None


@pytest.mark.parametrize(
    "block",
    [
        SlotRef(BLOCKS, 0, 0),
        SlotRef(-1, 0, 0),
        SlotRef(0, 1, 0),
        SlotRef(0, 0, -1),
        SlotRef(0, 0, REGION_BYTES - 1),
    ],
    ids=["block too high", "block negative", "unknown region", "before the region", "over the end"],
)
def test_a_plan_outside_of_memory_moves_nothing(memory: HostMemory, block: SlotRef) -> None:
    layout = make_layout(SHAPES["llama"], BLOCKS)
    mover = attached(layout, memory)
    before = memory_outside(layout, [])
    with pytest.raises(LocalProtocolError):
        mover.gather(0, [SlotRef(1, 0, 0), block], None)
    with pytest.raises(LocalProtocolError):
        mover.scatter(0, [SlotRef(1, 0, 0), block], None)
    assert memory_outside(layout, []) == before
    assert not memory.array.any()


def test_an_empty_plan_is_an_error(memory: HostMemory) -> None:
    mover = attached(make_layout(SHAPES["llama"], BLOCKS), memory)
    with pytest.raises(LocalProtocolError, match="no blocks"):
        mover.gather(0, [], None)


def test_gpu_staging_for_kv_on_the_cpu_is_refused() -> None:
    mover = make_mover(make_layout(SHAPES["llama"], BLOCKS))
    with pytest.raises(EnvironmentFault, match="memkv_scratch_medium"):
        mover.attach(Region(0, MemoryKind.GPU, 4096, None, 1234, 5))


def test_close_lets_go_of_the_regions() -> None:
    memory = HostMemory.create("test", 8192)
    mover = attached(make_layout(SHAPES["llama"], BLOCKS), memory)
    mover.gather(0, slots([1], [0]), None)
    mover.close()
    memory.close()
    assert memory._map.closed


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="'meta'"):
        make_mover(make_layout(SHAPES["llama"], BLOCKS, device="meta"))


@pytest.mark.parametrize("limit", [16, 64, 16 * 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_segments_cover_the_value_once(shape: str, limit: int) -> None:
    layout = make_layout(SHAPES[shape], BLOCKS)
    segments = cut_segments(layout, torch.device("cpu"), limit)
    at = 0
    for base, stride, offset, length in zip(*(column.tolist() for column in segments[:4]), strict=True):
        assert offset == at and 0 < length <= limit
        page = next(page for page in layout.pages if page.offset <= offset < page.offset + page.page_bytes)
        assert base == page.tensor.data_ptr() + offset - page.offset and stride == page.row_stride
        assert all(place % segments.alignment == 0 for place in (base, stride, offset, length))
        at += length
    assert at == layout.value_bytes
    assert segments.longest == max(segments.lengths.tolist())


def test_segments_of_a_plain_model_are_moved_sixteen_bytes_at_a_time() -> None:
    assert cut_segments(make_layout(SHAPES["llama"], BLOCKS), torch.device("cpu")).alignment == 16
    assert cut_segments(make_layout(SHAPES["odd"], BLOCKS), torch.device("cpu")).alignment == 1
