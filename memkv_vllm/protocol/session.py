"""The control session as a sans-I/O state machine: bytes in, events out, bytes to send.

One class plays both roles. A driver does five things: ``start()`` (client only), ``receive_data(data)`` for
every chunk that arrives (it returns events), ``data_to_send()`` after every call, ``receive_eof()`` when the
stream ends, and ``close()`` at the end.

Handshake::

    client                                         server
      HELLO  versions, role, key id, nonce   -->
             <--  HELLO  version, server id, session id, limits, nonce, proof of the server
      PROOF  proof of the client             -->
             <--  PROOF  whether a license is asked for (the first frame with a MAC)

Each side proves the key over both HELLO bodies before anything else of it is parsed; from then on every
frame carries a MAC under a key per direction and the next sequence number of that direction. A server that
will not go on says so in a REJECT: instead of its HELLO, where a client can treat it as a hint only (it is not
authenticated), or sealed instead of its PROOF. After ``Established`` the server's driver decides: ``accept`` or
``reject``.

States and inputs are the table ``TRANSITIONS``; a pair that is not listed is a protocol error and ends the
session. Any error leaves the session in ``CLOSED``; nothing more can be sent or received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from struct import Struct
from typing import NamedTuple, TypeVar

from memkv_vllm.errors import AuthError, ConnectError, LocalProtocolError, RemoteProtocolError, VersionError
from memkv_vllm.protocol import auth, codec
from memkv_vllm.protocol.auth import Credentials, Sealer
from memkv_vllm.protocol.frame import (
    HANDSHAKE_TYPES,
    HEADER_BYTES,
    MAC_BYTES,
    MAX_HANDSHAKE_BODY,
    MAX_VERSION,
    MIN_VERSION,
    Flags,
    Header,
    MessageType,
    pack_fields,
    unpack_header,
)
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply
from memkv_vllm.types import Role, SessionId

_T = TypeVar("_T")

MAX_REJECT_TEXT = 120
"""Characters; at most four bytes each, so that a REJECT fits in a handshake body."""


class State(Enum):
    """Where a session stands."""

    IDLE = "idle"
    HELLO_SENT = "hello sent"
    PROOF_SENT = "proof sent"
    PROOF_AWAITED = "proof awaited"
    PROVEN = "proven"
    READY = "ready"
    CLOSED = "closed"


class Input(Enum):
    """What can happen to a session."""

    START = "start"
    RECV_HELLO = "receive HELLO"
    RECV_PROOF = "receive PROOF"
    RECV_REJECT = "receive REJECT"
    RECV_REQUEST = "receive a request"
    RECV_REPLY = "receive a reply"
    SEND_REQUEST = "send a request"
    SEND_REPLY = "send a reply"
    ACCEPT = "accept the session"
    REJECT = "reject the session"
    CLOSE = "close"


TRANSITIONS: dict[Role, dict[tuple[State, Input], State]] = {
    Role.CLIENT: {
        (State.IDLE, Input.START): State.HELLO_SENT,
        (State.IDLE, Input.CLOSE): State.CLOSED,
        (State.HELLO_SENT, Input.RECV_HELLO): State.PROOF_SENT,
        (State.HELLO_SENT, Input.RECV_REJECT): State.CLOSED,
        (State.HELLO_SENT, Input.CLOSE): State.CLOSED,
        (State.PROOF_SENT, Input.RECV_PROOF): State.READY,
        (State.PROOF_SENT, Input.RECV_REJECT): State.CLOSED,
        (State.PROOF_SENT, Input.CLOSE): State.CLOSED,
        (State.READY, Input.SEND_REQUEST): State.READY,
        (State.READY, Input.RECV_REPLY): State.READY,
        (State.READY, Input.CLOSE): State.CLOSED,
        (State.CLOSED, Input.CLOSE): State.CLOSED,
    },
    Role.SERVER: {
        (State.IDLE, Input.RECV_HELLO): State.PROOF_AWAITED,
        (State.IDLE, Input.REJECT): State.CLOSED,
        (State.IDLE, Input.CLOSE): State.CLOSED,
        (State.PROOF_AWAITED, Input.RECV_PROOF): State.PROVEN,
        (State.PROOF_AWAITED, Input.REJECT): State.CLOSED,
        (State.PROOF_AWAITED, Input.CLOSE): State.CLOSED,
        (State.PROVEN, Input.ACCEPT): State.READY,
        (State.PROVEN, Input.REJECT): State.CLOSED,
        (State.PROVEN, Input.CLOSE): State.CLOSED,
        (State.READY, Input.RECV_REQUEST): State.READY,
        (State.READY, Input.SEND_REPLY): State.READY,
        (State.READY, Input.CLOSE): State.CLOSED,
        (State.CLOSED, Input.CLOSE): State.CLOSED,
    },
}


_KEEP_READY = {
    role: tuple(what for (state, what), after in table.items() if state is after is State.READY)
    for role, table in TRANSITIONS.items()
}
"""What changes nothing once the handshake is over; every message is one. Tuples, since an Enum is slow to hash."""


class PeerKind(Enum):
    """What a client is for; the server shows it and applies limits by it."""

    ENGINE = 1
    """A rank's engine: registers staging memory and moves values."""
    MANAGER = 2
    """The scheduler side: control only."""
    TOOL = 3
    """Command line, bench, fence-only connections."""
    DATA = 4
    """No session of its own: a data connection, to be attached to one (tcp transport)."""


