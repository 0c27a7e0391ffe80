"""Invariant 4, never an engine death: what breaks inside the engine costs blocks, not vLLM.

Faults P025, P027, P034, P038, P085 and the engine's own bugs: a copy that raises, a job that cannot be taken, the loop
thread that dies.
"""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memkv_vllm.engine.api import BlockRef
from memkv_vllm.engine.core import EngineSettings
from memkv_vllm.engine.engine import TransferEngine
from memkv_vllm.engine.lanes import Lane
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import Delay, NoReply, Operation
from memkv_vllm.transports.loopback import client as loopback_client
from memkv_vllm.types import Direction, LossReason, VerifyMode
from tests.support.fake_mover import ArrayMover
from tests.support.ranks import VALUE, Cluster, Rank, eventually, prefix_of, rank, staging_plan
from tests.support.store_process import ROOT

pytestmark = pytest.mark.fault


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as stores:
        yield stores


# ------------------------------------------------------------------------------------------------ copies that raise


def test_a_gather_that_raises_costs_its_blocks(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready()
        one.mover.fail = True
        assert one.stored(range(6)).lost == {LossReason.FAILED: 6}
        one.mover.fail = False
        one.idle()
        assert one.stored(range(6)).lost == {}
        assert cluster.only.statistics()["table"]["complete"] == 6


def test_a_scatter_that_raises_costs_its_blocks(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready().stored(range(6))
        one.mover.fail = True
        result = one.loaded([0, 1, 1])
        assert (result.lost, result.bad_block_ids) == (
            {LossReason.FAILED: 3},
            (one.half, one.half + 1, one.half + 1),
        )
        one.mover.fail = False
        one.idle()
        result = one.loaded(range(6))
        assert (result.lost, one.wrong(result, range(6))) == ({}, [])


# ------------------------------------------------------------------------------------------------ jobs not taken


def test_a_job_that_cannot_be_taken_ends_at_once(cluster: Cluster) -> None:
    """A key that makes no sense, a bug in the caller: the job ends as lost, and the others go on."""
    with rank(cluster.settings()) as one:
        one.ready().stored(range(3))
        broken: Any = "not a key"
        one.engine.submit_load(1000, [BlockRef(prefix_of(0), one.half), BlockRef(broken, one.half + 1)])
        one.engine.submit_store(1001, [BlockRef(broken, 1)])
        assert one.result(1000).bad_block_ids == (one.half, one.half + 1)
        assert one.result(1001).lost == {LossReason.ENGINE: 1}
        result = one.loaded(range(3))
        assert (result.lost, one.wrong(result, range(3))) == ({}, [])


@pytest.mark.parametrize("step", ["add_job", "report"])
def test_a_bug_while_a_job_is_taken_ends_it_at_once_and_for_good(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before or after its blocks were queued: reported once, all blocks bad, and none of them written afterwards."""
    with rank(cluster.settings()) as one:
        one.ready().stored(range(3))
        core = one.engine._core
        owner: Any = core.schedule if step == "add_job" else core

        def bug(*_: object) -> None:
            monkeypatch.undo()
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(owner, step, bug)
        result = one.loaded(range(3))
        assert result.lost == {LossReason.ENGINE: 3}
        assert result.bad_block_ids == tuple(one.half + number for number in range(3))
        good = one.loaded(range(3), into=range(one.half + 3, one.half + 6))
        assert good.lost == {}
        assert not one.mover.blocks[one.half : one.half + 3].any()
        one.idle()


def test_a_job_id_twice_is_refused_and_the_first_job_goes_on(cluster: Cluster) -> None:
    slow = cluster.only.faults.add(Operation.REQUEST, Delay(0.1), type=MessageType.PUT)
    with rank(cluster.settings()) as one:
        job = one.ready().store([1])
        with pytest.raises(LocalProtocolError, match=f"job {job}"):
            one.engine.submit_load(job, [BlockRef(prefix_of(1), one.half)])
        assert one.result(job).lost == {}
        assert slow.fired == 1
        one.engine.submit_load(job, [BlockRef(prefix_of(1), one.half)])
        (again,) = eventually(one.engine.poll_finished, "an id that was reported may come again")
        assert (again.job_id, again.direction) == (job, Direction.LOAD)


# ------------------------------------------------------------------------------------------------ the loop dies


class Bug(Exception):
    """What no code expects."""


def kill_loop(one: Rank) -> None:
    """Raise in a lane, which belongs to the engine's own tasks."""

    def bug(*_: object) -> None:
        raise Bug("injected")

    core = one.engine._core
    core.take = bug  # type: ignore[assignment, method-assign]
    one.engine._thread.post(core.wake)


def test_when_the_loop_dies_every_job_ends_with_its_load_blocks_bad(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    for type in (MessageType.GET, MessageType.PUT):
        cluster.only.faults.add(Operation.REQUEST, NoReply(), type=type)
    with rank(cluster.settings()) as one:
        one.ready()
        jobs = [one.load([1, 2]), one.store([3]), one.load([1], into=[one.half + 9]), one.store(range(30))]
        eventually(lambda: one.statistics.inflight_requests, "requests are under way")
        kill_loop(one)
        results = [one.result(job) for job in jobs]
        assert [sum(result.lost.values()) for result in results] == [2, 1, 1, 30]
        assert {reason for result in results for reason in result.lost} <= {LossReason.ENGINE, LossReason.BREAKER}
        assert [result.bad_block_ids for result in results] == [
            (one.half + 1, one.half + 2),
            (),
            (one.half + 9,),
            (),
        ]
        assert not one.mover.blocks[one.half :].any()
        later_is_lost_at_once(one)
        assert sum("event=loop_died" in record.getMessage() for record in caplog.records) == 1


def test_what_had_arrived_before_the_loop_died_stays_good(tmp_path: Path) -> None:
    with Cluster(tmp_path, ("a", "b")) as two, rank(two.settings()) as one:
        numbers = range(10)
        one.ready(2).stored(numbers)
        silent = two.servers["b"].faults.add(Operation.REQUEST, NoReply(), type=MessageType.GET)
        job = one.load(numbers)
        at_a, at_b = two.owned_by("a", numbers), two.owned_by("b", numbers)
        eventually(lambda: silent.fired and len(one.mover.scattered) == len(at_a), "one server has answered")
        kill_loop(one)
        result = one.result(job)
        assert result.bad_block_ids == tuple(one.half + number for number in at_b)
        assert one.wrong(result, numbers) == []


def later_is_lost_at_once(one: Rank) -> None:
    """What comes after the engine's end is answered without it."""
    eventually(lambda: not one.engine._thread.alive, "the thread ends")
    later = one.load([5]), one.store([6])
    one.engine.wait({*later, 999})
    one.poll()
    for job in later:
        assert one._results[job].lost == {LossReason.ENGINE: 1}
    assert one._results[later[0]].bad_block_ids == (one.half + 5,)
    assert one.engine.poll_finished() == []
    assert one.statistics.servers_ready in (0, 1)


@pytest.mark.parametrize("method", ["_load", "_put", "_store"])
def test_a_bug_in_a_lane_is_the_same(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    async def bug(*_: object) -> None:
        raise Bug("injected")

    with rank(cluster.settings()) as one:
        one.ready()
        monkeypatch.setattr(Lane, method, bug)
        job = one.load([1]) if method == "_load" else one.store([1])
        assert one.result(job).lost == {LossReason.ENGINE: 1}
        later_is_lost_at_once(one)


def test_wait_ends_when_the_loop_dies_and_not_before_its_copies_do(cluster: Cluster) -> None:
    """A gather that runs while the loop dies still reads GPU blocks: vLLM is told when it has ended."""
    with rank(cluster.settings()) as one:
        one.ready()
        one.mover.delay_s = 0.4
        job = one.store([1])
        eventually(lambda: one.mover.active, "a gather runs")
        kill_loop(one)
        one.engine.wait({job})
        assert one.mover.active == 0
        assert sum(one.result(job).lost.values()) == 1


def test_a_copy_that_runs_while_the_loop_dies_ends_before_its_job_is_reported(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready().stored([1])
        one.mover.delay_s = 0.3
        job = one.load([1])
        eventually(lambda: one.mover.active, "a scatter runs")
        kill_loop(one)
        while job not in one.poll():
            time.sleep(0.001)
        assert one.mover.active == 0
        assert one.wrong(one.result(job), [1]) == []


# ------------------------------------------------------------------------------------------------ start and end


def make_engine(cluster: Cluster, slots: int = 4, value: int = VALUE) -> TransferEngine:
    """An engine that was not started."""
    return TransferEngine(
        cluster=cluster.settings(),
        plan=staging_plan(slots, value=value),
        mover=ArrayMover(2, 16),
        shard=0,
        settings=EngineSettings(5, VerifyMode.FULL, 1 << 30),
        name="rank0",
    )


def test_close_without_start_and_close_twice(cluster: Cluster) -> None:
    engine = make_engine(cluster)
    engine.close()
    engine.close()
    engine.submit_load(1, [BlockRef(prefix_of(1), 0)])
    engine.wait({1})
    (result,) = engine.poll_finished()
    assert result.lost == {LossReason.ENGINE: 1}


def test_no_memory_for_staging_says_so_and_leaves_nothing(cluster: Cluster) -> None:
    engine = make_engine(cluster, value=1 << 60)
    with pytest.raises(EnvironmentFault, match="staging"):
        engine.start()
    engine.close()


def test_close_with_open_jobs_ends_them(cluster: Cluster) -> None:
    for type in (MessageType.GET, MessageType.PUT):
        cluster.only.faults.add(Operation.REQUEST, NoReply(), type=type)
    with rank(cluster.settings()) as one:
        jobs = one.ready().load([1]), one.store(range(30))
        eventually(lambda: one.statistics.inflight_requests, "requests are under way")
        one.engine.close()
        assert one.result(jobs[0]).bad_block_ids == (one.half + 1,)
        assert sum(one.result(jobs[1]).lost.values()) == 30
        assert one.mover.closed
        one.engine.wait(set(jobs))
        one.engine.close()


def test_close_waits_for_a_copy_and_takes_no_memory_from_under_it(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready()
        one.mover.delay_s = 0.3
        one.store([1])
        eventually(lambda: one.mover.active, "a gather runs")
        one.engine.close()
        assert one.mover.active == 0
        assert one.mover.gathered == [1], "it was not cut short"


def test_out_of_file_descriptors_is_a_server_that_is_down(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE at connect: reconnecting goes on, the loop lives."""
    tries = 0

    def no_socket(*args: Any) -> socket.socket:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return socket.socket(*args)

    monkeypatch.setattr(loopback_client, "socket", SimpleNamespace(**{**vars(socket), "socket": no_socket}))
    with rank(cluster.settings()) as one:
        assert one.ready().stored([1]).lost == {}
        assert tries == 4


@pytest.mark.timeout(60)
def test_a_process_that_forgets_close_can_exit(cluster: Cluster) -> None:
    script = f"""
from tests.support.ranks import *
settings = cluster_settings(bytes.fromhex({cluster.key.hex()!r}), {{"a": {cluster.only.port}}})
scope = rank(settings)
one = scope.__enter__()
one.ready().stored(range(5))
one.store(range(60))
print("done", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
