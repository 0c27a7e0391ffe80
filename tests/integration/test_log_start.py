"""Starts of a log: what was there, what the settings say, and everything that must be refused rather than lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log import format
from memkv_vllm.store.log.format import FORMAT_VERSION, Geometry, parse_superblock
from tests.support.log_media import FakeHost
from tests.support.logs import MIB, fill_with_records, key_of, opened, payload_of, start_only, storage, superblock

pytestmark = pytest.mark.anyio


def geometry_of(host: FakeHost) -> Geometry:
    """Layout of the only drive of a fake machine."""
    (disk,) = host.disks.values()
    block = parse_superblock(bytes(disk.volatile[:4096]))
    assert block is not None
    return block.geometry


async def filled(config, count: int = 10, length: int = 100_000) -> set[bytes]:
    """A store with that many values; their keys."""
    async with opened(config) as held:
        for number in range(count):
            assert await held.put(key_of(number), payload_of(number, length)) is not None
    return {key_of(number) for number in range(count)}


async def keys_in(config) -> set[bytes]:
    """The values that a start finds and can read."""
    async with opened(config) as held:
        found = set()
        for value in held.values:
            data = await held.get(value.record, value.location)
            assert data is not None
            found.add(value.record.key)
        return found


async def refused(config, match: str) -> str:
    """The start is refused, and changes no byte of any medium; the message."""
    paths = [drive.media for drive in config.drives if drive.media.exists()]
    before = [path.read_bytes() if path.is_file() else b"" for path in paths]
    with pytest.raises(EnvironmentFault, match=match) as caught:
        await start_only(config)
    assert [path.read_bytes() if path.is_file() else b"" for path in paths] == before
    assert all(drive.media in paths or not drive.media.exists() for drive in config.drives), "a file was left behind"
    return str(caught.value)


async def test_a_new_file_is_formatted_and_keeps_its_store_id(tmp_path: Path) -> None:
    config = storage([tmp_path / "d"])
    first, second = await start_only(config), await start_only(config)
    assert first.recovered is not None and second.recovered is not None
    assert first.recovered.server_id == second.recovered.server_id
    assert len(first.recovered.server_id) == 16
    assert first.values == second.values == []
    assert (tmp_path / "d").stat().st_size == 16 * MIB
    assert (tmp_path / "d").stat().st_blocks * 512 < 2 * MIB, "space is taken as it is needed"
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o600


async def test_values_come_back_oldest_first(tmp_path: Path) -> None:
    config = storage([tmp_path / "a", tmp_path / "b"])
    keys = await filled(config)
    async with opened(config) as held:
        assert [value.record.key for value in held.values] == [key_of(number) for number in range(10)]
        assert {value.location.drive for value in held.values} == {0, 1}
    assert await keys_in(config) == keys


async def test_manifests_and_resets_come_back(tmp_path: Path) -> None:
    config = storage([tmp_path / "a", tmp_path / "b"])
    async with opened(config) as held:
        await held.log.add_manifest(b"f" * 32, b"d" * 32, b"{}")
        await held.log.add_manifest(b"f" * 32, b"e" * 32, b"x" * 65_536)
        await held.log.add_manifest(b"f" * 32, b"d" * 32, b"another: a digest stands for its manifest")
    held = await start_only(config)
    assert held.recovered is not None
    assert sorted(held.recovered.manifests) == [(b"f" * 32, b"d" * 32, b"{}"), (b"f" * 32, b"e" * 32, b"x" * 65_536)]


async def test_drives_may_be_listed_in_another_order(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    keys = await filled(storage(paths))
    assert await keys_in(storage([paths[2], paths[0], paths[1]])) == keys
    assert await keys_in(storage(paths)) == keys


async def test_drives_may_be_moved_to_other_paths(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    keys = await filled(storage(paths))
    paths[0].rename(tmp_path / "other")
    assert await keys_in(storage([tmp_path / "other", paths[1]])) == keys


async def test_a_missing_drive_is_refused_by_its_id(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    keys = await filled(storage(paths))
    missing = superblock(paths[1]).drive_id.hex()
    message = await refused(storage(paths[:1]), "1 of the store's 2 drives not found")
    assert missing in message and "storage.missing_drives: forget" in message and str(paths[0]) in message
    assert await keys_in(storage(paths)) == keys


async def test_a_missing_drive_is_not_replaced_by_a_blank_one(tmp_path: Path) -> None:
    """A drive that is late to appear (its mount point is an empty folder) must not be formatted away."""
    paths = [tmp_path / "a", tmp_path / "b"]
    await filled(storage(paths))
    paths[1].rename(tmp_path / "kept")
    await refused(storage(paths), "not found")
    assert not paths[1].exists()


async def test_a_lost_drive_can_be_forgotten_on_purpose(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    keys = await filled(storage(paths))
    left = await keys_in(storage(paths[:1], missing_drives="forget"))
    assert set() < left < keys
    assert await keys_in(storage(paths[:1])) == left, "it is not asked for again"
    await refused(storage(paths), "was removed from this store before")


async def test_a_drive_is_added(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    keys = await filled(storage(paths[:1]))
    assert await keys_in(storage(paths)) == keys
    assert superblock(paths[0]).drives == superblock(paths[1]).drives
    await refused(storage(paths[:1]), "not found")
    async with opened(storage(paths)) as held:
        location = await held.put(key_of(100), payload_of(100, 100_000))
        assert location is not None and location.drive == 1, "the emptier one"


async def test_drives_of_two_stores_are_refused(tmp_path: Path) -> None:
    await filled(storage([tmp_path / "a"]))
    await filled(storage([tmp_path / "b"]))
    await refused(storage([tmp_path / "a", tmp_path / "b"]), "belongs to store .* to store")


async def test_a_copy_of_a_drive_is_refused(tmp_path: Path) -> None:
    await filled(storage([tmp_path / "a"]))
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())
    await refused(storage([tmp_path / "a", tmp_path / "b"]), "hold the same drive")


async def test_one_drive_under_two_names_is_refused(tmp_path: Path) -> None:
    await filled(storage([tmp_path / "a"]))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    await refused(storage([tmp_path / "a", tmp_path / "b"]), "is in use")


async def test_a_larger_drive_uses_more(tmp_path: Path) -> None:
    keys = await filled(storage([tmp_path / "a"], 8 * MIB))
    larger = storage([tmp_path / "a"], 32 * MIB)
    assert await keys_in(larger) == keys
    async with opened(larger) as held:
        for number in range(10, 200):
            await held.put(key_of(number), payload_of(number, 100_000))
        assert held.reclaimed == []
        assert held.log.statistics()["records"] == 200
    assert len(await keys_in(larger)) == 200


async def test_a_smaller_drive_is_refused_with_the_size_that_it_needs(tmp_path: Path) -> None:
    keys = await filled(storage([tmp_path / "a"], 32 * MIB), 100)
    message = await refused(storage([tmp_path / "a"], 8 * MIB), "values lie beyond")
    needed = int(message.split("they need ")[1].split(" bytes")[0])
    assert await keys_in(storage([tmp_path / "a"], needed)) == keys
    await refused(storage([tmp_path / "a"], needed - 4096), "values lie beyond")


async def test_an_empty_drive_is_not_made_too_small(tmp_path: Path) -> None:
    await start_only(storage([tmp_path / "a"], 32 * MIB))
    await refused(storage([tmp_path / "a"], 3 * MIB), "at least 4 are needed")


async def test_what_was_cut_off_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tombstones are not kept for ever: the segments that were cut off are started anew."""
    monkeypatch.setattr(format, "MIN_JOURNAL_HALF_BYTES", 4 * 4096)
    monkeypatch.setattr(format, "JOURNAL_DIVISOR", 1 << 20)
    large, small = storage([tmp_path / "a"], 32 * MIB), storage([tmp_path / "a"], 8 * MIB)
    async with opened(large) as held:
        locations = [await held.put(key_of(number), payload_of(number, 100_000)) for number in range(100)]
        held.log.forget([location for location in locations if location is not None])
        await held.log.flush()
    async with opened(small) as held:
        assert held.values == []
        for number in range(200, 210):
            location = await held.put(key_of(number), payload_of(number, 100_000))
            assert location is not None
            held.log.forget([location])
            await held.log.flush()
        assert held.log.statistics()["drives"][0]["compactions"] >= 1
    assert await keys_in(large) == set()


