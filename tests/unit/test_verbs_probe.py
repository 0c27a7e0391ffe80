"""The probe of a region: both directions over every queue pair, and no byte of anybody's memory is changed by it."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import EnvironmentFault, RemoteProtocolError, StoreError
from memkv_vllm.transports.base import Move
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs import bulk as bulk_module
from memkv_vllm.transports.verbs.bulk import BulkOptions, VerbsBulk
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES, NOWHERE, Endpoint, RegionToken
from memkv_vllm.transports.verbs.gpu_memory import REGION_ACCESS
from memkv_vllm.transports.verbs.opening import Knobs
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.transports.verbs.probing import probe_steps
from memkv_vllm.transports.verbs.provider import VerbsError
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.fake_verbs import RETRY_EXC_ERR, FakeMemoryRegion, FakeQueuePair, Trouble
from tests.support.harness import wait_until
from tests.support.scripted import soon
from tests.support.verbs_session import MIB, SERVER_ADDRESS, Pair, paired

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

MOVES = [Move(Extent(1, i * 100, 100), i * 100) for i in range(8)]
MTU = 1024
"""Of a fake port."""
STAGED, MARK = 0x5A, 0xFF
TO_SERVER = f"the server's READ of the client's memory: packets of {MTU} bytes from the client to the server do not"
TO_CLIENT = f"the server's WRITE to the client: packets of {MTU} bytes from the server to the client do not arrive"


def landing_of(end: PassiveEnd) -> HostMemory:
    assert end._landing is not None
    return end._landing


async def refusal(pair: Pair, region: int = 1, memory: HostMemory | None = None) -> str:
    """Why a region is not accepted."""
    with pytest.raises(StoreError, match="the RDMA probe failed: ") as caught:
        await pair.register(region, memory)
    assert caught.value.code == "data_path"
    return str(caught.value)


@asynccontextmanager
async def another(pair: Pair) -> AsyncIterator[Pair]:
    """One more session of the same server, with the same client host and the same staging memory: a reconnect."""
    counts: Counter[str] = Counter()
    end = PassiveEnd(pair.host.provider, pair.end.rail, Knobs(), 2, pair.host.root)
    bulk = VerbsBulk(
        pair.rails,
        SERVER_ADDRESS,
        BulkOptions(8, 64 * MIB, None, 0.3, 0),
        cut=lambda: None,
        counted=lambda event: counts.update([event]),
    )
    made = dataclasses.replace(pair, bulk=bulk, end=end, cuts=[], counts=counts)
    try:
        yield made
    finally:
        await bulk.fence()
        assert end.close(5.0)


# -- which direction


@pytest.mark.parametrize(("narrow", "says"), [("client", TO_SERVER), ("server", TO_CLIENT)])
async def test_a_way_that_loses_large_packets_of_one_direction(tmp_path: Path, narrow: str, says: str) -> None:
    """P070, P078: one switch port, one link of a bond, a firewall: small packets pass, and the other direction does."""
    async with paired(tmp_path, registered=False, probe_timeout_s=3.0) as pair:
        await pair.connect()
        pair.nic.troubles.retry_s = 0.01
        (pair.nic if narrow == "server" else pair.host.nics[1]).troubles.narrow_bytes = MTU - 1
        text = await refusal(pair)
        assert says in text and "RETRY_EXC_ERR" in text
        assert "MTU 1024: check that" in text
        assert len(text) < 1000  # an answer holds 1024 bytes
        assert pair.counts == {"rdma_retries": 1, "rdma_probe_failed": 1}
        assert await pair.bulk.push(MOVES, soon()) == [Status.BAD_EXTENT] * 8


@pytest.mark.parametrize("nic", [0, 1])
async def test_a_way_that_carries_just_these_packets_will_do(tmp_path: Path, nic: int) -> None:
    async with paired(tmp_path, registered=False) as pair:
        await pair.connect()
        pair.host.nics[nic].troubles.narrow_bytes = MTU
        await pair.register()
        assert pair.counts == {}


@pytest.mark.parametrize("place", range(6))
async def test_each_direction_goes_over_every_queue_pair(tmp_path: Path, place: int) -> None:
    async with paired(tmp_path, num_queue_pairs=3, registered=False) as pair:
        await pair.connect()
        pair.nic.troubles.requests = {pair.nic.num_posted + place: Trouble(RETRY_EXC_ERR)}
        assert (TO_SERVER if place < 3 else TO_CLIENT) in await refusal(pair)


@pytest.mark.parametrize(("first_silent", "says"), [(0, TO_SERVER), (2, TO_CLIENT)])
async def test_both_directions_have_one_time_limit(tmp_path: Path, first_silent: int, says: str) -> None:
    """A completion can fail to come. The READs here take most of the time, so little is left for the WRITEs."""
    async with paired(tmp_path, num_queue_pairs=2, registered=False, probe_timeout_s=0.6) as pair:
        await pair.connect()
        first = pair.nic.num_posted
        late = {first + at: Trouble(delay_s=0.4) for at in range(2)}
        late |= {first + at: Trouble(delay_s=60) for at in range(first_silent, 4)}
        pair.nic.troubles.requests = late
        started = time.monotonic()
        text = await refusal(pair)
        assert says in text and "no answer within 0.6 s" in text
        assert 0.6 <= time.monotonic() - started < 0.95
        assert pair.counts == {"rdma_probe_failed": 1}


async def test_no_direction_is_blamed_for_what_other_work_met(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second region is offered while gets are under way, and one of these fails."""
    async with paired(tmp_path, num_queue_pairs=1) as pair, anyio.create_task_group() as tasks:
        pair.nic.troubles.requests = {pair.nic.num_posted: Trouble(RETRY_EXC_ERR, delay_s=0.1)}
        tasks.start_soon(pair.bulk.push, MOVES, soon())
        await wait_until(lambda: pair.nic.num_posted > 2, "bytes are under way")
        with HostMemory.create("second", MIB) as second:
            text = await refusal(pair, 2, second)
            assert "RETRY_EXC_ERR" in text and "the server's" not in text
            assert "event=rdma_probe_failed" in caplog.text
            await pair.bulk.fence()
            pair.end.close(5.0)


