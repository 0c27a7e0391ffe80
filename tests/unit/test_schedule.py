"""Order, joining, bounds and endings of the schedule, one rule at a time."""

from __future__ import annotations

import pytest

from memkv_vllm.engine.schedule import BlockTask, Job, JobState, Schedule, ScheduleStatistics, TaskState
from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.types import Direction, LossReason

LOAD, STORE = Direction.LOAD, Direction.STORE
SIZE = 10
IDLE = ScheduleStatistics(0, 0, 0, 0, 0)


def make_job(
    job_id: int, direction: Direction, keys: str, *, at: float = 0.0, timeout: float = 100.0, expedited: bool = False
) -> Job:
    """A job with one block per letter of ``keys``; GPU block ids are job_id * 100 + position."""
    blocks = [(key.encode(), job_id * 100 + index) for index, key in enumerate(keys)]
    return Job(job_id, direction, blocks, SIZE, at, at + timeout, expedited)


@pytest.fixture
def schedule() -> Schedule:
    return Schedule(max_store_backlog_bytes=5 * SIZE, max_queued_blocks=8)


def keys(tasks: list[BlockTask]) -> str:
    return b"".join(task.key for task in tasks).decode()


def results(state: JobState) -> list[LossReason | None]:
    return [state.results[index] for index in range(len(state.job.blocks))]


class TestOrder:
    def test_directions_do_not_share_a_queue(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, STORE, "ab"))
        schedule.add_job(make_job(2, LOAD, "cd"))
        assert keys(schedule.take(LOAD, 9, 0)) == "cd"
        assert keys(schedule.take(STORE, 9, 0)) == "ab"

    def test_loads_before_stores_and_waited_before_both(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, STORE, "a"))
        assert schedule.next_direction(0) is STORE
        schedule.add_job(make_job(2, LOAD, "b"))
        assert schedule.next_direction(0) is LOAD
        schedule.mark_waited([1, 99])
        assert schedule.next_direction(0) is STORE
        schedule.mark_waited([2])
        assert schedule.next_direction(0) is LOAD
        assert schedule.next_direction(0, [STORE]) is STORE
        schedule.take(LOAD, 1, 0)
        schedule.take(STORE, 1, 0)
        assert schedule.next_direction(0) is None

    def test_first_come_first_served_within_a_class(self, schedule: Schedule) -> None:
        for job_id, names in enumerate(["ab", "cd", "ef", "gh"]):
            schedule.add_job(make_job(job_id, LOAD, names))
        schedule.mark_waited([3])
        schedule.mark_waited([1])
        assert keys(schedule.take(LOAD, 3, 0)) == "cdg"
        assert keys(schedule.take(LOAD, 9, 0)) == "habef"

    def test_expedited_counts_as_waited(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "a"))
        schedule.add_job(make_job(2, LOAD, "b", expedited=True))
        assert keys(schedule.take(LOAD, 2, 0)) == "ba"


class TestBounds:
    def test_store_beyond_the_backlog_keeps_its_first_blocks(self, schedule: Schedule) -> None:
        assert schedule.add_job(make_job(1, STORE, "abc")) == []
        shed = schedule.add_job(make_job(2, STORE, "defg"))
        assert keys(shed) == "fg"
        assert all(task.state is TaskState.ENDED for task in shed)
        assert schedule.statistics().queued_store_bytes == 5 * SIZE
        assert keys(schedule.take(STORE, 9, 0)) == "abcde"
        assert schedule.statistics().queued_store_bytes == 0

    def test_a_job_shed_as_a_whole_is_finished_at_once(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, STORE, "abcde"))
        schedule.add_job(make_job(2, STORE, "fg"))
        (state,) = schedule.poll_finished()
        assert state.job.job_id == 2
        assert state.lost == [(200, LossReason.SHED), (201, LossReason.SHED)]
        assert schedule.poll_finished() == []

    def test_loads_are_never_shed_by_bytes(self, schedule: Schedule) -> None:
        assert schedule.add_job(make_job(1, LOAD, "abcdefgh")) == []

    def test_loads_are_bounded_by_blocks_followers_too(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "abcd"))
        assert keys(schedule.add_job(make_job(2, LOAD, "abcdef"))) == "ef"

    def test_stores_are_bounded_by_blocks_too(self) -> None:
        schedule = Schedule(max_store_backlog_bytes=1000, max_queued_blocks=2)
        assert keys(schedule.add_job(make_job(1, STORE, "abc"))) == "c"

    def test_stale_heap_entries_are_bounded(self) -> None:
        schedule = Schedule(max_store_backlog_bytes=1000)
        for job_id in range(1000):
            schedule.add_job(make_job(job_id, LOAD, "abc"))
            schedule.cancel_job(job_id, LossReason.FLUSHED)
        assert max(len(heap) for heap in schedule._queues[LOAD]._heaps.values()) < 100

    def test_bad_bounds(self) -> None:
        with pytest.raises(ValueError, match="bad bounds"):
            Schedule(-1)
        with pytest.raises(ValueError, match="bad bounds"):
            Schedule(1, 0)