@pytest.mark.parametrize("modes", [("file", "direct"), ("direct", "file")])
async def test_the_mode_may_change_on_the_same_medium(tmp_path: Path, modes: tuple[str, str]) -> None:
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 16 * MIB)
    keys = await filled(storage([tmp_path / "a"], mode=modes[0]))
    assert await keys_in(storage([tmp_path / "a"], mode=modes[1])) == keys


async def test_another_segment_size_leaves_a_formatted_drive_alone(tmp_path: Path) -> None:
    keys = await filled(storage([tmp_path / "a"], segment_size="2 MiB"))
    assert await keys_in(storage([tmp_path / "a"], segment_size="1 MiB")) == keys
    assert superblock(tmp_path / "a").geometry.segment_bytes == 2 * MIB


async def test_sync_may_change(tmp_path: Path) -> None:
    keys = await filled(storage([tmp_path / "a"], sync="batch"))
    assert await keys_in(storage([tmp_path / "a"], sync="none")) == keys


@pytest.mark.parametrize(("version", "words"), [(FORMAT_VERSION + 1, "made by a newer"), (0, "made by an older")])
async def test_another_version_is_refused_by_name(tmp_path: Path, version: int, words: str) -> None:
    """P018: an upgrade that cannot read what is there says so, rather than missing everything silently."""
    await filled(storage([tmp_path / "a"]))
    with (tmp_path / "a").open("r+b") as file:
        for copy in range(2):
            file.seek(copy * 4096 + 8)
            file.write(version.to_bytes(2, "little"))
    message = await refused(storage([tmp_path / "a"]), words)
    assert f"format version {version}" in message and f"version {FORMAT_VERSION}" in message and "rm " in message


