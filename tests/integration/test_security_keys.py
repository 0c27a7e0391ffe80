"""Keys while a server runs: rotation under traffic, removal, other rights, reload by SIGHUP (P091, P092)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import SecretBytes

from memkv_vllm.config import KeyEntry, dev_server_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import AuthError, ConnectionLost
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import HEADER_BYTES, Flags, Header, MessageType, pack_header, unpack_header
from memkv_vllm.protocol.messages import Ping
from memkv_vllm.protocol.session import PeerKind, State
from memkv_vllm.pytest_plugin import LoopbackServer
from memkv_vllm.store.reloading import KeyReloader
from memkv_vllm.transports.loopback import LoopbackClientTransport
from memkv_vllm.transports.streams import send_all
from memkv_vllm.types import Status
from tests.support.guarded import Guarded, GuardedClient, guarded, make_key, value
from tests.support.harness import LoopbackFactory, wait_until
from tests.support.peers import client_session, raw_stream, until_closed
from tests.support.ranks import Cluster, Rank, eventually, rank
from tests.support.scripted import soon
from tests.support.store import Rig

ROOT = Path(__file__).resolve().parents[2]
OURS = b"A" * 32
FACTORY = LoopbackFactory()


def entry(key: bytes, **changes: Any) -> KeyEntry:
    return KeyEntry.model_validate({"key": SecretBytes(key), **changes})


def entries(site: Guarded, *names: str, **changes: Any) -> dict[str, KeyEntry]:
    """The site's keys of these names."""
    return {name: entry(site.keys[name], **changes) for name in names}


# ------------------------------------------------------------------------------------------------ rotation


def replace_keys(server: LoopbackServer, keys: Mapping[str, KeyEntry]) -> None:
    """On the server's own loop, as its signal handler does."""
    thread, store = server._thread, server._server
    assert thread is not None and store is not None
    before = server.statistics()["counters"].get("key_reloads", 0)
    thread.post(lambda: store.handler.replace_keys(keys))
    eventually(lambda: server.statistics()["counters"].get("key_reloads", 0) > before, "the keys are replaced")


def loads_all(one: Rank, numbers: range) -> bool:
    """One more round of traffic; whether nothing was lost."""
    result = one.loaded(numbers)
    assert one.wrong(result, list(numbers)) == []
    return not result.bad_block_ids


def test_a_fleet_moves_to_another_key_without_an_interruption(tmp_path: Path) -> None:
    """P092: both keys are valid while engines move one by one; then the old one goes, and only who still uses it."""
    new, numbers = os.urandom(32), range(20)
    with Cluster(tmp_path) as cluster:
        server = cluster.only
        old_settings = cluster.settings()
        new_settings = ClusterSettings(**{**vars(old_settings), "credentials": Credentials(new, "2027")})
        with rank(old_settings) as before:
            before.ready().stored(numbers)
            assert loads_all(before, numbers)
            replace_keys(server, {"default": entry(cluster.key), "2027": entry(new)})
            assert loads_all(before, numbers)
            with rank(new_settings) as after:
                after.ready()
                assert loads_all(before, numbers) and loads_all(after, numbers)
                assert after.stored(range(20, 24)).lost == {}
                replace_keys(server, {"2027": entry(new)})
                eventually(lambda: before.statistics.servers_ready == 0, "sessions of the old key end")
                for _ in range(3):
                    assert loads_all(after, range(24))
                lost = before.loaded(numbers)  # an engine that was forgotten misses, and goes on
                assert len(lost.bad_block_ids) == len(numbers)
                before.idle()
                assert after.statistics.servers_ready == 1
                counters = server.statistics()["counters"]
                assert counters["cut_key_removed"] >= 1
                replace_keys(server, {"default": entry(cluster.key), "2027": entry(new)})
                before.ready()
                assert loads_all(before, numbers) and loads_all(after, numbers)


# ------------------------------------------------------------------------------------------------ removal


async def _is_cut(client: GuardedClient) -> None:
    await wait_until(lambda: client.ended, "the session is cut")
    assert isinstance(client.ended[0], ConnectionLost)


