"""Restores on a real GPU: the real vLLM over a memkv store in another process, beside vLLM's own CPU offload.

    python benchmarks/gpu/restore.py [--layers 32] [--tokens 4000,16000] [--out result.json]

Needs a CUDA GPU, vLLM's CUDA build and this package importable; no network. The model has the shape of
Llama-3.1-8B and real random weights (written over vLLM's dummy ones, the same in every process): with dummy
weights outputs do not depend on the KV cache at all.

What it shows, each engine in a process of its own:

1. ``write``: time to first token recomputed, with a GPU prefix hit, and restored after ``reset_prefix_cache``.
2. ``restore``: a new process restores everything; tokens and logprobs must equal those of the prefix hit.
3. ``cold``: a new process in a namespace of its own, where nothing is stored: everything is computed.
4. ``unverified``: every stored value damaged and ``memkv_verify: off``: tokens must differ. The control: it
   proves that the loaded bytes are used at all.
5. ``damaged``: the same with ``memkv_verify: full``: refused and recomputed; tokens and logprobs must equal those of
   ``cold``. (Not those of the prefix hit: in each prompt one block was seen to differ, as steps of another size round
   otherwise.)
6. ``cpu``: vLLM's own CPU offload, timed in the same run.

Exit status 1 when any of that is untrue. Times are printed with their spread and never judged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PORT = 19950
REPEATS = 5
ANSWER_TOKENS = 12
START_S = 60.0
LOGPROB_TOLERANCE = 1e-4
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}


def model_config(layers: int) -> dict[str, Any]:
    """Llama-3.1-8B's shape with ``layers`` layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def randomise(model: Any) -> int:
    """Real random weights, the same in every process; sharp queries and keys, so that wrong KV shows at once."""
    import torch

    count = 0
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            gain = 3.0 if "lm_head" in name else 1.0
            scale = gain if "embed" in name else gain / parameter.shape[1] ** 0.5
            parameter.normal_(0.0, scale, generator=generator)
            if "qkv_proj" in name:
                parameter[: 40 * 128] *= 2.0
        count += parameter.numel()
    return count


class Engine:
    """One vLLM engine in this process."""

    def __init__(self, folder: Path, transfer: dict[str, Any] | None, max_tokens: int) -> None:
        from vllm import LLM

        options = {} if transfer is None else {"kv_transfer_config": transfer}
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=16,
            max_model_len=max_tokens + 64,
            gpu_memory_utilization=0.6,
            attention_config={"backend": os.environ.get("ATTENTION", "FLASH_ATTN")},
            enable_prefix_caching=True,
            disable_log_stats=False,
            **options,
        )
        self.llm.apply_model(randomise)

    def ask(self, prompt: Sequence[int], tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
        """Greedy tokens, their logprobs, and seconds to the first token as the caller sees them."""
        from vllm import SamplingParams

        begun = time.perf_counter()
        self.llm.generate(
            [{"prompt_token_ids": list(prompt)}],
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        first_token_s = time.perf_counter() - begun
        (output,) = self.llm.generate(
            [{"prompt_token_ids": list(prompt)}],
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1, detokenize=False),
            use_tqdm=False,
        )
        answer = output.outputs[0]
        return {
            "first_token_s": first_token_s,
            "tokens": list(answer.token_ids),
            "logprobs": [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)],
        }

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds of a one-token answer."""
        from vllm import SamplingParams

        begun = time.perf_counter()
        self.llm.generate(
            [{"prompt_token_ids": list(prompt)}],
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return time.perf_counter() - begun

    def counters(self) -> dict[str, float]:
        """vLLM's counters about offloading and external hits."""
        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None and ("offload" in metric.name or "external" in metric.name or "memkv" in metric.name):
                label = ",".join(v for k, v in sorted(metric.labels.items()) if k not in ("engine", "model_name"))
                values[metric.name + (f"[{label}]" if label else "")] = value
        return values

    def settle(self, seconds: float) -> None:
        """Give the engine steps, so that stores are submitted and their ends are noticed."""
        end = time.monotonic() + seconds
        dice = random.Random(time.monotonic_ns())
        while time.monotonic() < end:
            self.first_token_s([dice.randrange(3, 1000) for _ in range(5)])
            time.sleep(0.02)

    def forget(self) -> None:
        """Drop the GPU's prefix cache, as a busy GPU would have."""
        for _ in range(200):
            if self.llm.reset_prefix_cache():
                return
            self.settle(0.05)
        raise RuntimeError("vLLM did not reset its prefix cache")


def prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts that share no prefix; the same in every process."""
    dice = random.Random(seed)
    return [[dice.randrange(3, 128000) for _ in range(length)] for length in lengths]


def memkv_transfer(**extra: Any) -> dict[str, Any]:
    """The kv_transfer_config for memkv."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "MemKVOffloadingSpec",
            "spec_module_path": "memkv_vllm.spec",
            **extra,
        },
    }


EXTRA: dict[str, dict[str, Any]] = {
    "cold": {"memkv_spec_prefix": "cold"},
    "unverified": {"memkv_verify": "off"},
}
"""What the phases set beside the defaults."""

CPU_TRANSFER: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 30},
}


def phase_timed(engine: Engine, lengths: Sequence[int]) -> dict[str, Any]:
    """Recompute, GPU hit and restore after a reset, for each length."""
    result: dict[str, Any] = {}
    for prompt in prompts(lengths, 99):
        engine.first_token_s(prompt)
    for index, length in enumerate(lengths):
        fresh = [engine.first_token_s(prompts([length], 1000 + 10 * index + n)[0]) for n in range(3)]
        (prompt,) = prompts([length], 7 + index)
        engine.first_token_s(prompt)
        engine.settle(1.5)
        hit = [engine.first_token_s(prompt) for _ in range(REPEATS)]
        reference = engine.ask(prompt)
        restored = []
        for _ in range(REPEATS):
            engine.forget()
            restored.append(engine.first_token_s(prompt))
        result[str(length)] = {
            "recomputed_s": fresh,
            "gpu_hit_s": hit,
            "restored_s": restored,
            "reference": reference,
        }
    engine.settle(3.0)
    return result


def phase_ask(engine: Engine, lengths: Sequence[int]) -> dict[str, Any]:
    """One cold question per length: what comes back from the store decides."""
    return {str(length): engine.ask(prompts([length], 7 + index)[0]) for index, length in enumerate(lengths)}


def child(role: str, folder: Path, lengths: Sequence[int], result_fd: int) -> None:
    """One engine process; the result is JSON on ``result_fd``."""
    transfer = memkv_transfer(**EXTRA.get(role, {})) if role != "cpu" else CPU_TRANSFER
    engine = Engine(folder, transfer, max(lengths))
    engine.settle(0.5)
    answers = (phase_timed if role in ("write", "cpu") else phase_ask)(engine, lengths)
    engine.settle(0.5)
    with os.fdopen(result_fd, "w") as out:
        json.dump({"answers": answers, "counters": engine.counters()}, out)


def run_child(role: str, folder: Path, lengths: Sequence[int], environment: dict[str, str], logs: Path) -> Any:
    """Start a phase, wait, and return what it found."""
    read, write = os.pipe()
    begun = time.monotonic()
    with open(logs / f"{role}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--role", role, "--folder", str(folder), "--result-fd", str(write)]
            + ["--tokens", ",".join(map(str, lengths))],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(write,),
        )
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    status = process.wait()
    print(f"phase {role}: {time.monotonic() - begun:.1f} s, exit {status}", flush=True)
    if status or not text:
        tail = (logs / f"{role}.log").read_text(errors="replace").splitlines()[-60:]
        raise SystemExit(f"phase {role} failed:\n" + "\n".join(tail))
    return json.loads(text)


