"""Eager puts at the server: values whose bytes come right behind the PUT, and everything that can go wrong with them.

In every test, all pieces of every server have ended when it is over; see ``traffic``.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest

from memkv_vllm.errors import (
    ConnectError,
    ConnectionLost,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Get, GetItem, Ping, Put, PutItem
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store import transfers
from memkv_vllm.transports.faults import (
    Action,
    BitFlip,
    Delay,
    Die,
    Drop,
    Fail,
    FaultPlan,
    LateWrite,
    Operation,
    Short,
    Throttle,
)
from memkv_vllm.transports.loopback import LoopbackClientTransport
from memkv_vllm.transports.tcp import eagerlink
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, Kind
from memkv_vllm.transports.tcp.eager import MAX_EAGER_BYTES, MAX_EAGER_VALUES
from memkv_vllm.transports.tcp.mover import LOOP_BYTES, STEP_BYTES, DataConnection, Traffic
from memkv_vllm.types import Extent, Status
from tests.support.eager import (
    REGION_BYTES,
    TARGET,
    Running,
    Values,
    arena_of,
    ask,
    client_of,
    count,
    item,
    laid_out,
    reserved,
    store,
    store_and_client,
    until_quiet,
    watched_traffic,
)
from tests.support.harness import FACTORIES, MIB, connected, drive, serving, wait_until
from tests.support.scripted import KEY, fill, key_at, soon
from tests.support.store import LAYOUT, NAMESPACE, make_key
from tests.support.tcp_peer import DataPeer, HandMadeClient, hand_made_client

pytestmark = pytest.mark.anyio

UNWANTED = 0xFE
"""A byte that ``fill`` never writes."""
OTHER_NAMESPACE = b"O" * 32


@pytest.fixture(autouse=True)
def traffic() -> Iterator[list[Traffic]]:
    """What is under way on each server of the test; see ``watched_traffic``."""
    with watched_traffic() as made:
        yield made


@pytest.fixture
def eager_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client goes on with eager puts after one that was in vain: the next one shows that all is in step."""
    monkeypatch.setattr(eagerlink, "HOLD_OFF", 0)


# -- which puts are eager, and that they arrive


@pytest.mark.parametrize("gap", [0, 4099])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [4095],
        [65_537],
        [LOOP_BYTES],
        [LOOP_BYTES + 1],
        [3_000_001],
        [MAX_EAGER_BYTES],
        [3, 70_000, 1, 4096],
        [2 * MIB] * 4,
        [MAX_EAGER_BYTES - 1, 1],
        [1024 + index for index in range(MAX_EAGER_VALUES)],
        [MAX_EAGER_BYTES // MAX_EAGER_VALUES] * MAX_EAGER_VALUES,
    ],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}",
)
async def test_a_lone_small_put_is_eager_and_arrives(lengths: list[int], gap: int, traffic: list[Traffic]) -> None:
    async with store_and_client() as (running, client):
        for turn in range(2):
            first = 1000 * turn
            assert await client.put(first, laid_out(lengths, gap)) == [Status.OK] * len(lengths)
            assert count(running, "eager_puts") == turn + 1
            await client.check(first, lengths)
        assert count(running, "put_ok") == 2 * len(lengths)
        await until_quiet(traffic)


@pytest.mark.parametrize(
    "lengths", [[MAX_EAGER_BYTES + 1], [MAX_EAGER_BYTES, 1], [7] * (MAX_EAGER_VALUES + 1)], ids=["long", "both", "many"]
)
async def test_a_large_put_is_not_eager(lengths: list[int]) -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out(lengths)) == [Status.OK] * len(lengths)
        await client.check(0, lengths)
        assert count(running, "eager_puts") == 0
        await client.check_next(running, 2000)


async def test_of_puts_at_once_the_first_alone_is_eager() -> None:
    async with store_and_client() as (running, client):
        outcomes: list[list[Status]] = []

        async def put(number: int) -> None:
            outcomes.append(await client.put(10 * number, laid_out([70_000, 1], start=number * MIB)))

        for turn in range(1, 4):
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(put, 10 * turn + number)
            assert count(running, "eager_puts") == turn
        assert outcomes == [[Status.OK] * 2] * 12
        for turn in range(1, 4):
            for number in range(4):
                await client.check(10 * (10 * turn + number), [70_000, 1])


