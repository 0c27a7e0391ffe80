"""What must be true of this host before a client with a data path starts; each failure has its own message.

Facts of this host only: no server is asked. What a server can reach is found out when the first region is registered.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from memkv_vllm.errors import EnvironmentFault, RailError
from memkv_vllm.topology import CONTAINER_STEP, Host, Rail, allowed_ports, no_device, pair
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES
from memkv_vllm.transports.verbs.opening import Knobs, OpenPort, open_rail, rail_of
from memkv_vllm.transports.verbs.provider import Provider, VerbsError

__all__ = [
    "Memlock",
    "ServerRails",
    "check_devices",
    "check_memlock",
    "check_ports",
    "check_rails",
    "explain_refusal",
    "memlock_problem",
    "read_memlock",
]

MEMLOCK_FIX = (
    "raise it. Shell: ulimit -l unlimited (memlock unlimited in /etc/security/limits.conf); systemd: "
    "LimitMEMLOCK=infinity; docker: --ulimit memlock=-1 or --cap-add=IPC_LOCK; kubernetes: securityContext: "
    "capabilities: add: [IPC_LOCK]"
)

_CAP_IPC_LOCK = 14
_INITIAL_NAMESPACE = ["0", "0", "4294967295"]


class ServerRails(NamedTuple):
    """One server of the settings: its name and the hosts of its rails."""

    name: str
    hosts: tuple[str, ...]


def check_devices(provider: Provider, host: Host, devices: Sequence[str], root: Path) -> None:
    """That there are RDMA devices, the named ones among them, and that the verbs library can open them (P073, P076).

    Raises:
        EnvironmentFault: says what is there, and what to do on a host and in a container.
    """
    if not host.nics:
        raise no_device(host)
    wanted = list(dict.fromkeys(port.device for port in allowed_ports(host, devices)))
    try:
        known = provider.device_names()
    except VerbsError as error:
        raise EnvironmentFault(
            f"the verbs library cannot list the RDMA devices: {error}; expected {', '.join(wanted)} (of "
            f"/sys/class/infiniband); see: ls -l /dev/infiniband, ibv_devices, ulimit -n; {CONTAINER_STEP}"
        ) from error
    missing = [name for name in wanted if name not in known]
    if not missing or (known and not devices and len(missing) < len(wanted)):
        return
    if not (root / "dev/infiniband").is_dir():
        raise RailError(
            f"RDMA devices cannot be opened: {', '.join(missing)}",
            found="they are in /sys/class/infiniband, but there is no /dev/infiniband",
            wanted=f"the device files; in a container: {CONTAINER_STEP}; on a host: modprobe ib_uverbs",
        )
    in_sysfs = ", ".join(nic.name for nic in host.nics)
    raise RailError(
        f"the verbs library does not know {', '.join(missing)}",
        found=f"it knows {', '.join(known) or 'no device'}; /sys/class/infiniband has {in_sysfs}",
        wanted="their user-space driver (Debian, Ubuntu: ibverbs-providers), and /dev/infiniband/uverbs* of each",
    )


class Memlock(NamedTuple):
    """How much memory this process may pin."""

    limit_bytes: int | None
    """RLIMIT_MEMLOCK (soft); None: unlimited."""
    is_exempt: bool
    """It has CAP_IPC_LOCK where the kernel asks for it, so that no limit holds."""


def read_memlock(root: Path = Path("/")) -> Memlock:
    """Of this process; its capabilities are read below ``root``."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Memlock(None if limit == resource.RLIM_INFINITY else limit, _is_exempt(root))


def _is_exempt(root: Path) -> bool:
    try:
        status = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
        mapping = (root / "proc/self/uid_map").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    # The kernel asks for the capability in its first user namespace: one inside of a rootless container is none.
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1) and mapping == _INITIAL_NAMESPACE


