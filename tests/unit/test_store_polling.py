"""How long the server looks for the next request before it sleeps."""

import asyncio
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

import anyio
import pytest

from memkv_vllm.store.polling import FIRST_POLL_S, IdlePoll, PollingSelector, loop_factory

MOST_S = 200e-6


def test_short_waits_make_it_look_longer_up_to_the_bound_and_a_long_one_ends_it() -> None:
    idle = IdlePoll(MOST_S)
    seen = []
    for _ in range(7):
        seen.append(idle.poll_s)
        idle.slept(MOST_S)
    assert seen == pytest.approx([0, 10e-6, 20e-6, 40e-6, 80e-6, 160e-6, MOST_S])
    idle.slept(MOST_S * 1.01)
    assert idle.poll_s == 0.0
    idle.slept(0.0)
    assert idle.poll_s == FIRST_POLL_S


class _Clock:
    """Goes on by a step at each look at it; at a given look something happens."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.looks = 0
        self.happens: dict[int, Callable[[], object]] = {}
        self._step_s = step_s

    def __call__(self) -> float:
        self.looks += 1
        if self.looks in self.happens:
            self.happens[self.looks]()
        self.now_s += self._step_s
        return self.now_s


Pipe = tuple[int, int]


def _pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


own = pytest.fixture(name="own")(_pipe)
pipe = pytest.fixture(name="pipe")(_pipe)


def _grown(own: Pipe, pipe: Pipe, clock: _Clock) -> PollingSelector:
    """A loop's that has seen four short waits: it looks for 80 us now, eight looks at this clock."""
    selector = PollingSelector(MOST_S, clock)
    selector.register(own[0], selectors.EVENT_READ)
    selector.register(pipe[0], selectors.EVENT_READ)
    selector._idle.poll_s = 80e-6
    return selector


def test_what_comes_while_it_looks_is_found_without_sleeping(own: Pipe, pipe: Pipe) -> None:
    clock = _Clock(10e-6)
    selector = _grown(own, pipe, clock)
    clock.happens = {5: lambda: os.write(pipe[1], b"x")}
    ((key, events),) = selector.select(10)
    assert (key.fd, events, clock.looks) == (pipe[0], selectors.EVENT_READ, 5)
    assert selector._idle.poll_s == 80e-6  # only sleeping teaches
    selector.close()


def test_after_the_time_to_look_it_sleeps_and_learns_from_all_the_waiting(own: Pipe, pipe: Pipe) -> None:
    clock = _Clock(10e-6)
    selector = _grown(own, pipe, clock)
    assert selector.select(0.001) == []
    assert clock.looks == 10  # the start, eight until it slept, the end
    assert selector._idle.poll_s == pytest.approx(160e-6)  # by its clock the wait was a short one
    clock.happens = {clock.looks + 5: lambda: setattr(clock, "now_s", clock.now_s + 1)}
    assert selector.select(0.001) == []
    assert selector._idle.poll_s == 0.0
    selector.close()


@pytest.mark.parametrize("while_it_looks", [True, False])
def test_what_a_thread_has_done_ends_the_looking(own: Pipe, pipe: Pipe, while_it_looks: bool) -> None:
    """A thread gets the interpreter lock late while the loop looks."""
    clock = _Clock(10e-6)
    selector = _grown(own, pipe, clock)
    clock.happens = {5 if while_it_looks else 9: lambda: os.write(own[1], b"x")}
    assert [key.fd for key, _ in selector.select(10)] == [own[0]]
    assert clock.looks == (5 if while_it_looks else 9)
    assert selector._idle.poll_s == 0.0
    selector.close()


def test_a_loop_knows_what_threads_wake_it_by() -> None:
    async def work() -> list[float]:
        loop, seen = asyncio.get_running_loop(), list[float]()
        idle: IdlePoll = loop._selector._idle  # type: ignore[attr-defined]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for thread in (False, True):
                idle.poll_s = 100.0  # until something comes
                done = asyncio.Event()
                if thread:
                    waker = threading.Timer(0.01, loop.call_soon_threadsafe, (done.set,))
                else:
                    loop.add_reader(ours, done.set)
                    waker = threading.Timer(0.01, theirs.send, (b"x",))
                waker.start()
                await done.wait()
                seen.append(idle.poll_s)
                loop.remove_reader(ours)
                waker.join()
        return seen

    options = {"loop_factory": loop_factory(100.0)}
    assert anyio.run(work, backend="asyncio", backend_options=options) == [100.0, 0.0]


def test_a_wait_is_never_longer_than_its_timeout_and_none_at_all_is_none(own: Pipe, pipe: Pipe) -> None:
    selector = _grown(own, pipe, _Clock(10e-6))
    looks = selector._clock.looks  # type: ignore[attr-defined]
    assert selector.select(0) == [] == selector.select(-1)
    assert selector._clock.looks == looks  # type: ignore[attr-defined]
    selector.close()
    real = PollingSelector(0.5)
    real.register(own[0], selectors.EVENT_READ)
    real.register(pipe[0], selectors.EVENT_READ)
    real._idle.poll_s = 0.5
    start = time.monotonic()
    assert real.select(0.02) == []
    assert 0.02 <= time.monotonic() - start < 0.5  # it would have looked for half a second
    real.close()


@pytest.mark.parametrize("most_s", [0.0, MOST_S, 0.05])
def test_a_loop_of_it_runs_timers_and_is_woken_from_other_threads(most_s: float) -> None:
    async def work() -> tuple[list[str], bool]:
        loop, done, seen = asyncio.get_running_loop(), asyncio.Event(), list[str]()
        for _ in range(20):
            await asyncio.sleep(0.0001)
        loop.call_later(0.002, seen.append, "timer")
        thread = threading.Timer(0.01, loop.call_soon_threadsafe, (done.set,))
        thread.start()
        await asyncio.wait_for(done.wait(), 10)
        thread.join()
        return seen, isinstance(loop._selector, PollingSelector)  # type: ignore[attr-defined]

    options = {"loop_factory": loop_factory(most_s)}
    assert anyio.run(work, backend="asyncio", backend_options=options) == (["timer"], bool(most_s))
