"""One server's link: connect, set up, serve, condemn, fence, again. With scripted connections and no thread."""

from __future__ import annotations

import logging
import time

import anyio
import pytest

from memkv_vllm.engine import link as link_module
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.errors import (
    AuthError,
    ConnectError,
    ConnectionLost,
    LocalProtocolError,
    MemkvError,
    NotSent,
    RemoteProtocolError,
    RequestTimeout,
    StoreError,
)
from tests.support.link_world import hurry, region, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


# ------------------------------------------------------------------------------------------------ connecting


async def test_it_connects_registers_and_is_ready() -> None:
    async with running(regions=[region(0), region(1)]) as world:
        connection = await world.ready()
        assert connection.registered == [0, 1]
        assert world.link.holder == Holder("a", 1)
        assert world.link.available(time.monotonic())
        assert world.link.max_batch_keys == 77
        connection.replies = ["pong"]
        assert await world.ask() == "pong"
        assert world.link.statistics()[:4] == (True, 1, 1, 0)


async def test_a_request_without_a_connection_says_why() -> None:
    async with running(refusals=[AuthError("wrong key")] * 10_000) as world:
        await until(lambda: world.connects > 3)
        assert not world.link.connected and not world.link.available(time.monotonic())
        with pytest.raises(ConnectError, match=r"server a is not connected: wrong key"):
            await world.ask()


