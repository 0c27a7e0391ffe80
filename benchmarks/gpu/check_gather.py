"""The movers for CUDA against plain torch copies, and their rates.

    python benchmarks/gpu/check_gather.py [--seconds 2] [--programs 8,16,32,64,132]

Needs a CUDA GPU and torch; the kernel also triton. First every layout, with aligned and odd slots, with and without
the kernel, both ways: the bytes must be those of a plain copy and nothing else may change. Then the rate of one
40 MiB chunk of Llama-3.1-70B at TP 8, block 16 (80 layers x 8 KiB x 64 blocks), and of the same bytes packed into one
tensor, for several numbers of programs. Exit status 1 when a byte is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from memkv_vllm.engine.api import SlotRef
from memkv_vllm.integration.gather_cuda import NUM_PROGRAMS, CudaMover
from memkv_vllm.integration.layout import BlockLayout
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import MemoryKind
from tests.support.kv_tensors import SHAPES, fill, make_layout, memory_outside, slots, value_of

DEVICE = "cuda:0"
BLOCKS = 97
CHUNK = [(8192, 8192, 0)] * 80
PACKED = [(80 * 8192, 80 * 8192, 0)]
MORE_SHAPES = {"70B": CHUNK, "70B packed": PACKED, "one byte": [(1, 1, 0)], "8 but not 16": [(24, 40, 8)] * 3}


@contextlib.contextmanager
def attached(layout: BlockLayout, length: int, **options: object) -> Iterator[tuple[CudaMover, HostMemory]]:
    """A mover with one pinned region."""
    with HostMemory.create("check", length) as memory:
        mover = CudaMover(layout, **options)  # type: ignore[arg-type]
        mover.attach(Region(0, MemoryKind.HOST, memory.length, memory))
        try:
            yield mover, memory
        finally:
            mover.close()


def places(value: int, how: str, count: int) -> list[int]:
    """Offsets of slots: as the engine's pool makes them, shuffled with gaps, or at odd addresses."""
    dice = random.Random(count)
    if how == "pool":
        return [value * index for index in range(count)]
    step = -(-value // 16) * 16 + 16
    offsets = dice.sample([step * index for index in range(2 * count)], count)
    return offsets if how == "gaps" else [offset + 1 + dice.randrange(8) for offset in offsets]


def check(name: str, shape: Sequence[tuple[int, int, int]], how: str, use_kernel: bool) -> str | None:
    """Gather, compare, scatter elsewhere, compare; what was wrong, or None."""
    layout = make_layout(shape, BLOCKS, DEVICE)
    count = 70  # More than one launch holds.
    dice = random.Random(name)
    source, target = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
    offsets = places(layout.value_bytes, how, count)
    expected = [value_of(layout, block_id) for block_id in source]
    with attached(layout, max(offsets) + layout.value_bytes + 64, use_kernel=use_kernel) as (mover, memory):
        memory.array[:] = 0x33
        mover.gather(0, slots(source, offsets), event())
        for offset, value in zip(offsets, expected, strict=True):
            if memory.view(offset, len(value)).tobytes() != value:
                return "gather: wrong bytes in a slot"
            memory.view(offset, len(value))[:] = bytes(len(value))
        if set(memory.array.tolist() if memory.length < 2**20 else memory.array[::97].tolist()) - {0, 0x33}:
            return "gather: bytes outside of the slots"
        for offset, value in zip(offsets, expected, strict=True):
            memory.view(offset, len(value))[:] = value
        fill(layout, 0x55)
        outside = memory_outside(layout, target)
        mover.scatter(1, slots(target, offsets), event())
        if [value_of(layout, block_id) for block_id in target] != expected:
            return "scatter: wrong bytes in a block"
        if memory_outside(layout, target) != outside:
            return "scatter: bytes outside of the blocks"
    return None


def check_order(use_kernel: bool) -> str | None:
    """A gather must see what the compute stream wrote before its event."""
    layout = make_layout(CHUNK, BLOCKS, DEVICE)
    with attached(layout, layout.value_bytes, use_kernel=use_kernel) as (mover, memory):
        for byte in (1, 2, 3):
            torch.cuda._sleep(50_000_000)
            fill(layout, byte)
            mover.gather(0, slots([5], [0]), event())
            if set(memory.array.tolist()) != {byte}:
                return "gather: did not wait for the compute stream"
    return None


def check_lanes() -> str | None:
    """Four lanes at once, each from a thread of its own."""
    layout = make_layout(CHUNK, BLOCKS, DEVICE)
    value = layout.value_bytes
    wrong: list[int] = []
    with attached(layout, 4 * 16 * value) as (mover, memory):

        def work(lane: int) -> None:
            for turn in range(10):
                block_ids = [(lane * 17 + turn + index) % BLOCKS for index in range(16)]
                offsets = [(lane * 16 + index) * value for index in range(16)]
                mover.gather(lane, slots(block_ids, offsets), None)
                if memory.view(offsets[3], value).tobytes() != expected[block_ids[3]]:
                    wrong.append(lane)

        expected = [value_of(layout, block_id) for block_id in range(BLOCKS)]
        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return f"lanes disturb each other: {wrong}" if wrong else None


def event() -> object:
    """What the worker passes as ``after``."""
    recorded: object = torch.cuda.current_stream().record_event()
    return recorded


def rate(
    move: Callable[[int, Sequence[SlotRef], object], None], plan: Sequence[SlotRef], seconds: float
) -> list[float]:
    """Seconds per call, after a warm-up."""
    for _ in range(5):
        move(0, plan, None)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        move(0, plan, None)
        times.append(time.perf_counter() - start)
    return times


def measure(title: str, shape: Sequence[tuple[int, int, int]], seconds: float, **options: object) -> None:
    """Print the rate of 64 blocks both ways."""
    layout = make_layout(shape, 512, DEVICE)
    count = 64
    block_ids = random.Random(0).sample(range(512), count)
    plan = slots(block_ids, [layout.value_bytes * index for index in range(count)])
    moved = layout.value_bytes * count
    with attached(layout, moved, **options) as (mover, _):
        for name, move in (("gather", mover.gather), ("scatter", mover.scatter)):
            times = rate(move, plan, seconds)
            middle = statistics.median(times)
            print(
                f"{title:<34} {name:<8} {moved / middle / 1e9:6.1f} GB/s  median {middle * 1e3:7.3f} ms "
                f"min {min(times) * 1e3:7.3f} max {max(times) * 1e3:7.3f}  {moved} bytes x {len(times)}",
                flush=True,
            )


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1.0, help="per rate")
    parser.add_argument("--programs", default=f"8,16,{NUM_PROGRAMS},64,132")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    wrong = [
        (f"{name} / {how} / {'kernel' if kernel else 'copies'}", check(name, shape, how, kernel))
        for kernel in (True, False)
        for name, shape in (SHAPES | MORE_SHAPES).items()
        for how in ("pool", "gaps", "odd")
    ]
    wrong += [(f"order / {'kernel' if kernel else 'copies'}", check_order(kernel)) for kernel in (True, False)]
    wrong.append(("lanes", check_lanes()))
    for title, fault in wrong:
        if fault:
            print(f"WRONG {title}: {fault}")
    print(f"{sum(fault is None for _, fault in wrong)} of {len(wrong)} checks passed", flush=True)
    for programs in map(int, options.programs.split(",")):
        measure(f"80 x 8 KiB, {programs} programs", CHUNK, options.seconds, num_programs=programs)
    measure(f"packed, {NUM_PROGRAMS} programs", PACKED, options.seconds)
    measure("80 x 8 KiB, copies", CHUNK, options.seconds, use_kernel=False)
    measure("packed, copies", PACKED, options.seconds, use_kernel=False)
    return int(any(fault for _, fault in wrong))


if __name__ == "__main__":
    sys.exit(main())