def memlock_problem(memlock: Memlock, needed_bytes: int, purpose: str) -> str:
    """Why ``needed_bytes`` cannot be pinned, with the fix; empty if they can (P074). Pure.

    Args:
        memlock: of this process.
        needed_bytes: pinned at once; memory that is registered several times counts as often.
        purpose: what they are, for the message.
    """
    if memlock.is_exempt or memlock.limit_bytes is None or memlock.limit_bytes >= needed_bytes:
        return ""
    return (
        f"memlock is too small to register memory for RDMA: the limit is {memlock.limit_bytes / 2**20:.1f} MiB, "
        f"{purpose} needs {needed_bytes / 2**20:.1f} MiB; {MEMLOCK_FIX}"
    )


def explain_refusal(error: VerbsError, memlock: Memlock) -> str:
    """A library's error, with what it most likely means where the kernel's word for it misleads. Pure."""
    if error.errno != errno.ENOMEM or memlock.is_exempt or memlock.limit_bytes is None:
        return str(error)
    # The kernel says so of its limit, however much memory is free.
    return f"{error}; memlock is {memlock.limit_bytes / 2**20:.1f} MiB, which all registrations share: {MEMLOCK_FIX}"


def check_memlock(memlock: Memlock, staging_bytes: int, num_servers: int) -> None:
    """That the staging memory can be registered with a connection to each server.

    Raises:
        EnvironmentFault: it cannot; says the numbers and the fix for shell, systemd, docker and kubernetes.
    """
    count = max(1, num_servers)
    staging = f"{staging_bytes / 2**20:.1f} MiB of staging memory and {LANDING_BYTES // 1024} KiB beside it"
    purpose = f"{staging}, registered for each of {count} servers,"
    if problem := memlock_problem(memlock, (staging_bytes + LANDING_BYTES) * count, purpose):
        raise EnvironmentFault(f"{problem}; or lower memkv_scratch_mb_per_thread or memkv_num_threads")


def check_rails(
    host: Host, servers: Sequence[ServerRails], devices: Sequence[str], prefer: Sequence[str], gid_index: int | None
) -> tuple[dict[str, Rail], dict[str, RailError]]:
    """The rail to each address of the settings (P070). Names, which only a resolver knows, are left out.

    Returns:
        rails by address, and what is wrong with the other addresses of servers that have a rail.

    Raises:
        RailError: a server has no address that a port reaches.
    """
    rails: dict[str, Rail] = {}
    problems: dict[str, RailError] = {}
    for server in servers:
        unknown = [host_name for host_name in server.hosts if not _is_address(host_name)]
        for address in (entry for entry in server.hosts if entry not in unknown):
            try:
                rails[address] = pair(host, address, devices=devices, prefer=prefer, gid_index=gid_index)
            except RailError as error:
                problems[address] = error
        if not unknown and not any(address in rails for address in server.hosts):
            first = problems[server.hosts[0]]
            raise RailError(
                f"server {server.name} cannot be reached over RDMA: {first.args[0].partition(': found ')[0]}",
                found=first.found,
                wanted=first.wanted,
            )
    return rails, problems


def check_ports(
    provider: Provider, host: Host, rails: Sequence[Rail], devices: Sequence[str], knobs: Knobs
) -> list[OpenPort]:
    """Open the device of each rail (without any: of the first port that may be used), and close it again.

    Returns:
        what is chosen on each; the devices are closed.

    Raises:
        EnvironmentFault: one cannot be opened, is down, has no usable GID, or carries less than ``knobs.mtu``.
    """
    seen: list[OpenPort] = []
    for rail in rails or [rail_of(host, devices[0] if devices else None, knobs.gid_index)]:
        opened = open_rail(provider, rail, knobs)
        try:
            opened.device.close()
        except VerbsError as error:
            raise EnvironmentFault(
                f"RDMA device {rail.device} cannot be closed again: {error}; it may be broken: see dmesg, ibv_devinfo"
            ) from error
        seen.append(opened)
    return seen


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
