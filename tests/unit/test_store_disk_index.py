"""The table's side of a disk: values written behind, demoted, fetched, recovered, reclaimed, and the races of these."""

from __future__ import annotations

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.disk_index import FetchOutcome
from memkv_vllm.store.log.api import Location, Record, RecoveredValue
from memkv_vllm.types import Status
from tests.unit.test_store_table import LAYOUT, NAMESPACE, OTHER, Store, make_key


def at(number: int) -> Location:
    return Location(0, 0, 1, number * 4096)


def record(key: bytes, length: int = 10) -> Record:
    return Record(key, length, 99, 1, LAYOUT)


class DiskStore(Store):
    """With shorthands for what a disk's driver does."""

    def write(self, key: bytes, location: Location | None, length: int = 10) -> int:
        """Puts a value and writes it behind."""
        generation = self.put(key, length)
        self.written(key, generation, location)
        return generation

    def written(self, key: bytes, generation: int, location: Location | None) -> None:
        assert self.table.disk.begin_write(key, generation) is not None
        self.table.disk.end_write(generation, location)

    def demote(self, key: bytes) -> None:
        """Takes its extent from a value that is on disk too."""
        self.table.evict(10**9, 10**9)
        assert self.pin(key) is Status.PENDING

    def fetch(self, key: bytes, outcome: FetchOutcome = FetchOutcome.ARRIVED) -> Status:
        begun = self.table.disk.begin_fetch(key)
        if begun.status is Status.OK:
            self.table.disk.end_fetch(begun.generation, outcome)
        return begun.status

    @property
    def dead(self) -> list[Location]:
        return self.table.disk.take_dead()


@pytest.fixture
def store() -> DiskStore:
    return DiskStore()


KEY = make_key(1)


# Write-behind


def test_a_value_in_both_places_loses_only_its_copy_in_the_arena(store: DiskStore) -> None:
    generation = store.write(KEY, at(0))
    assert store.table.evict(10, 10) == (1, 10)
    assert store.has(KEY)
    assert store.table.pin(KEY, 10, LAYOUT, 0.0) == (Status.PENDING, 0, 0, 0, generation)
    assert store.table.pin(KEY, 9, LAYOUT, 0.0).status is Status.BAD_LENGTH
    assert store.reserve(KEY)[0] is Status.EXISTS
    stats = store.table.statistics()
    assert (stats.complete, stats.on_disk, stats.records, stats.bytes_used, stats.disk_bytes) == (1, 1, 1, 0, 10)
    assert (stats.counters.demotions, stats.counters.evictions) == (1, 0)
    assert store.arena.statistics().used == 0
    assert store.dead == []


def test_an_extent_that_is_being_written_is_never_evicted_or_reused(store: DiskStore) -> None:
    generation = store.put(KEY)
    begun = store.table.disk.begin_write(KEY, generation)
    assert begun is not None
    assert (begun.record, begun.offset) == (record(KEY), 0)
    assert store.table.evict(100, 100) == (0, 0)
    assert store.table.statistics().writing == 1
    assert store.table.statistics().pinned == 0
    assert store.table.delete(KEY)
    status, _ = store.reserve(KEY, 95)
    assert status is Status.NO_SPACE
    store.table.disk.end_write(generation, None)
    assert store.arena.statistics().used == 0


def test_a_value_deleted_while_it_is_written_leaves_a_dead_record(store: DiskStore) -> None:
    """M08: the delete is immediate, and the record that the disk makes afterwards must not bring the value back."""
    generation = store.put(KEY)
    store.table.disk.begin_write(KEY, generation)
    store.table.delete(KEY)
    newer = store.put(KEY)
    store.table.disk.end_write(generation, at(0))
    assert store.dead == [at(0)]
    assert store.table.pin(KEY, 10, LAYOUT, 0.0).generation == newer
    assert store.table.statistics().records == 0


def test_a_value_reset_while_it_is_written_leaves_a_dead_record(store: DiskStore) -> None:
    """P022."""
    generation = store.put(KEY)
    store.table.disk.begin_write(KEY, generation)
    store.table.reset_namespace(NAMESPACE)
    store.table.disk.end_write(generation, at(0))
    assert store.dead == [at(0)]
    assert store.arena.statistics().used == 0


