"""Segments in memory: sums, states, room, and which one is given up."""

from __future__ import annotations

import random

import numpy as np
import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.format import BLOCK_BYTES, Geometry, index_blocks
from memkv_vllm.store.log.handles import Handles
from memkv_vllm.store.log.reclaim import choose_second_chances, choose_victim
from memkv_vllm.store.log.segments import Segment, SegmentMap, SegmentState

MIB = 1 << 20


def record(length: int) -> Record:
    return Record(b"k" * 71, length, 0, 1, 0)


def new_map(segments: int = 6) -> SegmentMap:
    made = SegmentMap(Geometry.for_size((segments + 1) * MIB, MIB))
    assert len(made.segments) == segments
    return made


def fill(segments: SegmentMap, lengths: list[int], sequence: int = 1) -> Segment:
    """Opens a segment, adds records, seals it."""
    segment = segments.next_free()
    assert segment is not None
    segment.incarnation += 1
    segments.open(segment)
    for length in lengths:
        assert segments.room(1, 1 + -(-length // BLOCK_BYTES), 71)
        segments.add(segment.next_block, sequence, record(length))
        sequence += 1
    return segments.seal()


def test_sums_follow_what_lives() -> None:
    segments = new_map()
    segment = fill(segments, [4096, 1, 10_000])
    assert (segments.totals.live_records, segments.totals.live_bytes) == (3, (2 + 2 + 4) * BLOCK_BYTES)
    assert segment.mark_dead(1)
    assert not segment.mark_dead(1)
    assert not segment.mark_dead(2)
    assert (segments.totals.live_records, segments.totals.live_bytes) == (2, 6 * BLOCK_BYTES)
    assert segments.totals.used_bytes == 8 * BLOCK_BYTES
    segments.give_up(segment)
    assert (segments.totals.live_records, segments.totals.live_bytes, segments.totals.used_bytes) == (0, 0, 0)


def test_a_location_of_an_earlier_use_is_dead() -> None:
    segments = new_map()
    segment = fill(segments, [4096])
    location = Location(0, segment.number, segment.incarnation, BLOCK_BYTES)
    assert segments.find(location) is segment
    assert segments.find(location._replace(offset=2 * BLOCK_BYTES)) is None
    assert segments.find(location._replace(segment=99)) is None
    segments.give_up(segment)
    assert segments.find(location) is None


def test_a_segment_that_is_read_is_free_only_afterwards() -> None:
    segments = new_map()
    segment = fill(segments, [4096])
    segments.begin_read(segment)
    segments.begin_read(segment)
    segments.give_up(segment)
    segments.end_read(segment)
    assert segments.counts()["draining"] == segments.num_draining == 1
    segments.end_read(segment)
    assert segments.counts()["draining"] == segments.num_draining == 0
    assert segments.next_free() is segment


def test_the_open_segment_keeps_room_for_its_index() -> None:
    segments = new_map()
    segment = segments.next_free()
    assert segment is not None
    segments.open(segment)
    while segments.room(1, 2, 71):
        segments.add(segment.next_block, 1, record(1))
    count = len(segments.entries)
    assert segment.next_block + index_blocks(count, 71 * count) <= segments.geometry.segment_blocks
    assert segment.next_block + 2 + index_blocks(count + 1, 71 * (count + 1)) > segments.geometry.segment_blocks


def test_nothing_follows_a_write_that_failed() -> None:
    segments = new_map()
    segment = segments.next_free()
    assert segment is not None
    segments.open(segment)
    segments.break_off(1, 5)
    assert not segments.room(1, 1, 1)
    assert segments.copy_room(1) == 0
    assert segments.entries == []
    assert segment.dead_starts() == [1]


def test_records_never_overlap() -> None:
    segments = new_map()
    segment = fill(segments, [4096])
    with pytest.raises(LocalProtocolError, match="would cover others"):
        segment.add(2, 1, 1)


def test_space_that_the_file_system_has_not_is_withheld() -> None:
    segments = new_map()
    fill(segments, [1])
    segments.give_up(segments.segments[0])
    segments.withhold()
    assert (segments.num_free, segments.num_withheld) == (1, 5)
    assert segments.next_free() is segments.segments[0]
    segments.offer()
    assert (segments.num_free, segments.num_withheld) == (6, 0)


def test_a_whole_segment_is_loaded() -> None:
    segments = new_map()
    starts, blocks, dead = np.array([1, 3, 9], "u4"), np.array([2, 6, 2], "u4"), np.array([0, 1, 0], "u1")
    segments.segments[2].load(starts.tobytes(), blocks.tobytes(), dead.tobytes(), 5, 8)
    segments.recovered()
    assert segments.segments[2].state is SegmentState.SEALED
    assert (segments.totals.live_records, segments.totals.live_bytes) == (2, 4 * BLOCK_BYTES)
    assert segments.num_free == 5
    assert segments.oldest() == 5
    assert segments.segments[2].dead_starts() == [3]


# ---------------------------------------------------------------- reclaim


def test_the_segment_with_the_fewest_live_bytes_goes_first() -> None:
    segments = new_map()
    full, half, old = (fill(segments, [100_000] * 9, sequence) for sequence in (100, 200, 1))
    for start in [start for start, _, _ in list(half.live())][:5]:
        half.mark_dead(start)
    assert choose_victim(segments.segments, MIB) is half
    segments.give_up(half)
    assert choose_victim(segments.segments, MIB) is old
    segments.give_up(old)
    assert choose_victim(segments.segments, MIB) is full


def test_a_few_bytes_do_not_outweigh_age() -> None:
    segments = new_map()
    old = fill(segments, [50_000] * 18, 1)
    fill(segments, [50_000] * 17, 100)
    assert choose_victim(segments.segments, MIB) is old


def test_a_segment_that_is_read_is_the_last_choice() -> None:
    segments = new_map()
    first, second = fill(segments, [1], 1), fill(segments, [1] * 9, 50)
    segments.begin_read(first)
    assert choose_victim(segments.segments, MIB) is second


def test_neither_open_nor_free_segments_are_given_up() -> None:
    segments = new_map()
    assert choose_victim(segments.segments, MIB) is None
    segment = segments.next_free()
    assert segment is not None
    segments.open(segment)
    assert choose_victim(segments.segments, MIB) is None


def test_used_records_get_a_second_chance_within_a_quarter() -> None:
    segments = new_map()
    segment = fill(segments, [99_000] * 9)
    starts = [start for start, _, _ in segment.live()]
    for start in starts[:6]:
        segment.mark_used(start)
    segment.mark_dead(starts[5])
    chosen = choose_second_chances(segment, MIB, 10_000)
    # 64 blocks are a quarter, a record has 26: the two latest that were used and live.
    assert chosen == [(starts[3], 26), (starts[4], 26)]
    assert choose_second_chances(segment, MIB, 30) == [(starts[4], 26)]
    assert choose_second_chances(segment, MIB, 0) == []


def test_handles_lead_to_the_last_place() -> None:
    handles, places = Handles(), [Location(0, number, 1, 4096) for number in range(4)]
    handles.moved(places[0], places[1])
    handles.moved(places[1], places[2])
    assert handles.place(places[0]) == places[2]
    assert handles.handle(places[2]) == places[0]
    assert len(handles) == 1
    assert handles.drop(places[2]) == places[0]
    assert len(handles) == 0
    assert handles.place(places[0]) == places[0]
    handles.moved(places[0], places[3])
    assert handles.drop_handle(places[0]) == places[3]
    assert len(handles) == 0


def test_sums_agree_with_a_recount_after_anything() -> None:
    choices = random.Random(5)
    segments = new_map(8)
    for _ in range(300):
        step = choices.random()
        sealed = [segment for segment in segments.segments if segment.state is SegmentState.SEALED]
        if step < 0.4 and segments.num_free:
            fill(segments, [choices.randint(1, 60_000) for _ in range(choices.randint(0, 10))])
        elif step < 0.8 and sealed:
            segment = choices.choice(sealed)
            segment.mark_dead(choices.randint(0, 200))
        elif sealed:
            segments.give_up(choices.choice(sealed))
        live = [blocks for segment in segments.segments for _, blocks, _ in segment.live()]
        assert segments.totals.live_records == len(live)
        assert segments.totals.live_bytes == sum(live) * BLOCK_BYTES
        assert sum(segments.counts().values()) == 8
