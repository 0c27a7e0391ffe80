"""The presence cache's verdicts over time, and the livelock guard."""

from __future__ import annotations

import pytest

from memkv_vllm.engine.presence import PresenceCache, RequestGuard, Verdict
from memkv_vllm.types import MissReason

HIT, MISS, PENDING = Verdict.HIT, Verdict.MISS, Verdict.PENDING


@pytest.fixture
def cache() -> PresenceCache:
    return PresenceCache(hit_ttl=30, miss_ttl=20, lookup_timeout=1, max_entries=4)


def test_first_sight_is_pending_and_probed_once(cache: PresenceCache) -> None:
    assert cache.lookup(b"a", 0) is PENDING
    assert cache.lookup(b"b", 0) is PENDING
    assert cache.lookup(b"a", 0.5) is PENDING
    assert cache.take_probes() == [b"a", b"b"]
    assert cache.lookup(b"a", 0.6) is PENDING
    assert cache.take_probes() == []


@pytest.mark.parametrize(("present", "verdict", "ttl"), [(True, HIT, 30), (False, MISS, 20)])
def test_answers_are_trusted_for_their_ttl_then_asked_again(
    cache: PresenceCache, present: bool, verdict: Verdict, ttl: float
) -> None:
    cache.lookup(b"a", 0)
    cache.take_probes()
    cache.answer(b"a", present, now=0.5)
    assert cache.lookup(b"a", 0.5 + ttl - 0.01) is verdict
    assert cache.take_probes() == []
    assert cache.lookup(b"a", 0.5 + ttl) is PENDING
    assert cache.take_probes() == [b"a"]


def test_unanswered_probe_is_a_miss_at_the_deadline(cache: PresenceCache) -> None:
    """Faults P046 and P032: no lookup waits longer than the timeout, and one timeout serves all requests."""
    cache.lookup(b"a", 0)
    cache.take_probes()
    assert cache.lookup(b"a", 0.99) is PENDING
    assert cache.lookup(b"a", 1.0) is MISS
    assert all(cache.lookup(b"a", 1.0 + step) is MISS for step in range(20))
    assert cache.take_probes() == []
    assert cache.statistics().misses == {MissReason.TIMEOUT: 21}
    assert cache.lookup(b"a", 21.0) is PENDING


def test_late_answer_still_counts(cache: PresenceCache) -> None:
    cache.lookup(b"a", 0)
    assert cache.lookup(b"a", 2) is MISS
    cache.answer(b"a", True, now=3)
    assert cache.lookup(b"a", 3) is HIT


def test_unreachable_is_a_short_miss(cache: PresenceCache) -> None:
    cache.lookup(b"a", 0)
    cache.take_probes()
    cache.unreachable([b"a", b"never-seen"], now=0)
    assert cache.lookup(b"a", 0.99) is MISS
    assert cache.statistics().misses == {MissReason.BREAKER: 1}
    assert cache.lookup(b"a", 1.0) is PENDING
    assert cache.take_probes() == [b"a"]


def test_unreachable_is_never_trusted_longer_than_a_miss() -> None:
    cache = PresenceCache(miss_ttl=0.25)
    cache.lookup(b"a", 0)
    cache.unreachable([b"a"], now=0)
    assert cache.lookup(b"a", 0.25) is PENDING


def test_reasons_are_counted_apart(cache: PresenceCache) -> None:
    for key in (b"a", b"b"):
        cache.lookup(key, 0)
    cache.answer(b"a", False, 0)
    cache.answer(b"b", False, 0, MissReason.TIMEOUT)
    for key in (b"a", b"b", b"b"):
        assert cache.lookup(key, 0) is MISS
    cache.count_miss(MissReason.RETRIED)
    stats = cache.statistics()
    assert stats.misses == {MissReason.ABSENT: 1, MissReason.TIMEOUT: 2, MissReason.RETRIED: 1}
    assert (stats.pending, stats.hits, stats.entries) == (2, 0, 2)


