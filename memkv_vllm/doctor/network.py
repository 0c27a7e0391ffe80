"""Ports, GIDs, MTUs and rails: whether packets can go where the settings send them (P070, P071). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from memkv_vllm.doctor.devices import severity
from memkv_vllm.doctor.facts import Facts, ServerAnswer, Side
from memkv_vllm.doctor.findings import Finding, Level, fail, ok, warn
from memkv_vllm.errors import RailError
from memkv_vllm.topology import (
    GidKind,
    Port,
    RankedGid,
    allowed_ports,
    choose_gid,
    dscp_of,
    is_usable,
    pair,
    port_state,
    traffic_class_problem,
)

__all__ = ["check_marking", "check_mtus", "check_ports", "check_rails"]

JUMBO_MTU = 4096
_ANY = ("0.0.0.0", "::")


def _ports(facts: Facts) -> Sequence[Port]:
    """The ports that may be used; none where that is an error, which another check reports."""
    try:
        return allowed_ports(facts.host, facts.devices)
    except RailError:
        return ()


def check_ports(facts: Facts) -> Iterator[Finding]:
    """State and GID of each port that may be used."""
    ports = _ports(facts)
    usable = [port for port in ports if is_usable(facts.host, port)]
    for port in ports:
        if facts.knobs.gid_index is None and port not in usable:
            # One that nobody named may be down; that others are up is enough.
            level = severity(facts) if facts.devices or not usable else Level.OK
            fix = "" if level is Level.OK else f"give {port.netdev or 'its interface'} a link and an IP address"
            seen = f"{port_state(facts.host, port)}{'; it is not used' if level is Level.OK else ''}"
            yield Finding(level, "port", seen, fix)
            continue
        try:
            chosen = choose_gid(port, facts.knobs.gid_index)
        except RailError as error:
            yield Finding(severity(facts), "gid", f"{error.problem}: found {error.found}", error.wanted)
            continue
        yield _gid_finding(port, chosen)


def _gid_finding(port: Port, chosen: RankedGid) -> Finding:
    gid, over = chosen.gid, f" on {chosen.gid.netdev}" if chosen.gid.netdev else ""
    seen = f"{port.name} is {port.state.lower()}, GID {gid.index}: {gid.address}{over} ({chosen.reason})"
    if gid.kind is GidKind.ROCE_V1:
        fix = "RoCE v1 cannot be routed or marked, and does not talk to v2: give the interface an address so that v2 "
        return warn("gid", seen, f"{fix}entries appear (show_gids; cma_roce_mode)")
    if gid.kind is GidKind.ROCE_V2 and gid.address.is_link_local:
        return warn(
            "gid", seen, f"give {gid.netdev or 'its interface'} an IPv4 or global IPv6 address in its rail's subnet"
        )
    return ok("gid", seen)


def check_mtus(facts: Facts) -> Iterator[Finding]:
    """Path MTUs: what a setting asks for, what a port carries, and whether the rails are alike."""
    mtus: dict[str, int] = {}
    for port in _ports(facts):
        most = [mtu for mtu in (port.mtu, _active_mtu(facts, port)) if mtu]
        if not most or not port.is_up:
            continue
        mtus[port.name] = min(most)
        yield _mtu_finding(facts, port, min(most))
    if len(set(mtus.values())) > 1:
        shown = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
        common = Counter(mtus.values()).most_common(1)[0][0]
        fix = f"give all rails one MTU, or set mtu: {min(mtus.values())} for all (most have {common})"
        yield warn("mtu", f"the rails differ: {shown}", fix)


def _active_mtu(facts: Facts, port: Port) -> int | None:
    return None if facts.library is None else facts.library.active_mtus.get(port.name)


def _mtu_finding(facts: Facts, port: Port, most: int) -> Finding:
    above = f"interface {port.netdev or 'unknown'} {port.netdev_mtu or 'unknown'}"
    seen = f"{port.name} carries {most} bytes a packet ({above})"
    wanted = facts.knobs.mtu
    if wanted is not None and wanted > most:
        fix = f"set mtu: {most}, leave it out, or raise the MTU of every interface and switch of the rail"
        return fail("mtu", f"mtu is {wanted}, but {seen}: larger packets are dropped", fix)
    if wanted is not None:
        return ok("mtu", f"{seen}; mtu is {wanted}")
    if most < JUMBO_MTU and port.link_layer == "Ethernet":
        return warn(
            "mtu", seen, "set MTU 4200 or more (9000 is usual) on every host and switch of the rail: 4096 costs less"
        )
    return ok("mtu", seen)


def check_marking(facts: Facts) -> Iterator[Finding]:
    """``traffic_class`` is the whole byte, not the DSCP."""
    value = facts.knobs.traffic_class
    if value is None:
        return
    if problem := traffic_class_problem(value):
        seen, _, fix = problem.rpartition("; ")
        yield warn("traffic class", seen, fix)
    else:
        yield ok("traffic class", f"{value} (DSCP {dscp_of(value)})")


def check_rails(facts: Facts) -> Iterator[Finding]:
    """For each server, which port reaches it; for a server, at which addresses clients do (P070)."""
    if facts.side is Side.SERVER:
        yield from _served(facts)
        return
    if not any(is_usable(facts.host, port) for port in _ports(facts)):
        return  # said by other checks, port by port
    by_server: dict[str, list[ServerAnswer]] = {}
    for answer in facts.servers:
        by_server.setdefault(answer.name, []).append(answer)
    for name, answers in by_server.items():
        found = [finding for answer in answers if answer.ip for finding in (_rail_finding(facts, answer),)]
        reached = any(finding.level is not Level.FAIL for finding in found)
        for finding in found:
            # One rail of several is a rail less; none at all is no server.
            worse = finding.level is Level.FAIL and (reached or severity(facts) is Level.WARN)
            yield finding._replace(level=Level.WARN, seen=f"server {name}: {finding.seen}") if worse else finding


def _served(facts: Facts) -> Iterator[Finding]:
    served = {}
    for port in _ports(facts):
        if is_usable(facts.host, port):
            gid = choose_gid(port).gid
            at = f"the IP address of {port.netdev}" if gid.kind is GidKind.INFINIBAND else str(gid.address)
            served[port.name] = at
    if not served:
        return  # said by other checks, port by port
    seen = ", ".join(f"{at} ({name})" for name, at in served.items())
    yield ok("rail", f"clients reach it over verbs at {seen}: these belong into their servers setting")
    side = facts.server_side
    if side is None or side.host in _ANY or any(port.link_layer == "InfiniBand" for port in _ports(facts)):
        return
    unreached = [f"{at} ({name})" for name, at in served.items() if at != side.host]
    fix = "listen on all (network.address: 0.0.0.0:PORT), or on the address of one of these ports"
    if len(unreached) == len(served):
        yield warn("rail", f"network.address is {side.address}, which is none of them: no client gets verbs there", fix)
    elif unreached:
        seen = f"network.address is {side.address}: clients cannot come to {', '.join(unreached)}"
        yield warn("rail", seen, "listen on all (network.address: 0.0.0.0:PORT), or leave that device out")


def _rail_finding(facts: Facts, answer: ServerAnswer) -> Finding:
    try:
        rail = pair(facts.host, answer.ip, devices=facts.devices, gid_index=facts.knobs.gid_index)
    except RailError as error:
        return fail("rail", f"{answer.address}: {error.problem}: found {error.found}", error.wanted)
    seen = f"{answer.address} over {rail.name}: {rail.reason}"
    if rail.is_behind_gateway:
        fix = "expected a port in the server's own subnet: RDMA over a router needs a lossless path on both sides of it"
        return warn("rail", seen, fix)
    return ok("rail", seen)