def test_a_value_is_written_once_and_only_as_it_is(store: DiskStore) -> None:
    generation = store.put(KEY)
    assert store.table.disk.begin_write(KEY, generation + 1) is None
    assert store.table.disk.begin_write(make_key(2), generation) is None
    assert store.table.disk.begin_write(KEY, generation) is not None
    assert store.table.disk.begin_write(KEY, generation) is None  # it is under way
    store.table.disk.end_write(generation, at(0))
    assert store.table.disk.begin_write(KEY, generation) is None  # it is there
    with pytest.raises(LocalProtocolError, match="not being written"):
        store.table.disk.end_write(generation, at(0))


def test_a_write_that_failed_leaves_the_value_in_the_arena_alone(store: DiskStore) -> None:
    store.write(KEY, None)
    assert store.table.disk.unwritten() == [(KEY, 1)]
    assert store.table.evict(10, 10) == (1, 10)
    assert not store.has(KEY)
    counters = store.table.statistics().counters
    assert (counters.disk_writes_failed, counters.evictions, counters.demotions) == (1, 1, 0)


def test_a_cancelled_write_can_begin_again(store: DiskStore) -> None:
    generation = store.put(KEY)
    store.table.disk.begin_write(KEY, generation)
    store.table.disk.cancel_write(generation)
    assert store.table.statistics().writing == 0
    store.written(KEY, generation, at(0))
    assert store.table.disk.unwritten() == []


def test_readers_of_a_value_that_is_written_count_beside_the_write(store: DiskStore) -> None:
    generation = store.put(KEY)
    store.table.disk.begin_write(KEY, generation)
    assert store.pin(KEY) is Status.OK
    assert store.table.statistics().pinned == 1
    store.table.disk.end_write(generation, at(0))
    assert store.table.evict(10, 10) == (0, 0)
    store.table.unpin(KEY, generation)
    store.demote(KEY)


# Fetch


def test_a_fetched_value_is_in_both_places_with_the_generation_it_had(store: DiskStore) -> None:
    generation = store.write(KEY, at(0))
    store.demote(KEY)
    begun = store.table.disk.begin_fetch(KEY)
    assert begun == (Status.OK, record(KEY), at(0), 0, generation)
    assert store.has(KEY)
    assert store.pin(KEY) is Status.PENDING  # its bytes are not there yet
    assert store.table.disk.begin_fetch(KEY).status is Status.PENDING
    assert store.table.statistics().fetching == 1
    store.table.disk.end_fetch(generation, FetchOutcome.ARRIVED)
    assert store.table.pin(KEY, 10, LAYOUT, 0.0) == (Status.OK, 0, 99, 1, generation)
    assert store.table.disk.begin_fetch(KEY).status is Status.EXISTS
    stats = store.table.statistics()
    assert (stats.on_disk, stats.records, stats.bytes_used, stats.counters.fetches) == (0, 1, 10, 1)
    store.table.unpin(KEY, generation)
    store.demote(KEY)


def test_the_extent_of_a_fetch_is_in_use_and_makes_room_like_a_put(store: DiskStore) -> None:
    store.write(KEY, at(0))
    store.demote(KEY)
    for block in range(2, 12):
        store.put(make_key(block))
    begun = store.table.disk.begin_fetch(KEY)
    assert begun.status is Status.OK
    assert store.table.statistics().counters.evictions == 1
    assert store.reserve(make_key(99), 95)[0] is Status.NO_SPACE
    store.table.disk.end_fetch(begun.generation, FetchOutcome.ARRIVED)
    assert store.reserve(make_key(99), 95)[0] is Status.OK


def test_a_fetch_without_room_leaves_the_value_on_disk(store: DiskStore) -> None:
    store.write(KEY, at(0))
    store.demote(KEY)
    status, generation = store.reserve(make_key(2), 100)
    assert status is Status.OK
    assert store.fetch(KEY) is Status.NO_SPACE
    assert store.has(KEY)
    store.table.abort(make_key(2), generation)
    assert store.fetch(KEY) is Status.OK


def test_a_record_that_cannot_be_read_costs_its_value(store: DiskStore) -> None:
    store.write(KEY, at(0))
    store.demote(KEY)
    store.fetch(KEY, FetchOutcome.LOST)
    assert not store.has(KEY)
    assert store.dead == [at(0)]
    stats = store.table.statistics()
    assert (stats.entries, stats.records, stats.counters.disk_lost) == (0, 0, 1)
    assert store.arena.statistics().used == 0
    assert store.put(KEY)


def test_an_undone_fetch_can_be_tried_again(store: DiskStore) -> None:
    store.write(KEY, at(0))
    store.demote(KEY)
    store.fetch(KEY, FetchOutcome.UNDONE)
    assert store.has(KEY)
    assert store.arena.statistics().used == 0
    assert store.fetch(KEY) is Status.OK
    assert store.pin(KEY) is Status.OK


