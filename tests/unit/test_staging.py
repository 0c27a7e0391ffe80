"""The staging arithmetic of the spec's table, and the slot pool's rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.engine.plan import MIB, load_reserve
from memkv_vllm.engine.staging import Slot, StagingPlan, StagingPool, budget_warning, plan_staging, startup_line
from memkv_vllm.errors import ConfigError, LocalProtocolError
from memkv_vllm.types import Direction, MemoryKind

LOAD, STORE = Direction.LOAD, Direction.STORE


def make_plan(lanes: int = 4, chunk: int = 2, load_lanes: int = 0, store_lanes: int = 0) -> StagingPlan:
    return plan_staging(MIB, lanes, chunk, load_lanes, store_lanes, tokens_per_block=16)


@pytest.mark.parametrize(
    ("value_mib", "tokens", "budget_mib", "chunk", "scratch_mib", "tokens_lost"),
    [
        pytest.param(0.25, 16, 128, 64, 64, 4096, id="llama-8b-tp8"),
        pytest.param(0.625, 16, 128, 64, 160, 4096, id="llama-70b-tp8-block16"),
        pytest.param(2.5, 64, 128, 51, 510, 13056, id="llama-70b-tp8-block64"),
        pytest.param(3.5, 64, 128, 36, 504, 9216, id="glm"),
        pytest.param(3.5, 64, 48, 13, 182, 3328, id="glm-48mib"),
        pytest.param(2.0, 16, 128, 64, 512, 4096, id="cap-and-budget"),
        pytest.param(2.25, 16, 128, 56, 504, 3584, id="qwen3-8b"),
        pytest.param(128, 64, 128, 1, 512, 256, id="one-block-fits"),
        pytest.param(129, 64, 128, 1, 516, 256, id="over-the-budget"),
    ],
)
def test_worked_numbers(
    value_mib: float, tokens: int, budget_mib: int, chunk: int, scratch_mib: float, tokens_lost: int
) -> None:
    plan = plan_staging(int(value_mib * MIB), 4, budget_mib, tokens_per_block=tokens)
    assert plan.chunk_blocks == chunk
    assert plan.scratch_bytes == scratch_mib * MIB
    assert plan.tokens_lost == tokens_lost == plan.scratch_bytes * tokens // plan.value_bytes
    assert plan.num_slots == 4 * chunk
    assert plan.headroom is None


def test_ceiling_as_share_of_an_h200() -> None:
    plan = plan_staging(2 * MIB, total_gpu_bytes=141_000_000_000, tokens_per_block=16)
    assert plan.scratch_bytes == 512 * MIB
    assert plan.headroom == pytest.approx(0.0038, abs=0.00005)


@given(value=st.integers(1, 128 * MIB), lanes=st.integers(1, 16), budget=st.integers(1, 256))
def test_scratch_is_bounded(value: int, lanes: int, budget: int) -> None:
    plan = plan_staging(value, lanes, budget, tokens_per_block=16)
    assert 1 <= plan.chunk_blocks <= 64
    assert plan.scratch_bytes <= lanes * max(budget * MIB, value)
    assert plan_staging(value, tokens_per_block=16).scratch_bytes <= 512 * MIB


def test_directions_with_lanes_of_their_own() -> None:
    plan = make_plan(chunk=5, load_lanes=3, store_lanes=2)
    assert (plan.lanes_load, plan.lanes_store, plan.num_lanes) == (3, 2, 5)
    assert (plan.slots_load, plan.slots_store, plan.num_slots) == (15, 10, 25)
    assert not plan.shared


@pytest.mark.parametrize(("slots", "reserve"), [(1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (8, 2), (256, 64)])
def test_load_reserve(slots: int, reserve: int) -> None:
    assert load_reserve(slots) == reserve
    plan = make_plan(lanes=slots, chunk=1)
    assert (plan.slots_load, plan.slots_store) == (slots, slots - reserve)


def test_all_bad_numbers_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_staging(0, 0, 0, 2, 0, tokens_per_block=0)
    assert len(caught.value.problems) == 5
    assert "memkv_store_threads" in str(caught.value)


def test_startup_line_has_the_names_operators_look_for() -> None:
    plan = plan_staging(int(3.5 * MIB), tokens_per_block=64)
    assert startup_line(3, 99, 99, plan, MemoryKind.HOST) == (
        "rank=3 tensors=99 layers/block=99 value=3.5MiB threads=4 chunk=36 scratch=504MiB medium=host"
    )
    assert "value=0.956MiB" in startup_line(0, 1, 1, plan_staging(1_002_240, tokens_per_block=256), MemoryKind.GPU)


def test_budget_warning_names_the_setting_and_a_value_that_works() -> None:
    assert budget_warning(plan_staging(64 * MIB, tokens_per_block=16)) is None
    warning = budget_warning(plan_staging(64 * MIB + 1, tokens_per_block=16))
    assert warning is not None
    assert "chunk=1" in warning
    assert "memkv_scratch_mb_per_thread to at least 129 " in warning
    assert plan_staging(64 * MIB + 1, 4, 129, tokens_per_block=16).chunk_blocks == 2


class TestPool:
    def test_slots_tile_the_region(self) -> None:
        slots = StagingPool(make_plan(), region=7).try_acquire(LOAD, 100)
        assert [(s.region, s.offset, s.length) for s in slots] == [(7, i * MIB, MIB) for i in range(8)]

    def test_stores_leave_a_quarter_to_loads(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        assert len(pool.try_acquire(STORE, 100)) == 6
        assert pool.try_acquire(STORE, 1) == []
        assert len(pool.try_acquire(LOAD, 100)) == 2

    def test_released_and_quarantined_stores_give_their_share_back(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        slots = pool.try_acquire(STORE, 6)
        pool.release(slots[:3])
        pool.quarantine(slots[3:], "peer")
        pool.fenced("peer")
        assert len(pool.try_acquire(STORE, 100)) == 6

    def test_loads_may_take_all_and_stores_wait(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        loads = pool.try_acquire(LOAD, 8)
        pool.release(loads[:1])
        assert len(pool.try_acquire(STORE, 8)) == 1
        assert pool.statistics() == (0, 8, 0, 8, 8)

    def test_reserve_is_of_the_slots_that_are_left(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        pool.quarantine(pool.try_acquire(LOAD, 4), "peer")
        assert len(pool.try_acquire(STORE, 8)) == 3

    def test_single_slot_serves_both_directions(self) -> None:
        pool = StagingPool(make_plan(lanes=1, chunk=1), region=0)
        pool.release(pool.try_acquire(STORE, 1))
        assert len(pool.try_acquire(LOAD, 1)) == 1

    def test_separate_shares_do_not_mix(self) -> None:
        pool = StagingPool(make_plan(chunk=2, load_lanes=3, store_lanes=1), region=0)
        assert len(pool.try_acquire(STORE, 100)) == 2
        assert len(pool.try_acquire(LOAD, 100)) == 6

    def test_double_release_raises_and_changes_nothing(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        first, second = pool.try_acquire(LOAD, 2)
        assert pool.release([first]) == 1
        for bad in ([first], [second, first], [second, second], [Slot(99, 0, 0, MIB, 0)]):
            with pytest.raises(LocalProtocolError):
                pool.release(bad)
        assert pool.statistics().held == 1

    def test_stale_generation_raises(self) -> None:
        pool = StagingPool(make_plan(lanes=1, chunk=1), region=0)
        (stale,) = pool.try_acquire(LOAD, 1)
        pool.release([stale])
        (fresh,) = pool.try_acquire(LOAD, 1)
        assert (fresh.index, fresh.generation) == (stale.index, stale.generation + 1)
        with pytest.raises(LocalProtocolError, match="is now"):
            pool.release([stale])
        with pytest.raises(LocalProtocolError):
            pool.quarantine([stale], "peer")

    def test_quarantined_comes_back_by_fence_only(self) -> None:
        """Fault P039: a timed-out buffer is not handed out again while a peer may write into it."""
        pool = StagingPool(make_plan(lanes=1, chunk=1), region=0)
        slots = pool.try_acquire(STORE, 1)
        pool.quarantine(slots, ("server", 1))
        assert pool.release(slots) == 0
        assert pool.try_acquire(LOAD, 1) == []
        assert pool.fenced(("server", 2)) == 0
        assert pool.fenced(("server", 1)) == 1
        assert pool.fenced(("server", 1)) == 0
        assert pool.release(slots) == 0, "the owner's late release means nothing"
        (fresh,) = pool.try_acquire(LOAD, 1)
        assert fresh.generation == slots[0].generation + 1
        assert pool.release(slots) == 0
        assert pool.statistics().held == 1

    def test_several_holders_must_all_be_fenced(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        slots = pool.try_acquire(LOAD, 3)
        pool.quarantine(slots, "a")
        pool.quarantine(slots[:1], "b")
        assert pool.fenced("a") == 2
        assert pool.statistics().quarantined == 1
        assert pool.fenced("b") == 1

    def test_free_slots_cannot_be_quarantined(self) -> None:
        pool = StagingPool(make_plan(), region=0)
        slots = pool.try_acquire(LOAD, 1)
        pool.release(slots)
        with pytest.raises(LocalProtocolError):
            pool.quarantine([Slot(0, 0, 0, MIB, 1)], "peer")

    def test_one_replacement_region(self) -> None:
        pool = StagingPool(make_plan(chunk=1, load_lanes=3, store_lanes=1), region=0)
        pool.quarantine(pool.try_acquire(LOAD, 3) + pool.try_acquire(STORE, 1), "peer")
        pool.add_region(1, 4)
        slots = pool.try_acquire(LOAD, 9) + pool.try_acquire(STORE, 9)
        assert [(s.region, s.offset) for s in slots] == [(1, i * MIB) for i in range(4)]
        for region in (1, 2):
            with pytest.raises(LocalProtocolError, match="cannot add region"):
                pool.add_region(region, 4)

    def test_mostly_quarantined_looks_at_each_share(self) -> None:
        pool = StagingPool(make_plan(chunk=2, load_lanes=4, store_lanes=2), region=0)
        stores = pool.try_acquire(STORE, 3)
        pool.quarantine(stores[:2], "peer")
        assert not pool.mostly_quarantined
        pool.quarantine(stores[2:], "peer")
        assert pool.mostly_quarantined
        pool.fenced("peer")
        assert not pool.mostly_quarantined

    def test_repr_shows_the_state(self) -> None:
        assert "free=8" in repr(StagingPool(make_plan(), region=0))
