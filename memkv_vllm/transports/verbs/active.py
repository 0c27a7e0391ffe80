"""The server's end of a session: the queue pairs that post, and the memory that they post from.

The counterpart is ``passive.py``. The arena is registered once per device, in the device's one protection domain, and
with local access only: no peer ever has a key to it. Each session has queue pairs and a completion queue of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memkv_vllm.topology import Rail, gid_address
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.endpoints import Endpoint, QueuePairEnd
from memkv_vllm.transports.verbs.opening import Knobs, OpenPort, check_port
from memkv_vllm.transports.verbs.planning import NO_SLOT, Arena, Columns, RemoteRegion
from memkv_vllm.transports.verbs.provider import (
    Access,
    CompletionQueue,
    Device,
    MemoryRegion,
    Opcode,
    PeerQueuePair,
    ProtectionDomain,
    QueuePair,
)
from memkv_vllm.transports.verbs.threads import NicThreads

__all__ = ["DEPTH", "SCRATCH_BYTES", "ActiveEnd", "Nic", "Scratch"]

DEPTH = 128
"""Work requests outstanding on a queue pair, if the device has as many places: two batches of the largest size."""

SCRATCH_BYTES = 24 << 10
_SPOILT_AT = 8 << 10
"""Before: what probes and flushes READ, and nobody looks at. From here: bytes for injected faults."""
_ZEROS_AT = 16 << 10
"""From here: what probes WRITE. Nothing is ever READ to it: no client is sent what was another's."""

_MOST_BYTES = 1 << 30
"""Of one work request, whatever the port says: lengths have 31 bits."""


class Scratch:
    """A little registered memory beside the arena. Several work requests may READ to the same place: nobody looks.

    Args:
        memory: the bytes.
        lkey: names them in work requests.
    """

    def __init__(self, memory: HostMemory, lkey: int) -> None:
        self.address = memory.address
        self.length = _SPOILT_AT
        self.lkey = lkey
        self._memory = memory
        self._next = 0

    def read(self, region: RemoteRegion, num_bytes: int) -> Columns:
        """READ the first bytes of ``region`` to here: a probe."""
        return self._columns(Opcode.READ, self.address, num_bytes, region, 0)

    def write_zeros(self, region: RemoteRegion) -> Columns:
        """WRITE zeros over all of ``region``, ``length`` bytes at most: a probe."""
        num_bytes = min(region.length, SCRATCH_BYTES - _ZEROS_AT)
        return self._columns(Opcode.WRITE, self.address + _ZEROS_AT, num_bytes, region, 0)

    def write_byte(self, region: RemoteRegion, offset: int, byte: int) -> Columns:
        """WRITE one byte at ``offset`` of ``region``, and the READ behind it (injected faults)."""
        at = _SPOILT_AT + self._next
        self._next = (self._next + 1) % (_ZEROS_AT - _SPOILT_AT)
        self._memory.array[at] = byte
        write = self._columns(Opcode.WRITE, self.address + at, 1, region, offset)
        return write.flushed(self.address, self.lkey)

    def _columns(self, opcode: Opcode, local: int, num_bytes: int, region: RemoteRegion, offset: int) -> Columns:
        return Columns(
            np.array([NO_SLOT], np.intp),
            np.array([opcode], np.uint32),
            np.array([local], np.uint64),
            np.array([self.lkey], np.uint32),
            np.array([num_bytes], np.uint32),
            np.array([region.address + offset], np.uint64),
            np.array([region.rkey], np.uint32),
        )


@dataclass(frozen=True)
class Nic:
    """A device that the server serves on. The device owns the domain and the regions."""

    device: Device
    domain: ProtectionDomain
    arena: MemoryRegion
    memory: HostMemory
    """The arena's."""
    scratch: Scratch
    threads: NicThreads
    """Those that make and end the queue pairs of its sessions."""


@dataclass(frozen=True)
class ActiveEnd:
    """What :meth:`make` made: all of one session."""

    port: OpenPort
    peer: Endpoint
    endpoint: Endpoint
    """What the client is told: our end, with the MTU and the number of READs that both use."""
    completions: CompletionQueue
    queue_pairs: tuple[QueuePair, ...]
    depth: int
    most_bytes: int
    """Of one work request."""
    arena: Arena
    scratch: Scratch
    memory: HostMemory

    def __str__(self) -> str:
        """For logs and messages: both ends."""
        rail, endpoint = self.port.rail, self.endpoint
        return (
            f"device={rail.name} gid={gid_address(rail.gid)} gid_index={rail.gid_index} mtu={endpoint.mtu} "
            f"max_reads={endpoint.max_reads} qps={len(self.queue_pairs)} depth={self.depth} "
            f"peer_gid={gid_address(self.peer.gid)}"
        )

    @property
    def advice(self) -> str:
        """What to look at where a way that both ends brought up does not carry bytes."""
        rail = self.port.rail
        return (
            f"server {rail.name} {rail.address or ''} GID {rail.gid_index} {gid_address(rail.gid)}, client GID "
            f"{gid_address(self.peer.gid)}, MTU {self.endpoint.mtu}: check that both are of one subnet (rail), that "
            f"both hosts' interfaces and the switches carry that MTU (else set mtu or rdma.mtu lower), no firewall "
            f"drops UDP port 4791, and both ports' links (ibv_devinfo; rdma link)"
        )

    @classmethod
    def make(cls, nic: Nic, rail: Rail, knobs: Knobs, peer: Endpoint) -> ActiveEnd:
        """Make as many queue pairs as ``peer`` has and connect them to its own. In the NIC's thread for it.

        Raises:
            EnvironmentFault: the port cannot be used now.
            VerbsError: the library refused something; nothing is left of it.
        """
        port = check_port(nic.device, rail, knobs)
        count = len(peer.queue_pairs)
        limits = port.attributes
        depth = max(1, min(DEPTH, limits.max_work_requests, limits.max_completions // count))
        # When a queue pair fails, every work request on it completes, signalled or not.
        completions = nic.device.completion_queue(depth * count)
        try:
            mtu, reads = min(port.mtu, peer.mtu), min(port.max_reads_initiated, peer.max_reads)
            queue_pairs = tuple(nic.domain.queue_pair(completions, depth) for _ in range(count))
            for queue_pair, end in zip(queue_pairs, peer.queue_pairs, strict=True):
                queue_pair.initialize(rail.port, Access.LOCAL)
                queue_pair.connect(
                    port.path(mtu, reads), PeerQueuePair(end.number, end.packet_number, peer.gid, peer.lid)
                )
            completions.arm()
        except BaseException:
            completions.close()
            raise
        ends = tuple(QueuePairEnd(pair.number, pair.packet_number) for pair in queue_pairs)
        return cls(
            port=port,
            peer=peer,
            endpoint=Endpoint(rail.gid, port.port_attributes.lid, mtu, reads, ends),
            completions=completions,
            queue_pairs=queue_pairs,
            depth=depth,
            most_bytes=min(_MOST_BYTES, port.port_attributes.max_message_bytes),
            arena=Arena(nic.memory.address, nic.memory.length, nic.arena.lkey),
            scratch=nic.scratch,
            memory=nic.memory,
        )
