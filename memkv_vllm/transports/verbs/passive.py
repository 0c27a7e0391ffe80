"""The client's end of a session: queue pairs that post nothing, and memory regions that the server reads and writes.

Besides what is registered with it, it has a landing of its own, two packets long: there the server's probe WRITEs. So a
region that is offered again while its slots are in use is READ from, and never written to.

All of it belongs to one session: its device handle, protection domain and keys end with it. Every method blocks and is
called in worker threads, several at once if need be: they take turns. So :meth:`PassiveEnd.close` waits for a
registration that is under way, and after it nothing can begin any more.

Memory that is registered cannot be unmapped: pages stay pinned whatever becomes of the mapping, and a NIC would go on
writing into pages that nobody sees. So a view of each region's memory is held until it is deregistered, and the landing
is unmapped after that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from memkv_vllm.errors import ConnectionLost, EnvironmentFault, RemoteProtocolError
from memkv_vllm.topology import Rail
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES, Endpoint, QueuePairEnd, RegionToken
from memkv_vllm.transports.verbs.gpu_memory import register_region
from memkv_vllm.transports.verbs.opening import Knobs, OpenPort, open_rail
from memkv_vllm.transports.verbs.provider import (
    Access,
    CompletionQueue,
    Device,
    MemoryRegion,
    PeerQueuePair,
    ProtectionDomain,
    Provider,
    QueuePair,
    VerbsError,
)

__all__ = ["PassiveEnd"]

_Closable = QueuePair | MemoryRegion | CompletionQueue | ProtectionDomain | Device

_log = logging.getLogger("memkv.transports.verbs")

PEER_MAY = Access.REMOTE_READ | Access.REMOTE_WRITE


class PassiveEnd:
    """See the module's text.

    Args:
        provider: the verbs library.
        rail: the port to use.
        knobs: what settings fix.
        num_queue_pairs: of the session.
        root: where ``/sys`` and ``/proc`` are read to explain a failure.
    """

    def __init__(self, provider: Provider, rail: Rail, knobs: Knobs, num_queue_pairs: int, root: Path) -> None:
        self.rail = rail
        self._provider = provider
        self._knobs = knobs
        self._num_queue_pairs = num_queue_pairs
        self._root = root
        self._turn = threading.Lock()
        self._closed = False
        self._released = False
        self._broken = False
        self._begun = False
        self._port: OpenPort | None = None
        self._domain: ProtectionDomain | None = None
        self._completions: CompletionQueue | None = None
        self._queue_pairs: list[QueuePair] = []
        self._landing: HostMemory | None = None
        self._landing_region: MemoryRegion | None = None
        self._regions: list[MemoryRegion] = []
        self._views: list[memoryview] = []

    @property
    def is_released(self) -> bool:
        """Whether nothing of it is there, nor can be any more."""
        # A thread that begins says so before it looks whether it may: one that comes later makes nothing.
        return self._released or (self._closed and not self._begun)

    @property
    def port(self) -> OpenPort | None:
        """What was chosen; None before :meth:`make`."""
        return self._port

    def make(self) -> Endpoint:
        """Open the device, make the landing and the queue pairs, in INIT; what the server must know of them.

        Raises:
            EnvironmentFault: the device or its port cannot be used, or this host has no memory for the landing.
            VerbsError: the library refused something.
            ConnectionLost: it was closed meanwhile.
        """
        self._begun = True
        with self._turn:
            self._check_open()
            if self._port is not None:
                # What it made then is there until it is closed; a second set would hide the first from that.
                raise ConnectionLost("the set-up of this connection has failed before; a new one is needed")
            port = self._port = open_rail(self._provider, self.rail, self._knobs)
            self._domain = port.device.protection_domain()
            landing = self._make_landing(self._domain)
            # Never armed nor read: what posts nothing completes nothing.
            self._completions = port.device.completion_queue(self._num_queue_pairs)
            for _ in range(self._num_queue_pairs):
                queue_pair = self._domain.queue_pair(self._completions, 1)
                self._queue_pairs.append(queue_pair)
                queue_pair.initialize(self.rail.port, PEER_MAY)
            ends = tuple(QueuePairEnd(pair.number, pair.packet_number) for pair in self._queue_pairs)
            return Endpoint(self.rail.gid, port.port_attributes.lid, port.mtu, port.max_reads_accepted, ends, landing)

    def connect(self, server: Endpoint) -> None:
        """Connect the queue pairs to the server's, which may use them from now on.

        Raises:
            RemoteProtocolError: it does not fit ours.
            VerbsError: the library refused.
            ConnectionLost: it was closed meanwhile.
        """
        with self._turn:
            self._check_open()
            port = self._port
            if port is None or len(server.queue_pairs) != len(self._queue_pairs) or server.mtu > port.mtu:
                count, mtu = len(server.queue_pairs), server.mtu
                raise RemoteProtocolError("token", f"an endpoint of {count} queue pairs and MTU {mtu} was answered")
            path = port.path(server.mtu, min(server.max_reads, port.max_reads_accepted))
            for queue_pair, end in zip(self._queue_pairs, server.queue_pairs, strict=True):
                queue_pair.connect(path, PeerQueuePair(end.number, end.packet_number, server.gid, server.lid))

    def register(self, region: Region) -> RegionToken:
        """Register a region; what the server must know of it.

        Raises:
            VerbsError, EnvironmentFault, LocalProtocolError: see ``gpu_memory.register_region``.
            ConnectionLost: it was closed meanwhile.
        """
        with self._turn:
            self._check_open()
            if self._domain is None:
                raise ConnectionLost("a region was registered before the queue pairs were made")
            view = region.memory.view(0, region.length) if region.memory is not None else None
            made, way = register_region(self._domain, region, device=self.rail.device, root=self._root)
            self._regions.append(made)
            if view is not None:
                self._views.append(view)
            where, size = self.rail.name, region.length
            _log.debug("event=registered device=%s region=%d bytes=%d way=%s", where, region.id, size, way.value)
            return RegionToken(made.address, made.rkey)

    def refuse(self) -> None:
        """Let nothing begin any more; never waits."""
        self._closed = True

    def close(self, timeout_s: float) -> bool:
        """Destroy the queue pairs, then deregister: after that nothing of the peer touches the memory any more.

        Needs nothing from the peer. A call that is under way is waited for; a second call does nothing.

        Returns:
            False: not known yet, because a call of the library has not returned within ``timeout_s``, or because the
            library refused to destroy a queue pair or to deregister.
        """
        self.refuse()
        if not self._turn.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            if not self._released and not self._broken:
                self._release()
            return self._released
        finally:
            self._turn.release()

    # -- inside

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("the connection was fenced during its set-up")

    def _make_landing(self, domain: ProtectionDomain) -> RegionToken:
        # A mapping that is shared, like all that is registered: a fork would take a private one's pages away.
        try:
            self._landing = HostMemory.create("verbs-landing", LANDING_BYTES, hugepages="off")
        except EnvironmentFault as error:
            raise EnvironmentFault(
                f"no memory or no file descriptor for an RDMA connection ({error.__cause__}): raise this process's "
                "limits (ulimit -n; systemd: LimitNOFILE) or free memory on this host"
            ) from error
        access = Access.LOCAL | Access.REMOTE_WRITE
        self._landing_region = domain.register(self._landing.address, LANDING_BYTES, access)
        return RegionToken(self._landing_region.address, self._landing_region.rkey)

    def _release(self) -> None:
        failures = _close_all((*self._queue_pairs, self._landing_region, *self._regions))
        leaks = _close_all((self._completions, self._domain, self._port.device if self._port is not None else None))
        if leaks and not failures:
            where, reason = self.rail.name, "; ".join(map(str, leaks))
            _log.error("event=not_closed device=%s reason=%r: it stays open as long as this process", where, reason)
        if failures:
            self._broken = True
            # A queue pair that may live may still be written through: its memory is never handed out again.
            _log.error(
                "event=release_failed device=%s reason=%r: the slots of this connection stay in quarantine; the device "
                "may be broken (dmesg), restart this process once it is repaired",
                self.rail.name,
                "; ".join(map(str, failures)),
            )
            return
        self._queue_pairs.clear()
        self._regions.clear()
        self._views.clear()
        if self._landing is not None:
            self._landing.close()
        self._released = True


def _close_all(parts: Sequence[_Closable | None]) -> list[VerbsError]:
    """Close every one of ``parts``, in order; what the library refused."""
    failures: list[VerbsError] = []
    for part in parts:
        try:
            if part is not None:
                part.close()
        except VerbsError as error:
            failures.append(error)
    return failures
