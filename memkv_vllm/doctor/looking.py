"""Looks at this host: device files, verbs library, memory, drives. Blocking; called in threads with a deadline."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from pathlib import Path

from memkv_vllm.config import RailAddress, ServerConfig
from memkv_vllm.doctor.facts import DeviceFiles, DriveFacts, LibraryFacts, NodeFacts, ServerSide
from memkv_vllm.errors import MemkvError
from memkv_vllm.topology import Host
from memkv_vllm.transports.verbs.provider import Provider, VerbsError
from memkv_vllm.transports.verbs.providers import DEFAULT_PROVIDER, load_provider

__all__ = ["look_at_files", "look_at_library", "look_at_server_side"]

HUGEPAGE = "sys/kernel/mm/hugepages/hugepages-2048kB"
CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
NO_LIMIT = 1 << 60
"""A cgroup of the first version writes its highest number for none."""
DESCRIPTORS_PER_SESSION, OTHER_DESCRIPTORS = 6, 128
"""A client's control connection, its 4 of tcp for bytes, or a completion channel of verbs; and of the server itself:
listeners, drives, admin HTTP, the event loop."""


def look_at_files(root: Path = Path("/")) -> DeviceFiles:
    """The device files of RDMA; each is opened and closed, which changes nothing."""
    folder = root / "dev/infiniband"
    classes = root / "sys/class/infiniband_verbs"
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("uverbs"))
    except OSError:
        names = []
    return DeviceFiles(
        has_folder=folder.is_dir(),
        nodes=tuple(_node(folder / name, classes / name / "ibdev") for name in names),
        has_uverbs=classes.is_dir() or (root / "sys/module/ib_uverbs").is_dir(),
    )


def _node(path: Path, device_file: Path) -> NodeFacts:
    device = _text(device_file)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM)
        return NodeFacts(path.name, device, f"{os.strerror(error.errno or 0)} (opening it)", is_denied=denied)
    return NodeFacts(path.name, device)


def look_at_library(host: Host, name: str = DEFAULT_PROVIDER) -> LibraryFacts:
    """The verbs library, and what it says of every port."""
    try:
        provider = load_provider(name)
        known = tuple(provider.device_names())
    except (MemkvError, VerbsError) as error:
        return LibraryFacts(name, problem=str(error))
    facts = LibraryFacts(name, devices=known)
    for nic in (nic for nic in host.nics if nic.name in known):
        _look_at_ports(provider, nic.name, [port.number for port in nic.ports], facts)
    return facts


def _look_at_ports(provider: Provider, device_name: str, numbers: list[int], facts: LibraryFacts) -> None:
    try:
        device = provider.open(device_name)
    except VerbsError as error:
        facts.port_problems[device_name] = str(error)
        return
    try:
        for number in numbers:
            facts.active_mtus[f"{device_name}:{number}"] = device.port(number).active_mtu
    except VerbsError as error:
        facts.port_problems[device_name] = str(error)
    finally:
        device.close()


# ---------------------------------------------------------------------------------------------------- a storage host


def look_at_server_side(config: ServerConfig, root: Path = Path("/")) -> ServerSide:
    """What the server's settings ask of this host, beside what it has."""
    limits = config.limits
    return ServerSide(
        arena_bytes=config.memory.max_size,
        hugepages=config.memory.hugepages,
        free_hugepages_bytes=_free_hugepages(root),
        available_bytes=_available(root),
        limit_bytes=_cgroup_limit(root),
        max_descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        needed_descriptors=limits.max_sessions * DESCRIPTORS_PER_SESSION + OTHER_DESCRIPTORS,
        drives=tuple(_drive(drive.media, drive.max_size) for drive in config.storage.drives)
        if config.storage.mode != "memory"
        else (),
        listening=_listening(config.network.address),
        address=str(config.network.address),
        host=config.network.address.host,
        storage_mode=config.storage.mode,
    )


def _free_hugepages(root: Path) -> int | None:
    free = _number(root / HUGEPAGE / "free_hugepages")
    return None if free is None else free * (2 << 20)


def _available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemAvailable:" and words[1].isdecimal():
            return int(words[1]) << 10
    return None


def _cgroup_limit(root: Path) -> int | None:
    limits = [_number(root / path) for path in CGROUP_LIMITS]
    return next((limit for limit in limits if limit is not None and limit < NO_LIMIT), None)


def _listening(address: RailAddress) -> str:
    """Whether a server could listen there now; nothing is listened on."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "running"
        return error.strerror or str(error)
    return "free"


def _drive(media: Path, max_size: int) -> DriveFacts:
    try:
        known = os.stat(media) if media.exists() else None
        place = media if known is not None else media.parent
        if not place.exists():
            return DriveFacts(str(media), max_size, exists=False)
        return _found_drive(media, max_size, known, place)
    except OSError as error:
        return DriveFacts(str(media), max_size, exists=True, problem=error.strerror or str(error))


def _found_drive(media: Path, max_size: int, known: os.stat_result | None, place: Path) -> DriveFacts:
    is_block = known is not None and stat.S_ISBLK(known.st_mode)
    room = os.statvfs(place)
    size = 0
    if known is not None:
        size = _block_size(media) if is_block else known.st_blocks * 512
    return DriveFacts(
        str(media),
        max_size,
        exists=True,
        is_block_device=is_block,
        is_writable=os.access(place, os.W_OK),
        size=size,
        free=room.f_bavail * room.f_frsize,
        file_system=place.stat().st_dev,
    )


def _block_size(media: Path) -> int:
    fd = os.open(media, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdecimal() else None