def test_stored_clears_a_miss_but_makes_no_hit(cache: PresenceCache) -> None:
    cache.lookup(b"a", 0)
    cache.take_probes()
    cache.answer(b"a", False, 0)
    cache.stored(b"a")
    cache.stored(b"never-seen")
    assert cache.lookup(b"a", 0) is PENDING
    assert cache.take_probes() == [b"a"]
    cache.answer(b"a", True, 0)
    cache.stored(b"a")
    assert cache.lookup(b"a", 0) is HIT


@pytest.mark.parametrize(("present", "then"), [(False, PENDING), (True, HIT)])
def test_absent_that_crossed_a_store_is_not_kept(cache: PresenceCache, present: bool, then: Verdict) -> None:
    cache.lookup(b"a", 0)
    cache.take_probes()
    cache.stored(b"a")
    cache.answer(b"a", present, 0)
    assert cache.lookup(b"a", 0) is then


def test_absent_of_a_probe_that_left_after_the_store_is_kept(cache: PresenceCache) -> None:
    cache.lookup(b"a", 0)
    cache.stored(b"a")
    cache.take_probes()
    cache.answer(b"a", False, 0)
    assert cache.lookup(b"a", 0) is MISS


def test_drop_hit_asks_again(cache: PresenceCache) -> None:
    cache.lookup(b"a", 0)
    cache.take_probes()
    cache.answer(b"a", True, 0)
    cache.drop_hit(b"a")
    cache.drop_hit(b"never-seen")
    assert cache.lookup(b"a", 0) is PENDING
    assert cache.take_probes() == [b"a"]


def test_forgotten_hits_are_asked_for_again(cache: PresenceCache) -> None:
    """P084: a server went away, or another took its place. Only what was trusted before is forgotten, misses stay."""
    for prefix, present in ((b"hit", True), (b"miss", False)):
        cache.lookup(prefix, 0)
        cache.answer(prefix, present, 1)
    cache.lookup(b"asked", 1)
    cache.take_probes()
    cache.forget_hits(2)
    assert not cache.known(b"hit", 3), "it would not be stored again"
    assert (cache.lookup(b"hit", 3), cache.lookup(b"miss", 3), cache.lookup(b"asked", 1.5)) == (PENDING, MISS, PENDING)
    assert cache.take_probes() == [b"hit"]
    for prefix in (b"hit", b"asked"):
        cache.answer(prefix, True, 4)
        assert cache.lookup(prefix, 5) is HIT
        assert cache.known(prefix, 5)


def test_a_forgotten_hit_serves_no_waiting_request(cache: PresenceCache) -> None:
    """The longer trust for a request that waits for its other blocks ends with it too."""
    cache.lookup(b"a", 0, asked_since=0)
    cache.answer(b"a", True, 1)
    cache.forget_hits(2)
    assert cache.lookup(b"a", 3, asked_since=0) is PENDING


def test_bounded_least_recently_looked_up_goes_first(cache: PresenceCache) -> None:
    for key in (b"a", b"b", b"c", b"d"):
        cache.lookup(key, 0)
        cache.answer(key, True, 0)
    cache.lookup(b"a", 1)
    cache.lookup(b"e", 1)
    assert cache.lookup(b"a", 1) is HIT
    assert cache.statistics().entries == 4
    assert cache.statistics().evicted == 1
    assert cache.lookup(b"b", 1) is PENDING
    cache.answer(b"c", True, 1)
    assert cache.lookup(b"c", 1) is PENDING, "an answer for an evicted prefix is dropped"


def test_queued_probes_are_bounded_with_the_entries(cache: PresenceCache) -> None:
    for number in range(100):
        cache.lookup(b"%d" % number, 0)
    assert cache.take_probes() == [b"96", b"97", b"98", b"99"]


def test_bad_limits() -> None:
    with pytest.raises(ValueError, match="max_entries"):
        PresenceCache(max_entries=0)
    with pytest.raises(ValueError, match="negative"):
        PresenceCache(hit_ttl=-1)
    with pytest.raises(ValueError, match="max_entries"):
        RequestGuard(0)
    assert "0 of" in repr(PresenceCache())


