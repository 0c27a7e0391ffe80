"""What runs inside a vLLM process of the demo: ``python -m memkv_vllm.demo.generate MODEL ROLE``.

It speaks to the demo in lines of JSON: events on its standard output, and for the second role one line on its
standard input. Whatever vLLM prints goes to standard error, which the demo keeps in a file.

========  ============================================================================================
role      events
========  ============================================================================================
first     ``reference`` (no connector at all), then ``stored`` (a new engine, with memkv)
second    ``restored``; then it waits for a line, forgets its GPU cache, and asks again: ``after_damage``
========  ============================================================================================
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from memkv_vllm.demo.model import TinyLlama, write_tiny_llama

MODEL = TinyLlama(layers=8, heads=4, kv_heads=2, head_dim=64, max_positions=4096)
"""Large enough that computing a prompt takes visible time on a CPU."""

BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention takes."""
PROMPT_BLOCKS, PROMPT_REST = 81, 11
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + PROMPT_REST
"""Not a whole number of blocks: then every block that is stored is also restored."""
STEP_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
"""Most tokens that vLLM computes in one step. With this number a prompt that is computed and one that is restored have
the same last step (the rest of the prompt), so that their results are the same to the last bit. Otherwise they would
differ in the last bits, with vLLM's own prefix cache as well, because sums are added up in another order."""
NUM_PROMPTS = 4
ANSWER_TOKENS = 8
SETTLE_TIMEOUT_S = 30.0

ENVIRONMENT = {
    # One process for the whole engine, so that ending it is what ends everything that it held in memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # The block hashes of two engines agree only under one seed.
    "PYTHONHASHSEED": "0",
}
"""What both vLLM processes run with, besides the settings of memkv."""


@dataclass(frozen=True)
class Answer:
    """What a prompt gave: tokens, the logarithm of their probabilities and of the four next best, and how soon."""

    tokens: list[int]
    logprobs: list[list[float]]
    first_token_s: float


@dataclass(frozen=True)
class Run:
    """All prompts, one after the other, and what the engine counted meanwhile."""

    answers: list[Answer]
    counters: dict[str, float] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Blocks lost since the engine started, by direction and reason."""


def make_prompts(count: int = NUM_PROMPTS, seed: int = 7) -> list[list[int]]:
    """Prompts that share no prefix, the same in every process."""
    dice = random.Random(seed)
    return [[dice.randrange(3, MODEL.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class Engine:
    """A vLLM engine, with memkv or without, that answers one prompt at a time."""

    def __init__(self, model: Path, *, memkv: bool) -> None:
        from vllm import LLM

        self._memkv = memkv
        options: dict[str, Any] = {"kv_transfer_config": _kv_transfer_config()} if memkv else {}
        self._llm: Any = LLM(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=4096,
            max_num_batched_tokens=STEP_TOKENS,
            disable_log_stats=False,
            enable_prefix_caching=True,
            **options,
        )

    def warm_up(self) -> None:
        """One prompt whose blocks are not stored: what runs for the first time is slower than ever after."""
        self._generate(make_prompts(1, seed=99)[0], 2, store=False)

    def run(self, prompts: Sequence[Sequence[int]], *, stored_bytes: int = 0) -> Run:
        """Answers every prompt, then waits until ``stored_bytes`` were stored; the counters are of this run alone.

        An engine inside of its caller's process only moves on when something is asked of it, so the end of the last
        stores is waited for with prompts that are too short to be stored.
        """
        before = self._counters()
        answers = [self._generate(prompt, ANSWER_TOKENS) for prompt in prompts]
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            self._generate([3, 4, 5], 1)
            counters = {name: value - before.get(name, 0.0) for name, value in self._counters().items()}
            if counters.get("vllm:kv_offload_store_bytes", 0.0) >= stored_bytes or time.monotonic() > end:
                return Run(answers, {name: value for name, value in counters.items() if value}, self._lost())
            time.sleep(0.05)

    def forget(self) -> None:
        """Drops vLLM's own prefix cache, as a busy GPU would have."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are still in use")

    def close(self) -> None:
        """Ends the engine and frees its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def _generate(self, prompt: Sequence[int], tokens: int, *, store: bool = True) -> Answer:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
            extra_args=None if store else {"kv_transfer_params": {"max_offload_tokens": 0}},
        )
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        answer = output.outputs[0]
        return Answer(
            tokens=list(answer.token_ids),
            logprobs=[sorted((entry.logprob for entry in step.values()), reverse=True) for step in answer.logprobs],
            first_token_s=output.metrics.first_token_latency,
        )

    def _counters(self) -> dict[str, float]:
        """vLLM's own counters, as its metrics page would show them."""
        from vllm.v1.metrics.reader import Counter

        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counter):
                found[metric.name] = found.get(metric.name, 0.0) + metric.value
        return found

    def _lost(self) -> dict[str, int]:
        """What the engine counted as lost. The worker is in this process: vLLM has no metric for a worker's losses."""
        if not self._memkv:
            return {}
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        lost: dict[str, int] = connector.connector_worker.worker.statistics().lost
        return {reason: count for reason, count in lost.items() if count}


def _kv_transfer_config() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "MemKVOffloadingSpec",
            "spec_module_path": "memkv_vllm.spec",
            # The demo judges what comes back, not when: on a busy machine a late answer shall not count as a miss.
            "memkv_lookup_timeout_s": 10,
        },
    )


class Teller:
    """Sends events to the demo; vLLM's own output to standard output goes to standard error from here on."""

    def __init__(self) -> None:
        self._events: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def note(self, text: str) -> None:
        """What is about to happen."""
        self._events.write(json.dumps({"event": "note", "text": text}) + "\n")

    def result(self, name: str, run: Run) -> None:
        """What came out."""
        self._events.write(json.dumps({"event": name, "run": asdict(run)}) + "\n")


def _first(model: Path, tell: Teller) -> None:
    tell.note("starting vLLM without memkv, for the reference")
    engine = Engine(model, memkv=False)
    prompts = make_prompts()
    engine.warm_up()
    tell.note(f"reference: {len(prompts)} prompts of {PROMPT_TOKENS} tokens, computed")
    tell.result("reference", engine.run(prompts))
    engine.close()
    tell.note("starting vLLM with memkv")
    engine = Engine(model, memkv=True)
    engine.warm_up()
    tell.note("the same prompts again: computed, and their KV blocks go to the store")
    stored_bytes = len(prompts) * PROMPT_BLOCKS * BLOCK_TOKENS * MODEL.kv_bytes_per_token()
    tell.result("stored", engine.run(prompts, stored_bytes=stored_bytes))
    engine.close()


def _second(model: Path, tell: Teller) -> None:
    tell.note("starting vLLM with memkv, in a new process that has computed nothing yet")
    engine = Engine(model, memkv=True)
    prompts = make_prompts()
    engine.warm_up()
    tell.note("the same prompts: their KV blocks come from the store")
    tell.result("restored", engine.run(prompts))
    sys.stdin.readline()
    engine.forget()
    tell.note("the same prompts, while the store holds damaged values")
    tell.result("after_damage", engine.run(prompts))
    engine.close()


def main(arguments: Sequence[str]) -> None:
    """Runs one role; see the module text."""
    model, role = Path(arguments[0]), arguments[1]
    tell = Teller()
    write_tiny_llama(model, MODEL)
    if role == "first":
        _first(model, tell)
    else:
        _second(model, tell)


if __name__ == "__main__":
    main(sys.argv[1:])
