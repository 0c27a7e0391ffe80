"""What a request costs the server itself: CPU time per value of its control path, beside a bare asyncio echo.

The real store and the real protocol, over a TCP connection whose other end is in the same process and thread: frames
are sealed before the clock starts and answers are looked at after it has stopped, so that what is timed is the server,
plus one send and a few receives, which the echo of frames of the same sizes has too. No value is moved: the data path
either is done at once (``none``), or is that of verbs over a provider that does nothing (``verbs``: a no-op post and a
scripted completion queue).

    python -m benchmarks.bench_server_cost [--rounds N] [--batch N] [--out FILE] [--profile FILE]

Rows are those of ``benchmarks.rows``; ``concurrency`` is the number of requests in flight, CPU is that of the thread.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import io
import os
import pstats
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

import anyio

from benchmarks.control_server import ECHO_HEAD, EchoProtocol, NoBulk, NoBulkPeer
from benchmarks.geometry import LAYOUT, KeyRing, Shape
from benchmarks.noop_verbs import NoopRails, make_bulk
from benchmarks.rows import Case, Measurement, make_row, write_row
from memkv_vllm.config import dev_server_config
from memkv_vllm.keys import store_key
from memkv_vllm.protocol.auth import NONCE_BYTES, Credentials
from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES
from memkv_vllm.protocol.messages import Exists, Get, GetItem, Put, PutItem
from memkv_vllm.protocol.session import PeerKind, ReplyReceived, Session
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import LruPolicy
from memkv_vllm.store.garbage import Freezer
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.transports.base import Bulk
from memkv_vllm.transports.control import shake_hands
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.serving import LiveSessions, ServeOptions, serve_control
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.types import Extent, Role, Status

VALUE_BYTES = 4096
"""Of what PUT and GET name: the smallest granule, since nothing is moved."""
ARENA_BYTES = 64 << 20
"""16384 values: full after some hundred batches, so that every put evicts."""
ROOMY_ARENA_BYTES = 4 << 30
"""Never full here. Its pages are never touched."""
WINDOWS = (1, 4)
OPS = ("exists", "get", "put", "put-full")
_STORED_BATCHES = 32
_FRAME_BYTES = HEADER_BYTES + MAC_BYTES
_READ_BYTES = 1 << 18

AnyRequest = Put | Get | Exists


class Sizes(NamedTuple):
    """Frames of a request and of its reply, in bytes."""

    request: int
    reply: int


class Wire:
    """The other end of a connection, in the same thread: sends bytes and counts those that come back."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._due = 0
        self._arrived: asyncio.Future[None] | None = None
        self.received = bytearray()
        asyncio.get_running_loop().add_reader(sock, self._read)

    async def exchange(self, data: bytes, reply_bytes: int) -> None:
        """Sends ``data``; returns when ``reply_bytes`` more have come."""
        self._due = len(self.received) + reply_bytes
        self._arrived = asyncio.get_running_loop().create_future()
        if self._sock.send(data) != len(data):
            raise RuntimeError("the socket took a part of a window only: use a smaller batch")
        await self._arrived

    def close(self) -> None:
        """Stops reading; the socket is the caller's."""
        asyncio.get_running_loop().remove_reader(self._sock)

    def _read(self) -> None:
        self.received += self._sock.recv(_READ_BYTES)
        if self._arrived is not None and len(self.received) >= self._due and not self._arrived.done():
            self._arrived.set_result(None)


class Requests:
    """What the cases ask for: keys, and the requests over them."""

    def __init__(self, name: str, batch: int) -> None:
        self._ring = KeyRing(name, Shape(VALUE_BYTES, batch, 1))
        self._extents = [Extent(0, slot * VALUE_BYTES, VALUE_BYTES) for slot in range(batch)]
        self.stored = [self._ring.fresh() for _ in range(_STORED_BATCHES)]

    def put(self, prefixes: Sequence[bytes]) -> Put:
        """Values that nobody looks at."""
        keys = [store_key(prefix, 0) for prefix in prefixes]
        return Put([PutItem(key, 0, LAYOUT, at) for key, at in zip(keys, self._extents, strict=True)], 0, 30_000)

    def make(self, op: str, index: int) -> AnyRequest:
        """The request of this number."""
        if op.startswith("put"):
            return self.put(self._ring.fresh())
        prefixes = self.stored[index % _STORED_BATCHES]
        if op == "exists":
            return Exists(prefixes, 1)
        keys = [store_key(prefix, 0) for prefix in prefixes]
        return Get([GetItem(key, LAYOUT, at) for key, at in zip(keys, self._extents, strict=True)], 30_000)


