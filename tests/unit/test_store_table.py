"""The table: exact cases of reservation, reading, removal, reset and eviction."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.entries import TRANSITIONS, EntryEvent, EntryState
from memkv_vllm.store.eviction import LruPolicy
from memkv_vllm.store.table import Table, TableLimits
from memkv_vllm.types import Status

NAMESPACE, OTHER = b"N" * 32, b"O" * 32
LAYOUT = 7


def make_key(block: int, shard: int = 0, namespace: bytes = NAMESPACE) -> bytes:
    return b"\x01" + namespace + block.to_bytes(4, "big") + shard.to_bytes(2, "big")


class Store:
    """A table with shorthands; the granule is one byte, so that sizes are exact."""

    def __init__(self, size: int = 100, granule: int = 1, **limits: int) -> None:
        self.arena = ArenaAllocator(size, granule)
        self.policy = LruPolicy()
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
        return self.table.pin(key, length, layout).status

    def has(self, key: bytes) -> bool:
        return self.table.exists([key[:-2]], 1) == b"\x01"


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
    assert store.table.pin(key, 10, LAYOUT) == (Status.OK, 0, 99, 1, generation)


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
    assert store.table.exists(prefixes, 10) == bytes([0b1001, 0b1, 0, 0, 0, 0b10])
    assert store.table.exists(prefixes, 8) == bytes([0b1001, 0, 0])
    assert store.table.exists([], 8) == b""
    assert store.table.statistics().pinned == 0


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


def test_eviction_goes_on_until_a_hole_is_long_enough() -> None:
    store = Store(size=100)
    for block in range(10):
        store.put(make_key(block))
    for block in range(0, 10, 2):  # the odd ones are the oldest: holes of 10 apart
        assert store.has(make_key(block))
    result = store.table.reserve(make_key(99), 20, 0, 0, 0, "me", 0.0)
    assert (result.status, result.evicted) == (Status.OK, 6)


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
    assert store.table.pin(key, 10, LAYOUT).generation == newer
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
    assert (len(store.table._spaces), len(store.table._stale)) == (0, 0)
