"""Every metric that the server exposes, in one table, and how each is read out of its statistics. Pure.

Names follow Prometheus: counters end in ``_total``, units are bytes and seconds. No label holds what a client chose
(a session, a namespace, a key), so the number of series is bounded by this code. The handler counts events by name;
:func:`classify` sorts them into families, and one that no rule knows still shows, as ``memkv_events_total``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memkv_vllm.protocol.frame import HANDSHAKE_TYPES, MessageType
from memkv_vllm.store.latency import BOUNDS_S
from memkv_vllm.types import Status

__all__ = ["FAMILIES", "KNOWN", "MAX_EVENTS", "Buckets", "Family", "classify"]

Statistics = Mapping[str, Any]
Labelled = tuple[tuple[str, ...], Any]
"""Label values in the order of ``Family.labels``, and a number, or :class:`Buckets` of a histogram."""

MAX_EVENTS = 256
"""Most series of one family that is labelled by event names; later ones are added up as ``other``."""


class Buckets(NamedTuple):
    """A histogram: cumulated counts by upper bound (text, as Prometheus writes it), and the sum in seconds."""

    cumulated: tuple[tuple[str, int], ...]
    sum_s: float


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    """As it is exposed (a histogram: without ``_bucket``, ``_sum``, ``_count``)."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[Statistics], Iterable[Labelled]]
    labels: tuple[str, ...] = ()
    values: str = ""
    """What the labels may hold, in words."""


_RULES = tuple(
    (re.compile(pattern), family)
    for pattern, family in (
        (r"requests_refused", "memkv_requests_refused_total"),
        (r"requests_(\w+)", "memkv_requests_total"),
        (r"put_bytes", "memkv_put_bytes_total"),
        (r"get_bytes", "memkv_get_bytes_total"),
        (r"(?:exists|report_bad|delete|put_unknown|\w+_no)_(?:denied|algorithm|turn)", "memkv_refusals_total"),
        (r"(?:refused_\w+|denied)", "memkv_refusals_total"),
        (r"(?:put|get)_(?:given_up|reset)", "memkv_events_total"),
        (r"put_(\w+)", "memkv_put_values_total"),
        (r"get_(\w+)", "memkv_get_values_total"),
        (r"cut_(\w+)", "memkv_connections_cut_total"),
        (r"auth_failed|handshake_(?:timeout|displaced)", "memkv_connections_cut_total"),
        (r"disk_hits", "memkv_disk_hits_total"),
        (r"rdma_(\w+)", "memkv_rdma_failures_total"),
        (r"connections", "memkv_connections_total"),
        (r"sessions", "memkv_sessions_opened_total"),
        (r"sessions_closed", "memkv_sessions_closed_total"),
        (r"bulk_\w+|leaked_\w+|internal_error|accept_failed|drain_timeout", "memkv_faults_total"),
        (r".*", "memkv_events_total"),
    )
)


_STATUSES = tuple(status.name.lower() for status in Status)
KNOWN: dict[str, tuple[str, ...]] = {
    "memkv_requests_total": tuple(type_.name.lower() for type_ in MessageType if type_ not in HANDSHAKE_TYPES),
    "memkv_put_values_total": _STATUSES,
    "memkv_get_values_total": _STATUSES,
    "memkv_refusals_total": (
        "delete_denied", "denied", "exists_denied", "get_no_turn", "put_no_turn", "put_unknown_algorithm",
        "refused_attach", "refused_batch", "refused_busy", "refused_closing", "refused_handshakes", "refused_license",
        "refused_plain", "refused_session", "refused_sessions", "report_bad_denied",
    ),
    "memkv_connections_cut_total": (
        "attach", "auth_failed", "connect", "eager", "extent", "fds", "fenced", "flags", "handover", "handshake",
        "handshake_displaced", "handshake_timeout", "header", "json", "key_removed", "keys", "kind", "length",
        "license", "license_expired", "lost", "mac", "magic", "region", "request_id", "sequence", "shards", "state",
        "tls", "token", "transport", "truncated", "type", "unasked", "version", "write_timeout",
    ),
    "memkv_faults_total": (
        "accept_failed", "bulk_error", "bulk_overrun", "bulk_wrong_count", "drain_timeout", "internal_error",
        "leaked_reservations",
    ),
    "memkv_rdma_failures_total": (
        "bad_response", "completion", "context_number", "context_state", "fatal", "flushed", "general", "local_access",
        "local_domain", "local_eec", "local_length", "local_protection", "local_queue_pair", "not_destroyed",
        "probe_failed", "receiver", "refused", "remote_abort", "remote_access", "remote_operation", "remote_read",
        "remote_request", "response", "retries", "tag_matching", "tag_rendezvous", "unknown", "window",
    ),
    "memkv_sessions_by_data_path": ("loopback", "tcp", "verbs"),
}  # fmt: skip
"""Label values that are shown from the start, as 0. A series that appears with its first count would have no increase
from nothing to one, and an alert would miss the first fault. A test compares this with what the code counts."""


