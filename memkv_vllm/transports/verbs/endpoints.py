"""What the two ends tell each other to bring a session's queue pairs up: the tokens of CONNECT and REGISTER.

::

    client: makes its queue pairs (INIT) ---- CONNECT, token: its Endpoint ---> server: makes as many, connects them
    client: connects its own           <--- reply, token: the server's Endpoint
    client: registers memory           ---- REGISTER, token: RegionToken ----> server: on every queue pair READs from
                                       <--- OK: the path works -------------   it, WRITEs to the landing (the probe)

The server's endpoint holds what both are to use: the smaller MTU, and the fewer RDMA READs. Queue pair ``i`` of one
end belongs to queue pair ``i`` of the other. The **landing** is a little memory of the client's that nothing is kept
in: the probe WRITEs there, for what is offered as a region may be in use. Little-endian, without padding. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple

from memkv_vllm.errors import RemoteProtocolError, StoreError

__all__ = [
    "DATA_PATH",
    "LANDING_BYTES",
    "MAX_QUEUE_PAIRS",
    "MTUS",
    "NOWHERE",
    "VERSION",
    "Endpoint",
    "QueuePairEnd",
    "RegionToken",
]

VERSION = 2
"""Of these tokens. An end that meets another one refuses: the control protocol has a version of its own."""

MAX_QUEUE_PAIRS = 8
"""Of one session. Two saturate the NICs that are known; each costs memory on both of them."""

MTUS = (256, 512, 1024, 2048, 4096)
"""Path MTUs that verbs know, in bytes."""

LANDING_BYTES = 2 * MTUS[-1]
"""Of every client's landing: two of the largest packets."""

DATA_PATH = "data_path"
"""``StoreError.code``: the two ends cannot reach each other's memory."""

_NUMBERS = 1 << 24


class QueuePairEnd(NamedTuple):
    """One queue pair of one end; both numbers have 24 bits."""

    number: int
    packet_number: int
    """The first packet that it sends carries this one."""


_REGION = Struct("<QI")


class RegionToken(NamedTuple):
    """Memory of the client: where it begins there, and the key to it. REGISTER's token, ``<QI``."""

    address: int
    rkey: int

    def pack(self) -> bytes:
        """The token."""
        return _REGION.pack(*self)

    @classmethod
    def parse(cls, token: bytes, length: int) -> RegionToken:
        """The token of a region of ``length`` bytes.

        Raises:
            RemoteProtocolError: it is none, or the region ends beyond the address space.
        """
        if len(token) != _REGION.size:
            raise RemoteProtocolError("token", f"a region's token of {len(token)} bytes; {_REGION.size} are needed")
        address, rkey = _REGION.unpack(token)
        if address + length > 1 << 64:
            raise RemoteProtocolError("token", f"a region of {length} bytes at {address:#x}")
        return cls(address, rkey)


NOWHERE = RegionToken(0, 0)
"""A landing that there is none of: a server's, which no peer reaches."""


@dataclass(frozen=True)
class Endpoint:
    """One end of a session's queue pairs. ``<B`` version, ``16s`` GID, ``H`` LID, ``H`` MTU, ``B`` reads, ``B`` count,
    ``QI`` landing; then per queue pair ``<II`` number and first packet number.
    """

    gid: bytes
    """16 bytes: the address that packets come from."""
    lid: int
    """Address on InfiniBand; 0 on Ethernet."""
    mtu: int
    """Path MTU in bytes. Client: the most it can; server: the one to use."""
    max_reads: int
    """RDMA READs at once. Client: how many it answers; server: how many it will have outstanding. 1 to 255."""
    queue_pairs: tuple[QueuePairEnd, ...]
    landing: RegionToken = NOWHERE
    """Client: ``LANDING_BYTES`` that the server may WRITE to, whatever for."""

    _HEAD: ClassVar[Struct] = Struct("<B16sHHBBQI")
    _PAIR: ClassVar[Struct] = Struct("<II")

    def pack(self) -> bytes:
        """The token."""
        count = len(self.queue_pairs)
        head = self._HEAD.pack(VERSION, self.gid, self.lid, self.mtu, min(self.max_reads, 255), count, *self.landing)
        return head + b"".join(self._PAIR.pack(*pair) for pair in self.queue_pairs)

    @classmethod
    def unpack(cls, token: bytes) -> Endpoint:
        """Parse the other end's token.

        Raises:
            StoreError: it is of another version (code ``data_path``).
            RemoteProtocolError: nothing that an end of this version sends.
        """
        if token and token[0] != VERSION:
            text = f"the other end speaks version {token[0]} of the verbs data path, this one {VERSION}"
            raise StoreError(f"{text}: run the same release on both", DATA_PATH)
        if len(token) < cls._HEAD.size:
            raise RemoteProtocolError("token", f"a verbs endpoint of {len(token)} bytes")
        _, gid, lid, mtu, max_reads, count, address, rkey = cls._HEAD.unpack_from(token)
        if len(token) != cls._HEAD.size + count * cls._PAIR.size:
            raise RemoteProtocolError("token", f"a verbs endpoint of {len(token)} bytes for {count} queue pairs")
        pairs = tuple(QueuePairEnd(*pair) for pair in cls._PAIR.iter_unpack(token[cls._HEAD.size :]))
        endpoint = cls(gid, lid, mtu, max_reads, pairs, RegionToken(address, rkey))
        endpoint._check()
        return endpoint

    def _check(self) -> None:
        if not 1 <= len(self.queue_pairs) <= MAX_QUEUE_PAIRS:
            count = len(self.queue_pairs)
            raise RemoteProtocolError("token", f"{count} queue pairs; a session has 1 to {MAX_QUEUE_PAIRS}")
        if self.mtu not in MTUS:
            raise RemoteProtocolError("token", f"a path MTU of {self.mtu} bytes")
        if not self.max_reads or not any(self.gid):
            raise RemoteProtocolError("token", "a verbs endpoint without a GID, or that answers no RDMA READ")
        if any(number >= _NUMBERS or packet >= _NUMBERS for number, packet in self.queue_pairs):
            raise RemoteProtocolError("token", "a number of a queue pair or packet with more than 24 bits")
        if self.landing.address + LANDING_BYTES > 1 << 64:
            raise RemoteProtocolError("token", f"a landing of {LANDING_BYTES} bytes at {self.landing.address:#x}")
