"""Eager gets: answers that come with the bytes, and everything that can go wrong with them, at both ends.

In every test, all pieces of every server have ended when it is over; see ``traffic``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import anyio
import anyio.lowlevel
import pytest

from memkv_vllm.errors import ConnectionLost, MemkvError, NotSent, RemoteProtocolError, RequestTimeout, StoreError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import Get, GetItem, GetResult, Ping, Put
from memkv_vllm.protocol.session import PeerKind
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
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandSealer, Kind
from memkv_vllm.transports.tcp.eager import MAX_EAGER_GET_BYTES, MAX_EAGER_VALUES
from memkv_vllm.transports.tcp.eagerlink import EagerLink
from memkv_vllm.transports.tcp.mover import EagerConnection, Traffic
from memkv_vllm.transports.tcp.pieces import first_bytes
from memkv_vllm.transports.tcp.queue import Work
from memkv_vllm.types import Extent, Status
from tests.support.eager import (
    REGION_BYTES,
    TARGET,
    Running,
    Values,
    ask,
    client_of,
    count,
    item,
    laid_out,
    store,
    store_and_client,
    until_quiet,
    watched_traffic,
)
from tests.support.harness import FACTORIES, MIB, TcpFactory, connected, drive, serving, wait_until
from tests.support.resources import held, num_mappings
from tests.support.scripted import KEY, ScriptedHandler, fill, key_at, soon
from tests.support.store import LAYOUT, make_key
from tests.support.tcp_peer import HandMadeClient, hand_made_client

pytestmark = pytest.mark.anyio

UNTOUCHED = 0xFE
"""A byte that ``fill`` never writes."""
OTHER_NAMESPACE = b"O" * 32


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the gets that were answered with their bytes, on every server of the test."""
    numbers: list[int] = []
    original = CommandSealer.pack_answer

    def noted(sealer: CommandSealer, number: int, answer: bytes) -> bytes:
        numbers.append(number)
        return original(sealer, number, answer)

    monkeypatch.setattr(CommandSealer, "pack_answer", noted)
    return numbers


@pytest.fixture(autouse=True)
def traffic() -> Iterator[list[Traffic]]:
    """What is under way on each server of the test; see ``watched_traffic``."""
    with watched_traffic() as made:
        yield made


def pins(running: Running) -> int:
    """Extents of the arena that somebody uses."""
    table = running.server.statistics()["table"]
    return int(table["pinned"]) + int(table["reserved"])


def get_of(extents: Sequence[Extent], first: int = 0, timeout_ms: int = 20_000) -> Get:
    """A GET of values ``first``, ``first`` + 1, ..."""
    return Get([GetItem(make_key(block), LAYOUT, extent) for block, extent in enumerate(extents, first)], timeout_ms)


async def fetch(
    client: Values, get: Get, wanted: Callable[[int], bool] = lambda _: True, *, untouched: bool = False
) -> list[Status]:
    """Get values of which ``put`` made the bytes, and look at every byte.

    Args:
        wanted: the places that have bytes.
        untouched: in other ones' memory nothing may stand; else it may be that of others.
    """
    client.memory.array[TARGET:] = UNTOUCHED
    expected = bytearray(client.memory.view(TARGET, REGION_BYTES - TARGET))
    results = await client.connection.request(get, soon())
    came = bytearray(client.memory.view(TARGET, REGION_BYTES - TARGET))
    for place, one in enumerate(get.items):
        span = slice(one.extent.offset - TARGET, one.extent.offset - TARGET + one.extent.length)
        if wanted(place):
            expected[span] = fill(client.memory, one.extent, int.from_bytes(one.key[33:65], "big"))
        elif not untouched and one.extent.region == 1 and span.stop <= len(expected):
            expected[span] = came[span] = bytes(one.extent.length)
    assert came == expected
    return [result.status for result in results]


async def fetch_next(running: Running, client: Values, first: int, *, eager: bool = True) -> None:
    """Further puts and gets are right, and gets are eager, or not."""
    before = count(running, "eager_gets")
    lengths = [70_001, 5, 4096]
    assert await client.put(first, laid_out(lengths, gap=3)) == [Status.OK] * 3
    for _ in range(2):
        assert await fetch(client, get_of(laid_out(lengths, gap=7, start=TARGET), first)) == [Status.OK] * 3
    assert count(running, "eager_gets") - before == (2 if eager else 0)


async def ask_get(client: HandMadeClient, get: Get, outcome: list[object]) -> None:
    """Note what a hand-made client is answered on its control connection."""
    with contextlib.suppress(MemkvError):
        outcome.append([result.status for result in await client.channel.request(get, soon(60))])


# -- which gets are eager, and that they arrive


@pytest.mark.parametrize("gap", [0, 4099])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [4095],
        [65_537],
        [MAX_EAGER_GET_BYTES],
        [3, 70_000, 1, 4096],
        [MAX_EAGER_GET_BYTES - 1, 1],
        [1024 + index for index in range(MAX_EAGER_VALUES)],
        [MAX_EAGER_GET_BYTES // MAX_EAGER_VALUES] * MAX_EAGER_VALUES,
    ],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}",
)
async def test_a_lone_small_get_is_eager_and_arrives(
    lengths: list[int], gap: int, traffic: list[Traffic], answers: list[int]
) -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out(lengths)) == [Status.OK] * len(lengths)
        for turn in range(2):
            assert await fetch(client, get_of(laid_out(lengths, gap, TARGET))) == [Status.OK] * len(lengths)
            assert count(running, "eager_gets") == turn + 1
            assert answers == [*range(turn + 1)]
        assert count(running, "get_ok") == 2 * len(lengths)
        assert pins(running) == 0
        await until_quiet(traffic)


