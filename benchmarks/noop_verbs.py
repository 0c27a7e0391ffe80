"""The verbs data path without a device: a post does nothing, and a scripted completion queue says that all is done.

What is left of a transfer is what the server itself spends on it: planning, work requests, flow control, completions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.active import DEPTH, ActiveEnd, Scratch
from memkv_vllm.transports.verbs.bulk import BulkOptions, VerbsBulk
from memkv_vllm.transports.verbs.endpoints import Endpoint, QueuePairEnd, RegionToken
from memkv_vllm.transports.verbs.planning import Arena
from memkv_vllm.transports.verbs.provider import Access, Completion, Path, PeerQueuePair, WorkRequests
from memkv_vllm.types import MemoryKind

_GID = bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])
_KEY = 1


class NoopCompletionQueue:
    """Completions of the signalled work requests of every post, in order. Its descriptor is an eventfd."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done: list[Completion] = []

    def arm(self) -> None:
        """It always tells."""

    def done(self, completions: list[Completion]) -> None:
        """These work requests have ended."""
        if not self._done:
            os.eventfd_write(self.fd, 1)
        self._done += completions

    def drain(self) -> Sequence[Completion]:
        """All that has ended since the last call."""
        if self._done:
            os.eventfd_read(self.fd)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Once."""
        os.close(self.fd)


class NoopQueuePair:
    """Takes work requests, does nothing, and says at once that they have ended."""

    packet_number = 0

    def __init__(self, number: int, completions: NoopCompletionQueue) -> None:
        self.number = number
        self._completions = completions

    def initialize(self, port: int, access: Access) -> None:
        """Nothing."""

    def connect(self, path: Path, peer: PeerQueuePair) -> None:
        """Nothing."""

    def post(self, work: WorkRequests) -> None:
        """All ended."""
        ended = work.wr_ids[np.flatnonzero(work.signalled)].tolist()
        self._completions.done([Completion(wr_id, 0, 0, self.number) for wr_id in ended])

    def fail(self) -> None:
        """Nothing is outstanding."""

    def state(self) -> int:
        """RTS."""
        return 3

    def close(self) -> None:
        """Nothing to destroy."""


class NoopRails:
    """Gives every session queue pairs that move nothing.

    Args:
        arena: the server's memory.
    """

    def __init__(self, arena: HostMemory) -> None:
        self._arena = arena
        self._scratch = HostMemory.create("noop-scratch", 1 << 16)

    async def connect(self, local_host: str, peer: Endpoint) -> ActiveEnd:
        """As many as the peer has."""
        completions = NoopCompletionQueue()
        pairs = tuple(NoopQueuePair(number, completions) for number in range(1, len(peer.queue_pairs) + 1))
        no_port: Any = None  # for log lines alone
        return ActiveEnd(
            port=no_port,
            peer=peer,
            endpoint=peer,
            completions=completions,
            queue_pairs=pairs,
            depth=DEPTH,
            most_bytes=1 << 30,
            arena=Arena(self._arena.address, self._arena.length, _KEY),
            scratch=Scratch(self._scratch, _KEY),
            memory=self._arena,
        )

    def start_ending(self, end: ActiveEnd, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Nothing here blocks."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(work())
        return done

    def close(self) -> None:
        """Frees the scratch memory."""
        self._scratch.close()


async def make_bulk(rails: NoopRails, region_bytes: int, num_queue_pairs: int) -> VerbsBulk:
    """The data path of a session with one region, id 0."""
    any_rails: Any = rails
    options = BulkOptions(max_regions=1, max_region_bytes=region_bytes)
    bulk = VerbsBulk(any_rails, "127.0.0.1", options, cut=lambda: None, counted=lambda event: None)
    ends = tuple(QueuePairEnd(number, 0) for number in range(1, num_queue_pairs + 1))
    await bulk.connect("verbs", Endpoint(_GID, 0, 4096, 16, ends).pack())
    await bulk.register(0, MemoryKind.HOST, region_bytes, RegionToken(1 << 40, _KEY).pack())
    return bulk
