"""Engines over real stores: what the engine's integration and fault tests share.

:class:`Cluster` is a set of stores in this process (``memkv_vllm.pytest_plugin.LoopbackServer``, each with a fault
plan, each on a loop of its own) under one key; :class:`Rank` is an engine with a fake GPU, and the questions that
tests ask of it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine.api import BlockRef, EngineStatistics, JobResult, StagingMedium
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.engine.core import EngineSettings
from memkv_vllm.engine.engine import TransferEngine
from memkv_vllm.engine.placement import Placement
from memkv_vllm.engine.plan import StagingPlan
from memkv_vllm.engine.prober import ProbeAnswer, Prober
from memkv_vllm.keys import NamespaceManifest, block_prefix
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.pytest_plugin import LoopbackServer
from memkv_vllm.types import VerifyMode
from tests.support.fake_mover import ArrayMover

NAMESPACE = hashlib.sha256(b"namespace").digest()
VALUE = 4096
PATIENCE_S = 15.0
"""How long a test waits for what must happen; only a broken product uses it up."""


def eventually(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> Any:
    """Poll until ``condition`` is true and return what it said; ``what`` says what did not happen."""
    end = time.monotonic() + timeout_s
    while not (said := condition()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.002)
    return said


def prefix_of(number: int, namespace: bytes = NAMESPACE) -> bytes:
    """Block prefix number ``number``."""
    return block_prefix(namespace, hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def manifest(**changes: Any) -> NamespaceManifest:
    """A namespace like any other, but for ``changes``."""
    facts: dict[str, Any] = {
        "mode": "direct",
        "prefix": "",
        "model": "acme/tiny",
        "revision": "main",
        "weights": "w" * 16,
        "model_config": "c" * 64,
        "kv_dtype": "bfloat16",
        "tokens_per_block": (16,),
        "bytes_per_block": VALUE,
        "world_size": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "prefill_context_parallel": 1,
        "decode_context_parallel": 1,
        "hash_algorithm": "sha256",
        "hash_seed": "0",
        "kv_layout": "NHD",
    }
    return NamespaceManifest(**{**facts, **changes})


def staging_plan(slots: int = 16, *, value: int = VALUE, lanes: int = 2, split: bool = False) -> StagingPlan:
    """A plan with exactly ``slots`` slots; with ``split`` half of the lanes and slots for each direction."""
    own = lanes // 2 if split else lanes
    return StagingPlan(value, slots // lanes * value, slots // lanes, not split, own, own, 16, None)


class Held(NamedTuple):
    """What a process holds that must not grow."""

    fds: int
    threads: int
    mappings: int
    """Mappings of memfds."""

    @classmethod
    def now(cls) -> Held:
        """Count."""
        gc.collect()
        with open("/proc/self/maps", encoding="utf-8") as maps:
            mappings = sum("/memfd:" in line for line in maps)
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count(), mappings)

    def within(self, before: Held) -> bool:
        """Whether nothing has grown since."""
        return all(now <= then for now, then in zip(self, before, strict=True))


class Cluster:
    """``names`` stores under one key, started at once.

    Args:
        folder: for key files.
        names: of the servers.
        options: see ``LoopbackServer``.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ("a",), **options: Any) -> None:
        self.key = os.urandom(32)
        self.servers: dict[str, LoopbackServer] = {}
        for name in names:
            (folder / name).mkdir()
            server = self.servers[name] = LoopbackServer(folder / name, **{"max_size": "8MiB", **options})
            server.auth_key = self.key.hex()
        self.placement = Placement(names)

    def __enter__(self) -> Cluster:
        for server in self.servers.values():
            server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.stop()

    @property
    def only(self) -> LoopbackServer:
        """The server, where there is one."""
        (server,) = self.servers.values()
        return server

    def settings(self, *, connect_timeout_s: float = 5.0, op_timeout_s: float = 10.0) -> ClusterSettings:
        """How to reach it."""
        ports = {name: server.port for name, server in self.servers.items()}
        return cluster_settings(self.key, ports, connect_timeout_s, op_timeout_s)

    def owned_by(self, name: str, numbers: Iterable[int]) -> list[int]:
        """Those of the blocks that ``name`` holds."""
        return [number for number in numbers if self.placement.owner(prefix_of(number)) == name]


