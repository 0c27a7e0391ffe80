"""A link's rails and transports, its signs of life, and that it makes no storm. With scripted connections."""

from __future__ import annotations

import logging
import random

import anyio
import pytest

from memkv_vllm.engine import generation as generation_module
from memkv_vllm.engine import linklog as linklog_module
from memkv_vllm.engine import routes as routes_module
from memkv_vllm.engine.breaker import Backoff
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.errors import (
    ConnectionLost,
    RequestTimeout,
    StoreError,
)
from tests.support.link_world import FakeConnection, Step, hurry, region, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


# ------------------------------------------------------------------------------------------------ rails

RAILS = ("rail0", "rail1", "rail2")


@pytest.fixture
def _short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that failed is tried again after some 20 ms."""
    monkeypatch.setattr(routes_module, "REST_S", 0.02)


@pytest.mark.parametrize("preferred", range(3))
async def test_a_process_uses_its_own_rail(preferred: int) -> None:
    async with running(rails=RAILS, preferred=preferred) as world:
        assert (await world.ready()).host == RAILS[preferred]
        route = world.link.statistics().route
        assert route is not None and route.rail == preferred
        assert world.tried == [RAILS[preferred]]


async def test_a_rail_that_is_cut_is_left_for_the_next_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """One attempt, no pause: the other rails are the reason to have them."""
    async with running(rails=RAILS, preferred=1, cut_rails={"rail1"}) as world:
        assert (await world.ready()).host == "rail2"
        assert world.tried == ["rail1", "rail2"]
        assert world.link.statistics().connect_failures == 1
        await until(lambda: any("event=second_choice" in record.getMessage() for record in caplog.records))
        (line,) = [record.getMessage() for record in caplog.records if "event=second_choice" in record.getMessage()]
        assert "using='fake rail2:1'" in line and "no way to rail1" in line
        assert not any("event=server_down" in record.getMessage() for record in caplog.records), "nothing is down"


async def test_the_preferred_rail_is_no_second_choice_when_it_is_tried_last(caplog: pytest.LogCaptureFixture) -> None:
    """It rests, so the others come first; they fail, and it works: there is nothing better to go back to."""
    async with running(rails=RAILS) as world:
        connection = await world.ready()
        world.cut_rails |= {"rail1", "rail2"}
        connection.replies = [RequestTimeout("late")]
        with pytest.raises(RequestTimeout):
            await world.ask()
        assert (await world.ready(2)).host == "rail0"
        assert world.tried == ["rail0", "rail1", "rail2", "rail0"]
    assert not any("event=second_choice" in record.getMessage() for record in caplog.records)


async def test_a_rail_dies_under_a_connection() -> None:
    """The rail rests: the next attempt does not wait for it a second time."""
    async with running(rails=RAILS) as world:
        connection = await world.ready()
        connection.replies = [RequestTimeout("late")]
        with pytest.raises(RequestTimeout):
            await world.ask()
        assert (await world.ready(2)).host == "rail1"
        assert world.tried == ["rail0", "rail1"]


async def test_a_server_that_restarts_is_found_on_the_preferred_rail() -> None:
    """A connection that the server ended says nothing against its rail."""
    async with running(rails=RAILS, preferred=2) as world:
        (await world.ready()).cut()
        assert (await world.ready(2)).host == "rail2"


@pytest.mark.usefixtures("_short_rest")
async def test_a_server_that_was_away_on_every_rail_is_found_on_the_preferred_one() -> None:
    async with running(rails=RAILS, preferred=1, cut_rails=set(RAILS)) as world:
        await until(lambda: len(world.tried) > 6)
        world.cut_rails.clear()
        await until(lambda: world.link.connected and world.now.host == "rail1")


@pytest.mark.usefixtures("_short_rest")
async def test_it_comes_back_to_the_preferred_rail_without_dropping_what_is_under_way() -> None:
    """Make before break: the requests under way end on the old connection, the next ones take the new one."""
    gate = anyio.Event()

    async def late() -> str:
        await gate.wait()
        return "late, and answered"

    async with running(rails=RAILS, cut_rails={"rail0"}, regions=[region(0)]) as world:
        old = await world.ready()
        assert old.host == "rail1"
        old.replies = [late] * 5
        answers: list[str] = []

        async def ask() -> None:
            answers.append(await world.ask())

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
            await until(lambda: not old.replies)
            downs = world.changes
            world.cut_rails.clear()
            await until(lambda: world.now.host == "rail0" and world.link.holder.generation > 1)
            assert world.link.connected and old.alive, "both at once"
            new = world.now
            assert new.registered == [0], "before the first request"
            new.replies = ["new"]
            assert await world.ask() == "new"
            assert answers == [] and world.fenced == []
            assert world.changes == downs + 1, "it was never down"
            gate.set()
        assert answers == ["late, and answered"] * 5
        await until(lambda: not old.alive and world.fenced == [Holder("a", 1)])
        assert world.link.statistics().moves == 1
        assert new.alive


@pytest.mark.usefixtures("_short_rest")
async def test_it_goes_on_over_the_second_choice_while_the_first_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    """Attempts fail again and again: no request notices, and the log has one line of it."""
    async with running(rails=RAILS, cut_rails={"rail0"}) as world:
        connection = await world.ready()
        while world.tried.count("rail0") < 10:
            connection.replies = ["pong"]
            assert await world.ask() == "pong"
            await anyio.sleep(0.001)
        assert world.connections == [connection] and world.link.holder.generation == 1
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@pytest.mark.usefixtures("_short_rest")
@pytest.mark.parametrize("step", ["on_register", "on_greet"])
async def test_a_better_way_whose_set_up_fails_does_not_take_over(step: str) -> None:
    async def fail() -> None:
        if world.now.host == "rail0":
            raise StoreError("not now")

    async with running(rails=RAILS, cut_rails={"rail0"}, regions=[region(0)], **{step: fail}) as world:
        old = await world.ready()
        world.cut_rails.clear()
        await until(lambda: len(world.connections) >= 4)
        assert world.link.holder.generation == 1 and old.alive
        assert world.link.statistics().moves == 0
        await until(lambda: all(not other.alive for other in world.connections[1:-1]))


@pytest.mark.usefixtures("_short_rest")
async def test_the_connection_in_use_dies_while_a_better_way_is_set_up() -> None:
    """The half-made one is given up and all ways are tried anew; nothing is left over."""
    stuck = anyio.Event()

    async def hang() -> None:
        if world.now.host == "rail0" and not stuck.is_set():
            stuck.set()
            await anyio.sleep_forever()

    async with running(rails=RAILS, cut_rails={"rail0"}, on_greet=hang) as world:
        old = await world.ready()
        world.cut_rails.clear()
        await stuck.wait()
        half_made = world.now
        old.cut()
        await until(lambda: world.link.connected and world.link.holder.generation > 2)
        await until(lambda: not half_made.alive and half_made.fence_tries)
        assert len(world.link._unfenced) <= 2


@pytest.mark.usefixtures("_short_rest")
async def test_a_region_that_comes_while_a_better_way_is_set_up_is_on_both() -> None:
    go = anyio.Event()
    waits = [True]

    async def wait() -> None:
        if world.now.host == "rail0" and waits:
            waits.clear()
            await go.wait()

    async with running(rails=RAILS, cut_rails={"rail0"}, regions=[region(0)], on_register=wait) as world:
        old = await world.ready()
        world.cut_rails.clear()
        await until(lambda: world.now.host == "rail0" and world.now.registered)
        new = world.now
        world.regions.append(region(1))
        await world.link.register(region(1))
        assert (old.registered, new.registered) == ([0, 1], [0])
        go.set()
        await until(lambda: world.link.statistics().moves == 1)
        assert new.registered == [0, 1]


@pytest.mark.usefixtures("_short_rest")
async def test_rails_that_lead_to_different_servers(caplog: pytest.LogCaptureFixture) -> None:
    """Two servers under one entry: its blocks would be looked for on either. Said, and not used."""
    ids = {"rail0": b"x" * 16}
    async with running(rails=RAILS, cut_rails={"rail0"}, server_ids=ids) as world:
        old = await world.ready()
        world.cut_rails.clear()
        await until(lambda: len(world.connections) >= 3)
        assert world.link.holder.generation == 1 and old.alive and old.pings >= 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "event=rails_differ server=a" in line and (b"x" * 16).hex() in line


@pytest.mark.usefixtures("_short_rest")
async def test_a_server_that_was_replaced_is_not_taken_for_a_stranger() -> None:
    """The connection in use is dead and nobody has noticed: what answers on the other rail is the new server."""
    async with running(rails=RAILS, cut_rails={"rail0"}, server_ids={"rail0": b"x" * 16}) as world:
        old = await world.ready()
        old.lives = False
        world.link._settings = world.link._settings._replace(connect_timeout_s=0.05)
        world.cut_rails.clear()
        await until(lambda: world.link.statistics().moves == 1)
        assert world.now.host == "rail0"


# ------------------------------------------------------------------------------------------------ signs of life


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed after some milliseconds."""
    monkeypatch.setattr(generation_module, "QUIET_S", 0.02)
    monkeypatch.setattr(generation_module, "IDLE_S", 0.05)
    monkeypatch.setattr(generation_module, "PING_TIMEOUT_S", 0.03)


