"""What only a storage host needs: memory for the arena, descriptors, drives, an address to listen on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from memkv_vllm.doctor.facts import DriveFacts, Facts, ServerSide, Side
from memkv_vllm.doctor.findings import Finding, fail, ok, warn

__all__ = ["check_storage"]

GIB = 1 << 30
SPARE_PART = 0.05
"""Of the arena's size: what the values' own records and the process take beside it, at the least."""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def check_storage(facts: Facts) -> Iterator[Finding]:
    """All of it, where the server's yaml was given."""
    if facts.side is not Side.SERVER:
        return
    if facts.server_side is None:
        if not facts.settings_problems:
            yield warn(
                "settings", "no yaml was given: arena, limits and drives were not looked at", "give --config FILE"
            )
        return
    yield from _arena(facts.server_side)
    yield from _hugepages(facts.server_side)
    yield from _descriptors(facts.server_side)
    yield from _listening(facts.server_side)
    for drive in facts.server_side.drives:
        yield _drive(facts.server_side, drive)
    yield from _shared_space(facts.server_side)


def _arena(side: ServerSide) -> Iterator[Finding]:
    wanted = f"memory.max_size is {_gib(side.arena_bytes)}"
    if side.listening == "running":
        yield ok("arena", f"{wanted}; a server runs, so its memory is taken already")
        return
    if side.limit_bytes is not None and side.arena_bytes * (1 + SPARE_PART) > side.limit_bytes:
        fix = "raise the limit (docker --memory; kubernetes resources.limits.memory) or lower memory.max_size"
        yield fail("arena", f"{wanted}; this container may use {_gib(side.limit_bytes)} in all", fix)
    elif side.available_bytes is None:
        yield ok("arena", f"{wanted}; how much memory is free is not known here")
    elif side.arena_bytes * (1 + SPARE_PART) > side.available_bytes:
        fix = "lower memory.max_size, or free memory on this host"
        yield fail("arena", f"{wanted}; {_gib(side.available_bytes)} can be had now", fix)
    else:
        yield ok("arena", f"{wanted}; {_gib(side.available_bytes)} can be had now")


def _hugepages(side: ServerSide) -> Iterator[Finding]:
    if side.hugepages == "off" or side.listening == "running":
        return
    free, pages = side.free_hugepages_bytes, -(-side.arena_bytes // (2 << 20))
    enough = free is not None and free >= side.arena_bytes
    seen = f"{'none' if free is None else _gib(free)} of reserved 2 MiB pages are free, the arena needs {pages} of them"
    if enough:
        yield ok("hugepages", seen)
    elif side.hugepages == "on":
        yield fail("hugepages", f"memory.hugepages is on, but {seen}", f"sysctl vm.nr_hugepages={pages}, or set auto")
    else:
        yield ok("hugepages", f"{seen}: ordinary pages will be used (a NIC and a CPU translate more addresses)")


def _descriptors(side: ServerSide) -> Iterator[Finding]:
    seen = f"{side.max_descriptors} descriptors allowed, {side.needed_descriptors} with limits.max_sessions clients"
    if side.max_descriptors < side.needed_descriptors:
        fix = f"systemd: LimitNOFILE={side.needed_descriptors}; shell: ulimit -n; docker: --ulimit nofile; or lower"
        yield warn("descriptors", seen, f"{fix} limits.max_sessions")
    else:
        yield ok("descriptors", seen)


def _listening(side: ServerSide) -> Iterator[Finding]:
    if side.listening == "free":
        yield ok("address", f"{side.address} is free: no server runs there now")
    elif side.listening == "running":
        yield ok("address", f"something listens on {side.address} already")
    else:
        fix = "network.address must be an address of this host (ip addr), with a port that this user may use"
        yield fail("address", f"{side.address} cannot be listened on: {side.listening}", fix)


def _drive(side: ServerSide, drive: DriveFacts) -> Finding:
    name = f"{drive.media} (max_size {_gib(drive.max_size)})"
    if drive.problem:
        return fail("drive", f"{name}: {drive.problem}", "see that this user may use it, and that it answers (dmesg)")
    if not drive.exists:
        return fail("drive", f"{name} is not there", "mount it, or make its folder; or correct storage.drives")
    if not drive.is_writable:
        return fail(
            "drive", f"{name} is not writable for this user", "give it to the user that runs the server (chown)"
        )
    if side.storage_mode == "direct" and not drive.is_block_device:
        return ok("drive", f"{name} is a file under storage.mode direct; {_gib(drive.free + drive.size)} can be used")
    if drive.is_block_device:
        if drive.size < drive.max_size:
            return fail("drive", f"{name} has {_gib(drive.size)}", "lower max_size of this drive")
        return ok("drive", f"{name} has {_gib(drive.size)}")
    return ok("drive", f"{name}: {_gib(drive.size)} written, {_gib(drive.free)} free")


def _shared_space(side: ServerSide) -> Iterator[Finding]:
    """Files may share a file system: what all of them may still grow by must be free there."""
    growth: dict[int, int] = {}
    free: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    for drive in side.drives:
        if drive.is_block_device or not drive.exists or drive.problem:
            continue
        growth[drive.file_system] = growth.get(drive.file_system, 0) + max(0, drive.max_size - drive.size)
        free[drive.file_system] = drive.free
        names.setdefault(drive.file_system, []).append(drive.media)
    for system, grows in growth.items():
        if grows > free[system]:
            seen = f"{', '.join(names[system])} may grow by {_gib(grows)}; {_gib(free[system])} is free there"
            yield fail("drive", seen, "lower max_size, or free space: a full file system ends writing to the drive")
