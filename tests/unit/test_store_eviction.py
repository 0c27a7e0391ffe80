"""The order of eviction."""

from __future__ import annotations

import pytest

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.store.eviction import EvictionPolicy, LruPolicy


def filled(*keys: bytes) -> LruPolicy:
    policy = LruPolicy()
    for key in keys:
        policy.added(key)
    return policy


def test_the_least_recently_used_goes_first() -> None:
    policy = filled(b"a", b"b", b"c")
    policy.touched(b"a")
    assert list(policy.victims()) == [b"b", b"c", b"a"]


def test_a_victim_may_be_removed_while_iterating() -> None:
    policy = filled(b"a", b"b", b"c")
    seen = []
    for key in policy.victims():
        seen.append(key)
        policy.removed(key)
    assert seen == [b"a", b"b", b"c"]
    assert len(policy) == 0


def test_a_victim_that_is_left_in_place_is_in_use_and_becomes_the_newest() -> None:
    policy = filled(b"pinned", b"b", b"c")
    for key in policy.victims():
        if key != b"pinned":
            policy.removed(key)
            break
    assert list(policy.victims()) == [b"c", b"pinned"]


def test_victims_end_and_repeat_no_key_even_if_all_are_left() -> None:
    policy = filled(b"a", b"b")
    assert list(policy.victims()) == [b"a", b"b"]
    assert list(policy.victims()) == [b"a", b"b"]


def test_misuse_raises() -> None:
    policy: EvictionPolicy = filled(b"a")
    with pytest.raises(LocalProtocolError, match="twice"):
        policy.added(b"a")
    with pytest.raises(LocalProtocolError, match="not known"):
        policy.touched(b"b")
    with pytest.raises(LocalProtocolError, match="not known"):
        policy.removed(b"b")
