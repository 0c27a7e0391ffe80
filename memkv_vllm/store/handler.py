"""The ``SessionHandler`` that the store gives to every server transport: admission, sessions, dispatch.

What each message does is in :mod:`memkv_vllm.store.requests`, how values move in
:mod:`memkv_vllm.store.transfers`. All of it runs on one event loop, so the table needs no lock: nothing is
awaited between reading and changing it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from memkv_vllm.config import ServerConfig
from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError, StoreError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.session import Limits, ServerIdentity
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.bulkqueue import BulkQueue
from memkv_vllm.store.eviction import EvictionPolicy
from memkv_vllm.store.manifests import ManifestDirectory
from memkv_vllm.store.requests import Requests
from memkv_vllm.store.sessions import Access, StoreSession
from memkv_vllm.store.table import Table, TableLimits
from memkv_vllm.store.transfers import Transfers
from memkv_vllm.store.turns import BulkTurns
from memkv_vllm.transports.base import ServerPeer
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import SessionId

__all__ = ["StoreHandler"]

logger = logging.getLogger("memkv.store")

_U16 = 0xFFFF
_FRAME_RESERVE = 4096
_SWEEP_STEP = 256
_MAX_WAITING_TURNS = 1 << 16


class StoreHandler:
    """Serves the sessions of one store; implements ``memkv_vllm.transports.base.SessionHandler``.

    Args:
        config: the server's settings.
        memory: the arena's bytes, at least as long as ``allocator``.
        allocator: extents of the arena; nobody else may use it.
        policy: order of eviction.
        server_id: 16 bytes that stay with the store.
        boot_id: 16 bytes of this process run.
        clock: seconds on the clock of ``Deadline``.
    """

    def __init__(
        self,
        config: ServerConfig,
        memory: HostMemory,
        allocator: ArenaAllocator,
        policy: EvictionPolicy,
        *,
        server_id: bytes,
        boot_id: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = self._limits = config.limits
        self._keys = config.network.keys
        self._arena = allocator
        self._table = Table(allocator, policy, TableLimits(max_value_bytes=limits.max_value_bytes))
        family_bytes = limits.max_frame_bytes - _FRAME_RESERVE
        self._manifests = ManifestDirectory(limits.max_manifests, limits.max_manifest_bytes, family_bytes)
        self._counters: Counter[str] = Counter()
        slice_values = limits.put_slice_values
        queue: BulkQueue[anyio.Event] = BulkQueue(slice_values, _MAX_WAITING_TURNS, slice_values)
        self._turns = BulkTurns(limits.copy_threads, queue)
        self._transfers = Transfers(self._table, memory, self._turns, limits, self._counters, clock)
        self._identity = ServerIdentity(server_id, boot_id, self._told_limits())
        self._sessions: dict[SessionId, StoreSession] = {}
        self._connections = 0
        self._inflight = 0
        self._idle, self._stale = anyio.Event(), anyio.Event()
        self._idle.set()
        self._closing = False
        self._clock, self._started = clock, clock()
        self._requests = Requests(
            self._table,
            self._manifests,
            self._transfers,
            limits,
            self._counters,
            statistics=self.statistics,
            on_reset=lambda: self._stale.set(),
        )

    def __repr__(self) -> str:
        return f"<StoreHandler {len(self._sessions)} sessions, {self._inflight} requests in flight, {self._table!r}>"

    # What a transport calls

    @property
    def identity(self) -> ServerIdentity:
        """Told to every client in the handshake."""
        return self._identity

    def find_key(self, key_id: str) -> bytes | None:
        """The 32-byte key of ``key_id``, or None."""
        entry = self._keys.get(key_id)
        return None if entry is None else entry.key.get_secret_value()

    def admit(self) -> bool:
        """Whether one more connection may begin its handshake; if so, it is followed by one :meth:`departed`."""
        if self._closing:
            self._counters["refused_closing"] += 1
            return False
        if self._connections - len(self._sessions) >= self._limits.max_handshakes:
            self._counters["refused_handshakes"] += 1
            return False
        self._connections += 1
        self._counters["connections"] += 1
        return True

    def departed(self) -> None:
        """A connection that was admitted has ended and is fenced."""
        if not self._connections:
            raise LocalProtocolError("departed() without admit()")
        self._connections -= 1

    async def opened(self, peer: ServerPeer) -> None:
        """Takes up a session.

        Raises:
            StoreError: too many sessions, or the server is closing.
        """
        established = peer.established
        if self._closing or len(self._sessions) >= self._limits.max_sessions:
            self._counters["refused_sessions"] += 1
            reason = "closing" if self._closing else f"full: limits.max_sessions = {self._limits.max_sessions}"
            raise StoreError(f"the server is {reason}")
        entry = self._keys.get(established.key_id)
        if entry is None:
            raise StoreError(f"the key id {established.key_id!r} is not known here")
        self._sessions[established.session] = StoreSession(peer, Access.of(entry))
        self._counters["sessions"] += 1
        logger.info("session.opened peer=%s key=%s kind=%s", peer.label, established.key_id, established.kind.value)

    async def closed(self, peer: ServerPeer) -> None:
        """Undoes what a session left: its requests are over and its data path is fenced."""
        session = self._sessions.pop(peer.established.session, None)
        if session is None:
            return
        self._transfers.settle(session)
        for key, generation in self._table.release_owner(peer.established.session):
            logger.error("session.leaked_reservation peer=%s key=%s", peer.label, key.hex())
            self._counters["leaked_reservations"] += 1
            self._table.abort(key, generation)
        self._counters["sessions_closed"] += 1
        logger.info(
            "session.closed peer=%s requests=%d put_bytes=%d get_bytes=%d",
            peer.label,
            session.requests,
            session.put_bytes,
            session.get_bytes,
        )

    def counted(self, event: str) -> None:
        """Adds one to the counter called ``event``."""
        self._counters[event] += 1

    async def handle(self, peer: ServerPeer, type: int, body: memoryview) -> bytes:
        """Carries out one request; returns the reply's body.

        Raises:
            StoreError: the request is refused as a whole.
            RemoteProtocolError: the peer broke the protocol and is to be cut.
        """
        session = self._sessions.get(peer.established.session)
        method = self._requests.methods.get(type)
        if session is None or method is None:
            raise RemoteProtocolError("type", f"message type {type} is no request, or its session is not open")
        if self._closing:
            self._counters["refused_closing"] += 1
            raise StoreError("the server is closing")
        self._counters[f"requests_{MessageType(type).name.lower()}"] += 1
        session.requests += 1
        session.inflight += 1
        self._inflight += 1
        if self._inflight == 1:
            self._idle = anyio.Event()
        try:
            return await method(session, body)
        except StoreError:
            self._counters["requests_refused"] += 1
            raise
        finally:
            session.inflight -= 1
            self._inflight -= 1
            if not self._inflight:
                self._idle.set()

    # What the server calls

    def close(self) -> None:
        """From now on nothing new is accepted: no connection, session or request."""
        self._closing = True

    async def wait_idle(self) -> None:
        """Returns when no request is in flight."""
        await self._idle.wait()

    async def sweep(self) -> None:
        """Reclaims what resets left behind, in small steps; runs until cancelled."""
        while True:
            await self._stale.wait()
            self._stale = anyio.Event()
            while self._table.sweep(_SWEEP_STEP):
                await anyio.lowlevel.checkpoint()

    def statistics(self) -> dict[str, Any]:
        """Everything that STAT shows, as plain values: server, arena, table, manifests, bulk, counters, sessions."""
        table = self._table.statistics()
        age = None if table.oldest_reservation is None else self._clock() - table.oldest_reservation
        counters = {name: getattr(table.counters, name) for name in table.counters.__slots__}
        turns = self._turns.statistics()
        return {
            "server": {
                "server_id": self._identity.server_id.hex(),
                "boot_id": self._identity.boot_id.hex(),
                "uptime_s": round(self._clock() - self._started, 3),
                "connections": self._connections,
                "sessions": len(self._sessions),
                "inflight": self._inflight,
            },
            "arena": self._arena.statistics()._asdict(),
            "table": {**table._asdict(), "oldest_reservation": age, "counters": counters},
            "manifests": self._manifests.statistics()._asdict(),
            "bulk": {"lanes": turns.lanes, "idle": turns.idle, **turns.queue._asdict()},
            "counters": dict(self._counters),
            "sessions": [self._session_statistics(session) for session in self._sessions.values()],
        }

    # Small things

    def _told_limits(self) -> Limits:
        limits = self._limits
        return Limits(
            max_frame_bytes=min(limits.max_frame_bytes, 0xFFFF_FFFF),
            max_batch_keys=min(limits.max_batch_keys, _U16),
            max_inflight=min(limits.max_inflight_per_session, _U16),
            max_value_bytes=min(limits.max_value_bytes, self._arena.size),
        )

    @staticmethod
    def _session_statistics(session: StoreSession) -> dict[str, Any]:
        established = session.peer.established
        return {
            "peer": session.peer.label,
            "key_id": established.key_id,
            "kind": established.kind.name.lower(),
            "inflight": session.inflight,
            "requests": session.requests,
            "put_bytes": session.put_bytes,
            "get_bytes": session.get_bytes,
            "fenced": session.fenced,
            "limbo": len(session.limbo),
        }
