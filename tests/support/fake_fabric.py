"""What fake verbs libraries share: the network, its NICs, and what goes wrong on them. Import it from fake_verbs."""

from __future__ import annotations

import errno
import heapq
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from memkv_vllm.transports.verbs.provider import (
    AsyncEvent,
    DeviceAttributes,
    LinkLayer,
    PortState,
    VerbsError,
)

if TYPE_CHECKING:
    from tests.support.fake_verbs import FakeDevice, FakeQueuePair

__all__ = [
    "EVENT_KINDS",
    "FakeFabric",
    "FakeNic",
    "FakePort",
    "Trouble",
    "Troubles",
    "ipv4_gid",
    "link_local_gid",
]

SUCCESS, RTR, RTS = 0, 2, 3
EVENT_NAMES = {0: "cq_err", 1: "qp_fatal", 3: "qp_access_err", 8: "device_fatal", 9: "port_active", 10: "port_err"}
EVENT_KINDS = {name: kind for kind, name in EVENT_NAMES.items()}


def ipv4_gid(address: str) -> bytes:
    """The GID that RoCE v2 makes of an IPv4 address."""
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address)


def link_local_gid(number: int) -> bytes:
    """A link-local one, as every RoCE port has."""
    return b"\xfe\x80" + bytes(6) + number.to_bytes(8, "big")


@dataclass
class FakePort:
    """One port; change it at any time (``FakeNic.set_port`` also tells of it)."""

    gids: list[bytes]
    state: PortState = PortState.ACTIVE
    link_layer: LinkLayer = LinkLayer.ETHERNET
    active_mtu: int = 1024
    max_message_bytes: int = 1 << 30
    lid: int = 0


class Trouble(NamedTuple):
    """What befalls one work request instead of its success."""

    status: int = SUCCESS
    """It completes with this ``ibv_wc_status`` and moves nothing; others of its queue pair are flushed."""
    vendor_error: int = 0
    delay_s: float = 0.0
    """On top of ``Troubles.delay_s``."""
    completes: bool = True
    """False: it moves its bytes and never completes, nor does anything behind it, until its queue pair fails."""


@dataclass
class Troubles:
    """What goes wrong on a NIC. Changes hold from the next call on."""

    delay_s: float = 0.0
    """From a post until its bytes have moved and it completes."""
    completion_delay_s: float = 0.0
    """From when its bytes have moved until it completes."""
    outlives_sender: bool = False
    """A WRITE that was posted lands when it is due though its sender failed or closed its queue pair meanwhile: it was
    on the wire. Only the target can hold it off."""
    silent: bool = False
    """No work request moves anything or completes, until its queue pair fails: a NIC that is stuck."""
    narrow_bytes: int | None = None
    """Packets with more payload that leave this NIC are lost: those of its WRITEs, and of what others READ from it."""
    requests: dict[int, Trouble] = field(default_factory=dict)
    """By the number of the work request among all that were posted on this NIC, from 0 (see ``FakeNic.num_posted``)."""
    posts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The n-th post on this NIC, from 0, takes so many work requests and then fails: (accepted, errno)."""
    refuse: dict[str, int] = field(default_factory=lambda: {"ibv_reg_dmabuf_mr": errno.EOPNOTSUPP})
    """Calls that fail, by name, such as ``ibv_reg_mr``: with this errno. dmabuf is refused unless taken out."""
    slow_s: dict[str, float] = field(default_factory=dict)
    """Calls that take so long, by name."""
    spared_bytes: int = 0
    """Registrations of at most so many bytes are neither refused nor slow: those of landings."""
    retry_s: float | None = None
    """How long a request to a peer that is gone takes to fail; None: as the path's timeout and retry count say."""


class FakeNic:
    """A device. ``addresses`` are the IPv4 addresses of its ports, one port each; "" is a port without one."""

    def __init__(self, name: str, *addresses: str, attributes: DeviceAttributes | None = None) -> None:
        self.name = name
        self.ports = {
            number: FakePort([link_local_gid(random.getrandbits(48)), *([ipv4_gid(address)] if address else [])])
            for number, address in enumerate(addresses or ("127.0.0.1",), start=1)
        }
        self.attributes = attributes or DeviceAttributes(
            max_work_requests=1024, max_sges=32, max_completions=32767, max_queue_pairs=4096, max_regions=4096,
            max_region_bytes=1 << 40, max_reads_accepted=16, max_reads_initiated=16, num_ports=len(self.ports),
            vendor_id=0xFA4E, firmware="fake-1",
        )  # fmt: skip
        self.troubles = Troubles()
        self.num_posted = 0
        """Work requests so far."""
        self.num_posts = 0
        """Calls of ``post`` so far that were not empty."""
        self.opened: list[FakeDevice] = []

    def limit(self, **limits: Any) -> None:
        """Change device limits by name: ``limit(max_work_requests=4, max_sges=1)``."""
        self.attributes = self.attributes._replace(**limits)

    def set_port(self, number: int, state: PortState) -> None:
        """The port goes up or down, and whoever has the device open is told."""
        self.ports[number].state = state
        self.raise_event("port_active" if state is PortState.ACTIVE else "port_err", number)

    def raise_event(self, name: str, element: int = 0) -> None:
        """An asynchronous event, for every open device of this NIC."""
        for device in list(self.opened):
            device._tell(AsyncEvent(EVENT_KINDS[name], name, element))

    def _call(self, call: str) -> None:
        """What every call of the library goes through."""
        time.sleep(self.troubles.slow_s.get(call, 0.0))
        refused = self.troubles.refuse.get(call)
        if refused is not None:
            raise VerbsError(call, refused)


class FakeFabric:
    """The network between all NICs of its providers, and the thread on which late things happen."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.keys = itertools.count(random.randrange(1, 1 << 16) << 8, 0x101)
        self._queue_pairs: dict[int, FakeQueuePair] = {}
        self._gids: dict[bytes, tuple[FakeNic, int]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> FakeFabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread: what was late never happens."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def plug(self, nic: FakeNic) -> None:
        """A NIC is on the network; where two have one GID, the later is reached."""
        for number, port in nic.ports.items():
            self._gids.update((gid, (nic, number)) for gid in port.gids)

    def add(self, queue_pair: FakeQueuePair) -> int:
        """A number for it, 24 bits, random, not in use."""
        with self.lock:
            number = random.getrandbits(24)
            while number < 2 or number in self._queue_pairs:
                number = random.getrandbits(24)
            self._queue_pairs[number] = queue_pair
            return number

    def remove(self, number: int) -> None:
        """It was destroyed."""
        with self.lock:
            self._queue_pairs.pop(number, None)

    def peer_of(self, asking: FakeQueuePair) -> FakeQueuePair | None:
        """Who answers a queue pair's packets; None if nobody does."""
        peer = asking.peer
        if peer is None or peer.gid not in self._gids:
            return None
        nic, number = self._gids[peer.gid]
        found = self._queue_pairs.get(peer.number)
        if found is None or found.nic is not nic or found.path is None or found.path.port != number:
            return None
        talks_back = found.peer is not None and found.peer.number == asking.number
        in_step = talks_back and found.peer is not None and found.peer.packet_number == asking.packet_number
        up = nic.ports[number].state is PortState.ACTIVE
        return found if in_step and up and found.current_state in (RTR, RTS) else None

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Call ``action`` at a time of ``time.monotonic``, with the lock held."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (at, next(self._order), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fake-verbs", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._due:
                    self._changed.wait()
                elif (wait_s := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(wait_s)
                else:
                    heapq.heappop(self._due)[2]()