async def test_puts_beside_a_get_are_not_eager() -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, [Extent(1, 0, 30 * MIB)]) == [Status.OK]

        async def fetch() -> None:
            await client.connection.request(
                Get([GetItem(make_key(0), LAYOUT, Extent(1, TARGET, 30 * MIB))], 20_000), soon()
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await anyio.lowlevel.checkpoint()
            assert await client.put(1, laid_out([5000])) == [Status.OK]
            assert count(running, "eager_puts") == 0
        await client.check(1, [5000])
        await client.check_next(running, 10)


# -- values that the server does not want


LENGTHS = [70_001, 4096, 300_000]
PLACES = [(0,), (1,), (2,), (0, 2), (0, 1, 2)]


def _items(client: Values, kind: str, places: Sequence[int], extents: list[Extent]) -> list[PutItem]:
    """Of values 0, 1 and 2; those at ``places`` are such that the store does not want them."""
    items = []
    for place, extent in enumerate(extents):
        fill(client.memory, extent, place)
        if place not in places:
            items.append(item(place, extent))
            continue
        client.memory.view(extent.offset, extent.length)[:] = bytes([UNWANTED]) * extent.length
        items.append(item(place, extent, namespace=OTHER_NAMESPACE if kind == "denied" else NAMESPACE))
    return items


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("exists", Status.EXISTS),
        ("denied", Status.DENIED),
        ("empty", Status.BAD_LENGTH),
        ("too large", Status.TOO_LARGE),
        ("no space", Status.NO_SPACE),
    ],
)
async def test_unwanted_values_go_nowhere_and_the_others_arrive(
    kind: str, status: Status, places: tuple[int, ...], traffic: list[Traffic], eager_again: None
) -> None:
    lengths = list(LENGTHS)
    for place in places:
        lengths[place] = {"empty": 0, "too large": MIB + 1, "no space": 2 * MIB}.get(kind, lengths[place])
    async with store_and_client(16 * MIB, max_value_bytes=15 * MIB if kind == "no space" else MIB) as (running, client):
        if kind == "exists":
            for place in places:
                assert await client.put(place, laid_out([lengths[place]])) == [Status.OK]
        items = _items(client, kind, places, laid_out(lengths, gap=7))
        before = count(running, "eager_puts")
        async with hand_made_client(running.address) as holder, anyio.create_task_group() as tasks:
            if kind == "no space":
                held = Put([item(99, Extent(1, 0, 15 * MIB))], 0, 20_000)
                tasks.start_soon(ask, holder, held)
                await wait_until(lambda: running.server.statistics()["table"]["reserved"] == 1, "space is held")
            statuses = await client.connection.request(Put(items, 0, 20_000), soon())
            assert not (arena_of(running).array == UNWANTED).any()
            tasks.cancel_scope.cancel()
        assert statuses == [status if place in places else Status.OK for place in range(3)]
        assert count(running, "eager_puts") - before == (1 if sum(lengths) else 0), "0 bytes need no haste"
        for place in range(3):
            if kind == "exists" or place not in places:
                await client.check(place, [lengths[place]])
        await until_quiet(traffic)
        await client.check_next(running, 100)


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("wrong", [Extent(9, 0, 4096), Extent(1, REGION_BYTES - 8, 4096)], ids=["region", "offset"])
async def test_values_of_a_wrong_extent_go_nowhere(
    wrong: Extent, places: tuple[int, ...], traffic: list[Traffic]
) -> None:
    """A client of ours sends no bytes for them at all: it does not send such a put eagerly."""
    async with store_and_client(16 * MIB) as (running, reader), hand_made_client(running.address) as client:
        eager = await client.attach(eager=True)
        extents = laid_out(LENGTHS)
        values = [fill(reader.memory, extent, place) for place, extent in enumerate(extents)]
        for place in places:
            extents[place], values[place] = wrong, bytes([UNWANTED]) * wrong.length
        put = Put([item(place, extent) for place, extent in enumerate(extents)], 0, 20_000, eager=True)
        await eager.send_values(*values)
        assert await client.channel.request(put, soon()) == [
            Status.BAD_EXTENT if place in places else Status.OK for place in range(3)
        ]
        assert not (arena_of(running).array == UNWANTED).any()
        for place in set(range(3)).difference(places):
            await reader.check(place, [LENGTHS[place]])
        data = fill(reader.memory, Extent(1, 0, 70_000), 7)
        await eager.send_values(data)
        again = Put([item(7, Extent(1, 0, len(data)))], 0, 20_000, eager=True)
        assert await client.channel.request(again, soon()) == [Status.OK]
        await reader.check(7, [70_000])
        await until_quiet(traffic)


