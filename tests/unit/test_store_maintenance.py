"""The operator's commands over the ADMIN message: namespaces, reset, gc, evict; rights and bad input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import StoreError
from memkv_vllm.protocol.messages import Admin, Manifest
from memkv_vllm.types import Status
from tests.support.store import NAMESPACE, VALUE, Rig, make_key, value

pytestmark = pytest.mark.anyio

OTHER = b"O" * 32


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


async def test_namespaces_are_listed_with_their_manifests(rig: Rig) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1), make_key(2): value(2)})
    await rig.ask(peer, Manifest(b"f" * 32, NAMESPACE, b"{}"))
    await rig.ask(peer, Manifest(b"f" * 32, OTHER, b"{}"))
    answer = await rig.ask(peer, Admin({"command": "namespaces"}))
    rows = {row["namespace"]: row for row in answer["namespaces"]}
    assert set(rows) == {NAMESPACE.hex(), OTHER.hex()}
    full, empty = rows[NAMESPACE.hex()], rows[OTHER.hex()]
    assert (full["values"], full["arena_bytes"], full["disk_bytes"]) == (2, 2 * VALUE, 0)
    assert (empty["values"], empty["arena_bytes"]) == (0, 0)
    assert full["manifests"] == empty["manifests"] == [(b"f" * 32).hex()]
    assert 0 <= full["idle_s"] < 20


async def test_gc_drops_what_is_idle_and_says_what(rig: Rig) -> None:
    """P097."""
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1)})
    assert (await rig.ask(peer, Admin({"command": "gc", "idle_s": 3600})))["dropped"] == []
    assert rig.exists(make_key(1))
    (row,) = (await rig.ask(peer, Admin({"command": "gc", "idle_s": 0})))["dropped"]
    assert (row["namespace"], row["values"]) == (NAMESPACE.hex(), 1)
    assert not rig.exists(make_key(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.handler.sweep)
        await anyio.wait_all_tasks_blocked()
        assert rig.used == 0  # the bytes follow in the background
        tasks.cancel_scope.cancel()


async def test_evict_frees_bytes_in_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkv_vllm.store.maintenance._STEP_VALUES", 2)
    peer = await rig.connect()
    await rig.put(peer, {make_key(block): value(block) for block in range(10)})
    answer = await rig.ask(peer, Admin({"command": "evict", "bytes": 5 * VALUE - 1}))
    assert (answer["values"], answer["bytes"]) == (5, 5 * VALUE)
    assert [rig.exists(make_key(block)) for block in range(10)] == [False] * 5 + [True] * 5
    answer = await rig.ask(peer, Admin({"command": "evict", "bytes": 2**40}))
    assert (answer["values"], rig.used) == (5, 0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ({}, "unknown command 'None'; this server knows: evict, gc, namespaces, reset"),
        ({"command": ["gc"]}, "unknown command"),
        ({"command": "gc"}, "idle_s must be"),
        ({"command": "gc", "idle_s": -1}, "idle_s must be"),
        ({"command": "gc", "idle_s": True}, "idle_s must be"),
        ({"command": "gc", "idle_s": float("inf")}, "idle_s must be"),
        ({"command": "gc", "idle_s": float("nan")}, "idle_s must be"),
        ({"command": "evict"}, "bytes must be"),
        ({"command": "evict", "bytes": 0}, "bytes must be"),
        ({"command": "evict", "bytes": 1.5}, "bytes must be"),
        ({"command": "evict", "bytes": True}, "bytes must be"),
        ({"command": "reset", "namespace": "00"}, "64 hexadecimal"),
    ],
)
async def test_bad_input_is_refused_and_changes_nothing(rig: Rig, command: dict[str, Any], message: str) -> None:
    peer = await rig.connect()
    await rig.put(peer, {make_key(1): value(1)})
    with pytest.raises(StoreError, match=message):
        await rig.ask(peer, Admin(command))
    assert rig.exists(make_key(1))


@pytest.mark.parametrize("command", [{"command": "gc", "idle_s": 0}, {"command": "evict", "bytes": 1}])
@pytest.mark.parametrize("key_id", ["writer", "tenant"])
async def test_commands_over_the_whole_store_need_the_right_for_all_of_it(command: dict[str, Any], key_id: str) -> None:
    keys = {
        "writer": {"key": os.urandom(32).hex(), "rights": ["read", "write", "delete"]},
        "tenant": {"key": os.urandom(32).hex(), "prefix": (b"\x01" + NAMESPACE).hex()},
    }
    with Rig(network={"address": "127.0.0.1:0", "auth_keys": keys}) as rig:
        peer = await rig.connect(key_id)
        assert await rig.put(peer, {make_key(1): value(1)}) == [Status.OK]
        for what in (command, {"command": "namespaces"}):
            with pytest.raises(StoreError, match="needs the right: admin"):
                await rig.ask(peer, Admin(what))
        assert rig.exists(make_key(1))
        assert rig.count("denied") == 2
        if key_id == "tenant":  # of its own namespace it may dispose
            answer = await rig.ask(peer, Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
            assert answer["hidden"] == 1
