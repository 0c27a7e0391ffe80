"""Which data path a session uses: that of the transport it came over, unless it asks for another one by CONNECT."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.transports.base import Bulk, EagerBulk, EagerGet, EagerPut, Move
from memkv_vllm.types import Deadline, MemoryKind, Status

__all__ = ["ChosenBulk", "offered_in", "refuse_connect"]


_NONE = "it has none beside that of the control connection"
_OFFER = re.compile(r"offers no data path called .*: it has ([\w, -]+); for verbs")


def refuse_connect(asked: str, offered: Sequence[str]) -> NoReturn:
    """Answer a CONNECT to a data path that there is none of.

    Raises:
        StoreError: always; with the code ``data_path``.
    """
    have = f"it has {', '.join(offered)}" if offered else _NONE
    raise StoreError(
        f"this server offers no data path called {asked[:64]!r}: {have}; for verbs the server's yaml names its NICs in "
        f"rdma.devices",
        "data_path",
    )


def offered_in(refusal: str) -> tuple[str, ...] | None:
    """What a server offers, as a refusal by :func:`refuse_connect` says; None where it is another text."""
    if _NONE in refusal:
        return ()
    match = _OFFER.search(refusal)
    return tuple(match[1].split(", ")) if match else None


class ChosenBulk:
    """The data path of one session; see ``memkv_vllm.transports.base.Bulk``.

    Args:
        name: the transport whose data path ``default`` is.
        default: what is used without a CONNECT.
        offered: makes each other data path, by name.
    """

    def __init__(self, name: str, default: Bulk, offered: Mapping[str, Callable[[], Bulk]]) -> None:
        self.name = name
        """Of the data path in use."""
        self._bulk = default
        self._offered = offered
        self._settled = False
        """A region was offered or a data path was chosen: it stays with this one."""

    @property
    def chosen(self) -> Bulk:
        """The data path in use."""
        return self._bulk

    async def connect(self, transport: str, token: bytes) -> bytes:
        """Go over to the data path ``transport``; see the protocol."""
        if self._settled:
            raise RemoteProtocolError("connect", "CONNECT comes once, and before any region")
        if transport not in self._offered:
            refuse_connect(transport, sorted(self._offered))
        self._settled = True
        default, self._bulk = self._bulk, self._offered[transport]()
        self.name = transport
        # Nothing of it is used any more; data connections that come for it are turned away.
        await default.fence()
        return await self._bulk.connect(transport, token)

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        """Bind a region of the peer; see the protocol."""
        self._settled = True
        await self._bulk.register(region, kind, length, token)

    def pull(self, moves: Sequence[Move], deadline: Deadline) -> Coroutine[Any, Any, list[Status]]:
        """Copy out of the peer's memory; see the protocol."""
        return self._bulk.pull(moves, deadline)

    def push(self, moves: Sequence[Move], deadline: Deadline) -> Coroutine[Any, Any, list[Status]]:
        """Copy into the peer's memory; see the protocol."""
        return self._bulk.push(moves, deadline)

    def eager_put(self, lengths: Sequence[int]) -> EagerPut:
        """The peer sends values of these lengths; see ``memkv_vllm.transports.base.EagerBulk``."""
        return self._eager_bulk("put").eager_put(lengths)

    def eager_get(self, lengths: Sequence[int]) -> EagerGet:
        """The peer awaits values of these lengths; see ``memkv_vllm.transports.base.EagerBulk``."""
        return self._eager_bulk("get").eager_get(lengths)

    def _eager_bulk(self, what: str) -> EagerBulk:
        if not isinstance(self._bulk, EagerBulk):
            raise RemoteProtocolError("eager", f"an eager {what} over {self.name}")
        return self._bulk

    async def fence(self) -> None:
        """Stop all outstanding work of the peer; see the protocol."""
        await self._bulk.fence()
