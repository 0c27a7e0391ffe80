"""What a log holds of the process: everything is given back by ``aclose``, after failed starts too."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path

import anyio
import pytest

from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.store.log.drivelog import DriveLog
from memkv_vllm.transports.memory import HostMemory
from tests.support.log_media import FakeHost
from tests.support.logs import MIB, key_of, opened, payload_of, start_only, storage
from tests.support.resources import num_fds


def anonymous_mappings() -> int:
    """Mappings of no file, which header and bounce buffers are."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[5:] == ["/dev/zero", "(deleted)"] for line in lines)


def test_a_log_gives_everything_back(tmp_path: Path) -> None:
    """P067: descriptors, mappings and threads after many lives are those after the first."""
    config = storage([tmp_path / "a", tmp_path / "b"])

    async def live(number: int) -> None:
        async with opened(config) as held:
            location = await held.put(key_of(number), payload_of(number, 100_000))
            assert location is not None
            assert await held.get(held.record_at(location), location) == payload_of(number, 100_000)
            held.log.forget([location])
            await held.log.flush()

    seen = []
    for number in range(6):
        anyio.run(live, number)
        seen.append((num_fds(), anonymous_mappings(), threading.active_count()))
    assert len(set(seen[1:])) == 1, seen


def test_a_refused_start_gives_everything_back(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"something else")
    config = storage([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "b").write_bytes(b"x" * 8192)

    async def refused() -> None:
        with pytest.raises(EnvironmentFault):
            await start_only(config)

    seen = []
    for _ in range(4):
        anyio.run(refused)
        seen.append((num_fds(), anonymous_mappings(), threading.active_count()))
    assert len(set(seen[1:])) == 1, seen


@pytest.mark.anyio
async def test_a_log_is_started_once_and_closed_once(tmp_path: Path) -> None:
    with HostMemory.create("arena", MIB) as arena:
        log = DriveLog(storage([tmp_path / "a"]), arena)
        with pytest.raises(LocalProtocolError, match="was not started"):
            await log.reset(bytes(32))
        await log.start(on_written=lambda token, location: None, on_reclaimed=lambda locations: None)
        with pytest.raises(LocalProtocolError, match="started once"):
            await log.start(on_written=lambda token, location: None, on_reclaimed=lambda locations: None)
        await log.aclose()
        await log.aclose()
    await start_only(storage([tmp_path / "a"]))


@pytest.mark.anyio
async def test_a_log_that_was_never_started_is_closed() -> None:
    with HostMemory.create("arena", MIB) as arena:
        await DriveLog(storage([Path("/nowhere")]), arena).aclose()


@pytest.mark.anyio
@pytest.mark.slow
async def test_memory_does_not_grow_with_what_went_through() -> None:
    """M06: a log of six segments, of which each is used some ten times."""
    host = FakeHost()
    config = storage([Path("/fake/0")], 7 * MIB, segment_size="1 MiB")
    async with opened(config, open_medium=host.open) as held:

        async def churn(first: int) -> None:
            for number in range(first, first + 120):
                location = await held.put(key_of(number), bytes(200_000))
                assert location is not None
                held.log.used(location)
                if number % 3:
                    held.log.forget([location])
            held.written.clear()
            held.records.clear()
            held.reclaimed.clear()
            for disk in host.disks.values():
                disk.unsynced.clear()
            await held.log.flush()

        await churn(0)
        tracemalloc.start()
        try:
            await churn(1000)
            before = tracemalloc.get_traced_memory()[0]
            await churn(2000)
            await churn(3000)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < 200_000, f"{grown} bytes"
        assert held.log.statistics()["moved"] <= held.log.statistics()["records"]
