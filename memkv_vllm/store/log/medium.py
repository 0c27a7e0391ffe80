"""Reading and writing one medium: a regular file or a block device. Blocking; for worker threads.

A medium is read and written past the page cache (O_DIRECT) where the file system allows it: the arena is the cache,
and its pages, like everything handed to a medium, are aligned to 4 KiB. Where it is refused (some network and overlay
file systems), the page cache is used, which is slower and otherwise the same.

One process has a medium at a time: an exclusive lock of the open file, and for a block device exclusive opening, which
also keeps out mounted file systems and volume managers.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.format import BLOCK_BYTES

__all__ = ["AlignedBuffer", "FileMedium", "Medium", "OpenMedium", "error_reason"]

MAX_VECTORS = 512
"""Buffers of one system call; the kernel's own limit is 1024."""


class Medium(Protocol):
    """What the log needs of a medium. Every call but ``close`` may raise ``OSError``; all offsets are bytes."""

    name: str
    """For messages: the path."""
    direct: bool
    """Whether the page cache is bypassed."""
    block_device: bool
    created: bool
    """Whether opening it made it."""

    def size(self) -> int:
        """Bytes that it has now."""
        ...

    def resize(self, size: int) -> None:
        """Gives a file that many bytes, without space behind them; nothing for a block device."""
        ...

    def reserve(self, offset: int, length: int) -> None:
        """Takes space for these bytes, so that writing them cannot fail for the lack of it."""
        ...

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills the buffers, or raises."""
        ...

    def writev(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Writes the buffers, all of them, or raises."""
        ...

    def sync(self) -> None:
        """Returns when everything written until now is stable."""
        ...

    def close(self) -> None:
        """Once or more."""
        ...


class OpenMedium(Protocol):
    """How the log gets a medium: :meth:`FileMedium.open`, or a fake in tests."""

    def __call__(self, path: Path, mode: Literal["file", "direct"]) -> Medium:
        """Opens it exclusively."""
        ...


def error_reason(error: OSError) -> str:
    """Name of a counter: ``eio``, ``enospc``, ``short_write`` ..."""
    if isinstance(error, ShortTransferError):
        return error.reason
    return errno.errorcode.get(error.errno or 0, "error").lower()