def _check(request: AnyRequest, reply: ReplyReceived) -> None:
    """Every value was there, stored or fetched."""
    if isinstance(request, Exists):
        right = all(request.reply(reply.body))
    elif isinstance(request, Put):
        right = not any(request.reply(reply.body))
    else:
        right = all(result.status is Status.OK for result in request.reply(reply.body))
    if not right:
        raise RuntimeError(f"{request.TYPE.name} was answered {bytes(reply.body)!r}")


class Peer:
    """A client's session over a wire, whose frames are sealed ahead of time."""

    def __init__(self, session: Session, wire: Wire) -> None:
        self._session, self._wire = session, wire

    async def ask(
        self, requests: Sequence[AnyRequest], window: int, seen: Measurement, profile: cProfile.Profile | None = None
    ) -> None:
        """Sends ``requests``, ``window`` at a time, and then checks their answers."""
        frames = []
        for request in requests:
            self._session.send_request(request.TYPE, request.pack())
            frames.append(self._session.data_to_send())
        windows = [b"".join(frames[at : at + window]) for at in range(0, len(frames), window)]
        reply_bytes = window * sizes_of(requests[0]).reply
        if profile is not None:
            profile.enable()
        await _time(self._wire, windows, reply_bytes, seen)
        if profile is not None:
            profile.disable()
        replies = self._session.receive_data(self._wire.received)
        self._wire.received.clear()
        by_id = sorted((reply for reply in replies if isinstance(reply, ReplyReceived)), key=lambda r: r.request_id)
        for request, reply in zip(requests, by_id, strict=True):
            _check(request, reply)


async def _time(wire: Wire, windows: Sequence[bytes], reply_bytes: int, seen: Measurement) -> None:
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    for data in windows:
        start_ns = time.perf_counter_ns()
        await wire.exchange(data, reply_bytes)
        seen.latencies_ns.append(time.perf_counter_ns() - start_ns)
    seen.server_cpu_s += (time.thread_time_ns() - cpu_ns) / 1e9
    seen.wall_s += (time.perf_counter_ns() - wall_ns) / 1e9


def sizes_of(request: AnyRequest) -> Sizes:
    """The frames of ``request``."""
    if isinstance(request, Get):
        reply = 18 * len(request.items)
    else:
        reply = len(request.items if isinstance(request, Put) else request.prefixes)
    return Sizes(_FRAME_BYTES + len(request.pack()), _FRAME_BYTES + reply)


@contextmanager
def _connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection of this machine, unbuffered for small frames."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs = listener.accept()[0]
        with theirs:
            for sock in (ours, theirs):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            yield ours, theirs


@asynccontextmanager
async def _store(path: str, arena_bytes: int) -> AsyncIterator[tuple[Peer, StoreHandler]]:
    """A store in this thread, and a peer whose values go by the data path called ``path``."""
    key = os.urandom(32)
    config = dev_server_config(key, address="127.0.0.1:0", max_size=arena_bytes)
    with ExitStack() as stack:
        memory = stack.enter_context(HostMemory.create("bench-server-cost", arena_bytes))
        ours, theirs = stack.enter_context(_connected())
        arena, policy = ArenaAllocator(arena_bytes), LruPolicy()
        handler = StoreHandler(config, memory, arena, policy, server_id=os.urandom(16), boot_id=os.urandom(16))
        rails = NoopRails(memory)
        stack.callback(rails.close)
        bulk: Bulk = NoBulk() if path == "none" else await make_bulk(rails, 1 << 30, 2)
        make_peer = partial(NoBulkPeer, bulk=bulk, label="bench")
        session = Session(Role.CLIENT, os.urandom(NONCE_BYTES), credentials=Credentials(key), kind=PeerKind.ENGINE)
        async with anyio.create_task_group() as tasks:
            serve = partial(serve_control, sessions=LiveSessions(), options=ServeOptions(), label="bench")
            tasks.start_soon(serve, SocketStream(theirs), handler, make_peer)
            stream = SocketStream(ours.dup())
            await shake_hands(stream, session)
            stream.release().close()
            wire = Wire(ours)
            yield Peer(session, wire), handler
            wire.close()
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _echo() -> AsyncIterator[Wire]:
    with _connected() as (ours, theirs):
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(EchoProtocol, theirs)
        wire = Wire(ours)
        yield wire
        wire.close()
        transport.close()


