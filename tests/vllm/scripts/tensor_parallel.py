"""TP=2, twice, on one store that outlives both: an engine core and two workers each, all in processes of their own.

The first engine stores, forgets and restores. The second, which has computed nothing, restores what the first one
stored; then it meets a block of which one rank's value is missing, and one of which one rank's value is damaged.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import (
    StoreProcess,
    ask,
    end_engine,
    full_blocks,
    key_end,
    make_engine,
    metrics,
    run_scenario,
    until,
)
from tests.vllm.scripts.reference import PROMPTS

BLOCK_BYTES = 131_072
"""One block of the model on both ranks."""
BLOCKS = full_blocks(len(PROMPTS[0]))
NUM_PROMPTS = 3
VALUES = 2 * NUM_PROMPTS * BLOCKS

MISSING_BLOCK, MISSING_RANK = 5, 1
"""Of the second prompt."""
DAMAGED_BLOCK, DAMAGED_RANK = 7, 0
"""Of the third prompt."""


def scenario(folder: Path) -> dict[str, Any]:
    """The two engines, one after the other."""
    store = StoreProcess()
    store.start()
    os.environ.update(store.environ)
    result = first_engine(folder)
    result["store"] = store.statistics()
    store.delete(key_end(PROMPTS[1], MISSING_BLOCK, MISSING_RANK))
    store.damage(key_end(PROMPTS[2], DAMAGED_BLOCK, DAMAGED_RANK))
    result |= second_engine(folder, store)
    store.kill()
    return result


def first_engine(folder: Path) -> dict[str, Any]:
    """Compute, store, forget, restore."""
    llm = make_engine(folder, extra={}, tensor_parallel_size=2)
    result: dict[str, Any] = {"cold": ask(llm, PROMPTS[:NUM_PROMPTS])}
    # Stores go out with the next step and end when both ranks' servers said so: give it steps until they all did.
    result["settled"] = until(
        lambda: metrics(llm).get("kv_offload_store_bytes", 0.0) >= NUM_PROMPTS * BLOCKS * BLOCK_BYTES,
        step=lambda: a_step(llm),
    )
    llm.reset_prefix_cache()
    result["restored"] = ask(llm, PROMPTS[:2])
    # The core and its workers are processes of their own and outlive a process that just leaves.
    end_engine(llm)
    return result


def second_engine(folder: Path, store: StoreProcess) -> dict[str, Any]:
    """Restore what other processes stored; one value of the store is missing by now, and one is damaged."""
    llm = make_engine(folder, extra={}, tensor_parallel_size=2)
    result: dict[str, Any] = {"second": ask(llm, PROMPTS[:1])}

    result["incomplete"] = ask(llm, PROMPTS[1:2])
    result["metrics"] = metrics(llm)
    result["completed"] = until(lambda: store.stored() == VALUES, step=lambda: a_step(llm))
    llm.reset_prefix_cache()
    result["complete again"] = ask(llm, PROMPTS[1:2])

    result["damaged"] = ask(llm, PROMPTS[2:3])
    result["hidden"] = until(lambda: store.stored() == VALUES - 1, step=lambda: a_step(llm))
    llm.reset_prefix_cache()
    result["after the damage"] = ask(llm, PROMPTS[2:3])
    end_engine(llm)
    return result


def a_step(llm: Any) -> None:
    """Let the engine move on, with a prompt that is too short to be stored."""
    ask(llm, [[3, 4, 5]], tokens=1)


if __name__ == "__main__":
    run_scenario(scenario)
