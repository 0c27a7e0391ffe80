"""``transport: auto`` (tier): verbs where it works, else tcp, for each server by itself, and back. P072, spec 4.1.

Scripted servers that can be reached over both; which of them works is the test's choice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from memkv_vllm.engine import routes as routes_module
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports import registry
from memkv_vllm.types import Direction
from tests.support.ranks import Rank, eventually, lookups, prefix_of, rank, staging_plan
from tests.support.scripted_transport import Gate, Script, ScriptedConnection, scripted

pytestmark = pytest.mark.fault

MODULE = "tests.support.scripted_transport"


@pytest.fixture(autouse=True)
def _transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are scripted, and a way that failed is tried again after a moment."""
    monkeypatch.setitem(registry._CLIENTS, "tcp", (MODULE, "ScriptedTcp"))
    monkeypatch.setitem(registry._CLIENTS, "verbs", (MODULE, "ScriptedVerbs"))
    monkeypatch.setattr(routes_module, "REST_S", 0.05)


@contextmanager
def auto(*names: str, verbs: bool = True) -> Iterator[tuple[Rank, dict[str, Script]]]:
    """A rank with ``auto``; with ``verbs`` false no server can be reached over it at first."""
    with scripted(*names) as (settings, scripts):
        if not verbs:
            for script in scripts.values():
                script.accepts_verbs.shut()
        with rank(replace(settings, transport="auto"), plan=staging_plan(16)) as one:
            yield one.ready(len(names)), scripts


def in_use(one: Rank) -> dict[str, str]:
    """Transport of the ready connection, by server."""
    links = one.engine._core.client.links
    routes = {name: link.statistics().route for name, link in links.items()}
    return {name: route.transport for name, route in routes.items() if route is not None}


def moves(one: Rank) -> int:
    """Connections that took over from a working one."""
    return sum(link.statistics().moves for link in one.engine._core.client.links.values())


def check(one: Rank, numbers: range) -> None:
    """Everything can be loaded."""
    result = one.loaded(numbers)
    assert (result.lost, one.wrong(result, numbers)) == ({}, [])


def test_verbs_is_used_where_it_works_and_tcp_where_not() -> None:
    with scripted("a", "b") as (settings, scripts):
        scripts["b"].accepts_verbs.shut()
        with rank(replace(settings, transport="auto")) as one:
            one.ready(2).stored(range(20))
            assert in_use(one) == {"a": "verbs", "b": "tcp"}
            assert one.engine._core.client.connects == {"verbs": 1, "tcp": 1}
            check(one, range(20))


