"""What the scheduler side believes about which blocks the servers hold. Pure: ``now`` is monotonic seconds.

:class:`PresenceCache` answers vLLM's lookups at once and collects what must be asked; its driver takes the probes once
per scheduler step, sends one batch per server and feeds the answers back. :class:`RequestGuard` keeps one request from
trying a key twice: the worker cannot tell the manager that a load failed, so without it a hit that cannot be loaded
would be hit, lost and recomputed for ever.

States of a prefix: unknown -> pending -> hit | miss, each with an expiry, after which it is asked again.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from memkv_vllm.types import MissReason

__all__ = ["PresenceCache", "PresenceStats", "RequestGuard", "Verdict"]

BREAKER_TTL_S = 1.0
"""Longest trust in 'its server is down': hits come back by themselves soon after the server does."""


class Verdict(Enum):
    """Answer to one lookup."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"


class PresenceStats(NamedTuple):
    """A snapshot of a cache. Counters never decrease; ``misses`` has one for each miss answered, by reason."""

    entries: int
    queued_probes: int
    hits: int
    pending: int
    evicted: int
    misses: Mapping[MissReason, int]


REQUEST_GRACE_S = 10.0
"""More than any scheduler step takes: within it every block of a request was answered and looked at together."""


class _Entry:
    __slots__ = ("outdated", "reason", "since", "until", "verdict")

    def __init__(self, now: float, until: float) -> None:
        self.pend(now, until)

    def pend(self, now: float, until: float) -> None:
        """Wait for an answer until ``until``."""
        self.settle(Verdict.PENDING, now, until, MissReason.ABSENT)

    def serves(self, now: float, asked_since: float) -> bool:
        """Whether an expired answer is still good for a request that began to ask at ``asked_since``."""
        if self.verdict is Verdict.PENDING or self.reason is MissReason.BREAKER or self.since < asked_since:
            return False
        return now < self.until + REQUEST_GRACE_S

    def settle(self, verdict: Verdict, now: float, until: float, reason: MissReason) -> None:
        """Trust ``verdict``, which is of ``now``, until ``until``."""
        self.verdict = verdict
        self.since = now
        self.until = until
        self.reason = reason
        self.outdated = False


