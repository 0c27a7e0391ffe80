"""A second process restores what the first one stored; then a corrupted control, a full-size repeat, and a reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memkv_vllm.integration.gather import TorchMover
from tests.vllm.scripts.common import LogLines, ask, make_engine, manager_of, metrics, run_scenario, settle
from tests.vllm.scripts.reference import PROMPTS


def scenario(folder: Path) -> dict[str, Any]:
    """One engine."""
    log = LogLines()
    llm = make_engine(folder, extra={})
    result: dict[str, Any] = {"restored": ask(llm, PROMPTS), "metrics": metrics(llm)}
    llm.reset_prefix_cache()
    result["corrupted"] = with_corruption(llm)
    llm.reset_prefix_cache()
    result["restored again"] = ask(llm, PROMPTS)
    result["settled"] = settle(llm)
    before = manager_of(llm).namespace.hex()
    llm.reset_prefix_cache(reset_connector=True)
    result["reset"] = {"before": before, "after": manager_of(llm).namespace.hex()}
    result["after reset"] = ask(llm, PROMPTS[:1])
    result["log"] = log.lines
    return result


def with_corruption(llm: Any) -> Any:
    """The control: the same loads with every byte of every value inverted on the way into the KV cache."""
    scatter = TorchMover.scatter

    def inverted(self: TorchMover, lane: int, blocks: Any, after: Any) -> None:
        for block in blocks:
            piece = self._regions[block.region][block.offset : block.offset + self.value_bytes]
            piece ^= 0x80
        scatter(self, lane, blocks, after)

    TorchMover.scatter = inverted  # type: ignore[method-assign]
    try:
        return ask(llm, PROMPTS)
    finally:
        TorchMover.scatter = scatter  # type: ignore[method-assign]


if __name__ == "__main__":
    run_scenario(scenario)
