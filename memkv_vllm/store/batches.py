"""What a PUT or a GET does with the table, a whole request at a time. Pure: time is an argument.

A request's values are columns: sequences of equal length, an item for each value. What it holds in the table is an
:class:`~memkv_vllm.store.entries.Entry` per value: from :meth:`Batches.reserve` to ``commit`` or ``abort``, from
:meth:`Batches.pin` to ``unpin``. An entry in another state than these leave it in is a bug of the caller, and raises.

It goes as if the values had come one by one, in their order, but for this: all are looked up before room is made for
the first, so that a batch does not evict what it is about to find there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

from memkv_vllm.store.content import Content
from memkv_vllm.store.entries import RESIDENT, VISIBLE, Entry, EntryEvent, EntryState, move_all
from memkv_vllm.store.room import Room
from memkv_vllm.store.spaces import NAMESPACE
from memkv_vllm.types import Status

__all__ = ["Batches", "NewValues", "pick"]

T = TypeVar("T")

_RESERVED = EntryState.RESERVED


class NewValues(NamedTuple):
    """Values that somebody is about to write."""

    keys: Sequence[bytes]
    """Store keys; bytes 1 to 33 are the namespace digest."""
    lengths: Sequence[int]
    """Bytes of each value, positive."""
    checksums: Sequence[int]
    layouts: Sequence[int]
    """Stored with the values, for their readers."""
    algorithm: int
    """Of the checksums."""
    owner: object
    """Names the session that writes them."""


class Batches:
    """Part of one table.

    Args:
        content: what the table holds.
        room: allocates in its arena.
    """

    def __init__(self, content: Content, room: Room) -> None:
        self._content = content
        self._room = room
        self._counters = content.counters
        self._namespaces = content.namespaces

    def __repr__(self) -> str:
        return f"<Batches of {self._content!r}>"

    # Writers

    def reserve(self, values: NewValues, now: float) -> tuple[bytearray, dict[int, Entry]]:
        """Takes extents for values that are about to be written; none of their keys exists until :meth:`commit`.

        Args:
            values: what is to be written.
            now: seconds.

        Returns:
            a status per value, and what was reserved, by its place in the batch. ``OK``: reserved; ``EXISTS``,
            ``PENDING``, ``TOO_LARGE`` or ``NO_SPACE`` as :meth:`Table.reserve` says.
        """
        statuses, reserved = bytearray(len(values.keys)), dict[int, Entry]()
        for part in _parts(values.keys):
            wanted = self._not_refused(values, part, now, statuses)
            if not wanted:
                continue
            keys, lengths = pick(wanted, values.keys), pick(wanted, values.lengths)
            self._reclaim_older(keys)
            offsets: list[int] = []
            if len(wanted) > 1 and lengths.count(lengths[0]) == len(wanted):
                offsets = self._room.allocate_many(lengths[0], keys[0][NAMESPACE], len(wanted))
                reserved.update(zip(wanted, self._insert(values, wanted, offsets, now), strict=False))
            for index in wanted[len(offsets) :]:
                offset = self._room.allocate(values.lengths[index], keys[0][NAMESPACE], 1, owe=len(statuses) > 1)
                if offset is None:
                    statuses[index] = Status.NO_SPACE
                    self._counters.refused_no_space += 1
                else:
                    (reserved[index],) = self._insert(values, [index], [offset], now)
        return statuses, reserved

    @property
    def owes(self) -> bool:
        """Whether there is something for :meth:`drain` to do."""
        return self._room.owes

    def drain(self) -> bool:
        """Frees a step of what :meth:`reserve` left to be freed above the high watermark; whether there is more of it.

        Best while the bytes of a batch are on their way. A step takes some 0.25 ms.
        """
        return self._room.drain()

    def commit(self, entries: Sequence[Entry]) -> list[bool]:
        """Makes reserved values visible; all their bytes must be in place and checked.

        Returns:
            for each whether it is visible; False where the namespace was reset since: the value was freed instead.
        """
        content = self._content
        move_all(entries, EntryEvent.COMMIT)
        content.unhold(entries)
        visible = [entry.space.current for entry in entries]
        if all(visible):
            content.publish_all(entries)
        else:
            content.publish_all([entry for entry in entries if entry.space.current])
            for entry in entries:
                if not entry.space.current:
                    entry.move(EntryEvent.REMOVE)
                    self._namespaces.detach(entry)
                    content.release(entry)
        self._counters.commits += sum(visible)
        self._counters.commits_hidden += len(visible) - sum(visible)
        return visible

    def abort(self, entries: Sequence[Entry]) -> None:
        """Undoes reservations and frees their bytes: only after their pulls have ended or were fenced."""
        content = self._content
        for entry in entries:
            entry.move(EntryEvent.ABORT)
            content.unhold([entry])
            self._namespaces.detach(entry)
            content.release(entry)
        self._counters.aborts += len(entries)

    # Readers

    def pin(
        self, keys: Sequence[bytes], lengths: Sequence[int], layouts: Sequence[int], now: float
    ) -> tuple[bytearray, list[Entry | None]]:
        """Holds complete values in place until :meth:`unpin`, and counts as a use of each.

        Args:
            keys: store keys.
            lengths: bytes of each value, as its reader knows it.
            layouts: likewise.
            now: seconds.

        Returns:
            a status per value, and what was found under each key, pinned where the status is ``OK``. ``ABSENT``,
            ``BAD_LENGTH``, ``BAD_LAYOUT`` or ``PENDING`` as :meth:`Table.pin` says.
        """
        statuses, found = bytearray(len(keys)), self._namespaces.entries(keys, now)
        pinned: list[Entry] = []
        for index, (entry, length, layout) in enumerate(zip(found, lengths, layouts, strict=True)):
            if entry is None or entry.state not in VISIBLE:
                statuses[index], found[index] = Status.ABSENT, None
            elif entry.length != length:
                statuses[index] = Status.BAD_LENGTH
            elif entry.layout != layout:
                statuses[index] = Status.BAD_LAYOUT
            elif entry.state not in RESIDENT:
                statuses[index] = Status.PENDING
            else:
                pinned.append(entry)
        self._content.pin(pinned)
        self._content.policy.touched_many([entry.key for entry in pinned])
        if len(pinned) < len(keys):
            self._counters.misses += statuses.count(Status.ABSENT)
            self._counters.mismatches += statuses.count(Status.BAD_LENGTH) + statuses.count(Status.BAD_LAYOUT)
        self._counters.hits += len(pinned)
        return statuses, found

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Gives pins back: only after their pushes have ended. The last one frees a hidden value."""
        self._content.unpin(entries)

    def held(self, key: bytes, generation: int) -> Entry:
        """What the table holds for the caller under this key and generation.

        Raises:
            LocalProtocolError: nothing.
        """
        return self._content.held(key, generation)

    # Inside

    def _not_refused(self, values: NewValues, part: Sequence[int], now: float, statuses: bytearray) -> list[int]:
        """Places of the values that an extent is wanted for; notes in ``statuses`` why it is not for the others."""
        keys, lengths, largest = values.keys, values.lengths, self._room.largest
        found = self._namespaces.entries(pick(part, keys), now)
        if not any(found) and max(lengths) <= largest:
            return list(part)
        wanted = []
        for index, entry in zip(part, found, strict=True):
            if entry is not None:
                statuses[index] = self._refuse(entry)
            elif lengths[index] > largest:
                statuses[index] = Status.TOO_LARGE
                self._counters.refused_too_large += 1
            else:
                wanted.append(index)
        return wanted

    def _refuse(self, entry: Entry) -> Status:
        if entry.state is _RESERVED:
            self._counters.refused_pending += 1
            return Status.PENDING
        if entry.state in RESIDENT:
            self._content.policy.touched(entry.key)
        self._counters.refused_exists += 1
        return Status.EXISTS

    def _reclaim_older(self, keys: Sequence[bytes]) -> None:
        """A policy holds a key once, so an older epoch's values must go before their keys are reserved again."""
        for entry in self._namespaces.stale_entries(keys):
            self._content.reclaim(entry)

    def _insert(self, values: NewValues, places: Sequence[int], offsets: Sequence[int], now: float) -> list[Entry]:
        """Makes entries of the first of ``places``, one for each of ``offsets``; all of one namespace and length."""
        if not offsets:
            return []
        content, places = self._content, places[: len(offsets)]
        keys, lengths = pick(places, values.keys), pick(places, values.lengths)
        # Only now: the space goes with its last entry, which may have been evicted for these.
        space = self._namespaces.open(keys[0], now)
        columns = (
            keys,
            lengths,
            pick(places, values.checksums),
            repeat(values.algorithm),
            pick(places, values.layouts),
            repeat(values.owner),
            repeat(now),
            offsets,
            content.next_generations(len(offsets)),
            repeat(space),
            repeat(content.allocator.rounded(lengths[0])),
        )
        entries = list(map(Entry, *columns))
        content.insert_reserved(space, entries)
        self._counters.reservations += len(entries)
        return entries


def pick(places: Sequence[int], column: Sequence[T]) -> Sequence[T]:
    """What stands at ``places``, which ascend: the whole column as a rule."""
    return column if len(places) == len(column) else [column[place] for place in places]


def _parts(keys: Sequence[bytes]) -> list[range]:
    """The places of a batch in parts that have one namespace and no key twice: one part as a rule, else one each."""
    if len(set(keys)) == len(keys) and len({key[NAMESPACE] for key in keys}) <= 1:
        return [range(len(keys))] if keys else []
    return [range(index, index + 1) for index in range(len(keys))]
