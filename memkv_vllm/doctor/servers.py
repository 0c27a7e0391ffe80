"""What the configured servers answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from memkv_vllm.doctor.devices import severity
from memkv_vllm.doctor.facts import Facts, Need, ServerAnswer, Side
from memkv_vllm.doctor.findings import Finding, Level, fail, ok, warn

__all__ = ["check_servers"]

MAX_SKEW_S = 5.0
VERBS = "verbs"


def check_servers(facts: Facts) -> Iterator[Finding]:
    """Reachability, identity, version, clock and data path of every address."""
    if not facts.servers:
        if facts.side is Side.CLIENT and not facts.settings_problems:
            fix = "set servers (MEMKV_SERVERS) and the key, or give --server HOST:PORT"
            yield warn("server", "no server is configured, so none was asked", fix)
        return
    for answer in facts.servers:
        yield from _one(facts, answer)
    yield from _identities(facts)


def _one(facts: Facts, answer: ServerAnswer) -> Iterator[Finding]:
    name = answer.address if answer.name == answer.address else f"{answer.name} at {answer.address}"
    if not answer.ip:
        yield fail("server", f"{name}: its name has no IP address here", "correct the name, or mend name resolution")
        return
    if answer.problem:
        yield fail("server", f"{name}: {answer.problem}", answer.fix)
        return
    identity = f"id {answer.server_id[:8]}"
    if not answer.version:
        yield ok("server", f"{name} answers ({identity}); it does not say its version")
    elif facts.version and answer.version != facts.version:
        seen = f"{name} answers ({identity}): version {answer.version}, this is {facts.version}"
        yield warn("server", seen, "they speak one protocol; bring both to one release when you can")
    else:
        yield ok("server", f"{name} answers ({identity}, version {answer.version})")
    yield _clock(name, answer)
    if facts.need is not Need.NONE and facts.side is Side.CLIENT:
        yield from _data_path(facts, name, answer)


def _clock(name: str, answer: ServerAnswer) -> Finding:
    if answer.skew_s is None:
        return ok("clock", f"{name} does not say its time: skew unknown; only a license's dates depend on it")
    skew = f"{answer.skew_s:+.1f} s (within {answer.skew_error_s:.1f} s)"
    if abs(answer.skew_s) - answer.skew_error_s > MAX_SKEW_S:
        fix = "run a time service on both (chronyc tracking): the server judges licenses by its own, and logs differ"
        return warn("clock", f"{name} differs by {skew}", fix)
    return ok("clock", f"{name} differs by {skew}")


def _data_path(facts: Facts, name: str, answer: ServerAnswer) -> Iterator[Finding]:
    if answer.data_path_problem == "":
        yield ok("data path", f"{name}: it reads and writes this host's memory over {answer.data_path_rail}")
    elif answer.data_paths is not None and VERBS not in answer.data_paths:
        fix = "name its NICs in rdma.devices of the server's yaml, or set transport: tcp (tier only)"
        yield Finding(severity(facts), "data path", f"{name} does not offer verbs", fix)
    elif answer.data_path_problem:
        fix = "mend what it names; run memkv doctor on the server too (--side server --config FILE)"
        yield Finding(severity(facts), "data path", f"{name}: {answer.data_path_problem}", fix)
    else:
        offers = "offers verbs" if answer.data_paths else "does not say what it offers"
        yield ok("data path", f"{name} {offers}; not tried from here, see the lines above")


def _identities(facts: Facts) -> Iterator[Finding]:
    """Two entries that are one server would split its share; one entry that is two would lose values."""
    by_id: dict[str, dict[str, list[str]]] = {}
    by_name: dict[str, set[str]] = {}
    for answer in facts.servers:
        if answer.server_id:
            by_id.setdefault(answer.server_id, {}).setdefault(answer.name, []).append(answer.address)
            by_name.setdefault(answer.name, set()).add(answer.server_id)
    for entries in by_id.values():
        if len(entries) > 1:
            grouped = "|".join(address for addresses in entries.values() for address in addresses)
            seen = f"{' and '.join(entries)} are one server"
            yield Finding(Level.FAIL, "server", seen, f"write it once, with its rails: NAME={grouped}")
    for name, ids in by_name.items():
        if len(ids) > 1:
            seen = f"the addresses of {name} reach {len(ids)} different servers"
            yield fail("server", seen, "an entry is one server, its addresses are its rails: write two entries")
