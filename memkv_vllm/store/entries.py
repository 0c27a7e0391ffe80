"""What a table is made of: the states of an entry, entries and spaces, results, limits and statistics. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.types import Status

__all__ = [
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
]


class EntryState(Enum):
    """State of one entry; ``ABSENT`` is also that of a key that was never seen."""

    ABSENT = auto()
    RESERVED = auto()
    COMPLETE = auto()
    PINNED = auto()
    EVICTING = auto()


class EntryEvent(Enum):
    """What can happen to an entry."""

    RESERVE = auto()
    COMMIT = auto()
    ABORT = auto()
    PIN = auto()
    UNPIN = auto()
    LAST_UNPIN = auto()
    REMOVE = auto()


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
}
"""Every pair that may happen; any other is a bug of the driver (:class:`LocalProtocolError`)."""

VISIBLE = (_S.COMPLETE, _S.PINNED)
"""States in which a lookup finds the entry."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Bounds of a table."""

    max_entries: int = 1 << 20
    """Most entries, complete or not; the next reservation evicts, as it does when bytes are short."""
    max_value_bytes: int = 1 << 30
    """Most bytes of one value."""


class ReserveResult(NamedTuple):
    """``offset`` (bytes, in the arena) and ``generation`` mean something only with ``Status.OK``."""

    status: Status
    offset: int = 0
    generation: int = 0
    evicted: int = 0
    """Values that had to go for it."""


class PinResult(NamedTuple):
    """All but ``status`` mean something only with ``Status.OK``, and ``generation`` with a mismatch too."""

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
    evicted_bytes: int = 0
    reclaimed: int = 0
    """Values of an older epoch that were freed."""
    deletes: int = 0
    bad_reports: int = 0
    resets: int = 0
    refused_exists: int = 0
    refused_pending: int = 0
    refused_too_large: int = 0
    refused_no_space: int = 0
    hits: int = 0
    misses: int = 0
    mismatches: int = 0
    """Pins refused for a length or layout that differs."""


class TableStatistics(NamedTuple):
    """State of a table."""

    entries: int
    """Entries that hold bytes of the arena, in whatever state."""
    complete: int
    """Values that a lookup finds now (pinned ones too)."""
    reserved: int
    pinned: int
    """Entries that are the source of at least one push, hidden ones too."""
    stale: int
    """Entries of spaces that were reset, not reclaimed yet and not in use."""
    bytes_used: int
    """Bytes of all values, without rounding to granules."""
    oldest_reservation: float | None
    """``now`` of the oldest reservation that is open."""
    counters: TableCounters
    """A copy."""


@dataclass(slots=True, eq=False)
class Space:
    """One epoch of a namespace: its entries by key, without those that are hidden."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    current: bool = True
    complete: int = 0
    """Number of entries in a visible state."""


@dataclass(slots=True, eq=False)
class Entry:
    """One value and its extent."""

    key: bytes
    length: int
    checksum: int
    algorithm: int
    layout: int
    owner: object
    since: float
    offset: int
    generation: int
    space: Space
    state: EntryState = EntryState.ABSENT
    pins: int = 0

    def move(self, event: EntryEvent) -> None:
        """Takes the transition of ``event``.

        Raises:
            LocalProtocolError: it is not allowed in this state.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise LocalProtocolError(f"key {self.key.hex()} is {self.state.name}: {event.name} is not allowed")
        self.state = after
