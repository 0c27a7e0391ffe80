"""What the scenario scripts share: the environment, the model, prompts, engines, a store that can be killed.

A scenario runs in a process of its own with the engine inside it, and writes what it saw as JSON; the test modules
beside this folder judge it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memkv_vllm.demo import generate
from memkv_vllm.demo.model import TinyLlama, write_tiny_llama

MODEL = TinyLlama()
BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention takes."""

ENVIRONMENT = generate.ENVIRONMENT | {
    "MEMKV_TRANSPORT": "loopback",
    "MEMKV_CONNECT_TIMEOUT_S": "2",
    "MEMKV_OP_TIMEOUT_S": "10",
}


@dataclass(frozen=True)
class Answer:
    """What a prompt gave: tokens, and per token the logarithms of the best probabilities; and what was cached."""

    tokens: list[int]
    logprobs: list[list[float]]
    cached: int

    def same_tokens(self, other: Answer) -> bool:
        """Whether both have the same tokens."""
        return self.tokens == other.tokens

    def distance(self, other: Answer) -> float:
        """Largest difference of a logarithm."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True))


def prompts(count: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Prompts that share no prefix, the same in every process."""
    dice = random.Random(seed)
    return [[dice.randrange(3, MODEL.vocab) for _ in range(tokens)] for _ in range(count)]


def full_blocks(tokens: int) -> int:
    """Blocks of a prompt that a second run does not compute: all full ones, but never the last token's."""
    return (tokens - 1) // BLOCK_TOKENS


def key_end(prompt: Sequence[int], block: int, shard: int) -> bytes:
    """What the store key of a rank's value of a prompt's block ends with, whatever the namespace: its hash on."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    made = Request("request", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return bytes(made.block_hashes[block]) + (0).to_bytes(2, "big") + shard.to_bytes(2, "big")


def make_engine(
    folder: Path, *, extra: dict[str, Any] | None = None, policy: str | None = "recompute", **options: Any
) -> Any:
    """A ``vllm.LLM``; with the connector unless ``extra`` is None."""
    from vllm import LLM

    if extra is not None:
        connector: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        if policy is not None:
            connector["kv_load_failure_policy"] = policy
        spec = {
            "spec_name": "MemKVOffloadingSpec",
            "spec_module_path": "memkv_vllm.spec",
            "memkv_scratch_mb_per_thread": 4,
            # Answers are compared here, not times: a busy machine must not turn a hit into a miss.
            "memkv_lookup_timeout_s": 10,
        }
        options["kv_transfer_config"] = connector | {"kv_connector_extra_config": spec | extra}
    return LLM(
        model=str(write_tiny_llama(folder / "tiny-llama", MODEL)),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=MODEL.dtype,
        block_size=BLOCK_TOKENS,
        disable_log_stats=False,
        seed=0,
        **{"max_model_len": 1024, **options},
    )


def end_engine(llm: Any) -> None:
    """Shut an in-process engine down, so that the next one may start."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def ask(llm: Any, asked: Sequence[list[int]], *, together: bool = False, tokens: int = 12) -> list[Answer]:
    """Answer prompts one after the other (bit for bit repeatable), or all in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=3, detokenize=False)
    batches = [list(asked)] if together else [[prompt] for prompt in asked]
    outputs = [
        output
        for batch in batches
        for output in llm.generate([{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False)
    ]
    return [answer_of(output) for output in outputs]


def answer_of(output: Any) -> Answer:
    """From vLLM's ``RequestOutput``."""
    made = output.outputs[0]
    logprobs = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in made.logprobs]
    return Answer(list(made.token_ids), logprobs, int(output.num_cached_tokens or 0))


def metrics(llm: Any) -> dict[str, float]:
    """Ours and the connector's counters, by name and reason."""
    found = {}
    for metric in llm.get_metrics():
        if any(word in metric.name for word in ("memkv", "kv_offload", "external", "preemptions")) and hasattr(
            metric, "value"
        ):
            reason = metric.labels.get("reason", "")
            found[metric.name.removeprefix("vllm:") + (f":{reason}" if reason else "")] = float(metric.value)
    return found


def worker_of(llm: Any) -> Any:
    """Our worker inside an in-process engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker


def manager_of(llm: Any) -> Any:
    """Our manager inside an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager


def until(done: Callable[[], bool], seconds: float = 30.0, *, step: Callable[[], object] = lambda: None) -> bool:
    """Wait for ``done``, calling ``step`` in between; whether it came true in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        step()
        time.sleep(0.01)
    return True


def settle(llm: Any) -> bool:
    """Step the idle engine until no transfer is under way."""
    core = llm.llm_engine.engine_core.engine_core
    return until(lambda: not core.scheduler.connector.has_pending_push_work(), step=llm.llm_engine.step)


class LogLines(logging.Handler):
    """Collects what the ``memkv`` loggers say."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("memkv")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")


class StoreProcess:
    """A store server that can be killed and started again on its port, empty.

    Attributes:
        environ: what makes a client use it.
    """

    def __init__(self, size: str = "64MiB") -> None:
        self._size = size
        self._key = secrets.token_hex(32)
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """Known after the first start."""
        return {"MEMKV_SERVERS": f"127.0.0.1:{self._port}", "MEMKV_AUTH_KEY": self._key}

    def start(self) -> None:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "tests.vllm.scripts.store_process", self._key, str(self._port), self._size]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._port = self._read()["port"]

    def kill(self) -> None:
        """SIGKILL: nobody is told."""
        assert self._process is not None
        process, self._process = self._process, None
        with process:
            process.kill()

    def fault(self, operation: str, action: str, arguments: dict[str, Any] | None = None, **rule: Any) -> None:
        """Add a rule to its fault plan."""
        self._tell({"fault": {"operation": operation, "action": action, "arguments": arguments or {}, "rule": rule}})

    def clear_faults(self) -> None:
        """Take all rules out."""
        self._tell({"clear": True})

    def statistics(self) -> dict[str, Any]:
        """The server's counters and gauges."""
        return self._tell({"statistics": True})

    def delete(self, key_end: bytes) -> None:
        """Delete the value whose key ends so (see :func:`key_end`), as an eviction would."""
        self._tell({"delete": key_end.hex()})

    def damage(self, key_end: bytes) -> None:
        """Flip one bit of the value whose key ends so, in the arena, behind the server's back."""
        self._tell({"damage": key_end.hex()})

    def stored(self) -> int:
        """Values that it holds."""
        return int(self.statistics()["table"]["complete"])

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the store process has ended")
        made: dict[str, Any] = json.loads(line)
        return made


def run_scenario(scenario: Callable[[Path], dict[str, Any]]) -> None:
    """``main`` of a scenario script: FOLDER OUT; results as JSON, dataclasses as objects."""
    logging.basicConfig(level=logging.WARNING)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    result = scenario(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result, default=asdict, indent=1))
    # Daemon threads of vLLM and torch hold up interpreter shutdown on a busy machine.
    sys.stdout.flush()
    os._exit(0)


def answers_from(result: list[dict[str, Any]]) -> list[Answer]:
    """Back from JSON."""
    return [Answer(**entry) for entry in result]
