"""vLLM's worker side over a fake engine: no failure reaches vLLM, every lost block does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from memkv_vllm.engine.api import JobResult
from memkv_vllm.integration.compat import MemKVLoadStoreSpec
from memkv_vllm.integration.worker import MemKVOffloadingWorker
from memkv_vllm.keys import block_prefix
from memkv_vllm.types import Direction
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.vllm

NAMESPACE = bytes(range(32))


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def prefix(number: int) -> bytes:
    return block_prefix(NAMESPACE, number.to_bytes(32, "big"), 0)


def ours(*numbers: int, namespace: bytes = NAMESPACE) -> MemKVLoadStoreSpec:
    return MemKVLoadStoreSpec(namespace, [key(number) for number in numbers])


def gpu(*block_ids: int) -> Any:
    return SimpleNamespace(block_ids=list(block_ids))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> MemKVOffloadingWorker:
    return MemKVOffloadingWorker(engine, namespace=NAMESPACE, device=torch.device("cpu"), rank=0)


def test_a_store_and_a_load_name_the_same_blocks(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    assert worker.submit_store(1, gpu(10, 11), ours(1, 2)) is True
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size, result.transfer_time) == (1, True, 200, 0.5)
    assert engine.values == {prefix(1): 10, prefix(2): 11}
    assert worker.submit_load(2, ours(2, 1), gpu(20, 21)) is True
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (2, True, 200)
    assert worker.take_load_errors() == set()
    assert [call[0] for call in engine.calls if "submit" in str(call[0])] == ["submit_store", "submit_load"]


def test_expedited_is_passed_on(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    worker.submit_load(1, ours(1), gpu(5), expedited=True)
    assert engine.calls[-1][-1] is True


def test_lost_blocks_are_published_exactly_when_their_job_is_reported(
    worker: MemKVOffloadingWorker, engine: FakeEngine
) -> None:
    engine.values.update({prefix(1): 0, prefix(2): 0, prefix(3): 0})
    engine.unreadable.add(prefix(2))
    engine.held = True
    worker.submit_load(1, ours(1, 2, 3), gpu(10, 11, 12))
    assert worker.get_finished() == [] and worker.take_load_errors() == set()
    engine.held = False
    (result,) = worker.get_finished()
    assert result.success is True and result.transfer_size == 200
    assert worker.take_load_errors() == {11}
    assert worker.take_load_errors() == set()


def test_a_lost_store_is_a_success_without_bad_blocks(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    engine.broken.add("submit_store")
    assert worker.submit_store(1, gpu(10), ours(1)) is True
    (result,) = worker.get_finished()
    assert result.success is True and result.transfer_size is None
    assert worker.take_load_errors() == set()


@pytest.mark.parametrize("call", ["submit_load", "submit_store", "poll_finished", "wait"])
def test_an_engine_that_raises_is_ended_and_its_loads_are_lost(
    worker: MemKVOffloadingWorker, engine: FakeEngine, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine.held = True
    assert worker.submit_load(1, ours(1), gpu(10)) is True
    engine.broken.add(call)
    assert worker.submit_load(2, ours(2), gpu(20)) is True
    assert worker.submit_store(3, gpu(30), ours(3)) is True
    worker.wait({1, 2, 3})
    reported = {result.job_id: result.success for result in worker.get_finished()}
    assert reported == {1: True, 2: True, 3: True}
    # Before the blocks are given to the recomputation nothing may write into them any more.
    assert engine.closed
    assert worker.take_load_errors() == {10, 20}
    assert worker.submit_load(4, ours(4), gpu(40)) is True
    assert [result.job_id for result in worker.get_finished()] == [4]
    assert worker.take_load_errors() == {40}
    assert worker.get_finished() == []
    worker.wait({1, 4, 99})
    worker.shutdown()


def test_a_broken_engine_that_cannot_even_be_closed(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    engine.broken.update({"poll_finished", "close"})
    worker.submit_load(1, ours(1), gpu(10))
    assert [result.job_id for result in worker.get_finished()] == [1]
    assert worker.take_load_errors() == {10}
    worker.shutdown()


def test_unknown_jobs_are_dropped(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    worker.wait({7, 8})
    assert not any(call[0] == "wait" for call in engine.calls)
    engine._jobs.append(lambda: JobResult(99, Direction.LOAD, 1, 0, 0.0, (5,)))
    assert worker.get_finished() == []
    assert worker.take_load_errors() == set()


def test_a_job_is_reported_once(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    worker.submit_store(1, gpu(10), ours(1))
    engine._jobs *= 2
    assert len(worker.get_finished()) == 1
    assert worker.get_finished() == []


def test_wait_names_only_open_jobs(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    engine.held = True
    worker.submit_store(1, gpu(10), ours(1))
    worker.wait({1, 2})
    assert engine.calls[-1] == ("wait", frozenset({1}))


def test_a_job_whose_blocks_and_keys_do_not_match_moves_nothing(
    worker: MemKVOffloadingWorker, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "memkv.integration.worker"):
        worker.submit_load(1, ours(1, 2), gpu(10, 11, 12))
        worker.submit_store(2, gpu(10), object())
    assert "3 GPU blocks and 2 keys" in caplog.text and "another medium" in caplog.text
    assert len(worker.get_finished()) == 2
    assert worker.take_load_errors() == {10, 11, 12}
    assert not any("submit" in str(call[0]) for call in engine.calls)


def test_jobs_follow_the_namespace_that_the_manager_names(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    worker.submit_store(1, gpu(10), ours(1, namespace=bytes(32)))
    worker.get_finished()
    assert list(engine.values) == [block_prefix(bytes(32), (1).to_bytes(32, "big"), 0)]


def test_shutdown_closes_the_engine_once(worker: MemKVOffloadingWorker, engine: FakeEngine) -> None:
    worker.shutdown()
    worker.shutdown()
    assert [call[0] for call in engine.calls].count("close") == 1
    assert worker.submit_load(1, ours(1), gpu(10)) is True
    assert len(worker.get_finished()) == 1 and worker.take_load_errors() == {10}


def test_a_namespace_other_than_its_own_is_said_once(
    worker: MemKVOffloadingWorker, caplog: pytest.LogCaptureFixture
) -> None:
    for job in range(3):
        worker.submit_store(job, gpu(10), ours(1, namespace=bytes(32)))
    assert caplog.text.count("event=namespace_changed") == 1
