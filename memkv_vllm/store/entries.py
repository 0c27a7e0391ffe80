"""What a table is made of: the states of an entry, entries and spaces, results, limits and statistics. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.log.api import Location
from memkv_vllm.types import Status

__all__ = [
    "NO_OFFSET",
    "RESIDENT",
    "TRANSITIONS",
    "VISIBLE",
    "Entry",
    "EntryEvent",
    "EntryState",
    "PinResult",
    "ReserveResult",
    "Space",
    "TableCounters",
    "TableLimits",
    "TableStatistics",
    "move_all",
]


class EntryState(Enum):
    """State of one entry; ``ABSENT`` is also that of a key that was never seen."""

    # By identity, as their equality is: an Enum's own hash is a Python function, called twice per transition.
    __hash__ = object.__hash__

    ABSENT = auto()
    RESERVED = auto()
    """Its extent is the target of a pull."""
    COMPLETE = auto()
    """Its bytes are in the arena; a record on disk may hold them too."""
    PINNED = auto()
    """The same, and its extent is the source of pushes or of the write to disk."""
    EVICTING = auto()
    """Hidden, but its extent is still in use."""
    ON_DISK = auto()
    """Its bytes are on disk alone."""
    FETCHING = auto()
    """The same, and they are on their way into an extent."""


class EntryEvent(Enum):
    """What can happen to an entry."""

    __hash__ = object.__hash__

    RESERVE = auto()
    COMMIT = auto()
    ABORT = auto()
    PIN = auto()
    UNPIN = auto()
    LAST_UNPIN = auto()
    """The last use of the extent has ended."""
    REMOVE = auto()
    DEMOTE = auto()
    """Its copy in the arena goes, the record stays."""
    RECOVER = auto()
    """A start found its record."""
    FETCH = auto()
    FETCHED = auto()
    UNFETCH = auto()
    """The fetch was given up; the record is still good."""


_S, _E = EntryState, EntryEvent
TRANSITIONS: dict[tuple[EntryState, EntryEvent], EntryState] = {
    (_S.ABSENT, _E.RESERVE): _S.RESERVED,
    (_S.RESERVED, _E.COMMIT): _S.COMPLETE,
    (_S.RESERVED, _E.ABORT): _S.ABSENT,
    (_S.COMPLETE, _E.PIN): _S.PINNED,
    (_S.COMPLETE, _E.REMOVE): _S.ABSENT,
    (_S.PINNED, _E.PIN): _S.PINNED,
    (_S.PINNED, _E.UNPIN): _S.PINNED,
    (_S.PINNED, _E.LAST_UNPIN): _S.COMPLETE,
    (_S.PINNED, _E.REMOVE): _S.EVICTING,
    (_S.EVICTING, _E.UNPIN): _S.EVICTING,
    (_S.EVICTING, _E.LAST_UNPIN): _S.ABSENT,
    (_S.ABSENT, _E.RECOVER): _S.ON_DISK,
    (_S.COMPLETE, _E.DEMOTE): _S.ON_DISK,
    (_S.ON_DISK, _E.REMOVE): _S.ABSENT,
    (_S.ON_DISK, _E.FETCH): _S.FETCHING,
    (_S.FETCHING, _E.FETCHED): _S.COMPLETE,
    (_S.FETCHING, _E.UNFETCH): _S.ON_DISK,
    (_S.FETCHING, _E.REMOVE): _S.EVICTING,
}
"""Every pair that may happen; any other is a bug of the driver (:class:`LocalProtocolError`)."""

_AFTER: dict[EntryEvent, dict[EntryState, EntryState]] = {
    event: {before: after for (before, what), after in TRANSITIONS.items() if what is event} for event in EntryEvent
}
"""The same, by event: what a batch goes through has one event and one state as a rule."""

RESIDENT = (_S.COMPLETE, _S.PINNED)
"""States in which the value can be read from the arena; the eviction policy holds exactly these."""

VISIBLE = (*RESIDENT, _S.ON_DISK, _S.FETCHING)
"""States in which a lookup finds the entry."""

NO_OFFSET = -1
"""``offset`` of an entry without an extent."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Bounds of a table."""

    max_entries: int = 1 << 20
    """Most entries, wherever their bytes are; the next reservation evicts, as it does when bytes are short."""
    max_value_bytes: int = 1 << 30
    """Most bytes of one value."""
    high_watermark: float = 1.0
    """An allocation that takes the arena above this part begins to free more than it needs..."""
    low_watermark: float = 1.0
    """...and those that follow go on until this part is in use."""
    namespace_quota: float = 1.0
    """Part of the arena that one namespace may take. Below 1 the table's policy must keep an order per namespace."""


class ReserveResult(NamedTuple):
    """``offset`` (bytes, in the arena) and ``generation`` mean something only with ``Status.OK``."""

    status: Status
    offset: int = 0
    generation: int = 0
    evicted: int = 0
    """Values that had to go for it."""


