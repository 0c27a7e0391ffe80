"""The engine over real stores: round trips, sharing, placement over several servers, and one that goes and comes back.

Faults P079, P080, P081, P027; design sections 3 and 5.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from memkv_vllm.engine.api import BlockRef, SlotRef
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import Delay, NoReply, Operation
from memkv_vllm.types import Direction, LossReason
from tests.support.fake_mover import ArrayMover
from tests.support.ranks import VALUE, Cluster, Held, Rank, cluster_settings, eventually, prefix_of, rank, staging_plan
from tests.support.store_process import StoreProcess


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as stores:
        yield stores


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, ("a", "b", "c")) as stores:
        yield stores


def counters(cluster: Cluster) -> dict[str, int]:
    """The only server's."""
    found: dict[str, int] = cluster.only.statistics()["counters"]
    return found


# ------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("split", [False, True], ids=["shared lanes", "lanes of their own"])
@pytest.mark.parametrize("value", [512, 4096, 100_000])
def test_round_trip(cluster: Cluster, value: int, split: bool) -> None:
    with rank(cluster.settings(), plan=staging_plan(8, value=value, split=split)) as one:
        one.ready()
        numbers = range(40)
        stored = one.stored(numbers)
        assert (stored.direction, stored.num_blocks, stored.lost) == (Direction.STORE, 40, {})
        assert stored.moved_bytes == 40 * value
        loaded = one.loaded(numbers)
        assert (loaded.direction, loaded.num_blocks, loaded.bad_block_ids, loaded.lost) == (Direction.LOAD, 40, (), {})
        assert loaded.moved_bytes == 40 * value
        assert one.wrong(loaded, numbers) == []
        one.idle()
        statistics = one.statistics
        assert (statistics.stored_blocks, statistics.loaded_blocks) == (40, 40)
        assert (statistics.stored_bytes, statistics.loaded_bytes) == (40 * value, 40 * value)
        assert not any(statistics.lost.values())


