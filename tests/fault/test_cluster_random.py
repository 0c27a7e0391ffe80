"""A link whose rails and servers come and go at random: whatever the order, its promises hold and it recovers."""

from __future__ import annotations

import random
import time
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from memkv_vllm.engine import generation as generation_module
from memkv_vllm.engine import routes as routes_module
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.errors import ConnectError, ConnectionLost, MemkvError, NotSent, RequestTimeout, StoreError
from tests.support.link_world import FakeConnection, World, hurry, region, running, until

pytestmark = [pytest.mark.fault, pytest.mark.anyio]

RAILS = ("rail0", "rail1", "rail2")
STEPS = 150


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(routes_module, "REST_S", 0.01)
    monkeypatch.setattr(generation_module, "QUIET_S", 0.01)
    monkeypatch.setattr(generation_module, "IDLE_S", 0.05)
    monkeypatch.setattr(generation_module, "PING_TIMEOUT_S", 0.02)


class Chaos:
    """What happens to the world, and what its owner sees.

    Args:
        world: not yet running.
        seed: of all chance.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.asked = self.answered = self.failed = 0
        self.owed: set[Holder] = set()
        """Holders that slots wait for, as a caller has them in quarantine."""
        world.link._on_fenced = self._fenced
        world.link._on_change = self._changed
        world.on_greet = world.on_register = self.dawdle

    async def dawdle(self) -> None:
        """A set-up takes its time, so that things happen in the middle of it."""
        await anyio.sleep(self.chance.random() * 0.005)

    def _fenced(self, holder: Holder) -> None:
        assert holder not in self.world.fenced, f"{holder} was fenced twice"
        self.world.fenced.append(holder)
        self.owed.discard(holder)

    def _changed(self) -> None:
        """A connection that requests go over has every region, and none was given up before."""
        ready = self.world.link._ready
        if ready is not None:
            assert not ready.retired.is_set()
            assert {each.id for each in self.world.regions} <= ready.registered
            assert ready.holder not in self.world.fenced

    def reply(self, connection: FakeConnection) -> Any:
        """What the next request gets: an answer, sooner or later or never, or a failure."""
        kind = self.chance.randrange(8)
        if kind < 3:
            return "answer"
        if kind == 3:
            return NotSent("no place")
        if kind == 4:
            return StoreError("refused")
        if kind == 5:
            return RequestTimeout("late")
        delay_s = self.chance.random() * 0.02 if kind == 6 else 60.0

        async def later() -> Any:
            with anyio.move_on_after(delay_s):
                await connection.ended.wait()
                await self.dawdle()  # the caller is told later than others
                return ConnectionLost("cut")
            return "answer"

        return later

    async def ask(self) -> None:
        """One request that names memory."""
        link = self.world.link
        if not link.connected:
            return
        holder, sent_over = link.holder, link._ready
        assert sent_over is not None and sent_over.holder == holder
        connection = sent_over.connection
        assert isinstance(connection, FakeConnection)
        connection.replies = [self.reply(connection)]
        self.asked += 1
        try:
            await self.world.ask()
            self.answered += 1
        except (NotSent, StoreError, ConnectError):
            self.failed += 1
        except MemkvError:
            self.failed += 1
            # In the same breath: its slots go into quarantine, and must not have come out of it before.
            assert holder not in self.world.fenced, f"{holder} was fenced before its request returned"
            self.owed.add(holder)

    async def step(self, tasks: TaskGroup) -> None:
        """One more thing happens."""
        world, chance = self.world, self.chance
        kind = chance.randrange(10)
        if kind < 5:
            tasks.start_soon(self.ask)
        elif kind == 5:
            world.cut_rails ^= {chance.choice(RAILS)}
        elif kind == 6 and world.connections:
            chance.choice(world.connections).cut()
        elif kind == 7 and world.connections:
            world.now.lives = not world.now.lives
        elif kind == 8 and world.connections:
            world.unfenced ^= {chance.choice(world.connections).number}
        elif kind == 9 and len(world.regions) < 4:
            world.regions.append(region(len(world.regions)))
            tasks.start_soon(world.link.register, world.regions[-1])
        await anyio.sleep(chance.random() * 0.004)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_promises_hold_and_it_recovers(seed: int) -> None:
    async with running(rails=RAILS, regions=[region(0)], preferred=seed % 3) as world:
        chaos = Chaos(world, seed)
        async with anyio.create_task_group() as tasks:
            for _ in range(STEPS):
                await chaos.step(tasks)
            # Everything is well again but for the preferred rail, and stays so; then that is repaired, too.
            world.cut_rails = {RAILS[seed % 3]}
            world.unfenced.clear()
            broken = list(world.connections)
            for connection in broken:
                connection.lives = True
                connection.cut()
        link = world.link
        await until(lambda: link._ready is not None and link._ready.connection not in broken)
        world.cut_rails.clear()
        await until(lambda: link._ready is not None and link._ready.route.rail == seed % 3)
        await until(lambda: link.available(time.monotonic() + 60))
        await until(lambda: len(link._unfenced) == 1)
        assert chaos.owed == set(), "slots wait for a fence that never comes"
        assert sum(connection.alive for connection in world.connections) == 1
        world.now.replies = ["at last"]
        assert await world.ask() == "at last"
        assert chaos.asked == chaos.answered + chaos.failed > 20
        assert chaos.answered and chaos.failed
