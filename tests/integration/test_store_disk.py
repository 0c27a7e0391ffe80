"""A whole server with drives (files here) over real loopback connections: life, restarts, resets, a full disk."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from memkv_vllm.config import ServerConfig, dev_server_config
from memkv_vllm.errors import EnvironmentFault, StoreError
from memkv_vllm.protocol.messages import Admin, Delete, Manifest, Stat
from memkv_vllm.store.eviction import LruPolicy
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.drivelog import DriveLog
from memkv_vllm.store.policies import NamespacePolicies
from memkv_vllm.store.s3fifo import S3FifoPolicy
from memkv_vllm.store.server import StoreServer
from memkv_vllm.types import Status
from tests.support.fake_log import FakeLog, FakeMedium
from tests.support.harness import wait_until
from tests.support.resources import held
from tests.support.site import MIB, NAMESPACE, VALUE, Client, Site, make_key, site, value

pytestmark = pytest.mark.anyio


def drives(folder: Path, count: int = 1, max_size: str = "64 MiB", **settings: Any) -> dict[str, Any]:
    """Section ``storage`` with regular files."""
    media = [{"media": str(folder / f"drive-{number}"), "max_size": max_size} for number in range(count)]
    return {"mode": "file", "drives": media, **settings}


async def put(client: Client, *blocks: int) -> None:
    for block in blocks:
        assert await client.put({block: value(block)}) == [Status.OK]


async def check(client: Client, blocks: list[int]) -> list[int]:
    """The blocks that a get brings; each with its own bytes."""
    present = []
    for at in range(0, len(blocks), 8):
        part = blocks[at : at + 8]
        for slot, (block, result) in enumerate(zip(part, await client.get(part), strict=True)):
            if result.status is Status.OK:
                assert client.slot(slot) == value(block)
                present.append(block)
    return present


async def put_on_disk(here: Site, client: Client, *blocks: int) -> None:
    """One after the other: write-behind holds a quarter of the arena, and what waits for it may be evicted."""
    for block in blocks:
        await put(client, block)
        await here.until(lambda: not here.state("table")["writing"])


async def test_a_store_of_eight_values_in_memory_keeps_forty(tmp_path: Path) -> None:
    async with site(slots=8, storage=drives(tmp_path)) as here:
        writer, reader = await here.connect(), await here.connect()
        await put_on_disk(here, writer, *range(40))
        assert await reader.exists(*range(41)) == [True] * 40 + [False]
        assert await check(reader, list(range(40))) == list(range(40))
        state = (await reader.ask(Stat()))["table"]
        assert (state["complete"], state["counters"]["evictions"], state["pinned"]) == (40, 0, 0)
        assert state["counters"]["demotions"] >= 32
        assert here.state("disk")["reasons"]["disk_hits"] >= 32
        assert here.state("disk")["used_bytes"] >= 40 * VALUE


async def test_an_orderly_stop_keeps_everything_and_a_start_finds_it(tmp_path: Path) -> None:
    storage = drives(tmp_path, count=2)
    async with site(slots=32, storage=storage) as here:
        client, server_id = await here.connect(), here.server.server_id
        await put(client, *range(30))  # no waiting: what is still in memory alone is written at the end
        await client.ask(Manifest(b"f" * 32, NAMESPACE, b"{}"))
        assert await client.ask(Delete([make_key(7)])) == [Status.OK]
    async with site(slots=8, storage=storage) as here:
        assert here.server.server_id == server_id
        assert here.server.handler.identity.server_id == server_id
        client = await here.connect()
        assert await check(client, list(range(30))) == [block for block in range(30) if block != 7]
        assert await client.put({3: value(3)}) == [Status.EXISTS]
        siblings = await client.ask(Manifest(b"f" * 32, b"O" * 32, b"{}"))
        assert [entry.digest for entry in siblings] == [NAMESPACE]


async def test_memory_alone_has_a_new_id_each_time() -> None:
    ids = set()
    for _ in range(2):
        async with site() as here:
            ids.add(here.server.server_id)
    assert len(ids) == 2


async def test_a_reset_outlives_a_restart(tmp_path: Path) -> None:
    """P006, P022: after new weights nothing of the old epoch comes back, from no tier and by no restart."""
    storage = drives(tmp_path)
    async with site(slots=8, storage=storage) as here:
        client = await here.connect()
        await put_on_disk(here, client, *range(16))
        answer = await client.ask(Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        assert answer["hidden"] == 16
        assert await check(client, list(range(16))) == []
        await put(client, 3)
    async with site(slots=8, storage=storage) as here:
        assert await check(await here.connect(), list(range(16))) == [3]


async def test_a_reset_during_traffic_serves_no_old_value_from_disk(tmp_path: Path) -> None:
    """P022: gets from disk, puts and write-behind are under way; whatever is served after the answer is new."""
    async with site(slots=8, storage=drives(tmp_path)) as here:
        writer, reader, admin = await here.connect(), await here.connect(), await here.connect()
        await put_on_disk(here, writer, *range(24))
        newest_old = max(result.generation for result in await reader.get([22, 23]))
        stop = reset_answered = False
        late: list[int] = []

        async def read() -> None:
            while not stop:
                for first in range(0, 24, 4):
                    before = reset_answered
                    results = await reader.get(range(first, first + 4))
                    if before:
                        late.extend(result.generation for result in results if result.status is Status.OK)

        async def write() -> None:
            number = 100
            while not stop:
                await writer.put({number: value(number % 8)})
                number += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(write)
            await here.until(lambda: here.state("disk")["reasons"]["disk_hits"] > 10)
            await admin.ask(Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
            reset_answered = True
            for block in range(4):
                await admin.put({block: value(block)})
            await here.until(lambda: len(late) >= 4)
            stop = True
        assert min(late) > newest_old
        await here.until(lambda: here.state("table")["stale"] == 0)


async def test_a_drive_that_does_not_keep_a_reset_fails_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P023."""

    async def refuse(log: DriveLog, namespace: bytes) -> None:
        raise StoreError(f"{tmp_path}/drive-0: I/O error")

    async with site(slots=8, storage=drives(tmp_path)) as here:
        client = await here.connect()
        await put(client, 1)
        with monkeypatch.context() as patch:
            patch.setattr(DriveLog, "reset", refuse)
            with pytest.raises(StoreError, match="drive-0: I/O error"):
                await client.ask(Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
        assert await check(client, [1]) == []
        assert (await client.ask(Admin({"command": "reset", "namespace": NAMESPACE.hex()})))["hidden"] == 0


async def test_a_full_drive_keeps_accepting_and_what_it_lost_is_a_miss(tmp_path: Path) -> None:
    """P089: capacity is what the settings say; the oldest records make room."""
    async with site(slots=8, storage=drives(tmp_path, max_size="16 MiB")) as here:
        client = await here.connect()
        for block in range(150):
            await put(client, block)
            await here.until(lambda: not here.state("table")["writing"])
        present = await client.exists(*range(150))
        assert await check(client, list(range(150))) == [block for block in range(150) if present[block]]
        assert 20 < sum(present) < 70
        assert present[149]
        assert here.state("table")["counters"]["disk_reclaimed"] > 0
        assert (tmp_path / "drive-0").stat().st_size <= 16 * MIB
        assert here.count("put_no_space") == 0


async def test_drives_that_hold_less_than_the_arena_are_named_and_not_written_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(slots=256, storage=drives(tmp_path, max_size="16 MiB")) as here:
        assert "disk.smaller_than_arena" in caplog.text
        client = await here.connect()
        for block in range(200):
            await put(client, block)
        await here.until(lambda: not here.state("table")["writing"])
        # Each new value pays for at most one that is written again because its record had to go.
        assert here.state("disk")["counters"]["records_written"] <= 400


async def test_more_values_on_disk_than_entries_start_with_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = drives(tmp_path)
    async with site(slots=16, storage=storage) as here:
        client = await here.connect()
        await put_on_disk(here, client, *range(12))
    with caplog.at_level(logging.INFO, "memkv"):
        async with site(slots=16, storage=storage, max_entries=5) as here:
            assert await check(await here.connect(), list(range(12))) == [7, 8, 9, 10, 11]
    assert "limits.max_entries = 5" in caplog.text
    assert "disk.recovered values=12" in caplog.text


async def test_a_drive_that_cannot_be_used_ends_the_start_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "drive-0").write_bytes(b"somebody else's data" * 1000)
    config = config_of(storage=drives(tmp_path))
    await anyio.to_thread.run_sync(gc.collect)  # starts the worker thread that the log will use, which stays
    before = held()
    with pytest.raises(EnvironmentFault, match="drive-0"):
        async with StoreServer(config, []):
            raise AssertionError("it started")
    assert held() == before


