"""Which GID, which port, which NIC: the decisions, on tables and trees made by hand (P069, P070, P071, P073)."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault, RailError
from memkv_vllm.topology import (
    Affinity,
    Gid,
    GidKind,
    Gpu,
    Host,
    Nic,
    Port,
    RankedGid,
    affinity,
    allowed_ports,
    choose,
    choose_gid,
    describe,
    dscp_of,
    ib_mtu,
    pair,
    port_state,
    rank_gids,
    read_host,
    traffic_class,
    traffic_class_problem,
)
from tests.support.sysfs import MACHINES, GidEntry, SysTree, mlx5_gids

# ---------------------------------------------------------------------------------------------------- GIDs


def port_with(*entries: GidEntry, link_layer: str = "Ethernet", **others: object) -> Port:
    """A port with that GID table, empty entries left out as the reader does."""
    kinds = {"RoCE v2": GidKind.ROCE_V2, "IB/RoCE v1": GidKind.ROCE_V1}
    gids = []
    for index, entry in enumerate(entries):
        address = ip_address(entry.address)
        raw = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
        kind = GidKind.INFINIBAND if link_layer == "InfiniBand" else kinds[entry.kind]
        if any(raw):
            gids.append(Gid(index, raw, kind, entry.netdev))
    port = Port("mlx5_0", 1, "ACTIVE", link_layer, 50e9, "eth0", 9000, 4096, tuple(gids))
    return dataclasses.replace(port, **others)  # type: ignore[arg-type]


EMPTY = GidEntry("::")
V1, V2 = "IB/RoCE v1", "RoCE v2"

GID_TABLES = {
    "mlx5 with IPv4": (mlx5_gids("eth0", "fe80::1", "10.0.0.1"), [3, 1, 0, 2], "RoCE v2, IPv4"),
    "link-local first, then a global and an IPv4": (
        mlx5_gids("eth0", "fe80::1", "2001:db8::1", "10.0.0.1"),
        [5, 3, 1, 0, 2, 4],
        "RoCE v2, IPv4",
    ),
    "IPv6 only": (mlx5_gids("eth0", "fe80::1", "2001:db8::1"), [3, 1, 0, 2], "RoCE v2, global IPv6"),
    "unique local addresses count as global": (
        mlx5_gids("eth0", "fe80::1", "fd00::1"),
        [3, 1, 0, 2],
        "RoCE v2, global IPv6",
    ),
    "no address was given to the interface": (mlx5_gids("eth0", "fe80::1"), [1, 0], "RoCE v2, link-local"),
    "RoCE v1 only": (
        [GidEntry("fe80::1", V1, "eth0"), GidEntry("10.0.0.1", V1, "eth0")],
        [0, 1],
        "RoCE v1, link-local",
    ),
    "empty entries between": (
        [EMPTY, EMPTY, GidEntry("10.0.0.1", V1, "eth0"), EMPTY, GidEntry("10.0.0.1", V2, "eth0"), EMPTY],
        [4, 2],
        "RoCE v2, IPv4",
    ),
    "soft-RoCE": (
        [GidEntry("fe80::1", V2, "eth0"), GidEntry("10.0.0.1", V2, "eth0")],
        [1, 0],
        "RoCE v2, IPv4",
    ),
    "a kernel that names no interface": ([GidEntry("fe80::1", V2), GidEntry("10.0.0.1", V2)], [1, 0], "RoCE v2, IPv4"),
}


@pytest.mark.parametrize("name", GID_TABLES)
def test_ranking_of_recorded_tables(name: str) -> None:
    """P071: v2 with IPv4, v2 with a global IPv6, v2 link-local, v1; an empty entry never."""
    entries, order, reason = GID_TABLES[name]
    ranked = rank_gids(port_with(*entries))
    assert [entry.gid.index for entry in ranked] == order
    assert ranked[0].reason == reason
    assert choose_gid(port_with(*entries)).gid.index == order[0]


def test_an_empty_entry_is_never_ranked() -> None:
    """P071: whoever made the port's value."""
    empty = Gid(0, bytes(16), GidKind.ROCE_V2, "")
    assert [entry.gid.index for entry in rank_gids(dataclasses.replace(port_with(EMPTY), gids=(empty,)))] == []


