"""Bodies of the admin HTTP requests that change something: bytes in, an argument or a :class:`BadRequest` out. Pure.

What the commands are stands in :mod:`memkv_vllm.store.commands`.
"""

from __future__ import annotations

import json
from typing import Any

from memkv_vllm.store.commands import COMMANDS

__all__ = ["MAX_BODY_BYTES", "BadRequest", "parse"]

MAX_BODY_BYTES = 4096
"""The longest valid body has about a hundred."""
MAX_SHOWN_CHARS = 80
"""Of a wrong value in a message: a namespace and a little more."""


class BadRequest(Exception):
    """The caller's fault: what is wrong, and what to do about it."""

    def __init__(self, error: str, next_step: str, status: int = 400) -> None:
        self.error, self.next_step, self.status = error, next_step, status
        super().__init__(error)


def parse(name: str, body: bytes) -> Any:
    """The argument of the command ``name`` out of a request's body.

    Raises:
        BadRequest: the body is not what the command takes.
    """
    command = COMMANDS[name]
    wanted = f'send {{"{command.argument}": ...}}: {command.meaning}'
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON", wanted) from None
    if not isinstance(given, dict):
        raise BadRequest("the body is not a JSON object", wanted)
    unknown = sorted(str(key)[:32] for key in given.keys() - {command.argument})
    if unknown or command.argument not in given:
        problem = f"unknown: {', '.join(unknown[:4])}" if unknown else f"{command.argument} is missing"
        raise BadRequest(problem, wanted)
    try:
        return command.check(given[command.argument])
    except ValueError:
        seen = json.dumps(given[command.argument])
        seen = seen if len(seen) <= MAX_SHOWN_CHARS else seen[:MAX_SHOWN_CHARS] + "..."
        raise BadRequest(f"{command.argument} = {seen} is not allowed", wanted) from None
