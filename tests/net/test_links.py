"""What a cluster does over networks that break: real servers in namespaces, an engine and a prober in another one.

A deadline in these tests means only that something did not hang; what is promised is what happens to which blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memkv_vllm.engine import routes
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.transports.sockets import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    USER_TIMEOUT_MS,
)
from memkv_vllm.types import LossReason
from tests.soak.client_process import Orders
from tests.soak.clients import ClientActor
from tests.support.net_cluster import NetCluster, net_cluster
from tests.support.netns import Link
from tests.support.ranks import NAMESPACE, Lookups, Rank, eventually, lookups, rank, staging_plan

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(150)]

VALUE = 64 << 10
BLOCKS = range(60)
NOTICED_S = 60.0
"""Nothing that is promised to be noticed takes longer; the promises themselves are 5 to 30 s."""
JOB_S = 6.0


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """Three servers with a link each; every test gives the links back whole."""
    with net_cluster(tmp_path_factory.mktemp("three")) as cluster:
        yield cluster


@contextmanager
def at_work(
    cluster: NetCluster, *, value: int = VALUE, seed: int, settings: ClusterSettings | None = None
) -> Iterator[tuple[Rank, Lookups]]:
    """An engine that has stored all blocks, and a prober; both in the clients' namespace."""
    settings = cluster.settings(MEMKV_OP_TIMEOUT_S="8") if settings is None else settings
    with (
        cluster.client.inside(),
        rank(settings, plan=staging_plan(32, value=value), seed=seed, wait_timeout_s=JOB_S) as one,
        lookups(settings) as questions,
    ):
        servers = len(cluster.servers)
        eventually(lambda: one.statistics.servers_ready == servers, "all servers are connected", NOTICED_S)
        questions.ready(servers)
        assert one.result(one.store(BLOCKS), NOTICED_S).lost == {}
        yield one, questions
        # The next test has other values under the same keys. A connection that its server gave up while the network was
        # cut, and that nobody used since, says so only to the first who does.
        eventually(lambda: questions.prober.reset_namespace(NAMESPACE, NOTICED_S) == [], "a reset", NOTICED_S)


def load(one: Rank) -> dict[LossReason, int]:
    """Load all blocks; none that arrives is wrong. Returns what was lost."""
    result = one.result(one.load(BLOCKS), NOTICED_S)
    assert one.wrong(result, BLOCKS) == []
    assert len(result.bad_block_ids) == sum(result.lost.values())
    return dict(result.lost)


def lost_blocks(one: Rank) -> set[int]:
    """Load all blocks; returns the numbers of those that did not arrive."""
    result = one.result(one.load(BLOCKS), NOTICED_S)
    assert one.wrong(result, BLOCKS) == []
    return {block - one.half for block in result.bad_block_ids}


def break_silently(link: Link) -> None:
    link.shape(cut=True)


def break_openly(link: Link) -> None:
    link.down()


# ------------------------------------------------------------------------------------------------ one of three


@pytest.mark.parametrize("breaks", [break_silently, break_openly])
def test_a_link_that_goes_takes_its_share_only(three: NetCluster, breaks: Callable[[Link], None]) -> None:
    """P026, P029, P079: misses for one server's blocks, at once from the moment it is known; and back by itself."""
    share, link = set(three.owned_by("b", BLOCKS)), three.link("b")
    assert 0 < len(share) < len(BLOCKS)
    with at_work(three, seed=1) as (one, questions):
        breaks(link)
        try:
            begun = time.monotonic()
            while one.statistics.servers_ready == 3:
                assert lost_blocks(one) <= share, "under load, before it is known, only its share may be lost"
                assert time.monotonic() < begun + NOTICED_S, "a dead link is noticed"
            assert load(one) == {LossReason.BREAKER: len(share)}, "known: nothing waits for the network"
            eventually(lambda: questions.prober.statistics().servers_ready == 2, "the prober knows too", NOTICED_S)
            answers = questions.ask(BLOCKS)
            assert {number for number, answer in answers.items() if answer.present is None} == share
        finally:
            link.up()
            link.shape()
        eventually(lambda: one.statistics.servers_ready == 3, "it is connected again", NOTICED_S)
        assert load(one) == {}, "the server lived on, and kept what it had"
        one.idle()


def test_a_slow_link_costs_its_share_by_the_deadline(three: NetCluster) -> None:
    """P026, P048, P085: 10 Mbit/s and 50 ms: its blocks end as misses by their deadline, others do not wait."""
    share, link = set(three.owned_by("b", BLOCKS)), three.link("b")
    with at_work(three, value=1 << 20, seed=2) as (one, _):
        link.shape(rate_bytes_per_s=10e6 / 8, delay_s=0.05)
        try:
            begun = time.monotonic()
            lost = lost_blocks(one)
            assert time.monotonic() < begun + 3 * JOB_S, "a job ends by its deadline"
            assert lost <= share, "the blocks of the other servers are all there"
            assert lost, "more than the link carries by the deadline"
            others = [number for number in BLOCKS if number not in share]
            result = one.result(one.load(others), NOTICED_S)
            assert result.lost == {}, "and the next loads from them are not held up"
        finally:
            link.shape()
        eventually(lambda: load(one) == {}, "it is as before once the link is", NOTICED_S)
        one.idle()


