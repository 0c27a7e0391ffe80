"""Admin HTTP of a real store: what each path answers, who may change something, and what strangers can do to it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from memkv_vllm.errors import EnvironmentFault, StoreError
from memkv_vllm.store.admin import listener as listener_module
from memkv_vllm.store.admin.collector import CONTENT_TYPE
from memkv_vllm.store.admin.listener import tls_context
from memkv_vllm.store.admin.routes import HEADERS
from memkv_vllm.store.admin.server import AdminServer
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.loopback import LoopbackServerTransport
from tests.support.admin import TOKEN, Running, admin_config, find_errors, serving_admin
from tests.support.authority import Authority
from tests.support.harness import wait_until
from tests.support.store import NAMESPACE, VALUE, Rig, make_key, value

pytestmark = pytest.mark.anyio

READS = [
    "/",
    "/page.css",
    "/page.js",
    "/v1/health",
    "/v1/history",
    "/v1/metrics",
    "/v1/namespaces",
    "/v1/ready",
    "/v1/servers",
    "/v1/status",
]
COMMANDS: dict[str, Any] = {"reset": {"namespace": NAMESPACE.hex()}, "gc": {"idle_s": 1e6}, "evict": {"bytes": 1}}


def store_values(running: Running, count: int, namespace: bytes = NAMESPACE) -> None:
    """Values without a client: reserved and committed at the table."""
    table = running.server.handler._table
    for number in range(count):
        key = make_key(number, namespace=namespace)
        result = table.reserve(key, VALUE, 0, 0, 0, "test", running.server.handler._clock())
        assert table.commit(key, result.generation)


# ---------------------------------------------------------------------------------------------------- reads


@pytest.mark.parametrize("path", READS)
async def test_every_read_answers_without_a_token(path: str) -> None:
    async with serving_admin() as running:
        said = await running.ask(path)
        assert said.status == 200, said.text
        assert {name: said.headers.get(name) for name in HEADERS} == HEADERS
        assert "Access-Control-Allow-Origin" not in said.headers
        assert "Set-Cookie" not in said.headers
        head = await running.ask(path, "HEAD")
        assert (head.status, head.text) == (200, "")


async def test_health_ready_and_status_of_a_store_that_works() -> None:
    async with serving_admin() as running:
        store_values(running, 3)
        assert (await running.ask("/v1/health")).json == {"status": "ok"}
        assert (await running.ask("/v1/ready")).json == {"status": "ready"}
        status = (await running.ask("/v1/status")).json
        assert status["table"]["complete"] == 3
        assert status["admin"]["healthy"] == status["admin"]["ready"] == 1
        assert len(status["sample"]) == len((await running.ask("/v1/history")).json["columns"])
        (space,) = (await running.ask("/v1/namespaces")).json["namespaces"]
        assert (space["namespace"], space["values"]) == (NAMESPACE.hex(), 3)


async def test_metrics_are_prometheus_text() -> None:
    async with serving_admin() as running:
        store_values(running, 2)
        said = await running.ask("/v1/metrics")
        assert said.headers["Content-Type"] == CONTENT_TYPE
        assert 'memkv_table_entries{state="complete"} 2.0' in said.text
        assert 'memkv_info{boot_id="' in said.text


async def test_before_the_store_is_there_it_says_starting() -> None:
    async with serving_admin(attach=False) as running:
        for path in ("/v1/health", "/v1/ready"):
            said = await running.ask(path)
            assert (said.status, said.json["reasons"][0]["reason"]) == (503, "starting")
        assert (await running.ask("/v1/status")).json["admin"]["ready"] == 0
        for path in ("/v1/metrics", "/v1/namespaces"):
            assert (await running.ask(path)).status == 503
        assert (await running.command("gc", {"idle_s": 1})).status == 503
        assert (await running.ask("/")).status == 200


async def test_a_store_that_drains_is_not_ready_and_still_shows_its_state() -> None:
    async with serving_admin() as running:
        running.server.handler.close()
        for path in ("/v1/ready", "/v1/health"):
            said = await running.ask(path)
            assert (said.status, [reason["reason"] for reason in said.json["reasons"]]) == (503, ["draining"])
        assert (await running.ask("/v1/status")).status == 200
        assert "memkv_ready 0.0" in (await running.ask("/v1/metrics")).text


async def test_degraded_names_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_admin() as running:
        running.server.arena_slow = True
        monkeypatch.setattr(running.server, "health", lambda: ["drive /dev/x is out after 8 errors"])
        (transport, *_) = running.server._transports
        monkeypatch.setattr(transport, "health", lambda: ["RDMA port mlx5_0:1 is down"])
        running.admin._lag.add(0.5, 3.5)
        said = await running.ask("/v1/health")
        assert said.status == 503
        found = {reason["reason"]: reason for reason in said.json["reasons"]}
        assert found.keys() == {"arena_not_populated", "event_loop_lag", "disk", "rail"}
        assert found["rail"]["detail"] == "RDMA port mlx5_0:1 is down"
        assert "/dev/x" in found["disk"]["detail"]
        assert all(reason["next_step"] for reason in found.values())
        assert (await running.ask("/v1/ready")).status == 200  # clients may come all the same
        assert 'memkv_degraded{reason="disk"} 1.0' in (await running.ask("/v1/metrics")).text


async def test_the_loops_lag_is_measured() -> None:
    async with serving_admin() as running:
        import time

        await wait_until(lambda: running.admin._lag._last, "a first measurement")
        time.sleep(0.7)  # noqa: ASYNC251 - blocking the loop is what is to be seen
        await wait_until(lambda: running.admin._lag.worst_s > 0.1, "the late loop")


# ---------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", COMMANDS)
async def test_commands_need_the_token(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """P092: without the token nobody changes anything, and what is refused is logged with whom it came from."""
    async with serving_admin() as running:
        store_values(running, 2)
        with caplog.at_level(logging.WARNING, "memkv.admin"):
            for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x", "Ω" * 20):
                headers = {} if token is None else {"Authorization": f"Bearer {token}".encode().decode("latin-1")}
                said = await running.ask(f"/v1/{name}", "POST", json=COMMANDS[name], headers=headers)
                assert said.status == 401, token
                assert said.headers["WWW-Authenticate"] == "Bearer"
                assert said.json.keys() == {"error", "next_step"}
            for scheme in ("Basic", "Token", ""):
                headers = {"Authorization": f"{scheme} {TOKEN}"}
                assert (await running.ask(f"/v1/{name}", "POST", json=COMMANDS[name], headers=headers)).status == 401
            assert (await running.ask(f"/v1/{name}?token={TOKEN}", "POST", json=COMMANDS[name])).status == 401
        assert running.server.statistics()["table"]["complete"] == 2
        assert "admin.refused peer=127.0.0.1" in caplog.text
        assert len(caplog.records) < 5, "a flood of refusals is one line a second"
        assert TOKEN not in caplog.text


async def test_without_a_configured_token_nobody_may_and_the_answer_names_the_setting() -> None:
    async with serving_admin(admin_config(network={"admin_token": None})) as running:
        store_values(running, 1)
        for name, body in COMMANDS.items():
            said = await running.command(name, body)
            assert said.status == 403
            assert "network.admin_token_file" in said.json["next_step"]
        assert running.server.statistics()["table"]["complete"] == 1


async def test_reset_hides_a_namespace_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with serving_admin() as running:
        store_values(running, 3)
        store_values(running, 2, b"M" * 32)
        with caplog.at_level(logging.WARNING, "memkv.admin"):
            said = await running.command("reset", {"namespace": NAMESPACE.hex()})
        assert (said.status, said.json["hidden"]) == (200, 3)
        assert running.server.statistics()["table"]["complete"] == 2
        assert f"admin.command peer=127.0.0.1 command=reset argument={NAMESPACE.hex()}" in caplog.text


async def test_gc_drops_what_nobody_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """P097: namespaces of an old model, block size or TP do not stay for ever."""
    async with serving_admin() as running:
        store_values(running, 3)
        assert (await running.command("gc", {"idle_s": 3600})).json["dropped"] == []
        said = await running.command("gc", {"idle_s": 0})
        assert [row["namespace"] for row in said.json["dropped"]] == [NAMESPACE.hex()]
        assert running.server.statistics()["table"]["complete"] == 0


async def test_evict_frees_bytes() -> None:
    async with serving_admin() as running:
        store_values(running, 8)
        said = await running.command("evict", {"bytes": 3 * VALUE})
        assert (said.json["values"], said.json["bytes"]) == (3, 3 * VALUE)
        assert running.server.statistics()["table"]["complete"] == 5


WRONG = [
    ("reset", b"", "not JSON"),
    ("reset", b"{", "not JSON"),
    ("reset", b"[" * 4000, "not JSON"),
    ("reset", b"[]", "not a JSON object"),
    ("reset", b"{}", "namespace is missing"),
    ("reset", b'{"namespace": "ab"}', 'namespace = "ab" is not allowed'),
    ("reset", b'{"namespace": 5}', "not allowed"),
    ("reset", b'{"namespace": "%s"}' % (b" ab" * 32), "not allowed"),
    ("reset", b'{"namespace": "%s", "all": true}' % (b"ab" * 32), "unknown: all"),
    ("gc", b'{"idle_s": "1"}', "not allowed"),
    ("gc", b'{"idle_s": -1}', "not allowed"),
    ("gc", b'{"idle_s": NaN}', "not allowed"),
    ("gc", b'{"idle_s": Infinity}', "not allowed"),
    ("gc", b'{"idle_s": true}', "not allowed"),
    ("evict", b'{"bytes": 0}', "not allowed"),
    ("evict", b'{"bytes": 1.5}', "not allowed"),
    ("evict", b'{"bytes": 1e400}', "not allowed"),
    ("evict", b'{"bytes": %d}' % 10**300, "not allowed"),
    ("evict", b"\xff\xfe", "not JSON"),
]


async def test_wrong_bodies_are_refused_with_the_next_step() -> None:
    async with serving_admin() as running:
        store_values(running, 2)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        for name, body, error in WRONG:
            said = await running.ask(f"/v1/{name}", "POST", data=body, headers=headers)
            assert said.status == 400, (name, body[:40], said.text)
            assert error in said.json["error"], (name, body[:40], said.text)
            assert said.json["next_step"]
        assert running.server.statistics()["table"]["complete"] == 2


async def test_a_body_must_be_short_and_declared_as_json() -> None:
    """A page of somebody else can submit a form or plain text, but not this type, and its bytes are bounded."""
    async with serving_admin() as running:
        store_values(running, 1)
        token = {"Authorization": f"Bearer {TOKEN}"}
        body = b'{"idle_s": 0}'
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            said = await running.ask("/v1/gc", "POST", data=body, headers={**token, "Content-Type": kind})
            assert (said.status, "application/json" in said.json["next_step"]) == (415, True)

        async def endless() -> Any:
            for _ in range(64):
                yield b" " * 1024

        headers = {**token, "Content-Type": "application/json"}
        for data in (b" " * 5000, endless()):
            said = await running.ask("/v1/gc", "POST", data=data, headers=headers)
            assert said.status == 413
        compressed = {**headers, "Content-Encoding": "gzip"}
        import gzip

        said = await running.ask("/v1/gc", "POST", data=gzip.compress(b" " * 10**6), headers=compressed)
        assert (said.status, "not JSON" in said.json["error"]) == (400, True), "nothing is unpacked here"
        assert running.server.statistics()["table"]["complete"] == 1


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/",
        "/v1/shutdown",
        "/index.html",
        "/../server.py",
        "/page.css/../page.js",
        "/%2e%2e/x",
        "//etc/passwd",
    ],
)
async def test_an_unknown_path_is_404_and_lists_the_known_ones(path: str) -> None:
    async with serving_admin() as running:
        said = await running.ask(path)
        if path == "/page.css/../page.js":  # the client itself makes /page.js of it
            return
        assert said.status == 404, said.text
        assert "/v1/status" in said.json["next_step"]


async def test_raw_paths_lead_nowhere() -> None:
    async with serving_admin() as running:
        host, port = running.address.split(":")
        for path in (
            "/page.css/../page.js",
            "/../../server.py",
            "/..%2f..%2fserver.py",
            "/\\..\\x",
            "http://x/v1/secret",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), (path, answer[:80])
            writer.close()


@pytest.mark.parametrize(
    ("path", "method", "allow"), [("/v1/status", "POST", "GET"), ("/v1/reset", "GET", "POST"), ("/", "DELETE", "GET")]
)
async def test_a_wrong_method_says_which_is_right(path: str, method: str, allow: str) -> None:
    async with serving_admin() as running:
        said = await running.ask(path, method)
        assert said.status == 405
        assert said.headers["Allow"].startswith(allow)


async def test_a_command_that_a_tier_does_not_confirm_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P023: a reset is confirmed by everything that could serve the old values, or it is an error."""

    async def refuse(namespace: bytes) -> int:
        raise StoreError("drive /dev/x: the reset could not be written")

    async with serving_admin() as running:
        monkeypatch.setattr(running.server.handler, "reset", refuse)
        said = await running.command("reset", COMMANDS["reset"])
        assert (said.status, "/dev/x" in said.json["error"]) == (502, True)


