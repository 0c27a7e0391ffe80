"""What the store does with each control message: one method per type, found in a table; transport-neutral.

Rights and limits are checked here, before anything is touched. Requests that move values go on in
:mod:`memkv_vllm.store.transfers`. REGISTER, FENCE and BYE concern a connection as a
whole, so its driver answers them (:mod:`memkv_vllm.transports.serving`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from memkv_vllm.config import LimitsConfig, Right
from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.keys import NAMESPACE_BYTES
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import (
    Admin,
    Delete,
    Exists,
    Get,
    Manifest,
    ManifestEntry,
    Put,
    ReportBad,
)
from memkv_vllm.store.manifests import ManifestDirectory
from memkv_vllm.store.sessions import StoreSession
from memkv_vllm.store.table import Table
from memkv_vllm.store.transfers import Transfers
from memkv_vllm.types import Status

__all__ = ["EXISTS_LOOKUPS_PER_KEY", "Requests"]

logger = logging.getLogger("memkv.store")

EXISTS_LOOKUPS_PER_KEY = 64
"""An EXISTS may ask for this many times ``limits.max_batch_keys`` shards: it holds the loop for milliseconds."""

_Method = Callable[[StoreSession, memoryview], Awaitable[bytes]]


class Requests:
    """The methods of all requests.

    Args:
        table: index of the arena.
        manifests: directory of namespaces.
        transfers: puts and gets.
        limits: bounds of what a request may ask for.
        counters: counts by reason are added here.
        statistics: makes the object that STAT shows.
        on_reset: called after a reset, which leaves something to sweep.
    """

    def __init__(
        self,
        table: Table,
        manifests: ManifestDirectory,
        transfers: Transfers,
        limits: LimitsConfig,
        counters: Counter[str],
        *,
        statistics: Callable[[], dict[str, Any]],
        on_reset: Callable[[], None],
    ) -> None:
        self._table = table
        self._manifests = manifests
        self._transfers = transfers
        self._limits = limits
        self._counters = counters
        self._statistics = statistics
        self._on_reset = on_reset
        self.methods: dict[int, _Method] = {
            MessageType.MANIFEST: self._manifest,
            MessageType.PUT: self._put,
            MessageType.GET: self._get,
            MessageType.EXISTS: self._exists,
            MessageType.REPORT_BAD: self._report_bad,
            MessageType.DELETE: self._delete,
            MessageType.STAT: self._stat,
            MessageType.PING: self._ping,
            MessageType.ADMIN: self._admin,
        }
        """Each takes a session and a body, and returns the reply's body. A type not listed is no request."""

    # Messages

    async def _put(self, session: StoreSession, body: memoryview) -> bytes:
        request = Put.unpack(body)
        self._check_batch("PUT", len(request.items))
        return bytes(await self._transfers.put(session, request))

    async def _get(self, session: StoreSession, body: memoryview) -> bytes:
        request = Get.unpack(body)
        self._check_batch("GET", len(request.items))
        return Get.pack_reply(await self._transfers.get(session, request))

    async def _exists(self, session: StoreSession, body: memoryview) -> bytes:
        request = Exists.unpack(body)
        self._check_batch("EXISTS", len(request.prefixes))
        lookups, most = len(request.prefixes) * request.shards, self._limits.max_batch_keys * EXISTS_LOOKUPS_PER_KEY
        if lookups > most or lookups // 8 + len(request.prefixes) > self._limits.max_frame_bytes:
            self._counters["refused_batch"] += 1
            raise StoreError(f"an EXISTS for {lookups} shards; this server answers {most} (64 x limits.max_batch_keys)")
        if not session.access.prefix and Right.READ in session.access.rights:
            return self._table.exists(list(request.prefixes), request.shards)
        nothing = bytes(request.row_bytes)
        rows = []
        for prefix in request.prefixes:
            allowed = session.access.may(Right.READ, prefix)
            self._counters["exists_denied"] += not allowed
            rows.append(self._table.exists([prefix], request.shards) if allowed else nothing)
        return b"".join(rows)

    async def _report_bad(self, session: StoreSession, body: memoryview) -> bytes:
        request = ReportBad.unpack(body)
        self._check_batch("REPORT_BAD", len(request.items))
        answer = bytearray()
        for key, generation in request.items:
            allowed = session.access.may(Right.WRITE, key)
            self._counters["report_bad_denied"] += not allowed
            answer.append(allowed and self._table.report_bad(key, generation))
        if any(answer):
            logger.warning("values.reported_bad peer=%s count=%d", session.peer.label, sum(answer))
        return bytes(answer)

    async def _delete(self, session: StoreSession, body: memoryview) -> bytes:
        request = Delete.unpack(body)
        self._check_batch("DELETE", len(request.keys))
        statuses = []
        for key in request.keys:
            if not session.access.may(Right.DELETE, key):
                statuses.append(Status.DENIED)
                self._counters["delete_denied"] += 1
            else:
                statuses.append(Status.OK if self._table.delete(key) else Status.ABSENT)
        return bytes(statuses)

    async def _manifest(self, session: StoreSession, body: memoryview) -> bytes:
        request = Manifest.unpack(body)
        if session.access.may_namespace(Right.WRITE, request.digest):
            siblings = self._manifests.add(request.family, request.digest, request.manifest)
        elif session.access.may_namespace(Right.READ, request.digest):
            siblings = self._manifests.siblings(request.family, request.digest)
        else:
            raise self._denied("MANIFEST", "read or write")
        return Manifest.pack_reply([ManifestEntry(*sibling) for sibling in siblings])

    async def _stat(self, session: StoreSession, body: memoryview) -> bytes:
        _expect_empty(body)
        return json.dumps(self._statistics(), separators=(",", ":")).encode()

    async def _ping(self, session: StoreSession, body: memoryview) -> bytes:
        _expect_empty(body)
        return b""

    async def _admin(self, session: StoreSession, body: memoryview) -> bytes:
        command = Admin.unpack(body).command
        if command.get("command") != "reset":
            raise StoreError(f"unknown command {str(command.get('command'))[:64]!r}; this server knows: reset")
        try:
            namespace = bytes.fromhex(str(command.get("namespace")))
        except ValueError:
            namespace = b""
        if len(namespace) != NAMESPACE_BYTES:
            raise StoreError("reset: namespace must be 64 hexadecimal characters")
        if not session.access.may_namespace(Right.ADMIN, namespace):
            raise self._denied("ADMIN", "admin")
        hidden = self._table.reset_namespace(namespace)
        self._on_reset()
        logger.warning("namespace.reset peer=%s namespace=%s values=%d", session.peer.label, namespace.hex(), hidden)
        answer = {"command": "reset", "namespace": namespace.hex(), "hidden": hidden}
        return json.dumps(answer, separators=(",", ":")).encode()

    # Small things

    def _check_batch(self, name: str, count: int) -> None:
        if count > self._limits.max_batch_keys:
            self._counters["refused_batch"] += 1
            raise StoreError(f"a {name} of {count} keys; limits.max_batch_keys = {self._limits.max_batch_keys}")

    def _denied(self, what: str, right: str) -> StoreError:
        self._counters["denied"] += 1
        return StoreError(f"{what} is denied: this key id needs the right: {right}")


def _expect_empty(body: memoryview) -> None:
    if len(body):
        raise RemoteProtocolError("length", f"a body of {len(body)} bytes where none was expected")
