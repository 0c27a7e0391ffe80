"""The provider that calls libibverbs directly, by ctypes: any Python, no compiler, no Python object per work request.

A batch of work requests becomes an array of ``struct ibv_send_wr`` by a handful of numpy assignments, whatever its
length, and one call of ``ibv_post_send`` outside of the interpreter lock. Completions are polled into an array the same
way.

Lifetimes. Every object is an :class:`~memkv_vllm.transports.verbs.ownership.Owned` around a pointer: destroyed by
``close()`` and by nothing else, dependents first, once. A call on a closed one raises EBADF instead of following a
pointer to nothing. The memory behind a queue pair's work requests and a completion queue's polling array belongs to
these objects; the library copies from and to it during a call and keeps no pointer.

Forks. Regions are expected to be shared mappings, as all memory of this package is; for private memory a fork can move
the parent's pages away from the NIC (Linux before 5.12), and ``ibv_fork_init`` is not called here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from memkv_vllm.transports.verbs.abi import (
    ERR,
    INIT,
    MIN_RNR_TIMER,
    MTU_CODES,
    NO_DEVICES,
    PORT_EVENTS,
    QP_EVENTS,
    RNR_RETRY,
    RTR,
    RTS,
    SEND_SIGNALED,
    TO_ERR,
    TO_INIT,
    TO_RTR,
    TO_RTS,
    async_event,
    check_path,
    link_layer,
    mtu_bytes,
    port_state,
    random_packet_number,
)
from memkv_vllm.transports.verbs.ownership import Ledger, Owned, same_provider
from memkv_vllm.transports.verbs.provider import (
    Access,
    AsyncEvent,
    Completion,
    CompletionQueue,
    DeviceAttributes,
    Path,
    PeerQueuePair,
    PortAttributes,
    VerbsError,
    WorkRequests,
)
from memkv_vllm.transports.verbs.structs import (
    COMPLETION,
    SGE,
    WORK_REQUEST,
    AsyncEventStruct,
    Capabilities,
    Channel,
    Context,
    DeviceLimits,
    PortLimits,
    QueuePairAttributes,
    QueuePairInit,
    QueuePairStruct,
    RegionStruct,
)
from memkv_vllm.transports.verbs.symbols import ARM, DEFAULT_LIBRARY, POLL, POST, Library, error_number

__all__ = ["LibibverbsProvider"]

POLL_BATCH = 64
"""Completions taken by one call of ``ibv_poll_cq``."""


class LibibverbsProvider:
    """``libibverbs.so.1`` of this host.

    Args:
        path: of the library, for tests.

    Raises:
        OSError: it cannot be loaded.
    """

    name = "libibverbs"

    def __init__(self, path: str = DEFAULT_LIBRARY) -> None:
        self._library = Library(path)
        self._ledger = Ledger()

    def device_names(self) -> Sequence[str]:
        """Names in the library's order; none where the kernel has no RDMA."""
        try:
            with _DeviceList(self._library) as devices:
                return list(devices.names)
        except VerbsError as error:
            if error.errno in NO_DEVICES:
                return []
            raise

    def open(self, name: str) -> LibibverbsDevice:
        """Open a device by its name; VerbsError with ENODEV if there is none."""
        with _DeviceList(self._library) as devices:
            pointer = devices.names.get(name)
            if pointer is None:
                raise VerbsError("ibv_open_device", errno.ENODEV)
            context = self._library.make("ibv_open_device", pointer)
        return LibibverbsDevice(self._library, self._ledger, name, context)

    def num_live(self) -> int:
        """Objects that were made and not closed."""
        return self._ledger.num_live()


