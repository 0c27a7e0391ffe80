"""A process that writes values into a log, and says through its output what was acknowledged, until it is killed.

Lines: ``ready``; ``w NUMBER`` a value's location was reported; ``x NUMBER`` it is about to be forgotten; ``f NUMBER``
its tombstone is on the medium; ``g NUMBER`` a reclaim is about to give it up; ``r NUMBER`` it has. Called with
``storage.sync``, a seed, the first number to use, and the drives' paths.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import anyio

from memkv_vllm.store.log.api import Location
from memkv_vllm.store.log.drive import Drive
from memkv_vllm.store.log.format import BLOCK_BYTES
from memkv_vllm.store.log.segments import Segment
from tests.support.logs import MIB, NAMESPACE, OpenLog, opened, payload_of, storage

LENGTHS = (1, 4096, 30_000, 200_000)
DRIVE_BYTES = 12 * MIB


def say(line: str) -> None:
    """One line, whole: written at once, and not kept in this process."""
    os.write(1, f"{line}\n".encode())


def key_of(number: int) -> bytes:
    """A key that tells its number."""
    return b"\1" + NAMESPACE + number.to_bytes(32, "big") + bytes(4)


def number_of(key: bytes) -> int:
    """What :func:`key_of` was called with."""
    return int.from_bytes(key[33:65], "big")


class Writer:
    """What the process knows of its values."""

    def __init__(self, held: OpenLog, choices: random.Random, first: int) -> None:
        self.held, self.choices, self.number = held, choices, first
        self.alive: dict[int, Location] = {}
        self.numbers: dict[Location, int] = {}
        held.also_written, held.also_reclaimed = self.on_written, self.on_reclaimed

    def on_written(self, token: int, location: Location | None) -> None:
        number = number_of(self.held.records[token].key)
        if location is not None:
            self.alive[number], self.numbers[location] = location, number
            say(f"w {number}")

    def on_reclaimed(self, locations: Sequence[Location]) -> None:
        for location in locations:
            number = self.numbers.pop(location, None)
            if number is not None:
                del self.alive[number]
                say(f"r {number}")

    async def forget(self, number: int) -> None:
        say(f"x {number}")
        location = self.alive.pop(number)
        del self.numbers[location]
        self.held.log.forget([location])
        if self.choices.random() < 0.5:
            await self.held.log.flush()
            say(f"f {number}")

    def watch_reclaim(self) -> None:
        """Says what a reclaim gives up before it does: the process may be killed before the log has told us."""
        for drive in self.held.log._drives:
            drive._reclaimer.give_up = partial(self._give_up, drive, drive._reclaimer.give_up)  # type: ignore[method-assign]

    async def _give_up(self, drive: Drive, give_up: Callable[[Segment], Awaitable[bool]], segment: Segment) -> bool:
        for start, _, _ in segment.live():
            place = Location(drive.number, segment.number, segment.incarnation, start * BLOCK_BYTES)
            number = self.numbers.get(drive.handles.handle(place))
            if number is not None:
                say(f"g {number}")
        return await give_up(segment)

    async def run(self) -> None:
        """For ever: puts, and now and then a use, a forget, a flush."""
        self.watch_reclaim()
        say("ready")
        while True:
            for _ in range(self.choices.randint(1, 8)):
                self.held.offer(key_of(self.number), payload_of(self.number, self.choices.choice(LENGTHS)))
                self.number += 1
            # As fast as the log takes them, no faster: what is shed proves nothing.
            await self.held.settled(*list(self.held.extents))
            for number in self.choices.sample(sorted(self.alive), min(2, len(self.alive))):
                if self.choices.random() < 0.5:
                    self.held.log.used(self.alive[number])
                elif number in self.alive:
                    await self.forget(number)


async def main(sync: str, seed: int, first: int, *paths: str) -> None:
    """See the module."""
    config = storage([Path(path) for path in paths], DRIVE_BYTES, sync=sync, segment_size="1 MiB")
    async with opened(config) as held:
        await Writer(held, random.Random(seed), first).run()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
