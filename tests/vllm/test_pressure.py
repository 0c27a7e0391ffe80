"""Preemption, aborts and slow stores change no answer and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Scenario
from tests.vllm.scripts.common import Answer, answers_from
from tests.vllm.scripts.reference import CROWD

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def pressed(run_script: Scenario, reference: dict[str, Any]) -> dict[str, Any]:
    """The scenario; the reference comes first."""
    del reference
    return run_script("pressure", {})


def test_there_was_pressure(pressed: dict[str, Any]) -> None:
    assert pressed["cold metrics"]["num_preemptions"] > 0


@pytest.mark.parametrize("run", ["cold", "again"])
def test_every_request_ends_with_the_answer_that_it_has_alone(
    pressed: dict[str, Any], reference: dict[str, Any], run: str
) -> None:
    plain = answers_from(reference["crowd"])
    made = pressed[run]
    answers = (
        answers_from(made) if isinstance(made, list) else [Answer(**made[str(number)]) for number in range(len(CROWD))]
    )
    for number, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
        assert answer.same_tokens(expected), number
        assert answer.distance(expected) < 1e-4, number


def test_the_second_time_much_of_it_comes_from_the_store(pressed: dict[str, Any]) -> None:
    assert pressed["metrics"]["external_prefix_cache_hits"] > 0
    assert sum(entry["cached"] for entry in pressed["again"]) > 0


def test_nothing_stays_under_way(pressed: dict[str, Any]) -> None:
    assert pressed["settled"] and pressed["settled again"]


def test_the_manager_never_failed(pressed: dict[str, Any]) -> None:
    assert "memkv_manager_errors" not in pressed["metrics"]
    assert "Traceback" not in "".join(pressed["log"])
    assert "vllm:kv_offload_allocation_failure" not in pressed["metrics"]
