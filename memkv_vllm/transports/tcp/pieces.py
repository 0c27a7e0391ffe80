"""How a batch of values is cut into pieces that connections move one at a time. Pure.

A piece is bounded in bytes, so that a value of 1 GiB shares the connections with values of 64 KiB, and in spans, so
that its command is short. Spans that continue each other become one: slots of a staging region and extents of the arena
often lie side by side, and a long copy costs less than many short ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memkv_vllm.transports.base import Move, Moves
from memkv_vllm.transports.tcp.commands import MAX_SPANS
from memkv_vllm.types import Extent, Status

PIECE_BYTES = 8 << 20
"""Some 2 ms of one connection. Smaller ones cost more CPU per byte, larger ones make the others wait longer."""

NOWHERE = -1
"""A local offset: the bytes are taken off the connection and dropped."""
_DROPPED = memoryview(bytearray(256 << 10))
"""Written by any thread, read by none."""


@dataclass(slots=True)
class Piece:
    """What one command moves.

    Attributes:
        remote: spans of the client's regions, in order of the bytes.
        local: ``(offset, length)`` of the server's memory, in the same order; cut elsewhere than ``remote``.
        slots: the moves of the batch that have bytes in it.
        num_bytes: of all of it.
        done: all its bytes are in place.
        number: of an eager put or get, counted from 0 in its session.
        answer: to an eager get, sent before the bytes.
    """

    remote: list[Extent] = field(default_factory=list)
    local: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_bytes: int = 0
    done: bool = False
    number: int = 0
    answer: bytes = b""


def columns(moves: Sequence[Move]) -> Moves:
    """``moves`` in columns; a request's moves are so already."""
    if isinstance(moves, Moves):
        return moves
    regions, offsets, lengths = [[move.remote[field] for move in moves] for field in range(3)]
    return Moves(regions, offsets, lengths, [move.local_offset for move in moves])


def cut(
    slots: Iterable[int], moves: Sequence[Move], piece_bytes: int = PIECE_BYTES, max_spans: int = MAX_SPANS
) -> list[Piece]:
    """Cut ``moves`` into pieces; moves of no bytes are in none.

    Args:
        slots: of the moves, in the batch.
        moves: extents were checked before.
        piece_bytes: most bytes of a piece.
        max_spans: most spans of a piece on either side.
    """
    batch = columns(moves)
    pieces: list[Piece] = []
    spans = _Spans()
    room = piece_bytes
    region_due = remote_due = local_due = -1  # what would continue the last spans
    rows = zip(slots, batch.regions, batch.offsets, batch.lengths, batch.local_offsets, strict=True)
    for slot, region, offset, left, local_offset in rows:
        while left:
            if not room or len(spans.lengths) == max_spans or len(spans.local_lengths) == max_spans:
                pieces.append(spans.piece(piece_bytes - room))
                spans, room, region_due, remote_due, local_due = _Spans(), piece_bytes, -1, -1, -1
            taken = left if left < room else room
            if offset == remote_due and region == region_due:
                spans.lengths[-1] += taken
            else:
                spans.add_remote(region, offset, taken)
            if local_offset == local_due:
                spans.local_lengths[-1] += taken
            else:
                spans.add_local(local_offset, taken)
            spans.slots.append(slot)
            room, left, offset, local_offset = room - taken, left - taken, offset + taken, local_offset + taken
            region_due, remote_due, local_due = region, offset, local_offset
    if spans.slots:
        pieces.append(spans.piece(piece_bytes - room))
    return pieces


class _Spans:
    """A piece that is being made: columns, so that a span which grows is not made anew each time."""

    __slots__ = ("lengths", "local_lengths", "local_offsets", "offsets", "regions", "slots")

    def __init__(self) -> None:
        self.regions: list[int] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.local_offsets: list[int] = []
        self.local_lengths: list[int] = []
        self.slots: list[int] = []

    def add_remote(self, region: int, offset: int, length: int) -> None:
        self.regions.append(region)
        self.offsets.append(offset)
        self.lengths.append(length)

    def add_local(self, offset: int, length: int) -> None:
        self.local_offsets.append(offset)
        self.local_lengths.append(length)

    def piece(self, num_bytes: int) -> Piece:
        remote = list(map(Extent, self.regions, self.offsets, self.lengths))
        return Piece(remote, list(zip(self.local_offsets, self.local_lengths, strict=True)), self.slots, num_bytes)


def scatter(number: int, lengths: Sequence[int], slots: Mapping[int, int], moves: Sequence[Move]) -> Piece:
    """One piece of values that come in an order of the peer's choice.

    Args:
        number: of the eager put.
        lengths: of the values as they come; some bytes in all.
        slots: of those to keep, by their place in ``lengths``: which of ``moves`` says where to. The others go nowhere.
        moves: extents were checked before.
    """
    local: list[tuple[int, int]] = []
    kept: list[int] = []
    start, due = NOWHERE, 0
    taken = 0
    local_offsets = columns(moves).local_offsets
    for place, length in enumerate(lengths):
        slot = slots.get(place)
        offset = NOWHERE if slot is None else local_offsets[slot]
        if slot is not None:
            kept.append(slot)
        if not length:
            continue
        if taken and offset != (NOWHERE if start == NOWHERE else due):
            local.append((start, taken))
            taken = 0
        if not taken:
            start = offset
        taken += length
        due = start + taken
    if taken:
        local.append((start, taken))
    return Piece([], local, kept, sum(lengths), number=number)


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same bytes in fewer spans, without empty ones."""
    spans: list[Extent] = []
    region_due = due = -1
    for region, offset, length in extents:
        if offset == due and region == region_due:
            start = spans[-1].offset
            spans[-1] = Extent(region, start, offset + length - start)
        elif length:
            spans.append(Extent(region, offset, length))
        else:
            continue
        region_due, due = region, offset + length
    return spans


def are_disjoint(extents: Iterable[Extent]) -> bool:
    """Whether no two of ``extents`` have a byte in common."""
    region_before = end = -1
    for region, offset, length in sorted(extents):
        if region == region_before and offset < end:
            return False
        region_before, end = region, offset + length
    return True


def views(memory: memoryview, spans: Iterable[tuple[int, int]]) -> list[memoryview]:
    """Where the bytes of ``spans`` (offset or ``NOWHERE``, length) lie in ``memory``."""
    found: list[memoryview] = []
    for offset, length in spans:
        if offset == NOWHERE:
            found += [_DROPPED[: min(len(_DROPPED), length - at)] for at in range(0, length, len(_DROPPED))]
        else:
            found.append(memory[offset : offset + length])
    return found


def outcome(num_slots: int, pieces: Sequence[Piece], missing: Status) -> list[Status]:
    """A status per slot: OK where every piece with bytes of it is done, else ``missing``."""
    statuses = [Status.OK] * num_slots
    for piece in pieces:
        if not piece.done:
            for slot in piece.slots:
                statuses[slot] = missing
    return statuses


def first_bytes(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The first ``num_bytes`` of ``buffers``, which stand one after the other; all of them where they have no more."""
    taken: list[memoryview] = []
    for buffer in buffers:
        if num_bytes < len(buffer):
            return [*taken, buffer[:num_bytes]] if num_bytes else taken
        taken.append(buffer)
        num_bytes -= len(buffer)
    return taken


def advance(buffers: list[memoryview], num_bytes: int) -> None:
    """Take the first ``num_bytes`` off ``buffers``, which stand one after the other."""
    whole = 0
    while whole < len(buffers) and num_bytes >= len(buffers[whole]):
        num_bytes -= len(buffers[whole])
        whole += 1
    del buffers[:whole]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]
