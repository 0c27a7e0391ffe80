"""Whether transfers keep up with their path. Fault P078."""

from __future__ import annotations

from memkv_vllm.engine.pace import LEAST_BYTES, LEAST_S, SAMPLES, SLOW_SHARE, Pace, PaceChange

RAIL = 1e9
"""Bytes per second; ``LEAST_S`` of it are fewer than ``LEAST_BYTES``."""


class Clock:
    """Transfers one after the other, each as fast as told."""

    def __init__(self, expected: float | None = RAIL) -> None:
        self.now = 100.0
        self.pace = Pace()
        self.pace.expect(expected)

    def transfer(self, rate: float, size: int = LEAST_BYTES, moved: int | None = None) -> PaceChange | None:
        self.pace.begin(size, self.now)
        self.now += size / rate
        return self.pace.end(size, size if moved is None else moved, self.now)

    def changes(self, count: int, rate: float, **more: int) -> list[PaceChange]:
        return [change for _ in range(count) if (change := self.transfer(rate, **more)) is not None]


def test_a_slow_path_is_told_once_and_so_is_its_recovery() -> None:
    clock = Clock()
    slow, sound = 0.9 * SLOW_SHARE * RAIL, 1.1 * SLOW_SHARE * RAIL
    assert clock.changes(SAMPLES - 1, slow) == []
    assert clock.changes(1, slow) == [PaceChange.SLOW]
    assert clock.pace.slow and abs(clock.pace.rate - slow) < 1e3
    assert clock.changes(100, slow) == []
    assert clock.changes(SAMPLES - 1, sound) == []
    assert clock.changes(1, sound) == [PaceChange.RECOVERED]
    assert clock.changes(100, sound) == []


def test_a_few_slow_ones_in_between_say_nothing() -> None:
    """A value that the server had to read from a drive, a moment of congestion."""
    clock = Clock()
    for _ in range(50):
        assert clock.changes(SAMPLES - 1, RAIL / 100) == []
        assert clock.changes(1, RAIL) == []


def test_without_an_expectation_nothing_is_slow() -> None:
    assert Clock(None).changes(100, 1.0) == []


def test_what_is_too_small_to_tell_is_not_measured() -> None:
    assert Clock().changes(100, RAIL / 100, size=LEAST_BYTES - 1) == []


def test_a_fast_rail_is_judged_by_more_bytes() -> None:
    """On a rail of 50 GB/s, 8 MiB take 0.2 ms: no longer than the messages about them."""
    fast = 50e9
    assert Clock(fast).changes(100, fast / 100, size=LEAST_BYTES) == []
    assert Clock(fast).changes(SAMPLES, fast / 100, size=int(LEAST_S * fast)) == [PaceChange.SLOW]


def test_many_small_transfers_at_once_are_measured_together() -> None:
    """Eight at a time, each a quarter of what is needed to tell."""
    pace, now, size = Pace(), 0.0, LEAST_BYTES // 4
    pace.expect(RAIL)
    for _ in range(8):
        pace.begin(size, now)
    changes = []
    for _ in range(8 * SAMPLES):
        now += size / (SLOW_SHARE * RAIL * 0.5)
        changes.append(pace.end(size, size, now))
        pace.begin(size, now)
    assert [change for change in changes if change] == [PaceChange.SLOW]


def test_transfers_that_move_nothing_say_nothing() -> None:
    """Values that the server has already, or does not have."""
    clock = Clock()
    for _ in range(10 * SAMPLES):
        assert clock.transfer(RAIL / 100, moved=0) is None


def test_idle_time_does_not_count() -> None:
    clock = Clock()
    for _ in range(10 * SAMPLES):
        assert clock.transfer(RAIL) is None
        clock.now += 10.0


def test_another_way_begins_anew() -> None:
    clock = Clock()
    assert clock.changes(SAMPLES - 1, RAIL / 10) == []
    clock.pace.expect(RAIL)
    assert clock.changes(SAMPLES - 1, RAIL / 10) == []
    assert clock.changes(1, RAIL / 10) == [PaceChange.SLOW]