async def test_everything_is_closed_once_at_the_end(tmp_path: Path) -> None:
    async def live(number: int) -> None:
        async with site(slots=8, storage=drives(tmp_path, count=2)) as here:
            client = await here.connect()
            await put(client, number)
            assert await check(client, [number]) == [number]
            await client.ask(Admin({"command": "reset", "namespace": NAMESPACE.hex()}))
            await put(client, 1)
            await client.connection.aclose()
        gc.collect()

    for number in range(10, 13):  # what is made once and kept: worker threads, the loop's own
        await live(number)
    before = held()
    for number in range(20, 24):
        await live(number)
    assert held() == before


# What the server does with the disk, whatever it is


class Hanging(FakeLog):
    """Its medium takes nothing any more."""

    async def flush(self) -> None:
        await anyio.sleep_forever()


class Failing(FakeLog):
    """Its writer has a bug."""

    async def run(self) -> None:
        raise RuntimeError("a bug of the log")


def config_of(**sections: Any) -> ServerConfig:
    return dev_server_config(
        bytes(range(32)), address="127.0.0.1:0", overrides={"memory": {"max_size": "4 MiB"}, **sections}
    )


async def test_a_disk_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    log = Hanging()
    with anyio.fail_after(5):
        async with StoreServer(config_of(), [], log=log, drain_timeout_s=0.1, populate=False) as server:
            table = server.handler._table
            reserved = table.reserve(make_key(1), 4096, 0, 0, 0, "me", 0.0)
            table.commit(make_key(1), reserved.generation)
    assert log.closed
    assert "disk.values_left count=1" in caplog.text
    assert "no time within" in caplog.text


