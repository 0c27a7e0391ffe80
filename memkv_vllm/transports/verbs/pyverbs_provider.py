"""The provider on pyverbs, as Debian 12 packages it (``python3-pyverbs`` 44, for Python 3.11 only).

**pyverbs holds the interpreter lock through every call**, so a registration of seconds, or a post that moves bytes in
software, stops all threads of this process for as long. ``libibverbs`` (the other provider) does not.

Lifetimes of pyverbs' objects, as read in its source (44, which is what runs here, and the newest):

============  ======================================================================================================
``Context``   Knows what was made of it by weak references and closes that first, but leaves the rest as it is if one
              refuses. So nothing is left to it: its dependents are closed here, by :class:`Owned`, before it. Its
              property ``context`` must not be read: 44 takes the C pointer for a Python object.
``PD``,       Their ``close`` sets the C pointer to NULL when the library agreed, so that a second one does nothing.
``MR``,       If it refused, the pointer stays and their destructor would try again whenever the collector comes by:
``QP``,       such an object is kept for ever (its ledger never forgets it). They hold references to their parents; in
``CQ``        a garbage cycle, and at the interpreter's end, these are cleared in any order, so that a PD can go before
              its MRs (seen: "free(): invalid pointer"): a ledger holds every open object from outside, beyond that end.
``MR``        Holds no reference to the memory; an address of 0 would make it allocate its own.
``DmaBufMR``  Is named by its offset in the dmabuf, never by an address.
``CQ``        Destroying one waits until its events are acknowledged; it counts them and acknowledges the rest itself.
``QP``        The same for asynchronous events, for which it waits with the interpreter lock held: if one is taken and
              not acknowledged yet, for ever. So taking and acknowledging is one step under a lock, and queue pairs and
              completion queues are destroyed under the same.
``Comp-       Closes its CQs before itself. 44 does not tell its descriptor, nor does any version that of the context's
Channel``     events: both are found by looking which one is new in ``/proc/self/fd``. Both belong to these objects.
``SGE``,      Up to 59 their destructors are misspelt: nobody frees their C memory but ``close()``, which does not
``SendWR``    remember that it did: a second one is a double free. A ``SendWR`` points at the next one's C memory and
              keeps no reference. So none are made per work request: a queue pair has one of each, which share their
              memory and are filled in again and again, see :class:`WorkRequestForm`.
``GID``,      Plain values with nothing to free. ``QPInitAttr`` keeps its CQs by reference; it is dropped after use.
``QPAttr`` ..
============  ======================================================================================================
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from memkv_vllm.transports.verbs import quiet_pyverbs  # noqa: F401

# isort: split
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

from memkv_vllm.transports.verbs.abi import (
    ERR,
    INIT,
    MIN_RNR_TIMER,
    MTU_CODES,
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

__all__ = ["PyverbsProvider"]


QPT_RC = 2
POLL_BATCH = 64
FD_ATTEMPTS = 5
"""How often an object is made anew because another thread opened a descriptor of the same kind in that moment."""

T = TypeVar("T")


@contextlib.contextmanager
def _calling(call: str, otherwise: int = 0) -> Iterator[None]:
    """Turn pyverbs' errors into VerbsError; ``otherwise`` is the number of one that has none."""
    try:
        yield
    except PyverbsError as error:
        code = getattr(error, "error_code", -1)
        raise VerbsError(call, code if code > 0 else otherwise) from error


