"""Whether transfers keep up with what their way to the server should carry (P078). Pure: ``now`` is monotonic seconds.

A slow path works, so nothing else tells of it: a port that came up at a quarter of its speed, a cable on the wrong
switch, packets that are lost and sent again. Only stretches in which enough bytes are under way to tell are measured;
one of them may be slow because of the server or its disks, so only several in a row count.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["LEAST_BYTES", "LEAST_S", "SAMPLES", "SLOW_SHARE", "Pace", "PaceChange"]

SLOW_SHARE = 0.3
"""Share of the expected rate under which a path is slow."""

LEAST_BYTES = 8 << 20
LEAST_S = 0.002
"""Bytes that must be under way to tell: so many, and as many as the path should carry in this time, beside which a
request's fixed cost (control messages, checksums) is small."""

SAMPLES = 5
"""Measurements in a row after which a path is called slow, or sound again."""


class PaceChange(Enum):
    """What became of a path."""

    SLOW = "slow"
    RECOVERED = "recovered"


class Pace:
    """The transfers of one server, all its connections one after the other."""

    __slots__ = ("_contrary", "_least_bytes", "_moved_bytes", "_since", "_under_way_bytes", "expected", "rate", "slow")

    def __init__(self) -> None:
        self.expected: float | None = None
        """Bytes per second of the way in use; None: unknown, and nothing is ever called slow."""
        self.rate = 0.0
        """Bytes per second as measured last."""
        self.slow = False
        self._least_bytes = LEAST_BYTES
        self._under_way_bytes = 0
        self._since: float | None = None
        """Since when enough has been under way and nothing was evaluated."""
        self._moved_bytes = 0
        self._contrary = 0
        """Measurements in a row that contradict ``slow``."""

    def expect(self, bytes_per_s: float | None) -> None:
        """From now on transfers go a way that should carry so much."""
        self.expected = bytes_per_s
        self._least_bytes = max(LEAST_BYTES, int((bytes_per_s or 0.0) * LEAST_S))
        self._contrary = 0
        self._since = None

    def begin(self, size_bytes: int, now: float) -> None:
        """A transfer of so many bytes is asked for."""
        self._under_way_bytes += size_bytes
        if self._since is None:
            self._restart(now)

    def end(self, size_bytes: int, moved_bytes: int, now: float) -> PaceChange | None:
        """It has ended.

        Args:
            size_bytes: as it began.
            moved_bytes: what was really moved: not values that were present already, absent, or failed.
            now: monotonic seconds.

        Returns:
            what that changed about the path.
        """
        self._under_way_bytes -= size_bytes
        since, self._moved_bytes = self._since, self._moved_bytes + moved_bytes
        if since is None:
            return None
        if moved_bytes < size_bytes:
            # How long this held up the others nobody knows.
            self._restart(now)
            return None
        if self._moved_bytes < self._least_bytes:
            if self._under_way_bytes < self._least_bytes:
                self._since = None
            return None
        self.rate = self._moved_bytes / max(1e-9, now - since)
        self._restart(now)
        return self._judge()

    def _restart(self, now: float) -> None:
        self._since = now if self._under_way_bytes >= self._least_bytes else None
        self._moved_bytes = 0

    def _judge(self) -> PaceChange | None:
        if self.expected is None:
            return None
        if (self.rate < SLOW_SHARE * self.expected) is self.slow:
            self._contrary = 0
            return None
        self._contrary += 1
        if self._contrary < SAMPLES:
            return None
        self._contrary = 0
        self.slow = not self.slow
        return PaceChange.SLOW if self.slow else PaceChange.RECOVERED
