"""Frames of a data connection, and how batches are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.errors import RemoteProtocolError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.transports.base import Move, Moves
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, MAX_SPANS, CommandOpener, CommandSealer, Kind
from memkv_vllm.transports.tcp.pieces import Piece, advance, columns, cut, outcome
from memkv_vllm.types import Extent, Role, Status

TRANSCRIPT, KEY = b"transcript", bytes(range(32))
SPANS = [Extent(1, 4096 * index, 100) for index in range(MAX_SPANS)]


def sealer(role: Role = Role.SERVER, transcript: bytes = TRANSCRIPT) -> CommandSealer:
    return CommandSealer(Sealer(KEY, role, transcript))


def opener(role: Role = Role.SERVER) -> CommandOpener:
    return CommandOpener(Sealer(KEY, role, TRANSCRIPT))


def opened(reader: CommandOpener, frame: bytes, *due: Kind) -> tuple[Kind, list[Extent]]:
    """What a reader does with a stream that holds one frame."""
    assert len(frame) == FIRST_BYTES + reader.more_bytes(frame[:FIRST_BYTES])
    return reader.open(frame, *(due or tuple(Kind)))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, MAX_SPANS])
def test_what_was_packed_is_what_is_opened(count: int) -> None:
    writer, reader = sealer(), opener()
    for kind in Kind:
        assert opened(reader, writer.pack(kind, SPANS[:count])) == (kind, SPANS[:count])


def test_the_largest_numbers_fit() -> None:
    span = Extent((1 << 32) - 1, (1 << 64) - 1, (1 << 64) - 1)
    assert opened(opener(), sealer().pack(Kind.READ, [span, span])) == (Kind.READ, [span, span])


@pytest.mark.parametrize("count", [1, 5])
def test_every_changed_byte_is_noticed(count: int) -> None:
    frame = sealer().pack(Kind.WRITE, SPANS[:count])
    for index in range(len(frame)):
        spoilt = frame[:index] + bytes([frame[index] ^ 1]) + frame[index + 1 :]
        reader = opener()
        with pytest.raises(RemoteProtocolError):
            more = reader.more_bytes(spoilt[:FIRST_BYTES])
            if FIRST_BYTES + more != len(spoilt):
                raise RemoteProtocolError("length", "it would be read to another length, and its MAC stand elsewhere")
            reader.open(spoilt, *Kind)


def test_replayed_reordered_and_reflected_frames_are_refused() -> None:
    """P092: each frame is good once, in its turn, in its direction and on its connection."""
    writer = sealer()
    first, second = writer.pack(Kind.READ), writer.pack(Kind.READ)
    reader = opener()
    with pytest.raises(RemoteProtocolError, match="0 was due"):
        reader.more_bytes(second)
    opened(reader, first)
    with pytest.raises(RemoteProtocolError, match="1 was due"):
        reader.more_bytes(first)
    with pytest.raises(RemoteProtocolError, match="MAC"):
        opened(opener(Role.CLIENT), first)
    with pytest.raises(RemoteProtocolError, match="MAC"):
        opened(opener(), sealer(transcript=b"another connection").pack(Kind.READ))


def test_a_kind_that_is_not_due_and_too_many_spans_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="was due") as refused:
        opened(opener(), sealer().pack(Kind.SENT), Kind.WRITTEN)
    assert refused.value.kind == "type"
    frame = bytearray(sealer().pack(Kind.READ, SPANS))
    frame[6:8] = (MAX_SPANS + 1).to_bytes(2, "little")
    with pytest.raises(RemoteProtocolError, match="257 spans"):
        opener().more_bytes(frame)


def test_a_frame_of_the_control_protocol_is_no_command() -> None:
    with pytest.raises(RemoteProtocolError, match="magic"):
        opener().more_bytes(b"mKV1" + bytes(FIRST_BYTES))


# -- pieces

moves = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 40), st.integers(0, 50)).map(
        lambda t: Move(Extent(t[0], t[1], t[2]), t[3])
    ),
    max_size=30,
)


def bytes_of(pieces: list[Piece]) -> list[tuple[tuple[int, int], int]]:
    """Every byte in order: where it is remotely and locally."""
    remote = [(region, offset + i) for p in pieces for region, offset, length in p.remote for i in range(length)]
    local = [offset + i for p in pieces for offset, length in p.local for i in range(length)]
    return list(zip(remote, local, strict=True))


@given(moves, st.integers(1, 60), st.integers(1, 8))
def test_pieces_hold_every_byte_once_in_order_and_keep_their_bounds(
    batch: list[Move], piece_bytes: int, max_spans: int
) -> None:
    pieces = cut(range(len(batch)), batch, piece_bytes, max_spans)
    whole = cut(range(len(batch)), batch, 1 << 60, 1 << 60)
    assert bytes_of(pieces) == bytes_of(whole)
    assert len(bytes_of(pieces)) == sum(move.remote.length for move in batch)
    for piece in pieces:
        assert 0 < piece.num_bytes <= piece_bytes
        assert piece.num_bytes == sum(length for _, _, length in piece.remote) == sum(n for _, n in piece.local)
        assert max(len(piece.remote), len(piece.local)) <= max_spans


@given(moves, st.integers(1, 60), st.data())
def test_a_slot_is_ok_exactly_when_all_its_bytes_are_there(
    batch: list[Move], piece_bytes: int, data: st.DataObject
) -> None:
    pieces = cut(range(len(batch)), batch, piece_bytes, 4)
    for piece in pieces:
        piece.done = data.draw(st.booleans())
    missing = {slot for piece in pieces if not piece.done for slot in piece.slots}
    expected = [Status.TIMEOUT if slot in missing else Status.OK for slot in range(len(batch))]
    assert outcome(len(batch), pieces, Status.TIMEOUT) == expected
    touched = {slot for piece in pieces for slot in piece.slots}
    assert touched == {slot for slot, move in enumerate(batch) if move.remote.length}


@given(moves, st.integers(1, 60))
def test_a_batch_in_columns_is_cut_as_one_of_single_moves(batch: list[Move], piece_bytes: int) -> None:
    in_columns = Moves(
        [move.remote.region for move in batch],
        [move.remote.offset for move in batch],
        [move.remote.length for move in batch],
        [move.local_offset for move in batch],
    )
    slots = range(100, 100 + len(batch))
    assert columns(in_columns) is in_columns and columns(batch) == in_columns
    assert cut(slots, in_columns, piece_bytes) == cut(slots, batch, piece_bytes)
    named = {slot for piece in cut(slots, batch, piece_bytes) for slot in piece.slots}
    assert named == {slot for slot, move in zip(slots, batch, strict=True) if move.remote.length}


def test_a_slot_without_a_move_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError):
        cut([0, 1], [Move(Extent(1, 0, 10), 0)])


def test_neighbours_become_one_span() -> None:
    slots = [Move(Extent(1, 100 * i, 100), 100 * i) for i in range(64)]
    (piece,) = cut(range(64), slots)
    assert (piece.remote, piece.local) == ([Extent(1, 0, 6400)], [(0, 6400)])
    scattered = [Move(Extent(1, 100 * i, 100), 200 * i) for i in range(3)]
    (piece,) = cut(range(3), scattered)
    assert (piece.remote, piece.local) == ([Extent(1, 0, 300)], [(0, 100), (200, 100), (400, 100)])


@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.integers(1, 12), max_size=12))
def test_advance_takes_bytes_off_the_front(lengths: list[int], steps: list[int]) -> None:
    data = bytes(range(sum(lengths)))
    buffers, at = [], 0
    for length in lengths:
        buffers.append(memoryview(data)[at : at + length])
        at += length
    left = data
    for step in steps:
        step = min(step, len(left))
        advance(buffers, step)
        left = left[step:]
        assert b"".join(buffers) == left