def test_a_bond_has_the_address_and_a_slave_does_not() -> None:
    """P071: the entry of a slave is there first, is v2, and reaches nobody."""
    slave = GidEntry("10.0.0.9", V2, "eth0")
    table = [slave, GidEntry("fe80::1", V2, "bond0"), GidEntry("10.0.0.1", V1, "bond0")]
    port = port_with(*table, netdev="bond0", enslaved_netdevs=frozenset({"eth0"}))
    ranked = rank_gids(port)
    assert [entry.gid.index for entry in ranked] == [1, 2, 0]
    assert ranked[-1] == RankedGid(port.gids[0], "RoCE v2, IPv4, eth0 is part of a bond", usable=False)


def test_an_interface_that_is_down_is_worse_than_any_kind() -> None:
    """P071: a VLAN of the port is down; its better address does not count."""
    table = [GidEntry("10.0.0.1", V2, "eth0.7"), GidEntry("fe80::1", V2, "eth0")]
    port = port_with(*table, down_netdevs=frozenset({"eth0.7"}))
    assert [(entry.gid.index, entry.usable) for entry in rank_gids(port)] == [(1, True), (0, False)]


def test_no_usable_gid_is_an_error_with_the_table() -> None:
    port = port_with(GidEntry("10.0.0.1", V2, "eth0"), down_netdevs=frozenset({"eth0"}))
    with pytest.raises(RailError) as caught:
        choose_gid(port)
    assert caught.value.found == "GIDs 0: 10.0.0.1 (RoCE v2, IPv4, eth0 is down)"
    assert "ip link set eth0 up" in caught.value.wanted
    with pytest.raises(RailError, match="found GIDs an empty table"):
        choose_gid(port_with())


def test_an_index_overrides_and_is_checked() -> None:
    """P071: ``gid_index``."""
    port = port_with(*mlx5_gids("eth0", "fe80::1", "10.0.0.1"), EMPTY)
    chosen = choose_gid(port, 0)
    assert (chosen.gid.index, chosen.reason) == (0, "RoCE v1, link-local; index 0 is configured")
    for index in (4, 5, 255):
        with pytest.raises(RailError, match=f"mlx5_0:1 has no GID at index {index}: found GIDs 3: 10.0.0.1"):
            choose_gid(port, index)


def test_addresses_of_gids() -> None:
    port = port_with(*mlx5_gids("eth0", "fe80::1", "10.0.0.1"))
    assert [str(gid.address) for gid in port.gids] == ["fe80::1", "fe80::1", "10.0.0.1", "10.0.0.1"]


# ---------------------------------------------------------------------------------------------------- marking


@pytest.mark.parametrize(
    ("netdev", "expected"),
    [(9000, 4096), (4200, 4096), (4192, 4096), (4191, 2048), (2144, 2048), (1500, 1024), (1119, 512), (352, 256),
     (351, None), (0, None)],
)  # fmt: skip
def test_path_mtu_of_an_interface(netdev: int, expected: int | None) -> None:
    assert ib_mtu(netdev) == expected


def test_traffic_class() -> None:
    assert [traffic_class(dscp) for dscp in (0, 26, 63)] == [0, 104, 252]
    assert dscp_of(106) == 26
    with pytest.raises(ValueError, match="DSCP 64"):
        traffic_class(64)


def test_a_dscp_given_as_traffic_class_is_noticed() -> None:
    assert traffic_class_problem(104) == ""
    assert "if 26 is the DSCP, set traffic_class: 104" in traffic_class_problem(26)
    assert "set traffic_class: 104 for DSCP 26" in traffic_class_problem(106)
    assert "expected 0 to 255" in traffic_class_problem(256)


# ---------------------------------------------------------------------------------------------------- rails


@pytest.fixture
def rails(tmp_path: Path) -> Host:
    return read_host(MACHINES["rail_optimised"](tmp_path))


def test_each_subnet_has_its_port(rails: Host) -> None:
    """P070: never another rail's port."""
    for number in range(8):
        rail = pair(rails, f"10.10.{number}.77")
        assert (rail.name, str(rail.address), rail.gid_index) == (f"mlx5_{number}:1", f"10.10.{number}.1", 3)
        assert (rail.netdev, rail.mtu, rail.rate_bytes_per_s) == (f"rail{number}", 4096, 50e9)
        assert rail.gid == bytes(10) + b"\xff\xff" + bytes([10, 10, number, 1])
        assert f"10.10.{number}.77 is in its subnet 10.10.{number}.0/24; GID 3: RoCE v2, IPv4" in rail.reason


