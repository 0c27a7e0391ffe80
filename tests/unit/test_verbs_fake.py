"""The fake verbs library: all that a device does (the suite), and the troubles that only it can make."""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from memkv_vllm.transports.verbs.provider import Access, Opcode, PortState, VerbsError
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider, Trouble
from tests.support.provider_ends import ALL, End, batch, connect, pair, wait
from tests.support.provider_suite import ProviderSuite, World, refused

SUCCESS, LOC_LEN_ERR, LOC_QP_OP_ERR, WR_FLUSH_ERR, REM_ACCESS_ERR, RETRY_EXC_ERR = 0, 1, 2, 5, 10, 12
RTS, ERR = 3, 6
DELAY_S = 0.15
"""Longer than what stands between a post and the next line of a test on a busy machine."""


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with FakeFabric() as made:
        yield made


@pytest.fixture
def near_nic() -> FakeNic:
    return FakeNic("fake0", "127.0.0.1")


@pytest.fixture
def far_nic() -> FakeNic:
    return FakeNic("fake1", "127.0.0.2")


@pytest.fixture
def provider(fabric: FakeFabric, near_nic: FakeNic, far_nic: FakeNic) -> FakeProvider:
    return FakeProvider(fabric, [near_nic, far_nic])


@pytest.fixture
def ends(provider: FakeProvider) -> Iterator[tuple[End, End]]:
    with pair(provider, "fake0", "fake1") as made:
        yield made


class TestFake(ProviderSuite):
    """The suite, with bytes that move inside of the post, as on soft-RoCE."""

    @pytest.fixture
    def world(self, provider: FakeProvider) -> World:
        return World(provider, "fake0", "fake1")


class TestLateFake(ProviderSuite):
    """The suite, with bytes that move later, as on a NIC."""

    @pytest.fixture
    def world(self, provider: FakeProvider, near_nic: FakeNic, far_nic: FakeNic) -> World:
        near_nic.troubles.delay_s = far_nic.troubles.delay_s = 0.002
        return World(provider, "fake0", "fake1")


def landed(end: End) -> bool:
    """Whether anything was written into its first bytes."""
    return bool(end.bytes[:400].any())


def stays_empty(end: End, watch_s: float = 2 * DELAY_S) -> bool:
    """Whether nothing lands for a while."""
    ends_at = time.monotonic() + watch_s
    while time.monotonic() < ends_at:
        if landed(end):
            return False
        time.sleep(0.005)
    return True


class TestLateWrites:
    """What is posted lands later, unless an end of it is gone by then."""

    @pytest.fixture
    def sent(self, ends: tuple[End, End], near_nic: FakeNic) -> tuple[End, End]:
        near, far = ends
        near.bytes[:] = 1
        near_nic.troubles.delay_s = DELAY_S
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 4))
        assert not landed(far)
        return ends

    def test_control_it_lands(self, sent: tuple[End, End]) -> None:
        near, far = sent
        assert [c.status for c in wait(near, 4)] == [SUCCESS] * 4
        assert landed(far)

    def test_not_into_a_region_that_was_closed(self, sent: tuple[End, End]) -> None:
        near, far = sent
        far.region.close()
        assert stays_empty(far)
        assert [c.status for c in wait(near, 4)] == [REM_ACCESS_ERR, WR_FLUSH_ERR, WR_FLUSH_ERR, WR_FLUSH_ERR]

    @pytest.mark.parametrize("how", ["close", "fail"])
    def test_not_through_a_queue_pair_that_is_gone(self, sent: tuple[End, End], how: str) -> None:
        near, far = sent
        getattr(far.queue_pair, how)()
        assert stays_empty(far)
        assert [c.status for c in wait(near, 4)] == [RETRY_EXC_ERR, WR_FLUSH_ERR, WR_FLUSH_ERR, WR_FLUSH_ERR]

    def test_not_from_a_sender_that_failed(self, sent: tuple[End, End]) -> None:
        near, far = sent
        near.queue_pair.fail()
        assert [c.status for c in near.completions.drain()] == [WR_FLUSH_ERR] * 4
        assert stays_empty(far)

    def test_not_from_a_sender_that_was_closed(self, sent: tuple[End, End]) -> None:
        near, far = sent
        near.queue_pair.close()
        assert stays_empty(far)
        assert list(near.completions.drain()) == []

    def test_not_after_the_fabric(self, sent: tuple[End, End], fabric: FakeFabric) -> None:
        _, far = sent
        fabric.close()
        assert stays_empty(far)

    def test_its_thread_ends(self, sent: tuple[End, End], fabric: FakeFabric) -> None:
        def threads() -> int:
            return sum(thread.name == "fake-verbs" for thread in threading.enumerate())

        before = threads()
        fabric.close()
        assert threads() == before - 1

    def test_order_holds_when_the_delay_shrinks(self, sent: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = sent
        near_nic.troubles.delay_s = 0.0
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 1, at=4096))
        assert not far.bytes[4096]
        assert [c.wr_id for c in wait(near, 5)] == [1000, 1001, 1002, 1003, 1000]


