"""What fails on a session's queue pairs ends the session, its reason is counted, and no answer says more than is so."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import anyio
import pytest

from memkv_vllm.errors import RemoteProtocolError, StoreError
from memkv_vllm.transports.base import Move
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs import bulk as bulk_module
from memkv_vllm.transports.verbs.endpoints import RegionToken
from memkv_vllm.transports.verbs.provider import PortState
from memkv_vllm.transports.verbs.statuses import outcome_of
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.fake_verbs import FakeQueuePair, Trouble
from tests.support.harness import wait_until
from tests.support.scripted import soon
from tests.support.verbs_session import MIB, Pair, paired

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

OK, TIMEOUT, FAILED = Status.OK, Status.TIMEOUT, Status.FAILED
MOVES = [Move(Extent(1, i * 100, 100), i * 100) for i in range(8)]
REM_ACCESS_ERR, RETRY_EXC_ERR = 10, 12
UNKNOWN = 99


def states(pair: Pair) -> set[int]:
    """Of the server's queue pairs, as the device knows them."""
    found: set[int] = set()
    for domain in pair.host.provider.ledger._live:
        if isinstance(domain, FakeQueuePair) and domain.nic is pair.nic:
            found.add(domain.current_state)
    return found


@pytest.mark.parametrize("status", [*range(1, 24), UNKNOWN])
async def test_every_status_ends_the_session_and_is_counted(tmp_path: Path, status: int) -> None:
    """P068: what went before the one that failed is OK, everything else has failed, for good."""
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        pair.nic.troubles.requests = {pair.nic.num_posted + 2: Trouble(status, vendor_error=0x68)}
        assert await pair.bulk.pull(MOVES, soon()) == [OK] * 2 + [FAILED] * 6
        reason = outcome_of(status).reason
        assert (pair.counts[f"rdma_{reason}"], pair.counts.total()) == (1, 1)
        assert pair.cuts == ["cut"]
        started = time.monotonic()
        assert await pair.bulk.push(MOVES, soon()) == [FAILED] * 8
        assert time.monotonic() - started < 5
        await wait_until(lambda: states(pair) == {6}, "the queue pairs are in their error state")


async def test_all_queue_pairs_of_a_session_end_with_one(tmp_path: Path) -> None:
    async with paired(tmp_path, num_queue_pairs=4) as pair:
        pair.nic.troubles.requests = {pair.nic.num_posted: Trouble(RETRY_EXC_ERR)}
        assert FAILED in await pair.bulk.push(MOVES, soon())
        await wait_until(lambda: states(pair) == {6}, "all are in their error state")
        assert pair.cuts == ["cut"]


