"""``memkv net topo`` on machines of several shapes, against tables that were read and found right (P069).

The expected tables are in ``tests/golden/topology``. After a wanted change, look at what the test prints, and replace
the file by it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memkv_vllm.cli import main
from memkv_vllm.config import load_rdma_devices
from tests.support.sysfs import MACHINES

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "topology"

SERVERS = {
    "rail_optimised": ["store=10.10.3.9|10.10.4.9"],
    "eight_gpus_two_nics": ["10.20.1.9:9900", "10.99.0.1"],
    "bonded": ["10.30.4.4", "10.31.0.1"],
    "vm_without_pci": ["10.40.0.9"],
    "container_without_rdma": ["10.10.3.9"],
    "dual_port": ["10.50.2.9"],
    "ipv6_only": ["[2001:db8:6:1::9]:9900"],
    "soft_roce": ["10.78.0.1"],
    "infiniband": ["10.60.0.9"],
}
"""What is asked of each; one of them lies on no rail, one behind a gateway."""


def topo(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["net", "topo", *arguments])


@pytest.mark.parametrize("name", MACHINES)
def test_the_table(tmp_path: Path, name: str) -> None:
    root = MACHINES[name](tmp_path)
    servers = [word for server in SERVERS[name] for word in ("--server", server)]
    seen = topo("--root", str(root), *servers)
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert seen.output == expected, f"\n{seen.output}"
    assert seen.exit_code == (1 if name in ("eight_gpus_two_nics", "container_without_rdma") else 0)


def test_every_golden_file_has_a_machine() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(MACHINES) == set(SERVERS)


@pytest.mark.parametrize("name", MACHINES)
def test_json_has_the_facts_of_the_table(tmp_path: Path, name: str) -> None:
    root = MACHINES[name](tmp_path)
    servers = [word for server in SERVERS[name] for word in ("--server", server)]
    seen = topo("--json", "--root", str(root), *servers)
    facts = json.loads(seen.output)
    table = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    for nic in facts["nics"]:
        for port in nic["ports"]:
            assert port["name"] in table
            for gid in port["gids"][:1]:
                assert gid["address"] in table or not gid["usable"]
    for rank in facts["ranks"]:
        assert rank["reason"] in table or facts["problems"]
    for row in facts["servers"]:
        assert row["reason"] in table


def test_a_machine_without_a_nic_is_no_failure(tmp_path: Path) -> None:
    """P076: it says so, and what to do."""
    seen = topo("--root", str(MACHINES["container_without_rdma"](tmp_path)))
    assert seen.exit_code == 0
    assert "no RDMA device: found no /sys/class/infiniband" in seen.output
    assert "docker" in seen.output


def test_ranks_and_devices(tmp_path: Path) -> None:
    root = str(MACHINES["rail_optimised"](tmp_path))
    facts = json.loads(topo("--json", "--root", root, "--ranks", "2", "--device", "mlx5_6").output)
    assert [rank["ports"] for rank in facts["ranks"]] == [["mlx5_6:1"], ["mlx5_6:1"]]
    missing = topo("--root", root, "--device", "mlx5_9")
    assert missing.exit_code == 1
    assert "RDMA device mlx5_9 is not on this host" in missing.output


def test_the_settings_devices_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P073: MEMKV_RDMA_DEVICES, or the yaml's, without any other setting; of another machine's tree only --device."""
    monkeypatch.setenv("MEMKV_RDMA_DEVICES", "mlx5_99")
    here = topo("--ranks", "1")
    assert "mlx5_99 is not on this host" in here.output or "no RDMA device" in here.output
    root = str(MACHINES["rail_optimised"](tmp_path / "tree"))
    assert topo("--root", root).exit_code == 0
    monkeypatch.setenv("MEMKV_RDMA_DEVICES", "mlx5 0")
    wrong = topo()
    assert (wrong.exit_code, "expected RDMA device names" in wrong.stderr) == (2, True)
    monkeypatch.delenv("MEMKV_RDMA_DEVICES")
    yaml = tmp_path / "client.yaml"
    yaml.write_text("rdma_devices: [mlx5_98]\n")
    monkeypatch.setenv("MEMKV_CONFIG", str(yaml))
    assert load_rdma_devices() == ("mlx5_98",)


def test_a_wrong_server_is_a_usage_error(tmp_path: Path) -> None:
    seen = topo("--root", str(tmp_path), "--server", "http://store")
    assert seen.exit_code == 2
    assert "leave out the scheme" in seen.output


def test_a_name_without_an_address(tmp_path: Path) -> None:
    seen = topo("--root", str(MACHINES["soft_roce"](tmp_path)), "--server", "no-such-host.invalid")
    assert seen.exit_code == 1
    assert "no-such-host.invalid:9900 has no IP address here" in seen.output
