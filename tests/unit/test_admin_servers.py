"""The table of a cluster's servers: what becomes of a server's status, however odd it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from memkv_vllm.store.admin.servers import (
    MAX_REASON_CHARS,
    NOT_MEMKV,
    ServerRow,
    parse_row,
    read_row,
    tabulate,
    unreachable_row,
)

STATUS: dict[str, Any] = {
    "server": {"boot_id": "b1", "uptime_s": 12.5, "sessions": 3},
    "admin": {"healthy": 1, "ready": 1, "reasons": []},
    "arena": {"used": 10, "size": 100},
    "table": {"complete": 7},
    "disk": {"used_bytes": 20, "size_bytes": 200},
    "rates": {"put_bytes_per_s": 1.5, "get_bytes_per_s": 2.5, "hits_per_s": 3.0, "misses_per_s": 1.0},
}
DELETED = object()


def changed(path: str, value: Any) -> Any:
    """The status with another value at a dotted path; empty: the value itself."""
    if not path:
        return value
    status = copy.deepcopy(STATUS)
    *sections, name = path.split(".")
    node = status
    for section in sections:
        node = node[section]
    if value is DELETED:
        del node[name]
    else:
        node[name] = value
    return status


def row(status: object) -> ServerRow:
    return parse_row("s:1", json.dumps(status).encode())


def test_a_row_has_what_the_status_says() -> None:
    assert row(STATUS) == ServerRow(
        "s:1", False, "ok", "", "b1", 12.5, 7, 10, 100, 20, 200, 0.75, 1.5, 2.5, 3
    )  # fmt: skip
    assert read_row("s:1", STATUS, is_this=True).is_this


def test_without_a_disk_and_without_requests_these_are_not_known() -> None:
    assert row(changed("disk", None))[9:11] == (None, None)
    idle = {**STATUS["rates"], "hits_per_s": 0, "misses_per_s": 0.0}
    assert row(changed("rates", idle)).hit_ratio is None


@pytest.mark.parametrize(
    ("admin", "state", "reason"),
    [
        ({"healthy": 0, "reasons": ["disk", "event_loop_lag"]}, "degraded", "disk, event_loop_lag"),
        ({"healthy": 0, "reasons": ["draining"]}, "draining", ""),
        ({"healthy": 0, "reasons": ["draining", "disk"]}, "draining", "disk"),
    ],
)
def test_states(admin: dict[str, Any], state: str, reason: str) -> None:
    found = row(changed("admin", admin))
    assert (found.state, found.reason, found.values) == (state, reason, 7)


def test_one_that_starts_has_no_numbers() -> None:
    found = row({"admin": {"healthy": 0, "reasons": ["starting"]}})
    assert found == ServerRow("s:1", False, "starting", "")


@pytest.mark.parametrize("body", [b"", b"<html>", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b"{}", b"null"])
def test_what_is_no_status_is_no_memkv_server(body: bytes) -> None:
    assert parse_row("s:1", body) == unreachable_row("s:1", NOT_MEMKV)


@pytest.mark.parametrize("odd", [DELETED, None, True, -1, float("nan"), float("inf"), 10**400, "7", [], {}])
@pytest.mark.parametrize(
    "path",
    [
        "server", "admin", "arena", "table", "rates", "server.uptime_s", "server.sessions", "arena.used", "arena.size",
        "table.complete", "disk.used_bytes", "disk.size_bytes", "rates.put_bytes_per_s", "rates.get_bytes_per_s",
        "rates.hits_per_s", "rates.misses_per_s",
    ],
)  # fmt: skip
def test_odd_numbers_and_sections_make_a_row_and_no_failure(path: str, odd: Any) -> None:
    assert row(changed(path, odd)) == unreachable_row("s:1", NOT_MEMKV)


@pytest.mark.parametrize(
    ("path", "odd"),
    [
        ("admin.reasons", "disk"),
        ("admin.reasons", {"disk": 1}),
        ("admin.reasons", [["disk"]]),
        ("admin.healthy", "yes"),
        ("server.boot_id", 7),
        ("disk", []),
        ("", [STATUS]),
        ("", "starting"),
        ("", {"admin": {"reasons": []}}),
    ],
)
def test_other_odd_parts(path: str, odd: Any) -> None:
    assert row(changed(path, odd)) == unreachable_row("s:1", NOT_MEMKV)


def test_this_server_keeps_its_mark_when_its_status_is_odd() -> None:
    assert read_row("s:1", None, is_this=True).is_this


def test_text_of_a_server_is_short_and_printable() -> None:
    reasons = ["a\x1b[31m\u202e\n\ud800", *["x" * 1000] * 1000]
    found = row(changed("admin", {"healthy": 0, "reasons": reasons})).reason
    assert found.startswith("a?[31m???, xxx")
    assert len(found) == MAX_REASON_CHARS
    assert found.isprintable()
    json.dumps(found).encode()


def test_this_server_comes_first_and_a_peer_that_is_the_same_run_is_left_out() -> None:
    this = read_row("me:1", STATUS, is_this=True)
    same, other = row(STATUS), read_row("o:1", changed("server.boot_id", "b2"))
    lost = unreachable_row("l:1", "gone")
    found = tabulate(this, [lost, same, other])
    assert [each["address"] for each in found] == ["me:1", "l:1", "o:1"]
    json.dumps(found, allow_nan=False)
    starting = ServerRow("me:1", True, "starting", "")
    assert len(tabulate(starting, [lost])) == 2, "two runs that are not known are not the same"
