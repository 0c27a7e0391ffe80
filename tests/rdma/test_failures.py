"""What fails between a client and a server over verbs: what each end makes of it, and that all is well afterwards.

Over a cable that is cut, made lossy or too narrow, with ends that are killed or lie. After each failure nothing is left
on the server (sessions, reservations, pins, extents), and the next connection works.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.config import load_client_config
from memkv_vllm.engine.api import EngineStatistics
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import ConnectionLost, DataPathError, RequestTimeout, Scope
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.types import LossReason, MemoryKind, Status
from tests.support.actors import ROOT
from tests.support.cable import A, B, Cable, End
from tests.support.cable_store import CableStore, ClientFactory, ValueClient, cable_store
from tests.support.harness import drive
from tests.support.ranks import Rank, eventually, rank, staging_plan
from tests.support.scripted import soon

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(120)]

MIB = 1 << 20
REUSED = 0xFF
NUMBERS = range(16)
OK = [Status.OK] * len(NUMBERS)
DELAY_S = 0.25
"""Of the cable, where something is to happen amid a transfer: 16 MiB then take some 4 s."""


async def works(store: CableStore, numbers: range = NUMBERS) -> None:
    """A new connection puts and gets."""
    async with store.client() as again:
        statuses = await again.put(numbers)
        assert set(statuses) <= {Status.OK, Status.EXISTS}
        await again.fetch_right(numbers)


async def break_amid_get(store: CableStore, cable: Cable, one: ValueClient, broken: Any) -> BaseException | None:
    """Call ``broken`` in the middle of a get of all values; what the get raised."""
    assert await one.put(NUMBERS) == OK
    one.bytes[:] = 0
    cable.shape(A, delay_s=DELAY_S)

    async def breaks() -> None:
        await one.first_byte()
        broken()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(breaks)
        try:
            await one.get(NUMBERS, deadline_s=8)
        except (ConnectionLost, RequestTimeout) as error:
            return error
    return None


# ------------------------------------------------------------------------------------------------------ one end dies


@pytest.mark.anyio
async def test_a_server_that_is_killed_amid_a_get(tmp_path: Path, cable: Cable) -> None:
    """The control connection's end tells; what it had posted is on the cable, and the fence keeps it out."""
    with cable_store(tmp_path) as store:
        async with store.client() as one:
            error = await break_amid_get(store, cable, one, store.actor.kill)
            assert isinstance(error, ConnectionLost)
            assert (error.scope, error.retryable, error.reason) == (Scope.CONNECTION, True, LossReason.BREAKER)
            assert not one.client.connection.alive
            await one.client.connection.fence(soon(5))
            one.bytes[:] = REUSED
            assert await one.foreign(REUSED, 1.0) == 0
        cable.repair()
        store.actor.start()
        store.actor.wait_ready()
        await works(store)


