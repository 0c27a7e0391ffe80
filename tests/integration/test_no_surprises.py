"""What a whole client and a whole server reach out to: the configured servers, and nothing else (P098, P088)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    """P098: the abstract Unix address of its port; P088: without a verbs library."""
    result = audited("server", os.urandom(32), 0)
    assert result["outcome"]["complete"] == 0
    assert {tuple(event) for event in result["seen"]} == {("socket.bind", socket_address(result["outcome"]["port"]))}
