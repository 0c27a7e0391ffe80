"""The scheduler side's client over real stores: lookups, namespace manifests, resets.

Faults P001, P010, P018, P020, P022, P023, P029, P046, P085; spec section 6.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine.api import BlockRef
from memkv_vllm.errors import ConnectionLost
from memkv_vllm.keys import NamespaceManifest
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import Delay, Fail, NoReply, Operation
from memkv_vllm.types import LossReason, MissReason
from tests.support.ranks import (
    Cluster,
    Rank,
    cluster_settings,
    eventually,
    lookups,
    manifest,
    prefix_of,
    rank,
    staging_plan,
)
from tests.support.store_process import StoreProcess


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as stores:
        yield stores


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, ("a", "b", "c")) as stores:
        yield stores


# ------------------------------------------------------------------------------------------------ lookups


def test_one_batch_per_server_and_one_answer_per_block(three: Cluster) -> None:
    with rank(three.settings()) as one, lookups(three.settings()) as seen:
        one.ready(3).stored(range(0, 60, 2))
        answers = seen.ready(3).ask(range(60))
        assert {number: answer.present for number, answer in answers.items()} == {n: n % 2 == 0 for n in range(60)}
        assert {answer.reason for answer in answers.values() if not answer.present} == {MissReason.ABSENT}
        assert {answer.reason for answer in answers.values() if answer.present} == {None}
        statistics = seen.prober.statistics()
        assert (statistics.batches, statistics.probes, statistics.unreachable) == (3, 60, 0)
        seen.ask(three.owned_by("b", range(60)))
        assert seen.prober.statistics().batches == 4
        assert seen.prober.poll() == []


def test_a_settled_prober_has_tried_every_server(three: Cluster) -> None:
    """P029: the first lookups after a start are answered by the servers that are up, and do not wait for those that are
    not."""
    settings = three.settings()
    with rank(settings) as one:
        one.ready(3).stored(range(30))
    three.servers["b"].stop()
    with lookups(settings) as seen:
        seen.prober.settle(10.0)
        assert seen.prober.statistics().servers_ready == 2
        answers = seen.ask(range(30))
        lost = three.owned_by("b", range(30))
        assert {number for number, answer in answers.items() if not answer.present} == set(lost)


def test_a_prober_settles_when_its_loop_has_ended(three: Cluster) -> None:
    with lookups(three.settings()) as seen:
        seen.prober.close()
        seen.prober.settle(10.0)


def test_a_large_step_is_cut_into_batches_that_the_server_takes(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, lookups(cluster.settings()) as seen:
        assert seen.ready().ask(range(2500)).keys() == set(range(2500))
        assert seen.prober.statistics().batches == 3


def test_a_server_with_small_batches(tmp_path: Path) -> None:
    overrides = {"limits": {"max_batch_keys": 7}}
    with Cluster(tmp_path, overrides=overrides) as cluster, lookups(cluster.settings()) as seen:
        assert {answer.present for answer in seen.ready().ask(range(30)).values()} == {False}
        assert seen.prober.statistics().batches == 5


@pytest.mark.parametrize("shards", [1, 64, 65, 1000])
def test_many_shards(tmp_path: Path, shards: int) -> None:
    """However many ranks there are, a full step is answered."""
    with Cluster(tmp_path) as cluster, lookups(cluster.settings(), shards=shards) as seen:
        assert {answer.present for answer in seen.ready().ask(range(1100)).values()} == {False}


def test_a_block_is_present_when_all_ranks_have_stored_it(cluster: Cluster) -> None:
    """P010, P012."""
    settings = cluster.settings()
    with rank(settings, shard=0) as zero, rank(settings, shard=1) as one, lookups(settings, shards=2) as seen:
        seen.ready()
        zero.ready().stored([1, 2])
        assert seen.present([1, 2, 3]) == []
        one.ready().stored([2, 3])
        assert seen.present([1, 2, 3]) == [2]


# ------------------------------------------------------------------------------------------------ servers that fail


def test_a_server_that_is_down_is_answered_at_once(three: Cluster) -> None:
    """P029: no round trip; its share is unknown, the others' answers are not."""
    three.servers["b"].stop()
    with rank(three.settings()) as one, lookups(three.settings(), probe_timeout_s=600) as seen:
        one.ready(2).stored(range(30))
        share = three.owned_by("b", range(30))
        answers = seen.ready(2).ask(range(30))
        assert [number for number, answer in answers.items() if answer.present is None] == share
        assert {answers[number].reason for number in share} == {MissReason.BREAKER}
        assert seen.prober.statistics().unreachable == len(share)
        three.servers["b"].start()
        assert seen.ready(3).present(share) == []


