"""Whether this host has RDMA devices, and this process a way to them (P073, P076). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from memkv_vllm.doctor.facts import Facts, Need
from memkv_vllm.doctor.findings import Finding, Level, fail, ok, warn
from memkv_vllm.errors import RailError
from memkv_vllm.topology import allowed_ports, no_device

__all__ = ["DEVICE_FILES_FIX", "check_devices", "check_library", "severity"]

DEVICE_FILES_FIX = (
    "on a host: install rdma-core and modprobe ib_uverbs; "
    "docker: docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 --network=host; "
    "kubernetes: hostNetwork: true, resources: limits: {rdma/hca: 1} (the name that your RDMA device plugin offers), "
    "securityContext: capabilities: add: [IPC_LOCK]"
)
"""The lines that are missing where ``/dev/infiniband`` is."""

NO_DEVICE_FIX = (
    "on a host: look for a NIC (lspci) and load its driver (modprobe mlx5_ib; rdma link); in a container: see the "
    "device files; for a trial without a NIC: rdma link add rxe0 type rxe netdev ETH"
)

_ELSEWHERE = "or set transport: tcp (tier only) or loopback (a server on this host)"


def severity(facts: Facts) -> Level:
    """How bad it is when RDMA cannot be had."""
    return Level.FAIL if facts.need is Need.REQUIRED else Level.WARN


def check_devices(facts: Facts) -> Iterator[Finding]:
    """The devices themselves and their device files."""
    level = severity(facts)
    if not facts.host.nics:
        yield Finding(level, "nic", f"no RDMA device: {no_device(facts.host).found}", NO_DEVICE_FIX)
    else:
        yield from _named_devices(facts)
    if not facts.files.has_folder:
        yield Finding(level, "device files", "/dev/infiniband is absent", DEVICE_FILES_FIX)
        return
    if not facts.files.has_uverbs:
        yield Finding(level, "kernel", "ib_uverbs is not loaded", "modprobe ib_uverbs, on the host")
    if not facts.files.nodes:
        yield Finding(level, "device files", "/dev/infiniband holds no uverbs file", DEVICE_FILES_FIX)
        return
    yield from _nodes(facts, level)


def _named_devices(facts: Facts) -> Iterator[Finding]:
    try:
        ports = allowed_ports(facts.host, facts.devices)
    except RailError as error:
        yield fail("nic", f"{error.problem}; found {error.found}", error.wanted)
        return
    how = "named in the settings" if facts.devices else "found, none is named in the settings"
    drivers = sorted({nic.driver or "unknown driver" for nic in facts.host.nics})
    yield ok("nic", f"{', '.join(port.name for port in ports)} ({how}; {', '.join(drivers)})")


def _nodes(facts: Facts, level: Level) -> Iterator[Finding]:
    known = {node.device for node in facts.files.nodes}
    without = [nic.name for nic in facts.host.nics if _is_used(facts, nic.name) and nic.name not in known]
    if without and "" not in known:
        yield Finding(
            level,
            "device files",
            f"no uverbs file of {', '.join(without)}",
            f"hand in all of /dev/infiniband; {DEVICE_FILES_FIX}",
        )
    for node in facts.files.nodes:
        if not node.problem or not _is_used(facts, node.device):
            continue
        if node.is_denied:
            fix = (
                "let this user read and write it (mode 0666, or its group); in a container also its device list: "
                "docker --device=/dev/infiniband, kubernetes: an RDMA device plugin's resource"
            )
        else:
            fix = "see the kernel's log (dmesg) of that device"
        yield Finding(level, "device files", f"{node.name} ({node.device or 'unknown'}): {node.problem}", fix)
    good = [node.name for node in facts.files.nodes if not node.problem]
    if good:
        yield ok("device files", f"{', '.join(good)} can be opened")


def _is_used(facts: Facts, device: str) -> bool:
    return not facts.devices or not device or device in {name.partition(":")[0] for name in facts.devices}


def check_library(facts: Facts) -> Iterator[Finding]:
    """The verbs library, and whether it knows the devices."""
    library, level = facts.library, severity(facts)
    if library is None:
        return
    if library.problem:
        yield Finding(level, "verbs library", library.problem, f"install it as said, {_ELSEWHERE}")
        return
    used = [nic.name for nic in facts.host.nics if _is_used(facts, nic.name)]
    unknown = [name for name in used if name not in library.devices]
    if unknown:
        known = ", ".join(library.devices) or "none"
        seen = f"{library.name} is there and does not know {', '.join(unknown)} (it knows: {known})"
        fix = (
            "install their user-space driver (Debian, Ubuntu: ibverbs-providers; RHEL, Fedora: rdma-core), and see to "
            "the device files above"
        )
        yield Finding(level if facts.devices or len(unknown) == len(used) else Level.WARN, "verbs library", seen, fix)
    elif used:
        yield ok("verbs library", f"{library.name}, knows {', '.join(library.devices)}")
    else:
        yield ok("verbs library", f"{library.name} is there")
    for port, problem in library.port_problems.items():
        yield warn("verbs library", f"{port} cannot be asked: {problem}", "see: ibv_devinfo -v")
