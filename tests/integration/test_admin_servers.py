"""``GET /v1/servers`` with real servers in one process, and with peers that are dead, slow or hostile."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.config import RailAddress
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.admin.peers import MAX_AGE_S, MAX_STATUS_BYTES, trust
from tests.support.admin import Running, admin_config, serving_admin
from tests.support.authority import Authority
from tests.support.harness import wait_until
from tests.support.store import NAMESPACE, VALUE, make_key

pytestmark = pytest.mark.anyio

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
STARTING = b'{"admin": {"healthy": 0, "reasons": ["starting"]}}'


class Stub:
    """A listener in place of a server: counts who comes, and remembers what was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.connections = 0
        self.heads: list[bytes] = []


@asynccontextmanager
async def stub(answer: Answer | bytes) -> AsyncIterator[Stub]:
    """Answers every request with these bytes and an end, or as the function does."""
    this = Stub()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this.connections += 1
        try:
            this.heads.append(await reader.readuntil(b"\r\n\r\n"))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # whoever asked has had enough
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    this.address = f"{host}:{port}"
    try:
        yield this
    finally:
        server.close()


def body(content: bytes, *headers: bytes) -> bytes:
    """A whole answer with this body."""
    return OK + b"".join(line + b"\r\n" for line in headers) + b"Content-Length: %d\r\n\r\n" % len(content) + content


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says nothing until the other side goes."""
    await reader.read()


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An answer that goes on a byte at a time."""
    writer.write(OK + b"Content-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)


async def megabytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A body without an end."""
    writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        await writer.drain()


def asking(*peers: str, **network: Any) -> Any:
    """A server with these peers."""
    return serving_admin(admin_config(network={"admin_peers": list(peers), **network}))


async def rows(running: Running) -> list[dict[str, Any]]:
    """What the path answers; this server's own row is well in any case."""
    said = await running.ask("/v1/servers")
    assert said.status == 200, said.text
    found: list[dict[str, Any]] = said.json["servers"]
    assert (found[0]["is_this"], found[0]["state"], found[0]["address"]) == (True, "ok", running.address)
    return found


async def test_without_peers_it_shows_this_server_alone() -> None:
    async with serving_admin() as running:
        (row,) = await rows(running)
        assert (row["values"], row["sessions"], row["arena_size_bytes"]) == (0, 0, 8 << 20)
        assert row["disk_size_bytes"] is row["hit_ratio"] is None


async def test_three_servers_and_a_dead_one() -> None:
    async with serving_admin() as second, serving_admin(admin_config("16MiB")) as third:
        table, key = second.server.handler._table, make_key(1, namespace=NAMESPACE)
        reserved = table.reserve(key, VALUE, 0, 0, 0, "test", second.server.handler._clock())
        assert table.commit(key, reserved.generation)
        third.server.handler.close()
        async with asking(third.address, "127.0.0.1:1", second.address) as running:
            _, drains, dead, well = await rows(running)
    assert (drains["address"], drains["state"], drains["arena_size_bytes"]) == (third.address, "draining", 16 << 20)
    assert (dead["address"], dead["state"], dead["reason"]) == ("127.0.0.1:1", "unreachable", "Connection refused")
    assert dead["values"] is None
    assert (well["address"], well["state"], well["values"], well["is_this"]) == (second.address, "ok", 1, False)
    assert well["arena_used_bytes"] > 0


async def test_starting_and_degraded_servers_say_so() -> None:
    async with serving_admin(attach=False) as starts, serving_admin() as other:
        other.server.arena_slow = True
        async with asking(starts.address, other.address) as running:
            _, first, second = await rows(running)
        assert (first["state"], second["state"], second["reason"]) == ("starting", "degraded", "arena_not_populated")
        said = (await starts.ask("/v1/servers")).json["servers"]
        assert [row["state"] for row in said] == ["starting"], "it answers before its store does"


async def test_servers_that_name_each_other_and_themselves_do_not_go_round_in_circles() -> None:
    async with serving_admin() as one, serving_admin() as two:
        both = tuple(RailAddress("127.0.0.1", int(each.address.rpartition(":")[2])) for each in (one, two))
        for each in (one, two):
            each.admin._peers._addresses = both
        found = await rows(one)
        assert [row["address"] for row in found] == [one.address, two.address]
        assert dict(two.admin._routes.responses) == {"200": 1}, "its status, and nothing else"
        assert dict(one.admin._routes.responses) == {"200": 2}, "the table, and its status"
        assert two.admin._peers._rows == ()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hang, "no answer within 0.3 s"),
        (drip, "no answer within 0.3 s"),
        (megabytes, "not a memkv server: more than 1 MiB of status"),
        (body(b" " * (MAX_STATUS_BYTES + 1)), "not a memkv server: more than 1 MiB of status"),
        (body(gzip.compress(STARTING), b"Content-Encoding: gzip"), "not a memkv server"),  # a bomb is not unpacked
        (body(b"<html>hello</html>"), "not a memkv server"),
        (body(b"[" * 100_000), "not a memkv server"),
        (body(b'{"admin": {"reasons": [{}]}}'), "not a memkv server"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not a memkv server"),
        (OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n", "not a memkv server"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "not a memkv server: HTTP 404"),
        (b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n", "not a memkv server: HTTP 401"),
        (OK + b"Content-Length: 100\r\n\r\n{", "its answer broke off"),
        (b"", "it ended the connection without an answer"),
    ],
)
async def test_a_peer_that_is_slow_or_odd_has_a_row_and_spoils_no_other(answer: Answer | bytes, reason: str) -> None:
    async with serving_admin() as other, stub(answer) as odd:
        async with asking(odd.address, other.address, admin_timeout_s=0.6) as running:
            _, row, well = await rows(running)
            assert (row["address"], row["state"], row["reason"]) == (odd.address, "unreachable", reason)
            assert (well["state"], well["address"]) == ("ok", other.address)


async def test_no_redirect_is_followed_and_nothing_is_told_to_a_peer() -> None:
    """A server asks the addresses in its settings, whatever one of them says."""
    async with stub(body(b"{}")) as trap:
        moved = b"HTTP/1.1 302 Found\r\nLocation: http://%s/v1/status\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
        async with stub(moved % trap.address.encode()) as peer, asking(peer.address) as running:
            for _ in range(2):
                _, row = await rows(running)
                assert row["reason"] == "not a memkv server: HTTP 302"
                running.admin._peers._asked_at = float("-inf")
            assert trap.connections == 0
            assert len(peer.heads) == 2
            for head in peer.heads:
                assert head.startswith(b"GET /v1/status HTTP/1.1\r\n")
                assert b"authorization" not in head.lower()
                assert b"cookie" not in head.lower()


async def test_many_viewers_cost_one_round_and_nobody_looking_costs_none() -> None:
    async with stub(body(b"{}")) as peer, asking(peer.address) as running:
        await wait_until(lambda: running.admin._lag._last, "the server at work")
        assert peer.connections == 0, "nobody has looked"
        now = 1000.0
        running.admin._peers._clock = lambda: now
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(rows, running)
        assert peer.connections == 1
        now += MAX_AGE_S - 0.01
        await rows(running)
        assert peer.connections == 1, "what is known is new enough"
        now += 0.01
        await rows(running)
        assert peer.connections == 2


async def test_many_peers_are_asked_at_once() -> None:
    """Each waits for the last one to have been asked: one after the other none would be answered."""
    asked: list[asyncio.StreamWriter] = []
    all_asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        if len(asked) == 3:
            all_asked.set()
        await all_asked.wait()
        writer.write(body(b"{}"))
        await writer.drain()

    async with stub(answer) as one, stub(answer) as two, stub(answer) as three:
        async with asking(one.address, two.address, three.address) as running:
            assert [row["reason"] for row in (await rows(running))[1:]] == ["not a memkv server"] * 3


async def test_a_fault_of_the_asking_is_a_row_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memkv_vllm.store.admin.peers.parse_row", lambda *_: 1 / 0)
    async with stub(body(b"{}")) as peer, asking(peer.address) as running:
        _, row = await rows(running)
        assert row["reason"] == "it could not be asked; see the log of this server"
        assert "ZeroDivisionError" in caplog.text


async def test_with_tls_peers_are_asked_over_tls_and_their_certificates_are_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other_pair = authority.issue("127.0.0.1"), authority.issue("elsewhere.example", file="other")
    tls = {"tls_cert": pair.cert, "tls_key": pair.key}
    misnamed_tls = {"tls_cert": other_pair.cert, "tls_key": other_pair.key}
    async with (
        serving_admin(admin_config(network=tls)) as good,
        serving_admin(admin_config(network=misnamed_tls)) as misnamed,
        serving_admin() as plain,
    ):
        peers = (good.address, misnamed.address, plain.address)

        async def found(**network: Any) -> list[tuple[str, str]]:
            async with asking(*peers, **network) as running:
                running.scheme = "https" if network else "http"
                running.options = {"ssl": trust(authority.file)} if network else {}
                return [(row["state"], row["reason"]) for row in (await rows(running))[1:]]

        first, second, third = await found(**tls, admin_peers_ca=authority.file)
        assert first == ("ok", "")
        assert second[1].startswith("its certificate is not trusted: ")
        assert "elsewhere.example" in second[1] or "IP address mismatch" in second[1]
        assert third == ("unreachable", "no TLS with it")
        first, _, _ = await found(**tls)
        assert first[1].startswith("its certificate is not trusted: "), "not signed by this host's authorities"
        first, _, third = await found()
        assert (first[0], third[0]) == ("unreachable", "ok"), "without TLS of its own it asks in plain HTTP"


async def test_a_reload_takes_over_a_renewed_authority_and_keeps_the_old_one_over_a_broken_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    before, after = old.issue("127.0.0.1", file="before"), new.issue("127.0.0.1", file="after")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(old.file.read_bytes())
    tls = {"tls_cert": before.cert, "tls_key": before.key, "admin_peers_ca": authorities}
    async with serving_admin(admin_config(network={"tls_cert": after.cert, "tls_key": after.key})) as renewed:
        async with asking(renewed.address, **tls) as running:
            running.scheme, running.options = "https", {"ssl": trust(old.file)}
            states = []
            for content in (old.file.read_bytes(), new.file.read_bytes(), b"broken"):
                authorities.write_bytes(content)
                running.admin.reload()
                running.admin._peers._asked_at = float("-inf")
                states.append((await rows(running))[1]["state"])
    assert states == ["unreachable", "ok", "ok"]
    assert "admin.reload_failed" in caplog.text
    assert str(authorities) in caplog.text


def test_a_file_of_certificates_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for file in (wrong, tmp_path / "none"):
        with pytest.raises(EnvironmentFault, match=r"network\.admin_peers_ca .*; give the PEM certificate"):
            trust(file)
