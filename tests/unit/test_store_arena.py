"""The arena's allocator: exact cases."""

from __future__ import annotations

import random

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator

KIB = 1024


def test_extents_start_on_the_granule_and_lengths_round_up() -> None:
    arena = ArenaAllocator(64 * KIB, granule=4 * KIB)
    assert (arena.allocate(1), arena.allocate(4097), arena.allocate(4096)) == (0, 4096, 3 * 4096)
    assert arena.statistics().used == 4 * 4096


def test_the_part_after_the_last_whole_granule_is_not_used() -> None:
    arena = ArenaAllocator(10_000, granule=4096)
    assert arena.size == 8192
    assert arena.allocate(8193) is None
    assert arena.allocate(8192) == 0


def test_double_free_and_unknown_offset_raise() -> None:
    arena = ArenaAllocator(64 * KIB)
    offset = arena.allocate(8 * KIB)
    assert offset is not None
    with pytest.raises(LocalProtocolError, match="4096"):
        arena.free(offset + 4096)
    arena.free(offset)
    with pytest.raises(LocalProtocolError, match="double free"):
        arena.free(offset)
    with pytest.raises(LocalProtocolError, match="double free"):
        arena.free_many([offset])


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_that_is_not_positive_raises(length: int) -> None:
    with pytest.raises(LocalProtocolError):
        ArenaAllocator(64 * KIB).allocate(length)


@pytest.mark.parametrize(("size", "granule"), [(0, 4096), (4095, 4096), (4096, 0), (4096, -1)])
def test_an_arena_without_a_whole_granule_raises(size: int, granule: int) -> None:
    with pytest.raises(LocalProtocolError):
        ArenaAllocator(size, granule)


def test_best_fit_takes_the_smallest_hole_that_is_long_enough_and_the_lowest_of_them() -> None:
    arena = ArenaAllocator(100, granule=1)
    sizes = [10, 1, 5, 1, 7, 1, 5, 1]
    offsets = [arena.allocate(size) for size in sizes]
    for hole in (0, 2, 4, 6):
        offset = offsets[hole]
        assert offset is not None
        arena.free(offset)
    assert arena.allocate(5) == offsets[2]
    assert arena.allocate(4) == offsets[6]
    assert arena.allocate(6) == offsets[4]
    assert arena.allocate(9) == offsets[0]


def test_neighbours_join_on_both_sides() -> None:
    arena = ArenaAllocator(30, granule=1)
    low, middle, high = arena.allocate(10), arena.allocate(10), arena.allocate(10)
    assert low is not None and middle is not None and high is not None
    arena.free(low)
    arena.free(high)
    assert arena.statistics().largest_free == 10
    assert arena.statistics().fragmentation == 0.5
    arena.free(middle)
    assert arena.statistics() == (30, 0, 30, 30, 0, 0.0)


def test_a_full_arena_reports_no_fragmentation() -> None:
    arena = ArenaAllocator(8192)
    assert arena.allocate(8192) == 0
    assert arena.statistics() == (8192, 8192, 0, 0, 1, 0.0)


def test_one_length_never_fragments() -> None:
    """The common case: every value has one length, so whatever is freed fits what comes."""
    rng = random.Random(1)
    arena = ArenaAllocator(1000 * 4096)
    held = [arena.allocate(4096) for _ in range(1000)]
    for _ in range(5000):
        offset = held.pop(rng.randrange(len(held)))
        assert offset is not None
        arena.free(offset)
        held.append(arena.allocate(4096))
        assert held[-1] is not None


def test_mixed_lengths_keep_most_of_the_arena_usable() -> None:
    """Bound on external fragmentation under churn: first failure only when at least 75 % is in use."""
    rng = random.Random(7)
    arena = ArenaAllocator(1 << 20, granule=256)
    held: list[int] = []
    lowest = 1.0
    for _ in range(20_000):
        offset = arena.allocate(rng.choice([1, 2, 3, 5, 8, 13]) * 1024)
        if offset is None:
            lowest = min(lowest, arena.statistics().used / arena.size)
            arena.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(offset)
    assert 0.75 < lowest < 1.0


def test_skipped_offsets_do_not_pile_up() -> None:
    """A hole that opens and closes for ever behind a lower one of its length must not grow that length's heap."""
    arena = ArenaAllocator(120, granule=1)
    assert (arena.allocate(10), arena.allocate(10)) == (0, 10)
    arena.free(0)
    for _ in range(1000):
        assert arena.allocate(90) == 20  # leaves a hole of 10 bytes at 110
        arena.free(20)  # joins it
    assert len(arena._bins[10]._heap) < 32


def test_repr_shows_state() -> None:
    arena = ArenaAllocator(8192)
    arena.allocate(1)
    assert repr(arena) == "<ArenaAllocator 4096/8192 bytes in 1 extents>"