@pytest.mark.parametrize("outcome", list(FetchOutcome))
@pytest.mark.parametrize("how", ["delete", "report_bad", "reset", "reset_and_sweep"])
def test_a_value_removed_while_it_is_fetched_frees_its_extent_at_the_end(
    store: DiskStore, outcome: FetchOutcome, how: str
) -> None:
    generation = store.write(KEY, at(0))
    store.demote(KEY)
    store.table.disk.begin_fetch(KEY)
    if how == "delete":
        assert store.table.delete(KEY)
    elif how == "report_bad":
        assert store.table.report_bad(KEY, generation)
    else:
        assert store.table.reset_namespace(NAMESPACE) == 1
        store.table.sweep(10 if how == "reset_and_sweep" else 0)
    assert not store.has(KEY)
    assert store.arena.statistics().used == 10  # bytes may still land there
    newer = store.put(KEY)
    store.table.disk.end_fetch(generation, outcome)
    assert store.arena.statistics().used == 10
    assert store.table.pin(KEY, 10, LAYOUT, 0.0).generation == newer
    assert store.dead == ([at(0)] if how in ("delete", "report_bad") else [])  # else the log's own reset ends it
    with pytest.raises(LocalProtocolError, match="not being fetched"):
        store.table.disk.end_fetch(generation, outcome)


def test_only_a_fetch_can_be_ended_as_one(store: DiskStore) -> None:
    generation = store.put(KEY)
    store.pin(KEY)
    _, reserved = store.reserve(make_key(2))
    for wrong in (generation, reserved, 99):
        with pytest.raises(LocalProtocolError, match="not being fetched"):
            store.table.disk.end_fetch(wrong, FetchOutcome.ARRIVED)
    assert store.table.disk.begin_fetch(make_key(3)).status is Status.ABSENT


# Removal


@pytest.mark.parametrize("resident", [True, False])
def test_a_removed_value_is_dead_on_disk_too(store: DiskStore, resident: bool) -> None:
    first = store.write(KEY, at(0))
    other = store.write(make_key(2), at(1))
    if not resident:
        store.demote(KEY)
    assert store.table.delete(KEY)
    assert store.table.report_bad(make_key(2), other)
    assert not store.table.report_bad(KEY, first)
    assert store.dead == [at(0), at(1)]
    assert store.dead == []
    assert store.table.statistics()[:6] == (0, 0, 0, 0, 0, 0)
    assert len(store.policy) == 0


def test_a_reset_hides_what_is_on_disk_and_leaves_its_records_to_the_log(store: DiskStore) -> None:
    """P022: O(1), whatever is on disk; the log's own reset ends the records."""
    for block in range(5):
        store.write(make_key(block), at(block))
    store.table.evict(30, 10)
    assert store.table.reset_namespace(NAMESPACE) == 5
    assert not any(store.has(make_key(block)) for block in range(5))
    assert store.table.sweep(100) == 5
    assert store.dead == []
    assert store.table.statistics()[:6] == (0, 0, 0, 0, 0, 0)
    assert store.table.statistics().records == 0


def test_a_reclaimed_record_costs_only_values_that_are_nowhere_else(store: DiskStore) -> None:
    for block in range(3):
        store.write(make_key(block), at(block))
    store.table.evict(10, 1)  # block 0: on disk alone
    store.table.disk.reclaimed([at(0), at(1), at(77)])
    assert [store.has(make_key(block)) for block in range(3)] == [False, True, True]
    assert store.dead == []
    stats = store.table.statistics()
    assert (stats.records, stats.disk_bytes, stats.counters.disk_reclaimed) == (1, 10, 1)
    store.table.evict(100, 10)
    assert [store.has(make_key(block)) for block in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("outcome", "there"), [(FetchOutcome.ARRIVED, True), (FetchOutcome.LOST, False), (FetchOutcome.UNDONE, False)]
)
def test_a_record_reclaimed_while_it_is_read(store: DiskStore, outcome: FetchOutcome, there: bool) -> None:
    generation = store.write(KEY, at(0))
    store.demote(KEY)
    store.table.disk.begin_fetch(KEY)
    store.table.disk.reclaimed([at(0)])
    store.table.disk.end_fetch(generation, outcome)
    assert store.has(KEY) is there
    assert store.dead == []
    assert store.arena.statistics().used == (10 if there else 0)
    assert store.table.statistics().on_disk == 0