@pytest.mark.anyio
async def test_the_sessions_of_a_removed_key_end_and_no_other() -> None:
    async with guarded({"a": {}, "b": {}}) as site:
        first, second, other = [await site.connect(name) for name in ("a", "a", "b")]
        change = site.server.handler.replace_keys(entries(site, "b"))
        assert change == ((), ("a",), ())
        for client in (first, second):
            await _is_cut(client)
        await site.until_idle(sessions=1)
        assert site.count("cut_key_removed") == 2
        await other.ask(Ping())
        with pytest.raises(AuthError, match="'a'"):
            await site.connect("a")
        site.server.handler.replace_keys(entries(site, "a", "b"))
        await (await site.connect("a")).ask(Ping())
        await other.ask(Ping())


@pytest.mark.anyio
async def test_an_id_that_stands_for_another_key_ends_the_sessions_of_the_old_one() -> None:
    async with guarded({"a": {}}) as site:
        client = await site.connect("a")
        new = os.urandom(32)
        change = site.server.handler.replace_keys({"a": entry(new)})
        assert change == (("a",), ("a",), ())
        await _is_cut(client)
        with pytest.raises(AuthError):
            await site.connect("a")
        site.keys["a"] = new
        await (await site.connect("a")).ask(Ping())


@pytest.mark.anyio
async def test_other_rights_hold_from_the_next_request_on() -> None:
    async with guarded({"a": {}, "b": {}}) as site:
        client, key = await site.connect("a"), make_key(OURS, 1)
        assert await client.put(key, value(1)) is Status.OK
        change = site.server.handler.replace_keys(entries(site, "a", rights=["read"]) | entries(site, "b"))
        assert change == ((), (), ("a",))
        assert await client.get(key) == value(1)
        assert await client.put(make_key(OURS, 2), value(2)) is Status.DENIED
        site.server.handler.replace_keys(entries(site, "a", "b"))
        assert await client.put(make_key(OURS, 2), value(2)) is Status.OK
        assert client.connection.alive


@pytest.mark.anyio
async def test_a_key_that_is_replaced_during_a_handshake_lets_nobody_in() -> None:
    async with guarded({"a": {}}) as site:
        async with raw_stream(FACTORY, site.address) as stream:
            session = client_session(site.keys["a"], "a")
            session.start()
            await send_all(stream, session.data_to_send())
            session.receive_data(await stream.receive())
            site.server.handler.replace_keys({"a": entry(os.urandom(32))})
            await send_all(stream, session.data_to_send())
            with pytest.raises(AuthError, match="replaced"):
                session.receive_data(await until_closed(stream))
            assert session.state is State.CLOSED
        await site.until_idle()
        assert (site.count("auth_failed"), site.count("sessions")) == (1, 0)


# ------------------------------------------------------------------------------------------------ strangers


@pytest.mark.anyio
async def test_an_unknown_key_id_cannot_be_told_from_a_wrong_key() -> None:
    """The answers have the same type and length, and neither side of the handshake goes further (P092)."""
    async with guarded({"known": {}}) as site:
        answers = []
        for key_id in ("known", "unknown"):
            async with raw_stream(FACTORY, site.address) as stream:
                session = client_session(os.urandom(32), key_id)
                session.start()
                await send_all(stream, session.data_to_send())
                header = unpack_header(answer := await stream.receive())
                answers.append((header.type, header.flags, len(answer)))
                with pytest.raises(AuthError, match="auth_key_id"):
                    session.receive_data(answer)
        assert answers[0] == answers[1]
        assert answers[0][0] is MessageType.HELLO
        # The operator sees what the stranger does not.
        await wait_until(lambda: site.count("auth_failed") == 2, "both are counted")
        assert site.count("auth_unknown_key") == 1


