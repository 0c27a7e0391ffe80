"""Two ranks, each with values of its own under one namespace: a hit needs both, and one rank's loss is both ranks'."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.vllm.conftest import Scenario
from tests.vllm.scripts.common import BLOCK_TOKENS, answers_from
from tests.vllm.scripts.tensor_parallel import (
    BLOCK_BYTES,
    BLOCKS,
    DAMAGED_BLOCK,
    DAMAGED_RANK,
    MISSING_BLOCK,
    NUM_PROMPTS,
    VALUES,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

SAME = 1e-4
"""Most that a logarithm of a probability may differ from the same computation's."""
SAME_BUT_FOR_THE_ORDER = 1e-3
"""The same between TP=1 and TP=2: two ranks add up halves of each layer's output, in another order than one does."""


@pytest.fixture(scope="session")
def both(run_script: Scenario, reference: dict[str, Any]) -> dict[str, Any]:
    """The scenario; the reference comes first, for two engines never run at once."""
    del reference
    environ = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # Spawned workers: their log lines are read from the output.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    return run_script("tensor_parallel", environ)


def cached_blocks(both: dict[str, Any], name: str) -> list[int]:
    """Blocks of each prompt that vLLM did not compute."""
    return [answer.cached // BLOCK_TOKENS for answer in answers_from(both[name])]


def lost(both: dict[str, Any]) -> list[tuple[str, ...]]:
    """What the workers said that they lost: rank, direction, reason, blocks."""
    return re.findall(r"event=blocks_lost rank=(\d+) direction=(\w+) reason=(\w+) blocks=(\d+)", both["output"])


def test_every_rank_stores_every_block(both: dict[str, Any]) -> None:
    assert both["settled"]
    assert both["store"]["table"]["complete"] == VALUES == 2 * NUM_PROMPTS * BLOCKS
    assert both["store"]["counters"]["put_bytes"] == NUM_PROMPTS * BLOCKS * BLOCK_BYTES


def test_scheduler_and_ranks_agree_on_the_namespace(both: dict[str, Any]) -> None:
    # One manifest, announced by the scheduler side; the hits below prove that the ranks use it.
    assert both["store"]["manifests"]["manifests"] == 1


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("restored", 0),
        ("second", 0),
        ("incomplete", 1),
        ("complete again", 1),
        ("damaged", 2),
        ("after the damage", 2),
    ],
)
def test_every_answer_is_that_of_the_computed_prompt(
    both: dict[str, Any], reference: dict[str, Any], name: str, prompt: int
) -> None:
    """Of the first engine's cold run, and of one rank without connector."""
    made = answers_from(both[name])
    cold, plain = answers_from(both["cold"])[prompt:], answers_from(reference["reference"])[prompt:]
    for answer, first, alone in zip(made, cold, plain, strict=False):
        assert answer.same_tokens(first) and answer.distance(first) < SAME
        assert answer.same_tokens(alone) and answer.distance(alone) < SAME_BUT_FOR_THE_ORDER


def test_all_blocks_are_restored_on_both_ranks(both: dict[str, Any]) -> None:
    assert cached_blocks(both, "restored") == [BLOCKS] * 2


def test_a_second_engine_restores_what_the_first_one_stored(both: dict[str, Any]) -> None:
    """Its core and its workers are other processes, and the first ones are gone."""
    for role in ("EngineCore", "Worker_TP0", "Worker_TP1"):
        assert len(set(re.findall(rf"\({role} pid=(\d+)\)", both["output"]))) == 2, role
    assert cached_blocks(both, "second") == [BLOCKS]


def test_a_block_of_which_one_rank_has_no_value_is_a_miss(both: dict[str, Any]) -> None:
    """P010, P012: the lookup asks for all shards. Nothing is asked for in vain: no load fails."""
    assert cached_blocks(both, "incomplete") == [MISSING_BLOCK]
    assert both["metrics"]["memkv_lookup_misses:absent"] >= 1
    assert both["metrics"]["memkv_load_blocks"] == BLOCKS + MISSING_BLOCK


def test_the_rank_that_lacks_it_stores_it_again(both: dict[str, Any]) -> None:
    assert both["completed"]
    assert cached_blocks(both, "complete again") == [BLOCKS]


def test_one_ranks_damaged_value_is_refused_by_that_rank_alone(both: dict[str, Any]) -> None:
    """P090, and P030 for two ranks: one is told, both recompute; the answer is compared above."""
    refused = [line for line in lost(both) if line[2] == "checksum"]
    assert refused == [(str(DAMAGED_RANK), "load", "checksum", "1")]
    ends = re.findall(r"event=worker_end rank=(\d+) (.*)", both["output"])
    assert [rank for rank, summary in ends if "lost_load_checksum=1" in summary] == [str(DAMAGED_RANK)]
    assert not [summary for rank, summary in ends if rank != str(DAMAGED_RANK) and "lost_load" in summary]


def test_what_was_refused_is_hidden_on_the_server(both: dict[str, Any]) -> None:
    """The next request gets it no more: its lookup is a miss, or where an earlier answer is still trusted
    (``memkv_lookup_hit_ttl``), its load finds nothing and loses that block, once, on the same rank."""
    assert both["hidden"]
    others = [line for line in lost(both) if line[1] == "load" and line[2] != "checksum"]
    assert others in ([], [(str(DAMAGED_RANK), "load", "evicted", "1")], [(str(DAMAGED_RANK), "load", "absent", "1")])
    assert cached_blocks(both, "after the damage") == [BLOCKS if others else DAMAGED_BLOCK]


def test_each_rank_says_how_it_started(both: dict[str, Any]) -> None:
    for rank in (0, 1):
        assert f"rank={rank} tensors=4 layers/block=4 value=0.062MiB" in both["output"]