def test_an_address_on_no_rail_is_refused(rails: Host) -> None:
    """P070: the management interface has a default route, and no RDMA: no way."""
    with pytest.raises(RailError) as caught:
        pair(rails, "10.99.0.1")
    assert caught.value.found.startswith("mlx5_0:1 on rail0 in 10.10.0.0/24; mlx5_1:1 on rail1 in 10.10.1.0/24")
    assert "one address for each rail" in caught.value.wanted
    assert isinstance(caught.value, EnvironmentFault)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_loopback_address_is_on_no_rail(rails: Host, address: str) -> None:
    """What the first trial on one machine leaves in the settings."""
    with pytest.raises(RailError, match="no RDMA port reaches") as caught:
        pair(rails, address)
    assert "MEMKV_TRANSPORT=loopback" in caught.value.wanted


def test_an_address_whose_rail_is_down_names_that_port(rails: Host) -> None:
    """P070: a cable that was pulled must not look like a wrong subnet."""
    nics = tuple(replace(nic, ports=tuple(replace(port, state="DOWN") for port in nic.ports)) for nic in rails.nics[:1])
    with pytest.raises(RailError, match=r"no RDMA port reaches 10\.10\.0\.7: found mlx5_1:1 on rail1 in ") as caught:
        pair(replace(rails, nics=(*nics, *rails.nics[1:])), "10.10.0.7")
    assert "not usable now: mlx5_0:1 is in state DOWN (cable, switch port; ip link set rail0 up)" in caught.value.found


def test_a_named_device_is_the_only_one(rails: Host) -> None:
    """P073, P070: the rail's port is not among the allowed ones, and no other is taken."""
    assert pair(rails, "10.10.3.7", devices=("mlx5_3:1",)).device == "mlx5_3"
    with pytest.raises(
        RailError, match=r"no RDMA port reaches 10\.10\.3\.7: found mlx5_2:1 on rail2 in 10\.10\.2\.0/24"
    ):
        pair(rails, "10.10.3.7", devices=("mlx5_2",))


@pytest.mark.parametrize("name", ["mlx5_9", "mlx5_0:2", "rail0", "mlx5"])
def test_a_missing_device_is_an_error_that_lists_those_there(rails: Host, name: str) -> None:
    """P073: by another port, by the interface's name, by a prefix."""
    with pytest.raises(RailError) as caught:
        pair(rails, "10.10.0.7", devices=("mlx5_0", name))
    assert str(caught.value).startswith(f"RDMA device {name} is not on this host: found mlx5_0:1, mlx5_1:1, ")
    assert ("rail0 is the interface of mlx5_0:1" in caught.value.found) is (name == "rail0")
    assert "MEMKV_RDMA_DEVICES" in caught.value.wanted


def test_names_give_the_order(rails: Host) -> None:
    names = [port.name for port in allowed_ports(rails, ("mlx5_5", "mlx5_1:1", "mlx5_5:1"))]
    assert names == ["mlx5_5:1", "mlx5_1:1"]


def test_a_port_that_is_down_says_so(tmp_path: Path) -> None:
    host = read_host(MACHINES["dual_port"](tmp_path))
    with pytest.raises(
        RailError, match=r"found mlx5_0:1 is in state DOWN \(cable, switch port; ip link set enp66s0 up\)"
    ):
        pair(host, "10.50.1.9", devices=("mlx5_0",))


def test_ports_of_one_device_are_rails_of_their_own(tmp_path: Path) -> None:
    host = read_host(MACHINES["dual_port"](tmp_path))
    found = [pair(host, f"10.50.{number}.9") for number in (1, 2)]
    assert [(rail.name, rail.netdev, rail.mtu) for rail in found] == [
        ("mlx4_0:1", "enp34s0d1", 4096),
        ("mlx4_0:2", "enp34s0d2", 1024),
    ]


def test_a_gateway_is_the_second_choice_and_is_named(tmp_path: Path) -> None:
    """P070: a subnet of its own wins over any gateway; behind one the rail says so."""
    host = read_host(MACHINES["bonded"](tmp_path))
    near, far = pair(host, "10.30.4.4"), pair(host, "10.31.0.1")
    assert (near.is_behind_gateway, far.is_behind_gateway) == (False, True)
    assert far.reason.startswith("10.31.0.1 is behind the gateway 10.30.255.254 of bond0, not in a subnet of it")
    assert (far.gid_index, str(far.address)) == (8, "10.30.0.1")


