"""TP=2, an engine core and two workers in processes of their own: store, forget, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import ask, end_engine, full_blocks, make_engine, metrics, run_scenario, until
from tests.vllm.scripts.reference import PROMPTS

BLOCK_BYTES = 131_072
"""One block of the model on both ranks."""


def scenario(folder: Path) -> dict[str, Any]:
    """One engine."""
    llm = make_engine(folder, extra={}, tensor_parallel_size=2)
    result: dict[str, Any] = {"cold": ask(llm, PROMPTS[:2])}
    ask(llm, PROMPTS[2:3])
    # Stores go out with the next step and end when both ranks' servers said so: give it steps until they all did.
    wanted = 3 * full_blocks(len(PROMPTS[0])) * BLOCK_BYTES
    result["settled"] = until(
        lambda: metrics(llm).get("kv_offload_store_bytes", 0.0) >= wanted,
        step=lambda: ask(llm, [[3, 4, 5]], tokens=1),
    )
    llm.reset_prefix_cache()
    result["restored"] = ask(llm, PROMPTS[:2])
    result["metrics"] = metrics(llm)
    # The core and its workers are processes of their own and outlive a process that just leaves.
    end_engine(llm)
    return result


if __name__ == "__main__":
    run_scenario(scenario)
