"""Hit ratios of the eviction policies on traces in the shape of prompts, over the store's own table and allocator.

Each trace is a sequence of prompts, each a run of blocks. A prompt is looked up block by block as an engine does it:
the leading blocks that exist are read, the others are computed and put. Reported is the part of all blocks that was
read, and the time that the table took for each block.

    .venv/bin/python benchmarks/bench_eviction.py [--blocks 20000] [--requests 6000] [--seed 1]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.policies import POLICIES
from memkv_vllm.store.table import Table, TableLimits
from memkv_vllm.types import Status

VALUE_BYTES = 256 << 10
BLOCKS_PER_PROMPT = 32
Trace = Callable[[random.Random, int, int], Iterator[list[int]]]


def key(block: int) -> bytes:
    """A store key of 71 bytes."""
    return b"\x01" + bytes(32) + block.to_bytes(32, "big") + bytes(4)


def zipf(dice: random.Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws of ``0 .. count - 1`` with Zipf's law."""
    weights = list(itertools.accumulate((n + 1) ** -exponent for n in range(count)))
    return lambda: dice.choices(range(count), cum_weights=weights)[0]


def popular(dice: random.Random, blocks: int, requests: int) -> Iterator[list[int]]:
    """Prompts of a Zipf popularity (0.9), four times as many as fit."""
    prompts = 4 * blocks // BLOCKS_PER_PROMPT
    draw = zipf(dice, prompts, 0.9)
    for _ in range(requests):
        first = draw() * BLOCKS_PER_PROMPT
        yield list(range(first, first + BLOCKS_PER_PROMPT))


def popular_and_scan(dice: random.Random, blocks: int, requests: int) -> Iterator[list[int]]:
    """The same, and half of the requests are prompts that never come back: a batch job beside a chat service."""
    unique = 1 << 40
    for prompt in popular(dice, blocks, requests):
        yield prompt
        yield list(range(unique, unique + BLOCKS_PER_PROMPT))
        unique += BLOCKS_PER_PROMPT


def conversations(dice: random.Random, blocks: int, requests: int) -> Iterator[list[int]]:
    """Conversations that grow by four blocks a turn and come back ten times, some hundred at a time; then never."""
    live: list[list[int]] = []
    unique = 0
    for _ in range(requests):
        if len(live) < 2 * blocks // BLOCKS_PER_PROMPT and (not live or dice.random() < 0.1):
            live.append([])
        turn = dice.choice(live)
        turn.extend(range(unique, unique + 4))
        unique += 4
        yield turn
        if len(turn) >= 40:
            live.remove(turn)


def shifting(dice: random.Random, blocks: int, requests: int) -> Iterator[list[int]]:
    """Popularity that moves on: each tenth of the requests has favourites of its own."""
    for part in range(10):
        for prompt in popular(dice, blocks, requests // 10):
            yield [block + part * (1 << 32) for block in prompt]


TRACES: dict[str, Trace] = {
    "popular": popular,
    "popular and scan": popular_and_scan,
    "conversations": conversations,
    "shifting": shifting,
}


def replay(policy: str, trace: Iterator[list[int]], blocks: int) -> dict[str, Any]:
    """Runs one trace; a row of figures."""
    limits = TableLimits(high_watermark=0.95, low_watermark=0.90)
    table = Table(ArenaAllocator(blocks * VALUE_BYTES), POLICIES[policy](), limits)
    asked = read = 0
    began = time.process_time()
    for prompt in trace:
        found = table.exists([key(block)[:-2] for block in prompt], 1, 0.0)
        hits = found.index(0) if 0 in found else len(prompt)
        asked, read = asked + len(prompt), read + hits
        for block in prompt[:hits]:
            pinned = table.pin(key(block), VALUE_BYTES, 0, 0.0)
            table.unpin(key(block), pinned.generation)
        for block in prompt[hits:]:
            reserved = table.reserve(key(block), VALUE_BYTES, 0, 0, 0, "", 0.0)
            if reserved.status is Status.OK:
                table.commit(key(block), reserved.generation)
    spent_s = time.process_time() - began
    return {"blocks_asked": asked, "hit_ratio": round(read / asked, 4), "cpu_us_per_block": spent_s / asked * 1e6}


def main() -> None:
    """Prints one JSON row per trace and policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks that the arena holds")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name, trace in TRACES.items():
        for policy in POLICIES:
            dice = random.Random(options.seed)
            row = replay(policy, trace(dice, options.blocks, options.requests), options.blocks)
            print(json.dumps({"trace": name, "policy": policy, **row}))


if __name__ == "__main__":
    main()
