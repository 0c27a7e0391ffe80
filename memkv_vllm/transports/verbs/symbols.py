"""libibverbs' functions by ctypes, with their types and with errors that are raised.

A call that may take time lets go of the interpreter lock (:class:`ctypes.CDLL` does). The three that never wait and
come often, polling, arming and taking an event from a non-blocking descriptor, keep it: with another thread busy,
letting go costs up to a switch interval (5 ms), a thousand times what they take.
"""

from __future__ import annotations

import ctypes
import errno
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from typing import Any

from memkv_vllm.transports.verbs.provider import VerbsError

__all__ = ["ARM", "DEFAULT_LIBRARY", "POLL", "POST", "Library"]

DEFAULT_LIBRARY = "libibverbs.so.1"

POST = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, use_errno=True)
POLL = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
ARM = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int)
"""Types of ``ibv_post_send``, ``ibv_poll_cq``, ``ibv_req_notify_cq``: pointers in ``struct ibv_context``."""

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ibv_get_device_list": (c_void_p, POINTER(c_int)),
    "ibv_free_device_list": (None, c_void_p),
    "ibv_get_device_name": (c_char_p, c_void_p),
    "ibv_open_device": (c_void_p, c_void_p),
    "ibv_close_device": (c_int, c_void_p),
    "ibv_query_device": (c_int, c_void_p, c_void_p),
    "ibv_query_port": (c_int, c_void_p, c_uint8, c_void_p),
    "ibv_query_gid": (c_int, c_void_p, c_uint8, c_int, c_void_p),
    "ibv_get_async_event": (c_int, c_void_p, c_void_p),
    "ibv_ack_async_event": (None, c_void_p),
    "ibv_alloc_pd": (c_void_p, c_void_p),
    "ibv_dealloc_pd": (c_int, c_void_p),
    "ibv_reg_mr": (c_void_p, c_void_p, c_void_p, c_size_t, c_int),
    "ibv_reg_mr_iova2": (c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_uint),
    "ibv_reg_dmabuf_mr": (c_void_p, c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int),
    "ibv_dereg_mr": (c_int, c_void_p),
    "ibv_create_comp_channel": (c_void_p, c_void_p),
    "ibv_destroy_comp_channel": (c_int, c_void_p),
    "ibv_create_cq": (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int),
    "ibv_destroy_cq": (c_int, c_void_p),
    "ibv_get_cq_event": (c_int, c_void_p, c_void_p, c_void_p),
    "ibv_ack_cq_events": (None, c_void_p, c_uint),
    "ibv_create_qp": (c_void_p, c_void_p, c_void_p),
    "ibv_modify_qp": (c_int, c_void_p, c_void_p, c_int),
    "ibv_query_qp": (c_int, c_void_p, c_void_p, c_int, c_void_p),
    "ibv_destroy_qp": (c_int, c_void_p),
}  # fmt: skip
"""Result and arguments. Pointers are plain integers here; ``None`` is NULL."""

_OPTIONAL = frozenset(("ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"))
"""Came later (rdma-core 28 and 34): without them the rest works."""

_NEVER_WAITS = frozenset(("ibv_get_cq_event", "ibv_ack_cq_events", "ibv_get_async_event", "ibv_ack_async_event"))
"""On descriptors that do not block."""


class Library:
    """The loaded library.

    Args:
        path: a name for the dynamic loader, or a path.

    Raises:
        OSError: there is none, or it lacks a function that is needed.
    """

    def __init__(self, path: str = DEFAULT_LIBRARY) -> None:
        releasing, keeping = ctypes.CDLL(path, use_errno=True), ctypes.PyDLL(path, use_errno=True)
        self._functions: dict[str, Any] = {}
        for name, (result, *arguments) in _SIGNATURES.items():
            try:
                function = getattr(keeping if name in _NEVER_WAITS else releasing, name)
            except AttributeError:
                if name in _OPTIONAL:
                    continue
                raise OSError(errno.ENOSYS, f"{path} has no {name}") from None
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def has(self, name: str) -> bool:
        """Whether it has an optional function."""
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> Any:
        """Call and return what it returned, with no judgement."""
        return self._functions[name](*arguments)

    def make(self, name: str, *arguments: Any) -> int:
        """Call a function that returns a pointer, or NULL and sets errno.

        Raises:
            VerbsError: it returned NULL; ENOSYS: this library is too old to have it.
        """
        if name not in self._functions:
            raise VerbsError(name, errno.ENOSYS)
        ctypes.set_errno(0)
        pointer = self._functions[name](*arguments)
        if not pointer:
            raise VerbsError(name, ctypes.get_errno())
        return int(pointer)

    def check(self, name: str, *arguments: Any) -> None:
        """Call a function that returns 0, or the error's number, or -1 and sets errno.

        Raises:
            VerbsError: it did not return 0.
        """
        ctypes.set_errno(0)
        result = self._functions[name](*arguments)
        if result:
            raise VerbsError(name, error_number(result))


def error_number(result: int) -> int:
    """The error of a call that did not return 0: libraries return it, negate it, or return -1 and set errno."""
    if result == -1:
        return ctypes.get_errno()
    return abs(result)
