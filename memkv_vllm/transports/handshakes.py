"""Connections that are not authenticated yet, by where they come from: so that no one stranger can take all places.

A server admits a bounded number of handshakes at a time. When all places are taken, a newcomer does not have to wait
for a timeout: the oldest handshake of whoever holds the most places is cut, if that is more than the newcomer would
hold then. A single host that floods a server so competes with itself only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import anyio

__all__ = ["Handshake", "Handshakes"]


@dataclass(eq=False)
class Handshake:
    """One connection from its admission on. Its driver runs the handshake in ``scope``."""

    origin: str
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    departed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def was_cut(self) -> bool:
        """Whether somebody else got its place."""
        return self.scope.cancel_called


class Handshakes:
    """The handshakes of one server transport. Bounded by what the handler admits."""

    def __init__(self) -> None:
        self._under_way: dict[Handshake, None] = {}
        """In order of admission."""

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, origin: str) -> Handshake:
        """A connection from ``origin`` was admitted; :meth:`end` and then ``departed`` are due."""
        made = Handshake(origin)
        self._under_way[made] = None
        return made

    def end(self, handshake: Handshake) -> None:
        """It is authenticated, or has failed; a second call does nothing."""
        self._under_way.pop(handshake, None)

    async def make_room(self, origin: str) -> bool:
        """Cut one handshake for a newcomer from ``origin``, and wait until it has departed.

        Returns:
            whether there was one to cut: of an origin that holds at least two places more than this one.
        """
        held = Counter(handshake.origin for handshake in self._under_way)
        if not held:
            return False
        greediest, places = held.most_common(1)[0]
        if places < held[origin] + 2:
            return False
        oldest = next(handshake for handshake in self._under_way if handshake.origin == greediest)
        self.end(oldest)
        oldest.scope.cancel()
        await oldest.departed.wait()
        return True