async def test_a_client_does_not_send_eagerly_what_is_not_in_its_regions() -> None:
    async with store_and_client() as (running, client):
        for extent in (Extent(9, 0, 4096), Extent(1, REGION_BYTES - 8, 4096)):
            answer = await client.connection.request(Put([item(1, extent)], 0, 20_000), soon())
            assert answer == [Status.BAD_EXTENT]
        assert count(running, "eager_puts") == 0
        await client.check_next(running, 10)


@pytest.mark.parametrize("seed", range(4))
async def test_a_long_series_keeps_in_step(seed: int, traffic: list[Traffic], eager_again: None) -> None:
    """Of wanted and unwanted values in any order, with evictions and other puts between them, and no checksum."""
    random = Random(seed)
    stored: dict[bytes, tuple[int, int]] = {}
    async with store_and_client(8 * MIB, max_value_bytes=300_000) as (running, client):
        for turn in range(150):
            seeds: list[int] = []
            items: list[PutItem] = []
            for extent in laid_out(
                random.choices([0, 1, 4096, 70_001, 300_000, 300_001], k=random.randint(1, 7)), gap=5
            ):
                seeds.append(random.randrange(251))
                fill(client.memory, extent, seeds[-1])
                namespace = random.choice([NAMESPACE] * 9 + [OTHER_NAMESPACE])
                items.append(item(random.randrange(60), extent, namespace=namespace))
            cut = random.choice([0] * 4 + [len(items) // 2])
            for part in (slice(0, cut), slice(cut, None)):
                statuses = await client.connection.request(Put(items[part], 0, 20_000), soon())
                for one, by, status in zip(items[part], seeds[part], statuses, strict=True):
                    assert status not in (Status.FAILED, Status.TIMEOUT, Status.BUSY)
                    if status is Status.OK:
                        stored[one.key] = (one.extent.length, by)
            for key in random.sample(sorted(stored), min(len(stored), 60 if turn % 30 == 29 else 2)):
                length, by = stored[key]
                target = Extent(1, TARGET, length)
                (result,) = await client.connection.request(Get([GetItem(key, LAYOUT, target)], 20_000), soon())
                assert result.status in (Status.OK, Status.ABSENT), "it may have been evicted"
                if result.status is Status.OK:
                    found = bytes(client.memory.view(TARGET, length))
                    assert found == fill(client.memory, target, by)
        assert count(running, "eager_puts") >= 140
        for status in (Status.OK, Status.EXISTS, Status.PENDING, Status.DENIED, Status.BAD_LENGTH, Status.TOO_LARGE):
            assert count(running, f"put_{status.name.lower()}"), f"none was {status.name}"
        await until_quiet(traffic)


async def test_a_put_without_a_turn_is_dropped(eager_again: None) -> None:
    async with store_and_client(max_transfers=1, max_transfers_per_session=1) as (running, client):

        def idle() -> int:
            return int(running.server.statistics()["bulk"]["idle"])

        async with hand_made_client(running.address) as dead, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, dead, Put([item(1000, Extent(1, 0, 8))], 0, 20_000))
            await wait_until(lambda: idle() == 0, "the only lane is taken")
            for turn in range(1, 3):
                assert await client.put(1, laid_out([70_000, 5]), timeout_ms=50) == [Status.BUSY] * 2
                assert count(running, "eager_puts") == count(running, "put_no_turn") == turn
            tasks.cancel_scope.cancel()
        await wait_until(lambda: idle() == 1, "the lane is free")
        assert await client.put(1, laid_out([70_000, 5])) == [Status.OK] * 2
        await client.check(1, [70_000, 5])
        await client.check_next(running, 10)


@pytest.mark.parametrize("in_time", [True, False])
async def test_bytes_of_a_put_without_a_turn_may_come_a_little_late(
    in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes them while it waits, so on a busy link most of them are still to come. A dead client is cut."""
    monkeypatch.setattr(transfers, "_FINISH_S", 0.0)
    monkeypatch.setattr(transfers, "_FINISH_SHARE", 100.0 if in_time else 0.5)
    async with store(max_transfers=1) as running, hand_made_client(running.address) as dead:
        async with hand_made_client(running.address) as late, anyio.create_task_group() as tasks:
            eager = await late.attach(eager=True)
            tasks.start_soon(ask, dead, Put([item(1000, Extent(1, 0, 8))], 0, 20_000))
            await wait_until(lambda: running.server.statistics()["bulk"]["idle"] == 0, "the only lane is taken")
            outcome: list[object] = []
            tasks.start_soon(ask, late, Put([item(1, Extent(1, 0, 5))], 0, 100, eager=True), outcome)
            await wait_until(lambda: count(running, "put_no_turn") == 1, "its time is over")
            if in_time:
                await eager.send_values(b"12345")
            await wait_until(lambda: bool(outcome), "the answer, or the end")
            assert count(running, "cut_eager") == (0 if in_time else 1)
            if in_time:
                assert outcome == [[Status.BUSY]]
            else:
                assert isinstance(outcome[0], ConnectionLost)
            tasks.cancel_scope.cancel()


async def test_a_put_with_an_unknown_checksum_is_dropped() -> None:
    """The server drops its bytes; the client, who cannot know that, sends no further put eagerly."""
    async with store_and_client() as (running, client):
        with pytest.raises(StoreError, match="algorithm 77"):
            await client.connection.request(Put([item(1, Extent(1, 0, 4096))], 77, 20_000), soon())
        assert count(running, "eager_puts") == count(running, "put_unknown_algorithm") == 1
        await client.check_next(running, 10, eager=False)


async def test_the_bytes_of_a_refused_put_are_taken_off() -> None:
    """Of a client that goes on with eager puts, which ours does not."""
    async with store_and_client(16 * MIB) as (running, reader), hand_made_client(running.address) as client:
        eager = await client.attach(eager=True)
        await eager.send_values(bytes([UNWANTED]) * 4096)
        with pytest.raises(StoreError, match="algorithm 77"):
            await client.channel.request(Put([item(1, Extent(1, 0, 4096))], 77, 5000, eager=True), soon())
        await eager.send_values(fill(reader.memory, Extent(1, 0, 4096), 2))
        assert await client.channel.request(_eager_put(4096, first=2), soon()) == [Status.OK]
        await reader.check(2, [4096])
        with pytest.raises(ConnectionLost):
            await client.channel.request(Put([item(1, Extent(1, 0, 4096))], 77, 100, eager=True), soon())
        assert count(running, "cut_eager") == 1, "they have not come"


# -- clients that stop or die


@pytest.mark.parametrize("sent", ["nothing", "half of the frame", "the frame", "half"])
async def test_bytes_that_do_not_come_time_out_and_never_land_later(sent: str, traffic: list[Traffic]) -> None:
    """P039, at the server: the extent has a new owner, whose bytes are safe from what was sent for the old one."""
    length = 2 * MIB
    async with store_and_client(16 * MIB) as (running, other), hand_made_client(running.address) as client:
        eager = await client.attach(eager=True)
        stream = eager.sealer.pack(Kind.SENT) + bytes([UNWANTED]) * length
        now = {"nothing": 0, "half of the frame": 20, "the frame": FIRST_BYTES}.get(sent, len(stream) // 2)
        await eager.send(stream[:now])
        put = Put([item(1, Extent(1, 0, length))], 0, 300, eager=True)
        assert await client.channel.request(put, soon()) == [Status.TIMEOUT]
        assert (reserved(running), traffic[0].num_pieces) == (0, 0)
        # The whole arena gets new values, so the old extent does as well.
        for block in range(10, 18):
            assert await other.put(block, laid_out([length])) == [Status.OK]
        arena = arena_of(running).array.copy()
        assert not (arena == UNWANTED).all()
        with pytest.raises(OSError):
            for start in range(now, len(stream), MIB):
                await eager.send(stream[start : start + MIB])
                await anyio.sleep(0.02)
            await eager.send(b"x")
        assert await client.data[0].closed(), "fenced: its data connections are gone"
        assert (arena_of(running).array == arena).all()
        await other.check_next(running, 100)


@pytest.mark.parametrize("whole", [True, False], ids=["client", "connection"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "dropped"])
async def test_a_client_that_dies_in_the_middle_leaves_nothing(
    wanted: bool, reset: bool, whole: bool, traffic: list[Traffic]
) -> None:
    async with store_and_client(16 * MIB) as (running, other), hand_made_client(running.address) as client:
        if not wanted:
            assert await other.put(1, laid_out([2 * MIB])) == [Status.OK]
        eager = await client.attach(eager=True)
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, Put([item(1, Extent(1, 0, 2 * MIB))], 0, 20_000, True), outcome)
            await eager.send((eager.sealer.pack(Kind.SENT) + bytes([UNWANTED]) * 2 * MIB)[:MIB])
            await wait_until(lambda: traffic[0].num_pieces, "bytes are on their way")
            for peer in client.data if whole else [eager]:
                peer.die(reset=reset)
            if whole:
                client.channel._stream.close()
            await wait_until(lambda: client.ended, "the session is cut")
        assert isinstance(outcome[0], ConnectionLost) or (not wanted and outcome[0] == [Status.EXISTS])
        await wait_until(lambda: running.server.statistics()["server"]["sessions"] == 1, "the session has ended")
        assert reserved(running) == 0
        assert sum(count(running, name) for name in ("cut_data_lost", "cut_lost", "data_closed")) >= 1
        await until_quiet(traffic)
        assert count(running, "internal_error") == count(running, "bulk_error") == 0
        await other.check_next(running, 10)
        if not wanted:
            await other.check(1, [2 * MIB])


# -- hostile clients


@asynccontextmanager
async def hostile(traffic: list[Traffic], *, eager: bool = True) -> AsyncIterator[tuple[Running, HandMadeClient]]:
    """A client that holds a key, beside another one that must not notice anything."""
    async with store_and_client(32 * MIB) as (running, bystander):
        await bystander.put(500, laid_out([5000]))
        async with hand_made_client(running.address) as client:
            if eager:
                await client.attach(eager=True)
            yield running, client
            await wait_until(lambda: client.ended, "the session is cut")
            assert [await peer.closed() for peer in client.data] == [True] * len(client.data)
        await wait_until(lambda: running.server.statistics()["server"]["sessions"] == 1, "the session has ended")
        assert reserved(running) == count(running, "internal_error") == count(running, "bulk_error") == 0
        assert running.server.statistics()["bulk"]["idle"] == 32
        await until_quiet(traffic)
        await bystander.check(500, [5000])
        await bystander.check_next(running, 600)


def _eager_put(*lengths: int, first: int = 0, timeout_ms: int = 20_000) -> Put:
    return Put([item(first + at, extent) for at, extent in enumerate(laid_out(lengths))], 0, timeout_ms, eager=True)


async def test_unwanted_bytes_that_do_not_come_cut_the_session_by_the_deadline(traffic: list[Traffic]) -> None:
    """Else one put after the other could wait for its bytes, for as long and in as great a number as a client likes."""
    async with hostile(traffic) as (running, client):
        with pytest.raises(ConnectionLost):
            await client.channel.request(_eager_put(5000, first=500, timeout_ms=100), soon())
        assert count(running, "cut_eager") == 1


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)], ids=str)
async def test_a_put_that_is_refused_by_its_extents_waits_for_its_bytes_too(
    places: tuple[int, ...], traffic: list[Traffic]
) -> None:
    """They must not become the next put's: no answer comes before them, and at the deadline the session ends."""
    extents = [Extent(9, 0, 4096) if place in places else Extent(1, 0, 4096) for place in range(2)]
    put = Put([item(place, extent) for place, extent in enumerate(extents)], 0, 100, eager=True)
    async with hostile(traffic) as (running, client):
        outcome: list[object] = []
        await ask(client, put, outcome)
        if len(places) == 2:
            assert isinstance(outcome[0], ConnectionLost)
        else:
            # Fenced by the store; a fenced session moves nothing any more.
            with pytest.raises(ConnectionLost):
                await client.channel.request(_eager_put(4096, first=7), soon())
        assert running.server.statistics()["table"]["complete"] == 1, "the bystander's"


async def test_the_bytes_of_another_put_are_not_taken(traffic: list[Traffic]) -> None:
    """The last line of defence, were the ends ever out of step: each SENT has the number of its put."""
    async with hostile(traffic) as (running, client):
        (bulk,) = [bulk for _, bulk in running.transport._attachable._live.values() if bulk.num_connections == 2]
        await client.data[1].send_values(bytes(4096))
        assert await client.channel.request(_eager_put(4096), soon()) == [Status.OK]
        bulk._num_expected += 1
        await client.data[1].send_values(bytes([UNWANTED]) * 4096)
        with pytest.raises(ConnectionLost):
            await client.channel.request(_eager_put(4096, first=1), soon())
        assert count(running, "cut_data_sequence") == 1


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([4096], "without a connection for it"),
        ([MAX_EAGER_BYTES + 1], f"of 1 values, {MAX_EAGER_BYTES + 1} bytes"),
        ([MAX_EAGER_BYTES, 1], f"of 2 values, {MAX_EAGER_BYTES + 1} bytes"),
        ([1] * (MAX_EAGER_VALUES + 1), f"of {MAX_EAGER_VALUES + 1} values"),
        ([0], "of 1 values, 0 bytes"),
        ([], "of 0 values, 0 bytes"),
        ([1 << 62] * 3, "of 3 values"),
    ],
    ids=["no connection", "large", "large together", "many", "no bytes", "no values", "overflow"],
)
async def test_an_eager_put_that_may_not_be_one_cuts_its_session(
    lengths: list[int], why: str, traffic: list[Traffic], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with hostile(traffic, eager="without" not in why) as (running, client):
        with pytest.raises(ConnectionLost):
            await client.channel.request(_eager_put(*lengths), soon())
        await wait_until(lambda: count(running, "cut_eager"), "it is counted")
    assert f"an eager put {why}" in caplog.text or f"a session {why}" in caplog.text
    assert count(running, "cut_eager") == 1


async def test_two_eager_puts_at_once_cut_their_session(traffic: list[Traffic]) -> None:
    async with hostile(traffic) as (running, client):
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            for block in range(2):
                tasks.start_soon(ask, client, _eager_put(4096, first=block), outcome)
        assert [type(one) for one in outcome] == [ConnectionLost] * 2
        assert count(running, "cut_eager") == 1


async def test_an_eager_put_over_loopback_cuts_its_session() -> None:
    """Its client makes none; where the server reads memory by itself there is nothing to wait for."""
    async with store(loopback=True) as running:
        connection = await LoopbackClientTransport().connect(
            *running.address, Credentials(KEY), PeerKind.ENGINE, soon()
        )
        ended: list[BaseException | None] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, ended)
            with pytest.raises(ConnectionLost):
                await connection.request(_eager_put(4096), soon())
            await wait_until(lambda: ended, "the session is cut")
            await connection.aclose()
        assert count(running, "cut_eager") == 1
        assert count(running, "internal_error") == 0


