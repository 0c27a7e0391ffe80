"""Media in memory that fail as media do: torn, lost and reordered writes, errors, short writes, wrong bytes, delays."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.medium import ShortTransferError

__all__ = ["FakeHost", "FakeMedium", "Gate", "failing", "slow"]

Fault = Callable[[str, Path, int], None]
"""Called with the operation, the path and the offset; may raise, or sleep."""


@dataclass
class Disk:
    """The bytes of one medium, and what was written since the last sync."""

    volatile: bytearray
    stable: bytearray
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)
    open: bool = False


class FakeHost:
    """A machine with media by path. Its power can be cut, or its server killed, at any write.

    Attributes:
        writes: write calls until now, over all media.
        crash_at: the number of the write that does not end; None: none.
        crashed: it has happened: every further call of a medium fails.
        fault: called with the operation (``read``, ``write``, ``sync``, ``reserve``), the path and the offset; may
            raise, or sleep.
        spoil: called with the path, the offset and the bytes that a read found; returns what it gets.
        full: bytes of all media together for which there is space (:meth:`FakeMedium.reserve`); None: no limit.
    """

    def __init__(self, *, block_devices: bool = False) -> None:
        self.disks: dict[Path, Disk] = {}
        self.block_devices = block_devices
        self.writes = 0
        self.crash_at: int | None = None
        self.crashed = False
        self.fault: Fault | None = None
        self.spoil: Callable[[Path, int, bytes], bytes] | None = None
        self.full: int | None = None
        self.reserved: dict[tuple[Path, int], int] = {}
        self.lock = threading.Lock()

    def add_device(self, path: Path, size: int) -> None:
        """A block device."""
        self.disks[path] = Disk(bytearray(size), bytearray(size))

    def open(self, path: Path, mode: Literal["file", "direct"]) -> FakeMedium:
        """As :meth:`FileMedium.open`."""
        created = path not in self.disks
        if created and (mode == "direct" or self.block_devices):
            raise EnvironmentFault(f"storage: {path} does not exist")
        disk = self.disks.setdefault(path, Disk(bytearray(), bytearray()))
        if disk.open:
            raise EnvironmentFault(f"storage: {path} is in use")
        disk.open = True
        return FakeMedium(self, path, disk, created=created)

    def restart(self, *, power_lost: bool, seed: int) -> None:
        """After a crash: what a killed process wrote is there; after a power loss any part of what was not synced.

        Args:
            power_lost: whether more than the process ended.
            seed: decides which unsynced writes survive, and where the last ones are torn.
        """
        choices = random.Random(seed)
        for disk in self.disks.values():
            if power_lost:
                for offset, data in disk.unsynced:
                    fate = choices.random()
                    if fate < 0.4:
                        disk.stable[offset : offset + len(data)] = data
                    elif fate < 0.7:
                        # A drive writes sectors whole.
                        start, end = sorted(512 * choices.randint(0, len(data) // 512) for _ in range(2))
                        disk.stable[offset + start : offset + end] = data[start:end]
                disk.volatile = bytearray(disk.stable)
            else:
                disk.stable = bytearray(disk.volatile)
            disk.unsynced = []
            disk.open = False
        self.crashed, self.crash_at, self.writes = False, None, 0

    def check(self, operation: str, path: Path, offset: int) -> None:
        """What every call of a medium goes through."""
        if self.crashed:
            raise OSError(errno.EIO, "the machine is down")
        if self.fault is not None:
            self.fault(operation, path, offset)


class FakeMedium:
    """One medium of a :class:`FakeHost`."""

    direct = True

    def __init__(self, host: FakeHost, path: Path, disk: Disk, *, created: bool) -> None:
        self.name = str(path)
        self.created = created
        self.block_device = host.block_devices
        self._host, self._path, self._disk = host, path, disk

    def size(self) -> int:
        return len(self._disk.volatile)

    def resize(self, size: int) -> None:
        if not self.block_device:
            for image in (self._disk.volatile, self._disk.stable):
                image.extend(bytes(max(0, size - len(image))))

    def reserve(self, offset: int, length: int) -> None:
        host = self._host
        host.check("reserve", self._path, offset)
        taken = {**host.reserved, (self._path, offset): length}
        if host.full is not None and sum(taken.values()) > host.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        host.reserved = taken

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._host.check("read", self._path, offset)
        for buffer in buffers:
            data = bytes(self._disk.volatile[offset : offset + len(buffer)])
            if len(data) < len(buffer):
                raise ShortTransferError("short_read", "nothing moved")
            buffer[:] = self._host.spoil(self._path, offset, data) if self._host.spoil else data
            offset += len(buffer)

    def writev(self, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        host, data = self._host, b"".join(buffers)
        host.check("write", self._path, offset)
        with host.lock:
            if host.crashed:
                raise OSError(errno.EIO, "the machine is down")
            assert offset % 4096 == 0 and len(data) % 4096 == 0, "unaligned"
            assert offset + len(data) <= self.size(), "beyond the end"
            host.writes += 1
            if host.writes == host.crash_at:
                host.crashed = True
                data = data[: random.Random(host.writes * len(data)).randint(0, len(data))]
            self._disk.volatile[offset : offset + len(data)] = data
            self._disk.unsynced.append((offset, data))
            if host.crashed:
                raise OSError(errno.EIO, "the machine is down")

    def sync(self) -> None:
        self._host.check("sync", self._path, 0)
        with self._host.lock:
            for offset, data in self._disk.unsynced:
                self._disk.stable[offset : offset + len(data)] = data
            self._disk.unsynced = []

    def close(self) -> None:
        self._disk.open = False


def failing(operation: str, number: int, *, path: Path | None = None, times: int = 1) -> Fault:
    """A fault: ``times`` calls of ``operation`` fail with errno ``number``."""
    left = times

    def fault(called: str, at: Path, offset: int) -> None:
        nonlocal left
        if called == operation and left and path in (None, at):
            left -= 1
            raise OSError(number, "injected")

    return fault


def slow(operation: str, seconds: float, *, path: Path | None = None) -> Fault:
    """A fault: every call of ``operation`` takes that long."""

    def fault(called: str, at: Path, offset: int) -> None:
        if called == operation and path in (None, at):
            time.sleep(seconds)

    return fault


class Gate:
    """A fault: calls of ``operation`` at offsets that ``where`` likes wait until the gate is opened."""

    def __init__(
        self, operation: str, where: Callable[[int], bool] = lambda offset: True, *, path: Path | None = None
    ) -> None:
        self._operation, self._where, self._path = operation, where, path
        self._open = threading.Event()
        self.reached = 0
        """Calls that came here."""

    def __call__(self, operation: str, path: Path, offset: int) -> None:
        if operation == self._operation and self._where(offset) and self._path in (None, path):
            self.reached += 1
            assert self._open.wait(8), "the gate was never opened"

    def open(self) -> None:
        """Lets all of them go on."""
        self._open.set()