class PresenceCache:
    """Existence answers with a time to live, least recently looked up evicted first."""

    def __init__(
        self,
        hit_ttl: float = 30.0,
        miss_ttl: float = 30.0,
        lookup_timeout: float = 1.0,
        max_entries: int = 1_000_000,
        breaker_ttl: float = BREAKER_TTL_S,
    ) -> None:
        """Make an empty cache.

        Args:
            hit_ttl: seconds that a hit is trusted (``memkv_lookup_hit_ttl``).
            miss_ttl: seconds that a miss is trusted (``memkv_lookup_miss_ttl``).
            lookup_timeout: seconds after which an unanswered probe is a miss (``memkv_lookup_timeout_s``).
            max_entries: most prefixes known at once, those that wait for an answer included.
            breaker_ttl: most seconds that a miss for an unreachable server is trusted.

        Raises:
            ValueError: ``max_entries`` is below 1, or a time is negative.
        """
        if max_entries < 1 or min(hit_ttl, miss_ttl, lookup_timeout, breaker_ttl) < 0:
            raise ValueError("max_entries must be at least 1 and times not negative")
        self._hit_ttl = hit_ttl
        self._miss_ttl = miss_ttl
        self._lookup_timeout = lookup_timeout
        self._breaker_ttl = min(breaker_ttl, miss_ttl)
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._probes: dict[bytes, None] = {}
        self._answers: Counter[Verdict] = Counter()
        self._misses: Counter[MissReason] = Counter()
        self._evicted = 0
        self._forgotten_at = -math.inf

    def lookup(self, prefix: bytes, now: float, asked_since: float = math.inf) -> Verdict:
        """Answer one lookup, in constant time and without I/O.

        Args:
            prefix: opaque key prefix of a block (namespace, hash, group).
            now: monotonic seconds.
            asked_since: when the asking request's lookups began. An answer that came since then serves it for
                ``REQUEST_GRACE_S`` longer than the time to live: otherwise blocks whose answers come in different
                steps could expire in turn, and the request would wait for ever.

        Returns:
            ``PENDING`` for a prefix seen first or anew after its expiry, which is then queued for :meth:`take_probes`;
            it turns into a miss when no answer came within the lookup timeout.
        """
        entry = self._entries.get(prefix)
        if entry is None:
            entry = self._admit(prefix, now)
        else:
            self._entries.move_to_end(prefix)
            if self._is_forgotten(entry) or (now >= entry.until and not entry.serves(now, asked_since)):
                self._expire(prefix, entry, now)
        self._answers[entry.verdict] += 1
        if entry.verdict is Verdict.MISS:
            self._misses[entry.reason] += 1
        return entry.verdict

    def known(self, prefix: bytes, now: float) -> bool:
        """Whether a hit for ``prefix`` is trusted at ``now``; queues no probe and counts nothing."""
        entry = self._entries.get(prefix)
        if entry is None or entry.verdict is not Verdict.HIT or self._is_forgotten(entry):
            return False
        return now < entry.until

    def take_probes(self) -> list[bytes]:
        """Prefixes to ask the servers for, in order of lookup; each is given out once per question."""
        probes, self._probes = list(self._probes), {}
        return probes

    def answer(self, prefix: bytes, present: bool, now: float, reason: MissReason = MissReason.ABSENT) -> None:
        """Take a server's answer. A late one counts too; one for an evicted prefix is dropped.

        Args:
            prefix: what was asked.
            present: whether every shard exists.
            now: monotonic seconds.
            reason: why not, where ``present`` is false.
        """
        entry = self._entries.get(prefix)
        if entry is None:
            return
        if present:
            entry.settle(Verdict.HIT, now, now + self._hit_ttl, reason)
        elif entry.outdated:
            # The key was stored while the probe was under way: its 'absent' may be older than the store.
            self._forget(prefix)
        else:
            entry.settle(Verdict.MISS, now, now + self._miss_ttl, reason)

    def unreachable(self, prefixes: Iterable[bytes], now: float, reason: MissReason = MissReason.BREAKER) -> None:
        """Answer miss for prefixes whose server cannot be asked or did not answer, for a short time only."""
        for prefix in prefixes:
            entry = self._entries.get(prefix)
            if entry is not None:
                entry.settle(Verdict.MISS, now, now + self._breaker_ttl, reason)

    def stored(self, prefix: bytes) -> None:
        """Note that a store of this block ended: forget a negative answer. It never makes a hit.

        A probe that is under way is marked, so that its 'absent' is not kept; its 'present' is.
        """
        entry = self._entries.get(prefix)
        if entry is None:
            return
        if entry.verdict is Verdict.MISS:
            self._forget(prefix)
        elif entry.verdict is Verdict.PENDING and prefix not in self._probes:
            entry.outdated = True

    def drop_hit(self, prefix: bytes) -> None:
        """Forget a hit that could not be loaded; the next lookup asks again."""
        entry = self._entries.get(prefix)
        if entry is not None and entry.verdict is Verdict.HIT:
            self._forget(prefix)

    def forget_hits(self, now: float) -> None:
        """Trust no hit that was answered until ``now``: a server went away, and what it held may be gone.

        In constant time: each is asked for again when it is looked up. Misses and questions under way stay.
        """
        self._forgotten_at = now

    def _is_forgotten(self, entry: _Entry) -> bool:
        return entry.verdict is Verdict.HIT and entry.since <= self._forgotten_at

    def count_miss(self, reason: MissReason) -> None:
        """Count a miss that the caller answered by itself (``RETRIED``)."""
        self._answers[Verdict.MISS] += 1
        self._misses[reason] += 1

    def statistics(self) -> PresenceStats:
        """Counts so far."""
        hits, pending = self._answers[Verdict.HIT], self._answers[Verdict.PENDING]
        return PresenceStats(len(self._entries), len(self._probes), hits, pending, self._evicted, dict(self._misses))

    def _admit(self, prefix: bytes, now: float) -> _Entry:
        entry = self._entries[prefix] = _Entry(now, now + self._lookup_timeout)
        self._probes[prefix] = None
        if len(self._entries) > self._max_entries:
            self._forget(next(iter(self._entries)))
            self._evicted += 1
        return entry

    def _expire(self, prefix: bytes, entry: _Entry, now: float) -> None:
        if entry.verdict is Verdict.PENDING:
            entry.settle(Verdict.MISS, now, now + self._miss_ttl, MissReason.TIMEOUT)
        else:
            entry.pend(now, now + self._lookup_timeout)
            self._probes[prefix] = None

    def _forget(self, prefix: bytes) -> None:
        del self._entries[prefix]
        self._probes.pop(prefix, None)

    def __repr__(self) -> str:
        return f"PresenceCache({len(self._entries)} of {self._max_entries}, {len(self._probes)} to probe)"


class RequestGuard:
    """Which prefixes each request already tried to load. Bounded by the oldest requests being forgotten."""

    def __init__(self, max_entries: int = 1_000_000) -> None:
        """Remember at most ``max_entries`` (request, prefix) pairs.

        Raises:
            ValueError: ``max_entries`` is below 1.
        """
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        self._max_entries = max_entries
        self._requests: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        self._size = 0

    def loaded(self, req_id: str, prefixes: Iterable[bytes]) -> None:
        """Note that a load of these blocks is being prepared for the request."""
        fresh = dict.fromkeys(prefixes)
        if not fresh:
            return
        known = self._requests.setdefault(req_id, {})
        self._requests.move_to_end(req_id)
        self._size -= len(known)
        known.update(fresh)
        self._size += len(known)
        while self._size > self._max_entries:
            self._forget_oldest()

    def tried(self, req_id: str) -> tuple[bytes, ...]:
        """All blocks that the request tried to load."""
        return tuple(self._requests.get(req_id, ()))

    def seen(self, req_id: str, prefix: bytes) -> bool:
        """Whether the request tried to load this block before: a lookup then answers miss (``RETRIED``)."""
        return prefix in self._requests.get(req_id, ())

    def preempted(self, req_id: str) -> None:
        """vLLM took the request's blocks away: loading the same keys again is right, not a loop."""
        self.finished(req_id)

    def finished(self, req_id: str) -> None:
        """Forget the request; unknown ones are no error."""
        self._size -= len(self._requests.pop(req_id, ()))

    def _forget_oldest(self) -> None:
        req_id, known = next(iter(self._requests.items()))
        if len(self._requests) > 1:
            self.finished(req_id)
        else:
            del known[next(iter(known))]
            self._size -= 1

    def __len__(self) -> int:
        """Number of (request, prefix) pairs remembered."""
        return self._size

    def __repr__(self) -> str:
        return f"RequestGuard({len(self._requests)} requests, {self._size} of {self._max_entries} prefixes)"