@pytest.mark.parametrize(
    "lengths",
    [[MAX_EAGER_GET_BYTES + 1], [MAX_EAGER_GET_BYTES, 1], [7] * (MAX_EAGER_VALUES + 1)],
    ids=["long", "both", "many"],
)
async def test_a_large_get_is_not_eager(lengths: list[int]) -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out(lengths)) == [Status.OK] * len(lengths)
        assert await fetch(client, get_of(laid_out(lengths, start=TARGET))) == [Status.OK] * len(lengths)
        assert count(running, "eager_gets") == 0
        await fetch_next(running, client, 2000)


async def test_of_gets_at_once_the_first_alone_is_eager() -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([70_000] * 8)) == [Status.OK] * 8
        outcomes: list[list[Status]] = []

        async def get(number: int) -> None:
            extents = laid_out([70_000] * 2, start=TARGET + number * MIB)
            results = await client.connection.request(get_of(extents, 2 * number), soon())
            outcomes.append([result.status for result in results])

        for turn in range(1, 4):
            client.memory.array[TARGET:] = UNTOUCHED
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(get, number)
            assert count(running, "eager_gets") == turn
            for block in range(8):
                extent = Extent(1, TARGET + (block // 2) * MIB + (block % 2) * 70_000, 70_000)
                came = bytes(client.memory.view(extent.offset, extent.length))
                assert came == fill(client.memory, extent, block)
        assert outcomes == [[Status.OK] * 2] * 12


async def test_a_long_series_of_eager_puts_and_gets_keeps_in_step(traffic: list[Traffic], answers: list[int]) -> None:
    """Both use the one connection, each in its own direction."""
    async with store_and_client() as (running, client):
        for turn in range(60):
            lengths = [1 + 997 * (turn + place) % 80_000 for place in range(1 + turn % 5)]
            assert await client.put(10 * turn, laid_out(lengths)) == [Status.OK] * len(lengths)
            extents = laid_out(lengths, gap=turn % 3, start=TARGET)
            assert await fetch(client, get_of(extents, 10 * turn)) == [Status.OK] * len(lengths)
        assert count(running, "eager_puts") == count(running, "eager_gets") == 60
        assert answers == [*range(60)]
        await until_quiet(traffic)


# -- values that are not there, or not allowed


LENGTHS = [70_001, 4096, 300_000]
PLACES = [(0,), (1,), (2,), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("absent", Status.ABSENT),
        ("denied", Status.DENIED),
        ("layout", Status.BAD_LAYOUT),
        ("length", Status.BAD_LENGTH),
        ("region", Status.BAD_EXTENT),
        ("offset", Status.BAD_EXTENT),
    ],
)
async def test_what_is_not_to_be_had_has_no_bytes_and_the_others_arrive(
    kind: str, status: Status, places: tuple[int, ...], traffic: list[Traffic], answers: list[int]
) -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out(LENGTHS)) == [Status.OK] * 3
        items = list(get_of(laid_out(LENGTHS, gap=7, start=TARGET)).items)
        for place in places:
            key, layout, extent = items[place]
            items[place] = {
                "absent": GetItem(make_key(900 + place), layout, extent),
                "denied": GetItem(make_key(place, namespace=OTHER_NAMESPACE), layout, extent),
                "layout": GetItem(key, LAYOUT + 1, extent),
                "length": GetItem(key, layout, Extent(1, extent.offset, extent.length - 1)),
                "region": GetItem(key, layout, Extent(9, extent.offset, extent.length)),
                "offset": GetItem(key, layout, Extent(1, REGION_BYTES - 8, extent.length)),
            }[kind]
        statuses = await fetch(client, Get(items, 20_000), lambda place: place not in places)
        assert statuses == [status if place in places else Status.OK for place in range(3)]
        assert count(running, "eager_gets") == (0 if status is Status.BAD_EXTENT else 1), (
            "it says so to the server alone"
        )
        assert len(answers) == (0 if status is Status.BAD_EXTENT or len(places) == 3 else 1), "with some bytes"
        assert pins(running) == 0
        await until_quiet(traffic)
        await fetch_next(running, client, 100)


async def test_values_of_any_order_and_length_arrive_where_some_are_absent(answers: list[int]) -> None:
    """Also where the bytes of one have to be moved over the place of another."""
    random = Random(5)
    async with store_and_client() as (running, client):
        lengths = [random.choice([1, 52, 4096, 30_001]) for _ in range(40)]
        assert await client.put(0, laid_out(lengths)) == [Status.OK] * 40
        for _ in range(60):
            blocks = random.choices(range(40), k=random.randint(2, 12))
            absent = {place for place in range(len(blocks)) if random.random() < 0.3}
            extents = laid_out([lengths[block] for block in blocks], random.choice([0, 3]), TARGET)
            items = [
                GetItem(make_key(900 if place in absent else block), LAYOUT, extent)
                for place, (block, extent) in enumerate(zip(blocks, extents, strict=True))
            ]
            statuses = await fetch(client, Get(items, 20_000), lambda place, absent=absent: place not in absent)  # type: ignore[misc]
            assert statuses == [Status.ABSENT if place in absent else Status.OK for place in range(len(blocks))]
        assert len(answers) > 50
        assert count(running, "eager_gets") == 60