async def test_the_session_is_cut_before_anybody_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WRITEs that failed may still land at the client: whatever is answered now must not reach it."""
    async with paired(tmp_path) as pair:
        pair.nic.troubles.requests = {pair.nic.num_posted + 3: Trouble(RETRY_EXC_ERR)}
        order: list[str] = []
        monkeypatch.setattr(pair.bulk, "_cut", lambda: order.append("cut"))

        async def push() -> None:
            assert FAILED in await pair.bulk.push(MOVES, soon())
            order.append("answered")

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(push)
        assert order == ["cut", "answered", "answered", "answered"]


async def test_failed_waits_until_nothing_can_land_in_the_arena(tmp_path: Path) -> None:
    """While READs of another queue pair may still land, a pull is not FAILED: its extents would be used again."""
    async with paired(tmp_path) as pair:
        failing, slow = pair.nic.num_posted, 0.4
        pair.nic.troubles.requests = {failing: Trouble(RETRY_EXC_ERR)}
        pair.nic.troubles.slow_s = {"ibv_modify_qp": slow}  # nothing is flushed before that
        pair.nic.troubles.delay_s = 0.01
        silent = {failing + at: Trouble(delay_s=60) for at in range(1, 8)}
        pair.nic.troubles.requests |= silent
        started = time.monotonic()
        statuses = await pair.bulk.pull(MOVES, soon())
        assert statuses == [FAILED] * 8
        assert time.monotonic() - started >= slow


async def test_a_deadline_before_that_is_a_timeout(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        failing = pair.nic.num_posted
        pair.nic.troubles.requests = {failing + at: Trouble(delay_s=60) for at in range(1, 8)}
        pair.nic.troubles.requests[failing] = Trouble(RETRY_EXC_ERR)
        pair.nic.troubles.slow_s = {"ibv_modify_qp": 0.6}
        assert await pair.bulk.pull(MOVES, soon(0.1)) == [TIMEOUT] * 8
        assert pair.cuts == ["cut"]


@pytest.mark.parametrize(("accepted", "status"), [(0, FAILED), (3, TIMEOUT)])
async def test_a_post_that_is_refused_ends_the_session(tmp_path: Path, accepted: int, status: Status) -> None:
    async with paired(tmp_path, num_queue_pairs=1) as pair:
        pair.nic.troubles.posts = {pair.nic.num_posts: (accepted, errno.ENOMEM)}
        # What was accepted may move, and nothing says when it has: the signal was to come with the last of them.
        assert await pair.bulk.pull(MOVES, soon(0.3)) == [status] * 8
        assert pair.counts == {"rdma_refused": 1}
        assert pair.cuts == ["cut"]


async def test_nothing_is_posted_for_extents_outside_of_the_regions(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        before = pair.nic.num_posted
        moves = [Move(Extent(1, 4 * MIB - 5, 6), 0), Move(Extent(2, 0, 1), 0)]
        assert await pair.bulk.pull(moves, soon()) == [Status.BAD_EXTENT] * 2
        assert await pair.bulk.push(moves, soon()) == [Status.BAD_EXTENT] * 2
        assert (pair.nic.num_posted, pair.cuts) == (before, [])


async def test_a_client_that_takes_its_memory_back_ends_its_session_alone(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        assert pair.end.close(5.0)
        pair.nic.troubles.retry_s = 0.01
        assert await pair.bulk.push(MOVES, soon()) == [FAILED] * 8
        assert pair.counts == {"rdma_retries": 1}


# -- the probe


async def test_a_region_with_a_wrong_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told why, and is cut if it does not go then."""
    monkeypatch.setattr(bulk_module, "_CUT_AFTER_S", 0.2)
    async with paired(tmp_path, registered=False) as pair:
        await pair.connect()
        token = RegionToken(pair.memory.address, 12345)
        with pytest.raises(StoreError, match="the RDMA probe failed.*REM_ACCESS_ERR") as caught:
            await pair.bulk.register(1, MemoryKind.HOST, pair.memory.length, token.pack())
        assert caught.value.code == "data_path"
        assert pair.counts == {"rdma_remote_access": 1, "rdma_probe_failed": 1}
        assert pair.cuts == []
        assert await pair.bulk.pull(MOVES, soon()) == [Status.BAD_EXTENT] * 8
        with pytest.raises(StoreError, match="the RDMA probe failed"):
            await pair.register(2)
        await wait_until(lambda: pair.cuts == ["cut"], "the session is cut")


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_the_probe_goes_over_every_queue_pair(tmp_path: Path, place: int) -> None:
    async with paired(tmp_path, num_queue_pairs=3, registered=False) as pair:
        await pair.connect()
        pair.nic.troubles.requests = {pair.nic.num_posted + place: Trouble(RETRY_EXC_ERR)}
        with pytest.raises(StoreError, match="RETRY_EXC_ERR"):
            await pair.register()


async def test_what_a_failed_probe_says(tmp_path: Path) -> None:
    """Both ends, and what to look at: whoever reads it has two hosts and a switch before them."""
    async with paired(tmp_path, registered=False) as pair:
        await pair.connect()
        pair.nic.troubles.silent = True
        started = time.monotonic()
        with pytest.raises(StoreError) as caught:
            await pair.register()
        assert 0.3 <= time.monotonic() - started < 5
        text = str(caught.value)
        for part in (
            "the server's READ of the client's memory: packets of 1024 bytes from the client to the server do not",
            "no answer within 0.3 s",
            "fake0:1 10.77.0.1 GID 1 10.77.0.1, client GID 10.",
            "client GID 10.",
            "MTU 1024",
            "one subnet",
            "rdma.mtu lower",
            "UDP port 4791",
            "rdma link",
        ):
            assert part in text
        assert len(text) < 1000  # an answer holds 1024 bytes
        assert pair.counts == {"rdma_probe_failed": 1}


async def test_a_failing_probe_of_a_second_region_cuts_at_once_if_bytes_are_under_way(tmp_path: Path) -> None:
    async with paired(tmp_path, num_queue_pairs=1) as pair, anyio.create_task_group() as tasks:
        pair.nic.troubles.requests = {pair.nic.num_posted: Trouble(delay_s=60)}
        tasks.start_soon(pair.bulk.push, MOVES, soon())
        await wait_until(lambda: pair.nic.num_posted > 1, "bytes are under way")
        with HostMemory.create("second", MIB) as second:
            with pytest.raises(StoreError, match="the server's READ of the client's memory: no answer within"):
                await pair.register(2, second)
            assert pair.cuts == ["cut"]
            await pair.bulk.fence()
            pair.end.close(5.0)


# -- set-up


