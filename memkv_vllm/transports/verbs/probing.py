"""The probe of a region: what is moved before the server accepts it, and what a failure of it says of the way. Pure.

On every queue pair two full packets each way, for a switch, a firewall or one link of a bond may lose large packets of
one direction alone: a READ of the region brings the client's to the server, a WRITE to the client's landing the
server's to the client. Requests and acknowledgements are small. One after the other: what fails tells the direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memkv_vllm.transports.verbs.active import ActiveEnd
from memkv_vllm.transports.verbs.planning import Columns, RemoteRegion

__all__ = ["Step", "probe_steps"]


class Step(NamedTuple):
    """One half of the probe."""

    columns: Columns
    """For each queue pair."""
    what: str
    """What it is, for messages."""
    lost: str
    """What it means where it is not answered."""

    def explain(self, why: object, *, unanswered: bool) -> str:
        """A message for its failure ``why``; ``unanswered``: the peer's NIC said nothing."""
        return f"{self.what}: {self.lost}: {why}" if unanswered else f"{self.what}: {why}"


def probe_steps(end: ActiveEnd, region: RemoteRegion) -> Sequence[Step]:
    """What to move for ``region``, in this order. The landing is where the client says: it is WRITTEN to nowhere else.

    A region that is shorter than two packets is READ whole.
    """
    mtu, scratch = end.endpoint.mtu, end.scratch
    num_bytes = min(2 * mtu, end.most_bytes)
    size = min(mtu, num_bytes)
    num_read = min(region.length, num_bytes, scratch.length)
    landing = RemoteRegion(end.peer.landing.address, num_bytes, end.peer.landing.rkey)
    return (
        Step(
            scratch.read(region, num_read),
            "the server's READ of the client's memory",
            f"packets of {min(size, num_read)} bytes from the client to the server do not arrive, or none at all",
        ),
        Step(
            scratch.write_zeros(landing),
            "the server's WRITE to the client",
            f"packets of {size} bytes from the server to the client do not arrive, those from the client do",
        ),
    )
