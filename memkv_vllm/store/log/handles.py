"""Where the records went that the log itself has moved. Pure.

The caller keeps the location that it was given: it is a handle from then on. Bounded by the number of moved records
that are live.
"""

from __future__ import annotations

from memkv_vllm.store.log.api import Location

__all__ = ["Handles"]


class Handles:
    """Handle -> place, and back, for records whose place is not the handle."""

    def __init__(self) -> None:
        self._places: dict[Location, Location] = {}
        self._handles: dict[Location, Location] = {}

    def __len__(self) -> int:
        return len(self._places)

    def place(self, handle: Location) -> Location:
        """Where the record is now."""
        return self._places.get(handle, handle)

    def handle(self, place: Location) -> Location:
        """What the caller calls it."""
        return self._handles.get(place, place)

    def moved(self, before: Location, now: Location) -> None:
        """The record at ``before`` is at ``now``."""
        handle = self._handles.pop(before, before)
        self._places[handle] = now
        self._handles[now] = handle

    def drop(self, place: Location) -> Location:
        """The record is gone; returns its handle."""
        handle = self._handles.pop(place, place)
        self._places.pop(handle, None)
        return handle

    def drop_handle(self, handle: Location) -> Location:
        """The caller has forgotten the record; returns where it is."""
        place = self._places.pop(handle, handle)
        self._handles.pop(place, None)
        return place