@contextmanager
def putter(store: CableStore) -> Iterator[subprocess.Popen[str]]:
    """A client process in the middle of a put over a slow cable."""
    command = [sys.executable, "-m", "tests.support.cable_putter", str(store.folder / "key"), str(store.port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "putting\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.anyio
async def test_a_client_that_is_killed_amid_a_put(tmp_path: Path, cable: Cable) -> None:
    """P036, P064, M06: its reservations and extents are free again, once nothing of it can land any more.

    Where the cable is cut before, no end of the control connection is seen: the server's READs run out of retries.
    """
    with cable_store(tmp_path) as store:
        for silent in (False, True):
            cable.shape(B)
            with putter(store) as process:
                cable.shape(B, delay_s=DELAY_S)
                await store.wait(lambda now: now["table"]["reserved"] > 0, "a put is under way")
                if silent:
                    cable.shape(B, loss=1.0)
                process.kill()
                process.wait()
                if silent:
                    await store.wait_counted("rdma_retries")
                await store.wait_rest()
        cable.repair()
        await works(store, range(1_000_000, 1_000_016))


# ------------------------------------------------------------------------------------------------------ wrong keys


@pytest.mark.anyio
async def test_memory_that_the_client_has_taken_back(tmp_path: Path, cable: Cable) -> None:
    """REM_ACCESS_ERR: the session is cut, counted apart, and answers nothing that could be taken for success."""
    with cable_store(tmp_path) as store:
        await works(store)
        for times, put in enumerate((False, True), start=1):
            async with store.client() as one:
                _end_of(one)._regions[0].close()
                with pytest.raises(ConnectionLost):
                    await (one.put(range(20, 36)) if put else one.get(NUMBERS))
            await store.wait_counted("rdma_remote_access", times)
        await store.wait_rest(len(NUMBERS))
        await works(store)


def _end_of(one: ValueClient) -> PassiveEnd:
    connection: Any = one.client.connection
    end: PassiveEnd = connection._end
    return end


@pytest.mark.anyio
async def test_a_region_offered_with_a_wrong_key(tmp_path: Path, cable: Cable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe finds it before anything depends on it, and the message says what the NIC said."""
    true = PassiveEnd.register

    def lie(self: PassiveEnd, region: Any) -> Any:
        token = true(self, region)
        return token._replace(rkey=token.rkey ^ 0x5A00)

    with cable_store(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr(PassiveEnd, "register", lie)
            with pytest.raises(DataPathError, match="probe failed.*REM_ACCESS_ERR") as caught:
                async with store.client():
                    pass
        assert caught.value.scope is Scope.SERVER
        await store.wait_counted("rdma_remote_access")
        await works(store)


# ------------------------------------------------------------------------------------------------------ the cable

LARGE_LOST = {
    A: "the server's WRITE to the client: packets of 4096 bytes from the server to the client do not arrive",
    B: "the server's READ of the client's memory: packets of 4096 bytes from the client to the server do not arrive",
}
"""What is said of large packets that leave an end and are lost."""


@pytest.mark.anyio
async def test_one_packet_in_a_hundred_is_lost(tmp_path: Path, cable: Cable) -> None:
    """Retransmission is the NIC's: everything arrives, and nobody is told."""
    with cable_store(tmp_path) as store:
        async with store.client() as one:
            for end in (A, B):
                cable.shape(end, loss=0.01)
            assert await one.put(NUMBERS) == OK
            await one.fetch_right(NUMBERS)
        counters = (await store.statistics())["counters"]
        assert not [name for name in counters if name.startswith("rdma_")]


@pytest.mark.anyio
async def test_completions_that_never_come(tmp_path: Path, cable: Cable) -> None:
    """P085: the NIC carries out everything and reports nothing; the server's own deadline ends it, and it fences."""
    module = ("tests.support.spoilt_verbs_server", "deaf")
    with cable_store(tmp_path, module=module) as store:
        async with store.past() as other:
            assert await other.put(NUMBERS) == OK
        async with store.client() as one:
            assert await one.get(NUMBERS, timeout_ms=1000) == [Status.TIMEOUT] * len(NUMBERS)
        async with store.client() as one:
            assert await one.put(range(20, 36), timeout_ms=1000) == [Status.TIMEOUT] * len(NUMBERS)
        await store.wait_rest(len(NUMBERS))
        counters = (await store.statistics())["counters"]
        assert (counters["get_given_up"], counters["put_given_up"]) == (len(NUMBERS), len(NUMBERS))
        assert counters["settled_after_fence"] == 2 * len(NUMBERS)


@pytest.mark.anyio
@pytest.mark.parametrize("sender", [A, B], ids=["from the server", "from the client"])
async def test_a_way_that_carries_only_small_packets(tmp_path: Path, cable: Cable, sender: End) -> None:
    """P070, P078: control works, and RDMA in the other direction: found when the region is registered, and named."""
    with cable_store(tmp_path) as store:
        cable.narrow(sender, 1500)
        start = time.monotonic()
        with pytest.raises(DataPathError) as caught:
            async with store.client():
                pass
        assert time.monotonic() - start < 20
        text = str(caught.value)
        assert "RDMA probe failed" in text and "MTU" in text and "4791" in text, text
        assert LARGE_LOST[sender] in text and LARGE_LOST[sender.other] not in text, text
        assert A.address in text and B.device in text, text
        await store.wait_counted("rdma_probe_failed")
        cable.repair()
        await works(store)


@pytest.mark.anyio
async def test_memory_that_is_offered_again_while_a_get_fills_it(tmp_path: Path, cable: Cable) -> None:
    """P041: a new connection with the same memory, as after a reconnect. Its probe READs there and WRITEs elsewhere."""
    with cable_store(tmp_path) as store:
        async with store.client() as one:
            assert await one.put(NUMBERS) == OK
            one.bytes[:] = REUSED
            cable.shape(A, delay_s=DELAY_S)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.get, NUMBERS)
                while one.count(REUSED) == one.bytes.size:  # noqa: ASYNC110 - the NIC tells nobody
                    await anyio.sleep(0.01)
                transport, credentials = ClientFactory().client(), Credentials(store.key)
                again = await transport.connect(A.address, store.port, credentials, PeerKind.ENGINE, soon(20))
                tasks.start_soon(drive, again, [])
                memory = one.client.memory
                await again.register(Region(1, MemoryKind.HOST, memory.length, memory), soon(20))
                assert one.count(REUSED), "the get has ended before the probe: nothing is shown"
                assert not one.count(0), "the probe wrote to it"
                await again.aclose()
            assert one.wrong(NUMBERS) == []


@pytest.mark.anyio
async def test_an_interface_with_a_smaller_mtu(tmp_path: Path, cable: Cable) -> None:
    """Whichever end has it, both agree on the smaller one, and everything arrives."""
    cable.set_mtu(A, 1500)
    with cable_store(tmp_path) as store:
        await works(store)
        cable.repair()
        cable.set_mtu(B, 1500)
        await works(store)


# ------------------------------------------------------------------------------------------------------ the engine


@contextmanager
def engine(store: CableStore, **environ: str) -> Iterator[Rank]:
    """A rank over the cable, with 16 slots and 32 blocks of 256 KiB."""
    environ = store.environ(**{"MEMKV_OP_TIMEOUT_S": "3", **environ})
    cluster = ClusterSettings.from_config(load_client_config(environ), "direct")
    with rank(cluster, plan=staging_plan(16, value=256 << 10), blocks=32, wait_timeout_s=10) as one:
        yield one.ready()


BLOCKS = range(32)


def loads_until(one: Rank, condition: Any, what: str, timeout_s: float = 20.0) -> EngineStatistics:
    """Load all blocks again and again, whatever comes of it, until ``condition`` is true of the result.

    Every job ends by its deadline, and no block that is reported as good is wrong.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        result = one.loaded(BLOCKS)
        assert one.wrong(result, BLOCKS) == []
        if condition(result):
            return one.statistics
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}; {one.statistics}")


def all_there(result: Any) -> bool:
    """Every block was a hit."""
    return not result.lost


def all_lost(result: Any) -> bool:
    """Not one was, and it was known at once: the breaker is open, or no connection is up."""
    return dict(result.lost) == {LossReason.BREAKER: len(BLOCKS)}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("end", [A, B], ids=["the server's", "the client's"])
def test_a_link_that_goes_down_and_up(tmp_path: Path, cable: Cable, end: End) -> None:
    """Amid loads, for 0.1 s and for good: misses meanwhile, hits again without help, and never a wrong byte."""
    with cable_store(tmp_path) as store, engine(store) as one:
        assert one.stored(BLOCKS).lost == {}
        loads_until(one, all_there, "hits")
        job = one.load(BLOCKS)
        cable.down(end)
        time.sleep(0.1)
        cable.up(end)
        assert one.wrong(one.result(job), BLOCKS) == []
        loads_until(one, all_there, "hits after a flap")

        job = one.load(BLOCKS)
        cable.down(end)
        assert one.wrong(one.result(job), BLOCKS) == []
        loads_until(one, all_lost, "misses at once while the link is down")
        cable.up(end)
        loads_until(one, all_there, "hits after the link came back")
        one.idle()


def test_a_network_that_swallows_everything(tmp_path: Path, cable: Cable) -> None:
    """P029: no link goes down and nobody says a word; retries run out, the breaker opens, and closes by itself."""
    with cable_store(tmp_path) as store, engine(store) as one:
        assert one.stored(BLOCKS).lost == {}
        for end in (A, B):
            cable.shape(end, loss=1.0)
        first = one.loaded(BLOCKS)
        assert sum(first.lost.values()) == len(BLOCKS) and one.wrong(first, BLOCKS) == []
        loads_until(one, all_lost, "misses at once")
        cable.repair()
        loads_until(one, all_there, "hits again")
        one.idle()
        assert one.statistics.fences > 0


@pytest.mark.timeout(240)
def test_a_server_that_is_restarted_five_times(tmp_path: Path, cable: Cable) -> None:
    """P027, P080: the engine comes back by itself each time, under a new generation, with new keys to its memory."""
    with cable_store(tmp_path) as store, engine(store) as one:
        for turn in range(1, 6):
            assert one.ready().stored(BLOCKS).lost == {}
            loads_until(one, all_there, f"hits, turn {turn}")
            job = one.load(BLOCKS)
            store.actor.kill()
            assert one.wrong(one.result(job), BLOCKS) == []
            loads_until(one, all_lost, "misses at once while it is down")
            store.actor.start()
            store.actor.wait_ready()
            eventually(partial(_reconnected, one, turn), "a new connection")
        one.ready().idle()
        assert one.statistics.reconnects == 5


def _reconnected(one: Rank, times: int) -> bool:
    return one.statistics.reconnects >= times
