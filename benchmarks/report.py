"""Tables of benchmark rows: medians over the rounds with their spread, and the ratio to memcpy of the same round.

``python -m benchmarks.report FILE...``; rows of other systems in the same files stand beside ours.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.rows import Row, read_rows

BASELINE = "limit-memcpy-memfd"
NOTHING = "-"

Table = list[list[str]]


class Key(NamedTuple):
    """What rows of several rounds have in common. Where it is not said, rows are of no verify mode."""

    op: str
    value_bytes: int
    peer: str
    verify: str
    concurrency: int
    batch: int


class Spread(NamedTuple):
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no values."""
        return cls(median(values), min(values), max(values)) if values else None


def text_of(spread: Spread | None, digits: int) -> str:
    """``median [low-high]``."""
    if spread is None:
        return NOTHING
    return f"{spread.median:.{digits}f} [{spread.low:.{digits}f}-{spread.high:.{digits}f}]"


def number(row: Row, name: str) -> float | None:
    """A figure of a row; None where it does not apply."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def key_of(row: Row) -> Key:
    """What the row is grouped by."""

    def whole(name: str) -> int:
        return int(number(row, name) or 0)

    op = str(row["op"])
    size = 0 if op == "exists" else whole("value_bytes")
    return Key(op, size, str(row["peer"]), str(row.get("verify", "")), whole("concurrency"), whole("batch"))


def group(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """Rows without errors by what they measure."""
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        if "error" not in row:
            groups[key_of(row)].append(row)
    return groups


def figures(rows: Sequence[Row], name: str) -> list[float]:
    """One figure of every row that has it."""
    return [value for row in rows if (value := number(row, name)) is not None]


def ratios(groups: Mapping[Key, Sequence[Row]], key: Key) -> Spread | None:
    """Rate of ``key`` over that of memcpy of the same shape, round by round."""
    same = [each for each in groups if each.peer == BASELINE and _shape(each) == _shape(key)]
    by_round: dict[float | None, list[float]] = defaultdict(list)
    for each in same:
        for row in groups[each]:
            by_round[number(row, "round")] += figures([row], "gbps")
    values = []
    for row in groups[key]:
        base, rate = by_round.get(number(row, "round")), number(row, "gbps")
        if base and rate is not None and median(base) > 0:
            values.append(rate / median(base))
    return Spread.of(values)


def _shape(key: Key) -> tuple[str, int, int, int]:
    return key.op, key.value_bytes, key.concurrency, key.batch


def rate_table(groups: Mapping[Key, Sequence[Row]], keys: Sequence[Key]) -> Table:
    """Of puts or gets of one size."""
    table = [["peer", "verify", "workers", "batch", "GB/s", "x memcpy", "p50 us", "p99 us", "CPU s/GB", "rounds"]]
    for key in keys:
        rows = groups[key]
        spreads = [
            text_of(Spread.of(figures(rows, "gbps")), 2),
            text_of(None if key.peer == BASELINE else ratios(groups, key), 2),
            text_of(Spread.of(figures(rows, "p50_us")), 0),
            text_of(Spread.of(figures(rows, "p99_us")), 0),
            text_of(Spread.of(figures(rows, "cpu_s_per_gb")), 2),
        ]
        table.append([key.peer, key.verify, str(key.concurrency), str(key.batch), *spreads, str(len(rows))])
    return table


def probe_table(groups: Mapping[Key, Sequence[Row]], keys: Sequence[Key]) -> Table:
    """Of exists."""
    table = [["peer", "workers", "batch", "kilokeys/s", "p50 us", "p99 us", "CPU us/key", "rounds"]]
    for key in keys:
        rows = groups[key]
        spreads = [
            text_of(Spread.of(figures(rows, "kops")), 1),
            text_of(Spread.of(figures(rows, "p50_us")), 0),
            text_of(Spread.of(figures(rows, "p99_us")), 0),
            text_of(Spread.of(figures(rows, "cpu_us_per_key")), 1),
        ]
        table.append([key.peer, str(key.concurrency), str(key.batch), *spreads, str(len(rows))])
    return table


def lines_of(table: Table) -> list[str]:
    """The table in columns, as Markdown shows it too."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in table
    ]
    return [rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]]


def report(rows: Sequence[Row]) -> str:
    """Everything in ``rows``: a table per operation and size, the load that the machine had, and what failed."""
    groups = group(rows)
    lines: list[str] = []
    for op, value_bytes in sorted({(key.op, key.value_bytes) for key in groups}):
        keys = sorted(key for key in groups if (key.op, key.value_bytes) == (op, value_bytes))
        title = op if op == "exists" else f"{op}, values of {value_bytes / 1024:g} KiB"
        table = probe_table(groups, keys) if op == "exists" else rate_table(groups, keys)
        lines += [f"{title}: median [lowest-highest] of the rounds", "", *lines_of(table), ""]
    load = Spread.of(figures(rows, "load1"))
    lines.append(f"load average while measuring: {text_of(load, 1)}; x memcpy: over {BASELINE} of the same round")
    lines += [f"failed: {row['peer']} {row['op']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


def main(paths: Sequence[str]) -> None:
    """Print the report of some files."""
    rows = [row for path in paths for row in read_rows(Path(path).read_text().splitlines())]
    print(report(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
