"""Invariant 1, publish last: a put that fails at whatever step leaves nothing that a lookup can find.

Faults P036, P037, P068, P094. What the engine says of each (its counter) is checked too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import (
    Action,
    BitFlip,
    Delay,
    Die,
    Drop,
    Fail,
    LateWrite,
    NoReply,
    Operation,
    Short,
)
from memkv_vllm.types import LossReason, Status
from tests.support.ranks import Cluster, eventually, lookups, rank

pytestmark = pytest.mark.fault

FAULTS: dict[str, tuple[Operation, Action, LossReason]] = {
    "short read": (Operation.PULL, Short(100), LossReason.CHECKSUM),
    "nothing read": (Operation.PULL, Short(0), LossReason.CHECKSUM),
    "first bit": (Operation.PULL, BitFlip(0), LossReason.CHECKSUM),
    "last bit": (Operation.PULL, BitFlip(-1, 7), LossReason.CHECKSUM),
    "read fails": (Operation.PULL, Fail(Status.FAILED), LossReason.FAILED),
    "bad extent": (Operation.PULL, Fail(Status.BAD_EXTENT), LossReason.FAILED),
    "never read": (Operation.PULL, Drop(), LossReason.TIMEOUT),
    "read after the answer": (Operation.PULL, LateWrite(0.2, Status.OK), LossReason.CHECKSUM),
    "read after the deadline": (Operation.PULL, LateWrite(0.2), LossReason.TIMEOUT),
    "cut while reading": (Operation.PULL, Die(), LossReason.BREAKER),
    "refused": (Operation.REQUEST, Fail(), LossReason.REFUSED),
    "not answered": (Operation.REQUEST, NoReply(), LossReason.TIMEOUT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_put_that_fails_is_never_found(tmp_path: Path, fault: str) -> None:
    operation, action, reason = FAULTS[fault]
    type = MessageType.PUT if operation is Operation.REQUEST else None
    with Cluster(tmp_path) as cluster:
        settings = cluster.settings(op_timeout_s=0.5)
        with rank(settings) as one, lookups(settings) as seen:
            one.ready()
            seen.ready()
            rule = cluster.only.faults.add(operation, action, type=type)
            job = one.store([1])
            while job not in one.poll():
                assert seen.present([1]) == []
            assert one.result(job).lost == {reason: 1}
            assert one.lost(f"store_{reason.value}") == 1
            assert rule.fired == 1
            assert seen.present([1]) == []
            cluster.only.faults.clear()
            # Neither a reservation nor a slot stays behind, and the same block can be stored.
            eventually(lambda: cluster.only.statistics()["table"]["entries"] == 0, "nothing is reserved")
            one.ready().idle()
            assert seen.present([1]) == []
            assert one.stored([1]).lost == {}
            assert seen.present([1]) == [1]
            assert one.wrong(one.loaded([1]), [1]) == []


def test_a_value_is_found_only_once_it_is_complete(tmp_path: Path) -> None:
    """While its bytes are on their way a key does not exist; another writer of it is told so."""
    with Cluster(tmp_path) as cluster, rank(cluster.settings()) as one, rank(cluster.settings()) as two:
        with lookups(cluster.settings()) as seen:
            seen.ready()
            one.ready()
            two.ready()
            cluster.only.faults.add(Operation.PULL, Delay(0.3), times=1)
            job = one.store([1])
            eventually(lambda: cluster.only.statistics()["table"]["reserved"] == 1, "the put is under way")
            assert seen.present([1]) == []
            assert two.stored([1]).lost == {LossReason.PENDING: 1}
            assert two.loaded([1]).lost == {LossReason.EVICTED: 1}
            assert job not in one.poll(), "all this happened while the put was under way"
            assert one.result(job).lost == {}
            assert seen.present([1]) == [1]


@pytest.mark.parametrize(
    ("operation", "action", "reason"),
    [
        (Operation.REQUEST, Die(), LossReason.BREAKER),
        (Operation.REPLY, Die(), LossReason.BREAKER),
        (Operation.REPLY, NoReply(), LossReason.TIMEOUT),
        (Operation.REPLY, Short(10), LossReason.TIMEOUT),
        (Operation.REPLY, BitFlip(40), LossReason.FAILED),
    ],
    ids=["cut as it comes", "cut before the answer", "no answer", "half an answer", "a broken answer"],
)
def test_a_put_whose_answer_is_lost_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, operation: Operation, action: Action, reason: LossReason
) -> None:
    """The writer counts it as lost; a reader may find it, and then all of it."""
    with Cluster(tmp_path) as cluster:
        settings = cluster.settings(op_timeout_s=0.3)
        with rank(settings) as one, lookups(settings) as seen:
            one.ready()
            seen.ready()
            rule = cluster.only.faults.add(operation, action, type=MessageType.PUT)
            lost = one.stored(range(3)).lost
            assert rule.fired == 1 and sum(lost.values()) == 3 and lost.keys() <= {reason, LossReason.BREAKER}
            cluster.only.faults.clear()
            one.ready().idle()
            eventually(lambda: cluster.only.statistics()["table"]["reserved"] == 0, "nothing is reserved")
            found = seen.present(range(3))
            result = one.loaded(range(3))
            assert [block - one.half for block in result.bad_block_ids] == [n for n in range(3) if n not in found]
            assert one.wrong(result, range(3)) == []
            assert one.stored(range(3)).lost == {}


def test_only_the_bad_value_of_a_batch_is_lost(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, rank(cluster.settings()) as one, lookups(cluster.settings()) as seen:
        one.ready()
        seen.ready()
        cluster.only.faults.add(Operation.PULL, BitFlip(17), nth=3)
        assert one.stored(range(6)).lost == {LossReason.CHECKSUM: 1}
        found = seen.present(range(6))
        assert len(found) == 5
        result = one.loaded(range(6))
        assert result.lost == {LossReason.EVICTED: 1}
        assert one.wrong(result, range(6)) == []
        assert [block - one.half for block in result.bad_block_ids] == sorted(set(range(6)) - set(found))


def test_the_put_after_one_that_timed_out_is_not_lost_with_it(tmp_path: Path) -> None:
    """The server ends the data path of a session whose put timed out; the engine knows and connects anew."""
    with Cluster(tmp_path) as cluster, rank(cluster.settings(op_timeout_s=0.5)) as one:
        one.ready()
        cluster.only.faults.add(Operation.PULL, Drop(), nth=1)
        assert one.stored([1]).lost == {LossReason.TIMEOUT: 1}
        eventually(lambda: one.statistics.reconnects == 1, "a new connection")
        one.ready()
        assert one.stored([2]).lost == {}
