"""The rows that every benchmark here prints: one JSON object per measured case, one per line.

The names are those of the comparisons with other systems, so that rows of both can stand in one file and be joined on
(op, value_bytes, batch, concurrency). ``gbps`` counts 1e9 bytes of payload per second; a call moves ``batch`` values.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

Row = Mapping[str, object]

UNIT = "GB/s"
_NS = 1_000_000_000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.clock_getcpuclockid.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]


@dataclass(frozen=True)
class Case:
    """What is measured: the fields that rows are joined on, and where the figure comes from."""

    peer: str
    op: str
    """``put``, ``get`` or ``exists``."""
    value_bytes: int
    batch: int
    concurrency: int
    verify: str
    """``full``: values are checksummed by the writer, checked by the server and by the reader; ``off``: by nobody."""
    round: int = 0


@dataclass
class Measurement:
    """What was seen of a case: the time of each call, and wall and CPU seconds of the whole."""

    latencies_ns: list[int] = field(default_factory=list)
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ``ordered`` values lie; 0 for none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def make_row(case: Case, seen: Measurement, load1: float) -> dict[str, object]:
    """The row of a case.

    Args:
        case: what was measured.
        seen: what was seen of it.
        load1: load average of the last minute when the case began.
    """
    latencies = sorted(seen.latencies_ns)
    keys = len(latencies) * case.batch
    payload_gb = 0.0 if case.op == "exists" else keys * case.value_bytes / 1e9
    cpu_s = seen.client_cpu_s + seen.server_cpu_s
    return {
        "peer": case.peer,
        "op": case.op,
        "value_bytes": case.value_bytes,
        "batch": case.batch,
        "concurrency": case.concurrency,
        "gbps": round(payload_gb / seen.wall_s, 4) if seen.wall_s else 0.0,
        "p50_us": round(percentile(latencies, 0.50) / 1e3, 1),
        "p99_us": round(percentile(latencies, 0.99) / 1e3, 1),
        "cpu_s_per_gb": round(cpu_s / payload_gb, 4) if payload_gb else None,
        "calls": len(latencies),
        "wall_s": round(seen.wall_s, 4),
        "kops": round(keys / seen.wall_s / 1e3, 3) if seen.wall_s else 0.0,
        "cpu_us_per_key": round(cpu_s / keys * 1e6, 2) if keys else None,
        "cpu_client_s": round(seen.client_cpu_s, 4),
        "cpu_server_s": round(seen.server_cpu_s, 4),
        "load1": round(load1, 2),
        "round": case.round,
        "unit": UNIT,
        "verify": case.verify,
    }


def make_error_row(case: Case, error: BaseException) -> dict[str, object]:
    """The row of a case that failed: what was to be measured, and why it was not."""
    return {
        "peer": case.peer,
        "op": case.op,
        "value_bytes": case.value_bytes,
        "batch": case.batch,
        "concurrency": case.concurrency,
        "verify": case.verify,
        "round": case.round,
        "error": repr(error)[:300],
    }


def write_row(row: Row, stream: TextIO) -> None:
    """Print a row as one line, at once."""
    print(json.dumps(row), file=stream, flush=True)


def read_rows(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    """The rows in ``lines``; what is no row (log lines of a peer) is left out."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "peer" in row and "op" in row:
            yield row


class CpuClock:
    """User and system seconds of this process and of one server process, since the clock was made.

    Args:
        server_pid: None where there is no server.
    """

    def __init__(self, server_pid: int | None = None) -> None:
        self._server = None if server_pid is None else _cpu_clock_of(server_pid)
        self._start = self._read()

    def seconds(self) -> tuple[float, float]:
        """Of this process, and of the server."""
        client, server = self._read()
        return (client - self._start[0]) / _NS, (server - self._start[1]) / _NS

    def _read(self) -> tuple[int, int]:
        return time.process_time_ns(), time.clock_gettime_ns(self._server) if self._server is not None else 0


def _cpu_clock_of(pid: int) -> int:
    clock = ctypes.c_int()
    if error := _libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error), f"CPU clock of process {pid}")
    return clock.value


class Stopwatch:
    """Fills a :class:`Measurement` with the wall and CPU seconds of the ``with`` block."""

    def __init__(self, server_pid: int | None = None) -> None:
        self.seen = Measurement()
        self._server_pid = server_pid

    def __enter__(self) -> Measurement:
        self._cpu, self._start_ns = CpuClock(self._server_pid), time.perf_counter_ns()
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.seen.wall_s = (time.perf_counter_ns() - self._start_ns) / _NS
        self.seen.client_cpu_s, self.seen.server_cpu_s = self._cpu.seconds()