def test_a_subnet_of_its_own_wins_over_a_gateway_and_over_preference(tmp_path: Path) -> None:
    """P070: one port has the server's subnet, the preferred one only a route to it, with a longer prefix even."""
    tree = SysTree(tmp_path)
    for name, network in (("a", "10.0.0.1/8"), ("b", "172.16.0.1/24")):
        tree.netdev(f"eth{name}")
        tree.rdma(name)
        tree.port(name, gids=mlx5_gids(f"eth{name}", f"fe80::{name}", network.partition("/")[0]))
        tree.address(f"eth{name}", network)
    tree.gateway("ethb", "10.5.0.0/16", "172.16.0.254")
    host = read_host(tree.finish())
    assert pair(host, "10.5.0.9").device == "a"
    assert pair(host, "10.5.0.9", prefer=("b",)).device == "a"
    assert pair(host, "10.5.0.9", devices=("b",)).is_behind_gateway


def two_ports(tmp_path: Path, *networks: str) -> Host:
    """Two NICs ``a`` and ``b`` with these addresses."""
    tree = SysTree(tmp_path)
    for name, network in zip("ab", networks, strict=True):
        tree.netdev(f"eth{name}")
        tree.rdma(name)
        tree.port(name, gids=mlx5_gids(f"eth{name}", f"fe80::{name}", network.partition("/")[0]))
        tree.address(f"eth{name}", network)
    return read_host(tree.finish())


def test_the_longest_prefix_wins(tmp_path: Path) -> None:
    host = two_ports(tmp_path, "10.0.0.1/8", "10.1.1.1/24")
    assert [pair(host, address).device for address in ("10.1.1.9", "10.2.0.1")] == ["b", "a"]


def test_two_ports_in_one_subnet_are_settled_by_preference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = two_ports(tmp_path, "10.0.0.1/24", "10.0.0.2/24")
    with caplog.at_level(logging.INFO, "memkv.topology"):
        assert pair(host, "10.0.0.9").device == "a"
        assert pair(host, "10.0.0.9", prefer=("b:1", "a:1")).device == "b"
        assert pair(host, "10.0.0.9", devices=("b", "a")).device == "b"
    assert "event=rail_ambiguous address=10.0.0.9 chosen=a:1 reason=first others=b:1" in caplog.messages
    assert "event=rail_ambiguous address=10.0.0.9 chosen=b:1 reason=preferred others=a:1" in caplog.messages
    assert "first of 2 ports there" in pair(host, "10.0.0.9").reason


def test_preference_never_beats_the_subnet(rails: Host) -> None:
    """P070: the NIC nearest to the GPU is on another rail."""
    assert pair(rails, "10.10.3.7", prefer=("mlx5_0",)).device == "mlx5_3"


def test_an_address_of_this_host_is_its_own_ports(tmp_path: Path) -> None:
    """A server asks which port its listening address is on; two ports share the subnet."""
    host = two_ports(tmp_path, "10.0.0.1/24", "10.0.0.2/24")
    for address, device in (("10.0.0.1", "a"), ("10.0.0.2", "b")):
        rail = pair(host, address)
        assert (rail.device, str(rail.address)) == (device, address)
        assert f"{address} is its own address" in rail.reason


def test_over_a_cable_on_one_host_the_named_port_reaches_the_other_ones_address(tmp_path: Path) -> None:
    host = two_ports(tmp_path, "10.0.0.1/24", "10.0.0.2/24")
    rail = pair(host, "10.0.0.2", devices=("a",))
    assert (rail.device, str(rail.address)) == ("a", "10.0.0.1")


def test_a_vlan_of_a_port_has_its_own_gid_and_mtu(tmp_path: Path) -> None:
    """P071: the best GID of the table is in another subnet than the server."""
    tree = SysTree(tmp_path)
    tree.netdev("eth0", mtu=9000)
    tree.netdev("eth0.7", mtu=1500)
    tree.rdma("mlx5_0")
    tree.port("mlx5_0", gids=[*mlx5_gids("eth0", "fe80::1", "10.0.0.1"), *mlx5_gids("eth0.7", "fe80::1", "10.7.0.1")])
    tree.address("eth0", "10.0.0.1/24")
    tree.address("eth0.7", "10.7.0.1/24")
    host = read_host(tree.finish())
    assert [(r.gid_index, r.netdev, r.mtu) for r in (pair(host, "10.0.0.9"), pair(host, "10.7.0.9"))] == [
        (3, "eth0", 4096),
        (7, "eth0.7", 1024),
    ]


