"""What this process holds, for tests that nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """Descriptors, mappings of our memory, threads."""

    fds: int
    mappings: int
    threads: int


def num_fds() -> int:
    """Open descriptors, once garbage has closed its own."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def num_mappings(name: str = "") -> int:
    """Mappings of memory made by ``HostMemory.create(name)``, of all for no name."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(f"memkv-{name}")


def held() -> Held:
    """All of it."""
    return Held(num_fds(), num_mappings(), threading.active_count())