def classify(counter: str) -> tuple[str, str]:
    """The family of one of the handler's counters, and its label (empty where the family has none)."""
    for pattern, family in _RULES:
        match = pattern.fullmatch(counter)
        if match is not None:
            return family, match[1] if pattern.groups else counter
    raise AssertionError("the last rule matches everything")


# ---------------------------------------------------------------------------------------------------- readers


def _at(path: str, scale: float = 1) -> Callable[[Statistics], Iterator[Labelled]]:
    """One number at a dotted path; 0 where it is None, nothing where this server has no such part."""

    def read(statistics: Statistics) -> Iterator[Labelled]:
        node: Any = statistics
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return
            node = node[part]
        yield (), (node or 0) * scale

    return read


def _several(pairs: Mapping[str, str]) -> Callable[[Statistics], Iterator[Labelled]]:
    """One number each for label value -> dotted path."""

    def read(statistics: Statistics) -> Iterator[Labelled]:
        for label, path in pairs.items():
            for _, number in _at(path)(statistics):
                yield (label,), number

    return read


def _all_of(path: str, without: tuple[str, ...] = ()) -> Callable[[Statistics], Iterator[Labelled]]:
    """Every number of the mapping at ``path``, labelled by its key."""

    def read(statistics: Statistics) -> Iterator[Labelled]:
        node: Any = statistics
        for part in path.split("."):
            node = node.get(part, {}) if isinstance(node, Mapping) else {}
        for name, number in sorted(node.items()) if isinstance(node, Mapping) else ():
            if name not in without and isinstance(number, (int, float)):
                yield (name,), number

    return read


def _counted(family: str, *, labelled: bool) -> Callable[[Statistics], Iterator[Labelled]]:
    """The handler's counters that :func:`classify` sorts into ``family``, those that are known from 0 on."""

    def read(statistics: Statistics) -> Iterator[Labelled]:
        found: dict[str, float] = dict.fromkeys(KNOWN.get(family, ()), 0)
        for counter, number in sorted(statistics["counters"].items()):
            home, label = classify(counter)
            if home != family:
                continue
            if labelled and label not in found and len(found) >= MAX_EVENTS:
                label = "other"
            found[label if labelled else ""] = found.get(label if labelled else "", 0) + number
        if not labelled:
            found.setdefault("", 0)
        yield from (((label,) if labelled else (), number) for label, number in found.items())

    return read


def _latency(statistics: Statistics) -> Iterator[Labelled]:
    for type_, latency in sorted(statistics.get("latency", {}).items()):
        total, cumulated = 0, []
        for bound, count in zip((*map(repr, BOUNDS_S), "+Inf"), latency["counts"], strict=True):
            total += count
            cumulated.append((bound, total))
        yield (type_,), Buckets(tuple(cumulated), latency["sum_s"])


def _drives(statistics: Statistics) -> Iterator[Labelled]:
    drives = (statistics.get("disk") or {}).get("drives", ())
    if drives:
        serving = sum(1 for drive in drives if drive["in_service"])
        yield ("in_service",), serving
        yield ("out",), len(drives) - serving


def _sessions_by_path(statistics: Statistics) -> Iterator[Labelled]:
    found: Mapping[str, int] = statistics["server"].get("sessions_by_path", {})
    for path in sorted({*KNOWN["memkv_sessions_by_data_path"], *found}):
        yield (path,), found.get(path, 0)


def _info(statistics: Statistics) -> Iterator[Labelled]:
    server = statistics["server"]
    yield (statistics["admin"]["version"], server["server_id"], server["boot_id"]), 1


def _c(name: str, help: str, *, label: str = "", values: str = "", path: str = "") -> Family:
    """A counter that the handler keeps (or that stands at ``path``)."""
    read = _at(path) if path else _counted(name, labelled=bool(label))
    return Family(name, "counter", help, read, (label,) if label else (), values)


def _g(name: str, help: str, path: str) -> Family:
    return Family(name, "gauge", help, _at(path))