def _event_fds() -> set[int]:
    """This process's open descriptors of InfiniBand events."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was listdir's own
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


_making_fds = threading.Lock()


def _with_event_fd(call: str, make: Callable[[], T], close: Callable[[T], None]) -> tuple[T, int]:
    """Make an object that opens one descriptor of events, and find out which.

    Other users of the library in this process may open theirs at the same time; then it is made once more.
    """
    with _making_fds:
        for _ in range(FD_ATTEMPTS):
            before = _event_fds()
            made = make()
            new = _event_fds() - before
            if len(new) == 1:
                (fd,) = new
                os.set_blocking(fd, False)
                return made, fd
            close(made)
    raise VerbsError(call, errno.EAGAIN)


class PyverbsProvider:
    """The host's pyverbs."""

    name = "pyverbs"

    def __init__(self) -> None:
        self._ledger = Ledger()

    def device_names(self) -> Sequence[str]:
        """Names in the library's order; none where the kernel has no RDMA (pyverbs does not tell that from failure)."""
        try:
            return [device.name.decode() for device in get_device_list()]
        except PyverbsError:
            return []

    def open(self, name: str) -> PyverbsDevice:
        """Open a device by its name; VerbsError with ENODEV if there is none."""
        if name not in self.device_names():
            raise VerbsError("ibv_open_device", errno.ENODEV)
        with _calling("ibv_open_device"):
            context, fd = _with_event_fd("ibv_open_device", lambda: Context(name=name), lambda made: made.close())
        return PyverbsDevice(self._ledger, name, context, fd)

    def num_live(self) -> int:
        """Objects that were made and not closed."""
        return self._ledger.num_live()


class PyverbsDevice(Owned):
    """An open ``Context``."""

    def __init__(self, ledger: Ledger, name: str, context: Any, async_fd: int) -> None:
        self.name, self.async_fd = name, async_fd
        self._context = context
        self._acknowledging = threading.Lock()
        super().__init__(ledger)

    def attributes(self) -> DeviceAttributes:
        """Its limits."""
        self._check_open("ibv_query_device")
        with _calling("ibv_query_device"):
            found = self._context.query_device()
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
            firmware=found.fw_version,
        )

    def port(self, number: int) -> PortAttributes:
        """The state of a port now."""
        self._check_open("ibv_query_port")
        with _calling("ibv_query_port", errno.EINVAL):
            found = self._context.query_port(number)
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
        with _calling("ibv_query_gid", errno.EINVAL):
            return ipaddress.IPv6Address(self._context.query_gid(port, index).gid).packed

    def async_events(self) -> Sequence[AsyncEvent]:
        """Take and acknowledge what has happened; ``element`` is always 0: pyverbs does not tell it."""
        self._check_open("ibv_get_async_event")
        events: list[AsyncEvent] = []
        while _readable(self.async_fd, "ibv_get_async_event"):
            with self._acknowledging:
                try:
                    taken = self._context.get_async_event()
                except PyverbsError:  # carries no number; only EAGAIN is possible: somebody else took it
                    break
                events.append(async_event(taken.event_type, 0))
                taken.ack()
        return events

    def protection_domain(self) -> PyverbsProtectionDomain:
        """Allocate one."""
        self._check_open("ibv_alloc_pd")
        with _calling("ibv_alloc_pd"):
            return PyverbsProtectionDomain(self, PD(self._context))

    def completion_queue(self, max_completions: int) -> PyverbsCompletionQueue:
        """Make a completion channel, and a queue on it."""
        self._check_open("ibv_create_cq")
        with _calling("ibv_create_comp_channel"):
            channel, fd = _with_event_fd(
                "ibv_create_comp_channel", lambda: CompChannel(self._context), lambda made: made.close()
            )
        try:
            with _calling("ibv_create_cq"):
                queue = CQ(self._context, max_completions, None, channel)
        except BaseException:
            channel.close()
            raise
        return PyverbsCompletionQueue(self, queue, channel, fd)

    def _destroy(self) -> None:
        with _calling("ibv_close_device"):
            self._context.close()


