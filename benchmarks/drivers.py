"""What is measured: a driver per peer. Each makes calls that move one batch, and times them.

Three ways of making calls, since the things measured differ: coroutines on one loop (:class:`TransportDriver`), threads
(:class:`MemcpyDriver`) and jobs (:class:`EngineDriver`). All of them warm up first and time only what follows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
from anyio.from_thread import BlockingPortal, start_blocking_portal

from benchmarks.geometry import MAX_BATCH_BYTES, MAX_CONCURRENCY, KeyRing, Shape
from benchmarks.rows import Measurement, Stopwatch
from memkv_vllm.engine.api import BlockRef, JobResult, SlotRef
from memkv_vllm.engine.client import ClusterSettings, ServerEndpoint
from memkv_vllm.engine.engine import EngineSettings, TransferEngine
from memkv_vllm.engine.plan import plan_staging
from memkv_vllm.engine.verify import verify
from memkv_vllm.keys import store_key
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Exists, Get, GetItem, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, Region
from memkv_vllm.transports.loopback import LoopbackClientTransport
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status, VerifyMode

Bytes = npt.NDArray[np.uint8]
AsyncCall = Callable[[int, int], Awaitable[None]]
"""Makes call number ``index`` of worker ``worker``."""

LAYOUT = 7
TIMEOUT_S = 30.0
POLL_S = 50e-6


class Durations(NamedTuple):
    """Seconds of a case that are not timed, and that are."""

    warm_s: float
    timed_s: float


def staging_memory(name: str) -> HostMemory:
    """Memory for the largest batch of every worker, backed by pages."""
    memory = HostMemory.create(name, MAX_BATCH_BYTES * MAX_CONCURRENCY)
    memory.populate(0, memory.length)
    return memory


class TransportDriver:
    """Puts, gets and probes over one ``ClientConnection``, with the checksum work that the engine would do.

    Args:
        port: of the server.
        key: its auth key.
        server_pid: its process.
        staging: what is put from and got into: registered as region 0.
    """

    def __init__(self, port: int, key: bytes, server_pid: int, staging: HostMemory) -> None:
        self._port = port
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
            transport = LoopbackClientTransport()
            connection = await transport.connect(
                "127.0.0.1", self._port, self._credentials, PeerKind.ENGINE, _deadline()
            )
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
        return await _time_tasks(getattr(calls, op), shape.workers, times, self._server_pid)

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
    """The calls of one case: worker ``w`` uses the ``w``-th part of the staging memory and its own keys."""

    def __init__(
        self, connection: ClientConnection, staging: HostMemory, shape: Shape, rings: Sequence[KeyRing], check: bool
    ) -> None:
        self._request = connection.request
        self._staging = staging
        self._shape = shape
        self._rings = rings
        self._check = check
        self._algorithm = ChecksumAlgorithm.XXH3_64_TREE_1M if check else ChecksumAlgorithm.NONE

    async def fill(self) -> None:
        """Put what is missing of each worker's working set."""
        for worker, ring in enumerate(self._rings):
            while not ring.full:
                await self.put(worker, 0)

    async def put(self, worker: int, index: int) -> None:
        """A batch that is not in the store yet."""
        extents = self._extents(worker)
        checksums = [0] * len(extents)
        if self._check:
            checksums = await anyio.to_thread.run_sync(self._digests, extents)
        items = [
            PutItem(store_key(prefix, 0), checksum, LAYOUT, extent)
            for prefix, checksum, extent in zip(self._rings[worker].fresh(), checksums, extents, strict=True)
        ]
        statuses = await self._request(Put(items, self._algorithm, _milliseconds()), _deadline())
        _expect_ok(statuses)

    async def get(self, worker: int, index: int) -> None:
        """A batch of the working set."""
        extents = self._extents(worker)
        items = [
            GetItem(store_key(prefix, 0), LAYOUT, extent)
            for prefix, extent in zip(self._rings[worker].stored(index), extents, strict=True)
        ]
        results = await self._request(Get(items, _milliseconds()), _deadline())
        _expect_ok([result.status for result in results])
        if self._check:
            checksums = [result.checksum for result in results]
            if not await anyio.to_thread.run_sync(self._agree, extents, checksums):
                raise RuntimeError("a value came back with other bytes")

    async def exists(self, worker: int, index: int) -> None:
        """A batch of probes that hit."""
        if not all(await self._request(Exists(self._rings[worker].stored(index), 1), _deadline())):
            raise RuntimeError("a value that was put does not exist")

    def _extents(self, worker: int) -> list[Extent]:
        first, size = worker * MAX_BATCH_BYTES, self._shape.value_bytes
        return [Extent(0, first + slot * size, size) for slot in range(self._shape.batch)]

    def _digests(self, extents: Sequence[Extent]) -> list[int]:
        return [digest(self._staging.view(extent.offset, extent.length)) for extent in extents]

    def _agree(self, extents: Sequence[Extent], checksums: Sequence[int]) -> bool:
        view, algorithm = self._staging.view, ChecksumAlgorithm.XXH3_64_TREE_1M
        pairs = zip(extents, checksums, strict=True)
        return all(
            verify(view(extent.offset, extent.length), checksum, algorithm) is None for extent, checksum in pairs
        )


