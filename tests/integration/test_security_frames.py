"""How a frame can be wrong, over real connections: refused, cut, and counted by its own name (P091, P092).

The same rules without a wire stand in ``tests/unit/test_protocol_session.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio
import pytest

from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES, Flags, MessageType
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.protocol.session import Session
from memkv_vllm.transports.streams import SocketStream, send_all
from tests.support.fuzzing import no_more, seal
from tests.support.guarded import Guarded, guarded
from tests.support.harness import FACTORIES
from tests.support.peers import client_session, raw_stream, shake_hands, until_closed

pytestmark = pytest.mark.anyio


def pings(session: Session, count: int = 3) -> list[bytes]:
    return [seal(session, MessageType.PING, b"", request_id=number) for number in range(1, count + 1)]


def replayed(session: Session, answer: bytes) -> bytes:
    first, second, _ = pings(session)
    return first + second + first


def reordered(session: Session, answer: bytes) -> bytes:
    first, second, third = pings(session)
    return first + third + second


def dropped(session: Session, answer: bytes) -> bytes:
    first, _, third = pings(session)
    return first + third


def truncated_mac(session: Session, answer: bytes) -> bytes:
    first, second, third = pings(session)
    return first + second[:-1] + third


def no_mac(session: Session, answer: bytes) -> bytes:
    return pings(session, 1)[0][:-MAC_BYTES] + bytes(MAC_BYTES)


def other_body(session: Session, answer: bytes) -> bytes:
    frame = bytearray(seal(session, MessageType.STAT, b""))
    frame[5] = MessageType.PING
    return bytes(frame)


def reflected(session: Session, answer: bytes) -> bytes:
    """The server's own frame, back to it: it has the right number, and was sealed with the other direction's key."""
    return answer


def a_reply(session: Session, answer: bytes) -> bytes:
    """A frame of the wrong direction, rightly sealed."""
    return seal(session, MessageType.PING, b"", flags=Flags.REPLY)


def an_error(session: Session, answer: bytes) -> bytes:
    return seal(session, MessageType.PING, b"\x01\x00no", flags=Flags.REPLY | Flags.ERROR)


def of_another_session(session: Session, answer: bytes) -> bytes:
    """Sealed with a key of the same id, in a session that nobody has."""
    other = client_session(os.urandom(32))
    other.__dict__.update(_seal_ours=type(session._seal_ours)(os.urandom(32), session.role, b""))  # type: ignore[misc]
    return pings(other, 1)[0]


def a_handshake_frame(session: Session, answer: bytes) -> bytes:
    return seal(session, MessageType.HELLO, b"")


def an_unknown_type(session: Session, answer: bytes) -> bytes:
    return seal(session, 200, b"")


def unknown_flags(session: Session, answer: bytes) -> bytes:
    return seal(session, MessageType.PING, b"", flags=0x8000)


WRONG: dict[Callable[[Session, bytes], bytes], tuple[str, int]] = {
    replayed: ("sequence", 2),
    reordered: ("sequence", 1),
    dropped: ("sequence", 1),
    truncated_mac: ("mac", 1),
    no_mac: ("mac", 0),
    other_body: ("mac", 0),
    reflected: ("mac", 0),
    a_reply: ("flags", 0),
    an_error: ("flags", 0),
    of_another_session: ("mac", 0),
    a_handshake_frame: ("header", 0),
    an_unknown_type: ("type", 0),
    unknown_flags: ("flags", 0),
}
"""What is sent, the counter ``cut_<kind>`` that it meets, and how many pings at most are carried out before it."""


@pytest.mark.parametrize("over", ["loopback", "tcp"])
@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
async def test_a_wrong_frame_cuts_its_session_and_no_other(over: str, make: Callable[[Session, bytes], bytes]) -> None:
    kind, carried_out = WRONG[make]
    async with guarded(over=over) as site:
        healthy = await site.connect("default")
        before = site.count("requests_ping")
        async with raw_stream(FACTORIES[over], site.address) as stream:
            session, answer = await _established(stream, site)
            await send_all(stream, make(session, answer))
            no_more(stream)
            with anyio.fail_after(10):
                await until_closed(stream)
        await site.until_idle(sessions=1)
        assert site.count(f"cut_{kind}") == 1, site.server.statistics()["counters"]
        assert site.count("requests_ping") - before <= carried_out
        await healthy.ask(Ping())


async def _established(stream: SocketStream, site: Guarded) -> tuple[Session, bytes]:
    """A session at rest, and the sealed frame with which the server accepted it."""
    session = client_session(site.keys["default"])
    seen: list[bytes] = []
    receive = session.receive_data

    def keeping(data: bytes) -> object:
        seen.append(bytes(data))
        return receive(data)

    session.__dict__["receive_data"] = keeping
    await shake_hands(stream, session)
    del session.__dict__["receive_data"]
    accepted = seen[-1][-(HEADER_BYTES + MAC_BYTES) :]
    return session, accepted
