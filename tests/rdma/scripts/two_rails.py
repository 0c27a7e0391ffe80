"""vLLM over two rails: ``python -m tests.rdma.scripts.two_rails FOLDER OUT LIFE``.

``first`` computes and stores; ``second``, a process of its own, restores what ``first`` stored, loses the rail that it
uses while it does so again, and restores over the other one. Beside the answers they write how many packets each RDMA
device sent meanwhile, as the kernel counted them.

One rank: with two of them, which wait for each other, a step of the model takes minutes on the VM's one CPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import (
    BLOCK_TOKENS,
    LogLines,
    ask,
    full_blocks,
    make_engine,
    metrics,
    run_scenario,
    settle,
)
from tests.vllm.scripts.reference import PROMPTS as MANY

PROMPTS = MANY[:2]
BLOCKS = full_blocks(len(PROMPTS[0]))
DEVICES = ("rxe0", "rxe1")
LOST = "rail0"
"""The interface of the first one, which the only rank prefers. It is taken down."""
TRIES = 20
"""Requests after the loss until all blocks come from the store again."""
OPTIONS: dict[str, Any] = {
    # Enough for all prompts. vLLM would take a GiB, and in the VM every page of it costs.
    "num_gpu_blocks_override": 128,
}


def give_memory_nodes() -> None:
    """User-Mode Linux knows no NUMA, and vLLM's CPU worker needs a first node. The only change to vLLM here.

    At import: every process that vLLM starts imports this module too.
    """
    if "Mems_allowed_list:" not in Path("/proc/self/status").read_text():
        from vllm.utils import cpu_resource_utils

        cpu_resource_utils.get_memory_affinity = lambda pid=0: [0]


give_memory_nodes()


def packets() -> dict[str, int]:
    """Packets that each RDMA device has sent since it was made."""
    counters = {device: Path("/sys/class/infiniband", device, "ports/1/hw_counters/sent_pkts") for device in DEVICES}
    return {device: int(path.read_text()) for device, path in counters.items() if path.exists()}


@contextmanager
def counted(result: dict[str, Any], name: str) -> Iterator[None]:
    """Note how many packets were sent meanwhile, by device."""
    before = packets()
    yield
    result[f"{name} packets"] = {device: count - before[device] for device, count in packets().items()}


def first(folder: Path) -> dict[str, Any]:
    """Compute and store; then the same out of vLLM's own cache."""
    log = LogLines()
    llm = make_engine(folder, extra={}, **OPTIONS)
    result: dict[str, Any] = {}
    with counted(result, "stored"):
        result["cold"] = ask(llm, PROMPTS)
        result["settled"] = settle(llm)
    result["warm"] = ask(llm, PROMPTS)
    return result | {"metrics": metrics(llm), "log": log.lines}


def second(folder: Path) -> dict[str, Any]:
    """Restore; then without the first rail."""
    log = LogLines()
    llm = make_engine(folder, extra={}, **OPTIONS)
    result: dict[str, Any] = {}
    with counted(result, "restored"):
        result["restored"] = ask(llm, PROMPTS)
    result["metrics"] = metrics(llm)
    subprocess.run(["ip", "link", "set", LOST, "down"], check=True)
    try:
        result |= without_a_rail(llm)
    finally:
        subprocess.run(["ip", "link", "set", LOST, "up"], check=True)
    return result | {"log": log.lines}


def without_a_rail(llm: Any) -> dict[str, Any]:
    """The same prompts over and over, until all comes from the store again; then once more, with packets counted."""
    result: dict[str, Any] = {"losing": []}
    for _ in range(TRIES):
        llm.reset_prefix_cache()
        answers = ask(llm, PROMPTS)
        result["losing"].append(answers)
        if all(answer.cached == BLOCKS * BLOCK_TOKENS for answer in answers):
            break
    settle(llm)
    llm.reset_prefix_cache()
    with counted(result, "one rail"):
        result["one rail"] = ask(llm, PROMPTS)
    result["metrics at the end"] = metrics(llm)
    return result


if __name__ == "__main__":
    run_scenario({"first": first, "second": second}[sys.argv[3]])
