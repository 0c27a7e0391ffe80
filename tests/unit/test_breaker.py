"""Breaker and backoff, with time and chance as arguments."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from memkv_vllm.engine.breaker import Allowance, Backoff, Breaker, BreakerState


def full() -> float:
    """Jitter at its largest (just under 1 in real life): delays are exact."""
    return 1.0


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(full)
    for _ in range(3):
        breaker.failed(now)
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(full)
    breaker.failed(0)
    breaker.failed(0)
    breaker.succeeded(0)
    breaker.failed(0)
    breaker.failed(0)
    assert breaker.allow(0)
    breaker.failed(0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.retry_at == 1.0
    assert not breaker.allow(0.99)


def test_one_probe_at_a_time_and_success_closes() -> None:
    breaker = opened()
    assert breaker.allow(1.0)
    assert "half_open" in repr(breaker)
    assert not breaker.allow(1.1)
    breaker.succeeded(1.2)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.retry_at is None
    for _ in range(3):
        breaker.failed(2.0)
    assert breaker.retry_at == 3.0, "the open time starts at its first length again"


def test_open_time_doubles_up_to_the_limit() -> None:
    breaker = opened()
    waits = []
    for _ in range(7):
        now = breaker.retry_at
        assert now is not None
        assert breaker.allow(now)
        breaker.failed(now)
        assert breaker.retry_at is not None
        waits.append(breaker.retry_at - now)
    assert waits == [2, 4, 8, 16, 30, 30, 30]


def test_late_results_of_old_requests_do_not_move_an_open_breaker() -> None:
    breaker = opened()
    breaker.failed(0.5)
    breaker.succeeded(0.5)
    assert (breaker.state, breaker.retry_at) == (BreakerState.OPEN, 1.0)


def test_a_lost_probe_does_not_block_for_ever() -> None:
    breaker = opened()
    assert breaker.allow(1.0)
    assert not breaker.allow(1.9)
    assert breaker.allow(2.0)


def test_jitter_stays_between_half_and_all() -> None:
    backoff = Backoff(0.1, 5.0, random.Random(1).random)
    for attempt in range(200):
        limit = min(5.0, 0.1 * 2.0**attempt)
        assert limit / 2 <= backoff.next_delay() <= limit
    backoff.reset()
    assert backoff.next_delay() <= 0.1


def test_two_clients_do_not_come_back_at_once() -> None:
    first, second = (Backoff(1, 8, random.Random(seed).random) for seed in (1, 2))
    assert [first.next_delay() for _ in range(4)] != [second.next_delay() for _ in range(4)]


def test_no_herd_of_clients() -> None:
    """300 clients that lost a server in one moment come back spread out, at every attempt."""
    clients = [Backoff(0.05, 2.0, random.Random(seed).random) for seed in range(300)]
    for attempt in range(8):
        full_s = min(2.0, 0.05 * 2**attempt)
        delays = [client.next_delay() for client in clients]
        tenths = Counter(int(10 * delay / full_s) for delay in delays)
        # Uniform over the upper half, so 60 of 300 in each of its tenths; 6 standard deviations are 42.
        assert max(tenths.values()) < 60 + 42, f"attempt {attempt}: {tenths}"


def test_an_allowance_is_a_burst_and_then_one_in_a_while() -> None:
    lines = Allowance(3, 10.0)
    assert [lines.take(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert not lines.take(109.9)
    assert lines.take(110.0)
    assert not lines.take(119.0)
    assert [lines.take(1000.0) for _ in range(4)] == [True, True, True, False], "never more than the burst at once"
    assert not lines.take(900.0), "a clock that goes back earns nothing"


def test_a_flood_is_bounded_by_time() -> None:
    lines = Allowance(8, 10.0)
    said = sum(lines.take(number / 1000) for number in range(100_000))
    assert said == 8 + 9, "100 s at 1000 a second"


def test_bad_limits() -> None:
    for burst, every_s in ((0, 1.0), (1, 0.0)):
        with pytest.raises(ValueError, match="positive"):
            Allowance(burst, every_s)
    with pytest.raises(ValueError, match="first_s"):
        Backoff(2, 1, full)
    with pytest.raises(ValueError, match="failures_to_open"):
        Breaker(full, failures_to_open=0)
    assert "closed" in repr(Breaker(full))
