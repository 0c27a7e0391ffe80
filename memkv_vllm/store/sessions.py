"""What the store knows of one session: its rights, until when it may stay, and the transfers that it gave up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio

from memkv_vllm.errors import RemoteProtocolError
from memkv_vllm.store.bulkqueue import BulkKind
from memkv_vllm.store.entries import Entry
from memkv_vllm.store.keyring import Access
from memkv_vllm.transports.base import ServerPeer

__all__ = ["StoreSession", "Use"]


LICENSE_CHECK_S = 60.0
"""How often a session's license is compared with the wall clock: it ends at most this late after a step of it."""


class Use(NamedTuple):
    """An extent that a request has given up: the target of a pull, or the source of a push, that may still run."""

    kind: BulkKind
    entry: Entry


@dataclass(slots=True, eq=False)
class StoreSession:
    """One client's session."""

    peer: ServerPeer
    access: Access
    inflight: int = 0
    requests: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    fenced: bool = False
    """Its data path was stopped; only a new session can move bytes again."""
    limbo: list[Use] = field(default_factory=list)
    """Uses whose transfer may still run; settled once the peer is fenced."""
    fencing: anyio.Lock = field(default_factory=anyio.Lock)
    license_ends_s: float = math.inf
    """When its license ends, in seconds since the epoch."""
    _verdict: RemoteProtocolError | None = None
    _condemned: anyio.Event = field(default_factory=anyio.Event)

    def condemn(self, verdict: RemoteProtocolError) -> None:
        """The session is to be cut, counted as ``cut_<kind>`` of ``verdict``: :meth:`watch` raises it."""
        if self._verdict is None:
            self._verdict = verdict
            self._condemned.set()

    async def watch(self, wall_clock: Callable[[], float]) -> None:
        """Runs until the session may not go on.

        Args:
            wall_clock: seconds since the epoch. Asked again from time to time, since such a clock is set at times.

        Raises:
            RemoteProtocolError: it was condemned, or its license has ended.
        """
        while self._verdict is None:
            left_s = self.license_ends_s - wall_clock()
            if left_s <= 0:
                self.condemn(RemoteProtocolError("license_expired", "its license has expired since it connected"))
            else:
                with anyio.move_on_after(left_s if left_s == math.inf else min(left_s, LICENSE_CHECK_S)):
                    await self._condemned.wait()
        raise self._verdict
