"""The transport seam: what the engine and the store may know of a transport. Protocols and values only.

Ownership::

    ClientTransport --connect--> ClientConnection (one control session; its regions; its outstanding requests)
    ServerTransport --serve----> ServerPeer per accepted session, with its Bulk

Life of a client connection:

1. ``connect`` returns after the mutual handshake. Nothing runs yet.
2. ``run`` drives the connection until it ends; its owner starts it in a task group. Requests that are in
   flight when it ends fail with ``ConnectionLost``.
3. ``register`` offers a staging region; from then on extents of it may be named in puts and gets.
4. ``request`` sends one message and awaits its reply until a deadline. Past it ``RequestTimeout`` is raised:
   the peer may still move bytes, so the extents that the request named belong to nobody until ``fence``.
5. ``fence`` returns when no byte of this connection's work can land any more (queue pairs destroyed and the
   region deregistered; copy threads stopped and unmapped; the peer process dead). It ends the connection.
   It raises ``FenceTimeout`` if that is not yet known; it may be called again.
6. ``aclose`` ends the connection; it does not fence. Closing twice is safe.

Bulk is one-sided and driven by the server: ``pull`` moves a client's bytes into local memory, ``push`` moves
local bytes into the client's. Both return a status per move and only after the bytes are in place (the answer
must not overtake them; that to an eager get goes with them, and is there when they are). After cancellation or
a deadline of ``pull`` or ``push`` bytes may still move: the local extents may be reused only after ``fence`` of
that peer. A transport translates every foreign exception (``OSError``, a library's) at its own edge into
``memkv_vllm.errors``.

Threads: everything here is called on one event loop, the owner's. ``post``-like work that blocks runs in
worker threads of the transport, outside the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Request
from memkv_vllm.protocol.session import Established, PeerKind, ServerIdentity
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, SessionId, Status

R = TypeVar("R")


@dataclass(frozen=True)
class Capabilities:
    """What varies between transports. The engine reads this and never asks for a name."""

    one_sided: bool
    """The server moves bytes without the client's event loop."""
    gpu_memory: bool
    """GPU regions can be registered."""
    same_host: bool
    """Only reaches servers on this machine."""
    separate_data_path: bool = False
    """Bytes go another way than control messages (RDMA): a server may answer and yet not reach the client's memory.
    An engine that was told to use this transport and nothing else finds that out before it starts."""


class Region(NamedTuple):
    """Memory that a client registers: a host mapping, or for GPU memory its address and dmabuf descriptor."""

    id: int
    kind: MemoryKind
    length: int
    memory: HostMemory | None = None
    address: int = 0
    dmabuf_fd: int = -1


class Move(NamedTuple):
    """One value to move: the client's extent and the offset in the server's local memory (same length)."""

    remote: Extent
    local_offset: int


