"""What the first round over all ways to a server came to, for an engine that may have to refuse its start.

A server that does not answer is no reason: it may come later, and its blocks are missed until then. One that answers
and cannot reach this host's memory will not come to it by waiting: the data path is set up wrongly.
"""

from __future__ import annotations

import anyio

from memkv_vllm.errors import DataPathError, MemkvError

__all__ = ["FirstVerdict"]


class FirstVerdict:
    """Of one server. Belongs to the link's event loop."""

    def __init__(self) -> None:
        self._known = anyio.Event()
        self._ready = False
        self._problems: list[DataPathError] = []

    @property
    def problem(self) -> str:
        """Why the server cannot reach this host's memory though it answers; empty where it can, or may later."""
        return "" if self._ready else "; ".join(dict.fromkeys(map(str, self._problems)))

    def failed(self, error: MemkvError) -> None:
        """A way to the server did not work."""
        if isinstance(error, DataPathError) and not self._known.is_set():
            self._problems.append(error)

    def ready(self) -> None:
        """A connection is ready."""
        self._ready = True
        self._known.set()

    def round_over(self) -> None:
        """Every way was tried once; later failures are not a start's business."""
        self._known.set()

    async def wait_known(self) -> None:
        """Return when the first round is over."""
        await self._known.wait()
