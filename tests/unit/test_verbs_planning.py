"""Plans of batches: every byte is moved once, to its place, and nothing outside of what was registered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.transports.base import Move, Moves
from memkv_vllm.transports.verbs.planning import (
    NO_SLOT,
    Arena,
    Columns,
    Pieces,
    RemoteRegion,
    columns_of,
    share,
    split,
)
from memkv_vllm.transports.verbs.provider import Opcode
from memkv_vllm.types import Extent

ARENA = Arena(1 << 40, 1 << 20, 5)
REGIONS = {1: RemoteRegion(1 << 44, 1000, 11), 2: RemoteRegion((1 << 64) - 4096, 4096, 22)}
TOP = (1 << 64) - 1


def plan(*moves: Move) -> tuple[Pieces, tuple[int, ...]]:
    pieces, bad = Pieces.plan(columns_of(moves), REGIONS, ARENA)
    return pieces, bad


def rows(pieces: Pieces) -> list[tuple[int, int, int, int, int]]:
    columns = (pieces.slots, pieces.local, pieces.remote, pieces.lengths, pieces.rkeys)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_batch_over_two_regions() -> None:
    pieces, bad = plan(Move(Extent(2, 0, 4096), 0), Move(Extent(1, 990, 10), 8192), Move(Extent(1, 0, 0), 1 << 20))
    assert rows(pieces) == [
        (0, 1 << 40, (1 << 64) - 4096, 4096, 22),
        (1, (1 << 40) + 8192, (1 << 44) + 990, 10, 11),
    ]
    assert bad == ()


def test_the_columns_of_a_request_and_single_moves_are_planned_alike() -> None:
    moves = [Move(Extent(1, 10 * i, 10), 100 * i) for i in range(50)]
    columns = Moves([1] * 50, [10 * i for i in range(50)], [10] * 50, [100 * i for i in range(50)])
    assert rows(Pieces.plan(columns, REGIONS, ARENA).pieces) == rows(plan(*moves)[0])
    assert columns_of(columns) is columns


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6))
def test_a_batch_that_is_all_in_place_by_a_glance_is_planned_as_a_closer_look_would(
    columns: list[tuple[int, int, int]],
) -> None:
    """In a region and an arena of 20 bytes; a value of another region makes for the closer look."""
    regions = {1: RemoteRegion(1 << 44, 20, 11), 2: RemoteRegion(1 << 45, 20, 22)}
    moves = [Move(Extent(1, offset, length), local) for offset, length, local in columns if local + length <= 20]
    plain, bad = Pieces.plan(columns_of(moves), regions, Arena(1 << 40, 20, 5))
    closer, bad_too = Pieces.plan(columns_of([*moves, Move(Extent(2, 0, 1), 0)]), regions, Arena(1 << 40, 20, 5))
    assert rows(plain) == rows(closer)[:-1]
    assert bad == bad_too
    assert all(remote - (1 << 44) + length <= 20 for _, _, remote, length, _ in rows(plain))


BAD = [
    Extent(3, 0, 1),
    Extent(3, 0, 0),
    Extent(1, 1000, 1),
    Extent(1, 991, 10),
    Extent(1, 1001, 0),
    Extent(1, TOP, 2),
    Extent(1, 2, TOP),
    Extent(1, TOP, TOP),
    Extent(2, 4096, 1),
]


@pytest.mark.parametrize("extent", BAD)
def test_extents_outside_of_the_regions_are_found_alone_and_among_good_ones(extent: Extent) -> None:
    assert plan(Move(extent, 0))[1] == (0,)
    pieces, bad = plan(Move(Extent(1, 0, 7), 0), Move(extent, 0), Move(Extent(2, 0, 8), 7))
    assert (pieces.slots.tolist(), bad) == ([0, 2], (1,))


@pytest.mark.parametrize(("offset", "length"), [((1 << 20) - 9, 10), (1 << 20, 1), (TOP, 1), (TOP, 10)])
def test_memory_outside_of_the_arena_is_a_bug_here(offset: int, length: int) -> None:
    with pytest.raises(LocalProtocolError, match="outside of the arena of 1048576 bytes"):
        plan(Move(Extent(1, 0, 5), 0), Move(Extent(1, 0, length), offset))


def test_nothing_and_slots_of_a_larger_batch() -> None:
    assert len(plan()[0]) == 0
    slots = np.array([4, 9], np.intp)
    moves = columns_of([Move(Extent(1, 0, 5), 0), Move(Extent(7, 0, 5), 0)])
    pieces, bad = Pieces.plan(moves, REGIONS, ARENA, slots)
    assert (pieces.slots.tolist(), bad) == ([4], (9,))


lengths = st.lists(st.integers(1, 50_000), min_size=1, max_size=40)


def made(sizes: list[int]) -> Pieces:
    count = len(sizes)
    ends = np.cumsum(np.array(sizes, np.uint64))
    starts = ends - np.array(sizes, np.uint64)
    return Pieces(
        np.arange(count),
        starts + np.uint64(1 << 40),
        starts + np.uint64(1 << 50),
        np.array(sizes, np.uint64),
        np.full(count, 9, np.uint32),
    )


def covered(pieces: Pieces) -> dict[int, list[tuple[int, int, int]]]:
    """By slot: stretches (local, remote, length), adjacent ones joined."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for slot, local, remote, length, _ in sorted(rows(pieces)):
        stretches = found.setdefault(slot, [])
        if stretches and stretches[-1][0] + stretches[-1][2] == local:
            assert stretches[-1][1] + stretches[-1][2] == remote
            stretches[-1] = (*stretches[-1][:2], stretches[-1][2] + length)
        else:
            stretches.append((local, remote, length))
    return found