@dataclass(frozen=True, slots=True)
class Moves(Sequence[Move]):
    """A batch of moves in columns of equal length, as a request's body holds them; item ``i`` is a :class:`Move`.

    A transport that plans a batch as a whole reads the columns; one that goes by single values iterates.
    """

    regions: Sequence[int]
    offsets: Sequence[int]
    """Bytes, in the regions."""
    lengths: Sequence[int]
    """Bytes."""
    local_offsets: Sequence[int]
    """Bytes, in the server's local memory."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Move: ...

    @overload
    def __getitem__(self, index: slice) -> Moves: ...

    def __getitem__(self, index: int | slice) -> Move | Moves:
        if isinstance(index, slice):
            columns = (self.regions, self.offsets, self.lengths, self.local_offsets)
            return Moves(*(column[index] for column in columns))
        return Move(Extent(self.regions[index], self.offsets[index], self.lengths[index]), self.local_offsets[index])

    def __iter__(self) -> Iterator[Move]:
        return map(Move, map(Extent, self.regions, self.offsets, self.lengths), self.local_offsets)


class ClientConnection(Protocol):
    """One authenticated connection to one server, with the regions registered on it."""

    @property
    def established(self) -> Established:
        """The handshake's outcome: session id, server identity and limits."""
        ...

    @property
    def alive(self) -> bool:
        """False once the connection has ended for whatever reason."""
        ...

    @property
    def expected_bytes_per_s(self) -> float | None:
        """What the way of its bytes should carry, each direction; None where nobody knows."""
        ...

    async def run(self) -> None:
        """Drive the connection until it ends. Raises the ``TransportError`` or ``ProtocolError`` that ended it.

        Returns normally only after ``aclose`` or ``fence``. Cancelling it closes the connection.
        """
        ...

    async def register(self, region: Region, deadline: Deadline) -> None:
        """Offer ``region``; returns when the server has it, and has reached it where that is not a matter of course.

        Raises:
            DataPathError: the server answers and cannot reach the region.
            TransportError: anything else about the connection.
            StoreError: the server refused it, or the transport cannot take such memory.
        """
        ...

    async def request(self, request: Request[R], deadline: Deadline) -> R:
        """Send ``request`` and return its parsed reply.

        Raises:
            RequestTimeout: no reply by ``deadline``; bytes may still move.
            NotSent: it could not be sent by ``deadline``; no byte moves, and the connection is none the worse.
            ConnectionLost: the connection ended; bytes may still move until ``fence``.
            StoreError: the server refused the request as a whole; no byte moves.
            LocalProtocolError: the request breaks a limit of the server; nothing was sent.
        """
        ...

    async def fence(self, deadline: Deadline) -> None:
        """Return once no outstanding work of this connection can still touch its regions; see the module text.

        Raises:
            FenceTimeout: not known by ``deadline``; keep the memory in quarantine and call again.
        """
        ...

    async def aclose(self) -> None:
        """End the connection without fencing."""
        ...


class ClientTransport(Protocol):
    """Makes connections."""

    @property
    def name(self) -> str:
        """The name under which the registry knows it; for logs."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    async def connect(
        self, host: str, port: int, credentials: Credentials, kind: PeerKind, deadline: Deadline
    ) -> ClientConnection:
        """Connect and authenticate.

        Raises:
            ConnectError: no server there, or none that answered by ``deadline``.
            DataPathError: this host has no way for the bytes to this server.
            AuthError, VersionError, RemoteProtocolError: the handshake failed.
        """
        ...

    async def aclose(self) -> None:
        """Release what the transport itself holds; its connections are closed before."""
        ...


@runtime_checkable
class RailPreference(Protocol):
    """What a client transport has besides that knows how near this process is to each of a server's rails."""

    def first_rail(self, hosts: Sequence[str]) -> int | None:
        """Which of a server's ``hosts``, one per rail, this process should use first; None: it does not matter."""
        ...


class RegistrationTrial(Protocol):
    """What a client transport whose capabilities name ``gpu_memory`` has besides: asked before any connection."""

    @property
    def devices(self) -> Sequence[str]:
        """Names of the NICs that connections will use."""
        ...

    def try_registration(self, region: Region) -> str:
        """Register ``region`` with each of ``devices`` and deregister it; returns how, in one word. Blocks.

        Raises:
            EnvironmentFault: one of them refuses; says why and the fix.
        """
        ...


