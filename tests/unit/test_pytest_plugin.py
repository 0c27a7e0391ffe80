"""The public pytest plugin: a real server for synchronous and asynchronous tests, under any plugin."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from memkv_vllm.config import load_client_config
from memkv_vllm.errors import ConnectError, EnvironmentFault
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.pytest_plugin import LoopbackServer
from memkv_vllm.transports.faults import Fail, Operation
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Deadline


async def session_with(server: LoopbackServer) -> str:
    """Connects and authenticates as any client would; the server's id."""
    config = load_client_config(server.environ)
    assert config.transport is not None
    transport = client_transport(config.transport.value)
    rail = config.servers[0].rails[0]
    credentials = Credentials(config.auth_key.get_secret_value(), config.auth_key_id)
    deadline = Deadline(time.monotonic() + 5)
    connection = await transport.connect(rail.host, rail.port, credentials, PeerKind.TOOL, deadline)
    identity = connection.established.server
    assert identity is not None
    await connection.aclose()
    await transport.aclose()
    return identity.server_id.hex()


def test_a_synchronous_test(memkv_loopback: LoopbackServer) -> None:
    assert memkv_loopback.running
    assert memkv_loopback.port > 0
    assert anyio.run(session_with, memkv_loopback) == memkv_loopback.statistics()["server"]["server_id"]


@pytest.mark.anyio
async def test_an_anyio_test(memkv_loopback: LoopbackServer) -> None:
    assert await session_with(memkv_loopback) == memkv_loopback.statistics()["server"]["server_id"]


@pytest.mark.asyncio
async def test_a_pytest_asyncio_test(memkv_loopback: LoopbackServer) -> None:
    assert await session_with(memkv_loopback) == memkv_loopback.statistics()["server"]["server_id"]


def test_the_key_is_private_and_not_in_the_environment(memkv_loopback: LoopbackServer) -> None:
    assert memkv_loopback.key_file.read_text().strip() == memkv_loopback.auth_key
    assert stat.S_IMODE(memkv_loopback.key_file.stat().st_mode) == 0o600
    assert memkv_loopback.auth_key not in memkv_loopback.environ.values()
    assert memkv_loopback.auth_key not in repr(memkv_loopback)


@pytest.mark.anyio
async def test_stopping_and_starting_again_keeps_the_address(memkv_loopback: LoopbackServer) -> None:
    address, first = memkv_loopback.address, await session_with(memkv_loopback)
    await memkv_loopback.astop()
    assert not memkv_loopback.running
    with pytest.raises(ConnectError):
        await session_with(memkv_loopback)
    await memkv_loopback.astart()
    assert memkv_loopback.address == address
    assert await session_with(memkv_loopback) != first


def test_stopping_and_starting_twice_is_harmless(memkv_loopback: LoopbackServer) -> None:
    memkv_loopback.start()
    memkv_loopback.stop()
    memkv_loopback.stop()
    with pytest.raises(RuntimeError, match="does not run"):
        memkv_loopback.statistics()


def test_several_servers_and_options(memkv_loopback_factory: Callable[..., LoopbackServer]) -> None:
    small = memkv_loopback_factory(max_size="4MiB")
    large = memkv_loopback_factory(max_size="8MiB")
    assert small.port != large.port
    assert small.statistics()["arena"]["size"] == 4 << 20
    assert large.statistics()["arena"]["size"] == 8 << 20


@pytest.mark.fault
def test_faults_strike_and_can_be_taken_back(memkv_loopback: LoopbackServer) -> None:
    rule = memkv_loopback.faults.add(Operation.CONNECT, Fail())
    with pytest.raises(ConnectError):
        anyio.run(session_with, memkv_loopback)
    assert rule.fired == 1
    memkv_loopback.faults.clear()
    assert anyio.run(session_with, memkv_loopback)


def test_a_taken_port_is_an_error_at_start(memkv_loopback: LoopbackServer, tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:
        LoopbackServer(tmp_path, port=memkv_loopback.port).start()
    assert isinstance(caught.value, EnvironmentFault)


def test_it_works_in_a_project_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_it(memkv_loopback):
            assert set(memkv_loopback.environ) == {"MEMKV_SERVERS", "MEMKV_AUTH_KEY_FILE", "MEMKV_TRANSPORT"}
            assert memkv_loopback.statistics()["table"]
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