@pytest.mark.parametrize("absent", [0, 1, 2])
async def test_places_that_overlap_are_those_of_no_eager_get(absent: int, answers: list[int]) -> None:
    """Bytes of one might stand in the place of another."""
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([1000] * 3)) == [Status.OK] * 3
        places = [Extent(1, TARGET, 1000), Extent(1, TARGET, 1000), Extent(1, TARGET + 1000, 1000)]
        blocks = [1, 1, 2] if absent < 2 else [1, 1, 900]
        blocks[absent] = 900
        items = [GetItem(make_key(block), LAYOUT, place) for block, place in zip(blocks, places, strict=True)]
        results = await client.connection.request(Get(items, 20_000), soon())
        assert [result.status for result in results] == [
            Status.ABSENT if place == absent else Status.OK for place in range(3)
        ]
        assert bytes(client.memory.view(TARGET, 1000)) == fill(client.memory, Extent(1, 0, 1000), 1)
        if absent < 2:
            assert bytes(client.memory.view(TARGET + 1000, 1000)) == fill(client.memory, Extent(1, 0, 1000), 2)
        assert (answers, count(running, "eager_gets")) == ([], 0)


async def test_a_get_without_a_turn_brings_nothing() -> None:
    async with store_and_client(max_transfers=1, max_transfers_per_session=1) as (running, client):

        def idle() -> int:
            return int(running.server.statistics()["bulk"]["idle"])

        assert await client.put(1, laid_out([70_000, 5])) == [Status.OK] * 2
        async with hand_made_client(running.address) as dead, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, dead, Put([item(1000, Extent(1, 0, 8))], 0, 20_000))
            await wait_until(lambda: idle() == 0, "the only lane is taken")
            get = get_of(laid_out([70_000, 5], start=TARGET), 1, timeout_ms=50)
            for turn in range(1, 3):
                assert await fetch(client, get, lambda _: False, untouched=True) == [Status.BUSY] * 2
                assert count(running, "eager_gets") == count(running, "get_no_turn") == turn
            tasks.cancel_scope.cancel()
        await wait_until(lambda: idle() == 1, "the lane is free")
        await fetch_next(running, client, 10)


@pytest.mark.parametrize("places", PLACES, ids=str)
async def test_with_values_from_disk_a_get_is_answered_as_any_other(
    places: tuple[int, ...], tmp_path: Path, answers: list[int]
) -> None:
    """Nobody knows when they are there: no one piece has them all."""
    storage = {"mode": "file", "drives": [{"media": str(tmp_path / "drive"), "max_size": "64 MiB"}]}
    async with store(8 * MIB, storage=storage) as running, client_of(running) as client:

        def disk_hits() -> int:
            return int(running.server.statistics()["disk"]["reasons"].get("disk_hits", 0))

        async def put(block: int, length: int) -> None:
            assert await client.put(block, laid_out([length])) == [Status.OK]
            await wait_until(lambda: not running.server.statistics()["table"]["writing"], "it is on disk")

        for place in places:
            await put(place, LENGTHS[place])
        for other in range(12):
            await put(1000 + other, MIB)
        for place in set(range(3)).difference(places):
            await put(place, LENGTHS[place])
        get = get_of(laid_out(LENGTHS, gap=7, start=TARGET))
        assert await fetch(client, get) == [Status.OK] * 3
        assert disk_hits() == len(places)
        assert answers == []
        assert await fetch(client, get) == [Status.OK] * 3
        assert disk_hits() == len(places), "they are in the arena again"
        assert answers == [1], "the number counts both"
        assert count(running, "eager_gets") == 2
        assert pins(running) == 0
        await fetch_next(running, client, 100)


# -- faults at the server


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(
    ("action", "status"),
    [
        (Short(100), Status.OK),
        (BitFlip(1000, 3), Status.OK),
        (Fail(Status.FAILED), Status.FAILED),
        (Delay(0.05), Status.OK),
        (Throttle(10e6), Status.OK),
        (Drop(), Status.TIMEOUT),
        (LateWrite(0.05, Status.TIMEOUT), Status.TIMEOUT),
        (Die(), None),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Status) else value.name,
)
async def test_what_strikes_one_value_of_an_eager_get(
    action: Action, status: Status | None, nth: int, traffic: list[Traffic]
) -> None:
    """As in a get of another kind: tests of the rest of the system rely on it."""
    plan = FaultPlan()
    timeout_ms = 500 if status is Status.TIMEOUT else 20_000
    async with store_and_client(faults=plan) as (running, client):
        assert await client.put(0, laid_out(LENGTHS)) == [Status.OK] * 3
        rule = plan.add(Operation.PUSH, action, nth=nth)
        get = get_of(laid_out(LENGTHS, gap=9, start=TARGET), timeout_ms=timeout_ms)
        client.memory.array[TARGET:] = UNTOUCHED
        outcome: list[Status] | None = None
        try:
            outcome = [result.status for result in await client.connection.request(get, soon())]
        except ConnectionLost:
            assert status is None
        assert (rule.fired, count(running, "eager_gets")) == (1, 1)
        plan.clear()
        if status is None:
            assert outcome is None, "the session has ended"
        else:
            assert outcome == [status if place == nth - 1 else Status.OK for place in range(3)]
            for place, one in enumerate(get.items):
                came = bytes(client.memory.view(one.extent.offset, one.extent.length))
                is_right = came == fill(client.memory, one.extent, place)
                assert is_right == (place != nth - 1 or isinstance(action, Delay | Throttle))
        await until_quiet(traffic)
        if status is Status.TIMEOUT or status is None:
            async with client_of(running) as another:
                await fetch_next(running, another, 10)
            return
        await fetch_next(running, client, 10)