def test_a_second_address_of_an_interface(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.netdev("eth0")
    tree.rdma("mlx5_0")
    tree.port("mlx5_0", gids=mlx5_gids("eth0", "fe80::1", "10.0.0.1", "10.0.1.1", "2001:db8::1"))
    for text in ("10.0.0.1/24", "10.0.1.1/24", "2001:db8::1/64"):
        tree.address("eth0", text)
    host = read_host(tree.finish())
    assert [pair(host, a).gid_index for a in ("10.0.0.9", "10.0.1.9", "2001:db8::9")] == [3, 5, 7]


def test_ipv6_rails(tmp_path: Path) -> None:
    host = read_host(MACHINES["ipv6_only"](tmp_path))
    assert pair(host, "2001:db8:6:1::9").device == "mlx5_1"
    with pytest.raises(
        RailError, match=r"found mlx5_0:1 on ens0 in 2001:db8:6::/64; mlx5_1:1 on ens1 in 2001:db8:6:1::/64"
    ):
        pair(host, "10.0.0.1")


def test_a_link_local_address_names_its_interface(tmp_path: Path) -> None:
    host = read_host(MACHINES["ipv6_only"](tmp_path))
    assert [pair(host, f"fe80::9%ens{number}").device for number in (0, 1)] == ["mlx5_0", "mlx5_1"]
    assert pair(host, "fe80::9%ens1").gid_index == 1
    with pytest.raises(RailError):
        pair(host, "fe80::9%eth9")


def test_an_index_given_by_hand_applies_to_the_paired_port(rails: Host) -> None:
    """P071."""
    assert pair(rails, "10.10.2.7", gid_index=1).gid_index == 1
    with pytest.raises(RailError, match="mlx5_2:1 has no GID at index 9"):
        pair(rails, "10.10.2.7", gid_index=9)


def test_a_name_is_no_address(rails: Host) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        pair(rails, "store1")


def test_without_any_device(tmp_path: Path) -> None:
    """P076: names what is missing, and the line that adds it."""
    host = read_host(MACHINES["container_without_rdma"](tmp_path))
    with pytest.raises(RailError) as caught:
        pair(host, "10.0.0.1")
    assert caught.value.found == "no /sys/class/infiniband"
    assert "docker: --device=/dev/infiniband --cap-add=IPC_LOCK --network=host;" in caught.value.wanted


def test_iwarp_is_not_used(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.netdev("eth0")
    tree.rdma("iw0", node_type="4: RNIC")
    tree.port("iw0", gids=[GidEntry("10.0.0.1", V2, "eth0")])
    tree.address("eth0", "10.0.0.1/24")
    with pytest.raises(RailError, match="iw0:1 speaks RNIC, not RoCE or InfiniBand"):
        pair(read_host(tree.finish()), "10.0.0.9")


# ---------------------------------------------------------------------------------------------------- nearness


def gpu_at(*path: str, numa: int | None = 0, index: int = 0) -> Gpu:
    return Gpu(index, path[-1] if path else "", path, numa, "nvidia")


def nic_at(*path: str, numa: int | None = 0) -> Nic:
    return Nic("mlx5_0", path[-1] if path else "", path, numa, "mlx5_core", ())


BRIDGE = ("pci0000:10", "0000:10:01.0")


@pytest.mark.parametrize(
    ("gpu", "nic", "expected"),
    [
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0", "0000:12:00.0", "0000:13:00.0"),
            nic_at(*BRIDGE, "0000:11:00.0", "0000:12:01.0", "0000:14:00.0"),
            Affinity.PIX, id="two ports of one switch",
        ),
        pytest.param(gpu_at(*BRIDGE, "0000:11:00.0"), nic_at(*BRIDGE, "0000:11:00.1"), Affinity.PIX, id="one bus"),
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0", "0000:12:00.0", "0000:13:00.0"),
            nic_at(*BRIDGE, "0000:11:00.0", "0000:12:01.0", "0000:15:00.0", "0000:16:00.0", "0000:17:00.0"),
            Affinity.PXB, id="a switch below the switch",
        ),
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0", "0000:12:00.0", "0000:13:00.0"),
            nic_at(*BRIDGE, "0000:11:00.0", "0000:12:01.0", "0000:15:00.0", "0000:16:00.0"),
            Affinity.PXB, id="a bridge on the card",
        ),
        pytest.param(
            gpu_at("pci0000:10", "0000:10:01.0", "0000:11:00.0"), nic_at("pci0000:10", "0000:10:02.0", "0000:21:00.0"),
            Affinity.PHB, id="two root ports of a host bridge",
        ),
        pytest.param(gpu_at("pci0000:0", "0000:00:05.0"), nic_at("pci0000:0", "0000:00:06.0"), Affinity.PHB, id="flat"),
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0"), nic_at("pci0000:50", "0000:50:01.0", "0000:51:00.0"),
            Affinity.NODE, id="two host bridges of a node",
        ),
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0"), nic_at("pci0000:50", "0000:50:01.0", "0000:51:00.0", numa=1),
            Affinity.SYS, id="two nodes",
        ),
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0", numa=None), nic_at("pci0001:50", "0001:50:01.0", numa=None),
            Affinity.NODE, id="no NUMA",
        ),
        pytest.param(
            gpu_at(*BRIDGE, "0000:11:00.0", numa=0), nic_at("pci0001:50", "0001:50:01.0", numa=None),
            Affinity.SYS, id="NUMA of one only",
        ),
        pytest.param(gpu_at(*BRIDGE, "0000:11:00.0"), nic_at(), Affinity.UNKNOWN, id="not on PCI"),
    ],
)  # fmt: skip
def test_affinity(gpu: Gpu, nic: Nic, expected: Affinity) -> None:
    assert affinity(gpu, nic) is expected


