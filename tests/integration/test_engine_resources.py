"""What an engine costs: nothing when it is idle, nothing when it has gone.

Faults P064, P065, P067; design section 3 (the cost of the engine's loop is a budget).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkv_vllm.engine import generation
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import NoReply, Operation
from tests.support.ranks import Cluster, Held, cluster_settings, eventually, lookups, rank, staging_plan
from tests.support.store_process import StoreProcess


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as stores:
        yield stores


def wake_ups(thread_name: str) -> int:
    """How often a thread of this process has gone to sleep so far."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == thread_name]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


@pytest.fixture
def _no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks a server whether it lives: that is one timer in seconds, which these tests must not meet."""
    monkeypatch.setattr(generation, "QUIET_S", 600.0)
    monkeypatch.setattr(generation, "IDLE_S", 600.0)


@pytest.mark.usefixtures("_no_signs_of_life")
def test_an_idle_engine_sleeps(cluster: Cluster) -> None:
    """After work, and with a server connected, no timer and no poll wakes the loop."""
    with rank(cluster.settings()) as one, lookups(cluster.settings()) as seen:
        one.ready().stored(range(20))
        one.loaded(range(20))
        seen.ready().present(range(20))
        one.idle()
        threads = "memkv-rank0", "memkv-prober-test"
        time.sleep(0.1)
        before = [wake_ups(name) for name in threads]
        time.sleep(1.0)
        after = [wake_ups(name) for name in threads]
        assert [late - early for early, late in zip(before, after, strict=True)] == [0, 0]


@pytest.mark.usefixtures("_no_signs_of_life")
def test_an_engine_that_waits_for_a_server_sleeps(cluster: Cluster) -> None:
    """Open jobs, with their deadlines far away, wake nobody."""
    with rank(cluster.settings(op_timeout_s=600), wait_timeout_s=600) as one:
        one.ready().stored(range(20))
        cluster.only.faults.add(Operation.REQUEST, NoReply(), type=MessageType.GET)
        one.load(range(20))
        one.store(range(20, 25))
        eventually(lambda: one.statistics.slots_free == 0, "every slot waits for the server")
        time.sleep(0.2)
        before = wake_ups("memkv-rank0")
        time.sleep(0.5)
        assert wake_ups("memkv-rank0") == before


def test_an_engine_without_a_server_hardly_wakes(tmp_path: Path) -> None:
    """Reconnecting backs off."""
    with Cluster(tmp_path) as cluster:
        cluster.only.stop()
        with rank(cluster.settings()) as one:
            time.sleep(1.5)  # past the first, quick attempts
            before = wake_ups("memkv-rank0")
            time.sleep(1.0)
            assert wake_ups("memkv-rank0") - before <= 12
            assert one.statistics.servers_ready == 0


@pytest.fixture
def store() -> Iterator[tuple[ClusterSettings, StoreProcess]]:
    """A store that holds nothing of this process."""
    key = os.urandom(32)
    with StoreProcess(key) as process:
        yield cluster_settings(key, {"a": process.port}), process


@pytest.mark.timeout(60)
def test_two_hundred_lives_leave_nothing(store: tuple[ClusterSettings, StoreProcess]) -> None:
    """P067. Start, some work, close; now and then in the middle of work, without a server, or with nothing done."""
    settings, process = store
    before = None
    for life in range(200):
        with rank(settings, plan=staging_plan(4)) as one:
            if life % 4 == 0:
                one.ready().stored(range(6))
                one.loaded(range(6))
            elif life % 4 == 1:
                one.ready().store(range(40))
                one.load(range(40))
            elif life % 4 == 2:
                jobs = one.ready().store(range(40)), one.load(range(40))
                process.kill()
                for job in jobs:
                    one.result(job)
                process.start()
        if life == 20:
            before = settled()
    assert before is not None and settled().within(before)


@pytest.mark.timeout(60)
def test_probers_leave_nothing(store: tuple[ClusterSettings, StoreProcess]) -> None:
    before = None
    for life in range(60):
        with lookups(store[0]) as seen:
            if life % 2:
                seen.ready().ask(range(10))
        if life == 10:
            before = settled()
    assert before is not None and settled().within(before)


def settled() -> Held:
    """What this process holds, once the worker threads of the engines that went have ended."""
    eventually(lambda: not any("AnyIO" in thread.name for thread in threading.enumerate()), "worker threads end")
    return Held.now()