class Bulk(Protocol):
    """Server side: moves bytes between one peer's regions and the local memory."""

    async def connect(self, transport: str, token: bytes) -> bytes:
        """Bring up the data path of ``transport`` for this session, before any region; returns the server's token.

        Raises:
            StoreError: this server has no such data path, or it does not work (code ``data_path``); says why.
            RemoteProtocolError: a token that no client of ours sends, or it comes twice or too late.
        """
        ...

    async def register(self, region: int, kind: MemoryKind, length: int, token: bytes) -> None:
        """Map or bind a region that the peer offers. Raises ``RemoteProtocolError`` or ``StoreError``."""
        ...

    async def pull(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Copy each remote extent to its local offset. OK, BAD_EXTENT, TIMEOUT or FAILED per move.

        The bytes of a move are all in place when its status is OK. After TIMEOUT bytes may still land in the
        local extent until :meth:`fence` returns.
        """
        ...

    async def push(self, moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """Copy each local extent to its remote place; statuses as for :meth:`pull`.

        After TIMEOUT the local extent may still be read until :meth:`fence` returns.
        """
        ...

    async def fence(self) -> None:
        """Stop all outstanding work of this peer and drop its regions; returns when nothing of it runs.

        Later pulls and pushes answer FAILED. Takes no longer than the running copies' pieces.

        Raises:
            FenceTimeout: something of it may run as long as this process lives (queue pairs that a device does not
                give up): what it may touch is never used again. So says every later call.
        """
        ...


class EagerPut(Protocol):
    """The bytes of one eager put, which are on their way already. Finished by who asked for it."""

    async def pull(self, places: Sequence[int], moves: Sequence[Move], deadline: Deadline) -> list[Status]:
        """As :meth:`Bulk.pull`, of the values at ``places`` (growing); the bytes of the others are dropped. Once."""
        ...

    async def finish(self, deadline: Deadline) -> None:
        """Return when all bytes have come, dropping them if they were not pulled, or the data path is fenced.

        Before that the put must not be answered: the peer may then begin the next one.

        Raises:
            RemoteProtocolError: they have not come by ``deadline``.
        """
        ...


class EagerGet(Protocol):
    """One get whose answer may go with its bytes."""

    answered: bool
    """Whether it has: then nobody else answers."""

    async def push(self, moves: Sequence[Move], deadline: Deadline, answer: bytes) -> list[Status]:
        """As :meth:`Bulk.push`, of all that the get is given, at most once; ``answer`` goes before the bytes.

        ``answered`` afterwards says that the bytes are on their way, and the local extents not read any more: then all
        is OK. Else ``answer`` was not sent, or to nobody (the status is TIMEOUT), and the get is to be answered as
        others are.
        """
        ...


@runtime_checkable
class EagerBulk(Protocol):
    """What a :class:`Bulk` has besides whose peer may put without READ, and get without WRITTEN (tcp)."""

    def eager_put(self, lengths: Sequence[int]) -> EagerPut:
        """The peer sends values of these ``lengths`` (bytes), in this order.

        Raises:
            RemoteProtocolError: it may not: it has no connection for that, has another such put under way, or it is
                too large.
        """
        ...

    def eager_get(self, lengths: Sequence[int]) -> EagerGet:
        """The peer awaits values of these ``lengths``. Raises likewise, but for others under way."""
        ...


class DataPath(Protocol):
    """A way of moving bytes that sessions of another transport's server may choose by CONNECT (verbs, beside tcp)."""

    @property
    def name(self) -> str:
        """What CONNECT calls it."""
        ...

    async def open(self, memory: HostMemory) -> None:
        """Get ready to move bytes into and out of ``memory``, before the first session.

        Raises:
            EnvironmentFault: this host cannot do what is configured; says what was found and the fix.
        """
        ...

    def make(self, local_host: str, *, cut: Callable[[], None], counted: Callable[[str], None]) -> Bulk:
        """The data path of one session, not yet connected.

        Args:
            local_host: the address of this host at which the session's control connection arrived.
            cut: ends the session abruptly.
            counted: counts an event by name.
        """
        ...

    def health(self) -> list[str]:
        """What is wrong with it now (a port that is down), one line each with the fix; empty when nothing is."""
        ...

    async def aclose(self) -> None:
        """Release everything, after the last session was fenced."""
        ...


class ServerPeer(Protocol):
    """One authenticated session on the server."""

    @property
    def established(self) -> Established:
        """Session id, key id, kind."""
        ...

    @property
    def bulk(self) -> Bulk:
        """Its data path."""
        ...

    @property
    def label(self) -> str:
        """For logs: where it comes from."""
        ...

    @property
    def data_path(self) -> str:
        """Name of the transport that its bytes go over (``verbs`` for a session of tcp that chose it)."""
        ...


class SessionHandler(Protocol):
    """What the store gives to a server transport."""

    @property
    def identity(self) -> ServerIdentity:
        """Told to every client in the handshake."""
        ...

    @property
    def asks_license(self) -> bool:
        """Whether a session must present a license before anything else."""
        ...

    def find_key(self, key_id: str) -> bytes | None:
        """The 32-byte key of ``key_id``.

        For an id that it does not know, a handler may return 32 fresh random bytes: nobody can prove them, and a
        stranger cannot tell an unknown id from a wrong key.
        """
        ...

    def unproven(self, key_id: str) -> None:
        """A peer has named ``key_id`` and did not prove its key; called once it was answered.

        Counting and logging belong here and not into :meth:`find_key`, whose time a stranger can measure.
        """
        ...

    def licensed(self, peer: ServerPeer, token: str) -> None:
        """``peer``, which was opened, presents its license. Raises ``LicenseError`` to refuse it; says why."""
        ...

    async def watch(self, peer: ServerPeer) -> None:
        """Runs beside the requests of an opened session, until cancelled at its end.

        Raises:
            RemoteProtocolError: the session may not go on (its key was removed, its license has expired): cut it.
        """
        ...

    def answer(self, peer: ServerPeer, type: int, body: memoryview) -> bytes | None:
        """Carry out one request that needs no waiting and return the reply's body; None: :meth:`handle` is for it.

        Called straight from the loop's read callback, so it must be short and never wait. Nothing has happened yet
        where it returns None. Raises what :meth:`handle` raises.
        """
        ...

    async def handle(self, peer: ServerPeer, type: int, body: memoryview) -> bytes | None:
        """Carry out one request, of any type, and return the reply's body; None: the peer has it (an eager get).

        Called in a task of its own; at most ``identity.limits.max_inflight`` at once per session.

        Raises:
            StoreError: becomes an error reply.
            RemoteProtocolError: the peer is cut.
        """
        ...

    def admit(self) -> bool:
        """Whether one more connection may begin its handshake now; paired with exactly one :meth:`departed`."""
        ...

    def departed(self) -> None:
        """A connection that :meth:`admit` let in has ended and is fenced."""
        ...

    async def opened(self, peer: ServerPeer) -> None:
        """A session was established. Raises ``StoreError`` to refuse it (too many sessions)."""
        ...

    async def closed(self, peer: ServerPeer) -> None:
        """A session has ended: its requests are done or cancelled and ``peer.bulk`` is fenced."""
        ...

    def counted(self, event: str) -> None:
        """Count something by name: ``cut_<kind>``, ``handshake_timeout``, ``auth_failed`` ..."""
        ...


class ServerTransport(Protocol):
    """Accepts connections."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    def reload(self) -> None:
        """Read again what it holds of files, a renewed certificate; connections that are up keep what they have.

        Raises:
            ConfigError: they cannot be used; nothing has changed.
        """
        ...

    def health(self) -> list[str]:
        """What is wrong with it now, one line each with the fix; empty when nothing is."""
        ...

    async def serve(self, handler: SessionHandler, memory: HostMemory, *, task_status: Any = ...) -> None:
        """Listen and serve until cancelled; ``task_status.started(address)`` once listening.

        ``memory`` is the store's arena: what ``Move.local_offset`` points into. On cancellation: stops
        accepting, ends and fences every session, then returns.
        """
        ...


def remaining(deadline: Deadline, now: float) -> float:
    """Seconds left, never negative."""
    return max(0.0, deadline - now)


__all__ = [
    "Bulk",
    "Capabilities",
    "ClientConnection",
    "ClientTransport",
    "DataPath",
    "EagerBulk",
    "EagerGet",
    "EagerPut",
    "Move",
    "Moves",
    "Region",
    "RegistrationTrial",
    "ServerPeer",
    "ServerTransport",
    "SessionHandler",
    "SessionId",
    "remaining",
]
