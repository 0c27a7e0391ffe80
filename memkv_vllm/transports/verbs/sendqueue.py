"""Flow control of one queue pair's send queue: free places, sparse signals, and what a completion says. Pure.

A send queue has ``depth`` places. Every work request takes one and gives it back when a completion of it or of a later
one is polled: work requests of a queue pair complete in order. Only some are signalled, so that the NIC and this
process do less: the last one of what somebody waits for, or its end would never be known, and at least one in a quarter
of the places, so that places come back before all are taken.

Work requests are numbered from 0; the number is the ``wr_id``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memkv_vllm.errors import LocalProtocolError

__all__ = ["SendQueue"]


@lru_cache(maxsize=1024)
def _signals(count: int, first: int, interval: int, awaited: bool) -> npt.NDArray[np.bool_]:
    """True in row ``first``, in every ``interval``-th from there on, and in the last one if it is ``awaited``.

    Not to be written to: posts of the same kind come over and over.
    """
    signalled = np.zeros(count, np.bool_)
    signalled[first::interval] = True
    signalled[-1] |= awaited
    signalled.setflags(write=False)
    return signalled


class SendQueue:
    """The places of one send queue.

    Args:
        depth: places; at least 1.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise LocalProtocolError(f"a send queue of {depth} places")
        self.depth = depth
        self.posted = 0
        """Work requests that were ever posted: the number of the next."""
        self.completed = 0
        """Work requests that are known to have ended: all below this number."""
        self._interval = max(1, depth // 4)
        self._unsignalled = 0
        """At the end of the queue: fewer than the interval."""

    @property
    def free(self) -> int:
        """Places that can be taken now."""
        return self.depth - (self.posted - self.completed)

    def take(self, count: int, *, awaited: bool) -> npt.NDArray[np.bool_]:
        """Take places for the next ``count`` work requests; which of them are signalled, in order.

        Args:
            count: work requests.
            awaited: somebody waits for the last one.

        Raises:
            LocalProtocolError: there are not as many places.
        """
        if not 1 <= count <= self.free:
            raise LocalProtocolError(f"{count} work requests for {self.free} free places")
        signalled = _signals(count, self._interval - 1 - self._unsignalled, self._interval, awaited)
        self._unsignalled = 0 if signalled[-1] else (self._unsignalled + count) % self._interval
        self.posted += count
        return signalled

    def complete(self, number: int) -> int:
        """A completion of work request ``number`` was polled; returns how many ended that were not known to.

        Raises:
            LocalProtocolError: no such work request is under way.
        """
        if not self.completed <= number < self.posted:
            raise LocalProtocolError(
                f"a completion of work request {number}; {self.completed} to {self.posted - 1} are under way"
            )
        ended = number + 1 - self.completed
        self.completed = number + 1
        return ended

    def refuse(self, count: int) -> None:
        """The last ``count`` of the places taken were not used: the post stopped before them."""
        self.posted -= count