class PyverbsProtectionDomain(Owned):
    """A ``PD``."""

    rank = 3

    def __init__(self, device: PyverbsDevice, domain: Any) -> None:
        self._device, self._domain = device, domain
        super().__init__(device._ledger, device)

    def register(self, address: int, length: int, access: Access) -> PyverbsMemoryRegion:
        """Register memory of this process."""
        self._check_open("ibv_reg_mr")
        if not address:
            raise VerbsError("ibv_reg_mr", errno.EINVAL)
        with _calling("ibv_reg_mr"):
            region = MR(self._domain, length, int(access), address=address)
        return PyverbsMemoryRegion(self, region, address, length)

    def register_dmabuf(self, fd: int, offset: int, length: int, address: int, access: Access) -> PyverbsMemoryRegion:
        """Register a dmabuf; pyverbs names its bytes by their offset: ``address`` has to be the same as ``offset``."""
        self._check_open("ibv_reg_dmabuf_mr")
        if address != offset:
            raise VerbsError(
                "ibv_reg_dmabuf_mr", errno.EINVAL, detail=f"pyverbs names a dmabuf by its offset: address={offset} only"
            )
        with _calling("ibv_reg_dmabuf_mr"):
            region = DmaBufMR(self._domain, length, int(access), dmabuf=fd, offset=offset)
        return PyverbsMemoryRegion(self, region, address, length)

    def queue_pair(self, completions: CompletionQueue, max_work_requests: int) -> PyverbsQueuePair:
        """Make one in RESET."""
        self._check_open("ibv_create_qp")
        queue = same_provider(PyverbsCompletionQueue, completions, "ibv_create_qp")
        wanted = QPInitAttr(
            qp_type=QPT_RC,
            scq=queue._queue,
            rcq=queue._queue,
            cap=QPCap(max_send_wr=max_work_requests, max_recv_wr=0, max_send_sge=1, max_recv_sge=0),
            sq_sig_all=0,
        )
        with _calling("ibv_create_qp"):
            pair = QP(self._domain, wanted)
        return PyverbsQueuePair(self, queue, pair)

    def _destroy(self) -> None:
        with _calling("ibv_dealloc_pd"):
            self._domain.close()


class PyverbsMemoryRegion(Owned):
    """An ``MR`` or ``DmaBufMR``."""

    rank = 1

    def __init__(self, domain: PyverbsProtectionDomain, region: Any, address: int, length: int) -> None:
        self._region = region
        self.address, self.length = address, length
        self.lkey: int = region.lkey
        self.rkey: int = region.rkey
        super().__init__(domain._ledger, domain)

    def _destroy(self) -> None:
        with _calling("ibv_dereg_mr"):
            self._region.close()


class PyverbsCompletionQueue(Owned):
    """A ``CQ`` on a ``CompChannel`` of its own."""

    rank = 2

    def __init__(self, device: PyverbsDevice, queue: Any, channel: Any, fd: int) -> None:
        self._device, self._queue, self._channel, self.fd = device, queue, channel, fd
        super().__init__(device._ledger, device)

    def arm(self) -> None:
        """Ask for an event at the next completion."""
        self._check_open("ibv_req_notify_cq")
        with _calling("ibv_req_notify_cq"):
            self._queue.req_notify()

    def drain(self) -> Sequence[Completion]:
        """Events, acknowledgement, arming, polling: in this order, or a completion between two of them is missed."""
        self._check_open("ibv_poll_cq")
        events = 0
        while _readable(self.fd, "ibv_get_cq_event"):
            with _calling("ibv_get_cq_event"):
                self._channel.get_cq_event(self._queue)
            events += 1
        if events:
            self._queue.ack_events(events)
        self.arm()
        found: list[Completion] = []
        while True:
            with _calling("ibv_poll_cq"):
                count, polled = self._queue.poll(POLL_BATCH)
            found.extend(Completion(wc.wr_id, wc.status, wc.vendor_err, wc.qp_num) for wc in polled)
            if count < POLL_BATCH:
                return found

    def _destroy(self) -> None:
        try:
            with self._device._acknowledging, _calling("ibv_destroy_cq"):
                self._queue.close()
        finally:
            with _calling("ibv_destroy_comp_channel"):
                self._channel.close()


