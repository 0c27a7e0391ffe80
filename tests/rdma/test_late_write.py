"""A transfer that nobody waits for any more never writes into memory that has another use by now.

Over a cable, with many bytes under way while the process that sends them stands still: its kernel goes on sending, as
a NIC does. Each test of what a fence holds off has a control beside it, the same without the fence, in which the bytes
do arrive; where it fails, the test beside it shows nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from memkv_vllm.config import load_client_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import MemkvError, RequestTimeout
from memkv_vllm.transports.verbs.provider import Opcode
from memkv_vllm.transports.verbs.providers import load_provider
from memkv_vllm.types import LossReason, Status
from tests.support.cable import A, B, Cable
from tests.support.cable_store import CableStore, ValueClient, cable_store
from tests.support.ranks import Rank, eventually, prefix_of, rank, staging_plan
from tests.support.scripted import soon
from tests.support.verbs_end import MEMORY_BYTES, MIB, PeerProcess, VerbsEnd, peer_process

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(120)]

PROVIDERS = ("libibverbs", "pyverbs")
SENT, REUSED = 0xAA, 0x55
NUM_SENT, SENT_BYTES = 6, MIB
DELAY_S = 0.25
"""Of the cable. What soft-RoCE has under way at once is half a MiB, so 6 MiB take some 3 s."""
WATCH_S = 1.5
"""How long memory is watched. Without a fence the next bytes are there within ``DELAY_S``."""


def landed(end: VerbsEnd, value: int, watch_s: float, *, thaw: PeerProcess | None = None) -> int:
    """Bytes of ``value`` in ``end``'s memory, at once when there are some, else after ``watch_s``.

    ``thaw`` goes on in the middle of it.
    """
    start = time.monotonic()
    while time.monotonic() < start + watch_s and not end.count(value):
        if thaw is not None and time.monotonic() > start + watch_s / 2:
            thaw.thaw()
            thaw = None
        time.sleep(0.05)
    return end.count(value)


@contextmanager
def written_by_a_frozen_peer(provider: str, cable: Cable) -> Iterator[tuple[VerbsEnd, PeerProcess]]:
    """An end whose peer has posted WRITEs of ``SENT`` to it and stands still; most of them have not arrived."""
    end = VerbsEnd(load_provider(provider), B.device)
    with contextlib.closing(end), peer_process(provider, A.device, end) as peer:
        assert peer.ask("fill", SENT) == "filled"
        cable.shape(A, delay_s=DELAY_S)
        assert peer.ask("write", NUM_SENT, SENT_BYTES) == "posted"
        peer.freeze()
        assert end.count(SENT) < NUM_SENT * SENT_BYTES // 2, "most is under way"
        yield end, peer


# ---------------------------------------------------------------------------------------------------- the library


@pytest.mark.parametrize("provider", PROVIDERS)
def test_late_writes_never_reach_a_region_that_was_fenced(provider: str, cable: Cable) -> None:
    """P039, P041: queue pair destroyed, memory deregistered and registered anew; the sender goes on, and wakes up."""
    with written_by_a_frozen_peer(provider, cable) as (end, peer):
        old_key = end.region.rkey
        end.queue_pair.close()
        end.region.close()
        end.bytes[:] = REUSED
        again = VerbsEnd(load_provider(provider), B.device, end.buffer)
        with contextlib.closing(again):
            assert again.region.rkey != old_key
            assert landed(end, SENT, WATCH_S, thaw=peer) == 0
            assert end.count(REUSED) == MEMORY_BYTES


@pytest.mark.parametrize("provider", PROVIDERS)
def test_late_writes_reach_a_region_that_was_not_fenced(provider: str, cable: Cable) -> None:
    """The control: the same, and nothing was fenced."""
    with written_by_a_frozen_peer(provider, cable) as (end, _):
        end.bytes[:] = REUSED
        assert landed(end, SENT, WATCH_S) > 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_late_reads_never_reach_memory_whose_queue_pair_was_closed(provider: str, cable: Cable) -> None:
    """P039, the server's side of a put: its region stays registered, and closing the queue pair is the fence."""
    with reading_from_a_frozen_peer(provider, cable) as end:
        end.queue_pair.close()
        end.bytes[:] = REUSED
        assert landed(end, SENT, WATCH_S) == 0
        assert end.count(REUSED) == MEMORY_BYTES


