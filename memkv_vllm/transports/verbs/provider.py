"""The seam under the verbs transport: what it needs of a verbs library. Protocols and values only.

Two providers fill it: ``libibverbs``, called directly, and ``pyverbs``. Both are imported on use; nothing outside of
this folder imports either. Words are verbs' own: protection domain, memory region, queue pair, work request.

Ownership, and the order of closing::

    Device -> ProtectionDomain -> MemoryRegion, QueuePair
           -> CompletionQueue (with a completion channel of its own) <- QueuePair

``close()`` of any object is safe to call twice and closes what depends on it first, each exactly once: a device's
closes its queue pairs, then memory regions, then completion queues, then protection domains. After ``QueuePair.close``
returns the NIC neither reads nor writes memory for it any more, and after ``MemoryRegion.close`` nobody can through its
keys.

Threads: ``post``, ``drain`` and ``arm`` are short and belong to the owner's event loop. All else may take milliseconds
(a registration: seconds) and is run in worker threads; the owner sees to it that no two calls meet on one object.
Every call that fails raises :class:`VerbsError`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_RETRY_COUNT",
    "Access",
    "AsyncEvent",
    "Completion",
    "CompletionQueue",
    "Device",
    "DeviceAttributes",
    "LinkLayer",
    "MemoryRegion",
    "Opcode",
    "Path",
    "PeerQueuePair",
    "PortAttributes",
    "PortState",
    "ProtectionDomain",
    "Provider",
    "QueuePair",
    "VerbsError",
    "WorkRequests",
]

MAX_RETRY_COUNT = 6
"""Most of a path's ``retry_count``: soft-RoCE takes 7 as "for ever", and a work request to a dead peer never ends."""


class VerbsError(Exception):
    """A call of the verbs library failed. Stays inside this folder: the transport translates it at its edge.

    Attributes:
        call: the function, such as ``ibv_reg_mr``.
        errno: its error number, 0 if it gave none.
        accepted: for a post: the work requests before the one that was refused; they will complete.
        detail: why, where the number alone does not say it.
    """

    def __init__(self, call: str, errno: int, *, accepted: int = 0, detail: str = "") -> None:
        self.call = call
        self.errno = errno
        self.accepted = accepted
        self.detail = detail
        reason = os.strerror(errno) if errno else "failed"
        super().__init__(f"{call}: {reason} ({detail})" if detail else f"{call}: {reason}")


class Opcode(IntEnum):
    """What a work request does; numbers of ``enum ibv_wr_opcode``."""

    WRITE = 0
    READ = 4


class Access(IntFlag):
    """What may be done with a memory region; bits of ``enum ibv_access_flags``."""

    LOCAL = 1
    """Local write: the NIC may put what it READs there."""
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    RELAXED_ORDERING = 1 << 20


class LinkLayer(IntEnum):
    """Numbers of ``IBV_LINK_LAYER_*``."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class PortState(IntEnum):
    """Numbers of ``enum ibv_port_state``."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class DeviceAttributes(NamedTuple):
    """Limits of a device, of ``ibv_query_device``. Small ones are real: plan with them, never with a constant."""

    max_work_requests: int
    """Of one send queue."""
    max_sges: int
    max_completions: int
    """Of one completion queue."""
    max_queue_pairs: int
    max_regions: int
    max_region_bytes: int
    max_reads_accepted: int
    """RDMA READs that a queue pair may serve at once (``max_qp_rd_atom``)."""
    max_reads_initiated: int
    """RDMA READs that a queue pair may have outstanding (``max_qp_init_rd_atom``)."""
    num_ports: int
    vendor_id: int
    firmware: str


class PortAttributes(NamedTuple):
    """State of a port, of ``ibv_query_port``. Ports count from 1."""

    state: PortState
    link_layer: LinkLayer
    active_mtu: int
    """Bytes."""
    max_message_bytes: int
    lid: int
    num_gids: int


class Path(NamedTuple):
    """This end of a connection and how its packets travel; for ``QueuePair.connect``."""

    port: int
    gid_index: int
    mtu: int
    """Bytes; the same on both ends."""
    traffic_class: int
    service_level: int
    hop_limit: int
    max_reads: int
    """RDMA READs at once, as initiator and as responder: what both ends can."""
    timeout: int
    """Exponent: an acknowledgement is awaited for about 4.096 us x 2**timeout."""
    retry_count: int
    """At most ``MAX_RETRY_COUNT``."""


class PeerQueuePair(NamedTuple):
    """The other end's queue pair."""

    number: int
    packet_number: int
    """The first one that it sends (24 bits)."""
    gid: bytes
    """16 bytes."""
    lid: int


class Completion(NamedTuple):
    """One work completion. ``status`` is a number of ``enum ibv_wc_status``; 0 is success."""

    wr_id: int
    status: int
    vendor_error: int
    queue_pair: int
    """Its number."""


class AsyncEvent(NamedTuple):
    """Something happened to a device: ``kind`` is a number of ``enum ibv_event_type``."""

    kind: int
    name: str
    """Such as ``port_err``, in lower case, without the ``IBV_EVENT_`` prefix."""
    element: int
    """The port's or the queue pair's number; 0 for events of the whole device, and where pyverbs does not tell."""