async def test_a_fault_inside_is_a_500_without_its_text_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_admin() as running:
        monkeypatch.setattr(running.server.handler, "namespaces", lambda: 1 / 0)
        said = await running.ask("/v1/namespaces")
        assert said.status == 500
        assert "division" not in said.text
        assert "ZeroDivisionError" in caplog.text
        assert (await running.ask("/v1/health")).status == 200


async def test_a_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """P085: whatever hangs inside, whoever asked gets an answer."""

    async def hang(num_bytes: int) -> tuple[int, int]:
        await anyio.sleep_forever()
        raise AssertionError

    async with serving_admin(admin_config(network={"admin_timeout_s": 0.3})) as running:
        monkeypatch.setattr(running.server.handler, "evict", hang)
        said = await running.command("evict", {"bytes": 1})
        assert (said.status, "0.3 s" in said.json["error"]) == (503, True)


# ---------------------------------------------------------------------------------------------------- strangers


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = running.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_connections_are_bounded_and_come_back() -> None:
    config = admin_config(network={"admin_max_connections": 3, "admin_timeout_s": 5})
    async with serving_admin(config) as running:
        idle = [await connect(running) for _ in range(3)]
        await wait_until(lambda: running.admin._listener._connections == 3, "three connections")
        reader, writer = await connect(running)
        assert await reader.read() == b""  # closed without a word
        writer.close()
        assert running.admin._listener.refused == 1
        for _, other in idle:
            other.close()
        await wait_until(lambda: running.admin._listener._connections == 0, "their end")
        said = await running.ask("/v1/metrics")
        assert "memkv_admin_connections_refused_total 1.0" in said.text


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/health HTTP/1.1\r\nHost: x\r\n",
        b"GET /v1/he",
        b"POST /v1/gc HTTP/1.1\r\nContent-Length: 10\r\n\r\n",
    ],
    ids=["nothing", "half of the head", "half of a line", "no body"],
)
async def test_a_slow_request_is_cut_at_the_deadline(sent: bytes) -> None:
    """Slow loris: each such connection costs one of the bounded places, for a bounded time."""
    async with serving_admin(admin_config(network={"admin_timeout_s": 0.3})) as running:
        reader, writer = await connect(running)
        writer.write(sent)
        with anyio.fail_after(10):
            await reader.read()
        writer.close()
        await wait_until(lambda: running.admin._listener._connections == 0, "its end")