@pytest.mark.parametrize("provider", PROVIDERS)
def test_late_reads_reach_memory_whose_queue_pair_is_open(provider: str, cable: Cable) -> None:
    """The control: the reader has only stopped to wait."""
    with reading_from_a_frozen_peer(provider, cable) as end:
        end.bytes[:] = REUSED
        assert landed(end, SENT, WATCH_S) > 0


@contextmanager
def reading_from_a_frozen_peer(provider: str, cable: Cable) -> Iterator[VerbsEnd]:
    """An end that has posted READs of its peer's ``SENT``; the peer stands still and most has not arrived."""
    end = VerbsEnd(load_provider(provider), A.device)
    with contextlib.closing(end), peer_process(provider, B.device, end) as peer:
        assert peer.ask("fill", SENT) == "filled"
        cable.shape(B, delay_s=DELAY_S)
        peer.freeze()
        end.post(Opcode.READ, NUM_SENT, SENT_BYTES)
        assert end.count(SENT) < NUM_SENT * SENT_BYTES // 2, "most is under way"
        yield end


# ------------------------------------------------------------------------------------------------- client and server


NUMBERS = range(16)
"""Values of a get: 16 MiB, of which a MiB or two are on the cable at once."""


@contextlib.asynccontextmanager
async def given_up_get(store: CableStore, cable: Cable) -> AsyncIterator[ValueClient]:
    """A client whose get of all values has missed its deadline: they are on their way, and the server stands still."""
    async with store.client(slots=len(NUMBERS)) as one:
        assert await one.put(NUMBERS) == [Status.OK] * len(NUMBERS)
        one.bytes[:] = 0
        cable.shape(A, delay_s=DELAY_S)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(freeze_at_first_byte, store, one)
            with pytest.raises(RequestTimeout):
                await one.get(NUMBERS, deadline_s=1.0)
        assert store.actor.frozen, "bytes arrive, so the server has posted"
        assert one.count(0) > one.bytes.size // 2, "most is under way"
        yield one


async def freeze_at_first_byte(store: CableStore, one: ValueClient) -> None:
    """Stop the server as soon as something of its work requests has arrived."""
    await one.first_byte()
    store.actor.freeze()


@pytest.mark.anyio
async def test_a_get_past_its_deadline_never_writes_into_fenced_memory(tmp_path: Path, cable: Cable) -> None:
    """P039, P041: the fence asks nobody; the server wakes up later, finds its session gone, and serves the next one."""
    with cable_store(tmp_path) as store:
        async with given_up_get(store, cable) as one:
            start = time.monotonic()
            await one.client.connection.fence(soon(5))
            assert time.monotonic() - start < 2, "no answer of the server is needed, which is frozen"
            one.bytes[:] = REUSED
            assert await one.foreign(REUSED, WATCH_S) == 0
            store.actor.thaw()
            assert await one.foreign(REUSED, WATCH_S) == 0
            cable.repair()
        await store.wait_rest(len(NUMBERS))
        async with store.client(slots=len(NUMBERS)) as again:
            await again.fetch_right(NUMBERS)


@pytest.mark.anyio
async def test_a_get_past_its_deadline_writes_into_memory_that_is_not_fenced(tmp_path: Path, cable: Cable) -> None:
    """The control: the deadline alone ends nothing."""
    with cable_store(tmp_path) as store:
        async with given_up_get(store, cable) as one:
            one.bytes[:] = REUSED
            assert await one.foreign(REUSED, WATCH_S) > 0


OLD, NEW = range(14), range(100, 114)
"""Values of a put that the server gives up, and of those that get its extents: the arena has room for 16."""
LIMITS = {"put_slice_values": len(OLD)}
"""All of them are under way at once."""


async def reuse_extents_of_a_late_pull(folder: Path, cable: Cable, server: str) -> int:
    """Give the extents of a put that was given up to others, then let its bytes come; how often one was not whole.

    What the server asks of the client's memory is lost on the cable for as long as it takes, and its NIC asks again.
    """
    module = ("tests.support.spoilt_verbs_server", server)
    with cable_store(folder, max_size=16 * MIB, limits=LIMITS, module=module) as store:
        async with store.client() as one, store.past() as other, anyio.create_task_group() as tasks:
            cable.shape(A, loss=1.0)
            tasks.start_soon(put_in_vain, one)
            await store.wait_counted("settled_after_fence", len(OLD))
            assert await other.put(NEW) == [Status.OK] * len(NEW)
            cable.shape(A)
            failures = await spoilt_values(other)
            tasks.cancel_scope.cancel()
        await store.wait_rest(len(NEW))
    return failures


