"""Which value goes next when the arena is full. Pure: a policy orders keys; the table decides and frees.

Contract between the table and a policy:

1. ``added`` when a value becomes complete in the arena (never for a reservation; again when it comes back from
   disk), ``touched`` when it is used, ``removed`` when it leaves the arena for any reason, also after it was yielded
   as a victim. A policy thus holds exactly the keys of complete values in the arena, each once.
2. ``victims`` yields keys in order of eviction. Between two steps the caller either calls ``removed`` for the
   key just yielded, or leaves it: then it is in use (pinned), and the policy may treat it as touched.
   Nothing else may be called while an iterator is being consumed; an iterator may be dropped at any step.
3. ``victims`` ends: it yields no key twice.

A policy may remember keys that have left (the ghost queue of S3-FIFO) as long as that memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from memkv_vllm.errors import LocalProtocolError

__all__ = ["EvictionPolicy", "LruPolicy"]


class EvictionPolicy(Protocol):
    """Order of eviction over the complete keys of a store; the module's docstring is the contract."""

    def __len__(self) -> int:
        """Number of keys."""
        ...

    def added(self, key: bytes) -> None:
        """A value was committed under ``key``, or came back from disk."""

    def added_many(self, keys: Sequence[bytes]) -> None:
        """:meth:`added` for each of ``keys``, in this order: a batch was committed."""

    def touched(self, key: bytes) -> None:
        """The value under ``key`` was read or found by a lookup."""

    def touched_many(self, keys: Sequence[bytes]) -> None:
        """:meth:`touched` for each of ``keys``, in this order: what a lookup of a batch found."""

    def removed(self, key: bytes) -> None:
        """The value under ``key`` has left the arena."""

    def victims(self) -> Iterator[bytes]:
        """Keys in order of eviction."""


class LruPolicy:
    """Evicts the key that was not used for the longest time; each call is O(1)."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<LruPolicy {len(self._keys)} keys>"

    def added(self, key: bytes) -> None:
        """Appends ``key`` as the newest.

        Raises:
            LocalProtocolError: it is there already.
        """
        if key in self._keys:
            raise LocalProtocolError(f"eviction policy: key {key.hex()} added twice")
        self._keys[key] = None

    def added_many(self, keys: Sequence[bytes]) -> None:
        """Appends ``keys``; raises as :meth:`added` does."""
        known = self._keys
        for key in keys:
            if key in known:
                self.added(key)  # raises, saying why
            known[key] = None

    def touched(self, key: bytes) -> None:
        """Makes ``key`` the newest.

        Raises:
            LocalProtocolError: it is not there.
        """
        self._require(key)
        self._keys.move_to_end(key)

    def touched_many(self, keys: Sequence[bytes]) -> None:
        """Makes ``keys`` the newest, the last of them last.

        Raises:
            LocalProtocolError: one is not there.
        """
        try:
            # A deque of no length takes what a map gives without a step of the interpreter for each.
            deque(map(self._keys.move_to_end, keys), maxlen=0)
        except KeyError as error:
            raise LocalProtocolError(f"eviction policy: key {error.args[0].hex()} is not known") from None

    def removed(self, key: bytes) -> None:
        """Forgets ``key``.

        Raises:
            LocalProtocolError: it is not there.
        """
        try:
            del self._keys[key]
        except KeyError:
            raise LocalProtocolError(f"eviction policy: key {key.hex()} is not known") from None

    def victims(self) -> Iterator[bytes]:
        """Oldest first. A victim that the caller leaves in place is in use and becomes the newest."""
        for _ in range(len(self._keys)):
            key = next(iter(self._keys))
            yield key
            if key in self._keys:
                self._keys.move_to_end(key)

    def _require(self, key: bytes) -> None:
        if key not in self._keys:
            raise LocalProtocolError(f"eviction policy: key {key.hex()} is not known")