@pytest.mark.usefixtures("_impatient")
async def test_a_server_that_is_silent_and_does_not_answer_a_ping_is_given_up() -> None:
    """P046: its requests need not wait for their own deadlines (here 5 s); their slots wait for the fence."""
    async with running(unfenced={1}) as world:
        connection = await world.ready()
        connection.lives = False
        connection.replies = [until_closed(connection)] * 4
        lost = 0

        async def ask() -> None:
            nonlocal lost
            with pytest.raises(ConnectionLost):
                await world.ask()
            lost += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            await until(lambda: lost == 4)
        assert connection.pings == generation_module.PING_TRIES
        assert world.link.statistics().silences == 1
        await world.ready(2)
        assert world.fenced == [], "only the fence frees what they named"
        world.unfenced.clear()
        await until(lambda: world.fenced == [Holder("a", 1)])


def until_closed(connection: FakeConnection) -> Step:
    """A reply that ends with its connection."""

    async def reply() -> Exception:
        await connection.ended.wait()
        return ConnectionLost("closed")

    return reply


@pytest.mark.usefixtures("_impatient")
async def test_a_busy_server_that_answers_pings_is_waited_for() -> None:
    """A transfer that takes longer than the silence that is noticed is no fault."""
    gate = anyio.Event()

    async def slow() -> str:
        await gate.wait()
        return "done"

    async with running() as world:
        connection = await world.ready()
        connection.replies = [slow]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.ask)
            await until(lambda: connection.pings >= 5)
            gate.set()
        assert connection.alive and world.link.holder.generation == 1
        assert world.link.statistics().silences == 0


