"""Which namespaces the store holds: their current space, the stale ones that resets left, and their last use. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from memkv_vllm.store.entries import VISIBLE, Entry, Space

__all__ = ["NAMESPACE", "NamespaceStatistics", "Spaces"]

NAMESPACE = slice(1, 33)
"""Where the namespace digest stands in a store key."""


class NamespaceStatistics(NamedTuple):
    """What one namespace holds."""

    namespace: bytes
    """32 bytes."""
    values: int
    """Values that a lookup finds."""
    arena_bytes: int
    """Bytes of the arena that its values take, those being written included, in whole granules."""
    disk_bytes: int
    """Bytes of its values that are on disk; a value may be in both."""
    last_used: float
    """When one of its values was last put, got or looked up: seconds on the caller's clock."""


class Spaces:
    """The current space of every namespace with entries, and the stale spaces that wait to be reclaimed."""

    def __init__(self) -> None:
        self.current: dict[bytes, Space] = {}
        """By namespace; a space without entries is not kept."""
        self._stale: deque[Space] = deque()

    def __repr__(self) -> str:
        return f"<Spaces {len(self.current)} namespaces, {len(self._stale)} stale>"

    def entry(self, key: bytes) -> Entry | None:
        """The entry of ``key`` in its namespace's current space, in whatever state."""
        space = self.current.get(key[NAMESPACE])
        return None if space is None else space.entries.get(key)

    def entries(self, keys: Sequence[bytes], now: float) -> list[Entry | None]:
        """The entry of each of ``keys``, in whatever state; notes that their namespaces were used ``now`` (seconds).

        The keys of a batch have one namespace as a rule. So all are looked up in that of the first, at C speed, and
        only what is not found there is asked for its namespace: a key of another one cannot be found there.
        """
        namespace = keys[0][NAMESPACE] if keys else b""
        space = self.current.get(namespace)
        found: list[Entry | None] = [None] * len(keys)
        if space is not None:
            space.last_used = now
            found = list(map(space.entries.get, keys))
            if all(found):
                return found
        for index, key in enumerate(keys):
            if found[index] is None and key[NAMESPACE] != namespace:
                other = self.current.get(key[NAMESPACE])
                if other is not None:
                    other.last_used = now
                    found[index] = other.entries.get(key)
        return found

    def find(self, key: bytes) -> Entry | None:
        """The same, if a lookup may find it."""
        entry = self.entry(key)
        return entry if entry is not None and entry.state in VISIBLE else None

    def open(self, key: bytes, now: float) -> Space:
        """The current space of the namespace of ``key``, made if there is none, used ``now`` (seconds)."""
        namespace = key[NAMESPACE]
        space = self.current.get(namespace)
        if space is None:
            space = self.current[namespace] = Space(namespace)
        space.last_used = now
        return space

    def detach(self, entry: Entry) -> None:
        """Takes an entry out of its space; an empty space goes."""
        space = entry.space
        if space.entries.get(entry.key) is entry:
            del space.entries[entry.key]
            self.drop_empty(space)

    def drop_empty(self, space: Space) -> None:
        """A current space whose last entry was taken out goes."""
        if not space.entries and space.current:
            del self.current[space.namespace]

    def retire(self, namespace: bytes) -> Space | None:
        """Makes the current space of a namespace stale and returns it; O(1). None: it holds nothing."""
        space = self.current.pop(namespace, None)
        if space is not None:
            space.current = False
            self._stale.append(space)
        return space

    def stale_entry(self) -> Entry | None:
        """Some entry of a stale space, to be reclaimed and thereby detached; None when there is none."""
        while self._stale:
            entries = self._stale[0].entries
            if entries:
                # From the end: a dictionary that is emptied from its start is searched over the gap every time.
                key, entry = entries.popitem()
                entries[key] = entry
                return entry
            self._stale.popleft()
        return None

    def stale_entries(self, keys: Sequence[bytes]) -> list[Entry]:
        """Entries of ``keys`` in stale spaces."""
        found = [entry for space in self._stale for entry in map(space.entries.get, keys)]
        return [entry for entry in found if entry is not None]

    def idle(self, idle_s: float, now: float) -> list[bytes]:
        """Namespaces that were not used for ``idle_s`` seconds."""
        return [namespace for namespace, space in self.current.items() if now - space.last_used >= idle_s]

    def num_stale(self) -> int:
        """Number of entries in stale spaces."""
        return sum(len(space.entries) for space in self._stale)

    def statistics(self) -> list[NamespaceStatistics]:
        """One for each namespace that holds something."""
        return [self.describe(space) for space in self.current.values()]

    @staticmethod
    def describe(space: Space) -> NamespaceStatistics:
        """What one space holds."""
        return NamespaceStatistics(
            space.namespace, space.complete, space.arena_bytes, space.disk_bytes, space.last_used
        )
