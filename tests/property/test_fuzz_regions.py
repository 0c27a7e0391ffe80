"""What a peer that holds a key may pass as its memory: descriptors of any kind, number, size and seal (loopback).

The server maps them, so a region that is not what it claims to be must never be read or written.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from memkv_vllm.errors import ConnectionLost
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Put, PutItem, Register
from memkv_vllm.transports.streams import send_all
from memkv_vllm.types import Extent, MemoryKind
from tests.support.fuzzing import HOSTILE, Target, held_fds, seal, target
from tests.support.guarded import make_key
from tests.support.peers import raw_stream, shake_hands, until_closed

pytestmark = pytest.mark.fuzz

PAGE = 4096
SHRINK_GROW = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    with target("loopback") as made:
        yield made


def memfd(size: int, seals: int = SHRINK_GROW) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe_end() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def unix_socket() -> int:
    return socket.socket(socket.AF_UNIX).detach()


OFFERS: dict[str, tuple[Callable[[], int], int]] = {
    "right": (lambda: memfd(4 * PAGE), 4 * PAGE),
    "shorter than it says": (lambda: memfd(PAGE), 4 * PAGE),
    "longer than it says": (lambda: memfd(8 * PAGE), 4 * PAGE),
    "may shrink": (lambda: memfd(4 * PAGE, fcntl.F_SEAL_GROW), 4 * PAGE),
    "may grow": (lambda: memfd(4 * PAGE, fcntl.F_SEAL_SHRINK), 4 * PAGE),
    "cannot be written": (lambda: memfd(4 * PAGE, SHRINK_GROW | fcntl.F_SEAL_WRITE), 4 * PAGE),
    "empty": (lambda: memfd(0), 0),
    "not whole pages": (lambda: memfd(PAGE + 1), PAGE + 1),
    "larger than all memory": (lambda: memfd(1 << 44), 1 << 44),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), 4 * PAGE),
    "a pipe": (pipe_end, 4 * PAGE),
    "a socket": (unix_socket, 4 * PAGE),
    "a folder": (lambda: os.open("/", os.O_RDONLY), 4 * PAGE),
    "read only": (lambda: os.open("/proc/self/exe", os.O_RDONLY), 4 * PAGE),
}


async def offer(made: Target, name: str) -> bytes:
    """Register it, then put out of its whole length; returns what came back."""
    make, length = OFFERS[name]
    fd = make()
    try:
        async with raw_stream(made.factory, made.site.address) as stream:
            session = made.session()
            await shake_hands(stream, session)
            data = seal(session, MessageType.REGISTER, Register(1, MemoryKind.HOST, length).pack())
            stream.send_nowait(memoryview(data), (fd,))
            put = Put([PutItem(make_key(HOSTILE, 9), 0, 0, Extent(1, 0, max(1, length)))], 0, 100)
            try:
                await send_all(stream, seal(session, MessageType.PUT, put.pack(), request_id=2))
                stream._sock.shutdown(socket.SHUT_WR)
            except (ConnectionLost, OSError):
                pass
            return await until_closed(stream)
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", OFFERS)
def test_a_region_is_what_it_claims_to_be_or_its_peer_is_cut(server: Target, name: str) -> None:
    before, fds = server.cuts(), held_fds()
    server.attack(offer, name)
    refused = name not in ("right", "not whole pages", "larger than all memory")
    assert (server.cuts() > before) == refused
    assert held_fds() <= fds


def test_descriptors_that_belong_to_nothing(server: Target) -> None:
    """They are closed, whether the frame is good, bad or unfinished."""

    async def many(made: Target, data: bytes, count: int) -> None:
        fds = [memfd(PAGE) for _ in range(count)]
        try:
            async with raw_stream(made.factory, made.site.address) as stream:
                session = made.session()
                await shake_hands(stream, session)
                frame = data or seal(session, MessageType.PING, b"")
                for _ in range(4):
                    try:
                        stream.send_nowait(memoryview(frame), fds)
                    except ConnectionLost:
                        break
                stream._sock.shutdown(socket.SHUT_WR)
                await until_closed(stream)
        finally:
            for fd in fds:
                os.close(fd)

    before = held_fds()
    attack: Callable[..., Awaitable[None]] = many
    for data in (b"", b"x", b"mKV1", bytes(100)):
        for count in (1, 3, 8):
            server.attack(attack, data, count)
    assert held_fds() <= before
