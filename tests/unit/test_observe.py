"""JSON log lines: every pair of a message is a field of its own, and nothing that a value holds can make another."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.observe import LineFormatter, fields_of

ROOT = Path(__file__).resolve().parents[2]


def record(message: str, *arguments: Any) -> logging.LogRecord:
    return logging.LogRecord("memkv.test", logging.INFO, __file__, 1, message, arguments, None)


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        (record("event=stopped"), {"event": "stopped"}),
        (record("server.started id=%s arena=%d", "12", 64), {"event": "server.started", "id": "12", "arena": 64}),
        (record("event=a took_s=%.1f share=%g", 1.25, 0.5), {"event": "a", "took_s": 1.25, "share": 0.5}),
        (record("event=a reason=%r", "no such file"), {"event": "a", "reason": "no such file"}),
        (record("event=a addresses=%s n=%d", [("x", 1)], 2), {"event": "a", "addresses": "[('x', 1)]", "n": 2}),
        (
            record("event=refused server=%s reason=%r: try again", "a", "full"),
            {"event": "refused", "server": "a", "reason": "full", "detail": "try again"},
        ),
        (
            record("event=license_ignored path=%s reason='this server needs none'", "/x"),
            {"event": "license_ignored", "path": "/x", "reason": "this server needs none"},
        ),
        (
            record("event=scratch wanted=auto chosen=host: %s", "no room"),
            {"event": "scratch", "wanted": "auto", "chosen": "host", "detail": "no room"},
        ),
        (
            record("arena.not_populated: this kernel cannot"),
            {"event": "arena.not_populated", "detail": "this kernel cannot"},
        ),
        (record("event=a level=%s event=%s", "x", "y"), {"event": "a", "level_": "x", "event_": "y"}),
        (record("event=a share=%d%% of=%d", 5, 7), {"event": "a", "share": "5%", "of": 7}),
        (
            record("event=a at=%s:%d n=%d: of %s, x=1", "h", 5, 2, "q=1"),
            {"event": "a", "at": "h:5", "n": 2, "x": "1", "detail": "of q=1"},
        ),
        (record("event=a why='%s'", "no, x=1"), {"event": "a", "why": "no, x=1"}),
        (
            record("namespace.collected values=%(values)d idle_s=%(idle_s)s", {"values": 3, "idle_s": 1.5}),
            {"event": "namespace.collected", "values": 3, "idle_s": "1.5"},
        ),
        (record("some other library says a=%s", 1), {}),
        (record("plain"), {}),
    ],
)
def test_pairs_become_fields(made: logging.LogRecord, fields: dict[str, Any]) -> None:
    assert fields_of(made) == fields
    line = json.loads(LineFormatter(as_json=True).format(made))
    assert {name: line[name] for name in fields} == fields
    assert line["message"] == made.getMessage()


@given(st.text(), st.text())
def test_a_value_cannot_make_a_field(first: str, second: str) -> None:
    """What a peer says (its label, a reason) stands in its own field, whatever is in it; the line stays one line."""
    made = record("event=refused peer=%s reason=%r", first, second + " admin=yes\nts=0")
    line = LineFormatter(as_json=True).format(made)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.keys() == {"ts", "level", "logger", "event", "peer", "reason", "message"}
    assert (fields["peer"], fields["event"]) == (first, "refused")
    assert "\n" not in LineFormatter(as_json=False).format(made)


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = logging.LogRecord("memkv.test", logging.ERROR, __file__, 1, "event=a n=%d", (1,), sys.exc_info())
    line = json.loads(LineFormatter(as_json=True).format(made))
    assert (line["event"], line["n"]) == ("a", 1)
    assert "two\nlines" in line["exception"]


def test_every_message_of_the_package_that_is_an_event_parses() -> None:
    """All templates of the package, with stand-ins for the arguments: none breaks the formatter, all have an event."""
    templates: set[str] = set()
    for path in (ROOT / "memkv_vllm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        templates |= set(re.findall(r'(?:logger|_log)\.(?:info|warning|error|exception)\(\s*"([^"]+)"', text))
    assert len(templates) > 30
    for template in templates:
        kinds = re.findall(r"%(?:\(\w+\))?[-+ #0-9.]*([a-zA-Z])", template)
        if "%(" in template:
            continue
        made = record(template, *(7 if kind in "dfgi" else "x y=1" for kind in kinds))
        fields = fields_of(made)
        if template.startswith("event=") or re.match(r"[a-z_]+(\.[a-z_]+)+[ :]", template):
            assert fields["event"]
            assert "y" not in fields
