"""What the store knows of one session: its rights, and the transfers that it gave up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import anyio

from memkv_vllm.config import KeyEntry, Right
from memkv_vllm.transports.base import ServerPeer
from memkv_vllm.types import Extent

__all__ = ["Access", "StoreSession", "Use", "UseKind"]


class Access(NamedTuple):
    """What a key id may do, and with which store keys."""

    rights: frozenset[Right]
    prefix: bytes

    @classmethod
    def of(cls, entry: KeyEntry) -> Access:
        """The access that a key of the configuration gives."""
        return cls(frozenset(entry.rights), entry.prefix)

    def may(self, right: Right, key: bytes) -> bool:
        """Whether ``right`` holds for the store key (or block prefix) ``key``."""
        return right in self.rights and key.startswith(self.prefix)

    def may_namespace(self, right: Right, namespace: bytes) -> bool:
        """Whether ``right`` holds for every key of the namespace (byte 0 of a key is its format)."""
        return right in self.rights and namespace.startswith(self.prefix[1:])


class UseKind(Enum):
    """How a transfer uses an extent of the arena."""

    RESERVED = auto()
    """It is the target of a pull."""
    PINNED = auto()
    """It is the source of a push."""


@dataclass(slots=True, eq=False)
class Use:
    """One extent that one request uses; ``open`` until it was given back to the table or given up."""

    kind: UseKind
    index: int
    """Place in the request's batch."""
    key: bytes
    generation: int
    offset: int
    remote: Extent
    checksum: int
    open: bool = True


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

    def give_up(self, uses: list[Use]) -> int:
        """Moves those of ``uses`` that are open into limbo; returns how many these are."""
        given_up = [use for use in uses if use.open]
        for use in given_up:
            use.open = False
        self.limbo += given_up
        return len(given_up)
