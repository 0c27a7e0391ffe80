"""Client metrics: what the manager exports through vLLM, and what a worker can only log.

vLLM takes statistics from the scheduler side's manager alone; a worker's results reach the scheduler as "finished",
with bytes and seconds, and nothing else. So:

- exported (names ``vllm:memkv_*``): everything about lookups, namespaces, resets and servers, as the manager's
  prober sees them;
- exported by vLLM itself from our workers' results: ``vllm:kv_offload_{load,store}_{bytes,time,size}``;
- logged by each worker, one line per reason and minute with the total so far and what to do: blocks lost per
  reason (:class:`LossLog`).

Counters never decrease (fault P095): what is exported is the growth since the last poll, clamped at zero.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from memkv_vllm.types import Direction, LossReason, MissReason

logger = logging.getLogger("memkv.integration.metrics")

PREFIX = "vllm:memkv_"
LOG_INTERVAL_S = 60.0


class Metric(NamedTuple):
    """One exported metric. ``label`` is its only label's name, or empty."""

    name: str
    kind: str
    """``counter`` or ``gauge``."""
    documentation: str
    label: str = ""


METRICS: tuple[Metric, ...] = (
    Metric("lookup_hits", "counter", "Lookups answered hit. vLLM asks for each waiting request at every step."),
    Metric("lookup_pending", "counter", "Lookups deferred because the server's answer was not there yet."),
    Metric(
        "lookup_misses",
        "counter",
        "Lookups answered miss, by reason (" + ", ".join(reason.value for reason in MissReason) + ").",
        "reason",
    ),
    Metric("load_blocks", "counter", "Blocks handed to the workers for loading."),
    Metric("store_blocks", "counter", "Blocks handed to the workers for storing."),
    Metric("store_known_blocks", "counter", "Blocks not stored because the servers were known to hold them."),
    Metric("probes", "counter", "Blocks that the servers were asked for."),
    Metric("probes_unreachable", "counter", "Probes that no server answered."),
    Metric("namespace_mismatches", "counter", "Other namespaces found that were meant to share with ours and cannot."),
    Metric("duplicate_servers", "counter", "Entries of the settings that turned out to be one server."),
    Metric("servers_lost", "counter", "Times that a server went away or came back as another run."),
    Metric("connects", "counter", "Connections made to servers, by the transport that was chosen.", "transport"),
    Metric("reset_failures", "counter", "Servers that did not confirm a cache reset."),
    Metric("manager_errors", "counter", "Errors inside memkv's manager, each answered as a miss."),
    Metric("servers", "gauge", "Servers configured."),
    Metric("servers_ready", "gauge", "Servers that the scheduler side is connected to."),
    Metric("known_blocks", "gauge", "Blocks in the cache of existence answers."),
)


def metric_definitions() -> dict[str, Any]:
    """The definitions that vLLM's front end asks for, by full name."""
    from vllm.v1.kv_offload import base

    kinds = {"counter": base.OffloadingCounterMetadata, "gauge": base.OffloadingGaugeMetadata}
    return {
        PREFIX + metric.name: kinds[metric.kind](
            documentation=metric.documentation, labelnames=(metric.label,) if metric.label else ()
        )
        for metric in METRICS
    }


class ManagerMetrics:
    """Turns totals into what vLLM wants: the growth of counters since the last poll, and gauges that changed.

    Not thread-safe; the manager's thread owns it.
    """

    def __init__(self) -> None:
        self._totals: Counter[tuple[str, str]] = Counter()
        self._reported: Counter[tuple[str, str]] = Counter()
        self._gauges: dict[str, float] = {}
        self._reported_gauges: dict[str, float] = {}

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Count ``amount`` more; a negative amount counts nothing."""
        self._totals[name, label] += max(0, amount)

    def total(self, name: str, label: str = "") -> int:
        """The count so far."""
        return self._totals[name, label]

    def observe_total(self, name: str, total: int, label: str = "") -> None:
        """Take over a total that is counted elsewhere; one smaller than before is ignored."""
        self._totals[name, label] = max(self._totals[name, label], total)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name] = value

    def fill(self, stats: Any) -> bool:
        """Put all changes since the last call into an ``OffloadingConnectorStats``; False when there are none."""
        changed = False
        for key, total in self._totals.items():
            growth = total - self._reported[key]
            if growth > 0:
                name, label = key
                stats.increase_counter(PREFIX + name, growth, (label,) if label else ())
                self._reported[key] = total
                changed = True
        for name, value in self._gauges.items():
            if self._reported_gauges.get(name) != value:
                stats.set_gauge(PREFIX + name, value)
                self._reported_gauges[name] = value
                changed = True
        return changed


_FIXES: Mapping[LossReason, str] = {
    LossReason.ABSENT: "the servers do not hold it; normal after a restart or an eviction",
    LossReason.EVICTED: "evicted between lookup and load; give the servers more memory (memory.max_size)",
    LossReason.TIMEOUT: "slower than op_timeout_s or memkv_wait_timeout_s; look at the network and the servers' load",
    LossReason.CHECKSUM: "the bytes were wrong and were not used; look for memory or network faults in the kernel logs",
    LossReason.LAYOUT: "stored by an engine with another KV layout; use another memkv_spec_prefix for each",
    LossReason.BREAKER: "the server is down or unreachable; it is tried again by itself",
    LossReason.SHED: "stores come faster than the servers take them; add servers, lanes or rails",
    LossReason.TOO_SHORT: "the value has another length; use another memkv_spec_prefix for each configuration",
    LossReason.FLUSHED: "vLLM took the GPU blocks back first; more GPU blocks or more store lanes lower this",
    LossReason.PENDING: "another writer stores the same block at this moment; nothing is lost",
    LossReason.REFUSED: "the server has no room or no right for it; see the server's log",
    LossReason.FAILED: "the transfer failed; see the lines of memkv.engine before this one",
    LossReason.ENGINE: "the transfer engine of this rank has ended; restart vLLM and report its traceback",
}


class LossLog:
    """Counts blocks that a worker lost and logs each reason at most once per ``interval_s``. Time is an argument.

    Args:
        rank: for the line.
        interval_s: least seconds between two lines of one direction and reason.
    """

    def __init__(self, rank: int, interval_s: float = LOG_INTERVAL_S) -> None:
        self._rank = rank
        self._interval_s = interval_s
        self._totals: Counter[tuple[Direction, LossReason]] = Counter()
        self._logged_at: dict[tuple[Direction, LossReason], float] = {}

    @property
    def totals(self) -> Mapping[tuple[Direction, LossReason], int]:
        """Blocks lost so far."""
        return self._totals

    def count(self, direction: Direction, lost: Mapping[LossReason, int], now: float) -> None:
        """Count a job's lost blocks and log what is due at ``now`` (monotonic seconds)."""
        for reason, blocks in lost.items():
            key = (direction, reason)
            self._totals[key] += max(0, blocks)
            last = self._logged_at.get(key)
            if blocks > 0 and (last is None or now - last >= self._interval_s):
                self._logged_at[key] = now
                # A store that another writer does is no loss.
                level = logging.INFO if reason is LossReason.PENDING else logging.WARNING
                logger.log(
                    level,
                    "event=blocks_lost rank=%d direction=%s reason=%s blocks=%d total=%d: %s",
                    self._rank,
                    direction.value,
                    reason.value,
                    blocks,
                    self._totals[key],
                    _FIXES.get(reason, "see the lines of memkv.engine before this one"),
                )
