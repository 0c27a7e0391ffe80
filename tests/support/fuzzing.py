"""A real server to be misused, and what must hold afterwards whatever a peer did."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import strategies as st

from memkv_vllm.errors import ConnectionLost, MemkvError
from memkv_vllm.protocol.frame import Header, MessageType, pack_header
from memkv_vllm.protocol.messages import Ping, Register
from memkv_vllm.protocol.session import Session
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.streams import SocketStream, send_all
from memkv_vllm.types import MemoryKind, Status
from tests.support.guarded import VALUE, Guarded, GuardedClient, guarded, make_key, value
from tests.support.harness import FACTORIES, wait_until
from tests.support.peers import client_session, raw_stream, shake_hands, until_closed

HEALTHY, HOSTILE = b"H" * 32, b"X" * 32
"""Namespaces of the session that must not notice anything, and of whoever misbehaves."""

KEPT = make_key(HEALTHY, 1)
LIMITS = {"transfer_timeout_s": 3.0, "handshake_timeout_s": 5.0, "max_frame_bytes": "256KiB"}


class Target:
    """The server, the session that must not notice anything, and the counters before an attack."""

    def __init__(self, over: str, portal: BlockingPortal, site: Guarded, healthy: GuardedClient) -> None:
        self.factory, self.portal, self.site, self.healthy = FACTORIES[over], portal, site, healthy

    def attack(self, what: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Carry out ``what(self, *args)`` on the server's loop, then look whether all is as it was."""
        return self.portal.call(self._attack, what, args)

    async def _attack(self, what: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        with anyio.fail_after(30):
            outcome = await what(self, *args)
            await self.check()
        return outcome

    async def check(self) -> None:
        """Nobody else is hurt, nothing is left, and no fault of the server was met."""
        await self.healthy.ask(Ping())
        assert await self.healthy.get(KEPT) == value(1)
        await self.site.until_idle(sessions=1)
        statistics = self.site.server.statistics()
        for fault in ("internal_error", "leaked_reservations", "bulk_error", "bulk_wrong_count", "bulk_overrun"):
            assert statistics["counters"].get(fault, 0) == 0, fault

    def cuts(self) -> int:
        """How many peers were cut or refused so far, for whatever reason."""
        counters = self.site.server.statistics()["counters"]
        names = ("cut_", "auth_failed", "handshake_timeout", "refused_session", "refused_license", "refused_attach")
        return sum(number for name, number in counters.items() if name.startswith(names))

    def requests(self) -> int:
        """How many requests the store has begun so far."""
        counters = self.site.server.statistics()["counters"]
        return sum(number for name, number in counters.items() if name.startswith("requests_"))

    def session(self) -> Session:
        """A fresh session of the hostile key."""
        return client_session(self.site.keys["hostile"], "hostile")


@contextmanager
def target(over: str) -> Iterator[Target]:
    """A server over ``loopback`` or ``tcp`` in a thread of its own, with one healthy session.

    Over loopback the hostile key is confined to its namespace; over tcp it may do everything, which gets further.
    """
    confined = {"prefix": (b"\x01" + HOSTILE).hex()}
    entries: dict[str, dict[str, str]] = {"healthy": {}, "hostile": confined if over == "loopback" else {}}
    with start_blocking_portal("asyncio") as portal:
        with portal.wrap_async_context_manager(guarded(entries, limits=LIMITS, over=over)) as site:
            healthy = portal.call(site.connect, "healthy")
            assert portal.call(healthy.put, KEPT, value(1)) is Status.OK
            made = Target(over, portal, site, healthy)
            yield made
            portal.call(made.check)


# ------------------------------------------------------------------------------------------------ attacks


async def raw_bytes(made: Target, chunks: Sequence[bytes]) -> int:
    """A stranger says this and leaves; returns how many peers were cut for it."""
    before = made.cuts()
    async with raw_stream(made.factory, made.site.address) as stream:
        try:
            for chunk in chunks:
                await send_all(stream, chunk)
            no_more(stream)
        except ConnectionLost:
            pass  # it was cut in the middle
        await until_closed(stream)
    await made.site.until_idle(sessions=1)
    return made.cuts() - before


def no_more(stream: SocketStream) -> None:
    """Say that nothing more will come, and go on reading: what comes back is the server's doing alone."""
    with contextlib.suppress(OSError):
        stream._sock.shutdown(socket.SHUT_WR)


async def hostile_requests(made: Target, requests: Sequence[tuple[int, bytes]]) -> bool:
    """An authenticated peer sends these bodies, rightly sealed, and then asks whether it is still there.

    Returns:
        whether it is; otherwise it was cut, and that was counted.
    """
    before = made.cuts()
    with HostMemory.create("hostile", 16 * VALUE) as memory:
        async with raw_stream(made.factory, made.site.address) as stream:
            session = made.session()
            await shake_hands(stream, session)
            await _register(stream, session, memory)
            ended = not await _send(stream, seal_all(session, [*requests, (MessageType.PING, b"")]))
            answered = 0
            while not ended and answered < len(requests) + 2:
                try:
                    data = await stream.receive()
                    answered += len(session.receive_data(data))
                    ended = not data
                except (ConnectionLost, MemkvError):
                    ended = True
            no_more(stream)
            await until_closed(stream)
    await made.site.until_idle(sessions=1)
    assert ended == (made.cuts() > before) or any(kind == MessageType.BYE for kind, _ in requests)
    return not ended


async def _register(stream: SocketStream, session: Session, memory: HostMemory) -> None:
    session.send_request(MessageType.REGISTER, Register(1, MemoryKind.HOST, memory.length).pack())
    data = session.data_to_send()
    assert stream.send_nowait(data, (memory.fd,)) == len(data)


async def _send(stream: SocketStream, data: bytes) -> bool:
    try:
        await send_all(stream, data)
    except ConnectionLost:
        return False
    return True


def seal_all(session: Session, requests: Sequence[tuple[int, bytes]]) -> bytes:
    """Frames of any type and body, under the session's own seal and numbers."""
    frames = []
    for number, (kind, body) in enumerate(requests, 1000):
        frames.append(seal(session, kind, body, request_id=number))
    return b"".join(frames)


def seal(session: Session, kind: int, body: bytes, *, request_id: int = 1, flags: int = 0) -> bytes:
    """One such frame."""
    assert session._seal_ours is not None
    header = pack_header(
        Header(1, kind, flags, request_id, len(body), session._sequence_ours)  # type: ignore[arg-type]
    )
    session._sequence_ours += 1
    return header + body + session._seal_ours.mac(header, body)


async def spoilt_stream(made: Target, spoil: Callable[[list[bytes]], list[bytes]]) -> tuple[int, int]:
    """An authenticated peer's pings, spoilt on the way.

    Returns:
        how many pings the server carried out, and how many peers were cut.
    """
    before = made.cuts(), made.requests()
    async with raw_stream(made.factory, made.site.address) as stream:
        session = made.session()
        await shake_hands(stream, session)
        frames = [seal(session, MessageType.PING, b"", request_id=number) for number in range(8)]
        await _send(stream, b"".join(spoil(frames)))
        with anyio.move_on_after(0.3):
            await until_closed(stream)
        no_more(stream)
        await until_closed(stream)
    await made.site.until_idle(sessions=1)
    return made.requests() - before[1], made.cuts() - before[0]


# ------------------------------------------------------------------------------------------------ hostile values

EDGES = (0, 1, 2, 3, 127, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def unsigned(bits: int) -> st.SearchStrategy[int]:
    """Numbers of so many bits, the interesting ones often."""
    most = 2**bits - 1
    return st.sampled_from([edge for edge in EDGES if edge <= most] + [most]) | st.integers(0, most)


def keys(length: int) -> st.SearchStrategy[bytes]:
    """Store keys of one length: of the hostile namespace where that fits, or anything."""
    start = (b"\x01" + HOSTILE)[:length]
    own = st.binary(min_size=length - len(start), max_size=length - len(start)).map(lambda rest: start + rest)
    return own | st.binary(min_size=length, max_size=length)


def batch(head: str, item: str, *fields: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    """A body of a batch: its head as announced need not agree with what follows.

    Args:
        head: struct format behind count and key length.
        item: struct format behind the key.
        fields: of the head, then of an item.
    """
    num_head = len(struct.unpack("<" + head, bytes(struct.calcsize("<" + head))))

    @st.composite
    def made(draw: st.DrawFn) -> bytes:
        length = draw(st.sampled_from([1, 2, 33, 67, 69, 255]))
        rows = draw(st.lists(st.tuples(keys(length), *fields[num_head:]), max_size=4))
        count = draw(st.just(len(rows)) | st.just(len(rows)) | unsigned(16))
        announced = draw(st.just(length) | st.just(length) | st.just(length) | unsigned(8))
        start = struct.pack("<HB" + head, count, announced, *(draw(field) for field in fields[:num_head]))
        return start + b"".join(key + struct.pack("<" + item, *rest) for key, *rest in rows)

    return made()


U8, U16, U32, U64 = (unsigned(bits) for bits in (8, 16, 32, 64))
REGIONS = st.just(1) | U32
"""The hostile peer registers region 1, of 16 values."""
OFFSETS = st.sampled_from([0, VALUE, 15 * VALUE, 16 * VALUE, 16 * VALUE + 1]) | U64
LENGTHS = st.sampled_from([0, 1, VALUE, VALUE + 1, 16 * VALUE]) | U64
TIMEOUTS = st.sampled_from([0, 1, 20, 20, 50, 50, 2**32 - 1])

JSON_TEXTS = st.one_of(
    st.integers(1, 60_000).map(lambda depth: b'{"command":' + b"[" * depth),
    st.integers(1, 60_000).map(lambda depth: b'{"a":' * min(depth, 12_000)),
    st.integers(1, 9_000).map(lambda digits: b'{"command":' + b"9" * digits + b"}"),
    st.integers(1, 20_000).map(lambda pairs: b'{"command":[' + b"[]," * min(pairs, 20_000) + b"[]]}"),
    st.sampled_from(
        [
            b'{"command":"reset","namespace":"' + HOSTILE.hex().encode() + b'"}',
            b'{"command":"reset","namespace":"' + b"0" * 63 + b'"}',
            b'{"command":"reset","namespace":["a"]}',
            b'{"command":"evict","bytes":1e999}',
            b'{"command":"evict","bytes":-1}',
            b'{"command":"gc","idle_s":NaN}',
            b'{"command":"\\ud800"}',
            b'{"command":null}',
            b'{"command":{"command":"reset"}}',
            b'{"command":"namespaces","command":"evict"}',
            b"\xff\xfe{",
            b"[]",
            b"",
        ]
    ),
    st.binary(max_size=100),
)

BODIES: dict[int, st.SearchStrategy[bytes]] = {
    MessageType.PUT: batch("BI", "QQIQQ", U8, TIMEOUTS, U64, U64, REGIONS, OFFSETS, LENGTHS),
    MessageType.GET: batch("BI", "QIQQ", U8, TIMEOUTS, U64, REGIONS, OFFSETS, LENGTHS),
    MessageType.EXISTS: batch("BH", "", U8, U16),
    MessageType.REPORT_BAD: batch("", "Q", U64),
    MessageType.DELETE: batch("", ""),
    MessageType.REGISTER: st.builds(
        lambda region, kind, length, token, announced: (
            struct.pack("<IBQH", region, kind, length, len(token) if announced is None else announced) + token
        ),
        U32, U8, U64, st.binary(max_size=40), st.none() | U16,
    ),
    MessageType.MANIFEST: st.builds(
        lambda digest, text, announced: (
            struct.pack("<32s32sI", b"F" * 32, digest, len(text) if announced is None else announced) + text
        ),
        st.just(HOSTILE) | st.binary(min_size=32, max_size=32), st.binary(max_size=300), st.none() | U32,
    ),
    MessageType.FENCE: st.binary(min_size=16, max_size=16) | st.binary(max_size=40),
    MessageType.ADMIN: JSON_TEXTS,
    MessageType.STAT: st.just(b"") | st.binary(max_size=10),
    MessageType.PING: st.just(b"") | st.binary(max_size=10),
    MessageType.LICENSE: st.binary(max_size=10_000),
    MessageType.ATTACH: st.binary(max_size=40),
    MessageType.HELLO: st.binary(max_size=80),
    MessageType.PROOF: st.binary(max_size=40),
    MessageType.REJECT: st.binary(max_size=40),
    MessageType.BYE: st.binary(max_size=4),
    0: st.just(b""),
    255: st.binary(max_size=10),
}  # fmt: skip
"""Bodies by message type; the last two types do not exist."""

REQUEST = st.sampled_from(sorted(BODIES)).flatmap(lambda kind: st.tuples(st.just(kind), BODIES[kind]))


def held_fds() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


__all__ = [
    "BODIES",
    "HOSTILE",
    "REQUEST",
    "Target",
    "held_fds",
    "hostile_requests",
    "raw_bytes",
    "spoilt_stream",
    "target",
    "wait_until",
]
