"""Rendezvous placement over any set of servers: who moves when one comes or goes, and how evenly blocks are spread.

The bounds on shares are statistics, not taste: a share of ``n`` independent blocks is binomial, and six standard
deviations are left on each side, which a correct placement misses once in 500 million tries.
"""

from __future__ import annotations

import hashlib
import math

from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.config import parse_servers
from memkv_vllm.engine.placement import Placement
from memkv_vllm.keys import block_prefix, store_key

BLOCKS = [block_prefix(b"n" * 32, hashlib.sha256(number.to_bytes(4, "big")).digest(), 0) for number in range(3000)]
SIGMAS = 6

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-_:", min_size=1, max_size=30)
clusters = st.lists(names, min_size=1, max_size=16, unique=True)


def near(share: int, expected: float, blocks: int = len(BLOCKS)) -> bool:
    """Whether ``share`` of ``blocks`` agrees with the probability ``expected``."""
    return abs(share - blocks * expected) <= SIGMAS * math.sqrt(blocks * expected * (1 - expected)) + 1


@given(clusters, names)
def test_a_new_server_takes_one_nth_from_the_others_and_nothing_else_moves(old: list[str], new: str) -> None:
    """P079: adding one of N moves 1/N of the blocks, all of them to it."""
    if new in old:
        return
    before, after = Placement(old), Placement([*old, new])
    moved = [block for block in BLOCKS if before.owner(block) != after.owner(block)]
    assert {after.owner(block) for block in moved} <= {new}
    assert near(len(moved), 1 / (len(old) + 1))


@given(clusters.filter(lambda cluster: len(cluster) > 1), st.randoms(use_true_random=False))
def test_a_server_that_leaves_moves_only_its_own(cluster: list[str], chance: object) -> None:
    gone = cluster[chance.randrange(len(cluster))]  # type: ignore[attr-defined]
    before, after = Placement(cluster), Placement(name for name in cluster if name != gone)
    for block in BLOCKS:
        if before.owner(block) != gone:
            assert before.owner(block) == after.owner(block)


@given(clusters)
def test_blocks_are_spread_evenly(cluster: list[str]) -> None:
    shares = Placement(cluster).split(BLOCKS)
    assert all(near(len(shares.get(name, ())), 1 / len(cluster)) for name in cluster)


@given(st.integers(0, 2999), clusters, st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=8))
def test_all_shards_of_a_block_live_together(number: int, cluster: list[str], shards: list[int]) -> None:
    placement, block = Placement(cluster), BLOCKS[number]
    owners = {placement.owner(store_key(block, shard)[: len(block)]) for shard in shards}
    assert owners == {placement.owner(block)}


@given(st.lists(st.integers(1, 250), min_size=3, max_size=9, unique=True))
def test_names_decide_and_addresses_do_not(hosts: list[int]) -> None:
    """A server that gets other addresses, or another rail, keeps its blocks."""
    before = parse_servers(",".join(f"s{index}=10.0.0.{host}" for index, host in enumerate(hosts)))
    after = parse_servers(
        ",".join(f"s{index}=10.9.0.{host}:99|10.8.0.{host}" for index, host in reversed(list(enumerate(hosts))))
    )
    one, two = (Placement(server.name for server in servers) for servers in (before, after))
    assert one.split(BLOCKS[:300]) == two.split(BLOCKS[:300])
