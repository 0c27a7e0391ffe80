"""The fault plan: which occurrence is hit, in which order rules are asked, and that every firing is counted."""

from __future__ import annotations

import threading

import pytest

from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import Delay, Drop, Fail, FaultPlan, FaultPoint, Operation, Throttle
from memkv_vllm.types import Extent


def hits(plan: FaultPlan, count: int, operation: Operation = Operation.PULL) -> list[bool]:
    return [plan.strike(operation) is not None for _ in range(count)]


def test_an_empty_plan_does_nothing() -> None:
    assert hits(FaultPlan(), 3) == [False] * 3


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({}, [True] * 6),
        ({"nth": 3}, [False, False, True, False, False, False]),
        ({"every": 2}, [False, True, False, True, False, True]),
        ({"times": 2}, [True, True, False, False, False, False]),
        ({"every": 2, "times": 2}, [False, True, False, True, False, False]),
    ],
)
def test_which_occurrence(selection: dict[str, int], expected: list[bool]) -> None:
    plan = FaultPlan()
    rule = plan.add(Operation.PULL, Drop(), **selection)  # type: ignore[arg-type]
    assert hits(plan, 3, Operation.PUSH) == [False] * 3
    assert hits(plan, 6) == expected
    assert (rule.seen, rule.fired) == (6, sum(expected))


def test_by_message_type_and_predicate() -> None:
    plan = FaultPlan()
    by_type = plan.add(Operation.REPLY, Fail(), type=MessageType.GET)
    far = plan.add(Operation.PUSH, Drop(), predicate=lambda point: (point.extent or Extent(0, 0, 0)).offset >= 100)
    assert plan.strike(Operation.REPLY, type=MessageType.PUT) is None
    assert plan.strike(Operation.REPLY, type=MessageType.GET) == Fail()
    assert plan.strike(Operation.PUSH, extent=Extent(1, 99, 1)) is None
    assert plan.strike(Operation.PUSH, extent=Extent(1, 100, 1)) == Drop()
    assert (by_type.seen, by_type.fired, far.seen, far.fired) == (1, 1, 1, 1)
    assert FaultPoint(Operation.CONNECT).type is None


def test_the_first_rule_that_hits_decides() -> None:
    plan = FaultPlan()
    first, second = plan.add(Operation.PULL, Delay(1), nth=2), plan.add(Operation.PULL, Drop())
    assert [plan.strike(Operation.PULL) for _ in range(3)] == [Drop(), Delay(1), Drop()]
    assert (first.fired, second.fired) == (1, 2)
    plan.remove(second)
    assert hits(plan, 1) == [False]
    plan.clear()
    assert hits(plan, 2) == [False, False]


def test_a_throttle_queues_moves_behind_each_other() -> None:
    plan = FaultPlan()
    action = Throttle(bytes_per_s=1000)
    delays = [plan.delay_of(action, 500) for _ in range(4)]
    assert delays == pytest.approx([0.5, 1.0, 1.5, 2.0], abs=0.2)
    assert plan.delay_of(Delay(3), 500) == 3


def test_threads_share_a_plan() -> None:
    plan = FaultPlan()
    rule = plan.add(Operation.PULL, Drop(), times=500)
    seen: list[int] = []

    def strike() -> None:
        seen.append(sum(hits(plan, 400)))

    threads = [threading.Thread(target=strike) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(seen), rule.seen, rule.fired) == (500, 1600, 500)