# -- whose memory


async def test_the_probe_changes_no_byte_of_the_region(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        pair.memory.array[:] = STAGED
        await pair.connect()
        landing_of(pair.end).array[:] = MARK
        await pair.register()
        assert (pair.memory.array == STAGED).all()
        # Two packets, and not one byte more: the landing has room for larger ones.
        assert not landing_of(pair.end).array[: 2 * MTU].any()
        assert (landing_of(pair.end).array[2 * MTU :] == MARK).all()


async def test_a_reconnect_while_transfers_are_under_way(tmp_path: Path) -> None:
    """The slots of the old session are in use when the new one offers the same memory."""
    async with paired(tmp_path) as pair, anyio.create_task_group() as tasks:
        pair.memory.array[:] = STAGED
        pair.nic.troubles.delay_s = 60
        first = pair.nic.num_posted
        tasks.start_soon(pair.bulk.push, MOVES, soon(0.5))
        tasks.start_soon(pair.bulk.pull, MOVES, soon(0.5))
        await wait_until(lambda: pair.nic.num_posted > first + 16, "bytes are under way")
        pair.nic.troubles.delay_s = 0.0
        async with another(pair) as again:
            await again.connect()
            await again.register()
            assert (pair.memory.array == STAGED).all()
            assert again.counts == {}


async def test_no_client_is_sent_what_was_anothers(tmp_path: Path) -> None:
    """The server READs bytes of every client into its scratch memory: these must not be what it WRITEs to the next."""
    async with paired(tmp_path, registered=False) as pair:
        pair.memory.array[:] = STAGED
        await pair.connect()
        await pair.register()
        assert await pair.bulk.push(MOVES, soon()) == [Status.OK] * 8  # a flush READs too
        async with another(pair) as other:
            await other.connect()
            landing_of(other.end).array[:] = MARK
            with HostMemory.create("others", 100) as memory:  # so that most of the scratch stays as it was
                await other.register(1, memory)
                assert set(landing_of(other.end).array.tolist()) == {0, MARK}
                await other.bulk.fence()
                assert other.end.close(5.0)


# -- clients that lie, and the end


def wrong_key(true: Endpoint) -> RegionToken:
    return true.landing._replace(rkey=true.landing.rkey ^ 0x5A00)


def beside(true: Endpoint) -> RegionToken:
    return true.landing._replace(address=true.landing.address + LANDING_BYTES - MTU)


def nowhere(true: Endpoint) -> RegionToken:
    return NOWHERE


@pytest.mark.parametrize("lie", [wrong_key, beside, nowhere])
async def test_a_landing_that_there_is_none_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: object) -> None:
    """The client is told what its NIC said, and is cut if it does not go then; nobody else is concerned."""
    monkeypatch.setattr(bulk_module, "_CUT_AFTER_S", 0.2)
    async with paired(tmp_path, registered=False) as pair:
        true = pair.end.make()
        told = dataclasses.replace(true, landing=lie(true))  # type: ignore[operator]
        pair.end.connect(Endpoint.unpack(await pair.bulk.connect("verbs", told.pack())))
        text = await refusal(pair)
        assert "the server's WRITE to the client: a work request" in text and "REM_ACCESS_ERR" in text
        assert "do not arrive" not in text
        assert pair.counts == {"rdma_remote_access": 1, "rdma_probe_failed": 1} and pair.cuts == []
        await wait_until(lambda: pair.cuts == ["cut"], "the session is cut")
        async with another(pair) as other:
            await other.connect()
            await other.register()