@settings(deadline=None)
@given(lengths, st.integers(50, 60_000))
def test_values_longer_than_a_message_are_split_and_nothing_is_lost(sizes: list[int], most: int) -> None:
    """P077: a device with a small message size."""
    whole = made(sizes)
    pieces = split(whole, most)
    assert int(pieces.lengths.max()) <= most
    assert len(pieces) == sum(-(-size // most) for size in sizes)
    assert covered(pieces) == covered(whole)


@settings(deadline=None)
@given(lengths, st.integers(1, 8), st.integers(0, 7))
def test_shares_hold_everything_once_and_differ_by_little(sizes: list[int], count: int, first: int) -> None:
    whole, first = made(sizes), first % count
    shares = list(share(whole, count, first))
    indexes = [index for index, _ in shares]
    assert len(set(indexes)) == len(indexes) and set(indexes) <= set(range(count))
    assert [row for _, part in shares for row in rows(part)] == rows(whole)
    fair = sum(sizes) / count
    for _, part in shares:
        assert int(part.lengths.sum()) <= fair + max(sizes)
    if len(sizes) == 1:
        assert indexes == [first]


def test_a_full_batch_is_halved() -> None:
    shares = [(index, int(part.lengths.sum())) for index, part in share(made([100] * 64), 2, 1)]
    assert shares == [(1, 3200), (0, 3200)]


def test_writes_are_followed_by_a_small_read_of_each_region_written_last() -> None:
    pieces, _ = plan(Move(Extent(1, 0, 100), 0), Move(Extent(2, 5, 3), 100), Move(Extent(1, 200, 7), 103))
    columns = Columns.of(pieces, Opcode.WRITE, 5).flushed(77, 6)
    assert columns.opcodes.tolist() == [Opcode.WRITE] * 3 + [Opcode.READ] * 2
    assert columns.slots.tolist() == [0, 1, 2, NO_SLOT, NO_SLOT]
    flushes = (columns.remote[3:].tolist(), columns.lengths[3:].tolist(), columns.rkeys[3:].tolist())
    assert list(zip(*flushes, strict=True)) == [
        ((1 << 44) + 200, 7, 11),
        ((1 << 64) - 4096 + 5, 3, 22),
    ]
    assert columns.local[3:].tolist() == [77, 77] and columns.lkeys.tolist() == [5, 5, 5, 6, 6]
    one = Columns.of(plan(Move(Extent(1, 0, 100), 0), Move(Extent(1, 500, 100), 100))[0], Opcode.WRITE, 5)
    assert one.flushed(77, 6).remote.tolist()[2:] == [(1 << 44) + 500] and one.flushed(77, 6).lengths[-1] == 8
