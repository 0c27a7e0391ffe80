"""Tables of benchmark rows: medians over the rounds with their spread, and the ratio to memcpy of the same round.

``python -m benchmarks.report FILE...``; rows of other systems in the same files stand beside ours. With ``--medians``
it prints one row per case in place of the tables: what is small enough to keep (``benchmarks/results``).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.rows import Row, read_rows, write_row

BASELINE = "limit-memcpy-memfd"
NOTHING = "-"
CASE_FIELDS = ("peer", "op", "value_bytes", "batch", "concurrency", "verify")
"""What rows of one case share, whatever their round."""

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


def medians(rows: Sequence[Row]) -> list[dict[str, object]]:
    """One row per case, in order: the median of every figure over the rounds, and how far the rate went both ways.

    ``rounds`` counts them in place of ``round``; ``x_memcpy`` is the median of the ratios, round by round.
    """
    groups = group(rows)
    made = []
    for key in sorted(groups):
        same = groups[key]
        row: dict[str, object] = {name: same[0][name] for name in CASE_FIELDS if name in same[0]}
        for name in same[0]:
            if name not in (*CASE_FIELDS, "round"):
                values = figures(same, name)
                row[name] = median(values) if values else same[0][name]
        ratio, rates = ratios(groups, key), figures(same, "gbps")
        row |= {"gbps_min": min(rates, default=None), "gbps_max": max(rates, default=None), "rounds": len(same)}
        row["x_memcpy"] = None if ratio is None or key.peer == BASELINE else round(ratio.median, 3)
        made.append(row)
    return made


def main(arguments: Sequence[str]) -> None:
    """Print the report, or the medians, of some files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--medians", action="store_true", help="rows in place of tables")
    parser.add_argument("paths", nargs="+", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = [row for path in options.paths for row in read_rows(Path(path).read_text().splitlines())]
    if not options.medians:
        print(report(rows))
        return
    for row in medians(rows):
        write_row(row, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
