"""Store in one process, restore in another: the main promise, on a real vLLM."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.vllm.scripts.common import BLOCK_TOKENS, StoreProcess, answers_from, full_blocks
from tests.vllm.scripts.reference import PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = len(PROMPTS[0])
BLOCKS = full_blocks(TOKENS)
RESTORED = BLOCKS * BLOCK_TOKENS


def test_storing_changes_nothing(reference: dict[str, Any]) -> None:
    plain, stored = answers_from(reference["reference"]), answers_from(reference["stored"])
    assert [answer.cached for answer in stored] == [0] * len(PROMPTS)
    assert stored == plain


def test_every_full_block_of_every_prompt_is_stored(reference: dict[str, Any]) -> None:
    assert reference["settled"]
    assert reference["metrics"]["memkv_store_blocks"] == BLOCKS * len(PROMPTS)
    assert reference["metrics"]["kv_offload_store_bytes"] == BLOCKS * len(PROMPTS) * 131_072


def test_another_process_restores_every_full_block(restored: dict[str, Any]) -> None:
    assert [answer.cached for answer in answers_from(restored["restored"])] == [RESTORED] * len(PROMPTS)
    assert restored["metrics"]["external_prefix_cache_hits"] == RESTORED * len(PROMPTS)
    assert restored["metrics"]["kv_offload_load_bytes"] == BLOCKS * len(PROMPTS) * 131_072


def test_restored_answers_are_those_of_vllms_own_cache_to_the_last_bit(
    reference: dict[str, Any], restored: dict[str, Any]
) -> None:
    warm, made = answers_from(reference["warm"]), answers_from(restored["restored"])
    assert [answer.cached for answer in warm] == [RESTORED] * len(PROMPTS)
    assert made == warm
    assert answers_from(restored["restored again"]) == warm


def test_restored_answers_are_those_of_a_run_without_connector(
    reference: dict[str, Any], restored: dict[str, Any]
) -> None:
    for plain, made in zip(answers_from(reference["reference"]), answers_from(restored["restored"]), strict=True):
        assert made.same_tokens(plain)
        # The last step computes fewer tokens: sums are added in another order.
        assert made.distance(plain) < 1e-4


def test_the_restored_bytes_are_really_used(reference: dict[str, Any], restored: dict[str, Any]) -> None:
    for plain, made in zip(answers_from(reference["reference"]), answers_from(restored["corrupted"]), strict=True):
        assert made.cached == RESTORED
        assert not made.same_tokens(plain)


def test_a_reset_reaches_the_servers(restored: dict[str, Any], reference: dict[str, Any], store: StoreProcess) -> None:
    assert restored["reset"]["before"] == restored["reset"]["after"]
    (made,), plain = answers_from(restored["after reset"]), answers_from(reference["reference"])[0]
    assert made.cached == 0 and made == plain
    assert store.statistics()["table"]["counters"]["resets"] == 1


def test_the_start_up_line_says_what_operators_look_for(restored: dict[str, Any]) -> None:
    (line,) = [line for line in restored["log"] if "layers/block=" in line]
    assert line.startswith("INFO rank=0 tensors=4 layers/block=4 value=0.125MiB threads=4 chunk=32 scratch=16MiB")
    assert any("event=worker_started" in line and "transport=loopback" in line for line in restored["log"])


def test_the_default_failure_policy_is_warned_about_with_the_exact_argument(reference: dict[str, Any]) -> None:
    (line,) = [line for line in reference["log"] if "kv_load_failure_policy" in line]
    assert line.startswith("WARNING")
    argument = json.loads(line.split("--kv-transfer-config '")[1].rstrip("'"))
    assert argument["kv_load_failure_policy"] == "recompute"
    assert argument["kv_connector_extra_config"]["spec_name"] == "MemKVOffloadingSpec"


def test_a_good_start_has_no_warning(restored: dict[str, Any]) -> None:
    assert [line for line in restored["log"] if not line.startswith("INFO")] == []


def test_scheduler_and_worker_derive_one_namespace_in_both_lives(
    reference: dict[str, Any], restored: dict[str, Any]
) -> None:
    """P002, P018: with the model's effective configuration in it, before and after the model was built from it."""
    output = reference["output"] + restored["output"]
    found = re.findall(r"event=(manager|worker)_started .*?namespace=([0-9a-f]{12})", output)
    assert {side for side, _ in found} == {"manager", "worker"}
    assert len({namespace for _, namespace in found}) == 1
