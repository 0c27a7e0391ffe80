"""Two ranks, each with values of its own under one namespace; a hit needs both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Scenario
from tests.vllm.scripts.common import BLOCK_TOKENS, StoreProcess, answers_from, full_blocks
from tests.vllm.scripts.reference import PROMPTS
from tests.vllm.scripts.tensor_parallel import BLOCK_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCKS = full_blocks(len(PROMPTS[0]))


@pytest.fixture(scope="session")
def both(run_script: Scenario, reference: dict[str, Any]) -> dict[str, Any]:
    """The scenario on a store of its own."""
    del reference
    store = StoreProcess()
    store.start()
    try:
        environ = {
            **store.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            # Spawned workers: their log lines are read from the output.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        result = run_script("tensor_parallel", environ)
        return result | {"store": store.statistics()}
    finally:
        store.kill()


def test_every_rank_stores_every_block(both: dict[str, Any]) -> None:
    assert both["settled"]
    assert both["store"]["table"]["complete"] == 2 * 3 * BLOCKS
    assert both["store"]["counters"]["put_bytes"] == 3 * BLOCKS * BLOCK_BYTES


def test_scheduler_and_ranks_agree_on_the_namespace(both: dict[str, Any]) -> None:
    # One manifest, announced by the scheduler side; the hits below prove that the ranks use it.
    assert both["store"]["manifests"]["manifests"] == 1


def test_all_blocks_are_restored_on_both_ranks(both: dict[str, Any], reference: dict[str, Any]) -> None:
    restored, cold = answers_from(both["restored"]), answers_from(both["cold"])
    assert [answer.cached for answer in restored] == [BLOCKS * BLOCK_TOKENS] * 2
    for made, first, plain in zip(restored, cold, answers_from(reference["reference"]), strict=False):
        assert made.same_tokens(first) and made.distance(first) < 1e-4
        assert made.same_tokens(plain) and made.distance(plain) < 1e-3


def test_each_rank_says_how_it_started(both: dict[str, Any]) -> None:
    for rank in (0, 1):
        assert f"rank={rank} tensors=4 layers/block=4 value=0.062MiB" in both["output"]