def test_one_packet_in_a_hundred_is_lost(three: NetCluster) -> None:
    """TCP sends again; every block arrives, and is right."""
    with at_work(three, seed=3) as (one, questions):
        for name in three.servers:
            three.link(name).shape(loss=0.01, delay_s=0.001)
        try:
            for _ in range(3):
                assert load(one) == {}
            assert one.result(one.store(BLOCKS), NOTICED_S).lost == {}
            assert set(questions.present(BLOCKS)) == set(BLOCKS)
        finally:
            for name in three.servers:
                three.link(name).shape()
        assert all(three.link(name).lost > 0 for name in three.servers), "the links did lose packets"


def test_a_link_that_flaps(three: NetCluster) -> None:
    """P080, P041: cut and healed again and again under load: nothing wrong, nothing stuck, all back in the end."""
    link = three.link("b")
    share = set(three.owned_by("b", BLOCKS))
    with at_work(three, seed=4) as (one, _):
        try:
            for turn in range(6):
                job = one.load(BLOCKS)
                (break_openly if turn % 2 else break_silently)(link)
                result = one.result(job, NOTICED_S)
                assert one.wrong(result, BLOCKS) == []
                assert {block - one.half for block in result.bad_block_ids} <= share
                link.up()
                link.shape()
        finally:
            link.up()
            link.shape()
        eventually(lambda: load(one) == {}, "everything is there again", NOTICED_S)
        one.idle()
        eventually(lambda: not any(map(three.pinned, three.servers)), "nothing stays pinned")


# ------------------------------------------------------------------------------------------------ half-open


def test_both_sides_find_out_when_the_other_vanishes_without_a_word(tmp_path: Path) -> None:
    """Half-open connections: no FIN, no RST. The server frees what a dead client reserved, the client goes on."""
    assert KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S <= 30 >= USER_TIMEOUT_MS / 1000, "the promise"
    brisk, limits = ("tests.support.brisk_server",), {"transfer_timeout_s": 5}
    with net_cluster(tmp_path, ("a", "b"), module=brisk, limits=limits) as cluster:
        link = cluster.link("a")
        with at_work(cluster, seed=5) as (one, _):
            writer = _writer_on(cluster, link)
            try:
                eventually(lambda: cluster.statistics("a")["table"]["reserved"] > 0, "a put is under way", NOTICED_S)
                link.shape(cut=True)
                writer.kill()
                # The client: what is owed is asked for by a PING.
                eventually(
                    lambda: load(one).get(LossReason.BREAKER, 0) > 0, "the engine gives the server up", NOTICED_S
                )
                # The server: by the deadline of the transfer, then by keepalive.
                eventually(lambda: cluster.statistics("a")["table"]["reserved"] == 0, "freed", NOTICED_S)
                eventually(lambda: _sessions(cluster, "a") == 0, "the dead sessions are noticed", NOTICED_S)
                assert cluster.statistics("a")["table"]["pinned"] == 0
                assert cluster.statistics("b")["server"]["sessions"] > 1, "the other server's are not touched"
            finally:
                writer.kill()
                link.shape()
            eventually(lambda: load(one) == {}, "and it is used again when the network is back", NOTICED_S)


def _writer_on(cluster: NetCluster, link: Link) -> ClientActor:
    """A client process that puts over a slow link all the time."""
    link.shape(rate_bytes_per_s=2e6)

    def orders(life: int) -> Orders:
        environ = cluster.environ(MEMKV_SERVERS=f"a={link.there}:9900")
        return Orders("writer", life, 1, environ, "tier", str(cluster.folder / "writer.journal"), {})

    writer = ClientActor("writer", cluster.folder, module="tests.soak.ledger_client", orders=orders)
    writer.start()
    return writer


def _sessions(cluster: NetCluster, name: str) -> int:
    """Without the one that asks."""
    return int(cluster.statistics(name)["server"]["sessions"]) - 1


# ------------------------------------------------------------------------------------------------ two rails


def test_the_other_rail_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two links to a server goes: it is used over the other one, and over the first again when that is back."""
    monkeypatch.setattr(routes, "REST_S", 1.0)
    with net_cluster(tmp_path, ("a",), rails=2) as cluster:
        first, second = cluster.servers["a"].links
        with at_work(cluster, seed=6) as (one, _):
            assert _rails_in_use(cluster) == {first.here}
            break_silently(first)
            eventually(lambda: load(one) == {}, "everything is loaded over the other rail", NOTICED_S)
            eventually(lambda: second.here in _rails_in_use(cluster), "the server sees the other rail")
            first.shape()
            eventually(lambda: _rails_in_use(cluster) == {first.here}, "and it goes back", NOTICED_S)
            assert load(one) == {}
            one.idle()


def _rails_in_use(cluster: NetCluster) -> set[str]:
    """Addresses from which engines are connected, as the server sees them."""
    sessions = cluster.statistics("a")["sessions"]
    return {s["peer"].split()[-1].rpartition(":")[0] for s in sessions if s["kind"] == "engine"}
