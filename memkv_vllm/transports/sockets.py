"""TCP sockets as tcp and verbs want them: listening, connecting by a deadline, noticing a dead peer."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from functools import cache
from typing import Any

import anyio

from memkv_vllm.errors import ConnectError, EnvironmentFault
from memkv_vllm.transports.base import remaining
from memkv_vllm.types import Deadline

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 15, 5, 3
"""A silent peer whose host is gone is noticed after 30 s."""
USER_TIMEOUT_MS = 30_000
"""And one that leaves what was sent to it unanswered or untaken (a frozen process), after the same."""

SAME_HOST_SEND_BYTES = 512 << 10
"""Send buffer of a data connection within one host (the same address at both ends); the kernel takes twice that.

What waits in it is still in a cache when the other end copies it: with the 4 MiB that a buffer grows to otherwise a GB
costs up to a quarter more time and CPU. It must stay above the receiver's low-water mark: a put took 3.5 times as long
with less, for both ends waited."""

_BACKLOG = 1024
_BIND_ADDRESS_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT, for which Python has no name before 3.12
_NO_LINGER = struct.pack("ii", 1, 0)

Address = tuple[Any, ...]
Resolved = tuple[Any, Any, int, str, Address]
"""What ``getaddrinfo`` gives: family, type, protocol, canonical name, address."""


def tune(sock: socket.socket) -> None:
    """Set what every connection has."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def tune_data(sock: socket.socket) -> None:
    """Set what a connected data connection has besides. Between hosts the kernel knows best how much is on its way."""
    try:
        if sock.getsockname()[0] == sock.getpeername()[0] and _send_buffer_is_to_be_had():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_BYTES)
    except OSError:
        pass  # it is broken already


@cache
def _send_buffer_is_to_be_had() -> bool:
    """Whether net.core.wmem_max allows it: less than asked for would be worse than nothing, and cannot be undone."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_BYTES)
        return trial.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * SAME_HOST_SEND_BYTES


def reset(sock: socket.socket) -> None:
    """Close at once: what was not sent yet is dropped, and the peer learns it by a reset."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    except OSError:
        pass  # it is broken already
    sock.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on ``host``: a name, an IPv4 or an IPv6 address (``::`` takes IPv4 clients as well).

    A name is looked up here and now, which may block; a server does it once, when it starts.

    Raises:
        EnvironmentFault: the address is not of this host or is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
    except OSError as error:
        raise EnvironmentFault(f"cannot listen on {host}:{port}: {error}; set network.address") from error
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Else a server that was restarted waits a minute for its own port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        what = "is taken by another program: stop it, or set another network.address"
        why = what if error.errno == errno.EADDRINUSE else f"cannot be used: {error}; set network.address"
        raise EnvironmentFault(f"tcp address {host}:{port} {why}") from error


async def dial(host: str, port: int, deadline: Deadline) -> socket.socket:
    """A connected socket, not blocking. Every address of ``host`` is tried in turn, each with its share of the time.

    Raises:
        ConnectError: none could be reached by ``deadline``; says which and why.
    """
    found = await resolve(host, port, deadline)
    problems = []
    for index, (family, _, _, _, address) in enumerate(found):
        share_s = remaining(deadline, time.monotonic()) / (len(found) - index)
        try:
            return await dial_address(family, address, Deadline(time.monotonic() + share_s))
        except ConnectError as error:
            problems.append(str(error))
    raise ConnectError(f"no tcp server on {host}:{port}: {'; '.join(problems)}")


async def dial_address(
    family: int, address: Address, deadline: Deadline, source: Address | None = None
) -> socket.socket:
    """A connected socket, not blocking.

    Args:
        family: of both addresses.
        address: the server's.
        deadline: for the connection.
        source: an address of this host that it must come from; its port is chosen.

    Raises:
        ConnectError: refused, unreachable, or no answer by ``deadline``.
    """
    label = f"{address[0]}:{address[1]}"
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ConnectError(f"no socket for {label}: {error}") from error
    try:
        tune(sock)
        if source is not None:
            # Else the port is taken for all peers, and a host with many connections runs out of them.
            sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source[0], 0, *source[2:]))
        with anyio.fail_after(remaining(deadline, time.monotonic())):
            number = sock.connect_ex(address)
            if number == errno.EINPROGRESS:
                await anyio.wait_writable(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise ConnectError(f"{label}: {os.strerror(number)}")
        return sock
    except TimeoutError:
        sock.close()
        raise ConnectError(f"{label} does not accept connections") from None
    except OSError as error:
        sock.close()
        raise ConnectError(f"{label}: {error}") from error
    except BaseException:
        sock.close()
        raise


async def resolve(host: str, port: int, deadline: Deadline) -> list[Resolved]:
    """Every address of ``host``, as ``getaddrinfo`` gives them. An address stands for itself, without a look-up.

    Raises:
        ConnectError: there is none, or no answer by ``deadline``.
    """
    try:
        # An address needs no look-up, thus no thread.
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except socket.gaierror:
        pass
    try:
        with anyio.fail_after(remaining(deadline, time.monotonic())):
            return list(await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except TimeoutError:
        raise ConnectError(f"the name {host} was not resolved by the deadline") from None
    except OSError as error:
        raise ConnectError(f"the name {host} cannot be resolved: {error}") from error
