"""A network link that can be slow, lossy or cut: packets between two TUN devices, carried by a process of its own.

``python -m tests.support.wire FD FD``: the descriptors are TUN devices, each of which stands in a network namespace.
Every line on standard input is a JSON object with the fields of :class:`Shape`; it holds for both directions once a
line was printed: how many packets were sent into the link and how many of these were lost, until then. Ends with its
input. The kernel's own netem is not used: many kernels are built without it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import selectors
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Lane", "Shape"]

MAX_PACKET = 65_536
BURST = 64
"""Packets taken from one side before the other gets its turn."""


class Shape(NamedTuple):
    """How a link behaves, each direction for itself."""

    delay_s: float = 0.0
    rate_bytes_per_s: float | None = None
    loss: float = 0.0
    """Part of the packets that vanish."""
    cut: bool = False
    """All packets vanish, without a word to either side."""
    queue_bytes: int = 256 << 10
    """What waits for its turn on a slow link; more is lost, as in a real one."""


class Packet(NamedTuple):
    """One that is under way; ``number`` keeps the order of those that arrive together."""

    arrives_at: float
    number: int
    data: bytes


@dataclass
class Lane:
    """One direction: decides when a packet arrives. Pure; ``now`` is in seconds."""

    dice: random.Random
    shape: Shape = field(default_factory=Shape)
    sent: int = 0
    lost: int = 0
    _free_at: float = 0.0
    _number: int = 0
    _under_way: list[Packet] = field(default_factory=list)

    def send(self, now: float, data: bytes) -> bool:
        """Take a packet; False when it is lost."""
        kept = self._take(now, data)
        self.sent += 1
        self.lost += not kept
        return kept

    def _take(self, now: float, data: bytes) -> bool:
        shape = self.shape
        if shape.cut or (shape.loss and self.dice.random() < shape.loss):
            return False
        starts_at = max(now, self._free_at)
        took_s = 0.0
        if shape.rate_bytes_per_s is not None:
            if (starts_at - now) * shape.rate_bytes_per_s > shape.queue_bytes:
                return False
            took_s = len(data) / shape.rate_bytes_per_s
        self._free_at = starts_at + took_s
        self._number += 1
        heapq.heappush(self._under_way, Packet(self._free_at + shape.delay_s, self._number, data))
        return True

    def change(self, now: float, shape: Shape) -> None:
        """From now on it behaves so; a cut takes what is under way with it."""
        self.shape = shape
        self._free_at = now
        if shape.cut:
            self._under_way.clear()

    def arrived(self, now: float) -> Iterator[bytes]:
        """Packets that have arrived by now, in order."""
        while self._under_way and self._under_way[0].arrives_at <= now:
            yield heapq.heappop(self._under_way).data

    def next_at(self) -> float | None:
        """When the next one arrives."""
        return self._under_way[0].arrives_at if self._under_way else None


class Wire:
    """Carries packets between two devices until its orders end."""

    def __init__(self, first: int, second: int, seed: int = 1) -> None:
        self._ways = [
            (first, second, Lane(random.Random(seed))),
            (second, first, Lane(random.Random(seed + 1))),
        ]
        self._selector = selectors.DefaultSelector()
        for index, (source, _, _) in enumerate(self._ways):
            os.set_blocking(source, False)
            self._selector.register(source, selectors.EVENT_READ, index)
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, -1)
        self._orders = b""

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            times = [at for _, _, lane in self._ways if (at := lane.next_at()) is not None]
            timeout = max(0.0, min(times) - time.monotonic()) if times else None
            for key, _ in self._selector.select(timeout):
                if key.data < 0:
                    if not self._obey():
                        return
                else:
                    self._take(*self._ways[key.data])
            now = time.monotonic()
            for _, target, lane in self._ways:
                for data in lane.arrived(now):
                    _write(target, data)

    def _take(self, source: int, target: int, lane: Lane) -> None:
        for _ in range(BURST):
            try:
                data = os.read(source, MAX_PACKET)
            except OSError:
                return
            lane.send(time.monotonic(), data)

    def _obey(self) -> bool:
        data = os.read(0, 65_536)
        self._orders += data
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            for _, _, lane in self._ways:
                lane.change(time.monotonic(), Shape(**json.loads(line)))
            lanes = [lane for _, _, lane in self._ways]
            sys.stdout.write(f"{sum(lane.sent for lane in lanes)} {sum(lane.lost for lane in lanes)}\n")
            sys.stdout.flush()
        return bool(data)


def _write(target: int, data: bytes) -> None:
    # A device that is down or full takes nothing: the packet is lost, as on any link.
    with contextlib.suppress(OSError):
        os.write(target, data)


if __name__ == "__main__":
    Wire(int(sys.argv[1]), int(sys.argv[2])).run()
