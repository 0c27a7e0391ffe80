"""Injected faults of moves (``memkv_vllm.transports.faults``), as they are carried out over verbs. For tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.faults import Action, BitFlip, Die, Drop, Fail, LateWrite, Short, die
from memkv_vllm.types import Extent, Status

__all__ = ["Injected", "Late", "inject"]


class Late(NamedTuple):
    """A move that is answered before it is carried out."""

    move: Move
    after_s: float


@dataclass
class Injected:
    """What becomes of a batch."""

    plain: list[Move] = field(default_factory=list)
    """To carry out."""
    slots: list[int] = field(default_factory=list)
    """Place of each of those in the batch."""
    fixed: dict[int, Status] = field(default_factory=dict)
    """Answers that are given whatever happens."""
    late: list[Late] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Slots that are never carried out nor answered before the deadline or the fence."""
    flips: list[tuple[Move, BitFlip]] = field(default_factory=list)
    """To be spoilt once they have arrived."""


def inject(moves: Sequence[Move], faults: Mapping[int, Action], cut: Callable[[], None]) -> Injected:
    """Sort ``moves`` by what strikes them.

    Args:
        moves: the batch.
        faults: by slot.
        cut: ends the session, where it is to die here.
    """
    result = Injected()
    for slot, move in enumerate(moves):
        action = faults.get(slot)
        if isinstance(action, Fail):
            result.fixed[slot] = action.status
        elif isinstance(action, LateWrite):
            result.fixed[slot] = action.answer
            result.late.append(Late(move, action.after_s))
        elif isinstance(action, Die | Drop):
            result.dropped.append(slot)
            if isinstance(action, Die):
                die(action, cut)
        elif isinstance(action, Short):
            region, offset, length = move.remote
            result.slots.append(slot)
            result.plain.append(Move(Extent(region, offset, min(action.length, length)), move.local_offset))
        else:
            result.slots.append(slot)
            result.plain.append(move)
            if isinstance(action, BitFlip):
                result.flips.append((move, action))
    return result
