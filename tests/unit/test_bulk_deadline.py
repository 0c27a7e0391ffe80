"""Loopback's data path: what a status promises about the bytes, when deadline and fence come together."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import anyio
import numpy as np
import pytest

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.loopback.bulk import LoopbackBulk
from memkv_vllm.transports.loopback.copying import CopyPool
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status

pytestmark = pytest.mark.anyio

VALUE = 1 << 20


async def test_a_value_that_a_thread_still_writes_is_not_called_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAILED says that no byte moves any more: its reader reuses the memory at once. TIMEOUT says: fence first.

    A get's deadline passes while a thread is in the middle of a piece, and the session is being fenced already.
    """
    go, begun = threading.Event(), threading.Event()
    copy = np.copyto

    def slow(*args: Any) -> None:
        begun.set()
        go.wait(10)
        copy(*args)

    monkeypatch.setattr(np, "copyto", slow)
    pool = CopyPool(2)
    with HostMemory.create("arena", VALUE) as arena, HostMemory.create("staging", VALUE) as staging:
        bulk = LoopbackBulk(arena, pool, max_regions=1, max_region_bytes=VALUE, faults=None, cut=lambda: None)
        bulk.offer(0, os.dup(staging.fd))
        await bulk.register(0, MemoryKind.HOST, VALUE, b"")
        statuses: list[Status] = []

        async def push() -> None:
            statuses.extend(await bulk.push([Move(Extent(0, 0, VALUE), 0)], Deadline(time.monotonic() + 0.1)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push)
            while not begun.is_set():  # noqa: ASYNC110 - set by a copy thread
                await anyio.sleep(0.001)
            tasks.start_soon(bulk.fence)
            while not statuses:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            assert statuses == [Status.TIMEOUT]
            go.set()
    pool.close()
