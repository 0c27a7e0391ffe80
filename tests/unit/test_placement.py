"""Rendezvous placement: stable, balanced, and few moves when a server comes or goes."""

from __future__ import annotations

import hashlib

import pytest

from memkv_vllm.engine.placement import Placement

KEYS = [hashlib.sha256(str(number).encode()).digest() for number in range(4000)]
GOLDEN = "alpha alpha beta alpha beta alpha beta beta gamma gamma beta gamma".split()


def names(count: int) -> list[str]:
    return [f"10.0.0.{number}:9900" for number in range(count)]


def test_golden_owners() -> None:
    """Another process, release or machine must find the same server."""
    placement = Placement(["alpha", "beta", "gamma"])
    assert [placement.owner(key) for key in KEYS[:12]] == GOLDEN
    assert placement.owner(b"") == "beta"


def test_order_of_names_does_not_matter() -> None:
    one, two = Placement(names(5)), Placement(reversed(names(5)))
    assert [one.owner(key) for key in KEYS] == [two.owner(key) for key in KEYS]
    assert one.names == two.names


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_a_new_server_takes_its_share_and_nothing_else_moves(count: int) -> None:
    before, after = Placement(names(count)), Placement(names(count + 1))
    moved = [key for key in KEYS if before.owner(key) != after.owner(key)]
    assert {after.owner(key) for key in moved} == {names(count + 1)[-1]}
    assert len(moved) == pytest.approx(len(KEYS) / (count + 1), rel=0.2)


def test_split_keeps_every_index_once() -> None:
    placement = Placement(names(3))
    shares = placement.split(KEYS[:100])
    assert sorted(index for share in shares.values() for index in share) == list(range(100))
    for name, share in shares.items():
        assert share == sorted(share)
        assert all(placement.owner(KEYS[index]) == name for index in share)
    assert placement.split([]) == {}


def test_bad_names() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Placement([])
    with pytest.raises(ValueError, match="differ"):
        Placement(["a", "b", "a"])
    assert repr(Placement(["b", "a"])) == "Placement(['a', 'b'])"
