"""The scheduler side's client: existence probes, namespace manifests, resets. Control only.

It has a loop thread of its own and registers no memory. The manager hands over a scheduler step's probes with
``submit`` and drains answers with ``poll``; neither waits. The probes of a step travel as one batch per server.
"""

from __future__ import annotations

import json
import logging
import queue
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from memkv_vllm.engine.client import ClusterClient, ClusterSettings
from memkv_vllm.engine.link import ServerLink
from memkv_vllm.engine.placement import Placement
from memkv_vllm.engine.portal import LoopThread
from memkv_vllm.errors import EngineStopped, MemkvError, NotSent, RequestTimeout, StoreError
from memkv_vllm.keys import NamespaceManifest, impossible_sharing
from memkv_vllm.protocol.messages import Admin, Exists, Manifest, ManifestEntry
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection
from memkv_vllm.types import Deadline, MissReason

logger = logging.getLogger("memkv.engine")

PROBE_BATCH = 1024
"""Most blocks per EXISTS message: 70 KiB of keys."""

LOOKUPS_PER_KEY = 64
"""An EXISTS may ask for so many shards per key that the server takes in a batch."""


class ProbeAnswer(NamedTuple):
    """``present`` is None when the block's server could not be asked; then ``reason`` says why."""

    prefix: bytes
    present: bool | None
    reason: MissReason | None


class ProberStatistics(NamedTuple):
    """A snapshot; counters never decrease."""

    servers_ready: int
    servers: int
    probes: int
    batches: int
    unreachable: int
    namespace_mismatches: int
    """Namespaces found that were meant to share with ours and cannot."""
    duplicate_servers: int
    """Entries of ``servers`` found to reach a server that another entry reaches already."""
    servers_lost: int
    """Times that a server went away, or was found to be another run."""
    connects: Mapping[str, int]
    """Connections that became ready, by the transport that was chosen."""


