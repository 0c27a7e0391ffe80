"""What the drives say together: which records survive, in the order in which they were written. Pure.

A record is dead when a tombstone names it, when its namespace was reset after it was written, when its drive failed
after it was written, or when there is a newer record of its key. Works on columns, since a store has millions of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memkv_vllm.keys import namespace_of
from memkv_vllm.store.log.api import Location, Record, RecoveredValue
from memkv_vllm.store.log.format import BLOCK_BYTES, INDEX_DTYPE
from memkv_vllm.store.log.scanning import DriveContent, JournalContent, SegmentContent
from memkv_vllm.store.log.segments import Segment, SegmentMap

__all__ = ["Memory", "Survivors", "load_segments", "merge", "merge_journals", "values"]


@dataclass
class Memory:
    """What all journals together remember beside dead records."""

    resets: dict[bytes, int] = field(default_factory=dict)
    """Namespace -> sequence number below which its records are dead."""
    manifests: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    drives_out: dict[bytes, int] = field(default_factory=dict)

    def newest(self) -> int:
        """Highest sequence number that is mentioned."""
        return max([*self.resets.values(), *self.drives_out.values()], default=0)


def merge_journals(journals: Iterable[JournalContent]) -> Memory:
    """One drive's journal may lack what could not be written there: all of them count together."""
    memory = Memory()
    for journal in journals:
        memory.manifests.update(journal.manifests)
        for into, of in ((memory.resets, journal.resets), (memory.drives_out, journal.drives_out)):
            for name, sequence in of.items():
                into[name] = max(sequence, into.get(name, 0))
    return memory


class _Place(NamedTuple):
    """Which rows of the columns are of one segment."""

    drive: int
    segment: SegmentContent
    first: int


@dataclass
class Survivors:
    """All records of all drives as columns, and which of them live."""

    rows: npt.NDArray[np.void]
    keys: list[bytes]
    places: list[_Place]
    alive: npt.NDArray[np.bool_]
    order: list[int]
    """Rows that are alive, by sequence."""
    superseded: list[Location]
    """Whole records that are dead only because of a newer one: they need a tombstone, or they would come back once
    that is forgotten."""
    newest: int
    """Highest sequence number of any record."""

    def dead_of(self, place: _Place) -> npt.NDArray[np.bool_]:
        """Which records of a segment are dead."""
        return ~self.alive[place.first : place.first + len(place.segment.index.keys)]


def merge(contents: Sequence[DriveContent], drive_ids: Sequence[bytes], memory: Memory) -> Survivors:
    """Decides for every record whether it survives."""
    places, keys, tables, first = [], list[bytes](), [], 0
    for drive, content in enumerate(contents):
        for segment in content.segments:
            places.append(_Place(drive, segment, first))
            keys += segment.index.keys
            tables.append(segment.index.rows)
            first += len(segment.index.keys)
    rows = np.concatenate(tables) if tables else np.zeros(0, INDEX_DTYPE)
    alive = np.ones(len(rows), np.bool_)
    for place in places:
        end = place.first + len(place.segment.index.keys)
        _bury(place, rows[place.first : end], keys, alive[place.first : end], contents, drive_ids, memory)
    survivors = Survivors(rows, keys, places, alive, [], [], int(rows["sequence"].max()) if len(rows) else 0)
    _keep_newest(survivors)
    return survivors


def _bury(
    place: _Place,
    rows: npt.NDArray[np.void],
    keys: list[bytes],
    alive: npt.NDArray[np.bool_],
    contents: Sequence[DriveContent],
    drive_ids: Sequence[bytes],
    memory: Memory,
) -> None:
    """Clears ``alive`` (a view) for one segment's records that tombstones, resets or a drive's failure cover."""
    segment = place.segment
    dead = contents[place.drive].journal.dead.get((segment.number, segment.incarnation))
    if dead:
        alive &= ~np.isin(rows["start"], np.fromiter(dead, np.uint32, len(dead)))
    out = memory.drives_out.get(drive_ids[place.drive], 0)
    if out:
        alive &= rows["sequence"] >= out
    if not memory.resets or int(rows["sequence"].min()) >= max(memory.resets.values()):
        return
    sequences = rows["sequence"].tolist()
    for at, sequence in enumerate(sequences):
        if sequence < memory.resets.get(namespace_of(keys[place.first + at]), 0):
            alive[at] = False