def cluster_settings(
    key: bytes, ports: dict[str, int], connect_timeout_s: float = 5.0, op_timeout_s: float = 10.0
) -> ClusterSettings:
    """Settings for servers on this machine."""
    servers = tuple(ServerAddress(name, (RailAddress("127.0.0.1", port),)) for name, port in ports.items())
    return ClusterSettings(servers, Credentials(key), "loopback", connect_timeout_s, op_timeout_s)


@dataclass
class Rank:
    """An engine with a fake GPU of ``2 * half`` blocks: the lower half is what was computed, the upper half empty.

    Block ``n`` is stored from GPU block ``n`` and loaded, unless told otherwise, into GPU block ``half + n``.
    """

    engine: TransferEngine
    mover: ArrayMover
    half: int

    def __post_init__(self) -> None:
        self.mover.blocks[self.half :] = 0
        self.computed = self.mover.blocks[: self.half].copy()
        self._next_job = 0
        self._results: dict[int, JobResult] = {}

    # -- jobs

    def store(self, numbers: Iterable[int]) -> int:
        """Submit a store; returns its job id."""
        self._next_job += 1
        self.engine.submit_store(self._next_job, [BlockRef(prefix_of(number), number) for number in numbers])
        return self._next_job

    def load(self, numbers: Iterable[int], into: Iterable[int] | None = None, *, expedited: bool = False) -> int:
        """Submit a load; returns its job id."""
        numbers = list(numbers)
        targets = [self.half + number for number in numbers] if into is None else list(into)
        blocks = [BlockRef(prefix_of(number), target) for number, target in zip(numbers, targets, strict=True)]
        self._next_job += 1
        self.engine.submit_load(self._next_job, blocks, expedited=expedited)
        return self._next_job

    def poll(self) -> dict[int, JobResult]:
        """All results so far; fails when a job is reported twice."""
        for result in self.engine.poll_finished():
            assert result.job_id not in self._results, f"job {result.job_id} was reported twice"
            self._results[result.job_id] = result
        return self._results

    def result(self, job: int, timeout_s: float = PATIENCE_S) -> JobResult:
        """The job's result, waiting for it."""
        eventually(lambda: job in self.poll(), lambda: f"job {job} ends: {self.statistics}", timeout_s)
        return self._results[job]

    def stored(self, numbers: Iterable[int]) -> JobResult:
        """Store, and wait until it is done."""
        return self.result(self.store(numbers))

    def loaded(self, numbers: Iterable[int], into: Iterable[int] | None = None) -> JobResult:
        """Load, and wait until it is done."""
        return self.result(self.load(numbers, into))

    # -- questions

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's."""
        return self.engine.statistics()

    def lost(self, name: str) -> int:
        """Counter ``<direction>_<reason>``."""
        return self.statistics.lost[name]

    def ready(self, servers: int = 1) -> Rank:
        """Wait until so many servers are connected."""
        eventually(lambda: self.statistics.servers_ready == servers, f"{servers} servers are connected")
        return self

    def idle(self) -> None:
        """Wait until every gauge is back to nothing and every slot is free."""

        def at_rest() -> bool:
            now = self.statistics
            gauges = (now.queued_load_blocks, now.queued_store_blocks, now.queued_store_bytes, now.inflight_requests)
            return not any(gauges) and now.slots_held == now.slots_quarantined == 0

        eventually(at_rest, lambda: f"all gauges return to 0 and all slots are free: {self.statistics}")

    @property
    def slots(self) -> int:
        """All slots."""
        now = self.statistics
        return now.slots_free + now.slots_held + now.slots_quarantined

    def gpu(self, block: int) -> bytes:
        """Bytes of a GPU block."""
        return self.mover.blocks[block].tobytes()

    def wrong(self, result: JobResult, numbers: Sequence[int], into: Sequence[int] | None = None) -> list[int]:
        """Blocks that a load reported as good and whose bytes are not what was computed."""
        targets = [self.half + number for number in numbers] if into is None else into
        bad = set(result.bad_block_ids)
        return [
            number
            for number, target in zip(numbers, targets, strict=True)
            if target not in bad and not np.array_equal(self.mover.blocks[target], self.computed[number])
        ]


