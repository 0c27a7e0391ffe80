"""Where the synchronous side (vLLM's threads) and an event loop meet. The only module that makes a thread.

Who owns what: the loop's objects belong to the loop thread alone. The other side reaches them only through
``post`` (runs a function on the loop, returns at once) and ``call`` (runs a coroutine function there and
waits). What was posted crosses in ``_inbox`` (appended by any thread, taken by one task on the loop, so that it
runs where tasks may be started). Results travel back in ``queue.SimpleQueue`` objects that their owner drains
without waiting.

The thread is a daemon: a host process that forgets ``close`` can still exit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from memkv_vllm.errors import EngineStopped

R = TypeVar("R")
logger = logging.getLogger("memkv.engine")

_CHECK_S = 0.25
"""How often a waiting caller looks whether the loop is still there."""


class LoopThread:
    """An anyio event loop in a thread of its own, running ``main(self)`` until it returns or ``stop``.

    Args:
        name: thread name.
        main: the coroutine function that owns everything on the loop. It is cancelled by ``stop``.
    """

    def __init__(self, name: str, main: Callable[[LoopThread], Awaitable[None]]) -> None:
        self._main = main
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: TaskGroup | None = None
        self._inbox: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._posted = asyncio.Event()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self.failure: BaseException | None = None

    @property
    def alive(self) -> bool:
        """Whether the loop runs (after ``start``)."""
        return self._ready.is_set() and not self._ended.is_set()

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    def start(self) -> None:
        """Start the thread and wait until the loop takes work."""
        self._thread.start()
        self._ready.wait()

    def post(self, function: Callable[..., Any], *args: Any) -> bool:
        """Run ``function(*args)`` on the loop soon, in order; False when the loop has ended. Microseconds."""
        loop = self._loop
        if loop is None or self._ended.is_set():
            return False
        self._inbox.append((function, args))
        try:
            loop.call_soon_threadsafe(self._posted.set)
        except RuntimeError:
            return False
        return True

    def call(self, function: Callable[..., Awaitable[R]], *args: Any, timeout_s: float) -> R:
        """Run a coroutine function on the loop and wait for its result.

        Raises:
            EngineStopped: the loop has ended or ends meanwhile.
            TimeoutError: no result within ``timeout_s`` seconds; the coroutine goes on.
        """
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        if not self.post(self._spawn, function, args, future):
            raise EngineStopped(f"the loop of {self.name} has ended")
        end = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(min(_CHECK_S, max(0.0, end - time.monotonic())))
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
                if not self.alive:
                    raise EngineStopped(f"the loop of {self.name} ended meanwhile") from self.failure
                if time.monotonic() >= end:
                    raise TimeoutError(f"no result from {self.name} within {timeout_s:g} s") from None

    def stop(self, timeout_s: float) -> bool:
        """Cancel ``main`` and join the thread; False when it has not ended within ``timeout_s`` seconds."""
        if not self._ready.is_set():
            return True
        self._stopping = True
        self.post(self._cancel)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _cancel(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def _spawn(
        self, function: Callable[..., Awaitable[R]], args: tuple[Any, ...], future: concurrent.futures.Future[R]
    ) -> None:
        if self._tasks is None:
            future.set_exception(EngineStopped(f"the loop of {self.name} has ended"))
            return
        self._tasks.start_soon(self._answer, function, args, future)

    async def _answer(
        self, function: Callable[..., Awaitable[R]], args: tuple[Any, ...], future: concurrent.futures.Future[R]
    ) -> None:
        """A call must never end the loop: its error belongs to the caller."""
        try:
            future.set_result(await function(*args))
        except Exception as error:
            future.set_exception(error)
        except BaseException:
            future.set_exception(EngineStopped(f"the loop of {self.name} has ended"))
            raise

    async def _take_inbox(self) -> None:
        """Run what was posted. An error of it is logged and belongs to nobody else: the loop goes on."""
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._inbox:
                function, args = self._inbox.popleft()
                try:
                    function(*args)
                except Exception:
                    logger.exception("event=posted_call_failed thread=%s call=%r", self.name, function)

    async def _body(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._take_inbox)
            self._ready.set()
            try:
                await self._main(self)
            finally:
                self._tasks = None
            tasks.cancel_scope.cancel()

    def _run(self) -> None:
        try:
            anyio.run(self._body, backend="asyncio")
        except BaseException as error:  # the thread ends here: nothing above could hear of it
            self.failure = error
            if not self._stopping:
                logger.exception("event=loop_died thread=%s", self.name)
        finally:
            self._ended.set()
            self._ready.set()