class PyverbsQueuePair(Owned):
    """A ``QP`` with the work request that is filled in for each of a batch."""

    rank = 0

    def __init__(self, domain: PyverbsProtectionDomain, completions: PyverbsCompletionQueue, pair: Any) -> None:
        self._device, self._pair = domain._device, pair
        self.number: int = pair.qp_num
        self.packet_number = random_packet_number()
        self._form = WorkRequestForm()
        super().__init__(domain._ledger, domain, completions)

    def initialize(self, port: int, access: Access) -> None:
        """RESET to INIT."""
        wanted = QPAttr(qp_state=INIT, port_num=port)
        wanted.qp_access_flags = int(access)
        self._modify(wanted, TO_INIT)

    def connect(self, path: Path, peer: PeerQueuePair) -> None:
        """INIT to RTR to RTS."""
        check_path(path)
        route = GlobalRoute(
            dgid=GID(ipaddress.IPv6Address(peer.gid).exploded),
            sgid_index=path.gid_index,
            hop_limit=path.hop_limit,
            traffic_class=path.traffic_class,
        )
        ready = QPAttr(qp_state=RTR)
        ready.ah_attr = AHAttr(dlid=peer.lid, sl=path.service_level, is_global=1, port_num=path.port, gr=route)
        ready.path_mtu = MTU_CODES[path.mtu]
        ready.dest_qp_num, ready.rq_psn = peer.number, peer.packet_number
        ready.max_dest_rd_atomic, ready.min_rnr_timer = path.max_reads, MIN_RNR_TIMER
        self._modify(ready, TO_RTR)
        sending = QPAttr(qp_state=RTS)
        sending.timeout, sending.retry_cnt, sending.rnr_retry = path.timeout, path.retry_count, RNR_RETRY
        sending.sq_psn, sending.max_rd_atomic = self.packet_number, path.max_reads
        self._modify(sending, TO_RTS)

    def post(self, work: WorkRequests) -> None:
        """Post a batch, one call for each of its work requests."""
        self._check_open("ibv_post_send")
        self._form.post(work, self._pair)

    def fail(self) -> None:
        """To ERR."""
        self._modify(QPAttr(qp_state=ERR), TO_ERR)

    def state(self) -> int:
        """As the device knows it; pyverbs' own ``qp_state`` is a copy that stays behind."""
        self._check_open("ibv_query_qp")
        with _calling("ibv_query_qp"):
            found, _ = self._pair.query(TO_ERR)
        return int(found.qp_state)

    def _modify(self, wanted: Any, mask: int) -> None:
        self._check_open("ibv_modify_qp")
        with _calling("ibv_modify_qp"):
            self._pair.modify(wanted, mask)

    def _destroy(self) -> None:
        with self._device._acknowledging, _calling("ibv_destroy_qp"):
            self._pair.close()
        self._form.close()


class WorkRequestForm:
    """One ``SendWR`` and its ``SGE``, filled in for each work request of a batch.

    A ``SendWR`` copies its SGEs into memory of its own, which cannot be written any more. So that copy is freed at
    once, and the work request is pointed at the SGE itself instead: from then on both are written in place, and the
    SGE's memory is freed with the SGE, once.

    Work requests are posted one by one. Of a chain, pyverbs would tell which one was refused only by a copy that it
    makes through a pointer that it does not initialise: where the library refuses a post as a whole (a queue pair in
    INIT), that is a crash.
    """

    def __init__(self) -> None:
        self._sge = SGE(0, 0, 0)
        self._request = SendWR(num_sge=1, sg=[self._sge])
        self._request.close()  # frees its copy; 44 leaves the pointer to it, which the next line replaces
        self._request.sg_list = self._sge

    def post(self, work: WorkRequests, pair: Any) -> None:
        """Post a batch.

        Raises:
            VerbsError: one was refused, with the number of those before it.
        """
        request, sge = self._request, self._sge
        rows = zip(
            work.wr_ids.tolist(),
            work.opcodes.tolist(),
            (work.signalled * SEND_SIGNALED).tolist(),
            work.local.tolist(),
            work.lengths.tolist(),
            work.lkeys.tolist(),
            work.rkeys.tolist(),
            work.remote.tolist(),
            strict=True,
        )
        accepted = 0
        try:
            for *fields, rkey, remote in rows:
                request.wr_id, request.opcode, request.send_flags, sge.addr, sge.length, sge.lkey = fields
                request.set_wr_rdma(rkey, remote)
                pair.post_send(request)
                accepted += 1
        except PyverbsError as error:
            raise VerbsError("ibv_post_send", max(error.error_code, 0), accepted=accepted) from error

    def close(self) -> None:
        """Free the SGE, once; a destructor of the work request, where there is one, finds nothing to free."""
        self._sge.close()
        self._request.sg_list = self._sge


def _readable(fd: int, call: str) -> bool:
    """Whether there is an event to take now: pyverbs would raise an exception where there is none.

    Raises:
        VerbsError: EIO: there never will be one any more, for the device is gone.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    found = poller.poll(0)
    if found and not found[0][1] & select.POLLIN:
        raise VerbsError(call, errno.EIO)
    return bool(found)