async def test_each_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[MemkvError] = []
    for error in (ConnectError("no server"), AuthError("wrong key"), ConnectError("none")):
        errors += [error] * 4
    async with running(refusals=errors) as world:
        await world.ready()
        assert world.link.statistics().connect_failures == 12
    lines = [record.getMessage() for record in caplog.records if "event=server_down" in record.getMessage()]
    assert [reason in line for reason, line in zip(("no server", "wrong key", "none"), lines, strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize("step", ["on_register", "on_greet"])
@pytest.mark.parametrize("error", [StoreError("limit"), RequestTimeout("no answer"), ConnectionLost("cut")], ids=repr)
async def test_a_set_up_that_fails_is_tried_again(step: str, error: MemkvError) -> None:
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise error

    async with running(regions=[region(0)], **{step: fail}) as world:
        await world.ready(4)
        assert world.link.holder.generation == 4
        assert world.link.statistics().connects == 1
        assert all(not connection.alive for connection in world.connections[:3])
        await until(lambda: len(world.fenced) == 3)


async def test_a_connection_that_ends_during_its_set_up() -> None:
    async def never() -> None:
        if world.now.number == 1:
            world.now.cut()
            await anyio.sleep_forever()

    async with running(on_greet=never) as world:
        await world.ready(2)
        assert world.link.holder.generation == 2


async def test_a_connection_that_was_given_up_as_its_set_up_ended_is_not_used() -> None:
    async def give_up() -> None:
        if world.now.number == 1:
            (generation,) = world.link._unfenced.values()
            generation.retire(ConnectionLost("given up"))

    async with running(regions=[region(0)], on_register=give_up) as world:
        await world.ready(2)
        assert world.link.holder.generation == 2
        assert world.changes == 1, "it was never ready before"
        assert world.link.statistics().connects == 1


async def test_it_comes_back_under_a_new_generation() -> None:
    async with running(regions=[region(0)]) as world:
        for number in range(1, 4):
            connection = await world.ready(number)
            assert world.link.holder == Holder("a", number)
            connection.cut()
            await until(lambda: world.changes >= 2 * number)  # noqa: B023
        await world.ready(4)
        assert [connection.registered for connection in world.connections] == [[0]] * 4
        await until(lambda: world.fenced == [Holder("a", 1), Holder("a", 2), Holder("a", 3)])
        assert world.link.statistics().fences == 3


async def test_cancelling_closes_the_connection() -> None:
    async with running() as world:
        connection = await world.ready()
    assert not connection.alive
    assert not world.link.connected


# ------------------------------------------------------------------------------------------------ regions


async def test_a_region_that_comes_later_is_registered_once() -> None:
    async with running(regions=[region(0)]) as world:
        connection = await world.ready()
        world.regions.append(region(1))
        await world.link.register(region(1))
        await world.link.register(region(1))
        assert connection.registered == [0, 1]
        connection.cut()
        assert (await world.ready(2)).registered == [0, 1]


async def test_a_region_that_comes_during_the_set_up_is_registered_once() -> None:
    go = anyio.Event()
    async with running(regions=[region(0)], on_register=go.wait) as world:
        await until(lambda: world.connections and world.now.registered == [0])
        world.regions.append(region(1))
        await world.link.register(region(1))
        assert not world.link.connected
        go.set()
        connection = await world.ready()
        await world.link.register(region(1))
        assert connection.registered == [0, 1]


async def test_a_region_that_is_refused_ends_the_connection() -> None:
    async with running() as world:
        await world.ready()

        async def refuse() -> None:
            if world.now.number == 1:
                raise StoreError("one region too many")

        world.on_register = refuse
        world.regions.append(region(1))
        await world.link.register(region(1))
        assert (await world.ready(2)).registered == [1]


# ------------------------------------------------------------------------------------------------ requests that fail


@pytest.mark.parametrize(
    "error", [RequestTimeout("late"), ConnectionLost("cut"), RemoteProtocolError("type", "nonsense")], ids=repr
)
async def test_a_request_that_names_memory_and_fails_condemns_its_connection(error: MemkvError) -> None:
    async with running() as world:
        connection = await world.ready()
        connection.replies = [error]
        with pytest.raises(type(error)):
            await world.ask()
        assert not world.link.connected, "at once"
        await world.ready(2)
        assert not connection.alive
        await until(lambda: world.fenced == [Holder("a", 1)])


@pytest.mark.parametrize("error", [StoreError("refused"), LocalProtocolError("too large")], ids=repr)
async def test_a_request_that_is_refused_does_not(error: MemkvError) -> None:
    async with running() as world:
        connection = await world.ready()
        for _ in range(10):
            connection.replies = [error]
            with pytest.raises(type(error)):
                await world.ask()
        assert world.link.available(time.monotonic())
        assert world.fenced == [] and len(world.connections) == 1


async def test_timeouts_of_requests_without_memory_open_the_breaker() -> None:
    async with running() as world:
        connection = await world.ready()
        connection.replies = [RequestTimeout("late"), RequestTimeout("late"), "pong"]
        for _ in range(2):
            with pytest.raises(RequestTimeout):
                await world.ask(names_memory=False)
            assert world.link.available(time.monotonic())
        await world.ask(names_memory=False)
        connection.replies = [RequestTimeout("late")] * 3
        for _ in range(3):
            with pytest.raises(RequestTimeout):
                await world.ask(names_memory=False)
        assert not world.link.connected, "and with the breaker goes the connection"
        await world.ready(2)
        assert not world.link.available(time.monotonic())
        assert world.link.available(time.monotonic() + 2)


async def test_the_requests_that_end_with_a_connection_are_one_failure() -> None:
    """A server that was restarted is used at once, however many requests were under way."""
    async with running() as world:
        connection = await world.ready()
        gate = anyio.Event()

        async def lost() -> Exception:
            await gate.wait()
            return ConnectionLost("cut")

        connection.replies = [lost] * 20
        failures = 0

        async def ask() -> None:
            nonlocal failures
            with pytest.raises(ConnectionLost):
                await world.ask()
            failures += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask)
            await until(lambda: not connection.replies)
            gate.set()
        assert failures == 20
        await world.ready(2)
        assert world.link.available(time.monotonic())


async def test_a_server_that_loses_every_connection_opens_the_breaker() -> None:
    async with running() as world:
        for number in range(1, 4):
            connection = await world.ready(number)
            connection.replies = [ConnectionLost("cut")]
            with pytest.raises(ConnectionLost):
                await world.ask()
        await world.ready(4)
        assert not world.link.available(time.monotonic())


async def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "memkv.engine")
    async with running() as world:
        connection = await world.ready()
        connection.replies = [RequestTimeout("the server did not answer")]
        with pytest.raises(RequestTimeout):
            await world.ask()
        await world.ready(2)
    lines = [record.getMessage() for record in caplog.records if "event=server_down" in record.getMessage()]
    assert len(lines) == 1 and "the server did not answer" in lines[0]


# ------------------------------------------------------------------------------------------------ given up


async def test_a_reply_that_says_the_server_gave_up_condemns_its_connection() -> None:
    async with running(unfenced={1}) as world:
        connection = await world.ready()
        connection.replies = ["late"]
        assert await world.ask(gave_up=lambda reply: reply == "late") == "late"
        assert not world.link.connected, "at once"
        await world.ready(2)
        assert not connection.alive
        await until(lambda: connection.fence_tries > 3)
        assert world.fenced == []
        world.unfenced.clear()
        await until(lambda: world.fenced == [Holder("a", 1)])


async def test_a_reply_of_an_older_generation_changes_nothing_but_that_it_owes() -> None:
    gate = anyio.Event()

    async def late() -> str:
        await gate.wait()
        return "late"

    async with running(unfenced={1}) as world:
        connection = await world.ready()
        connection.replies = [late]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: world.ask(gave_up=lambda _: 1))
            await until(lambda: not connection.replies)
            connection.cut()
            await world.ready(2)
            gate.set()
        assert world.link.connected and world.link.holder.generation == 2
        await until(lambda: connection.fence_tries > 3)
        assert world.fenced == [], "its slots wait"