async def test_a_session_that_may_choose_its_data_path_has_eager_puts_until_it_chooses_another() -> None:
    factory = FACTORIES["verbs-fake"]
    async with serving(factory) as server:
        async with hand_made_client(server.address) as client:
            eager = await client.attach(eager=True)
            await eager.send_values(b"x" * 5000)
            assert await client.put(Extent(1, 0, 5000), eager=True) == [Status.OK]
            assert bytes(server.arena.view(0, 5000)) == b"x" * 5000
        async with connected(factory, server.address) as other:
            with pytest.raises(ConnectionLost):
                await other.connection.request(Put([PutItem(key_at(0), 0, 0, Extent(1, 0, 8))], 0, 5000, True), soon())
        await wait_until(lambda: server.handler.counts["cut_eager"], "it is counted")
        assert server.handler.counts["internal_error"] == 0


async def test_a_session_has_one_eager_connection() -> None:
    async with store() as running, hand_made_client(running.address) as client:
        eager = await client.attach(eager=True)
        with pytest.raises(ConnectError, match="one eager connection per session"):
            await client.attach(eager=True)
        assert count(running, "refused_attach") == 1
        await eager.send_values(bytes(4096))
        assert await client.channel.request(_eager_put(4096), soon()) == [Status.OK]


def _spoilt(eager: DataPeer, how: str) -> bytes:
    frame = bytearray(eager.sealer.pack(Kind.WRITTEN if how == "type" else Kind.SENT))
    if how == "magic":
        frame[0] ^= 1
    elif how == "mac":
        frame[-1] ^= 1
    elif how == "sequence":
        frame = bytearray(eager.sealer.pack(Kind.SENT))
    elif how == "length":
        frame = bytearray(eager.sealer.pack(Kind.SENT, [Extent(1, 0, 8)] * 2))
        frame[8:16] = bytes(8)
    elif how == "surplus":
        frame = bytearray(b"x") + frame
    return bytes(frame)


