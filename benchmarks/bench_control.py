"""The control path alone: latency and CPU of EXISTS, values/s of PUT and GET where no byte is moved.

Beside it, in the same round, bare asyncio echoes of frames of the same sizes: what divides is the ratio to that.

    python -m benchmarks.bench_control [--rounds N] [--seconds S] [--out FILE]

Rows are those of ``benchmarks.rows``; ``value_bytes`` is 0, since nothing is moved.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import anyio

from benchmarks.control_server import ECHO_HEAD, ControlServer
from benchmarks.geometry import LAYOUT, Durations, KeyRing, Shape
from benchmarks.rows import Case, Measurement, Stopwatch, make_row, write_row
from memkv_vllm.keys import store_key
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES
from memkv_vllm.protocol.messages import Exists, Get, GetItem, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.control import ControlChannel
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.types import Deadline, Extent

BATCH, WORKERS = 64, (1, 4)
VALUE_BYTES = 4096
"""Of what PUT and GET name: the smallest granule, since nothing is moved."""
_FRAME_BYTES = HEADER_BYTES + MAC_BYTES
_TIMEOUT_S = 30.0

Call = Callable[[int, int], Awaitable[None]]


def _deadline() -> Deadline:
    return Deadline(time.monotonic() + _TIMEOUT_S)


class _Calls:
    """The calls of one case, over one channel."""

    def __init__(self, channel: ControlChannel, rings: Sequence[KeyRing]) -> None:
        self._request = channel.request
        self._rings = rings
        self._extents = [Extent(0, slot * VALUE_BYTES, VALUE_BYTES) for slot in range(BATCH)]
        self._stored = [[ring.fresh(), ring.fresh()] for ring in rings]

    async def fill(self) -> None:
        """Puts what the gets and probes ask for."""
        for batches in self._stored:
            for prefixes in batches:
                await self._put(prefixes)

    async def put(self, worker: int, index: int) -> None:
        """A batch of new keys."""
        await self._put(self._rings[worker].fresh())

    async def _put(self, prefixes: Sequence[bytes]) -> None:
        items = [PutItem(store_key(p, 0), 0, LAYOUT, e) for p, e in zip(prefixes, self._extents, strict=True)]
        statuses = await self._request(Put(items, 0, 30_000), _deadline())
        assert not any(status > 1 for status in statuses), statuses

    async def get(self, worker: int, index: int) -> None:
        """A batch that is there."""
        prefixes = self._stored[worker][index % 2]
        items = [GetItem(store_key(p, 0), LAYOUT, e) for p, e in zip(prefixes, self._extents, strict=True)]
        results = await self._request(Get(items, 30_000), _deadline())
        assert not any(result.status for result in results), results[0]

    async def exists(self, worker: int, index: int) -> None:
        """A batch of probes that hit."""
        assert all(await self._request(Exists(self._stored[worker][index % 2], 1), _deadline()))


class EchoClient(asyncio.Protocol):
    """One frame at a time per call; answers come in order."""

    def __init__(self, request_bytes: int, reply_bytes: int) -> None:
        self._frame = ECHO_HEAD.pack(request_bytes, reply_bytes).ljust(request_bytes, b"\0")
        self._reply_bytes = reply_bytes
        self._seen = 0
        self._waiting: list[asyncio.Future[None]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._seen += len(data)
        while self._seen >= self._reply_bytes:
            self._seen -= self._reply_bytes
            self._waiting.pop(0).set_result(None)

    async def call(self, worker: int, index: int) -> None:
        """A frame and its answer."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._transport.write(self._frame)
        await future


async def _time(call: Call, workers: int, times: Durations, server_pid: int) -> Measurement:
    async def work(worker: int, seconds: float, seen: Measurement) -> None:
        index, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            start_ns = time.perf_counter_ns()
            await call(worker, index)
            seen.latencies_ns.append(time.perf_counter_ns() - start_ns)
            index += 1

    async def run(seconds: float, seen: Measurement) -> None:
        async with anyio.create_task_group() as tasks:
            for worker in range(workers):
                tasks.start_soon(work, worker, seconds, seen)

    await run(times.warm_s, Measurement())
    with Stopwatch(server_pid) as seen:
        await run(times.timed_s, seen)
    return seen


