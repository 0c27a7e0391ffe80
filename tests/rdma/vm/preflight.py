"""What the VM needs of its host, looked at before it is started; each lack with the next step."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.rdma.vm.kernel import missing_packages, say

__all__ = ["TOOLS", "namespace_problem", "problem", "raise_map_count"]

TOOLS = {
    "bash": "bash",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "pivot_root": "util-linux",
    "stty": "coreutils",
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "sysctl": "procps",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}
"""What runs the VM and what runs in it: the VM's root is the host's."""
MAP_COUNT = Path("/proc/sys/vm/max_map_count")
MAP_COUNT_NEEDED = 4_000_000
"""The VM maps its processes' memory page by page. At the usual 65530 one with vLLM in it is killed without a word."""
HEADROOM_MB = 256
NAMESPACES = ("unshare", "--pid", "--mount", "--fork", "mount", "-n", "-t", "tmpfs", "memory", "/tmp")
"""The same as the VM is started with; the mount is gone with its namespace."""


def problem(memory_mb: int, root: bool, tools: Mapping[str, str] = TOOLS, meminfo: str | None = None) -> str | None:
    """The first reason why the VM cannot run here, with what to do about it; None if there is none.

    Args:
        memory_mb: of the VM.
        root: whether this process is root.
        tools: commands and files that it takes, with their packages.
        meminfo: in place of the host's ``/proc/meminfo``.
    """
    if platform.machine() != "x86_64":
        return f"User-Mode Linux runs on x86_64 only, and this is {platform.machine()}: use a machine of that kind"
    if not root:
        return "it must be started by root, as it reads all of the host's files and makes namespaces: use sudo -E"
    if packages := missing_packages(dict(tools)):
        return f"missing on this machine; apt-get install -y {' '.join(packages)}"
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available_mb = int(found[1]) >> 10 if found else None
    if available_mb is not None and available_mb < memory_mb + HEADROOM_MB:
        return (
            f"a VM of {memory_mb} MiB does not fit: {available_mb} MiB of memory are available on this machine. "
            "Free some, or ask for less with --mem"
        )
    return None


def namespace_problem(command: Sequence[str] = NAMESPACES) -> str | None:
    """Why this process may not make the namespaces that the VM lives in, with what to do; None where it may."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode == 0:
        return None
    return (
        f"`{' '.join(command)}` failed ({done.stderr.strip()}), so nothing could keep the VM's processes together: a "
        "container needs --privileged, or at least --cap-add SYS_ADMIN without its seccomp and AppArmor profiles"
    )


def raise_map_count(path: Path = MAP_COUNT, tell: Callable[[str], None] = say) -> str | None:
    """Allow processes enough mappings; it stays so, for other VMs may run when this one ends.

    Returns:
        Why that is impossible, or None.
    """
    now = int(path.read_text())
    if now >= MAP_COUNT_NEEDED:
        return None
    try:
        path.write_text(f"{MAP_COUNT_NEEDED}\n")
    except OSError as error:
        return (
            f"vm.max_map_count is {now} and could not be raised to {MAP_COUNT_NEEDED} "
            f"({os.strerror(error.errno or 0)}): on the host of this container run "
            f"sysctl -w vm.max_map_count={MAP_COUNT_NEEDED}"
        )
    tell(f"raised vm.max_map_count of this machine from {now} to {MAP_COUNT_NEEDED} (until its next boot)")
    return None