@pytest.mark.parametrize(
    ("offset", "magic", "words"),
    [
        (0x438, b"\x53\xef", "an ext2/3/4 file system"),
        (0, b"XFSB", "an XFS file system"),
        (0x10040, b"_BHRfS_M", "a btrfs file system"),
        (0x200, b"EFI PART", "a GPT partition table"),
        (0x200, b"LABELONE", "an LVM physical volume"),
        (0, b"LUKS\xba\xbe", "a LUKS container"),
        (0xFF6, b"SWAPSPACE2", "swap space"),
        (0x1FE, b"\x55\xaa", "a boot sector"),
        (1000, b"something", "bytes that are no memkv store"),
        ((1 << 20) - 1, b"x", "bytes that are no memkv store"),
    ],
)
async def test_a_medium_with_something_else_is_refused(tmp_path: Path, offset: int, magic: bytes, words: str) -> None:
    content = bytearray(2 * MIB)
    content[offset : offset + len(magic)] = magic
    (tmp_path / "a").write_bytes(content)
    message = await refused(storage([tmp_path / "a"]), f"holds {words}")
    assert f"rm {tmp_path / 'a'}" in message


@pytest.mark.parametrize("blocks", [0, 1])
async def test_a_small_file_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, blocks: int) -> None:
    """It has no first block, or no second, that could be looked at."""
    content = bytes(blocks * 4096) + b"127.0.0.1 localhost\n"
    (tmp_path / "a").write_bytes(content)
    await refused(storage([tmp_path / "a"]), f"holds {len(content)} bytes that are no memkv store")
    assert (tmp_path / "a").read_bytes() == content


async def test_a_blank_file_is_formatted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(2 * MIB))
    await filled(storage([tmp_path / "a"]))


