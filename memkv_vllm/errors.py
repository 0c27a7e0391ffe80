"""Every exception of this package, by what a caller can do about it.

::

    MemkvError
    |-- ConfigError               settings; all problems of a file in one message; exit code 2
    |-- EnvironmentFault          this host lacks something (NIC, memlock, memory); names the fix
    |   `-- RailError             no port, GID or route for what is configured
    |-- GeometryError             vLLM's configuration cannot be served by this version; says why
    |-- TransportError            talking to a peer failed
    |   |-- ConnectError          no connection could be made
    |   |-- ConnectionLost        it was there and ended; the requests in flight fail with this
    |   |-- RequestTimeout        a deadline passed; what was posted may still be moving
    |   |-- NotSent               a deadline passed before a request could be sent; nothing moves
    |   |-- DataPathError         a server answers, but its way to our memory does not work
    |   |-- FenceTimeout          the peer is not yet provably done with our memory
    |   `-- AuthError             the key is not known or not the same on both sides
    |       `-- LicenseError      the server asks for a license that is missing or not valid
    |-- ProtocolError
    |   |-- LocalProtocolError    we broke the rules (a bug here)
    |   |-- RemoteProtocolError   the peer did; it is cut after the first bad frame
    |   `-- VersionError          no common protocol version
    |-- StoreError                the server refused a request as a whole
    `-- EngineStopped             the engine's loop has ended; jobs end at once

Misses, pending keys and partial results are values (:class:`memkv_vllm.types.Status`), not exceptions.
Each class carries its advice as attributes, so that callers read ``retryable`` and ``scope`` instead of
testing for classes: ``scope`` is what is affected (one value, the connection, the server, this process).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

from memkv_vllm.types import LossReason

__all__ = [
    "AuthError",
    "ConfigError",
    "ConnectError",
    "ConnectionLost",
    "DataPathError",
    "EngineStopped",
    "EnvironmentFault",
    "FenceTimeout",
    "GeometryError",
    "LicenseError",
    "LocalProtocolError",
    "MemkvError",
    "NotSent",
    "ProtocolError",
    "RailError",
    "RemoteProtocolError",
    "RequestTimeout",
    "Scope",
    "StoreError",
    "TransportError",
    "VersionError",
]


class Scope(Enum):
    """What an error affects."""

    VALUE = "value"
    CONNECTION = "connection"
    SERVER = "server"
    PROCESS = "process"


class MemkvError(Exception):
    """Root of all errors that this package raises on purpose."""

    retryable: ClassVar[bool] = False
    scope: ClassVar[Scope] = Scope.PROCESS
    reason: ClassVar[LossReason] = LossReason.FAILED
    """The counter that a block lost to this error is added to."""


class ConfigError(MemkvError):
    """One or more settings are wrong. ``problems`` holds one line each; ``str()`` shows them all."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{source}: {count}\n{lines}")


class EnvironmentFault(MemkvError):
    """The host lacks what the configuration asks for. The message names what was found and the fix."""


class RailError(EnvironmentFault):
    """No NIC port of this host fits what is configured: a named device, a GID, or the way to a server's address.

    Attributes:
        problem: what is missing.
        found: what this host has instead.
        wanted: what would do, and how to get there.
    """

    def __init__(self, problem: str, *, found: str, wanted: str) -> None:
        self.problem = problem
        self.found = found
        self.wanted = wanted
        super().__init__(f"{problem}: found {found}; expected {wanted}")


class GeometryError(MemkvError):
    """vLLM's configuration (blocks, groups, layout) is one that this version does not serve."""


class TransportError(MemkvError):
    """Talking to a peer failed."""

    retryable = True
    scope = Scope.CONNECTION
    reason = LossReason.BREAKER


class ConnectError(TransportError):
    """No connection could be made."""

    scope = Scope.SERVER


class ConnectionLost(TransportError):
    """The connection ended; requests in flight on it fail with this."""


class RequestTimeout(TransportError):
    """A request's deadline passed. The peer may still move bytes: fence before reuse."""

    reason = LossReason.TIMEOUT


class NotSent(TransportError):
    """A request found no free place by its deadline and never left: no byte of it moves, and its server is busy.

    It says nothing against the connection, whose other requests go on.
    """

    reason = LossReason.TIMEOUT


class DataPathError(TransportError):
    """The server answers on its control channel, but it cannot reach our memory (no queue pair, a failed RDMA probe).

    At a direct engine's start a reason not to start; later a server like one that is down.
    """

    scope = Scope.SERVER


class FenceTimeout(TransportError):
    """The peer is not yet provably done with our memory; the slots stay in quarantine."""

    reason = LossReason.TIMEOUT


class AuthError(TransportError):
    """The key id is unknown, or the two sides do not hold the same key."""

    retryable = False
    scope = Scope.SERVER


class LicenseError(AuthError):
    """The server asks for a license; none was presented, or one that is not valid there. Says which, and why."""


class ProtocolError(MemkvError):
    """The rules of the wire protocol were broken."""

    scope = Scope.CONNECTION


class LocalProtocolError(ProtocolError):
    """This side broke the protocol: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol. It is cut after the first bad frame and counted.

    ``kind`` is a short word for the counter (``magic``, ``mac``, ``sequence``, ``length`` ...).
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class VersionError(ProtocolError):
    """The peers share no protocol version."""

    scope = Scope.SERVER


class StoreError(MemkvError):
    """The server refused a request as a whole (bad batch, limit, missing right).

    ``code`` is the wire's short word for why (``limit``, ``denied`` ...), empty where this side refused it.
    """

    scope = Scope.CONNECTION

    def __init__(self, message: str, code: str = "") -> None:
        self.code = code
        super().__init__(message)


class EngineStopped(MemkvError):
    """The engine's loop has ended: its jobs end with their load blocks reported as bad."""

    reason = LossReason.ENGINE
