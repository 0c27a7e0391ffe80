"""Ways to a server: their order, and when a better one is due again. Time and chance are arguments."""

from __future__ import annotations

import pytest

from memkv_vllm.config import RailAddress, ServerAddress, parse_servers
from memkv_vllm.engine.routes import Route, Routes, routes_of

SERVER = ServerAddress("s", (RailAddress("10.0.0.1", 9900), RailAddress("10.0.1.1", 9900), RailAddress("fd00::1", 99)))


def middle() -> float:
    """Rests last exactly as long as they say."""
    return 0.5


def three() -> tuple[Routes, Route, Route, Route]:
    first, second, third = routes_of(SERVER, ["tcp"], 0)
    return Routes([first, second, third], middle, rest_s=60.0), first, second, third


@pytest.mark.parametrize(("preferred", "rails"), [(0, [0, 1, 2]), (1, [1, 2, 0]), (2, [2, 0, 1]), (7, [1, 2, 0])])
def test_each_process_begins_with_its_own_rail(preferred: int, rails: list[int]) -> None:
    assert [route.rail for route in routes_of(SERVER, ["tcp"], preferred)] == rails


def test_ranks_share_out_the_rails() -> None:
    first = [routes_of(SERVER, ["verbs"], rank)[0].rail for rank in range(9)]
    assert sorted(first) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_better_transport_over_any_rail_comes_before_a_worse_one() -> None:
    ways = routes_of(SERVER, ["verbs", "tcp"], 1)
    assert [(way.transport, way.rail) for way in ways] == [
        ("verbs", 1), ("verbs", 2), ("verbs", 0), ("tcp", 1), ("tcp", 2), ("tcp", 0),
    ]  # fmt: skip
    assert str(ways[1]) == "verbs [fd00::1]:99"
    assert (ways[0].address, ways[1].address) == (f"{ways[0].host}:{ways[0].port}", "[fd00::1]:99")


def test_the_settings_grammar_gives_the_rails() -> None:
    (server,) = parse_servers("s=10.0.0.1|10.0.1.1:9901")
    assert [str(way) for way in routes_of(server, ["tcp"], 0)] == ["tcp 10.0.0.1:9900", "tcp 10.0.1.1:9901"]


def test_a_way_that_failed_comes_last_until_it_has_rested() -> None:
    ways, first, second, third = three()
    assert ways.order(0.0) == [first, second, third]
    ways.failed(first, 0.0)
    assert ways.order(59.9) == [second, third, first]
    assert ways.order(60.0) == [first, second, third]


def test_when_all_have_failed_the_preference_decides_again() -> None:
    """The server was down as a whole: the ranks must not all come back over its last rail."""
    ways, first, second, third = three()
    for number, way in enumerate((first, second, third)):
        ways.failed(way, float(number))
    assert ways.order(10.0) == [first, second, third]


def test_a_way_that_works_rests_no_longer() -> None:
    ways, first, second, third = three()
    ways.failed(first, 0.0)
    ways.worked(first)
    assert ways.order(1.0) == [first, second, third]
    assert "0 rest" in repr(ways)


def test_better_ways_and_when_they_are_due() -> None:
    ways, first, second, third = three()
    assert ways.next_probe(first) is None, "there is none"
    ways.failed(first, 0.0)
    ways.failed(second, 10.0)
    assert ways.next_probe(third) == 60.0
    assert ways.better(third, 59.0) == []
    assert ways.better(third, 60.0) == [first]
    assert ways.better(third, 70.0) == [first, second]
    ways.failed(first, 60.0)
    assert ways.next_probe(third) == 70.0, "each has a rest of its own"
    assert ways.next_probe(second) == 120.0


def test_a_better_way_that_never_failed_is_due_at_once() -> None:
    ways, first, second, _ = three()
    due = ways.next_probe(second)
    assert due is not None and due <= 0.0
    assert ways.better(second, 5.0) == [first]


@pytest.mark.parametrize(("chance", "rest_s"), [(0.0, 45.0), (1.0, 75.0)])
def test_rests_differ_between_clients(chance: float, rest_s: float) -> None:
    """Those that lost a rail together do not all try it in the same moment."""
    first, second, _ = routes_of(SERVER, ["tcp"], 0)
    ways = Routes([first, second], lambda: chance, rest_s=60.0)
    ways.failed(first, 0.0)
    assert ways.next_probe(second) == rest_s


def test_no_way_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one way"):
        Routes([], middle)