class TestOnTheWire:
    """What was sent arrives although its sender is gone; the target alone can hold it off."""

    @pytest.fixture
    def sent(self, ends: tuple[End, End], near_nic: FakeNic) -> tuple[End, End]:
        near, far = ends
        near.bytes[:] = 1
        near_nic.troubles.delay_s, near_nic.troubles.outlives_sender = DELAY_S, True
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 4))
        return ends

    @pytest.mark.parametrize("how", ["queue pair fails", "queue pair closes", "device closes"])
    def test_it_arrives(self, sent: tuple[End, End], how: str) -> None:
        near, far = sent
        {"queue pair fails": near.queue_pair.fail, "queue pair closes": near.queue_pair.close}.get(how, near.close)()
        near.bytes[:] = 2  # what was sent is what was there when it was posted
        assert not landed(far)
        assert not stays_empty(far, 10.0)
        assert set(far.bytes[:100].tolist()) == {1}

    @pytest.mark.parametrize("how", ["region", "queue_pair"])
    def test_not_where_the_target_has_closed(self, sent: tuple[End, End], how: str) -> None:
        near, far = sent
        near.queue_pair.close()
        getattr(far, how).close()
        assert stays_empty(far)


class TestScripts:
    """One work request or one call goes wrong."""

    @pytest.mark.parametrize("status", [1, 6, 9, 13, 21])
    def test_a_status_by_number(self, ends: tuple[End, End], near_nic: FakeNic, status: int) -> None:
        near, far = ends
        near.bytes[:] = 1
        near_nic.troubles.requests[near_nic.num_posted + 2] = Trouble(status=status, vendor_error=0x81)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 4))
        found = wait(near, 4)
        assert [c.status for c in found] == [SUCCESS, SUCCESS, status, WR_FLUSH_ERR]
        assert found[2].vendor_error == 0x81
        assert not far.bytes[200:400].any() and near.queue_pair.state() == ERR

    def test_one_that_never_completes(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        """Its bytes have moved; those behind it do not, until the queue pair fails and flushes them all."""
        near, far = ends
        near.bytes[:] = 1
        near_nic.troubles.requests[near_nic.num_posted + 1] = Trouble(completes=False)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 3))
        assert [c.wr_id for c in near.completions.drain()] == [1000]
        assert far.bytes[:200].all() and not far.bytes[200:].any()
        assert near.queue_pair.state() == RTS
        near.queue_pair.fail()
        assert [(c.wr_id, c.status) for c in near.completions.drain()] == [(1001, WR_FLUSH_ERR), (1002, WR_FLUSH_ERR)]

    def test_a_nic_that_is_stuck(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near.bytes[:] = 1
        near_nic.troubles.silent = True
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 3))
        assert list(near.completions.drain()) == [] and not landed(far) and near.queue_pair.state() == RTS
        near.queue_pair.fail()
        assert [c.status for c in near.completions.drain()] == [WR_FLUSH_ERR] * 3

    def test_one_that_is_late(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near_nic.troubles.requests[near_nic.num_posted + 1] = Trouble(delay_s=DELAY_S)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 3))
        assert [c.wr_id for c in near.completions.drain()] == [1000]
        assert [c.wr_id for c in wait(near, 2)] == [1001, 1002]

    def test_bytes_that_are_there_before_the_completion(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near.bytes[:] = 1
        near_nic.troubles.completion_delay_s = DELAY_S
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 2))
        assert far.bytes[:100].all() and list(near.completions.drain()) == []
        assert [c.status for c in wait(near, 2)] == [SUCCESS] * 2

    def test_a_post_that_is_refused(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near_nic.troubles.posts[near_nic.num_posts] = (2, errno.EIO)
        with refused("ibv_post_send", errno.EIO) as caught:
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 5))
        assert caught.value.accepted == 2
        assert len(near.completions.drain()) == 2
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 5))
        assert len(near.completions.drain()) == 5

    def test_calls_that_fail(self, provider: FakeProvider, near_nic: FakeNic) -> None:
        near = End(provider, "fake0")
        near_nic.troubles.refuse["ibv_reg_mr"] = errno.ENOMEM
        with refused("ibv_reg_mr", errno.ENOMEM):
            near.domain.register(near.region.address, 4096, ALL)
        near_nic.troubles.refuse["ibv_open_device"] = errno.EACCES
        with refused("ibv_open_device", errno.EACCES):
            provider.open("fake0")
        near.close()
        assert provider.num_live() == 0

    def test_calls_that_take_time(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, _ = ends
        near_nic.troubles.slow_s["ibv_reg_mr"] = DELAY_S
        begun = time.monotonic()
        near.domain.register(near.region.address, 4096, ALL)
        assert time.monotonic() - begun >= DELAY_S

    def test_a_dmabuf_where_it_is_let(self, ends: tuple[End, End], far_nic: FakeNic) -> None:
        """A memfd stands for the GPU's memory; work requests name it from the address that was asked for."""
        near, far = ends
        far_nic.troubles.refuse.clear()
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, 1 << 16)
        region = far.domain.register_dmabuf(fd, 4196, 8192, 0x7000_0000, ALL)
        assert (region.address, region.length) == (0x7000_0000, 8192)
        near.bytes[:100] = np.arange(100)
        work = batch(near, far, Opcode.WRITE)
        work.remote[:], work.rkeys[:] = region.address + 50, region.rkey
        near.queue_pair.post(work)
        assert [c.status for c in wait(near, 1)] == [SUCCESS]
        with mmap.mmap(fd, 1 << 16) as content:
            assert content[4246:4346] == bytes(range(100)) and not any(content[:4246])
        os.close(fd)

    def test_retries_take_as_long_as_they_are_told(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near_nic.troubles.retry_s = 0.0
        far.queue_pair.close()
        near.queue_pair.post(batch(near, far, Opcode.WRITE))
        assert [c.status for c in near.completions.drain()] == [RETRY_EXC_ERR]


class TestLimits:
    """P077: devices with small limits."""

    def test_limits_show_and_hold(self, provider: FakeProvider, near_nic: FakeNic) -> None:
        near_nic.limit(
            max_work_requests=4, max_sges=1, max_completions=8, max_queue_pairs=2, max_regions=1, max_region_bytes=8192
        )
        device = provider.open("fake0")
        assert (device.attributes().max_work_requests, device.attributes().max_sges) == (4, 1)
        domain = device.protection_domain()
        with refused("ibv_create_cq", errno.EINVAL):
            device.completion_queue(9)
        completions = device.completion_queue(8)
        with refused("ibv_create_qp", errno.EINVAL):
            domain.queue_pair(completions, 5)
        made = [domain.queue_pair(completions, 4) for _ in range(2)]
        with refused("ibv_create_qp", errno.ENOMEM):
            domain.queue_pair(completions, 4)
        made[0].close()
        domain.queue_pair(completions, 4)
        memory = np.zeros(16_384, np.uint8)
        with refused("ibv_reg_mr", errno.EINVAL):
            domain.register(memory.ctypes.data, 8193, ALL)
        domain.register(memory.ctypes.data, 8192, ALL)
        with refused("ibv_reg_mr", errno.ENOMEM):
            domain.register(memory.ctypes.data, 1, ALL)
        device.close()

    def test_a_message_that_is_too_long(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near_nic.ports[1].max_message_bytes = 4096
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 2, 4097))
        assert [c.status for c in wait(near, 2)] == [LOC_LEN_ERR, WR_FLUSH_ERR]

    def test_the_send_queue_has_so_many_places(self, provider: FakeProvider) -> None:
        """Places come back when a signalled completion behind them is taken, not when the bytes have moved."""
        near, far = End(provider, "fake0", depth=4), End(provider, "fake1")
        connect(near, far)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 3, signalled=[False, True, False]))
        with refused("ibv_post_send", errno.ENOMEM) as caught:
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 3))
        assert caught.value.accepted == 1
        assert [c.wr_id for c in wait(near, 2)] == [1001, 1000], "the fourth was signalled"
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 4))
        assert len(wait(near, 4)) == 4
        near.close()
        far.close()

    def test_a_completion_queue_overruns(self, provider: FakeProvider) -> None:
        near, far = End(provider, "fake0"), End(provider, "fake1")
        small = near.device.completion_queue(2)
        sender = near.domain.queue_pair(small, 16)
        sender.initialize(1, ALL)
        sender.connect(near.path(), far.peer())
        far.queue_pair.connect(
            far.path(), near.peer()._replace(number=sender.number, packet_number=sender.packet_number)
        )
        sender.post(batch(near, far, Opcode.WRITE, 4))
        assert len(small.drain()) == 2
        assert "cq_err" in [event.name for event in near.device.async_events()]
        assert sender.state() == ERR
        near.close()
        far.close()

    def test_a_region_needs_local_write_for_remote_write(self, ends: tuple[End, End]) -> None:
        near, _ = ends
        with refused("ibv_reg_mr", errno.EINVAL):
            near.domain.register(near.region.address, 100, Access.REMOTE_WRITE)


