"""From moves to columns of work requests: checked, split, shared out among queue pairs. In bulk, and pure.

A batch is planned as a whole, in numpy columns with one row per **piece**: a value, or a part of one that is longer
than one message may be. No object is made per work request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.transports.base import Move, Moves
from memkv_vllm.transports.verbs.provider import Opcode

__all__ = [
    "FLUSH_BYTES",
    "NO_SLOT",
    "Arena",
    "Columns",
    "Pieces",
    "Plan",
    "RemoteRegion",
    "Slots",
    "columns_of",
    "share",
    "split",
]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.intp]

FLUSH_BYTES = 8
"""Most that the RDMA READ behind a batch of WRITEs asks for."""

_FLUSH_BYTES = np.uint32(FLUSH_BYTES)

NO_SLOT = -1
"""Stands in place of a slot where a work request belongs to no value."""


class RemoteRegion(NamedTuple):
    """Memory of the peer that work requests may name."""

    address: int
    length: int
    rkey: int


class Arena(NamedTuple):
    """Our own memory."""

    address: int
    length: int
    lkey: int


class Plan(NamedTuple):
    """What is to be moved of one batch."""

    pieces: Pieces
    bad: tuple[int, ...]
    """Slots whose extent is not inside a registered region: nothing of them is moved."""


@dataclass(slots=True)
class Pieces:
    """Rows of equal length: which value (its place in the batch), from where to where, how much."""

    slots: Slots
    local: U64
    remote: U64
    lengths: U64
    rkeys: U32

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return int(self.lengths.sum())

    def __getitem__(self, rows: slice) -> Pieces:
        return Pieces(self.slots[rows], self.local[rows], self.remote[rows], self.lengths[rows], self.rkeys[rows])

    @classmethod
    def plan(cls, moves: Moves, regions: Mapping[int, RemoteRegion], arena: Arena, slots: Slots | None = None) -> Plan:
        """The pieces of ``moves``, not split yet. Empty values need no piece.

        Args:
            moves: the batch.
            regions: of the peer, by id.
            arena: our memory, in which local offsets are.
            slots: place of each move in its batch, where these are not all of it.

        Raises:
            LocalProtocolError: a move names memory outside of the arena.
        """
        if slots is None:
            slots = _places(len(moves))
        plain = cls._plain(moves, regions, arena, slots)
        if plain is not None:
            return Plan(plain, ())
        offsets, lengths = np.array(moves.offsets, np.uint64), np.array(moves.lengths, np.uint64)
        local = np.array(moves.local_offsets, np.uint64)
        of_each = _regions_of(moves.regions, regions)
        bad = ~(of_each.known & _inside(offsets, lengths, of_each.lengths))
        if not bool((bad | _inside(local, lengths, np.uint64(arena.length))).all()):
            raise LocalProtocolError(f"a batch names memory outside of the arena of {arena.length} bytes")
        pieces = cls(slots, local + np.uint64(arena.address), offsets + of_each.addresses, lengths, of_each.rkeys)
        good = ~bad & (lengths > 0)
        return Plan(pieces._where(good), tuple(slots[bad].tolist()))

    @classmethod
    def _plain(cls, moves: Moves, regions: Mapping[int, RemoteRegion], arena: Arena, slots: Slots) -> Pieces | None:
        """The pieces of a batch of one region of which all is in place by a glance; None: it takes a closer look.

        Batches are short lists of Python's numbers, whose sums cannot overflow: looking at them is cheaper than arrays.
        """
        count, lengths = len(moves), moves.lengths
        if not count or moves.regions.count(moves.regions[0]) != count or not min(lengths):
            return None
        region, longest = regions.get(moves.regions[0]), max(lengths)
        if region is None or max(moves.offsets) + longest > region.length:
            return None
        if max(moves.local_offsets) + longest > arena.length:
            return None
        return cls(
            slots,
            np.array(moves.local_offsets, np.uint64) + np.uint64(arena.address),
            np.array(moves.offsets, np.uint64) + np.uint64(region.address),
            np.array(lengths, np.uint64),
            _filled(count, int(region.rkey), np.uint32),
        )

    def _where(self, rows: npt.NDArray[np.bool_]) -> Pieces:
        return Pieces(self.slots[rows], self.local[rows], self.remote[rows], self.lengths[rows], self.rkeys[rows])


class _Regions(NamedTuple):
    """The region of each move."""

    known: npt.NDArray[np.bool_]
    addresses: U64
    lengths: U64
    rkeys: U32


def _regions_of(ids: Sequence[int], regions: Mapping[int, RemoteRegion]) -> _Regions:
    nowhere = RemoteRegion(0, 0, 0)
    found = [regions.get(id, nowhere) for id in ids]
    return _Regions(
        np.array([id in regions for id in ids], np.bool_),
        np.array([region.address for region in found], np.uint64),
        np.array([region.length for region in found], np.uint64),
        np.array([region.rkey for region in found], np.uint32),
    )


@lru_cache(maxsize=512)
def _filled(count: int, value: int, kind: type[Any], tail_count: int = 0, tail_value: int = 0) -> npt.NDArray[Any]:
    """``count`` times ``value``, then the tail; not to be written to: batches need the same ones over and over."""
    filled = np.full(count + tail_count, value, kind)
    filled[count:] = tail_value
    filled.setflags(write=False)
    return filled


@lru_cache(maxsize=128)
def _places(count: int) -> Slots:
    """0 to ``count`` - 1; not to be written to."""
    places = np.arange(count)
    places.setflags(write=False)
    return places


def _inside(offsets: U64, lengths: U64, size: U64 | np.uint64) -> npt.NDArray[np.bool_]:
    """Whether each stretch lies in ``[0, size)``; sums are avoided, for they may pass 64 bits."""
    fits: npt.NDArray[np.bool_] = (lengths <= size) & (offsets <= size - lengths)
    return fits


def columns_of(moves: Sequence[Move]) -> Moves:
    """``moves`` in columns, as the store gives them."""
    if isinstance(moves, Moves):
        return moves
    regions, offsets, lengths = zip(*(move.remote for move in moves), strict=True) if moves else ((), (), ())
    return Moves(regions, offsets, lengths, [move.local_offset for move in moves])


def split(pieces: Pieces, most_bytes: int) -> Pieces:
    """``pieces`` with none longer than ``most_bytes``; those of one value stay in order."""
    if not len(pieces) or int(pieces.lengths.max()) <= most_bytes:
        return pieces
    step = np.uint64(most_bytes)
    counts = ((pieces.lengths + step - np.uint64(1)) // step).astype(np.intp)
    rows = np.repeat(np.arange(len(pieces)), counts)
    # How many pieces of the same value go before each.
    before = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = before.astype(np.uint64) * step
    return Pieces(
        pieces.slots[rows],
        pieces.local[rows] + offsets,
        pieces.remote[rows] + offsets,
        np.minimum(pieces.lengths[rows] - offsets, step),
        pieces.rkeys[rows],
    )


def share(pieces: Pieces, count: int, first: int) -> Iterator[tuple[int, Pieces]]:
    """Share ``pieces`` out among ``count`` queue pairs, about as many bytes to each.

    Args:
        pieces: one or more.
        count: queue pairs.
        first: which of them begins: a batch of one piece goes there whole.

    Yields:
        The index of a queue pair and the rows that are its own; only queue pairs that have some.
    """
    if count == 1 or len(pieces) == 1:
        yield first, pieces
        return
    ends = np.cumsum(pieces.lengths, dtype=np.float64)
    middles = ends - pieces.lengths / 2.0
    bounds = np.searchsorted(middles, np.arange(1, count) * (ends[-1] / count)).tolist()
    begin = 0
    for index, end in enumerate([*bounds, len(pieces)]):
        if end > begin:
            yield (first + index) % count, pieces[begin:end]
        begin = end


@dataclass(slots=True)
class Columns:
    """All that one queue pair does for a batch, one row per work request; see ``provider.WorkRequests``."""

    slots: Slots
    opcodes: U32
    local: U64
    lkeys: U32
    lengths: U32
    remote: U64
    rkeys: U32

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def of(cls, pieces: Pieces, opcode: Opcode, lkey: int) -> Columns:
        """Move ``pieces`` between the peer and our memory of ``lkey``."""
        count = len(pieces)
        return cls(
            pieces.slots,
            _filled(count, int(opcode), np.uint32),
            pieces.local,
            _filled(count, int(lkey), np.uint32),
            pieces.lengths.astype(np.uint32),
            pieces.remote,
            pieces.rkeys,
        )

    def part(self, begin: int, end: int) -> Columns:
        """Rows ``begin`` to ``end`` - 1."""
        rows = slice(begin, end)
        return Columns(
            self.slots[rows],
            self.opcodes[rows],
            self.local[rows],
            self.lkeys[rows],
            self.lengths[rows],
            self.remote[rows],
            self.rkeys[rows],
        )

    def flushed(self, scratch: int, lkey: int) -> Columns:
        """These, all of them WRITEs, then a small READ of each region that they go to, into the scratch memory.

        A READ is carried out behind the WRITEs before it, and its answer reaches us behind their bytes: its completion
        says that they are in place, which a WRITE's own does not.

        Args:
            scratch: its address.
            lkey: names it.
        """
        last = self._last_of_each_region()
        count, tail = len(self), len(last)
        return Columns(
            np.concatenate((self.slots, _filled(tail, int(NO_SLOT), np.intp))),
            _filled(count, int(Opcode.WRITE), np.uint32, tail, int(Opcode.READ)),
            np.concatenate((self.local, _filled(tail, int(scratch), np.uint64))),
            _filled(count, int(self.lkeys[0]), np.uint32, tail, int(lkey)),
            np.concatenate((self.lengths, np.minimum(self.lengths[last], _FLUSH_BYTES))),
            np.concatenate((self.remote, self.remote[last])),
            np.concatenate((self.rkeys, self.rkeys[last])),
        )

    def _last_of_each_region(self) -> npt.NDArray[np.intp]:
        rkeys = self.rkeys
        if bool((rkeys == rkeys[0]).all()):
            return _filled(1, len(self) - 1, np.intp)
        return np.array(list({int(rkey): row for row, rkey in enumerate(rkeys)}.values()), np.intp)
