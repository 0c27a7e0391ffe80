"""The order of bulk work."""

from __future__ import annotations

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.bulkqueue import SMALL_SLICE_BYTES, BulkKind, BulkQueue

GET, PUT = BulkKind.GET, BulkKind.PUT
LARGE = SMALL_SLICE_BYTES


def drain(queue: BulkQueue[str]) -> list[str]:
    taken = []
    while (work := queue.pop()) is not None:
        taken.append(work)
    return taken


def test_gets_go_before_puts_and_each_class_is_first_come_first_served() -> None:
    queue: BulkQueue[str] = BulkQueue()
    for kind, work in [(PUT, "p1"), (GET, "g1"), (PUT, "p2"), (GET, "g2")]:
        assert queue.push(queue.ticket(kind), work)
    assert drain(queue) == ["g1", "g2", "p1", "p2"]


def test_a_get_that_comes_between_two_slices_of_a_put_goes_next() -> None:
    queue: BulkQueue[str] = BulkQueue(put_slice_values=2)
    ticket = queue.ticket(PUT)
    for part in queue.slices(PUT, [LARGE] * 5):
        queue.push(ticket, f"p{part.start}:{part.stop}")
    assert queue.pop() == "p0:2"
    queue.push(queue.ticket(GET), "g")
    assert drain(queue) == ["g", "p2:4", "p4:5"]


def test_later_slices_keep_the_place_that_their_batch_took() -> None:
    queue: BulkQueue[str] = BulkQueue()
    first, second = queue.ticket(PUT), queue.ticket(PUT)
    queue.push(second, "second")
    queue.push(first, "first, pushed later")
    assert drain(queue) == ["first, pushed later", "second"]


def test_slices_cover_a_batch_once() -> None:
    queue: BulkQueue[str] = BulkQueue(put_slice_values=3)
    assert queue.slices(PUT, [LARGE] * 7) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert queue.slices(PUT, [LARGE] * 3) == [slice(0, 3)]
    assert queue.slices(GET, [LARGE] * 7) == [slice(0, 7)]
    assert BulkQueue(get_slice_values=4).slices(GET, [LARGE] * 7) == [slice(0, 4), slice(4, 7)]
    assert queue.slices(GET, []) == queue.slices(PUT, []) == []


def test_a_slice_of_small_values_goes_on_up_to_its_bytes() -> None:
    queue: BulkQueue[str] = BulkQueue(put_slice_values=3)
    quarter, small = LARGE // 4, 100
    assert queue.slices(PUT, [small] * 50) == [slice(0, 50)]
    assert queue.slices(PUT, [quarter] * 9) == [slice(0, 4), slice(4, 8), slice(8, 9)]
    assert queue.slices(PUT, [LARGE, small, small, small]) == [slice(0, 3), slice(3, 4)]
    assert queue.slices(PUT, [small] * 10 + [LARGE] * 2) == [slice(0, 10), slice(10, 12)]


def test_a_full_line_refuses_and_counts() -> None:
    queue: BulkQueue[str] = BulkQueue(max_waiting=1)
    assert queue.push(queue.ticket(PUT), "a")
    assert not queue.push(queue.ticket(GET), "b")
    assert queue.statistics() == (0, 1, 0, 0, 1)
    assert queue.pop() == "a"
    assert queue.push(queue.ticket(GET), "b")


def test_discard_takes_out_the_very_turn() -> None:
    queue: BulkQueue[list[int]] = BulkQueue()
    one, equal = [1], [1]
    ticket = queue.ticket(PUT)
    queue.push(ticket, one)
    queue.push(ticket, equal)
    assert queue.discard(equal)
    assert not queue.discard(equal)
    assert queue.pop() is one
    assert queue.pop() is None
    assert not queue.discard(one)


@pytest.mark.parametrize("limits", [{"put_slice_values": 0}, {"max_waiting": 0}])
def test_limits_must_be_positive(limits: dict[str, int]) -> None:
    with pytest.raises(LocalProtocolError):
        BulkQueue(**limits)