def _keep_newest(survivors: Survivors) -> None:
    """Orders what is alive, and lets of each key the newest live."""
    alive = np.flatnonzero(survivors.alive)
    order = alive[np.argsort(survivors.rows["sequence"][alive], kind="stable")].tolist()
    keys = survivors.keys
    # A dict built of pairs keeps the last of equal keys: here the newest.
    winner = dict(zip([keys[row] for row in order], order, strict=True))
    if len(winner) < len(order):
        kept = set(winner.values())
        losers = [row for row in order if row not in kept]
        survivors.alive[losers] = False
        firsts = [place.first for place in survivors.places]
        survivors.superseded = [_location(survivors, firsts, row) for row in losers]
        order = [row for row in order if row in kept]
    survivors.order = order


def _location(survivors: Survivors, firsts: list[int], row: int) -> Location:
    place = survivors.places[bisect_right(firsts, row) - 1]
    segment = place.segment
    return Location(place.drive, segment.number, segment.incarnation, int(survivors.rows["start"][row]) * BLOCK_BYTES)


def load_segments(survivors: Survivors, contents: Sequence[DriveContent], maps: Sequence[SegmentMap]) -> None:
    """Fills the drives' segment maps."""
    for content, segments in zip(contents, maps, strict=True):
        for number, incarnation in enumerate(content.incarnations[: len(segments.segments)]):
            segments.segments[number].incarnation = incarnation
    for place in survivors.places:
        if place.segment.number >= len(maps[place.drive].segments):
            continue
        rows = place.segment.index.rows
        blocks = 1 + (rows["length"] + BLOCK_BYTES - 1) // BLOCK_BYTES
        sequences = rows["sequence"]
        segment: Segment = maps[place.drive].segments[place.segment.number]
        segment.load(
            rows["start"].astype(np.uint32).tobytes(),
            blocks.astype(np.uint32).tobytes(),
            survivors.dead_of(place).astype(np.uint8).tobytes(),
            int(sequences.min()),
            int(sequences.max()),
        )
    for segments in maps:
        segments.recovered()


def values(survivors: Survivors) -> Iterator[RecoveredValue]:
    """The values that survived, oldest first. Made at C speed, one at a time: a million take under a second."""
    order = np.array(survivors.order, np.int64)
    rows = survivors.rows[order]
    drives, numbers, incarnations = (np.zeros(len(survivors.rows), np.uint32) for _ in range(3))
    for place in survivors.places:
        span = slice(place.first, place.first + len(place.segment.index.keys))
        drives[span], numbers[span] = place.drive, place.segment.number
        incarnations[span] = place.segment.incarnation
    keys = survivors.keys
    records = _tuples(
        Record,
        [keys[row] for row in survivors.order],
        *(rows[name].tolist() for name in ("length", "checksum", "algorithm", "layout")),
    )
    offsets = rows["start"].astype(np.int64) * BLOCK_BYTES
    locations = _tuples(
        Location, *(column[order].tolist() for column in (drives, numbers, incarnations)), offsets.tolist()
    )
    return _tuples(RecoveredValue, records, locations)


def _tuples(kind: Any, *columns: Iterable[Any]) -> Iterator[Any]:
    """Named tuples of columns, without a line of Python each."""
    return map(partial(tuple.__new__, kind), zip(*columns, strict=True))


def manifests(memory: Mapping[tuple[bytes, bytes], bytes]) -> list[tuple[bytes, bytes, bytes]]:
    """``(family, digest, manifest)`` of each."""
    return [(family, digest, manifest) for (family, digest), manifest in memory.items()]
