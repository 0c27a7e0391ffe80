"""Two connected queue pairs in this process, over any verbs provider, and what tests do with them."""

from __future__ import annotations

import contextlib
import mmap
import select
import time
from collections.abc import Iterator, Sequence

import numpy as np

from memkv_vllm.transports.verbs.provider import (
    Access,
    Completion,
    Device,
    Path,
    PeerQueuePair,
    Provider,
    WorkRequests,
)

__all__ = ["ALL", "End", "batch", "connect", "pair", "wait"]

ALL = Access.LOCAL | Access.REMOTE_READ | Access.REMOTE_WRITE
LENGTH = 1 << 20
DEPTH = 64
IPV4_MAPPED = bytes(10) + b"\xff\xff"


class End:
    """A device, a domain, a completion queue that is armed, registered memory, and a queue pair in INIT.

    Attributes:
        bytes: the memory, uint8[length]; outlives :meth:`close`.
    """

    def __init__(
        self,
        provider: Provider,
        device: str,
        *,
        length: int = LENGTH,
        depth: int = DEPTH,
        access: Access = ALL,
        peers_may: Access = ALL,
    ) -> None:
        self._memory = mmap.mmap(-1, length)
        self.bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.device: Device = provider.open(device)
        self.domain = self.device.protection_domain()
        self.completions = self.device.completion_queue(4 * depth)
        self.completions.arm()
        self.region = self.domain.register(int(self.bytes.ctypes.data), length, access)
        self.queue_pair = self.domain.queue_pair(self.completions, depth)
        self.queue_pair.initialize(1, peers_may)
        self.gid_index = next(i for i in range(16) if self.device.gid(1, i)[:12] == IPV4_MAPPED)
        self.gid = self.device.gid(1, self.gid_index)

    def peer(self) -> PeerQueuePair:
        """This end, for the other."""
        return PeerQueuePair(self.queue_pair.number, self.queue_pair.packet_number, self.gid, 0)

    def path(self, **changes: int) -> Path:
        """How its packets travel; a dead peer shows after some 0.2 s."""
        path = Path(
            port=1, gid_index=self.gid_index, mtu=1024, traffic_class=0, service_level=0, hop_limit=64, max_reads=4,
            timeout=14, retry_count=1,
        )  # fmt: skip
        return path._replace(**changes)

    def close(self) -> None:
        """Close the device, and with it everything."""
        self.device.close()


def connect(one: End, other: End, **changes: int) -> None:
    """Bring both queue pairs to RTS."""
    one.queue_pair.connect(one.path(**changes), other.peer())
    other.queue_pair.connect(other.path(**changes), one.peer())


@contextlib.contextmanager
def pair(provider: Provider, near: str, far: str, **changes: int) -> Iterator[tuple[End, End]]:
    """Two ends that are connected; both devices are closed at the end."""
    with contextlib.ExitStack() as stack:
        ends = []
        for device in (near, far):
            ends.append(End(provider, device))
            stack.callback(ends[-1].close)
        connect(ends[0], ends[1], **changes)
        yield ends[0], ends[1]


def batch(
    near: End,
    far: End,
    opcode: int,
    count: int = 1,
    length: int = 100,
    *,
    at: int = 0,
    signalled: Sequence[bool] | None = None,
) -> WorkRequests:
    """``count`` work requests side by side: the n-th of offset ``at + n * length`` on both ends; its id is 1000 + n."""
    places = at + np.arange(count, dtype=np.uint64) * np.uint64(length)
    return WorkRequests(
        wr_ids=np.arange(1000, 1000 + count, dtype=np.uint64),
        opcodes=np.full(count, opcode, np.uint32),
        local=near.region.address + places,
        lkeys=np.full(count, near.region.lkey, np.uint32),
        lengths=np.full(count, length, np.uint32),
        remote=far.region.address + places,
        rkeys=np.full(count, far.region.rkey, np.uint32),
        signalled=np.ones(count, np.bool_) if signalled is None else np.array(signalled, np.bool_),
    )


def wait(end: End, count: int, limit_s: float = 10.0) -> list[Completion]:
    """Completions of ``end`` as they come by its descriptor, until there are ``count``.

    Raises:
        TimeoutError: too few; says which.
    """
    found: list[Completion] = list(end.completions.drain())
    ends_at = time.monotonic() + limit_s
    while len(found) < count:
        readable, _, _ = select.select([end.completions.fd], [], [], max(0.0, ends_at - time.monotonic()))
        if not readable:
            raise TimeoutError(f"{len(found)} of {count} completions in {limit_s} s: {found}")
        found.extend(end.completions.drain())
    return found
