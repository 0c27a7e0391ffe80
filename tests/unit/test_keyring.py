"""Keys by id: what each allows, what a replacement changes, and what an unknown id is told."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.config import KeyEntry, Right, dev_server_config
from memkv_vllm.keys import KEY_FORMAT
from memkv_vllm.store.keyring import Access, KeyRing
from memkv_vllm.store.reloading import settings_not_taken

KEYS = [bytes([number]) * 32 for number in range(4)]


def entry(number: int, **changes: Any) -> KeyEntry:
    return KeyEntry.model_validate({"key": KEYS[number], **changes})


def test_an_unknown_id_has_another_key_each_time() -> None:
    ring = KeyRing({"a": entry(0)})
    assert ring.find("a") == KEYS[0] and "a" in ring
    assert "b" not in ring and ring.access("b") is None
    found = {ring.find("b") for _ in range(10)}
    assert len(found) == 10 and {len(key) for key in found} == {32}
    assert KEYS[0].hex() not in repr(ring) and repr(KEYS[0]) not in repr(ring)


def test_what_a_replacement_changes() -> None:
    ring = KeyRing({"stays": entry(0), "goes": entry(1), "other key": entry(2), "other rights": entry(3)})
    change = ring.replace(
        {
            "stays": entry(0),
            "comes": entry(1),  # the key of one that goes, under another id
            "other key": KeyEntry.model_validate({"key": os.urandom(32)}),
            "other rights": entry(3, rights=["read"]),
        }
    )
    assert change.added == ("comes", "other key")
    assert change.removed == ("goes", "other key")
    assert change.changed == ("other rights",)
    assert ring.find("comes") == KEYS[1] and "goes" not in ring


def test_a_replacement_by_the_same_changes_nothing() -> None:
    entries = {"a": entry(0, prefix="0102"), "b": entry(1)}
    assert KeyRing(entries).replace(dict(entries)) == ((), (), ())


@given(st.binary(max_size=40), st.binary(min_size=32, max_size=32), st.binary(max_size=36))
def test_a_right_over_a_namespace_is_one_over_every_key_of_it(prefix: bytes, namespace: bytes, rest: bytes) -> None:
    access = Access(frozenset({Right.ADMIN}), prefix)
    if access.may_namespace(Right.ADMIN, namespace):
        assert access.may(Right.ADMIN, bytes([KEY_FORMAT]) + namespace + rest)
    assert not access.may_namespace(Right.READ, namespace)


@pytest.mark.parametrize(
    ("rights", "prefix", "sees"),
    [
        ({Right.ADMIN}, b"", True),
        ({Right.ADMIN}, bytes([KEY_FORMAT]), True),
        ({Right.ADMIN}, b"\x02", False),
        ({Right.ADMIN}, bytes([KEY_FORMAT]) + b"n", False),
        ({Right.READ, Right.WRITE, Right.DELETE}, b"", False),
    ],
)
def test_who_sees_everything(rights: set[Right], prefix: bytes, sees: bool) -> None:
    assert Access(frozenset(rights), prefix).sees_everything is sees


def test_settings_that_a_reload_does_not_take_are_named_without_values() -> None:
    running = dev_server_config("ab" * 32, max_size="8MiB")
    assert settings_not_taken(running, dev_server_config("cd" * 32, max_size="8MiB")) == []
    other = dev_server_config(
        "cd" * 32, max_size="16MiB", address="127.0.0.1:1", overrides={"limits": {"max_sessions": 3}}
    )
    assert settings_not_taken(running, other) == ["network.address", "memory", "limits"]
