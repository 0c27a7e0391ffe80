"""Put and get over TCP of this machine: ``python -m benchmarks.bench_tcp``.

Prints the rows as JSON lines, with the peer ``memkv-tcp`` and these beside it:

    limit-tcp    one process sends to another over one connection as fast as both can, with the same sizes of calls

With ``--peer-command COMMAND`` it runs rounds in pairs with another system's script that prints the same rows (it gets
``BENCH_ROUND``), and prints for each case the ratio of the medians with the spread of the rounds' ratios:

    python -m benchmarks.bench_tcp --rounds 5 --peer-name mooncake-store-tcp \\
        --peer-command 'venv/bin/python bench_mooncake.py tcp' --out results/tcp.jsonl
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.bench_loopback import make_rings, measure_case
from benchmarks.geometry import ARENA_BYTES, BATCHES, CONCURRENCIES, MAX_BATCH_BYTES, SIZES, Durations, Shape
from benchmarks.rows import Case, read_rows, write_row
from benchmarks.server import IDLE_POLL_US, ServerProcess
from benchmarks.staging import staging_memory
from benchmarks.tcp_limit import TcpLimit
from benchmarks.transport_driver import TransportDriver

PEER, LIMIT = "memkv-tcp", "limit-tcp"
MIN_ARENA_BYTES = ARENA_BYTES

FIGURES = (("gbps", "cpu_s_per_gb"), ("p50_us", "cpu_us_per_key"))
"""What is compared, speed and cost: of puts and gets, and of probes."""

Emit = Callable[[dict[str, object]], None]


def one_round(number: int, options: argparse.Namespace, emit: Emit) -> None:
    """Every case once; a server and a client of its own for each size, so that no put evicts values of another one."""
    times = Durations(options.warm, options.seconds)
    for value_bytes in options.sizes:
        with ExitStack() as stack:
            server = stack.enter_context(
                ServerProcess(MIN_ARENA_BYTES, transport="tcp", idle_poll_us=options.idle_poll_us)
            )
            staging = stack.enter_context(staging_memory("bench-staging"))
            driver = stack.enter_context(
                TransportDriver(
                    server.port, server.key, server.pid, staging, "tcp", num_connections=options.num_connections
                )
            )
            for workers in options.workers:
                for batch in options.batches:
                    shape = Shape(value_bytes, batch, workers)
                    for verify in options.verify:
                        rings = make_rings(verify, shape, number)
                        probes = value_bytes == min(options.sizes) and verify == "off"
                        for op in ("put", "get", "exists") if probes else ("put", "get"):
                            call = partial(driver.measure, op, shape, rings, check=verify == "full", times=times)
                            case = Case(PEER, op, value_bytes, batch, workers, verify, number)
                            emit(measure_case(case, call))
    if options.limit:
        with TcpLimit(MAX_BATCH_BYTES) as limit:
            for value_bytes in options.sizes:
                for batch in options.batches:
                    shape = Shape(value_bytes, batch, 1)
                    for op in ("put", "get"):
                        case = Case(LIMIT, op, value_bytes, batch, 1, "off", number)
                        emit(measure_case(case, partial(limit.measure, op, shape, times)))


def peer_round(number: int, command: str, folder: Path | None, emit: Emit) -> None:
    """Run the other system's script once and take its rows."""
    environ = {**os.environ, "BENCH_ROUND": str(number)}
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True, env=environ, cwd=folder, check=False)
    for row in read_rows(done.stdout.splitlines()):
        emit({**row, "round": number})


def ratios(rows: Sequence[dict[str, object]], peer: str, verify: str) -> list[str]:
    """A line per case that both have: ours against theirs, of medians, with the rounds' lowest and highest.

    Puts and gets by GB/s and CPU per GB, probes by the median latency of a call and CPU per key.
    """
    seen: dict[tuple[object, ...], dict[str, dict[object, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        ours = row.get("peer") == PEER and row.get("verify") == verify
        if "error" in row or not (ours or row.get("peer") == peer):
            continue
        key = (row["op"], row["value_bytes"], row["concurrency"], row["batch"])
        figures = {name: float(str(row[name])) for name in FIGURES[row["op"] == "exists"]}
        seen[key]["ours" if ours else "theirs"][row["round"]] = figures
    lines = [f"{'case':36s} {'GB/s or us':>15s} {'ratio':>22s} {'CPU-s/GB, us/key':>16s} {'ratio':>22s}"]
    for (op, size, workers, batch), both in sorted(seen.items(), key=str):
        if {"ours", "theirs"} <= both.keys():
            label = f"{op} {int(str(size)) >> 10} KiB x {batch}, {workers} at once, {verify}"
            speed, cpu = FIGURES[op == "exists"]
            lines.append(f"{label:36s} {_compared(both, speed)} {_compared(both, cpu)}")
    return lines


def _compared(both: dict[str, dict[object, dict[str, float]]], name: str) -> str:
    ours, theirs = both["ours"], both["theirs"]
    mine, other = (median(figures[name] for figures in side.values()) for side in (ours, theirs))
    pairs = [
        ours[number][name] / theirs[number][name] for number in ours.keys() & theirs.keys() if theirs[number][name]
    ]
    spread = f"[{min(pairs):.2f}-{max(pairs):.2f}]" if pairs else ""
    ratio = f"{mine / other:.2f} {spread}" if other else "-"
    return f"{f'{mine:.2f} : {other:.2f}':>15s} {ratio:>22s}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="timed part of a case (default 0.6)")
    parser.add_argument("--warm", type=float, default=0.15, help="untimed part before it (default 0.15)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--workers", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--verify", nargs="+", choices=("off", "full"), default=("off", "full"))
    parser.add_argument("--num-connections", type=int, default=4)
    parser.add_argument("--idle-poll-us", type=int, default=IDLE_POLL_US, help="the server's setting of that name")
    parser.add_argument("--limit", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peer-command", help="another system's script, run once a round")
    parser.add_argument("--peer-folder", type=Path, help="where to run it")
    parser.add_argument("--peer-name", default="mooncake-store-tcp", help="which of its rows to compare with")
    parser.add_argument("--out", type=Path, help="write the rows here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; 1 if a case failed."""
    options = parse(arguments)
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        stream = sys.stdout if options.out is None else stack.enter_context(options.out.open("w"))

        def emit(row: dict[str, object]) -> None:
            rows.append(row)
            write_row(row, stream)

        for number in range(1, options.rounds + 1):
            one_round(number, options, emit)
            if options.peer_command:
                peer_round(number, options.peer_command, options.peer_folder, emit)
    if options.peer_command:
        for verify in options.verify:
            print(*ratios(rows, options.peer_name, verify), sep="\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