def test_the_dead_are_told_once_until_they_were_taken(store: DiskStore) -> None:
    told: list[int] = []
    store.table.disk.watch_dead(lambda: told.append(1))
    for block in range(3):
        store.write(make_key(block), at(block))
    store.table.delete(make_key(0))
    store.table.delete(make_key(1))
    assert len(told) == 1
    assert len(store.dead) == 2
    store.table.delete(make_key(2))
    assert len(told) == 2
    other = DiskStore()
    other.write(KEY, at(0))
    other.table.delete(KEY)
    other.table.disk.watch_dead(lambda: told.append(1))  # there is something already
    assert len(told) == 3


# Start


def test_recovered_values_are_there_without_a_byte_of_the_arena(store: DiskStore) -> None:
    found = [RecoveredValue(record(make_key(block)), at(block)) for block in range(3)]
    found.append(RecoveredValue(record(make_key(1, namespace=OTHER)), at(3)))
    assert store.table.disk.recover(found, now=5.0) == 4
    assert all(store.has(make_key(block)) for block in range(3))
    assert store.pin(make_key(0)) is Status.PENDING
    assert store.reserve(make_key(0))[0] is Status.EXISTS
    stats = store.table.statistics()
    assert (stats.entries, stats.complete, stats.on_disk, stats.bytes_used, stats.disk_bytes) == (4, 4, 4, 0, 40)
    assert [(s.namespace, s.values, s.arena_bytes, s.disk_bytes) for s in store.table.namespaces()] == [
        (NAMESPACE, 3, 0, 30),
        (OTHER, 1, 0, 10),
    ]
    assert store.fetch(make_key(2)) is Status.OK
    assert store.pin(make_key(2)) is Status.OK


def test_of_two_records_of_one_key_the_newer_counts(store: DiskStore) -> None:
    store.table.disk.recover([RecoveredValue(record(KEY), at(0)), RecoveredValue(record(KEY), at(1))], 0.0)
    assert store.dead == [at(0)]
    begun = store.table.disk.begin_fetch(KEY)
    assert begun.location == at(1)
    assert store.table.statistics().complete == 1


def test_more_values_than_entries_keep_the_newest() -> None:
    store = DiskStore(max_entries=3)
    store.table.disk.recover([RecoveredValue(record(make_key(n)), at(n)) for n in range(5)], 0.0)
    assert [store.has(make_key(n)) for n in range(5)] == [False, False, True, True, True]
    assert store.dead == [at(0), at(1)]


def test_a_value_that_the_arena_cannot_hold_stays_on_disk_unseen(store: DiskStore) -> None:
    """A smaller arena drops nothing: a larger one sees the value again."""
    store.table.disk.recover([RecoveredValue(record(KEY, 101), at(0)), RecoveredValue(record(make_key(2)), at(1))], 0.0)
    assert not store.has(KEY)
    assert store.has(make_key(2))
    assert store.dead == []
    assert store.table.statistics().counters.recovered_too_large == 1


def test_when_entries_are_short_the_oldest_on_disk_go_first() -> None:
    """M06: the number of entries is bounded, wherever their bytes are."""
    store = DiskStore(max_entries=4)
    for block in range(3):
        store.write(make_key(block), at(block))
    store.table.evict(20, 2)  # blocks 0 and 1: on disk alone
    store.put(make_key(3))
    store.fetch(make_key(0))  # used: now younger than block 1
    store.table.evict(10, 1)
    store.put(make_key(4))
    assert [store.has(make_key(n)) for n in range(5)] == [True, False, True, True, True]
    assert store.dead == [at(1)]
    assert store.table.statistics().entries == 4


def test_values_in_memory_too_are_passed_by_when_entries_are_short() -> None:
    store = DiskStore(max_entries=3)
    for block in range(3):
        store.write(make_key(block), at(block))
    assert store.has(make_key(0)) and store.has(make_key(1))  # so that 2 loses its copy in the arena
    store.table.evict(10, 1)
    store.put(make_key(3))
    assert [store.has(make_key(n)) for n in range(4)] == [True, True, False, True]
    assert store.dead == [at(2)]


def test_when_entries_are_short_and_none_is_on_disk_alone_a_victim_goes_altogether() -> None:
    store = DiskStore(max_entries=2)
    store.write(make_key(0), at(0))
    store.write(make_key(1), at(1))
    store.put(make_key(2))
    assert [store.has(make_key(n)) for n in range(3)] == [False, True, True]
    assert store.dead == [at(0)]
