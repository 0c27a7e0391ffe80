"""Host memory that can be registered with a transport: a sealed memfd, mapped shared.

Staging pools and the store's arena are always such mappings, so that loopback can pass the file descriptor,
verbs can register the address, and CUDA can pin it. A memfd is sealed against shrinking and growing: a
mapping of it can then never fault with SIGBUS because the other side changed its size.

A new mapping has no pages yet: the first write to each is a fault, in which the kernel finds and clears a page. That
is several times slower than a copy (4 KiB pages: 1.5 to 2 GB/s; in a virtual machine whose host backs memory lazily
0.2 GB/s), so owners call :meth:`HostMemory.populate` before bytes that somebody waits for land there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt

from memkv_vllm.errors import EnvironmentFault, LocalProtocolError, RemoteProtocolError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

HugePages = Literal["on", "auto", "advise", "off"]
"""``on``: pages that the operator reserved, or an error; ``auto``: those where enough are free, else as ``advise``;
``advise``: transparent hugepages where the kernel has them for shared memory; ``off``: neither."""

POPULATE_STEP_BYTES = 16 << 20
"""Populating holds up ``mmap`` calls of the whole process for one step, some 10 ms."""
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostMemory:
    """``length`` bytes of shared host memory. Owns the file descriptor and the mapping; close once.

    Attributes:
        fd: the memfd.
        length: bytes.
        array: the bytes as a writable 1-D uint8 array. Views of it must be gone before ``close``.
        address: the mapping's address in this process.
    """

    def __init__(self, fd: int, length: int) -> None:
        """Map ``fd``; use :meth:`create` or :meth:`adopt`."""
        self.fd = fd
        self.length = length
        self._map = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)
        self._closed = False

    @classmethod
    def create(cls, name: str, length: int, hugepages: HugePages = "advise") -> HostMemory:
        """Make a new sealed memfd of ``length`` bytes; ``name`` shows in /proc/PID/maps.

        Raises:
            EnvironmentFault: the machine does not have the memory, or not the hugepages that ``on`` asks for.
        """
        if hugepages in ("on", "auto"):
            try:
                return cls._create(name, length, os.MFD_HUGETLB)
            except (OSError, ValueError, OverflowError) as error:
                if hugepages == "on":
                    raise EnvironmentFault(
                        f"cannot make {length / 2**20:.1f} MiB of reserved hugepages for {name}: {error}; "
                        f"reserve them (sysctl vm.nr_hugepages; whole pages only) or set memory.hugepages: auto"
                    ) from error
        try:
            memory = cls._create(name, length, 0)
        except (OSError, ValueError, OverflowError) as error:
            raise EnvironmentFault(
                f"cannot make {length / 2**20:.1f} MiB of shared memory for {name}: {error}; "
                f"lower its size (a server's arena: memory.max_size) or free memory on this host"
            ) from error
        memory._advise(mmap.MADV_NOHUGEPAGE if hugepages == "off" else mmap.MADV_HUGEPAGE)
        return memory

    @classmethod
    def _create(cls, name: str, length: int, flags: int) -> HostMemory:
        fd = os.memfd_create(f"memkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, length)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, length)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, length: int) -> HostMemory:
        """Map a memfd that a peer passed to us, after checking its kind, seals and size. Owns ``fd``.

        Raises:
            RemoteProtocolError: not a memfd of that length sealed against shrinking and growing.
        """
        try:
            info = os.fstat(fd)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not stat.S_ISREG(info.st_mode) or info.st_size != length or length <= 0:
                raise RemoteProtocolError("region", f"a region of {info.st_size} bytes was passed as {length}")
            if seals & _REQUIRED_SEALS != _REQUIRED_SEALS:
                raise RemoteProtocolError("region", "a region that is not sealed against shrinking and growing")
            return cls(fd, length)
        except OSError as error:
            os.close(fd)
            raise RemoteProtocolError("region", f"the passed file descriptor is no memfd: {error}") from error
        except RemoteProtocolError:
            os.close(fd)
            raise

    def populate(self, offset: int, length: int) -> bool:
        """Back ``length`` bytes at ``offset`` with memory now, so that no copy pays for it later.

        For a worker thread: it takes long, outside the interpreter lock. Contents do not change, so it may run beside
        readers and writers. ``close`` meanwhile is safe.

        Returns:
            False where the kernel cannot do it (before Linux 5.14): then the first writes are slow.

        Raises:
            EnvironmentFault: the machine does not have the memory.
        """
        with self.view(offset, length):  # keeps the mapping
            end = self.address + offset + length
            start = self.address + offset - offset % mmap.PAGESIZE
            for step in range(start, end, POPULATE_STEP_BYTES):
                if _libc.madvise(step, min(POPULATE_STEP_BYTES, end - step), _MADV_POPULATE_WRITE) == 0:
                    continue
                number = ctypes.get_errno()
                if number == errno.EINVAL:
                    return False
                raise EnvironmentFault(
                    f"this host has no memory behind {length / 2**20:.1f} MiB of shared memory: "
                    f"{os.strerror(number)}; lower its size or free memory"
                )
        return True

    def _advise(self, advice: int) -> None:
        try:
            self._map.madvise(advice)
        except OSError:
            pass  # a kernel without transparent hugepages

    def view(self, offset: int, length: int) -> memoryview:
        """A writable view of ``length`` bytes at ``offset``."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise LocalProtocolError(f"[{offset}, {offset + length}) is outside a region of {self.length} bytes")
        return self.array.data[offset : offset + length]

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Unmap and close; a second call does nothing. The mapping goes once the last view of it is gone."""
        if self._closed:
            return
        self._closed = True
        del self.array
        try:
            self._map.close()
        except BufferError:
            # A view is still alive somewhere: the mapping goes with it. Never unmap under a reader's feet.
            pass
        os.close(self.fd)

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HostMemory {self.length} bytes{' closed' if self._closed else ''}>"
