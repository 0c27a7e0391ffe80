"""Put, get and exists over loopback beside memcpy in the same run: ``python -m benchmarks.bench_loopback``.

Prints the rows as JSON lines; with ``--out FILE`` it writes them there and prints the report instead. Peers:

    memkv-loopback              one ClientConnection, its messages and checksums as the engine makes them
    memkv-engine                the same through TransferEngine, with a mover that copies nothing
    limit-memcpy-memfd          numpy copies between two shared mappings of this process
    limit-memcpy                numpy copies between private arrays
    memkv-loopback-first-touch  the first puts into an arena without pages, and
    memkv-loopback-populated    the same into one that was populated

Every round does all of it once, so that ratios are made of figures that were taken seconds apart.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.engine_driver import EngineDriver
from benchmarks.geometry import (
    ARENA_BYTES,
    BATCHES,
    CONCURRENCIES,
    MAX_BATCH_BYTES,
    MAX_CONCURRENCY,
    MIB,
    MIN_WORKING_SET_BYTES,
    SIZES,
    Durations,
    KeyRing,
    Shape,
)
from benchmarks.memcpy_driver import MemcpyDriver
from benchmarks.report import report
from benchmarks.rows import Case, Measurement, make_error_row, make_row, read_rows, write_row
from benchmarks.server import ServerProcess
from benchmarks.staging import fill, staging_memory
from benchmarks.transport_driver import TransportDriver
from memkv_vllm.transports.memory import HostMemory

Measure = Callable[[], Measurement]
Emit = Callable[[dict[str, object]], None]

TRANSPORT, ENGINE = "memkv-loopback", "memkv-engine"
MEMCPY_SHARED, MEMCPY_PRIVATE = "limit-memcpy-memfd", "limit-memcpy"
FIRST_TOUCH, POPULATED = "memkv-loopback-first-touch", "memkv-loopback-populated"

FIRST_TOUCH_ARENA_BYTES = 256 * MIB
PRIVATE_BATCH = 8
UNVERIFIED_BATCH = 64


class Bench:
    """All drivers of a run, and its cases.

    Args:
        server: shared by all cases but those of the first touch.
        times: of each case.
        emit: takes each row.
    """

    def __init__(self, server: ServerProcess, times: Durations, emit: Emit) -> None:
        self._server = server
        self._times = times
        self._emit = emit
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        server, enter = self._server, self._stack.enter_context
        staging = enter(staging_memory("bench-staging"))
        store = enter(staging_memory("bench-memcpy"))
        self._transport = enter(TransportDriver(server.port, server.key, server.pid, staging))
        self._engines = {size: enter(EngineDriver(server.port, server.key, server.pid, size)) for size in SIZES}
        self._shared = MemcpyDriver(store.array, staging.array)
        private = MAX_CONCURRENCY * max(MIN_WORKING_SET_BYTES, PRIVATE_BATCH * max(SIZES))
        self._private = MemcpyDriver(np.ones(private, np.uint8), np.ones(private, np.uint8))
        self._stack.callback(self._forget)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, number: int) -> None:
        """Every case once."""
        for value_bytes in SIZES:
            for workers in CONCURRENCIES:
                for batch in BATCHES:
                    self._shape(Shape(value_bytes, batch, workers), number)
        for populate in (False, True):
            first_touch(populate, number, self._emit)

    def _shape(self, shape: Shape, number: int) -> None:
        half = Durations(self._times.warm_s / 2, self._times.timed_s / 2)
        for op in ("put", "get"):
            self._case(MEMCPY_SHARED, op, shape, "off", number, partial(self._shared.measure, op, shape, half))
            if shape.batch == PRIVATE_BATCH:
                self._case(MEMCPY_PRIVATE, op, shape, "off", number, partial(self._private.measure, op, shape, half))
        ops = ("put", "get", "exists") if shape.value_bytes == SIZES[0] else ("put", "get")
        self._transport_cases(ops, shape, True, number)
        if shape.batch == UNVERIFIED_BATCH:
            self._transport_cases(("put", "get"), shape, False, number)
        engine, rings = self._engines[shape.value_bytes], make_rings("engine", shape, number)
        for op in ("put", "get"):
            self._case(ENGINE, op, shape, "full", number, partial(engine.measure, op, shape, rings, times=self._times))

    def _transport_cases(self, ops: Sequence[str], shape: Shape, check: bool, number: int) -> None:
        verify = "full" if check else "off"
        rings = make_rings(verify, shape, number)
        for op in ops:
            call = partial(self._transport.measure, op, shape, rings, check=check, times=self._times)
            self._case(TRANSPORT, op, shape, verify, number, call)

    def _case(self, peer: str, op: str, shape: Shape, verify: str, number: int, measure: Measure) -> None:
        case = Case(peer, op, shape.value_bytes, shape.batch, shape.workers, verify, number)
        self._emit(measure_case(case, measure))

    def _forget(self) -> None:
        """Views of the mappings must be gone before they are closed."""
        del self._shared, self._private


def measure_case(case: Case, measure: Measure) -> dict[str, object]:
    """The case's row; that of an error if it failed."""
    load1 = os.getloadavg()[0]
    try:
        return make_row(case, measure(), load1)
    except Exception as error:
        return make_error_row(case, error)


def make_rings(name: str, shape: Shape, number: int) -> list[KeyRing]:
    """A ring per worker, with keys that no other case has."""
    tag = f"{name}-{shape.value_bytes}-{shape.batch}-{shape.workers}-{number}"
    return [KeyRing(f"{tag}-{worker}", shape) for worker in range(shape.workers)]


def first_touch(populate: bool, number: int, emit: Emit) -> None:
    """Put once around an arena that nobody has written to yet."""
    shape = Shape(max(SIZES), 8, 1)
    case = Case(POPULATED if populate else FIRST_TOUCH, "put", shape.value_bytes, shape.batch, 1, "off", number)
    with (
        ServerProcess(FIRST_TOUCH_ARENA_BYTES, populate=populate) as server,
        HostMemory.create("bench-staging", MAX_BATCH_BYTES) as staging,
        TransportDriver(server.port, server.key, server.pid, staging) as transport,
    ):
        fill(staging.array[: shape.batch_bytes])
        rings = make_rings("first", shape, number)
        calls = FIRST_TOUCH_ARENA_BYTES // shape.batch_bytes
        emit(measure_case(case, partial(transport.measure_calls, "put", shape, rings, calls)))


def rounds_of(arguments: argparse.Namespace) -> Iterator[int]:
    """Numbers of the rounds: from ``BENCH_ROUND`` on where another driver counts them."""
    first = int(os.environ.get("BENCH_ROUND", "1"))
    return iter(range(first, first + arguments.rounds))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.15, help="timed part of a case (default 0.15)")
    parser.add_argument("--warm", type=float, default=0.05, help="untimed part before it (default 0.05)")
    parser.add_argument("--out", type=Path, help="write the rows here and print the report")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; 1 if a case failed."""
    options = parse(arguments)
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
        stream = sys.stdout if options.out is None else stack.enter_context(options.out.open("w"))

        def emit(row: dict[str, object]) -> None:
            rows.append(row)
            write_row(row, stream)

        server = stack.enter_context(ServerProcess(ARENA_BYTES))
        bench = stack.enter_context(Bench(server, Durations(options.warm, options.seconds), emit))
        for number in rounds_of(options):
            bench.round(number)
    if options.out is not None:
        with options.out.open() as lines:
            print(report(list(read_rows(lines))))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