async def test_a_damaged_superblock_has_a_copy(tmp_path: Path) -> None:
    keys = await filled(storage([tmp_path / "a"]))
    with (tmp_path / "a").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 100)
    assert await keys_in(storage([tmp_path / "a"])) == keys
    with (tmp_path / "a").open("r+b") as file:  # the start has written the first copy anew: it stands in for the second
        file.seek(4096 + 20)
        file.write(b"\xff" * 100)
    assert await keys_in(storage([tmp_path / "a"])) == keys
    with (tmp_path / "a").open("r+b") as file:
        for copy in range(2):
            file.seek(4096 * copy + 20)
            file.write(b"\xff" * 100)
    await refused(storage([tmp_path / "a"]), "a damaged memkv superblock")


async def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    """Without it nobody knows what was deleted."""
    await filled(storage([tmp_path / "a"]))
    geometry = superblock(tmp_path / "a").geometry
    with (tmp_path / "a").open("r+b") as file:
        for half in range(2):
            file.seek(geometry.journal_half(half) + 30)
            file.write(b"\xff" * 8)
    await refused(storage([tmp_path / "a"]), "the journal of .* is damaged")


async def test_a_torn_payload_in_an_unsealed_segment_is_not_found() -> None:
    """Its header may be there without it. What was written behind it is found all the same."""
    host = FakeHost()
    config = storage([Path("/fake/a")], 8 * MIB)
    async with opened(config, open_medium=host.open) as held:
        locations = [await held.put(key_of(number), payload_of(number, 9000)) for number in range(3)]
        assert locations[1] is not None
        torn = geometry_of(host).at(0, 0) + locations[1].offset + 2 * 4096
    host.disks[Path("/fake/a")].volatile[torn] ^= 1
    for _ in range(2):  # the second start finds the segment sealed by the first
        held = await start_only(config, open_medium=host.open)
        assert [value.record.key for value in held.values] == [key_of(0), key_of(2)]
        assert held.log.statistics()["records"] == 2
    assert held.log.statistics()["records_torn"] == 0


async def test_a_torn_payload_hides_no_older_copy_of_its_value() -> None:
    """The newest record of a key counts, but only if it is whole."""
    host = FakeHost()
    config = storage([Path("/fake/a")], 8 * MIB)
    async with opened(config, open_medium=host.open) as held:
        first = await held.put(key_of(1), payload_of(1, 9000))
        second = await held.put(key_of(1), payload_of(1, 9000))
        assert first is not None and second is not None
        torn = geometry_of(host).at(0, 0) + second.offset + 4096
    host.disks[Path("/fake/a")].volatile[torn] ^= 1
    async with opened(config, open_medium=host.open) as held:
        (value,) = held.values
        assert value.location.offset == first.offset
        assert await held.get(value.record, value.location) == payload_of(1, 9000)
        assert held.log.statistics()["records_torn"] == 1


async def test_a_torn_journal_is_cut_off_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    config = storage([Path("/fake/a")], 8 * MIB)
    async with opened(config, open_medium=host.open) as held:
        for number in range(3):
            await held.log.add_manifest(b"f" * 32, number.to_bytes(32, "big"), b"{}")
    journal = geometry_of(host).journal_half(0)
    host.disks[Path("/fake/a")].volatile[journal + 3 * 4096 + 60] ^= 1  # the third manifest's batch
    held = await start_only(config, open_medium=host.open)
    assert held.recovered is not None and len(held.recovered.manifests) == 2
    assert f"journal.torn media=/fake/a batch=3 at={journal + 3 * 4096}" in caplog.text
    caplog.clear()
    async with opened(config, open_medium=host.open) as held:  # what is written now takes its place
        await held.log.add_manifest(b"f" * 32, b"n" * 32, b"{}")
    held = await start_only(config, open_medium=host.open)
    assert held.recovered is not None and len(held.recovered.manifests) == 3
    caplog.clear()
    await start_only(config, open_medium=host.open)
    assert "journal.torn" not in caplog.text


async def test_a_drive_that_is_too_small_says_what_it_needs(tmp_path: Path) -> None:
    message = await refused(storage([tmp_path / "a"], 4 * MIB), "at least 4 are needed")
    needed = int(message.split("give it ")[1].split(" bytes")[0])
    await start_only(storage([tmp_path / "a"], needed))


