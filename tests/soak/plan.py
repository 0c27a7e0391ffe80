"""What a soak breaks, and when: a pure function of a seed, so that a run can be repeated.

Times are seconds from the start of the load. The run has four parts::

    warm-up   10 %, at most 30 s   nothing breaks
    storm     up to 70 %           servers and clients are killed, ended, frozen; disks are damaged
    swell     up to 90 %           servers live, but freeze; clients are killed and frozen
    calm      the rest             nothing breaks

From the end of the storm on no server is replaced, so what it holds at the end can be compared with what it held then.
Events of one target never overlap; those of several targets do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

__all__ = ["Action", "Event", "Phases", "chaos_plan"]

MAX_WARM_UP_S = 30.0
FREEZE_S = (0.2, 4.0)
"""Long enough for a breaker to open, shorter than any deadline of a request."""
DOWN_S = (0.2, 3.0)
"""How long a killed process stays away."""
GAP_S = (3.0, 12.0)
"""From the end of a target's event to its next one."""
DAMAGE_SHARE = 0.3
"""Of the ends of a server that has a disk."""


class Action(str, Enum):
    """What happens to a process."""

    KILL = "kill"
    """SIGKILL, and a new one ``for_s`` later."""
    END = "end"
    """SIGTERM, and a new one ``for_s`` after its end."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT ``for_s`` later."""


class Event(NamedTuple):
    """One thing that is done to one process."""

    at_s: float
    action: Action
    target: str
    for_s: float
    damage: float | None = None
    """Part (0 to 1) of the way through the medium from which on some bits are inverted while the server is down."""

    def line(self) -> str:
        """For people."""
        damage = "" if self.damage is None else f", its disk damaged from {self.damage:.4f} on"
        return f"{self.at_s:8.2f} s  {self.action.value:6} {self.target:10} for {self.for_s:.2f} s{damage}"


class Phases(NamedTuple):
    """When each part of a run ends, in seconds."""

    warm_up_s: float
    storm_s: float
    swell_s: float
    calm_s: float

    @classmethod
    def of(cls, duration_s: float) -> Phases:
        """The parts of a run of ``duration_s``."""
        warm_up_s = min(0.1 * duration_s, MAX_WARM_UP_S)
        return cls(warm_up_s, 0.7 * duration_s, 0.9 * duration_s, duration_s)


def chaos_plan(
    seed: int, duration_s: float, servers: Sequence[str], clients: Sequence[str], disks: Sequence[str] = ()
) -> list[Event]:
    """Everything that will be broken, in order of time.

    Args:
        seed: the same one gives the same plan.
        duration_s: length of the run in seconds.
        servers: names of the servers.
        clients: names of the clients that may be killed; leave out those that must live.
        disks: those of ``servers`` that have a disk to damage.
    """
    phases = Phases.of(duration_s)
    events: list[Event] = []
    for name in servers:
        dice = random.Random(f"{seed}:{name}")
        events += _of_target(dice, name, phases.warm_up_s, phases.storm_s, tuple(Action), name in disks)
        events += _of_target(dice, name, phases.storm_s, phases.swell_s, (Action.FREEZE,), False)
    for name in clients:
        dice = random.Random(f"{seed}:{name}")
        events += _of_target(dice, name, phases.warm_up_s, phases.swell_s, (Action.KILL, Action.FREEZE), False)
    return sorted(events)


def _of_target(
    dice: random.Random, name: str, begin_s: float, end_s: float, actions: Sequence[Action], disk: bool
) -> Iterator[Event]:
    """Events of one target that begin and end inside of a span of time."""
    # The first one comes soon: a run of a minute is to have an event of every target.
    at_s = begin_s + dice.uniform(0, GAP_S[0])
    while True:
        action = dice.choice(actions)
        for_s = dice.uniform(*(FREEZE_S if action is Action.FREEZE else DOWN_S))
        damaged = disk and action is not Action.FREEZE and dice.random() < DAMAGE_SHARE
        where = dice.random()
        if at_s + for_s >= end_s:
            return
        yield Event(round(at_s, 3), action, name, round(for_s, 3), where if damaged else None)
        at_s += for_s + dice.uniform(*GAP_S)
