"""All data connections of one client connection, one of which may be for eager requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import anyio

from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.sockets import tune_data
from memkv_vllm.transports.tcp.datalink import DataLink
from memkv_vllm.transports.tcp.eagerlink import EagerLink


class Links:
    """All data connections of one client connection. Used on one event loop.

    Args:
        failed: called on the event loop when the server broke the rules on one of them.
    """

    def __init__(self, failed: Callable[[MemkvError], None]) -> None:
        self.regions: dict[int, HostMemory] = {}
        """What the server may name, by region id."""
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._links: set[DataLink] = set()
        self.eager: EagerLink | None = None
        self._stopping = False
        self._idle = anyio.Event()

    def __len__(self) -> int:
        return len(self._links)

    def add(self, sock: socket.socket, ours: Sealer, theirs: Sealer, *, eager: bool = False) -> None:
        """Serve ``sock``, an attached data connection, in a thread; owns it."""
        if self._stopping:
            sock.close()
            return
        tune_data(sock)
        link = (EagerLink if eager else DataLink)(sock, ours, theirs, self.regions, self._report_end)
        if isinstance(link, EagerLink):
            self.eager = link
        self._links.add(link)
        link.thread.start()

    def shut_down(self) -> None:
        """Make all threads end soon; a second call does nothing."""
        self._stopping = True
        for link in self._links:
            link.stop()
        if not self._links:
            self._idle.set()

    async def stop(self) -> None:
        """End all threads; when this returns, none of them touches a region any more."""
        self.shut_down()
        await self._idle.wait()
        self.regions.clear()

    def _report_end(self, link: DataLink, failure: MemkvError | None) -> None:
        """From a link's thread, which has nothing more to do then than close its socket."""
        try:
            self._loop.call_soon_threadsafe(self._on_end, link, failure)
        except RuntimeError:
            pass  # the loop has ended: nobody waits

    def _on_end(self, link: DataLink, failure: MemkvError | None) -> None:
        link.thread.join()  # at once: it was about to end
        self._links.discard(link)
        if failure is not None and not self._stopping:
            self._failed(failure)
        if self._stopping and not self._links:
            self._idle.set()
