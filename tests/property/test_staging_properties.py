"""Any sequence of acquire, release, quarantine and fence: no slot in two hands, none lost (P039, P064, P065)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.plan import MIB
from memkv_vllm.engine.staging import Slot, StagingPool, plan_staging
from memkv_vllm.types import Direction

HOLDERS = [Holder(server, generation) for server in "ab" for generation in (1, 2)]


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool beside a plain model of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.hands: dict[int, Slot] = {}
        self.quarantined: dict[int, set[Holder]] = {}
        self.ended: list[Slot] = []

    @initialize(lanes=st.integers(1, 3), chunk=st.integers(1, 4), own=st.booleans())
    def make(self, lanes: int, chunk: int, own: bool) -> None:
        self.plan = plan = plan_staging(MIB, lanes, chunk, lanes * own, lanes * own, tokens_per_block=16)
        self.pool = StagingPool(plan, region=0)
        self.total = plan.num_slots

    @rule(direction=st.sampled_from(Direction), count=st.integers(0, 12))
    def acquire(self, direction: Direction, count: int) -> None:
        can = self.pool.available(direction)
        slots = self.pool.try_acquire(direction, count)
        assert len(slots) == min(count, can)
        for slot in slots:
            assert slot.index not in self.hands, "in two hands"
            assert slot.index not in self.quarantined, "out of quarantine without a fence"
            self.hands[slot.index] = slot

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        for slot in data.draw(st.lists(st.sampled_from(sorted(self.hands)), unique=True)) if self.hands else []:
            assert self.pool.release([self.hands.pop(slot)]) == 1

    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def quarantine(self, data: st.DataObject, holder: Holder) -> None:
        if not self.hands:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.hands)), unique=True))
        self.pool.quarantine([self.hands[index] for index in chosen], holder)
        second = data.draw(st.sampled_from([None, *HOLDERS]))
        for index in chosen:
            slot = self.hands.pop(index)
            self.quarantined[index] = {holder}
            if second is not None:
                self.pool.quarantine([slot], second)
                self.quarantined[index].add(second)
            self.ended.append(slot)
            assert self.pool.release([slot]) == 0

    @rule(holder=st.sampled_from(HOLDERS))
    def fence(self, holder: Holder) -> None:
        back = [index for index, holders in self.quarantined.items() if holders == {holder}]
        assert self.pool.fenced(holder) == len(back)
        for index in back:
            del self.quarantined[index]
        for holders in self.quarantined.values():
            holders.discard(holder)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.statistics()
        assert (stats.held, stats.quarantined) == (len(self.hands), len(self.quarantined))
        assert stats.free + stats.held + stats.quarantined == stats.total == self.total

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.release(list(self.hands.values()))
        for holder in HOLDERS:
            self.pool.fenced(holder)
        assert self.pool.statistics().free == self.total, "slots leaked"
        assert self.pool.available(Direction.STORE) == self.plan.slots_store
        slots = self.pool.try_acquire(Direction.LOAD, self.total) + self.pool.try_acquire(Direction.STORE, self.total)
        assert len({slot.index for slot in slots}) == self.total
        assert not set(slots) & set(self.ended), "an old generation came back"


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStagingPool = PoolMachine.TestCase
