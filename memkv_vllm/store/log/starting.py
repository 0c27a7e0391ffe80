"""The start of a log: all drives are read side by side, then brought up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.format import Superblock, pack_segment_header
from memkv_vllm.store.log.medium import write_bytes
from memkv_vllm.store.log.opening import OpenDrive, write_superblock
from memkv_vllm.store.log.recovery import Memory, Survivors, merge, merge_journals
from memkv_vllm.store.log.scanning import DriveContent, read_drive

__all__ = ["Content", "read_all", "settle"]


@dataclass
class Content:
    """What all drives say, and what follows from it."""

    drives: list[DriveContent]
    memory: Memory
    survivors: Survivors


def _widest(drive: OpenDrive) -> Superblock:
    """The superblock with a size that covers all that may be in use: ``max_size`` may have been lowered."""
    block = drive.member.superblock
    old = drive.old.geometry.size if drive.old is not None else 0
    return block._replace(geometry=block.geometry._replace(size=max(block.geometry.size, old)))


async def read_all(drives: Sequence[OpenDrive]) -> Content:
    """Reads all drives side by side, and decides which records survive.

    Raises:
        EnvironmentFault: a drive cannot be read.
    """
    found: list[DriveContent | None] = [None] * len(drives)
    limiter = anyio.CapacityLimiter(len(drives))
    faults: list[EnvironmentFault] = []

    async def read(number: int, drive: OpenDrive) -> None:
        try:
            found[number] = await anyio.to_thread.run_sync(read_drive, drive.medium, _widest(drive), limiter=limiter)
        except EnvironmentFault as fault:
            faults.append(fault)

    async with anyio.create_task_group() as tasks:
        for number, drive in enumerate(drives):
            tasks.start_soon(read, number, drive)
    if faults:
        raise faults[0]
    contents = [content for content in found if content is not None]

    def decide() -> Content:
        memory = merge_journals(content.journal for content in contents)
        ids = [drive.member.superblock.drive_id for drive in drives]
        memory.drives_out = {name: sequence for name, sequence in memory.drives_out.items() if name in ids}
        return Content(contents, memory, merge(contents, ids, memory))

    return await anyio.to_thread.run_sync(decide)


def settle(drives: Sequence[OpenDrive], content: Content) -> None:
    """Writes what the start changes: ends of what was being written, superblocks. Blocking.

    Raises:
        EnvironmentFault: a drive was made smaller than what it holds, or cannot be written.
    """
    for number, drive in enumerate(drives):
        _check_size(number, drive, content.survivors)
    try:
        for number, drive in enumerate(drives):
            repairs = content.drives[number].repairs
            for offset, data in repairs:
                write_bytes(drive.medium, offset, data)
            if repairs:
                drive.medium.sync()
            if drive.member.changed:
                _end_cut_off(drive, content.drives[number])
                write_superblock(drive.medium, drive.member.superblock)
    except OSError as error:
        raise EnvironmentFault(
            f"storage: {drive.medium.name} cannot be written: {error}; check the drive (dmesg, smartctl)"
        ) from error


def _check_size(number: int, drive: OpenDrive, survivors: Survivors) -> None:
    geometry = drive.member.superblock.geometry
    beyond = [
        (place.segment.number, int(np.count_nonzero(~survivors.dead_of(place))))
        for place in survivors.places
        if place.drive == number and place.segment.number >= geometry.num_segments
    ]
    records = sum(count for _, count in beyond)
    if records:
        last = max(segment for segment, count in beyond if count)
        raise EnvironmentFault(
            f"storage: max_size of {drive.medium.name} is {geometry.size} bytes now, but {records} values lie beyond "
            f"that; they need {geometry.at(last + 1, 0)} bytes. Set max_size to at least that, or wipe the drive"
        )


def _end_cut_off(drive: OpenDrive, content: DriveContent) -> None:
    """Starts segments beyond a smaller size anew, so that nothing in them comes back when the drive grows again."""
    block, wide = drive.member.superblock, _widest(drive).geometry
    for segment in content.segments:
        if segment.number >= block.geometry.num_segments:
            header = pack_segment_header(block.tag, segment.number, segment.incarnation + 1)
            write_bytes(drive.medium, wide.at(segment.number, 0), header)
    drive.medium.sync()  # before the superblock says that nothing is there
