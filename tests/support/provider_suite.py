"""What every verbs provider has to do, as tests. The fake runs them on any machine, the real ones on soft-RoCE.

A subclass called ``Test...`` gives the fixture ``world``. The fake shows that the users of a provider are right only as
far as it passes the same tests as the devices do.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from memkv_vllm.transports.verbs.provider import (
    MAX_RETRY_COUNT,
    Access,
    LinkLayer,
    Opcode,
    PortState,
    Provider,
    VerbsError,
)
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider
from tests.support.provider_ends import ALL, DEPTH, LENGTH, End, batch, connect, pair, wait

__all__ = ["ProviderSuite", "World"]

SUCCESS, LOC_PROT_ERR, WR_FLUSH_ERR, REM_ACCESS_ERR, RETRY_EXC_ERR = 0, 4, 5, 10, 12
RTS, ERR = 3, 6
COMPARE_AND_SWAP = 5
"""An opcode that is none of ours; with less than 8 bytes libraries refuse it in the post."""


class World(NamedTuple):
    """A provider and the names of two devices that reach each other (soft-RoCE: one, that reaches itself)."""

    provider: Provider
    near: str
    far: str


def num_fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def refused(call: str, *numbers: int) -> pytest.RaisesExc[VerbsError]:
    """Expect a VerbsError of this call, with one of these numbers (none: any)."""

    def matches(error: VerbsError) -> bool:
        return error.call == call and (not numbers or error.errno in numbers)

    return pytest.RaisesExc(VerbsError, check=matches)


class ProviderSuite:
    """The tests."""

    @pytest.fixture(autouse=True)
    def nothing_stays(self, world: World) -> object:
        """Every test ends with what it began with."""
        before, live = num_fds(), world.provider.num_live()
        yield
        gc.collect()
        assert (world.provider.num_live(), num_fds()) == (live, before)

    # ------------------------------------------------------------------------------------------ devices

    def test_devices_and_their_limits(self, world: World) -> None:
        assert {world.near, world.far} <= set(world.provider.device_names())
        device = world.provider.open(world.near)
        limits, port = device.attributes(), device.port(1)
        assert device.name == world.near
        assert limits.max_work_requests >= 64 and limits.max_sges >= 1 and limits.max_completions >= 256
        assert limits.max_queue_pairs >= 1 and limits.max_regions >= 1 and limits.max_region_bytes >= 1 << 32
        assert limits.max_reads_accepted >= 4 and limits.max_reads_initiated >= 4 and limits.num_ports >= 1
        assert isinstance(limits.firmware, str)
        assert port.state is PortState.ACTIVE and port.link_layer is LinkLayer.ETHERNET
        assert port.active_mtu in (1024, 2048, 4096) and port.max_message_bytes >= 1 << 20 and port.num_gids >= 2
        assert device.gid(1, 0)[:2] == b"\xfe\x80", "GID 0 of RoCE is link-local"
        assert list(device.async_events()) == []
        device.close()

    def test_what_is_not_there_is_an_error(self, world: World) -> None:
        with refused("ibv_open_device", errno.ENODEV):
            world.provider.open("mlx5_77")
        device = world.provider.open(world.near)
        with refused("ibv_query_port"):
            device.port(99)
        with refused("ibv_query_gid"):
            device.gid(1, 60_000)
        with refused("ibv_create_cq"):
            device.completion_queue(1 << 24)
        device.close()

    def test_limits_of_a_queue_pair(self, world: World) -> None:
        device = world.provider.open(world.near)
        domain, completions = device.protection_domain(), device.completion_queue(16)
        with refused("ibv_create_qp"):
            domain.queue_pair(completions, 1 << 24)
        device.close()

    # ------------------------------------------------------------------------------------------ bytes

    @pytest.mark.parametrize("opcode", [Opcode.READ, Opcode.WRITE])
    @pytest.mark.parametrize(("at", "length"), [(0, 1), (3, 4097), (4096, 65536), (1, LENGTH - 1)])
    def test_bytes_arrive(self, world: World, opcode: Opcode, at: int, length: int) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            source, target = (far, near) if opcode == Opcode.READ else (near, far)
            source.bytes[:] = np.random.default_rng(at).integers(1, 256, LENGTH, dtype=np.uint8)
            near.queue_pair.post(batch(near, far, opcode, length=length, at=at))
            (completion,) = wait(near, 1)
            assert completion == (1000, SUCCESS, completion.vendor_error, near.queue_pair.number)
            assert np.array_equal(target.bytes[at : at + length], source.bytes[at : at + length])
            assert not target.bytes[:at].any() and not target.bytes[at + length :].any()
            assert list(far.completions.drain()) == [], "the passive end learns nothing"

    def test_a_batch_of_64_in_one_post(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            far.bytes[:] = np.random.default_rng(1).integers(1, 256, LENGTH, dtype=np.uint8)
            near.queue_pair.post(batch(near, far, Opcode.READ, 64, 1000))
            assert [c.wr_id for c in wait(near, 64)] == list(range(1000, 1064)), "in order"
            assert np.array_equal(near.bytes[:64_000], far.bytes[:64_000]) and not near.bytes[64_000:].any()

    def test_each_row_is_its_own(self, world: World) -> None:
        """Lengths, places, directions and ids that follow no pattern: nothing of one row shows in another."""
        with pair(world.provider, world.near, world.far) as (near, far):
            dice = np.random.default_rng(7)
            for _ in range(20):
                count = int(dice.integers(1, 65))
                work = batch(near, far, Opcode.READ, count, 1024)
                work.lengths[:] = dice.integers(1, 1025, count)
                work.wr_ids[:] = dice.integers(0, 1 << 63, count, dtype=np.uint64)
                work.opcodes[:] = dice.choice([int(Opcode.READ), int(Opcode.WRITE)], count)
                slots = dice.permutation(LENGTH // 1024)[: 2 * count].astype(np.uint64) * np.uint64(1024)
                work.local[:] = near.region.address + slots[:count]
                work.remote[:] = far.region.address + slots[count:]
                near.bytes[:] = dice.integers(0, 256, LENGTH, dtype=np.uint8)
                far.bytes[:] = dice.integers(0, 256, LENGTH, dtype=np.uint8)
                expected = {near: near.bytes.copy(), far: far.bytes.copy()}
                for opcode, length, here, there in zip(
                    work.opcodes, work.lengths, slots[:count].tolist(), slots[count:].tolist(), strict=True
                ):
                    if opcode == Opcode.READ:
                        expected[near][here : here + length] = expected[far][there : there + length]
                    else:
                        expected[far][there : there + length] = expected[near][here : here + length]
                near.queue_pair.post(work)
                assert [c.wr_id for c in wait(near, count)] == work.wr_ids.tolist()
                assert np.array_equal(near.bytes, expected[near]) and np.array_equal(far.bytes, expected[far])

    def test_an_empty_batch_is_nothing(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            near.queue_pair.post(batch(near, far, Opcode.READ, 0))
            assert list(near.completions.drain()) == []

    def test_both_ends_post(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            near.bytes[:1000], far.bytes[1000:2000] = 1, 2
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 10))
            far.queue_pair.post(batch(far, near, Opcode.WRITE, 10, at=1000))
            assert [c.status for c in wait(near, 10) + wait(far, 10)] == [SUCCESS] * 20
            assert (far.bytes[:1000] == 1).all() and (near.bytes[1000:2000] == 2).all()

    # ------------------------------------------------------------------------------------------ completions

    def test_only_signalled_ones_show_up(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            signalled = [n % 16 == 15 for n in range(64)]
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 64, signalled=signalled))
            assert [c.wr_id for c in wait(near, 4)] == [1015, 1031, 1047, 1063]
            assert list(near.completions.drain()) == []

    def test_places_come_back_with_sparse_signals(self, world: World) -> None:
        """Ten times the send queue's depth, with a signal at each end of it only."""
        with pair(world.provider, world.near, world.far) as (near, far):
            for _ in range(10):
                near.queue_pair.post(
                    batch(near, far, Opcode.WRITE, DEPTH, signalled=[n == DEPTH - 1 for n in range(DEPTH)])
                )
                assert [c.wr_id for c in wait(near, 1)] == [1000 + DEPTH - 1]

    def test_the_descriptor_tells(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):

            def readable(within_s: float) -> bool:
                return bool(select.select([near.completions.fd], [], [], within_s)[0])

            assert not os.get_blocking(near.completions.fd)
            assert not readable(0)
            for _ in range(3):
                near.queue_pair.post(batch(near, far, Opcode.WRITE, 3))
                assert readable(5)
                found = list(near.completions.drain())
                while len(found) < 3 and readable(5):
                    found.extend(near.completions.drain())
                assert [c.wr_id for c in found] == [1000, 1001, 1002]
                near.completions.drain()
                assert not readable(0)

    def test_a_completion_before_arming_is_not_missed(self, world: World) -> None:
        """drain() arms and then polls, so one that came in between is found, and one after it makes an event."""
        with pair(world.provider, world.near, world.far) as (near, far):
            near.completions.drain()
            near.queue_pair.post(batch(near, far, Opcode.WRITE))
            wait(near, 1)
            near.queue_pair.post(batch(near, far, Opcode.WRITE))
            assert len(wait(near, 1)) == 1

    def test_more_at_once_than_any_array_holds(self, world: World) -> None:
        """Providers write and poll in pieces of 64; a batch of 200 shows none of that."""
        near, far = End(world.provider, world.near, depth=200), End(world.provider, world.far, depth=200)
        connect(near, far)
        near.bytes[:] = np.random.default_rng(3).integers(1, 256, LENGTH, dtype=np.uint8)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 200))
        assert [c.wr_id for c in wait(near, 200)] == list(range(1000, 1200))
        assert np.array_equal(far.bytes[:20_000], near.bytes[:20_000]) and not far.bytes[20_000:].any()
        near.close()
        far.close()

    # ------------------------------------------------------------------------------------------ failures

    def _fails(self, near: End, far: End, work: object, row: int, status: int) -> None:
        near.queue_pair.post(work)  # type: ignore[arg-type]
        found = wait(near, 4)
        assert [c.wr_id for c in found] == [1000, 1001, 1002, 1003]
        assert [c.status for c in found] == [SUCCESS] * row + [status] + [WR_FLUSH_ERR] * (3 - row)
        assert near.queue_pair.state() == ERR

    def test_wrong_rkey(self, world: World) -> None:
        """The one fails, those before it arrived, those behind it are flushed, signalled or not."""
        with pair(world.provider, world.near, world.far) as (near, far):
            near.bytes[:] = 1
            work = batch(near, far, Opcode.WRITE, 4, signalled=[True, False, False, False])
            work.rkeys[1] ^= 0x5A
            self._fails(near, far, work, 1, REM_ACCESS_ERR)
            assert far.bytes[:100].all() and not far.bytes[100:].any()
            assert far.queue_pair.state() == ERR, "the peer's end goes with it"

    @pytest.mark.parametrize("opcode", [Opcode.READ, Opcode.WRITE])
    def test_past_the_end_of_remote_memory(self, world: World, opcode: Opcode) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            work = batch(near, far, opcode, 4)
            work.remote[2] = far.region.address + LENGTH - 99
            self._fails(near, far, work, 2, REM_ACCESS_ERR)

    def test_before_the_beginning_of_remote_memory(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            work = batch(near, far, Opcode.READ, 4)
            work.remote[0] = far.region.address - 1
            self._fails(near, far, work, 0, REM_ACCESS_ERR)

    def test_past_the_end_of_local_memory(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            work = batch(near, far, Opcode.WRITE, 4)
            work.local[1] = near.region.address + LENGTH - 99
            self._fails(near, far, work, 1, LOC_PROT_ERR)

    @pytest.mark.parametrize(
        ("opcode", "access"), [(Opcode.WRITE, Access.LOCAL | Access.REMOTE_READ), (Opcode.READ, ALL & ~Access(4))]
    )
    def test_what_a_region_does_not_allow(self, world: World, opcode: Opcode, access: Access) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            narrow = far.domain.register(far.region.address, 4096, access)
            work = batch(near, far, opcode, 4)
            work.rkeys[3] = narrow.rkey
            self._fails(near, far, work, 3, REM_ACCESS_ERR)

    def test_what_belongs_to_another_domain(self, world: World) -> None:
        """Sessions have a domain each: one's keys are nothing to another's queue pairs."""
        with pair(world.provider, world.near, world.far) as (near, far):
            other = far.device.protection_domain()
            region = other.register(far.region.address, LENGTH, ALL)
            work = batch(near, far, Opcode.WRITE, 4)
            work.rkeys[0] = region.rkey
            self._fails(near, far, work, 0, REM_ACCESS_ERR)

    def test_a_region_that_was_closed(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            near.bytes[:] = 1
            far.region.close()
            self._fails(near, far, batch(near, far, Opcode.WRITE, 4), 0, REM_ACCESS_ERR)
            assert not far.bytes.any()

    def test_a_peer_that_is_gone(self, world: World) -> None:
        """P029: the retries run out, (retry_count + 1) times the timeout; not before, and not never."""
        with pair(world.provider, world.near, world.far) as (near, far):
            far.queue_pair.close()
            begun = time.monotonic()
            self._fails(near, far, batch(near, far, Opcode.WRITE, 4), 0, RETRY_EXC_ERR)
            assert time.monotonic() - begun > 0.03
            assert not far.bytes.any()

    def test_fail_flushes_what_is_outstanding_and_what_comes(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            far.queue_pair.close()  # so that nothing completes by itself at once
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 2, signalled=[False, False]))
            near.queue_pair.fail()
            assert near.queue_pair.state() == ERR
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 2))
            found = wait(near, 4)
            assert [c.status for c in found[1:]] == [WR_FLUSH_ERR] * 3
            assert found[0].status in (WR_FLUSH_ERR, RETRY_EXC_ERR)

    def test_a_refused_post_says_how_many_went(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            for row in (0, 1, 5):
                work = batch(near, far, Opcode.WRITE, 6)
                work.opcodes[row], work.lengths[row] = COMPARE_AND_SWAP, 4
                with refused("ibv_post_send", errno.EINVAL) as caught:
                    near.queue_pair.post(work)
                assert caught.value.accepted == row
                assert [c.wr_id for c in wait(near, row)] == [1000 + n for n in range(row)]
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 6))
            assert [c.status for c in wait(near, 6)] == [SUCCESS] * 6, "the queue pair is none the worse"

    def test_a_post_that_is_refused_as_a_whole(self, world: World) -> None:
        """Also behind one that was refused in the middle: nothing of that may be remembered."""
        near, far = End(world.provider, world.near), End(world.provider, world.far)
        fresh = near.domain.queue_pair(near.completions, 4)
        fresh.initialize(1, ALL)
        connect(near, far)
        for work in (batch(near, far, Opcode.WRITE, 4), batch(near, far, Opcode.READ, 1)):
            with refused("ibv_post_send", errno.EINVAL) as caught:
                fresh.post(work)
            assert caught.value.accepted == 0
        near.close()
        far.close()

    # ------------------------------------------------------------------------------------------ connecting

    def test_states(self, world: World) -> None:
        near, far = End(world.provider, world.near), End(world.provider, world.far)
        assert near.queue_pair.state() == 1
        with refused("ibv_post_send", errno.EINVAL) as caught:
            near.queue_pair.post(batch(near, far, Opcode.WRITE, 2))
        assert caught.value.accepted == 0
        fresh = near.domain.queue_pair(near.completions, 4)
        assert fresh.state() == 0
        with refused("ibv_modify_qp", errno.EINVAL):
            fresh.connect(near.path(), far.peer())
        with refused("ibv_modify_qp"):
            fresh.initialize(9, ALL)
        connect(near, far)
        assert near.queue_pair.state() == far.queue_pair.state() == RTS
        with refused("ibv_modify_qp", errno.EINVAL):
            near.queue_pair.connect(near.path(), far.peer())
        near.close()
        far.close()

    @pytest.mark.parametrize("changes", [{"retry_count": MAX_RETRY_COUNT + 1}, {"mtu": 1500}, {"retry_count": -1}])
    def test_a_path_that_must_not_be(self, world: World, changes: dict[str, int]) -> None:
        """A retry count of 7 means for ever on soft-RoCE: a work request to a dead peer would never end."""
        near, far = End(world.provider, world.near), End(world.provider, world.far)
        with refused("ibv_modify_qp", errno.EINVAL):
            near.queue_pair.connect(near.path(**changes), far.peer())
        near.close()
        far.close()

    def test_numbers_are_random(self, world: World) -> None:
        near = End(world.provider, world.near)
        made = [near.domain.queue_pair(near.completions, 4) for _ in range(20)]
        assert len({pair.number for pair in made}) == 20
        assert len({pair.packet_number for pair in made}) > 18
        assert all(pair.number < 1 << 24 and pair.packet_number < 1 << 24 for pair in made)
        near.close()

    def test_the_wrong_packet_number_is_a_dead_peer(self, world: World) -> None:
        near, far = End(world.provider, world.near), End(world.provider, world.far)
        near.queue_pair.connect(near.path(), far.peer())
        # An earlier one, so that what comes is ahead of it: what is behind is taken for repeated, and acknowledged.
        due = (near.peer().packet_number - 0x400000) % (1 << 24)
        far.queue_pair.connect(far.path(), near.peer()._replace(packet_number=due))
        near.bytes[:] = 1
        self._fails(near, far, batch(near, far, Opcode.WRITE, 4), 0, RETRY_EXC_ERR)
        assert not far.bytes.any()
        near.close()
        far.close()

    # ------------------------------------------------------------------------------------------ memory

    def test_registering_registers_what_it_says(self, world: World) -> None:
        near = End(world.provider, world.near)
        address = near.region.address + 12_345
        region = near.domain.register(address, 777, Access.LOCAL)
        assert (region.address, region.length) == (address, 777)
        assert region.lkey != near.region.lkey
        region.close()
        near.close()

    def test_relaxed_ordering_may_always_be_asked_for(self, world: World) -> None:
        with pair(world.provider, world.near, world.far) as (near, far):
            relaxed = far.domain.register(far.region.address, LENGTH, ALL | Access.RELAXED_ORDERING)
            near.bytes[:] = 1
            work = batch(near, far, Opcode.WRITE)
            work.rkeys[:] = relaxed.rkey
            near.queue_pair.post(work)
            assert [c.status for c in wait(near, 1)] == [SUCCESS]
            assert far.bytes[:100].all()

    def test_dmabuf_is_refused_with_a_number(self, world: World) -> None:
        """P075: neither soft-RoCE nor an unchanged fake can: the caller goes on to its next way."""
        near = End(world.provider, world.near)
        fd = os.memfd_create("no dmabuf")
        os.ftruncate(fd, 4096)
        with refused("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP):
            near.domain.register_dmabuf(fd, 0, 4096, 0, ALL)
        os.close(fd)
        near.close()

    # ------------------------------------------------------------------------------------------ closing

    def test_everything_closes_once_whatever_the_order(self, world: World) -> None:
        live = world.provider.num_live()
        for order in ("parents first", "children first", "device only"):
            near = End(world.provider, world.near)
            assert world.provider.num_live() == live + 5
            objects: list[Any] = [near.device, near.domain, near.completions, near.region, near.queue_pair]
            for owned in {"parents first": objects, "children first": objects[::-1], "device only": objects[:1]}[order]:
                owned.close()
            for owned in objects:
                owned.close()
            assert world.provider.num_live() == live

    @pytest.mark.parametrize("parent", ["domain", "completions"])
    def test_a_parent_closes_what_stands_on_it(self, world: World, parent: str) -> None:
        near = End(world.provider, world.near)
        live = world.provider.num_live()
        getattr(near, parent).close()
        assert world.provider.num_live() == live - (3 if parent == "domain" else 2)
        with refused("ibv_query_qp", errno.EBADF):
            near.queue_pair.state()
        near.close()

    def test_a_closed_object_refuses_instead_of_crashing(self, world: World) -> None:
        near, far = End(world.provider, world.near), End(world.provider, world.far)
        connect(near, far)
        near.close()
        calls = [
            ("ibv_query_device", near.device.attributes),
            ("ibv_query_port", lambda: near.device.port(1)),
            ("ibv_query_gid", lambda: near.device.gid(1, 0)),
            ("ibv_get_async_event", near.device.async_events),
            ("ibv_alloc_pd", near.device.protection_domain),
            ("ibv_create_cq", lambda: near.device.completion_queue(4)),
            ("ibv_reg_mr", lambda: near.domain.register(near.region.address, 10, ALL)),
            ("ibv_reg_dmabuf_mr", lambda: near.domain.register_dmabuf(0, 0, 10, 0, ALL)),
            ("ibv_create_qp", lambda: near.domain.queue_pair(near.completions, 4)),
            ("ibv_create_qp", lambda: far.domain.queue_pair(near.completions, 4)),
            ("ibv_req_notify_cq", near.completions.arm),
            ("ibv_poll_cq", near.completions.drain),
            ("ibv_modify_qp", lambda: near.queue_pair.initialize(1, ALL)),
            ("ibv_modify_qp", near.queue_pair.fail),
            ("ibv_query_qp", near.queue_pair.state),
            ("ibv_post_send", lambda: near.queue_pair.post(batch(near, far, Opcode.WRITE))),
        ]
        for name, call in calls:
            with refused(name, errno.EBADF):
                call()
        far.close()

    def test_another_providers_object_is_refused(self, world: World) -> None:
        with FakeFabric() as fabric:
            stranger = FakeProvider(fabric, [FakeNic("other")]).open("other")
            strange = stranger.completion_queue(4)
            near = End(world.provider, world.near)
            if type(strange) is not type(near.completions):
                with refused("ibv_create_qp", errno.EINVAL):
                    near.domain.queue_pair(strange, 4)
            near.close()
            stranger.close()

    def test_what_nobody_holds_is_not_collected(self, world: World) -> None:
        """P064: the collector could free a domain before its regions; it gets nothing that is open."""
        with pair(world.provider, world.near, world.far) as (near, far):
            near.bytes[:] = 1
            live = world.provider.num_live()
            work = batch(near, far, Opcode.WRITE)
            number = far.queue_pair.number
            del far.queue_pair, far.region, far.domain, far.completions
            gc.collect()
            assert world.provider.num_live() == live
            near.queue_pair.post(work)
            assert [c.status for c in wait(near, 1)] == [SUCCESS], f"queue pair {number} still answers"
            assert far.bytes[:100].all()

    def test_two_threads_close_one_object(self, world: World) -> None:
        for _ in range(20):
            near = End(world.provider, world.near)
            threads = [threading.Thread(target=near.close) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()

    @pytest.mark.slow
    @pytest.mark.timeout(120)
    def test_a_thousand_connections_leave_nothing(self, world: World) -> None:
        """P067: descriptors, threads and objects are as many as before, whether ends close whole or piece by piece."""
        with pair(world.provider, world.near, world.far) as (near, far):
            near.queue_pair.post(batch(near, far, Opcode.WRITE))
            wait(near, 1)  # whatever is started once is there now
            fds, threads, live = num_fds(), threading.active_count(), world.provider.num_live()
            for round_number in range(1000):
                domain, completions = near.device.protection_domain(), near.device.completion_queue(8)
                region = domain.register(near.region.address, 8192, ALL)
                one, other = domain.queue_pair(completions, 4), domain.queue_pair(completions, 4)
                ends = ((one, other), (other, one))
                for mine, _ in ends:
                    mine.initialize(1, ALL)
                for mine, its in ends:
                    peer = near.peer()._replace(number=its.number, packet_number=its.packet_number)
                    mine.connect(near.path(), peer)
                work = batch(near, far, Opcode.WRITE, 2)
                work.lkeys[:], work.rkeys[:], work.remote[:] = region.lkey, region.rkey, near.region.address + 4096
                one.post(work)
                if round_number % 3 == 0:
                    one.close()
                    other.close()
                if round_number % 2 == 0:
                    completions.close()
                domain.close()
                completions.close()
            assert (num_fds(), threading.active_count(), world.provider.num_live()) == (fds, threads, live)
