"""What must be true once all clients of a soak are gone: judgements of what STAT, the logs and the counts say. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["coverage", "hit_ratio", "log_problems", "rest_problems", "server_coverage"]

GRANULE = 4096
MUST_HAPPEN = (
    "get_ok", "load_good", "store_good", "looked_for_removed", "delete_ok", "resets", "reported_bad", "waits",
)  # fmt: skip
"""Counts without which a soak has shown nothing about what they name."""
BAD_LINES = re.compile(
    r"Traceback|exception=|internal_error|leaked_reservation|level=critical|Fatal Python|MemoryError|level=error"
)
BAD_COUNTERS = ("internal_error", "leaked_reservations", "bulk_error", "bulk_wrong_count")
TOLERATED_LINES = re.compile(r"event=bulk\.abandoned .*reason=bulk_overrun")
"""A peer that was frozen in the middle of a transfer."""


def rest_problems(statistics: Mapping[str, Any]) -> list[str]:
    """Why a server that nobody uses but the asker is not at rest."""
    server, arena, table = statistics["server"], statistics["arena"], statistics["table"]
    used, values, extents = arena["used"], table["bytes_used"], arena["extents"]
    expected = {
        "server.sessions": (server["sessions"], 1),
        "server.inflight": (server["inflight"], 1),
        "table.reserved": (table["reserved"], 0),
        "table.pinned": (table["pinned"], 0),
        "table.stale": (table["stale"], 0),
        "table.fetching": (table["fetching"], 0),
        "table.writing": (table["writing"], 0),
        "arena.extents": (extents, table["entries"] - table["on_disk"]),
        "sessions in limbo": (sum(session["limbo"] for session in statistics["sessions"]), 0),
    }
    problems = [f"{name} is {found}, expected {right}" for name, (found, right) in expected.items() if found != right]
    # Each value takes whole granules: less than one of them is lost per value.
    if not values <= used < values + extents * GRANULE + 1:
        problems.append(f"arena.used is {used}, but the {extents} values have {values} bytes")
    counters = statistics["counters"]
    return problems + [f"counter {name} is {counters[name]}" for name in BAD_COUNTERS if counters.get(name)]


def log_problems(text: str) -> list[str]:
    """Lines of a server's log that must not be there."""
    return [line for line in text.splitlines() if BAD_LINES.search(line) and not TOLERATED_LINES.search(line)]


def coverage(counts: Mapping[str, int]) -> list[str]:
    """What the clients did not see happen, so that the soak says nothing about it."""
    return [f"{name} is 0: nothing was shown about it" for name in MUST_HAPPEN if not counts.get(name)]


def server_coverage(statistics: Collection[Mapping[str, Any]]) -> list[str]:
    """The same of what the servers did in their last lives: evict, and read from disk where there is one."""
    counters = [each["table"]["counters"] for each in statistics]
    disks = [each["table"]["counters"] for each in statistics if each.get("disk") is not None]
    problems = []
    if not sum(each["evictions"] + each["demotions"] for each in counters):
        problems.append("no server evicted anything: their arenas were never full")
    if disks and not sum(each["fetches"] for each in disks):
        problems.append("no server read anything from its disk")
    return problems


def hit_ratio(counts: Mapping[str, int]) -> float:
    """Part of the values asked for that arrived; lookups for what must be absent do not count."""
    hits = counts.get("get_ok", 0) + counts.get("load_good", 0)
    lost = sum(number for name, number in counts.items() if name.startswith("load_lost_")) + counts.get("get_absent", 0)
    return hits / (hits + lost) if hits else 0.0