class Prober:
    """Probes which blocks all ``shards`` ranks have stored.

    Args:
        cluster: servers, credentials, timeouts.
        shards: number of ranks; a block is present only when all their shards are.
        namespace: announced on every first connection to a server and compared with its siblings.
        name: for the thread and logs.
        probe_timeout_s: deadline of one probe batch.
    """

    def __init__(
        self,
        *,
        cluster: ClusterSettings,
        shards: int,
        namespace: NamespaceManifest,
        name: str,
        probe_timeout_s: float = 1.0,
    ) -> None:
        self._cluster = cluster
        self._shards = shards
        self._namespace = namespace
        self._probe_timeout_s = probe_timeout_s
        self._answers: queue.SimpleQueue[ProbeAnswer] = queue.SimpleQueue()
        self._thread = LoopThread(f"memkv-prober-{name}", self._main)
        self._client: ClusterClient | None = None
        self._tasks: TaskGroup | None = None
        self._counts: Counter[str] = Counter()
        self._warned: set[bytes] = set()
        self._greeted: dict[str, bytes] = {}
        self._boots: dict[str, bytes] = {}
        self._placement = Placement(server.name for server in cluster.servers)
        self._down = frozenset(server.name for server in cluster.servers)
        """Servers without a connection; replaced by the loop, read by the caller."""
        self._counts_of_caller: Counter[str] = Counter()
        """What the caller's thread counts: a counter has one writer."""
        self._server_ids: dict[str, bytes] = {}

    def start(self) -> None:
        """Start the loop thread. Returns at once; servers are connected in the background."""
        self._thread.start()

    def settle(self, limit_s: float) -> None:
        """Wait until every server was tried once, ``limit_s`` seconds at most, so that the first lookups find those up.

        Never raises: a server that is not up is connected later, in the background.
        """
        try:
            self._thread.call(self._try_all, limit_s, timeout_s=limit_s + 1.0)
        except (EngineStopped, TimeoutError) as error:
            logger.info("event=prober_not_settled thread=%s reason=%r", self._thread.name, str(error))

    def submit(self, prefixes: Sequence[bytes]) -> None:
        """Ask for these blocks; never waits. Every prefix gets exactly one answer.

        Those of a server that is down are answered here and now: on a busy host the way to the loop and back alone
        may take milliseconds, and its answer is known.
        """
        if down := self._down:
            owned = [(prefix, self._placement.owner(prefix) in down) for prefix in prefixes]
            lost = [prefix for prefix, is_lost in owned if is_lost]
            self._counts_of_caller["probes"] += len(lost)
            self._answer_unreachable(lost, self._counts_of_caller)
            prefixes = [prefix for prefix, is_lost in owned if not is_lost]
        if prefixes and not self._thread.post(self._probe_all, list(prefixes)):
            self._answer_unreachable(prefixes, self._counts_of_caller)

    def poll(self) -> list[ProbeAnswer]:
        """Answers that arrived since the last call; O(1) when there are none."""
        answers: list[ProbeAnswer] = []
        while not self._answers.empty():
            answers.append(self._answers.get_nowait())
        return answers

    @property
    def servers_lost(self) -> int:
        """How often a server went away, or was found to be another run: what it was known to hold may be gone.

        Another run is counted before its first answer. Never decreases; any thread may read it.
        """
        return self._counts["servers_lost"]

    def reset_namespace(self, namespace: bytes, timeout_s: float) -> list[str]:
        """Have every server drop a namespace; returns the names of those that did not confirm in time."""
        try:
            return self._thread.call(self._reset, namespace, timeout_s, timeout_s=timeout_s + 1.0)
        except (EngineStopped, TimeoutError):
            return [server.name for server in self._cluster.servers]

    def statistics(self) -> ProberStatistics:
        """A snapshot."""
        client = self._client
        return ProberStatistics(
            servers_ready=client.num_ready if client is not None else 0,
            servers=len(self._cluster.servers),
            probes=self._counts["probes"] + self._counts_of_caller["probes"],
            batches=self._counts["batches"],
            unreachable=self._counts["unreachable"] + self._counts_of_caller["unreachable"],
            namespace_mismatches=self._counts["namespace_mismatches"],
            duplicate_servers=self._counts["duplicate_servers"],
            servers_lost=self._counts["servers_lost"],
            connects=client.connects if client is not None else {},
        )

    def close(self) -> None:
        """Stop the loop thread, within the connect timeout."""
        if not self._thread.stop(self._cluster.connect_timeout_s + 1.0):
            logger.warning("event=prober_slow_stop thread=%s", self._thread.name)

    # -- on the loop

    async def _main(self, _: LoopThread) -> None:
        self._client = ClusterClient(
            self._cluster,
            self._cluster.transports(PeerKind.MANAGER),
            PeerKind.MANAGER,
            greet=self._greet,
            on_change=self._changed,
        )
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                await self._client.run()
            finally:
                self._tasks = None

    async def _try_all(self, limit_s: float) -> None:
        if self._client is not None:
            await self._client.first_problems(limit_s)

    def _changed(self) -> None:
        assert self._client is not None
        down = frozenset(name for name, link in self._client.links.items() if not link.connected)
        self._counts["servers_lost"] += len(down - self._down)
        self._down = down

    def _probe_all(self, prefixes: list[bytes]) -> None:
        if self._client is None or self._tasks is None:
            self._unreachable(prefixes)
            return
        self._counts["probes"] += len(prefixes)
        for link, indices in self._client.split(prefixes).items():
            share = [prefixes[index] for index in indices]
            if not link.available(time.monotonic()):
                self._unreachable(share)
                continue
            most = min(PROBE_BATCH, link.max_batch_keys)
            size = max(1, min(most, most * LOOKUPS_PER_KEY // self._shards))
            for start in range(0, len(share), size):
                self._tasks.start_soon(self._probe, link, share[start : start + size])

    async def _probe(self, link: ServerLink, batch: list[bytes]) -> None:
        self._counts["batches"] += 1
        answered, reason = False, MissReason.BREAKER
        try:
            deadline = Deadline(time.monotonic() + self._probe_timeout_s)
            present = await link.request(Exists(batch, self._shards), deadline)
            for prefix, found in zip(batch, present, strict=True):
                self._answers.put(ProbeAnswer(prefix, found, None if found else MissReason.ABSENT))
            answered = True
        except MemkvError as error:
            logger.debug("event=probe_failed server=%s blocks=%d reason=%r", link.name, len(batch), str(error))
            if isinstance(error, RequestTimeout | NotSent):
                reason = MissReason.TIMEOUT
        finally:
            if not answered:
                self._unreachable(batch, reason)

    def _unreachable(self, prefixes: Sequence[bytes], reason: MissReason = MissReason.BREAKER) -> None:
        self._answer_unreachable(prefixes, self._counts, reason)

    def _answer_unreachable(
        self, prefixes: Sequence[bytes], counts: Counter[str], reason: MissReason = MissReason.BREAKER
    ) -> None:
        counts["unreachable"] += len(prefixes)
        for prefix in prefixes:
            self._answers.put(ProbeAnswer(prefix, None, reason))

    async def _reset(self, namespace: bytes, timeout_s: float) -> list[str]:
        client = self._client
        failed: list[str] = []
        if client is None:
            return [server.name for server in self._cluster.servers]

        async def one(link: ServerLink) -> None:
            command = Admin({"command": "reset", "namespace": namespace.hex()})
            try:
                await link.request(command, Deadline(time.monotonic() + timeout_s))
            except MemkvError as error:
                logger.error("event=reset_failed server=%s reason=%r", link.name, str(error))
                failed.append(link.name)

        async with anyio.create_task_group() as tasks:
            for link in client.links.values():
                tasks.start_soon(one, link)
        return sorted(failed)

    async def _greet(self, link: ServerLink, connection: ClientConnection) -> None:
        """Once per run of a server: put our manifest into its directory and look at the siblings."""
        self._look_for_duplicates(link, connection.established.server.server_id)
        boot_id = connection.established.server.boot_id
        if self._boots.setdefault(link.name, boot_id) != boot_id:
            self._boots[link.name] = boot_id
            self._counts["servers_lost"] += 1
        if self._greeted.get(link.name) == boot_id:
            return
        ours = self._namespace
        announcement = Manifest(ours.family, ours.digest, ours.to_json())
        deadline = Deadline(time.monotonic() + self._cluster.connect_timeout_s)
        siblings: list[ManifestEntry] = []
        try:
            siblings = await connection.request(announcement, deadline)
        except StoreError as error:
            # Its directory is full, or our key may not: lookups work without it.
            logger.warning(
                "event=manifest_refused server=%s reason=%r: namespaces there that cannot share with ours stay unseen",
                link.name,
                str(error),
            )
        self._greeted[link.name] = boot_id
        for sibling in siblings:
            self._compare(link, sibling)

    def _look_for_duplicates(self, link: ServerLink, server_id: bytes) -> None:
        """Say so when two entries of ``servers`` reach one server: once per entry and server."""
        if self._server_ids.get(link.name) == server_id:
            return
        self._server_ids[link.name] = server_id
        same = [server for server in self._cluster.servers if self._server_ids.get(server.name) == server_id]
        if len(same) < 2:
            return
        self._counts["duplicate_servers"] += 1
        # JSON is yaml, and quotes what needs quotes.
        rails = list(dict.fromkeys(str(rail) for server in same for rail in server.rails))
        logger.error(
            "event=duplicate_server entries=%s server_id=%s: these entries of servers are one server, which so gets "
            "a double share of the blocks; write it as one entry with rails, the same on every client: {name: %s, "
            "rails: %s}",
            ",".join(server.name for server in same),
            server_id.hex(),
            json.dumps(same[0].name),
            json.dumps(rails),
        )

    def _compare(self, link: ServerLink, sibling: ManifestEntry) -> None:
        """Warn once per namespace that was meant to share with ours and cannot."""
        if sibling.digest in self._warned:
            return
        self._warned.add(sibling.digest)
        try:
            differing = self._namespace.differing_fields(sibling.manifest)
        except (ValueError, RecursionError) as error:
            logger.warning("event=bad_manifest server=%s reason=%r", link.name, str(error))
            return
        if not impossible_sharing(differing):
            logger.info(
                "event=other_namespace server=%s differs_in=%s: side by side, nothing shared",
                link.name,
                ",".join(differing),
            )
            return
        self._counts["namespace_mismatches"] += 1
        logger.warning(
            "event=namespace_mismatch server=%s differs_in=%s: another engine stored the same model here under keys "
            "that this one can never find. Start every engine with one PYTHONHASHSEED and one "
            "--prefix-caching-hash-algo (sha256), then restart",
            link.name,
            ",".join(differing),
        )
