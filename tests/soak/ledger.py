"""What one client knows about the values that only it stores on one server: which may be visible, and which must not.

A key is *stored* once a put of it was confirmed, and *dead* once a delete, a report as bad or a reset of its namespace
was confirmed. A dead key must never be found again, whatever happens to the server, unless this client stores it anew.
Of a request without an answer nobody knows what it did: its keys are forgotten, and no claim is made about them.

A key that takes part in a request is *busy*: it is never picked for a second one, so no two requests of this client
about one key overlap and every claim above has a clear before and after. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memkv_vllm.keys import block_prefix, namespace_of, store_key

__all__ = ["Ledger", "Snapshot"]

MAX_STORED, MAX_DEAD = 600, 20_000


class Snapshot(NamedTuple):
    """Numbers of keys."""

    stored: int
    dead: int
    busy: int
    forgotten: int


class _Picks:
    """A set from which a random element is taken in O(1), and of bounded size: the oldest give way."""

    def __init__(self, bound: int) -> None:
        self._keys: list[bytes] = []
        self._at: dict[bytes, int] = {}
        self._bound = bound

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._at

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def add(self, key: bytes, dice: random.Random) -> None:
        if key in self._at:
            return
        if len(self._keys) >= self._bound:
            self.discard(self._keys[dice.randrange(len(self._keys))])
        self._at[key] = len(self._keys)
        self._keys.append(key)

    def discard(self, key: bytes) -> None:
        at = self._at.pop(key, None)
        if at is None:
            return
        last = self._keys.pop()
        if at < len(self._keys):
            self._keys[at] = last
            self._at[last] = at

    def sample(self, dice: random.Random, most: int) -> list[bytes]:
        return dice.sample(self._keys, min(most, len(self._keys)))


class Ledger:
    """See the module's text.

    Args:
        dice: picks keys and makes new ones.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._stored = _Picks(MAX_STORED)
        self._dead = _Picks(MAX_DEAD)
        self._busy: set[bytes] = set()
        self._forgotten = 0
        self._closing: bytes | None = None
        self.namespace = dice.randbytes(32)
        """Where new keys go."""

    def snapshot(self) -> Snapshot:
        """How many keys are in which state."""
        return Snapshot(len(self._stored), len(self._dead), len(self._busy), self._forgotten)

    # -- picking: every key that is handed out is busy until `release`; none is of the namespace that is to be reset,
    # for a put of it would cross the reset, and nobody knew which was first

    def new(self, count: int) -> list[bytes]:
        """Keys that were never used."""
        return self._take(store_key(block_prefix(self.namespace, self._dice.randbytes(32), 0), 0) for _ in range(count))

    def stored(self, most: int) -> list[bytes]:
        """Some that were stored and not removed: each is there, or was evicted."""
        return self._take(self._stored.sample(self._dice, most))

    def dead(self, most: int) -> list[bytes]:
        """Some that must not be found."""
        return self._take(self._dead.sample(self._dice, most))

    def _take(self, keys: Iterable[bytes]) -> list[bytes]:
        taken = [key for key in keys if key not in self._busy and namespace_of(key) != self._closing]
        self._busy.update(taken)
        return taken

    def release(self, keys: Iterable[bytes]) -> None:
        """The request about these keys is over."""
        self._busy.difference_update(keys)

    # -- what became of them

    def is_dead(self, key: bytes) -> bool:
        """Whether it must not be found."""
        return key in self._dead

    def was_stored(self, key: bytes) -> None:
        """A put was confirmed."""
        self._dead.discard(key)
        self._stored.add(key, self._dice)

    def is_gone(self, key: bytes) -> None:
        """It was not found, or not stored: no claim is made, but it is of no use for reading either."""
        self._stored.discard(key)

    def was_removed(self, key: bytes) -> None:
        """A delete or a report was confirmed."""
        self._stored.discard(key)
        self._dead.add(key, self._dice)

    def forget(self, key: bytes) -> None:
        """A request that changes it had no answer: nothing can be said about it any more."""
        self._stored.discard(key)
        self._dead.discard(key)
        self._forgotten += 1

    # -- namespaces

    def closing(self) -> bytes:
        """The namespace that is to be reset next; its keys are not picked any more, and new ones go elsewhere."""
        if self._closing is None:
            self._closing, self.namespace = self.namespace, self._dice.randbytes(32)
        return self._closing

    def is_quiet(self, namespace: bytes) -> bool:
        """Whether no key of the namespace is busy."""
        return not any(namespace_of(key) == namespace for key in self._busy)

    def was_reset(self, namespace: bytes) -> list[bytes]:
        """The reset of a quiet namespace was confirmed: all of its keys are dead; returns those that were stored."""
        self._closing = None
        keys = [key for key in list(self._stored) if namespace_of(key) == namespace]
        for key in keys:
            self.was_removed(key)
        return keys