def test_the_order_of_affinities() -> None:
    names = ["PIX", "PXB", "PHB", "NODE", "SYS", "UNKNOWN"]
    assert [level.name for level in sorted(Affinity)] == names


def best(host: Host, gpu: int | None, rank: int, num_ranks: int = 8, devices: tuple[str, ...] = ()) -> str:
    return choose(host, gpu, rank, num_ranks, devices)[0].name


def test_each_gpu_has_the_nic_of_its_switch(rails: Host) -> None:
    """P069."""
    assert [best(rails, gpu, gpu) for gpu in range(8)] == [f"mlx5_{number}:1" for number in range(8)]
    first = choose(rails, 2, 2, 8)[0]
    assert (first.affinity, first.reason) == (Affinity.PIX, "GPU 2: PIX, one PCIe switch")


def test_when_the_nearest_fail_gpus_go_to_different_ones(rails: Host) -> None:
    """P069: the three other NICs of a node take one GPU each."""
    second = [choose(rails, gpu, gpu, 8)[1].name for gpu in range(8)]
    assert max(Counter(second).values()) <= 2
    assert all((int(name[5]) < 4) == (gpu < 4) for gpu, name in enumerate(second)), second


def test_two_nics_serve_their_own_socket(tmp_path: Path) -> None:
    """P069: not mlx5_0 for all."""
    host = read_host(MACHINES["eight_gpus_two_nics"](tmp_path))
    assert [best(host, gpu, gpu) for gpu in range(8)] == ["mlx5_0:1"] * 4 + ["mlx5_1:1"] * 4
    assert [choose(host, gpu, gpu, 8)[0].affinity.name for gpu in (0, 2, 4, 6)] == ["PXB", "NODE", "PXB", "NODE"]


def test_narrowed_to_one_device_all_ranks_use_it(tmp_path: Path) -> None:
    """P073: MEMKV_RDMA_DEVICES."""
    host = read_host(MACHINES["eight_gpus_two_nics"](tmp_path))
    for gpu in range(8):
        assert [choice.name for choice in choose(host, gpu, gpu, 8, ("mlx5_1",))] == ["mlx5_1:1"]
    with pytest.raises(RailError, match="mlx5_7 is not on this host: found mlx5_0:1, mlx5_1:1"):
        choose(host, 0, 0, 8, ("mlx5_7",))


def test_equally_near_ports_take_turns(tmp_path: Path) -> None:
    """P069: both of a device's ports are used, also by eight engines that are each rank 0 of 1."""
    host = read_host(MACHINES["dual_port"](tmp_path))
    assert [best(host, gpu, 0, 1) for gpu in (0, 1)] == ["mlx4_0:1", "mlx4_0:2"]
    assert choose(host, 1, 0, 1)[0].reason == "GPU 1: SYS, across NUMA nodes, turn 2 of 2"


