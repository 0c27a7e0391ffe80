"""Which key may do what: every request against every right and prefix, over a real server (P092)."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import ConnectError, StoreError
from memkv_vllm.protocol.frame import HANDSHAKE_TYPES, MessageType
from memkv_vllm.protocol.messages import (
    Admin,
    BadValue,
    Bye,
    Delete,
    Exists,
    Fence,
    Manifest,
    ManifestEntry,
    Ping,
    ReportBad,
    Stat,
)
from memkv_vllm.transports.tcp.attach import attach
from memkv_vllm.types import SessionId, Status
from tests.support.guarded import GuardedClient, guarded, make_key, value
from tests.support.harness import wait_until
from tests.support.scripted import soon

pytestmark = pytest.mark.anyio

OURS, THEIRS = b"A" * 32, b"B" * 32
FAMILY = b"F" * 32
RIGHTS = ("read", "write", "delete", "admin")
ALLOWED: dict[MessageType, set[str]] = {
    MessageType.PUT: {"write"},
    MessageType.GET: {"read"},
    MessageType.EXISTS: {"read"},
    MessageType.REPORT_BAD: {"write"},
    MessageType.DELETE: {"delete"},
    MessageType.MANIFEST: {"read", "write"},
    MessageType.ADMIN: {"admin"},
}
"""Which rights allow a request at all. STAT is for everybody, but what it shows depends on the key."""

ANY_KEY = {
    MessageType.CONNECT,
    MessageType.REGISTER,
    MessageType.STAT,
    MessageType.PING,
    MessageType.FENCE,
    MessageType.ATTACH,
    MessageType.BYE,
}
"""These name nothing of anybody else: one's own memory, oneself, or (FENCE, ATTACH) a session of one's own key."""


async def probe(owner: GuardedClient, client: GuardedClient, namespace: bytes) -> dict[MessageType, bool]:
    """What ``client`` achieves with values of ``namespace``, which ``owner`` put there and puts back."""
    present, absent = make_key(namespace, 1), make_key(namespace, 2)
    assert await owner.put(present, value(1)) in (Status.OK, Status.EXISTS)
    await owner.ask(Delete([absent]))
    done = {}
    stored = await client.put(absent, value(2))
    assert stored in (Status.OK, Status.DENIED)
    done[MessageType.PUT] = stored is Status.OK
    assert (await owner.get(absent) == value(2)) == done[MessageType.PUT]
    got = await client.get(present)
    assert got in (value(1), Status.DENIED)
    done[MessageType.GET] = got == value(1)
    (done[MessageType.EXISTS],) = await client.ask(Exists([present[:-2]], 1))
    generation = await owner.generation(present)
    (done[MessageType.REPORT_BAD],) = await client.ask(ReportBad([BadValue(present, generation)]))
    assert (await owner.get(present) is Status.ABSENT) == done[MessageType.REPORT_BAD]
    assert await owner.put(present, value(1)) in (Status.OK, Status.EXISTS)
    (deleted,) = await client.ask(Delete([present]))
    assert deleted in (Status.OK, Status.DENIED)
    done[MessageType.DELETE] = deleted is Status.OK
    assert (await owner.get(present) is Status.ABSENT) == done[MessageType.DELETE]
    done[MessageType.MANIFEST] = await _succeeds(client, Manifest(FAMILY, namespace, b"{}"))
    assert await owner.put(present, value(1)) in (Status.OK, Status.EXISTS)
    done[MessageType.ADMIN] = await _succeeds(client, Admin({"command": "reset", "namespace": namespace.hex()}))
    assert (await owner.get(present) is Status.ABSENT) == done[MessageType.ADMIN]
    return done


async def _succeeds(client: GuardedClient, request: Any) -> bool:
    try:
        await client.ask(request)
    except StoreError as error:
        assert "denied" in str(error)
        return False
    return True


def test_every_message_type_has_its_row() -> None:
    """A request type that is added must say here who may send it."""
    assert set(MessageType) == ALLOWED.keys() | ANY_KEY | HANDSHAKE_TYPES | {MessageType.LICENSE}


@pytest.mark.parametrize("over", ["loopback", "tcp"])
async def test_each_right_allows_its_requests_and_no_other(over: str) -> None:
    keys: dict[str, dict[str, Any]] = {"owner": {}, **{right: {"rights": [right]} for right in RIGHTS}}
    async with guarded(keys, over=over) as site:
        owner = await site.connect("owner")
        for right in RIGHTS:
            done = await probe(owner, await site.connect(right), OURS)
            assert done == {kind: right in rights for kind, rights in ALLOWED.items()}, right


async def test_all_rights_end_at_the_prefix() -> None:
    async with guarded({"owner": {}, "tenant": {"prefix": (b"\x01" + OURS).hex()}}) as site:
        owner, tenant = await site.connect("owner"), await site.connect("tenant")
        assert await probe(owner, tenant, OURS) == dict.fromkeys(ALLOWED, True)
        assert await probe(owner, tenant, THEIRS) == dict.fromkeys(ALLOWED, False)
        for name in ("exists_denied", "report_bad_denied", "put_denied", "get_denied", "delete_denied", "denied"):
            assert site.count(name) > 0, name


@pytest.mark.parametrize(
    "prefix", [b"\x02", b"\x02" + OURS, b"\x01" + OURS + b"\0"], ids=lambda prefix: prefix.hex()[:6]
)
async def test_a_prefix_that_does_not_cover_a_namespace_gives_no_right_over_it(prefix: bytes) -> None:
    """A prefix of another key format, or one inside of the namespace, must not reset all of it."""
    async with guarded({"owner": {}, "odd": {"prefix": prefix.hex()}}) as site:
        owner, odd = await site.connect("owner"), await site.connect("odd")
        assert await owner.put(make_key(OURS, 1), value(1)) is Status.OK
        commands: list[dict[str, Any]] = [
            {"command": "reset", "namespace": OURS.hex()},
            {"command": "gc", "idle_s": 0},
            {"command": "evict", "bytes": 1},
            {"command": "namespaces"},
        ]
        for command in commands:
            assert not await _succeeds(odd, Admin(command))
        assert not await _succeeds(odd, Manifest(FAMILY, OURS, b"{}"))
        assert await owner.get(make_key(OURS, 1)) == value(1)


async def test_answers_outside_of_the_prefix_do_not_tell_whether_a_value_is_there() -> None:
    async with guarded({"owner": {}, "tenant": {"prefix": (b"\x01" + OURS).hex()}}) as site:
        owner, tenant = await site.connect("owner"), await site.connect("tenant")
        there, nowhere = make_key(THEIRS, 1), make_key(THEIRS, 2)
        assert await owner.put(there, value(1)) is Status.OK
        for request in (
            lambda key: tenant.ask(Exists([key[:-2]], 1)),
            lambda key: tenant.ask(Exists([key[:20]], 1)),
            lambda key: tenant.ask(ReportBad([BadValue(key, 1)])),
            lambda key: tenant.ask(Delete([key])),
            lambda key: tenant.put(key, value(1)),
            lambda key: tenant.get(key),
        ):
            assert await request(there) == await request(nowhere)


async def test_a_family_shows_a_tenant_only_its_own_namespaces() -> None:
    async with guarded({"owner": {}, "tenant": {"prefix": (b"\x01" + OURS).hex()}}) as site:
        owner, tenant = await site.connect("owner"), await site.connect("tenant")
        await owner.ask(Manifest(FAMILY, THEIRS, b'{"model": "secret-project"}'))
        assert await tenant.ask(Manifest(FAMILY, OURS, b"{}")) == []
        assert await owner.ask(Manifest(FAMILY, THEIRS, b"{}")) == [ManifestEntry(OURS, b"{}")]
        assert site.count("manifests_hidden") == 1


async def test_statistics_of_others_are_for_the_administrator() -> None:
    keys: dict[str, dict[str, Any]] = {
        "root": {"rights": ["admin"]},
        "engine": {"rights": ["read", "write"]},
        "tenant": {"prefix": (b"\x01" + OURS).hex()},
    }
    async with guarded(keys) as site:
        root, engine, tenant = [await site.connect(name) for name in keys]
        shown = await root.ask(Stat())
        assert {row["key_id"] for row in shown["sessions"]} == {"root", "engine", "tenant"}
        assert {"arena", "table", "counters"} <= shown.keys()
        for name, client in (("engine", engine), ("tenant", tenant)):
            shown = await client.ask(Stat())
            assert shown.keys() == {"server", "sessions"}
            assert shown["server"].keys() == {"server_id", "boot_id", "uptime_s", "version", "time_s"}
            assert [row["key_id"] for row in shown["sessions"]] == [name]


async def test_a_session_is_fenced_by_its_own_key_only() -> None:
    async with guarded({"one": {}, "two": {"rights": ["read"]}}) as site:
        victim, stranger, friend = [await site.connect(name) for name in ("one", "two", "one")]
        session = victim.connection.established.session
        with pytest.raises(StoreError, match="another key"):
            await stranger.ask(Fence(session))
        await victim.ask(Ping())
        await friend.ask(Fence(session))
        await wait_until(lambda: victim.ended, "the fenced session ends")


async def test_a_data_connection_is_attached_by_the_sessions_own_key_only() -> None:
    """To another key's session it is refused as to one that does not exist, and the session does not notice."""
    async with guarded({"one": {}, "two": {}}, over="tcp") as site:
        victim = await site.connect("one")
        established = victim.connection.established
        before, refusals = site.count("refused_attach"), []
        for session in (established, replace(established, session=SessionId(bytes(16)))):
            sock = socket.create_connection(site.address)
            with pytest.raises(ConnectError) as caught:
                await attach(sock, site.credentials("two"), session, soon(), label="server")
            refusals.append(str(caught.value))
        assert refusals[0] == refusals[1]
        await wait_until(lambda: site.count("refused_attach") == before + 2, "both are counted")
        assert await victim.put(make_key(OURS, 1), value(1)) is Status.OK


async def test_what_any_key_may_do() -> None:
    async with guarded({"weak": {"rights": ["delete"], "prefix": "0102"}}) as site:
        weak = await site.connect("weak")  # REGISTER
        await weak.ask(Ping())
        await weak.ask(Bye())
        with anyio.fail_after(5):
            await site.until_idle()


async def test_an_administrators_command_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed JSON takes many times its length: only who may send commands makes the server parse one."""
    parsed: list[int] = []
    unpack = Admin.unpack

    def counting(body: memoryview) -> Admin:
        parsed.append(len(body))
        return unpack(body)

    monkeypatch.setattr(Admin, "unpack", counting)
    async with guarded({"engine": {"rights": ["read", "write"]}, "root": {"rights": ["admin"]}}) as site:
        engine, root = await site.connect("engine"), await site.connect("root")
        assert not await _succeeds(engine, Admin({"command": "namespaces"}))
        assert parsed == []
        assert await _succeeds(root, Admin({"command": "namespaces"}))
        assert len(parsed) == 1
