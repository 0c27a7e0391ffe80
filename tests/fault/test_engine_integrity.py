"""Invariant 3, never wrong bytes: only values whose key, length, layout and checksum agree reach a GPU block.

Faults P035, P037, P090, P004, P015, P078 (the exceptions ``sampled`` and ``off`` are stated ones).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkv_vllm.keys import store_key
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Get, GetResult
from memkv_vllm.transports.faults import Action, BitFlip, Fail, LateWrite, Operation, Short
from memkv_vllm.types import LossReason, Status, VerifyMode
from tests.support.fake_mover import ArrayMover
from tests.support.ranks import (
    VALUE,
    Cluster,
    Rank,
    arena,
    eventually,
    lookups,
    prefix_of,
    rank,
    staging_plan,
    stored_at,
)
from tests.support.scripted_transport import ScriptedConnection, scripted

pytestmark = pytest.mark.fault


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as stores:
        yield stores


def flip(cluster: Cluster, value: bytes, offset: int, bit: int) -> None:
    """Invert one bit of a value where the store keeps it."""
    arena(cluster.only)[stored_at(cluster.only, value) + offset] ^= 1 << bit


def bad_reports(cluster: Cluster) -> int:
    """How many values readers have reported."""
    count: int = cluster.only.statistics()["table"]["counters"]["bad_reports"]
    return count


# ------------------------------------------------------------------------------------------------ damage in the store


@pytest.mark.timeout(60)
def test_a_thousand_flipped_bits_are_all_found(cluster: Cluster) -> None:
    """P090, and what follows a find: refused, hidden, accepted again when it was recomputed."""
    rng = random.Random(20)
    numbers = range(50)
    with rank(cluster.settings()) as one:
        one.ready()
        for round_number in range(1, 21):
            assert one.stored(numbers).moved_bytes == 50 * VALUE, "hidden values are stored again"
            content = arena(cluster.only)
            whole = content.tobytes()
            for number in numbers:
                at = whole.find(one.computed[number].tobytes())
                content[at + rng.randrange(VALUE)] ^= 1 << rng.randrange(8)
            result = one.loaded(numbers)
            assert result.lost == {LossReason.CHECKSUM: 50}
            assert len(result.bad_block_ids) == 50
            assert one.mover.scattered == []
            eventually(lambda: bad_reports(cluster) == 50 * round_number, "all are reported")  # noqa: B023
        assert not one.mover.blocks[one.half :].any()
        assert one.lost("load_checksum") == 1000
        one.stored(numbers)
        result = one.loaded(numbers)
        assert (result.lost, one.wrong(result, numbers)) == ({}, [])
        one.idle()


def test_only_the_damaged_value_is_refused_and_hidden(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with rank(cluster.settings()) as one, lookups(cluster.settings()) as seen:
        seen.ready()
        one.ready().stored(range(8))
        flip(cluster, one.computed[3].tobytes(), VALUE - 1, 7)
        result = one.loaded(range(8))
        assert (result.bad_block_ids, result.lost) == ((one.half + 3,), {LossReason.CHECKSUM: 1})
        assert one.wrong(result, range(8)) == []
        assert one.gpu(one.half + 3) == bytes(VALUE)
        eventually(lambda: bad_reports(cluster) == 1, "it is reported")
        assert seen.present(range(8)) == [0, 1, 2, 4, 5, 6, 7]
        assert one.loaded([3]).lost == {LossReason.EVICTED: 1}
        assert sum("event=bad_value" in record.getMessage() for record in caplog.records) == 1
        assert one.stored([3]).moved_bytes == VALUE
        assert one.wrong(one.loaded([3]), [3]) == []


def test_a_damaged_value_is_refused_for_every_load_that_joined(cluster: Cluster) -> None:
    with rank(cluster.settings(), plan=staging_plan(4, lanes=1)) as one:
        one.ready().stored([3])
        flip(cluster, one.computed[3].tobytes(), 0, 0)
        result = one.loaded([3, 3, 3], into=[one.half, one.half + 1, one.half + 2])
        assert (result.lost, result.bad_block_ids) == (
            {LossReason.CHECKSUM: 3},
            (one.half, one.half + 1, one.half + 2),
        )
        assert one.mover.scattered == []
        eventually(lambda: bad_reports(cluster) == 1, "it is reported once")


def test_a_report_that_fails_changes_nothing_for_the_load(cluster: Cluster) -> None:
    with rank(cluster.settings()) as one:
        one.ready().stored([3])
        refused = cluster.only.faults.add(Operation.REQUEST, Fail(), type=MessageType.REPORT_BAD)
        flip(cluster, one.computed[3].tobytes(), 5, 5)
        for _ in range(2):
            assert one.loaded([3]).lost == {LossReason.CHECKSUM: 1}
        eventually(lambda: refused.fired == 2, "it was tried")
        cluster.only.faults.clear()
        assert one.loaded([3]).lost == {LossReason.CHECKSUM: 1}
        eventually(lambda: bad_reports(cluster) == 1, "it is reported")


# ------------------------------------------------------------------------------------------------ damage on the way


@pytest.mark.parametrize(
    "action",
    [BitFlip(0), BitFlip(VALUE - 1, 7), Short(0), Short(VALUE - 1), LateWrite(0.2, Status.OK)],
    ids=["first bit", "last bit", "nothing written", "last byte missing", "answer before the bytes"],
)
def test_bytes_that_did_not_arrive_as_they_left_are_refused(cluster: Cluster, action: Action) -> None:
    """P035, P037: an OK for bytes that are not there, or not these, makes no block valid."""
    with rank(cluster.settings()) as one:
        one.ready().stored(range(4))
        cluster.only.faults.add(Operation.PUSH, action, nth=2)
        result = one.loaded(range(4))
        assert result.lost == {LossReason.CHECKSUM: 1}
        assert one.wrong(result, range(4)) == []
        (bad,) = result.bad_block_ids
        assert one.gpu(bad) == bytes(VALUE)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.ABSENT, LossReason.EVICTED),
        (Status.BAD_LENGTH, LossReason.TOO_SHORT),
        (Status.BAD_LAYOUT, LossReason.LAYOUT),
        (Status.TIMEOUT, LossReason.TIMEOUT),
        (Status.DENIED, LossReason.REFUSED),
        (Status.FAILED, LossReason.FAILED),
        (Status.BAD_EXTENT, LossReason.FAILED),
        (Status.EXISTS, LossReason.FAILED),
        (Status.PENDING, LossReason.FAILED),
        (Status.NO_SPACE, LossReason.FAILED),
    ],
)
def test_every_status_but_ok_is_a_loss_with_a_reason(status: Status, reason: LossReason) -> None:
    """P068, P094: each has its counter, and the ones that make no sense for a get are failures."""
    with scripted("a") as (settings, scripts), rank(settings) as one:
        one.ready()

        async def answer(connection: ScriptedConnection, request: Get) -> list[GetResult]:
            connection.push(request)
            return [GetResult(status, 1, 0, 0)] * len(request.items)

        scripts["a"].put(store_key(prefix_of(1), 0), one.computed[1].tobytes())
        scripts["a"].on_get = answer
        assert one.loaded([1]).lost == {reason: 1}
        assert one.lost(f"load_{reason.value}") == 1
        assert one.mover.scattered == []


def test_a_checksum_of_an_unknown_kind_is_no_checksum() -> None:
    with scripted("a") as (settings, scripts), rank(settings) as one:
        one.ready()

        async def answer(connection: ScriptedConnection, request: Get) -> list[GetResult]:
            return [result._replace(algorithm=99) for result in connection.push(request)]

        scripts["a"].put(store_key(prefix_of(1), 0), one.computed[1].tobytes())
        scripts["a"].on_get = answer
        assert one.loaded([1]).lost == {LossReason.CHECKSUM: 1}


# ------------------------------------------------------------------------------------------------ length and layout


def test_a_value_of_another_layout_is_refused_and_makes_room(cluster: Cluster) -> None:
    """P004, P060: the same key and length, allocated in another order: hidden, so that a usable one can be stored."""
    settings = cluster.settings()
    with rank(settings) as one, rank(settings, mover=ArrayMover(128, VALUE, layout=8)) as other:
        one.ready().stored(range(4))
        assert other.ready().loaded(range(4)).lost == {LossReason.LAYOUT: 4}
        assert other.mover.scattered == []
        eventually(lambda: one.loaded([0]).lost == {LossReason.EVICTED: 1}, "the values were reported and hidden")
        other.stored(range(4))
        result = other.loaded(range(4))
        assert (result.lost, other.wrong(result, range(4))) == ({}, [])


@pytest.mark.parametrize("value", [VALUE // 2, 2 * VALUE])
def test_a_value_of_another_length_is_refused(cluster: Cluster, value: int) -> None:
    settings = cluster.settings()
    with rank(settings) as one, rank(settings, plan=staging_plan(value=value)) as other:
        one.ready().stored(range(4))
        assert other.ready().loaded(range(4)).lost == {LossReason.TOO_SHORT: 4}
        assert other.mover.scattered == []


# ------------------------------------------------------------------------------------------------ memkv_verify


def damaged_loads(one: Rank, cluster: Cluster, count: int) -> int:
    """Load one damaged value ``count`` times; how often was it refused?"""
    one.ready().stored([3])
    # Reports would hide it.
    cluster.only.faults.add(Operation.REQUEST, Fail(), type=MessageType.REPORT_BAD)
    flip(cluster, one.computed[3].tobytes(), 5, 5)
    return sum(one.loaded([3]).lost == {LossReason.CHECKSUM: 1} for _ in range(count))


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(VerifyMode.FULL, 32), (VerifyMode.SAMPLED, 2), (VerifyMode.OFF, 0)],
    ids=lambda each: str(each),
)
def test_verify_modes(cluster: Cluster, mode: VerifyMode, refused: int) -> None:
    """``sampled`` is one load in 16, whichever values they are: none is exempt for ever."""
    with rank(cluster.settings(op_timeout_s=0.2), verify=mode) as one:
        assert damaged_loads(one, cluster, 32) == refused
