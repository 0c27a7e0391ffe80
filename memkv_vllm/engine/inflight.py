"""Which connection may still touch which staging slot. Pure bookkeeping of live postings.

A posting begins when a request that names a slot leaves, and ends in one of two ways: its answer came (``settled``),
or its connection is given up (``abandoned``) and the slot goes into the staging pool's quarantine under that holder.
After that an answer of the old generation settles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memkv_vllm.engine.staging import Slot
from memkv_vllm.errors import LocalProtocolError

__all__ = ["Holder", "InFlight"]


class Holder(NamedTuple):
    """One connection to one server. ``generation`` grows with each reconnect."""

    server: str
    generation: int


class InFlight:
    """Live postings per holder. Bounded by the number of slots and of servers."""

    __slots__ = ("_posted", "_retired")

    def __init__(self) -> None:
        self._posted: dict[Holder, dict[Slot, None]] = {}
        self._retired: dict[str, int] = {}

    def posted(self, holder: Holder, slots: Iterable[Slot]) -> None:
        """Note that a request over ``holder`` names these slots. Call it before the request leaves.

        Raises:
            LocalProtocolError: the holder was abandoned, or a slot is posted over it already.
        """
        batch = list(slots)
        if holder.generation <= self._retired.get(holder.server, -1):
            raise LocalProtocolError(f"{holder} was abandoned; nothing may be posted over it")
        live = self._posted.get(holder, {})
        doubled = [slot for slot in batch if slot in live]
        if doubled or len(set(batch)) != len(batch):
            raise LocalProtocolError(f"slots posted twice over {holder}: {doubled or batch}")
        if batch:
            self._posted.setdefault(holder, live).update(dict.fromkeys(batch))

    def settled(self, holder: Holder, slots: Iterable[Slot]) -> bool:
        """Note that the answer for these slots came.

        Returns:
            Whether all of them were posted over this holder. Where false, the unknown ones must not be released: they
            were abandoned, and the staging pool has them in quarantine (or back under a new generation).
        """
        live = self._posted.get(holder, {})
        missing = object()
        known = True
        for slot in slots:
            known &= live.pop(slot, missing) is None
        if not live:
            self._posted.pop(holder, None)
        return known

    def abandoned(self, holder: Holder) -> list[Slot]:
        """Give up a connection. Nothing can be posted over it, or over an older one to this server, again.

        Returns:
            The slots that it may still touch, in order of posting: quarantine them under ``holder``, which must then
            be fenced.
        """
        self._retired[holder.server] = max(holder.generation, self._retired.get(holder.server, -1))
        return list(self._posted.pop(holder, {}))

    def holders_of(self, slot: Slot) -> frozenset[Holder]:
        """Connections with a live posting of this slot."""
        return frozenset(holder for holder, live in self._posted.items() if slot in live)

    def __len__(self) -> int:
        """Number of live postings."""
        return sum(map(len, self._posted.values()))

    def __repr__(self) -> str:
        return f"InFlight({ {str(holder): len(live) for holder, live in self._posted.items()} })"
