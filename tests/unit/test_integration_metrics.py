"""What is exported, what is logged, and that nothing ever decreases."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.integration.metrics import METRICS, PREFIX, LossLog, ManagerMetrics
from memkv_vllm.types import Direction, LossReason, MissReason


class Stats:
    """Stands in for vLLM's ``OffloadingConnectorStats``."""

    def __init__(self) -> None:
        self.counters: list[tuple[str, int, tuple[str, ...]]] = []
        self.gauges: dict[str, float] = {}

    def increase_counter(self, name: str, amount: int, labels: tuple[str, ...]) -> None:
        self.counters.append((name, amount, labels))

    def set_gauge(self, name: str, value: float) -> None:
        self.gauges[name] = value


def filled(metrics: ManagerMetrics) -> Stats:
    stats = Stats()
    metrics.fill(stats)
    return stats


def test_only_growth_is_reported() -> None:
    metrics = ManagerMetrics()
    metrics.add("probes", 3)
    metrics.add("lookup_misses", 1, MissReason.ABSENT.value)
    assert filled(metrics).counters == [(PREFIX + "probes", 3, ()), (PREFIX + "lookup_misses", 1, ("absent",))]
    assert not metrics.fill(Stats())
    metrics.add("probes", 2)
    assert filled(metrics).counters == [(PREFIX + "probes", 2, ())]


def test_gauges_are_reported_when_they_change() -> None:
    metrics = ManagerMetrics()
    metrics.set("servers_ready", 0)
    assert filled(metrics).gauges == {PREFIX + "servers_ready": 0}
    metrics.set("servers_ready", 0)
    assert filled(metrics).gauges == {}
    metrics.set("servers_ready", 2)
    assert filled(metrics).gauges == {PREFIX + "servers_ready": 2}


@given(st.lists(st.tuples(st.sampled_from(["add", "observe"]), st.integers(-100, 100))))
def test_no_counter_ever_decreases(steps: list[tuple[str, int]]) -> None:
    metrics, before = ManagerMetrics(), 0
    for how, amount in steps:
        metrics.add("x", amount) if how == "add" else metrics.observe_total("x", amount)
        assert metrics.total("x") >= before
        before = metrics.total("x")
        assert all(growth > 0 for _, growth, _ in filled(metrics).counters)


def test_names_are_distinct_and_ours() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z_]+", name) for name in names)
    # vLLM's front end refuses a label that was not declared.
    assert {metric.name: metric.label for metric in METRICS}["lookup_misses"] == "reason"


def test_vllm_takes_the_definitions() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

    from memkv_vllm.integration.metrics import metric_definitions

    definitions = metric_definitions()
    assert len(definitions) == len(METRICS)
    assert all(name.startswith("vllm:memkv_") for name in definitions)
    assert all(isinstance(definition, OffloadingMetricMetadata) for definition in definitions.values())


def test_each_reason_is_logged_once_a_minute_with_the_total_and_the_fix(caplog: pytest.LogCaptureFixture) -> None:
    log = LossLog(rank=3, interval_s=60)
    with caplog.at_level(logging.INFO, "memkv.integration.metrics"):
        for second in range(0, 130, 10):
            log.count(Direction.LOAD, {LossReason.TIMEOUT: 2}, float(second))
        log.count(Direction.STORE, {LossReason.TIMEOUT: 1}, 1.0)
        log.count(Direction.LOAD, {LossReason.ABSENT: 0}, 1.0)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("total=")[1].split(":")[0] for line in lines] == ["2", "14", "26", "1"]
    assert "rank=3 direction=load reason=timeout" in lines[0] and "memkv_wait_timeout_s" in lines[0]
    assert log.totals[Direction.LOAD, LossReason.TIMEOUT] == 26


@pytest.mark.parametrize("reason", LossReason)
def test_every_reason_says_what_to_do(reason: LossReason, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memkv.integration.metrics"):
        LossLog(rank=0).count(Direction.LOAD, {reason: 1}, 0.0)
    (record,) = caplog.records
    assert "memkv.engine" not in record.getMessage() or reason is LossReason.FAILED
    assert record.levelno == (logging.INFO if reason is LossReason.PENDING else logging.WARNING)


def test_what_to_do_names_only_commands_that_exist(caplog: pytest.LogCaptureFixture) -> None:
    from memkv_vllm.cli import main

    LossLog(0).count(Direction.LOAD, dict.fromkeys(LossReason, 1), now=0.0)
    assert len(caplog.records) >= len(LossReason) - 1
    assert set(re.findall(r"memkv ([a-z]+)", caplog.text)) <= set(main.commands)
