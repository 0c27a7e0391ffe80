"""The engine over staging memory that it cannot see: regions of a GPU, which a NIC reaches by their descriptor.

The same promises as over host memory (invariants 2 and 3), and what the ``gpu`` medium adds: arrived bytes are made
visible before anything reads them, and checksums go through the host.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration.cuda_driver import Ordering
from memkv_vllm.integration.gpu_staging import GpuMedium
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.registry import Transports
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES
from memkv_vllm.types import LossReason, VerifyMode
from tests.support.fake_cuda import H200, FakeDriver, GpuArrayMover, ReachingTransport
from tests.support.ranks import VALUE, Rank, eventually, rank, staging_plan
from tests.support.scripted_transport import Gate, Script, scripted
from tests.support.verbs_store import VerbsStores, verbs_stores
from tests.support.verbs_world import verbs_world

pytestmark = pytest.mark.fault

UNORDERED = H200._replace(writes_ordering=Ordering.NONE)


@contextmanager
def gpu_rank(settings: ClusterSettings, driver: FakeDriver, slots: int = 16, **options: Any) -> Iterator[Rank]:
    """An engine that stages in ``driver``'s memory."""
    medium = GpuMedium(driver, lambda facts: None)
    mover = GpuArrayMover(driver, 128, VALUE)
    with rank(settings, plan=staging_plan(slots), mover=mover, medium=medium, **options) as made:
        yield made


@contextmanager
def reaching(**options: float) -> Iterator[tuple[ClusterSettings, Script]]:
    """A scripted server that a client reaches over a NIC."""
    with scripted("a", **options) as (settings, scripts):
        transport = f"{ReachingTransport.__module__}:{ReachingTransport.__name__}"
        yield dataclasses.replace(settings, transport=transport), scripts["a"]


def test_the_same_bytes_and_keys_as_over_host_memory() -> None:
    stored = []
    for medium in ("gpu", "host"):
        if medium == "gpu":
            with reaching() as (settings, script), gpu_rank(settings, FakeDriver()) as one:
                one.ready().stored(range(40))
                result = one.loaded(range(40))
                assert (result.lost, one.wrong(result, range(40))) == ({}, [])
                one.idle()
                stored.append(script.values)
        else:
            with scripted("a") as (settings, scripts), rank(settings) as one:
                one.ready().stored(range(40))
                stored.append(scripts["a"].values)
    ours, theirs = stored
    assert {key: value[:3] for key, value in ours.items()} == {key: value[:3] for key, value in theirs.items()}


@pytest.mark.parametrize("facts", [H200, UNORDERED], ids=["ordered by the GPU", "to be flushed"])
def test_arrived_bytes_are_made_visible_before_anything_reads_them(facts: Any) -> None:
    """The answer must not overtake the bytes: not on the last stretch either, from the GPU's door to its kernels."""
    driver = FakeDriver(facts)
    with reaching() as (settings, _), gpu_rank(settings, driver) as one:
        one.ready().stored([1])
        assert "flush" not in driver.log, "nothing has arrived"
        del driver.log[:]
        one.loaded([1])
        assert driver.log == ["read", "scatter"] if facts is H200 else ["flush", "read", "scatter"]


def test_a_flush_that_fails_loses_the_load_and_writes_nothing() -> None:
    driver = FakeDriver(UNORDERED)
    with reaching() as (settings, _), gpu_rank(settings, driver) as one:
        one.ready().stored([1])
        driver.fails["flush"] = 999
        assert one.loaded([1]).lost == {LossReason.FAILED: 1}
        assert one.mover.scattered == []
        del driver.fails["flush"]
        assert one.wrong(one.loaded([1]), [1]) == []
        one.idle()


def test_a_wrong_byte_is_found_in_gpu_memory_too() -> None:
    with reaching() as (settings, script), gpu_rank(settings, FakeDriver()) as one:
        one.ready().stored(range(8))
        (key,) = [key for key, value in script.values.items() if value.data == one.computed[3].tobytes()]
        damaged = bytearray(script.values[key].data)
        damaged[-1] ^= 1
        script.values[key] = script.values[key]._replace(data=bytes(damaged))
        script.on_request = lambda connection, request: _no_report(request)
        result = one.loaded(range(8))
        assert (result.bad_block_ids, result.lost) == ((one.half + 3,), {LossReason.CHECKSUM: 1})
        assert one.wrong(result, range(8)) == []


async def _no_report(request: Any) -> Any:
    return [] if type(request).__name__ == "ReportBad" else None


@pytest.mark.parametrize(("mode", "blocks"), [(VerifyMode.OFF, 0), (VerifyMode.SAMPLED, 2), (VerifyMode.FULL, 32)])
def test_a_load_goes_through_the_host_only_where_it_is_verified(mode: VerifyMode, blocks: int) -> None:
    driver = FakeDriver()
    with reaching() as (settings, _), gpu_rank(settings, driver, verify=mode) as one:
        one.ready().stored(range(32))
        assert driver.num_read == 32 * VALUE, "a store is always checksummed"
        one.loaded(range(32))
        assert driver.num_read == (32 + blocks) * VALUE


