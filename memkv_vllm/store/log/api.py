"""The seam between the store and its disk: values and protocols only, so that either side can be tested alone.

Who does what::

    table       which key has its bytes where: in the arena, on disk, or both; pure
    residency   drives both: offers committed values to the log, brings values back, follows reclaims
    value log   writes records behind the arena, reads them, reclaims segments, rebuilds the index at start

The one implementation is ``drivelog.DriveLog(config.storage, memory)``; ``run`` starts after ``start`` and before the
first ``append``, and ``aclose`` comes after ``run`` has ended.

Contract of :class:`ValueLog`, all on one event loop unless said otherwise:

1. ``start`` returns what survived: for each key the newest whole record that no tombstone and no reset covers.
   A torn tail, a record whose checksum fails, a record of an older use of its segment: absent, never an error.
2. ``append`` takes a value whose bytes lie in the arena, or refuses it (False: the bound of bytes that wait is
   reached, or it fits no segment). Until ``on_written`` was called for it, the bytes must stay as they are: the
   caller holds the extent. ``on_written(token, location)`` comes exactly once per accepted append; ``location`` is
   None when it could not be written.
3. ``read`` copies a record's payload into the arena and checks its header, key, length and checksum. False means:
   there is no such value (any more). A location that is being read is not overwritten meanwhile. ``read`` returns
   when no further byte can land in the arena, cancelled or not: ``deadline`` bounds the wait for a turn, while a read
   that the medium has begun is waited for.
4. Before a segment is used again, ``on_reclaimed(locations)`` tells which live records are lost with it; the
   callback returns after the caller has forgotten them. Reclaim prefers segments with few live bytes, and writes
   records that were read since they were written (second chance) again, within a bound. A location stays good for
   such a record: the log knows where it went. Locations of records that the caller has forgotten, or that a reset
   covers, may be among those of the callback.
5. ``forget`` makes a record dead for good: after it has returned and the journal was written, the value does not
   come back at the next start. ``reset`` does that for all of a namespace's records accepted until now, in O(1),
   and returns when that is on the medium. It is decided before its first wait: what is appended after the call, to
   the same namespace, lives, whether the reset has ended or was given up.
6. Errors of the medium never reach the caller of append, read or forget: they are counted, the drive is left out
   after too many, and ``health`` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from memkv_vllm.types import Deadline

__all__ = ["Location", "Record", "Recovered", "RecoveredValue", "ValueLog"]


class Location(NamedTuple):
    """Where a record lies: number of the drive, of the segment in it, its use count, and the offset in bytes."""

    drive: int
    segment: int
    incarnation: int
    """How often the segment was started: a location of an earlier use is dead."""
    offset: int


class Record(NamedTuple):
    """What is known of a value beside its bytes; stands in the record's header."""

    key: bytes
    length: int
    checksum: int
    algorithm: int
    layout: int


class RecoveredValue(NamedTuple):
    """A value that survived."""

    record: Record
    location: Location


class Recovered(NamedTuple):
    """What a start found."""

    values: Iterable[RecoveredValue]
    """Oldest first; consumed once."""
    manifests: Sequence[tuple[bytes, bytes, bytes]]
    """``(family, digest, manifest)``."""
    server_id: bytes
    """16 bytes: written when the first drive was formatted."""


class ValueLog(Protocol):
    """One store's disk; the module's docstring is the contract."""

    async def start(
        self,
        *,
        on_written: Callable[[int, Location | None], None],
        on_reclaimed: Callable[[Sequence[Location]], None],
    ) -> Recovered:
        """Opens, checks and scans the drives.

        Raises:
            EnvironmentFault: a medium cannot be used, holds something else, or belongs to another store. Nothing on
                it was changed.
        """
        ...

    async def run(self) -> None:
        """Writes what waits, until cancelled; what then still waits is reported as not written."""
        ...

    def append(self, record: Record, arena_offset: int, token: int) -> bool:
        """Queues a value for writing. False: refused, and counted with its reason."""
        ...

    async def read(self, record: Record, location: Location, arena_offset: int, deadline: Deadline) -> bool:
        """Copies the payload of ``record`` to the arena at ``arena_offset`` (a multiple of 4096)."""
        ...

    def used(self, location: Location) -> None:
        """The value was read or found: it earns a second chance when its segment is reclaimed."""
        ...

    def forget(self, locations: Sequence[Location]) -> None:
        """These records are dead. Queues a tombstone for each."""
        ...

    async def flush_forgotten(self) -> None:
        """Returns when the tombstones of all records forgotten until now are on their media.

        Raises:
            StoreError: one could not be written; it stays queued, and the message names the drive.
        """
        ...

    async def reset(self, namespace: bytes) -> None:
        """All records of the namespace (32 bytes) accepted until now are dead; returns when that is on the medium.

        Raises:
            StoreError: it could not be written.
        """
        ...

    async def add_manifest(self, family: bytes, digest: bytes, manifest: bytes) -> None:
        """Keeps a manifest of the directory. Raises ``StoreError`` when it could not be written."""
        ...

    async def flush(self) -> None:
        """Returns when everything accepted until now was written or refused."""
        ...

    def statistics(self) -> dict[str, Any]:
        """Plain values: capacity, used, live and waiting bytes, records, segments by state, counters by reason."""
        ...

    def health(self) -> list[str]:
        """What is wrong, one line each; empty when nothing is."""
        ...

    async def aclose(self) -> None:
        """Ends its threads and closes the media, once."""
        ...
