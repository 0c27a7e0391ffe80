"""What an operator may command, over admin HTTP and by the ADMIN message alike: one table, :data:`COMMANDS`.

A new command that changes something is one entry of it. ADMIN also lists namespaces, which HTTP has a path for.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from memkv_vllm.config import Right
from memkv_vllm.errors import StoreError
from memkv_vllm.keys import NAMESPACE_BYTES
from memkv_vllm.store.sessions import StoreSession

__all__ = ["COMMANDS", "AdminCommands", "Command", "Operated"]

logger = logging.getLogger("memkv.store")

_MAX_NUMBER = 2**60


class Operated(Protocol):
    """What carries the commands out; see :class:`memkv_vllm.store.maintenance.Maintenance`."""

    def namespaces(self) -> list[dict[str, Any]]:
        """Every namespace, as plain values."""
        ...

    async def reset(self, namespace: bytes) -> int:
        """Makes the namespace's values invisible; returns how many they were."""
        ...

    async def gc(self, idle_s: float) -> list[dict[str, Any]]:
        """Drops namespaces that were idle for so long; returns their rows."""
        ...

    async def evict(self, num_bytes: int) -> tuple[int, int]:
        """Frees so much of the arena; returns values and bytes."""
        ...


@dataclass(frozen=True)
class Command:
    """One command: its one argument, and what it does."""

    argument: str
    meaning: str
    """Of the argument, for messages."""
    check: Callable[[object], Any]
    """The argument as it is used; raises ``ValueError`` for a wrong one."""
    run: Callable[[Operated, Any], Awaitable[dict[str, Any]]]
    """The answer's fields."""


def _namespace(value: object) -> bytes:
    namespace = bytes.fromhex(value) if isinstance(value, str) and value.isascii() and value.isalnum() else b""
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError
    return namespace


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError
    return value


def _bytes(value: object) -> int:
    if not isinstance(value, int) or _number(value) < 1:
        raise ValueError
    return value


async def _reset(store: Operated, namespace: bytes) -> dict[str, Any]:
    return {"namespace": namespace.hex(), "hidden": await store.reset(namespace)}


async def _gc(store: Operated, idle_s: float) -> dict[str, Any]:
    return {"idle_s": idle_s, "dropped": await store.gc(idle_s)}


async def _evict(store: Operated, num_bytes: int) -> dict[str, Any]:
    values, freed = await store.evict(num_bytes)
    return {"values": values, "bytes": freed}


COMMANDS: dict[str, Command] = {
    "reset": Command(
        "namespace", "64 hexadecimal characters, as the list of namespaces shows them", _namespace, _reset
    ),
    "gc": Command("idle_s", "a number of seconds from 0 on", _number, _gc),
    "evict": Command("bytes", "a whole number of bytes from 1 on", _bytes, _evict),
}
"""The commands that change something, by name."""

_LIST = "namespaces"


class AdminCommands:
    """Carries out ADMIN messages. All need the right ``admin``; all but ``reset`` need it for the whole store.

    Args:
        store: does what they ask for.
        counters: counts by reason are added here.
    """

    def __init__(self, store: Operated, counters: Counter[str]) -> None:
        self._store = store
        self._counters = counters

    async def run(self, session: StoreSession, command: dict[str, Any]) -> bytes:
        """Carries out ``{"command": name, argument: ...}``; returns the JSON of the answer.

        Raises:
            StoreError: unknown, malformed, denied, or it could not be done.
        """
        name = command.get("command")
        if name == _LIST:
            self._check_right(session, b"")
            answer: dict[str, Any] = {"namespaces": self._store.namespaces()}
        elif isinstance(name, str) and name in COMMANDS:
            answer = await self._change(session, name, command)
        else:
            known = ", ".join(sorted([*COMMANDS, _LIST]))
            raise StoreError(f"unknown command {str(name)[:64]!r}; this server knows: {known}")
        return json.dumps({"command": name, **answer}, separators=(",", ":")).encode()

    async def _change(self, session: StoreSession, name: str, given: dict[str, Any]) -> dict[str, Any]:
        command = COMMANDS[name]
        if name != "reset":
            self._check_right(session, b"")
        try:
            argument = command.check(given.get(command.argument))
        except ValueError:
            raise StoreError(f"{name}: {command.argument} must be {command.meaning}") from None
        if name == "reset":
            self._check_right(session, argument)
        shown = argument.hex() if isinstance(argument, bytes) else argument
        logger.warning("admin.%s peer=%s %s=%s", name, session.peer.label, command.argument, shown)
        return await command.run(self._store, argument)

    def _check_right(self, session: StoreSession, namespace: bytes) -> None:
        """The right ``admin`` for a namespace; ``b""`` asks for that of the whole store."""
        if not session.access.may_namespace(Right.ADMIN, namespace):
            self._counters["denied"] += 1
            raise StoreError("ADMIN is denied: this key id needs the right: admin")
