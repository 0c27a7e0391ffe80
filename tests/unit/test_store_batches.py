"""Whole requests on the table: exact cases of batches that are refused in part, evict, end hidden, or are misused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.batches import NewValues
from memkv_vllm.store.entries import Entry
from memkv_vllm.store.log.api import Location
from memkv_vllm.store.policies import make_policy
from memkv_vllm.store.room import DRAIN_STEP
from memkv_vllm.store.table import Table, TableLimits
from memkv_vllm.types import Status

NAMESPACE, OTHER = b"N" * 32, b"O" * 32
LAYOUT = 7


def make_key(block: int, namespace: bytes = NAMESPACE) -> bytes:
    return b"\x01" + namespace + block.to_bytes(4, "big") + b"\0\0"


class Store:
    """A table with shorthands; the granule is one byte, so that sizes are exact."""

    def __init__(self, size: int = 100, **limits: Any) -> None:
        self.arena = ArenaAllocator(size, 1)
        self.policy = make_policy("lru", per_namespace=limits.get("namespace_quota", 1) < 1)
        self.table = Table(self.arena, self.policy, TableLimits(**limits))
        self.batches = self.table.batches

    def reserve(
        self, keys: Sequence[bytes], lengths: Sequence[int] | int = 10
    ) -> tuple[list[Status], dict[int, Entry]]:
        lengths = [lengths] * len(keys) if isinstance(lengths, int) else lengths
        numbers = list(range(len(keys)))
        statuses, entries = self.batches.reserve(NewValues(keys, lengths, numbers, [LAYOUT] * len(keys), 1, "me"), 0.0)
        return [Status(status) for status in statuses], entries

    def put(self, *blocks: int, length: int = 10) -> list[Entry]:
        statuses, entries = self.reserve([make_key(block) for block in blocks], length)
        assert statuses == [Status.OK] * len(blocks)
        assert self.batches.commit(list(entries.values())) == [True] * len(blocks)
        return list(entries.values())

    def pin(self, *keys: bytes, length: int = 10, layout: int = LAYOUT) -> tuple[list[Status], list[Entry | None]]:
        statuses, found = self.batches.pin(keys, [length] * len(keys), [layout] * len(keys), 0.0)
        return [Status(status) for status in statuses], found

    def has(self, block: int, namespace: bytes = NAMESPACE) -> bool:
        return self.table.exists([make_key(block, namespace)[:-2]], 1, 0.0) == b"\x01"


@pytest.fixture
def store() -> Store:
    return Store()


# Writers


def test_a_batch_lies_side_by_side_and_is_visible_only_when_committed(store: Store) -> None:
    statuses, entries = store.reserve([make_key(block) for block in range(5)])
    assert statuses == [Status.OK] * 5
    assert [entry.offset for entry in entries.values()] == [0, 10, 20, 30, 40]
    assert [entry.checksum for entry in entries.values()] == list(range(5))
    assert not any(store.has(block) for block in range(5))
    store.batches.commit(list(entries.values()))
    assert all(store.has(block) for block in range(5))
    stats = store.table.statistics()
    assert (stats.entries, stats.complete, stats.reserved, stats.bytes_used) == (5, 5, 0, 50)
    assert (stats.counters.reservations, stats.counters.commits) == (5, 5)


def test_each_value_has_its_own_reason(store: Store) -> None:
    store.put(1)
    store.reserve([make_key(2)])
    keys = [make_key(block) for block in (1, 2, 3, 4)]
    statuses, entries = store.reserve(keys, [10, 10, 101, 10])
    assert statuses == [Status.EXISTS, Status.PENDING, Status.TOO_LARGE, Status.OK]
    assert (list(entries), entries[3].key) == ([3], keys[3])
    counters = store.table.statistics().counters
    assert (counters.refused_exists, counters.refused_pending, counters.refused_too_large) == (1, 1, 1)


def test_a_key_twice_is_reserved_once(store: Store) -> None:
    keys = [make_key(1), make_key(2), make_key(1)]
    statuses, entries = store.reserve(keys)
    assert statuses == [Status.OK, Status.OK, Status.PENDING]
    assert list(entries) == [0, 1]


def test_values_of_several_lengths_and_namespaces(store: Store) -> None:
    keys = [make_key(1), make_key(1, OTHER), make_key(2), make_key(2, OTHER)]
    statuses, entries = store.reserve(keys, [10, 20, 30, 40])
    assert statuses == [Status.OK] * 4
    store.batches.commit(list(entries.values()))
    assert {row.namespace: (row.values, row.arena_bytes) for row in store.table.namespaces()} == {
        NAMESPACE: (2, 40),
        OTHER: (2, 60),
    }


def test_values_of_one_length_go_to_the_namespaces_of_their_keys(store: Store) -> None:
    keys = [make_key(1), make_key(1, OTHER), make_key(2)]
    _, entries = store.reserve(keys)
    store.batches.commit(list(entries.values()))
    assert {row.namespace: row.values for row in store.table.namespaces()} == {NAMESPACE: 2, OTHER: 1}
    assert store.has(1, OTHER)


def test_a_namespace_goes_with_the_last_value_that_was_evicted(store: Store) -> None:
    _, entries = store.reserve([make_key(1, OTHER), make_key(2, OTHER)])
    store.batches.commit(list(entries.values()))
    store.put(*range(8))
    store.put(*range(8, 10))
    assert [row.namespace for row in store.table.namespaces()] == [NAMESPACE]


def test_an_empty_batch_is_nothing(store: Store) -> None:
    assert store.reserve([]) == ([], {})
    assert store.pin() == ([], [])


def test_a_full_store_takes_a_batch_and_evicts_the_oldest(store: Store) -> None:
    store.put(*range(10))
    store.has(0)
    store.put(*range(10, 14))
    assert [store.has(block) for block in range(10)] == [True, False, False, False, False] + [True] * 5
    counters = store.table.statistics().counters
    assert (counters.evictions, counters.evicted_bytes) == (4, 40)
    assert store.arena.statistics().used == 100


def test_what_a_batch_finds_it_does_not_evict(store: Store) -> None:
    """One by one, the first value would have taken the place of the second before that was asked for."""
    store.put(*range(10))
    statuses, _ = store.reserve([make_key(10), make_key(0)])
    assert statuses == [Status.OK, Status.EXISTS]
    assert store.has(0)
    assert not store.has(1)


def test_the_rest_of_a_batch_has_no_space_and_nothing_in_use_goes(store: Store) -> None:
    store.put(*range(7))
    store.pin(*[make_key(block) for block in range(7)])
    statuses, entries = store.reserve([make_key(block) for block in range(10, 15)])
    assert statuses == [Status.OK] * 3 + [Status.NO_SPACE] * 2
    assert list(entries) == [0, 1, 2]
    assert all(store.has(block) for block in range(7))
    assert store.table.statistics().counters.refused_no_space == 2


def test_a_batch_into_holes_between_values_in_use(store: Store) -> None:
    store.put(*range(10))
    store.pin(*[make_key(block) for block in range(1, 10, 2)])
    statuses, entries = store.reserve([make_key(block) for block in range(20, 25)])
    assert statuses == [Status.OK] * 5
    assert [entry.offset for entry in entries.values()] == [0, 20, 40, 60, 80]


def test_the_number_of_entries_bounds_a_batch() -> None:
    store = Store(max_entries=4)
    store.put(1, 2, 3)
    store.put(4, 5, 6)
    assert store.table.statistics().entries == 4
    assert [store.has(block) for block in range(1, 7)] == [False, False, True, True, True, True]


def test_a_quota_bounds_a_batch() -> None:
    store = Store(namespace_quota=0.5)
    statuses, entries = store.reserve([make_key(block, OTHER) for block in range(5)])
    store.batches.commit(list(entries.values()))
    store.put(*range(5))
    store.put(*range(5, 8))
    assert [store.has(block) for block in range(8)] == [False] * 3 + [True] * 5
    assert all(store.has(block, OTHER) for block in range(5)), "another namespace paid for it"


def test_a_batch_drains_above_the_watermark_as_its_values_would_have() -> None:
    store = Store(size=1000, high_watermark=0.9, low_watermark=0.5)
    for first in range(0, 90, 10):
        store.put(*range(first, first + 10))
    assert store.arena.used == 900
    store.put(90, 91)
    assert store.arena.used == 920, "nothing had to go for these: what is above the watermark is left to the caller"
    assert not store.batches.drain()  # sixteen more for each at the most: 32 of the 42 above the low watermark
    assert store.arena.used == 600
    assert not store.batches.drain()
    assert store.arena.used == 600


def test_what_a_batch_left_above_the_watermark_goes_before_the_next_one() -> None:
    store = Store(size=1000, high_watermark=0.9, low_watermark=0.5)
    for first in range(0, 90, 10):
        store.put(*range(first, first + 10))
    store.put(90, 91)
    store.put(92, 93)
    assert store.arena.used == 620
    store.batches.drain()
    assert store.arena.used == 500


def test_what_a_batch_owes_is_freed_in_steps_that_the_loop_can_bear() -> None:
    store = Store(size=20_000, high_watermark=0.9, low_watermark=0.5)
    for first in range(0, 1800, 100):
        store.put(*range(first, first + 100))
    store.put(*range(1800, 1810))  # owes 160
    seen = [store.arena.used]
    while store.batches.drain():
        seen.append(store.arena.used)
    assert [*seen, store.arena.used] == [18_100, 18_100 - 10 * DRAIN_STEP, 18_100 - 1600]


@pytest.mark.parametrize("lengths", [[10] * 4, [10, 11, 10, 11]], ids=["of one length", "of two lengths"])
def test_no_batch_pays_for_the_watermark_before_its_bytes_move(lengths: list[int]) -> None:
    store = Store(size=1000, high_watermark=0.9, low_watermark=0.5)
    for first in range(0, 90, 10):
        store.put(*range(first, first + 10))
    store.reserve([make_key(block) for block in range(90, 94)], lengths=lengths)
    assert store.arena.used == 900 + sum(lengths)
    store.batches.drain()
    assert store.arena.used <= 500


def test_a_victim_with_a_record_stays_on_disk(store: Store) -> None:
    for entry in store.put(*range(10)):
        assert store.table.disk.begin_write(entry.key, entry.generation) is not None
        store.table.disk.end_write(entry.generation, Location(0, 0, 0, entry.generation))
    store.put(*range(10, 13))
    stats = store.table.statistics()
    assert (stats.on_disk, stats.complete, stats.counters.demotions, stats.counters.evictions) == (3, 13, 3, 0)
    assert all(store.has(block) for block in range(13))


def test_values_of_an_older_epoch_make_room_first(store: Store) -> None:
    """P006: after a reset the batch takes the old values' place, its own keys' among them."""
    store.put(*range(10))
    store.table.reset_namespace(NAMESPACE)
    store.put(*range(8))
    stats = store.table.statistics()
    assert (stats.complete, stats.stale, stats.counters.reclaimed, stats.counters.evictions) == (8, 2, 8, 0)
    assert store.table.sweep(10) == 2


def test_a_reset_in_between_hides_just_what_was_reserved_before(store: Store) -> None:
    """P022: the batch ends as it must for each of its values."""
    _, old = store.reserve([make_key(1), make_key(2)])
    store.table.reset_namespace(NAMESPACE)
    _, new = store.reserve([make_key(2), make_key(3)])
    assert store.batches.commit([old[0], new[0], old[1], new[1]]) == [False, True, False, True]
    assert [store.has(block) for block in (1, 2, 3)] == [False, True, True]
    stats = store.table.statistics()
    assert (stats.entries, stats.bytes_used, stats.counters.commits_hidden) == (2, 20, 2)
    assert store.arena.statistics().used == 20


def test_abort_gives_everything_back(store: Store) -> None:
    _, entries = store.reserve([make_key(block) for block in range(5)])
    store.batches.abort(list(entries.values()))
    assert store.arena.statistics().largest_free == 100
    assert (store.table.namespaces(), store.table.release_owner("me")) == ([], [])
    assert store.table.statistics().counters.aborts == 5


def test_release_owner_names_what_is_still_reserved(store: Store) -> None:
    _, entries = store.reserve([make_key(1), make_key(2)])
    store.batches.commit([entries[0]])
    assert store.table.release_owner("me") == [(make_key(2), entries[1].generation)]


# Readers


def test_a_batch_is_pinned_and_each_has_its_own_reason(store: Store) -> None:
    (entry, *_) = store.put(1, 2)
    store.reserve([make_key(3)])
    statuses, found = store.pin(make_key(1), make_key(3), make_key(4))
    assert statuses == [Status.OK, Status.ABSENT, Status.ABSENT]
    assert found == [entry, None, None]
    statuses, found = store.pin(make_key(2), make_key(1), length=9)
    assert statuses == [Status.BAD_LENGTH] * 2
    assert [item is not None and item.generation for item in found] == [2, 1]
    assert store.pin(make_key(1), layout=8)[0] == [Status.BAD_LAYOUT]
    stats = store.table.statistics()
    assert (stats.pinned, stats.counters.hits, stats.counters.misses, stats.counters.mismatches) == (1, 1, 2, 3)


def test_a_value_twice_in_a_batch_is_pinned_twice(store: Store) -> None:
    store.put(1)
    _, found = store.pin(make_key(1), make_key(1))
    entries = [entry for entry in found if entry is not None]
    store.table.delete(make_key(1))
    store.batches.unpin(entries[:1])
    assert store.arena.statistics().used == 10
    store.batches.unpin(entries[1:])
    assert store.arena.statistics().used == 0


def test_pins_in_the_order_of_the_batch_are_uses(store: Store) -> None:
    store.put(*range(10))
    _, found = store.pin(make_key(1), make_key(0))
    store.batches.unpin([entry for entry in found if entry is not None])
    assert list(store.policy.victims())[-2:] == [make_key(1), make_key(0)]


# Misuse


@pytest.mark.parametrize("verb", ["commit", "abort", "unpin"])
def test_ending_what_is_not_open_raises(store: Store, verb: str) -> None:
    with pytest.raises(LocalProtocolError, match="COMPLETE"):
        getattr(store.batches, verb)(store.put(1, 2))
    assert (store.has(1), store.table.statistics().complete) == (True, 2)


def test_a_reservation_ends_once(store: Store) -> None:
    _, entries = store.reserve([make_key(1)])
    store.batches.abort(list(entries.values()))
    with pytest.raises(LocalProtocolError, match="ABSENT"):
        store.batches.abort(list(entries.values()))
    with pytest.raises(LocalProtocolError, match="not in use"):
        store.batches.held(make_key(1), entries[0].generation)