async def test_a_drip_of_header_bytes_does_not_extend_the_deadline() -> None:
    async with serving_admin(admin_config(network={"admin_timeout_s": 0.4})) as running:
        reader, writer = await connect(running)
        writer.write(b"GET /v1/health HTTP/1.1\r\n")
        with anyio.fail_after(10):
            while not reader.at_eof():
                writer.write(b"a: b\r\n")
                try:
                    with anyio.move_on_after(0.05):
                        await reader.read()
                except ConnectionResetError:
                    break
        writer.close()


async def test_an_answer_that_is_not_read_ends_the_connection() -> None:
    async with serving_admin(admin_config(network={"admin_timeout_s": 0.3})) as running:
        host, port = running.address.split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.settimeout(0)
            request = b"GET /v1/metrics HTTP/1.1\r\nHost: x\r\n\r\n"
            with pytest.raises((BlockingIOError, ConnectionError)):
                while True:
                    sock.send(request * 16)
            await wait_until(lambda: running.admin._routes.responses["200"], "the first answers")
            await wait_until(lambda: running.admin._listener._connections == 0, "its end")


async def test_a_connection_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_LIFE_S", 0.5)
    async with serving_admin(admin_config(network={"admin_timeout_s": 0.5})) as running:
        reader, writer = await connect(running)
        with anyio.fail_after(10), pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            while True:
                writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.readexactly(20)
        writer.close()


