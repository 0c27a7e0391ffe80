"""What the ``gpu`` medium needs of the CUDA driver and torch does not offer, through ``libcuda``. The only user of it.

Everything runs in the device's primary context, which is torch's too, pushed for each call: any thread may call. Calls
release the interpreter lock. Every call that fails raises :class:`CudaError`; a function that an old driver lacks too.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from memkv_vllm.errors import EnvironmentFault

__all__ = ["CudaDriver", "CudaError", "Driver", "GpuFacts", "HostCopy", "LibCuda", "Ordering", "pci_address"]

GPU_PAGE_BYTES = 64 * 1024
"""Memory is exported and pinned in whole pages of the GPU."""

_NOT_FOUND = 500
"""CUDA_ERROR_NOT_FOUND: here also for a function that the library lacks."""

# CUdevice_attribute and CUpointer_attribute
_RDMA_SUPPORTED, _FLUSH_OPTIONS, _WRITES_ORDERING, _DMABUF_SUPPORTED = 116, 117, 118, 124
_RDMA_CAPABLE = 15

_FLUSH_BY_HOST = 1
"""Bit of _FLUSH_OPTIONS: cuFlushGPUDirectRDMAWrites works."""
_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER = 0, 100
_HANDLE_DMABUF_FD = 1
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_NO_TIMING = 1 | 2
_HOST_PORTABLE = 1


class CudaError(Exception):
    """A call of the driver failed.

    Attributes:
        call: the function, such as ``cuMemAlloc_v2``.
        code: its ``CUresult``.
    """

    def __init__(self, call: str, code: int, name: str = "") -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {name or 'CUDA error'} ({code})")


class Ordering(IntEnum):
    """``CUGPUDirectRDMAWritesOrdering``: who sees a NIC's writes in order without a flush."""

    NONE = 0
    OWNER = 100
    """The GPU that they go to: what work launched after the news of a write reads, is what was written."""
    ALL_DEVICES = 200


class GpuFacts(NamedTuple):
    """What a GPU can, and its memory now. Sizes in bytes."""

    name: str
    pci: str
    """Such as ``0000:1b:00.0``, in lower case, as in sysfs."""
    total_bytes: int
    free_bytes: int
    rdma_supported: bool
    """NICs may reach its memory at all."""
    dmabuf_supported: bool
    writes_ordering: int
    """See :class:`Ordering`."""
    can_flush: bool
    """``cuFlushGPUDirectRDMAWrites`` works."""


