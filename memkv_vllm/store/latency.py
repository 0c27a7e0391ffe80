"""How long requests take, counted into fixed buckets: bounded memory, one search and two additions a request. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

__all__ = ["BOUNDS_S", "Latency", "LatencyStatistics"]

BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets in seconds: from a lookup in memory to ``limits.transfer_timeout_s``; three or so a
decade, which is enough to see a p99 move and little enough for one series per bucket."""


class LatencyStatistics(NamedTuple):
    """State of a :class:`Latency`; no number of it ever decreases."""

    counts: tuple[int, ...]
    """Requests by bucket (not cumulated): one per bound, and one for those slower than all bounds."""
    num: int
    """Requests in all."""
    sum_s: float


class Latency:
    """A histogram of durations."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one request that took ``seconds``; a clock that went backwards counts as zero."""
        seconds = max(0.0, seconds)
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def statistics(self) -> LatencyStatistics:
        """The counts as they are now."""
        return LatencyStatistics(tuple(self._counts), sum(self._counts), self._sum_s)
