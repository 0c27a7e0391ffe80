"""Everything that the checks look at, as values. Pure: a test writes a sick machine down in a few lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from memkv_vllm.topology import Host
from memkv_vllm.transports.verbs.gpu_memory import GpuHost
from memkv_vllm.transports.verbs.opening import Knobs
from memkv_vllm.transports.verbs.preflight import Memlock

__all__ = [
    "DeviceFiles",
    "DriveFacts",
    "Facts",
    "LibraryFacts",
    "Need",
    "NodeFacts",
    "ServerAnswer",
    "ServerSide",
    "Side",
]


class Side(str, Enum):
    """Which end this host is."""

    CLIENT = "client"
    SERVER = "server"


class Need(Enum):
    """What RDMA is to this host."""

    REQUIRED = "required"
    """Without it nothing starts (transport verbs; a server with rdma.devices)."""
    WANTED = "wanted"
    """Used where it works (transport auto)."""
    NONE = "none"
    """Not configured."""


@dataclass(frozen=True)
class NodeFacts:
    """One ``/dev/infiniband/uverbsN``."""

    name: str
    device: str
    """The RDMA device behind it; empty where the kernel does not say."""
    problem: str = ""
    """The kernel's word when it was opened; empty when that went well."""
    is_denied: bool = False
    """The problem is one of rights: of the file's mode, or of a container's device list."""


@dataclass(frozen=True)
class DeviceFiles:
    """What user space reaches the NICs by."""

    has_folder: bool
    """``/dev/infiniband`` exists."""
    nodes: tuple[NodeFacts, ...] = ()
    has_uverbs: bool = True
    """The kernel's ``ib_uverbs`` is loaded or built in."""


@dataclass(frozen=True)
class LibraryFacts:
    """The verbs library that would be used."""

    name: str
    problem: str = ""
    devices: tuple[str, ...] = ()
    active_mtus: dict[str, int] = field(default_factory=dict)
    """Bytes, by port (``mlx5_0:1``); what could be asked."""
    port_problems: dict[str, str] = field(default_factory=dict)
    """What the library said of ports that it could not be asked about."""


@dataclass(frozen=True)
class ServerAnswer:
    """What came of asking one address of a server."""

    name: str
    """The server's, as placement hashes it."""
    address: str
    """Of this rail, with its port."""
    ip: str = ""
    """Empty: its name has no IP address here."""
    problem: str = ""
    """Why there was no session; empty when there was one."""
    fix: str = ""
    server_id: str = ""
    version: str = ""
    """Of its software; empty where it does not say."""
    skew_s: float | None = None
    """Its clock minus this host's; None where it does not say."""
    skew_error_s: float = 0.0
    """At most so much of it is the network's."""
    data_paths: tuple[str, ...] | None = None
    """What it offers beside its control connection's; None where it does not say."""
    data_path_problem: str | None = None
    """Why a trial over RDMA failed; empty when it went well; None when there was none."""
    data_path_rail: str = ""
    """The port that a trial uses; empty where none can be made."""


@dataclass(frozen=True)
class DriveFacts:
    """A drive of the server's settings."""

    media: str
    max_size: int
    """Bytes."""
    exists: bool
    """The medium itself, or (for a file that the server will make) its folder."""
    is_block_device: bool = False
    is_writable: bool = True
    size: int = 0
    """Bytes that it has now."""
    free: int = 0
    """Bytes free on its file system."""
    file_system: int = 0
    """Its number; media with one number share the space."""
    problem: str = ""


@dataclass(frozen=True)
class ServerSide:
    """What only a storage host has."""

    arena_bytes: int
    hugepages: str
    """``memory.hugepages``."""
    free_hugepages_bytes: int | None
    """Reserved and free, of 2 MiB; None where the kernel has none of them."""
    available_bytes: int | None
    """Memory that can be had now, within the container's limit."""
    limit_bytes: int | None
    """The container's (cgroup's) limit; None: none."""
    max_descriptors: int
    """RLIMIT_NOFILE, soft."""
    needed_descriptors: int
    """With every session and connection that the limits allow."""
    drives: tuple[DriveFacts, ...]
    listening: str
    """``free``: the address can be taken; ``running``: something listens there; else the kernel's word."""
    address: str
    """``network.address``."""
    host: str
    """Its part before the port."""
    storage_mode: str = "memory"


@dataclass(frozen=True)
class Facts:
    """All of it."""

    side: Side
    need: Need
    host: Host
    transport: str = "verbs"
    """What the settings say; ``verbs`` where there are none."""
    devices: tuple[str, ...] = ()
    """``rdma_devices``, or a server's ``rdma.devices``."""
    knobs: Knobs = field(default_factory=Knobs)
    settings_problems: tuple[str, ...] = ()
    files: DeviceFiles = field(default_factory=lambda: DeviceFiles(has_folder=False))
    library: LibraryFacts | None = None
    """None: not asked, for RDMA is not needed or the answer did not come in time."""
    memlock: Memlock = field(default_factory=lambda: Memlock(None, is_exempt=False))
    pinned_bytes: int = 0
    pinned_purpose: str = ""
    gpu_host: GpuHost = field(default_factory=lambda: GpuHost("", "", ""))
    medium: str = "host"
    hash_seed: str | None = None
    vllm: str | None = None
    """The installed version; None: not installed here."""
    supported_vllm: str = ""
    version: str = ""
    """Of this package."""
    servers: tuple[ServerAnswer, ...] = ()
    server_side: ServerSide | None = None
    unanswered: tuple[str, ...] = ()
    """What could not be found out, and why."""
