"""A real server that is stopped in the middle of its work: it closes nothing and answers nothing. P029, P041, P046."""

from __future__ import annotations

import pytest

from memkv_vllm.types import LossReason, MissReason
from tests.support.ranks import eventually, lookups, rank, staging_plan
from tests.support.stores import stores

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(60)]

NUMBERS = range(60)
NEVER_S = 600.0
"""Deadlines that no test waits for: what ends before them is ended by the missing sign of life."""


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_a_frozen_server_is_found_out_long_before_any_deadline(
    caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """Its loads end as misses and its slots wait for the fence; the others' loads go on all the time."""
    with stores(transport=transport) as served:
        settings = served.settings(op_timeout_s=NEVER_S)
        with rank(settings, plan=staging_plan(32), wait_timeout_s=NEVER_S) as one:
            one.ready(3).stored(NUMBERS)
            frozen = served.share("b", NUMBERS)[:12]
            healthy = [number for name in "ac" for number in served.share(name, NUMBERS)]
            served.processes["b"].freeze()
            job = one.load(frozen)
            eventually(lambda: one.statistics.inflight_requests > 0, "requests are under way")
            while job not in one.poll():
                result = one.loaded(healthy)
                assert (result.lost, one.wrong(result, healthy)) == ({}, [])
            assert one.result(job).lost == {LossReason.BREAKER: 12}
            assert one.statistics.servers_ready == 2
            if transport == "loopback":
                assert one.statistics.slots_quarantined == 12, "it may still write into them"
            else:
                eventually(lambda: one.statistics.slots_quarantined == 0, "a fence over tcp needs nothing of the peer")
            assert any("no sign of life" in record.getMessage() for record in caplog.records)
            assert one.loaded(NUMBERS).lost == {LossReason.BREAKER: len(served.share("b", NUMBERS))}, "at once"
            served.processes["b"].thaw()
            one.ready(3).idle()
            result = one.loaded(NUMBERS)
            assert (result.lost, one.wrong(result, NUMBERS)) == ({}, []), "nothing was lost by it"


def test_lookups_of_a_frozen_server_are_misses_at_once_after_it_is_found_out() -> None:
    """The probe under way ends with the connection; the next ones are not even sent."""
    with stores() as served:
        with lookups(served.settings(connect_timeout_s=1.0), probe_timeout_s=NEVER_S) as seen:
            seen.ready(3).ask(NUMBERS)
            share = served.share("b", NUMBERS)
            served.processes["b"].freeze()
            answers = seen.ask(NUMBERS)
            assert sorted(number for number, answer in answers.items() if answer.present is None) == share
            batches = seen.prober.statistics().batches
            again = seen.ask(share)
            assert {answer.reason for answer in again.values()} == {MissReason.BREAKER}
            assert seen.prober.statistics().batches == batches
            assert seen.prober.servers_lost == 1
            served.processes["b"].thaw()
            seen.ready(3)
            assert {answer.present for answer in seen.ask(share).values()} == {False}


def test_a_server_that_is_frozen_and_killed_frees_the_slots() -> None:
    """The end of its process is proof enough, and another one takes its place under its address."""
    with stores() as served:
        settings = served.settings(op_timeout_s=NEVER_S)
        with rank(settings, plan=staging_plan(16), wait_timeout_s=NEVER_S) as one:
            one.ready(3).stored(NUMBERS)
            share = served.share("b", NUMBERS)
            served.processes["b"].freeze()
            assert one.result(one.load(share[:8])).lost == {LossReason.BREAKER: 8}
            served.processes["b"].kill()
            one.idle()
            served.processes["b"].start()
            assert one.ready(3).loaded(share).lost == {LossReason.EVICTED: len(share)}
            one.stored(share)
            result = one.loaded(NUMBERS)
            assert (result.lost, one.wrong(result, NUMBERS)) == ({}, [])
