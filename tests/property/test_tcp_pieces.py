"""How the bytes of eager puts are laid out, beside models that go byte by byte."""

from __future__ import annotations

import os
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.tcp import pieces
from memkv_vllm.transports.tcp.eager import MAX_EAGER_BYTES, MAX_EAGER_VALUES, may_be_eager
from memkv_vllm.transports.tcp.pieces import NOWHERE, advance, are_disjoint, first_bytes, joined, scatter, views
from memkv_vllm.types import Extent

UNTOUCHED = 255
DROPPED_BYTES = 5
"""In place of 256 KiB, so that short spans are longer than it."""


@st.composite
def eager_puts(draw: st.DrawFn) -> tuple[list[int], dict[int, int], list[Move], int]:
    """Lengths as they come, which places go to which move, the moves, and how long the arena is.

    Places in the arena are in any order, with and without gaps; some values have no bytes, some are not wanted, and
    some moves (which were refused) get none.
    """
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 12, 20]), min_size=1, max_size=10).filter(any))
    wanted = draw(st.lists(st.sampled_from(range(len(lengths))), unique=True).map(sorted))
    in_order = draw(st.booleans())
    offsets, at = {}, draw(st.integers(0, 3))
    for place in wanted if in_order else draw(st.permutations(wanted)):
        offsets[place] = at
        at += lengths[place] + draw(st.sampled_from([0, 0, 0, 1, 4]))
    moves = [Move(Extent(1, 0, lengths[place]), offsets[place]) for place in wanted]
    refused = draw(st.sets(st.sampled_from(wanted))) if wanted else set()
    slots = {place: slot for slot, place in enumerate(wanted) if place not in refused}
    return lengths, slots, moves, at


def stream_of(lengths: list[int]) -> bytes:
    """Bytes of all values, in which each differs from its neighbours and none is ``UNTOUCHED``."""
    return bytes(index % 251 for index in range(sum(lengths)))


@given(eager_puts())
def test_scattered_values_land_where_their_moves_say_and_nowhere_else(
    put: tuple[list[int], dict[int, int], list[Move], int],
) -> None:
    lengths, slots, moves, size = put
    stream = stream_of(lengths)
    expected = bytearray([UNTOUCHED] * size)
    at = 0
    for place, length in enumerate(lengths):
        if place in slots:
            to = moves[slots[place]].local_offset
            expected[to : to + length] = stream[at : at + length]
        at += length

    piece = scatter(3, lengths, slots, moves)
    arena = bytearray([UNTOUCHED] * size)
    with patch.object(pieces, "_DROPPED", memoryview(bytearray(DROPPED_BYTES))):
        buffers = views(memoryview(arena), piece.local)
    rest = memoryview(stream)
    for buffer in buffers:
        assert len(buffer), "an empty buffer would end a message early"
        buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]
    assert not rest, "all bytes are taken off the connection"
    assert arena == expected
    assert (piece.remote, piece.num_bytes, piece.done, piece.number) == ([], len(stream), False, 3)
    assert piece.slots == [slots[place] for place in sorted(slots)], "those without bytes, too"


@given(eager_puts())
def test_scattered_spans_are_as_few_as_can_be(put: tuple[list[int], dict[int, int], list[Move], int]) -> None:
    lengths, slots, moves, _ = put
    spans = scatter(0, lengths, slots, moves).local
    for (offset, length), (following, _) in zip(spans, spans[1:], strict=False):
        if offset == NOWHERE:
            assert following != NOWHERE
        else:
            assert following != offset + length


