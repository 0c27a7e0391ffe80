"""The threads of one drive: one that writes, some that read; counts what fails, and says when it is too much."""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from memkv_vllm.store.log.medium import Medium, error_reason

__all__ = ["DriveWorker"]

logger = logging.getLogger("memkv.store.log")

T = TypeVar("T")


class DriveWorker:
    """Runs blocking calls of one drive in threads.

    A call that has begun is waited for, cancelled or not: it may be writing from the arena, or into it.

    Args:
        medium: of the drive.
        sync: whether :meth:`write` makes each write stable.
        max_errors: failures after which the drive is out.
        on_out: called once, on the event loop, when that happens.
    """

    def __init__(self, medium: Medium, *, sync: bool, max_errors: int, on_out: Callable[[], None]) -> None:
        self.medium = medium
        self.errors: Counter[str] = Counter()
        """By reason, named after the operation: ``write_eio``, ``read_wrong_bytes`` ..."""
        self.last_error = ""
        self.out = False
        """No call is made any more."""
        self._sync = sync
        self._max_errors = max_errors
        self._on_out = on_out
        self._writing = anyio.CapacityLimiter(1)
        self._began: list[float] = []
        """When each call that goes on has begun."""

    def longest_call_s(self) -> float:
        """Seconds since the oldest call began that has not ended; 0 when none goes on."""
        return time.monotonic() - min(self._began) if self._began else 0.0

    async def write(self, operation: str, function: Callable[..., T], *args: object) -> T:
        """Runs ``function(*args)`` in the writing thread, and a sync behind it if that is configured.

        Raises:
            OSError: the medium failed, or the drive is out; counted.
        """

        def work() -> T:
            result = function(*args)
            if self._sync:
                self.medium.sync()
            return result

        self._check()
        try:
            with self._noted():
                return await anyio.to_thread.run_sync(work, limiter=self._writing)
        except OSError as error:
            self.count(f"{operation}_{error_reason(error)}", str(error))
            raise

    async def read(self, function: Callable[..., T], *args: object, limiter: anyio.CapacityLimiter) -> T:
        """Runs ``function(*args)`` in a reading thread.

        Raises:
            OSError: the medium failed, or the drive is out; counted.
        """
        self._check()
        try:
            with self._noted():
                return await anyio.to_thread.run_sync(function, *args, limiter=limiter)
        except OSError as error:
            self.count(f"read_{error_reason(error)}", str(error))
            raise

    def count(self, reason: str, message: str) -> None:
        """Counts a failure of the medium; too many of them end its use."""
        self.errors[reason] += 1
        self.last_error = message
        logger.warning("drive.error media=%s reason=%s: %s", self.medium.name, reason, message)
        if not self.out and sum(self.errors.values()) >= self._max_errors:
            self.out = True
            logger.error("drive.out media=%s after %d errors", self.medium.name, sum(self.errors.values()))
            self._on_out()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        began = time.monotonic()
        self._began.append(began)
        try:
            yield
        finally:
            self._began.remove(began)

    def _check(self) -> None:
        if self.out:
            raise OSError(errno.EIO, f"{self.medium.name}: left out after too many errors")
