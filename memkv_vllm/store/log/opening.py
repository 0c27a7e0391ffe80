"""Opens the media of a store, reads and writes their superblocks. Blocking; for worker threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memkv_vllm.config import StorageConfig
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.format import (
    BLOCK_BYTES,
    JOURNAL_OFFSET,
    SUPERBLOCK_COPIES,
    Superblock,
    pack_superblock,
    parse_superblock,
    superblock_version,
)
from memkv_vllm.store.log.journal import pack_batch
from memkv_vllm.store.log.medium import Medium, OpenMedium, read_bytes, write_bytes
from memkv_vllm.store.log.membership import Found, Member, check_version, decide, foreign_content, wipe_advice

__all__ = ["OpenDrive", "close_all", "look", "open_drives", "write_superblock"]

logger = logging.getLogger("memkv.store.log")

FOREIGN_BYTES = 1 << 20
"""As much of a medium must be zeros to count as blank; every file system has something in it."""
SERVER_ID_BYTES = 16


@dataclass(frozen=True)
class OpenDrive:
    """A medium that is ours, with what stands in its superblock (or is to stand there: ``member.changed``)."""

    medium: Medium
    member: Member
    old: Superblock | None
    """None: it was formatted by this start."""


def look(medium: Medium, size: int) -> Found:
    """Reads what a medium is.

    Raises:
        EnvironmentFault: another version's, damaged, too small, or it holds something else.
    """
    name, has = medium.name, medium.size()
    if medium.block_device and size > has:
        raise EnvironmentFault(
            f"storage: {name} has {has} bytes, max_size asks for {size}; lower max_size of this drive"
        )
    beginning = read_bytes(medium, 0, min(has - has % BLOCK_BYTES, FOREIGN_BYTES)) if has >= BLOCK_BYTES else b""
    for copy in range(SUPERBLOCK_COPIES):
        block = beginning[copy * BLOCK_BYTES : (copy + 1) * BLOCK_BYTES]
        check_version(name, block, block_device=medium.block_device)
    copies = [
        found
        for copy in range(SUPERBLOCK_COPIES)
        if (found := parse_superblock(beginning[copy * BLOCK_BYTES : (copy + 1) * BLOCK_BYTES])) is not None
    ]
    if copies:
        # Of one generation a complete one counts: formatting may have ended between the two.
        best = max(copies, key=lambda block: (block.generation, block.complete))
        return Found(name, best, size, damaged=copies != [best] * SUPERBLOCK_COPIES)
    what = foreign_content(beginning)
    if what is None and has % BLOCK_BYTES and not medium.block_device:
        # Its last bytes cannot be looked at past the page cache; a file of ours has whole blocks.
        what = f"{has} bytes that are no memkv store"
    if what is not None:
        if superblock_version(beginning) is not None:
            if not any(beginning[SUPERBLOCK_COPIES * BLOCK_BYTES :]):
                return Found(name, None, size)  # formatting it ended in its first write
            what = "a damaged memkv superblock"
        raise EnvironmentFault(
            f"storage: {name} holds {what}, expected a memkv store or a blank medium; nothing was written. Name "
            f"another one, or {wipe_advice(name, block_device=medium.block_device)}"
        )
    return Found(name, None, size)


def write_superblock(medium: Medium, block: Superblock) -> None:
    """Writes both copies, one after the other: a torn write leaves the other one."""
    data = pack_superblock(block)
    for copy in range(SUPERBLOCK_COPIES):
        write_bytes(medium, copy * BLOCK_BYTES, data)
        medium.sync()


def _format(medium: Medium, block: Superblock) -> None:
    """Writes everything but the superblock's word that the store is complete.

    The superblock comes first: a medium without one that is not all zeros is somebody else's.
    """
    geometry = block.geometry
    medium.resize(geometry.size)
    medium.reserve(0, geometry.segments_offset)
    write_superblock(medium, block._replace(complete=False))
    snapshot, _ = pack_batch(block.tag, 0, 0, 0, (), begins=True, ends=True)
    write_bytes(medium, JOURNAL_OFFSET, snapshot)
    medium.sync()


def _carry_out(media: Sequence[Medium], members: Sequence[Member]) -> None:
    for medium, member in zip(media, members, strict=True):
        if member.blank:
            _format(medium, member.superblock)
    for medium, member in zip(media, members, strict=True):
        if member.superblock.geometry.size > medium.size():
            medium.resize(member.superblock.geometry.size)
        # A smaller size is written once it is known that nothing lies beyond it: see recovery.
        if member.blank:
            write_superblock(medium, member.superblock)


def close_all(media: Sequence[Medium], *, failed: bool) -> None:
    """Closes media; after a failed start files that it made and left empty are removed again."""
    for medium in media:
        empty = failed and medium.created and medium.size() == 0
        medium.close()
        if empty:
            Path(medium.name).unlink(missing_ok=True)


def open_drives(
    config: StorageConfig, open_medium: OpenMedium, new_id: Callable[[], bytes] | None = None
) -> tuple[bytes, list[OpenDrive]]:
    """Opens all drives of the settings, in their order.

    Returns:
        the store's id, and the drives. What their superblocks say now may still have to be written
        (``member.changed``).

    Raises:
        EnvironmentFault: see :func:`memkv_vllm.store.log.membership.decide`; nothing was changed.
    """
    mode: Literal["file", "direct"] = "direct" if config.mode == "direct" else "file"
    media: list[Medium] = []
    try:
        found = []
        for drive in config.drives:
            medium = open_medium(drive.media, mode)
            media.append(medium)
            found.append(_looked_at(medium, drive.max_size))
        membership = decide(
            found,
            segment_bytes=config.segment_size,
            missing_drives=config.missing_drives,
            new_id=new_id or (lambda: os.urandom(SERVER_ID_BYTES)),
        )
        try:
            _carry_out(media, membership.members)
        except OSError as error:
            raise EnvironmentFault(
                f"storage: a drive could not be formatted: {error}; check it, then try again"
            ) from error
    except BaseException:
        close_all(media, failed=True)
        raise
    for note in membership.notes:
        logger.info("%s", note)
    for medium in media:
        if not medium.direct:
            logger.warning(
                "drive.buffered media=%s: its file system does not allow O_DIRECT; the page cache is used, which costs "
                "memory and time. Use a local ext4 or XFS file system or a block device", medium.name,
            )  # fmt: skip
    return membership.server_id, [
        OpenDrive(medium, member, None if member.blank else one.superblock)
        for medium, member, one in zip(media, membership.members, found, strict=True)
    ]


def _looked_at(medium: Medium, max_size: int) -> Found:
    try:
        return look(medium, max_size - max_size % BLOCK_BYTES)
    except OSError as error:
        raise EnvironmentFault(
            f"storage: {medium.name} cannot be read: {error}; check the drive (dmesg, smartctl) or remove it"
        ) from error
