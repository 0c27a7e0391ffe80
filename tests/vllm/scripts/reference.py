"""vLLM alone, then vLLM with memkv storing: what everything else is compared with.

``reference``: no connector; ``warm``: the same prompts again out of vLLM's own prefix cache, which computes the same
last step as a restored prompt does, so that those two must agree to the last bit. ``stored``: a new engine with
memkv and the failure policy left at its default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import LogLines, ask, end_engine, make_engine, metrics, prompts, run_scenario, settle

PROMPTS = prompts(4, 533)
CROWD = prompts(8, 250, seed=2)


def scenario(folder: Path) -> dict[str, Any]:
    """The two engines, one after the other."""
    result: dict[str, Any] = {}
    llm = make_engine(folder)
    result["reference"] = ask(llm, PROMPTS)
    result["warm"] = ask(llm, PROMPTS)
    result["crowd"] = ask(llm, CROWD, together=True, tokens=40)
    end_engine(llm)
    log = LogLines()
    llm = make_engine(folder, extra={}, policy=None)
    result["stored"] = ask(llm, PROMPTS)
    result["settled"] = settle(llm)
    result["metrics"] = metrics(llm)
    result["log"] = log.lines
    return result


if __name__ == "__main__":
    run_scenario(scenario)
