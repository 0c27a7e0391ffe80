"""Admin HTTP's decisions: who may change something, what counts as healthy, what is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from memkv_vllm.cli_admin import sessions_cell
from memkv_vllm.store.admin.access import Verdict, judge
from memkv_vllm.store.admin.commands import BadRequest, parse
from memkv_vllm.store.admin.health import Facts, Reason, degraded, not_ready
from memkv_vllm.store.admin.watch import HISTORY_STEP_S, History, LagWindow, Sample
from memkv_vllm.store.commands import COMMANDS

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("header", "verdict"),
    [
        (None, Verdict.MISSING),
        ("", Verdict.MISSING),
        ("Bearer", Verdict.MISSING),
        ("Bearer  ", Verdict.MISSING),
        (TOKEN, Verdict.MISSING),
        (f"Basic {TOKEN}", Verdict.MISSING),
        ("Bearer x", Verdict.WRONG),
        (f"Bearer {TOKEN[:-1]}", Verdict.WRONG),
        (f"Bearer {TOKEN}0", Verdict.WRONG),
        (f"Bearer {TOKEN.upper()}", Verdict.WRONG),
        ("Bearer \udcff\udcfe", Verdict.WRONG),
        (f"Bearer {TOKEN}", Verdict.ALLOWED),
        (f"bearer  {TOKEN} ", Verdict.ALLOWED),
    ],
)
def test_only_the_token_opens(header: str | None, verdict: Verdict) -> None:
    assert judge(header, TOKEN) is verdict
    assert judge(header, None) is Verdict.NO_TOKEN_CONFIGURED


def test_an_empty_token_never_opens() -> None:
    assert judge("Bearer ", "") is Verdict.MISSING
    assert judge("Bearer", "") is Verdict.MISSING


FINE = Facts(started=True, draining=False, arena_slow=False, lag_s=0.01, max_lag_s=1.0)


@pytest.mark.parametrize(
    ("change", "reasons", "ready"),
    [
        ({}, [], True),
        ({"started": False}, ["starting"], False),
        ({"started": False, "draining": True}, ["starting"], False),
        ({"draining": True}, ["draining"], False),
        ({"arena_slow": True}, ["arena_not_populated"], True),
        ({"lag_s": 1.0}, [], True),
        ({"lag_s": 1.01}, ["event_loop_lag"], True),
        ({"reported": [Reason("disk", "out", "replace it")]}, ["disk"], True),
        (
            {"draining": True, "arena_slow": True, "lag_s": 2.0},
            ["draining", "arena_not_populated", "event_loop_lag"],
            False,
        ),
    ],
)  # fmt: skip
def test_health_and_readiness(change: dict[str, Any], reasons: list[str], ready: bool) -> None:
    facts = FINE._replace(**change)
    found = degraded(facts)
    assert [reason.reason for reason in found] == reasons
    assert (not not_ready(facts)) is ready
    assert all(reason.detail and reason.next_step for reason in found)


def test_lag_is_the_worst_of_the_last_ones() -> None:
    window = LagWindow(size=3)
    assert window.worst_s == 0
    for took in (0.5, 2.5, 0.4, 0.6, 0.5):
        window.add(0.5, took)
        assert window.worst_s >= 0
    assert window.worst_s == pytest.approx(0.1)  # the 2 s are forgotten


def sample(at_s: float, **numbers: int) -> Sample:
    return Sample(at_s, *(numbers.get(name, 0) for name in Sample._fields[1:]))


def test_rates_are_over_the_newest_steps_and_never_negative() -> None:
    history = History(600)
    assert set(history.rates().values()) == {0.0}
    for step in range(10):
        history.add(sample(step * 2.0, put_bytes=step * 100, hits=step * step))
    assert history.rates(window=5)["put_bytes_per_s"] == pytest.approx(50)
    assert history.rates(window=1)["hits_per_s"] == pytest.approx((81 - 64) / 2)
    history.add(sample(20.0, put_bytes=0))  # a clock that was set, a counter that began anew
    assert history.rates()["put_bytes_per_s"] == 0
    history.add(sample(1.0))
    assert history.rates()["hits_per_s"] == 0


def test_the_history_is_bounded() -> None:
    history = History(20)
    for step in range(1000):
        history.add(sample(step * HISTORY_STEP_S))
    rows = history.statistics()["rows"]
    assert len(rows) == 10
    assert rows[-1][0] == 999 * HISTORY_STEP_S
    assert history.newest()["sample"] == rows[-1]


def test_every_command_says_what_it_takes() -> None:
    for name, command in COMMANDS.items():
        with pytest.raises(BadRequest) as raised:
            parse(name, b"{}")
        assert command.argument in raised.value.error
        assert command.meaning in raised.value.next_step


def test_the_table_says_how_many_sessions_use_rdma() -> None:
    """At a glance: a cluster that is meant to run over verbs and does not is slow, not down."""
    assert sessions_cell({"sessions": 5, "sessions_by_path": {"verbs": 4, "tcp": 1}}) == "5 (4 verbs)"
    assert sessions_cell({"sessions": 5, "sessions_by_path": {"tcp": 5}}) == "5"
    assert sessions_cell({"sessions": 0}) == "0", "a server of an earlier release"