@pytest.mark.anyio
async def test_a_proof_under_an_unknown_key_id_is_refused_like_a_wrong_one() -> None:
    async with guarded({"known": {}}) as site:
        ends = []
        for key_id in ("known", "unknown"):
            async with raw_stream(FACTORY, site.address) as stream:
                session = client_session(os.urandom(32), key_id)
                session.start()
                await send_all(stream, session.data_to_send())
                await stream.receive()
                proof = bytes(os.urandom(32))
                await send_all(stream, _proof_frame(proof))
                ends.append(await until_closed(stream))
        assert ends[0] == ends[1]
        assert unpack_header(ends[0]).type is MessageType.REJECT
        assert site.count("auth_failed") == 2
        assert len(ends[0]) > HEADER_BYTES


def _proof_frame(proof: bytes) -> bytes:
    return pack_header(Header(1, MessageType.PROOF, Flags.NONE, 0, len(proof), 0)) + proof


# ------------------------------------------------------------------------------------------------ SIGHUP


class Server:
    """``memkv start --config`` in a process of its own, with its log."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], port: int) -> None:
        self.folder, self.process, self.port = folder, process, port

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8")

    def reload(self, text: str) -> None:
        """Write the yaml and send SIGHUP."""
        write_yaml(self.folder, text)
        os.kill(self.process.pid, signal.SIGHUP)

    def connects(self, key: bytes, key_id: str) -> bool:
        """Whether a client under this key gets in."""

        async def connect() -> bool:
            transport = LoopbackClientTransport()
            try:
                made = await transport.connect("127.0.0.1", self.port, Credentials(key, key_id), PeerKind.TOOL, soon())
            except AuthError:
                return False
            await made.aclose()
            return True

        return anyio.run(connect)


def write_yaml(folder: Path, keys: str, max_size: str = "8MiB") -> None:
    network = "network:\n  address: 127.0.0.1:0\n  admin_address: 127.0.0.1:0\n  auth_keys:\n"
    text = f"{network}{keys}\nmemory: {{max_size: {max_size}}}\n"
    (folder / "memkv.yaml").write_text(text, encoding="utf-8")


def key_line(name: str, key: bytes) -> str:
    return f"    {name}: {{key: '{key.hex()}'}}"


@contextmanager
def started(folder: Path, keys: str) -> Iterator[Server]:
    write_yaml(folder, keys)
    (folder / "memkv.yaml").chmod(0o600)
    command = [sys.executable, "-m", "memkv_vllm", "start", "--config", str(folder / "memkv.yaml")]
    with open(folder / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready address="), (folder / "log").read_text()
        port = int(line.split("address=")[1].split()[0].rpartition(":")[2])
        yield Server(folder, process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        process.stdout.close()


@pytest.mark.timeout(60)
def test_sighup_reloads_the_keys_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    old, new = os.urandom(32), os.urandom(32)
    with started(tmp_path, key_line("old", old)) as server:
        assert server.connects(old, "old") and not server.connects(new, "new")
        server.reload(key_line("old", old) + "\n" + key_line("new", new))
        eventually(lambda: "keys.reloaded added=new" in server.log, lambda: server.log)
        assert server.connects(old, "old") and server.connects(new, "new")

        server.reload(key_line("new", new)[:-4])  # a file that is only half written
        eventually(lambda: "reload.failed" in server.log, lambda: server.log)
        server.reload("    new: {key: 'abc'}")
        eventually(lambda: server.log.count("reload.failed") == 2, lambda: server.log)
        assert "network.auth_keys.new.key" in server.log and "stay as they were" in server.log
        assert server.connects(old, "old") and server.connects(new, "new")

        write_yaml(tmp_path, key_line("new", new), max_size="16MiB")
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(lambda: "removed=old" in server.log, lambda: server.log)
        assert "reload.partial settings=memory" in server.log
        assert not server.connects(old, "old") and server.connects(new, "new")
        assert server.process.poll() is None
        for key in (old, new):
            assert key.hex() not in server.log


def test_a_server_without_a_yaml_ignores_the_signal_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with Rig() as rig:
        assert not KeyReloader(dev_server_config(os.urandom(32)), None).reload(rig.handler)
    assert "reload.ignored" in caplog.text
