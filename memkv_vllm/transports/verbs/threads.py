"""Threads of a server's NIC that make calls of the verbs library which may take long.

A call can be held up by a peer (a queue pair to an address that nobody answers for waits a second for it) or by the
device (firmware that is stuck, up to a minute). So each NIC has threads of its own, and those that take queue pairs
down, which a fence waits for, are others than the one that brings them up.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["NUM_ENDING", "NicThreads"]

NUM_ENDING = 4
"""Sessions of a NIC whose queue pairs are taken down at once."""


class NicThreads:
    """See the module's text.

    Args:
        device: name of the NIC.
    """

    def __init__(self, device: str) -> None:
        self.making = _started(1, f"memkv-{device}-make")
        """Brings queue pairs up, one session after the other."""
        self.ending = _started(NUM_ENDING, f"memkv-{device}-end")
        """Makes them fail, and destroys them."""

    def close(self) -> None:
        """End the threads, after the last call was awaited."""
        self.making.shutdown()
        self.ending.shutdown()


def _started(count: int, name: str) -> ThreadPoolExecutor:
    """All threads start now: their number is then a constant."""
    executor, together = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count)
    for _ in range(count):
        executor.submit(together.wait)
    return executor
