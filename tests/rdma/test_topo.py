"""``memkv net topo`` over the devices of a real kernel: what is read is what the verbs library says (P069, P071)."""

from __future__ import annotations

import json
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.errors import RailError
from memkv_vllm.topology import Host, allowed_ports, choose, pair, rank_gids, read_host
from memkv_vllm.transports.verbs.providers import load_provider

ROOT = Path(__file__).resolve().parents[2]


def topo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memkv_vllm", "net", "topo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def host() -> Host:
    return read_host()


def test_every_gid_of_sysfs_is_the_librarys(host: Host) -> None:
    """P071: the same bytes at the same index, and empty entries nowhere else."""
    provider = load_provider()
    for nic in host.nics:
        device = provider.open(nic.name)
        try:
            for port in nic.ports:
                found = {gid.index: gid.raw for gid in port.gids}
                for index in range(16):
                    assert device.gid(port.number, index) == found.get(index, bytes(16)), (port.name, index)
        finally:
            device.close()


def test_path_mtus_are_the_librarys_active_ones(host: Host) -> None:
    provider = load_provider()
    for nic in host.nics:
        device = provider.open(nic.name)
        try:
            for port in nic.ports:
                assert device.port(port.number).active_mtu == port.mtu, port
        finally:
            device.close()


def test_the_two_rails(host: Host) -> None:
    """P070, P071: link-local stands first in the kernel's table, the IPv4 one is chosen."""
    for number in range(2):
        rail = pair(host, f"10.{77 + number}.0.9")
        assert (rail.device, rail.netdev, rail.mtu) == (f"rxe{number}", f"rail{number}", 4096)
        assert rail.address == ip_address(f"10.{77 + number}.0.1")
        (port,) = allowed_ports(host, (f"rxe{number}",))
        assert port.gids[0].address.is_link_local
        assert rail.gid_index == rank_gids(port)[0].gid.index != 0
        assert rail.rate_bytes_per_s is None
    with pytest.raises(RailError, match=r"no RDMA port reaches 10\.99\.0\.1"):
        pair(host, "10.99.0.1")


def test_ranks_spread_over_the_rails(host: Host) -> None:
    """P069."""
    assert [choose(host, None, rank, 4)[0].name for rank in range(4)] == ["rxe0:1", "rxe0:1", "rxe1:1", "rxe1:1"]


def test_the_command() -> None:
    done = topo("--json", "--server", "10.77.0.1:9900", "--server", "10.78.0.7", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert [nic["name"] for nic in facts["nics"]] == ["rxe0", "rxe1"]
    assert all(nic["software"] for nic in facts["nics"])
    assert [(row["server"], row["port"]) for row in facts["servers"]] == [
        ("10.77.0.1:9900", "rxe0:1"),
        ("10.78.0.7:9900", "rxe1:1"),
    ]
    assert [rank["ports"][0] for rank in facts["ranks"]] == ["rxe0:1", "rxe1:1"]


def test_a_rail_whose_interface_goes_down(host: Host) -> None:
    """P070, P071: not used, and the reason names the interface."""
    subprocess.run(["ip", "link", "set", "rail1", "down"], check=True)
    try:
        done = topo("--server", "10.78.0.9")
        assert done.returncode == 1
        assert "not used: rxe1:1" in done.stdout
        assert "rail1" in done.stdout
    finally:
        # What a link that was down loses of IPv6 comes back by itself, the IPv4 address has stayed.
        subprocess.run(["ip", "link", "set", "rail1", "up"], check=True)
    assert pair(read_host(), "10.78.0.9").device == "rxe1"
