"""What survives what: the table of docs/storage.md, a test for each of its cells.

A value is *in the arena only* (refused, or not offered), *waiting* in write-behind, *logged* (its location was
reported), or *sealed* (logged, in a segment that has ended).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault
from tests.support.harness import wait_until
from tests.support.log_media import FakeHost, Gate
from tests.support.logs import MIB, OpenLog, key_of, opened, payload_of, start_only, storage

pytestmark = pytest.mark.anyio

ONE, TWO = Path("/fake/1"), Path("/fake/2")
ARENA, WAITING, LOGGED, SEALED = range(4)
LENGTH = 200_000


def settings(sync: str = "none", paths: tuple[Path, ...] = (ONE,), **others):
    return storage(paths, 8 * MIB, segment_size="1 MiB", sync=sync, **others)


async def fill(held: OpenLog) -> None:
    """A value in a sealed segment, and one in the open one; those between are numbers from 100."""
    assert await held.put(key_of(SEALED), payload_of(SEALED, LENGTH)) is not None
    number = 100
    while not held.log.statistics()["segments"]["sealed"]:
        assert await held.put(key_of(number), payload_of(number, LENGTH)) is not None
        number += 1
    assert await held.put(key_of(LOGGED), payload_of(LOGGED, LENGTH)) is not None


async def offer_waiting(held: OpenLog, host: FakeHost) -> Gate:
    """A value whose write does not get through."""
    gate = host.fault = Gate("write")
    assert held.offer(key_of(WAITING), payload_of(WAITING, LENGTH)) is not None
    await wait_until(lambda: gate.reached, "the write begins")
    return gate


async def survivors(config, host: FakeHost) -> set[int]:
    """Which of the four came back, whole."""
    host.fault = None
    found = set()
    async with opened(config, open_medium=host.open) as held:
        for value in held.values:
            data = await held.get(value.record, value.location)
            for number in (ARENA, WAITING, LOGGED, SEALED):
                if value.record.key == key_of(number) and data == payload_of(number, LENGTH):
                    found.add(number)
    return found


async def test_an_orderly_stop_keeps_all_that_was_offered() -> None:
    """SIGTERM: the server waits for the log (``flush``) within its drain timeout."""
    host = FakeHost()
    async with opened(settings(), open_medium=host.open) as held:
        await fill(held)
        gate = await offer_waiting(held, host)
        gate.open()
        await held.log.flush()
    assert await survivors(settings(), host) == {WAITING, LOGGED, SEALED}


@pytest.mark.parametrize("sync", ["none", "batch"])
async def test_a_kill_keeps_what_was_logged(sync: str) -> None:
    host = FakeHost()
    async with opened(settings(sync), open_medium=host.open) as held:
        await fill(held)
        gate = await offer_waiting(held, host)
        host.crashed = True
        gate.open()
    host.restart(power_lost=False, seed=1)
    assert await survivors(settings(sync), host) == {LOGGED, SEALED}


@pytest.mark.parametrize("seed", range(8))
async def test_a_power_loss_keeps_what_was_logged_with_sync_batch(seed: int) -> None:
    host = FakeHost()
    async with opened(settings("batch"), open_medium=host.open) as held:
        await fill(held)
        gate = await offer_waiting(held, host)
        host.crashed = True
        gate.open()
    host.restart(power_lost=True, seed=seed)
    assert await survivors(settings("batch"), host) == {LOGGED, SEALED}


@pytest.mark.parametrize("seed", range(8))
async def test_a_power_loss_with_sync_none_keeps_nothing_for_sure_and_shows_nothing_wrong(seed: int) -> None:
    """What is found is whole (``survivors`` compares); the start is never refused."""
    host = FakeHost()
    async with opened(settings(), open_medium=host.open) as held:
        await fill(held)
        for number in range(200, 260):  # the journal is written, too
            location = await held.put(key_of(number), payload_of(number, 100))
            assert location is not None
            held.log.forget([location])
        host.crashed = True
    host.restart(power_lost=True, seed=seed)
    assert await survivors(settings(), host) <= {LOGGED, SEALED}


async def test_a_lost_drive_takes_its_own_values_alone() -> None:
    host = FakeHost()
    both = settings(paths=(ONE, TWO))
    kept = set()
    async with opened(both, open_medium=host.open) as held:
        for number in range(20):
            location = await held.put(key_of(number), payload_of(number, LENGTH))
            assert location is not None
            if location.drive == 1:
                kept.add(key_of(number))
        await held.log.add_manifest(b"f" * 32, b"d" * 32, b"{}")
    left = settings(paths=(TWO,))
    with pytest.raises(EnvironmentFault, match="not found"):
        await start_only(left, open_medium=host.open)
    held = await start_only(settings(paths=(TWO,), missing_drives="forget"), open_medium=host.open)
    assert {value.record.key for value in held.values} == kept
    assert held.recovered is not None and len(held.recovered.manifests) == 1


async def test_a_change_of_settings_keeps_what_was_logged() -> None:
    """Or is refused before anything is written: ``test_log_start.py`` goes through the changes one by one."""
    host = FakeHost()
    async with opened(settings(), open_medium=host.open) as held:
        await fill(held)
    host.disks[ONE].volatile = bytearray(host.disks[ONE].volatile)
    changed = storage(
        (TWO, ONE), 12 * MIB, segment_size="2 MiB", sync="batch", read_threads=2, max_write_behind="1 MiB"
    )
    assert await survivors(changed, host) == {LOGGED, SEALED}


async def test_a_full_disk_keeps_what_was_logged_last() -> None:
    """A file system without space, and a drive that is full: the oldest values make room for new ones."""
    host = FakeHost()
    async with opened(settings(), open_medium=host.open) as held:
        host.full = sum(host.reserved.values()) + 3 * MIB
        for number in range(100, 140):
            assert await held.put(key_of(number), payload_of(number, LENGTH)) is not None
        assert held.counters["file_system_full"] >= 1
        assert await held.put(key_of(SEALED), payload_of(SEALED, LENGTH)) is not None
        for number in range(140, 146):
            assert await held.put(key_of(number), payload_of(number, LENGTH)) is not None
        assert await held.put(key_of(LOGGED), payload_of(LOGGED, LENGTH)) is not None
    assert await survivors(settings(), host) == {LOGGED, SEALED}


async def test_what_was_refused_stays_in_the_arena_alone() -> None:
    host = FakeHost()
    config = settings(max_write_behind="300 KiB")
    async with opened(config, open_medium=host.open) as held:
        await fill(held)
        gate = await offer_waiting(held, host)
        assert held.offer(key_of(ARENA), payload_of(ARENA, LENGTH)) is None
        gate.open()
        await held.log.flush()
    assert await survivors(config, host) == {WAITING, LOGGED, SEALED}


@pytest.mark.parametrize("sync", ["none", "batch"])
async def test_values_that_a_power_loss_tore_do_not_cost_the_drive(sync: str) -> None:
    """Without sync, that is: then the index of a segment may be there and its values not."""
    host = FakeHost()
    config = settings(sync, max_drive_errors=4)
    async with opened(config, open_medium=host.open) as held:
        await fill(held)
    async with opened(config, open_medium=host.open) as held:  # by now all segments are sealed
        geometry = held.log._drives[0].segments.geometry
        for _, location in held.values[:6]:
            torn = geometry.at(location.segment, 0) + location.offset + 4096
            host.disks[ONE].volatile[torn : torn + 512] = bytes(512)
        read = [await held.get(record, location) for record, location in held.values]
        assert read[:6] == [None] * 6
        if sync == "none":
            assert None not in read[6:]
            assert held.counters["read_wrong"] == 6
            assert held.log.health() == []
        else:
            assert "out of service" in held.log.health()[0]