async def test_a_server_that_gives_up_again_and_again_opens_the_breaker() -> None:
    """Its control path answers, its data path hangs: loads must not go on paying for that."""
    async with running() as world:
        for number in range(1, 4):
            connection = await world.ready(number)
            connection.replies = ["pong", "late"] if number == 1 else ["late"]
            if number == 1:
                await world.ask()
            await world.ask(gave_up=lambda _: 1)
        await world.ready(4)
        assert not world.link.available(time.monotonic())


# ------------------------------------------------------------------------------------------------ fencing


async def test_it_fences_until_it_succeeds_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running(unfenced={1}) as world:
        connection = await world.ready()
        connection.replies = [RequestTimeout("late")]
        with pytest.raises(RequestTimeout):
            await world.ask()
        await until(lambda: connection.fence_tries > 5)
        assert world.fenced == []
        assert (await world.ready(2)).alive, "it does not wait for the fence"
        world.unfenced.clear()
        await until(lambda: world.fenced == [Holder("a", 1)])
    assert sum("event=fence_pending" in record.getMessage() for record in caplog.records) == 1


async def test_generations_are_fenced_in_any_order() -> None:
    async with running(unfenced={1}) as world:
        for number in (1, 2):
            connection = await world.ready(number)
            connection.replies = [RequestTimeout("late")]
            with pytest.raises(RequestTimeout):
                await world.ask()
        await until(lambda: world.fenced == [Holder("a", 2)])
        world.unfenced.clear()
        await until(lambda: world.fenced == [Holder("a", 2), Holder("a", 1)])


async def test_a_generation_is_fenced_only_after_its_requests_have_returned() -> None:
    """Who was told of a failure has put its slots into quarantine before the quarantine ends."""
    order: list[str] = []
    gate = anyio.Event()

    async def late() -> Exception:
        await gate.wait()
        return ConnectionLost("cut")

    async with running() as world:
        world.link._on_fenced = lambda holder: order.append(f"fenced {holder.generation}")
        connection = await world.ready()
        connection.replies = [late, RequestTimeout("late")]

        async def ask() -> None:
            with pytest.raises(ConnectionLost):
                await world.ask()
            order.append("returned")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(connection.replies) == 1)
            with pytest.raises(RequestTimeout):
                await world.ask()
            await world.ready(2)
            await until(lambda: connection.fence_tries)
            gate.set()
        await until(lambda: len(order) == 2)
        assert order == ["returned", "fenced 1"]


async def test_a_connection_that_owes_nothing_is_not_fenced_for_ever() -> None:
    """Set-ups that fail with a server that never fences must not pile up tasks that wait for it."""
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        if tries < 6:
            raise RequestTimeout("no answer")

    async with running(regions=[region(0)], on_register=fail, unfenced=set(range(100))) as world:
        connection = await world.ready(6)
        connection.replies = ["pong"]
        await world.ask()
        connection.cut()
        await world.ready(7)
        await until(lambda: connection.fence_tries)
        await until(lambda: not [holder for holder in world.link._unfenced if holder.generation < 7])
        assert [old.fence_tries for old in world.connections[:6]] == [1] * 6
        assert world.fenced == []


async def test_connections_that_wait_for_their_fence_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A server whose fence never ends is not connected to for ever; once one is fenced, it is again."""
    most = link_module.MAX_UNFENCED
    async with running(unfenced=set(range(1000))) as world:
        for number in range(1, most + 1):
            connection = await world.ready(number)
            connection.replies = [RequestTimeout("late")]
            with pytest.raises(RequestTimeout):
                await world.ask()
        await until(lambda: any("not fenced" in record.getMessage() for record in caplog.records))
        assert len(world.connections) == world.connects == most
        world.unfenced.remove(3)
        await world.ready(most + 1)
        assert world.fenced == [Holder("a", 3)]


async def test_a_request_that_was_not_sent_costs_nothing() -> None:
    """Every place was taken until its deadline: the server is busy, its connection and its slots are fine."""
    async with running() as world:
        connection = await world.ready()
        for _ in range(5):
            connection.replies = [NotSent("no place"), NotSent("no place"), "pong"]
            for _ in range(2):
                with pytest.raises(NotSent):
                    await world.ask()
            await world.ask()
        assert world.link.available(time.monotonic()) and connection.alive
        connection.cut()
        await until(lambda: connection.fence_tries)
        await world.ready(2)
        assert world.link.statistics().fences <= 1


async def test_a_server_that_keeps_every_place_for_ever_is_given_up() -> None:
    """It answers nothing, so no place is ever free again: three in a row without an answer open the breaker."""
    async with running() as world:
        connection = await world.ready()
        connection.replies = [NotSent("no place")] * 3
        for _ in range(3):
            with pytest.raises(NotSent):
                await world.ask()
        await world.ready(2)
        assert not connection.alive
        assert not world.link.available(time.monotonic())
