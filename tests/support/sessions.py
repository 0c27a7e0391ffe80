"""Pairs of protocol sessions over no link at all: bytes are carried by hand, spoilt on the way if a test likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import Established, Event, Limits, PeerKind, ServerIdentity, Session
from memkv_vllm.types import Role, SessionId

KEY = bytes(range(100, 132))
LIMITS = Limits(max_frame_bytes=4096, max_batch_keys=64, max_inflight=8, max_value_bytes=1 << 20)
IDENTITY = ServerIdentity(b"S" * 16, b"B" * 16, LIMITS)

Carry = Callable[[str, bytes], bytes]
"""Called with "client" or "server" (who sent) and the bytes; returns what arrives."""


def as_sent(sender: str, data: bytes) -> bytes:
    """A link that spoils nothing."""
    return data


def client(key: bytes = KEY, key_id: str = "default", nonce: bytes = b"c" * 32) -> Session:
    """A client's session."""
    return Session(Role.CLIENT, nonce, credentials=Credentials(key, key_id), kind=PeerKind.ENGINE)


def server(key: bytes = KEY, key_id: str = "default", nonce: bytes = b"s" * 32) -> Session:
    """A server's session that knows one key."""
    return Session(
        Role.SERVER,
        nonce,
        identity=IDENTITY,
        session_id=SessionId(b"I" * 16),
        find_key=lambda asked: key if asked == key_id else None,
    )


@dataclass
class Pair:
    """A client, a server and what each has told its driver."""

    client: Session = field(default_factory=client)
    server: Session = field(default_factory=server)
    client_events: list[Event] = field(default_factory=list)
    server_events: list[Event] = field(default_factory=list)

    def to_server(self, carry: Carry = as_sent) -> None:
        """Carry what the client has queued; a server that has authenticated it accepts."""
        events = self.server.receive_data(carry("client", self.client.data_to_send()))
        self.server_events += events
        if any(isinstance(event, Established) for event in events):
            self.server.accept()

    def to_client(self, carry: Carry = as_sent) -> None:
        """Carry what the server has queued."""
        self.client_events += self.client.receive_data(carry("server", self.server.data_to_send()))

    def shake_hands(self, carry: Carry = as_sent) -> Pair:
        """The whole handshake."""
        self.client.start()
        for _ in range(2):
            self.to_server(carry)
            self.to_client(carry)
        return self


def one_byte_at_a_time(session: Session, data: bytes) -> list[Event]:
    """Feed ``data`` in the smallest pieces."""
    events: list[Event] = []
    for at in range(len(data)):
        events += session.receive_data(data[at : at + 1])
    return events