class Limits(NamedTuple):
    """What the server tells every client it will accept."""

    max_frame_bytes: int
    max_batch_keys: int
    max_inflight: int
    max_value_bytes: int


@dataclass(frozen=True)
class ServerIdentity:
    """What a server says of itself: 16 persistent bytes, 16 bytes of this process run, and its limits."""

    server_id: bytes
    boot_id: bytes
    limits: Limits


@dataclass(frozen=True)
class Established:
    """The handshake is done, both ways. On the server, ``accept`` or ``reject`` is due next."""

    session: SessionId
    server: ServerIdentity
    key_id: str
    kind: PeerKind
    version: int
    asks_license: bool = False
    """Client side: the server answers LICENSE and nothing else until it has seen a valid one."""


class RequestReceived(NamedTuple):
    """A request came in (server side). ``body`` owns its bytes."""

    request_id: int
    type: MessageType
    body: memoryview


class ReplyReceived(NamedTuple):
    """A reply came in (client side); ``error`` is set when the request was refused as a whole."""

    request_id: int
    type: MessageType
    body: memoryview
    error: ErrorReply | None = None


Event = Established | RequestReceived | ReplyReceived

_ERROR_REPLY = Flags.REPLY | Flags.ERROR

# HELLO of a client: lowest and highest version, kind, key id (zero padded), nonce.
_CLIENT_HELLO = Struct(f"<BBB{auth.MAX_KEY_ID_BYTES}s{auth.NONCE_BYTES}s")
# HELLO of a server: version, server id, boot id, session id, max frame, max batch, max in flight, max value, nonce.
_SERVER_HELLO = Struct(f"<B16s16s16sIHHQ{auth.NONCE_BYTES}s")


# Body of a server's PROOF: empty, or this.
_ASKS_LICENSE = b"\x01"


@dataclass
class _Handshake:
    """What is remembered between the frames of the handshake."""

    transcript: bytes = b""
    key: bytes = field(default=b"", repr=False)
    key_id: str = ""
    kind: PeerKind = PeerKind.TOOL
    version: int = MAX_VERSION


