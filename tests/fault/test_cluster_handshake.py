"""Servers that accept and go wrong before they are of use. P027, P034, P085.

Whatever they do, an engine starts at once, its blocks are misses, and it uses the server as soon as that is well.
"""

from __future__ import annotations

import logging
import os
import time

import anyio
import pytest

from memkv_vllm.engine import link as link_module
from memkv_vllm.engine.linklog import LINES_AT_ONCE
from memkv_vllm.errors import MemkvError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.faults import NoReply, Operation
from memkv_vllm.transports.loopback import LoopbackClientTransport
from memkv_vllm.types import Deadline, LossReason
from tests.support.cutter import Cutter
from tests.support.ranks import Cluster, cluster_settings, eventually, rank
from tests.support.store_process import StoreProcess

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]


def free_port(key: bytes) -> int:
    """A port that a store had, and has no longer."""
    with StoreProcess(key) as store:
        return store.port


async def shake_hands(port: int, key: bytes) -> None:
    """One handshake; raises when it fails."""
    deadline = Deadline(time.monotonic() + 10)
    connection = await LoopbackClientTransport().connect("127.0.0.1", port, Credentials(key), PeerKind.TOOL, deadline)
    await connection.aclose()


def length_of_handshake(front: int, store: StoreProcess, key: bytes) -> int:
    """How many bytes a server says in a handshake that succeeds: the least allowance with which one does."""
    low, high = 0, 4096
    while low + 1 < high:
        middle = (low + high) // 2
        with Cutter(front, store.port, [middle]):
            try:
                anyio.run(shake_hands, front, key)
                high = middle
            except MemkvError:
                low = middle
    return high


def test_a_server_that_closes_at_each_byte_of_the_handshake(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P034: every offset is a refused connection like any other; no block waits for it, nothing piles up."""
    monkeypatch.setattr(link_module, "RECONNECT_FIRST_S", 0.0005)
    monkeypatch.setattr(link_module, "RECONNECT_MAX_S", 0.001)
    key = os.urandom(32)
    front = free_port(key)
    with StoreProcess(key) as store:
        length = length_of_handshake(front, store, key)
        assert 100 < length < 4096
        settings = cluster_settings(key, {"a": front})
        # Beyond the handshake too: through the answers to the first requests.
        offsets = range(length + 40)
        with Cutter(front, store.port, offsets) as cutter, rank(settings) as one:
            while cutter.cut < len(offsets):
                assert one.loaded(range(4)).lost == {LossReason.BREAKER: 4}
                assert one.stored(range(4)).lost == {LossReason.BREAKER: 4}
            cutter.close()
            store.kill()
            lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert 0 < len(lines) <= LINES_AT_ONCE + 3, [line.getMessage() for line in lines]
            assert not [line for line in lines if line.exc_info]
            with StoreProcess(key, front):
                one.ready().stored(range(4))
                result = one.loaded(range(4))
                assert (result.lost, one.wrong(result, range(4))) == ({}, [])
                one.idle()


def test_a_server_that_accepts_and_never_answers_is_named_with_the_reason(
    tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    """P085: the engine is up at once, whatever ``connect_timeout_s`` is; after it the log says what is wrong."""
    with Cluster(tmp_path) as cluster:  # type: ignore[arg-type]
        cluster.only.faults.add(Operation.CONNECT, NoReply())
        with rank(cluster.settings(connect_timeout_s=600)) as one:
            assert one.loaded(range(5)).lost == {LossReason.BREAKER: 5}
        with rank(cluster.settings(connect_timeout_s=0.2)) as one:
            eventually(lambda: "event=server_down" in caplog.text, "the reason is in the log")
            assert one.stored(range(5)).lost == {LossReason.BREAKER: 5}
        (line,) = [record.getMessage() for record in caplog.records if "event=server_down" in record.getMessage()]
        assert "accepted the connection and did not answer by the deadline" in line