class TestRequestGuard:
    def test_second_try_of_a_key_by_one_request_is_seen(self) -> None:
        guard = RequestGuard()
        guard.loaded("r", [b"a", b"b"])
        assert guard.seen("r", b"a")
        assert not guard.seen("r", b"c")
        assert not guard.seen("other", b"a")

    @pytest.mark.parametrize("end", ["preempted", "finished"])
    def test_forgotten_at_its_end(self, end: str) -> None:
        guard = RequestGuard()
        guard.loaded("r", [b"a", b"b"])
        guard.loaded("r", [b"b", b"c"])
        assert len(guard) == 3
        getattr(guard, end)("r")
        getattr(guard, end)("never-seen")
        assert not guard.seen("r", b"a")
        assert len(guard) == 0

    def test_bounded_by_forgetting_the_oldest_request(self) -> None:
        guard = RequestGuard(max_entries=4)
        guard.loaded("old", [b"a", b"b"])
        guard.loaded("new", [b"a", b"b", b"c"])
        assert not guard.seen("old", b"a")
        guard.loaded("new", [b"d", b"e"])
        assert len(guard) == 4
        assert guard.seen("new", b"e")
        assert not guard.seen("new", b"a")

    def test_requests_without_loads_cost_nothing(self) -> None:
        guard = RequestGuard()
        for number in range(100):
            guard.loaded(str(number), [])
        assert repr(guard).startswith("RequestGuard(0 requests")


def test_known_asks_nobody() -> None:
    """What the manager uses to leave out stores: true for a trusted hit only, and no probe follows from it."""
    cache = PresenceCache(hit_ttl=10, miss_ttl=10)
    assert not cache.known(b"block", 0.0)
    assert cache.take_probes() == []
    cache.lookup(b"block", 0.0)
    assert not cache.known(b"block", 0.0)
    cache.answer(b"block", True, 1.0)
    assert cache.known(b"block", 10.9)
    assert not cache.known(b"block", 11.0)
    before = cache.statistics()
    cache.known(b"block", 2.0)
    assert cache.statistics() == before


@pytest.mark.parametrize("ttl", [0.0, 0.001])
def test_a_request_never_waits_for_answers_that_expire_in_turn(ttl: float) -> None:
    """A trust shorter than a scheduler step: each block is asked for once, and the request goes on."""
    cache = PresenceCache(hit_ttl=ttl, miss_ttl=ttl)
    asked: list[bytes] = []
    now, verdicts = 100.0, [Verdict.PENDING]
    for step in range(6):
        verdicts = [cache.lookup(prefix, now, 100.0) for prefix in (b"a", b"b")[: step + 1]]
        probes = cache.take_probes()
        asked += probes
        now += 0.5
        for prefix in probes:
            cache.answer(prefix, True, now)
        if len(verdicts) == 2 and Verdict.PENDING not in verdicts:
            break
    assert verdicts == [Verdict.HIT, Verdict.HIT]
    assert asked == [b"a", b"b"]
    # The next request asks anew: that is what a time to live of nothing means.
    assert cache.lookup(b"a", now, now) is Verdict.PENDING


def test_an_answer_does_not_serve_a_waiting_request_for_ever() -> None:
    cache = PresenceCache(hit_ttl=1)
    cache.lookup(b"a", 0.0, 0.0)
    cache.answer(b"a", True, 0.0)
    assert cache.lookup(b"a", 10.9, 0.0) is Verdict.HIT
    assert cache.lookup(b"a", 11.0, 0.0) is Verdict.PENDING


def test_a_probe_that_was_not_answered_in_time_says_so() -> None:
    cache = PresenceCache()
    cache.lookup(b"a", 0.0)
    cache.unreachable([b"a"], 0.5, MissReason.TIMEOUT)
    assert cache.lookup(b"a", 0.6) is Verdict.MISS
    assert cache.statistics().misses == {MissReason.TIMEOUT: 1}
