"""The loop thread: calls in, results out, and an end that everybody hears of."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from memkv_vllm.engine.portal import LoopThread
from memkv_vllm.errors import EngineStopped

ROOT = Path(__file__).resolve().parents[2]


async def forever(_: LoopThread) -> None:
    await anyio.sleep_forever()


@contextmanager
def running(main: object = forever) -> Iterator[LoopThread]:
    """A started loop thread, stopped at the end."""
    portal = LoopThread("test-loop", main)  # type: ignore[arg-type]
    portal.start()
    try:
        yield portal
    finally:
        assert portal.stop(5)


def ended(portal: LoopThread) -> None:
    """Wait for the end of its thread."""
    portal._thread.join(5)
    assert not portal.alive


# ------------------------------------------------------------------------------------------------ post and call


def test_posted_functions_run_on_the_loop_in_order() -> None:
    seen: list[tuple[int, str]] = []
    done = threading.Event()
    with running() as portal:
        for number in range(100):
            assert portal.post(lambda number=number: seen.append((number, threading.current_thread().name)))
        assert portal.post(done.set)
        assert done.wait(5)
    assert seen == [(number, "test-loop") for number in range(100)]


def test_a_posted_function_may_start_tasks_and_scopes() -> None:
    """It runs where anyio knows which loop it is on (``call_soon`` alone would not do)."""
    made: list[object] = []
    done = threading.Event()

    def function() -> None:
        made.append(anyio.CancelScope())
        made.append(anyio.Event())
        done.set()

    with running() as portal:
        portal.post(function)
        assert done.wait(5)
    assert len(made) == 2


def test_a_posted_function_starts_a_task_and_wakes_one() -> None:
    """With sniffio installed (vLLM brings it), anyio finds its backend by the running task. A callback of the loop runs
    in none: ``start_soon`` and ``CancelScope`` raised NoEventLoopError there, and the engine stood still.
    """
    sniffio = pytest.importorskip("sniffio")
    tasks: list[TaskGroup] = []
    ready, ran = threading.Event(), threading.Event()
    seen: list[object] = []

    async def main(_: LoopThread) -> None:
        async with anyio.create_task_group() as group:
            tasks.append(group)
            ready.set()
            await anyio.sleep_forever()

    async def work(event: anyio.Event) -> None:
        seen.append(sniffio.current_async_library())
        with anyio.move_on_after(5):
            await event.wait()
        seen.append(event.is_set())
        ran.set()

    def function() -> None:
        event = anyio.Event()
        tasks[0].start_soon(work, event)
        event.set()

    with running(main) as portal:
        assert ready.wait(5)
        assert portal.post(function)
        assert ran.wait(5)
    assert seen == ["asyncio", True]


def test_an_error_of_a_posted_function_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def answer() -> int:
        return 3

    with running() as portal:
        portal.post(lambda: 1 // 0)
        assert portal.call(answer, timeout_s=5) == 3
        assert portal.alive
    assert any("event=posted_call_failed" in record.getMessage() for record in caplog.records)


def test_call_returns_what_the_coroutine_returns_or_raises() -> None:
    async def divide(a: int, b: int) -> float:
        await anyio.lowlevel.checkpoint()
        return a / b

    with running() as portal:
        assert portal.call(divide, 6, 3, timeout_s=5) == 2
        with pytest.raises(ZeroDivisionError):
            portal.call(divide, 6, 0, timeout_s=5)
        assert portal.alive, "an error belongs to its caller"


def test_a_timeout_of_the_coroutine_is_not_a_timeout_of_the_call() -> None:
    async def late() -> None:
        raise TimeoutError("mine")

    with running() as portal, pytest.raises(TimeoutError, match="mine"):
        portal.call(late, timeout_s=5)


def test_call_gives_up_after_its_timeout_and_the_coroutine_goes_on() -> None:
    go, went = threading.Event(), threading.Event()

    async def slow() -> None:
        while not go.is_set():  # noqa: ASYNC110 - set by another thread
            await anyio.sleep(0.001)
        went.set()

    with running() as portal:
        with pytest.raises(TimeoutError, match="test-loop"):
            portal.call(slow, timeout_s=0.05)
        go.set()
        assert went.wait(5)


def test_many_threads_may_post_and_call() -> None:
    total = 0

    def add(number: int) -> None:
        nonlocal total
        total += number

    async def read() -> int:
        return total

    with running() as portal:

        def work() -> None:
            for _ in range(200):
                portal.post(add, 1)
            portal.call(read, timeout_s=5)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert portal.call(read, timeout_s=5) == 1600


# ------------------------------------------------------------------------------------------------ ends


def test_stop_cancels_main_which_may_clean_up() -> None:
    cleaned = threading.Event()

    async def main(_: LoopThread) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.set()

    with running(main) as portal:
        assert portal.stop(5)
        assert cleaned.is_set()
        assert not portal.alive
        assert portal.failure is None


def test_stop_before_start_and_twice() -> None:
    portal = LoopThread("test-loop", forever)
    assert portal.stop(5)
    assert not portal.alive
    assert not portal.post(print)
    portal.start()
    assert portal.stop(5)
    assert portal.stop(5)


def test_stop_says_when_the_thread_does_not_end() -> None:
    go = threading.Event()

    async def stubborn(_: LoopThread) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            go.wait(5)

    with running(stubborn) as portal:
        assert not portal.stop(0.05)
        go.set()


@pytest.mark.parametrize("fails", [False, True], ids=["main returns", "main raises"])
def test_after_its_end_nothing_is_taken(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main(_: LoopThread) -> None:
        if fails:
            raise ZeroDivisionError("a bug")

    async def never() -> None:
        raise AssertionError("ran on a dead loop")

    with running(main) as portal:
        ended(portal)
        assert not portal.post(never)
        with pytest.raises(EngineStopped, match="test-loop"):
            portal.call(never, timeout_s=5)
        assert (portal.failure is not None) == fails
    assert any("event=loop_died" in record.getMessage() for record in caplog.records) == fails


def test_a_call_that_is_under_way_when_the_loop_dies_is_told() -> None:
    go = threading.Event()

    async def main(_: LoopThread) -> None:
        while not go.is_set():  # noqa: ASYNC110 - set by another thread
            await anyio.sleep(0.001)
        raise ZeroDivisionError("a bug")

    async def wait_for_ever() -> None:
        go.set()
        await anyio.sleep_forever()

    with running(main) as portal, pytest.raises(EngineStopped, match="test-loop"):
        portal.call(wait_for_ever, timeout_s=60)


def test_what_was_posted_just_before_the_end_is_not_waited_for_for_ever() -> None:
    async def answer() -> int:
        return 1

    for _ in range(50):
        with running() as portal:
            portal.post(portal._cancel)
            try:
                assert portal.call(answer, timeout_s=60) == 1
            except EngineStopped:
                pass


@pytest.mark.timeout(60)
def test_a_process_that_forgets_stop_can_exit() -> None:
    script = """
import anyio
from memkv_vllm.engine.portal import LoopThread
portal = LoopThread("forgotten", lambda _: anyio.sleep_forever())
portal.start()
print("done", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