async def test_a_refusal_leaves_no_new_file(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"x" * 4096)
    await refused(storage([tmp_path / "a", tmp_path / "b"]), "bytes that are no memkv store")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("crash_at", range(1, 12))
async def test_formatting_may_be_interrupted(crash_at: int) -> None:
    """At any write: the next start formats again, or goes on with what there is."""
    host = FakeHost()
    config = storage([Path("/fake/a"), Path("/fake/b")], 8 * MIB)
    host.crash_at = crash_at
    with pytest.raises(EnvironmentFault):
        await start_only(config, open_medium=host.open)
    assert host.crashed
    host.restart(power_lost=True, seed=crash_at)
    assert (await start_only(config, open_medium=host.open)).values == []


@pytest.mark.parametrize("crash_at", range(1, 12))
async def test_adding_a_drive_may_be_interrupted(crash_at: int) -> None:
    host = FakeHost()
    paths = [Path("/fake/a"), Path("/fake/b")]
    async with opened(storage(paths[:1], 8 * MIB, sync="batch"), open_medium=host.open) as held:
        assert await held.put(key_of(1), payload_of(1, 5000)) is not None
    host.writes, host.crash_at = 0, crash_at
    both = storage(paths, 8 * MIB, sync="batch")
    try:
        await start_only(both, open_medium=host.open)
    except EnvironmentFault:
        assert host.crashed
    host.restart(power_lost=True, seed=crash_at)
    held = await start_only(both, open_medium=host.open)
    assert [value.record.key for value in held.values] == [key_of(1)]


async def test_a_device_smaller_than_configured_is_refused() -> None:
    host = FakeHost(block_devices=True)
    host.add_device(Path("/dev/fake"), 8 * MIB)
    with pytest.raises(EnvironmentFault, match=f"has {8 * MIB} bytes, max_size asks for {16 * MIB}"):
        await start_only(storage([Path("/dev/fake")], mode="direct"), open_medium=host.open)


async def test_a_device_says_how_to_wipe_it() -> None:
    host = FakeHost(block_devices=True)
    host.add_device(Path("/dev/fake"), 16 * MIB)
    host.disks[Path("/dev/fake")].volatile[0x438:0x43A] = b"\x53\xef"
    with pytest.raises(EnvironmentFault, match="wipefs -a /dev/fake && dd if=/dev/zero of=/dev/fake bs=1M count=1"):
        await start_only(storage([Path("/dev/fake")], mode="direct"), open_medium=host.open)


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    """A block device of 16 MiB, where this user may make one."""
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 16 * MIB)
    try:
        made = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", str(image)], capture_output=True, text=True, timeout=10
        )
    except FileNotFoundError:
        pytest.skip("no losetup")
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True, timeout=10)


async def test_a_block_device_holds_a_store(loop_device: Path) -> None:
    config = storage([loop_device], mode="direct")
    keys = await filled(config, 60, 200_000)
    async with opened(config) as held:
        assert held.log.statistics()["drives"][0]["direct"] is True
        with pytest.raises(EnvironmentFault, match="is in use by another process, mounted"):
            await start_only(config)
    assert await keys_in(config) <= keys
    assert len(await keys_in(config)) > 20
    with pytest.raises(EnvironmentFault, match="is a block device; use storage.mode direct"):
        await start_only(storage([loop_device]))


@pytest.mark.slow
async def test_many_records_come_back(tmp_path: Path) -> None:
    """50,000 tiny records over two drives: all found, in order, with their lengths; what they cost is in docs."""
    config = storage([tmp_path / "a", tmp_path / "b"], "512 MiB")
    await start_only(config)
    for number, path in enumerate((tmp_path / "a", tmp_path / "b")):
        fill_with_records(path, 1 + 25_000 * number, 25_000, 1 + number)
    held = await start_only(config)
    assert [value.record.key for value in held.values] == [key_of(number) for number in range(1, 50_001)]
    assert [value.record.length for value in held.values] == [1] * 25_000 + [2] * 25_000
    assert len({value.location for value in held.values}) == 50_000
    assert held.log.statistics()["records"] == 50_000
