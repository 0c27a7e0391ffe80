"""The table against a model: who owns which bytes, which keys exist, who wins, and that all bytes return."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import LruPolicy
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
    values: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    """Keys that were committed and not removed on request: generation, length, layout. Eviction may take any."""
    generations: set[int] = field(default_factory=set)


class TableMachine(RuleBasedStateMachine):
    @initialize(max_entries=st.sampled_from([3, 100]))
    def start(self, max_entries: int) -> None:
        self.arena = ArenaAllocator(SIZE, GRANULE)
        self.policy = LruPolicy()
        self.table = Table(self.arena, self.policy, TableLimits(max_entries=max_entries))
        self.max_entries = max_entries
        self.model = Model()
        self.layouts: dict[int, int] = {}
        self.counters = astuple(self.table.statistics().counters)

    def existing(self, key: bytes) -> bool:
        """Asks the index itself, since a lookup through the interface counts as a use."""
        return self.table._find(key) is not None

    def pending(self, key: bytes) -> bool:
        return any(transfer.key == key and not transfer.ended_epoch for transfer in self.model.reserved.values())

    @rule(key=keys, length=lengths, owner=st.sampled_from("xy"), layout=st.integers(0, 1))
    def reserve(self, key: bytes, length: int, owner: str, layout: int) -> None:
        existed, pending = self.existing(key), self.pending(key)
        entries = self.table.statistics().entries
        result = self.table.reserve(key, length, 11, 1, layout, owner, 0.0)
        if existed or pending:
            assert result.status is (Status.EXISTS if existed else Status.PENDING)
            assert self.table.statistics().entries == entries
        elif length > SIZE:
            assert result.status is Status.TOO_LARGE
        elif result.status is Status.NO_SPACE:
            in_use = [*self.model.reserved.values(), *self.model.pinned.values()]
            free = SIZE - sum(self.arena.rounded(transfer.length) for transfer in in_use)
            pinned = {transfer.key for transfer in self.model.pinned.values()}
            nothing_evictable = {other for other in KEYS if self.existing(other)} <= pinned
            assert in_use and (nothing_evictable or (self.arena.rounded(length) > free and not result.evicted))
        else:
            assert result.status is Status.OK
            assert result.generation not in self.model.generations
            self.model.generations.add(result.generation)
            transfer = Transfer(key, result.generation, result.offset, length)
            self.model.reserved[result.generation] = transfer
            self.layouts[result.generation] = layout

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
        visible = self.table.commit(transfer.key, generation)
        assert visible is not transfer.ended_epoch
        if visible:
            self.model.values[transfer.key] = (generation, transfer.length, self.layouts[generation])

    @rule(key=keys)
    def read(self, key: bytes) -> None:
        self.pin(key, True, True)

    @rule(key=keys, right_length=st.booleans(), right_layout=st.booleans())
    def pin(self, key: bytes, right_length: bool, right_layout: bool) -> None:
        existed = self.existing(key)
        generation, length, layout = self.model.values.get(key, (0, 1, 0))
        result = self.table.pin(key, length if right_length else length + 1, layout if right_layout else layout + 1)
        if not existed:
            assert result.status is Status.ABSENT
        elif not right_length:
            assert result.status is Status.BAD_LENGTH
        elif not right_layout:
            assert result.status is Status.BAD_LAYOUT
        else:
            assert (result.status, result.generation) == (Status.OK, generation)
            transfer = self.model.pinned.setdefault(generation, Transfer(key, generation, result.offset, length))
            assert transfer.offset == result.offset
            transfer.pins += 1

    @precondition(lambda self: self.model.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(sorted(self.model.pinned)))
        transfer = self.model.pinned[generation]
        transfer.pins -= 1
        if not transfer.pins:
            del self.model.pinned[generation]
        self.table.unpin(transfer.key, generation)

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

    @rule(namespace=st.sampled_from(NAMESPACES))
    def reset(self, namespace: bytes) -> None:
        visible = [key for key in KEYS if key[1:33] == namespace and self.existing(key)]
        used = self.arena.statistics().used
        assert self.table.reset_namespace(namespace) == len(visible)
        assert self.arena.statistics().used == used
        for transfer in self.model.reserved.values():
            transfer.ended_epoch |= transfer.key[1:33] == namespace
        self.model.values = {key: value for key, value in self.model.values.items() if key[1:33] != namespace}

    @rule(steps=st.integers(0, 3))
    def sweep(self, steps: int) -> None:
        assert self.table.sweep(steps) <= steps
        for transfer in self.model.pinned.values():
            assert transfer.offset in self.arena._extents

    @invariant()
    def nobody_shares_bytes_and_nothing_in_use_was_freed(self) -> None:
        if not hasattr(self, "table"):
            return
        owned: set[int] = set()
        transfers = {**self.model.reserved, **self.model.pinned}
        for key, (generation, length, _) in self.model.values.items():
            if self.existing(key) and generation not in transfers:
                entry = self.table._find(key)
                assert entry is not None and (entry.generation, entry.length) == (generation, length)
                transfers[generation] = Transfer(key, generation, entry.offset, length)
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
        assert (stats.reserved, stats.pinned) == (len(self.model.reserved), len(self.model.pinned))
        assert stats.entries == self.arena.statistics().extents <= self.max_entries
        assert set(self.model.pinned) <= set(self.table._held)
        after = astuple(stats.counters)
        assert all(new >= old for new, old in zip(after, self.counters, strict=True))
        self.counters = after

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for generation, transfer in self.model.reserved.items():
            self.table.abort(transfer.key, generation)
        for generation, transfer in self.model.pinned.items():
            for _ in range(transfer.pins):
                self.table.unpin(transfer.key, generation)
        for length in (SIZE, 1, SIZE // 2):  # whatever is left, everything is evictable now
            result = self.table.reserve(KEYS[0][:-1] + b"\xff", length, 0, 0, 0, "z", 0.0)
            assert result.status is Status.OK
            self.table.abort(KEYS[0][:-1] + b"\xff", result.generation)
        for key in KEYS:
            self.table.delete(key)
        self.table.sweep(1000)
        assert self.arena.statistics().largest_free == SIZE
        assert self.table.statistics()[:6] == (0, 0, 0, 0, 0, 0)
        assert (len(self.policy), self.table._spaces, self.table._held, self.table._owned) == (0, {}, {}, {})
        assert self.table._held_bytes == 0


TableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTable = TableMachine.TestCase
