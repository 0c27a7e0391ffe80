"""A batch of moves in columns is the sequence of its moves."""

from __future__ import annotations

import pytest

from memkv_vllm.transports.base import Move, Moves
from memkv_vllm.types import Extent

SINGLE = [Move(Extent(region, 10 * region, 100 + region), 1000 * region) for region in range(5)]
MOVES = Moves(range(5), range(0, 50, 10), range(100, 105), range(0, 5000, 1000))


def test_it_is_read_as_its_moves() -> None:
    assert list(MOVES) == [MOVES[at] for at in range(len(MOVES))] == SINGLE
    assert [extent for extent, _ in MOVES] == [move.remote for move in SINGLE]
    assert MOVES[-1] == SINGLE[-1]
    assert list(reversed(MOVES)) == SINGLE[::-1]
    with pytest.raises(IndexError):
        MOVES[5]


def test_a_part_is_in_columns_too() -> None:
    part = MOVES[1:3]
    assert isinstance(part, Moves)
    assert (list(part), list(part.lengths)) == (SINGLE[1:3], [101, 102])
    assert list(MOVES[5:]) == []
