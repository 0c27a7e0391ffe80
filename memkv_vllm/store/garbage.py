"""Keeps Python's garbage collector away from what a store holds.

A full collection visits every object that may be part of a cycle: with a million values it stops the event loop for
half a second (measured: 0.46 to 1.3 s). Entries of the table are freed by their reference counts and are in no cycle
once they are gone, so nothing is lost by freezing them: moved where the collector does not look.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Freezer", "collection_paused"]

STEP_ENTRIES = 8192
"""Entries that may be made between two freezes: a collection that visits so many takes a few milliseconds."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection within the block: for work that makes many objects, all of which stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Freezer:
    """Freezes what there is whenever enough was added. The collector is the process's, so there is one in each."""

    def __init__(self) -> None:
        self._frozen_at = 0
        self.freezes = 0

    def __repr__(self) -> str:
        return f"<Freezer {self.freezes} freezes, the last at {self._frozen_at} entries>"

    def poll(self, made: int) -> bool:
        """Freezes if ``made``, the number of entries made since the start, is far enough ahead of the last time.

        Returns:
            whether it did.
        """
        if made - self._frozen_at < STEP_ENTRIES:
            return False
        self._frozen_at = made
        self.freezes += 1
        gc.collect()  # so that no garbage is frozen; it visits only what came since the last time
        gc.freeze()
        return True

    def close(self) -> None:
        """Lets the collector see everything again."""
        if self.freezes:
            gc.unfreeze()
