"""The table of a cluster's servers: one row each, out of what that server's status says. Pure.

What comes from another server is not believed to be of any form: whatever it is, it becomes a row, and what a row holds
is a finite number or a short printable text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["MAX_REASON_CHARS", "NOT_MEMKV", "ServerRow", "parse_row", "read_row", "tabulate", "unreachable_row"]

NOT_MEMKV = "not a memkv server"
MAX_REASON_CHARS = 160
"""Every reason that a server can have at once, by name, fits."""
_MAX_REASONS = 16
_MAX_NUMBER = 2.0**62
"""More than any server can count; a larger one would only make the table wide."""


class ServerRow(NamedTuple):
    """One server. What is not known is None: all numbers of one that starts or cannot be reached, a disk it lacks."""

    address: str
    """Of its admin HTTP, as this server's settings have it."""
    is_this: bool
    """The server that answers."""
    state: str
    """``ok``, ``degraded``, ``starting``, ``draining`` or ``unreachable``."""
    reason: str
    """Why it is not ok: its own names of reasons, or why nothing is known of it. Empty when it is ok."""
    boot_id: str | None = None
    """Of its present run."""
    uptime_s: float | None = None
    values: float | None = None
    arena_used_bytes: float | None = None
    arena_size_bytes: float | None = None
    disk_used_bytes: float | None = None
    disk_size_bytes: float | None = None
    hit_ratio: float | None = None
    """Of the values that were asked for within the window of the rates; None when none was."""
    put_bytes_per_s: float | None = None
    get_bytes_per_s: float | None = None
    sessions: float | None = None


class _Odd(Exception):
    """A status that is not of the form that servers answer with."""


def unreachable_row(address: str, reason: str) -> ServerRow:
    """The row of a server of which nothing is known, and why."""
    return ServerRow(address, False, "unreachable", _short(reason))


def parse_row(address: str, body: bytes) -> ServerRow:
    """The row of another server out of the body of its ``/v1/status``, whatever that is."""
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        return unreachable_row(address, NOT_MEMKV)
    return read_row(address, status)


def read_row(address: str, status: object, *, is_this: bool = False) -> ServerRow:
    """The row of a server out of its status.

    Args:
        address: of its admin HTTP.
        status: what ``/v1/status`` answers, read from JSON.
        is_this: the server that answers.
    """
    try:
        state, reason = _state(status)
        row = ServerRow(address, is_this, state, reason)
        if state == "starting" or not isinstance(status, Mapping):
            return row
        return row._replace(**_numbers(status), **_disk(status), boot_id=_text(_at(status, "server", "boot_id")))
    except _Odd:
        return unreachable_row(address, NOT_MEMKV)._replace(is_this=is_this)


def tabulate(this: ServerRow, others: Sequence[ServerRow]) -> list[dict[str, Any]]:
    """The rows as JSON takes them, this server first.

    One of the others that is the same run as this server is left out: all servers may have the same list of all.
    """
    is_known = this.boot_id is not None
    rows = [this, *(row for row in others if not (is_known and row.boot_id == this.boot_id))]
    return [row._asdict() for row in rows]


def _state(status: object) -> tuple[str, str]:
    """State, and the names of the reasons for it."""
    names = _at(status, "admin", "reasons")
    if not isinstance(names, (list, tuple)):
        raise _Odd
    reasons = [_text(name) for name in names[:_MAX_REASONS]]
    has_store = isinstance(status, Mapping) and "server" in status
    if not has_store:
        if "starting" not in reasons:
            raise _Odd
        return "starting", ""
    if "draining" in reasons:
        return "draining", _short(", ".join(name for name in reasons if name != "draining"))
    is_healthy = _number(status, "admin", "healthy")
    return ("ok", "") if is_healthy else ("degraded", _short(", ".join(reasons)))


def _numbers(status: Mapping[Any, Any]) -> dict[str, Any]:
    hits, misses = _number(status, "rates", "hits_per_s"), _number(status, "rates", "misses_per_s")
    return {
        "uptime_s": _number(status, "server", "uptime_s"),
        "values": _number(status, "table", "complete"),
        "arena_used_bytes": _number(status, "arena", "used"),
        "arena_size_bytes": _number(status, "arena", "size"),
        "hit_ratio": hits / (hits + misses) if hits + misses else None,
        "put_bytes_per_s": _number(status, "rates", "put_bytes_per_s"),
        "get_bytes_per_s": _number(status, "rates", "get_bytes_per_s"),
        "sessions": _number(status, "server", "sessions"),
    }


def _disk(status: Mapping[Any, Any]) -> dict[str, Any]:
    if status.get("disk") is None:
        return {}
    used, size = _number(status, "disk", "used_bytes"), _number(status, "disk", "size_bytes")
    return {"disk_used_bytes": used, "disk_size_bytes": size}


def _at(status: object, section: str, name: str) -> object:
    found = status.get(section) if isinstance(status, Mapping) else None
    if not isinstance(found, Mapping) or name not in found:
        raise _Odd
    return found[name]


def _number(status: object, section: str, name: str) -> float:
    value = _at(status, section, name)
    # True is a number to Python alone. NaN and infinity, JSON to Python and to no browser, fail the comparison below.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Odd
    if not 0 <= value <= _MAX_NUMBER:
        raise _Odd
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Odd
    return _short(value)


def _short(text: str) -> str:
    """Printable and not long: no control character, no mark that turns the direction of writing around."""
    text = "".join(char if char.isprintable() else "?" for char in text[: MAX_REASON_CHARS + 1])
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."
