"""``make demo`` and ``memkv demo``: the whole system at work on this machine, judged.

1. ``memkv start --dev`` runs in a process of its own.
2. A first vLLM process answers prompts without memkv (the reference), then with it (their KV blocks are stored), and
   ends.
3. A second vLLM process answers the same prompts out of the store.
4. One bit of every stored value is flipped behind the server's back; the second process must refuse each, compute
   instead, and still answer the same.

Exit status 0 only if all of it is true.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from memkv_vllm.demo.generate import BLOCK_TOKENS, MODEL, NUM_PROMPTS, PROMPT_BLOCKS, PROMPT_TOKENS
from memkv_vllm.demo.report import Progress, Verdict, compare, first_token_table, mib
from memkv_vllm.demo.store import StoreProcess
from memkv_vllm.demo.vllm_process import running
from memkv_vllm.errors import MemkvError

NUM_BLOCKS = NUM_PROMPTS * PROMPT_BLOCKS
VALUE_BYTES = MODEL.kv_bytes_per_token() * BLOCK_TOKENS

Results = dict[str, Any]
"""What came of each step, by its name."""


def main() -> int:
    """Runs the demo; the exit status."""
    # Whoever ends the demo ends what it started, by Ctrl-C or otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = Progress()
    click.echo(
        "memkv demo: vLLM's own engine on this CPU with a tiny model of random weights, and a memkv store in another\n"
        "process, over shared memory. It takes one to three minutes; no GPU, no network.\n"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="memkv-demo-") as folder:
            results = play(Path(folder), progress)
    except MemkvError as error:
        click.echo(f"\nmemkv demo: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("\nmemkv demo: interrupted", err=True)
        return 130
    progress.say("done")
    return 0 if judge(results) else 1


def play(folder: Path, progress: Progress) -> Results:
    """Runs everything, judging nothing; what each step gave, by its name."""
    seen: Results = {}
    with StoreProcess(folder) as store:
        progress.say(f"store: ready, process {store.pid} (memkv start --dev)")
        with running("first", folder, store.exports, progress) as first:
            seen["reference"] = first.result("reference")
            seen["stored"] = first.result("stored")
            seen["first_exit"] = first.wait()
        progress.say(f"vLLM process {first.pid} has ended; what it computed lives on in the store only")
        seen["store"] = store.statistics()
        with running("second", folder, store.exports, progress) as second:
            seen["restored"] = second.result("restored")
            seen["damaged"] = store.damage(VALUE_BYTES)
            progress.say(f"store: one bit flipped in each of {seen['damaged']} values, behind the server's back")
            second.go_on()
            seen["after_damage"] = second.result("after_damage")
            seen["second_exit"] = second.wait()
        seen["store_exit"] = store.stop()
    return seen


def judge(seen: Results) -> bool:
    """Prints what was seen; whether all of it is as it must be."""
    first_token_table(_first_token_s(seen["reference"]), _first_token_s(seen["restored"]), PROMPT_TOKENS)
    click.echo("\nWhat had to be true:\n")
    verdict = Verdict()
    _judge_store(seen, verdict)
    _judge_restore(seen, verdict)
    _judge_damage(seen, verdict)
    ends = [seen["first_exit"], seen["second_exit"], seen["store_exit"]]
    verdict.check(
        ends == [0, 0, 0],
        "both vLLM processes and the store ended in order",
        f"exit statuses {', '.join(map(str, ends))}",
    )
    verdict.show()
    click.echo(f"\nmemkv demo: {'all of it held' if verdict.good else 'NOT all of it held'}")
    return verdict.good


def _judge_store(seen: Results, verdict: Verdict) -> None:
    held = seen["store"]["table"]["complete"]
    stored = seen["stored"]["counters"].get("vllm:kv_offload_store_bytes", 0)
    verdict.check(
        held >= NUM_BLOCKS,
        f"the store holds every full block of the {NUM_PROMPTS} prompts",
        f"{held} blocks of {BLOCK_TOKENS} tokens; vLLM counted {mib(stored)} stored",
    )
    _judge_answers(seen, "stored", "storing changed no answer", verdict)


def _judge_restore(seen: Results, verdict: Verdict) -> None:
    counters, lost = seen["restored"]["counters"], seen["restored"]["lost"]
    hits = int(counters.get("vllm:external_prefix_cache_hits", 0)) // BLOCK_TOKENS
    loaded = counters.get("vllm:kv_offload_load_bytes", 0)
    verdict.check(
        hits >= NUM_BLOCKS and not lost,
        "a process that had computed nothing restored all of them",
        f"{hits} blocks, {mib(loaded)}; {_by_reason(lost)}",
    )
    _judge_answers(seen, "restored", "answers from restored blocks are those of vLLM without memkv", verdict)


def _judge_damage(seen: Results, verdict: Verdict) -> None:
    lost, damaged = seen["after_damage"]["lost"], seen["damaged"]
    loaded = seen["after_damage"]["counters"].get("vllm:kv_offload_load_bytes", 0)
    # The prompts ask for NUM_BLOCKS blocks, every one of them damaged: as many refusals, and nothing that was used.
    verdict.check(
        damaged >= NUM_BLOCKS and lost.get("load_checksum", 0) >= NUM_BLOCKS and loaded == 0,
        "blocks with one flipped bit were refused, each of them",
        f"{damaged} damaged; {_by_reason(lost)}; {mib(loaded)} of damaged blocks used",
    )
    _judge_answers(seen, "after_damage", "they were computed instead, and no answer changed", verdict)


def _judge_answers(seen: Results, name: str, claim: str, verdict: Verdict) -> None:
    tokens, identical, farthest = compare(seen["reference"]["answers"], seen[name]["answers"])
    count = sum(len(answer["tokens"]) for answer in seen[name]["answers"])
    if identical:
        found = f"{count} tokens and their log-probabilities are the same to the last bit"
    else:
        found = f"tokens {'are the same' if tokens else 'DIFFER'}, log-probabilities differ by up to {farthest:.2g}"
    verdict.check(identical, claim, found)


def _by_reason(lost: dict[str, int]) -> str:
    return ", ".join(f"lost by reason {name}: {count}" for name, count in sorted(lost.items())) or "none lost"


def _first_token_s(run: dict[str, Any]) -> list[float]:
    return [answer["first_token_s"] for answer in run["answers"]]


if __name__ == "__main__":
    sys.exit(main())
