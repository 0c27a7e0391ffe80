"""Which drives make up a store, decided from what their media say. Pure: nothing is changed before all is decided.

The superblock with the highest generation knows the ids of all drives of the store. A start may find drives in another
order, a new medium beside them (it joins), one missing, or one that belongs to somebody else. What cannot be done
without losing values is refused with what was found, what was expected, and how to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.format import (
    FORMAT_VERSION,
    MAX_DRIVES,
    MIN_SEGMENTS,
    Geometry,
    Superblock,
    default_segment_bytes,
    superblock_version,
)

__all__ = ["Found", "Member", "Membership", "decide", "foreign_content", "wipe_advice"]


class Found(NamedTuple):
    """What a medium showed."""

    name: str
    """Its path."""
    superblock: Superblock | None
    """None: it is blank."""
    size: int
    """Bytes that may be used: ``max_size``."""
    damaged: bool = False
    """The superblock's two copies are not the same: the worse one is to be written again."""


class Member(NamedTuple):
    """One drive of the store that is to be run, in the order of the settings."""

    superblock: Superblock
    """As it is to stand on the drive."""
    blank: bool
    """To be formatted."""
    changed: bool
    """The superblock differs from what stands there."""


class Membership(NamedTuple):
    """All drives, and what is worth a log line."""

    server_id: bytes
    members: tuple[Member, ...]
    notes: tuple[str, ...]