async def test_a_client_that_does_not_take_its_bytes_is_told_so_and_pins_nothing(traffic: list[Traffic]) -> None:
    """What the kernel does not take any more waits for the deadline, and no longer. Then its session is fenced."""
    length = 4 * MIB
    async with store_and_client() as (running, client), hand_made_client(running.address) as frozen:
        assert await client.put(0, laid_out([length])) == [Status.OK]
        await frozen.attach(eager=True)
        items = get_of([Extent(1, 0, length)]).items
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            for sent in range(1, 21):
                tasks.start_soon(ask_get, frozen, Get(items, 2000, eager=True), outcome)
                await wait_until(lambda sent=sent: count(running, "eager_gets") == sent, "it came")
                await anyio.sleep(0.02)
                if traffic[0].num_pieces:
                    break
            else:
                raise AssertionError("the kernel takes no end")
            await wait_until(lambda: bool(outcome), "the answer to what it does not take")
            assert outcome == [[Status.TIMEOUT]]
            with pytest.raises(ConnectionLost):
                await frozen.channel.request(Get(items, 1000, eager=True), soon())
        assert count(running, "get_given_up") == 1
        assert pins(running) == 0
        await until_quiet(traffic)
        await fetch_next(running, client, 10)


# -- a hostile client


def _eager_get(*lengths: int) -> Get:
    return Get(get_of(laid_out(lengths)).items, 5000, eager=True)


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([4096], "without a connection for it"),
        ([8 * MIB + 1], f"of 1 values, {8 * MIB + 1} bytes"),
        ([1] * (MAX_EAGER_VALUES + 1), f"of {MAX_EAGER_VALUES + 1} values"),
        ([0], "of 1 values, 0 bytes"),
        ([], "of 0 values, 0 bytes"),
        ([1 << 62] * 3, "of 3 values"),
    ],
    ids=["no connection", "large", "many", "no bytes", "no values", "overflow"],
)
async def test_an_eager_get_that_may_not_be_one_cuts_its_session(
    lengths: list[int], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with store() as running, hand_made_client(running.address) as client:
        if "without" not in why:
            await client.attach(eager=True)
        with pytest.raises(ConnectionLost):
            await client.channel.request(_eager_get(*lengths), soon())
        await wait_until(lambda: count(running, "cut_eager"), "it is counted")
    assert f"an eager get {why}" in caplog.text or f"a session {why}" in caplog.text
    assert count(running, "cut_eager") == 1


async def test_eager_gets_at_once_are_answered_in_their_order(answers: list[int]) -> None:
    """A client of ours has one at a time. Each of more is answered with its own bytes."""
    async with store_and_client() as (running, reader), hand_made_client(running.address) as client:
        assert await reader.put(0, laid_out([5000] * 8)) == [Status.OK] * 8
        eager = await client.attach(eager=True)
        for block in range(8):
            get = get_of([Extent(1, 0, 5000)], block)
            client.channel._send(MessageType.GET, Get(get.items, 5000, eager=True).pack(), soon(), (), False)
        for number in range(8):
            frame = await eager.receive(FIRST_BYTES + Get.RESULT_BYTES)
            eager.opener.expect(number)
            assert not eager.opener.more_bytes(frame)
            eager.opener.open(frame, Kind.ANSWER, answer_bytes=Get.RESULT_BYTES)
            assert await eager.receive(5000) == fill(reader.memory, Extent(1, 0, 5000), number)
        assert answers == [*range(8)]


async def test_many_eager_gets_that_wait_for_each_other_are_all_answered(traffic: list[Traffic]) -> None:
    """However many: behind a put whose bytes come late, they all are to be sent at once."""
    num_gets = 600
    async with (
        store_and_client(max_transfers=2000, max_transfers_per_session=2000, max_inflight_per_session=2000) as (
            running,
            reader,
        ),
        hand_made_client(running.address) as client,
    ):
        assert await reader.put(0, laid_out([50])) == [Status.OK]
        eager = await client.attach(eager=True)
        async with anyio.create_task_group() as tasks:
            put = Put([item(5, Extent(1, 0, 8))], 0, 20_000, eager=True)
            outcome: list[object] = []
            tasks.start_soon(ask, client, put, outcome)
            await wait_until(lambda: count(running, "eager_puts") == 2, "the put waits for its bytes")
            get = Get(get_of([Extent(1, 0, 50)]).items, 20_000, eager=True)
            for _ in range(num_gets):
                client.channel._send(MessageType.GET, get.pack(), soon(), (), False)
            await wait_until(lambda: count(running, "eager_gets") == num_gets, "all wait")
            await eager.send_values(b"01234567")
            frame_bytes = FIRST_BYTES + Get.RESULT_BYTES
            came = await eager.receive(num_gets * (frame_bytes + 50))
        assert outcome == [[Status.OK]]
        value = fill(reader.memory, Extent(1, 0, 50), 0)
        assert all(
            came[at + frame_bytes : at + frame_bytes + 50] == value for at in range(0, len(came), frame_bytes + 50)
        )
        assert count(running, "get_ok") == num_gets
        assert pins(running) == 0
        await until_quiet(traffic)
        await fetch_next(running, reader, 10)


async def test_a_get_beside_a_put_whose_bytes_do_not_come_waits_for_its_deadline() -> None:
    """No client of ours does it: both have the one connection."""
    async with store_and_client() as (running, reader), hand_made_client(running.address) as client:
        assert await reader.put(0, laid_out([5000])) == [Status.OK]
        await client.attach(eager=True)
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, Put([item(5, Extent(1, 0, 8))], 0, 20_000, eager=True))
            await wait_until(lambda: count(running, "eager_puts") == 2, "the put waits for its bytes")
            tasks.start_soon(ask_get, client, Get(get_of([Extent(1, 0, 5000)]).items, 200, eager=True), outcome)
            await wait_until(lambda: bool(outcome), "the answer")
        assert outcome == [[Status.TIMEOUT]]
        await wait_until(lambda: pins(running) == 0, "nothing stays pinned or reserved")