class TestEndings:
    def test_results_per_block(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "abc"))
        first, second, third = schedule.take(LOAD, 3, 0)
        schedule.finish(second, LossReason.CHECKSUM, SIZE)
        schedule.finish(first, None, SIZE)
        assert schedule.poll_finished() == []
        schedule.finish(third, LossReason.ABSENT)
        (state,) = schedule.poll_finished()
        assert results(state) == [None, LossReason.CHECKSUM, LossReason.ABSENT]
        assert state.lost == [(101, LossReason.CHECKSUM), (102, LossReason.ABSENT)]
        assert state.moved_bytes == 2 * SIZE
        assert schedule.job(1) is None
        assert schedule.statistics() == IDLE

    def test_finishing_twice_or_untaken_is_a_bug(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "ab"))
        state = schedule.job(1)
        assert state is not None
        with pytest.raises(LocalProtocolError, match="queued"):
            schedule.finish(state.tasks[0], None)
        with pytest.raises(LocalProtocolError, match="queued"):
            schedule.claim_followers(state.tasks[0])
        (task,) = schedule.take(LOAD, 1, 0)
        schedule.finish(task, None)
        with pytest.raises(LocalProtocolError, match="ended"):
            schedule.finish(task, None)

    def test_empty_job_is_finished_at_once(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, ""))
        assert [state.job.job_id for state in schedule.poll_finished()] == [1]

    def test_same_id_twice_is_a_bug(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "a"))
        with pytest.raises(LocalProtocolError, match="already"):
            schedule.add_job(make_job(1, STORE, "b"))

    def test_cancel_ends_what_was_not_taken_and_marks_the_rest(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "abc"))
        (taken,) = schedule.take(LOAD, 1, 0)
        assert keys(schedule.cancel_job(1, LossReason.FLUSHED)) == "bc"
        assert schedule.cancel_job(1, LossReason.TIMEOUT) == []
        assert schedule.cancel_job(99, LossReason.FLUSHED) == []
        assert taken.cancelled is LossReason.FLUSHED
        schedule.finish(taken, taken.cancelled)
        assert schedule.take(LOAD, 9, 0) == []
        (state,) = schedule.poll_finished()
        assert results(state) == [LossReason.FLUSHED] * 3

    def test_expire_ends_what_is_late(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "a", timeout=5))
        schedule.add_job(make_job(2, STORE, "b", timeout=6))
        assert schedule.expire(4.9) == []
        assert schedule.take(LOAD, 9, now=5) == [], "late blocks are not handed to a lane"
        assert schedule.next_direction(5) is STORE
        assert keys(schedule.expire(5)) == "a"
        assert keys(schedule.expire(6)) == "b"
        assert all(results(state) == [LossReason.TIMEOUT] for state in schedule.poll_finished())
        assert schedule.statistics() == IDLE

    def test_abandon_all_ends_taken_tasks_too(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "ab"))
        schedule.add_job(make_job(2, LOAD, "ab"))
        schedule.add_job(make_job(3, STORE, "c"))
        schedule.take(LOAD, 1, 0)
        assert len(schedule.abandon_all(LossReason.ENGINE)) == 5
        finished = schedule.poll_finished()
        assert sorted(state.job.job_id for state in finished) == [1, 2, 3]
        assert {reason for state in finished for reason in state.results.values()} == {LossReason.ENGINE}
        assert schedule.statistics() == IDLE


