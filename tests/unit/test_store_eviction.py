"""The order of eviction: what holds for every policy, and what each is for."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import EvictionPolicy, LruPolicy
from memkv_vllm.store.policies import POLICIES, NamespacePolicies, make_policy
from memkv_vllm.store.s3fifo import MAX_ROUNDS, S3FifoPolicy
from memkv_vllm.store.table import Table
from memkv_vllm.types import Status

MAKERS: dict[str, Callable[[], EvictionPolicy]] = {**POLICIES, "per namespace": lambda: NamespacePolicies(LruPolicy)}
every_policy = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def filled(make: Callable[[], EvictionPolicy], *keys: bytes) -> EvictionPolicy:
    policy = make()
    for key in keys:
        policy.added(key)
    return policy


# The contract


@every_policy
def test_many_keys_at_once_are_as_each_on_its_own(make: Callable[[], EvictionPolicy]) -> None:
    keys = [bytes([n]) for n in range(20)]
    once = make()
    once.added_many(keys)
    assert list(once.victims()) == list(filled(make, *keys).victims())
    with pytest.raises(LocalProtocolError, match="twice"):
        once.added_many([b"new", keys[0]])


@every_policy
def test_many_uses_at_once_are_as_each_on_its_own(make: Callable[[], EvictionPolicy]) -> None:
    keys = [bytes([n]) for n in range(20)]
    used = [keys[n * n % 20] for n in range(50, 0, -1)]
    once, each = filled(make, *keys), filled(make, *keys)
    once.touched_many(used)
    for key in used:
        each.touched(key)
    assert list(once.victims()) == list(each.victims()) != keys
    with pytest.raises(LocalProtocolError):
        once.touched_many([keys[0], b"unknown"])


@every_policy
def test_a_victim_may_be_removed_while_iterating(make: Callable[[], EvictionPolicy]) -> None:
    policy = filled(make, b"a", b"b", b"c")
    seen = []
    for key in policy.victims():
        seen.append(key)
        policy.removed(key)
    assert seen == [b"a", b"b", b"c"]
    assert len(policy) == 0


@every_policy
def test_victims_end_and_repeat_no_key_even_if_all_are_left(make: Callable[[], EvictionPolicy]) -> None:
    policy = filled(make, *(bytes([n]) for n in range(30)))
    for n in range(0, 30, 3):
        policy.touched(bytes([n]))
    for _ in range(3):
        victims = list(policy.victims())
        assert sorted(victims) == [bytes([n]) for n in range(30)]
        assert len(policy) == 30


@every_policy
def test_a_victim_that_was_left_comes_after_those_that_were_not(make: Callable[[], EvictionPolicy]) -> None:
    policy = filled(make, b"pinned", b"b", b"c")
    for key in policy.victims():
        if key != b"pinned":
            policy.removed(key)
            break
    assert list(policy.victims()) == [b"c", b"pinned"]


@every_policy
def test_an_iterator_may_be_dropped_at_any_step(make: Callable[[], EvictionPolicy]) -> None:
    policy = filled(make, b"a", b"b")
    next(iter(policy.victims()))
    policy.removed(b"a")
    policy.added(b"c")
    assert sorted(policy.victims()) == [b"b", b"c"]


@every_policy
def test_misuse_raises(make: Callable[[], EvictionPolicy]) -> None:
    policy = filled(make, b"a")
    with pytest.raises(LocalProtocolError, match="twice"):
        policy.added(b"a")
    with pytest.raises(LocalProtocolError, match="not known"):
        policy.touched(b"b")
    with pytest.raises(LocalProtocolError, match="not known"):
        policy.removed(b"b")


@every_policy
def test_random_use_holds_exactly_the_keys_that_are_there(make: Callable[[], EvictionPolicy]) -> None:
    dice, policy, there = random.Random(7), make(), set()
    for _ in range(5000):
        key = bytes([dice.randrange(40)])
        if key not in there:
            policy.added(key)
            there.add(key)
        elif dice.random() < 0.5:
            policy.touched(key)
        elif dice.random() < 0.5:
            policy.removed(key)
            there.remove(key)
        else:
            for victim in policy.victims():
                assert victim in there
                if dice.random() < 0.7:
                    policy.removed(victim)
                    there.remove(victim)
                    break
        assert len(policy) == len(there)
    assert set(policy.victims()) == there


# LRU


def test_lru_takes_the_least_recently_used_first() -> None:
    policy = filled(LruPolicy, b"a", b"b", b"c")
    policy.touched(b"a")
    assert list(policy.victims()) == [b"b", b"c", b"a"]


# S3-FIFO


def test_a_key_that_was_used_outlives_newer_ones_that_were_not() -> None:
    policy = filled(S3FifoPolicy, b"a", b"b", b"c")
    for _ in range(2):
        policy.touched(b"a")
    assert list(policy.victims()) == [b"b", b"c", b"a"]


def test_one_use_in_the_small_queue_is_not_enough() -> None:
    """The lookup before a load counts too, so a load is two uses; a lookup alone is no reuse."""
    policy = filled(S3FifoPolicy, b"a", b"b")
    policy.touched(b"a")
    assert next(policy.victims()) == b"a"


def test_a_ghost_enters_the_main_queue() -> None:
    policy = filled(S3FifoPolicy, *(bytes([n]) for n in range(10)))
    first = next(policy.victims())
    policy.removed(first)
    policy.added(first)  # evicted too early: it is back
    assert list(policy.victims())[-1] == first


def test_a_deleted_key_leaves_no_ghost() -> None:
    policy = S3FifoPolicy()
    for key in (b"a", b"b", b"c"):
        policy.added(key)
    policy.removed(b"a")
    assert "0 ghosts" in repr(policy)


def test_ghosts_are_bounded_by_the_keys_in_the_store() -> None:
    """M06."""
    policy = S3FifoPolicy()
    for number in range(10_000):
        policy.added(number.to_bytes(4, "big"))
        if len(policy) > 100:
            policy.removed(next(policy.victims()))
    assert len(policy._ghost) == len(policy) == 100


def test_the_search_for_a_victim_is_bounded_when_every_key_was_used() -> None:
    keys = [number.to_bytes(4, "big") for number in range(10_000)]
    policy = filled(S3FifoPolicy, *keys)
    assert isinstance(policy, S3FifoPolicy)
    for key in keys:
        for _ in range(3):
            policy.touched(key)
    order = list(policy._small)
    policy.removed(next(policy.victims()))
    assert len(policy._main) <= MAX_ROUNDS
    assert list(policy._small) == order[MAX_ROUNDS + 1 :]


def test_so_is_the_search_in_the_main_queue() -> None:
    keys = [number.to_bytes(4, "big") for number in range(1000)]
    policy = filled(S3FifoPolicy, *keys)
    assert isinstance(policy, S3FifoPolicy)
    policy._main, policy._small = policy._small, policy._main
    for key in keys:
        for _ in range(3):
            policy.touched(key)
    victim = next(policy.victims())
    assert victim == keys[MAX_ROUNDS]
    assert list(policy._main)[-1] == keys[MAX_ROUNDS - 1]  # those before it got another round


# On a table


def scan_over_a_hot_set(policy: EvictionPolicy) -> int:
    """How many of 50 hot values are left after a scan of 1000 that are never used; 100 fit."""
    table = Table(ArenaAllocator(100, 1), policy)

    def key(block: int) -> bytes:
        return bytes(33) + block.to_bytes(4, "big") + b"\0\0"

    def put(block: int) -> None:
        result = table.reserve(key(block), 1, 0, 0, 0, "me", 0.0)
        if result.status is Status.OK:
            table.commit(key(block), result.generation)

    def use(block: int) -> None:
        table.exists([key(block)[:-2]], 1, 0.0)
        result = table.pin(key(block), 1, 0, 0.0)
        if result.status is Status.OK:
            table.unpin(key(block), result.generation)

    for block in range(50):
        put(block)
        use(block)
    for block in range(1000, 2000):
        put(block)
    return sum(table.exists([key(block)[:-2]], 1, 0.0) == b"\x01" for block in range(50))


def test_a_scan_pushes_out_the_hot_set_under_lru_and_not_under_s3_fifo() -> None:
    assert scan_over_a_hot_set(LruPolicy()) == 0
    assert scan_over_a_hot_set(S3FifoPolicy()) == 50


# Per namespace


def test_each_namespace_has_an_order_of_its_own() -> None:
    keys = [bytes([1]) + name * 32 + bytes([n]) for n in range(2) for name in (b"A", b"B")]
    policy = make_policy("lru", per_namespace=True)
    assert isinstance(policy, NamespacePolicies)
    for key in keys:
        policy.added(key)
    policy.touched(keys[0])
    assert list(policy.victims()) == [keys[1], keys[2], keys[3], keys[0]]
    assert list(policy.victims_of(b"A" * 32)) == [keys[2], keys[0]]
    assert list(policy.victims_of(b"B" * 32)) == [keys[1], keys[3]]
    assert list(policy.victims_of(b"C" * 32)) == []
    for key in keys:
        policy.removed(key)
    assert policy._own == {}