@pytest.mark.parametrize(("num_ranks", "each"), [(8, 1), (16, 2), (4, 1), (2, 1)])
def test_without_gpus_ranks_spread_evenly(rails: Host, num_ranks: int, each: int) -> None:
    """P069."""
    used = Counter(best(rails, None, rank, num_ranks) for rank in range(num_ranks))
    assert set(used.values()) == {each}


def test_a_gpu_that_is_not_there_is_none(rails: Host) -> None:
    for gpu in (8, -1):
        assert choose(rails, gpu, 0, 8)[0].reason.startswith("no GPU to be near to")


def test_every_usable_port_is_in_the_choice_once_and_no_other(tmp_path: Path) -> None:
    for name, make in MACHINES.items():
        host = read_host(make(tmp_path / name))
        usable = sorted(port.name for port in host.ports if not port_state(host, port))
        for gpu in (None, *range(len(host.gpus))):
            if usable:
                assert sorted(choice.name for choice in choose(host, gpu, 0, 1)) == usable, name


def test_a_software_device_is_the_last(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    for name, parent in (("a_rxe", "eth0"), ("mlx5_0", "")):
        tree.rdma(name, parent=parent)
        tree.port(name, gids=[GidEntry("10.0.0.1", V2)])
    assert [choice.name for choice in choose(read_host(tree.finish()), None, 0, 1)] == ["mlx5_0:1", "a_rxe:1"]


# ---------------------------------------------------------------------------------------------------- reading


def test_a_real_kernels_tree_of_this_machine_reads() -> None:
    host = read_host()
    assert any(netdev.name == "lo" for netdev in host.netdevs)
    assert ip_address("127.0.0.1") in host.addresses


def test_the_facts_of_a_port(tmp_path: Path) -> None:
    host = read_host(MACHINES["bonded"](tmp_path))
    (nic,) = host.nics
    (port,) = nic.ports
    assert (nic.pci, nic.numa_node, nic.driver) == ("0000:99:00.0", 1, "mlx5_core")
    assert nic.pci_path == ("pci0000:97", "0000:97:02.0", "0000:99:00.0")
    assert (port.state, port.rate_bytes_per_s, port.netdev, port.netdev_mtu) == ("ACTIVE", 25e9, "bond0", 9000)
    assert [gid.index for gid in port.gids] == [2, 3, 5, 6, 7, 8]
    assert port.enslaved_netdevs == {"ens1f0np0"}
    assert host.addresses == {ip_address(text) for text in ("127.0.0.1", "10.30.0.1", "fe80::99:b0")}


def test_interfaces_of_a_device_with_two_ports_that_no_gid_names(tmp_path: Path) -> None:
    """InfiniBand: only the number of the port that an interface stands on tells."""
    tree = SysTree(tmp_path)
    folder = tree.pci(["pci0000:20", "0000:20:02.0"], numa=0, vendor="0x15b3", kind="0x020700")
    tree.rdma("mlx4_0", folder)
    for number, netdev in ((1, "ibs1"), (2, "ibs0")):
        tree.netdev(netdev, mtu=2044, pci=folder, dev_port=number - 1)
        tree.port("mlx4_0", number, gids=[GidEntry(f"fe80::{number}", V1)], link_layer="InfiniBand")
    ports = read_host(tree.finish()).ports
    assert [(port.netdev, port.mtu) for port in ports] == [("ibs1", 2048), ("ibs0", 2048)]


def test_software_devices_are_known_and_have_no_rate(tmp_path: Path) -> None:
    host = read_host(MACHINES["soft_roce"](tmp_path))
    assert [nic.is_software for nic in host.nics] == [True, True]
    assert pair(host, "10.77.0.9").rate_bytes_per_s is None
    assert host.ports[0].rate_bytes_per_s == 312.5e6


def test_numbers_inside_of_names_are_ordered_as_numbers(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    for name in ("mlx5_10", "mlx5_2", "mlx5_1"):
        tree.rdma(name)
    assert [nic.name for nic in read_host(tree.finish()).nics] == ["mlx5_1", "mlx5_2", "mlx5_10"]


def test_a_gid_of_an_interface_in_another_network_namespace_is_not_used(tmp_path: Path) -> None:
    """A container sees the NIC, and the interfaces of its own namespace only."""
    tree = SysTree(tmp_path)
    tree.rdma("mlx5_0")
    tree.port("mlx5_0", gids=mlx5_gids("rail0", "fe80::1", "10.0.0.1"))
    host = read_host(tree.finish())
    with pytest.raises(RailError, match="RoCE v2, IPv4, rail0 is not in this network namespace"):
        pair(host, "10.0.0.9")


def test_routes_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    """Rejecting, switched off, local, anycast, multicast ones."""
    tree = SysTree(tmp_path)
    tree.address("eth0", "10.0.0.1/24")
    tree.address("eth0", "2001:db8::1/64")
    tree.gateway("eth0", "10.1.0.0/16", "10.0.0.254", metric=7)
    tree.gateway("eth0", "::/0", "2001:db8::fe", metric=1024)
    root = tree.finish()
    zero, rest = "0" * 32, "00000001 00000000"
    with (root / "proc/net/route").open("a") as file:
        file.write("*\t0000020A\t00000000\t0201\t0\t0\t0\t0000FFFF\n")  # unreachable
        file.write("eth0\t0000030A\t00000000\t0000\t0\t0\t0\t0000FFFF\n")  # not up
    with (root / "proc/net/ipv6_route").open("a") as file:
        file.write(f"{zero} 00 {zero} 00 {zero} ffffffff {rest} 00200200       lo\n")
        file.write(f"fd{zero[2:]} 40 {zero} 00 {zero} 00000100 {rest} 00000201     eth0\n")
        file.write(f"ff{zero[2:]} 08 {zero} 00 {zero} 00000100 {rest} 00000001     eth0\n")
        file.write(f"fe80{zero[4:]} 80 {zero} 00 {zero} 00000100 {rest} 00100001     eth0\n")
    routes = read_host(root).routes
    assert [(str(route.network), str(route.gateway), route.metric) for route in routes] == [
        ("10.0.0.0/24", "None", 0),
        ("10.1.0.0/16", "10.0.0.254", 7),
        ("2001:db8::/64", "None", 256),
        ("::/0", "2001:db8::fe", 1024),
    ]


ODD_TEXTS = ["", "\0\xff", "nonsense", "-1", "99999999999999999999", "a:b:c", "0x", "\n\n\n", "x" * 100_000]


@pytest.mark.parametrize("odd", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
def test_odd_files_are_facts_left_out(tmp_path: Path, odd: str) -> None:
    """Every file of a tree in turn is replaced; nothing raises, and what is decided of it raises RailError only."""
    for name in ("bonded", "ipv6_only"):
        root = MACHINES[name](tmp_path / name)
        for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
            if ("gids/" in str(path) and int(path.name) > 3) or (name == "ipv6_only" and "proc" not in path.parts):
                continue  # one of a kind is enough
            before = path.read_bytes()
            path.write_text(odd, encoding="latin-1")
            host = read_host(root)
            describe(host, servers={"a": "10.30.0.9", "b": "2001:db8:6::9", "c": ""})
            path.write_bytes(before)


def test_odd_trees_are_read(tmp_path: Path) -> None:
    """Folders where files are expected, files where folders are, links in a circle, no rights."""
    assert read_host(tmp_path / "absent") == Host((), (), (), has_rdma_class=False, has_pci=False)
    base = tmp_path / "sys/class/infiniband"
    for path in ("mlx5_0/ports/1/gids/0", "mlx5_1/ports/one", "mlx5_2/node_type"):
        (base / path).mkdir(parents=True)
    (base / "mlx5_3").write_text("a file")
    (base / "mlx5_4").symlink_to("mlx5_4")
    (base / "mlx5_5").mkdir()
    (base / "mlx5_5/ports").write_text("a file")
    (base / "mlx5_0/ports/1/state").symlink_to("state")
    os.mkfifo(base / "mlx5_0/ports/1/rate")  # a read of it would wait for ever
    started = time.monotonic()
    host = read_host(tmp_path)
    assert time.monotonic() - started < 10
    assert [nic.name for nic in host.nics][:3] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert all(not port.gids for port in host.ports)
    describe(host)


def test_nothing_outside_of_the_root_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("4: ACTIVE")
    tree = SysTree(tmp_path / "root")
    tree.rdma("mlx5_0")
    tree.port("mlx5_0", gids=[GidEntry("10.0.0.1")])
    state = tree.root / "sys/class/infiniband/mlx5_0/ports/1/state"
    state.unlink()
    state.symlink_to(secret)
    assert read_host(tree.finish()).ports[0].state == ""