class TestJoining:
    def test_identical_load_joins_a_queued_one(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "ab"))
        schedule.add_job(make_job(2, LOAD, "bc"))
        tasks = schedule.take(LOAD, 9, 0)
        assert keys(tasks) == "abc"
        (follower,) = schedule.claim_followers(tasks[1])
        assert (follower.job_id, follower.block_id) == (2, 200)
        for task in (*tasks, follower):
            schedule.finish(task, None)
        assert len(schedule.poll_finished()) == 2
        assert schedule.statistics() == IDLE

    def test_joiner_after_take_is_included_and_after_claim_gets_its_own(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "a"))
        (leader,) = schedule.take(LOAD, 9, 0)
        schedule.add_job(make_job(2, LOAD, "a"))
        assert schedule.take(LOAD, 9, 0) == []
        (follower,) = schedule.claim_followers(leader)
        schedule.add_job(make_job(3, LOAD, "a"))
        (own,) = schedule.take(LOAD, 9, 0)
        assert (follower.job_id, own.job_id) == (2, 3)
        schedule.finish(leader, None)
        schedule.add_job(make_job(4, LOAD, "a"))
        assert [task.job_id for task in schedule.claim_followers(own)] == [4]

    def test_stores_are_not_joined(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, STORE, "a"))
        schedule.add_job(make_job(2, STORE, "a"))
        schedule.add_job(make_job(3, LOAD, "a"))
        assert len(schedule.take(STORE, 9, 0)) == 2
        assert len(schedule.take(LOAD, 9, 0)) == 1

    @pytest.mark.parametrize("taken", [False, True])
    def test_followers_outlive_their_leader(self, schedule: Schedule, taken: bool) -> None:
        for job_id in (1, 2, 3):
            schedule.add_job(make_job(job_id, LOAD, "a"))
        if taken:
            (leader,) = schedule.take(LOAD, 1, 0)
            schedule.finish(leader, LossReason.TIMEOUT)
        else:
            schedule.cancel_job(1, LossReason.FLUSHED)
        (second,) = schedule.take(LOAD, 9, 0)
        assert second.job_id == 2
        assert [task.job_id for task in schedule.claim_followers(second)] == [3]

    def test_cancelled_follower_leaves_its_leader(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "a"))
        schedule.add_job(make_job(2, LOAD, "a"))
        assert len(schedule.cancel_job(2, LossReason.FLUSHED)) == 1
        (leader,) = schedule.take(LOAD, 9, 0)
        assert schedule.claim_followers(leader) == []

    def test_follower_with_a_later_deadline_survives_its_leaders(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "a", timeout=1))
        schedule.add_job(make_job(2, LOAD, "a", timeout=9))
        assert [task.job_id for task in schedule.expire(1)] == [1]
        assert [task.job_id for task in schedule.take(LOAD, 9, 1)] == [2]

    @pytest.mark.parametrize("waited_first", [False, True])
    def test_leader_inherits_the_priority_of_its_followers(self, schedule: Schedule, waited_first: bool) -> None:
        schedule.add_job(make_job(1, LOAD, "ab"))
        schedule.add_job(make_job(2, LOAD, "b", expedited=waited_first))
        if not waited_first:
            schedule.mark_waited([2])
        assert keys(schedule.take(LOAD, 1, 0)) == "b"
        assert keys(schedule.take(LOAD, 9, 0)) == "a"

    def test_same_key_twice_in_one_job(self, schedule: Schedule) -> None:
        schedule.add_job(make_job(1, LOAD, "aa"))
        assert len(schedule.cancel_job(1, LossReason.FLUSHED)) == 2
        (state,) = schedule.poll_finished()
        assert state.remaining == 0
        assert schedule.statistics() == IDLE


def test_what_is_too_late_to_start_ends_and_the_rest_goes_on() -> None:
    schedule = Schedule(max_store_backlog_bytes=1 << 20)
    schedule.add_job(Job(1, Direction.LOAD, [(b"a", 1), (b"b", 2)], 1, 0.0, 10.0))
    schedule.add_job(Job(2, Direction.LOAD, [(b"a", 3), (b"c", 4)], 1, 0.0, 10.0))
    schedule.add_job(Job(3, Direction.LOAD, [(b"d", 5)], 1, 0.0, 20.0))
    (taken,) = schedule.take(Direction.LOAD, 1, 0.0)
    ended = schedule.end_unstarted(10.0)
    # "a" is under way for both jobs; "b" and "c" are not; job 3 has time.
    assert sorted(task.key for task in ended) == [b"b", b"c"]
    assert [task.block_id for task in schedule.claim_followers(taken)] == [3]
    assert [task.key for task in schedule.take(Direction.LOAD, 9, 0.0)] == [b"d"]
    assert schedule.end_unstarted(20.0) == []
