"""One storage host's server: owns the arena, the disk and the transports, starts them and ends them in order.

Life::

    start   arena memory -> handler -> the disk is opened, and what survived there is taken up
            -> every transport listens
            -> the arena is populated in the background: a put that lands on pages that are not there yet is slow
    run     until the body of the ``async with`` ends, or a transport or the disk's log fails
    end     nothing new is accepted -> requests in flight finish, and what only the arena holds is written to disk,
            up to ``drain_timeout_s`` in all -> every transport ends and fences its sessions -> the disk is closed
            -> the arena is unmapped, once

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
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.eviction import EvictionPolicy
from memkv_vllm.store.garbage import Freezer
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.store.log.api import ValueLog
from memkv_vllm.store.log.drivelog import DriveLog
from memkv_vllm.store.policies import make_policy
from memkv_vllm.transports.base import ServerTransport
from memkv_vllm.transports.memory import POPULATE_STEP_BYTES, HostMemory

__all__ = ["GRANULE_BYTES", "StoreServer"]

logger = logging.getLogger("memkv.store")

GRANULE_BYTES = 4096
"""Values are of any size: an extent wastes less than one page, whatever ``memory.block_size`` is."""
DEFAULT_DRAIN_TIMEOUT_S = 5.0
SERVER_ID_BYTES = 16
_FREEZE_INTERVAL_S = 0.5


class StoreServer:
    """A store with its transports. Used once, as ``async with StoreServer(config, transports) as server:``.

    Args:
        config: the server's settings.
        transports: what to serve on; each gets the same handler and arena.
        policy: order of eviction; as ``storage.eviction`` says by default.
        log: the disk behind the arena; as ``storage`` says by default.
        server_id: 16 bytes that stay with the store's content; random by default, since memory does not outlive us.
            With a disk it is what stands there.
        drain_timeout_s: how long requests in flight, and then the writing to disk, may go on at the end.
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
        log: ValueLog | None = None,
        server_id: bytes | None = None,
        drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S,
        populate: bool = True,
    ) -> None:
        config.validate_supported()
        self.config = config
        self.server_id = os.urandom(SERVER_ID_BYTES) if server_id is None else server_id
        self.boot_id = os.urandom(SERVER_ID_BYTES)
        self.arena_slow = False
        """The arena could not be backed with memory in advance."""
        self.addresses: list[Any] = []
        """What each transport listens on, in the order of ``transports``."""
        self._transports = tuple(transports)
        eviction = config.storage.eviction
        if policy is None:
            policy = make_policy(eviction.policy, per_namespace=eviction.namespace_quota < 1)
        self._policy = policy
        self._log = log
        self._freezer = Freezer()
        self._disk_runs = False
        self._stop_by = 0.0
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

    def health(self) -> list[str]:
        """What is wrong with the store's parts, one line each; empty when nothing is."""
        return self.handler.health()

    def transport_health(self) -> list[str]:
        """What is wrong with the transports (a NIC's port that is down), one line each; empty when nothing is."""
        return [line for transport in self._transports for line in transport.health()]

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
            await self._open_disk(self._tasks)
            self._tasks.start_soon(self.handler.sweep)
            self._tasks.start_soon(self._freeze_entries)
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
            await self._finish_disk()
            self._tasks.cancel_scope.cancel()
            kind = None if cancellation is None else type(cancellation)
            swallowed = await self._tasks.__aexit__(kind, cancellation, None)
            return swallowed if cancellation is not None else None
        except Exception as error:
            cause = _only_cause(error)
            if cause is not error:
                raise cause from None
            raise
        finally:
            await self._close_disk()
            self._memory.close()
            self._freezer.close()
            logger.info("server.stopped id=%s", self.server_id.hex())

    def _make_arena(self) -> HostMemory:
        settings = self.config.memory
        size = settings.max_size - settings.max_size % settings.block_size
        self._memory = memory = HostMemory.create("arena", size, settings.hugepages)
        allocator = ArenaAllocator(size, GRANULE_BYTES)
        if self._log is None and self.config.storage.mode != "memory":
            self._log = DriveLog(self.config.storage, memory)
        self._handler = StoreHandler(
            self.config,
            memory,
            allocator,
            self._policy,
            server_id=self.server_id,
            boot_id=self.boot_id,
            log=self._log,
        )
        return memory

    async def _open_disk(self, tasks: TaskGroup) -> None:
        """Before anybody listens: clients that came now would be told that nothing is there."""
        await self.handler.start()
        self.server_id = self.handler.identity.server_id
        self._freezer.poll(self.handler.entries_made)
        if self.handler.residency is not None:
            self._disk_runs = True
            tasks.start_soon(self.handler.residency.run)

    async def _finish_disk(self) -> None:
        if self._disk_runs and self.handler.residency is not None:
            left_s = max(0.0, self._stop_by - time.monotonic())
            await self.handler.residency.finish(left_s)

    async def _close_disk(self) -> None:
        if self._handler is not None and self._handler.residency is not None:
            with anyio.CancelScope(shield=True):  # it ends threads that read and write the arena
                await self._handler.residency.aclose()

    async def _freeze_entries(self) -> None:
        while True:
            await anyio.sleep(_FREEZE_INTERVAL_S)
            self._freezer.poll(self.handler.entries_made)

    async def _populate(self, memory: HostMemory) -> None:
        """In steps, so that the server can end meanwhile. From the start on: low addresses are handed out first."""
        started = time.monotonic()
        for offset in range(0, memory.length, POPULATE_STEP_BYTES):
            length = min(POPULATE_STEP_BYTES, memory.length - offset)
            if not await anyio.to_thread.run_sync(memory.populate, offset, length):
                self.arena_slow = True
                logger.warning("arena.not_populated: this kernel cannot; the first put to each page will be slow")
                return
        logger.info("arena.populated bytes=%d elapsed_s=%.1f", memory.length, time.monotonic() - started)

    async def _serve_transport(
        self, transport: ServerTransport, memory: HostMemory, *, task_status: TaskStatus[Any]
    ) -> None:
        try:
            await transport.serve(self.handler, memory, task_status=task_status)
        except EnvironmentFault as error:
            # Of this host, and complete as it is: where in this program it was noticed helps nobody.
            logger.error("transport.failed name=%s reason=%r: the server stops", transport.name, str(error))
            raise
        except Exception:
            logger.exception("transport.failed name=%s: the server stops", transport.name)
            raise

    async def _drain(self) -> None:
        self.handler.close()
        self._stop_by = time.monotonic() + self._drain_timeout_s
        with anyio.move_on_after(self._drain_timeout_s, shield=True) as scope:
            await self.handler.wait_idle()
        if scope.cancelled_caught:
            logger.warning("server.drain_timeout after_s=%s %r", self._drain_timeout_s, self._handler)
            self.handler.counted("drain_timeout")


def _only_cause(error: Exception) -> Exception:
    """What a group of one error, in groups of one, is about."""
    causes: Sequence[Exception] = getattr(error, "exceptions", [])
    return _only_cause(causes[0]) if len(causes) == 1 else error
