"""Looks for the next request for a moment before the event loop sleeps.

A core that goes to sleep between two requests takes longer to wake up than a lookup takes to answer, and then runs the
interpreter from cold caches. So where requests follow each other within microseconds the loop asks the kernel again and
again instead. How long is learnt, as the halt polling of hypervisors does it: waits that ended soon make it look longer
the next time, up to the bound that the operator sets; one wait that was longer than the bound ends it, so an idle store
costs nothing.

Looking holds up the process's other threads: they get the interpreter lock only if they are awake in the moment in
which the loop asks the kernel. So a wait that a thread ended (a checksum, a copy, a drive) counts as a long one.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

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
            self.stop()
        else:
            self.poll_s = min(self._most_s, max(FIRST_POLL_S, 2 * self.poll_s))

    def stop(self) -> None:
        """Sleep at once the next time."""
        self.poll_s = 0.0


class PollingSelector(selectors.EpollSelector):
    """What an event loop waits with.

    The first file that is registered is taken for the loop's own, by which threads and signals wake it: that is what
    ``asyncio.SelectorEventLoop`` begins with.

    Args:
        most_s: seconds that it looks before it sleeps, at most.
        clock: seconds.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._idle = IdlePoll(most_s)
        self._clock = clock
        self._own: int | None = None

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """See ``selectors.BaseSelector``."""
        key = super().register(fileobj, events, data)
        if self._own is None:
            self._own = key.fd
        return key

    def select(self, timeout: float | None = None) -> _Ready:
        """See ``selectors.BaseSelector``."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        start = self._clock()
        until_s = self._idle.poll_s if timeout is None else min(timeout, self._idle.poll_s)
        waited_s = 0.0
        while waited_s < until_s:
            if ready := super().select(0):
                if self._by_thread(ready):
                    self._idle.stop()
                return ready
            waited_s = self._clock() - start
        ready = super().select(None if timeout is None else max(0.0, timeout - waited_s))
        if self._by_thread(ready):
            self._idle.stop()
        else:
            self._idle.slept(self._clock() - start)
        return ready

    def _by_thread(self, ready: _Ready) -> bool:
        return any(key.fd == self._own for key, _ in ready)


def loop_factory(most_s: float) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes event loops that look for up to ``most_s`` seconds before they sleep; 0: ones like any other."""
    return lambda: asyncio.SelectorEventLoop(PollingSelector(most_s) if most_s else None)
