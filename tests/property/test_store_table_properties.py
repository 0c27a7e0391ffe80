"""The table against a model: who owns which bytes, which keys exist, who wins, and that all bytes return.

The arena of these tests has contents: every transfer writes or reads the number of the value's generation, so that an
extent that was given to two owners shows as wrong bytes. A disk is part of it: writes behind, fetches, reclaims.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.batches import NewValues
from memkv_vllm.store.disk_index import FetchOutcome
from memkv_vllm.store.entries import RESIDENT, EntryState
from memkv_vllm.store.log.api import Location, Record, RecoveredValue
from memkv_vllm.store.policies import make_policy
from memkv_vllm.store.table import Table, TableLimits
from memkv_vllm.types import Status

SIZE, GRANULE = 64, 4
NAMESPACES = [b"A" * 32, b"B" * 32]
KEYS = [b"\x01" + namespace + b"h" + shard.to_bytes(2, "big") for namespace in NAMESPACES for shard in range(3)]
keys = st.sampled_from(KEYS)
lengths = st.one_of(st.integers(1, 24), st.integers(1, SIZE + 4))


@dataclass
class Transfer:
    """An extent that a pull writes or pushes read; the table must leave it alone."""

    key: bytes
    generation: int
    offset: int
    length: int
    pins: int = 0
    ended_epoch: bool = False


@dataclass
class Model:
    reserved: dict[int, Transfer] = field(default_factory=dict)
    pinned: dict[int, Transfer] = field(default_factory=dict)
    writing: dict[int, Transfer] = field(default_factory=dict)
    fetching: dict[int, tuple[Transfer, Location]] = field(default_factory=dict)
    values: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    """Keys that were committed and not removed on request: generation, length, layout. Eviction may take any."""
    generations: set[int] = field(default_factory=set)
    disk: dict[Location, tuple[bytes, int, int]] = field(default_factory=dict)
    """Records that a restart would find: key, generation, length."""
    locations: int = 0


class TableMachine(RuleBasedStateMachine):
    @initialize(
        max_entries=st.sampled_from([3, 100]),
        policy=st.sampled_from(["lru", "s3-fifo"]),
        quota=st.sampled_from([1.0, 0.5]),
        high=st.sampled_from([1.0, 0.75]),
    )
    def start(self, max_entries: int, policy: str, quota: float, high: float) -> None:
        self.arena = ArenaAllocator(SIZE, GRANULE)
        self.policy = make_policy(policy, per_namespace=quota < 1)
        self.max_entries, self.quota = max_entries, int(SIZE * quota)
        limits = TableLimits(max_entries, high_watermark=high, low_watermark=0.5, namespace_quota=quota)
        self.table = Table(self.arena, self.policy, limits)
        self.model = Model()
        self.bytes = [0] * SIZE
        self.layouts: dict[int, int] = {}
        self.counters = astuple(self.table.statistics().counters)

    def existing(self, key: bytes) -> bool:
        """Asks the index itself, since a lookup through the interface counts as a use."""
        return self.table._find(key) is not None

    def pending(self, key: bytes) -> bool:
        return any(transfer.key == key and not transfer.ended_epoch for transfer in self.model.reserved.values())

    def states(self, namespace: bytes | None = None) -> list[EntryState]:
        spaces = self.table._spaces
        chosen = spaces.values() if namespace is None else [spaces[namespace]] if namespace in spaces else []
        return [entry.state for space in chosen for entry in space.entries.values()]

    def fill(self, transfer: Transfer) -> None:
        for at in range(transfer.offset, transfer.offset + transfer.length):
            self.bytes[at] = transfer.generation

    def check_bytes(self, transfer: Transfer) -> None:
        found = self.bytes[transfer.offset : transfer.offset + transfer.length]
        assert found == [transfer.generation] * transfer.length

    # Writers

    @rule(key=keys, length=lengths, owner=st.sampled_from("xy"), layout=st.integers(0, 1))
    def reserve(self, key: bytes, length: int, owner: str, layout: int) -> None:
        existed, pending = self.existing(key), self.pending(key)
        entries = self.table.statistics().entries
        result = self.table.reserve(key, length, 11, 1, layout, owner, 0.0)
        if existed or pending:
            assert result.status is (Status.EXISTS if existed else Status.PENDING)
            assert self.table.statistics().entries == entries
        elif length > self.quota:
            assert result.status is Status.TOO_LARGE
        elif result.status is Status.NO_SPACE:
            free = SIZE - sum(self.arena.rounded(transfer.length) for transfer in self.in_use())
            mine = key[1:33] if self.quota < SIZE else None
            nothing_evictable = EntryState.COMPLETE not in self.states(mine) or (
                self.table.statistics().entries >= self.max_entries and EntryState.COMPLETE not in self.states()
            )
            assert self.in_use()
            assert nothing_evictable or (self.arena.rounded(length) > free and not result.evicted)
        else:
            assert result.status is Status.OK
            assert result.generation not in self.model.generations
            self.model.generations.add(result.generation)
            transfer = Transfer(key, result.generation, result.offset, length)
            self.model.reserved[result.generation] = transfer
            self.layouts[result.generation] = layout

    @rule(
        chosen=st.lists(keys, max_size=5),
        alike=st.booleans(),
        lengths=st.lists(st.integers(1, 24), min_size=5, max_size=5),
        ends=st.lists(st.sampled_from(["commit", "abort", "goes on"]), min_size=5, max_size=5),
    )
    def put_batch(self, chosen: list[bytes], alike: bool, lengths: list[int], ends: list[str]) -> None:
        """A whole PUT: reserved together, ended in any way, a part of it later."""
        lengths = [lengths[0] if alike else length for length in lengths][: len(chosen)]
        existed = {key for key in chosen if self.existing(key)}
        pending = {key for key in chosen if self.pending(key)}
        zeros = [0] * len(chosen)
        values = NewValues(chosen, lengths, [11] * len(chosen), zeros, 1, "b")
        statuses, reserved = self.table.batches.reserve(values, 0.0)
        for at, (key, length, status) in enumerate(zip(chosen, lengths, statuses, strict=True)):
            if key in existed:
                # Another of the batch may have been what it was evicted for, if the batch came one by one.
                assert status in (Status.EXISTS, Status.OK, Status.NO_SPACE, Status.PENDING)
            elif key in pending or (key in chosen[:at] and status == Status.PENDING):
                assert status == Status.PENDING
            elif length > self.quota:
                assert status == Status.TOO_LARGE
            else:
                assert status in (Status.OK, Status.NO_SPACE) or key in chosen[:at]
            assert (at in reserved) is (status == Status.OK)
        for entry in reserved.values():
            assert entry.generation not in self.model.generations
            self.model.generations.add(entry.generation)
            self.model.reserved[entry.generation] = Transfer(entry.key, entry.generation, entry.offset, entry.length)
            self.layouts[entry.generation] = 0
        for how in ("commit", "abort"):
            entries = [entry for entry, end in zip(reserved.values(), ends, strict=False) if end == how]
            for entry in entries:
                self.fill(self.model.reserved.pop(entry.generation))
            if how == "abort":
                self.table.batches.abort(entries)
            else:
                assert self.table.batches.commit(entries) == [True] * len(entries)
                for entry in entries:
                    self.model.values[entry.key] = (entry.generation, entry.length, 0)

    @rule(chosen=st.lists(keys, max_size=5))
    def get_batch(self, chosen: list[bytes]) -> None:
        """A whole GET of what the model knows: pinned together, read, and given back together."""
        held = [self.model.values.get(key, (0, 1, 0)) for key in chosen]
        lengths, layouts = [length for _, length, _ in held], [layout for _, _, layout in held]
        existed = [self.table._find(key) for key in chosen]
        statuses, found = self.table.batches.pin(chosen, lengths, layouts, 0.0)
        for before, status, entry in zip(existed, statuses, found, strict=True):
            assert entry is before
            if entry is None:
                assert status == Status.ABSENT
            else:
                assert status == (Status.OK if entry.state in RESIDENT else Status.PENDING)
        pinned = [entry for entry, status in zip(found, statuses, strict=True) if entry and status == Status.OK]
        for entry in pinned:
            self.check_bytes(Transfer(entry.key, entry.generation, entry.offset, entry.length))
        self.table.batches.unpin(pinned)

    def in_use(self) -> list[Transfer]:
        model = self.model
        used = {**model.reserved, **model.writing, **model.pinned}
        return [*used.values(), *(transfer for transfer, _ in model.fetching.values())]

    @precondition(lambda self: self.model.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.model.reserved))))

    @precondition(lambda self: self.model.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(sorted(self.model.reserved)))
        self.table.abort(self.model.reserved.pop(generation).key, generation)

    @rule(key=keys, length=st.integers(1, 24))
    def put(self, key: bytes, length: int) -> None:
        """Both steps at once, so that most runs hold values."""
        self.reserve(key, length, "z", 0)
        for generation, transfer in list(self.model.reserved.items()):
            if transfer.key == key and not transfer.ended_epoch:
                self.end(generation)

    def end(self, generation: int) -> None:
        transfer = self.model.reserved.pop(generation)
        self.fill(transfer)
        visible = self.table.commit(transfer.key, generation)
        assert visible is not transfer.ended_epoch
        if visible:
            self.model.values[transfer.key] = (generation, transfer.length, self.layouts[generation])

    # Readers

    @rule(key=keys)
    def read(self, key: bytes) -> None:
        self.pin(key, True, True)

    @rule(key=keys, right_length=st.booleans(), right_layout=st.booleans())
    def pin(self, key: bytes, right_length: bool, right_layout: bool) -> None:
        entry = self.table._find(key)
        generation, length, layout = self.model.values.get(key, (0, 1, 0))
        asked = (length if right_length else length + 1, layout if right_layout else layout + 1)
        resident = entry is not None and entry.state in RESIDENT
        result = self.table.pin(key, *asked, 0.0)
        if entry is None:
            assert result.status is Status.ABSENT
        elif not right_length:
            assert result.status is Status.BAD_LENGTH
        elif not right_layout:
            assert result.status is Status.BAD_LAYOUT
        elif not resident:
            assert (result.status, result.generation) == (Status.PENDING, generation)
        else:
            assert (result.status, result.generation) == (Status.OK, generation)
            transfer = self.model.pinned.setdefault(generation, Transfer(key, generation, result.offset, length))
            assert transfer.offset == result.offset
            transfer.pins += 1
            self.check_bytes(transfer)

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(sorted(self.model.pinned)))
        transfer = self.model.pinned[generation]
        self.check_bytes(transfer)
        transfer.pins -= 1
        if not transfer.pins:
            del self.model.pinned[generation]
        self.table.unpin(transfer.key, generation)

    @rule(key=keys)
    def look_up(self, key: bytes) -> None:
        assert self.table.exists([key[:-2]], 3, 0.0)[0] >> key[-1] & 1 == self.existing(key)

    # Disk

    @rule(key=keys)
    def begin_write(self, key: bytes) -> None:
        generation, length, _ = self.model.values.get(key, (0, 0, 0))
        entry = self.table._find(key)
        begun = self.table.disk.begin_write(key, generation)
        if begun is None:
            assert entry is None or entry.state not in RESIDENT or entry.location or generation in self.model.writing
        else:
            assert begun.record == Record(key, length, 11, 1, self.layouts[generation])
            transfer = self.model.writing[generation] = Transfer(key, generation, begun.offset, length)
            self.check_bytes(transfer)

    @precondition(lambda self: self.model.writing)
    @rule(data=st.data(), how=st.sampled_from(["written", "written", "failed", "cancelled"]))
    def end_write(self, data: st.DataObject, how: str) -> None:
        generation = data.draw(st.sampled_from(sorted(self.model.writing)))
        transfer = self.model.writing.pop(generation)
        self.check_bytes(transfer)
        if how == "cancelled":
            self.table.disk.cancel_write(generation)
            return
        location = None
        if how == "written":
            self.model.locations += 1
            location = Location(0, 0, 0, self.model.locations)
            self.model.disk[location] = (transfer.key, generation, transfer.length)
        self.table.disk.end_write(generation, location)

    @rule(key=keys, outcome=st.sampled_from([None, *FetchOutcome]))
    def fetch(self, key: bytes, outcome: FetchOutcome | None) -> None:
        """``None``: it goes on."""
        entry = self.table._find(key)
        begun = self.table.disk.begin_fetch(key)
        if begun.status is not Status.OK:
            assert entry is None or entry.state is not EntryState.ON_DISK or self.in_use()
            return
        generation, length, _ = self.model.values[key]
        assert begun.location is not None and begun.generation == generation
        assert self.model.disk[begun.location] == (key, generation, length)
        self.model.fetching[generation] = (Transfer(key, generation, begun.offset, length), begun.location)
        if outcome is not None:
            self.end_one_fetch(generation, outcome)

    @precondition(lambda self: self.model.fetching)
    @rule(data=st.data(), outcome=st.sampled_from(FetchOutcome))
    def end_fetch(self, data: st.DataObject, outcome: FetchOutcome) -> None:
        self.end_one_fetch(data.draw(st.sampled_from(sorted(self.model.fetching))), outcome)

    def end_one_fetch(self, generation: int, outcome: FetchOutcome) -> None:
        transfer, _ = self.model.fetching.pop(generation)
        self.fill(transfer)
        existed = self.table._find(transfer.key)
        was_it = existed is not None and existed.generation == generation
        self.table.disk.end_fetch(generation, outcome)
        assert not (was_it and outcome is FetchOutcome.ARRIVED) or self.existing(transfer.key)

    @precondition(lambda self: self.model.disk)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        location = data.draw(st.sampled_from(sorted(self.model.disk)))
        self.model.disk.pop(location)
        self.table.disk.reclaimed([location])

    @rule(key=keys, length=st.integers(1, 24))
    def recover(self, key: bytes, length: int) -> None:
        """As a start does, at any time: the newer record takes the place of the value that was there."""
        if self.existing(key) or self.pending(key) or length > self.quota:
            return
        self.model.locations += 1
        location = Location(0, 0, 0, self.model.locations)
        entries = self.table.statistics().entries
        before = self.table.entries_made
        self.table.batches._reclaim_older([key])
        self.table.disk.recover([RecoveredValue(Record(key, length, 11, 1, 0), location)], 0.0)
        generation = self.table.entries_made
        self.model.disk[location] = (key, generation, length)
        if generation == before:
            assert entries >= self.max_entries
            return
        self.model.generations.add(generation)
        self.layouts[generation] = 0
        self.model.values[key] = (generation, length, 0)

    # Removal

    @rule(key=keys)
    def delete(self, key: bytes) -> None:
        assert self.table.delete(key) is self.existing_before(key)

    @rule(key=keys, stale=st.booleans())
    def report_bad(self, key: bytes, stale: bool) -> None:
        generation = self.model.values.get(key, (0, 0, 0))[0]
        if stale:
            before = self.existing(key)
            assert not self.table.report_bad(key, generation + 1)
            assert self.existing(key) is before
        else:
            assert self.table.report_bad(key, generation) is self.existing_before(key)

    def existing_before(self, key: bytes) -> bool:
        """Evaluated after the call, from the model: the value was there unless it had been evicted."""
        held = self.model.values.pop(key, None)
        assert not self.existing(key)
        return held is not None and key in self.present

    @rule(namespace=st.sampled_from(NAMESPACES), by_gc=st.booleans())
    def reset(self, namespace: bytes, by_gc: bool) -> None:
        visible = [key for key in KEYS if key[1:33] == namespace and self.existing(key)]
        used = self.arena.statistics().used
        if by_gc:
            space = self.table._spaces.get(namespace)
            if space is None:
                return
            space.last_used = -10.0
            (dropped,) = self.table.gc(5.0, 0.0)
            assert (dropped.namespace, dropped.values) == (namespace, len(visible))
        else:
            assert self.table.reset_namespace(namespace) == len(visible)
        assert self.arena.statistics().used == used
        for transfer in self.model.reserved.values():
            transfer.ended_epoch |= transfer.key[1:33] == namespace
        self.model.values = {key: value for key, value in self.model.values.items() if key[1:33] != namespace}
        # The log's own reset ends every record that exists now.
        self.model.disk = {at: record for at, record in self.model.disk.items() if record[0][1:33] != namespace}

    @rule(steps=st.integers(0, 3))
    def sweep(self, steps: int) -> None:
        assert self.table.sweep(steps) <= steps
        for transfer in self.model.pinned.values():
            assert transfer.offset in self.arena._extents

    @rule(num_bytes=st.integers(0, SIZE), most=st.integers(0, 3))
    def evict(self, num_bytes: int, most: int) -> None:
        before = self.arena.statistics().used
        values, freed = self.table.evict(num_bytes, most)
        assert values <= most
        assert before - self.arena.statistics().used == freed
        if freed < num_bytes and values < most:
            assert EntryState.COMPLETE not in self.states()
            assert self.table.statistics().stale == len([t for t in self.in_use() if self.hidden(t)]) or freed <= before

    def hidden(self, transfer: Transfer) -> bool:
        return self.model.values.get(transfer.key, (0,))[0] != transfer.generation

    # Always

    @invariant()
    def nobody_shares_bytes_and_nothing_in_use_was_freed(self) -> None:
        if not hasattr(self, "table"):
            return
        owned: set[int] = set()
        transfers = {transfer.generation: transfer for transfer in self.in_use()}
        for key, (generation, length, _) in self.model.values.items():
            entry = self.table._find(key)
            if entry is not None and generation not in transfers:
                assert (entry.generation, entry.length) == (generation, length)
                if entry.state in RESIDENT:
                    transfers[generation] = Transfer(key, generation, entry.offset, length)
                    self.check_bytes(transfers[generation])
        for transfer in transfers.values():
            assert transfer.offset in self.arena._extents
            mine = set(range(transfer.offset, transfer.offset + transfer.length))
            assert not mine & owned
            owned |= mine
        assert len(owned) <= self.arena.statistics().used

    @invariant()
    def only_committed_keys_exist_and_numbers_add_up(self) -> None:
        if not hasattr(self, "table"):
            return
        self.present = {key for key in KEYS if self.existing(key)}
        assert self.present <= set(self.model.values)
        # Only deletes, bad reports and resets may hide what is being read, and those take it out of the model.
        in_use = {key for key, held in self.model.values.items() if held[0] in self.model.pinned}
        assert in_use <= self.present
        stats = self.table.statistics()
        assert stats.complete == len(self.present)
        model = self.model
        assert (stats.reserved, stats.pinned) == (len(model.reserved), len(model.pinned))
        assert (stats.writing, stats.fetching) == (len(model.writing), len(model.fetching))
        resident = self.arena.statistics().extents
        without_extent = sum(state is EntryState.ON_DISK for state in self.states())
        assert resident + without_extent <= stats.entries <= self.max_entries
        assert {transfer.generation for transfer in self.in_use()} == set(self.table._content.in_use)
        after = astuple(stats.counters)
        assert all(new >= old for new, old in zip(after, self.counters, strict=True))
        self.counters = after

    @invariant()
    def every_record_is_known_or_dead_once(self) -> None:
        if not hasattr(self, "table"):
            return
        for location in self.table.disk.take_dead():
            self.model.disk.pop(location, None)  # a reset may have ended it already
        held: dict[Location, tuple[bytes, int, int]] = {}
        for space in self.table._spaces.values():
            for key, entry in space.entries.items():
                if entry.location is not None:
                    held[entry.location] = (key, entry.generation, entry.length)
        assert held == self.model.disk
        assert self.table.statistics().disk_bytes >= sum(length for _, _, length in held.values())

    @invariant()
    def bytes_of_namespaces_add_up_and_keep_to_the_quota(self) -> None:
        if not hasattr(self, "table"):
            return
        shown = self.table.namespaces()
        assert {s.namespace for s in shown} == set(self.table._spaces)
        for statistics in shown:
            entries = self.table._spaces[statistics.namespace].entries.values()
            assert statistics.disk_bytes == sum(entry.length for entry in entries if entry.location is not None)
            assert statistics.arena_bytes >= sum(self.arena.rounded(e.length) for e in entries if e.offset >= 0)
            assert statistics.arena_bytes <= self.quota

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for generation, transfer in self.model.reserved.items():
            self.table.abort(transfer.key, generation)
        for generation in self.model.writing:
            self.table.disk.cancel_write(generation)
        for generation in self.model.fetching:
            self.table.disk.end_fetch(generation, FetchOutcome.UNDONE)
        for generation, transfer in self.model.pinned.items():
            for _ in range(transfer.pins):
                self.table.unpin(transfer.key, generation)
        for length in (self.quota, 1, self.quota // 2):  # whatever is left, everything is evictable now
            result = self.table.reserve(KEYS[0][:-1] + b"\xff", length, 0, 0, 0, "z", 0.0)
            assert result.status is Status.OK
            self.table.abort(KEYS[0][:-1] + b"\xff", result.generation)
        for key in KEYS:
            self.table.delete(key)
        self.table.sweep(1000)
        assert self.arena.statistics().largest_free == SIZE
        stats = self.table.statistics()
        assert stats[:6] == (0, 0, 0, 0, 0, 0)
        assert (stats.on_disk, stats.records, stats.disk_bytes) == (0, 0, 0)
        assert (len(self.policy), self.table._spaces) == (0, {})
        assert (self.table._content.in_use, self.table._content.in_use_bytes) == ({}, 0)


TableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTable = pytest.mark.timeout(120)(TableMachine.TestCase)
