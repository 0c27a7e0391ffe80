"""When a server counts as healthy, and as ready. Pure: facts in, reasons out.

Ready means that clients may come: the transports listen and nothing is draining. Healthy means that it also works as
it should. A server that is degraded goes on serving: the answer is for people and alerts, not for a restart, which
would empty an arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Facts", "Reason", "degraded", "not_ready"]


class Reason(NamedTuple):
    """One thing that is not as it should be."""

    reason: str
    """A short name that stays the same over releases, for alerts."""
    detail: str
    next_step: str


class Facts(NamedTuple):
    """What the answers depend on."""

    started: bool
    """The transports listen and the recovery from disk has ended."""
    draining: bool
    arena_slow: bool
    """The arena could not be backed with memory, and is not being backed either."""
    lag_s: float
    """The most that the event loop came late by, lately."""
    max_lag_s: float
    reported: Sequence[Reason] = ()
    """What the store's own parts say (a drive that is out, a log that cannot be written)."""


_STARTING = Reason("starting", "the server does not accept clients yet", "wait; the log says what it is doing")
_DRAINING = Reason("draining", "the server is ending and accepts nothing new", "use another server; this one was told")
_ARENA = Reason(
    "arena_not_populated",
    "this kernel cannot back the arena in advance: the first put to each page is slow",
    "run Linux 5.14 or newer",
)


def not_ready(facts: Facts) -> list[Reason]:
    """Why clients may not come; empty when they may."""
    if not facts.started:
        return [_STARTING]
    return [_DRAINING] if facts.draining else []


def degraded(facts: Facts) -> list[Reason]:
    """Everything that is wrong; empty when all is well."""
    reasons = not_ready(facts)
    if facts.arena_slow:
        reasons.append(_ARENA)
    if facts.lag_s > facts.max_lag_s:
        detail = f"the event loop came late by {facts.lag_s:.2f} s; more than network.admin_max_lag_s = "
        step = "look at the CPU of this host; use fewer values a batch, or more servers"
        reasons.append(Reason("event_loop_lag", f"{detail}{facts.max_lag_s:g} s", step))
    return [*reasons, *facts.reported]