@pytest.mark.parametrize("first", [True, False], ids=["bytes first", "put first"])
@pytest.mark.parametrize("wanted", [True, False], ids=["wanted", "dropped"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("magic", "magic"),
        ("mac", "mac"),
        ("sequence", "sequence"),
        ("type", "type"),
        ("length", "length"),
        ("surplus", "magic"),
    ],
)
async def test_a_bad_frame_before_the_bytes_cuts_the_session(
    how: str, reason: str, wanted: bool, first: bool, traffic: list[Traffic]
) -> None:
    """P091, P092: of bytes that are dropped, too."""
    async with hostile(traffic) as (running, client):
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            if first:
                await client.data[1].send(_spoilt(client.data[1], how) + bytes([UNWANTED]) * 5000)
            tasks.start_soon(ask, client, _eager_put(5000, first=1 if wanted else 500), outcome)
            if not first:
                await wait_until(lambda: count(running, "eager_puts") == 2, "the put is expected")
                await client.data[1].send(_spoilt(client.data[1], how) + bytes([UNWANTED]) * 5000)
        await wait_until(lambda: client.ended, "the session is cut")
        assert count(running, f"cut_data_{reason}") == 1
        assert outcome != [[Status.OK]]
        # What came in one call with the frame may lie in an extent that nobody sees and that is free again.
        assert running.server.statistics()["table"]["complete"] == 1, "the bystander's"


