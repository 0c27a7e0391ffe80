"""The allocator against a naive model: no overlap, exact best fit, all bytes return."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memkv_vllm.store.arena import ArenaAllocator


class ArenaMachine(RuleBasedStateMachine):
    """The model is a list with one cell per granule."""

    @initialize(granules=st.integers(1, 40), granule=st.sampled_from([1, 3, 16]))
    def start(self, granules: int, granule: int) -> None:
        self.granule = granule
        self.arena = ArenaAllocator(granules * granule + granule - 1, granule)
        self.cells = [False] * granules
        self.extents: dict[int, int] = {}

    def holes(self) -> list[tuple[int, int]]:
        """(start, length) of every free run, in granules."""
        found, start = [], None
        for at, used in enumerate([*self.cells, True]):
            if not used and start is None:
                start = at
            elif used and start is not None:
                found.append((start, at - start))
                start = None
        return found

    @rule(length=st.integers(1, 200))
    def allocate(self, length: int) -> None:
        need = -(-length // self.granule)
        fitting = [(size, start) for start, size in self.holes() if size >= need]
        offset = self.arena.allocate(length)
        if not fitting:
            assert offset is None
            return
        start = min(fitting)[1]
        assert offset == start * self.granule
        self.cells[start : start + need] = [True] * need
        self.extents[offset] = need

    @rule(length=st.integers(1, 60), count=st.integers(0, 6))
    def allocate_many(self, length: int, count: int) -> None:
        """As so many single allocations would."""
        need = -(-length // self.granule)
        expected = []
        for _ in range(count):
            fitting = [(size, start) for start, size in self.holes() if size >= need]
            if fitting:
                start = min(fitting)[1]
                expected.append(start * self.granule)
                self.cells[start : start + need] = [True] * need
        assert self.arena.allocate_many(length, count) == expected
        self.extents.update(dict.fromkeys(expected, need))

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free_many(self, data: st.DataObject) -> None:
        offsets = data.draw(st.lists(st.sampled_from(sorted(self.extents)), unique=True))
        for offset in offsets:
            need, start = self.extents.pop(offset), offset // self.granule
            self.cells[start : start + need] = [False] * need
        self.arena.free_many(offsets)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.extents)))
        need = self.extents.pop(offset)
        start = offset // self.granule
        self.cells[start : start + need] = [False] * need
        self.arena.free(offset)

    @invariant()
    def statistics_agree(self) -> None:
        if not hasattr(self, "arena"):
            return
        size, used, free, largest, extents, fragmentation = self.arena.statistics()
        holes = [length * self.granule for _, length in self.holes()]
        assert (size, used) == (len(self.cells) * self.granule, sum(self.cells) * self.granule)
        assert (free, largest, extents) == (size - used, max(holes, default=0), len(self.extents))
        assert fragmentation == (1 - largest / free if free else 0)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for offset in self.extents:
            self.arena.free(offset)
        assert self.arena.statistics().largest_free == self.arena.size
        assert self.arena.allocate(self.arena.size) == 0


TestArena = ArenaMachine.TestCase
