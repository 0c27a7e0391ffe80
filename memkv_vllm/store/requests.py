"""What the store does with each control message: one method per type, found in a table; transport-neutral.

Rights and limits are checked here, before anything is touched. Requests that move values go on in
:mod:`memkv_vllm.store.transfers`. REGISTER, FENCE and BYE concern a connection as a
whole, so its driver answers them (:mod:`memkv_vllm.transports.serving`).
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from memkv_vllm import __version__
from memkv_vllm.config import LimitsConfig, Right
from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.protocol.columns import GetColumns, PutColumns
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import (
    Admin,
    Delete,
    Exists,
    Manifest,
    ManifestEntry,
    ReportBad,
)
from memkv_vllm.store.commands import AdminCommands
from memkv_vllm.store.maintenance import Maintenance
from memkv_vllm.store.manifests import ManifestDirectory
from memkv_vllm.store.sessions import StoreSession
from memkv_vllm.store.table import Table
from memkv_vllm.store.transfers import Transfers
from memkv_vllm.types import Status

__all__ = ["EXISTS_LOOKUPS_PER_KEY", "Requests"]

logger = logging.getLogger("memkv.store")

EXISTS_LOOKUPS_PER_KEY = 64
"""An EXISTS may ask for this many times ``limits.max_batch_keys`` shards: it holds the loop for milliseconds."""

_Method = Callable[[StoreSession, memoryview], Awaitable[bytes | None]]
_MethodAtOnce = Callable[[StoreSession, memoryview], bytes]


class Requests:
    """The methods of all requests.

    Args:
        table: index of the arena.
        manifests: directory of namespaces.
        transfers: puts and gets.
        maintenance: the operator's commands.
        limits: bounds of what a request may ask for.
        counters: counts by reason are added here.
        statistics: makes the object that STAT shows.
        clock: seconds; the one that the table's other callers use.
    """

    def __init__(
        self,
        table: Table,
        manifests: ManifestDirectory,
        transfers: Transfers,
        maintenance: Maintenance,
        limits: LimitsConfig,
        counters: Counter[str],
        *,
        statistics: Callable[[], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._manifests = manifests
        self._transfers = transfers
        self._commands = AdminCommands(maintenance, counters)
        self._limits = limits
        self._max_lookups = limits.max_batch_keys * EXISTS_LOOKUPS_PER_KEY
        self._counters = counters
        self._statistics = statistics
        self._clock = clock
        self.methods: dict[int, _Method] = {
            MessageType.MANIFEST: self._manifest,
            MessageType.PUT: self._put,
            MessageType.GET: self._get,
            MessageType.STAT: self._stat,
            MessageType.ADMIN: self._admin,
        }
        """Each takes a session and a body, and returns the reply's body, or None where that has been sent."""

        self.at_once: dict[int, _MethodAtOnce] = {
            MessageType.EXISTS: self._exists,
            MessageType.REPORT_BAD: self._report_bad,
            MessageType.DELETE: self._delete,
            MessageType.PING: self._ping,
        }
        """Likewise, of those that need no waiting. A type in neither table is no request."""

        if maintenance.keep_removals is not None:
            for type in (MessageType.REPORT_BAD, MessageType.DELETE):
                self.methods[type] = _kept(self.at_once.pop(type), maintenance.keep_removals)

    # Messages

    async def _put(self, session: StoreSession, body: memoryview) -> bytes:
        request = PutColumns.unpack(body)
        self._check_batch("PUT", len(request.keys))
        return await self._transfers.put(session, request)

    async def _get(self, session: StoreSession, body: memoryview) -> bytes | None:
        request = GetColumns.unpack(body)
        self._check_batch("GET", len(request.keys))
        return await self._transfers.get(session, request)

    def _exists(self, session: StoreSession, body: memoryview) -> bytes:
        request = Exists.unpack(body)
        prefixes, shards = request.prefixes, request.shards
        self._check_batch("EXISTS", len(prefixes))
        lookups, most = len(prefixes) * shards, self._max_lookups
        if lookups > most or lookups // 8 + len(prefixes) > self._limits.max_frame_bytes:
            self._counters["refused_batch"] += 1
            raise StoreError(f"an EXISTS for {lookups} shards; this server answers {most} (64 x limits.max_batch_keys)")
        rights, within = session.access
        if Right.READ in rights and (not within or all(prefix.startswith(within) for prefix in prefixes)):
            return self._table.exists(prefixes, shards, self._clock())
        # Not one lookup for what is not allowed: its rows are as those of a value that is not there.
        allowed = [prefix for prefix in prefixes if session.access.may(Right.READ, prefix)]
        self._counters["exists_denied"] += len(prefixes) - len(allowed)
        found, width = self._table.exists(allowed, shards, self._clock()), request.row_bytes
        rows = iter([found[at : at + width] for at in range(0, len(found), width)])
        nothing = bytes(width)
        return b"".join([next(rows) if session.access.may(Right.READ, prefix) else nothing for prefix in prefixes])

    def _report_bad(self, session: StoreSession, body: memoryview) -> bytes:
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

    def _delete(self, session: StoreSession, body: memoryview) -> bytes:
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
            siblings = self._manifests.add(request.family, request.digest, request.manifest, self._clock())
        elif session.access.may_namespace(Right.READ, request.digest):
            siblings = self._manifests.siblings(request.family, request.digest)
        else:
            raise self._denied("MANIFEST", "read or write")
        # A family may hold namespaces of tenants that this key has no right to know of.
        access = session.access
        shown = [
            ManifestEntry(digest, manifest)
            for digest, manifest in siblings
            if access.may_namespace(Right.READ, digest) or access.may_namespace(Right.WRITE, digest)
        ]
        self._counters["manifests_hidden"] += len(siblings) - len(shown)
        return Manifest.pack_reply(shown)

    async def _stat(self, session: StoreSession, body: memoryview) -> bytes:
        _expect_empty(body)
        shown = self._statistics()
        # Who runs servers and clients of two releases, or on two clocks, should see it from here.
        shown["server"] = {**shown["server"], "version": __version__, "time_s": round(time.time(), 3)}
        if not session.access.sees_everything:
            # The rest tells how much others store and move. Who it is, and what it does itself, everybody may see.
            key_id, server = session.peer.established.key_id, shown["server"]
            shown = {
                "server": {name: server[name] for name in ("server_id", "boot_id", "uptime_s", "version", "time_s")},
                "sessions": [row for row in shown["sessions"] if row["key_id"] == key_id],
            }
        return json.dumps(shown, separators=(",", ":")).encode()

    def _ping(self, session: StoreSession, body: memoryview) -> bytes:
        _expect_empty(body)
        return b""

    async def _admin(self, session: StoreSession, body: memoryview) -> bytes:
        if Right.ADMIN not in session.access.rights:
            raise self._denied("ADMIN", "admin")
        return await self._commands.run(session, Admin.unpack(body).command)

    # Small things

    def _check_batch(self, name: str, count: int) -> None:
        if count > self._limits.max_batch_keys:
            self._counters["refused_batch"] += 1
            raise StoreError(f"a {name} of {count} keys; limits.max_batch_keys = {self._limits.max_batch_keys}")

    def _denied(self, what: str, right: str) -> StoreError:
        self._counters["denied"] += 1
        return StoreError(f"{what} is denied: this key id needs the right: {right}")


def _kept(method: _MethodAtOnce, keep_removals: Callable[[], Awaitable[None]]) -> _Method:
    """A method that is answered only when a crash cannot undo what it removed."""

    async def kept(session: StoreSession, body: memoryview) -> bytes:
        answer = method(session, body)
        await keep_removals()
        return answer

    return kept


def _expect_empty(body: memoryview) -> None:
    if len(body):
        raise RemoteProtocolError("length", f"a body of {len(body)} bytes where none was expected")