GARBAGE = {
    "zeros": b"\x00" * 64 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
    "long line": b"GET " + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    "negative length": b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "smuggling": b"POST /v1/gc HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_refused_and_fills_no_log(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_admin() as running:
        reader, writer = await connect(running)
        writer.write(garbage)
        with anyio.fail_after(10):
            answer = await reader.read(4096)
        assert answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.0 4") or answer == b"", answer[:60]
        writer.close()
        assert (await running.ask("/v1/health")).status == 200
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_many_connections_leak_nothing() -> None:
    """P067: descriptors are the same before and after."""
    async with serving_admin() as running:
        await running.ask("/v1/health")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            reader, writer = await connect(running)
            writer.write(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()
        await wait_until(lambda: running.admin._listener._connections <= 1, "their end")
        await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the same descriptors")
        assert len(running.admin._page._shown) < 500


# ---------------------------------------------------------------------------------------------------- life, TLS


async def test_a_taken_address_says_which_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BaseException) as raised:
            async with serving_admin(admin_config(network={"admin_address": address})):
                pass
        (fault,) = find_errors(raised.value, EnvironmentFault)
        assert "network.admin_address" in str(fault)
        assert address in str(fault)


async def test_ipv6() -> None:
    async with serving_admin(admin_config(network={"admin_address": "[::1]:0"})) as running:
        assert running.address.startswith("[::1]:")
        assert (await running.ask("/v1/health")).status == 200


async def test_a_fault_of_admin_http_does_not_end_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: AdminServer) -> None:
        raise RuntimeError("broken sampling")

    monkeypatch.setattr(AdminServer, "_sample", fail)
    async with serving_admin() as running:
        await wait_until(lambda: "admin.failed" in caplog.text, "the log line")
        with pytest.raises(aiohttp.ClientError):
            await running.ask("/v1/health")
        assert running.server.statistics()["server"]["uptime_s"] >= 0