def test_nobody_is_there(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.only.stop()
        with lookups(cluster.settings(), probe_timeout_s=600) as seen:
            assert {answer.present for answer in seen.ask(range(9)).values()} == {None}


def test_a_server_that_does_not_answer_costs_a_timeout_a_few_times_only() -> None:
    """P046, P029: each probe has a deadline; after some of them the server is not asked any more."""
    key = os.urandom(32)
    with StoreProcess(key) as store:
        settings = cluster_settings(key, {"a": store.port}, connect_timeout_s=0.2)
        with lookups(settings, probe_timeout_s=0.1) as seen:
            assert seen.ready().present([1]) == []
            store.freeze()
            reasons = [seen.ask([1])[1].reason for _ in range(6)]
            assert reasons == [MissReason.TIMEOUT] * 3 + [MissReason.BREAKER] * 3
            store.thaw()
            eventually(lambda: seen.ask([1])[1].present is False, "it is asked again")


def test_a_server_that_takes_probes_and_does_not_answer_is_left_alone(cluster: Cluster) -> None:
    """P029: it is connected, but its breaker is open: no probe travels until it is time to try again."""
    silent = cluster.only.faults.add(Operation.REQUEST, NoReply(), type=MessageType.EXISTS)
    with lookups(cluster.settings(), probe_timeout_s=0.1) as seen:
        seen.ready()
        assert [seen.ask([1])[1].reason for _ in range(3)] == [MissReason.TIMEOUT] * 3
        seen.ready()
        assert [seen.ask([1])[1].reason for _ in range(20)] == [MissReason.BREAKER] * 20
        assert silent.fired == 3
        cluster.only.faults.clear()
        eventually(lambda: seen.ask([1])[1].present is False, "it is asked again")


def test_probes_refused_by_the_server_are_answered(cluster: Cluster) -> None:
    cluster.only.faults.add(Operation.REQUEST, Fail(), type=MessageType.EXISTS)
    with lookups(cluster.settings()) as seen:
        answers = seen.ready().ask(range(3))
        assert {(answer.present, answer.reason) for answer in answers.values()} == {(None, MissReason.BREAKER)}


def test_probes_under_way_when_the_server_goes_are_answered(cluster: Cluster) -> None:
    silent = cluster.only.faults.add(Operation.REQUEST, NoReply(), type=MessageType.EXISTS)
    with lookups(cluster.settings(), probe_timeout_s=600) as seen:
        seen.ready().prober.submit([prefix_of(1)])
        eventually(lambda: silent.fired, "the probe is under way")
        cluster.only.stop()
        (answer,) = eventually(seen.prober.poll, "the probe is answered")
        assert (answer.prefix, answer.present, answer.reason) == (prefix_of(1), None, MissReason.BREAKER)


def test_after_the_end_every_probe_is_answered(cluster: Cluster) -> None:
    cluster.only.faults.add(Operation.REQUEST, NoReply(), type=MessageType.EXISTS)
    with lookups(cluster.settings()) as seen:
        prober = seen.ready().prober
        prober.submit([prefix_of(1), prefix_of(2)])
        eventually(lambda: prober.statistics().batches, "a probe is under way")
        prober.close()
        prober.submit([prefix_of(3)])
        answers = {answer.prefix: answer.present for answer in prober.poll()}
        assert answers == dict.fromkeys(map(prefix_of, (1, 2, 3)))
        assert prober.reset_namespace(b"n" * 32, 5) == ["a"]


def test_it_may_be_asked_right_after_start(cluster: Cluster) -> None:
    with lookups(cluster.settings()) as seen:
        assert seen.ask(range(5)).keys() == set(range(5))


# ------------------------------------------------------------------------------------------------ namespaces


def warnings_of(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if f"event={event}" in record.getMessage()]


@pytest.mark.parametrize(
    ("changes", "event", "named", "mismatches"),
    [
        ({"hash_seed": "random"}, "namespace_mismatch", "differs_in=hash_seed", 1),
        ({"hash_algorithm": "xxhash_cbor"}, "namespace_mismatch", "differs_in=hash_algorithm", 1),
        ({"tensor_parallel": 2, "world_size": 2}, "other_namespace", "differs_in=tensor_parallel,world_size", 0),
        ({"hash_seed": "1", "kv_dtype": "fp8"}, "other_namespace", "differs_in=hash_seed,kv_dtype", 0),
        ({}, None, "", 0),
        ({"model": "acme/other"}, None, "", 0),
    ],
    ids=["seed", "algorithm", "TP", "seed and dtype", "same", "another model"],
)
def test_a_sibling_namespace(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, object],
    event: str | None,
    named: str,
    mismatches: int,
) -> None:
    """P001, P020: what was meant to share and cannot is a warning, once, with the fix; all else is information."""
    caplog.set_level(logging.INFO, "memkv.engine")
    with Cluster(tmp_path, ("a", "b")) as two:
        with lookups(two.settings(), namespace=manifest(**changes)) as first:
            first.ready(2)
        with lookups(two.settings()) as second:
            second.ready(2)
            assert second.prober.statistics().namespace_mismatches == mismatches
    lines = warnings_of(caplog, "namespace_mismatch") + warnings_of(caplog, "other_namespace")
    assert len(lines) == (event is not None), "once, not once per server"
    if event is not None:
        assert f"event={event} server=" in lines[0] and named in lines[0]
        assert ("PYTHONHASHSEED" in lines[0]) == bool(mismatches)