async def test_an_eager_get_over_loopback_cuts_its_session() -> None:
    async with store(loopback=True) as running:
        connection = await LoopbackClientTransport().connect(
            *running.address, Credentials(KEY), PeerKind.ENGINE, soon()
        )
        ended: list[BaseException | None] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, connection, ended)
            with pytest.raises(ConnectionLost):
                await connection.request(_eager_get(4096), soon())
            await wait_until(lambda: ended, "the session is cut")
            await connection.aclose()
        assert count(running, "cut_eager") == 1
        assert count(running, "internal_error") == 0


async def test_a_session_with_another_data_path_has_no_eager_gets() -> None:
    factory = FACTORIES["verbs-fake"]
    async with serving(factory) as server:
        async with connected(factory, server.address) as other:
            with pytest.raises(ConnectionLost):
                get = Get([GetItem(key_at(0), 0, Extent(1, 0, 8))], 5000, eager=True)
                await other.connection.request(get, soon())
        await wait_until(lambda: server.handler.counts["cut_eager"], "it is counted")
        assert server.handler.counts["internal_error"] == 0


# -- the client's end


def link_of(client: Values) -> EagerLink:
    """The client's end of the eager connection."""
    link = client.connection._links.eager  # type: ignore[attr-defined]
    assert isinstance(link, EagerLink)
    return link


def server_end(running: Running) -> EagerConnection:
    """The server's end of the only client's eager connection."""
    (live,) = running.transport._attachable._live.values()
    (found,) = [one for one in live[1]._connections if isinstance(one, EagerConnection)]
    return found


async def get_or_error(client: Values, get: Get, outcome: list[object], timeout_s: float = 20) -> None:
    """Note how a get ended."""
    try:
        outcome.append([result.status for result in await client.connection.request(get, soon(timeout_s))])
    except MemkvError as error:
        outcome.append(error)


class HeldBack:
    """What has come is not taken off before ``let_go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self._is_held = True
        original = EagerLink._on_readable

        def held(link: EagerLink) -> None:
            self.num_calls += 1
            if not self._is_held:
                original(link)

        monkeypatch.setattr(EagerLink, "_on_readable", held)

    def let_go(self) -> None:
        self._is_held = False


async def test_a_get_returns_only_when_its_bytes_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([100_000])) == [Status.OK]
        bytes_come = HeldBack(monkeypatch)
        target = Extent(1, TARGET, 100_000)
        client.memory.array[TARGET:] = UNTOUCHED
        came: list[bytes] = []

        async def get() -> None:
            await client.connection.request(get_of([target]), soon())
            came.append(bytes(client.memory.view(*target[1:])))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get)
            channel = client.connection._channel  # type: ignore[attr-defined]
            await wait_until(lambda: count(running, "get_ok") == 1 and bytes_come.num_calls > 0, "it is there")
            await anyio.sleep(0.05)
            assert not came
            assert channel.num_pending == 1
            bytes_come.let_go()
        assert came == [fill(client.memory, target, 0)]


async def test_after_the_fence_no_byte_of_a_get_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of what was given up meet no new owner, and the loop watches nothing that is closed."""
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([100_000])) == [Status.OK]
        bytes_come = HeldBack(monkeypatch)
        target = Extent(1, TARGET, 100_000)
        with pytest.raises(RequestTimeout, match="did not answer GET"):
            await client.connection.request(get_of([target]), soon(1))
        assert count(running, "get_ok") == 1, "the server has answered"
        assert bytes_come.num_calls, "it is there, and nobody took it off"
        number = link_of(client)._sock.fileno()
        fence = anyio.create_task_group()
        async with fence:
            fence.start_soon(client.connection.fence, soon())
            await anyio.lowlevel.checkpoint()
            assert number not in asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
        client.memory.array[TARGET:] = UNTOUCHED
        bytes_come.let_go()
        await anyio.sleep(0.1)
        assert set(client.memory.view(*target[1:])) == {UNTOUCHED}