async def test_a_log_that_fails_ends_the_server_with_its_error() -> None:
    log = Failing()
    with pytest.raises(RuntimeError, match="a bug of the log"):
        async with StoreServer(config_of(), [], log=log, drain_timeout_s=0.1, populate=False):
            await anyio.sleep_forever()
    assert log.closed


async def test_a_long_start_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P086: progress is logged."""
    monkeypatch.setattr("memkv_vllm.store.residency._PROGRESS_S", 0.0)
    monkeypatch.setattr("memkv_vllm.store.residency._RECOVER_STEP", 10)
    medium = FakeMedium()
    for number in range(25):
        record = Record(make_key(number), 4096, 0, 0, 0)
        medium.records[Location(0, 0, 0, number)] = (record, bytes(4096))
    with caplog.at_level(logging.INFO, "memkv"):
        async with StoreServer(config_of(), [], log=FakeLog(medium), populate=False) as server:
            assert server.statistics()["table"]["on_disk"] == 25
            assert server.server_id == medium.server_id
    assert [line for line in caplog.messages if "disk.recovering" in line and "values=20" in line]


async def test_entries_are_frozen_while_it_runs_and_not_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection over a million entries would stop the loop for half a second."""
    monkeypatch.setattr("memkv_vllm.store.garbage.STEP_ENTRIES", 1)
    monkeypatch.setattr("memkv_vllm.store.server._FREEZE_INTERVAL_S", 0.001)
    async with StoreServer(config_of(), [], populate=False) as server:
        server.handler._table.reserve(make_key(1), 4096, 0, 0, 0, "me", 0.0)
        await wait_until(lambda: server._freezer.freezes, "a freeze")
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("eviction", "policy"),
    [
        ({}, LruPolicy),
        ({"policy": "s3-fifo"}, S3FifoPolicy),
        ({"namespace_quota": 0.5, "high_watermark": 0.8, "low_watermark": 0.7}, NamespacePolicies),
    ],
)
async def test_what_is_configured_is_what_runs(eviction: dict[str, Any], policy: type) -> None:
    config = config_of(storage={"eviction": eviction}, limits={"max_entries": 77})
    async with StoreServer(config, [], populate=False) as server:
        table = server.handler._table
        assert type(table._policy) is policy
        limits = table.limits
        assert limits.max_entries == 77
        shown = (limits.high_watermark, limits.low_watermark, limits.namespace_quota)
        assert shown == (
            eviction.get("high_watermark", 0.95),
            eviction.get("low_watermark", 0.9),
            eviction.get("namespace_quota", 1.0),
        )
