"""Accepts connections for a server transport, whatever state each of them is in by then."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, NoReturn

import anyio

__all__ = ["accept_forever"]

_PAUSE_S = 0.1
_GONE = frozenset({errno.ECONNABORTED, errno.ECONNRESET, errno.EPROTO})
"""The peer took its connection back before it was accepted; that says nothing of this host."""


async def accept_forever(
    listener: socket.socket,
    take: Callable[[socket.socket, Any], object],
    counted: Callable[[str], None],
    log: logging.Logger,
    *,
    tune: Callable[[socket.socket], None] = lambda sock: None,
) -> NoReturn:
    """Accept until cancelled.

    Args:
        listener: not blocking; stays open.
        take: owns a connection from now on; given the peer's address too.
        counted: counts ``accept_failed``: this host has no descriptor or memory for one more connection.
        log: says so too.
        tune: sets options of the new socket. One on which they cannot be set was reset meanwhile: it is dropped.
    """
    while True:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            await anyio.wait_readable(listener)
        except OSError as error:
            if error.errno not in _GONE:
                # Out of descriptors or memory: the connection stays in the backlog; others may end meanwhile.
                log.warning("cannot accept a connection: %s", error)
                counted("accept_failed")
                await anyio.sleep(_PAUSE_S)
        else:
            try:
                tune(sock)
            except OSError:
                sock.close()
            else:
                take(sock, address)