def start_store(key_file: Path, log_file: Path) -> subprocess.Popen[bytes]:
    """The store, once clients may come; it raises if the store ended or did not come up."""
    with open(log_file, "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "memkv_vllm", "start", "--dev", "--address", f"127.0.0.1:{PORT}"]
            + ["--max-size", "16GiB", "--key-file", str(key_file)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    until = time.monotonic() + START_S
    while b"\nready " not in b"\n" + log_file.read_bytes():
        if server.poll() is not None or time.monotonic() > until:
            server.kill()
            raise SystemExit("the store did not start:\n" + log_file.read_text(errors="replace"))
        time.sleep(0.1)
    return server


def damage(pid: int) -> int:
    """Flip a high bit in every page of the store's arena; returns how many bytes were changed."""
    import mmap

    import numpy as np

    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:memkv-arena" in os.readlink(link):
            with open(link, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
                pages = np.frombuffer(view, dtype=np.uint8)[1::4096]
                used = np.flatnonzero(pages)
                pages[used] ^= 0x40
                count = int(used.size)
                del pages
            return count
    raise RuntimeError("the store's arena was not found")


def check(found: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    """What is untrue."""
    wrong = []
    for length in map(str, lengths):
        hit, cold = found["write"]["answers"][length]["reference"], found["cold"]["answers"][length]
        for role, reference, same in (("restore", hit, True), ("damaged", cold, True), ("unverified", hit, False)):
            answer = found[role]["answers"][length]
            equal = answer["tokens"] == reference["tokens"]
            if equal is not same:
                wrong.append(f"{role}, {length} tokens: answers are {'equal' if equal else 'different'}")
            if same:
                delta = max(abs(a - b) for a, b in zip(answer["logprobs"], reference["logprobs"], strict=True))
                what = "the GPU prefix hit" if reference is hit else "computing it"
                print(f"{role} {length}: max |difference of logprobs| to {what} {delta:.2e}")
                if delta > LOGPROB_TOLERANCE:
                    wrong.append(f"{role}, {length} tokens: logprobs differ by {delta:.2e}")
    return wrong


def show(found: dict[str, Any], lengths: Sequence[int]) -> None:
    """The table: medians with minimum and maximum, in milliseconds."""

    def cell(values: Sequence[float]) -> str:
        ms = [1000 * value for value in values]
        return f"{statistics.median(ms):8.1f} ({min(ms):.1f}-{max(ms):.1f})"

    print(f"{'tokens':>7} {'':10} {'recomputed ms':>24} {'GPU prefix hit ms':>24} {'restored ms':>24}")
    for role in ("write", "cpu"):
        for length in map(str, lengths):
            row = found[role]["answers"][length]
            cells = "".join(f"{cell(row[name]):>25}" for name in ("recomputed_s", "gpu_hit_s", "restored_s"))
            print(f"{length:>7} {'memkv' if role == 'write' else 'vLLM CPU':10}{cells}")
    for role in ("restore", "cold", "damaged", "unverified"):
        times = {n: round(1000 * found[role]["answers"][str(n)]["first_token_s"], 1) for n in lengths}
        print(f"{role}: first token in a new process, ms: {times}")
        print(f"   counters: {json.dumps(found[role]['counters'])}")


def main() -> None:
    """Run all phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--result-fd", type=int)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", default="4000,16000")
    parser.add_argument("--out", type=Path, help="Where to write the figures as JSON; logs go beside it.")
    options = parser.parse_args()
    lengths = [int(text) for text in options.tokens.split(",")]
    if options.role:
        child(options.role, options.folder, lengths, options.result_fd)
        return
    work = Path(tempfile.mkdtemp(prefix="memkv-gpu-"))
    logs = options.out.parent if options.out else work
    (work / "config.json").write_text(json.dumps(model_config(options.layers)))
    key_file = work / "key"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "MEMKV_SERVERS": f"127.0.0.1:{PORT}",
        "MEMKV_AUTH_KEY_FILE": str(key_file),
        "MEMKV_TRANSPORT": "loopback",
    }
    server = start_store(key_file, logs / "server.log")
    try:
        found: dict[str, Any] = {}
        for role in ("write", "restore", "cold", "cpu"):
            found[role] = run_child(role, work, lengths, environment, logs)
        print(f"damaged {damage(server.pid)} pages of the store")
        for role in ("unverified", "damaged"):
            found[role] = run_child(role, work, lengths, environment, logs)
    finally:
        server.terminate()
        server.wait(20)
    show(found, lengths)
    if options.out:
        options.out.write_text(json.dumps(found))
    wrong = check(found, lengths)
    for line in wrong:
        print(f"WRONG {line}")
    print("all true" if not wrong else "FAILED")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