@pytest.mark.usefixtures("_impatient")
async def test_an_answer_is_a_sign_of_life() -> None:
    """While others are answered, nobody asks: a PING per request would be paid by every engine."""
    async with running() as world:
        connection = await world.ready()
        for _ in range(40):
            connection.replies = ["pong"]
            await world.ask()
            await anyio.sleep(0.004)
        assert connection.pings <= 2


@pytest.mark.usefixtures("_impatient")
async def test_a_request_that_timed_out_leaves_the_question_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short probes come and go, each with a deadline below the silence that is noticed: it is noticed all the same."""
    monkeypatch.setattr(generation_module, "IDLE_S", 600.0)
    async with running() as world:
        connection = await world.ready()
        connection.lives = False
        connection.replies = [RequestTimeout("late")]
        with pytest.raises(RequestTimeout):
            await world.ask(names_memory=False)
        await world.ready(2)
        assert world.link.statistics().silences == 1


@pytest.mark.usefixtures("_impatient")
async def test_an_idle_connection_is_asked_now_and_then() -> None:
    """Its server went without a word: the first request after the pause must not be the one to find out."""
    async with running() as world:
        connection = await world.ready()
        await until(lambda: connection.pings >= 2)
        connection.lives = False
        await world.ready(2)
        assert not connection.alive


@pytest.mark.usefixtures("_impatient")
async def test_one_late_answer_is_not_enough() -> None:
    """This process stood still, so the first PING's answer was read too late; the second one's is not."""
    async with running() as world:
        connection = await world.ready()
        connection.lives = False
        connection.replies = [until_closed(connection)]
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(ConnectionLost):
                    await world.ask()

            tasks.start_soon(ask)
            await until(lambda: connection.pings == 2)
            connection.lives = True
            await until(lambda: connection.pings >= 4)
            assert connection.alive
            connection.cut()


@pytest.mark.usefixtures("_impatient")
async def test_a_silent_rail_is_left_for_another() -> None:
    async with running(rails=RAILS) as world:
        connection = await world.ready()
        connection.lives = False
        await until(lambda: world.link.connected and world.now.host == "rail1")


# ------------------------------------------------------------------------------------------------ no storm


class NotedBackoff(Backoff):
    """Remembers the delays that it gave."""

    def __init__(self, first_s: float, max_s: float) -> None:
        super().__init__(first_s, max_s, random.random)
        self.given: list[float] = []

    def next_delay(self) -> float:
        self.given.append(super().next_delay())
        return self.given[-1]


async def test_a_server_that_comes_and_goes_is_not_a_storm(caplog: pytest.LogCaptureFixture) -> None:
    """P079: it accepts, is ready, and is gone, with another reason each time. Attempts back off, lines are few."""
    async with running() as world:
        world.link._backoff = backoff = NotedBackoff(0.001, 0.016)
        for number in range(1, 41):
            (await world.ready(number)).cut(ConnectionLost(f"reason {number}"))
            await until(lambda: not world.link.connected or len(world.connections) > number)  # noqa: B023
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) <= linklog_module.LINES_AT_ONCE
    assert min(backoff.given[8:]) >= 0.008, "a connection that never answered anything does not start the backoff anew"


async def test_after_a_useful_connection_it_is_tried_at_once() -> None:
    async with running() as world:
        for number in range(1, 6):
            connection = await world.ready(number)
            connection.replies = ["pong"]
            await world.ask()
            assert world.link._backoff.attempts == (1 if number > 1 else 0)
            connection.cut()
            await until(lambda: len(world.connections) > number)  # noqa: B023


async def test_the_same_line_is_not_said_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as world:
        for number in range(1, 20):
            (await world.ready(number)).cut(ConnectionLost("cut"))
            await until(lambda: len(world.connections) > number)  # noqa: B023
        world.link._log._said_at -= 2 * linklog_module.LINE_EVERY_S
        (await world.ready(20)).cut(ConnectionLost("cut"))
        await until(lambda: len(world.connections) > 20)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2
    assert "18 lines about it were left out" in lines[1]
