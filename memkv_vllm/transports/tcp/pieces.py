"""How a batch of values is cut into pieces that connections move one at a time. Pure.

A piece is bounded in bytes, so that a value of 1 GiB shares the connections with values of 64 KiB, and in spans, so
that its command is short. Spans that continue each other become one: slots of a staging region and extents of the arena
often lie side by side, and a long copy costs less than many short ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.tcp.commands import MAX_SPANS
from memkv_vllm.types import Extent, Status

PIECE_BYTES = 8 << 20
"""Some 2 ms of one connection. Smaller ones cost more CPU per byte, larger ones make the others wait longer."""


@dataclass(slots=True)
class Piece:
    """What one command moves.

    Attributes:
        remote: spans of the client's regions, in order of the bytes.
        local: ``(offset, length)`` of the server's memory, in the same order; cut elsewhere than ``remote``.
        slots: the moves of the batch that have bytes in it.
        num_bytes: of all of it.
        done: all its bytes are in place.
    """

    remote: list[Extent] = field(default_factory=list)
    local: list[tuple[int, int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_bytes: int = 0
    done: bool = False


def cut(moves: Iterable[tuple[int, Move]], piece_bytes: int = PIECE_BYTES, max_spans: int = MAX_SPANS) -> list[Piece]:
    """Cut ``moves``, each with its slot, into pieces; moves of no bytes are in none.

    Args:
        moves: ``(slot, move)``; extents were checked before.
        piece_bytes: most bytes of a piece.
        max_spans: most spans of a piece on either side.
    """
    pieces: list[Piece] = []
    piece = Piece()
    remote, local, slots = piece.remote, piece.local, piece.slots
    room = piece_bytes
    region_due = remote_due = local_due = -1  # what would continue the last spans
    for slot, ((region, offset, left), local_offset) in moves:
        while left:
            if not room or len(remote) == max_spans or len(local) == max_spans:
                pieces.append(piece)
                piece = Piece()
                remote, local, slots = piece.remote, piece.local, piece.slots
                room, region_due, remote_due, local_due = piece_bytes, -1, -1, -1
            taken = min(left, room)
            if offset == remote_due and region == region_due:
                _, first, length = remote[-1]
                remote[-1] = Extent(region, first, length + taken)
            else:
                remote.append(Extent(region, offset, taken))
            if local_offset == local_due:
                first, length = local[-1]
                local[-1] = (first, length + taken)
            else:
                local.append((local_offset, taken))
            slots.append(slot)
            piece.num_bytes += taken
            room -= taken
            left -= taken
            offset += taken
            local_offset += taken
            region_due, remote_due, local_due = region, offset, local_offset
    if slots:
        pieces.append(piece)
    return pieces


def outcome(num_slots: int, pieces: Sequence[Piece], missing: Status) -> list[Status]:
    """A status per slot: OK where every piece with bytes of it is done, else ``missing``."""
    statuses = [Status.OK] * num_slots
    for piece in pieces:
        if not piece.done:
            for slot in piece.slots:
                statuses[slot] = missing
    return statuses


def advance(buffers: list[memoryview], num_bytes: int) -> None:
    """Take the first ``num_bytes`` off ``buffers``, which stand one after the other."""
    whole = 0
    while whole < len(buffers) and num_bytes >= len(buffers[whole]):
        num_bytes -= len(buffers[whole])
        whole += 1
    del buffers[:whole]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]