@asynccontextmanager
async def _channel(server: ControlServer, family: str) -> AsyncIterator[ControlChannel]:
    stream = SocketStream(server.connect(family))
    channel = await ControlChannel.open(stream, Credentials(server.key), PeerKind.ENGINE, _deadline(), label="bench")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        yield channel
        channel.close()


class Sizes(NamedTuple):
    """Frames of a request and of its reply, in bytes."""

    request: int
    reply: int


def frame_sizes() -> Sizes:
    """Of an EXISTS of the batch."""
    request = Exists(KeyRing("size", Shape(VALUE_BYTES, BATCH, 1)).fresh(), 1)
    return Sizes(_FRAME_BYTES + len(request.pack()), _FRAME_BYTES + BATCH)


class Bench:
    """One round of every case."""

    def __init__(self, server: ControlServer, times: Durations, emit: Callable[[dict[str, object]], None]) -> None:
        self._server, self._times, self._emit = server, times, emit

    async def round(self, number: int, ops: Sequence[str], families: Sequence[str]) -> None:
        """Every case once."""
        for workers in WORKERS:
            await self._echo(workers, number)
            for family in families:
                async with _channel(self._server, family) as channel:
                    for op in ops:
                        shape = Shape(VALUE_BYTES, BATCH, workers)
                        rings = [KeyRing(f"{op}{family}{workers}-{number}-{w}", shape) for w in range(workers)]
                        calls = _Calls(channel, rings)
                        await calls.fill()
                        seen = await _time(getattr(calls, op), workers, self._times, self._server.pid)
                        self._row(f"memkv-control-{family}", op, workers, number, seen)

    async def _echo(self, workers: int, number: int) -> None:
        sizes = frame_sizes()
        loop = asyncio.get_running_loop()
        transport, echo = await loop.create_connection(lambda: EchoClient(*sizes), sock=self._server.connect("echo"))
        seen = await _time(echo.call, workers, self._times, self._server.pid)
        transport.close()
        self._row("limit-echo", "exists", workers, number, seen)

    def _row(self, peer: str, op: str, workers: int, number: int, seen: Measurement) -> None:
        case = Case(peer, op, 0, BATCH, workers, "off", number)
        self._emit(make_row(case, seen, os.getloadavg()[0]))


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Medians over the rounds; of the exists also the ratio to the echo of the same round, with its spread."""
    lines = ["peer op workers p50_us p99_us kvalues/s cpu_us/value server_cpu_us/value x_echo(min-max)"]
    keys = list(dict.fromkeys((r["peer"], r["op"], r["concurrency"]) for r in rows))
    p50 = {(r["peer"], r["op"], r["concurrency"], r["round"]): float(str(r["p50_us"])) for r in rows}
    for peer, op, workers in keys:
        mine = [r for r in rows if (r["peer"], r["op"], r["concurrency"]) == (peer, op, workers)]

        def middle(name: str, mine: list[dict[str, object]] = mine) -> float:
            return statistics.median(float(str(r[name])) for r in mine)

        server = statistics.median(float(str(r["cpu_server_s"])) / int(str(r["calls"])) / BATCH * 1e6 for r in mine)
        line = f"{peer} {op} {workers} {middle('p50_us'):.1f} {middle('p99_us'):.1f} {middle('kops'):.1f}"
        line += f" {middle('cpu_us_per_key'):.2f} {server:.2f}"
        ratios = sorted(
            p50[peer, op, workers, r["round"]] / p50["limit-echo", "exists", workers, r["round"]] for r in mine
        )
        lines.append(f"{line} {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="timed part of a case (default 0.5)")
    parser.add_argument("--ops", default="exists,get,put")
    parser.add_argument("--families", default="tcp,unix")
    parser.add_argument("--out", type=Path, help="write the rows here and print the summary")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        stream: TextIO = sys.stdout if options.out is None else stack.enter_context(options.out.open("w"))

        def emit(row: dict[str, object]) -> None:
            rows.append(row)
            write_row(row, stream)

        bench = Bench(stack.enter_context(ControlServer()), Durations(options.seconds / 5, options.seconds), emit)
        for number in range(1, options.rounds + 1):
            anyio.run(bench.round, number, options.ops.split(","), options.families.split(","))
    if options.out is not None:
        print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
