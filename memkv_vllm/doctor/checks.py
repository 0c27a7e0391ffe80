"""All checks, in the order in which an operator reads them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memkv_vllm.doctor.devices import check_devices, check_library
from memkv_vllm.doctor.engine import check_hash_seed, check_vllm
from memkv_vllm.doctor.facts import Facts, Need, Side
from memkv_vllm.doctor.findings import Finding, fail, ok, warn
from memkv_vllm.doctor.memory import check_gpu_memory, check_memlock
from memkv_vllm.doctor.network import check_marking, check_mtus, check_ports, check_rails
from memkv_vllm.doctor.placement import check_placement
from memkv_vllm.doctor.servers import check_servers
from memkv_vllm.doctor.storage import check_storage

__all__ = ["check_all"]

_Check = Callable[[Facts], Iterator[Finding]]

_RDMA: tuple[_Check, ...] = (
    check_devices, check_library, check_memlock, check_ports, check_mtus, check_marking, check_rails,
)  # fmt: skip


def check_all(facts: Facts) -> list[Finding]:
    """Every finding about these facts."""
    client = facts.side is Side.CLIENT
    checks: list[_Check] = [_settings, _transport]
    if facts.need is not Need.NONE:
        checks += _RDMA
        if client:
            checks += [check_gpu_memory, check_placement]
    if client:
        checks += [check_vllm, check_hash_seed]
    checks += [check_storage, check_servers, _unanswered]
    return [finding for check in checks for finding in check(facts)]


def _settings(facts: Facts) -> Iterator[Finding]:
    for problem in facts.settings_problems:
        seen, _, fix = problem.rpartition("; ")
        yield fail("settings", seen or problem, fix if seen else "correct it; docs/reference/settings.md has them all")


def _transport(facts: Facts) -> Iterator[Finding]:
    if facts.need is not Need.NONE:
        return
    if facts.side is Side.SERVER:
        yield ok("rdma", "rdma.devices names none: this server offers tcp and loopback; RDMA was not looked at")
    else:
        yield ok("rdma", f"transport is {facts.transport}: RDMA is not used, and was not looked at")


def _unanswered(facts: Facts) -> Iterator[Finding]:
    for what in facts.unanswered:
        yield warn("doctor", what, "try again; if it repeats, something there hangs or is broken")
