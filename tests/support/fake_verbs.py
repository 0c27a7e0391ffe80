"""A verbs library without hardware: NICs, queue pairs and RDMA in the memory of this process.

A :class:`FakeFabric` is the network: every queue pair of every provider on it can reach every other. A
:class:`FakeNic` is one device with its ports, limits and troubles; a :class:`FakeProvider` is the library that one
host has, with some NICs::

    fabric = FakeFabric()
    server = FakeProvider(fabric, [FakeNic("fake0", "127.0.0.1"), FakeNic("fake1", "127.0.0.2")])
    client = FakeProvider(fabric, [FakeNic("fake8", "127.0.0.3")])
    ...
    fabric.close()  # ends its thread; late writes never land after it

Bytes really move, by memmove between the addresses that work requests name, so whoever uses it must own that memory.
With no delay they move inside of ``post`` and no thread is started; with one (``nic.troubles.delay_s``), on the
fabric's thread, unless an end was closed or failed before; with ``outlives_sender`` also where it was the sender. All
that can go wrong on purpose is in :class:`Troubles`. GID 0 of a port is link-local, GID 1 its IPv4 address.

Where it is stricter than soft-RoCE, and where it is not like it, is listed in ``tests/rdma/test_provider.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memkv_vllm.transports.verbs.ownership import Ledger, Owned, same_provider
from memkv_vllm.transports.verbs.provider import (
    MAX_RETRY_COUNT,
    Access,
    AsyncEvent,
    Completion,
    CompletionQueue,
    DeviceAttributes,
    Opcode,
    Path,
    PeerQueuePair,
    PortAttributes,
    PortState,
    VerbsError,
    WorkRequests,
)
from tests.support.fake_fabric import (
    EVENT_KINDS,
    FakeFabric,
    FakeNic,
    FakePort,
    Trouble,
    Troubles,
    ipv4_gid,
    link_local_gid,
)

__all__ = ["FakeFabric", "FakeNic", "FakePort", "FakeProvider", "Trouble", "Troubles", "ipv4_gid", "link_local_gid"]

SUCCESS, LOC_LEN_ERR, LOC_QP_OP_ERR, LOC_PROT_ERR, WR_FLUSH_ERR = 0, 1, 2, 4, 5
REM_ACCESS_ERR, RETRY_EXC_ERR = 10, 12
"""Numbers of ``enum ibv_wc_status``."""
RESET, INIT, RTR, RTS, ERR = 0, 1, 2, 3, 6


class FakeProvider:
    """The verbs library of one host."""

    name = "fake"

    def __init__(self, fabric: FakeFabric, nics: Sequence[FakeNic]) -> None:
        self.fabric = fabric
        self.nics = {nic.name: nic for nic in nics}
        self.ledger = Ledger()
        self.num_opened = 0
        """Devices that were ever opened: a test of a transport that must not touch them asks for 0."""
        for nic in nics:
            fabric.plug(nic)

    def device_names(self) -> Sequence[str]:
        return list(self.nics)

    def open(self, name: str) -> FakeDevice:
        nic = self.nics.get(name)
        if nic is None:
            raise VerbsError("ibv_open_device", errno.ENODEV)
        nic._call("ibv_open_device")
        self.num_opened += 1
        return FakeDevice(self, nic)

    def num_live(self) -> int:
        return self.ledger.num_live()


class FakeDevice(Owned):
    """An open device."""

    def __init__(self, provider: FakeProvider, nic: FakeNic) -> None:
        self.nic, self.fabric, self.name = nic, provider.fabric, nic.name
        self.async_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: deque[AsyncEvent] = deque()
        super().__init__(provider.ledger)
        nic.opened.append(self)

    def attributes(self) -> DeviceAttributes:
        self._enter("ibv_query_device")
        return self.nic.attributes._replace(num_ports=len(self.nic.ports))

    def port(self, number: int) -> PortAttributes:
        self._enter("ibv_query_port")
        port = self.nic.ports.get(number)
        if port is None:
            raise VerbsError("ibv_query_port", errno.EINVAL)
        return PortAttributes(
            port.state, port.link_layer, port.active_mtu, port.max_message_bytes, port.lid, len(port.gids)
        )

    def gid(self, port: int, index: int) -> bytes:
        self._enter("ibv_query_gid")
        if port not in self.nic.ports or not 0 <= index < len(self.nic.ports[port].gids):
            raise VerbsError("ibv_query_gid", errno.EINVAL)
        return self.nic.ports[port].gids[index]

    def async_events(self) -> Sequence[AsyncEvent]:
        self._enter("ibv_get_async_event")
        with self.fabric.lock, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.async_fd)
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def protection_domain(self) -> FakeProtectionDomain:
        self._enter("ibv_alloc_pd")
        return FakeProtectionDomain(self)

    def completion_queue(self, max_completions: int) -> FakeCompletionQueue:
        self._enter("ibv_create_cq")
        if not 1 <= max_completions <= self.nic.attributes.max_completions:
            raise VerbsError("ibv_create_cq", errno.EINVAL)
        return FakeCompletionQueue(self, max_completions)

    def _enter(self, call: str) -> None:
        self._check_open(call)
        self.nic._call(call)

    def _tell(self, event: AsyncEvent) -> None:
        with self.fabric.lock:
            if not self.closed:
                self._events.append(event)
                os.eventfd_write(self.async_fd, 1)

    def _destroy(self) -> None:
        with self.fabric.lock:
            self.nic.opened.remove(self)
            os.close(self.async_fd)


class FakeProtectionDomain(Owned):
    """Regions and queue pairs that belong together."""

    rank = 3

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.regions: dict[int, FakeMemoryRegion] = {}
        super().__init__(device._ledger, device)

    def register(self, address: int, length: int, access: Access) -> FakeMemoryRegion:
        return self._register("ibv_reg_mr", address, address, length, access, None)

    def register_dmabuf(self, fd: int, offset: int, length: int, address: int, access: Access) -> FakeMemoryRegion:
        self._check_open("ibv_reg_dmabuf_mr")
        self.device.nic._call("ibv_reg_dmabuf_mr")
        page = offset - offset % mmap.PAGESIZE
        memory = mmap.mmap(fd, length + offset - page, offset=page)
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset - page
        return self._register("", address, place, length, access, memory)

    def queue_pair(self, completions: CompletionQueue, max_work_requests: int) -> FakeQueuePair:
        self._check_open("ibv_create_qp")
        queue = same_provider(FakeCompletionQueue, completions, "ibv_create_qp")
        self.device.nic._call("ibv_create_qp")
        limits = self.device.nic.attributes
        if not 1 <= max_work_requests <= limits.max_work_requests:
            raise VerbsError("ibv_create_qp", errno.EINVAL)
        if sum(len(device_pd.queue_pairs()) for device_pd in self._siblings()) >= limits.max_queue_pairs:
            raise VerbsError("ibv_create_qp", errno.ENOMEM)
        return FakeQueuePair(self, queue, max_work_requests)

    def queue_pairs(self) -> list[FakeQueuePair]:
        """Its own, for counting."""
        return [dependent for dependent in self._dependents if isinstance(dependent, FakeQueuePair)]

    def _siblings(self) -> Iterator[FakeProtectionDomain]:
        for device in self.device.nic.opened:
            yield from (d for d in list(device._dependents) if isinstance(d, FakeProtectionDomain))

    def _register(
        self, call: str, address: int, place: int, length: int, access: Access, memory: mmap.mmap | None
    ) -> FakeMemoryRegion:
        self._check_open("ibv_reg_mr")
        if call and length > self.device.nic.troubles.spared_bytes:
            self.device.nic._call(call)
        limits = self.device.nic.attributes
        if length > limits.max_region_bytes or length < 1:
            raise VerbsError("ibv_reg_mr", errno.EINVAL)
        if sum(len(domain.regions) for domain in self._siblings()) >= limits.max_regions:
            raise VerbsError("ibv_reg_mr", errno.ENOMEM)
        if access & Access.REMOTE_WRITE and not access & Access.LOCAL:
            raise VerbsError("ibv_reg_mr", errno.EINVAL)
        return FakeMemoryRegion(self, address, place, length, access, memory)

    def _destroy(self) -> None:
        pass


class FakeMemoryRegion(Owned):
    """Memory under keys. ``place`` is where the bytes are, ``address`` what work requests call it."""

    rank = 1

    def __init__(
        self,
        domain: FakeProtectionDomain,
        address: int,
        place: int,
        length: int,
        access: Access,
        memory: mmap.mmap | None,
    ) -> None:
        self.address, self.place, self.length, self.access = address, place, length, access
        self.domain, self._memory = domain, memory
        self.lkey = self.rkey = next(domain.device.fabric.keys) & 0xFFFFFFFF
        super().__init__(domain._ledger, domain)
        domain.regions[self.rkey] = self

    def covers(self, address: int, length: int) -> bool:
        """Whether all of it lies inside."""
        return self.address <= address and address + length <= self.address + self.length

    def _destroy(self) -> None:
        with self.domain.device.fabric.lock:  # a move that has begun ends first
            del self.domain.regions[self.rkey]


class FakeCompletionQueue(Owned):
    """Completions, and an eventfd that becomes readable."""

    rank = 2

    def __init__(self, device: FakeDevice, max_completions: int) -> None:
        self.device, self.max_completions = device, max_completions
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._completions: deque[tuple[Completion, FakeQueuePair, int]] = deque()
        self._armed = False
        super().__init__(device._ledger, device)

    def arm(self) -> None:
        self._check_open("ibv_req_notify_cq")
        with self.device.fabric.lock:
            self._armed = True

    def drain(self) -> Sequence[Completion]:
        self._check_open("ibv_poll_cq")
        self.device.nic._call("ibv_get_cq_event")
        with self.device.fabric.lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            self._armed = True
            taken = list(self._completions)
            self._completions.clear()
            for _, queue_pair, number in taken:
                queue_pair._reported(number)
        return [completion for completion, _, _ in taken]

    def _push(self, completion: Completion, queue_pair: FakeQueuePair, number: int) -> bool:
        """False: it overran and is lost."""
        if len(self._completions) >= self.max_completions:
            self.device._tell(AsyncEvent(EVENT_KINDS["cq_err"], "cq_err", 0))
            return False
        self._completions.append((completion, queue_pair, number))
        if self._armed:
            self._armed = False
            os.eventfd_write(self.fd, 1)
        return True

    def _destroy(self) -> None:
        with self.device.fabric.lock:
            os.close(self.fd)


class Posted(NamedTuple):
    """One work request under way."""

    number: int
    """Among those of its queue pair."""
    wr_id: int
    opcode: int
    local: int
    lkey: int
    length: int
    remote: int
    rkey: int
    signalled: bool
    due: float
    trouble: Trouble
    landed: int | None = None
    """Its status, once its bytes have moved and only the completion is outstanding."""


class FakeQueuePair(Owned):
    """One end of a reliable connection."""

    rank = 0

    def __init__(self, domain: FakeProtectionDomain, completions: FakeCompletionQueue, max_work_requests: int) -> None:
        self.domain, self.completions, self.max_work_requests = domain, completions, max_work_requests
        self.nic, self.fabric = domain.device.nic, domain.device.fabric
        self.packet_number = random.getrandbits(24)
        self.path: Path | None = None
        self.peer: PeerQueuePair | None = None
        self.current_state = RESET
        self.access = Access(0)
        self._port = 0
        self._queue: deque[Posted] = deque()
        self._num_posted = self._num_reported = 0
        self._stuck = self._retrying = False
        super().__init__(domain._ledger, domain, completions)
        self.number = self.fabric.add(self)

    def initialize(self, port: int, access: Access) -> None:
        self._enter("ibv_modify_qp")
        if self.current_state != RESET or port not in self.nic.ports:
            raise VerbsError("ibv_modify_qp", errno.EINVAL)
        self._port, self.access, self.current_state = port, access, INIT

    def connect(self, path: Path, peer: PeerQueuePair) -> None:
        self._enter("ibv_modify_qp")
        port, limits = self.nic.ports.get(path.port), self.nic.attributes
        wrong = (
            port is None
            or self.current_state != INIT
            or path.port != self._port
            or not 0 <= path.gid_index < len(port.gids)
            or path.mtu not in (256, 512, 1024, 2048, 4096)
            or path.mtu > port.active_mtu
            or not 0 <= path.retry_count <= MAX_RETRY_COUNT
            or not 0 <= path.timeout < 32
            or not 0 <= path.max_reads <= min(limits.max_reads_accepted, limits.max_reads_initiated)
            or len(peer.gid) != 16
            or peer.packet_number >> 24
            or peer.number >> 24
        )
        if wrong:
            raise VerbsError("ibv_modify_qp", errno.EINVAL)
        with self.fabric.lock:
            self.path, self.peer, self.current_state = path, peer, RTS

    def post(self, work: WorkRequests) -> None:
        self._enter("ibv_post_send")
        with self.fabric.lock:
            if self.current_state not in (RTS, ERR):
                raise VerbsError("ibv_post_send", errno.EINVAL)
            if not len(work):
                return
            room = self.max_work_requests - (self._num_posted - self._num_reported)
            accepted, refused = self.nic.troubles.posts.get(self.nic.num_posts, (len(work), 0))
            self.nic.num_posts += 1
            if accepted > room:
                accepted, refused = room, errno.ENOMEM
            odd = np.flatnonzero((work.opcodes != Opcode.READ) & (work.opcodes != Opcode.WRITE))
            if odd.size and odd[0] < accepted:
                accepted, refused = int(odd[0]), errno.EINVAL
            for row in range(min(accepted, len(work))):
                self._take(work, row)
            self._advance()
            if accepted < len(work):
                raise VerbsError("ibv_post_send", refused, accepted=accepted)

    def fail(self) -> None:
        self._enter("ibv_modify_qp")
        with self.fabric.lock:
            self._abandon()
            self.current_state = ERR
            self._advance()

    def state(self) -> int:
        self._enter("ibv_query_qp")
        return self.current_state

    def _enter(self, call: str) -> None:
        self._check_open(call)
        self.nic._call(call)

    def _take(self, work: WorkRequests, row: int) -> None:
        troubles = self.nic.troubles
        trouble = troubles.requests.get(self.nic.num_posted, Trouble())
        self._queue.append(
            Posted(
                self._num_posted, int(work.wr_ids[row]), int(work.opcodes[row]), int(work.local[row]),
                int(work.lkeys[row]), int(work.lengths[row]), int(work.remote[row]), int(work.rkeys[row]),
                bool(work.signalled[row]), time.monotonic() + troubles.delay_s + trouble.delay_s, trouble,
            )
        )  # fmt: skip
        self._num_posted += 1
        self.nic.num_posted += 1

    def _advance(self) -> None:
        """Carry out what is due, in order; with the fabric's lock held."""
        while self._queue and not self.closed:
            head = self._queue[0]
            if self.current_state == ERR:
                self._complete(self._queue.popleft(), WR_FLUSH_ERR)
                continue
            if self._stuck or self.nic.troubles.silent:
                return
            if head.due > time.monotonic():
                self.fabric.later(head.due, self._advance)
                return
            status = (head.trouble.status or self._carry_out(head)) if head.landed is None else head.landed
            if status == RETRY_EXC_ERR and not head.trouble.status and not self._retrying:
                self._retrying = True
                self._queue[0] = head._replace(due=time.monotonic() + self._retry_s())
                continue
            self._retrying = False
            if not head.trouble.completes:
                self._stuck = True
                return
            wait_s = self.nic.troubles.completion_delay_s
            if head.landed is None and wait_s:
                self._queue[0] = head._replace(landed=status, due=time.monotonic() + wait_s)
                continue
            self._complete(self._queue.popleft(), status)

    def _carry_out(self, posted: Posted) -> int:
        """Move the bytes of one work request; its status."""
        port = self.nic.ports[self._port]
        if port.state is not PortState.ACTIVE:
            return LOC_QP_OP_ERR
        local = self.domain.regions.get(posted.lkey)
        if local is None or not local.covers(posted.local, posted.length):
            return LOC_PROT_ERR
        if posted.opcode == Opcode.READ and not local.access & Access.LOCAL:
            return LOC_PROT_ERR
        if posted.length > port.max_message_bytes:
            return LOC_LEN_ERR
        peer = self.fabric.peer_of(self)
        if peer is None:
            return RETRY_EXC_ERR
        there = self._target(posted, peer)
        narrow = (peer if posted.opcode == Opcode.READ else self).nic.troubles.narrow_bytes
        if narrow is not None and self.path is not None and min(posted.length, self.path.mtu) > narrow:
            return RETRY_EXC_ERR
        if there is None:
            peer._fall()
            return REM_ACCESS_ERR
        here = local.place + posted.local - local.address
        to, source = (here, there) if posted.opcode == Opcode.READ else (there, here)
        ctypes.memmove(to, source, posted.length)
        return SUCCESS

    @staticmethod
    def _target(posted: Posted, peer: FakeQueuePair) -> int | None:
        """Where its remote bytes are, if the peer lets it."""
        remote = peer.domain.regions.get(posted.rkey)
        needed = Access.REMOTE_READ if posted.opcode == Opcode.READ else Access.REMOTE_WRITE
        if remote is None or not remote.covers(posted.remote, posted.length):
            return None
        return remote.place + posted.remote - remote.address if remote.access & peer.access & needed else None

    def _abandon(self) -> None:
        """Failed or closed from this side: what is on the wire may arrive all the same."""
        if not self.nic.troubles.outlives_sender or self.current_state != RTS:
            return
        for posted in self._queue:
            local = self.domain.regions.get(posted.lkey)
            if posted.opcode == Opcode.WRITE and posted.landed is None and local is not None:
                sent = ctypes.string_at(local.place + posted.local - local.address, posted.length)
                self.fabric.later(posted.due, functools.partial(self._arrive, posted, sent))

    def _arrive(self, posted: Posted, sent: bytes) -> None:
        """Bytes off the wire, whose sender is gone."""
        peer = self.fabric.peer_of(self)
        there = self._target(posted, peer) if peer is not None else None
        if there is not None:
            ctypes.memmove(there, sent, posted.length)

    def _complete(self, posted: Posted, status: int) -> None:
        if status != SUCCESS:
            self.current_state = ERR
        if not posted.signalled and status == SUCCESS:
            return
        completion = Completion(posted.wr_id, status, posted.trouble.vendor_error, self.number)
        if not self.completions._push(completion, self, posted.number):
            self.current_state = ERR

    def _fall(self) -> None:
        """It answered with an error, which ends it too."""
        self.current_state = ERR
        self.domain.device._tell(AsyncEvent(EVENT_KINDS["qp_access_err"], "qp_access_err", self.number))
        self._advance()

    def _reported(self, number: int) -> None:
        """A completion was taken: its place in the send queue and all before it are free."""
        self._num_reported = max(self._num_reported, number + 1)

    def _retry_s(self) -> float:
        if self.nic.troubles.retry_s is not None:
            return self.nic.troubles.retry_s
        assert self.path is not None
        return float((self.path.retry_count + 1) * 4.096e-6 * 2**self.path.timeout)

    def _destroy(self) -> None:
        self.nic._call("ibv_destroy_qp")
        with self.fabric.lock:  # a move that has begun ends first
            self._abandon()
            self.fabric.remove(self.number)
            self._queue.clear()