@contextmanager
def rank(
    cluster: ClusterSettings,
    *,
    plan: StagingPlan | None = None,
    blocks: int = 64,
    wait_timeout_s: float = 30.0,
    verify: VerifyMode = VerifyMode.FULL,
    max_store_backlog_bytes: int = 1 << 30,
    mover: ArrayMover | None = None,
    medium: StagingMedium | None = None,
    seed: int = 0,
    shard: int = 0,
) -> Iterator[Rank]:
    """A started engine, closed on exit; ranks of one ``seed`` have computed the same blocks."""
    plan = staging_plan() if plan is None else plan
    mover = ArrayMover(2 * blocks, plan.value_bytes, seed=seed) if mover is None else mover
    engine = TransferEngine(
        cluster=cluster,
        plan=plan,
        mover=mover,
        shard=shard,
        settings=EngineSettings(wait_timeout_s, verify, max_store_backlog_bytes),
        name=f"rank{shard}",
        medium=medium,
    )
    engine.start()
    try:
        yield Rank(engine, mover, blocks)
    finally:
        engine.close()


@dataclass
class Lookups:
    """A prober, and one answer per question."""

    prober: Prober

    def ask(self, numbers: Iterable[int], namespace: bytes = NAMESPACE) -> dict[int, ProbeAnswer]:
        """Ask for blocks and wait for the answers, one for each."""
        by_prefix = {prefix_of(number, namespace): number for number in numbers}
        answers: dict[int, ProbeAnswer] = {}
        self.prober.submit(list(by_prefix))

        def complete() -> bool:
            for answer in self.prober.poll():
                number = by_prefix[answer.prefix]
                assert number not in answers, f"block {number} was answered twice"
                answers[number] = answer
            return len(answers) == len(by_prefix)

        eventually(complete, "every probe is answered")
        return answers

    def present(self, numbers: Iterable[int]) -> list[int]:
        """Those that the stores have."""
        return [number for number, answer in self.ask(numbers).items() if answer.present]

    def ready(self, servers: int = 1) -> Lookups:
        """Wait until so many servers are connected."""
        eventually(lambda: self.prober.statistics().servers_ready == servers, f"{servers} servers are connected")
        return self


@contextmanager
def lookups(
    cluster: ClusterSettings,
    *,
    shards: int = 1,
    namespace: NamespaceManifest | None = None,
    probe_timeout_s: float = 5.0,
) -> Iterator[Lookups]:
    """A started prober, closed on exit."""
    prober = Prober(
        cluster=cluster,
        shards=shards,
        namespace=manifest() if namespace is None else namespace,
        name="test",
        probe_timeout_s=probe_timeout_s,
    )
    prober.start()
    try:
        yield Lookups(prober)
    finally:
        prober.close()


def arena(server: LoopbackServer) -> np.ndarray[Any, Any]:
    """The bytes of a store in this process."""
    assert server._server is not None
    memory = server._server._memory
    assert memory is not None
    return memory.array


def stored_at(server: LoopbackServer, value: bytes) -> int:
    """Where in the arena a value stands, found by its bytes."""
    at = arena(server).tobytes().find(value)
    assert at >= 0, "the value is not in this store"
    return at
