"""vLLM's scheduler side over a fake prober: what it answers, what it asks, and that it never raises."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytest.importorskip("vllm")

from memkv_vllm.integration.compat import LookupResult
from memkv_vllm.integration.facts import EngineFacts
from memkv_vllm.integration.manager import MemKVOffloadingManager, PresenceSettings
from memkv_vllm.keys import NamespaceManifest, block_prefix
from tests.support.fake_prober import FakeProber
from tests.support.vllm_shapes import spec_0_32, vllm_config

pytestmark = pytest.mark.vllm

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def manifest() -> NamespaceManifest:
    return EngineFacts.from_spec(spec_0_32(), vllm_config()).namespace("")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


def request(name: str) -> Any:
    return SimpleNamespace(req_id=name)


class Driver:
    """A manager with its prober and clock."""

    def __init__(self, hit_ttl: float = 30, miss_ttl: float = 30, **options: Any) -> None:
        self.now = 100.0
        self.prober = FakeProber()
        self.manager = MemKVOffloadingManager(
            namespace=manifest(),
            prober=self.prober,
            settings=PresenceSettings(hit_ttl, miss_ttl, lookup_timeout=1),
            clock=lambda: self.now,
            **options,
        )

    def hold(self, *numbers: int) -> None:
        """Have the servers hold these blocks, in the manager's present namespace."""
        self.prober.present |= {self.prefix(number) for number in numbers}

    def prefix(self, number: int) -> bytes:
        return block_prefix(self.manager.namespace, number.to_bytes(32, "big"), 0)

    def lookup(self, number: int, name: str = "r") -> Any:
        return self.manager.lookup(key(number), request(name))

    def step(self, preempted: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(SimpleNamespace(new_req_ids=(), preempted_req_ids=preempted))

    def settled(self, number: int, name: str = "r") -> Any:
        """The answer after the servers were asked."""
        self.lookup(number, name)
        self.step()
        return self.lookup(number, name)

    def stats(self) -> dict[str, Any]:
        stats = self.manager.get_stats()
        return {} if stats is None else stats.reduce()


@pytest.fixture
def driver() -> Driver:
    return Driver()


# ---------------------------------------------------------------- lookups


def test_a_block_is_asked_for_and_then_known(driver: Driver) -> None:
    driver.hold(1)
    assert (driver.lookup(1), driver.lookup(2)) == (RETRY, RETRY)
    driver.step()
    assert (driver.lookup(1), driver.lookup(2)) == (HIT, MISS)


def test_the_probes_of_a_step_are_one_batch_and_each_block_is_asked_once(driver: Driver) -> None:
    driver.prober.silent = True
    for name in ("a", "b"):
        for number in range(50):
            assert driver.lookup(number, name) is RETRY
    assert driver.prober.batches == []
    driver.step()
    driver.step()
    assert driver.prober.batches == [[driver.prefix(number) for number in range(50)]]


def test_a_probe_without_an_answer_is_a_miss_at_the_deadline(driver: Driver) -> None:
    driver.prober.silent = True
    assert driver.lookup(1) is RETRY
    driver.step()
    driver.now += 0.99
    assert driver.lookup(1) is RETRY
    driver.now += 0.02
    assert driver.lookup(1) is MISS


def test_an_unreachable_server_is_a_miss_for_a_second(driver: Driver) -> None:
    driver.hold(1)
    driver.prober.down = True
    assert driver.settled(1) is MISS
    driver.prober.down = False
    driver.now += 1.1
    assert driver.settled(1) is HIT


def test_a_server_that_went_takes_the_trust_in_hits_with_it(driver: Driver) -> None:
    """P084: it was replaced by an empty one. No hit of before is promised to vLLM, and its blocks are stored again."""
    driver.hold(1, 2)
    assert (driver.settled(1), driver.settled(2)) == (HIT, HIT)
    assert driver.manager.prepare_store([key(1), key(2)], request("s")).keys_to_store == []
    driver.now += 1
    driver.prober.present.clear()
    driver.hold(2)
    driver.prober.servers_lost += 1
    assert (driver.lookup(1, "later"), driver.lookup(2, "later")) == (RETRY, RETRY)
    driver.now += 0.1
    driver.step()
    driver.now += 0.1
    assert (driver.lookup(1, "later"), driver.lookup(2, "later")) == (MISS, HIT)
    assert driver.manager.prepare_store([key(1), key(2)], request("s")).keys_to_store == [key(1)]
    driver.now += 1
    assert driver.lookup(2, "even later") is HIT, "once, not for ever"


def test_answers_from_before_a_loss_are_not_trusted(driver: Driver) -> None:
    """They lay in the queue while the server went: read after the loss, they are as old as it."""
    driver.hold(1)
    driver.lookup(1)
    driver.step()
    driver.prober.servers_lost += 1
    driver.now += 0.1
    assert driver.lookup(1) is RETRY


def lookup_cost_s(known: int) -> float:
    """CPU seconds of one lookup among ``known`` known blocks: the best of several rounds."""
    import time

    driver = Driver()
    driver.hold(*range(known))
    for number in range(known):
        driver.lookup(number)
    driver.step()
    rounds = []
    for _ in range(7):
        start = time.thread_time()
        assert all(driver.lookup(number) is HIT for number in range(known - 200, known))
        rounds.append((time.thread_time() - start) / 200)
    return min(rounds)


def test_a_lookup_costs_the_same_however_many_blocks_are_known() -> None:
    """vLLM asks for every block of every waiting request at every step."""
    assert lookup_cost_s(20_000) < 6 * lookup_cost_s(200)


# ---------------------------------------------------------------- a request never tries a block twice


def test_after_a_lost_load_all_its_blocks_are_asked_for_again(driver: Driver) -> None:
    """A store that was restarted empty: the next request must not be sent after the same lost blocks (20 of them)."""
    blocks = list(range(20))
    driver.hold(*blocks)
    for number in blocks:
        assert driver.settled(number, "a") is HIT
    driver.manager.prepare_load([key(number) for number in blocks], request("a"))
    driver.prober.present.clear()
    assert driver.lookup(0, "a") is MISS
    assert [driver.lookup(number, "b") for number in blocks] == [RETRY] * 20
    driver.step()
    assert [driver.lookup(number, "b") for number in blocks] == [MISS] * 20
    # So the next computation of them is stored again.
    offered = [key(number) for number in blocks]
    assert driver.manager.prepare_store(offered, request("b")).keys_to_store == offered


@pytest.mark.parametrize("ttl", ["hit_ttl", "miss_ttl"])
def test_a_trust_of_nothing_asks_once_per_request(ttl: str) -> None:
    """0 asks every time; it must not ask for ever (P046)."""
    driver = Driver(**{ttl: 0.0})
    driver.hold(1)
    for name in ("a", "b"):
        verdicts = []
        for _ in range(3):
            verdicts = [driver.lookup(1, name), driver.lookup(2, name)]
            driver.step()
            driver.now += 0.2
        assert verdicts == [HIT, MISS]


def test_a_block_that_was_given_once_is_a_miss_for_that_request(driver: Driver) -> None:
    driver.hold(1, 2)
    assert driver.settled(1, "a") is HIT
    driver.manager.prepare_load([key(1)], request("a"))
    driver.manager.complete_load({key(1)}, request("a"))
    assert driver.lookup(1, "a") is MISS
    # The hit is dropped for all: the servers are asked again for the next request.
    assert driver.lookup(1, "b") is RETRY


def test_no_livelock_on_a_block_that_exists_and_cannot_be_read(driver: Driver) -> None:
    driver.hold(1)
    loads = 0
    for _ in range(100):
        answer = driver.lookup(1, "a")
        driver.step()
        if answer is HIT:
            driver.manager.prepare_load([key(1)], request("a"))
            loads += 1
        elif answer is MISS:
            break
    assert (answer, loads) == (MISS, 1)


@pytest.mark.parametrize("how", ["preempted", "finished"])
def test_a_request_that_starts_again_may_load_again(driver: Driver, how: str) -> None:
    driver.hold(1)
    assert driver.settled(1, "a") is HIT
    driver.manager.prepare_load([key(1)], request("a"))
    if how == "preempted":
        driver.step(preempted=["a"])
    else:
        driver.manager.on_request_finished(request("a"))
    assert driver.lookup(1, "a") is HIT


# ---------------------------------------------------------------- loads and stores


def test_a_load_keeps_the_order_of_its_keys(driver: Driver) -> None:
    spec = driver.manager.prepare_load([key(3), key(1), key(2)], request("a"))
    assert spec.keys == (key(3), key(1), key(2)) and spec.namespace == driver.manager.namespace


def test_a_store_keeps_the_offered_order_without_known_and_repeated_blocks(driver: Driver) -> None:
    driver.hold(2)
    assert driver.settled(2) is HIT
    output = driver.manager.prepare_store([key(3), key(2), key(1), key(3), key(4)], request("a"))
    assert output.keys_to_store == [key(3), key(1), key(4)]
    assert output.store_spec.keys == tuple(output.keys_to_store)
    assert output.evicted_keys == []


def test_a_hit_that_has_expired_is_stored_again(driver: Driver) -> None:
    driver.hold(1)
    assert driver.settled(1) is HIT
    driver.now += 31
    assert driver.manager.prepare_store([key(1)], request("a")).keys_to_store == [key(1)]


def test_storing_asks_the_servers_nothing(driver: Driver) -> None:
    driver.manager.prepare_store([key(number) for number in range(10)], request("a"))
    driver.step()
    assert driver.prober.batches == []


def test_a_finished_store_only_clears_the_negative_answer(driver: Driver) -> None:
    assert driver.settled(1) is MISS
    driver.manager.complete_store({key(1)}, request("a"))
    # Not a hit: the store may have been dropped. The servers are asked.
    assert driver.lookup(1) is RETRY
    driver.step()
    assert driver.lookup(1) is MISS
    driver.manager.complete_store({key(1)}, request("a"))
    driver.hold(1)
    assert driver.settled(1) is HIT


def test_nothing_is_expected_of_an_unknown_request(driver: Driver) -> None:
    driver.manager.on_request_finished(request("never seen"))
    driver.manager.complete_load({key(1)}, request("never seen"))
    driver.manager.complete_store({key(1)}, request("never seen"))
    driver.manager.touch([key(1)], request("never seen"))
    driver.step(preempted=["never seen"])
    assert "manager_errors" not in str(driver.stats())


# ---------------------------------------------------------------- resets


def test_a_reset_forgets_everything_here_and_there(driver: Driver) -> None:
    driver.hold(1)
    namespace = driver.manager.namespace
    assert driver.settled(1) is HIT
    driver.manager.reset_cache()
    assert driver.prober.resets == [namespace]
    assert driver.manager.namespace == namespace
    assert driver.settled(1) is MISS


def test_a_reset_that_a_server_does_not_confirm_moves_to_a_fresh_namespace(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.hold(1)
    namespace = driver.manager.namespace
    assert driver.settled(1) is HIT
    driver.prober.unconfirmed = ["beta", "gamma"]
    driver.manager.reset_cache()
    assert "beta,gamma" in caplog.text and namespace.hex() in caplog.text
    assert driver.manager.namespace != namespace
    # The servers still hold the old value, under a key that this engine no longer makes.
    assert driver.settled(1) is MISS
    assert driver.stats()["vllm:memkv_reset_failures"] == 2
    # Jobs carry the new namespace, so that workers follow at the same step.
    assert driver.manager.prepare_load([key(1)], request("a")).namespace == driver.manager.namespace
    assert driver.manager.prepare_store([key(1)], request("a")).store_spec.namespace == driver.manager.namespace


def test_a_reset_while_stores_are_under_way_moves_to_a_fresh_namespace(driver: Driver) -> None:
    namespace = driver.manager.namespace
    driver.manager.prepare_store([key(1)], request("a"))
    driver.manager.reset_cache()
    assert driver.manager.namespace != namespace
    # vLLM never reports the jobs of the time before the reset.
    second = driver.manager.namespace
    driver.manager.reset_cache()
    assert driver.manager.namespace == second


def test_finished_stores_are_not_under_way(driver: Driver) -> None:
    namespace = driver.manager.namespace
    output = driver.manager.prepare_store([key(1), key(2)], request("a"))
    driver.manager.complete_store(set(output.keys_to_store), request("a"))
    driver.manager.reset_cache()
    assert driver.manager.namespace == namespace


def test_what_a_reset_left_behind_is_reset_by_the_next_one(driver: Driver) -> None:
    first = driver.manager.namespace
    driver.prober.unconfirmed = ["beta"]
    driver.manager.reset_cache()
    second = driver.manager.namespace
    driver.prober.unconfirmed = []
    driver.manager.reset_cache()
    driver.manager.reset_cache()
    assert driver.prober.resets == [first, second, first, second]


def test_a_late_store_of_before_the_reset_is_not_one_of_now(driver: Driver) -> None:
    """The store of now is still under way: a reset may not stay in its namespace."""
    driver.manager.prepare_store([key(1)], request("a"))
    driver.manager.reset_cache()
    second = driver.manager.namespace
    driver.manager.prepare_store([key(1), key(2)], request("b"))
    driver.manager.complete_store({key(1)}, request("a"))
    driver.manager.complete_store({key(2)}, request("b"))
    driver.manager.reset_cache()
    assert driver.manager.namespace != second
    third = driver.manager.namespace
    driver.manager.complete_store({key(1)}, request("b"))
    driver.manager.reset_cache()
    assert driver.manager.namespace == third


def test_a_block_stored_by_two_requests_is_under_way_until_both_end(driver: Driver) -> None:
    namespace = driver.manager.namespace
    for name in "ab":
        driver.manager.prepare_store([key(1)], request(name))
    driver.manager.complete_store({key(1)}, request("a"))
    driver.manager.reset_cache()
    assert driver.manager.namespace != namespace


def test_a_namespace_with_stores_under_way_is_reset_again_when_they_have_ended(driver: Driver) -> None:
    """A reset in between confirms it, but a store may land after that, and the namespace is used again."""
    shared = driver.manager.namespace
    driver.manager.prepare_store([key(1)], request("a"))
    driver.manager.reset_cache()
    driver.manager.reset_cache()
    driver.prober.present.add(block_prefix(shared, (1).to_bytes(32, "big"), 0))
    driver.manager.on_reset_flushed()
    assert driver.manager.namespace == shared
    assert driver.settled(1) is MISS


def test_a_reset_takes_its_time_once_for_all_namespaces(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds up the scheduler: a server that does not answer costs RESET_TIMEOUT_S, not that per namespace."""
    waits: list[float] = []

    def slow(namespace: bytes, timeout_s: float) -> list[str]:
        waits.append(timeout_s)
        driver.now += min(timeout_s, 0.75)
        return ["beta"]

    monkeypatch.setattr(driver.prober, "reset_namespace", slow)
    first = driver.manager.namespace
    for _ in range(4):
        driver.manager.reset_cache()
    waits.clear()
    before = driver.now
    driver.manager.reset_cache()
    assert waits == [2.0, 1.25, 0.5] and driver.now - before <= 2.0
    assert f"event=reset_given_up namespace={first.hex()}" in caplog.text


def test_it_shares_again_once_the_jobs_from_before_the_reset_have_ended(driver: Driver) -> None:
    shared = driver.manager.namespace
    driver.manager.prepare_store([key(1)], request("a"))
    driver.manager.reset_cache()
    fresh = driver.manager.namespace
    assert fresh != shared
    # The late store lands after the reset: it must be gone before the namespace is used again.
    driver.prober.present.add(block_prefix(shared, (1).to_bytes(32, "big"), 0))
    driver.manager.on_reset_flushed()
    assert driver.manager.namespace == shared
    assert driver.prober.resets == [shared, shared]
    assert driver.settled(1) is MISS


def test_it_stays_alone_while_a_server_has_not_confirmed(driver: Driver) -> None:
    shared = driver.manager.namespace
    driver.prober.unconfirmed = ["beta"]
    driver.manager.reset_cache()
    driver.manager.on_reset_flushed()
    assert driver.manager.namespace != shared
    driver.prober.unconfirmed = []
    driver.manager.on_reset_flushed()
    assert driver.manager.namespace == shared


def test_a_reset_without_any_trouble_changes_nothing_when_it_is_flushed(driver: Driver) -> None:
    driver.manager.reset_cache()
    driver.hold(1)
    assert driver.settled(1) is HIT
    driver.manager.on_reset_flushed()
    assert driver.lookup(1) is HIT and len(driver.prober.resets) == 1


def test_a_request_may_load_again_after_a_reset(driver: Driver) -> None:
    driver.hold(1)
    assert driver.settled(1, "a") is HIT
    driver.manager.prepare_load([key(1)], request("a"))
    driver.manager.reset_cache()
    driver.hold(1)
    assert driver.settled(1, "a") is HIT


def test_an_answer_from_before_the_reset_makes_no_hit_in_the_fresh_namespace(driver: Driver) -> None:
    driver.hold(1)
    driver.prober.silent = True
    assert driver.lookup(1) is RETRY
    driver.step()
    driver.prober.unconfirmed = ["beta"]
    driver.manager.reset_cache()
    driver.prober.silent = False
    assert driver.settled(1) is MISS


# ---------------------------------------------------------------- never raises


@pytest.mark.parametrize("call", ["poll", "submit", "statistics", "reset_namespace", "close"])
def test_a_prober_that_raises_is_a_miss_and_one_line(
    driver: Driver, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver.prober.broken.add(call)
    with caplog.at_level(logging.ERROR, "memkv.integration.manager"):
        for _ in range(5):
            assert driver.lookup(1) in (MISS, RETRY)
            driver.step()
            driver.manager.prepare_load([key(1)], request("a"))
            assert driver.manager.prepare_store([key(1)], request("a")) is not None
            driver.manager.complete_store({key(1)}, request("a"))
            driver.manager.on_request_finished(request("a"))
            driver.manager.reset_cache()
            driver.manager.get_stats()
        driver.manager.shutdown()
    lines = [record.getMessage() for record in caplog.records]
    assert lines and len(lines) == len(set(lines))


def test_a_key_that_is_no_key_is_a_miss(driver: Driver) -> None:
    assert driver.manager.lookup(b"short", request("a")) is MISS
    assert driver.manager.prepare_load([b"short"], request("a")).keys == (b"short",)
    assert driver.manager.prepare_store([b"short"], request("a")).keys_to_store == []
    driver.manager.complete_store({b"short"}, request("a"))
    assert driver.stats()["vllm:memkv_manager_errors"] == 4


# ---------------------------------------------------------------- events, statistics


def test_events_are_off_unless_asked_for(driver: Driver) -> None:
    driver.manager.complete_store({key(1)}, request("a"))
    assert driver.manager.take_events() == ()


def test_stored_blocks_are_announced_once(driver: Driver) -> None:
    announcing = Driver(kv_events=True)
    announcing.manager.complete_store({key(1)}, request("a"))
    (event,) = announcing.manager.take_events()
    assert event.keys == [key(1)] and event.removed is False
    assert announcing.manager.take_events() == ()


def test_statistics_grow_and_survive_a_reset(driver: Driver) -> None:
    driver.hold(1)
    driver.settled(1), driver.settled(2)
    driver.prober.counts = {"probes": 2, "servers": 1, "servers_ready": 1}
    first = driver.stats()
    assert first["vllm:memkv_lookup_hits"] == 1
    assert first["vllm:memkv_lookup_pending"] == 2
    assert first["vllm:memkv_lookup_misses:('absent',)"] == 1
    assert first["vllm:memkv_probes"] == 2 and first["vllm:memkv_servers_ready"] == 1
    assert driver.stats() == {}
    driver.manager.reset_cache()
    driver.hold(1)
    driver.settled(1)
    assert driver.stats()["vllm:memkv_lookup_hits"] == 1


def test_a_retried_block_has_its_own_reason(driver: Driver) -> None:
    driver.hold(1)
    driver.settled(1, "a")
    driver.manager.prepare_load([key(1)], request("a"))
    driver.lookup(1, "a")
    assert driver.stats()["vllm:memkv_lookup_misses:('retried',)"] == 1


def test_every_statistic_was_declared(driver: Driver) -> None:
    from memkv_vllm.integration.metrics import metric_definitions

    driver.settled(1)
    driver.prober.unconfirmed = ["beta"]
    driver.manager.reset_cache()
    stats: Any = driver.manager.get_stats()
    declared = metric_definitions()
    for name, values in stats._values.items():
        assert all(len(labels) == len(declared[name].labelnames) for labels in values)


def test_shutdown_closes_the_prober(driver: Driver) -> None:
    driver.manager.shutdown()
    assert driver.prober.closed


# ---------------------------------------------------------------- any order of events (P038, P043)

NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.lists(st.integers(0, 6), max_size=4)


class AnyOrder(RuleBasedStateMachine):
    """vLLM's calls in any order: no error, and no request is given a block twice between two of its starts."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.given: dict[str, set[int]] = {}

    @rule(name=NAMES, numbers=NUMBERS)
    def schedule(self, name: str, numbers: list[int]) -> None:
        hits = []
        for number in dict.fromkeys(numbers):
            if self.driver.lookup(number, name) is not HIT:
                break
            hits.append(number)
        assert not self.given.setdefault(name, set()) & set(hits)
        if hits:
            self.driver.manager.prepare_load([key(number) for number in hits], request(name))
            self.given[name] |= set(hits)

    @rule(name=NAMES, numbers=NUMBERS)
    def store(self, name: str, numbers: list[int]) -> None:
        output = self.driver.manager.prepare_store([key(number) for number in numbers], request(name))
        assert set(output.keys_to_store) <= {key(number) for number in numbers}

    @rule(name=NAMES, numbers=NUMBERS, kept=st.booleans())
    def stored(self, name: str, numbers: list[int], kept: bool) -> None:
        if kept:
            self.driver.hold(*numbers)
        self.driver.manager.complete_store({key(number) for number in numbers}, request(name))

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        self.driver.manager.on_request_finished(request(name))
        self.given.pop(name, None)

    @rule(names=st.sets(NAMES))
    def end_step(self, names: set[str]) -> None:
        self.driver.step(preempted=sorted(names))
        for name in names:
            self.given.pop(name, None)

    @rule(seconds=st.sampled_from([0.1, 2.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule(confirmed=st.booleans())
    def reset(self, confirmed: bool) -> None:
        self.driver.prober.unconfirmed = [] if confirmed else ["beta"]
        self.driver.manager.reset_cache()
        self.given.clear()

    @rule(down=st.booleans())
    def server(self, down: bool) -> None:
        self.driver.prober.down = down

    @invariant()
    def nothing_failed(self) -> None:
        assert "vllm:memkv_manager_errors" not in self.driver.stats()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
