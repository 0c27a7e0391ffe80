"""Data connections of the tcp transport in hostile hands: answers that are wrong, early, late, short or noise.

The peer holds a key and seals what it says rightly where it likes. Whatever it answers, the transfer fails or the
session is cut; no value becomes visible that was not moved, nothing stays reserved or pinned, others go on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Literal

import anyio
import anyio.to_thread
import pytest
from hypothesis import strategies as st

from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Delete, Get, GetItem, Put, PutItem, Register
from memkv_vllm.transports.streams import send_all
from memkv_vllm.transports.tcp.attach import attach
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandSealer, Kind
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.property.test_fuzz_server import run
from tests.support.fuzzing import HOSTILE, Target, held_fds, seal, target
from tests.support.guarded import LAYOUT, VALUE, make_key, value
from tests.support.peers import raw_stream, shake_hands, until_closed
from tests.support.scripted import soon

pytestmark = pytest.mark.fuzz

Way = Literal["put", "get", "eager", "early", "eager get"]
WAYS: list[Way] = ["put", "get", "eager", "early", "eager get"]
"""Eager puts have their bytes behind the PUT, or before it. To an eager get nobody expects an answer."""

KEY = make_key(HOSTILE, 5)
STORED = make_key(HOSTILE, 6)


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    with target("tcp") as made:
        tenant = made.portal.call(made.site.connect, "hostile")
        assert made.portal.call(tenant.put, STORED, value(2)) is Status.OK
        made.portal.call(tenant.connection.aclose)
        yield made


def read_some(sock: socket.socket, count: int, timeout_s: float = 1.0) -> bytes:
    """In a thread: up to ``count`` bytes, fewer if no more come."""
    sock.settimeout(timeout_s)
    came = b""
    try:
        while len(came) < count and (data := sock.recv(count - len(came))):
            came += data
    except OSError:
        pass
    return came


async def misbehave(made: Target, answers: list[tuple[str, bytes]], way: Way) -> None:
    """Attach a data connection, ask for a transfer, and answer the server's command with ``answers``.

    Args:
        made: the server.
        answers: (how to make the frame, bytes) one after the other.
        way: what is asked for; an eager request awaits no command, and its answers are there at once or before it.
    """
    early = way == "early"
    is_get = way in ("get", "eager get")
    eager = early or way.startswith("eager")
    credentials = Credentials(made.site.keys["hostile"], "hostile")
    async with raw_stream(made.factory, made.site.address) as stream:
        session = made.session()
        await shake_hands(stream, session)
        assert session.established is not None
        sock, ours, _ = await attach(
            socket.create_connection(made.site.address),
            credentials,
            session.established,
            soon(),
            label="test",
            eager=eager,
        )
        with sock:
            sealer = CommandSealer(ours)
            extent = Extent(1, 0, VALUE)
            body = (
                Get([GetItem(STORED, LAYOUT, extent)], 150, eager).pack()
                if is_get
                else Put([PutItem(KEY, 0, LAYOUT, extent)], 0, 150, eager).pack()
            )
            frames = seal(session, MessageType.REGISTER, Register(1, MemoryKind.HOST, 16 * VALUE).pack())
            frames += seal(session, MessageType.GET if is_get else MessageType.PUT, body, request_id=2)
            command = b""
            if not early:
                await send_all(stream, frames)
            if not eager:
                command = await anyio.to_thread.run_sync(read_some, sock, FIRST_BYTES)
            sock.setblocking(False)
            for how, data in answers:
                try:
                    sock.send(command if how == "reflected" else frame_of(sealer, how, data))
                except OSError:
                    break  # it was cut, or does not read
            if early:
                await send_all(stream, frames)
            with anyio.move_on_after(0.05):
                await until_closed(stream)
            if not answers:
                await anyio.sleep(0.2)
            stream._sock.shutdown(socket.SHUT_WR) if not stream._closing else None
            await until_closed(stream)
    assert made.site.server.handler._table._find(KEY) is None, "a value became visible that nobody moved"


def frame_of(sealer: CommandSealer, how: str, data: bytes) -> bytes:
    """An answer: sealed rightly, or not."""
    if how == "noise":
        return data
    if how == "payload":
        return data[:1] * VALUE
    kinds = {"sent": Kind.SENT, "written": Kind.WRITTEN, "read": Kind.READ, "write": Kind.WRITE}
    if how in kinds:
        return sealer.pack(kinds[how])
    if how == "spans":
        return sealer.pack(Kind.SENT, [Extent(2**32 - 1, 2**64 - 1, 2**64 - 1)] * (1 + len(data)))
    frame = bytearray(sealer.pack(Kind.SENT))
    frame[len(data) % len(frame)] ^= 1
    return bytes(frame)


ANSWERS = st.lists(
    st.tuples(
        st.sampled_from(["noise", "payload", "sent", "written", "read", "write", "spans", "spoilt"]),
        st.binary(min_size=1, max_size=60),
    ),
    max_size=4,
).filter(lambda answers: [how for how, _ in answers][:1] != ["sent"] or "payload" not in [how for how, _ in answers])
"""All but the right answer to a READ, which is what an eager put begins with, too: SENT, and then as many bytes as were
asked for, whatever they are."""


@pytest.mark.parametrize("way", WAYS)
def test_hostile_answers_on_a_data_connection(server: Target, fuzz_seconds: float, way: Way) -> None:
    before = held_fds()

    def check(answers: list[tuple[str, bytes]]) -> None:
        server.attack(misbehave, answers, way)

    run(40, fuzz_seconds, ANSWERS, check)
    assert held_fds() <= before


@pytest.mark.parametrize("way", ["put", "eager", "early"])
@pytest.mark.parametrize("at", [0, 4, 6, 8, 16, 36, FIRST_BYTES - 1])
def test_an_answer_with_a_wrong_byte_moves_nothing(server: Target, at: int, way: Way) -> None:
    """Wherever it is, in what the MAC covers or in the MAC: the value is not there afterwards, and the peer is cut."""
    before = server.cuts()
    server.attack(misbehave, [("spoilt", bytes(at)), ("payload", b"x")], way)
    assert server.cuts() > before


def test_the_servers_own_command_is_no_answer(server: Target) -> None:
    before = server.cuts()
    server.attack(misbehave, [("reflected", b""), ("payload", b"x")], "put")
    assert server.cuts() > before


@pytest.mark.parametrize("way", ["put", "eager", "early"])
def test_the_right_answer_moves_the_value(server: Target, way: Way) -> None:
    """What the tests above would be worth nothing without: the same script, rightly sealed, does store a value."""
    with pytest.raises(AssertionError, match="became visible"):
        server.attack(misbehave, [("sent", b""), ("payload", b"x")], way)
    assert server.portal.call(forget, server) == 1


async def forget(made: Target) -> int:
    """Delete what the right answer has stored; returns how many values that were."""
    client = await made.site.connect("hostile")
    statuses = await client.ask(Delete([KEY]))
    await client.connection.aclose()
    await made.site.until_idle(sessions=1)
    return sum(status is Status.OK for status in statuses)


def test_noise_on_data_connections_ends_their_session(server: Target) -> None:
    before = server.cuts()
    heard = [way for way in WAYS if way != "eager get"]
    for way in heard:
        server.attack(misbehave, [("noise", os.urandom(200))], way)
    assert server.cuts() - before >= len(heard)