async def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    config = admin_config(network={"tls_cert": pair.cert, "tls_key": pair.key})
    async with serving_admin(config) as running:
        trusting = ssl.create_default_context(cafile=authority.file)
        running.scheme, running.options = "https", {"ssl": trusting}
        assert (await running.ask("/v1/health")).status == 200
        assert (await running.command("gc", {"idle_s": 0})).status == 200
        running.options = {"ssl": ssl.create_default_context()}
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await running.ask("/v1/health")
        running.scheme, running.options = "http", {}
        with pytest.raises(aiohttp.ClientError):
            await running.ask("/v1/health")  # plain HTTP is not answered there
        old = ssl.create_default_context(cafile=authority.file)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        running.scheme, running.options = "https", {"ssl": old}
        assert (await running.ask("/v1/health")).status == 200


async def test_a_stranger_who_never_shakes_hands_is_bounded_too(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("127.0.0.1")
    network = {"tls_cert": pair.cert, "tls_key": pair.key, "admin_max_connections": 2, "admin_timeout_s": 0.5}
    async with serving_admin(admin_config(network=network)) as running:
        silent = [await connect(running) for _ in range(2)]
        await wait_until(lambda: running.admin._listener._connections == 2, "two in the handshake")
        reader, writer = await connect(running)
        assert await reader.read() == b""
        writer.close()
        await wait_until(lambda: running.admin._listener._connections == 0, "the handshake's deadline")
        for _, other in silent:
            other.close()


def test_tls_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, other = authority.issue("a", file="a"), authority.issue("b", file="b", passphrase=b"locked")
    for certificate, key in ((first.cert, authority.issue("c", file="c").key), (first.cert, other.key)):
        with pytest.raises(EnvironmentFault, match=r"network.tls_key .*unencrypted key"):
            tls_context(certificate, key)
    with pytest.raises(EnvironmentFault, match="network.tls_cert .*No such file"):
        tls_context(tmp_path / "none", first.key)


async def test_latencies_of_requests_are_counted() -> None:
    with Rig() as rig:
        peer = await rig.connect()
        await rig.put(peer, {make_key(1): value(1)})
        await rig.get(peer, [make_key(1), make_key(2)])
        latency = rig.handler.statistics()["latency"]
        assert (latency["put"]["num"], latency["get"]["num"]) == (1, 1)
        assert sum(latency["get"]["counts"]) == 1
        assert latency["put"]["sum_s"] > 0


async def test_the_store_server_says_whether_its_arena_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from memkv_vllm.transports.memory import HostMemory

    monkeypatch.setattr(HostMemory, "populate", lambda self, offset, length: False)
    config = admin_config()
    async with StoreServer(config, [LoopbackServerTransport.from_config(config)]) as server:
        await wait_until(lambda: server.arena_slow, "the arena's state")
