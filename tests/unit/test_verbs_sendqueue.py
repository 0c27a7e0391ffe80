"""Places of a send queue: never more outstanding than there are, and always a signal on its way that frees some."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.transports.verbs.sendqueue import SendQueue


@settings(deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.integers(0, 3)), max_size=60))
def test_it_never_gets_stuck_and_never_overflows(depth: int, steps: list[tuple[int, bool, int]]) -> None:
    """P077: down to a single place."""
    queue = SendQueue(depth)
    signalled: list[int] = []
    for wanted, awaited, completions in steps:
        count = min(wanted, queue.free)
        if count:
            first = queue.posted
            mask = queue.take(count, awaited=awaited)
            assert len(mask) == count and (mask[-1] or not awaited)
            signalled += [first + row for row in range(count) if mask[row]]
        for _ in range(completions):
            if signalled:
                queue.complete(signalled.pop(0))
        assert 0 <= queue.free <= depth
        # All but a few of what is outstanding ends in a signalled one, so that places come back.
        last = signalled[-1] if signalled else queue.completed - 1
        assert queue.posted - 1 - last < max(1, depth // 4)
    for number in signalled:
        queue.complete(number)
    assert queue.free > depth * 3 // 4 or queue.free == depth


def test_a_quarter_of_the_places_has_a_signal() -> None:
    queue = SendQueue(128)
    assert [row for row, is_signalled in enumerate(queue.take(100, awaited=True)) if is_signalled] == [31, 63, 95, 99]
    assert queue.take(1, awaited=True).tolist() == [True]
    assert SendQueue(2).take(2, awaited=False).tolist() == [True, True]


def test_signals_are_counted_over_posts_whose_last_nobody_awaits() -> None:
    queue = SendQueue(128)
    assert not queue.take(31, awaited=False).any()
    assert queue.take(1, awaited=False).tolist() == [True]
    assert queue.take(40, awaited=False).nonzero()[0].tolist() == [31]
    assert queue.take(24, awaited=False).nonzero()[0].tolist() == [23]


def test_one_completion_ends_all_before_it() -> None:
    queue = SendQueue(8)
    queue.take(8, awaited=True)
    assert queue.complete(5) == 6
    assert queue.complete(7) == 2
    assert queue.free == 8


def test_what_cannot_be_is_a_bug_here() -> None:
    queue = SendQueue(4)
    with pytest.raises(LocalProtocolError, match="a send queue of 0 places"):
        SendQueue(0)
    with pytest.raises(LocalProtocolError, match="5 work requests for 4 free places"):
        queue.take(5, awaited=True)
    with pytest.raises(LocalProtocolError, match="0 work requests"):
        queue.take(0, awaited=True)
    with pytest.raises(LocalProtocolError, match="work request 0; 0 to -1"):
        queue.complete(0)
    queue.take(3, awaited=True)
    queue.complete(1)
    for number in (0, 1, 3):
        with pytest.raises(LocalProtocolError, match=f"work request {number}; 2 to 2 are under way"):
            queue.complete(number)


def test_places_of_a_post_that_was_refused_come_back() -> None:
    queue = SendQueue(10)
    queue.take(10, awaited=True)
    queue.refuse(7)
    assert (queue.posted, queue.free) == (3, 7)
