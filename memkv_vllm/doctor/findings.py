"""What a check says: one line of what was seen, how it is, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level", "exit_status", "fail", "ok", "warn"]


class Level(Enum):
    """How a thing is."""

    OK = "ok"
    WARN = "warn"
    """It works, but not as well, or not for ever."""
    FAIL = "fail"
    """It does not work as configured."""


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    check: str
    """What was looked at, in a word or two."""
    seen: str
    fix: str = ""
    """The next step; empty where there is nothing to do."""


def ok(check: str, seen: str) -> Finding:
    """All is well, or it does not matter here."""
    return Finding(Level.OK, check, seen)


def warn(check: str, seen: str, fix: str) -> Finding:
    """It works for now."""
    return Finding(Level.WARN, check, seen, fix)


def fail(check: str, seen: str, fix: str) -> Finding:
    """It will not work."""
    return Finding(Level.FAIL, check, seen, fix)


def exit_status(findings: Sequence[Finding]) -> int:
    """0 all is ok, 1 a warning, 2 a failure."""
    levels = {finding.level for finding in findings}
    return 2 if Level.FAIL in levels else 1 if Level.WARN in levels else 0
