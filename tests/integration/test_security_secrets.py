"""No key, license or token in any log, message, traceback or repr; and nobody else's words break a log line."""

from __future__ import annotations

import base64
import io
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from memkv_vllm.config import LicenseConfig, load_client_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import ConnectError, MemkvError
from memkv_vllm.observe import LineFormatter
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply, License, Manifest, Ping
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.license import LicenseVerifier
from memkv_vllm.transports.streams import SocketStream, send_all
from tests.support.fuzzing import no_more, seal
from tests.support.guarded import Guarded, guarded
from tests.support.harness import FACTORIES
from tests.support.licenses import Issuer
from tests.support.peers import client_session, raw_stream, server_session, shake_hands, until_closed
from tests.support.scripted import soon

pytestmark = pytest.mark.anyio

INJECTED = "fine\nts=2099 level=error logger=memkv event=forged\r\x1b[2J\u2028\x00"


def forms_of(secret: bytes) -> set[str]:
    """How a secret could show."""
    texts = {secret.hex(), base64.b64encode(secret).decode(), base64.urlsafe_b64encode(secret).decode().rstrip("=")}
    return texts | {repr(secret)[2:-1]}


class Watch:
    """Collects every text that an operator could see."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def see(self, *things: object) -> None:
        for thing in things:
            self.texts += [repr(thing), str(thing)]
            if isinstance(thing, BaseException):
                self.texts.append("".join(traceback.format_exception(thing)))

    def without(self, *secrets: str | bytes) -> None:
        for secret in secrets:
            forms = {secret} if isinstance(secret, str) else forms_of(secret)
            for text in self.texts:
                assert not any(form in text for form in forms), f"a secret in: {text[:300]}"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged, as the command formats it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(LineFormatter(as_json=False))
    logger = logging.getLogger("memkv")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize("over", ["loopback", "tcp"])
async def test_no_secret_is_shown_whatever_happens(over: str, log: io.StringIO, tmp_path: Path) -> None:
    issuer, watch = Issuer(), Watch()
    good, bad = issuer.license(), Issuer().license()
    asked = {"public_key_file": str(issuer.write(tmp_path))}
    wrong = os.urandom(32)
    async with guarded({"a": {}, "b": {}}, license=asked, over=over) as site:
        client = await site.connect("a", good)
        await client.ask(Ping())
        for credentials in (
            Credentials(wrong, "a", good),
            Credentials(site.keys["a"], "nobody", good),
            Credentials(site.keys["a"], "a", bad),
            Credentials(site.keys["a"], "a"),
        ):
            with pytest.raises(MemkvError) as caught:
                await site.transport.connect(*site.address, credentials, PeerKind.ENGINE, soon())
            watch.see(caught.value, credentials)
        handler, config = site.server.handler, site.server.config
        await site.until_idle(sessions=1)
        (session,) = handler._sessions.values()
        watch.see(site.server, handler, handler._admission._keys, handler._admission._license, session, config)
        watch.see(config.network, config.network.keys, config.license, client.connection, License(good), issuer)
        watch.see(client.connection.established, vars(client.connection), site.server.statistics())
        handler.replace_keys({"b": config.network.keys["b"]})
        await site.until_idle()
    watch.texts += log.getvalue().splitlines()
    assert "license.refused" in log.getvalue() and "keys.reloaded" in log.getvalue()
    watch.without(*site.keys.values(), wrong, good, bad, good.split(".")[2])


async def test_no_secret_in_a_clients_settings(tmp_path: Path) -> None:
    key, license = os.urandom(32), Issuer().license()
    environ = {"MEMKV_SERVERS": "a,b", "MEMKV_AUTH_KEY": key.hex(), "MEMKV_LICENSE": license}
    config, watch = load_client_config(environ), Watch()
    settings = ClusterSettings.from_config(config, "tier")
    assert settings.credentials.license == license
    watch.see(config, settings, settings.credentials, vars(settings))
    watch.texts += [config.model_dump_json(), str(config.model_dump())]
    for broken in (license[:-3] + "!", license + "x.y", key.hex() + "0"):
        with pytest.raises(MemkvError) as caught:
            load_client_config({**environ, "MEMKV_LICENSE": broken, "MEMKV_AUTH_KEY": broken})
        watch.see(caught.value)
    watch.without(key, license, license[:100])


# ------------------------------------------------------------------------------------------------ other people's words


def one_line_each(log: io.StringIO) -> None:
    lines = log.getvalue().splitlines()
    assert lines
    for line in lines:
        assert line.startswith("ts=20"), line
        assert line.isprintable(), line
        assert not line.startswith("ts=2099")


async def test_a_strangers_key_id_cannot_forge_a_log_line(log: io.StringIO) -> None:
    async with guarded() as site, raw_stream(FACTORIES["loopback"], site.address) as stream:
        session = client_session()
        session.start()
        hello = bytearray(session.data_to_send())
        hello[28 + 3 : 28 + 35] = b"a\nts=2099 event=forged \x1b[2J\r\0x".ljust(32, b"\0")
        await send_all(stream, bytes(hello))
        await stream.receive()
        no_more(stream)
        await until_closed(stream)
        await site.until_idle()
        assert site.count("auth_unknown_key") == 1
    assert "forged" in log.getvalue()
    one_line_each(log)


async def test_a_servers_words_cannot_forge_a_log_line_or_a_terminal_escape(log: io.StringIO) -> None:
    """A REJECT before authentication may be anybody's, and its text is shown at the client."""
    factory = FACTORIES["tcp"]
    listener, address = factory.raw_listener()

    async def refuse() -> None:
        await anyio.wait_readable(listener)
        stream = SocketStream(listener.accept()[0])
        session = server_session()
        session.reject(ErrorCode.BUSY, INJECTED)
        await send_all(stream, session.data_to_send())
        await until_closed(stream)
        stream.close()

    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse)
            try:
                await factory.client().connect(*address, Credentials(bytes(32)), PeerKind.TOOL, soon())
            except ConnectError as error:
                assert "fine" in str(error) and str(error).isprintable()
            else:
                pytest.fail("it was refused")
    assert ErrorReply.unpack(memoryview(ErrorReply(ErrorCode.BUSY, INJECTED).pack())).text.isprintable()


async def test_the_words_of_a_holder_of_a_key_cannot_forge_a_log_line(log: io.StringIO) -> None:
    async def send(site: Guarded, kind: int, body: bytes) -> None:
        async with raw_stream(FACTORIES["loopback"], site.address) as stream:
            session = client_session(site.keys["default"])
            await shake_hands(stream, session)
            await send_all(stream, seal(session, kind, body))
            stream._sock.shutdown(1)
            await until_closed(stream)

    command = b'{"command":"x\\nts=2099 event=forged\\u001b[2J"}'
    manifest = Manifest(b"F" * 32, b"\n" * 32, INJECTED.encode()).pack()
    async with guarded() as site:
        for kind, body in ((24, command), (24, b'{"command":"reset","namespace":"\\n"}'), (17, manifest), (99, b"\n")):
            await send(site, kind, body)
        await site.until_idle()
    one_line_each(log)


def test_a_verifier_shows_its_algorithm_only(tmp_path: Path) -> None:
    judge = LicenseVerifier(LicenseConfig(public_key_file=Issuer("ES256").write(tmp_path), issuer="acme"))
    assert repr(judge) == "<LicenseVerifier ES256>"
