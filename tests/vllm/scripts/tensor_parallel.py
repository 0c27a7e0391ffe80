"""TP=2, an engine core and two workers in processes of their own: store, forget, restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import ask, end_engine, make_engine, metrics, run_scenario
from tests.vllm.scripts.reference import PROMPTS


def scenario(folder: Path) -> dict[str, Any]:
    """One engine."""
    llm = make_engine(folder, extra={}, tensor_parallel_size=2)
    result: dict[str, Any] = {"cold": ask(llm, PROMPTS[:2])}
    llm.reset_prefix_cache()
    # The last stores of a request go out with the next step; another prompt makes it.
    ask(llm, PROMPTS[2:3])
    llm.reset_prefix_cache()
    result["restored"] = ask(llm, PROMPTS[:2])
    result["metrics"] = metrics(llm)
    # The core and its workers are processes of their own and outlive a process that just leaves.
    end_engine(llm)
    return result


if __name__ == "__main__":
    run_scenario(scenario)