_BYTES_IN_LOG = ("bytes_written", "read_bytes", "log_shed_bytes")
"""Bytes and counts are no labels of one metric."""
_OWN_TABLE_FAMILIES = (
    "hits", "misses", "mismatches", "evictions", "evicted_bytes", "demotions", "demoted_bytes", "fetches",
    "disk_writes", "disk_lost",
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    # traffic
    _c("memkv_requests_total", "Requests by message type.", label="type", values="message types in lower case"),
    _c("memkv_requests_refused_total", "Requests refused as a whole: a bad batch, a limit, a missing right, the end."),
    _c("memkv_put_values_total", "Values of PUT batches by result.", label="result", values="result of each value"),
    _c("memkv_get_values_total", "Values of GET batches by result.", label="result", values="result of each value"),
    _c("memkv_put_bytes_total", "Bytes of values that were stored."),
    _c("memkv_get_bytes_total", "Bytes of values that were handed out."),
    Family(
        "memkv_request_duration_seconds",
        "histogram",
        "From the arrival of a PUT or GET batch to its answer; waiting for a turn included.",
        _latency,
        ("type",),
        "put, get",
    ),
    # why not
    _c("memkv_refusals_total", "What was refused, by reason.", label="reason", values="reason of the refusal"),
    _c(
        "memkv_connections_cut_total",
        "Connections that this server ended because of what the peer did or was, by reason.",
        label="reason",
        values="auth_failed, handshake_timeout, or the rule of the protocol that was broken",
    ),
    _c("memkv_faults_total", "Faults of this server, by reason; each has a log line.", label="reason", values="fault"),
    _c(
        "memkv_rdma_failures_total",
        "Failures over RDMA, by reason; each ended one session, or kept one from beginning, and has a log line.",
        label="reason",
        values="see docs/rdma.md, How a transfer runs",
    ),
    _c("memkv_events_total", "Other things that were counted, by name.", label="event", values="name of the event"),
    # connections
    _c("memkv_connections_total", "Connections that were let in to the handshake."),
    _c("memkv_sessions_opened_total", "Sessions that were authenticated and taken up."),
    _c("memkv_sessions_closed_total", "Sessions that ended."),
    _g("memkv_connections", "Connections now, those in the handshake included.", "server.connections"),
    _g("memkv_sessions", "Sessions now.", "server.sessions"),
    Family(
        "memkv_sessions_by_data_path",
        "gauge",
        "Sessions now, by what their bytes go over; a session that moves none counts as what it came over.",
        _sessions_by_path,
        ("data_path",),
        "loopback, tcp, verbs",
    ),
    _g("memkv_requests_in_flight", "Requests that are being worked on.", "server.inflight"),
    # what it holds
    Family(
        "memkv_lookups_total",
        "counter",
        "Values asked for by GET: found, absent, or there with another length or layout.",
        _several(
            {
                "hit": "table.counters.hits",
                "miss": "table.counters.misses",
                "mismatch": "table.counters.mismatches",
            }
        ),
        ("result",),
        "hit, miss, mismatch",
    ),
    _c("memkv_evictions_total", "Values evicted to make room.", path="table.counters.evictions"),
    _c("memkv_evicted_bytes_total", "Bytes of those.", path="table.counters.evicted_bytes"),
    _c(
        "memkv_demotions_total",
        "Values that left the arena to make room and stay on disk.",
        path="table.counters.demotions",
    ),
    _c("memkv_demoted_bytes_total", "Bytes of those.", path="table.counters.demoted_bytes"),
    Family(
        "memkv_table_events_total",
        "counter",
        "What else happened to values, by event.",
        _all_of("table.counters", _OWN_TABLE_FAMILIES),
        ("event",),
        "reservations, commits, aborts, deletes, bad_reports, resets, refused_no_space and others",
    ),
    Family(
        "memkv_table_entries",
        "gauge",
        "Entries by state; a pinned one is also complete unless it was hidden meanwhile.",
        _several({state: f"table.{state}" for state in ("complete", "reserved", "pinned", "stale")}),
        ("state",),
        "complete, reserved, pinned, stale",
    ),
    _g("memkv_value_bytes", "Bytes of all values in the arena.", "table.bytes_used"),
    _g(
        "memkv_oldest_reservation_seconds",
        "Age of the oldest put that is not over; 0: none.",
        "table.oldest_reservation",
    ),
    _g("memkv_manifests", "Manifests of namespaces that are kept.", "manifests.manifests"),
    # disk
    _c("memkv_disk_writes_total", "Values that were written to disk.", path="table.counters.disk_writes"),
    _c("memkv_disk_fetches_total", "Values that came back from disk.", path="table.counters.fetches"),
    _c("memkv_disk_lost_total", "Values whose record could not be read.", path="table.counters.disk_lost"),
    _c("memkv_disk_hits_total", "Values that a GET waited for the disk for, and got."),
    Family(
        "memkv_disk_events_total",
        "counter",
        "What the log behind the arena did, and why not, by event.",
        _all_of("disk.counters", _BYTES_IN_LOG),
        ("event",),
        "records_written, records_rewritten, segments_reclaimed, read_failed, log_shed and others",
    ),
    Family(
        "memkv_disk_moved_bytes_total",
        "counter",
        "Bytes of values that moved between the arena and the drives.",
        _several({"read": "disk.counters.read_bytes", "write": "disk.counters.bytes_written"}),
        ("direction",),
        "read, write",
    ),
    _g("memkv_disk_size_bytes", "Size of the drives, as far as they may be used.", "disk.size_bytes"),
    _g("memkv_disk_used_bytes", "Bytes of it in use, records that are dead included.", "disk.used_bytes"),
    _g("memkv_disk_write_behind_bytes", "Bytes in the arena that wait to be written.", "disk.write_bytes"),
    Family("memkv_disk_drives", "gauge", "Drives by state.", _drives, ("state",), "in_service, out"),
    Family(
        "memkv_disk_segments",
        "gauge",
        "Segments of the drives by state.",
        _all_of("disk.segments"),
        ("state",),
        "states of a segment",
    ),
    _g("memkv_disk_values", "Values with a record on disk, in the arena too or not.", "table.records"),
    _g("memkv_disk_only_values", "Values that are on disk alone.", "table.on_disk"),
    _g("memkv_disk_value_bytes", "Bytes of all values on disk.", "table.disk_bytes"),
    _g("memkv_disk_fetches_running", "Values that are being read from disk.", "table.fetching"),
    _g("memkv_disk_writes_waiting", "Values that wait to be written, or are being written.", "table.writing"),
    # arena
    _g("memkv_arena_size_bytes", "Size of the arena.", "arena.size"),
    _g("memkv_arena_used_bytes", "Bytes of it in use, in whole pages.", "arena.used"),
    _g("memkv_arena_largest_free_bytes", "Longest value that fits without evicting.", "arena.largest_free"),
    _g("memkv_arena_extents", "Extents in use.", "arena.extents"),
    _g("memkv_arena_fragmentation_ratio", "1 - largest free extent / free bytes.", "arena.fragmentation"),
    # lanes
    _g("memkv_transfer_lanes", "Transfers that may run at once.", "bulk.lanes"),
    _g("memkv_transfer_lanes_idle", "Lanes that have nothing to do.", "bulk.idle"),
    Family(
        "memkv_transfers_waiting",
        "gauge",
        "Turns that wait for a lane.",
        _several({"get": "bulk.waiting_gets", "put": "bulk.waiting_puts"}),
        ("type",),
        "get, put",
    ),
    # the server itself
    Family(
        "memkv_info",
        "gauge",
        "1, with the version, the id of the store's content and the id of this run.",
        _info,
        ("version", "server_id", "boot_id"),
        "one series",
    ),
    _g("memkv_uptime_seconds", "Since the start.", "server.uptime_s"),
    _g("memkv_ready", "1 when clients may come.", "admin.ready"),
    _g("memkv_healthy", "1 when nothing is degraded.", "admin.healthy"),
    Family(
        "memkv_degraded",
        "gauge",
        "1 for each reason why the server is degraded now.",
        lambda statistics: (((reason,), 1) for reason in sorted(set(statistics["admin"]["reasons"]))),
        ("reason",),
        "reasons of /v1/health",
    ),
    _g("memkv_event_loop_lag_seconds", "The most that the event loop came late by in the last 30 s.", "admin.lag_s"),
    Family(
        "memkv_admin_requests_total",
        "counter",
        "Requests to admin HTTP by status code.",
        _all_of("admin.responses"),
        ("code",),
        "HTTP status",
    ),
    _c(
        "memkv_admin_connections_refused_total",
        "Connections to admin HTTP beyond network.admin_max_connections.",
        path="admin.connections_refused",
    ),
    _c(
        "memkv_metrics_clamped_total",
        "Counters that had gone back and were shown at their earlier value: a fault of this server.",
        path="admin.clamped",
    ),
)
