"""The store goes away in every way; the engine serves on, the answers stay the same, the hits come back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Scenario
from tests.vllm.scripts.common import BLOCK_TOKENS, Answer, answers_from, full_blocks
from tests.vllm.scripts.reference import PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(300)]

BLOCKS = full_blocks(len(PROMPTS[0]))


@pytest.fixture(scope="session")
def story(run_script: Scenario, reference: dict[str, Any]) -> dict[str, Any]:
    """All steps; the reference comes first, for two engines never run at once."""
    del reference
    return run_script("faults", {})


def cached(story: dict[str, Any], name: str) -> int:
    """Blocks that vLLM did not compute."""
    return int(story["steps"][name]["answer"]["cached"]) // BLOCK_TOKENS


def test_every_answer_is_the_one_of_a_run_without_connector(story: dict[str, Any], reference: dict[str, Any]) -> None:
    """P030: after rejected loads too (a store that died, pushes that fail, flipped bits), token by token."""
    plain = answers_from(reference["reference"])
    for name, step in story["steps"].items():
        made = Answer(**step["answer"])
        assert made.same_tokens(plain[step["prompt"]]), name
        assert made.distance(plain[step["prompt"]]) < 1e-4, name


def test_every_transfer_ended(story: dict[str, Any]) -> None:
    assert [name for name, step in story["steps"].items() if not step["settled"]] == []


def test_nothing_took_longer_than_a_deadline(story: dict[str, Any]) -> None:
    assert {name: step["seconds"] for name, step in story["steps"].items() if step["seconds"] > 15} == {}


def test_it_starts_and_serves_without_a_store(story: dict[str, Any]) -> None:
    assert cached(story, "no store at the start") == 0
    assert story["steps"]["no store at the start"]["lost"] == {"store_breaker": BLOCKS}


@pytest.mark.parametrize("name", ["hits without a restart", "hits come back", "readable again"])
def test_hits_come_back_by_themselves(story: dict[str, Any], name: str) -> None:
    assert cached(story, name) == BLOCKS
    assert not any(story["steps"][name]["lost"].values())


def test_a_store_that_dies_between_lookup_and_load_costs_a_recomputation(story: dict[str, Any]) -> None:
    step = story["steps"]["killed between lookup and load"]
    assert step["load_blocks"] == BLOCKS
    assert sum(count for key, count in step["lost"].items() if key.startswith("load_")) == BLOCKS


def test_a_store_that_dies_during_a_store_loses_it(story: dict[str, Any]) -> None:
    step = story["steps"]["killed during a store"]
    assert sum(count for key, count in step["lost"].items() if key.startswith("store_")) > 0
    assert cached(story, "stored again") == 0


def test_a_store_that_dies_during_a_load_costs_a_recomputation(story: dict[str, Any]) -> None:
    step = story["steps"]["killed during a load"]
    assert step["load_blocks"] == BLOCKS
    assert sum(count for key, count in step["lost"].items() if key.startswith("load_")) > 0


@pytest.mark.parametrize("name", ["every block fails", "every block fails again"])
def test_values_that_exist_and_cannot_be_read_are_tried_once_by_each_request(story: dict[str, Any], name: str) -> None:
    step = story["steps"][name]
    assert step["load_blocks"] == BLOCKS
    assert step["lost"]["load_failed"] == BLOCKS
    assert story["metrics"]["memkv_lookup_misses:retried"] >= 2


def test_a_corrupted_first_block_is_recomputed_and_stored_by_the_next_request(story: dict[str, Any]) -> None:
    assert story["steps"]["first block corrupted"]["lost"]["load_checksum"] == 1
    # vLLM does not offer a block again that it had asked to load; the next request that computes it does.
    assert cached(story, "after the corruption") == 0
    assert story["steps"]["ninth block corrupted"]["load_blocks"] == BLOCKS


def test_one_corrupted_block_costs_one_block(story: dict[str, Any]) -> None:
    assert story["steps"]["ninth block corrupted"]["lost"] == {
        key: int(key == "load_checksum") for key in story["steps"]["ninth block corrupted"]["lost"]
    }


def test_the_manager_never_failed(story: dict[str, Any]) -> None:
    assert "memkv_manager_errors" not in story["metrics"]
    assert "Traceback" not in "".join(story["log"])