async def test_a_landing_beyond_the_address_space(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        true = pair.end.make()
        before = pair.host.provider.num_live()
        told = dataclasses.replace(true, landing=RegionToken((1 << 64) - 4096, 1))
        with pytest.raises(RemoteProtocolError, match="a landing of 8192 bytes at 0xfffffffffffff000"):
            await pair.bulk.connect("verbs", told.pack())
        assert pair.host.provider.num_live() == before


async def test_without_a_file_descriptor_for_the_landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, length: int, flags: int) -> HostMemory:
        raise OSError(errno.EMFILE, "Too many open files")

    async with paired(tmp_path) as pair:
        end = PassiveEnd(pair.host.provider, pair.end.rail, Knobs(), 2, pair.host.root)
        monkeypatch.setattr(HostMemory, "_create", refused)
        with pytest.raises(EnvironmentFault, match=r"RDMA connection \(.*Too many open files\): .*ulimit -n"):
            end.make()
        assert end.close(5.0)


async def test_a_fence_between_both_directions_posts_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(tmp_path) as pair:

        def fenced_between(*arguments: Any) -> Iterator[Any]:
            first, second = probe_steps(*arguments)
            yield first
            pair.bulk._gone.set()
            landing_of(pair.end).array[:] = MARK
            yield second

        monkeypatch.setattr(bulk_module, "probe_steps", fenced_between)
        with pytest.raises(StoreError, match="this session has ended"):
            await pair.register(2)
        assert (landing_of(pair.end).array == MARK).all()


async def test_the_landing_goes_after_its_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with paired(tmp_path) as pair:
        landing = landing_of(pair.end)
        order: list[str] = []
        for kind in (FakeQueuePair, FakeMemoryRegion):

            def noted(owned: object, name: str = kind.__name__, true: object = kind._destroy) -> None:
                order.append(name if not landing.closed else "late")
                true(owned)  # type: ignore[operator]

            monkeypatch.setattr(kind, "_destroy", noted)
        assert pair.end.close(5.0)
        assert order == ["FakeQueuePair"] * 4 + ["FakeMemoryRegion"] * 2
        assert landing.closed


@pytest.mark.parametrize("refused", ["ibv_destroy_qp", "ibv_dereg_mr"])
async def test_a_landing_that_may_still_be_written_to_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """P039: the library does not give a queue pair up, or the landing's registration; its memory is never freed."""

    def refuse() -> None:
        raise VerbsError(refused, errno.EIO)

    async with paired(tmp_path) as pair:
        landing = landing_of(pair.end)
        kept: Any = pair.end._landing_region if refused == "ibv_dereg_mr" else pair.end._queue_pairs[0]
        true = kept._destroy
        kept._destroy = refuse
        assert not pair.end.close(5.0)
        assert not landing.closed and not pair.end.is_released
        true()
        pair.host.provider.ledger.closed(kept)
        monkeypatch.setattr(pair.end, "close", lambda timeout_s: True)
        landing.close()


async def test_a_probe_that_arrives_after_the_fence_lands_nowhere(tmp_path: Path) -> None:
    """The client gives up and unmaps the landing while the server's WRITEs to it are on the wire."""
    async with paired(tmp_path, registered=False, probe_timeout_s=0.3) as pair:
        await pair.connect()
        first = pair.nic.num_posted
        pair.nic.troubles.outlives_sender = True
        pair.nic.troubles.requests = {first + at: Trouble(delay_s=0.4) for at in range(4, 8)}
        with HostMemory.create("same-place", LANDING_BYTES) as seen:
            landing_of(pair.end).array[:] = MARK
            watched = landing_of(pair.end).view(0, LANDING_BYTES)  # the mapping outlives its owner
            assert TO_CLIENT in await refusal(pair)
            assert pair.end.close(5.0)
            await anyio.sleep(0.3)
            seen.array[:] = watched
            assert (seen.array == MARK).all()
        assert pair.end.is_released


async def test_kinds_of_memory_share_the_landing(tmp_path: Path) -> None:
    """GPU memory is READ like any other; what tests the way to the client is host memory all the same."""
    async with paired(tmp_path, registered=False) as pair:
        await pair.connect()
        landing_of(pair.end).array[:] = MARK
        with HostMemory.create("gpu", MIB) as gpu:
            gpu.array[:] = STAGED
            registered = pair.end._domain.register(gpu.address, MIB, REGION_ACCESS)  # type: ignore[union-attr]
            token = RegionToken(registered.address, registered.rkey)
            await pair.bulk.register(1, MemoryKind.GPU, MIB, token.pack())
            assert (gpu.array == STAGED).all()
            assert not landing_of(pair.end).array[: 2 * MTU].any()
            await pair.bulk.fence()
            assert pair.end.close(5.0)
