"""What a link knows after its first round, for an engine that may have to refuse its start; and what it expects."""

from __future__ import annotations

import anyio
import pytest

from memkv_vllm.engine.verdict import FirstVerdict
from memkv_vllm.errors import ConnectError, ConnectionLost, DataPathError
from tests.support.link_world import World, hurry, region, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def decided(world: World) -> str:
    with anyio.fail_after(5):
        await world.link.verdict.wait_known()
    return world.link.verdict.problem


async def test_a_ready_connection_is_a_good_verdict() -> None:
    async with running() as world:
        assert await decided(world) == ""


async def test_a_server_that_is_not_there_is_no_problem_of_the_start() -> None:
    async with running(cut_rails={"rail0"}) as world:
        assert await decided(world) == ""


async def test_a_server_that_answers_and_does_not_reach_the_memory_is() -> None:
    async def refuse() -> None:
        raise DataPathError("no queue pair")

    async with running(regions=[region(1)], on_register=refuse) as world:
        assert await decided(world) == "no queue pair"


async def test_one_way_that_works_outweighs_the_others() -> None:
    async with running(rails=("rail0", "rail1"), refusals=[DataPathError("no rail")]) as world:
        assert await decided(world) == ""
        assert world.link.connected


async def test_a_broken_path_beside_a_silent_one_is_a_problem() -> None:
    async with running(
        rails=("rail0", "rail1"), refusals=[DataPathError("no rail"), ConnectError("nobody there")]
    ) as world:
        assert await decided(world) == "no rail"


async def test_each_reason_is_given_once() -> None:
    async with running(rails=("rail0", "rail1"), refusals=[DataPathError("no rail")] * 2) as world:
        assert await decided(world) == "no rail"


async def test_what_fails_later_is_no_problem_of_the_start() -> None:
    async with running() as world:
        assert await decided(world) == ""
        world.refusals.append(DataPathError("later"))
        (await world.ready()).cut(ConnectionLost("cut"))
        await until(lambda: not world.refusals)
        assert world.link.verdict.problem == ""


async def test_it_is_not_known_before_every_way_was_tried() -> None:
    verdict = FirstVerdict()
    verdict.failed(DataPathError("first rail"))
    with anyio.move_on_after(0.01) as scope:
        await verdict.wait_known()
    assert scope.cancelled_caught
    assert verdict.problem == "first rail", "at the time limit it counts all the same"


@pytest.mark.parametrize(("rails", "ranks", "share"), [(1, 1, 1.0), (8, 8, 1.0), (2, 8, 0.25), (4, 1, 1.0)], ids=str)
async def test_ranks_share_what_the_rails_carry(rails: int, ranks: int, share: float) -> None:
    """P078: eight ranks on two rails cannot each have a whole one, and must not be called slow for it."""
    names = tuple(f"rail{number}" for number in range(rails))
    async with running(rails=names, ranks=ranks, expected_bytes_per_s=50e9) as world:
        await world.ready()
        assert world.link._pace.expected == pytest.approx(50e9 * share)


async def test_an_unknown_rate_expects_nothing() -> None:
    async with running() as world:
        await world.ready()
        assert world.link._pace.expected is None
