"""The scheduler side: vLLM's ``OffloadingManager`` on existence probes.

vLLM asks ``lookup`` for every block of every waiting request at every step, on the scheduler's thread. So every
answer comes out of a dictionary; what is not known is asked in the background, one batch per server and step, and
the request waits meanwhile (``RETRY``), at most ``memkv_lookup_timeout_s``. Nothing here does I/O (the bounded wait
of ``reset_cache`` is the exception), takes a lock, or lets an exception out: an error is a miss.

The manager believes no completion: a finished store may have been dropped, a finished load may have brought nothing
(workers can tell vLLM only "finished"). Presence comes from the servers alone; a block that one request was given
once and asks for again was lost on the way, and is a miss for that request from then on.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from memkv_vllm.engine.presence import PresenceCache, RequestGuard, Verdict
from memkv_vllm.integration import compat
from memkv_vllm.integration.compat import LookupResult, MemKVLoadStoreSpec, PrepareStoreOutput
from memkv_vllm.integration.metrics import ManagerMetrics
from memkv_vllm.keys import NamespaceManifest, block_prefix
from memkv_vllm.types import MissReason

logger = logging.getLogger("memkv.integration.manager")

RESET_TIMEOUT_S = 2.0
"""How long a cache reset waits for the servers, for all its namespaces together: it holds up the scheduler, and what
is not confirmed by then is left behind in a namespace that this engine no longer uses."""

MAX_LEFT_BEHIND = 4
"""Most namespaces of earlier resets that a reset tries again, in what remains of its ``RESET_TIMEOUT_S``."""

ERROR_LOG_INTERVAL_S = 60.0

SLOW_LOOKUP_S = 0.005
SLOW_LOOKUP_PAUSE_S = 0.001
"""A lookup usually takes 2 ms. Past 5 ms of waiting each scheduler step is 1 ms longer until the answer is there."""

F = TypeVar("F", bound=Callable[..., Any])

_ANSWERS = {
    Verdict.HIT: LookupResult.HIT,
    Verdict.MISS: LookupResult.MISS,
    Verdict.PENDING: LookupResult.RETRY,
}


class Answer(Protocol):
    """What a prober's ``poll`` yields: see :class:`memkv_vllm.engine.prober.ProbeAnswer`."""

    @property
    def prefix(self) -> bytes:
        """What was asked."""
        ...

    @property
    def present(self) -> bool | None:
        """Whether all shards exist; None when its server could not be asked."""
        ...

    @property
    def reason(self) -> MissReason | None:
        """Why not."""
        ...


class ProberLike(Protocol):
    """What the manager needs of :class:`memkv_vllm.engine.prober.Prober`."""

    def submit(self, prefixes: Sequence[bytes]) -> None:
        """Ask; never waits."""
        ...

    def poll(self) -> Sequence[Answer]:
        """Answers since the last call."""
        ...

    @property
    def servers_lost(self) -> int:
        """How often a server went away or came back as another run."""
        ...

    def reset_namespace(self, namespace: bytes, timeout_s: float) -> list[str]:
        """Drop a namespace everywhere; names of the servers that did not confirm."""
        ...

    def statistics(self) -> Any:
        """A snapshot of counters that never decrease."""
        ...

    def close(self) -> None:
        """Bounded in time."""
        ...


class PresenceSettings(NamedTuple):
    """How long existence answers are trusted; seconds."""

    hit_ttl: float = 30.0
    miss_ttl: float = 30.0
    lookup_timeout: float = 1.0


