"""One storage host's server: owns the arena and the transports, starts them and ends them in order.

Life::

    start   arena memory -> handler -> every transport listens
            -> the arena is populated in the background: a put that lands on pages that are not there yet is slow
    run     until the body of the ``async with`` ends, or a transport fails
    end     nothing new is accepted -> requests in flight finish, up to ``drain_timeout_s`` -> every transport
            ends and fences its sessions -> the arena is unmapped, once

The end is the same on a normal exit, an error and a cancellation.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from memkv_vllm.config import ServerConfig
from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import EvictionPolicy, LruPolicy
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.transports.base import ServerTransport
from memkv_vllm.transports.memory import POPULATE_STEP_BYTES, HostMemory

__all__ = ["GRANULE_BYTES", "StoreServer"]

logger = logging.getLogger("memkv.store")

GRANULE_BYTES = 4096
"""Values are of any size: an extent wastes less than one page, whatever ``memory.block_size`` is."""
DEFAULT_DRAIN_TIMEOUT_S = 5.0
SERVER_ID_BYTES = 16


class StoreServer:
    """A store with its transports. Used once, as ``async with StoreServer(config, transports) as server:``.

    Args:
        config: the server's settings.
        transports: what to serve on; each gets the same handler and arena.
        policy: order of eviction; LRU by default.
        server_id: 16 bytes that stay with the store's content; random by default, since memory does not outlive us.
        drain_timeout_s: how long requests in flight may go on at the end.
        populate: back the whole arena with memory after the start; without, the first put to each page does it.

    Raises:
        ConfigError: the settings ask for what this version does not do.
    """

    def __init__(
        self,
        config: ServerConfig,
        transports: Sequence[ServerTransport],
        *,
        policy: EvictionPolicy | None = None,
        server_id: bytes | None = None,
        drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S,
        populate: bool = True,
    ) -> None:
        config.validate_supported()
        self.config = config
        self.server_id = os.urandom(SERVER_ID_BYTES) if server_id is None else server_id
        self.boot_id = os.urandom(SERVER_ID_BYTES)
        self.addresses: list[Any] = []
        """What each transport listens on, in the order of ``transports``."""
        self._transports = tuple(transports)
        self._policy = LruPolicy() if policy is None else policy
        self._drain_timeout_s = drain_timeout_s
        self._populates = populate
        self._memory: HostMemory | None = None
        self._handler: StoreHandler | None = None
        self._tasks: TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<StoreServer {self.server_id.hex()[:8]} on {self.addresses} {self._handler!r}>"

    @property
    def handler(self) -> StoreHandler:
        """The handler of the running server."""
        if self._handler is None:
            raise LocalProtocolError("the server was not started")
        return self._handler

    def statistics(self) -> dict[str, Any]:
        """What STAT shows; plain values."""
        return self.handler.statistics()

    async def serve(self, *, task_status: TaskStatus[list[Any]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Runs the server until cancelled; ``task_status.started(addresses)`` once it listens."""
        async with self:
            task_status.started(self.addresses)
            await anyio.sleep_forever()

    async def __aenter__(self) -> StoreServer:
        if self._tasks is not None:
            raise LocalProtocolError("a server is started once")
        memory = self._make_arena()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._tasks.start_soon(self.handler.sweep)
            for transport in self._transports:
                self.addresses.append(await self._tasks.start(self._serve_transport, transport, memory))
        except BaseException:
            await self._stop(None)
            raise
        if self._populates:
            self._tasks.start_soon(self._populate, memory)
        logger.info("server.started id=%s addresses=%s arena=%d", self.server_id.hex(), self.addresses, memory.length)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        # A failed transport cancels the body: that must reach the task group. Any other error is the body's own.
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        return await self._stop(error if cancelled else None)

    async def _stop(self, cancellation: BaseException | None) -> bool | None:
        if self._tasks is None or self._memory is None:
            raise LocalProtocolError("the server was not started")
        try:
            await self._drain()
            self._tasks.cancel_scope.cancel()
            kind = None if cancellation is None else type(cancellation)
            swallowed = await self._tasks.__aexit__(kind, cancellation, None)
            return swallowed if cancellation is not None else None
        except Exception as error:
            causes: Sequence[Exception] = getattr(error, "exceptions", [])
            if len(causes) == 1:
                raise causes[0] from None
            raise
        finally:
            self._memory.close()
            logger.info("server.stopped id=%s", self.server_id.hex())

    def _make_arena(self) -> HostMemory:
        settings = self.config.memory
        size = settings.max_size - settings.max_size % settings.block_size
        self._memory = memory = HostMemory.create("arena", size, settings.hugepages)
        allocator = ArenaAllocator(size, GRANULE_BYTES)
        self._handler = StoreHandler(
            self.config, memory, allocator, self._policy, server_id=self.server_id, boot_id=self.boot_id
        )
        return memory

    async def _populate(self, memory: HostMemory) -> None:
        """In steps, so that the server can end meanwhile. From the start on: low addresses are handed out first."""
        started = time.monotonic()
        for offset in range(0, memory.length, POPULATE_STEP_BYTES):
            length = min(POPULATE_STEP_BYTES, memory.length - offset)
            if not await anyio.to_thread.run_sync(memory.populate, offset, length):
                logger.warning("arena.not_populated: this kernel cannot; the first put to each page will be slow")
                return
        logger.info("arena.populated bytes=%d elapsed_s=%.1f", memory.length, time.monotonic() - started)

    async def _serve_transport(
        self, transport: ServerTransport, memory: HostMemory, *, task_status: TaskStatus[Any]
    ) -> None:
        try:
            await transport.serve(self.handler, memory, task_status=task_status)
        except Exception:
            logger.exception("transport.failed name=%s: the server stops", transport.name)
            raise

    async def _drain(self) -> None:
        self.handler.close()
        with anyio.move_on_after(self._drain_timeout_s, shield=True) as scope:
            await self.handler.wait_idle()
        if scope.cancelled_caught:
            logger.warning("server.drain_timeout after_s=%s %r", self._drain_timeout_s, self._handler)
            self.handler.counted("drain_timeout")