def test_an_empty_job_ends_too(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        assert one.stored([]).num_blocks == 0
        assert one.loaded([]).num_blocks == 0


def test_what_was_never_stored_is_reported_by_block(cluster: Cluster) -> None:
    """P026, P028: partial results are first class."""
    with rank(cluster.settings()) as one:
        one.ready().stored([0, 1, 3])
        result = one.loaded([0, 1, 2, 3, 4])
        assert result.bad_block_ids == (one.half + 2, one.half + 4)
        assert result.lost == {LossReason.EVICTED: 2}
        assert one.wrong(result, [0, 1, 2, 3, 4]) == []
        assert one.lost("load_evicted") == 2
        assert one.gpu(one.half + 2) == bytes(one.mover.value_bytes)


def test_present_values_are_not_moved_again(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready().stored(range(10))
        pulled = counters(cluster)["put_bytes"]
        again = one.stored(range(12))
        assert again.lost == {}
        assert again.moved_bytes == 2 * one.mover.value_bytes
        assert one.statistics.already_present_blocks == 10
        assert counters(cluster)["put_bytes"] - pulled == 2 * one.mover.value_bytes
        assert counters(cluster)["put_exists"] == 10


def test_identical_loads_in_flight_are_one_get(cluster: Cluster) -> None:
    slow = cluster.only.faults.add(Operation.REQUEST, Delay(0.2), type=MessageType.GET)
    with rank(cluster.settings()) as one:
        one.ready().stored([5])
        jobs = [one.load([5], into=[one.half + target]) for target in range(3)]
        results = [one.result(job) for job in jobs]
        assert [result.bad_block_ids for result in results] == [(), (), ()]
        for target in range(3):
            assert one.gpu(one.half + target) == one.computed[5].tobytes()
        assert slow.seen == 1
        assert one.statistics.joined_loads == 2
        assert sum(result.moved_bytes for result in results) == one.mover.value_bytes
        assert counters(cluster)["get_ok"] == 1
        one.idle()


def test_one_block_twice_in_a_job(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready().stored([5])
        result = one.loaded([5, 5], into=[one.half, one.half + 1])
        assert result.bad_block_ids == ()
        assert one.gpu(one.half) == one.gpu(one.half + 1) == one.computed[5].tobytes()
        one.idle()


class Noting(ArrayMover):
    """Keeps what each copy was told to wait for, by GPU block."""

    def __init__(self) -> None:
        super().__init__(128, VALUE)
        self.after: dict[int, object | None] = {}

    def gather(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        self.after |= {block.block_id: after for block in blocks}
        super().gather(lane, blocks, after)

    def scatter(self, lane: int, blocks: Sequence[SlotRef], after: object | None) -> None:
        self.after |= {block.block_id: after for block in blocks}
        super().scatter(lane, blocks, after)


def test_copies_wait_for_what_their_jobs_were_handed_over_with(cluster: Cluster) -> None:
    """On CUDA an event of the compute stream: a store's KV is written, a load's blocks are free, only after it.

    A chunk may hold blocks of several jobs: the newest one's event includes the others'.
    """
    mover = Noting()
    with rank(cluster.settings(), plan=staging_plan(64, lanes=1), mover=mover) as one:
        one.ready()
        for job in range(1, 9):
            blocks = [BlockRef(prefix_of(number), number) for number in range(4 * job, 4 * job + 4)]
            one.engine.submit_store(100 + job, blocks, after=job)
        for job in range(1, 9):
            assert one.result(100 + job).lost == {}
            assert {mover.after[number] for number in range(4 * job, 4 * job + 4)} <= set(range(job, 9))
        one.engine.submit_load(200, [BlockRef(prefix_of(4), 100)], after="load")
        assert one.result(200).lost == {}
        assert mover.after[100] == "load"
        one.engine.submit_load(201, [BlockRef(prefix_of(4), 101)])
        assert one.result(201).lost == {}
        assert mover.after[101] is None


def test_a_server_that_takes_small_batches_only(tmp_path: Path) -> None:
    overrides = {"limits": {"max_batch_keys": 3}}
    with Cluster(tmp_path, overrides=overrides) as cluster, rank(cluster.settings()) as one:
        assert one.ready().stored(range(40)).lost == {}
        result = one.loaded(range(40))
        assert result.lost == {}
        assert one.wrong(result, range(40)) == []


# ------------------------------------------------------------------------------------------------ sharing


def test_two_engines_share(cluster: Cluster) -> None:
    with rank(cluster.settings()) as writer, rank(cluster.settings(), seed=0) as reader:
        writer.ready().stored(range(30))
        reader.mover.blocks[:] = 0
        result = reader.ready().loaded(range(30))
        assert result.lost == {}
        assert reader.wrong(result, range(30)) == []


def test_two_engines_that_store_the_same_at_once(cluster: Cluster) -> None:
    """The second writer of a key is told PENDING or EXISTS; nobody moves a value twice."""
    with rank(cluster.settings()) as first, rank(cluster.settings()) as second:
        first.ready()
        second.ready()
        jobs = first.store(range(60)), second.store(range(60))
        results = first.result(jobs[0]), second.result(jobs[1])
        assert {reason for result in results for reason in result.lost} <= {LossReason.PENDING}
        assert sum(result.moved_bytes for result in results) == 60 * first.mover.value_bytes
        loaded = second.loaded(range(60))
        assert loaded.lost == {}
        assert second.wrong(loaded, range(60)) == []


def test_shards_do_not_mix(cluster: Cluster) -> None:
    """P010: each rank finds its own bytes only."""
    with rank(cluster.settings(), seed=1, shard=0) as zero, rank(cluster.settings(), seed=2, shard=1) as one:
        zero.ready().stored(range(10))
        one.ready()
        assert one.loaded(range(10)).lost == {LossReason.EVICTED: 10}
        one.stored(range(10))
        for each in (zero, one):
            assert each.wrong(each.loaded(range(10)), range(10)) == []


# ------------------------------------------------------------------------------------------------ several servers


def test_blocks_are_spread_and_a_job_spans_servers(three: Cluster) -> None:
    numbers = range(60)
    with rank(three.settings()) as one:
        assert one.ready(3).stored(numbers).lost == {}
        result = one.loaded(numbers)
        assert result.lost == {}
        assert one.wrong(result, numbers) == []
        for name, server in three.servers.items():
            assert server.statistics()["table"]["complete"] == len(three.owned_by(name, numbers)) > 0


def lost_share(one: Rank, three: Cluster, numbers: range) -> None:
    """Server ``b`` is gone: exactly its share is lost, at once and with the reason."""
    share = three.owned_by("b", numbers)
    result = one.loaded(numbers)
    assert result.lost == {LossReason.BREAKER: len(share)}
    assert result.bad_block_ids == tuple(one.half + number for number in share)
    assert one.wrong(result, numbers) == []


def test_a_server_that_goes_takes_its_share_only_and_comes_back_by_itself(three: Cluster) -> None:
    """P079, P029, P084."""
    numbers = range(60)
    share = three.owned_by("b", numbers)
    with rank(three.settings()) as one:
        one.ready(3).stored(numbers)
        three.servers["b"].stop()
        eventually(lambda: one.statistics.servers_ready == 2, "the end of a server is seen")
        lost_share(one, three, numbers)
        assert one.lost("load_breaker") == len(share)
        assert one.stored(numbers).lost == {LossReason.BREAKER: len(share)}
        three.servers["b"].start()
        one.ready(3)
        assert one.loaded(numbers).lost == {LossReason.EVICTED: len(share)}, "it came back empty"
        assert one.stored(numbers).moved_bytes == len(share) * one.mover.value_bytes
        assert one.wrong(one.loaded(numbers), numbers) == []
        assert one.statistics.reconnects == 1
        one.idle()


def test_a_server_that_never_was_is_like_one_that_went(tmp_path: Path) -> None:
    """P027: detached at start, found later without a restart."""
    numbers = range(30)
    with Cluster(tmp_path, ("a", "b", "c")) as three:
        three.servers["b"].stop()
        with rank(three.settings()) as one:
            one.ready(2).stored(numbers)
            lost_share(one, three, numbers)
            three.servers["b"].start()
            one.ready(3).stored(numbers)
            assert one.loaded(numbers).lost == {}


def test_no_server_at_start(tmp_path: Path) -> None:
    """P027: the engine starts, everything is recomputed; hits begin when the server comes."""
    with Cluster(tmp_path) as cluster:
        cluster.only.stop()
        with rank(cluster.settings()) as one:
            assert one.loaded(range(5)).lost == {LossReason.BREAKER: 5}
            assert one.stored(range(5)).lost == {LossReason.BREAKER: 5}
            cluster.only.start()
            one.ready().stored(range(5))
            result = one.loaded(range(5))
            assert result.lost == {}
            assert one.wrong(result, range(5)) == []


@pytest.mark.parametrize("type", [None, MessageType.REGISTER], ids=["says nothing", "authenticates, then nothing"])
def test_a_server_that_accepts_and_never_answers(tmp_path: Path, type: MessageType | None) -> None:
    """P085: start and jobs end at once, whatever the connect timeout is."""
    with Cluster(tmp_path, ("a", "b")) as cluster:
        operation = Operation.CONNECT if type is None else Operation.REQUEST
        silent = cluster.servers["b"].faults.add(operation, NoReply(), type=type)
        numbers = range(20)
        with rank(cluster.settings(connect_timeout_s=0.3)) as one:
            one.ready(1).stored(numbers)
            result = one.loaded(numbers)
            assert result.lost == {LossReason.BREAKER: len(cluster.owned_by("b", numbers))}
            eventually(lambda: silent.fired >= 2, "it is tried again")
            cluster.servers["b"].faults.clear()
            one.ready(2)


@pytest.mark.timeout(60)
def test_a_server_that_is_killed_and_restarted_often() -> None:
    """P080: 20 lives under load, and the engine neither restarts nor keeps anything of them."""
    key = os.urandom(32)
    with StoreProcess(key) as store, rank(cluster_settings(key, {"a": store.port})) as one:
        before = None
        for life in range(20):
            one.ready()
            numbers = range(3 * life, 3 * life + 3)
            assert one.stored(numbers).lost == {}
            assert one.wrong(one.loaded(numbers), numbers) == []
            if life == 2:
                before = Held.now()
            open_job = one.load(numbers)
            store.kill()
            assert set(one.result(open_job).lost) <= {LossReason.BREAKER}
            eventually(lambda: one.statistics.servers_ready == 0, "the end of the server is seen")
            store.start()
        one.ready().idle()
        assert one.statistics.reconnects == 20
        assert before is not None
        eventually(lambda: Held.now().within(before), f"nothing is left behind: {before}, {Held.now()}")


def test_prefixes_have_one_owner_in_every_process(three: Cluster) -> None:
    with rank(three.settings()) as one:
        for number in range(50):
            owner = one.engine._core.client.owner(prefix_of(number)).name
            assert owner == three.placement.owner(prefix_of(number))
