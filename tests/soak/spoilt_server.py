"""A store that does one thing wrong, to see a soak fail: ``python -m tests.soak.spoilt_server SPOIL CONFIG``.

It is ``memkv start --config CONFIG`` with one part replaced before it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memkv_vllm.cli import main
from memkv_vllm.store.batches import Batches
from memkv_vllm.store.entries import Entry
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.store.table import Table
from memkv_vllm.transports.faults import BitFlip, FaultPlan, Operation
from memkv_vllm.transports.loopback import LoopbackServerTransport


def wrong_byte() -> None:
    """Every 40th value that is served has one bit inverted, and the answer says OK."""
    plan = FaultPlan()
    plan.add(Operation.PUSH, BitFlip(offset=1000), every=40)

    def with_faults(was: Any) -> Any:
        return lambda self, *args, **more: was(self, *args, **{**more, "faults": plan})

    for transport in _server_transports():
        _replace(transport, "__init__", with_faults)


def leaks() -> None:
    """The end of a session is not noticed by the store, and leaves some descriptors open."""

    async def closed(self: StoreHandler, peer: Any) -> None:
        for _ in range(3):
            os.open(os.devnull, os.O_RDONLY)

    _replace(StoreHandler, "closed", lambda _: closed)


def risen_value() -> None:
    """A delete is confirmed and not carried out."""
    _replace(Table, "delete", lambda _: lambda self, *args, **more: True)


def no_hits() -> None:
    """Puts are confirmed and nothing is kept."""

    def commit(was: Any) -> Any:
        def lose(self: Any, entries: Sequence[Entry]) -> list[bool]:
            visible: list[bool] = was(self, entries)
            for entry in [entry for entry, there in zip(entries, visible, strict=True) if there]:
                self._content.remove(entry)
            return visible

        return lose

    _replace(Batches, "commit", commit)


def _server_transports() -> list[type[Any]]:
    found: list[type[Any]] = [LoopbackServerTransport]
    try:
        from memkv_vllm.transports.tcp import TcpServerTransport
    except ImportError:
        return found
    return [*found, TcpServerTransport]


def _replace(owner: type[Any], name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


SPOILS = {
    "wrong-byte": wrong_byte, "leaks": leaks, "risen-value": risen_value, "no-hits": no_hits,
}  # fmt: skip

if __name__ == "__main__":
    SPOILS[sys.argv[1]]()
    sys.argv = ["memkv", "start", "--config", sys.argv[2]]
    main()