class TestPorts:
    """Ports, GIDs and events."""

    def test_addresses_become_gids(self, fabric: FakeFabric) -> None:
        device = FakeProvider(fabric, [FakeNic("two", "10.1.2.3", "")]).open("two")
        assert device.attributes().num_ports == 2
        assert device.gid(1, 1) == bytes(10) + b"\xff\xff\x0a\x01\x02\x03"
        assert (device.port(1).num_gids, device.port(2).num_gids) == (2, 1)
        with refused("ibv_query_gid", errno.EINVAL):
            device.gid(2, 1)
        device.close()

    def test_a_port_goes_down_and_comes_back(self, ends: tuple[End, End], near_nic: FakeNic) -> None:
        near, far = ends
        near_nic.set_port(1, PortState.DOWN)
        assert select.select([near.device.async_fd], [], [], 0)[0]
        assert [(e.name, e.element) for e in near.device.async_events()] == [("port_err", 1)]
        assert not select.select([near.device.async_fd], [], [], 0)[0]
        assert near.device.port(1).state is PortState.DOWN
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 2))
        assert [c.status for c in wait(near, 2)] == [LOC_QP_OP_ERR, WR_FLUSH_ERR]
        near_nic.set_port(1, PortState.ACTIVE)
        assert [e.name for e in near.device.async_events()] == ["port_active"]

    def test_the_peers_port_is_down_for_a_while(
        self, ends: tuple[End, End], near_nic: FakeNic, far_nic: FakeNic
    ) -> None:
        near, far = ends
        near_nic.troubles.retry_s = 60.0
        far_nic.set_port(1, PortState.DOWN)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 2))
        assert list(near.completions.drain()) == []
        near.queue_pair.fail()
        assert [c.status for c in wait(near, 2)] == [WR_FLUSH_ERR] * 2

    def test_two_hosts_on_one_fabric(self, fabric: FakeFabric) -> None:
        here = FakeProvider(fabric, [FakeNic("nic", "10.0.0.1")])
        there = FakeProvider(fabric, [FakeNic("nic", "10.0.0.2")])
        near, far = End(here, "nic"), End(there, "nic")
        connect(near, far)
        near.bytes[:] = 1
        near.queue_pair.post(batch(near, far, Opcode.WRITE))
        assert [c.status for c in wait(near, 1)] == [SUCCESS] and landed(far)
        assert (here.num_opened, there.num_opened) == (1, 1)
        with pytest.raises(VerbsError):
            near.domain.queue_pair(far.completions, 0)
        near.close()
        far.close()
        assert (here.num_live(), there.num_live()) == (0, 0)
