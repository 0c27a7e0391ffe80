"""What admin HTTP remembers over time, in bounded rings: how late the event loop came, and samples for charts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["HISTORY_STEP_S", "History", "LagWindow", "Sample"]

HISTORY_STEP_S = 2.0
LAG_WINDOW = 60
"""Measurements that the worst is taken of: 30 s at two a second."""


class LagWindow:
    """The worst of the last measurements of how late the event loop was."""

    def __init__(self, size: int = LAG_WINDOW) -> None:
        self._last: deque[float] = deque(maxlen=size)

    def add(self, expected_s: float, took_s: float) -> None:
        """Notes that a sleep of ``expected_s`` took ``took_s``."""
        self._last.append(max(0.0, took_s - expected_s))

    @property
    def worst_s(self) -> float:
        """Seconds; 0 before the first measurement."""
        return max(self._last, default=0.0)


class Sample(NamedTuple):
    """One row of the history: counters and gauges of one instant. The page makes rates of them."""

    at_s: float
    """Seconds since the epoch, for the axis."""
    put_bytes: int
    get_bytes: int
    hits: int
    misses: int
    evictions: int
    arena_used: int
    arena_size: int
    disk_used: int
    disk_size: int
    sessions: int

    @classmethod
    def of(cls, statistics: Mapping[str, Any], at_s: float) -> Sample:
        """A row out of the server's statistics; what a part does not have counts as zero."""
        counters, table = statistics["counters"], statistics["table"]["counters"]
        arena, disk = statistics["arena"], statistics.get("disk") or {}
        return cls(
            at_s,
            counters.get("put_bytes", 0),
            counters.get("get_bytes", 0),
            table["hits"],
            table["misses"],
            table["evictions"],
            arena["used"],
            arena["size"],
            disk.get("used_bytes", 0),
            disk.get("size_bytes", 0),
            statistics["server"]["sessions"],
        )


class History:
    """The last rows, and rates over the newest few.

    Args:
        length_s: how far back it goes.
    """

    def __init__(self, length_s: float) -> None:
        self._rows: deque[Sample] = deque(maxlen=max(2, round(length_s / HISTORY_STEP_S)))

    def add(self, sample: Sample) -> None:
        """Takes a row; the oldest goes when the ring is full."""
        self._rows.append(sample)

    def rates(self, window: int = 5) -> dict[str, float]:
        """Per second, over the newest ``window`` steps: bytes in and out, hits, misses, evictions."""
        names = ("put_bytes", "get_bytes", "hits", "misses", "evictions")
        if len(self._rows) < 2:
            return dict.fromkeys((f"{name}_per_s" for name in names), 0.0)
        first, last = self._rows[max(0, len(self._rows) - 1 - window)], self._rows[-1]
        elapsed_s = max(1e-3, last.at_s - first.at_s)
        return {f"{name}_per_s": max(0, getattr(last, name) - getattr(first, name)) / elapsed_s for name in names}

    def newest(self) -> dict[str, Any]:
        """The newest row, for whoever has the ones before it."""
        return {"step_s": HISTORY_STEP_S, "sample": list(self._rows[-1]) if self._rows else []}

    def statistics(self) -> dict[str, Any]:
        """All rows as columns and lists, oldest first."""
        return {"step_s": HISTORY_STEP_S, "columns": list(Sample._fields), "rows": [list(row) for row in self._rows]}
