"""Few GPU blocks, slow stores, preemptions and an abort: every request ends, with the answer that it has alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import (
    Answer,
    LogLines,
    StoreProcess,
    answer_of,
    ask,
    make_engine,
    metrics,
    run_scenario,
    settle,
)
from tests.vllm.scripts.reference import CROWD

GPU_BLOCKS = 28
"""One request needs 10 at its end; eight are asked at once."""


def scenario(folder: Path) -> dict[str, Any]:
    """One engine: cold under pressure with slow stores, then again out of the store."""
    store = StoreProcess()
    store.start()
    os.environ.update(store.environ)
    store.fault("pull", "Delay", {"seconds": 0.15})
    log = LogLines()
    few: dict[str, Any] = {"num_gpu_blocks_override": GPU_BLOCKS, "max_model_len": 512}
    llm = make_engine(folder, extra={"offload_prompt_only": False}, **few)
    result: dict[str, Any] = {"cold": crowd_with_an_abort(llm), "settled": settle(llm)}
    result["cold metrics"] = metrics(llm)
    store.clear_faults()
    llm.reset_prefix_cache()
    result["again"] = ask(llm, CROWD, together=True, tokens=40)
    result["metrics"] = metrics(llm)
    result["settled again"] = settle(llm)
    result["log"] = log.lines
    store.kill()
    return result


def crowd_with_an_abort(llm: Any) -> dict[str, Answer]:
    """Ask all at once; one request is aborted in the middle, one before it ever ran. By request id."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3, detokenize=False)
    for number, prompt in enumerate([*CROWD, CROWD[0][::-1], CROWD[1][::-1]]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    engine.abort_request(["9"])
    answers: dict[str, Answer] = {}
    end = time.monotonic() + 100
    while engine.has_unfinished_requests() and time.monotonic() < end:
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = answer_of(output)
        if len(answers) == 2:
            engine.abort_request(["8"])
    return answers


if __name__ == "__main__":
    run_scenario(scenario)