async def test_a_fence_ends_a_get_that_waits_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([100_000])) == [Status.OK]
        bytes_come = HeldBack(monkeypatch)
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get_or_error, client, get_of([Extent(1, TARGET, 100_000)]), outcome)
            await wait_until(lambda: bytes_come.num_calls > 0, "it is there")
            client.memory.array[TARGET:] = UNTOUCHED
            with anyio.fail_after(5):
                await client.connection.fence(soon())
        assert [type(one) for one in outcome] == [ConnectionLost]
        assert (client.memory.array[TARGET:] == UNTOUCHED).all()
        assert count(running, "get_ok") == 1


@pytest.mark.parametrize("end", ["cancelled", "timed out"])
async def test_after_a_get_that_is_given_up_none_is_eager(
    end: str, monkeypatch: pytest.MonkeyPatch, answers: list[int]
) -> None:
    """Its bytes still come, to their own place: they are not taken for those of the next get."""
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([300_000])) == [Status.OK]
        bytes_come = HeldBack(monkeypatch)
        target = Extent(1, TARGET, 300_000)
        if end == "cancelled":
            with anyio.move_on_after(0.5) as scope:
                await client.connection.request(get_of([target]), soon())
            assert scope.cancelled_caught
        else:
            with pytest.raises(RequestTimeout):
                await client.connection.request(get_of([target]), soon(0.5))
        assert bytes_come.num_calls
        client.memory.array[TARGET:] = UNTOUCHED
        assert await client.put(1, laid_out([4096])) == [Status.OK]
        assert await client.put(2, laid_out([4096])) == [Status.OK]
        assert count(running, "eager_puts") == 1, "before it"
        bytes_come.let_go()
        await wait_until(lambda: link_of(client)._answer is None, "its bytes are taken off")
        assert bytes(client.memory.view(*target[1:])) == fill(client.memory, target, 0)
        await fetch_next(running, client, 10, eager=False)
        assert answers == [0]
        statistics = client.connection.statistics()  # type: ignore[attr-defined]
        assert (statistics.late_replies, statistics.pending) == (1, 0)


async def test_a_get_that_was_not_sent_leaves_the_connection_as_it_was() -> None:
    async with store_and_client() as (running, client):
        with pytest.raises(NotSent):
            await client.connection.request(get_of([Extent(1, TARGET, 4096)]), soon(-1))
        assert count(running, "eager_gets") == 0
        await fetch_next(running, client, 10)


async def test_after_a_get_that_was_refused_as_a_whole_none_is_eager() -> None:
    plan = FaultPlan()
    async with store_and_client(faults=plan) as (running, client):
        assert await client.put(0, laid_out([4096])) == [Status.OK]
        plan.add(Operation.REQUEST, Fail(), type=MessageType.GET, times=1)
        with pytest.raises(StoreError, match="injected"):
            await client.connection.request(get_of([Extent(1, TARGET, 4096)]), soon())
        await wait_until(
            lambda: client.connection.num_data_connections == 4,  # type: ignore[attr-defined]
            "its thread has ended",
        )
        await fetch_next(running, client, 10, eager=False)


async def test_an_eager_connection_that_breaks_under_a_get_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A middlebox may end it alone. Where the server ends it, it has a moment to say why."""
    monkeypatch.setattr(eagerlink, "BROKEN_S", 0.1)
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([300_000])) == [Status.OK]
        with monkeypatch.context() as patch:
            original = EagerConnection._command

            def broken(connection: EagerConnection, work: Work) -> list[memoryview]:
                command = original(connection, work)
                connection._sock.sendmsg(command)
                connection._sock.shutdown(socket.SHUT_RDWR)
                work.buffers.clear()
                return []

            patch.setattr(EagerConnection, "_command", broken)
            outcome: list[object] = []
            with anyio.fail_after(10):
                await get_or_error(client, get_of([Extent(1, TARGET, 300_000)]), outcome, timeout_s=60)
        assert isinstance(outcome[0], ConnectionLost)
        assert not client.connection.alive
        await client.connection.fence(soon())
        await wait_until(lambda: pins(running) == 0, "nothing stays pinned")
        async with client_of(running) as another:
            await fetch_next(running, another, 10)


async def test_a_server_that_gives_a_get_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the data connections first; the statuses still come, and the engine counts them."""
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([300_000])) == [Status.OK]
        original = EagerConnection._send
        monkeypatch.setattr(EagerConnection, "_send", lambda connection: None)
        get = get_of([Extent(1, TARGET, 300_000)], timeout_ms=200)
        (result,) = await client.connection.request(get, soon())
        assert result.status is Status.TIMEOUT
        monkeypatch.setattr(EagerConnection, "_send", original)
        await client.connection.fence(soon())
        assert pins(running) == 0
        async with client_of(running) as another:
            await fetch_next(running, another, 10)


