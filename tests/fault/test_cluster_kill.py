"""One of three real servers is killed under load: it costs its share, and nothing else. P029, P079, P080, P084, M13."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memkv_vllm.types import LossReason, MissReason
from tests.support.ranks import Lookups, Rank, eventually, lookups, prefix_of, rank
from tests.support.stores import Stores, stores

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]

NUMBERS = range(60)
OVER_BOTH = pytest.mark.parametrize("transport", ["loopback", "tcp"])
SERVER_GONE = {LossReason.BREAKER, LossReason.TIMEOUT}


class Load:
    """Loads everything again and again, from a thread of its own, and judges each result."""

    def __init__(self, one: Rank, served: Stores, victim: str) -> None:
        self._one = one
        self._share = set(served.share(victim, NUMBERS))
        self._half = one.half
        self.rounds = 0
        self.reasons: Counter[LossReason] = Counter()
        self.wrong: list[str] = []
        """What must not be."""

    def round(self) -> int:
        """One job over all servers; how many blocks were lost?"""
        result = self._one.loaded(NUMBERS)
        self.rounds += 1
        self.reasons.update(result.lost)
        bad = {block - self._half for block in result.bad_block_ids}
        if not bad <= self._share:
            self.wrong.append(f"blocks of other servers were lost: {sorted(bad - self._share)} {result.lost}")
        if damaged := self._one.wrong(result, NUMBERS):
            self.wrong.append(f"wrong bytes: {damaged}")
        return len(bad)


@contextmanager
def under_load(load: Load) -> Iterator[None]:
    """The load runs meanwhile."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            load.round()

    thread = threading.Thread(target=run, name="load")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def gone(seen: Lookups, one: Rank) -> None:
    """Wait until both sides know that a server is gone."""
    eventually(lambda: one.statistics.servers_ready == 2, "the engine sees its end")
    eventually(lambda: seen.prober.statistics().servers_ready == 2, "the prober sees its end")


@OVER_BOTH
def test_a_killed_server_costs_its_share_and_comes_back_without_a_restart(
    caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    """P079: three servers, one killed under load. Its share misses; the rest goes on; no storm; it returns empty."""
    caplog.set_level(logging.WARNING, "memkv")
    with (
        stores(transport=transport) as served,
        rank(served.settings()) as one,
        lookups(served.settings()) as seen,
    ):
        one.ready(3).stored(NUMBERS)
        seen.ready(3)
        share = served.share("b", NUMBERS)
        others = [number for number in NUMBERS if number not in share]
        assert len(share) > 8
        assert sorted(seen.present(NUMBERS)) == list(NUMBERS)
        load = Load(one, served, "b")
        caplog.clear()
        with under_load(load):
            eventually(lambda: load.rounds > 3, "it runs")
            served.processes["b"].kill()
            gone(seen, one)
            rounds = load.rounds
            eventually(lambda: load.rounds > rounds + 20, "it goes on")
        assert load.wrong == []
        assert set(load.reasons) <= SERVER_GONE
        assert load.round() == len(share), "all of its share, now that it is gone"

        # No question is sent to it: no batch, and the answer is there before the loop does anything else.
        batches = seen.prober.statistics().batches
        answers = seen.ask(share)
        assert {(answer.present, answer.reason) for answer in answers.values()} == {(None, MissReason.BREAKER)}
        assert seen.prober.statistics().batches == batches
        assert sorted(seen.present(NUMBERS)) == others
        # Two links lost it and cannot connect again; slots went into quarantine. A few lines, not one per request.
        assert len(caplog.records) <= 12, [record.getMessage() for record in caplog.records]
        assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]

        with under_load(load):
            served.processes["b"].start()
            one.ready(3)
            seen.ready(3)
        assert load.wrong == []
        assert one.loaded(NUMBERS).lost == {LossReason.EVICTED: len(share)}, (
            "it came back empty: misses, not wrong hits"
        )
        assert sorted(seen.present(NUMBERS)) == others
        assert one.stored(NUMBERS).moved_bytes == len(share) * one.mover.value_bytes
        assert load.round() == 0
        assert sorted(seen.present(NUMBERS)) == list(NUMBERS)
        one.idle()


def test_lookups_for_a_dead_server_are_answered_on_the_spot(capsys: pytest.CaptureFixture[str]) -> None:
    """P029: nothing is sent, waited for or tried on behalf of a lookup, nor does it go to another thread and back.

    Times are printed and not judged; what makes them short is: the answer is there when ``submit`` returns.
    """
    with stores() as served, lookups(served.settings()) as seen:
        seen.ready(3).ask(NUMBERS)
        served.processes["b"].kill()
        eventually(lambda: seen.prober.statistics().servers_ready == 2, "the prober sees its end")
        share = served.share("b", NUMBERS)
        before = seen.prober.statistics()
        taken = []
        for number in range(400):
            start = time.perf_counter()
            seen.prober.submit([prefix_of(share[number % len(share)])])
            answers = seen.prober.poll()
            taken.append(time.perf_counter() - start)
            assert [answer.reason for answer in answers] == [MissReason.BREAKER]
        after = seen.prober.statistics()
        assert (after.batches, after.unreachable) == (before.batches, before.unreachable + 400)
        taken.sort()
        with capsys.disabled():
            print(f"\nlookup of a dead server: p50 {taken[200] * 1e6:.0f} us, p99 {taken[396] * 1e6:.0f} us, n=400")  # noqa: T201


@OVER_BOTH
def test_each_of_three_servers_is_replaced_in_turn_under_load(transport: str) -> None:
    """P080, P084: a rolling restart. The engine goes on; every server returns empty and is filled again."""
    with stores(transport=transport) as served, rank(served.settings()) as one:
        one.ready(3).stored(NUMBERS)
        for name, process in served.processes.items():
            load = Load(one, served, name)
            with under_load(load):
                eventually(lambda: load.rounds > 2, "it runs")  # noqa: B023
                process.kill()
                process.start()
                eventually(lambda: one.statistics.servers_ready == 3, "it is back")
                rounds = load.rounds
                eventually(lambda: load.rounds > rounds + 2, "it goes on")  # noqa: B023
            assert load.wrong == []
            assert set(load.reasons) <= SERVER_GONE | {LossReason.EVICTED}
            one.stored(NUMBERS)
            assert load.round() == 0
        one.idle()
        assert one.statistics.slots_quarantined == 0


def test_the_prober_counts_a_server_that_went_and_one_that_is_another_run() -> None:
    """P084: what a manager forgets its positive answers by."""
    with stores() as served, lookups(served.settings()) as seen:
        assert seen.ready(3).prober.servers_lost == 0
        served.processes["b"].kill()
        eventually(lambda: seen.prober.servers_lost == 1, "it went")
        served.processes["b"].start()
        seen.ready(3)
        assert seen.prober.servers_lost == 2
        assert seen.prober.statistics().connects == {"loopback": 4}
