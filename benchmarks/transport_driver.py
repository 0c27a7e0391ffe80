"""Puts, gets and probes over one transport: the messages and checksums of an engine without the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from benchmarks.geometry import LAYOUT, MAX_BATCH_BYTES, Durations, KeyRing, Shape
from benchmarks.rows import Measurement, Stopwatch
from memkv_vllm.engine.verify import verify
from memkv_vllm.keys import store_key
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Exists, Get, GetItem, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status

AsyncCall = Callable[[int, int], Awaitable[None]]
"""Makes call number ``index`` of worker ``worker``."""

TIMEOUT_S = 30.0


class TransportDriver:
    """Puts, gets and probes over one ``ClientConnection``, with the checksum work that the engine would do.

    Args:
        port: of the server.
        key: its auth key.
        server_pid: its process.
        staging: what is put from and got into: registered as region 0.
        transport: as the registry knows it.
        host: of the server.
        options: of the transport's class.
    """

    def __init__(
        self,
        port: int,
        key: bytes,
        server_pid: int,
        staging: HostMemory,
        transport: str = "loopback",
        *,
        host: str = "127.0.0.1",
        **options: int,
    ) -> None:
        self._transport = client_transport(transport, **options)
        self._address = (host, port)
        self._credentials = Credentials(key)
        self._server_pid = server_pid
        self._staging = staging
        self._started = threading.Event()
        self._stop: anyio.Event | None = None
        self._connection: ClientConnection | None = None

    def __enter__(self) -> TransportDriver:
        self._portal_context = start_blocking_portal("asyncio")
        self._portal: BlockingPortal = self._portal_context.__enter__()
        self._life = self._portal.start_task_soon(self._live)
        self._started.wait(TIMEOUT_S)
        if self._connection is None:
            self._life.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stop is not None:
            self._portal.call(self._stop.set)
        self._portal_context.__exit__(kind, error, trace)

    def measure(self, op: str, shape: Shape, rings: Sequence[KeyRing], *, check: bool, times: Durations) -> Measurement:
        """Time ``op``; gets and probes ask for what was put before with the same ``rings``."""
        return self._portal.call(self._measure, op, shape, rings, check, times)

    def measure_calls(self, op: str, shape: Shape, rings: Sequence[KeyRing], calls: int) -> Measurement:
        """Time a number of calls one after the other, without warming up and without checksums."""
        return self._portal.call(self._measure_calls, op, shape, rings, calls)

    async def _live(self) -> None:
        try:
            self._stop = anyio.Event()
            connection = await self._transport.connect(*self._address, self._credentials, PeerKind.ENGINE, _deadline())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connection.run)
                await connection.register(Region(0, MemoryKind.HOST, self._staging.length, self._staging), _deadline())
                self._connection = connection
                self._started.set()
                await self._stop.wait()
                await connection.aclose()
        finally:
            self._started.set()

    async def _measure(
        self, op: str, shape: Shape, rings: Sequence[KeyRing], check: bool, times: Durations
    ) -> Measurement:
        assert self._connection is not None
        calls = _TransportCalls(self._connection, self._staging, shape, rings, check)
        if op != "put":
            await calls.fill()
        return await time_tasks(getattr(calls, op), shape.workers, times, self._server_pid)

    async def _measure_calls(self, op: str, shape: Shape, rings: Sequence[KeyRing], calls: int) -> Measurement:
        assert self._connection is not None
        call: AsyncCall = getattr(_TransportCalls(self._connection, self._staging, shape, rings, False), op)
        with Stopwatch(self._server_pid) as seen:
            for index in range(calls):
                start_ns = time.perf_counter_ns()
                await call(0, index)
                seen.latencies_ns.append(time.perf_counter_ns() - start_ns)
        return seen


class _TransportCalls:
    """The calls of one case: worker ``w`` uses the ``w``-th part of the staging memory and its own keys.

    What a caller has at hand before it asks is made once, outside the timed calls: places in the staging memory, and
    the keys of what is got or probed. The keys of puts are new ones each time, and so are all messages.
    """

    def __init__(
        self, connection: ClientConnection, staging: HostMemory, shape: Shape, rings: Sequence[KeyRing], check: bool
    ) -> None:
        self._request = connection.request
        self._staging = staging
        self._shape = shape
        self._rings = rings
        self._check = check
        self._algorithm = ChecksumAlgorithm.XXH3_64_TREE_1M if check else ChecksumAlgorithm.NONE
        self._places = [self._extents(worker) for worker in range(shape.workers)]
        self._known: dict[int, list[list[bytes]]] = {}
        """Prefixes of each worker's working set, by worker."""
        self._known_keys: dict[int, list[list[bytes]]] = {}
        """The same, store keys."""

    async def fill(self) -> None:
        """Put what is missing of each worker's working set; what is there counts as used."""
        for worker, ring in enumerate(self._rings):
            for prefixes in ring.working_set():
                _expect(await self._put(worker, prefixes), Status.OK, Status.EXISTS)

    async def put(self, worker: int, index: int) -> None:
        """A batch that is not in the store yet."""
        _expect(await self._put(worker, self._rings[worker].fresh()), Status.OK)

    async def _put(self, worker: int, prefixes: Sequence[bytes]) -> list[Status]:
        extents = self._places[worker]
        checksums = [0] * len(extents)
        if self._check:
            checksums = await anyio.to_thread.run_sync(self._digests, extents)
        items = [
            PutItem(store_key(prefix, 0), checksum, LAYOUT, extent)
            for prefix, checksum, extent in zip(prefixes, checksums, extents, strict=True)
        ]
        return await self._request(Put(items, self._algorithm, _milliseconds()), _deadline())

    async def get(self, worker: int, index: int) -> None:
        """A batch of the working set."""
        extents = self._places[worker]
        if worker not in self._known_keys:
            self._known_keys[worker] = [[store_key(prefix, 0) for prefix in batch] for batch in self._batches(worker)]
        batches = self._known_keys[worker]
        items = [
            GetItem(key, LAYOUT, extent) for key, extent in zip(batches[index % len(batches)], extents, strict=True)
        ]
        results = await self._request(Get(items, _milliseconds()), _deadline())
        _expect([result.status for result in results], Status.OK)
        if self._check:
            checksums = [result.checksum for result in results]
            if not await anyio.to_thread.run_sync(self._agree, extents, checksums):
                raise RuntimeError("a value came back with other bytes")

    async def exists(self, worker: int, index: int) -> None:
        """A batch of probes that hit."""
        batches = self._batches(worker)
        if not all(await self._request(Exists(batches[index % len(batches)], 1), _deadline())):
            raise RuntimeError("a value that was put does not exist")

    def _batches(self, worker: int) -> list[list[bytes]]:
        if worker not in self._known:
            self._known[worker] = self._rings[worker].working_set()
        return self._known[worker]

    def _extents(self, worker: int) -> list[Extent]:
        first, size = worker * MAX_BATCH_BYTES, self._shape.value_bytes
        return [Extent(0, first + slot * size, size) for slot in range(self._shape.batch)]

    def _digests(self, extents: Sequence[Extent]) -> list[int]:
        return [digest(self._staging.view(extent.offset, extent.length)) for extent in extents]

    def _agree(self, extents: Sequence[Extent], checksums: Sequence[int]) -> bool:
        view, algorithm = self._staging.view, ChecksumAlgorithm.XXH3_64_TREE_1M
        pairs = zip(extents, checksums, strict=True)
        return all(
            verify(partial(digest, view(extent.offset, extent.length)), checksum, algorithm) is None
            for extent, checksum in pairs
        )


async def time_tasks(call: AsyncCall, workers: int, times: Durations, server_pid: int) -> Measurement:
    """Make calls from ``workers`` tasks at once, warm-up first."""

    async def work(worker: int, seconds: float, seen: Measurement) -> None:
        index, end = 0, time.perf_counter() + seconds
        while True:
            start_ns = time.perf_counter_ns()
            await call(worker, index)
            seen.latencies_ns.append(time.perf_counter_ns() - start_ns)
            index += 1
            if time.perf_counter() > end:
                return

    async def run(seconds: float, seen: Measurement) -> None:
        async with anyio.create_task_group() as tasks:
            for worker in range(workers):
                tasks.start_soon(work, worker, seconds, seen)

    await run(times.warm_s, Measurement())
    with Stopwatch(server_pid) as seen:
        await run(times.timed_s, seen)
    return seen


def _expect(statuses: Sequence[Status], *expected: Status) -> None:
    if others := set(statuses).difference(expected):
        raise RuntimeError(f"a batch was not carried out: {sorted(status.name for status in others)}")


def _deadline() -> Deadline:
    return Deadline(time.monotonic() + TIMEOUT_S)


def _milliseconds() -> int:
    return int(TIMEOUT_S * 1000)
