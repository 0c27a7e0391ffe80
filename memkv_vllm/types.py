"""Value types that several layers share. Pure: no I/O, no clock, no imports from above.

Words follow the glossary of the design: block, shard, value, extent, region, slot, peer, session.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple, NewType

SessionId = NewType("SessionId", bytes)
"""16 random bytes that a server gives a control session; names the session in FENCE."""

Deadline = NewType("Deadline", float)
"""A point on the monotonic clock in seconds (``time.monotonic``), never a length of time."""


class Extent(NamedTuple):
    """``length`` bytes at ``offset`` of the registered memory region ``region`` (a small integer id)."""

    region: int
    offset: int
    length: int


class Role(Enum):
    """Side of a control session."""

    CLIENT = "client"
    SERVER = "server"


class Direction(Enum):
    """vLLM's directions: a store leaves the GPU, a load comes back to it."""

    STORE = "store"
    LOAD = "load"


class MemoryKind(Enum):
    """Where a staging region lives."""

    HOST = "host"
    GPU = "gpu"


class VerifyMode(Enum):
    """How much of a loaded value is compared with its checksum (setting ``memkv_verify``)."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


class Status(IntEnum):
    """Result of one key of a batch, as it stands on the wire. A value, not an exception.

    ``OK`` is the only one after which a get's bytes may be used, or a put's value exists through this put.
    """

    OK = 0
    EXISTS = 1
    """Put: the key is already complete; nothing was moved. Counts as present."""
    PENDING = 2
    """Put: another writer holds the reservation; nothing was moved. Not stored by this sender."""
    ABSENT = 3
    """Get: no complete value under this key."""
    BAD_LENGTH = 4
    """The length asked for and the length stored differ."""
    BAD_LAYOUT = 5
    """The layout fingerprints differ."""
    BAD_CHECKSUM = 6
    """Put: the bytes that arrived do not match the checksum sent; nothing was committed."""
    TOO_LARGE = 7
    """Put: larger than the arena or the server's value limit."""
    NO_SPACE = 8
    """Put: nothing evictable at this moment (all pinned or reserved)."""
    DENIED = 9
    """The key id has no right for this operation on this key."""
    BAD_EXTENT = 10
    """The extent is not inside a region that this session registered, or has another length."""
    TIMEOUT = 11
    """The transfer did not end by its deadline; for a put nothing was committed."""
    FAILED = 12
    """The transfer ended with an error; for a put nothing was committed."""
    BUSY = 13
    """The server had no turn for it by the deadline: nothing was moved, and nothing will be."""


class LossReason(str, Enum):
    """Why a hit was lost or a store was not kept: one counter each (``memkv_lost_*``)."""

    ABSENT = "absent"
    EVICTED = "evicted"
    """Present at lookup, absent at load."""
    TIMEOUT = "timeout"
    CHECKSUM = "checksum"
    LAYOUT = "layout"
    BREAKER = "breaker"
    """Its server is down or its breaker open."""
    SHED = "shed"
    """A store dropped to stay inside a budget."""
    TOO_SHORT = "too_short"
    """The value's length or the number of bytes moved is not what was asked for."""
    FLUSHED = "flushed"
    """vLLM took the GPU blocks back (``wait``) before the transfer was done."""
    PENDING = "pending"
    """Another writer is storing the same key."""
    REFUSED = "refused"
    """The server has no room, the value is too large, or the right is missing."""
    FAILED = "failed"
    """Any other transfer error; the log line has the details."""
    ENGINE = "engine"
    """The engine's own loop ended."""


class MissReason(str, Enum):
    """Why a lookup answered miss."""

    ABSENT = "absent"
    """Not every rank's shard exists."""
    TIMEOUT = "timeout"
    BREAKER = "breaker"
    RETRIED = "retried"
    """The same request already tried to load this key once; a second try could loop for ever."""
