"""A prober that answers when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from memkv_vllm.types import MissReason


class Answer(NamedTuple):
    """As ``memkv_vllm.engine.prober.ProbeAnswer``."""

    prefix: bytes
    present: bool | None
    reason: MissReason | None


@dataclass
class FakeProber:
    """Attributes:
    present: prefixes that the servers hold.
    down: no server can be asked.
    silent: answers are kept back.
    unconfirmed: servers that do not confirm a reset.
    """

    present: set[bytes] = field(default_factory=set)
    down: bool = False
    silent: bool = False
    unconfirmed: list[str] = field(default_factory=list)
    batches: list[list[bytes]] = field(default_factory=list)
    resets: list[bytes] = field(default_factory=list)
    servers_lost: int = 0
    closed: bool = False
    broken: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    _asked: list[bytes] = field(default_factory=list)

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise RuntimeError(f"injected failure of {name}")

    def submit(self, prefixes: Sequence[bytes]) -> None:
        """Take a step's batch."""
        self._call("submit")
        self.batches.append(list(prefixes))
        self._asked += prefixes

    def poll(self) -> list[Answer]:
        """Answer everything asked so far."""
        self._call("poll")
        if self.silent:
            return []
        asked, self._asked = self._asked, []
        if self.down:
            return [Answer(prefix, None, MissReason.BREAKER) for prefix in asked]
        return [
            Answer(prefix, prefix in self.present, None if prefix in self.present else MissReason.ABSENT)
            for prefix in asked
        ]

    def reset_namespace(self, namespace: bytes, timeout_s: float) -> list[str]:
        """Drop what starts with the namespace, unless a server does not confirm."""
        self._call("reset_namespace")
        self.resets.append(namespace)
        if not self.unconfirmed:
            self.present = {prefix for prefix in self.present if namespace not in prefix}
        return list(self.unconfirmed)

    def statistics(self) -> Any:
        """Zeros, but for ``counts``."""
        self._call("statistics")
        names = (
            "servers_ready",
            "servers",
            "probes",
            "batches",
            "unreachable",
            "namespace_mismatches",
            "duplicate_servers",
        )
        lost = {"servers_lost": self.servers_lost, "connects": {}}
        return SimpleNamespace(**{**dict.fromkeys(names, 0), **lost, **self.counts})

    def close(self) -> None:
        """Remember it."""
        self._call("close")
        self.closed = True