_SIGNATURES = (
    (0x438, b"\x53\xef", "an ext2/3/4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a btrfs file system"),
    (0x200, b"EFI PART", "a GPT partition table"),
    (0x200, b"LABELONE", "an LVM physical volume"),
    (0, b"LUKS", "a LUKS container"),
    (0xFF6, b"SWAPSPACE2", "swap space"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a software RAID member"),
    (0x1FE, b"\x55\xaa", "a boot sector or partition table"),
)


def foreign_content(beginning: bytes) -> str | None:
    """What the first bytes of a medium without a superblock are; None: nothing, all zeros."""
    if not any(beginning):
        return None
    for offset, magic, what in _SIGNATURES:
        if beginning[offset : offset + len(magic)] == magic:
            return what
    return "bytes that are no memkv store"


def wipe_advice(name: str, *, block_device: bool) -> str:
    """How to empty a medium on purpose."""
    if block_device:
        return f"to lose all that is on it: wipefs -a {name} && dd if=/dev/zero of={name} bs=1M count=1 oflag=direct"
    return f"to lose all that is in it: rm {name}"


def check_version(name: str, beginning: bytes, *, block_device: bool) -> None:
    """Refuses another version's store.

    Raises:
        EnvironmentFault: P018: rather than starting empty, say why nothing would be found.
    """
    version = superblock_version(beginning)
    if version is None or version == FORMAT_VERSION:
        return
    ours = f"this one reads and writes version {FORMAT_VERSION}"
    if version > FORMAT_VERSION:
        raise EnvironmentFault(
            f"storage: {name} was made by a newer version (format version {version}; {ours}); "
            f"start it with that version, or {wipe_advice(name, block_device=block_device)}"
        )
    raise EnvironmentFault(
        f"storage: {name} was made by an older version (format version {version}; {ours}): its values cannot be found "
        f"by this one; start it with that version, or {wipe_advice(name, block_device=block_device)}"
    )


def _same_store(found: Sequence[Found]) -> Superblock | None:
    """The newest superblock; None: all are blank, or were never completed."""
    formatted = [one for one in found if one.superblock is not None]
    complete = [one for one in formatted if one.superblock and one.superblock.complete]
    if not complete:
        return None
    first = complete[0]
    for other in complete[1:]:
        if first.superblock and other.superblock and first.superblock.server_id != other.superblock.server_id:
            raise EnvironmentFault(
                f"storage: {first.name} belongs to store {first.superblock.server_id.hex()}, {other.name} to store "
                f"{other.superblock.server_id.hex()}; list the drives of one store in storage.drives"
            )
    return max((one.superblock for one in complete if one.superblock), key=lambda block: block.generation)


def _check_members(found: Sequence[Found], newest: Superblock, missing_drives: Literal["refuse", "forget"]) -> None:
    here: dict[bytes, str] = {}
    for one in found:
        block = one.superblock
        if block is None or not block.complete and block.drive_id not in newest.drives:
            continue
        if block.drive_id in here:
            raise EnvironmentFault(
                f"storage: {here[block.drive_id]} and {one.name} hold the same drive {block.drive_id.hex()}: one is a "
                f"copy or another name of the other; remove one from storage.drives"
            )
        here[block.drive_id] = one.name
        if block.drive_id not in newest.drives:
            raise EnvironmentFault(
                f"storage: {one.name} (drive {block.drive_id.hex()}) was removed from this store before: what it holds "
                f"is out of date; remove it from storage.drives, or wipe it so that it can join as a new drive"
            )
    missing = [drive_id for drive_id in newest.drives if drive_id not in here]
    if missing and missing_drives == "refuse":
        names = ", ".join(f"{drive_id.hex()} (number {newest.drives.index(drive_id)})" for drive_id in missing)
        raise EnvironmentFault(
            f"storage: {len(missing)} of the store's {len(newest.drives)} drives not found: {names}; found: "
            f"{', '.join(here.values()) or 'none'}. Put it back into storage.drives; if it is lost, set "
            f"storage.missing_drives: forget for one start, which gives up the values that it held"
        )


def _checked(name: str, geometry: Geometry) -> Geometry:
    size = geometry.size
    if geometry.num_segments < MIN_SEGMENTS:
        need = geometry.segments_offset + MIN_SEGMENTS * geometry.segment_bytes
        raise EnvironmentFault(
            f"storage: {name} of {size} bytes holds {max(0, geometry.num_segments)} segments of "
            f"{geometry.segment_bytes} bytes, at least {MIN_SEGMENTS} are needed; give it {need} bytes (max_size), or "
            f"a smaller storage.segment_size"
        )
    return geometry


def decide(
    found: Sequence[Found],
    *,
    segment_bytes: int | None,
    missing_drives: Literal["refuse", "forget"],
    new_id: Callable[[], bytes],
) -> Membership:
    """What is to be run.

    Args:
        found: what each medium showed, in the order of the settings.
        segment_bytes: of drives that are formatted now; None: by their size.
        missing_drives: setting ``storage.missing_drives``.
        new_id: makes 16 random bytes.

    Raises:
        EnvironmentFault: it cannot be done without losing values; nothing was changed.
    """
    if len(found) > MAX_DRIVES:
        raise EnvironmentFault(f"storage: {len(found)} drives; at most {MAX_DRIVES} make up one store")
    newest = _same_store(found)
    known: tuple[bytes, ...] = ()
    if newest is not None:
        _check_members(found, newest, missing_drives)
        known = newest.drives
    server_id = newest.server_id if newest is not None else new_id()
    blank = [one.superblock is None or one.superblock.drive_id not in known for one in found]
    ids = [
        new_id() if is_blank or one.superblock is None else one.superblock.drive_id
        for one, is_blank in zip(found, blank, strict=True)
    ]
    generation = 1 if newest is None else newest.generation + (set(ids) != set(known))
    members = []
    for one, drive_id, is_blank in zip(found, ids, blank, strict=True):
        old = None if is_blank else one.superblock
        if old is None:
            geometry = Geometry.for_size(one.size, segment_bytes or default_segment_bytes(one.size))
        else:
            geometry = old.geometry._replace(size=one.size)
        # A list of the same drives in another order is the same list: the ids are sorted.
        ids_now = tuple(sorted(ids))
        block = Superblock(generation, server_id, drive_id, True, ids_now, _checked(one.name, geometry))
        members.append(Member(block, is_blank, block != old or one.damaged))
    return Membership(server_id, tuple(members), tuple(_notes(found, members, known)))


def _notes(found: Sequence[Found], members: Sequence[Member], known: Sequence[bytes]) -> list[str]:
    notes = []
    for one, member in zip(found, members, strict=True):
        what = member.superblock
        if member.blank:
            joined = "a new store" if not known else "joins the store"
            segments = f"{what.geometry.num_segments} segments of {what.geometry.segment_bytes} bytes"
            notes.append(f"drive.formatted media={one.name} id={what.drive_id.hex()}: {joined}, {segments}")
        elif one.superblock and one.superblock.geometry.size != one.size:
            before = one.superblock.geometry.size
            notes.append(f"drive.resized media={one.name} from={before} to={one.size} bytes")
    gone = set(known) - {member.superblock.drive_id for member in members}
    notes += [f"drive.forgotten id={drive_id.hex()}: the values that it held are gone" for drive_id in sorted(gone)]
    return notes
