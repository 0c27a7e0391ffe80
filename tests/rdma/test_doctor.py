"""``memkv doctor`` on soft-RoCE, against a running server: what is well, and what is broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORT = 19811
KEY = "7c" * 32
AS_A_USER = """
import os, resource
from memkv_vllm.cli import main
try:
    main(["doctor", "--json"])  # as root: imports everything, for the user may not read the folders of it
except SystemExit:
    pass
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main(["doctor", "--json"])
"""
MEMKV = [sys.executable, "-m", "memkv_vllm"]


def write_yaml(folder: Path, devices: list[str], port: int = PORT) -> Path:
    path = folder / "server.yaml"
    network = {"address": f"0.0.0.0:{port}", "admin_address": "127.0.0.1:0", "auth_key": KEY}
    path.write_text(json.dumps({"network": network, "memory": {"max_size": "16MiB"}, "rdma": {"devices": devices}}))
    path.chmod(0o600)
    return path


def serving(path: Path) -> Iterator[Path]:
    process = subprocess.Popen(
        [*MEMKV, "start", "--config", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        assert first.startswith("ready "), process.stderr.read()
        yield path
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server with verbs on both rails; its yaml."""
    yield from serving(write_yaml(tmp_path_factory.mktemp("server"), ["rxe0", "rxe1"]))


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server without verbs, on the next port."""
    yield from serving(write_yaml(tmp_path_factory.mktemp("plain"), [], PORT + 1))


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, list[tuple[str, str, str]]]]:
    """Exit status, and the findings by check: level, seen, fix."""
    environ = {
        **os.environ,
        "MEMKV_AUTH_KEY": KEY,
        "MEMKV_SERVERS": f"store=10.77.0.1:{PORT}|10.78.0.1:{PORT}",
        "PYTHONHASHSEED": "0",
        **variables,
    }
    done = subprocess.run(
        [*MEMKV, "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=environ,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in told["findings"]:
        found.setdefault(row["check"], []).append((row["level"], row["seen"], row["fix"]))
    return done.returncode, found


def levels(found: dict[str, list[tuple[str, str, str]]], check: str) -> list[str]:
    return [level for level, _, _ in found[check]]


@pytest.mark.timeout(120)
def test_all_is_well_and_bytes_went_over_both_rails(server: Path) -> None:
    status, found = doctor()
    bad = {check: rows for check, rows in found.items() if any(level != "ok" for level, _, _ in rows)}
    bad.pop("vllm", None)  # it need not be installed in the VM
    assert not bad
    assert status in (0, 1)
    assert [seen.rpartition(" ")[2] for _, seen, _ in found["data path"]] == ["rxe0:1", "rxe1:1"]
    assert all("reads and writes" in seen for _, seen, _ in found["data path"])
    assert "uverbs0, uverbs1 can be opened" in found["device files"][0][1]


@pytest.mark.timeout(120)
def test_the_server_side(server: Path) -> None:
    """P070: it says the addresses that clients must use."""
    status, found = doctor("--side", "server", "--config", str(server))
    assert status in (0, 1), found
    assert "10.77.0.1 (rxe0:1), 10.78.0.1 (rxe1:1)" in found["rail"][0][1]
    assert "32 MiB" in found["memlock"][0][1]
    assert "a server runs" in found["arena"][0][1]


@pytest.mark.timeout(120)
def test_a_device_that_is_not_there(server: Path) -> None:
    """P073."""
    status, found = doctor(MEMKV_RDMA_DEVICES="rxe7")
    assert status == 2
    assert found["nic"][0][:2] == ("fail", "RDMA device rxe7 is not on this host; found rxe0:1, rxe1:1")


@pytest.mark.timeout(120)
def test_an_address_on_no_rail(server: Path) -> None:
    """P070."""
    status, found = doctor(MEMKV_SERVERS=f"store=127.0.0.1:{PORT}")
    assert status == 2
    assert levels(found, "rail") == ["fail"]
    assert "no RDMA port reaches 127.0.0.1" in found["rail"][0][1]


@pytest.mark.timeout(120)
def test_an_mtu_that_the_rail_does_not_carry(server: Path) -> None:
    subprocess.run(["ip", "link", "set", "rail1", "mtu", "1500"], check=True)
    try:
        status, found = doctor(MEMKV_MTU="4096")
    finally:
        subprocess.run(["ip", "link", "set", "rail1", "mtu", "9000"], check=True)
    assert status == 2
    assert any("mtu is 4096, but rxe1:1 carries 1024" in seen for _, seen, _ in found["mtu"])
    assert any("the rails differ" in seen for _, seen, _ in found["mtu"])


@pytest.mark.timeout(120)
def test_a_server_that_does_not_offer_verbs(plain_server: Path) -> None:
    status, found = doctor(MEMKV_SERVERS=f"10.77.0.1:{PORT + 1}")
    assert status == 2
    assert "does not offer verbs" in found["data path"][0][1]
    assert "rdma.devices" in found["data path"][0][2]


@pytest.mark.timeout(120)
def test_memlock_and_rights_of_a_user(server: Path) -> None:
    """P074, P076: a user with 64 KiB of locked memory who may not open one of the device files."""
    node = Path("/dev/infiniband/uverbs1")
    mode = node.stat().st_mode & 0o777
    node.chmod(0o600)
    environ = {**os.environ, "MEMKV_AUTH_KEY": KEY, "MEMKV_SERVERS": f"10.77.0.1:{PORT}", "HOME": "/"}
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-c", AS_A_USER],
            capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=environ,
        )  # fmt: skip
    finally:
        node.chmod(mode)
    assert done.returncode == 2, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["findings"]
    memlock = next(row for row in rows if row["check"] == "memlock")
    assert memlock["level"] == "fail"
    assert "the limit is 0.1 MiB" in memlock["seen"]
    assert "LimitMEMLOCK=infinity" in memlock["fix"]
    assert any(row["seen"].startswith("uverbs1 (rxe1): Permission denied") for row in rows)
