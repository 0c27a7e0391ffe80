"""Questions to a store, each over a connection of its own: for tests that look at servers in other processes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from memkv_vllm.config import ClientConfig, RailAddress
from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Exists, Stat
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Deadline

__all__ = ["Auditor"]

BATCH = 512


class Auditor:
    """Asks servers over a connection of its own.

    Args:
        config: a client's settings.
        transport: ``loopback`` or ``tcp``.
    """

    def __init__(self, config: ClientConfig, transport: str) -> None:
        self._transport = transport
        self._rails = {server.name: server.rails[0] for server in config.servers}
        self._credentials = Credentials(config.auth_key.get_secret_value(), config.auth_key_id)

    def statistics(self, server: str) -> dict[str, Any]:
        """What STAT says now."""
        return anyio.run(self._statistics, server)

    def risen(self, server: str, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that a lookup finds."""
        return anyio.run(self._risen, server, keys)

    async def _statistics(self, server: str) -> dict[str, Any]:
        async with self._connection(self._rails[server]) as connection:
            return await connection.request(Stat(), _soon(10))

    async def _risen(self, server: str, keys: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = []
        async with self._connection(self._rails[server]) as connection:
            for start in range(0, len(keys), BATCH):
                batch = keys[start : start + BATCH]
                present = await connection.request(Exists([key[:-2] for key in batch], 1), _soon(10))
                found += [key for key, there in zip(batch, present, strict=True) if there]
        return found

    @asynccontextmanager
    async def _connection(self, rail: RailAddress) -> AsyncIterator[ClientConnection]:
        transport = client_transport(self._transport)
        connection = await transport.connect(rail.host, rail.port, self._credentials, PeerKind.TOOL, _soon(10))
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_drive, connection)
            try:
                yield connection
            except Exception as error:
                failure = error  # raised outside, so that no task group wraps it
            await connection.aclose()
            tasks.cancel_scope.cancel()
        await transport.aclose()
        if failure is not None:
            raise failure


async def _drive(connection: ClientConnection) -> None:
    try:
        await connection.run()
    except MemkvError:
        return  # the request in flight says so


def _soon(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds)