async def test_a_server_that_dies_under_a_get_is_a_loss_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole values with their answer, or none."""
    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out([300_000])) == [Status.OK]
        HeldBack(monkeypatch)
        outcome: list[object] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get_or_error, client, get_of([Extent(1, TARGET, 300_000)]), outcome)
            await wait_until(lambda: count(running, "get_ok") == 1, "it was answered")
            (live,) = running.transport._attachable._live.values()
            live[1]._cut()
            with anyio.fail_after(5):
                await wait_until(lambda: bool(outcome), "it is told")
        assert isinstance(outcome[0], ConnectionLost)


async def test_a_get_that_was_answered_otherwise_leaves_the_connection_as_it_was(answers: list[int]) -> None:
    async with store_and_client() as (running, client):
        for turn in range(3):
            get = get_of([Extent(1, TARGET, 5000)], 700)
            assert await fetch(client, get, lambda _: False, untouched=True) == [Status.ABSENT]
            assert (count(running, "eager_gets"), answers[2 * turn :]) == (1 + 3 * turn, [])
            await fetch_next(running, client, 10 * turn)


async def test_gets_do_not_shorten_the_hold_off_of_puts() -> None:
    async with store_and_client() as (running, client):
        assert await client.put(1, laid_out([4096])) == [Status.OK]
        assert await client.put(1, laid_out([4096])) == [Status.EXISTS]
        for block in range(eagerlink.HOLD_OFF):
            assert await fetch(client, get_of([Extent(1, TARGET, 4096)], 1)) == [Status.OK]
            assert await client.put(100 + block, laid_out([10])) == [Status.OK]
        assert count(running, "eager_puts") == 2
        assert count(running, "eager_gets") == eagerlink.HOLD_OFF
        assert await client.put(500, laid_out([10])) == [Status.OK]
        assert count(running, "eager_puts") == 3


async def test_after_a_get_whose_bytes_may_still_come_none_is_eager() -> None:
    """They would be taken for those of the next one."""
    handler = ScriptedHandler()
    reply = Get.pack_reply([GetResult(Status.TIMEOUT, 0, 0, 0)])
    handler.at_once = lambda type, _: reply if type is MessageType.GET and not handler.counts["PING"] else None
    async with serving(TcpFactory(), handler=handler) as server, connected(TcpFactory(), server.address) as client:
        get = Get([GetItem(key_at(0), 0, Extent(1, 0, 1000))], 5000)
        (result,) = await client.connection.request(get, soon())
        assert result.status is Status.TIMEOUT
        await client.connection.request(Ping(), soon())
        fill(server.arena, Extent(1, 0, 1000), 7)
        (result,) = await client.connection.request(get, soon())
        assert result.status is Status.OK
        assert bytes(client.memory.view(0, 1000)) == fill(server.arena, Extent(1, 0, 1000), 7)
        assert not handler.eager


async def test_a_second_answer_on_the_control_connection_ends_it() -> None:
    """A server that saw its deadline pass a moment before the kernel took the last byte has fenced the data path."""
    handler = ScriptedHandler()
    handler.answers_twice = True
    async with serving(TcpFactory(), handler=handler) as server, connected(TcpFactory(), server.address) as client:
        get = Get([GetItem(key_at(0), 0, Extent(1, 0, 1000))], 5000)
        expected = fill(server.arena, Extent(1, 0, 1000), 3)
        (result,) = await client.connection.request(get, soon())
        assert (result.status, handler.eager) == (Status.OK, True)
        assert bytes(client.memory.view(0, 1000)) == expected
        await wait_until(lambda: not client.connection.alive, "the second answer has come")
        with pytest.raises(ConnectionLost, match="answered a GET twice"):
            await client.connection.request(get, soon())


async def test_an_error_of_an_answer_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who keeps it, as a connection does that has ended, would keep the staging pool with it."""

    def bent(connection: EagerConnection, work: Work) -> list[memoryview]:
        return [memoryview(connection._sealer.pack_answer(0, b"\2" + work.piece.answer[1:]))]

    async with store_and_client() as (_, client):
        assert await client.put(0, laid_out([1000, 1000])) == [Status.OK] * 2
        monkeypatch.setattr(EagerConnection, "_command", bent)
        with pytest.raises(ConnectionLost):
            await client.connection.request(get_of(laid_out([1000] * 2, 5, TARGET)), soon())
        assert client.connection._channel._ended is not None  # type: ignore[attr-defined]
        await client.connection.fence(soon())
        client.memory.close()
        assert num_mappings("staging") == 0


Bend = Callable[[CommandSealer, int, bytes], bytes]
_BENT: dict[str, tuple[str, Bend]] = {
    "a read": ("type", lambda sealer, number, answer: sealer._pack(Kind.READ, number, (), answer)),
    "a write": ("type", lambda sealer, number, answer: sealer._pack(Kind.WRITE, number, (), answer)),
    "a wrong seal": ("mac", lambda sealer, number, answer: sealer.pack_answer(number, answer)[:-1] + b"?"),
    "another number": ("sequence", lambda sealer, number, answer: sealer.pack_answer(number + 1, answer)),
    "no frame": ("magic", lambda sealer, number, answer: b"x" + sealer.pack_answer(number, answer)),
    "spans": ("length", lambda s, number, answer: s._pack(Kind.ANSWER, number, [Extent(1, 0, 9)] * 2, answer)),
    "a longer answer": ("mac", lambda sealer, number, answer: sealer.pack_answer(number, answer + answer)),
    "more bytes": ("length", lambda sealer, number, answer: sealer.pack_answer(number, b"\2" + answer[1:])),
}


