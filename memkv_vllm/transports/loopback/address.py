"""Where a loopback server listens, and who is at the other end."""

from __future__ import annotations

import ipaddress
import socket
import struct

_UCRED = struct.Struct("3i")


def socket_address(port: int) -> str:
    """The abstract Unix address of the server on ``port``."""
    return f"\0memkv-loopback-{port}"


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a loopback name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def peer_pid(sock: socket.socket) -> int:
    """The process at the other end of a connected Unix socket; 0 if it is not visible from here."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)