class _DeviceList:
    """The library's list of devices; its pointers hold until the list is left."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.names: dict[str, int] = {}

    def __enter__(self) -> _DeviceList:
        count = ctypes.c_int()
        self._list = self._library.make("ibv_get_device_list", ctypes.byref(count))
        for pointer in (ctypes.c_uint64 * count.value).from_address(self._list):
            self.names[self._library.call("ibv_get_device_name", pointer).decode()] = pointer
        return self

    def __exit__(self, *_: object) -> None:
        self._library.call("ibv_free_device_list", self._list)


class LibibverbsDevice(Owned):
    """An open device: ``struct ibv_context``."""

    def __init__(self, library: Library, ledger: Ledger, name: str, context: int) -> None:
        self.name = name
        self._library = library
        self._context = context
        struct = Context.from_address(context)
        self.async_fd: int = struct.async_fd
        os.set_blocking(self.async_fd, False)
        self._post = POST(struct.ops[Context.OP_POST_SEND])
        self._poll = POLL(struct.ops[Context.OP_POLL_CQ])
        self._arm = ARM(struct.ops[Context.OP_REQ_NOTIFY_CQ])
        super().__init__(ledger)

    def attributes(self) -> DeviceAttributes:
        """Its limits."""
        self._check_open("ibv_query_device")
        found = DeviceLimits()
        self._library.check("ibv_query_device", self._context, ctypes.byref(found))
        return DeviceAttributes(
            max_work_requests=found.max_qp_wr,
            max_sges=found.max_sge,
            max_completions=found.max_cqe,
            max_queue_pairs=found.max_qp,
            max_regions=found.max_mr,
            max_region_bytes=found.max_mr_size,
            max_reads_accepted=found.max_qp_rd_atom,
            max_reads_initiated=found.max_qp_init_rd_atom,
            num_ports=found.phys_port_cnt,
            vendor_id=found.vendor_id,
            firmware=found.fw_ver.decode(errors="replace"),
        )

    def port(self, number: int) -> PortAttributes:
        """The state of a port now."""
        self._check_open("ibv_query_port")
        found = PortLimits()
        self._library.check("ibv_query_port", self._context, number, ctypes.byref(found))
        return PortAttributes(
            state=port_state(found.state),
            link_layer=link_layer(found.link_layer),
            active_mtu=mtu_bytes(found.active_mtu),
            max_message_bytes=found.max_msg_sz,
            lid=found.lid,
            num_gids=found.gid_tbl_len,
        )

    def gid(self, port: int, index: int) -> bytes:
        """16 bytes; all zero where the entry is empty."""
        self._check_open("ibv_query_gid")
        found = (ctypes.c_uint8 * 16)()
        self._library.check("ibv_query_gid", self._context, port, index, found)
        return bytes(found)

    def async_events(self) -> Sequence[AsyncEvent]:
        """Take and acknowledge what has happened."""
        self._check_open("ibv_get_async_event")
        events: list[AsyncEvent] = []
        taken = AsyncEventStruct()
        while True:
            ctypes.set_errno(0)
            if self._library.call("ibv_get_async_event", self._context, ctypes.byref(taken)):
                _only_empty("ibv_get_async_event")
                return events
            # Not acknowledged yet, so that the queue pair that it names is still there.
            events.append(async_event(taken.event_type, _element(taken)))
            self._library.call("ibv_ack_async_event", ctypes.byref(taken))

    def protection_domain(self) -> LibibverbsProtectionDomain:
        """Allocate one."""
        self._check_open("ibv_alloc_pd")
        return LibibverbsProtectionDomain(self, self._library.make("ibv_alloc_pd", self._context))

    def completion_queue(self, max_completions: int) -> LibibverbsCompletionQueue:
        """Make a completion channel, and a queue on it."""
        self._check_open("ibv_create_cq")
        channel = self._library.make("ibv_create_comp_channel", self._context)
        try:
            os.set_blocking(Channel.from_address(channel).fd, False)
            pointer = self._library.make("ibv_create_cq", self._context, max_completions, None, channel, 0)
        except BaseException:
            self._library.call("ibv_destroy_comp_channel", channel)
            raise
        return LibibverbsCompletionQueue(self, pointer, channel)

    def _destroy(self) -> None:
        self._library.check("ibv_close_device", self._context)


class LibibverbsProtectionDomain(Owned):
    """``struct ibv_pd``."""

    rank = 3

    def __init__(self, device: LibibverbsDevice, pointer: int) -> None:
        self._device, self._library, self._pointer = device, device._library, pointer
        super().__init__(device._ledger, device)

    def register(self, address: int, length: int, access: Access) -> LibibverbsMemoryRegion:
        """Register; relaxed ordering is asked for only where library and kernel can ignore it if they must."""
        self._check_open("ibv_reg_mr")
        if access & Access.RELAXED_ORDERING and self._library.has("ibv_reg_mr_iova2"):
            pointer = self._library.make("ibv_reg_mr_iova2", self._pointer, address, length, address, int(access))
        else:
            plain = int(access & ~Access.RELAXED_ORDERING)
            pointer = self._library.make("ibv_reg_mr", self._pointer, address, length, plain)
        return LibibverbsMemoryRegion(self, pointer, address, length)

    def register_dmabuf(
        self, fd: int, offset: int, length: int, address: int, access: Access
    ) -> LibibverbsMemoryRegion:
        """Register a dmabuf; VerbsError with ENOSYS where the library has no such call (rdma-core before 34)."""
        self._check_open("ibv_reg_dmabuf_mr")
        pointer = self._library.make("ibv_reg_dmabuf_mr", self._pointer, offset, length, address, fd, int(access))
        return LibibverbsMemoryRegion(self, pointer, address, length)

    def queue_pair(self, completions: CompletionQueue, max_work_requests: int) -> LibibverbsQueuePair:
        """Make one in RESET."""
        self._check_open("ibv_create_qp")
        queue = same_provider(LibibverbsCompletionQueue, completions, "ibv_create_qp")
        wanted = QueuePairInit(
            send_cq=queue._pointer,
            recv_cq=queue._pointer,
            cap=Capabilities(max_send_wr=max_work_requests, max_send_sge=1),
            qp_type=QueuePairInit.TYPE_RC,
            sq_sig_all=0,
        )
        pointer = self._library.make("ibv_create_qp", self._pointer, ctypes.byref(wanted))
        return LibibverbsQueuePair(self, queue, pointer, max_work_requests)

    def _destroy(self) -> None:
        self._library.check("ibv_dealloc_pd", self._pointer)


class LibibverbsMemoryRegion(Owned):
    """``struct ibv_mr``."""

    rank = 1

    def __init__(self, domain: LibibverbsProtectionDomain, pointer: int, address: int, length: int) -> None:
        self._library, self._pointer = domain._library, pointer
        struct = RegionStruct.from_address(pointer)
        self.address, self.length = address, length
        self.lkey: int = struct.lkey
        self.rkey: int = struct.rkey
        super().__init__(domain._ledger, domain)

    def _destroy(self) -> None:
        self._library.check("ibv_dereg_mr", self._pointer)


class LibibverbsCompletionQueue(Owned):
    """``struct ibv_cq`` on a ``struct ibv_comp_channel`` of its own: a shared one would mix their events."""

    rank = 2

    def __init__(self, device: LibibverbsDevice, pointer: int, channel: int) -> None:
        self._library, self._pointer, self._channel = device._library, pointer, channel
        self._poll, self._arm = device._poll, device._arm
        self.fd: int = Channel.from_address(channel).fd
        self._records = np.zeros(POLL_BATCH, COMPLETION)
        self._place = self._records.ctypes.data
        self._event = (ctypes.c_void_p * 2)()
        super().__init__(device._ledger, device)

    def arm(self) -> None:
        """Ask for an event at the next completion."""
        self._check_open("ibv_req_notify_cq")
        result = self._arm(self._pointer, 0)
        if result:
            raise VerbsError("ibv_req_notify_cq", error_number(result))

    def drain(self) -> Sequence[Completion]:
        """Events, acknowledgement, arming, polling: in this order, or a completion between two of them is missed."""
        self._check_open("ibv_poll_cq")
        self._take_events()
        self.arm()
        found: list[Completion] = []
        while True:
            count = self._poll(self._pointer, POLL_BATCH, self._place)
            if count < 0:
                raise VerbsError("ibv_poll_cq", error_number(count))
            records = self._records[:count]
            found.extend(
                map(
                    Completion,
                    records["wr_id"].tolist(),
                    records["status"].tolist(),
                    records["vendor_err"].tolist(),
                    records["qp_num"].tolist(),
                )
            )
            if count < POLL_BATCH:
                return found

    def _take_events(self) -> None:
        first, second = ctypes.addressof(self._event), ctypes.addressof(self._event) + 8
        events = 0
        try:
            ctypes.set_errno(0)
            while not self._library.call("ibv_get_cq_event", self._channel, first, second):
                events += 1
            _only_empty("ibv_get_cq_event")
        finally:
            # Whatever comes next: destroying the queue waits for ever for an event that was not acknowledged.
            if events:
                self._library.call("ibv_ack_cq_events", self._pointer, events)

    def _destroy(self) -> None:
        try:
            self._library.check("ibv_destroy_cq", self._pointer)
        finally:
            self._library.check("ibv_destroy_comp_channel", self._channel)


class LibibverbsQueuePair(Owned):
    """``struct ibv_qp`` with the array that its batches are written into."""

    rank = 0

    def __init__(
        self,
        domain: LibibverbsProtectionDomain,
        completions: LibibverbsCompletionQueue,
        pointer: int,
        max_work_requests: int,
    ) -> None:
        self._library, self._pointer, self._post = domain._library, pointer, domain._device._post
        self.number: int = QueuePairStruct.from_address(pointer).qp_num
        self.packet_number = random_packet_number()
        self._batch = WorkRequestArray(max_work_requests)
        super().__init__(domain._ledger, domain, completions)

    def initialize(self, port: int, access: Access) -> None:
        """RESET to INIT."""
        self._modify(QueuePairAttributes(qp_state=INIT, port_num=port, qp_access_flags=int(access)), TO_INIT)

    def connect(self, path: Path, peer: PeerQueuePair) -> None:
        """INIT to RTR to RTS."""
        check_path(path)
        ready = QueuePairAttributes(
            qp_state=RTR,
            path_mtu=MTU_CODES[path.mtu],
            dest_qp_num=peer.number,
            rq_psn=peer.packet_number,
            max_dest_rd_atomic=path.max_reads,
            min_rnr_timer=MIN_RNR_TIMER,
        )
        address = ready.ah_attr
        address.dgid[:] = peer.gid
        address.is_global, address.sgid_index = 1, path.gid_index
        address.hop_limit, address.traffic_class = path.hop_limit, path.traffic_class
        address.dlid, address.sl, address.port_num = peer.lid, path.service_level, path.port
        self._modify(ready, TO_RTR)
        sending = QueuePairAttributes(
            qp_state=RTS,
            timeout=path.timeout,
            retry_cnt=path.retry_count,
            rnr_retry=RNR_RETRY,
            sq_psn=self.packet_number,
            max_rd_atomic=path.max_reads,
        )
        self._modify(sending, TO_RTS)

    def post(self, work: WorkRequests) -> None:
        """Post a batch by one call."""
        self._check_open("ibv_post_send")
        if len(work):
            self._batch.post(work, self._post, self._pointer)

    def fail(self) -> None:
        """To ERR."""
        self._modify(QueuePairAttributes(qp_state=ERR), TO_ERR)

    def state(self) -> int:
        """As the device knows it."""
        self._check_open("ibv_query_qp")
        found, made = QueuePairAttributes(), QueuePairInit()
        self._library.check("ibv_query_qp", self._pointer, ctypes.byref(found), TO_ERR, ctypes.byref(made))
        return int(found.qp_state)

    def _modify(self, attributes: QueuePairAttributes, mask: int) -> None:
        self._check_open("ibv_modify_qp")
        self._library.check("ibv_modify_qp", self._pointer, ctypes.byref(attributes), mask)

    def _destroy(self) -> None:
        self._library.check("ibv_destroy_qp", self._pointer)


class WorkRequestArray:
    """``capacity`` chained ``struct ibv_send_wr``, each with its own ``struct ibv_sge``, written column by column.

    The chain is made once, from the first to the last. A batch of n takes the last n of it, so that its end needs no
    change: only what differs between work requests is ever written.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        requests, sges = np.zeros(capacity, WORK_REQUEST), np.zeros(capacity, SGE)
        self._start = int(requests.ctypes.data)
        requests["next"][:-1] = self._start + WORK_REQUEST.itemsize * np.arange(1, capacity, dtype=np.uint64)
        requests["sg_list"] = sges.ctypes.data + SGE.itemsize * np.arange(capacity, dtype=np.uint64)
        requests["num_sge"] = 1
        self._wr_ids, self._opcodes, self._flags = requests["wr_id"], requests["opcode"], requests["send_flags"]
        self._remote, self._rkeys = requests["remote_addr"], requests["rkey"]
        self._local, self._lengths, self._lkeys = sges["addr"], sges["length"], sges["lkey"]
        self._bad = np.zeros(1, np.uint64)
        self._bad_place = int(self._bad.ctypes.data)

    def post(self, work: WorkRequests, function: Any, queue_pair: int) -> None:
        """Write a batch and call ``function`` (``ibv_post_send``) on it once.

        Raises:
            VerbsError: ENOMEM: longer than the array, nothing was posted; or what the function said.
        """
        first = self._capacity - len(work)
        if first < 0:
            raise VerbsError("ibv_post_send", errno.ENOMEM)
        self._wr_ids[first:] = work.wr_ids
        self._opcodes[first:] = work.opcodes
        np.multiply(work.signalled, SEND_SIGNALED, out=self._flags[first:], casting="unsafe")
        self._remote[first:] = work.remote
        self._rkeys[first:] = work.rkeys
        self._local[first:] = work.local
        self._lengths[first:] = work.lengths
        self._lkeys[first:] = work.lkeys
        head = self._start + first * WORK_REQUEST.itemsize
        self._bad[0] = 0  # a device that refuses all may leave it as it was
        result = function(queue_pair, head, self._bad_place)
        if result:
            bad = int(self._bad[0]) or head
            raise VerbsError("ibv_post_send", error_number(result), accepted=(bad - head) // WORK_REQUEST.itemsize)


def _element(event: AsyncEventStruct) -> int:
    """The number of what an event is about."""
    if event.event_type in QP_EVENTS:
        return int(QueuePairStruct.from_address(event.element).qp_num)
    return int(event.element & 0xFFFFFFFF) if event.event_type in PORT_EVENTS else 0


def _only_empty(call: str) -> None:
    """After a call that found nothing: raise unless that was all."""
    number = ctypes.get_errno()
    if number not in (errno.EAGAIN, errno.EINTR):
        raise VerbsError(call, number)
