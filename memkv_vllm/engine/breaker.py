"""When to stop asking a server that fails, when to ask again, and how often to speak of it.

Pure: ``now`` is in seconds on any monotonic clock, and randomness comes from outside: ``rng`` returns a float in
[0, 1), like ``random.Random().random``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

__all__ = ["Allowance", "Backoff", "Breaker", "BreakerState"]

_MAX_DOUBLINGS = 60


class Backoff:
    """A sequence of delays that doubles up to a limit, with jitter so that many clients do not come back at once."""

    __slots__ = ("_first_s", "_max_s", "_rng", "attempts")

    def __init__(self, first_s: float, max_s: float, rng: Callable[[], float]) -> None:
        """Set the first and the largest delay, in seconds.

        Raises:
            ValueError: not ``0 < first_s <= max_s``.
        """
        if not 0 < first_s <= max_s:
            raise ValueError(f"need 0 < first_s <= max_s, got {first_s} and {max_s}")
        self._first_s = first_s
        self._max_s = max_s
        self._rng = rng
        self.attempts = 0

    def next_delay(self) -> float:
        """Seconds to wait now: between half and all of ``min(max_s, first_s * 2**attempts)``."""
        full: float = min(self._max_s, self._first_s * 2.0 ** min(self.attempts, _MAX_DOUBLINGS))
        self.attempts += 1
        return full * (0.5 + 0.5 * self._rng())

    def reset(self) -> None:
        """Start again at the first delay."""
        self.attempts = 0


class Allowance:
    """How often something may be done: ``burst`` times at once, and once more every ``every_s`` seconds.

    Raises:
        ValueError: ``burst`` or ``every_s`` is not positive.
    """

    __slots__ = ("_burst", "_every_s", "_left", "_since")

    def __init__(self, burst: int, every_s: float) -> None:
        if burst < 1 or every_s <= 0:
            raise ValueError(f"burst and every_s must be positive, got {burst} and {every_s}")
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._since: float | None = None

    def take(self, now: float) -> bool:
        """Whether it may be done now."""
        earned = 0.0 if self._since is None else (now - self._since) / self._every_s
        self._left = min(self._burst, self._left + max(0.0, earned))
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class BreakerState(Enum):
    """``CLOSED`` lets everything through, ``OPEN`` nothing, ``HALF_OPEN`` one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Circuit breaker of one server.

    Call :meth:`allow` before each request and :meth:`succeeded` or :meth:`failed` after it. A probe whose result never
    comes (its task was cancelled) does not close the door for ever: after the current delay the next one may go.
    """

    __slots__ = ("_backoff", "_failures", "_failures_to_open", "_retry_at", "_state", "_wait_s")

    def __init__(
        self,
        rng: Callable[[], float],
        failures_to_open: int = 3,
        open_s: float = 1.0,
        max_open_s: float = 30.0,
    ) -> None:
        """Make a closed breaker.

        Args:
            rng: source of jitter, floats in [0, 1).
            failures_to_open: failures in a row that open it.
            open_s: first open time in seconds (with jitter between half and all of it); doubles with each failed probe.
            max_open_s: longest open time in seconds.

        Raises:
            ValueError: a limit is not positive, or ``open_s > max_open_s``.
        """
        if failures_to_open < 1:
            raise ValueError(f"failures_to_open must be at least 1, got {failures_to_open}")
        self._backoff = Backoff(open_s, max_open_s, rng)
        self._failures_to_open = failures_to_open
        self._failures = 0
        self._state = BreakerState.CLOSED
        self._wait_s = 0.0
        self._retry_at = 0.0

    @property
    def state(self) -> BreakerState:
        """The state after the last call."""
        return self._state

    @property
    def retry_at(self) -> float | None:
        """When the next probe may go (same clock as ``now``); ``None`` while closed."""
        return None if self._state is BreakerState.CLOSED else self._retry_at

    def allow(self, now: float) -> bool:
        """Whether a request may be sent now. A true answer in another state than closed is the probe."""
        if self._state is BreakerState.CLOSED:
            return True
        if now < self._retry_at:
            return False
        self._state = BreakerState.HALF_OPEN
        self._retry_at = now + self._wait_s
        return True

    def succeeded(self, now: float) -> None:
        """A request succeeded. Late answers to requests from before the opening change nothing."""
        del now
        if self._state is not BreakerState.OPEN:
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._backoff.reset()

    def failed(self, now: float) -> None:
        """A request failed in a way that speaks against the server (not: a miss)."""
        if self._state is BreakerState.OPEN:
            return
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN or self._failures >= self._failures_to_open:
            self._state = BreakerState.OPEN
            self._wait_s = self._backoff.next_delay()
            self._retry_at = now + self._wait_s

    def __repr__(self) -> str:
        return f"Breaker({self._state.value}, failures={self._failures}, retry_at={self.retry_at})"
