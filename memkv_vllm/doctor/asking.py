"""Asks one address of a server what it is, and whether its bytes come through. Every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from memkv_vllm.doctor.facts import ServerAnswer
from memkv_vllm.errors import AuthError, LicenseError, MemkvError, StoreError, VersionError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.connect import Connect
from memkv_vllm.protocol.messages import Stat
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, ClientTransport, Region
from memkv_vllm.transports.choosing import offered_in
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Deadline, MemoryKind

__all__ = ["Asking", "ask", "try_data_path"]

TRIAL_BYTES = 1 << 16
_ASK_NAME = "?"
"""A data path that no server has: the refusal lists those that there are."""


@dataclass(frozen=True)
class Asking:
    """How servers are asked."""

    transport: str
    """``tcp`` or ``loopback``: what control messages go over."""
    credentials: Credentials
    timeout_s: float
    """For each address."""
    tls: bool = False
    tls_ca: Path | None = None
    tls_server_name: str | None = None

    def open(self, host: str) -> ClientTransport:
        """The transport for one host, which its certificate must name.

        Raises:
            ConfigError: ``tls_ca`` cannot be used.
            EnvironmentFault: this host has no such transport.
        """
        if self.transport != "tcp":
            return client_transport(self.transport)
        return client_transport(
            "tcp",
            tls=self.tls,
            tls_ca=self.tls_ca,
            tls_server_name=self.tls_server_name or (host if self.tls else None),
        )


async def ask(answer: ServerAnswer, host: str, port: int, asking: Asking) -> ServerAnswer:
    """``answer``, whose ``ip`` is known, with what came of a session.

    Args:
        answer: to be filled in.
        host: as it stands in the settings.
        port: of the server.
        asking: credentials and deadline.
    """
    deadline = Deadline(time.monotonic() + asking.timeout_s)
    transport: ClientTransport | None = None
    try:
        transport = asking.open(host)
        connection = await transport.connect(answer.ip, port, asking.credentials, PeerKind.TOOL, deadline)
    except MemkvError as error:
        if transport is not None:
            await transport.aclose()
        return replace(answer, problem=str(error), fix=_fix(error))
    try:
        return await _converse(answer, connection, deadline)
    finally:
        with anyio.CancelScope(shield=True):
            await connection.aclose()
            await transport.aclose()


def _fix(error: MemkvError) -> str:
    if isinstance(error, LicenseError):
        return "give the client a license that this server accepts: license (MEMKV_LICENSE)"
    if isinstance(error, AuthError):
        return "use the server's key here: auth_key_file (MEMKV_AUTH_KEY_FILE) and auth_key_id"
    if isinstance(error, VersionError):
        return "bring both to releases that share a protocol version"
    return (
        "is it running (memkv start), does it listen there (network.address in its yaml: 127.0.0.1 is for its own host "
        "only), does a firewall let TCP to it through, do both or neither use tls?"
    )


async def _converse(answer: ServerAnswer, connection: ClientConnection, deadline: Deadline) -> ServerAnswer:
    answer = replace(answer, server_id=connection.established.server.server_id.hex())
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            try:
                await connection.run()
            except MemkvError:
                return  # the requests in flight say it

        tasks.start_soon(run)
        try:
            began, wall = time.monotonic(), time.time()
            seen = await connection.request(Stat(), deadline)
            half_s = (time.monotonic() - began) / 2
            answer = _of_statistics(answer, seen.get("server"), wall + half_s, half_s)
            answer = replace(answer, data_paths=await _data_paths(connection, deadline))
        except MemkvError as error:
            answer = replace(answer, problem=f"it accepted the key, then: {error}", fix="see the server's log")
        await connection.aclose()
        tasks.cancel_scope.cancel()
    return answer


def _of_statistics(answer: ServerAnswer, server: object, now_s: float, error_s: float) -> ServerAnswer:
    """Another release may say less, or something else."""
    said: dict[str, Any] = server if isinstance(server, dict) else {}
    version, time_s = said.get("version"), said.get("time_s")
    return replace(
        answer,
        version=version if isinstance(version, str) else "",
        skew_s=time_s - now_s if isinstance(time_s, int | float) else None,
        skew_error_s=error_s,
    )


async def _data_paths(connection: ClientConnection, deadline: Deadline) -> tuple[str, ...] | None:
    try:
        await connection.request(Connect(_ASK_NAME, b""), deadline)
    except StoreError as error:
        return offered_in(str(error))
    return None


async def try_data_path(
    answer: ServerAnswer, host: str, port: int, asking: Asking, open_verbs: Callable[[str], ClientTransport]
) -> ServerAnswer:
    """Register a page over verbs, which the server answers after it has read it over every queue pair.

    Args:
        answer: of a server that offers verbs.
        host: as it stands in the settings.
        port: of the server.
        asking: credentials and deadline.
        open_verbs: makes the transport, with the name that the server's certificate must have; may raise.
    """
    deadline = Deadline(time.monotonic() + asking.timeout_s)
    memory = HostMemory.create("doctor", TRIAL_BYTES)
    transport: ClientTransport | None = None
    try:
        transport = open_verbs(host)
        connection = await transport.connect(answer.ip, port, asking.credentials, PeerKind.ENGINE, deadline)
    except MemkvError as error:
        memory.close()
        if transport is not None:
            await transport.aclose()
        return replace(answer, data_path_problem=str(error))
    problem = ""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            try:
                await connection.run()
            except MemkvError:
                return

        tasks.start_soon(run)
        try:
            region = Region(1, MemoryKind.HOST, TRIAL_BYTES, memory)
            await connection.register(region, deadline)
        except MemkvError as error:
            problem = str(error)
        tasks.cancel_scope.cancel()
    try:
        with anyio.CancelScope(shield=True):
            await connection.fence(Deadline(time.monotonic() + asking.timeout_s))
            await transport.aclose()
        memory.close()
    except MemkvError as error:
        # The page stays mapped: the NIC may still know it.
        problem = problem or str(error)
    return replace(answer, data_path_problem=problem)
