"""The table: exact cases of reservation, reading, removal, reset and eviction."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.entries import TRANSITIONS, EntryEvent, EntryState
from memkv_vllm.store.eviction import EvictionPolicy, LruPolicy
from memkv_vllm.store.policies import make_policy
from memkv_vllm.store.room import EXTRA_EVICTIONS
from memkv_vllm.store.table import NamespaceStatistics, Table, TableLimits
from memkv_vllm.types import Status

NAMESPACE, OTHER = b"N" * 32, b"O" * 32
LAYOUT = 7


def make_key(block: int, shard: int = 0, namespace: bytes = NAMESPACE) -> bytes:
    return b"\x01" + namespace + block.to_bytes(4, "big") + shard.to_bytes(2, "big")


class Store:
    """A table with shorthands; the granule is one byte, so that sizes are exact."""

    def __init__(self, size: int = 100, granule: int = 1, policy: EvictionPolicy | None = None, **limits: Any) -> None:
        self.arena = ArenaAllocator(size, granule)
        self.policy = LruPolicy() if policy is None else policy
        self.table = Table(self.arena, self.policy, TableLimits(**limits))

    def reserve(self, key: bytes, length: int = 10, owner: object = "me", now: float = 0.0) -> tuple[Status, int]:
        status, _, generation, _ = self.table.reserve(key, length, 99, 1, LAYOUT, owner, now)
        return status, generation

    def put(self, key: bytes, length: int = 10) -> int:
        status, generation = self.reserve(key, length)
        assert status is Status.OK
        assert self.table.commit(key, generation)
        return generation

    def pin(self, key: bytes, length: int = 10, layout: int = LAYOUT) -> Status:
        return self.table.pin(key, length, layout, 0.0).status

    def has(self, key: bytes) -> bool:
        return self.table.exists([key[:-2]], 1, 0.0) == b"\x01"


@pytest.fixture
def store() -> Store:
    return Store()


# Reservation and commit


def test_a_reserved_key_does_not_exist_and_a_committed_one_does(store: Store) -> None:
    key = make_key(1)
    status, generation = store.reserve(key)
    assert status is Status.OK
    assert not store.has(key)
    assert store.pin(key) is Status.ABSENT
    store.table.commit(key, generation)
    assert store.has(key)
    assert store.table.pin(key, 10, LAYOUT, 0.0) == (Status.OK, 0, 99, 1, generation)


def test_the_first_writer_wins(store: Store) -> None:
    key = make_key(1)
    _, generation = store.reserve(key, owner="first")
    assert store.reserve(key, owner="second")[0] is Status.PENDING
    assert store.reserve(key, owner="first")[0] is Status.PENDING
    store.table.commit(key, generation)
    assert store.reserve(key, owner="second")[0] is Status.EXISTS
    counters = store.table.statistics().counters
    assert (counters.refused_pending, counters.refused_exists, counters.commits) == (2, 1, 1)


def test_abort_gives_the_bytes_back_and_the_key_to_the_next_writer(store: Store) -> None:
    key = make_key(1)
    _, generation = store.reserve(key)
    store.table.abort(key, generation)
    assert store.arena.statistics().used == 0
    status, second = store.reserve(key)
    assert (status, second != generation) == (Status.OK, True)


@pytest.mark.parametrize("verb", ["commit", "abort", "unpin"])
def test_ending_what_is_not_open_raises(store: Store, verb: str) -> None:
    key = make_key(1)
    generation = store.put(key)
    end = getattr(store.table, verb)
    for wrong in (generation, generation + 1):
        with pytest.raises(LocalProtocolError):
            end(key, wrong)
    _, reserved = store.reserve(make_key(2))
    with pytest.raises(LocalProtocolError):
        end(key, reserved)  # another key's generation
    if verb == "unpin":
        with pytest.raises(LocalProtocolError, match="RESERVED"):
            end(make_key(2), reserved)


def test_a_pinned_value_cannot_be_committed_or_aborted(store: Store) -> None:
    key = make_key(1)
    generation = store.put(key)
    store.pin(key)
    for verb in (store.table.commit, store.table.abort):
        with pytest.raises(LocalProtocolError, match="PINNED"):
            verb(key, generation)


def test_every_state_has_a_way_out_and_absent_follows_only_ended_transfers() -> None:
    assert {state for state, _ in TRANSITIONS} == set(EntryState)
    to_absent = {pair for pair, after in TRANSITIONS.items() if after is EntryState.ABSENT}
    assert to_absent == {
        (EntryState.RESERVED, EntryEvent.ABORT),
        (EntryState.COMPLETE, EntryEvent.REMOVE),
        (EntryState.EVICTING, EntryEvent.LAST_UNPIN),
        (EntryState.ON_DISK, EntryEvent.REMOVE),  # has no extent
    }


def test_release_owner_lists_the_open_reservations_of_one_session(store: Store) -> None:
    keys = [make_key(block) for block in range(4)]
    generations = [store.reserve(key, owner=owner)[1] for key, owner in zip(keys, "aaab", strict=True)]
    store.table.commit(keys[0], generations[0])
    store.table.abort(keys[1], generations[1])
    assert store.table.release_owner("a") == [(keys[2], generations[2])]
    assert store.table.release_owner("b") == [(keys[3], generations[3])]
    assert store.table.release_owner("nobody") == []
    assert store.table.statistics().reserved == 2  # listing them changes nothing


def test_the_table_compares_whole_keys() -> None:
    """P015: keys that agree in all but one byte, wherever it stands, are different keys."""
    store = Store(size=1000)
    base = make_key(1)
    keys = {bytes(byte ^ (0x80 if at == flip else 0) for at, byte in enumerate(base)) for flip in range(len(base))}
    for key in keys:
        store.put(key)
    assert store.table.statistics().complete == len(base)


# Reading


def test_length_and_layout_must_agree(store: Store) -> None:
    key = make_key(1)
    store.put(key)
    assert store.pin(key, length=9) is Status.BAD_LENGTH
    assert store.pin(key, layout=8) is Status.BAD_LAYOUT
    assert store.pin(make_key(2)) is Status.ABSENT
    stats = store.table.statistics()
    assert (stats.pinned, stats.counters.mismatches, stats.counters.misses, stats.counters.hits) == (0, 2, 1, 0)


def test_exists_answers_a_bit_per_shard_lowest_first(store: Store) -> None:
    for shard in (0, 3, 8):
        store.put(make_key(1, shard), length=1)
    store.reserve(make_key(1, 1), length=1)
    store.put(make_key(3, 9), length=1)
    prefixes = [make_key(block)[:-2] for block in (1, 2, 3)]
    assert store.table.exists(prefixes, 10, 0.0) == bytes([0b1001, 0b1, 0, 0, 0, 0b10])
    assert store.table.exists(prefixes, 8, 0.0) == bytes([0b1001, 0, 0])
    assert store.table.exists([], 8, 0.0) == b""
    assert store.table.statistics().pinned == 0


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("first", [NAMESPACE, OTHER, b"-" * 32])
def test_exists_takes_namespaces_in_any_order_and_notes_their_use(store: Store, first: bytes, shards: int) -> None:
    for namespace in (NAMESPACE, OTHER):
        for shard in range(shards):
            store.put(make_key(1, shard, namespace), length=1)
    prefixes = [make_key(1, 0, first), make_key(2), make_key(1, 0, OTHER), make_key(1), make_key(1, 0, b"-" * 32)]
    every = (1 << shards) - 1
    expected = [0 if first == b"-" * 32 else every, 0, every, every, 0]
    assert store.table.exists([prefix[:-2] for prefix in prefixes], shards, 5.0) == bytes(expected)
    assert {row.namespace: row.last_used for row in store.table.namespaces()} == {NAMESPACE: 5.0, OTHER: 5.0}


def test_a_lookup_counts_as_a_use() -> None:
    store = Store(size=20)
    old, new = make_key(1), make_key(2)
    store.put(old)
    store.put(new)
    assert store.has(old)
    store.put(make_key(3))
    assert (store.has(old), store.has(new)) == (True, False)


# Eviction


def test_a_full_store_keeps_accepting_and_evicts_the_oldest() -> None:
    store = Store(size=30)
    for block in range(10):
        store.put(make_key(block))
    assert [store.has(make_key(block)) for block in range(10)] == [False] * 7 + [True] * 3
    counters = store.table.statistics().counters
    assert (counters.evictions, counters.evicted_bytes) == (7, 70)


def test_pinned_and_reserved_values_are_never_evicted() -> None:
    store = Store(size=30)
    pinned, reserved = make_key(1), make_key(2)
    generation = store.put(pinned)
    store.pin(pinned)
    _, writing = store.reserve(reserved)
    for block in range(3, 9):
        store.put(make_key(block))
    assert store.has(pinned)
    store.table.commit(reserved, writing)
    store.table.unpin(pinned, generation)
    store.put(make_key(9), length=30)
    assert not store.has(pinned)
    assert not store.has(reserved)


def test_no_space_while_everything_is_in_use_and_nothing_is_evicted_in_vain() -> None:
    store = Store(size=30)
    store.put(make_key(1))
    store.pin(make_key(1))
    store.put(make_key(2))
    assert store.reserve(make_key(3), length=21)[0] is Status.NO_SPACE
    assert store.has(make_key(2))
    assert store.table.statistics().counters.refused_no_space == 1
    assert store.reserve(make_key(3), length=20)[0] is Status.OK


def test_when_enough_is_free_in_holes_that_are_too_short_a_neighbour_goes_out_of_its_order() -> None:
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    for block in range(0, 10, 2):  # the odd ones are the oldest: holes of 10 apart
        assert store.has(make_key(block))
    result = store.table.reserve(make_key(99), 20, 0, 0, 0, "me", 0.0)
    assert (result.status, result.evicted) == (Status.OK, 3)  # 1 and 3, then what stands behind one of the holes
    assert store.table.statistics().counters.window_evictions == 1


def test_a_neighbour_that_is_in_use_is_passed_by() -> None:
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    for block in range(0, 10, 2):
        assert store.has(make_key(block))
    for block in (2, 4):  # they stand behind the first two holes
        store.pin(make_key(block))
    result = store.table.reserve(make_key(99), 20, 0, 0, 0, "me", 0.0)
    assert result.status is Status.OK
    assert store.has(make_key(2)) and store.has(make_key(4))


def test_a_pin_that_splits_the_arena_ends_in_no_space_not_in_a_loop() -> None:
    store = Store(size=30)
    for block in range(3):
        store.put(make_key(block))
    store.pin(make_key(1))
    assert store.reserve(make_key(9), length=20)[0] is Status.NO_SPACE


def test_too_large_is_refused_without_eviction() -> None:
    store = Store(size=100, max_value_bytes=50)
    store.put(make_key(1))
    assert store.reserve(make_key(2), length=51)[0] is Status.TOO_LARGE
    assert Store(size=100).reserve(make_key(2), length=101)[0] is Status.TOO_LARGE
    assert store.has(make_key(1))
    assert store.table.statistics().counters.refused_too_large == 1


def test_the_number_of_entries_is_bounded() -> None:
    store = Store(size=100, max_entries=2)
    for block in range(3):
        store.put(make_key(block), length=1)
    assert store.table.statistics().entries == 2
    assert not store.has(make_key(0))
    store.pin(make_key(1), length=1)
    store.pin(make_key(2), length=1)
    assert store.reserve(make_key(9), length=1)[0] is Status.NO_SPACE


def test_in_use_bytes_count_in_granules() -> None:
    """Two values of one byte hold two granules: nothing that needs the whole arena may evict for it in vain."""
    store = Store(size=300, granule=100)
    store.put(make_key(1), length=1)
    store.pin(make_key(1), length=1)
    store.put(make_key(2), length=1)
    assert store.reserve(make_key(3), length=201)[0] is Status.NO_SPACE
    assert store.has(make_key(2))


# Removal


def test_delete_is_immediate_and_readers_in_flight_finish(store: Store) -> None:
    key = make_key(1)
    generation = store.put(key)
    store.pin(key)
    store.pin(key)
    assert store.table.delete(key)
    assert not store.table.delete(key)
    assert store.pin(key) is Status.ABSENT
    again = store.table.reserve(key, 10, 0, 0, 0, "me", 0.0)
    assert (again.status, again.offset) == (Status.OK, 10)  # not on the bytes that are being read
    store.table.unpin(key, generation)
    assert store.arena.statistics().used == 20
    store.table.unpin(key, generation)
    assert store.arena.statistics().used == 10
    with pytest.raises(LocalProtocolError):
        store.table.unpin(key, generation)


def test_a_reservation_survives_delete(store: Store) -> None:
    """Its extent is the target of a pull: delete sees an absent key, the put lands after it."""
    key = make_key(1)
    _, generation = store.reserve(key)
    assert not store.table.delete(key)
    assert store.arena.statistics().used == 10
    assert store.table.commit(key, generation)
    assert store.has(key)


def test_report_bad_hides_the_very_value(store: Store) -> None:
    key = make_key(1)
    generation = store.put(key)
    store.pin(key)
    assert not store.table.report_bad(key, generation + 1)
    assert store.table.report_bad(key, generation)
    assert not store.table.report_bad(key, generation)
    assert not store.has(key)
    assert store.arena.statistics().used == 10
    store.table.unpin(key, generation)
    assert store.arena.statistics().used == 0
    newer = store.put(key)
    assert newer != generation
    assert not store.table.report_bad(key, generation)
    assert store.has(key)


# Reset


def test_reset_hides_one_namespace_at_once(store: Store) -> None:
    mine, other = make_key(1), make_key(1, namespace=OTHER)
    store.put(mine)
    store.put(other)
    assert store.table.reset_namespace(NAMESPACE) == 1
    assert (store.has(mine), store.has(other)) == (False, True)
    assert store.pin(mine) is Status.ABSENT
    assert not store.table.delete(mine)
    assert store.table.reset_namespace(NAMESPACE) == 0
    stats = store.table.statistics()
    assert (stats.complete, stats.stale, stats.entries) == (1, 1, 2)
    store.put(mine)
    assert store.has(mine)


def test_a_reservation_of_an_older_epoch_ends_invisible_and_freed(store: Store) -> None:
    key = make_key(1)
    _, old = store.reserve(key)
    store.table.reset_namespace(NAMESPACE)
    newer = store.put(key)  # absent for the new epoch, so not PENDING
    assert not store.table.commit(key, old)
    assert store.arena.statistics().used == 10
    assert store.table.pin(key, 10, LAYOUT, 0.0).generation == newer
    assert store.table.statistics().counters.commits_hidden == 1


def test_an_aborted_reservation_of_an_older_epoch_is_freed_once(store: Store) -> None:
    key = make_key(1)
    _, old = store.reserve(key)
    store.table.reset_namespace(NAMESPACE)
    store.table.sweep(10)
    store.table.abort(key, old)
    assert store.arena.statistics().used == 0


def test_a_value_pinned_over_a_reset_is_freed_at_the_last_unpin(store: Store) -> None:
    key = make_key(1)
    generation = store.put(key)
    store.pin(key)
    store.table.reset_namespace(NAMESPACE)
    store.put(key)
    assert store.arena.statistics().used == 20
    store.table.unpin(key, generation)
    assert store.arena.statistics().used == 10
    assert store.has(key)


def test_an_unswept_pinned_value_of_an_older_epoch_is_freed_at_unpin_too(store: Store) -> None:
    key = make_key(1)
    generation = store.put(key)
    store.pin(key)
    store.table.reset_namespace(NAMESPACE)
    store.table.unpin(key, generation)
    assert store.arena.statistics().used == 0
    assert len(store.policy) == 0


def test_allocation_prefers_stale_values_to_evictions() -> None:
    store = Store(size=30)
    live, stale, newest = make_key(1, namespace=OTHER), make_key(2), make_key(3, namespace=OTHER)
    store.put(live)
    store.put(stale)
    store.table.reset_namespace(NAMESPACE)
    store.put(newest)
    store.put(make_key(4, namespace=OTHER))
    assert store.has(live)
    counters = store.table.statistics().counters
    assert (counters.evictions, counters.reclaimed) == (0, 1)


def test_sweep_reclaims_in_bounded_steps() -> None:
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    store.table.reset_namespace(NAMESPACE)
    assert store.arena.statistics().used == 100  # the reset itself touched nothing
    assert store.table.sweep(4) == 4
    assert store.arena.statistics().used == 60
    assert store.table.sweep(100) == 6
    assert store.table.sweep(100) == 0
    assert store.arena.statistics().used == 0
    assert len(store.policy) == 0


# Statistics


def test_statistics_show_gauges_and_the_oldest_reservation(store: Store) -> None:
    store.put(make_key(1))
    store.pin(make_key(1))
    store.reserve(make_key(2), now=5.0)
    store.reserve(make_key(3), now=3.0)
    stats = store.table.statistics()
    assert stats[:7] == (3, 1, 2, 1, 0, 30, 3.0)
    assert repr(store.table) == "<Table 1 complete of 3 entries, 3 in use>"


def test_statistics_are_a_copy(store: Store) -> None:
    before = astuple(store.table.statistics().counters)
    held = store.table.statistics().counters
    store.put(make_key(1))
    assert astuple(held) == before


def test_namespaces_without_values_cost_nothing(store: Store) -> None:
    for number in range(1000):
        namespace = number.to_bytes(32, "big")
        key = make_key(1, namespace=namespace)
        store.put(key)
        assert store.table.reset_namespace(namespace) == 1
        assert store.table.reset_namespace(namespace) == 0
        store.table.sweep(10)
        store.put(key)
        store.table.delete(key)
    assert (len(store.table._spaces), store.table._namespaces.num_stale()) == (0, 0)


# Namespaces, gc, evict


def test_namespaces_show_what_they_hold_and_their_last_use() -> None:
    store = Store(size=1000, granule=16)
    store.put(make_key(1))
    store.put(make_key(2), length=20)
    store.reserve(make_key(3), length=5, now=1.0)
    store.table.reserve(make_key(1, namespace=OTHER), 7, 0, 0, LAYOUT, "me", 2.0)
    assert store.table.namespaces() == [
        NamespaceStatistics(NAMESPACE, 2, 64, 0, 1.0),
        NamespaceStatistics(OTHER, 0, 16, 0, 2.0),
    ]


@pytest.mark.parametrize("use", ["pin", "exists", "reserve"])
def test_every_use_of_a_namespace_counts_as_one(use: str) -> None:
    store = Store()
    store.put(make_key(1))
    if use == "pin":
        store.table.pin(make_key(1), 10, LAYOUT, 7.0)
    elif use == "exists":
        store.table.exists([make_key(9)[:-2]], 1, 7.0)
    else:
        store.table.reserve(make_key(2), 1, 0, 0, LAYOUT, "me", 7.0)
    (shown,) = store.table.namespaces()
    assert shown.last_used == 7.0


def test_gc_drops_idle_namespaces_and_no_others() -> None:
    """P097: a namespace whose engines are gone (another block size, another TP) does not stay for ever."""
    store = Store()
    for name, now in ((NAMESPACE, 0.0), (OTHER, 50.0)):
        _, generation = store.reserve(make_key(1, namespace=name), now=now)
        store.table.commit(make_key(1, namespace=name), generation)
    assert store.table.gc(idle_s=100.0, now=99.0) == []
    assert store.table.gc(idle_s=100.0, now=100.0) == [NamespaceStatistics(NAMESPACE, 1, 10, 0, 0.0)]
    assert not store.has(make_key(1))
    assert store.has(make_key(1, namespace=OTHER))
    assert store.arena.statistics().used == 20  # O(1): the bytes go with the next allocation or sweep
    assert store.table.sweep(10) == 1
    assert store.arena.statistics().used == 10


def test_an_older_epoch_is_collected_by_the_puts_of_the_new_one() -> None:
    """P006: after the bump all old keys miss, and their bytes are what new values take first."""
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    store.table.reset_namespace(NAMESPACE)
    for block in range(10):
        assert not store.has(make_key(block))
        store.put(make_key(block))
    counters = store.table.statistics().counters
    assert (counters.reclaimed, counters.evictions, store.table.statistics().stale) == (10, 0, 0)


def test_sweeping_a_large_stale_space_costs_the_same_for_each_entry() -> None:
    """Emptied from its start, a dictionary is searched over the gap each time: quadratic, minutes for a million."""
    store = Store(size=30_000)
    for block in range(30_000):
        store.put(make_key(block), length=1)
    store.table.reset_namespace(NAMESPACE)
    steps = Steps()
    (space,) = store.table._namespaces._stale
    space.entries = steps.watch(space.entries)
    assert store.table.sweep(30_000) == 30_000
    assert steps.full_walks == 0


class Steps:
    """Counts walks over a dictionary from its start."""

    full_walks = 0

    def watch(self, entries: dict[bytes, Any]) -> dict[bytes, Any]:
        outer = self

        class Watched(dict[bytes, Any]):
            def __iter__(self) -> Any:
                outer.full_walks += 1
                return super().__iter__()

            def values(self) -> Any:
                outer.full_walks += 1
                return super().values()

        return Watched(entries)


def test_evict_frees_what_was_asked_for_and_nothing_in_use() -> None:
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    store.pin(make_key(0))
    assert store.table.evict(25, 100) == (3, 30)
    assert [store.has(make_key(block)) for block in range(5)] == [True, False, False, False, True]
    assert store.table.evict(1000, 2) == (2, 20)
    assert store.table.evict(1000, 100) == (4, 40)
    assert store.table.evict(1000, 100) == (0, 0)
    assert store.arena.statistics().used == 10


def test_evict_takes_what_resets_left_first() -> None:
    store = Store(size=100)
    store.put(make_key(1, namespace=OTHER))
    store.put(make_key(1))
    store.table.reset_namespace(NAMESPACE)
    assert store.table.evict(5, 100) == (1, 10)
    assert store.has(make_key(1, namespace=OTHER))


# Watermarks


def test_above_the_high_watermark_each_put_frees_more_until_the_low_one_is_reached() -> None:
    store = Store(size=10_000, high_watermark=0.9, low_watermark=0.5)
    for block in range(900):
        store.put(make_key(block))
    assert store.arena.used == 9000
    assert store.table.statistics().counters.evictions == 0
    used = []
    for block in range(900, 935):
        store.put(make_key(block))
        used.append(store.arena.used)
    steps = [before - after for before, after in zip(used, used[1:], strict=False)]
    fall = [step for step in steps if step > 0]
    assert min(used) == 5000 + 10 - 10  # the low watermark, exactly
    assert max(fall) == 10 * (EXTRA_EVICTIONS - 1)  # one put's worth of work is bounded
    assert [step for step in steps if step < 0] == [-10] * (len(steps) - len(fall))  # hysteresis: it rests until 0.9


def test_a_watermark_takes_nothing_that_is_in_use() -> None:
    store = Store(size=100, high_watermark=0.5, low_watermark=0.1)
    for block in range(5):
        store.put(make_key(block))
        store.pin(make_key(block))
    assert store.reserve(make_key(9))[0] is Status.OK
    assert all(store.has(make_key(block)) for block in range(5))


def test_without_watermarks_the_arena_is_used_to_its_end() -> None:
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    assert all(store.has(make_key(block)) for block in range(10))


# Quota


def quota_store(part: float, size: int = 100) -> Store:
    return Store(size=size, policy=make_policy("lru", per_namespace=True), namespace_quota=part)


def test_a_noisy_namespace_evicts_its_own_values_first() -> None:
    """P089: one tenant that floods the store cannot push out the others."""
    store = quota_store(0.5)
    quiet = [make_key(block, namespace=OTHER) for block in range(5)]
    for key in quiet:
        store.put(key)
    for block in range(200):
        store.put(make_key(block))
    assert all(store.has(key) for key in quiet)
    assert [store.has(make_key(block)) for block in range(193, 200)] == [False, False] + [True] * 5
    shown = {s.namespace: s.arena_bytes for s in store.table.namespaces()}
    assert shown == {NAMESPACE: 50, OTHER: 50}


def test_without_a_quota_it_does_push_them_out() -> None:
    store = Store()
    store.put(make_key(1, namespace=OTHER))
    for block in range(200):
        store.put(make_key(block))
    assert not store.has(make_key(1, namespace=OTHER))


def test_a_namespace_whose_values_are_all_in_use_is_refused_at_its_quota() -> None:
    store = quota_store(0.3)
    for block in range(3):
        store.put(make_key(block))
        store.pin(make_key(block))
    assert store.reserve(make_key(9))[0] is Status.NO_SPACE
    assert store.reserve(make_key(9, namespace=OTHER))[0] is Status.OK
    counters = store.table.statistics().counters
    assert (counters.refused_quota, counters.refused_no_space) == (1, 1)


def test_a_value_larger_than_the_quota_is_too_large() -> None:
    """P083: told at once, for no eviction could ever make room for it."""
    store = quota_store(0.3)
    assert store.reserve(make_key(1), length=31)[0] is Status.TOO_LARGE
    assert store.reserve(make_key(1), length=30)[0] is Status.OK


def test_reservations_count_against_the_quota() -> None:
    store = quota_store(0.3)
    for block in range(3):
        assert store.reserve(make_key(block))[0] is Status.OK
    assert store.reserve(make_key(3))[0] is Status.NO_SPACE


def test_a_quota_needs_an_order_per_namespace() -> None:
    with pytest.raises(LocalProtocolError, match="per namespace"):
        Store(namespace_quota=0.5)


def test_a_put_says_how_much_it_evicted() -> None:
    """P083: evicted to fit, or too large; never rejected without a reason."""
    store = Store(size=30)
    for block in range(3):
        store.put(make_key(block))
    result = store.table.reserve(make_key(9), 25, 0, 0, LAYOUT, "me", 0.0)
    assert (result.status, result.evicted) == (Status.OK, 3)
    assert store.table.reserve(make_key(8), 31, 0, 0, LAYOUT, "me", 0.0) == (Status.TOO_LARGE, 0, 0, 0)
