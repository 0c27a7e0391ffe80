"""The loop that accepts: it outlives every socket, and tells a host without descriptors from a peer that went."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from memkv_vllm.transports.accepting import accept_forever
from tests.support.harness import wait_until

pytestmark = pytest.mark.anyio


class Listener:
    """A listening socket whose next accepts fail as told."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.inner = socket.create_server(("127.0.0.1", 0))
        self.inner.setblocking(False)

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(0), "made up")
        return self.inner.accept()

    def fileno(self) -> int:
        return self.inner.fileno()


class World:
    """What became of connections."""

    def __init__(self, *errors: int, tune: Callable[[socket.socket], None] = lambda sock: None) -> None:
        self.listener = Listener(*errors)
        self.counts: Counter[str] = Counter()
        self.taken: list[socket.socket] = []
        self.tune = tune

    async def run(self) -> None:
        log = logging.getLogger("memkv.transports.test")
        await accept_forever(
            self.listener,  # type: ignore[arg-type]
            lambda sock, _: self.taken.append(sock),
            lambda event: self.counts.update([event]),
            log,
            tune=self.tune,
        )

    async def takes_one(self) -> float:
        """Seconds until a connection is taken."""
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run)
            with socket.create_connection(self.listener.inner.getsockname()):
                await wait_until(lambda: self.taken, "it is taken")
            tasks.cancel_scope.cancel()
        seconds = time.monotonic() - started
        for sock in (*self.taken, self.listener.inner):
            sock.close()
        return seconds


async def test_a_host_without_descriptors_waits_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    world = World(errno.EMFILE, errno.ENOMEM)
    assert await world.takes_one() >= 0.2
    assert world.counts == {"accept_failed": 2}
    assert "cannot accept a connection" in caplog.text


async def test_a_peer_that_went_before_it_was_accepted_costs_nothing() -> None:
    world = World(*[errno.ECONNABORTED] * 50)
    assert await world.takes_one() < 5  # 50 pauses would be as long
    assert world.counts == {}


async def test_a_socket_that_is_reset_before_its_options_are_set_is_dropped() -> None:
    dropped: list[socket.socket] = []

    def tune(sock: socket.socket) -> None:
        if len(dropped) < 3:
            dropped.append(sock)
            raise OSError(errno.EINVAL, "Invalid argument")

    world = World(tune=tune)
    address = world.listener.inner.getsockname()
    early = [socket.create_connection(address) for _ in range(3)]
    await world.takes_one()
    assert world.counts == {}
    assert all(sock.fileno() == -1 for sock in dropped)
    for sock in early:
        sock.close()