async def test_surplus_bytes_are_no_part_of_the_next_value(traffic: list[Traffic]) -> None:
    async with hostile(traffic) as (running, client):
        eager = client.data[1]
        await eager.send_values(bytes(4096), b"surplus of a put" * 10)
        assert await client.channel.request(_eager_put(4096), soon()) == [Status.OK]
        await client.channel.request(Ping(), soon())
        await eager.send_values(bytes([UNWANTED]) * 5000)
        with pytest.raises(ConnectionLost):
            await client.channel.request(_eager_put(5000, first=1), soon())
        assert count(running, "cut_data_magic") == 1
        assert running.server.statistics()["table"]["complete"] == 2


async def test_bytes_before_any_put_wait(traffic: list[Traffic]) -> None:
    """As the rest of a put that was answered early does: they are nobody's until a PUT comes."""
    async with store_and_client(16 * MIB) as (running, reader), hand_made_client(running.address) as client:
        eager = await client.attach(eager=True)
        data = fill(reader.memory, Extent(1, 0, 70_000), 0)
        await eager.send_values(data)
        for _ in range(3):
            await client.channel.request(Ping(), soon())
            await anyio.sleep(0.02)
        assert not client.ended
        assert not traffic[0].num_pieces
        assert await client.channel.request(_eager_put(70_000), soon()) == [Status.OK]
        await reader.check(0, [70_000])


