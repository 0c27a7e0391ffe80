"""The ``SessionHandler`` that the store gives to every server transport: admission, sessions, dispatch.

What each message does is in :mod:`memkv_vllm.store.requests`, how values move in
:mod:`memkv_vllm.store.transfers`. All of it runs on one event loop, so the table needs no lock: nothing is
awaited between reading and changing it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio

from memkv_vllm.config import KeyEntry, LimitsConfig, ServerConfig
from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError, StoreError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.session import Limits, ServerIdentity
from memkv_vllm.store.admission import Admission
from memkv_vllm.store.arena import ArenaAllocator
from memkv_vllm.store.bulkqueue import BulkQueue
from memkv_vllm.store.eviction import EvictionPolicy
from memkv_vllm.store.keyring import KeyChange
from memkv_vllm.store.log.api import ValueLog
from memkv_vllm.store.maintenance import Maintenance
from memkv_vllm.store.manifests import ManifestDirectory
from memkv_vllm.store.requests import Requests
from memkv_vllm.store.residency import Residency
from memkv_vllm.store.sessions import StoreSession
from memkv_vllm.store.table import Table, TableLimits
from memkv_vllm.store.transfers import Transfers
from memkv_vllm.store.turns import BulkTurns, Waiter
from memkv_vllm.transports.base import ServerPeer
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import SessionId

__all__ = ["StoreHandler", "table_limits"]

logger = logging.getLogger("memkv.store")

_U16 = 0xFFFF
_FRAME_RESERVE = 4096
_MAX_WAITING_TURNS = 1 << 16
_REQUESTS = {type.value: f"requests_{type.name.lower()}" for type in MessageType}
"""Counters of requests, by type."""


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
        log: the disk behind the arena, if there is one; then :meth:`start` comes before the first session.
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
        log: ValueLog | None = None,
    ) -> None:
        limits = self._limits = config.limits
        self._arena = allocator
        self._table = Table(allocator, policy, table_limits(config))
        self._manifests = _make_manifests(limits)
        self._counters: Counter[str] = Counter()
        self._admission = Admission(config, self._counters)
        self._turns = _make_turns(limits)
        self.residency = None if log is None else self._make_residency(log, clock)
        """Drives the disk, if there is one."""
        self._transfers = Transfers(self._table, memory, self._turns, limits, self._counters, clock, self.residency)
        self._identity = ServerIdentity(server_id, boot_id, self._told_limits())
        self._sessions: dict[SessionId, StoreSession] = {}
        self._connections = self._inflight = 0
        self._idle: anyio.Event | None = None
        """Of who waits until no request is in flight, if somebody does."""
        self._closing = False
        self._clock, self._started = clock, clock()
        self._maintenance = Maintenance(self._table, self._manifests, clock, self.residency)
        self._requests = Requests(
            self._table,
            self._manifests,
            self._transfers,
            self._maintenance,
            limits,
            self._counters,
            statistics=self.statistics,
            clock=clock,
        )

    def __repr__(self) -> str:
        return f"<StoreHandler {len(self._sessions)} sessions, {self._inflight} requests in flight, {self._table!r}>"

    # What a transport calls

    @property
    def identity(self) -> ServerIdentity:
        """Told to every client in the handshake."""
        return self._identity

    @property
    def asks_license(self) -> bool:
        """Whether a session must present a license before anything else."""
        return self._admission.asks_license

    def find_key(self, key_id: str) -> bytes:
        """The 32-byte key of ``key_id``; for an unknown id one that nobody can prove."""
        return self._admission.find_key(key_id)

    def unproven(self, key_id: str) -> None:
        """A peer did not prove the key of ``key_id``: counted and logged if there is none."""
        self._admission.unproven(key_id)

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
        self._sessions[established.session] = StoreSession(peer, self._admission.access(established.key_id))
        self._counters["sessions"] += 1
        kind = established.kind.name.lower()
        logger.info("session.opened peer=%s key=%s kind=%s", peer.label, established.key_id, kind)

    def licensed(self, peer: ServerPeer, token: str) -> None:
        """A session presents its license. Raises ``LicenseError`` to refuse it."""
        self._admission.licensed(self._sessions[peer.established.session], token)

    async def watch(self, peer: ServerPeer) -> None:
        """Runs until the session may not go on: its key was removed, its license has ended.

        Raises:
            RemoteProtocolError: why it is to be cut.
        """
        await self._admission.watch(self._sessions[peer.established.session])

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

    def answer(self, peer: ServerPeer, type: int, body: memoryview) -> bytes | None:
        """Carries out one request that needs no waiting; None, and nothing done, for the others.

        Raises:
            StoreError: the request is refused as a whole.
            RemoteProtocolError: the peer broke the protocol and is to be cut.
        """
        method = self._requests.at_once.get(type)
        if method is None:
            return None
        session = self._begin(peer, type)
        try:
            return method(session, body)
        except StoreError:
            self._counters["requests_refused"] += 1
            raise

    async def handle(self, peer: ServerPeer, type: int, body: memoryview) -> bytes | None:
        """Carries out one request of any type; returns the reply's body, or None where that has been sent.

        Raises:
            StoreError: the request is refused as a whole.
            RemoteProtocolError: the peer broke the protocol and is to be cut.
        """
        answer = self.answer(peer, type, body)
        if answer is not None:
            return answer
        method = self._requests.methods.get(type)
        if method is None:
            raise RemoteProtocolError("type", f"message type {type} is no request")
        session = self._begin(peer, type)
        session.inflight += 1
        self._inflight += 1
        try:
            return await method(session, body)
        except StoreError:
            self._counters["requests_refused"] += 1
            raise
        finally:
            session.inflight -= 1
            self._inflight -= 1
            if not self._inflight and self._idle is not None:
                self._idle.set()
                self._idle = None

    def _begin(self, peer: ServerPeer, type: int) -> StoreSession:
        """Counts a request of a session that is open, on a server that is not closing."""
        session = self._sessions.get(peer.established.session)
        if session is None:
            raise RemoteProtocolError("type", "a request of a session that is not open")
        if self._closing:
            self._counters["refused_closing"] += 1
            raise StoreError("the server is closing")
        self._counters[_REQUESTS[type]] += 1
        session.requests += 1
        return session

    # What the server calls

    async def start(self) -> None:
        """Takes up what the disk holds; from then on the server has the id that is written there.

        Raises:
            EnvironmentFault: a medium cannot be used.
        """
        if self.residency is not None:
            self._identity = replace(self._identity, server_id=await self.residency.start())

    @property
    def entries_made(self) -> int:
        """Number of entries that the table ever had."""
        return self._table.entries_made

    @property
    def closing(self) -> bool:
        """Whether nothing new is accepted any more."""
        return self._closing

    def close(self) -> None:
        """From now on nothing new is accepted: no connection, session or request."""
        self._closing = True

    def replace_keys(self, keys: Mapping[str, KeyEntry]) -> KeyChange:
        """Puts ``keys`` in place of all keys at once; sessions of a key that is gone are ended."""
        return self._admission.replace_keys(keys, self._sessions.values())

    async def wait_idle(self) -> None:
        """Returns when no request is in flight."""
        if self._inflight:
            self._idle = self._idle or anyio.Event()
            await self._idle.wait()

    async def sweep(self) -> None:
        """Reclaims what resets left behind, in small steps; runs until cancelled."""
        await self._maintenance.sweep()

    def namespaces(self) -> list[dict[str, Any]]:
        """See :meth:`Maintenance.namespaces`."""
        return self._maintenance.namespaces()

    async def reset(self, namespace: bytes) -> int:
        """See :meth:`Maintenance.reset`."""
        return await self._maintenance.reset(namespace)

    async def gc(self, idle_s: float) -> list[dict[str, Any]]:
        """See :meth:`Maintenance.gc`."""
        return await self._maintenance.gc(idle_s)

    async def evict(self, num_bytes: int) -> tuple[int, int]:
        """See :meth:`Maintenance.evict`."""
        return await self._maintenance.evict(num_bytes)

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
                "sessions_by_path": dict(Counter(session.peer.data_path for session in self._sessions.values())),
                "inflight": self._inflight,
            },
            "arena": self._arena.statistics()._asdict(),
            "table": {**table._asdict(), "oldest_reservation": age, "counters": counters},
            "manifests": self._manifests.statistics()._asdict(),
            "bulk": {"lanes": turns.lanes, "idle": turns.idle, **turns.queue._asdict()},
            "counters": dict(self._counters),
            "latency": {
                kind.name.lower(): latency.statistics()._asdict() for kind, latency in self._transfers.latencies.items()
            },
            "disk": None if self.residency is None else self.residency.statistics(),
            "sessions": [self._session_statistics(session) for session in self._sessions.values()],
        }

    def health(self) -> list[str]:
        """What is wrong with the store's parts, one line each; empty when nothing is."""
        return [] if self.residency is None else self.residency.health()

    # Small things

    def _make_residency(self, log: ValueLog, clock: Callable[[], float]) -> Residency:
        return Residency(self._table, self._arena, log, self._manifests, self._limits, self._counters, clock)

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
            "data_path": session.peer.data_path,
            "inflight": session.inflight,
            "requests": session.requests,
            "put_bytes": session.put_bytes,
            "get_bytes": session.get_bytes,
            "fenced": session.fenced,
            "limbo": len(session.limbo),
        }


def _make_manifests(limits: LimitsConfig) -> ManifestDirectory:
    family_bytes = limits.max_frame_bytes - _FRAME_RESERVE
    return ManifestDirectory(limits.max_manifests, limits.max_manifest_bytes, family_bytes)


def _make_turns(limits: LimitsConfig) -> BulkTurns:
    slice_values = limits.put_slice_values
    queue: BulkQueue[Waiter] = BulkQueue(slice_values, _MAX_WAITING_TURNS, slice_values)
    return BulkTurns(limits.max_transfers, queue, limits.max_transfers_per_session)


def table_limits(config: ServerConfig) -> TableLimits:
    """The bounds of a table out of the settings."""
    eviction = config.storage.eviction
    return TableLimits(
        max_entries=config.limits.max_entries,
        max_value_bytes=config.limits.max_value_bytes,
        high_watermark=eviction.high_watermark,
        low_watermark=eviction.low_watermark,
        namespace_quota=eviction.namespace_quota,
    )