async def put_in_vain(one: ValueClient) -> None:
    """A put whose deadline on the server is long before a byte of it can move."""
    with contextlib.suppress(MemkvError):
        assert set(await one.put(OLD, timeout_ms=200)) == {Status.TIMEOUT}


async def spoilt_values(other: ValueClient) -> int:
    """How often one of the new values is wrong: looked at again and again for as long as a NIC goes on asking."""
    failures, end = 0, time.monotonic() + 5
    while time.monotonic() < end and not failures:
        other.bytes[:] = 0
        assert await other.get(NEW) == [Status.OK] * len(NEW)
        failures += len(other.wrong(NEW))
    return failures


@pytest.mark.anyio
async def test_extents_of_a_put_given_up_are_reused_only_after_the_fence(tmp_path: Path, cable: Cable) -> None:
    """P039 the other way round: what a client's NIC answers late meets no other value in the arena."""
    assert await reuse_extents_of_a_late_pull(tmp_path, cable, "patient") == 0


@pytest.mark.anyio
async def test_a_server_that_does_not_fence_stores_wrong_bytes(tmp_path: Path, cable: Cable) -> None:
    """The control: its queue pairs live on, and what is late lands in values of others."""
    assert await reuse_extents_of_a_late_pull(tmp_path, cable, "unfenced") > 0


# ----------------------------------------------------------------------------------------------------- the engine


NEAR = ("10.77.0.1", "rxe0")
"""Address and device of a server that the cable does not lead to."""


@contextmanager
def two_servers(folder: Path, **environ: str) -> Iterator[tuple[CableStore, CableStore, Rank]]:
    """An engine with ``a`` over the cable and ``b`` on a rail of its own; 16 slots of 1 MiB, 20 blocks."""
    with cable_store(folder, name="a") as a:
        with cable_store(folder, name="b", key=a.key, port=9910, rdma={"devices": [NEAR[1]]}) as b:
            servers = f"a={A.address}:{a.port},b={NEAR[0]}:{b.port}"
            settings = a.environ(MEMKV_SERVERS=servers, MEMKV_RDMA_DEVICES=f"{B.device},{NEAR[1]}", **environ)
            cluster = ClusterSettings.from_config(load_client_config(settings), "direct")
            plan = staging_plan(16, value=MIB, lanes=2)
            with rank(cluster, plan=plan, blocks=20, wait_timeout_s=10) as one:
                one.ready(2).stored(range(20))
                yield a, b, one


@pytest.mark.timeout(180)
def test_slots_of_a_frozen_server_are_fenced_and_reused_under_its_bytes(tmp_path: Path, cable: Cable) -> None:
    """P039, P041, P046: quarantine, fence, reuse under a new generation, while the old one still sends."""
    with two_servers(tmp_path, MEMKV_OP_TIMEOUT_S="1") as (a, _, one):
        owner = one.engine._core.client.owner
        of_a = [number for number in range(20) if owner(prefix_of(number)).name == "a"]
        of_b = [number for number in range(20) if number not in of_a]
        assert len(of_a) > 4 and len(of_b) > 4
        generation = owner(prefix_of(of_a[0])).holder.generation
        cable.shape(A, delay_s=DELAY_S)
        job = one.load(of_a)
        eventually(lambda: one.statistics.inflight_requests > 0, "gets are under way")
        time.sleep(2 * DELAY_S)  # until they are posted, and the first packets cross the cable
        a.actor.freeze()
        lost = one.result(job)
        assert lost.lost[LossReason.TIMEOUT] > 0 and one.wrong(lost, of_a) == []
        eventually(lambda: one.statistics.fences > 0, "the fence needs nobody")
        eventually(lambda: one.statistics.slots_quarantined == 0, "slots come back")
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            loaded = one.loaded(of_b)
            assert (loaded.lost, one.wrong(loaded, of_b)) == ({}, []), "in slots that bytes of a are on their way to"
        a.actor.thaw()
        cable.repair()
        one.ready(2)
        assert owner(prefix_of(of_a[0])).holder.generation > generation
        loaded = one.loaded(of_a)
        assert (loaded.lost, one.wrong(loaded, of_a)) == ({}, []), "hits are back"
        one.idle()
