"""Put and get over verbs beside a bare pair of queue pairs in the same run: ``python -m benchmarks.bench_verbs``.

Needs an RDMA device that reaches itself: the VM of ``make test-rdma`` has soft-RoCE. There the kernel moves all bytes
inside of the post, on the one CPU that client and server share; so it shows what the product adds to the moving of the
bytes, and says nothing about a NIC.

    python -m tests.rdma.vm --rails 2 --mem 3000 -- .venv/bin/python -m benchmarks.bench_verbs --out FILE

Peers, in turns in every round, so that ratios are made of figures that were taken seconds apart:

    memkv-verbs     a server process, and one connection with an engine's messages; verify ``off``, and ``full``: values
                    are checksummed by the writer, checked by the server and checked again by the reader
    limit-verbs     two connected queue pairs in this process: READs from a region as large as the staging memory into
                    one as large as the arena's working set (put), WRITEs the other way (get), posted as the server does
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from benchmarks.geometry import Durations, KeyRing, Shape
from benchmarks.rows import Case, Measurement, make_row, write_row
from benchmarks.server import ServerProcess
from benchmarks.staging import fill
from benchmarks.transport_driver import TransportDriver
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.provider import Opcode
from memkv_vllm.transports.verbs.providers import load_provider
from tests.support.provider_ends import End, batch, connect, wait

VALUE_BYTES = 2560 << 10
BATCH = 8
ARENA_BYTES = 512 << 20
MTU, MAX_READS = 4096, 16
PRODUCT, LIMIT = "memkv-verbs", "limit-verbs"
AIM = 0.9
"""Of the bare pair's rate, with verify off."""


class BarePair:
    """Two connected queue pairs of one process on ``device``."""

    def __init__(self, device: str) -> None:
        provider = load_provider()
        self._stack = ExitStack()
        self._near = End(provider, device, length=ARENA_BYTES)
        self._stack.callback(self._near.close)
        self._far = End(provider, device, length=VALUE_BYTES * BATCH)
        self._stack.callback(self._far.close)
        fill(self._near.bytes)
        fill(self._far.bytes)
        connect(self._near, self._far, mtu=MTU, max_reads=MAX_READS)

    def close(self) -> None:
        """Release it."""
        self._stack.close()

    def measure(self, op: str, seconds: float) -> Measurement:
        """Move batches for so long, one after the other."""
        opcode = Opcode.READ if op == "put" else Opcode.WRITE
        signalled = [False] * (BATCH - 1) + [True]
        seen, at, step = Measurement(), 0, VALUE_BYTES * BATCH
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            start_ns = time.perf_counter_ns()
            work = batch(self._near, self._far, opcode, BATCH, VALUE_BYTES, signalled=signalled)
            work.local[:] += at
            self._near.queue_pair.post(work)
            (completion,) = wait(self._near, 1)
            if completion.status:
                raise RuntimeError(f"the bare pair failed with status {completion.status}")
            seen.latencies_ns.append(time.perf_counter_ns() - start_ns)
            at = (at + step) % (ARENA_BYTES - step)
        seen.wall_s = time.perf_counter() - begun
        return seen


@contextmanager
def drivers(device: str, host: str) -> Iterator[tuple[TransportDriver, BarePair]]:
    """Both peers, ready."""
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(ARENA_BYTES, transport=device, host=host))
        staging = stack.enter_context(HostMemory.create("bench-staging", VALUE_BYTES * BATCH))
        fill(staging.array)
        driver = TransportDriver(server.port, server.key, server.pid, staging, "verbs", host=host)
        stack.enter_context(driver)
        bare = BarePair(device)
        stack.callback(bare.close)
        yield driver, bare


def run(device: str, host: str, rounds: int, seconds: float, out: TextIO) -> list[dict[str, object]]:
    """Every case in every round; the rows, which are also written to ``out`` as they come."""
    rows: list[dict[str, object]] = []
    shape, times = Shape(VALUE_BYTES, BATCH, 1), Durations(seconds / 4, seconds)
    with drivers(device, host) as (driver, bare):

        def emit(peer: str, op: str, verify: str, number: int, seen: Measurement) -> None:
            case = Case(peer, op, VALUE_BYTES, BATCH, 1, verify, number)
            rows.append(make_row(case, seen, os.getloadavg()[0]))
            write_row(rows[-1], out)

        for number in range(rounds):
            for op in ("put", "get"):
                emit(LIMIT, op, "off", number, bare.measure(op, seconds))
                for verify in ("off", "full"):
                    ring = KeyRing(f"{op}{verify}{number}", shape)
                    seen = driver.measure(op, shape, [ring], check=verify == "full", times=times)
                    emit(PRODUCT, op, verify, number, seen)
    return rows


def ratios(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """For each operation the product's rate over the bare pair's, round by round: median, lowest, highest."""
    rates = {(row["peer"], row["op"], row["verify"], row["round"]): float(str(row["gbps"])) for row in rows}
    numbers = sorted({int(str(row["round"])) for row in rows})
    found: list[dict[str, object]] = []
    for op in ("put", "get"):
        for verify in ("off", "full"):
            each = [rates[PRODUCT, op, verify, n] / rates[LIMIT, op, "off", n] for n in numbers]
            found.append(
                {
                    "ratio": f"{PRODUCT} / {LIMIT}",
                    "op": op,
                    "verify": verify,
                    "median": round(statistics.median(each), 3),
                    "lowest": round(min(each), 3),
                    "highest": round(max(each), 3),
                    "limit_gbps": round(statistics.median(rates[LIMIT, op, "off", n] for n in numbers), 4),
                }
            )
    return found


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--host", default="10.77.0.1", help="the device's address")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="where rows go (default: stdout)")
    options = parser.parse_args()
    with ExitStack() as stack:
        out = stack.enter_context(options.out.open("w")) if options.out else sys.stdout
        rows = run(options.device, options.host, options.rounds, options.seconds, out)
    for line in ratios(rows):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
