"""Several stores as processes of their own under one key, as one cluster: to be killed, frozen and replaced."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.engine.placement import Placement
from tests.support.ranks import cluster_settings, prefix_of
from tests.support.store_process import StoreProcess


@dataclass
class Stores:
    """Attributes:
    key: of all servers.
    processes: by the servers' names.
    transport: by which clients reach them.
    """

    key: bytes
    processes: dict[str, StoreProcess]
    transport: str = "loopback"

    def settings(self, *, connect_timeout_s: float = 5.0, op_timeout_s: float = 10.0) -> ClusterSettings:
        """How to reach them."""
        ports = {name: process.port for name, process in self.processes.items()}
        return replace(cluster_settings(self.key, ports, connect_timeout_s, op_timeout_s), transport=self.transport)

    def share(self, name: str, numbers: Iterable[int]) -> list[int]:
        """Those of the blocks that server ``name`` holds."""
        placement = Placement(self.processes)
        return [number for number in numbers if placement.owner(prefix_of(number)) == name]


@contextmanager
def stores(names: Sequence[str] = ("a", "b", "c"), *, transport: str = "loopback") -> Iterator[Stores]:
    """Started stores; killed on exit, frozen or not."""
    key = os.urandom(32)
    with ExitStack() as stack:
        yield Stores(key, {name: stack.enter_context(StoreProcess(key)) for name in names}, transport)