class Bench:
    """Rounds of every case."""

    def __init__(self, batch: int, calls: int, emit: Callable[[dict[str, object]], None]) -> None:
        self._batch, self._calls, self._emit = batch, calls, emit

    async def round(self, number: int, ops: Sequence[str], paths: Sequence[str]) -> None:
        """Every case once, each store case right behind its echo."""
        for op in ops:
            for path in paths if op != "exists" else paths[:1]:
                await self.case(op, path, number)

    async def case(self, op: str, path: str, number: int, profile: cProfile.Profile | None = None) -> None:
        """One operation over one data path, with every window, each next to its echo."""
        requests, freezer = Requests(f"{op}{path}{number}", self._batch), Freezer()
        async with _store(path, ARENA_BYTES if op == "put-full" else ROOMY_ARENA_BYTES) as (peer, handler):
            fill = ARENA_BYTES // VALUE_BYTES // self._batch + 1 if op == "put-full" else 0
            filling: list[AnyRequest] = [requests.make("put", index) for index in range(fill)]
            await peer.ask([*filling, *map(requests.put, requests.stored)], 1, Measurement())
            freezer.poll(handler.entries_made)
            gc.collect()
            for window in WINDOWS:
                asked = [requests.make(op, index) for index in range(self._calls)]
                await self._measure_echo(f"limit-echo-{op}", sizes_of(asked[0]), window, number)
                seen = Measurement()
                await peer.ask(asked, window, seen, profile)
                self._row(f"memkv-server-{path}", op, window, number, seen)
        freezer.close()

    async def _measure_echo(self, peer: str, sizes: Sizes, window: int, number: int) -> None:
        frame = ECHO_HEAD.pack(*sizes).ljust(sizes.request, b"\0")
        windows, seen = [frame * window] * (self._calls // window), Measurement()
        async with _echo() as wire:
            await _time(wire, windows[: len(windows) // 5], window * sizes.reply, Measurement())
            await _time(wire, windows, window * sizes.reply, seen)
        self._row(peer, "exists", window, number, seen)

    def _row(self, peer: str, op: str, window: int, number: int, seen: Measurement) -> None:
        row = make_row(Case(peer, op, 0, self._batch, window, "off", number), seen, os.getloadavg()[0])
        values = self._calls * self._batch
        row |= {"calls": self._calls, "cpu_us_per_key": round(seen.server_cpu_s / values * 1e6, 3)}
        row["kops"] = round(values / seen.server_cpu_s / 1e3, 1)
        self._emit(row)


def summary(rows: Sequence[dict[str, object]]) -> str:
    """Medians over the rounds, with the lowest and highest; the ratio is that to the echo of the same round."""
    cpu = {_key(row): float(str(row["cpu_us_per_key"])) for row in rows}
    lines = ["peer op in_flight cpu_us/value(min-max) kvalues/cpu_s x_echo(min-max)"]
    for peer, op, window in dict.fromkeys(_key(row)[:3] for row in rows):
        mine = [key for key in cpu if key[:3] == (peer, op, window)]
        costs = sorted(cpu[key] for key in mine)
        line = f"{peer} {op} {window} {statistics.median(costs):.2f} ({costs[0]:.2f}-{costs[-1]:.2f})"
        line += f" {1e3 / statistics.median(costs):.0f}"
        if not str(peer).startswith("limit"):
            ratios = sorted(cpu[key] / cpu[f"limit-echo-{op}", "exists", window, key[3]] for key in mine)
            line += f" {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        lines.append(line)
    return "\n".join(lines)


def _key(row: dict[str, object]) -> tuple[object, object, object, object]:
    return row["peer"], row["op"], row["concurrency"], row["round"]


def _profile(bench: Bench, ops: Sequence[str], path: str, top: int = 40) -> str:
    """Where the time of each operation goes, by ``cProfile``, which makes calls dearer than they are."""
    text = io.StringIO()
    for op in ops:
        profile = cProfile.Profile(time.thread_time)
        anyio.run(bench.case, op, path, 0, profile)
        text.write(f"== {op}, data path {path}\n")
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(top)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100, help="requests of a case")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--paths", default="none,verbs", help="data paths")
    parser.add_argument("--out", type=Path, help="write the rows here and print the summary")
    parser.add_argument("--profile", type=Path, help="write where the time goes here, and measure nothing")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    ops, paths = options.ops.split(","), options.paths.split(",")
    with ExitStack() as stack:
        stream: TextIO = sys.stdout if options.out is None else stack.enter_context(options.out.open("w"))

        def emit(row: dict[str, object]) -> None:
            rows.append(row)
            write_row(row, stream)

        if options.profile is not None:
            quiet = Bench(options.batch, options.calls, lambda row: None)
            options.profile.write_text(_profile(quiet, ops, paths[-1]))
            return 0
        bench = Bench(options.batch, options.calls, emit)
        for number in range(1, options.rounds + 1):
            anyio.run(bench.round, number, ops, paths)
    if options.out is not None:
        print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
