"""The parts of the demo that need no vLLM: its judgement, its progress lines, and the store that it starts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.demo import __main__ as demo
from memkv_vllm.demo.generate import BLOCK_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, make_prompts
from memkv_vllm.demo.report import PULSE_S, Progress, compare
from memkv_vllm.demo.store import StoreProcess


def answers(shift: float = 0.0, token: int = 5) -> list[dict[str, Any]]:
    one = {"tokens": [token, 6], "logprobs": [[-0.5, -1.0], [-0.25, -2.0 - shift]], "first_token_s": 0.5}
    return [dict(one) for _ in range(NUM_PROMPTS)]


def run(**changes: Any) -> dict[str, Any]:
    return {"answers": answers(), "counters": {}, "lost": {}} | changes


def everything_held() -> dict[str, Any]:
    blocks, size = demo.NUM_BLOCKS, demo.NUM_BLOCKS * demo.VALUE_BYTES
    hits = {"vllm:external_prefix_cache_hits": blocks * BLOCK_TOKENS, "vllm:kv_offload_load_bytes": size}
    return {
        "reference": run(),
        "stored": run(counters={"vllm:kv_offload_store_bytes": size}),
        "store": {"table": {"complete": blocks}},
        "restored": run(counters=hits),
        "damaged": blocks,
        "after_damage": run(lost={"load_checksum": blocks}),
        "first_exit": 0,
        "second_exit": 0,
        "store_exit": 0,
    }


def test_all_true_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.judge(everything_held())
    assert "all of it held" in capsys.readouterr().out


FALSE = {
    "a block was not stored": {"store": {"table": {"complete": demo.NUM_BLOCKS - 1}}},
    "an answer while storing": {"stored": run(answers=answers(token=7))},
    "a block was recomputed": {"restored": run(counters={"vllm:external_prefix_cache_hits": 32})},
    "a restored answer": {"restored": run(answers=answers(1e-9))},
    "a loss": {"restored": run(lost={"load_timeout": 1})},
    "nothing was damaged": {"damaged": 0},
    "a block was not damaged": {"damaged": demo.NUM_BLOCKS - 1},
    "damage unseen": {"after_damage": run()},
    "damage of one block unseen": {"after_damage": run(lost={"load_checksum": demo.NUM_BLOCKS - 1})},
    "a damaged block lost for another reason": {
        "after_damage": run(lost={"load_checksum": demo.NUM_BLOCKS - 1, "load_timeout": 1})
    },
    "damage used": {
        "after_damage": run(
            lost={"load_checksum": demo.NUM_BLOCKS}, counters={"vllm:kv_offload_load_bytes": demo.VALUE_BYTES}
        )
    },
    "an answer after damage": {"after_damage": run(lost={"load_checksum": demo.NUM_BLOCKS}, answers=answers(token=7))},
    "an engine died": {"second_exit": 1},
    "the store died": {"store_exit": -9},
}


@pytest.mark.parametrize("change", FALSE.values(), ids=FALSE.keys())
def test_each_untruth_is_bad(change: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert not demo.judge(everything_held() | change)
    assert "NOT all of it held" in capsys.readouterr().out


def test_a_slower_restore_is_said_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    seen = everything_held()
    for answer in seen["restored"]["answers"]:
        answer["first_token_s"] = 1.0
    assert demo.judge(seen)
    assert "2.0 times later" in capsys.readouterr().out


def test_compare_is_exact() -> None:
    assert compare(answers(), answers()) == (True, True, 0.0)
    tokens, identical, farthest = compare(answers(), answers(1e-6))
    assert (tokens, identical) == (True, False)
    assert farthest == pytest.approx(1e-6)
    assert compare(answers(), answers(token=7))[0] is False


def test_prompts_are_the_same_each_time_and_share_nothing() -> None:
    first = make_prompts()
    assert first == make_prompts()
    assert {len(prompt) for prompt in first} == {PROMPT_TOKENS}
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in first}) == NUM_PROMPTS


def test_progress_in_a_pipe_is_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("memkv_vllm.demo.report.time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(stream)
    progress.say("begins")
    progress.pulse()
    now += PULSE_S
    progress.pulse()
    assert stream.getvalue() == f"[   0 s] begins\n[{PULSE_S:4.0f} s]   ...\n"


def test_the_store_is_started_asked_and_ended(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as store:
        assert store.exports["MEMKV_TRANSPORT"] == "loopback"
        assert store.statistics()["table"]["complete"] == 0
        assert store.damage(demo.VALUE_BYTES) == 0, "an empty store has nothing to damage"
        assert store.stop() == 0
