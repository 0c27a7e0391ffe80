"""Looks for the next request for a moment before the event loop sleeps.

A core that goes to sleep between two requests takes longer to wake up than a lookup takes to answer, and then runs the
interpreter from cold caches. So where requests follow each other within microseconds the loop asks the kernel again and
again instead. How long is learnt, as the halt polling of hypervisors does it: waits that ended soon make it look longer
the next time, up to the bound that the operator sets; one wait that was longer than the bound ends it. An idle store
costs nothing, and neither does one that waits for large transfers.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

__all__ = ["IdlePoll", "PollingSelector", "loop_factory"]

FIRST_POLL_S = 10e-6
"""From which it grows, by doubling: five short waits in turn, and it covers the pause between two calls of a client."""

_Ready = list[tuple[selectors.SelectorKey, int]]


class IdlePoll:
    """How long to look for before sleeping. Pure.

    Args:
        most_s: seconds at most; 0: never.
    """

    __slots__ = ("_most_s", "poll_s")

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.poll_s = 0.0
        """Seconds to look for, the next time."""

    def __repr__(self) -> str:
        return f"<IdlePoll {self.poll_s * 1e6:.0f} of {self._most_s * 1e6:.0f} us>"

    def slept(self, waited_s: float) -> None:
        """It was not found by looking: all the waiting took ``waited_s``."""
        if waited_s > self._most_s:
            self.poll_s = 0.0
        else:
            self.poll_s = min(self._most_s, max(FIRST_POLL_S, 2 * self.poll_s))


class PollingSelector(selectors.EpollSelector):
    """What an event loop waits with.

    Args:
        most_s: seconds that it looks before it sleeps, at most.
        clock: seconds.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._idle = IdlePoll(most_s)
        self._clock = clock

    def select(self, timeout: float | None = None) -> _Ready:
        """See ``selectors.BaseSelector``."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        start = self._clock()
        until_s = self._idle.poll_s if timeout is None else min(timeout, self._idle.poll_s)
        waited_s = 0.0
        while waited_s < until_s:
            if ready := super().select(0):
                return ready
            waited_s = self._clock() - start
        ready = super().select(None if timeout is None else max(0.0, timeout - waited_s))
        self._idle.slept(self._clock() - start)
        return ready


def loop_factory(most_s: float) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes event loops that look for up to ``most_s`` seconds before they sleep; 0: ones like any other."""
    return lambda: asyncio.SelectorEventLoop(PollingSelector(most_s) if most_s else None)