class EngineDriver:
    """Stores and loads through ``TransferEngine``, as vLLM's worker makes them: a job is a batch.

    Its mover copies nothing (a GPU's copies cost no CPU): what is timed is staging, checksums, control and the server.
    """

    def __init__(self, port: int, key: bytes, server_pid: int, value_bytes: int) -> None:
        self._server_pid = server_pid
        self._jobs = 0
        self._ended: list[JobResult] = []
        self._engine = TransferEngine(
            cluster=ClusterSettings(
                (ServerEndpoint("bench", "127.0.0.1", port),), Credentials(key), "loopback", 5.0, TIMEOUT_S
            ),
            plan=plan_staging(value_bytes, tokens_per_block=16),
            mover=_NoCopy(value_bytes),
            shard=0,
            settings=EngineSettings(120.0, VerifyMode.FULL, 4 << 30),
            name="bench",
        )

    def __enter__(self) -> EngineDriver:
        self._engine.start()
        end = time.monotonic() + TIMEOUT_S
        while not self._engine.statistics().servers_ready:
            if time.monotonic() > end:
                raise RuntimeError("the engine did not reach the server")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def measure(self, op: str, shape: Shape, rings: Sequence[KeyRing], *, times: Durations) -> Measurement:
        """Time ``op``; gets ask for what was put before with the same ``rings``."""
        if op == "get":
            for worker, ring in enumerate(rings):
                while not ring.full:
                    self._submit("put", worker, ring, 0)
                    self._wait_one()
        self._run(op, rings, times.warm_s, Measurement())
        with Stopwatch(self._server_pid) as seen:
            self._run(op, rings, times.timed_s, seen)
        return seen

    def _run(self, op: str, rings: Sequence[KeyRing], seconds: float, seen: Measurement) -> None:
        """Keep one job of each ring on its way for ``seconds``, then await the last ones."""
        end = time.perf_counter() + seconds
        started: dict[int, tuple[int, int, int]] = {}
        for worker, ring in enumerate(rings):
            started[self._submit(op, worker, ring, 0)] = worker, 0, time.perf_counter_ns()
        while started:
            result = self._wait_one()
            worker, index, start_ns = started.pop(result.job_id)
            now_ns = time.perf_counter_ns()
            seen.latencies_ns.append(now_ns - start_ns)
            if time.perf_counter() < end:
                started[self._submit(op, worker, rings[worker], index + 1)] = worker, index + 1, now_ns

    def _submit(self, op: str, worker: int, ring: KeyRing, index: int) -> int:
        self._jobs += 1
        if op == "put":
            self._engine.submit_store(self._jobs, _block_refs(ring.fresh()))
        else:
            self._engine.submit_load(self._jobs, _block_refs(ring.stored(index)))
        return self._jobs

    def _wait_one(self) -> JobResult:
        """The next job that ends. Several at once are given one by one."""
        while not self._ended:
            self._ended += self._engine.poll_finished()
            if not self._ended:
                time.sleep(POLL_S)
        result = self._ended.pop(0)
        if result.lost:
            raise RuntimeError(f"the engine lost blocks of a {result.direction.value}: {dict(result.lost)}")
        return result


