"""The server as a process: what it tells systemd, how it drains, what it logs, and with which status it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import yaml
from anyio.streams.tls import TLSAttribute

from memkv_vllm.errors import TransportError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.serve import tell_systemd
from memkv_vllm.transports.base import ClientConnection, Region
from memkv_vllm.transports.loopback import LoopbackClientTransport
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status
from tests.support.authority import Authority
from tests.support.store import LAYOUT, VALUE, make_key

pytestmark = pytest.mark.timeout(60)  # each starts processes

ROOT = Path(__file__).resolve().parents[2]
KEY = "5e" * 32
TOKEN = "secret-token-of-this-test"


def write_config(folder: Path, **network: Any) -> Path:
    path = folder / "server.yaml"
    base = {"address": "127.0.0.1:0", "admin_address": "127.0.0.1:0", "auth_key": KEY, "admin_token": TOKEN}
    path.write_text(yaml.safe_dump({"network": {**base, **network}, "memory": {"max_size": "8 MiB"}}))
    path.chmod(0o600)
    return path


@dataclass
class Process:
    """A server process."""

    process: subprocess.Popen[str]
    port: int
    admin: str

    def end(self, timeout_s: float = 15) -> tuple[int, str]:
        """Its exit status and what it logged, once it has ended."""
        _, logged = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, logged


@contextmanager
def spawned(*command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Killed on exit if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@contextmanager
def process_of(*command: str, **environ: str) -> Iterator[Process]:
    """A server that is ready."""
    with spawned(*command, **environ) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("ready ")), "")
        found = re.match(r"ready address=127\.0\.0\.1:(\d+) admin=(\S+)", line)
        assert found, process.communicate(timeout=5)
        yield Process(process, int(found[1]), found[2])


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[tuple[ClientConnection, HostMemory]]:
    """A client with one region."""
    deadline = Deadline(time.monotonic() + 10)
    credentials = Credentials(bytes.fromhex(KEY), "default")
    connection = await LoopbackClientTransport().connect("127.0.0.1", port, credentials, PeerKind.ENGINE, deadline)
    with HostMemory.create("staging", 1 << 20) as memory:
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                try:
                    await connection.run()
                except TransportError:
                    pass

            tasks.start_soon(run)
            await connection.register(Region(1, MemoryKind.HOST, memory.length, memory), deadline)
            yield connection, memory
            await connection.aclose()
            tasks.cancel_scope.cancel()


def put_of(memory: HostMemory) -> Put:
    item = PutItem(make_key(1), digest(memory.view(0, VALUE)), LAYOUT, Extent(1, 0, VALUE))
    return Put([item], ChecksumAlgorithm.XXH3_64_TREE_1M, 20_000)


async def get(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with session.get(url) as response:
        return response.status, await response.json(content_type=None)


async def get_until(session: aiohttp.ClientSession, url: str, condition: Callable[[int, Any], bool]) -> Any:
    """Asks until ``condition(status, answer)`` holds; returns the answer."""
    with anyio.fail_after(10):
        for pause in repeat(0.01):
            status, answer = await get(session, url)
            if condition(status, answer):
                break
            await anyio.sleep(pause)
    return answer


# ---------------------------------------------------------------------------------------------------- draining


def in_flight(_: int, answer: Any) -> bool:
    return bool(answer["server"]["inflight"] == 1)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_put_in_flight_ends_well_while_the_server_drains(tmp_path: Path, number: signal.Signals) -> None:
    """Meanwhile /v1/ready is 503, new clients are refused, and a second signal changes nothing."""
    with process_of("tests.support.slow_server", "2", str(write_config(tmp_path))) as server:
        async with aiohttp.ClientSession() as session, client_of(server.port) as (connection, memory):
            assert await get(session, f"http://{server.admin}/v1/ready") == (200, {"status": "ready"})
            results: list[Status] = []

            async def put() -> None:
                deadline = Deadline(time.monotonic() + 20)
                results.extend(await connection.request(put_of(memory), deadline))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                await get_until(session, f"http://{server.admin}/v1/status", in_flight)
                server.process.send_signal(number)
                ready = f"http://{server.admin}/v1/ready"
                answer = await get_until(session, ready, lambda status, _: status == 503)
                assert answer["reasons"][0]["reason"] == "draining"
                assert results == [], "the put is still on its way"
                server.process.send_signal(number)
                with pytest.raises(TransportError):
                    async with client_of(server.port):
                        pass
            assert results == [Status.OK]
        status, logged = server.end()
        assert status == 0, logged
        assert "Traceback" not in logged
        assert json.loads(logged.splitlines()[-1])["event"] == "stopped"


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_put_that_does_not_end_is_answered_by_the_end_of_its_connection(tmp_path: Path) -> None:
    """The drain has a deadline: a hung client cannot keep a server from ending."""
    with process_of("tests.support.slow_server", "60", str(write_config(tmp_path))) as server:
        async with aiohttp.ClientSession() as session, client_of(server.port) as (connection, memory):
            async with anyio.create_task_group() as tasks:

                async def put() -> None:
                    with pytest.raises(TransportError):
                        await connection.request(put_of(memory), Deadline(time.monotonic() + 19))

                tasks.start_soon(put)
                await get_until(session, f"http://{server.admin}/v1/status", in_flight)
                server.process.terminate()
        status, logged = server.end()
        assert status == 0, logged
        assert "server.drain_timeout" in logged


@pytest.mark.anyio
async def test_a_server_that_is_still_starting_says_so_and_can_be_ended(tmp_path: Path) -> None:
    """A start that reads large drives takes minutes: it is seen to be starting, and SIGTERM does not wait for it."""
    with spawned("tests.support.slow_server", "never", str(write_config(tmp_path))) as process:
        assert process.stderr is not None
        events = (json.loads(line) for line in process.stderr)
        admin = next(event["address"] for event in events if event["event"] == "admin.started")
        async with aiohttp.ClientSession() as session:
            status, answer = await get(session, f"http://{admin}/v1/ready")
            assert (status, answer["reasons"][0]["reason"]) == (503, "starting")
        process.send_signal(signal.SIGHUP)
        process.terminate()
        said, logged = process.communicate(timeout=15)
    assert process.returncode == 0, logged
    assert "ready" not in said
    assert [json.loads(line)["event"] for line in logged.splitlines()][-1] == "stopped"
    assert "Traceback" not in logged


# ---------------------------------------------------------------------------------------------------- systemd


def test_systemd_hears_that_it_is_ready_and_that_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.settimeout(10)
        command = ("memkv_vllm", "start", "--config", str(write_config(tmp_path)))
        with process_of(*command, NOTIFY_SOCKET=str(path)) as server:
            assert sock.recv(64) == b"READY=1"
            server.process.terminate()
            assert sock.recv(64) == b"STOPPING=1"
            assert server.end()[0] == 0


def test_an_abstract_socket_and_none_at_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    name = f"memkv-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert tell_systemd("READY=1")
        assert sock.recv(64) == b"READY=1"
    monkeypatch.setenv("NOTIFY_SOCKET", "/none/notify")
    assert not tell_systemd("READY=1")
    assert "event=systemd_not_told" in caplog.text
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not tell_systemd("READY=1")


# ---------------------------------------------------------------------------------------------------- logs, ends


def test_json_logs_have_fields_and_no_secret(tmp_path: Path) -> None:
    command = ("memkv_vllm", "start", "--config", str(write_config(tmp_path)), "--log-json")
    with process_of(*command) as server:

        async def misuse() -> None:
            url = f"http://{server.admin}/v1/gc"
            async with aiohttp.ClientSession() as session:
                for token in ("wrong-token-of-somebody", TOKEN):
                    headers = {"Authorization": f"Bearer {token}"}
                    async with session.post(url, json={"idle_s": 1}, headers=headers) as response:
                        assert response.status == (200 if token == TOKEN else 401)

        anyio.run(misuse)
        server.process.terminate()
        status, logged = server.end()
    assert status == 0
    lines = [json.loads(line) for line in logged.splitlines()]
    events = {line["event"]: line for line in lines}
    assert {"admin.started", "server.started", "admin.refused", "admin.command", "stopping", "stopped"} <= events.keys()
    assert events["admin.started"]["address"] == server.admin
    assert events["server.started"]["arena"] == 8 << 20
    assert (events["admin.refused"]["reason"], events["admin.refused"]["command"]) == ("wrong", "gc")
    assert events["stopping"]["signal"] == "SIGTERM"
    for secret in (TOKEN, KEY, "wrong-token-of-somebody"):
        assert secret not in logged


def test_a_taken_admin_address_is_one_line_and_status_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = write_config(tmp_path, admin_address=address)
        command = [sys.executable, "-m", "memkv_vllm", "start", "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, cwd=ROOT)
        dev = [
            sys.executable,
            "-m",
            "memkv_vllm",
            "start",
            "--dev",
            "--address=127.0.0.1:0",
            f"--admin-address={address}",
        ]
        key = f"--key-file={tmp_path / 'dev.key'}"
        dev_done = subprocess.run([*dev, "--max-size=8MiB", key], capture_output=True, text=True, timeout=15, cwd=ROOT)
    for end in (done, dev_done):
        assert end.returncode == 1
        assert "Traceback" not in end.stderr
        assert f"cannot serve admin HTTP on {address}" in end.stderr.splitlines()[-1]
        assert "ready" not in end.stdout


@pytest.mark.anyio
async def test_ready_is_said_only_once_clients_may_come(tmp_path: Path) -> None:
    """What the line announces is there: a script may connect the moment it has read it."""
    with process_of("memkv_vllm", "start", "--config", str(write_config(tmp_path))) as server:
        async with aiohttp.ClientSession() as session:
            assert (await get(session, f"http://{server.admin}/v1/ready"))[0] == 200
            async with client_of(server.port) as (connection, memory):
                statuses = await connection.request(put_of(memory), Deadline(time.monotonic() + 5))
                assert statuses == [Status.OK]
            assert (await get(session, f"http://{server.admin}/v1/status"))[1]["table"]["complete"] == 1


@pytest.mark.anyio
async def test_a_hangup_reads_the_certificate_again(tmp_path: Path) -> None:
    """A certificate is renewed without a restart; one that cannot be used leaves the old one in force."""
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    config = write_config(tmp_path, tls_cert=str(pair.cert), tls_key=str(pair.key))
    trusting = ssl.create_default_context(cafile=authority.file)

    async def serial(admin: str) -> int:
        host, port = admin.split(":")
        async with await anyio.connect_tcp(host, int(port), ssl_context=trusting, tls_hostname=host) as stream:
            certificate = stream.extra(TLSAttribute.peer_certificate)
            assert certificate is not None
            return int(str(certificate["serialNumber"]), 16)

    with process_of("memkv_vllm", "start", "--config", str(config)) as server:
        first = await serial(server.admin)
        renewed = authority.issue("127.0.0.1")
        server.process.send_signal(signal.SIGHUP)
        with anyio.fail_after(10):
            for pause in repeat(0.02):
                if await serial(server.admin) != first:
                    break
                await anyio.sleep(pause)
        second = await serial(server.admin)
        renewed.cert.write_text("no certificate")
        server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGHUP)
        assert await serial(server.admin) == second
        server.process.terminate()
        status, logged = server.end()
    assert status == 0, logged
    assert "Traceback" not in logged
