"""How a session's queue pairs end when the library or the device does not do its part, and what others feel of it."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

import anyio
import pytest

from memkv_vllm.errors import FenceTimeout, StoreError
from memkv_vllm.topology import read_host
from memkv_vllm.transports.base import Move
from memkv_vllm.transports.verbs import bulk as bulk_module
from memkv_vllm.transports.verbs.bulk import BulkOptions, VerbsBulk
from memkv_vllm.transports.verbs.opening import Knobs, rail_of
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.types import Extent, Status
from tests.support.fake_verbs import FakeQueuePair, Trouble
from tests.support.harness import wait_until
from tests.support.scripted import soon
from tests.support.verbs_host import FakeHost
from tests.support.verbs_session import CLIENT_ADDRESS, MIB, SERVER_ADDRESS, Pair, paired

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

MOVES = [Move(Extent(1, i * 100, 100), i * 100) for i in range(8)]


def other(pair: Pair, host: str = SERVER_ADDRESS) -> VerbsBulk:
    """One more session of the same server."""
    return VerbsBulk(pair.rails, host, BulkOptions(8, 64 * MIB), cut=lambda: None, counted=lambda event: None)


def forget(pair: Pair) -> None:
    """The queue pairs that nobody could destroy go with the test."""
    ledger = pair.host.provider.ledger
    for owned in [owned for owned in ledger._live if isinstance(owned, FakeQueuePair)]:
        owned.fabric.remove(owned.number)
        ledger.closed(owned)


async def test_a_queue_pair_that_cannot_be_destroyed_is_not_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P039: its READs may still land in the arena. Neither the fence nor a status says otherwise, however often."""
    async with paired(tmp_path) as pair:
        pair.nic.troubles.silent = True
        first = pair.nic.num_posted
        pair.nic.troubles.refuse |= {"ibv_destroy_qp": errno.EIO, "ibv_modify_qp": errno.EIO}
        statuses: list[Status] = []

        async def pull() -> None:
            statuses.extend(await pair.bulk.pull(MOVES, soon(1.0)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
            await wait_until(lambda: pair.nic.num_posted > first, "it is under way")
            for _ in range(2):
                with pytest.raises(FenceTimeout, match="4 of 4 queue pairs on fake0:1.*ibv_destroy_qp.*dmesg"):
                    await pair.bulk.fence()
        assert statuses == [Status.TIMEOUT] * 8
        assert pair.counts == {"rdma_not_destroyed": 1}
        assert "event=rdma_not_destroyed" in caplog.text

        async def nothing() -> None: ...

        monkeypatch.setattr(pair.bulk, "fence", nothing)
        pair.nic.troubles.refuse.clear()
        forget(pair)


async def test_fences_do_not_wait_for_queue_pairs_that_are_being_made(tmp_path: Path) -> None:
    """A peer whose address nobody answers for holds each of its CONNECTs up for a second or more."""
    async with paired(tmp_path) as pair, anyio.create_task_group() as tasks:
        ends = [PassiveEnd(pair.host.provider, pair.end.rail, Knobs(), 1, pair.host.root) for _ in range(6)]
        tokens = [end.make().pack() for end in ends]
        slow_s = 0.5
        pair.nic.troubles.slow_s = {"ibv_create_cq": slow_s}
        sessions = [other(pair) for _ in ends]
        for session, made in zip(sessions, tokens, strict=True):
            tasks.start_soon(session.connect, "verbs", made)
        await anyio.sleep(0.05)
        started = time.monotonic()
        await pair.bulk.fence()
        took_s = time.monotonic() - started
        for session in sessions:
            await session.fence()
        for end in ends:
            assert end.close(5.0)
        assert took_s < 2 * slow_s, "the fence waited for several of them"


async def test_a_nic_that_is_stuck_does_not_hold_up_the_fences_of_another(tmp_path: Path) -> None:
    """Firmware that does not answer keeps a call for a minute; sessions on the other rail must end meanwhile."""
    host = FakeHost.make(tmp_path, SERVER_ADDRESS, CLIENT_ADDRESS, "10.78.0.1")
    async with paired(tmp_path, host=host, devices=["fake0", "fake2"]) as pair, anyio.create_task_group() as tasks:
        rail = rail_of(read_host(host.root), "fake1")
        ends = [PassiveEnd(host.provider, rail, Knobs(), 1, host.root) for _ in range(6)]
        sessions = [other(pair, "10.78.0.1") for _ in ends]
        for session, end in zip(sessions, ends, strict=True):
            await session.connect("verbs", end.make().pack())
        stuck_s = 1.0
        host.nics[2].troubles.slow_s = {"ibv_destroy_qp": stuck_s}
        for session in sessions:
            tasks.start_soon(session.fence)
        await anyio.sleep(0.05)
        started = time.monotonic()
        await pair.bulk.fence()
        took_s = time.monotonic() - started
        for end in ends:
            assert end.close(5.0)
        assert took_s < stuck_s


async def test_a_completion_channel_that_fails_is_not_read_for_ever(tmp_path: Path) -> None:
    """The kernel took the device away: the descriptor stays readable, and reading it fails each time."""
    async with paired(tmp_path) as pair:
        drains = 0
        drain = pair.bulk._pairs._completions.drain  # type: ignore[union-attr]

        def count() -> object:
            nonlocal drains
            drains += 1
            return drain()

        pair.bulk._pairs._completions.drain = count  # type: ignore[union-attr,method-assign]
        pair.nic.troubles.refuse["ibv_get_cq_event"] = errno.EIO
        assert Status.OK not in await pair.bulk.pull(MOVES, soon(0.2))
        await anyio.sleep(0.1)
        assert drains == 1
        assert pair.counts == {"rdma_refused": 1} and pair.cuts == ["cut"]


async def test_a_device_that_is_gone_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its descriptor of events stays readable from then on: the loop must not go round it for ever."""
    async with paired(tmp_path) as pair:
        caplog.set_level(logging.INFO, "memkv")
        pair.nic.troubles.refuse |= {"ibv_get_async_event": errno.EIO, "ibv_query_port": errno.EIO}
        pair.nic.raise_event("device_fatal")
        await wait_until(lambda: "event=rdma_device_lost device=fake0" in caplog.text, "it is logged")
        await anyio.sleep(0.1)
        assert caplog.text.count("event=rdma_device_lost") == 1
        assert "restart this server" in caplog.text
        assert "Exception in callback" not in caplog.text
        end = PassiveEnd(pair.host.provider, pair.end.rail, Knobs(), 1, pair.host.root)
        with pytest.raises(StoreError, match="cannot be queried"):
            await other(pair).connect("verbs", end.make().pack())
        assert end.close(5.0)


async def test_a_deadline_while_completions_stay_away_is_a_timeout_for_good(tmp_path: Path) -> None:
    """A completion that is late by more than the deadline says nothing about a batch that was given up before."""
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        first = pair.nic.num_posted
        pair.nic.troubles.requests = {first + at: Trouble(delay_s=0.2) for at in range(8)}
        assert await pair.bulk.pull(MOVES, soon(0.05)) == [Status.TIMEOUT] * 8
        assert await pair.bulk.pull(MOVES, soon(3.0)) == [Status.OK] * 8
        assert pair.counts == {} and pair.cuts == []


async def test_a_fence_that_takes_long_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for as long as it takes; whoever wonders why a server does not end finds the reason."""
    monkeypatch.setattr(bulk_module, "_SAY_PENDING_S", 0.05)
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        pair.nic.troubles.slow_s = {"ibv_destroy_qp": 0.3}
        await pair.bulk.fence()
        assert caplog.text.count("event=rdma_fence_pending device=fake0:1") == 1
    caplog.clear()
    async with paired(tmp_path / "quick", num_queue_pairs=1) as pair:
        await pair.bulk.fence()
        await anyio.sleep(0.1)
        assert "event=rdma_fence_pending" not in caplog.text