class HostCopy(Protocol):
    """Copies GPU memory to one pinned buffer of the host. One caller at a time."""

    def read(self, address: int, length: int) -> memoryview:
        """``length`` bytes at ``address``, valid until the next call. Blocks without spinning."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class Driver(Protocol):
    """The CUDA driver for one device."""

    def facts(self) -> GpuFacts:
        """As it is now."""
        ...

    def allocate(self, length: int) -> int:
        """At least ``length`` zeroed bytes of device memory of their own (``cuMemAlloc``); returns the address."""
        ...

    def rdma_capable(self, address: int) -> bool:
        """Whether NICs may reach this memory."""
        ...

    def export(self, address: int, length: int) -> int:
        """A dmabuf descriptor for the range, which is whole pages; the caller closes it."""
        ...

    def free(self, address: int) -> None:
        """Free what :meth:`allocate` returned."""
        ...

    def flush(self) -> None:
        """Make what NICs wrote before visible to work launched from now on."""
        ...

    def host_copy(self, length: int) -> HostCopy:
        """A copier with a buffer of ``length`` bytes and a stream of its own."""
        ...

    def close(self) -> None:
        """Let go of the context. Nothing is called afterwards."""
        ...


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetPCIBusId": (POINTER(c_char), c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemsetD8Async": (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemGetHandleForAddressRange": (c_void_p, c_uint64, c_size_t, c_int, c_ulonglong),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class LibCuda:
    """The library itself: typed calls that raise.

    Args:
        library: of the driver, found by the loader.

    Raises:
        EnvironmentFault: there is none.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise EnvironmentFault(
                f"the CUDA driver's library cannot be loaded ({error}); install the NVIDIA driver, or start the "
                "container with it (docker run --gpus all), or set memkv_scratch_medium: host"
            ) from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call ``name``.

        Raises:
            CudaError: it failed, or this driver does not have it.
        """
        function = getattr(self._library, name, None)
        code = _NOT_FOUND if function is None else int(function(*arguments))
        if code != 0:
            raise CudaError(name, code, self._name_of(code) if function is not None else "not in this driver")

    def _name_of(self, code: int) -> str:
        text = c_char_p()
        if self._library.cuGetErrorName(code, byref(text)) != 0 or text.value is None:
            return ""
        return text.value.decode("ascii", "replace")


class CudaDriver:
    """See :class:`Driver` and the module.

    Args:
        ordinal: of the device, as torch counts (``CUDA_VISIBLE_DEVICES`` holds for both).
        library: the driver's.

    Raises:
        EnvironmentFault: no driver.
        CudaError: no such device.
    """

    def __init__(self, ordinal: int, library: LibCuda | None = None) -> None:
        self._call = LibCuda() if library is None else library
        self._call("cuInit", 0)
        device, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(device), ordinal)
        self._device = device.value
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        self._closed = False

    @contextlib.contextmanager
    def current(self) -> Iterator[LibCuda]:
        """Calls inside are of this device."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield self._call
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def facts(self) -> GpuFacts:
        """See the protocol. What an old driver does not know counts as missing."""
        free, total = c_size_t(), c_size_t()
        with self.current() as call:
            call("cuMemGetInfo_v2", byref(free), byref(total))
        return GpuFacts(
            name=self._text("cuDeviceGetName"),
            pci=self._text("cuDeviceGetPCIBusId").lower(),
            total_bytes=total.value,
            free_bytes=free.value,
            rdma_supported=self._attribute(_RDMA_SUPPORTED) == 1,
            dmabuf_supported=self._attribute(_DMABUF_SUPPORTED) == 1,
            writes_ordering=self._attribute(_WRITES_ORDERING),
            can_flush=bool(self._attribute(_FLUSH_OPTIONS) & _FLUSH_BY_HOST),
        )

    def _text(self, call: str) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._call(call, buffer, len(buffer), self._device)
        return buffer.value.decode("utf-8", "replace")

    def _attribute(self, number: int) -> int:
        value = c_int()
        try:
            self._call("cuDeviceGetAttribute", byref(value), number, self._device)
        except CudaError:
            return 0
        return value.value

    def allocate(self, length: int) -> int:
        """See the protocol."""
        address = c_uint64()
        with self.current() as call:
            call("cuMemAlloc_v2", byref(address), length)
            try:
                with _Work(call) as work:
                    call("cuMemsetD8Async", address, 0, length, work.stream)
                    work.wait()
            except BaseException:
                call("cuMemFree_v2", address)
                raise
        return int(address.value)

    def rdma_capable(self, address: int) -> bool:
        """See the protocol."""
        value = c_int()
        try:
            with self.current() as call:
                call("cuPointerGetAttribute", byref(value), _RDMA_CAPABLE, address)
        except CudaError:
            return False
        return value.value == 1

    def export(self, address: int, length: int) -> int:
        """See the protocol."""
        fd = c_int(-1)
        with self.current() as call:
            call("cuMemGetHandleForAddressRange", byref(fd), address, length, _HANDLE_DMABUF_FD, 0)
        return fd.value

    def free(self, address: int) -> None:
        """See the protocol."""
        with self.current() as call:
            call("cuMemFree_v2", address)

    def flush(self) -> None:
        """See the protocol."""
        with self.current() as call:
            call("cuFlushGPUDirectRDMAWrites", _FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER)

    def host_copy(self, length: int) -> HostCopy:
        """See the protocol."""
        return _PinnedCopy(self, length)

    def close(self) -> None:
        """See the protocol; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)


def pci_address(ordinal: int) -> str:
    """Where a device is, such as ``0000:1b:00.0``; empty where there is no driver or device to say so."""
    device, buffer = c_int(), ctypes.create_string_buffer(256)
    try:
        call = LibCuda()
        call("cuInit", 0)
        call("cuDeviceGet", byref(device), ordinal)
        call("cuDeviceGetPCIBusId", buffer, len(buffer), device)
    except (CudaError, EnvironmentFault):
        return ""
    return buffer.value.decode("ascii", "replace").lower()


class _Work:
    """A stream and an event of the current context. The event blocks: the waiting thread sleeps."""

    def __init__(self, call: LibCuda) -> None:
        self._call = call
        self.stream, self._done = c_void_p(), c_void_p()
        call("cuStreamCreate", byref(self.stream), _STREAM_NON_BLOCKING)
        try:
            call("cuEventCreate", byref(self._done), _EVENT_BLOCKING_NO_TIMING)
        except BaseException:
            call("cuStreamDestroy_v2", self.stream)
            raise

    def wait(self) -> None:
        """Return when all that was given to the stream is done."""
        self._call("cuEventRecord", self._done, self.stream)
        self._call("cuEventSynchronize", self._done)

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *_: object) -> None:
        self._call("cuEventDestroy_v2", self._done)
        self._call("cuStreamDestroy_v2", self.stream)


class _PinnedCopy:
    """See :class:`HostCopy`."""

    def __init__(self, driver: CudaDriver, length: int) -> None:
        self._driver = driver
        self._length = length
        self._buffer = c_void_p()
        with driver.current() as call:
            call("cuMemHostAlloc", byref(self._buffer), length, _HOST_PORTABLE)
            try:
                self._work = _Work(call)
            except BaseException:
                call("cuMemFreeHost", self._buffer)
                raise
        self._view = memoryview((ctypes.c_ubyte * length).from_address(self._buffer.value or 0)).cast("B")

    def read(self, address: int, length: int) -> memoryview:
        """See the protocol."""
        assert 0 < length <= self._length
        with self._driver.current() as call:
            try:
                call("cuMemcpyDtoHAsync_v2", self._buffer, address, length, self._work.stream)
            finally:
                # Also after an error: nothing may be on its way into the buffer when it is freed.
                self._work.wait()
        return self._view[:length]

    def close(self) -> None:
        """See the protocol."""
        self._view.release()
        with self._driver.current() as call:
            with self._work:
                pass
            call("cuMemFreeHost", self._buffer)