class PinResult(NamedTuple):
    """All but ``status`` mean something only with ``Status.OK``, and ``generation`` with a mismatch too.

    ``Status.PENDING``: the value is on disk alone. Fetch it, then pin again.
    """

    status: Status
    offset: int = 0
    checksum: int = 0
    algorithm: int = 0
    generation: int = 0


@dataclass(slots=True)
class TableCounters:
    """Counters of a table since it was made; none ever decreases."""

    reservations: int = 0
    commits: int = 0
    commits_hidden: int = 0
    """Commits whose namespace was reset meanwhile; the value was freed."""
    aborts: int = 0
    evictions: int = 0
    """Values that left the store to make room."""
    evicted_bytes: int = 0
    window_evictions: int = 0
    """Values out of their order that went, or lost their copy in the arena, to make one hole of several."""
    demotions: int = 0
    """Values whose copy in the arena went to make room; they stay on disk."""
    demoted_bytes: int = 0
    reclaimed: int = 0
    """Values of an older epoch that were freed."""
    deletes: int = 0
    bad_reports: int = 0
    resets: int = 0
    refused_exists: int = 0
    refused_pending: int = 0
    refused_too_large: int = 0
    refused_no_space: int = 0
    refused_quota: int = 0
    """Those of them whose namespace is at its quota with values that are all in use."""
    hits: int = 0
    misses: int = 0
    mismatches: int = 0
    """Pins refused for a length or layout that differs."""
    recovered: int = 0
    """Values that a start found on disk."""
    recovered_too_large: int = 0
    """Those left on disk unseen, since this arena cannot hold them."""
    fetches: int = 0
    """Values that came back from disk into the arena."""
    fetches_undone: int = 0
    """Fetches that ended without a result; the value stays on disk."""
    disk_lost: int = 0
    """Values whose record could not be read; they are gone."""
    disk_writes: int = 0
    """Values that were written to disk."""
    disk_writes_failed: int = 0
    disk_reclaimed: int = 0
    """Values that left the store because the space of their record was needed."""


class TableStatistics(NamedTuple):
    """State of a table."""

    entries: int
    """All entries, in whatever state."""
    complete: int
    """Values that a lookup finds now, wherever their bytes are."""
    reserved: int
    pinned: int
    """Entries that are the source of at least one push, hidden ones too."""
    stale: int
    """Entries of spaces that were reset, not reclaimed yet and not in use."""
    bytes_used: int
    """Bytes of all values in the arena, without rounding to granules."""
    oldest_reservation: float | None
    """``now`` of the oldest reservation that is open."""
    on_disk: int
    """Values whose bytes are on disk alone, those that are being fetched included."""
    records: int
    """Values with a record on disk, in the arena too or not."""
    disk_bytes: int
    """Bytes of all values on disk."""
    fetching: int
    writing: int
    """Values that wait for their write to disk or are being written; their extents cannot be evicted."""
    counters: TableCounters
    """A copy."""


@dataclass(slots=True, eq=False)
class Space:
    """One epoch of a namespace: its entries by key, without those that are hidden."""

    namespace: bytes
    entries: dict[bytes, Entry] = field(default_factory=dict)
    current: bool = True
    complete: int = 0
    """Number of entries in a visible state."""
    arena_bytes: int = 0
    """Bytes of the arena that its entries take, hidden ones too, in whole granules."""
    disk_bytes: int = 0
    """Bytes of its values that are on disk."""
    last_used: float = 0.0
    """Seconds on the clock of whoever calls the table."""


@dataclass(slots=True, eq=False)
class Entry:
    """One value: its extent in the arena, its record on disk, or both."""

    key: bytes
    length: int
    checksum: int
    algorithm: int
    layout: int
    owner: object
    since: float
    offset: int
    """Bytes; ``NO_OFFSET`` without an extent."""
    generation: int
    space: Space
    extent_bytes: int
    """What its extent takes, in whole granules."""
    state: EntryState = EntryState.ABSENT
    pins: int = 0
    """Uses of the extent: pushes, and the write to disk."""
    location: Location | None = None
    """Where its record is."""
    writing: bool = False
    """One of the pins is that of the write to disk."""

    def move(self, event: EntryEvent) -> None:
        """Takes the transition of ``event``.

        Raises:
            LocalProtocolError: it is not allowed in this state.
        """
        after = _AFTER[event].get(self.state)
        if after is None:
            raise LocalProtocolError(f"key {self.key.hex()} is {self.state.name}: {event.name} is not allowed")
        self.state = after


def move_all(entries: Iterable[Entry], event: EntryEvent) -> None:
    """:meth:`Entry.move` for each of ``entries``."""
    after = _AFTER[event].get
    for entry in entries:
        state = after(entry.state)
        if state is None:
            entry.move(event)  # raises, saying why
        else:
            entry.state = state
