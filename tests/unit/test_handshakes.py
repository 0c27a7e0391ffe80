"""Who has to go when all places of handshakes are taken."""

from __future__ import annotations

import anyio
import pytest

from memkv_vllm.transports.handshakes import Handshake, Handshakes

pytestmark = pytest.mark.anyio


class Driven:
    """Handshakes whose drivers end as soon as they are cut."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.handshakes = Handshakes()
        self.tasks = tasks

    def begin(self, origin: str, count: int = 1) -> list[Handshake]:
        made = [self.handshakes.begin(origin) for _ in range(count)]
        for handshake in made:
            self.tasks.start_soon(self._drive, handshake)
        return made

    async def _drive(self, handshake: Handshake) -> None:
        with handshake.scope:
            await anyio.sleep_forever()
        self.handshakes.end(handshake)
        handshake.departed.set()


async def test_the_oldest_of_the_greediest_goes() -> None:
    async with anyio.create_task_group() as tasks:
        driven = Driven(tasks)
        modest, greedy = driven.begin("modest", 2), driven.begin("greedy", 5)
        assert await driven.handshakes.make_room("newcomer")
        assert [handshake.was_cut for handshake in greedy] == [True, False, False, False, False]
        assert greedy[0].departed.is_set()
        assert not any(handshake.was_cut for handshake in modest)
        assert len(driven.handshakes) == 6
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("held", "makes_room"), [(0, True), (1, True), (2, False), (3, False)])
async def test_nobody_goes_for_one_that_would_hold_as_many(held: int, makes_room: bool) -> None:
    async with anyio.create_task_group() as tasks:
        driven = Driven(tasks)
        driven.begin("other", 3)
        driven.begin("newcomer", held)
        assert await driven.handshakes.make_room("newcomer") is makes_room
        tasks.cancel_scope.cancel()


async def test_one_host_never_displaces_itself() -> None:
    async with anyio.create_task_group() as tasks:
        driven = Driven(tasks)
        driven.begin("", 10)
        assert not await driven.handshakes.make_room("")
        assert not await Handshakes().make_room("")
        tasks.cancel_scope.cancel()


async def test_what_is_authenticated_is_not_displaced() -> None:
    async with anyio.create_task_group() as tasks:
        driven = Driven(tasks)
        made = driven.begin("greedy", 3)
        for handshake in made:
            driven.handshakes.end(handshake)
            driven.handshakes.end(handshake)
        assert not await driven.handshakes.make_room("newcomer")
        assert not any(handshake.was_cut for handshake in made)
        tasks.cancel_scope.cancel()


async def test_newcomers_at_once_displace_different_ones() -> None:
    async with anyio.create_task_group() as tasks:
        driven = Driven(tasks)
        made = driven.begin("greedy", 6)
        made_room: list[bool] = []

        async def come(number: int) -> None:
            made_room.append(await driven.handshakes.make_room(f"newcomer {number}"))

        async with anyio.create_task_group() as newcomers:
            for number in range(4):
                newcomers.start_soon(come, number)
        assert made_room == [True] * 4
        assert [handshake.was_cut for handshake in made] == [True] * 4 + [False] * 2
        tasks.cancel_scope.cancel()
