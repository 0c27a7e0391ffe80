"""A client process of a soak, in one life after the other: its orders, its heartbeat."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.client_process import Heartbeat, Orders
from tests.support.actors import READY_S, Actor

__all__ = ["ClientActor"]


@dataclass
class ClientActor(Actor):
    """A client process.

    Attributes:
        module: what to run.
        orders: makes the orders of a life.
    """

    module: str = ""
    orders: Callable[[int], Orders] | None = None
    heartbeat: Heartbeat | None = None
    grew_at: float = 0.0
    """When its number of operations last grew (monotonic), or when it was thawed."""
    ended: list[Heartbeat] = field(default_factory=list)
    """Last heartbeats of earlier lives."""

    def command(self) -> Sequence[str]:
        """With the orders of this life."""
        assert self.orders is not None
        path = self.folder / f"{self.name}.{self.life}.orders"
        self.orders(self.life).write(path)
        return [sys.executable, "-m", self.module, str(path)]

    def start(self) -> None:
        """Begin the next life."""
        self.forget_life()
        super().start()
        self.grew_at = time.monotonic()

    def forget_life(self) -> None:
        """What this life has said is kept, and the next one begins with nothing."""
        if self.heartbeat is not None:
            self.ended.append(self.heartbeat)
        self.heartbeat = None

    def listen(self, now: float) -> None:
        """Read the newest heartbeat."""
        newest = Heartbeat.last_of(self.output)
        if newest is not None and (self.heartbeat is None or newest.operations > self.heartbeat.operations):
            self.grew_at = now
        self.heartbeat = newest or self.heartbeat

    def wait_ready(self) -> None:
        """Return after the first heartbeat of this life, or at its end: only then a signal is an orderly one."""
        end = time.monotonic() + READY_S
        while self.running and self.heartbeat is None and time.monotonic() < end:
            self.listen(time.monotonic())
            time.sleep(0.02)

    @property
    def journals(self) -> list[Path]:
        """Of all lives."""
        return [self.folder / f"{self.name}.{life}.journal" for life in range(self.life + 1)]

    def beats(self) -> list[Heartbeat]:
        """The last heartbeat of every life."""
        return [*self.ended, *([self.heartbeat] if self.heartbeat is not None else [])]
