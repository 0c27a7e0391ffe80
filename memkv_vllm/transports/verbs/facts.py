"""What ``/sys`` says of this host, for a client that connects to many servers: not read anew for each of them.

Reading takes milliseconds, on a host with many devices or a slow ``/sys`` a second (seen: 0.2 to 0.9 s in a VM).
Addresses and routes may change, so what was read is used for a few seconds, and not after something failed with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from memkv_vllm.topology import Host, read_host

__all__ = ["FRESH_S", "HostFacts"]

FRESH_S = 5.0
"""How long what was read is used."""


class HostFacts:
    """This host, as it was a moment ago. Safe to use from several threads: of those that come at once, one reads.

    Args:
        root: where ``/sys``, ``/proc`` and ``/dev`` are looked at.
        clock: seconds.
        read: what reads.
    """

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[Path], Host] = read_host,
    ) -> None:
        self._root = root
        self._clock = clock
        self._read = read
        self._turn = threading.Lock()
        self._host: Host | None = None
        self._read_at = 0.0

    def get(self) -> Host:
        """This host; reads, if what is known is older than ``FRESH_S`` or was forgotten."""
        with self._turn:
            # When reading began: what changes meanwhile may not be in it.
            now = self._clock()
            if self._host is None or now - self._read_at >= FRESH_S:
                self._host, self._read_at = self._read(self._root), now
            return self._host

    def forget(self) -> None:
        """Something failed that may be due to what is known: the next :meth:`get` reads."""
        with self._turn:
            self._host = None
