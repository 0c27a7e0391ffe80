"""Latency buckets."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.store.latency import BOUNDS_S, Latency


def test_bounds_ascend() -> None:
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_a_duration_on_a_bound_belongs_below_it() -> None:
    """Prometheus' ``le`` means less or equal."""
    latency = Latency()
    for seconds in (0, BOUNDS_S[0], BOUNDS_S[0] * 1.01, BOUNDS_S[-1], BOUNDS_S[-1] * 2, -1.0):
        latency.observe(seconds)
    counts = latency.statistics().counts
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (3, 1, 1, 1)


@given(st.lists(st.floats(-1, 100)))
def test_nothing_is_lost_and_nothing_decreases(durations: list[float]) -> None:
    """P095."""
    latency = Latency()
    before = latency.statistics()
    for seconds in durations:
        latency.observe(seconds)
        after = latency.statistics()
        assert after.num == before.num + 1
        assert after.sum_s >= before.sum_s
        changed = [at for at, (old, new) in enumerate(zip(before.counts, after.counts, strict=True)) if new != old]
        assert changed == [bisect_left(BOUNDS_S, max(0.0, seconds))]
        before = after
    assert sum(before.counts) == before.num == len(durations)
