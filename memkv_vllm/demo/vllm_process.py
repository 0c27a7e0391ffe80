"""One vLLM process of the demo: ``python -m memkv_vllm.demo.vllm_process FOLDER ROLE``.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention takes."""
PROMPT_TOKENS = (2603, 2210, 1905, 1511)
"""None is a whole number of blocks: then every block that was stored can be restored."""
ANSWER_TOKENS = 16
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
    from_store_tokens: int


@dataclass(frozen=True)
class Run:
    """All prompts, one after the other, and what the engine counted meanwhile."""

    answers: list[Answer]
    counters: dict[str, float] = field(default_factory=dict)


def prompts(vocabulary: int, lengths: Sequence[int] = PROMPT_TOKENS, seed: int = 7) -> list[list[int]]:
    """Prompts that share no prefix, the same in every process."""
    dice = random.Random(seed)
    return [[dice.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


class Engine:
    """A vLLM engine, with memkv or without, that answers one prompt at a time."""

    def __init__(self, model: Path, *, memkv: bool) -> None:
        from vllm import LLM

        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = int(config["vocab_size"])
        options: dict[str, Any] = {"kv_transfer_config": _kv_transfer_config()} if memkv else {}
        self._llm: Any = LLM(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=4096,
            disable_log_stats=False,
            enable_prefix_caching=True,
            **options,
        )

    def warm_up(self) -> None:
        """One prompt of the usual length whose blocks are not kept: first use costs more than the ones after it."""
        self._generate(prompts(self._vocabulary, PROMPT_TOKENS[:1], seed=99)[0], 2, keep=False)

    def run(self, asked: Sequence[Sequence[int]]) -> Run:
        """Answers every prompt; the counters are those of this run alone."""
        before = self._counters()
        answers = [self._generate(prompt, ANSWER_TOKENS) for prompt in asked]
        after = self._counters()
        return Run(answers, {name: after[name] - before.get(name, 0.0) for name in after})

    def settle(self, since: Mapping[str, float], stored_bytes: int) -> dict[str, float]:
        """Gives vLLM steps until ``stored_bytes`` were stored; the counters since ``since``.

        An engine inside of this process only moves on when something is asked of it.
        """
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            self._generate([3, 4, 5], 1)
            counters = {name: value - since.get(name, 0.0) for name, value in self._counters().items()}
            if counters.get("vllm:kv_offload_store_bytes", 0.0) >= stored_bytes or time.monotonic() > end:
                return counters
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

    def counters(self) -> dict[str, float]:
        """Every counter that is about offloading, as of now."""
        return self._counters()

    def _generate(self, prompt: Sequence[int], tokens: int, *, keep: bool = True) -> Answer:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=5,
            detokenize=False,
            extra_args=None if keep else {"kv_transfer_params": {"max_offload_tokens": 0}},
        )
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        answer = output.outputs[0]
        return Answer(
            tokens=list(answer.token_ids),
            logprobs=[sorted((entry.logprob for entry in step.values()), reverse=True) for step in answer.logprobs],
            first_token_s=output.metrics.first_token_latency,
            from_store_tokens=output.num_cached_tokens or 0,
        )

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None and any(word in metric.name for word in ("kv_offload", "external_prefix", "memkv")):
                labels = ",".join(
                    f"{name}={text}" for name, text in metric.labels.items() if name not in ("engine", "model_name")
                )
                found[f"{metric.name}{{{labels}}}" if labels else metric.name] = float(value)
        return found


def _kv_transfer_config() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"spec_name": "MemKVOffloadingSpec", "spec_module_path": "memkv_vllm.spec"},
    )


def _first(model: Path, tell: Teller) -> None:
    tell.note("engine 1, without memkv: the reference")
    engine = Engine(model, memkv=False)
    asked = prompts(engine._vocabulary)
    engine.warm_up()
    tell.result("reference", engine.run(asked))
    engine.close()
    tell.note("engine 1, with memkv: the same prompts, their KV blocks go to the store")
    engine = Engine(model, memkv=True)
    engine.warm_up()
    before = engine.counters()
    run = engine.run(asked)
    blocks = sum(len(prompt) // BLOCK_TOKENS for prompt in asked)
    settled = engine.settle(before, blocks * block_bytes(model))
    tell.result("stored", Run(run.answers, settled))
    engine.close()