def _contained(answer: Callable[..., Any]) -> Callable[[F], F]:
    """Never raise into vLLM: log (once a minute per method), count, and return ``answer(self, *args)``."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapper(self: MemKVOffloadingManager, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._failed(method.__name__)
                return answer(self, *args)

        return wrapper  # type: ignore[return-value]

    return decorate


def _nothing(*_: object) -> None:
    return None


class MemKVOffloadingManager(compat.OffloadingManager):
    """See the module. All calls come from the scheduler's thread.

    Args:
        namespace: what block prefixes start with.
        prober: started; closed by ``shutdown``.
        settings: trust in answers.
        kv_events: whether ``take_events`` reports stored blocks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        namespace: NamespaceManifest,
        prober: ProberLike,
        settings: PresenceSettings | None = None,
        kv_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manifest = self._shared_manifest = namespace
        self._namespace = namespace.digest
        self._prober = prober
        self._settings = settings or PresenceSettings()
        self._clock = clock
        self._servers_lost = 0
        self._presence = self._new_presence()
        self._guard = RequestGuard()
        self._asked_since: dict[str, float] = {}
        """When each request that is being looked up first asked; gone with its load, preemption or end."""
        self._doubted: set[str] = set()
        self._metrics = ManagerMetrics()
        self._kv_events = kv_events
        self._events: list[Any] = []
        self._in_flight: dict[bytes, Counter[bytes]] = {}
        """Keys of stores that have not ended, by namespace, the oldest first; bounded by what vLLM has in flight."""
        self._left_behind: list[bytes] = []
        self._waiting = False
        self._waiting_since: float | None = None
        self._error_logged_at: dict[str, float] = {}

    # -- lookups

    @_contained(lambda *_: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY while the server's answer is on its way. Constant time."""
        now = self._clock()
        self._take_answers(now)
        prefix = self._prefix(key)
        if self._guard.seen(req_context.req_id, prefix):
            self._doubt(req_context.req_id)
            self._presence.count_miss(MissReason.RETRIED)
            return LookupResult.MISS
        asked_since = self._asked_since.setdefault(req_context.req_id, now)
        verdict = self._presence.lookup(prefix, now, asked_since)
        self._waiting = self._waiting or verdict is Verdict.PENDING
        return _ANSWERS[verdict]

    def _doubt(self, req_id: str) -> None:
        """The request asks again for a block that it was given: its load did not bring it.

        A second try could loop for ever. And as vLLM asks again only when the very first block was lost, the store
        may have lost the others too (it was restarted empty, say): their hits are forgotten, so that the next
        request asks the servers and stores what is missing.
        """
        if req_id in self._doubted:
            return
        self._doubted.add(req_id)
        for prefix in self._guard.tried(req_id):
            self._presence.drop_hit(prefix)

    def _forget_request(self, req_id: str) -> None:
        self._asked_since.pop(req_id, None)
        self._doubted.discard(req_id)

    def _take_answers(self, now: float) -> None:
        # Read before the answers: those of the time before a loss are then all taken, and forgotten with the rest.
        servers_lost = self._prober.servers_lost
        for answer in self._prober.poll():
            if answer.present is None:
                self._presence.unreachable((answer.prefix,), now, answer.reason or MissReason.BREAKER)
            else:
                self._presence.answer(answer.prefix, answer.present, now, answer.reason or MissReason.ABSENT)
        if servers_lost != self._servers_lost:
            self._servers_lost = servers_lost
            self._presence.forget_hits(now)

    def _prefix(self, key: bytes) -> bytes:
        block_hash, group = compat.split_offload_key(key)
        return block_prefix(self._namespace, block_hash, group)

    # -- loads

    @_contained(lambda self, keys, *_: MemKVLoadStoreSpec(self._namespace, list(keys)))
    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> MemKVLoadStoreSpec:
        """Name the blocks of a load, in the order of ``keys``, and remember that this request had them."""
        spec = MemKVLoadStoreSpec(self._namespace, list(keys))
        self._guard.loaded(req_context.req_id, [self._prefix(key) for key in spec.keys])
        self._forget_request(req_context.req_id)
        self._metrics.add("load_blocks", len(spec.keys))
        return spec

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Nothing to learn: vLLM is told "finished" whether or not the bytes came."""

    # -- stores

    @_contained(lambda self, *_: PrepareStoreOutput([], MemKVLoadStoreSpec(self._namespace, ()), []))
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Name the blocks worth storing: those offered, in that order, without known ones and repetitions."""
        now = self._clock()
        offered = list(dict.fromkeys(keys))
        wanted = [key for key in offered if not self._presence.known(self._prefix(key), now)]
        self._metrics.add("store_known_blocks", len(offered) - len(wanted))
        self._metrics.add("store_blocks", len(wanted))
        if wanted:
            self._in_flight.setdefault(self._namespace, Counter()).update(wanted)
        return PrepareStoreOutput(
            keys_to_store=wanted, store_spec=MemKVLoadStoreSpec(self._namespace, wanted), evicted_keys=[]
        )

    @_contained(_nothing)
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Forget negative answers for ``keys``; only a server's answer makes a hit of them."""
        for key in keys:
            self._store_ended(key)
            self._presence.stored(self._prefix(key))
        if self._kv_events and success:
            self._events.append(compat.make_event(list(keys), removed=False))

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Recency belongs to the servers: they see every get."""

    # -- requests and steps

    def on_new_request(self, req_context: Any) -> Any:
        """The default policy: each new block is offered once."""
        return compat.RequestOffloadingContext()

    @_contained(_nothing)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request; one never seen is no error (fault P043)."""
        self._guard.finished(req_context.req_id)
        self._forget_request(req_context.req_id)

    @_contained(_nothing)
    def on_schedule_end(self, context: Any) -> None:
        """Send the step's probes as one batch; preempted requests may load their blocks again."""
        for req_id in context.preempted_req_ids:
            self._guard.preempted(req_id)
            self._forget_request(req_id)
        self._take_answers(self._clock())
        probes = self._presence.take_probes()
        if probes:
            self._prober.submit(probes)
        self._give_way()

    def _give_way(self) -> None:
        """While a lookup is pending, let the prober's loop have the interpreter lock once per step.

        A scheduler with nothing to run spins, and each turn of the prober's loop would wait 5 ms for the lock
        (measured: 39 ms for a lookup instead of 2). On a host with fewer cores than runnable threads an offer is
        not enough, the prober does not get a core in time to take it: a lookup that takes unusually long gets a
        real pause.
        """
        if not self._waiting:
            self._waiting_since = None
            return
        self._waiting = False
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        time.sleep(0 if now - self._waiting_since < SLOW_LOOKUP_S else SLOW_LOOKUP_PAUSE_S)

    # -- resets

    def _store_ended(self, key: bytes) -> None:
        """Count a store off where it was offered first: a late one of the time before a reset is not one of now."""
        for namespace, keys in self._in_flight.items():
            if key in keys:
                keys[key] -= 1
                if not keys[key]:
                    del keys[key]
                if not keys:
                    del self._in_flight[namespace]
                return

    @_contained(_nothing)
    def reset_cache(self) -> None:
        """Make every value stored so far unreachable, on all servers; waits at most ``RESET_TIMEOUT_S``.

        Servers drop the namespace in constant time. Where that is not certain this engine moves to a fresh
        namespace instead: a server did not confirm, or stores of the time before the reset are still under way and
        may land after it. Such an engine shares with no other until it is restarted (with vLLM 0.33, until all jobs of
        the time before the reset have ended). What was left behind is reset again by the next reset, for the other
        engines' sake.
        """
        deadline = self._clock() + RESET_TIMEOUT_S
        unconfirmed = self._prober.reset_namespace(self._namespace, RESET_TIMEOUT_S)
        self._reset_left_behind(deadline)
        self._forget_all()
        self._metrics.add("reset_failures", len(unconfirmed))
        if unconfirmed:
            logger.error(
                "event=reset_unconfirmed servers=%s: they may still hold values from before the reset. This engine "
                "goes on in a namespace of its own and never reads them; other engines that share the store may. Reset "
                "again when the servers are up (namespace %s)",
                ",".join(unconfirmed),
                self._namespace.hex(),
            )
        if unconfirmed or self._namespace in self._in_flight:
            self._leave_behind(self._namespace)
            self._move_to_fresh_namespace()
        else:
            logger.info("event=cache_reset namespace=%s", self._namespace.hex()[:12])

    @_contained(_nothing)
    def on_reset_flushed(self) -> None:
        """All jobs of the time before the reset have ended (0.33+): where the servers agree, share again."""
        for namespace in self._left_behind:
            self._in_flight.pop(namespace, None)
        self._reset_left_behind(self._clock() + RESET_TIMEOUT_S)
        if not self._left_behind and self._manifest is not self._shared_manifest:
            self._forget_all()
            self._manifest = self._shared_manifest
            self._namespace = self._manifest.digest
            logger.info("event=shared_namespace namespace=%s", self._namespace.hex()[:12])

    def _leave_behind(self, namespace: bytes) -> None:
        self._left_behind.append(namespace)
        while len(self._left_behind) > MAX_LEFT_BEHIND:
            dropped = self._left_behind.pop(0)
            self._in_flight.pop(dropped, None)
            logger.error(
                "event=reset_given_up namespace=%s: too many resets that were not confirmed; this one is not tried "
                "again. This engine never reads it; other engines may until it is evicted",
                dropped.hex(),
            )

    def _reset_left_behind(self, deadline: float) -> None:
        """Reset them again, until ``deadline``. One with stores in flight stays: they may land after this reset."""
        for namespace in list(self._left_behind):
            remaining = deadline - self._clock()
            if remaining <= 0:
                return
            unconfirmed = self._prober.reset_namespace(namespace, remaining)
            if not unconfirmed and namespace not in self._in_flight:
                self._left_behind.remove(namespace)

    def _forget_all(self) -> None:
        self._collect_presence()
        self._presence = self._new_presence()
        self._guard = RequestGuard()
        self._events.clear()

    def _move_to_fresh_namespace(self) -> None:
        extra = tuple(item for item in self._manifest.extra if item[0] != "reset")
        self._manifest = dataclasses.replace(self._manifest, extra=(*extra, ("reset", secrets.token_hex(16))))
        self._namespace = self._manifest.digest
        logger.info(
            "event=fresh_namespace namespace=%s stores_in_flight=%d",
            self._namespace.hex()[:12],
            sum(keys.total() for keys in self._in_flight.values()),
        )

    @property
    def namespace(self) -> bytes:
        """The digest that new jobs carry."""
        return self._namespace

    # -- events, statistics, end

    def take_events(self) -> Iterable[Any]:
        """Blocks whose stores ended, where vLLM's KV events are on; a server may have refused some of them."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @_contained(_nothing)
    def get_stats(self) -> Any | None:
        """What changed since the last call, or None."""
        self._collect_presence()
        self._collect_prober()
        stats = compat.new_stats()
        return stats if self._metrics.fill(stats) else None

    def _new_presence(self) -> PresenceCache:
        settings = self._settings
        self._presence_base: dict[str, int] = {}
        return PresenceCache(settings.hit_ttl, settings.miss_ttl, settings.lookup_timeout)

    def _collect_presence(self) -> None:
        """Add what the cache counted since the last time; a fresh cache starts from zero."""
        stats = self._presence.statistics()
        counts = {("lookup_hits", ""): stats.hits, ("lookup_pending", ""): stats.pending}
        counts |= {("lookup_misses", reason.value): count for reason, count in stats.misses.items()}
        for (name, label), count in counts.items():
            key = name + label
            self._metrics.add(name, count - self._presence_base.get(key, 0), label)
            self._presence_base[key] = count
        self._metrics.set("known_blocks", stats.entries)

    def _collect_prober(self) -> None:
        stats = self._prober.statistics()
        self._metrics.observe_total("probes", stats.probes)
        self._metrics.observe_total("probes_unreachable", stats.unreachable)
        self._metrics.observe_total("namespace_mismatches", stats.namespace_mismatches)
        self._metrics.observe_total("duplicate_servers", stats.duplicate_servers)
        self._metrics.observe_total("servers_lost", stats.servers_lost)
        for transport, connects in stats.connects.items():
            self._metrics.observe_total("connects", connects, transport)
        self._metrics.set("servers", stats.servers)
        self._metrics.set("servers_ready", stats.servers_ready)

    @_contained(_nothing)
    def shutdown(self) -> None:
        """Close the prober, within its connect timeout."""
        self._prober.close()

    def _failed(self, method: str) -> None:
        self._metrics.add("manager_errors")
        now = self._clock()
        last = self._error_logged_at.get(method)
        if last is None or now - last >= ERROR_LOG_INTERVAL_S:
            self._error_logged_at[method] = now
            logger.exception("event=manager_error method=%s: answered as a miss; please report this", method)
