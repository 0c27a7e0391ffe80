"""Which segment to give up, and which of its records to write again. Pure.

A log-structured store makes room by cleaning whole segments (Rosenblum and Ousterhout, "The design and implementation
of a log-structured file system"). What it cleans it may throw away, since this is a cache: a record is written again
only when it was used since it was written (FIFO with reinsertion, which is CLOCK with the log as its hand), and of
those only as many bytes as leave most of the segment free.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from memkv_vllm.store.log.format import BLOCK_BYTES
from memkv_vllm.store.log.segments import Segment, SegmentState

__all__ = ["SECOND_CHANCE_PART", "choose_second_chances", "choose_victim"]

SECOND_CHANCE_PART = Fraction(1, 4)
"""Of a segment's bytes at most this many are written again: reclaiming one costs a quarter of a segment of writes, and
four of them at most are cleaned for three that can be filled."""
LIVE_STEPS = 8
"""Live bytes are compared in eighths of a segment, so that a few bytes do not weigh more than age."""


def choose_victim(segments: Iterable[Segment], segment_bytes: int) -> Segment | None:
    """The sealed segment with the fewest live bytes, in eighths; among those the one whose records are oldest.

    One that is being read comes last: it could not be written until the read has ended.
    """
    sealed = [segment for segment in segments if segment.state is SegmentState.SEALED]
    return min(
        sealed,
        key=lambda one: (one.readers > 0, -(-one.live_bytes * LIVE_STEPS // segment_bytes), one.newest),
        default=None,
    )


def choose_second_chances(segment: Segment, segment_bytes: int, room_blocks: int) -> list[tuple[int, int]]:
    """``(start, blocks)`` of the used records that are written again, the latest first if not all are.

    Args:
        segment: the victim.
        segment_bytes: bytes of a segment.
        room_blocks: blocks that there is room for.
    """
    left = min(int(segment_bytes * SECOND_CHANCE_PART) // BLOCK_BYTES, room_blocks)
    chosen = []
    for start, blocks, used in reversed(list(segment.live())):
        if used and blocks <= left:
            chosen.append((start, blocks))
            left -= blocks
    return chosen[::-1]