async def test_bytes_of_one_put_come_in_any_portions(traffic: list[Traffic]) -> None:
    async with store_and_client(16 * MIB) as (running, reader), hand_made_client(running.address) as client:
        eager = await client.attach(eager=True)
        lengths = [30_000, 1, 70_000]
        values = [fill(reader.memory, extent, place) for place, extent in enumerate(laid_out(lengths))]
        await reader.put(1, laid_out([1]))
        stream = eager.sealer.pack(Kind.SENT) + b"".join(values)
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, _eager_put(*lengths), outcome)
            for start in [*range(0, 80, 7), *range(84, len(stream), 13_001)]:
                end = start + 7 if start < 84 else start + 13_001
                await eager.send(stream[start:end])
                await anyio.sleep(0.002)
        assert outcome == [[Status.OK, Status.EXISTS, Status.OK]]
        for place in range(3):
            await reader.check(place, [lengths[place]])
        await until_quiet(traffic)


# -- faults


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(
    ("action", "status"),
    [
        (Short(100), Status.BAD_CHECKSUM),
        (BitFlip(1000, 3), Status.BAD_CHECKSUM),
        (Fail(Status.FAILED), Status.FAILED),
        (Delay(0.05), Status.OK),
        (Throttle(10e6), Status.OK),
        (Drop(), Status.TIMEOUT),
        (LateWrite(0.05, Status.TIMEOUT), Status.TIMEOUT),
        (Die(), None),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Status) else value.name,
)
async def test_what_strikes_one_value_of_an_eager_put(
    action: Action, status: Status | None, nth: int, traffic: list[Traffic]
) -> None:
    """As in a put of another kind: tests of the rest of the system rely on it."""
    plan = FaultPlan()
    async with store_and_client(faults=plan) as (running, client):
        rule = plan.add(Operation.PULL, action, nth=nth)
        outcome: object = None
        try:
            outcome = await client.put(0, laid_out(LENGTHS, gap=9), timeout_ms=500)
        except ConnectionLost:
            assert status is None
        assert (rule.fired, count(running, "eager_puts")) == (1, 1)
        plan.clear()
        if status is not None:
            assert outcome == [status if place == nth - 1 else Status.OK for place in range(3)]
        await until_quiet(traffic)
        if status is Status.TIMEOUT or status is None:
            async with client_of(running) as another:
                await another.check_next(running, 10)
            return
        for place in range(3):
            if outcome == [Status.OK] * 3 or place != nth - 1:
                await client.check(place, [LENGTHS[place]])
        await client.check_next(running, 10)


