"""The pure parts of a soak: its plan, its values, its bookkeeping, its judgements."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.soak.client_process import Heartbeat, Journal
from tests.soak.content import MAX_BYTES, MIN_BYTES, content, first_difference, length_of
from tests.soak.ledger import Ledger
from tests.soak.plan import Action, Phases, chaos_plan
from tests.soak.verdict import MUST_HAPPEN, coverage, hit_ratio, log_problems, rest_problems, server_coverage
from tests.support.actors import Growth, Held, damage

SERVERS, CLIENTS = ["memory-0", "file-1", "direct-2"], ["x", "y"]


def keys(count: int) -> list[bytes]:
    dice = random.Random(1)
    return [dice.randbytes(70) for _ in range(count)]


# ------------------------------------------------------------------------------------------------ the plan


def test_one_seed_gives_one_plan() -> None:
    one, same, other = (chaos_plan(seed, 600, SERVERS, CLIENTS, SERVERS[1:]) for seed in (3, 3, 4))
    assert one == same
    assert one != other


@pytest.mark.parametrize("duration_s", [30, 60, 1800])
@pytest.mark.parametrize("seed", range(5))
def test_a_plan_keeps_its_promises(duration_s: float, seed: int) -> None:
    plan = chaos_plan(seed, duration_s, SERVERS, CLIENTS, SERVERS[1:])
    phases = Phases.of(duration_s)
    assert plan == sorted(plan)
    assert {event.target for event in plan} == {*SERVERS, *CLIENTS}, "everybody has a bad time"
    for name in {event.target for event in plan}:
        events = [event for event in plan if event.target == name]
        assert all(a.at_s + a.for_s < b.at_s for a, b in zip(events, events[1:], strict=False)), "one thing at a time"
    for event in plan:
        assert phases.warm_up_s <= event.at_s
        assert event.at_s + event.for_s <= phases.swell_s
        if event.target in SERVERS and event.action is not Action.FREEZE:
            assert event.at_s + event.for_s <= phases.storm_s, "no server is replaced after the storm"
        if event.damage is not None:
            assert event.target in SERVERS[1:]
            assert event.action is not Action.FREEZE
            assert 0 <= event.damage < 1


def test_a_long_plan_has_every_kind_of_event() -> None:
    plan = chaos_plan(1, 1800, SERVERS, CLIENTS, SERVERS[1:])
    kinds = Counter((event.target in SERVERS, event.action) for event in plan)
    assert set(kinds) == {*((True, action) for action in Action), (False, Action.KILL), (False, Action.FREEZE)}
    assert sum(event.damage is not None for event in plan) > 10


# ------------------------------------------------------------------------------------------------ the values


def test_lengths_cover_the_range() -> None:
    lengths = [length_of(key) for key in keys(2000)]
    assert min(lengths) >= MIN_BYTES and max(lengths) <= MAX_BYTES
    assert min(lengths) < 2 * MIN_BYTES and max(lengths) > MAX_BYTES // 2
    assert any(length % 8 for length in lengths) and any(length % 4096 == 0 for length in lengths)


def test_a_value_is_known_by_its_key() -> None:
    (key, other) = keys(2)
    value = content(key, 100_001)
    assert first_difference(key, content(key, 100_001)) is None
    assert np.mean(value == content(other, 100_001)) < 0.02, "two keys share bytes by chance only"
    assert first_difference(other, value) is not None
    assert first_difference(key, np.concatenate([value[1:], value[:1]])) is not None, "shifted"
    for at in (0, 50_000, 100_000):
        damaged = value.copy()
        damaged[at] ^= 1
        assert first_difference(key, damaged) == at


# ------------------------------------------------------------------------------------------------ bookkeeping


def test_a_busy_key_is_not_picked_twice() -> None:
    ledger = Ledger(random.Random(1))
    fresh = ledger.new(10)
    for key in fresh:
        ledger.was_stored(key)
    assert ledger.stored(10) == [], "they are busy still"
    ledger.release(fresh)
    some = ledger.stored(4)
    assert set(some) < set(fresh)
    assert not set(some) & set(ledger.stored(10))


def test_what_is_dead_stays_dead_until_it_is_stored_again() -> None:
    ledger = Ledger(random.Random(1))
    first, second, third = ledger.new(3)
    for key in (first, second, third):
        ledger.was_stored(key)
        ledger.was_removed(key)
    ledger.was_stored(second)
    ledger.forget(third)
    ledger.release([first, second, third])
    assert [ledger.is_dead(key) for key in (first, second, third)] == [True, False, False]
    assert ledger.dead(10) == [first]
    assert ledger.stored(10) == [second]


def test_a_reset_kills_its_namespace_only() -> None:
    ledger = Ledger(random.Random(1))
    old_key, lost, removed = ledger.new(3)
    for key in (old_key, lost, removed):
        ledger.was_stored(key)
    ledger.was_removed(removed)
    old = ledger.closing()
    assert not ledger.is_quiet(old)
    assert ledger.closing() == old, "one after the other"
    (new_key,) = ledger.new(1)
    ledger.was_stored(new_key)
    ledger.forget(lost)
    ledger.release([old_key, lost, removed, new_key])
    assert ledger.is_quiet(old)
    assert ledger.stored(10) == [new_key], "nothing crosses the reset"
    assert ledger.dead(10) == []
    ledger.release([new_key])
    assert ledger.was_reset(old) == [old_key]
    assert ledger.closing() != old
    assert ledger.is_dead(old_key) and not ledger.is_dead(new_key) and not ledger.is_dead(lost)


def test_a_journal_tells_who_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.dead("a", [b"1", b"2"])
    journal.alive("a", [b"2"])
    journal.dead("*", [b"2"])
    with path.open("a") as file:
        file.write("dead a 33")  # torn by a kill
    assert Journal.read(path) == {("a", b"1"), ("*", b"2")}
    assert Journal.read(tmp_path / "never written") == set()


def test_the_newest_whole_heartbeat_counts(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert Heartbeat.last_of(path) is None
    path.write_text(Heartbeat(1).line() + "\n" + Heartbeat(2, {"x": 3}).line() + "\n" + '{"operations": 9')
    assert Heartbeat.last_of(path) == Heartbeat(2, {"x": 3})


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9999999])
def test_damage_is_some_bits_behind_the_beginning(tmp_path: Path, share: float) -> None:
    medium = tmp_path / "disk"
    medium.write_bytes(bytes(1000))
    offsets = damage(medium, 200, share, places=3)
    data = medium.read_bytes()
    assert len(set(offsets)) == 3
    assert all(200 <= at < 1000 for at in offsets)
    assert sorted(offsets) == [i for i, byte in enumerate(data) if byte]


# ------------------------------------------------------------------------------------------------ judgements


def statistics(**changes: Any) -> dict[str, Any]:
    """STAT of a server at rest, but for ``changes`` such as ``table__pinned=1``."""
    made: dict[str, Any] = {
        "server": {"sessions": 1, "inflight": 1},
        "arena": {"used": 3 * 4096, "extents": 2},
        "table": {
            "entries": 3,
            "complete": 3,
            "reserved": 0,
            "pinned": 0,
            "stale": 0,
            "fetching": 0,
            "writing": 0,
            "on_disk": 1,
            "bytes_used": 2 * 4096 + 1,
        },
        "counters": {"put_ok": 3},
        "sessions": [{"limbo": 0}],
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        made[section][key] = value
    return made


def test_a_server_at_rest_has_no_problem() -> None:
    assert rest_problems(statistics()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"server__sessions": 2}, {"server__inflight": 2}, {"table__reserved": 1}, {"table__pinned": 1},
        {"table__stale": 1}, {"table__writing": 1},
        {"table__fetching": 1}, {"table__on_disk": 0}, {"arena__extents": 3}, {"arena__used": 4 * 4096 + 2},
        {"arena__used": 4096},
        {"counters__internal_error": 1}, {"counters__leaked_reservations": 1},
    ],
)  # fmt: skip
def test_each_leak_is_a_problem(changes: dict[str, Any]) -> None:
    assert rest_problems(statistics(**changes)) != []


def test_servers_that_had_nothing_to_do_are_a_problem() -> None:
    def server(disk: dict[str, Any] | None = None, **counters: int) -> dict[str, Any]:
        return {"table": {"counters": {"evictions": 0, "demotions": 0, "fetches": 0, **counters}}, "disk": disk}

    assert server_coverage([server(evictions=1), server({}, fetches=1), server({})]) == []
    assert server_coverage([server(evictions=1)]) == []
    (problem,) = server_coverage([server({}, fetches=1), server({})])
    assert "evicted" in problem
    assert server_coverage([server({}, demotions=1), server()]) == ["no server read anything from its disk"]


def test_growth_beyond_the_tolerance_is_a_problem() -> None:
    before, growth = Held(20, 5, 400_000), Growth(fds=4, threads=4, share=0.25, kib=1000)
    assert growth.problems(before, Held(24, 9, 500_000)) == []
    assert len(growth.problems(before, Held(25, 10, 500_001))) == 3
    assert growth.problems(Held(20, 5, 1000), Held(20, 5, 2000)) == []


def test_a_log_with_an_error_is_a_problem() -> None:
    good = "ts=1 level=info logger=memkv.store event=session.closed peer=pid:1\nlevel=warning event=namespace.reset"
    assert log_problems(good) == []
    for line in ("Traceback (most recent call last):", "level=error event=x", 'level=warning exception="x"'):
        assert log_problems(f"{good}\n{line}\n{good}") == [line]


def test_a_soak_that_shows_nothing_is_a_problem() -> None:
    counts = dict.fromkeys(MUST_HAPPEN, 1)
    assert coverage(counts) == []
    assert len(coverage({**counts, "get_ok": 0})) == 1
    assert hit_ratio({}) == 0
    assert hit_ratio({"get_ok": 1, "load_good": 2, "get_absent": 1, "load_lost_breaker": 2}) == 0.5
