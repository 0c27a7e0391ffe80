"""`memkv admin` against real servers: what it prints, and that it succeeds only if all of them did as asked."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from memkv_vllm.cli import main
from memkv_vllm.errors import StoreError
from tests.support.admin import TOKEN, AdminThread, admin_config, admin_threads
from tests.support.authority import Authority
from tests.support.store import NAMESPACE, VALUE, make_key


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN)
    return path


def admin(*arguments: str, servers: list[str], **environ: str) -> Result:
    options = [word for server in servers for word in ("--server", server)]
    return CliRunner().invoke(main, ["admin", *arguments, *options], env=environ)


def fill(server: AdminThread, count: int) -> None:
    handler = server.server.handler

    def put() -> None:
        for number in range(count):
            key = make_key(number)
            result = handler._table.reserve(key, VALUE, 0, 0, 0, "test", handler._clock())
            handler._table.commit(key, result.generation)

    server.call(put)


def complete(server: AdminThread) -> int:
    return int(server.call(server.server.statistics)["table"]["complete"])


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def silent_server() -> Iterator[str]:
    """Accepts and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield f"127.0.0.1:{sock.getsockname()[1]}"


# ---------------------------------------------------------------------------------------------------- reads


def test_status_of_several_servers_in_the_order_given() -> None:
    with admin_threads(admin_config(), admin_config()) as (first, second):
        fill(second, 3)
        result = admin("status", servers=[second.address, first.address])
        assert result.exit_code == 0, result.output
        heads, *lines = [re.split(r"\s{2,}", line) for line in result.output.splitlines()]
        assert [line[0] for line in lines] == [second.address, first.address]
        assert [line[heads.index("values")] for line in lines] == ["3", "0"]
        assert {line[1] for line in lines} == {"ok"}


@pytest.mark.parametrize("name", ["status", "health", "ready", "namespaces"])
def test_json_is_what_each_server_said(name: str) -> None:
    with admin_threads(admin_config()) as (server,):
        fill(server, 1)
        result = admin(name, "--json", servers=[server.address])
        (said,) = json.loads(result.output)["servers"]
        assert (said["server"], said["status"]) == (server.address, 200)
        expected = {"status": "table", "health": "status", "ready": "status", "namespaces": "namespaces"}[name]
        assert expected in said["answer"]


def test_namespaces_are_listed_with_what_reset_needs() -> None:
    with admin_threads(admin_config()) as (server,):
        fill(server, 2)
        result = admin("namespaces", servers=[server.address])
        assert NAMESPACE.hex() in result.output
        assert "8.00 KiB" in result.output


def test_a_degraded_server_is_an_exit_status_and_a_reason() -> None:
    with admin_threads(admin_config(), admin_config()) as (good, bad):
        bad.server.arena_slow = True
        result = admin("health", servers=[good.address, bad.address])
        assert result.exit_code == 1
        assert f"memkv: {bad.address}: arena_not_populated" in result.output
        assert f"memkv: {good.address}" not in result.output
        assert admin("ready", servers=[good.address, bad.address]).exit_code == 0
        bad.call(bad.server.handler.close)
        result = admin("ready", servers=[good.address, bad.address])
        assert (result.exit_code, "draining" in result.output) == (1, True)


def test_servers_from_the_clients_environment() -> None:
    with admin_threads(admin_config()) as (server,):
        host, port = server.address.split(":")
        result = CliRunner().invoke(main, ["admin", "health"], env={"MEMKV_SERVERS": f"{host}:{int(port) - 1}"})
        assert (result.exit_code, server.address in result.output) == (0, True)
        result = CliRunner().invoke(main, ["admin", "health"], env={"MEMKV_ADMIN_SERVERS": server.address})
        assert (result.exit_code, server.address in result.output) == (0, True)


def test_without_a_server_it_says_how_to_name_one() -> None:
    result = CliRunner().invoke(main, ["admin", "status"])
    assert result.exit_code == 2
    assert "--server HOST:PORT" in result.output
    assert "Traceback" not in result.output


# ---------------------------------------------------------------------------------------------------- commands