class ShortTransferError(OSError):
    """The medium took or gave fewer bytes than asked for, and no reason."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(errno.EIO, message)


class AlignedBuffer:
    """``length`` bytes of zeroed memory that begin on a page, for what is not in the arena. Close once."""

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, length)
        self.view = memoryview(self._map)

    def block(self, number: int) -> memoryview:
        """Block ``number`` of it."""
        return self.view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def close(self) -> None:
        """Gives the memory back; a view that is left (in the traceback of an error) keeps it until it goes."""
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass


def read_bytes(medium: Medium, offset: int, length: int) -> bytes:
    """``length`` bytes at ``offset``, both multiples of a block."""
    buffer = AlignedBuffer(length)
    try:
        medium.readv([buffer.view], offset)
        return bytes(buffer.view)
    finally:
        buffer.close()


def write_bytes(medium: Medium, offset: int, data: bytes) -> None:
    """Writes whole blocks that stand in unaligned memory."""
    buffer = AlignedBuffer(len(data))
    try:
        buffer.view[:] = data
        medium.writev([buffer.view], offset)
    finally:
        buffer.close()


class FileMedium:
    """A regular file or a block device behind a file descriptor."""

    def __init__(self, name: str, fd: int, *, direct: bool, block_device: bool, created: bool) -> None:
        """Use :meth:`open`."""
        self.name = name
        self.direct = direct
        self.block_device = block_device
        self.created = created
        self._fd = fd

    def __repr__(self) -> str:
        return f"<FileMedium {self.name}{' direct' if self.direct else ''}{' closed' if self._fd < 0 else ''}>"

    @classmethod
    def open(cls, path: Path, mode: Literal["file", "direct"]) -> FileMedium:
        """Opens a medium for this process alone; mode ``file`` makes a file that is not there.

        Raises:
            EnvironmentFault: it is not there, not of the kind that the mode asks for, or in use; says what to do.
        """
        kind = cls._kind(path, mode)
        created = mode == "file" and kind is None
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if created else 0)
        if kind == "block device":
            flags |= os.O_EXCL
        try:
            fd, direct = cls._open(path, flags)
        except OSError as error:
            raise EnvironmentFault(_explained(path, error)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise EnvironmentFault(_explained(path, error)) from error
        return cls(str(path), fd, direct=direct, block_device=kind == "block device", created=created)

    @staticmethod
    def _kind(path: Path, mode: str) -> Literal["regular file", "block device"] | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            if mode == "file":
                return None
            fix = "name the drive as /dev/disk/by-id shows it, or use storage.mode file, which makes files"
            raise EnvironmentFault(f"storage: {path} does not exist; {fix}") from None
        except OSError as error:
            raise EnvironmentFault(_explained(path, error)) from error
        if stat.S_ISBLK(status.st_mode):
            if mode == "file":
                raise EnvironmentFault(f"storage: {path} is a block device; use storage.mode direct for it")
            return "block device"
        if not stat.S_ISREG(status.st_mode):
            found = "a directory" if stat.S_ISDIR(status.st_mode) else "neither a file nor a block device"
            fix = f"name a file in it, for example {path}/memkv-0" if stat.S_ISDIR(status.st_mode) else "name another"
            raise EnvironmentFault(f"storage: {path} is {found}; {fix}")
        return "regular file"

    @staticmethod
    def _open(path: Path, flags: int) -> tuple[int, bool]:
        """A file descriptor, and whether it bypasses the page cache: some file systems refuse only the first read."""
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            probe = AlignedBuffer(BLOCK_BYTES)
            try:
                os.preadv(fd, [probe.view], 0)
                return fd, True
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EINVAL:
                    raise
            finally:
                probe.close()
        return os.open(path, flags, 0o600), False

    def size(self) -> int:
        """Bytes that it has now."""
        return os.lseek(self._fd, 0, os.SEEK_END)

    def resize(self, size: int) -> None:
        """Gives a file that many bytes."""
        if not self.block_device:
            os.ftruncate(self._fd, size)

    def reserve(self, offset: int, length: int) -> None:
        """Takes space for these bytes."""
        if self.block_device:
            return
        try:
            os.posix_fallocate(self._fd, offset, length)
        except OSError as error:
            # A file system that cannot promise space says so when it is written to.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills the buffers, or raises."""
        self._transfer(os.preadv, buffers, offset, "short_read")

    def writev(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Writes the buffers, all of them, or raises."""
        self._transfer(os.pwritev, [memoryview(buffer) for buffer in buffers], offset, "short_write")

    def _transfer(
        self, call: _Transfer, buffers: Sequence[memoryview], offset: int, short: Literal["short_read", "short_write"]
    ) -> None:
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            moved = call(self._fd, left[:MAX_VECTORS], offset)
            if moved <= 0:
                raise ShortTransferError(short, f"{self.name}: nothing moved at {offset}")
            offset += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if moved:
                left[0] = left[0][moved:]

    def sync(self) -> None:
        """Returns when everything written until now is stable."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes it and gives up the lock; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Transfer(Protocol):
    def __call__(self, fd: int, buffers: list[memoryview], offset: int, /) -> int: ...


def _explained(path: Path, error: OSError) -> str:
    reason = errno.errorcode.get(error.errno or 0, "")
    if reason in ("EAGAIN", "EBUSY"):
        what = "is in use by another process, mounted, part of a volume, or named twice in storage.drives"
        return f"storage: {path} {what}; stop the other server, or find who has it with: lsblk, fuser -v {path}"
    fixes = {
        "EACCES": "give this user the right to read and write it",
        "EPERM": "give this user the right to read and write it",
        "ENOENT": "make its folder first",
        "EROFS": "mount the file system for writing (a systemd unit needs ReadWritePaths= for it, too)",
        "ENOSPC": "free some space there, or use another place",
    }
    fix = fixes.get(reason, "check the drive (dmesg, smartctl) or use another place")
    return f"storage: {path} cannot be opened: {error.strerror or error}; {fix}"