class _NoCopy:
    """A ``BlockMover`` whose blocks are in the slots already."""

    layout = LAYOUT

    def __init__(self, value_bytes: int) -> None:
        self.value_bytes = value_bytes

    def attach(self, region: Region) -> None:
        """Nothing to prepare."""

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Nothing to copy."""

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        """Nothing to copy."""

    def close(self) -> None:
        """Nothing to undo."""


class MemcpyDriver:
    """Copies between a large store and small local memory, a thread per worker: what no transport can beat.

    Args:
        store: a put's target and a get's source.
        local: the other side; worker ``w`` uses the part from ``w * MAX_BATCH_BYTES`` on, as the transport does.
    """

    def __init__(self, store: Bytes, local: Bytes) -> None:
        self._store = store
        self._local = local

    def measure(self, op: str, shape: Shape, times: Durations) -> Measurement:
        """Time ``op``."""
        barrier = threading.Barrier(shape.workers + 1)
        latencies: list[list[int]] = [[] for _ in range(shape.workers)]
        threads = [
            threading.Thread(target=self._work, args=(op, shape, worker, times, barrier, latencies[worker]))
            for worker in range(shape.workers)
        ]
        for thread in threads:
            thread.start()
        barrier.wait()
        with Stopwatch() as seen:
            barrier.wait()
            for thread in threads:
                thread.join()
        seen.latencies_ns = [latency for each in latencies for latency in each]
        return seen

    def _work(
        self, op: str, shape: Shape, worker: int, times: Durations, barrier: threading.Barrier, latencies: list[int]
    ) -> None:
        index = 0
        end = time.perf_counter() + times.warm_s
        while time.perf_counter() < end:
            self._copy(op, shape, worker, index)
            index += 1
        barrier.wait()
        barrier.wait()
        end = time.perf_counter() + times.timed_s
        while True:
            start_ns = time.perf_counter_ns()
            self._copy(op, shape, worker, index)
            latencies.append(time.perf_counter_ns() - start_ns)
            index += 1
            if time.perf_counter() > end:
                return

    def _copy(self, op: str, shape: Shape, worker: int, index: int) -> None:
        share = len(self._store) // MAX_CONCURRENCY
        batches = max(1, share // shape.batch_bytes)
        far = worker * share + index % batches * shape.batch_bytes
        near = worker * (len(self._local) // MAX_CONCURRENCY)
        for start in range(0, shape.batch_bytes, shape.value_bytes):
            stored = self._store[far + start : far + start + shape.value_bytes]
            local = self._local[near + start : near + start + shape.value_bytes]
            if op == "put":
                np.copyto(stored, local)
            else:
                np.copyto(local, stored)


async def _time_tasks(call: AsyncCall, workers: int, times: Durations, server_pid: int) -> Measurement:
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


def _block_refs(prefixes: Sequence[bytes]) -> list[BlockRef]:
    return [BlockRef(prefix, block_id) for block_id, prefix in enumerate(prefixes)]


def _expect_ok(statuses: Sequence[Status]) -> None:
    if any(status is not Status.OK for status in statuses):
        raise RuntimeError(f"a batch was not carried out: {sorted({status.name for status in statuses})}")


def _deadline() -> Deadline:
    return Deadline(time.monotonic() + TIMEOUT_S)


def _milliseconds() -> int:
    return int(TIMEOUT_S * 1000)
