"""S3-FIFO: an order of eviction that a scan of keys used once does not disturb. Pure.

After Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues are all you need for cache eviction" (SOSP 2023). A new key
enters a small queue; if it was used there it moves on to the main queue, else it leaves early and a ghost queue
remembers it for a while: coming back then, it enters the main queue at once. The main queue gives a key that was used
another round for each use, up to three.

Two choices differ from the paper's text. The small queue is a part of the *keys*, not of the bytes: a policy orders
keys and knows no sizes, the values of one model have one size, and how many bytes go is the table's decision. And a
search for a victim gives at most ``MAX_ROUNDS`` keys another round before it takes the next one whatever its uses,
so that one eviction never walks over a main queue of a million keys that were all used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from memkv_vllm.errors import LocalProtocolError

__all__ = ["S3FifoPolicy"]

SMALL_PART = 0.1
"""Part of the keys that the small queue holds when both are full (the paper's)."""
MAX_USES = 3
USES_TO_MOVE = 2
"""Uses in the small queue that take a key to the main one. A load is two, for its lookup counts too: so one reuse."""
MAX_ROUNDS = 64


class S3FifoPolicy:
    """Evicts what was not used in the small queue first; each call is O(1), a victim O(``MAX_ROUNDS``)."""

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        """Uses by key, the oldest key first."""
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        """Keys that left the small queue as victims; as many as there are keys in the store at most."""
        self._victim: bytes | None = None
        """The key that was yielded last: if it is removed next, it was evicted."""

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __repr__(self) -> str:
        return f"<S3FifoPolicy {len(self._small)} small, {len(self._main)} main, {len(self._ghost)} ghosts>"

    def added(self, key: bytes) -> None:
        """Enters ``key``: into the main queue if its ghost is there, else into the small one.

        Raises:
            LocalProtocolError: it is there already.
        """
        if key in self._small or key in self._main:
            raise LocalProtocolError(f"eviction policy: key {key.hex()} added twice")
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def added_many(self, keys: Sequence[bytes]) -> None:
        """Enters each of ``keys``; raises as :meth:`added` does."""
        for key in keys:
            self.added(key)

    def touched(self, key: bytes) -> None:
        """Counts a use of ``key``.

        Raises:
            LocalProtocolError: it is not there.
        """
        queue = self._queue(key)
        uses = queue[key]
        if uses < MAX_USES:
            queue[key] = uses + 1

    def touched_many(self, keys: Sequence[bytes]) -> None:
        """Counts a use of each of ``keys``; raises as :meth:`touched` does."""
        for key in keys:
            self.touched(key)

    def removed(self, key: bytes) -> None:
        """Forgets ``key``; a victim out of the small queue leaves a ghost.

        Raises:
            LocalProtocolError: it is not there.
        """
        queue = self._queue(key)
        del queue[key]
        if queue is self._small and key == self._victim:
            self._ghost[key] = None
        while len(self._ghost) > len(self):
            self._ghost.popitem(last=False)
        self._victim = None

    def victims(self) -> Iterator[bytes]:
        """In order of eviction. A victim that the caller leaves in place is in use and goes on in the main queue."""
        left: set[bytes] = set()
        for _ in range(len(self)):
            key = self._next(left)
            if key is None:
                return
            self._victim = key
            yield key
            if key in self._small:
                del self._small[key]
                self._main[key] = 1
                left.add(key)
            elif key in self._main:
                self._main.move_to_end(key)
                left.add(key)

    def _next(self, left: set[bytes]) -> bytes | None:
        """The next victim; keys that earn another round get it on the way, up to ``MAX_ROUNDS``."""
        rounds = 0
        while True:
            if self._small and (len(self._small) >= SMALL_PART * len(self) or len(left) >= len(self._main)):
                key, uses = next(iter(self._small.items()))
                if uses < USES_TO_MOVE or rounds >= MAX_ROUNDS:
                    return key
                del self._small[key]
                self._main[key] = 0
            elif len(left) < len(self._main):
                key, uses = next(iter(self._main.items()))
                if key not in left and (not uses or rounds >= MAX_ROUNDS):
                    return key
                self._main[key] = max(0, uses - 1)
                self._main.move_to_end(key)
            else:
                return None
            rounds += 1

    def _queue(self, key: bytes) -> OrderedDict[bytes, int]:
        if key in self._main:
            return self._main
        if key not in self._small:
            raise LocalProtocolError(f"eviction policy: key {key.hex()} is not known")
        return self._small
