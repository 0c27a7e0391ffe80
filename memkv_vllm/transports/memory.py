"""Host memory that can be registered with a transport: a sealed memfd, mapped shared.

Staging pools and the store's arena are always such mappings, so that loopback can pass the file descriptor,
verbs can register the address, and CUDA can pin it. A memfd is sealed against shrinking and growing: a
mapping of it can then never fault with SIGBUS because the other side changed its size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from types import TracebackType

import numpy as np
import numpy.typing as npt

from memkv_vllm.errors import EnvironmentFault, LocalProtocolError, RemoteProtocolError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


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
    def create(cls, name: str, length: int) -> HostMemory:
        """Make a new sealed memfd of ``length`` bytes; ``name`` shows in /proc/PID/maps.

        Raises:
            EnvironmentFault: the machine does not have the memory.
        """
        fd = os.memfd_create(f"memkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, length)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, length)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise EnvironmentFault(
                f"cannot make {length / 2**20:.1f} MiB of shared memory for {name}: {error}; "
                f"lower its size or free memory on this host"
            ) from error

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
