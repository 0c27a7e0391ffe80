"""Waiting for calls that may never return: a resolver, a dead network drive, a driver that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

__all__ = ["within"]

T = TypeVar("T")


async def within(timeout_s: float, call: Callable[[], T]) -> T:
    """The result of ``call``, which runs in a thread of its own.

    The thread is a daemon: one that hangs is left behind and holds up nothing, not even the end of this process. A pool
    would wait for it.

    Raises:
        TimeoutError: it did not return in time. Whatever ``call`` raises comes out as it is.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            return  # the loop has ended: nobody waits any more

    threading.Thread(target=run, name="memkv-doctor", daemon=True).start()
    with anyio.fail_after(timeout_s):
        return await future
