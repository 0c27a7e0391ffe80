"""Names of hosts to IP addresses, with a deadline that holds even where the system's resolver hangs."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import anyio

from memkv_vllm.doctor.patience import within

__all__ = ["RESOLVE_TIMEOUT_S", "resolve"]

RESOLVE_TIMEOUT_S = 5.0


async def resolve(hosts: Iterable[str], timeout_s: float = RESOLVE_TIMEOUT_S) -> dict[str, str]:
    """The first IP address of each host; an empty text for a name that has none by the deadline.

    Args:
        hosts: names or addresses.
        timeout_s: for each of them; they are looked up at once.
    """
    found: dict[str, str] = {}

    async def look_up(name: str) -> None:
        def ask() -> str:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])

        try:
            found[name] = await within(timeout_s, ask)
        except (OSError, UnicodeError, TimeoutError):
            found[name] = ""

    async with anyio.create_task_group() as tasks:
        for host in dict.fromkeys(hosts):
            try:
                found[host] = str(ipaddress.ip_address(host))
            except ValueError:
                tasks.start_soon(look_up, host)
    return found