@dataclass(slots=True)
class WorkRequests:
    """A batch to post on one queue pair, one row per work request, in columns of equal length.

    Each moves ``length`` bytes between one local and one remote stretch. They complete in order; only signalled ones
    (and all that fail, and all behind those) show up in the completion queue.
    """

    wr_ids: npt.NDArray[np.uint64]
    opcodes: npt.NDArray[np.uint32]
    local: npt.NDArray[np.uint64]
    """Addresses in this process."""
    lkeys: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint32]
    """Bytes; below 2 GiB."""
    remote: npt.NDArray[np.uint64]
    """Addresses in the peer."""
    rkeys: npt.NDArray[np.uint32]
    signalled: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.wr_ids)


class MemoryRegion(Protocol):
    """Memory that a device may reach."""

    @property
    def address(self) -> int:
        """Where it begins, as work requests name it."""
        ...

    @property
    def length(self) -> int:
        """Bytes."""
        ...

    @property
    def lkey(self) -> int:
        """Names it in work requests of this process."""
        ...

    @property
    def rkey(self) -> int:
        """Names it in work requests of the peer."""
        ...

    def close(self) -> None:
        """Deregister."""
        ...


class QueuePair(Protocol):
    """One reliable connection (RC). Made in RESET."""

    @property
    def number(self) -> int:
        """Its number, 24 bits."""
        ...

    @property
    def packet_number(self) -> int:
        """The first one that it will send, chosen at random; the peer needs it."""
        ...

    def initialize(self, port: int, access: Access) -> None:
        """RESET to INIT. ``access``: what the peer may do through it."""
        ...

    def connect(self, path: Path, peer: PeerQueuePair) -> None:
        """INIT to RTR to RTS: from now on it answers the peer, and may post.

        Raises:
            VerbsError: also for a ``retry_count`` over ``MAX_RETRY_COUNT``.
        """
        ...

    def post(self, work: WorkRequests) -> None:
        """Post a batch in order. The send queue's free places are the caller's to count.

        Raises:
            VerbsError: one was refused; ``accepted`` says how many went before it.
        """
        ...

    def fail(self) -> None:
        """To ERR: what is outstanding is flushed, nothing new is sent or answered."""
        ...

    def state(self) -> int:
        """As the device knows it now (``enum ibv_qp_state``: 0 RESET, 1 INIT, 2 RTR, 3 RTS, 6 ERR)."""
        ...

    def close(self) -> None:
        """Destroy. When this returns, nothing of it touches memory any more."""
        ...


class CompletionQueue(Protocol):
    """Where work requests report, with a channel whose descriptor becomes readable."""

    @property
    def fd(self) -> int:
        """Non-blocking; readable when there is an event to take with :meth:`drain`. Owned by the queue."""
        ...

    def arm(self) -> None:
        """Ask for an event at the next completion. Once after it was made; :meth:`drain` does it again."""
        ...

    def drain(self) -> Sequence[Completion]:
        """Take and acknowledge all events, arm again, then poll until empty: so no completion is missed."""
        ...

    def close(self) -> None:
        """Destroy it and its channel, after its queue pairs."""
        ...


class ProtectionDomain(Protocol):
    """What belongs together: queue pairs reach only regions of their own domain."""

    def register(self, address: int, length: int, access: Access) -> MemoryRegion:
        """Register memory of this process, or of a GPU where the kernel can (peermem). Holds no reference to it."""
        ...

    def register_dmabuf(self, fd: int, offset: int, length: int, address: int, access: Access) -> MemoryRegion:
        """Register ``length`` bytes at ``offset`` of a dmabuf; work requests name them from ``address`` on.

        pyverbs can name them by their offset only: with it, ``address`` must be ``offset``.

        Raises:
            VerbsError: EOPNOTSUPP: the device or the kernel cannot; ENOSYS: the library is too old.
        """
        ...

    def queue_pair(self, completions: CompletionQueue, max_work_requests: int) -> QueuePair:
        """Make one whose sends report to ``completions``: one SGE, no inline data, no receives."""
        ...

    def close(self) -> None:
        """Deallocate."""
        ...


class Device(Protocol):
    """An open device."""

    @property
    def name(self) -> str:
        """Such as ``mlx5_0``."""
        ...

    @property
    def async_fd(self) -> int:
        """Non-blocking; readable when :meth:`async_events` has something. Owned by the device."""
        ...

    def attributes(self) -> DeviceAttributes:
        """Its limits."""
        ...

    def port(self, number: int) -> PortAttributes:
        """The state of a port now."""
        ...

    def gid(self, port: int, index: int) -> bytes:
        """16 bytes; all zero where the entry is empty."""
        ...

    def async_events(self) -> Sequence[AsyncEvent]:
        """Take and acknowledge what has happened; never waits."""
        ...

    def protection_domain(self) -> ProtectionDomain:
        """Allocate one."""
        ...

    def completion_queue(self, max_completions: int) -> CompletionQueue:
        """Make one, with a completion channel."""
        ...

    def close(self) -> None:
        """Close all that was made of it, then itself."""
        ...


class Provider(Protocol):
    """A verbs library."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    def device_names(self) -> Sequence[str]:
        """All RDMA devices of this host that the library can open, in its order; empty where there are none."""
        ...

    def open(self, name: str) -> Device:
        """Open a device."""
        ...

    def num_live(self) -> int:
        """Objects that were made and not closed, of all kinds: a gauge for tests of leaks."""
        ...
