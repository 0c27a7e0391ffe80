"""Postings: settled by their own generation only (P041)."""

from __future__ import annotations

import pytest

from memkv_vllm.engine.inflight import Holder, InFlight
from memkv_vllm.engine.staging import Slot
from memkv_vllm.errors import LocalProtocolError

OLD, NEW = Holder("a", 1), Holder("a", 2)


def slots(*indices: int) -> list[Slot]:
    return [Slot(index, 0, index * 8, 8, 0) for index in indices]


def test_posted_until_settled() -> None:
    inflight = InFlight()
    inflight.posted(OLD, slots(0, 1))
    inflight.posted(Holder("b", 1), slots(1))
    assert inflight.holders_of(slots(1)[0]) == {OLD, Holder("b", 1)}
    assert inflight.settled(OLD, slots(0, 1))
    assert inflight.holders_of(slots(1)[0]) == {Holder("b", 1)}
    assert len(inflight) == 1


def test_answers_of_an_abandoned_generation_settle_nothing() -> None:
    inflight = InFlight()
    inflight.posted(OLD, slots(0, 1))
    assert inflight.abandoned(OLD) == slots(0, 1)
    assert inflight.abandoned(OLD) == []
    inflight.posted(NEW, slots(0))
    assert not inflight.settled(OLD, slots(0))
    assert inflight.holders_of(slots(0)[0]) == {NEW}
    assert inflight.settled(NEW, slots(0))


def test_a_reissued_slot_is_another_slot() -> None:
    inflight = InFlight()
    fresh = Slot(0, 0, 0, 8, generation=1)
    inflight.posted(OLD, [fresh])
    assert not inflight.settled(OLD, slots(0))
    assert inflight.settled(OLD, [fresh])


def test_unknown_ones_do_not_keep_known_ones_posted() -> None:
    inflight = InFlight()
    inflight.posted(OLD, slots(0))
    assert not inflight.settled(OLD, slots(5, 0))
    assert len(inflight) == 0


@pytest.mark.parametrize("bad", [slots(0), slots(1, 1)])
def test_posting_twice_is_a_bug(bad: list[Slot]) -> None:
    inflight = InFlight()
    inflight.posted(OLD, slots(0))
    with pytest.raises(LocalProtocolError, match="twice"):
        inflight.posted(OLD, bad)
    assert len(inflight) == 1


def test_nothing_is_posted_over_an_abandoned_connection() -> None:
    inflight = InFlight()
    inflight.abandoned(NEW)
    for holder in (OLD, NEW):
        with pytest.raises(LocalProtocolError, match="abandoned"):
            inflight.posted(holder, slots(0))
    inflight.posted(Holder("a", 3), slots(0))
    assert "1" in repr(inflight)
