"""TLS beneath the control channel: what it hides, who is refused on either side, and what they are told."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from memkv_vllm.errors import AuthError, ConfigError, ConnectError, MemkvError, RemoteProtocolError
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.transports.tcp import TcpClientTransport
from memkv_vllm.transports.tls import ServerTls, TlsStream, client_context
from memkv_vllm.types import Status
from tests.support.authority import Authority, Pair
from tests.support.guarded import Guarded, guarded, make_key, value
from tests.support.harness import Address, wait_until
from tests.support.peers import until_closed

pytestmark = pytest.mark.anyio

OURS = b"A" * 32


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("localhost", "127.0.0.1")


def tls_network(pair: Pair) -> dict[str, Any]:
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_control": True}


@asynccontextmanager
async def tls_server(pair: Pair, ca: Path | None, *, name: str | None = None, **options: Any) -> AsyncIterator[Guarded]:
    """A server with TLS, and clients that trust ``ca``."""
    transport = TcpClientTransport(2, tls=True, tls_ca=ca, tls_server_name=name)
    async with guarded(network=tls_network(pair), over="tcp", transport=transport, **options) as site:
        yield site


# ------------------------------------------------------------------------------------------------ it works


async def test_values_travel_and_the_session_is_an_ordinary_one(authority: Authority, pair: Pair) -> None:
    async with tls_server(pair, authority.file) as site:
        client = await site.connect("default")
        for block in range(20):
            assert await client.put(make_key(OURS, block), value(block)) is Status.OK
        for block in range(20):
            assert await client.get(make_key(OURS, block)) == value(block)
        await client.connection.aclose()
        await site.until_idle()
        assert not [name for name in site.server.statistics()["counters"] if name.startswith(("cut_tls", "refused"))]


async def test_many_requests_at_once_over_tls(authority: Authority, pair: Pair) -> None:
    async with tls_server(pair, authority.file) as site:
        client = await site.connect("default")
        with anyio.fail_after(15):
            async with anyio.create_task_group() as tasks:
                for _ in range(200):
                    tasks.start_soon(client.ask, Ping())
        assert site.count("requests_ping") == 200


class Tap:
    """Relays connections to a server and keeps what passes, both ways together, per connection."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.seen: list[bytearray] = []
        self.address: Address = ("", 0)

    async def run(self, *, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self.address = ("127.0.0.1", listener.extra(anyio.abc.SocketAttribute.local_port))
        task_status.started()
        async with listener:
            await listener.serve(self._relay)

    async def _relay(self, near: ByteStream) -> None:
        seen = bytearray()
        self.seen.append(seen)
        async with near, await anyio.connect_tcp(*self.target) as far, anyio.create_task_group() as tasks:
            tasks.start_soon(copy, near, far, seen)
            await copy(far, near, seen)
            tasks.cancel_scope.cancel()


async def copy(source: ByteStream, target: ByteStream, seen: bytearray | None = None) -> None:
    """Until either side ends."""
    try:
        async for data in source:
            if seen is not None:
                seen += data
            await target.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass


async def test_nothing_of_the_control_channel_can_be_read_on_the_way(authority: Authority, pair: Pair) -> None:
    key = make_key(OURS, 7)
    async with tls_server(pair, authority.file) as site:
        tap = Tap(site.address)
        await site.tasks.start(tap.run)
        site.address = tap.address
        client = await site.connect("default")
        assert await client.put(key, value(1)) is Status.OK
        control = bytes(tap.seen[0])
        assert control[:2] == b"\x16\x03"
        for secret in (b"mKV1", b"default", key, OURS, value(1)[:64]):
            assert secret not in control
        # And what the documentation says of values: they travel as they are.
        assert any(value(1)[:64] in bytes(seen) for seen in tap.seen[1:])


# ------------------------------------------------------------------------------------------------ one side without


async def test_a_client_without_tls_is_refused_and_told_what_to_set(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memkv")
    async with guarded(network=tls_network(pair), over="tcp") as site:
        with pytest.raises(ConnectError, match=r"over TLS only: set tls \(MEMKV_TLS=true\)"):
            await site.connect("default")
        await site.until_idle()
        assert (site.count("refused_plain"), site.count("sessions")) == (1, 0)
    assert sum("refused_plain" in record.getMessage() for record in caplog.records) == 1


async def test_a_client_with_tls_and_a_server_without(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memkv")
    transport = TcpClientTransport(tls=True, tls_ca=authority.file)
    async with guarded(over="tcp", transport=transport) as site:
        with pytest.raises(ConnectError, match="tls_control is off"):
            await site.connect("default")
        await wait_until(lambda: site.count("cut_magic"), "the server cuts it")
    assert "begins with TLS, which is off here" in caplog.text


# ------------------------------------------------------------------------------------------------ certificates


async def refusal(site: Guarded) -> str:
    """Why a client does not get in; the server has to notice, too."""
    with pytest.raises(AuthError) as caught:
        await site.connect("default")
    await wait_until(lambda: site.count("cut_tls") + site.count("cut_lost") > 0, "the server counts it")
    assert site.count("sessions") == 0
    return str(caught.value)


async def test_another_authority(pair: Pair, tmp_path: Path) -> None:
    async with tls_server(pair, Authority(tmp_path, "somebody else").file) as site:
        text = await refusal(site)
        assert "not accepted" in text and "set tls_ca" in text


async def test_this_hosts_authorities_do_not_know_a_private_one(pair: Pair) -> None:
    async with tls_server(pair, None) as site:
        assert "set tls_ca" in await refusal(site)


async def test_another_name_and_the_setting_that_names_it(authority: Authority) -> None:
    other = authority.issue("store.example")
    async with tls_server(other, authority.file) as site:
        assert "set tls_server_name" in await refusal(site)
    async with tls_server(other, authority.file, name="store.example") as site:
        await (await site.connect("default")).ask(Ping())


@pytest.mark.parametrize("days", [(-30, -1), (1, 30)], ids=["expired", "not yet valid"])
async def test_dates(authority: Authority, days: tuple[int, int]) -> None:
    old = authority.issue("127.0.0.1", first_day=days[0], last_day=days[1])
    async with tls_server(old, authority.file) as site:
        assert "renew it" in await refusal(site)


async def test_somebody_in_the_middle_with_a_valid_certificate_is_noticed(authority: Authority, pair: Pair) -> None:
    """The handshake covers the certificate: relaying frames between two TLS connections breaks the proofs."""
    second = authority.issue("127.0.0.1", file="middle")
    middle = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    middle.load_cert_chain(second.cert, second.key)
    outward = client_context(authority.file)
    async with tls_server(pair, authority.file) as site:

        async def relay(near: ByteStream) -> None:
            target = await anyio.connect_tcp(*site_address)
            far = await anyio.streams.tls.TLSStream.wrap(
                target, hostname="127.0.0.1", ssl_context=outward, standard_compatible=False
            )
            async with near, far, anyio.create_task_group() as tasks:
                tasks.start_soon(copy, near, far)
                await copy(far, near)
                tasks.cancel_scope.cancel()

        async def serve(*, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
            task_status.started(listener.extra(anyio.abc.SocketAttribute.local_port))
            secured = anyio.streams.tls.TLSListener(listener, middle, standard_compatible=False)
            async with secured:
                await secured.serve(relay)

        site_address = site.address
        site.address = ("127.0.0.1", await site.tasks.start(serve))
        with pytest.raises(AuthError, match="does not hold this auth_key"):
            await site.connect("default")
        site.address = site_address
        await (await site.connect("default")).ask(Ping())


async def test_an_old_version_of_tls_is_refused(authority: Authority, pair: Pair) -> None:
    async with tls_server(pair, authority.file) as site:
        context = ssl.create_default_context(cafile=str(authority.file))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, anyio.BrokenResourceError)):
            await anyio.connect_tcp(*site.address, tls=True, ssl_context=context, tls_hostname="127.0.0.1")
        await wait_until(lambda: site.count("cut_tls") == 1, "it is cut and counted")


# ------------------------------------------------------------------------------------------------ hostile peers


async def test_garbage_after_the_first_byte_is_cut_and_counted(authority: Authority, pair: Pair) -> None:
    async with tls_server(pair, authority.file) as site:
        healthy = await site.connect("default")
        for number in range(20):
            stream = SocketStream(socket.create_connection(site.address))
            stream.send_nowait(memoryview(b"\x16\x03\x01" + os.urandom(200 + number)))
            stream._sock.shutdown(socket.SHUT_WR)
            await until_closed(stream)
            stream.close()
        await wait_until(lambda: site.count("cut_tls") + site.count("cut_lost") == 20, "all are cut")
        await healthy.ask(Ping())
        await site.until_idle(sessions=1)
        assert site.count("internal_error") == 0


@pytest.mark.parametrize("first", [b"", b"\x16", b"\x16\x03\x01\x02\x00" + bytes(100)], ids=["none", "one", "a part"])
async def test_a_peer_that_stops_within_the_tls_handshake_is_cut_in_time(
    authority: Authority, pair: Pair, first: bytes
) -> None:
    async with tls_server(pair, authority.file, limits={"handshake_timeout_s": 0.2}) as site:
        stream = SocketStream(socket.create_connection(site.address))
        if first:
            stream.send_nowait(memoryview(first))
        await until_closed(stream)
        stream.close()
        await site.until_idle()
        assert site.count("handshake_timeout") + site.count("cut_tls") == 1


# ------------------------------------------------------------------------------------------------ the server's files


async def test_files_that_cannot_be_used(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    other = authority.issue("other", file="other")
    locked = authority.issue("locked", file="locked", passphrase=b"secret")
    empty = tmp_path / "empty"
    empty.touch()
    for cert, key, reason in (
        (pair.cert, other.key, "(?i)mismatch"),
        (locked.cert, locked.key, "passphrase"),
        (tmp_path / "none", pair.key, "No such file"),
        (empty, pair.key, "PEM"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            ServerTls(cert, key)
        assert "PRIVATE" not in str(caught.value)
    with pytest.raises(ConfigError, match="tls_ca"):
        client_context(empty)


async def test_a_renewed_certificate_is_taken_over_and_a_broken_one_is_not(authority: Authority, pair: Pair) -> None:
    async with tls_server(pair, authority.file, name="new.example") as site:
        (transport,) = site.server._transports
        with pytest.raises(AuthError):
            await site.connect("default")
        authority.issue("new.example")  # over the old files
        pair.cert.write_text(pair.cert.read_text()[:100])
        with pytest.raises(ConfigError):
            transport.reload()
        with pytest.raises(AuthError):
            await site.connect("default")
        authority.issue("new.example")
        transport.reload()
        await (await site.connect("default")).ask(Ping())


# ------------------------------------------------------------------------------------------------ the stream


@asynccontextmanager
async def tls_pair(
    authority: Authority, pair: Pair, buffer_bytes: int = 0
) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Both ends of a TLS connection over a pair of sockets."""
    near, far = socket.socketpair()
    for sock in (near, far) if buffer_bytes else ():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    client = TlsStream(SocketStream(near), client_context(authority.file), server_name="localhost")
    server = ServerTls(pair.cert, pair.key).stream(SocketStream(far))
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.secure)
            await client.secure()
        yield client, server
    finally:
        client.close()
        server.close()


async def test_both_ends_know_the_same_binding(authority: Authority, pair: Pair) -> None:
    async with tls_pair(authority, pair) as (client, server):
        assert client.binding == server.binding != b""
        assert client.secured and server.secured


@pytest.mark.parametrize("buffer_bytes", [0, 4096])
async def test_the_stream_keeps_every_byte_and_their_order(authority: Authority, pair: Pair, buffer_bytes: int) -> None:
    """Both ways at once, through socket buffers that are far too small: nothing is lost, doubled or held back."""
    data = os.urandom(3_000_000)
    async with tls_pair(authority, pair, buffer_bytes) as (client, server):

        async def send(stream: TlsStream) -> None:
            view = memoryview(data)
            while view:
                taken = stream.send_nowait(view[:100_001])
                view = view[taken:]
                if not taken:
                    await stream.wait_writable()

        async def receive(stream: TlsStream) -> None:
            came = bytearray()
            while len(came) < len(data):
                came += await stream.receive()
            assert came == data

        with anyio.fail_after(15):
            async with anyio.create_task_group() as tasks:
                for stream in (client, server):
                    tasks.start_soon(send, stream)
                    tasks.start_soon(receive, stream)
        assert client._outgoing.pending == server._outgoing.pending == 0
        assert not client._unsent and not server._unsent


async def test_what_is_reported_as_sent_has_left(authority: Authority, pair: Pair) -> None:
    """The writers' back pressure is a plain socket's: at most one chunk is encrypted ahead."""
    async with tls_pair(authority, pair, 4096) as (client, server):
        data, sent = memoryview(os.urandom(10_000_000)), 0
        while taken := client.send_nowait(data[sent:]):
            sent += taken
        assert sent < 1_000_000
        assert len(client._unsent) + client._outgoing.pending < 70_000
        came = b""
        with anyio.fail_after(10):
            while len(came) < sent:
                came += await server.receive()
        assert came[:sent] == data[:sent]


async def test_feeding_delivers_what_was_left_by_receiving(authority: Authority, pair: Pair) -> None:
    async with tls_pair(authority, pair) as (client, server):
        came: list[bytes] = []
        for part in (b"one", b"two"):
            assert client.send_nowait(part) == 0 or True
            while client.send_nowait(part) < len(part):
                await client.wait_writable()

        async def stop() -> bool:
            return False

        def take(data: bytes) -> Any:
            came.append(data)
            return stop if b"".join(came).endswith(b"end") else None

        client.send_nowait(b"end")
        with anyio.fail_after(5):
            await server.feed(take)
        assert b"".join(came).endswith(b"end")


async def test_a_spoilt_record_ends_the_connection(authority: Authority, pair: Pair) -> None:
    async with tls_pair(authority, pair) as (client, server):
        client._inner.send_nowait(memoryview(b"\x17\x03\x03\x00\x20" + os.urandom(32)))
        with pytest.raises(RemoteProtocolError) as caught:
            await server.receive()
        assert caught.value.kind == "tls"


async def test_descriptors_do_not_travel_over_tls(authority: Authority, pair: Pair) -> None:
    async with tls_pair(authority, pair) as (client, _):
        with pytest.raises(MemkvError, match="descriptors"):
            client.send_nowait(b"x", (0,))
        with pytest.raises(MemkvError, match="without it"):
            client.release()
        assert client.take_fd() is None