async def test_the_order_of_messages(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        with pytest.raises(RemoteProtocolError, match="before CONNECT"):
            await pair.bulk.register(1, MemoryKind.HOST, 4096, RegionToken(0, 0).pack())
        assert await pair.bulk.pull(MOVES[:1], soon()) == [Status.BAD_EXTENT]
        answer = await pair.connect()
        assert (answer.mtu, answer.max_reads, len(answer.queue_pairs)) == (1024, 16, 4)
        with pytest.raises(RemoteProtocolError, match="CONNECT comes once"):
            await pair.bulk.connect("verbs", answer.pack())
        await pair.register()
        with pytest.raises(RemoteProtocolError, match="region 1 is registered already"):
            await pair.bulk.register(1, MemoryKind.HOST, 4096, RegionToken(0, 0).pack())
        with pytest.raises(RemoteProtocolError, match="region 2 has 0 bytes"):
            await pair.bulk.register(2, MemoryKind.HOST, 0, RegionToken(0, 0).pack())
        with pytest.raises(RemoteProtocolError, match="token of 3 bytes"):
            await pair.bulk.register(2, MemoryKind.HOST, 4096, b"abc")
        with pytest.raises(StoreError, match="a session may register"):
            await pair.bulk.register(2, MemoryKind.HOST, 64 * MIB, RegionToken(0, 0).pack())
        await pair.bulk.fence()
        with pytest.raises(StoreError, match="this session has ended"):
            await pair.bulk.register(2, MemoryKind.HOST, 4096, RegionToken(0, 0).pack())


async def test_the_smaller_mtu_and_the_fewer_reads_are_used(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        pair.host.nics[1].ports[1].active_mtu = 512
        pair.host.nics[1].limit(max_reads_accepted=4)
        answer = await pair.connect()
        assert (answer.mtu, answer.max_reads) == (512, 4)
        await pair.register()
        assert await pair.bulk.pull(MOVES, soon()) == [OK] * 8


@pytest.mark.parametrize(
    ("call", "number"), [("ibv_create_qp", errno.ENOMEM), ("ibv_create_cq", errno.EINVAL), ("ibv_modify_qp", 110)]
)
async def test_queue_pairs_that_cannot_be_had_leave_nothing_behind(tmp_path: Path, call: str, number: int) -> None:
    async with paired(tmp_path, registered=False) as pair:
        token = pair.end.make().pack()
        before = pair.host.provider.num_live()
        pair.nic.troubles.refuse[call] = number
        with pytest.raises(
            StoreError, match=f"the server's NIC fake0:1 did not connect 4 queue pairs.*{call}"
        ) as caught:
            await pair.bulk.connect("verbs", token)
        assert caught.value.code == "data_path"
        assert pair.host.provider.num_live() == before


async def test_a_port_that_went_down_is_said(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        token = pair.end.make().pack()
        pair.nic.set_port(1, PortState.DOWN)
        with pytest.raises(StoreError, match="the server's side: RDMA port fake0:1 is DOWN; expected ACTIVE") as caught:
            await pair.bulk.connect("verbs", token)
        assert caught.value.code == "data_path"


@pytest.mark.parametrize("host", ["192.0.2.7", "", "::1", "10.77.0.2"])
async def test_a_control_connection_to_another_address_is_told_which_are_served(tmp_path: Path, host: str) -> None:
    """P070: bytes never go over another rail than the one that the client chose."""
    async with paired(tmp_path, registered=False) as pair:
        pair.bulk._local_host = host
        with pytest.raises(StoreError, match=r"it serves verbs on 10.77.0.1 \(fake0:1\)") as caught:
            await pair.bulk.connect("verbs", pair.end.make().pack())
        assert caught.value.code == "data_path"


async def test_an_ipv4_client_of_a_listener_on_all_addresses(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        pair.bulk._local_host = "::ffff:10.77.0.1"
        await pair.connect()
        await pair.register()


async def test_a_fence_during_the_set_up_waits_for_the_thread_and_releases_what_it_made(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair, anyio.create_task_group() as tasks:
        token = pair.end.make().pack()
        before = pair.host.provider.num_live()
        pair.nic.troubles.slow_s = {"ibv_create_qp": 0.15}
        tasks.start_soon(pair.bulk.connect, "verbs", token)
        await wait_until(lambda: pair.host.provider.num_live() > before, "it is under way")
        await pair.bulk.fence()
        assert pair.host.provider.num_live() == before
        with pytest.raises(StoreError, match="this session has ended"):
            await pair.bulk.connect("verbs", token)


async def test_a_set_up_that_is_cancelled_leaves_it_to_the_fence(tmp_path: Path) -> None:
    async with paired(tmp_path, registered=False) as pair:
        token = pair.end.make().pack()
        before = pair.host.provider.num_live()
        pair.nic.troubles.slow_s = {"ibv_create_qp": 0.1}
        with anyio.move_on_after(0.02):
            await pair.bulk.connect("verbs", token)
        await pair.bulk.fence()
        assert pair.host.provider.num_live() == before
