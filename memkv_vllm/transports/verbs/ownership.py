"""Lifetimes of a verbs library's objects: dependents are closed first, every one exactly once.

Verbs objects stand on each other: a queue pair on its protection domain and its completion queue, these on their
device. The library refuses to destroy one that others stand on, and crashes on a second destroy or on a use after it.
So each is wrapped in an :class:`Owned`, which

* keeps what it stands on alive by a reference, and is itself kept by its provider's :class:`Ledger` until it is closed:
  the garbage collector frees nothing, so that it can free nothing in the wrong order. Nor does the end of the
  interpreter: what is open then is left to the kernel, which closes all with the process;
* closes what stands on it before itself, by rank, and itself once, whoever asks and however often;
* is counted, so that a leak shows in :meth:`Ledger.num_live`.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import threading
from abc import ABC, abstractmethod
from typing import TypeVar

from memkv_vllm.transports.verbs.provider import VerbsError

__all__ = ["Ledger", "Owned", "same_provider"]

Kind = TypeVar("Kind", bound="Owned")


class Ledger:
    """Holds and counts the objects of one provider that were made and not closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Owned] = set()

    def num_live(self) -> int:
        """Objects that are there now. One whose destruction failed counts for good: it is a leak."""
        with self._lock:
            return len(self._live)

    def made(self, owned: Owned) -> None:
        """It is there; kept until it is closed."""
        with self._lock:
            self._live.add(owned)
            _in_use.add(self)

    def closed(self, owned: Owned) -> None:
        """It is gone."""
        with self._lock:
            self._live.discard(owned)
            if not self._live:
                _in_use.discard(self)

    def keep_for_ever(self) -> None:
        """Never free what is open now, nor the memory that it uses."""
        with self._lock:
            for owned in self._live:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(owned))


_in_use: set[Ledger] = set()
"""Ledgers with open objects. From here they are reached when nobody holds their provider any more."""


@atexit.register
def _leave_open() -> None:
    # The interpreter drops modules and what they hold in no certain order; pyverbs' destructors abort then.
    for ledger in tuple(_in_use):
        ledger.keep_for_ever()


class Owned(ABC):
    """One object of the library; its class wraps the handle and says how it is destroyed.

    Args:
        ledger: counts it.
        parents: what it stands on. Called last by a subclass: where one of them is closed already, the object is
            destroyed again and ``VerbsError`` (EBADF) raised.
    """

    rank = 0
    """Among objects that stand on the same one, those of lower rank are closed first."""

    def __init__(self, ledger: Ledger, *parents: Owned) -> None:
        self._ledger = ledger
        self._parents = parents
        self._dependents: set[Owned] = set()
        self._members = threading.Lock()  # of _dependents and _closing; never held across a call of the library
        self._closing_once = threading.RLock()  # a second close waits for the first one
        self._closing = False
        try:
            for parent in parents:
                parent._adopt(self)
        except VerbsError:
            self._leave()
            self._destroy()
            raise
        ledger.made(self)

    def close(self) -> None:
        """Close what stands on it, then itself; nothing the second time.

        Goes on where one of them fails, and raises the first failure at the end.

        Raises:
            VerbsError: the library refused to destroy something.
        """
        with self._closing_once:
            with self._members:
                if self._closing:
                    return
                self._closing = True
                dependents = sorted(self._dependents, key=lambda dependent: dependent.rank)
            failure: VerbsError | None = None
            for dependent in dependents:
                error = _closed(dependent)
                failure = failure or error
            try:
                self._destroy()
            except VerbsError as refused:
                failure = failure or refused
            else:
                self._ledger.closed(self)
            self._leave()
            if failure is not None:
                raise failure

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing

    def _check_open(self, call: str) -> None:
        """Refuse a call on an object that is closed, before the library crashes on it."""
        if self._closing:
            raise VerbsError(call, errno.EBADF)

    @abstractmethod
    def _destroy(self) -> None:
        """Destroy the library's object; called once."""

    def _adopt(self, dependent: Owned) -> None:
        with self._members:
            if self._closing:
                raise VerbsError(type(dependent).__name__, errno.EBADF)
            self._dependents.add(dependent)

    def _leave(self) -> None:
        for parent in self._parents:
            parent._release(self)

    def _release(self, dependent: Owned) -> None:
        with self._members:
            self._dependents.discard(dependent)


def same_provider(wanted: type[Kind], found: object, call: str) -> Kind:
    """``found``, which a caller got of this provider before.

    Raises:
        VerbsError: EINVAL: it is another provider's; EBADF: it is closed.
    """
    if not isinstance(found, wanted):
        raise VerbsError(call, errno.EINVAL, detail=f"a {type(found).__name__} is not of this provider")
    found._check_open(call)
    return found


def _closed(owned: Owned) -> VerbsError | None:
    """Close it and return what went wrong."""
    try:
        owned.close()
    except VerbsError as error:
        return error
    return None