@pytest.mark.parametrize("how", _BENT)
async def test_a_server_that_breaks_the_rules_ends_the_connection(
    how: str, monkeypatch: pytest.MonkeyPatch, answers: list[int]
) -> None:
    """P091, P092: what it sends in place of an answer is none, and reaches no other memory than was asked for."""
    kind, bend = _BENT[how]

    def bent(connection: EagerConnection, work: Work) -> list[memoryview]:
        if work.transfer.operation is Operation.PULL:
            return []
        return [memoryview(bend(connection._sealer, work.piece.number, work.piece.answer))]

    async with store_and_client() as (_, client):
        assert await client.put(0, laid_out([100_000, 5])) == [Status.OK] * 2
        monkeypatch.setattr(EagerConnection, "_command", bent)
        client.memory.array[:] = UNTOUCHED
        with anyio.fail_after(5), pytest.raises(ConnectionLost):
            await client.connection.request(get_of(laid_out([100_000, 5], 11, TARGET)), soon())
        assert not client.connection.alive
        await client.connection.fence(soon())
        client.memory.view(TARGET, 100_016)[:] = bytes([UNTOUCHED]) * 100_016
        assert (client.memory.array == UNTOUCHED).all()
        ended = client.connection._channel._ended  # type: ignore[attr-defined]
        assert isinstance(ended, RemoteProtocolError), ended
        assert ended.kind == kind


async def test_surplus_bytes_of_one_get_are_no_part_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerConnection._command

    def with_surplus(connection: EagerConnection, work: Work) -> list[memoryview]:
        work.buffers.append(memoryview(b"surplus of a get" * 10))
        return original(connection, work)

    async with store_and_client() as (_, client):
        assert await client.put(0, laid_out([100_000])) == [Status.OK]
        with monkeypatch.context() as patch:
            patch.setattr(EagerConnection, "_command", with_surplus)
            assert await fetch(client, get_of([Extent(1, TARGET, 100_000)])) == [Status.OK]
        client.memory.array[:] = UNTOUCHED
        with pytest.raises(ConnectionLost):
            await client.connection.request(get_of([Extent(1, TARGET, 100_000)]), soon())
        client.memory.view(TARGET, 100_000)[:] = bytes([UNTOUCHED]) * 100_000
        assert (client.memory.array == UNTOUCHED).all()


@pytest.mark.parametrize("absent", [None, 0, 1, 2])
@pytest.mark.parametrize("portion", [1, 7, 105, 106, 107, 150, 13_001])
async def test_bytes_of_one_get_come_in_any_portions(portion: int, absent: int | None) -> None:
    lengths = [30, 1, 700] if portion < 1000 else [30_000, 1, 70_000]
    original = socket.socket.recvmsg_into

    class Slow(socket.socket):
        def recvmsg_into(self, buffers, ancbufsize=0, flags=0):
            return original(self, first_bytes(buffers, portion), ancbufsize, flags)

    async with store_and_client() as (running, client):
        assert await client.put(0, laid_out(lengths)) == [Status.OK] * 3
        link = link_of(client)
        link._sock = Slow(fileno=link._sock.detach())
        for gap in (0, 5):
            items = list(get_of(laid_out(lengths, gap, TARGET)).items)
            if absent is not None:
                items[absent] = items[absent]._replace(key=make_key(900))
            statuses = await fetch(client, Get(items, 20_000), lambda place: place != absent)
            assert statuses == [Status.ABSENT if place == absent else Status.OK for place in range(3)]
        assert count(running, "eager_gets") == 2


async def test_nothing_is_left_of_eager_gets_however_they_end(traffic: list[Traffic]) -> None:
    """P067: no descriptor, mapping or thread, and the loop watches nothing that is closed, on either side."""
    plan = FaultPlan()

    async def end_in(running: Running, end: str) -> None:
        async with client_of(running) as client:
            await client.put(0, laid_out([300_000]))
            actions: dict[str, Action] = {"cancelled": Delay(0.05), "timed out": Drop(), "died": Die()}
            rule = plan.add(Operation.PUSH, actions[end], times=1) if end in actions else None
            if end == "refused":
                rule = plan.add(Operation.REQUEST, Fail(), type=MessageType.GET, times=1)
            with anyio.move_on_after(0.02 if end == "cancelled" else 5), contextlib.suppress(MemkvError):
                get = get_of([Extent(1, TARGET, 300_000)], timeout_ms=500 if end == "timed out" else 5000)
                await client.connection.request(get, soon())
            if rule is not None:
                await wait_until(lambda: rule.fired, "the fault has struck")
                plan.remove(rule)

    async def each_end(running: Running) -> None:
        for end in ("arrived", "refused", "cancelled", "timed out", "died"):
            await end_in(running, end)
        await wait_until(lambda: not running.server.statistics()["server"]["connections"], "all are gone")
        await until_quiet(traffic)

    watched = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    async with store(faults=plan) as running:
        await each_end(running)
        before, num_watched = held(), len(watched.get_map())
        for _ in range(3):
            await each_end(running)
        assert held() == before
        assert len(watched.get_map()) == num_watched
        assert pins(running) == count(running, "internal_error") == 0
        assert count(running, "eager_gets") == 16


async def test_a_connection_without_eager_puts_has_no_eager_gets() -> None:
    """An older server refuses the connection for them."""
    async with store_and_client(max_connections_per_session=4) as (running, client):
        await fetch_next(running, client, 10, eager=False)


async def test_who_asks_says_nothing_of_eager() -> None:
    async with store_and_client() as (_, client):
        with pytest.raises(MemkvError, match="chosen here"):
            await client.connection.request(_eager_get(8), soon())