def test_reset_on_all_servers(token_file: Path) -> None:
    """P022, P023."""
    with admin_threads(admin_config(), admin_config()) as servers:
        for server in servers:
            fill(server, 2)
        addresses = [server.address for server in servers]
        result = admin("reset", NAMESPACE.hex(), "--token-file", str(token_file), servers=addresses)
        assert result.exit_code == 0, result.output
        assert result.output.count("done") == 2
        assert [complete(server) for server in servers] == [0, 0]


def test_a_reset_that_one_server_refuses_fails_and_names_it(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P023: success only after every server has confirmed; what the others said is told too."""

    async def refuse(namespace: bytes) -> int:
        raise StoreError("drive /dev/x: the reset could not be written")

    with admin_threads(admin_config(), admin_config(), admin_config()) as servers:
        for server in servers:
            fill(server, 1)
        monkeypatch.setattr(servers[1].server.handler, "reset", refuse)
        dead = closed_port()
        addresses = [*(server.address for server in servers), dead]
        result = admin("reset", NAMESPACE.hex(), "--token-file", str(token_file), servers=addresses)
        assert result.exit_code == 1
        assert f"memkv: {servers[1].address}: drive /dev/x" in result.output
        assert f"memkv: {dead}: cannot be asked: Connection refused" in result.output
        assert result.output.count("done") == 2
        assert [complete(server) for server in servers] == [0, 1, 0]


def test_gc_and_evict(token_file: Path) -> None:
    with admin_threads(admin_config()) as (server,):
        fill(server, 8)
        environ = {"MEMKV_ADMIN_TOKEN_FILE": str(token_file)}
        result = admin("evict", "--bytes", "8 KiB", servers=[server.address], **environ)
        assert (result.exit_code, "8.00 KiB" in result.output) == (0, True), result.output
        assert complete(server) == 6
        assert admin("evict", "--bytes", "4096", servers=[server.address], **environ).exit_code == 0
        assert complete(server) == 5
        result = admin("gc", "--idle-s", "3600", "--json", servers=[server.address], **environ)
        assert json.loads(result.output)["servers"][0]["answer"]["dropped"] == []
        result = admin("gc", "--idle-s", "0", servers=[server.address], **environ)
        assert (result.exit_code, complete(server)) == (0, 0)


@pytest.mark.parametrize("arguments", [("reset", "ab" * 32), ("gc", "--idle-s", "1"), ("evict", "--bytes", "1MiB")])
def test_without_the_token_it_fails_and_says_where_it_comes_from(arguments: tuple[str, ...], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("another-token-of-some-length")
    with admin_threads(admin_config(), admin_config(network={"admin_token": None})) as (server, without):
        result = admin(*arguments, servers=[server.address])
        assert (result.exit_code, "no bearer token" in result.output) == (1, True)
        assert "--token-file FILE" in result.output
        result = admin(*arguments, "--token-file", str(other), servers=[server.address])
        assert (result.exit_code, "not this server's" in result.output) == (1, True)
        assert "another-token" not in result.output
        result = admin(*arguments, "--token-file", str(other), servers=[without.address])
        assert (result.exit_code, "network.admin_token_file" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("reset", "xyz"), "NAMESPACE xyz: expected 64 hexadecimal characters, got 3"),
        (("reset", "z" * 64), "expected 64 hexadecimal characters"),
        (("reset",), "Missing argument"),
        (("gc",), "Missing option"),
        (("gc", "--idle-s", "-1"), "Invalid value"),
        (("evict", "--bytes", "many"), "expected a size"),
        (("evict", "--bytes", "10G"), "GiB"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], problem: str, token_file: Path) -> None:
    with admin_threads(admin_config()) as (server,):
        result = admin(*arguments, "--token-file", str(token_file), servers=[server.address])
        assert result.exit_code == 2
        assert problem in result.output


# ---------------------------------------------------------------------------------------------------- no server


def test_each_server_has_its_own_deadline_and_one_that_hangs_holds_up_no_other() -> None:
    """P085."""
    with admin_threads(admin_config()) as (server,), silent_server() as silent:
        result = admin("status", "--timeout", "0.5", servers=[silent, server.address])
        assert result.exit_code == 1
        assert f"memkv: {silent}: no answer within 0.5 s" in result.output
        lines = [line.split() for line in result.output.splitlines()]
        assert [server.address, "ok"] in [line[:2] for line in lines]


def test_servers_are_asked_at_once() -> None:
    """Each of these answers only when all of them have been asked."""
    asked = threading.Barrier(3)

    def serve(sock: socket.socket) -> None:
        with suppress(OSError, threading.BrokenBarrierError), sock.accept()[0] as other:
            other.recv(4096)
            asked.wait(5)
            other.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"status":"ok"}')

    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(asked.parties)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            sock.settimeout(5)
        threads = [threading.Thread(target=serve, args=(sock,)) for sock in sockets]
        for thread in threads:
            thread.start()
        result = admin("health", servers=[f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets])
        for thread in threads:
            thread.join()
    assert result.exit_code == 0, result.output


ELSE = {
    "text": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "list": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    "no HTTP": b"SSH-2.0-x\r\n",
    "half": b"HTTP/1.1 200 OK\r\n",
}


def test_a_clients_port_in_place_of_the_admin_port() -> None:
    """The server ends such a connection without a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()

        def serve() -> None:
            other, _ = sock.accept()
            with other:
                other.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        result = admin("status", servers=[f"127.0.0.1:{sock.getsockname()[1]}"])
        thread.join()
    assert "is this its admin address (by default the clients' port + 1)?" in result.output


def test_tls_with_a_server_that_has_none(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).file
    with admin_threads(admin_config()) as (server,):
        result = admin("status", "--tls-ca", str(certificate), servers=[server.address])
    assert (result.exit_code, "leave out --tls-ca" in result.output) == (1, True)


@pytest.mark.parametrize("answer", ELSE.values(), ids=ELSE.keys())
def test_something_else_listens_there(answer: bytes, token_file: Path) -> None:
    result, address = gc_of_a_server_that_says(answer, token_file)
    assert result.exit_code == 1
    assert f"memkv: {address}: " in result.output
    assert "is this its admin address" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def gc_of_a_server_that_says(answer: bytes, token_file: Path) -> tuple[Result, str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()

        def serve() -> None:
            other, _ = sock.accept()
            with other:
                other.recv(4096)
                other.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        result = admin("gc", "--idle-s", "1", "--token-file", str(token_file), "--timeout", "5", servers=[address])
        thread.join()
        return result, address


def test_a_token_is_not_carried_on_to_where_a_server_points(token_file: Path) -> None:
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        elsewhere.listen()
        elsewhere.setblocking(False)
        there = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/v1/gc"
        head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {there}\r\nContent-Length: 2\r\n\r\n{{}}"
        result, address = gc_of_a_server_that_says(head.encode(), token_file)
        assert (result.exit_code, f"memkv: {address}: " in result.output) == (1, True)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_tls(tmp_path: Path, token_file: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger").file
    certificate = authority.file
    pair = authority.issue("127.0.0.1")
    config = admin_config(network={"tls_cert": pair.cert, "tls_key": pair.key})
    with admin_threads(config) as (server,):
        options: dict[str, Any] = {"servers": [server.address]}
        assert admin("health", "--tls-ca", str(certificate), **options).exit_code == 0
        command = ("gc", "--idle-s", "9", "--token-file", str(token_file))
        assert admin(*command, "--tls-ca", str(certificate), **options).exit_code == 0
        result = admin("health", "--tls-ca", str(stranger), **options)
        assert (result.exit_code, "not trusted" in result.output) == (1, True), result.output
        port = server.address.rpartition(":")[2]
        result = admin("health", "--tls-ca", str(certificate), servers=[f"localhost:{port}"])
        assert (result.exit_code, "not trusted" in result.output) == (1, True), "the name is checked too"
        result = admin("health", **options)
        assert (result.exit_code, "--tls-ca" in result.output) == (1, True), result.output
        result = admin("health", "--tls-ca", "/none", **options)
        assert (result.exit_code, "/none" in result.output) == (2, True)


def test_every_subcommand_has_help_and_the_same_options() -> None:
    group = main.commands["admin"]
    assert isinstance(group, click.Group)
    assert set(group.commands) == {"status", "health", "ready", "namespaces", "gc", "evict", "reset"}
    for name, command in group.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--server", "--token-file", "--tls-ca", "--timeout", "--json"} <= options, name
        assert CliRunner().invoke(main, ["admin", name, "--help"]).exit_code == 0
    assert "MEMKV_ADMIN_SERVERS" in CliRunner().invoke(main, ["admin", "--help"]).output