def test_a_server_that_gets_verbs_back_is_used_over_it_again_and_nothing_under_way_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Make before break: gets under way over tcp are answered over tcp, the next go over verbs."""
    caplog.set_level(logging.INFO, "memkv.engine")
    with auto("a", verbs=False) as (one, scripts):
        script = scripts["a"]
        one.stored(range(20))
        gate = Gate(is_open=False)

        async def held(connection: ScriptedConnection, request: Any) -> None:
            if connection.transport == "tcp":
                await gate.passed()

        script.on_get = held
        job = one.load(range(8))
        eventually(lambda: gate.waiting, "gets are under way over tcp")
        script.accepts_verbs.open()
        eventually(lambda: in_use(one) == {"a": "verbs"}, "it has moved")
        assert job not in one.poll() and gate.waiting, "they are still under way"
        assert one.loaded(range(8, 12)).lost == {}, "over verbs"
        gate.open()
        result = one.result(job)
        assert (result.direction, result.lost, one.wrong(result, range(8))) == (Direction.LOAD, {}, [])
        one.idle()
        old = [connection for connection in script.connections if connection.transport == "tcp"]
        eventually(lambda: not any(connection.alive for connection in old), "the old connection ends")
        assert moves(one) == 1
        assert one.engine._core.client.connects == {"tcp": 1, "verbs": 1}
        lines = [record.getMessage() for record in caplog.records]
        assert sum("event=moved server=a away_from='tcp " in line for line in lines) == 1
        assert sum("event=connected server=a generation=1 transport=tcp" in line for line in lines) == 1


def test_verbs_that_comes_and_goes_loses_only_what_was_under_way_over_it() -> None:
    with auto("a") as (one, scripts):
        script = scripts["a"]
        one.stored(range(20))
        for round_number in range(1, 6):
            assert in_use(one) == {"a": "verbs"}
            script.accepts_verbs.shut()
            script.connections[-1].cut()
            eventually(lambda: in_use(one) == {"a": "tcp"}, "it fell back")
            check(one, range(20))
            script.accepts_verbs.open()
            eventually(lambda: in_use(one) == {"a": "verbs"}, "it came back")
            check(one, range(20))
            assert moves(one) == round_number
        one.idle()
        eventually(lambda: sum(connection.alive for connection in script.connections) == 1, "one connection is left")


def test_under_load_nothing_is_lost_while_servers_move() -> None:
    """Stores and loads all the time; every move happens in the middle of them."""
    with auto("a", "b", "c", verbs=False) as (one, scripts):
        one.stored(range(30))
        jobs = []
        for name, script in scripts.items():
            script.accepts_verbs.open()
            while in_use(one)[name] == "tcp":
                jobs.append(one.load(range(30)))
                one.result(jobs[-1])
        assert {tuple(one.result(job).lost) for job in jobs} == {()}
        assert moves(one) == 3
        check(one, range(30))
        one.idle()


def test_without_verbs_on_this_host_all_servers_use_tcp_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._CLIENTS, "verbs", ("memkv_vllm.transports.not_in_this_version", "X"))
    with auto("a", "b", "c") as (one, _):
        assert in_use(one) == dict.fromkeys("abc", "tcp")
        client = one.engine._core.client
        eventually(lambda: client.links["a"].statistics().connect_failures >= 3, "it is tried again in vain")
        one.stored(range(10))
        check(one, range(10))
        assert moves(one) == 0
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "event=transport_unavailable transport=verbs" in line.getMessage()
    assert "not part of this version" in line.getMessage()


def test_the_scheduler_side_chooses_in_the_same_way() -> None:
    """Its connects are what the metric ``connects`` counts by transport."""
    with scripted("a") as (settings, scripts):
        scripts["a"].accepts_verbs.shut()

        async def greeting(connection: ScriptedConnection, request: Any) -> Any:
            return [False] * len(request.prefixes) if hasattr(request, "prefixes") else []

        scripts["a"].on_request = greeting
        with lookups(replace(settings, transport="auto")) as seen:
            seen.ready().ask(range(5))
            assert seen.prober.statistics().connects == {"tcp": 1}
            scripts["a"].accepts_verbs.open()
            eventually(lambda: seen.prober.statistics().connects == {"tcp": 1, "verbs": 1}, "it moves")
            seen.ask(range(5))
            assert seen.prober.servers_lost == 0, "it was never away"


@pytest.mark.parametrize("transport", ["verbs", "tcp"])
def test_a_named_transport_stays_what_it_is(transport: str) -> None:
    """P072: the other way works, and is never taken."""
    with scripted("a") as (settings, scripts):
        script = scripts["a"]
        mine, other = (script.accepts_verbs, script.accepts)[:: 1 if transport == "verbs" else -1]
        with rank(replace(settings, transport=transport)) as one:
            one.ready()
            mine.shut()
            script.connections[-1].cut()
            eventually(lambda: one.engine._core.client.links["a"].statistics().connect_failures >= 3, "it is tried")
            assert one.statistics.servers_ready == 0 and other.is_open
            assert {connection.transport for connection in script.connections} == {transport}
            mine.open()
            one.ready()
            assert one.engine._core.client.owner(prefix_of(1)).connected


def test_a_named_transport_that_is_missing_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._CLIENTS, "verbs", ("memkv_vllm.transports.not_in_this_version", "X"))
    with scripted("a") as (settings, _), pytest.raises(EnvironmentFault, match="not part of this version"):
        with rank(replace(settings, transport="verbs")):
            raise AssertionError("it started")
