"""A real server under random, mutated and hostile frames (P091, P092).

Over loopback and tcp: strangers before authentication, and peers that hold a key and seal their frames rightly, which
is where lengths, counts, offsets and JSON can hurt. After each attack another session works and its value is right,
nothing is left (sessions, connections, reservations, pins), no fault of the server was met; and whoever broke the
protocol was cut after the first bad frame and counted.

Examples are the same in every run. ``pytest --fuzz-seconds N`` goes on with random ones for N seconds per test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES, MessageType
from memkv_vllm.protocol.messages import Exists, Put, PutItem
from memkv_vllm.types import Extent
from tests.support.fuzzing import (
    BODIES,
    HOSTILE,
    REQUEST,
    Target,
    held_fds,
    hostile_requests,
    raw_bytes,
    spoilt_stream,
    target,
)
from tests.support.guarded import make_key
from tests.support.peers import client_session

pytestmark = pytest.mark.fuzz

PING_BYTES = HEADER_BYTES + MAC_BYTES


@pytest.fixture(scope="module", params=["loopback", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Target]:
    with target(request.param) as made:
        yield made


def run(examples: int, seconds: float, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """``check`` for so many fixed examples, then for random ones as long as asked."""
    quiet: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    settings(max_examples=examples, derandomize=True, **quiet)(given(strategy)(check))()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        settings(max_examples=200, phases=[Phase.generate], **quiet)(given(strategy)(check))()


# ------------------------------------------------------------------------------------------------ strangers


def hello() -> bytes:
    """The first frame of an honest client."""
    session = client_session(bytes(32), "hostile")
    session.start()
    return session.data_to_send()


@st.composite
def mutated(draw: st.DrawFn, frame: bytes) -> bytes:
    """``frame`` with bytes flipped, cut, inserted, repeated or replaced."""
    data = bytearray(frame)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "edge"]))
        if how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif how == "repeat":
            data += data[at:]
        elif data:
            data[at : at + 4] = draw(st.sampled_from([bytes(4), b"\xff" * 4, b"\0\0\0\x80"]))
    return bytes(data)


def test_strangers(server: Target, fuzz_seconds: float) -> None:
    strategy = st.lists(mutated(hello()) | st.binary(max_size=300) | st.just(hello()), min_size=1, max_size=3)

    def check(chunks: list[bytes]) -> None:
        cut = server.attack(raw_bytes, chunks)
        assert cut == (1 if b"".join(chunks) else cut)

    run(100, fuzz_seconds, strategy, check)
    assert server.site.server.statistics()["counters"].get("sessions") == 1 + server.site.count("sessions_closed")


# ------------------------------------------------------------------------------------------------ holders of a key


def test_hostile_bodies_of_every_type(server: Target, fuzz_seconds: float) -> None:
    """First each type by itself, so that none is left to chance; then several in one session."""

    def check(requests: list[tuple[int, bytes]]) -> None:
        server.attack(hostile_requests, requests)

    for kind, bodies in BODIES.items():
        one = st.tuples(st.just(kind), bodies).map(lambda request: [request])
        run(8, 0, one, check)
    several = st.lists(REQUEST, min_size=1, max_size=6)
    run(80, fuzz_seconds, several, check)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MessageType.PUT, b"\xff\xff\x45\x01" + bytes(4)),
        (MessageType.EXISTS, b"\x01\x00\x43\x00\xff\xff" + bytes(0x43)),
        (MessageType.EXISTS, b"\x00\x00\x00\x00\xff\xff"),
        (MessageType.EXISTS, b"\x01\x00\x43\x00\x00\x00" + bytes(0x43)),
        (MessageType.GET, b"\x01\x00\x00\x00" + bytes(4) + bytes(28)),
        (MessageType.ADMIN, b'{"a":' * 13_000),
        (MessageType.ADMIN, b"[" * 65_536),
        (MessageType.ADMIN, b"[" * 65_537),
        (MessageType.ADMIN, b'{"command":' + b"9" * 60_000 + b"}"),
        (MessageType.REGISTER, b"\x02\0\0\0" + b"\0" + b"\xff" * 8 + b"\0\0"),
        (MessageType.REGISTER, b"\x02\0\0\0" + b"\x01" + b"\xff" * 8 + b"\0\0"),
    ],
)
def test_known_edges(server: Target, kind: MessageType, body: bytes) -> None:
    server.attack(hostile_requests, [(kind, body)])


@pytest.mark.parametrize("timeout_ms", [0, 1, 2**32 - 1])
@pytest.mark.parametrize(
    "extent",
    [
        Extent(1, 2**64 - 1, 1),
        Extent(1, 2**64 - 4096, 4096),
        Extent(1, 0, 2**64 - 1),
        Extent(1, 2**63, 2**63),
        Extent(2**32 - 1, 0, 4096),
        Extent(1, 16 * 4096 - 1, 2),
        Extent(1, 0, 0),
    ],
    ids=str,
)
def test_extents_beyond_all_memory(server: Target, extent: Extent, timeout_ms: int) -> None:
    """Refused one by one: the peer stays, and nothing is reserved for it."""
    put = Put([PutItem(make_key(HOSTILE, 1), 0, 0, extent)], 0, timeout_ms)
    server.attack(hostile_requests, [(MessageType.PUT, put.pack())])


def test_the_largest_question_is_answered_in_bounded_time(server: Target) -> None:
    body = Exists([make_key(HOSTILE, number)[:-2] for number in range(1024)], 64).pack()
    assert server.attack(hostile_requests, [(MessageType.EXISTS, body)] * 4)


# ------------------------------------------------------------------------------------------------ spoilt frames


def spoilers() -> st.SearchStrategy[tuple[int, Callable[[list[bytes]], list[bytes]]]]:
    """How the frames are spoilt from the ``first`` on: (first, what to do with all of them)."""

    def flip(first: int, at: int, bit: int) -> Callable[[list[bytes]], list[bytes]]:
        def spoil(frames: list[bytes]) -> list[bytes]:
            frame = bytearray(frames[first])
            frame[at] ^= 1 << bit
            return [*frames[:first], bytes(frame), *frames[first + 1 :]]

        return spoil

    firsts = st.integers(0, 6)
    places = st.integers(0, PING_BYTES - 1)
    simple: dict[str, Callable[[int], Callable[[list[bytes]], list[bytes]]]] = {
        "dropped": lambda first: lambda frames: frames[:first] + frames[first + 1 :],
        "repeated": lambda first: lambda frames: frames[:first] + frames[:1] + frames[first:],
        "swapped": lambda first: (
            lambda frames: [*frames[:first], frames[first + 1], frames[first], *frames[first + 2 :]]
        ),
        "shorter": lambda first: lambda frames: [*frames[:first], frames[first][:-1], *frames[first + 1 :]],
        "longer": lambda first: lambda frames: [*frames[:first], b"\0" + frames[first], *frames[first + 1 :]],
        "handshake again": lambda first: lambda frames: [*frames[:first], hello(), *frames[first:]],
    }
    flips = st.builds(lambda first, at, bit: (first, flip(first, at, bit)), firsts, places, st.integers(0, 7))
    others = st.builds(lambda first, how: (first, simple[how](first)), firsts, st.sampled_from(sorted(simple)))
    return flips | others


def test_nothing_behind_the_first_bad_frame_is_carried_out(server: Target, fuzz_seconds: float) -> None:
    def check(spoiler: tuple[int, Callable[[list[bytes]], list[bytes]]]) -> None:
        first, spoil = spoiler
        carried_out, cut = server.attack(spoilt_stream, spoil)
        # "repeated" at the very start is the first ping itself: the second is the bad one.
        assert carried_out - (1 if first == 0 else 0) <= first
        assert cut == 1

    run(80, fuzz_seconds, spoilers(), check)


# ------------------------------------------------------------------------------------------------ what is left


def test_descriptors_are_constant_over_attacks(server: Target) -> None:
    requests = [(MessageType.PING, b""), (MessageType.PUT, b"\x01"), (MessageType.PING, b"")]
    server.attack(hostile_requests, requests)
    before = held_fds()
    for _ in range(30):
        server.attack(hostile_requests, requests)
        server.attack(raw_bytes, [hello(), b"noise"])
    assert held_fds() <= before
