"""How a log record becomes one line: ``key=value`` pairs for people, or a JSON object with a field for each pair.

The package's messages are templates of pairs, ``"event=fenced server=%s slots=%d"`` or ``"server.started id=%s"``.
The JSON form takes the values from the record's arguments, not out of the finished text: nothing that a value
contains can look like another field, and a number stays a number.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["LineFormatter", "fields_of"]

_DIRECTIVE = re.compile(r"%(?:\((?P<name>\w+)\))?[-+ #0-9.]*(?P<kind>[a-zA-Z%])")
_PAIR = re.compile(rf"(?:^|(?<=\s))([A-Za-z_]\w*)=('[^']*'|\"[^\"]*\"|(?:{_DIRECTIVE.pattern}|[^\s%])+)")
_EVENT = re.compile(r"(?:event=(\w[\w.]*)|([a-z_]+(?:\.[a-z_]+)+)(?=[ :]|$))")
_NUMBERS = "dfgi"
_OWN = frozenset({"ts", "level", "logger", "event", "detail", "message", "exception"})
"""Fields that every line has; a pair of the same name gets an underscore."""


class LineFormatter(logging.Formatter):
    """One event per line, as ``key=value`` pairs or a JSON object. Exceptions stay on the line."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        message = record.getMessage()
        failure = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {**fields, **fields_of(record), "message": message}
            return json.dumps(line | ({"exception": failure} if failure else {}))
        text = " ".join([*(f"{name}={value}" for name, value in fields.items()), _as_pairs(message)])
        return text + (f" exception={json.dumps(failure)}" if failure else "")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The pairs of a record: ``event``, then each ``key=`` of its template with its argument, then ``detail``.

    A message that is no event (another library's) has none.
    """
    template = str(record.msg)
    event = _EVENT.match(template)
    if event is None:
        return {}
    fields: dict[str, Any] = {"event": event[1] or event[2]}
    arguments, others, at = _Arguments(record.args), [], event.end()
    for pair in _PAIR.finditer(template, at):
        others.append(arguments.put_into(template[at : pair.start()]))
        fields[_free(pair[1])] = arguments.value_of(pair[2])
        at = pair.end()
    others.append(arguments.put_into(template[at:]))
    detail = " ".join("".join(others).split()).strip(":;, ")
    return {**fields, **({"detail": detail} if detail else {})}


class _Arguments:
    """The arguments of a record, handed out in the order of the template's directives."""

    def __init__(self, args: Any) -> None:
        self._by_name = args if isinstance(args, Mapping) else None
        self._in_order = iter(args if isinstance(args, tuple) else ())
        self._formats = bool(args)

    def put_into(self, text: str) -> str:
        """``text`` with its directives replaced."""
        if not self._formats:
            return text
        if self._by_name is not None:
            return text % self._by_name
        return text % tuple(next(self._in_order) for found in _DIRECTIVE.finditer(text) if found["kind"] != "%")

    def value_of(self, text: str) -> Any:
        """The value that ``text`` stands for: a number where the template says so, else text."""
        text = text[1:-1] if text[0] in "'\"" else text.rstrip(":;,")
        directive = _DIRECTIVE.fullmatch(text)
        if directive is None or directive["kind"] == "%" or not self._formats:
            return self.put_into(text)
        value = next(self._in_order) if self._by_name is None else self._by_name[directive["name"]]
        return value if directive["kind"] in _NUMBERS and isinstance(value, int | float) else str(value)


def _free(name: str) -> str:
    return f"{name}_" if name in _OWN else name


def _as_pairs(message: str) -> str:
    """The package's own messages are pairs already (``server.started id=..``); any other is quoted as a whole."""
    if message.startswith("event="):
        text = message
    elif re.match(r"[a-z_]+(\.[a-z_]+)+( |$)", message):
        text = f"event={message}"
    else:
        return f"message={json.dumps(message)}"
    # A message may quote a peer: no line break and no terminal escape of his gets into the log.
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