MANY_LENGTHS = st.integers(1, MAX_EAGER_VALUES).flatmap(
    lambda count: st.lists(st.integers(1, MAX_EAGER_BYTES // count), min_size=count, max_size=count)
)


@given(MANY_LENGTHS, st.sets(st.integers(0, MAX_EAGER_VALUES - 1)) | st.sets(st.integers(0, 3)))
def test_one_call_takes_all_of_an_eager_put(lengths: list[int], kept: set[int]) -> None:
    """Whatever of it is dropped: its header and its buffers are fewer than one ``recvmsg`` takes."""
    assert may_be_eager(lengths)
    places = sorted(kept.intersection(range(len(lengths))))
    moves = [Move(Extent(1, 0, lengths[place]), place * MAX_EAGER_BYTES) for place in places]
    piece = scatter(0, lengths, {place: slot for slot, place in enumerate(places)}, moves)
    buffers = views(_Endless(), piece.local)  # type: ignore[arg-type]
    assert 1 + len(buffers) <= os.sysconf("SC_IOV_MAX")


class _Endless:
    """An arena of any size."""

    def __getitem__(self, span: slice) -> slice:
        return span


@given(st.lists(st.builds(Extent, st.integers(1, 2), st.integers(0, 9), st.sampled_from([0, 1, 2, 3]))))
def test_joined_extents_are_the_same_bytes_in_as_few_spans_as_can_be(extents: list[Extent]) -> None:
    def addresses(spans: list[Extent]) -> list[tuple[int, int]]:
        return [(span.region, span.offset + at) for span in spans for at in range(span.length)]

    spans = joined(extents)
    assert addresses(spans) == addresses(extents)
    assert all(span.length for span in spans)
    for span, following in zip(spans, spans[1:], strict=False):
        assert (following.region, following.offset) != (span.region, span.offset + span.length)


@given(st.lists(st.builds(Extent, st.integers(1, 2), st.integers(0, 20), st.integers(1, 5)), max_size=5))
def test_extents_are_disjoint_when_no_byte_is_in_two(extents: list[Extent]) -> None:
    addresses = [(one.region, one.offset + at) for one in extents for at in range(one.length)]
    assert are_disjoint(extents) == (len(set(addresses)) == len(addresses))


@given(st.lists(st.tuples(st.just(NOWHERE) | st.integers(0, 40), st.integers(1, 30))))
def test_views_lie_where_the_spans_say(spans: list[tuple[int, int]]) -> None:
    memory = bytearray(70)
    nowhere = bytearray(DROPPED_BYTES)
    with patch.object(pieces, "_DROPPED", memoryview(nowhere)):
        found = views(memoryview(memory), spans)
    assert sum(map(len, found)) == sum(length for _, length in spans)
    for offset, length in spans:
        if offset == NOWHERE:
            while length:
                view = found.pop(0)
                assert view.obj is nowhere
                length -= len(view)
            continue
        view = found.pop(0)
        memory[:] = bytes(70)
        view[:] = b"x" * length
        assert [at for at, byte in enumerate(memory) if byte] == list(range(offset, offset + length))
    assert not found


BUFFERS = st.lists(st.integers(0, 6), max_size=8)


@given(BUFFERS, st.integers(0, 40))
def test_first_bytes_are_the_first_ones_and_take_nothing_away(lengths: list[int], num_bytes: int) -> None:
    data = [bytes([index + 1] * length) for index, length in enumerate(lengths)]
    buffers = [memoryview(part) for part in data]
    taken = first_bytes(buffers, num_bytes)
    assert b"".join(taken) == b"".join(data)[:num_bytes]
    assert all(view.obj is part for view, part in zip(taken, data, strict=False)), "no copies"
    assert [bytes(buffer) for buffer in buffers] == data


@given(BUFFERS, st.integers(1, 9), st.data())
def test_steps_go_over_every_byte_once(lengths: list[int], step: int, data: st.DataObject) -> None:
    """As a connection does: each call is given so many bytes at most, and moves some of them."""
    stream = bytes(range(sum(lengths)))
    buffers, at = [], 0
    for length in lengths:
        buffers.append(memoryview(stream)[at : at + length])
        at += length
    seen = b""
    while any(map(len, buffers)):
        given_now = b"".join(first_bytes(buffers, step))
        assert 0 < len(given_now) <= step
        moved = data.draw(st.integers(1, len(given_now)))
        seen += given_now[:moved]
        advance(buffers, moved)
    assert seen == stream
