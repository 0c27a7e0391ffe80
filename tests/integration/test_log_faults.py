"""Media that fail, are slow, full or lie: counted by reason, named by health, and never more lost than was on them."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from memkv_vllm.errors import EnvironmentFault, StoreError
from memkv_vllm.store.log.api import Location
from memkv_vllm.store.log.medium import FileMedium
from memkv_vllm.types import Deadline
from tests.support.harness import wait_until
from tests.support.log_media import FakeHost, Gate, failing, slow
from tests.support.logs import MIB, NAMESPACE, OpenLog, key_of, opened, payload_of, start_only, storage

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

ONE, TWO = Path("/fake/1"), Path("/fake/2")
SMALL = storage([ONE], 8 * MIB, segment_size="1 MiB", max_drive_errors=4)
PAIR = storage([ONE, TWO], 8 * MIB, segment_size="1 MiB", max_drive_errors=4)


async def put(held: OpenLog, number: int, length: int = 50_000) -> Location:
    location = await held.put(key_of(number), payload_of(number, length))
    assert location is not None
    return location


async def readable(held: OpenLog, number: int, location: Location) -> bool:
    data = await held.get(held.record_at(location), location)
    assert data in (None, payload_of(number, len(data or b"")))
    return data is not None


def errors(held: OpenLog, drive: int = 0) -> dict[str, int]:
    found: dict[str, int] = held.log.statistics()["drives"][drive]["errors"]
    return found


# ---------------------------------------------------------------- writes


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, "write_eio"), (errno.EREMOTEIO, "write_eremoteio")])
async def test_a_write_that_fails_is_counted_and_the_next_goes_on(number: int, reason: str) -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        first = await put(held, 1)
        host.fault = failing("write", number)
        assert await held.put(key_of(2), payload_of(2, 50_000)) is None
        third = await put(held, 3)
        assert errors(held) == {reason: 1}
        assert held.counters["log_failed"] == 1
        assert held.log.health() == [f"drive {ONE} had errors: 1 {reason} (last: [Errno {number}] injected)"]
        assert await readable(held, 1, first) and await readable(held, 3, third)
        await held.log.flush()
    left = await start_only(SMALL, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(1), key_of(3)]


async def test_a_write_that_failed_but_is_there_does_not_come_back() -> None:
    """A drive may report an error for what it has written: the caller was told that it failed."""
    host = FakeHost()
    config = storage([ONE], 8 * MIB, segment_size="1 MiB", sync="batch")
    async with opened(config, open_medium=host.open) as held:
        await put(held, 1)
        host.fault = failing("sync", errno.EIO)
        assert await held.put(key_of(2), payload_of(2, 50_000)) is None
        await held.log.flush()
    left = await start_only(config, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(1)]


async def test_too_many_errors_leave_the_drive_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    async with opened(PAIR, open_medium=host.open) as held:
        locations = [await put(held, number) for number in range(10)]
        on_first = [location for location in locations if location.drive == 0]
        assert 0 < len(on_first) < 10
        host.fault = failing("write", errno.EIO, path=ONE, times=100)
        number = 100
        while len(held.log.health()) != 1 or "out of service" not in held.log.health()[0]:
            await held.put(key_of(number), payload_of(number, 50_000))
            number += 1
            assert number < 200
        assert f"drive {ONE} is out of service after 4 errors" in held.log.health()[0]
        assert "check it (dmesg, smartctl)" in held.log.health()[0]
        assert set(on_first) <= set(held.reclaimed), "its values are reported as lost"
        assert not set(held.reclaimed) & {location for location in locations if location.drive == 1}
        for at in range(200, 210):
            assert (await put(held, at)).drive == 1
        await held.log.reset(bytes(32))
        assert held.log.statistics()["drives"][0]["in_service"] is False
    assert f"drive.out media={ONE}" in caplog.text


async def test_what_is_forgotten_after_its_drive_failed_does_not_come_back() -> None:
    """No tombstone can be written there: the other drives remember that it failed."""
    host = FakeHost()
    async with opened(PAIR, open_medium=host.open) as held:
        locations = {number: await put(held, number) for number in range(10)}
        gone = [number for number, location in locations.items() if location.drive == 0]
        host.fault = failing("write", errno.EIO, path=ONE, times=100)
        number = 100
        while not held.reclaimed:
            await held.put(key_of(number), payload_of(number, 50_000))
            number += 1
        held.log.forget([locations[number] for number in gone])
        await held.log.flush()
    host.fault = None
    async with opened(PAIR, open_medium=host.open) as held:
        assert not {key_of(number) for number in gone} & {value.record.key for value in held.values}
        assert held.log.health() == []
        again = [await put(held, number) for number in range(300, 310)]
        assert {location.drive for location in again} == {0, 1}, "it is in service again"
    left = await start_only(PAIR, open_medium=host.open)
    assert {key_of(number) for number in range(300, 310)} <= {value.record.key for value in left.values}


async def test_without_a_drive_everything_is_refused() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        host.fault = failing("write", errno.EIO, times=100)
        for number in range(4):
            await held.put(key_of(number), payload_of(number, 5000))
            if "out of service" in "".join(held.log.health()):
                break
        assert held.offer(key_of(9), b"x") is None
        assert held.counters["log_no_drive"] == 1
        with pytest.raises(StoreError, match="no drive is in service"):
            await held.log.reset(NAMESPACE)
        with pytest.raises(StoreError, match="no drive is in service"):
            await held.log.add_manifest(b"f" * 32, b"d" * 32, b"")
        with anyio.fail_after(10):
            await held.log.flush()
        assert held.log.statistics()["waiting"] == 0


async def test_a_full_file_system_recycles_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    """Space is reserved a segment at a time: what does not fit is known before anything is written there."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        host.full = sum(host.reserved.values()) + 4 * MIB
        locations = []
        for number in range(250):
            locations.append(await put(held, number))
            # From then on health says so, also while space is asked for again.
            if held.counters.get("file_system_full"):
                assert [line for line in held.log.health() if "its file system is full" in line]
        assert errors(held) == {}
        assert held.counters["file_system_full"] > 1
        assert caplog.text.count("drive.file_system_full") == 1
        assert all(location.segment < 4 for location in locations)
        assert await readable(held, 249, locations[-1])
        host.full = None
        for number in range(300, 560):
            await put(held, number)
        assert held.log.health() == []
        assert held.log.statistics()["segments"]["free"] == 1
    assert "Free some space, or lower max_size" in caplog.text


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, timeout=10
        )
    except FileNotFoundError:
        pytest.skip("no mount")
    if made.returncode:
        pytest.skip(f"no mount: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)


async def test_a_real_file_system_without_space_recycles_what_it_has(small_file_system: Path) -> None:
    async with opened(storage([small_file_system / "d"], 16 * MIB, segment_size="1 MiB")) as held:
        locations = [await put(held, number) for number in range(150)]
        assert errors(held) == {}
        assert held.counters["file_system_full"] >= 1
        assert max(location.segment for location in locations) <= 5
        assert await readable(held, 149, locations[-1])
    left = await start_only(storage([small_file_system / "d"], 16 * MIB))
    assert key_of(149) in {value.record.key for value in left.values}


async def test_a_file_system_without_space_for_one_segment_refuses_values() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        host.full = 0
        assert await held.put(key_of(1), b"x") is None
        assert held.counters["log_no_space"] == 1
        assert [line for line in held.log.health() if "its file system is full" in line]


# ---------------------------------------------------------------- reads


async def test_wrong_bytes_are_never_handed_out() -> None:
    """P090: one bit at each of 1000 places of header and payload: false, counted."""
    host = FakeHost()
    config = storage([ONE], 8 * MIB, max_drive_errors=2000)
    choices = random.Random(7)
    async with opened(config, open_medium=host.open) as held:
        location = await put(held, 1, 40_000)
        record = held.record_at(location)
        for _ in range(1000):
            at = choices.choice([choices.randrange(150), 4096 + choices.randrange(40_000)])
            position = [0]

            def flip(path: Path, offset: int, data: bytes, at: int = at, position: list[int] = position) -> bytes:
                start, position[0] = position[0], position[0] + len(data)
                if not start <= at < start + len(data):
                    return data
                changed = bytearray(data)
                changed[at - start] ^= 1 << choices.randrange(8)
                return bytes(changed)

            host.spoil = flip
            assert await held.get(record, location) is None
        host.spoil = None
        assert held.counters["read_wrong"] == 1000
        assert errors(held) == {"read_wrong_bytes": 1000}
        assert await readable(held, 1, location)


async def test_a_value_without_a_checksum_gets_one_of_ours() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        location = await held.put(key_of(1), payload_of(1, 9000), algorithm=0)
        assert location is not None
        assert await readable(held, 1, location)
        position = 8999

        def spoil(path: Path, offset: int, data: bytes) -> bytes:
            if len(data) <= 4096:
                return data
            return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

        host.spoil = spoil
        assert await held.get(held.record_at(location), location) is None
        assert held.counters["read_wrong"] == 1


async def test_a_value_under_another_key_is_not_handed_out() -> None:
    """P015: the header repeats the key, so that a mix-up of locations is a miss."""
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        first, second = await put(held, 1), await put(held, 2)
        assert await held.get(held.record_at(first), second) is None
        assert await held.get(held.record_at(first)._replace(layout=8), first) is None
        assert held.counters["read_gone"] == 2
        assert held.log.health() == [], "no fault of the drive"


async def test_a_read_error_is_a_miss_and_counted() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        location = await put(held, 1)
        host.fault = failing("read", errno.EIO)
        assert not await readable(held, 1, location)
        assert errors(held) == {"read_eio": 1}
        assert await readable(held, 1, location)


async def test_reads_are_bounded_and_wait_no_longer_than_their_deadline() -> None:
    host = FakeHost()
    config = storage([ONE], 8 * MIB, read_threads=2)
    async with opened(config, open_medium=host.open) as held:
        location = await put(held, 1)
        record = held.record_at(location)
        gate = host.fault = Gate("read")
        done: list[bool] = []

        async def read(offset: int, deadline: Deadline) -> None:
            done.append(await held.log.read(record, location, offset, deadline))

        async with anyio.create_task_group() as tasks:
            for at in range(2):
                tasks.start_soon(read, at * MIB, Deadline(time.monotonic() + 60))
            await wait_until(lambda: gate.reached == 2, "two reads begin")
            await read(2 * MIB, Deadline(time.monotonic() + 0.05))
            assert done == [False]
            assert held.counters["read_timeout"] == 1
            assert gate.reached == 2
            gate.open()
        assert done == [False, True, True]


async def test_a_cancelled_read_ends_when_nothing_more_can_land() -> None:
    """Invariant 2: the extent that it reads into is given to somebody else afterwards."""
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        location = await put(held, 1)
        gate = host.fault = Gate("read")
        ended: list[bool] = []

        async def read() -> None:
            try:
                await held.log.read(held.record_at(location), location, 0, Deadline(time.monotonic() + 60))
            finally:
                ended.append(True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await wait_until(lambda: gate.reached, "the read begins")
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for _ in range(20):
                    await anyio.sleep(0.001)
            assert not ended
            gate.open()
        assert ended


# ---------------------------------------------------------------- the queue


async def test_write_behind_is_bounded_and_sheds() -> None:
    """P048, M06: beyond ``storage.max_write_behind`` a value is refused, and counted."""
    host = FakeHost()
    config = storage([ONE], 8 * MIB, segment_size="1 MiB", max_write_behind="400 KiB")
    async with opened(config, open_medium=host.open) as held:
        await put(held, 0)
        gate = host.fault = Gate("write")
        tokens = [held.offer(key_of(number), payload_of(number, 50_000)) for number in range(1, 20)]
        accepted = [token for token in tokens if token is not None]
        assert len(accepted) == 400 * 1024 // 50_000
        assert held.counters["log_shed"] == 19 - len(accepted)
        assert held.counters["log_shed_bytes"] == 50_000 * (19 - len(accepted))
        assert held.log.statistics()["waiting_bytes"] == 50_000 * len(accepted)
        gate.open()
        await held.settled(*accepted)
        assert held.log.statistics()["waiting_bytes"] == 0
        assert held.offer(key_of(99), b"x") is not None


async def test_a_slow_drive_does_not_take_the_place_of_others() -> None:
    host = FakeHost()
    config = storage([ONE, TWO], 8 * MIB, segment_size="1 MiB", max_write_behind="400 KiB")
    async with opened(config, open_medium=host.open) as held:
        gate = host.fault = Gate("write", path=ONE)
        number = 0
        while held.counters.get("records_written", 0) < 30:
            held.offer(key_of(number), payload_of(number, 50_000))
            number += 1
            await anyio.sleep(0.002)
        assert gate.reached == 1
        assert held.log.statistics()["drives"][0]["waiting_bytes"] <= 200 * 1024
        gate.open()
        await held.log.flush()


@pytest.mark.parametrize("length", [1 * MIB, 40 * MIB])
async def test_a_value_larger_than_a_segment_is_refused(length: int) -> None:
    """P083."""
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        assert held.offer(key_of(1), bytes(length)) is None
        assert held.counters["log_too_large"] == 1


async def test_the_largest_value_fits_a_segment() -> None:
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        largest = (held.log._drives[0].largest_blocks - 1) * 4096
        location = await held.put(b"k" * 255, payload_of(1, largest))
        assert location is not None
        assert await held.get(held.record_at(location), location) == payload_of(1, largest)
        assert held.offer(b"k" * 255, bytes(largest + 1)) is None
        assert held.offer(b"k" * 256, b"x") is None


async def test_the_end_says_of_every_value_that_waits_that_it_was_not_written() -> None:
    host = FakeHost()
    config = storage([ONE], 8 * MIB, segment_size="1 MiB")
    async with opened(config, open_medium=host.open) as held:
        await put(held, 0)
        host.fault = slow("write", 0.05)
        tokens = [held.offer(key_of(number), payload_of(number, 500_000)) for number in range(1, 9)]
    assert all(token in held.written for token in tokens)
    assert [token for token in tokens if held.written[token or 0] is None]
    assert held.counters["log_stopped"] >= 1
    assert not held.log.append(held.records[1], 0, 999)
    with anyio.fail_after(5):
        await held.log.flush()
        with pytest.raises(StoreError, match="the server stops"):
            await held.log.reset(NAMESPACE)
    found = {value.record.key for value in (await start_only(config, open_medium=host.open)).values}
    written = {held.records[token].key for token, location in held.written.items() if location is not None}
    assert found == written


# ---------------------------------------------------------------- the journal


async def test_a_reset_that_cannot_be_written_names_the_drive() -> None:
    """P023: success only after every drive has it."""
    host = FakeHost()
    async with opened(PAIR, open_medium=host.open) as held:
        host.fault = failing("write", errno.EIO, path=TWO)
        with pytest.raises(StoreError, match=f"{TWO}: the journal could not be written.*injected"):
            await held.log.reset(NAMESPACE)
        await held.log.reset(NAMESPACE)


async def test_no_old_value_is_logged_or_comes_back_after_a_reset() -> None:
    """P022: also those that waited or were being written when it came."""
    host = FakeHost()
    async with opened(PAIR, open_medium=host.open) as held:
        before = [await put(held, number) for number in range(4)]
        gate = host.fault = Gate("write")
        waiting = [held.offer(key_of(number), payload_of(number, 50_000)) for number in range(10, 20)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(held.log.reset, NAMESPACE)
            await wait_until(lambda: held.counters.get("resets"), "the reset begins")
            gate.open()
        assert all(token is not None and held.written[token] is None for token in waiting)
        assert held.counters["log_reset"] == 10
        after = await put(held, 50)
        assert before[0] != after
    left = await start_only(PAIR, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(50)]


async def test_a_tombstone_that_cannot_be_written_is_tried_again() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        location = await put(held, 1)
        host.fault = failing("write", errno.EIO, times=2)
        held.log.forget([location])
        await wait_until(lambda: errors(held).get("journal_eio") == 2, "it fails twice")
        await held.log.flush()
    assert (await start_only(SMALL, open_medium=host.open)).values == []


async def test_manifests_have_a_bound() -> None:
    async with opened(SMALL, open_medium=FakeHost().open) as held:
        await held.log.add_manifest(b"f" * 32, b"0" * 32, bytes(65_536))
        with pytest.raises(StoreError, match="that the journal of /fake/1 has for them; use a larger drive"):
            await held.log.add_manifest(b"f" * 32, b"1" * 32, bytes(65_536))


# ---------------------------------------------------------------- start


async def test_a_drive_that_cannot_be_read_at_start_is_named() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        await put(held, 1)
    host.fault = failing("read", errno.EIO)
    with pytest.raises(EnvironmentFault, match=r"/fake/1 cannot be read.*smartctl"):
        await start_only(SMALL, open_medium=host.open)
    host.fault = None
    assert len((await start_only(SMALL, open_medium=host.open)).values) == 1


async def test_a_drive_that_cannot_be_written_at_start_is_named() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        await put(held, 1)
    host.fault = failing("write", errno.EIO)
    with pytest.raises(EnvironmentFault, match=r"/fake/1 cannot be written.*smartctl"):
        await start_only(SMALL, open_medium=host.open)
    assert len((await start_only(SMALL, open_medium=host.open)).values) == 1


async def test_buffered_media_are_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P078: no slow path without a word."""
    monkeypatch.setattr(FileMedium, "_open", staticmethod(lambda path, flags: (os.open(path, flags, 0o600), False)))
    with caplog.at_level(logging.WARNING):
        async with opened(storage([tmp_path / "d"])) as held:
            assert held.log.statistics()["buffered_drives"] == 1
            location = await put(held, 1)
            assert await readable(held, 1, location)
    assert caplog.text.count("drive.buffered") == 1
    assert "does not allow O_DIRECT" in caplog.text


# ---------------------------------------------------------------- removals


@pytest.mark.parametrize(("sync", "power_lost"), [("none", False), ("batch", True)])
async def test_what_was_forgotten_is_dead_on_the_medium_after_flush_forgotten(sync: str, power_lost: bool) -> None:
    """A crash right after it brings nothing back (M08: a delete that was answered)."""
    host = FakeHost()
    config = storage([ONE], 8 * MIB, segment_size="1 MiB", sync=sync)
    async with opened(config, open_medium=host.open) as held:
        locations = [await put(held, number) for number in range(6)]
        await held.log.flush()
        held.log.forget(locations[:3])
        await held.log.flush_forgotten()
        host.crashed = True
    host.restart(power_lost=power_lost, seed=1)
    left = await start_only(config, open_medium=host.open)
    assert [value.record.key for value in left.values] == [key_of(number) for number in range(3, 6)]


async def test_flush_forgotten_fails_by_name_where_the_journal_cannot_be_written() -> None:
    host = FakeHost()
    async with opened(SMALL, open_medium=host.open) as held:
        location = await put(held, 1)
        host.fault = failing("write", errno.EIO)
        held.log.forget([location])
        with pytest.raises(StoreError, match="/fake/1: the journal could not be written"):
            await held.log.flush_forgotten()
        await held.log.flush_forgotten()  # it stayed queued, and was tried again
        host.crashed = True
    host.restart(power_lost=False, seed=1)
    host.fault = None
    assert (await start_only(SMALL, open_medium=host.open)).values == []