class Session:
    """One control session, either side. Not thread-safe; owned by one connection.

    Args:
        role: which side this is.
        nonce: 32 fresh random bytes.
        credentials: client only.
        kind: client only: what this client is for.
        identity: server only.
        session_id: server only: 16 fresh random bytes.
        find_key: server only: the 32-byte key for a key id, or None.
    """

    def __init__(
        self,
        role: Role,
        nonce: bytes,
        *,
        credentials: Credentials | None = None,
        kind: PeerKind = PeerKind.TOOL,
        identity: ServerIdentity | None = None,
        session_id: SessionId | None = None,
        find_key: Callable[[str], bytes | None] | None = None,
    ) -> None:
        self.role = role
        self._keep_ready = _KEEP_READY[role]
        self.state = State.IDLE
        self.established: Established | None = None
        self._nonce = nonce
        self._credentials = credentials
        self._identity = identity
        self._session_id = session_id
        self._find_key = find_key
        self._handshake = _Handshake(kind=kind)
        self._max_body = MAX_HANDSHAKE_BODY
        self._incoming = bytearray()
        """The beginning of a frame whose rest has not come yet."""
        self._due_bytes = HEADER_BYTES
        """So many bytes it must have at least before it is worth another look."""
        self._outgoing: list[bytes] = []
        self._seal_ours: Sealer | None = None
        self._seal_theirs: Sealer | None = None
        self._sequence_ours = 0
        self._sequence_theirs = 0
        self._next_request_id = 1
        self._binding = b""

    def __repr__(self) -> str:
        return f"<Session {self.role.value} {self.state.value} sent={self._sequence_ours} seen={self._sequence_theirs}>"

    # -- driver's verbs

    def bind(self, binding: bytes) -> None:
        """Cover ``binding`` with the handshake: what both ends must know of the channel beneath. Before anything else.

        Over TLS it is a digest of the server's certificate; a peer that saw another one fails the proof.
        """
        self._binding = binding

    def start(self) -> None:
        """Client: queue HELLO. Call ``data_to_send`` next."""
        self._move(Input.START)
        credentials = _require(self._credentials)
        handshake = self._handshake
        handshake.key, handshake.key_id = credentials.key, credentials.key_id
        body = _CLIENT_HELLO.pack(
            MIN_VERSION, MAX_VERSION, handshake.kind.value, credentials.key_id.encode("ascii"), self._nonce
        )
        handshake.transcript = self._binding + body
        self._queue(MessageType.HELLO, Flags.NONE, 0, body)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Take bytes off the wire; returns the events they complete. Call ``data_to_send`` next.

        Raises:
            RemoteProtocolError: the peer broke the rules; close the connection.
            AuthError, VersionError: the handshake failed; send what ``data_to_send`` holds, then close.
            ConnectError: client: the server refused (busy, closing, too many sessions).
        """
        if self.state is State.CLOSED:
            return []
        if self._incoming:
            self._incoming += data
            if len(self._incoming) < self._due_bytes:
                return []
            data = bytes(self._incoming)
            self._incoming.clear()
        try:
            return self._take_frames(data if isinstance(data, bytes) else bytes(data))
        except Exception:
            self.state = State.CLOSED
            raise

    def data_to_send(self) -> bytes:
        """Everything queued since the last call."""
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        return data

    def send_request(self, type: MessageType, body: bytes) -> int:
        """Client: queue a request; returns its id. Call ``data_to_send`` next."""
        self._move(Input.SEND_REQUEST)
        request_id = self._next_request_id
        self._next_request_id += 1
        self._queue(type, Flags.NONE, request_id, body)
        return request_id

    @property
    def last_request_id(self) -> int:
        """Of the request that was sent last; 0: none was."""
        return self._next_request_id - 1

    def send_reply(self, request_id: int, type: MessageType, body: bytes) -> None:
        """Server: queue the reply to a request. Call ``data_to_send`` next."""
        self._move(Input.SEND_REPLY)
        self._queue(type, Flags.REPLY, request_id, body)

    def send_error(self, request_id: int, type: MessageType, error: ErrorReply) -> None:
        """Server: queue an error reply. Call ``data_to_send`` next."""
        self._move(Input.SEND_REPLY)
        self._queue(type, _ERROR_REPLY, request_id, error.pack())

    def accept(self, *, asks_license: bool = False) -> None:
        """Server: let the proven client in; its first sealed frame goes out. Call ``data_to_send`` next."""
        self._move(Input.ACCEPT)
        self._queue(MessageType.PROOF, Flags.REPLY, 0, _ASKS_LICENSE if asks_license else b"")

    def reject(self, code: ErrorCode, text: str) -> None:
        """Server: refuse a client that is not in yet and end the session. Call ``data_to_send`` next."""
        self._move(Input.REJECT)
        self._queue(MessageType.REJECT, Flags.REPLY, 0, ErrorReply(code, text[:MAX_REJECT_TEXT]).pack())

    def receive_eof(self) -> None:
        """The peer's stream has ended.

        Raises:
            RemoteProtocolError: in the middle of a frame (``truncated``) or of the handshake (``handshake``).
        """
        within, state = len(self._incoming), self.state
        self.close()
        if state is State.CLOSED:
            return
        if within:
            raise RemoteProtocolError("truncated", f"the stream ended {within} bytes into a frame")
        if state is not State.READY:
            raise RemoteProtocolError("handshake", f"the stream ended with the handshake at: {state.value}")

    def close(self) -> None:
        """End the session; what is queued may still be sent."""
        self._move(Input.CLOSE)
        self._incoming.clear()

    def hand_over(self) -> tuple[Sealer, Sealer]:
        """End the session and give its seals, ours and theirs, to what speaks over the connection from here on.

        Raises:
            RemoteProtocolError: the peer has sent more than it may before it was told to go on.
            LocalProtocolError: the handshake is not done.
        """
        ours, theirs = _require(self._seal_ours), _require(self._seal_theirs)
        within = len(self._incoming)
        self.close()
        if within:
            raise RemoteProtocolError("handover", f"{within} bytes too many before the connection was handed over")
        return ours, theirs

    # -- frames

    def _move(self, what: Input, *, remote: bool = False) -> None:
        before = self.state
        if before is State.READY and what in self._keep_ready:
            return
        after = TRANSITIONS[self.role].get((before, what))
        if after is None:
            self.state = State.CLOSED
            message = f"{what.value} while {before.value} ({self.role.value} side)"
            raise RemoteProtocolError("state", message) if remote else LocalProtocolError(message)
        self.state = after

    def _queue(self, type: MessageType, flags: Flags, request_id: int, body: bytes) -> None:
        seal, length = self._seal_ours, len(body)
        if seal is None:
            self._outgoing.append(pack_fields(self._handshake.version, type, flags, request_id, length, 0) + body)
            return
        if length > self._max_body:
            raise LocalProtocolError(f"a {type.name} of {length} bytes; the peer takes {self._max_body}")
        sequence = self._sequence_ours
        frame = pack_fields(self._handshake.version, type, flags, request_id, length, sequence) + body
        self._outgoing += (frame, seal.mac(frame))
        self._sequence_ours = sequence + 1

    def _take_frames(self, data: bytes) -> list[Event]:
        """The events of the whole frames in ``data``; what is left is kept. One pass: every message goes this way."""
        events: list[Event] = []
        at, length = 0, len(data)
        self._due_bytes = HEADER_BYTES
        while length - at >= HEADER_BYTES and self.state is not State.CLOSED:
            header = unpack_header(data, at)
            seal, size = self._seal_theirs, HEADER_BYTES + header.body_length
            # Refused before any of it is kept.
            if header.body_length > self._max_body:
                raise RemoteProtocolError("length", f"a body of {header.body_length} bytes; at most {self._max_body}")
            if seal is not None:
                size += MAC_BYTES
                if header.sequence != self._sequence_theirs:
                    text = f"sequence {header.sequence}; {self._sequence_theirs} was due"
                    raise RemoteProtocolError("sequence", text)
            if length - at < size:
                self._due_bytes = size
                break
            # An event keeps its frame, not everything that came with it.
            frame = memoryview(data if size == length else data[at : at + size])
            at += size
            if seal is not None:
                if not auth.check(seal.mac(frame[:-MAC_BYTES]), frame[-MAC_BYTES:]):
                    raise RemoteProtocolError("mac", "a frame's MAC does not match")
                self._sequence_theirs += 1
            events += self._dispatch(header, frame[HEADER_BYTES : HEADER_BYTES + header.body_length])
        if at < length and self.state is not State.CLOSED:
            self._incoming += data[at:]
        return events

    def _dispatch(self, header: Header, body: memoryview) -> list[Event]:
        kind = header.type
        if kind in HANDSHAKE_TYPES:
            return self._handshake_frame(header, body)
        _check_version(header, self._handshake.version)
        if self.role is Role.SERVER:
            self._move(Input.RECV_REQUEST, remote=True)
            if header.flags is not Flags.NONE:
                raise RemoteProtocolError("flags", "a client sent a reply")
            return [RequestReceived(header.request_id, kind, body)]
        self._move(Input.RECV_REPLY, remote=True)
        if header.flags not in (Flags.REPLY, _ERROR_REPLY):
            raise RemoteProtocolError("flags", "a server sent a request")
        error = ErrorReply.unpack(body) if header.flags is not Flags.REPLY else None
        return [ReplyReceived(header.request_id, kind, body, error)]

    def _handshake_frame(self, header: Header, body: memoryview) -> list[Event]:
        _check_handshake_header(header, self.role)
        if header.type is MessageType.HELLO:
            self._move(Input.RECV_HELLO, remote=True)
            return self._server_hello(header, body) if self.role is Role.CLIENT else self._client_hello(header, body)
        if header.type is MessageType.PROOF:
            self._move(Input.RECV_PROOF, remote=True)
            _check_version(header, self._handshake.version)
            return self._accepted(body) if self.role is Role.CLIENT else self._client_proof(body)
        self._move(Input.RECV_REJECT, remote=True)
        raise self._rejected(ErrorReply.unpack(body))

    # -- handshake, server side

    def _client_hello(self, header: Header, body: memoryview) -> list[Event]:
        codec.expect_length(body, _CLIENT_HELLO.size)
        lowest, highest, kind, key_id, _ = _CLIENT_HELLO.unpack(body)
        if lowest > MAX_VERSION or highest < MIN_VERSION:
            text = f"the client speaks versions {lowest}-{highest}, this server {MIN_VERSION}-{MAX_VERSION}"
            raise self._reject(ErrorCode.VERSION, VersionError(text))
        _check_version(header, highest)
        name = key_id.rstrip(b"\0").decode("ascii", "replace")
        key = _require(self._find_key)(name)
        if key is None:
            raise self._reject(ErrorCode.UNKNOWN_KEY, AuthError("unknown key id"))
        handshake = self._handshake
        handshake.version = min(highest, MAX_VERSION)
        handshake.key, handshake.key_id = key, name
        handshake.kind = PeerKind(kind) if kind in PeerKind._value2member_map_ else PeerKind.TOOL
        identity = _require(self._identity)
        ours = _SERVER_HELLO.pack(
            handshake.version,
            identity.server_id,
            identity.boot_id,
            _require(self._session_id),
            *identity.limits,
            self._nonce,
        )
        handshake.transcript = self._binding + bytes(body) + ours
        self._queue(MessageType.HELLO, Flags.REPLY, 0, ours + auth.proof(key, Role.SERVER, handshake.transcript))
        return []

    def _client_proof(self, body: memoryview) -> list[Event]:
        handshake = self._handshake
        if not auth.check(auth.proof(handshake.key, Role.CLIENT, handshake.transcript), bytes(body)):
            raise self._reject(ErrorCode.BAD_PROOF, AuthError("the client does not hold the key that it named"))
        identity = _require(self._identity)
        self._seal(identity.limits)
        return [self._established(_require(self._session_id), identity)]

    def _reject(self, code: ErrorCode, error: AuthError | VersionError) -> AuthError | VersionError:
        self.reject(code, str(error))
        return error

    # -- handshake, client side

    def _server_hello(self, header: Header, body: memoryview) -> list[Event]:
        codec.expect_length(body, _SERVER_HELLO.size + auth.PROOF_BYTES)
        ours = bytes(body[: _SERVER_HELLO.size])
        version, server_id, boot_id, session_id, *limits, _ = _SERVER_HELLO.unpack(ours)
        if not MIN_VERSION <= version <= MAX_VERSION:
            raise VersionError(f"the server chose version {version}; this client speaks {MIN_VERSION}-{MAX_VERSION}")
        _check_version(header, version)
        handshake = self._handshake
        handshake.version = version
        handshake.transcript += ours
        expected = auth.proof(handshake.key, Role.SERVER, handshake.transcript)
        if not auth.check(expected, bytes(body[_SERVER_HELLO.size :])):
            raise AuthError(
                f"the server does not hold this auth_key under the id {handshake.key_id!r}: set the same auth_key, and "
                "its auth_key_id, on both sides"
            )
        self._queue(MessageType.PROOF, Flags.NONE, 0, auth.proof(handshake.key, Role.CLIENT, handshake.transcript))
        self._identity = ServerIdentity(server_id, boot_id, Limits(*limits))
        self._session_id = SessionId(session_id)
        self._seal(self._identity.limits)
        return []

    def _accepted(self, body: memoryview) -> list[Event]:
        asks_license = body == _ASKS_LICENSE
        if not asks_license:
            codec.expect_length(body, 0)
        established = self._established(_require(self._session_id), _require(self._identity))
        self.established = replace(established, asks_license=asks_license)
        return [self.established]

    def _rejected(self, reply: ErrorReply) -> Exception:
        if reply.code is ErrorCode.VERSION:
            return VersionError(reply.text)
        if reply.code in (ErrorCode.UNKNOWN_KEY, ErrorCode.BAD_PROOF):
            return AuthError(f"the server refused the key id {self._handshake.key_id!r}: {reply.text}")
        return ConnectError(f"the server refused the connection ({reply.code.name.lower()}): {reply.text}")

    # -- both

    def _seal(self, limits: Limits) -> None:
        """From here on every frame of both directions carries a MAC and a sequence number."""
        other = Role.SERVER if self.role is Role.CLIENT else Role.CLIENT
        self._seal_ours = Sealer(self._handshake.key, self.role, self._handshake.transcript)
        self._seal_theirs = Sealer(self._handshake.key, other, self._handshake.transcript)
        self._max_body = limits.max_frame_bytes
        self._handshake.key = b""

    def _established(self, session: SessionId, server: ServerIdentity) -> Established:
        handshake = self._handshake
        self.established = Established(session, server, handshake.key_id, handshake.kind, handshake.version)
        return self.established


def _require(value: _T | None) -> _T:
    if value is None:
        raise LocalProtocolError("the session was made without what its role needs")
    return value


def _check_handshake_header(header: Header, role: Role) -> None:
    # Handshake headers are covered by no proof, so nothing in them may be free to choose.
    due = Flags.REPLY if role is Role.CLIENT else Flags.NONE
    if header.flags != due or header.request_id or header.sequence:
        raise RemoteProtocolError("header", f"{header.type.name} with flags, request id or sequence set")


def _check_version(header: Header, version: int) -> None:
    if header.version != version:
        raise RemoteProtocolError("version", f"a frame of version {header.version}; {version} was due")