# -- who moves the bytes


class Movings:
    """In which threads bytes of pieces of one length are moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
        self._threads: list[str] = []
        for operation, name in ((Operation.PULL, "_receive"), (Operation.PUSH, "_send")):
            original = getattr(DataConnection, name)

            def watched(connection: DataConnection, operation: Operation = operation, original: Any = original) -> None:
                work = connection._work
                if work is not None and work.piece.num_bytes == num_bytes and work.transfer.operation is operation:
                    self._threads.append(threading.current_thread().name)
                original(connection)

            monkeypatch.setattr(DataConnection, name, watched)

    @property
    def calls(self) -> int:
        """How many there were since the last call of ``threads``."""
        return len(self._threads)

    def threads(self) -> set[str]:
        """Since the last call, without their numbers."""
        names = {name.rstrip("0123456789") for name in self._threads}
        self._threads.clear()
        return names


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "asked for"])
async def test_a_long_piece_alone_is_moved_by_the_loop_and_beside_another_by_a_mover(
    is_eager: bool, traffic: list[Traffic], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 6 * MIB
    movings = Movings(monkeypatch, length)
    async with store_and_client() as (running, client), hand_made_client(running.address) as other:
        if not is_eager:
            client.connection._links.eager = None  # type: ignore[attr-defined]
        assert await client.put(1, laid_out([length])) == [Status.OK]
        assert movings.calls >= length // STEP_BYTES, "the loop does other things in between"
        assert movings.threads() == {"MainThread"}
        await client.check(1, [length])
        assert movings.calls >= length // STEP_BYTES
        assert movings.threads() == {"MainThread"}
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, other, Put([item(50, Extent(1, 0, 4096))], 0, 20_000), outcome)
            await other.data[0].command()
            assert traffic[0].num_pieces == 1
            assert await client.put(2, laid_out([length])) == [Status.OK]
            assert movings.threads() == {"memkv-mover-"}
            await client.check(2, [length])
            assert movings.threads() == {"memkv-mover-"}
            await other.data[0].send_values(fill(client.memory, Extent(1, 0, 4096), 50))
        assert outcome == [[Status.OK]]
        await client.check(50, [4096])
        await until_quiet(traffic)
        assert await client.put(3, laid_out([length])) == [Status.OK]
        assert movings.threads() == {"MainThread"}, "and again when it is over"
        assert count(running, "eager_puts") == (3 if is_eager else 0)


async def test_a_short_piece_is_moved_by_the_loop_beside_others_too(
    traffic: list[Traffic], monkeypatch: pytest.MonkeyPatch
) -> None:
    movings = Movings(monkeypatch, LOOP_BYTES)
    async with store_and_client() as (running, client), hand_made_client(running.address) as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, other, Put([item(50, Extent(1, 0, 4096))], 0, 20_000))
            await other.data[0].command()
            assert await client.put(2, laid_out([LOOP_BYTES])) == [Status.OK]
            await client.check(2, [LOOP_BYTES])
            assert movings.threads() == {"MainThread"}
            await other.data[0].send_values(bytes(4096))