def test_the_directory_is_told_again_after_a_restart(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Its memory is as short as the server's life: whoever comes later still finds us there."""
    with lookups(cluster.settings()) as ours:
        ours.ready()
        cluster.only.stop()
        eventually(lambda: ours.prober.statistics().servers_ready == 0, "the server is gone")
        cluster.only.start()
        ours.ready()
        with lookups(cluster.settings(), namespace=manifest(hash_seed="7")) as later:
            later.ready()
            assert later.prober.statistics().namespace_mismatches == 1


def test_a_server_that_refuses_manifests_still_answers_lookups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its directory is full: one line says so, and the service goes on."""
    with Cluster(tmp_path, overrides={"limits": {"max_manifests": 1}}) as cluster, rank(cluster.settings()) as one:
        one.ready().stored([1])
        with lookups(cluster.settings(), namespace=manifest(model="first")) as first:
            first.ready()
        with lookups(cluster.settings(), namespace=manifest(model="second")) as second:
            assert second.ready().present([1, 2]) == [1]
    assert len(warnings_of(caplog, "manifest_refused")) == 1


@pytest.mark.parametrize("text", [b"no json", b"[1, 2]", b"[" * 20_000, b"\xff\xfe", b"{}"])
def test_a_manifest_that_makes_no_sense(cluster: Cluster, caplog: pytest.LogCaptureFixture, text: bytes) -> None:
    """Whatever a sibling wrote there, lookups go on."""

    class Strange(NamespaceManifest):
        def to_json(self) -> bytes:
            return text

    facts = json.loads(manifest().to_json())
    facts |= {"tokens_per_block": (16,), "extra": ()}
    with lookups(cluster.settings(), namespace=Strange(**facts)) as first:
        first.ready()
    with lookups(cluster.settings()) as second:
        assert second.ready().present([1]) == []


# ------------------------------------------------------------------------------------------------ one server twice


def test_two_entries_that_reach_one_server(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Spec 4.1: an error that names both and shows the grouped form, once; not again when it comes back."""
    port = cluster.only.port
    settings = cluster_settings(cluster.key, {"one": port, "two": port, "three": port})
    with lookups(settings) as seen:
        seen.ready(3)
        assert seen.prober.statistics().duplicate_servers == 2
        assert len(warnings_of(caplog, "duplicate_server")) == 2
        line = warnings_of(caplog, "duplicate_server")[-1]
        assert "entries=one,two,three" in line
        rail = f'"127.0.0.1:{port}"'
        assert f'{{name: "one", rails: [{rail}]}}' in line
        assert {record.levelname for record in caplog.records if "duplicate_server" in record.getMessage()} == {"ERROR"}
        assert {answer.present for answer in seen.ask(range(20)).values()} == {False}, "the service goes on"


def test_a_second_entry_that_reaches_a_server_by_another_rail(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The grouped form lists every rail of both; a server that comes back is said again only under a new identity."""
    port, dead = cluster.only.port, RailAddress("127.0.0.1", 1)
    alive = RailAddress("127.0.0.1", port)
    settings = cluster_settings(cluster.key, {"one": port})
    settings = replace(settings, servers=(*settings.servers, ServerAddress("two", (dead, alive))))
    with lookups(settings) as seen:
        seen.ready(2)
        assert seen.prober.statistics().duplicate_servers == 1
        (line,) = warnings_of(caplog, "duplicate_server")
        assert f'{{name: "one", rails: ["127.0.0.1:{port}", "127.0.0.1:1"]}}' in line
        for link in seen.prober._client.links.values():  # type: ignore[union-attr]
            assert link._ready is not None
            seen.prober._thread.post(link._ready.retire, ConnectionLost("cut"))
        eventually(lambda: sum(seen.prober.statistics().connects.values()) == 4, "both are connected again")
        assert seen.ready(2).prober.statistics().duplicate_servers == 1


def test_different_servers_are_no_duplicates(three: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with lookups(three.settings()) as seen:
        seen.ready(3)
        assert seen.prober.statistics().duplicate_servers == 0
    assert warnings_of(caplog, "duplicate_server") == []


def test_a_server_that_returns_under_its_id_is_no_duplicate(cluster: Cluster) -> None:
    with lookups(cluster.settings()) as seen:
        seen.ready()
        cluster.only.stop()
        eventually(lambda: seen.prober.statistics().servers_ready == 0, "the server is gone")
        cluster.only.start()
        assert seen.ready().prober.statistics().duplicate_servers == 0


# ------------------------------------------------------------------------------------------------ resets


def test_a_reset_is_confirmed_by_every_server(three: Cluster) -> None:
    """P022."""
    numbers = range(30)
    with rank(three.settings()) as one, lookups(three.settings()) as seen:
        one.ready(3).stored(numbers)
        assert len(seen.ready(3).present(numbers)) == 30
        assert seen.prober.reset_namespace(b"other" + bytes(27), 5) == []
        assert len(seen.present(numbers)) == 30
        assert seen.prober.reset_namespace(prefix_of(0)[1:33], 5) == []
        assert seen.present(numbers) == []
        assert one.loaded(numbers).lost == {LossReason.EVICTED: 30}
        one.stored(numbers)
        assert len(seen.present(numbers)) == 30


def test_a_reset_names_the_servers_that_did_not_confirm(three: Cluster) -> None:
    """P023: refused, not answered, not there."""
    namespace = prefix_of(0)[1:33]
    with lookups(three.settings()) as seen:
        seen.ready(3)
        three.servers["a"].faults.add(Operation.REQUEST, Fail(), type=MessageType.ADMIN)
        assert seen.prober.reset_namespace(namespace, 5) == ["a"]
        three.servers["b"].faults.add(Operation.REQUEST, NoReply(), type=MessageType.ADMIN)
        assert seen.prober.reset_namespace(namespace, 0.2) == ["a", "b"]
        three.servers["c"].stop()
        eventually(lambda: seen.prober.statistics().servers_ready == 2, "the server is gone")
        assert seen.prober.reset_namespace(namespace, 0.2) == ["a", "b", "c"]
        three.servers["c"].start()
        for server in three.servers.values():
            server.faults.clear()
        seen.ready(3)
        assert seen.prober.reset_namespace(namespace, 5) == []


def fill(one: Rank, byte: int) -> int:
    """The model's weights give this byte everywhere from now on."""
    one.mover.blocks[: one.half] = byte
    return byte


def test_no_old_value_is_served_after_a_reset_was_confirmed(cluster: Cluster) -> None:
    """P022, under traffic: puts that the server works on end invisible, and a load that comes after it is a miss.

    Stores that have not reached a server yet are the manager's business: it goes on in a fresh namespace.
    """
    namespace = prefix_of(0)[1:33]
    numbers = range(20)
    targets = range(52, 72)
    with (
        rank(cluster.settings(), blocks=36, plan=staging_plan(20, lanes=1)) as one,
        lookups(cluster.settings()) as seen,
    ):
        one.ready()
        seen.ready()
        for round_number in range(5):
            assert seen.prober.reset_namespace(namespace, 5) == []
            old = fill(one, 2 * round_number + 1)
            one.stored(range(10))
            slow = cluster.only.faults.add(Operation.PULL, Delay(0.2))
            store = one.store(range(10, 20))
            eventually(lambda: cluster.only.statistics()["table"]["reserved"] == 10, "the server works on the puts")
            cluster.only.faults.remove(slow)
            loads = [one.load(range(10)) for _ in range(3)]
            assert seen.prober.reset_namespace(namespace, 5) == []
            for job in loads:
                one.result(job)
            assert one.loaded(numbers, into=targets).lost == {LossReason.EVICTED: 20}, "an old value was served"
            assert one.result(store).lost == {LossReason.FAILED: 10}
            assert one.loaded(numbers, into=targets).lost == {LossReason.EVICTED: 20}, "an old value was served"
            fill(one, 2 * round_number + 2)
            one.stored(numbers)
            assert one.loaded(numbers, into=targets).lost == {}
            assert not (one.mover.blocks[targets.start : targets.stop] == old).any()


def test_a_reset_of_one_namespace_leaves_the_others(cluster: Cluster) -> None:
    other = b"o" * 32
    with rank(cluster.settings()) as one, lookups(cluster.settings()) as seen:
        one.ready().stored([1])
        one.engine.submit_store(1000, [BlockRef(prefix_of(1, other), 1)])
        one.result(1000)
        assert seen.ready().prober.reset_namespace(prefix_of(0)[1:33], 5) == []
        assert seen.present([1]) == []
        assert seen.ask([1], other)[1].present