def test_slots_of_a_silent_server_wait_for_the_fence_and_a_second_region_is_made() -> None:
    """Invariant 2 does not depend on what the memory is."""
    driver = FakeDriver()
    with reaching(op_timeout_s=0.3) as (settings, script), gpu_rank(settings, driver, slots=4) as one:
        one.ready().stored(range(4))
        script.fences = {number: Gate(is_open=False) for number in range(1, 9)}
        script.on_get = _silence
        assert one.loaded(range(4)).lost == {LossReason.TIMEOUT: 4}
        eventually(lambda: one.slots == 8, "the replacement region is there")
        assert one.statistics.slots_quarantined == 4
        script.on_get = None
        result = one.ready().loaded(range(4))
        assert (result.lost, one.wrong(result, range(4))) == ({}, [])
        regions = {extent.region for _, extent in script.named[4:]}
        assert regions == {1}, "nothing of the first region is handed out again"
        for gate in script.fences.values():
            gate.open()
        eventually(lambda: one.statistics.slots_quarantined == 0, "the fence ends the quarantine")


def test_a_replacement_that_does_not_fit_takes_nothing_from_vllm(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    medium = GpuMedium(driver, lambda facts: None if facts is H200 else "staging needs more than is there")
    mover = GpuArrayMover(driver, 128, VALUE)
    with (
        reaching(op_timeout_s=0.3) as (settings, script),
        rank(settings, plan=staging_plan(4), mover=mover, medium=medium) as one,
    ):
        one.ready().stored(range(4))
        script.fences = {number: Gate(is_open=False) for number in range(1, 9)}
        script.on_get = _silence
        one.loaded(range(4))
        eventually(lambda: "event=no_replacement_pool" in caplog.text, "it is said")
        assert "staging needs more than is there" in caplog.text
        assert one.slots == 4 and driver.log.count("allocate") == 1
        for gate in script.fences.values():
            gate.open()
        eventually(lambda: one.statistics.slots_free == 4, "the fence gives them back")


# ------------------------------------------------------------------------------------------------ over verbs


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerbsStores]:
    """Real stores and transports; the NIC between them is not there, and imports dmabufs."""
    with (
        verbs_world(tmp_path / "hosts") as world,
        verbs_stores(tmp_path / "keys", world, monkeypatch, "a", "b") as made,
    ):
        world.client_nic.troubles.refuse = {}
        yield made
        assert world.num_live == 0


def test_values_go_round_and_hosts_of_both_media_share_them(stores: VerbsStores) -> None:
    driver = FakeDriver()
    with gpu_rank(stores.settings(), driver) as one:
        one.ready(2).stored(range(24))
        result = one.loaded(range(24))
        assert (result.lost, one.wrong(result, range(24))) == ({}, [])
        one.idle()
    assert driver.live == 0
    with rank(stores.settings()) as other:
        result = other.ready(2).loaded(range(24))
        assert (result.lost, other.wrong(result, range(24))) == ({}, [])
        other.stored(range(24, 48))
    with gpu_rank(stores.settings(), FakeDriver()) as one:
        result = one.ready(2).loaded(range(48))
        assert (result.lost, one.wrong(result, range(48))) == ({}, [])


def test_an_engine_whose_nic_takes_no_gpu_memory_does_not_start(stores: VerbsStores) -> None:
    """P075. ``memkv_scratch_medium`` is settled before, by a trial; here a NIC has changed its mind since."""
    stores.world.client_nic.troubles.refuse = {"ibv_reg_dmabuf_mr": errno.EOPNOTSUPP, "ibv_reg_mr": errno.EFAULT}
    stores.world.client_nic.troubles.spared_bytes = LANDING_BYTES  # host memory, which any NIC reaches
    driver = FakeDriver()
    begun = time.monotonic()
    with (
        pytest.raises(EnvironmentFault, match=r"dmabuf: errno 95 .*peermem: errno 14"),
        gpu_rank(stores.settings(), driver),
    ):
        pass
    assert time.monotonic() - begun < 5.0
    assert driver.live == 0


def test_the_end_of_the_engine_frees_all() -> None:
    before = len(os.listdir("/proc/self/fd"))
    driver = FakeDriver()
    with reaching() as (settings, _), gpu_rank(settings, driver) as one:
        one.ready().stored(range(20))
        one.loaded(range(20))
        assert driver.live > 1
    assert driver.live == 0
    assert driver.log[-1] == "close"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_region_that_cannot_be_attached_is_given_back() -> None:
    driver = FakeDriver()
    with reaching() as (settings, _):
        mover = GpuArrayMover(driver, 128, VALUE)
        mover.attach = _refuse  # type: ignore[method-assign]
        engine = rank(settings, mover=mover, medium=GpuMedium(driver, lambda facts: None))
        with pytest.raises(EnvironmentFault, match="not pinned"), engine:
            pass
        assert driver.log.count("allocate") == driver.log.count("free") == 1


def _refuse(region: Region) -> None:
    raise EnvironmentFault("not pinned")


@pytest.mark.parametrize(("medium", "locked"), [("gpu", 0), ("host", 16 * VALUE)])
def test_only_host_memory_counts_against_memlock(monkeypatch: pytest.MonkeyPatch, medium: str, locked: int) -> None:
    asked: list[int] = []
    make = ClusterSettings.transports

    def transports(self: ClusterSettings, kind: PeerKind = PeerKind.TOOL, staging_bytes: int = 0) -> Transports:
        asked.append(staging_bytes)
        return make(self, kind, staging_bytes)

    monkeypatch.setattr(ClusterSettings, "transports", transports)
    if medium == "gpu":
        with reaching() as (settings, _), gpu_rank(settings, FakeDriver()):
            pass
    else:
        with scripted("a") as (settings, _), rank(settings):
            pass
    assert asked == [locked]


async def _silence(connection: Any, request: Any) -> Any:
    await connection.closed.wait()
