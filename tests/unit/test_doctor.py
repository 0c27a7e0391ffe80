"""The doctor's checks, as functions of facts: sick machines written down, and the line that each must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.doctor.checks import check_all
from memkv_vllm.doctor.devices import DEVICE_FILES_FIX
from memkv_vllm.doctor.facts import (
    DeviceFiles,
    DriveFacts,
    Facts,
    LibraryFacts,
    Need,
    NodeFacts,
    ServerAnswer,
    ServerSide,
    Side,
)
from memkv_vllm.doctor.findings import Finding, Level, exit_status
from memkv_vllm.topology import Host, read_host
from memkv_vllm.transports.verbs.gpu_memory import GpuHost
from memkv_vllm.transports.verbs.opening import Knobs
from memkv_vllm.transports.verbs.preflight import Memlock
from tests.support.sysfs import MACHINES, GidEntry, SysTree

MIB, GIB = 1 << 20, 1 << 30
ID = "ab" * 16

Make = Callable[..., Facts]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Host]:
    """Reads a machine, each once."""
    known: dict[str, Host] = {}

    def read(name: str) -> Host:
        if name not in known:
            known[name] = read_host(MACHINES[name](tmp_path_factory.mktemp(name)))
        return known[name]

    return read


@pytest.fixture(scope="module")
def healthy(machines: Callable[[str], Host]) -> Make:
    """Facts of a machine on which all is well, with whatever a test changes."""

    def make(machine: str = "rail_optimised", **changed: Any) -> Facts:
        host = machines(machine)
        devices = tuple(nic.name for nic in host.nics)
        answer = ServerAnswer(
            "store", "10.10.0.9:9900", "10.10.0.9", server_id=ID, version="1.0", skew_s=0.01, skew_error_s=0.001,
            data_paths=("verbs",), data_path_problem="", data_path_rail="mlx5_0:1",
        )  # fmt: skip
        facts = Facts(
            Side.CLIENT,
            Need.REQUIRED,
            host,
            files=DeviceFiles(True, tuple(NodeFacts(f"uverbs{at}", name) for at, name in enumerate(devices))),
            library=LibraryFacts("libibverbs", devices=devices),
            memlock=Memlock(None, is_exempt=False),
            pinned_bytes=512 * MIB,
            pinned_purpose="staging",
            gpu_host=GpuHost("6.8.0-50-generic", "nvidia_peermem", "open"),
            hash_seed="0",
            vllm="0.32.0",
            supported_vllm="0.25 to 0.33",
            version="1.0",
            servers=(answer,),
        )
        return replace(facts, **changed)

    return make


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def only(facts: Facts, check: str) -> Finding:
    (finding,) = of(check_all(facts), check)
    return finding


def bad(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.level.value, finding.check) for finding in check_all(facts) if finding.level is not Level.OK]


def test_a_healthy_machine_has_nothing_to_fix(healthy: Make) -> None:
    findings = check_all(healthy())
    assert bad(healthy()) == []
    assert exit_status(findings) == 0
    assert not any(finding.fix for finding in findings)
    assert {"nic", "device files", "verbs library", "memlock", "gid", "mtu", "rail", "gpu memory", "placement"} <= {
        finding.check for finding in findings
    }


def test_everything_bad_has_a_fix_and_decides_the_exit_status(healthy: Make) -> None:
    findings = check_all(healthy("container_without_rdma", files=DeviceFiles(False), hash_seed=None, vllm=None))
    assert all(finding.fix for finding in findings if finding.level is not Level.OK)
    assert exit_status(findings) == 2
    assert exit_status([finding for finding in findings if finding.level is not Level.FAIL]) == 1


# ---------------------------------------------------------------------------------------------------- devices


def test_a_container_without_devices_gets_the_missing_lines(healthy: Make) -> None:
    """P076: word for word what an operator must add to docker and to kubernetes."""
    facts = healthy("container_without_rdma", files=DeviceFiles(False, has_uverbs=False))
    assert only(facts, "nic") == Finding(
        Level.FAIL,
        "nic",
        "no RDMA device: no /sys/class/infiniband",
        "on a host: look for a NIC (lspci) and load its driver (modprobe mlx5_ib; rdma link); in a container: see the "
        "device files; for a trial without a NIC: rdma link add rxe0 type rxe netdev ETH",
    )
    assert only(facts, "device files") == Finding(
        Level.FAIL,
        "device files",
        "/dev/infiniband is absent",
        "on a host: install rdma-core and modprobe ib_uverbs; docker: docker run --device=/dev/infiniband "
        "--cap-add=IPC_LOCK --ulimit memlock=-1 --network=host; kubernetes: hostNetwork: true, resources: limits: "
        "{rdma/hca: 1} (the name that your RDMA device plugin offers), securityContext: capabilities: add: [IPC_LOCK]",
    )


def test_where_rdma_is_only_wanted_it_is_a_warning_and_where_it_is_not_used_nothing(healthy: Make) -> None:
    """P072: with transport tcp or loopback no RDMA check runs at all."""
    facts = healthy("container_without_rdma", files=DeviceFiles(False), servers=())
    wanted = replace(facts, need=Need.WANTED, transport="auto")
    assert {(finding.level, finding.check) for finding in check_all(wanted)} >= {
        (Level.WARN, "nic"),
        (Level.WARN, "device files"),
    }
    unused = check_all(replace(facts, need=Need.NONE, transport="loopback"))
    assert [finding.check for finding in unused] == ["rdma", "vllm", "hash seed", "server"]
    assert unused[0].seen == "transport is loopback: RDMA is not used, and was not looked at"


def test_a_missing_named_device_lists_those_there(healthy: Make) -> None:
    """P073."""
    finding = only(healthy(devices=("mlx5_9",)), "nic")
    assert finding.level is Level.FAIL
    assert finding.seen.startswith("RDMA device mlx5_9 is not on this host; found mlx5_0:1, mlx5_1:1")


@pytest.mark.parametrize(
    ("files", "seen", "fix"),
    [
        (DeviceFiles(True), "/dev/infiniband holds no uverbs file", DEVICE_FILES_FIX),
        (
            DeviceFiles(True, (NodeFacts("uverbs0", "rxe0", "Permission denied (opening it)", is_denied=True),)),
            "uverbs0 (rxe0): Permission denied (opening it)",
            "docker --device=/dev/infiniband",
        ),
        (
            DeviceFiles(True, (NodeFacts("uverbs0", "rxe0", "No such device or address (opening it)"),)),
            "uverbs0 (rxe0): No such device",
            "dmesg",
        ),
        (
            DeviceFiles(True, (NodeFacts("uverbs0", "rxe0"),)),
            "no uverbs file of rxe1",
            "hand in all of /dev/infiniband",
        ),
    ],
)
def test_device_files(healthy: Make, files: DeviceFiles, seen: str, fix: str) -> None:
    """P076: there, but not all, or not for this process."""
    findings = [f for f in of(check_all(healthy("soft_roce", files=files)), "device files") if f.level is Level.FAIL]
    assert any(seen in finding.seen and fix in finding.fix for finding in findings), findings


def test_a_device_that_is_not_used_may_be_denied(healthy: Make) -> None:
    nodes = (NodeFacts("uverbs0", "rxe0"), NodeFacts("uverbs1", "rxe1", "Permission denied", is_denied=True))
    facts = healthy("soft_roce", files=DeviceFiles(True, nodes), devices=("rxe0:1",))
    assert [finding.level for finding in of(check_all(facts), "device files")] == [Level.OK]


def test_the_kernel_module(healthy: Make) -> None:
    finding = only(healthy(files=DeviceFiles(True, (NodeFacts("uverbs0", ""),), has_uverbs=False)), "kernel")
    assert (finding.level, finding.fix) == (Level.FAIL, "modprobe ib_uverbs, on the host")


def test_the_verbs_library(healthy: Make) -> None:
    missing = only(healthy(library=LibraryFacts("libibverbs", "install libibverbs1")), "verbs library")
    assert (missing.level, missing.seen) == (Level.FAIL, "install libibverbs1")
    ignorant = only(healthy("soft_roce", library=LibraryFacts("libibverbs")), "verbs library")
    assert (ignorant.level, "does not know rxe0, rxe1" in ignorant.seen) == (Level.FAIL, True)
    assert "ibverbs-providers" in ignorant.fix
    one = only(healthy("soft_roce", library=LibraryFacts("libibverbs", devices=("rxe0",))), "verbs library")
    assert one.level is Level.WARN


# ---------------------------------------------------------------------------------------------------- memory


def test_memlock_too_small_says_the_numbers_and_every_fix(healthy: Make) -> None:
    """P074."""
    finding = only(healthy(memlock=Memlock(8 * MIB, is_exempt=False)), "memlock")
    assert finding.level is Level.FAIL
    assert "8.0 MiB" in finding.seen
    assert "512.0 MiB" in finding.seen
    for word in ("ulimit -l unlimited", "LimitMEMLOCK=infinity", "docker: --ulimit memlock=-1", "IPC_LOCK"):
        assert word in finding.fix


@pytest.mark.parametrize("memlock", [Memlock(8 * MIB, is_exempt=True), Memlock(None, False), Memlock(512 * MIB, False)])
def test_memlock_that_is_enough(healthy: Make, memlock: Memlock) -> None:
    """P074: a process with CAP_IPC_LOCK has no limit."""
    finding = only(healthy(memlock=memlock), "memlock")
    assert finding.level is Level.OK
    assert memlock.is_exempt == ("no limit holds for this process (CAP_IPC_LOCK)" in finding.seen)


@pytest.mark.parametrize(
    ("gpu_host", "medium", "level", "word"),
    [
        (GpuHost("6.8.0", "nvidia_peermem", "proprietary"), "gpu", Level.OK, "nvidia_peermem is loaded"),
        (GpuHost("6.8.0", "", "open"), "gpu", Level.OK, "dmabuf"),
        (GpuHost("5.4.0", "", "open"), "gpu", Level.FAIL, "nvidia_peermem is not loaded"),
        (GpuHost("6.8.0", "", "proprietary"), "gpu", Level.FAIL, "found: proprietary"),
        (GpuHost("6.8.0", "", "proprietary"), "auto", Level.WARN, "memkv_scratch_medium is auto"),
        (GpuHost("6.8.0", "", ""), "host", Level.OK, "host does not need either"),
    ],
)
def test_gpu_memory(healthy: Make, gpu_host: GpuHost, medium: str, level: Level, word: str) -> None:
    """P075: by peermem, by dmabuf, or not; only who asked for it is told that it fails."""
    finding = only(healthy(gpu_host=gpu_host, medium=medium), "gpu memory")
    assert (finding.level, word in finding.seen) == (level, True), finding


def test_gpu_memory_and_software_nics(healthy: Make) -> None:
    assert only(healthy("soft_roce", medium="gpu", servers=()), "gpu memory").level is Level.WARN
    assert of(check_all(healthy("soft_roce", servers=())), "gpu memory") == []


# ---------------------------------------------------------------------------------------------------- network


def with_gids(tmp_path: Path, *entries: GidEntry, mtu: int = 9000) -> Any:
    tree = SysTree(tmp_path / "gids")
    tree.netdev("eth0", mtu=mtu)
    tree.rdma("mlx5_0")
    tree.port("mlx5_0", gids=entries)
    tree.address("eth0", "10.10.0.1/24")
    return read_host(tree.finish())


@pytest.mark.parametrize(
    ("entry", "level", "word"),
    [
        (GidEntry("10.10.0.1", "RoCE v2", "eth0"), Level.OK, "RoCE v2, IPv4"),
        (GidEntry("2001:db8::1", "RoCE v2", "eth0"), Level.OK, "RoCE v2, global IPv6"),
        (GidEntry("10.10.0.1", "IB/RoCE v1", "eth0"), Level.WARN, "RoCE v1"),
        (GidEntry("fe80::1", "RoCE v2", "eth0"), Level.WARN, "link-local"),
    ],
)
def test_gid_and_roce_version(healthy: Make, tmp_path: Path, entry: GidEntry, level: Level, word: str) -> None:
    """P071."""
    finding = only(healthy(host=with_gids(tmp_path, entry)), "gid")
    assert (finding.level, word in finding.seen) == (level, True), finding


def test_a_gid_index_without_a_gid(healthy: Make) -> None:
    """P071."""
    findings = of(check_all(healthy(knobs=Knobs(gid_index=11))), "gid")
    assert {finding.level for finding in findings} == {Level.FAIL}
    assert "mlx5_0:1 has no GID at index 11" in findings[0].seen


def test_a_dead_port_counts_where_it_is_named_or_the_only_one(healthy: Make) -> None:
    unnamed = only(healthy("dual_port"), "port")
    assert (unnamed.level, unnamed.seen.startswith("mlx5_0:1 is in state DOWN")) == (Level.OK, True)
    named = only(healthy("dual_port", devices=("mlx5_0",)), "port")
    assert (named.level, "enp66s0" in named.fix) == (Level.FAIL, True)


def test_mtus(healthy: Make) -> None:
    facts = healthy("dual_port")
    assert [(finding.level, finding.seen) for finding in of(check_all(facts), "mtu")] == [
        (Level.OK, "mlx4_0:1 carries 4096 bytes a packet (interface enp34s0d1 4200)"),
        (Level.WARN, "mlx4_0:2 carries 1024 bytes a packet (interface enp34s0d2 1500)"),
        (Level.WARN, "the rails differ: mlx4_0:1 4096, mlx4_0:2 1024"),
    ]


def test_the_librarys_active_mtu_has_the_last_word(healthy: Make) -> None:
    library = LibraryFacts("libibverbs", devices=("mlx5_0",), active_mtus={"mlx5_0:1": 2048})
    finding = of(check_all(healthy(library=library, devices=("mlx5_0",))), "mtu")[0]
    assert (finding.level, "carries 2048" in finding.seen) == (Level.WARN, True)


def test_an_mtu_that_is_too_large_fails(healthy: Make) -> None:
    levels = [f.level for f in of(check_all(healthy("dual_port", knobs=Knobs(mtu=4096))), "mtu")]
    assert levels == [Level.OK, Level.FAIL, Level.WARN]


def test_a_dscp_in_place_of_the_traffic_class(healthy: Make) -> None:
    assert only(healthy(knobs=Knobs(traffic_class=26)), "traffic class").fix.endswith("set traffic_class: 104")
    assert only(healthy(knobs=Knobs(traffic_class=104)), "traffic class").seen == "104 (DSCP 26)"


def at(address: str, name: str = "store", **others: Any) -> ServerAnswer:
    return ServerAnswer(name, f"{address}:9900", address, server_id=ID, version="1.0", **others)


def test_rails(healthy: Make) -> None:
    """P070: a server on no rail is a failure, one rail of several a warning."""
    lost = only(healthy(servers=(at("10.99.0.1"),)), "rail")
    assert lost.level is Level.FAIL
    assert "no RDMA port reaches 10.99.0.1" in lost.seen
    assert "one address for each rail" in lost.fix
    half = of(check_all(healthy(servers=(at("10.10.1.9"), at("10.99.0.1")))), "rail")
    assert [finding.level for finding in half] == [Level.OK, Level.WARN]
    behind = only(healthy("bonded", servers=(at("10.31.0.1"),)), "rail")
    assert (behind.level, "behind the gateway" in behind.seen) == (Level.WARN, True)


def test_placement(healthy: Make) -> None:
    """P069."""
    near, far = of(check_all(healthy("eight_gpus_two_nics", devices=("mlx5_0",))), "placement")[-2:]
    assert [near.level, far.level] == [Level.OK, Level.WARN]
    assert far.seen == "SYS (across NUMA nodes): GPU 4: mlx5_0:1, GPU 5: mlx5_0:1, GPU 6: mlx5_0:1, GPU 7: mlx5_0:1"
    assert only(healthy("vm_without_pci"), "placement").level is Level.OK


# ---------------------------------------------------------------------------------------------------- vLLM


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.25.0", Level.OK),
        ("0.33.1rc1.dev5+gabc", Level.OK),
        ("0.24.9", Level.WARN),
        ("0.34.0", Level.WARN),
        ("1.0", Level.WARN),
        ("dev", Level.WARN),
        (None, Level.WARN),
    ],
)
def test_vllm_version(healthy: Make, version: str | None, level: Level) -> None:
    """P096."""
    finding = only(healthy(vllm=version), "vllm")
    assert (finding.level, "0.25 to 0.33" in finding.seen + finding.fix) == (level, True)


@pytest.mark.parametrize(
    ("seed", "version", "level"),
    [
        ("0", "0.25.0", Level.OK),
        (None, "0.28.1", Level.WARN),
        (None, "0.29.0", Level.OK),
        (None, None, Level.WARN),
        ("random", "0.32.0", Level.WARN),
    ],
)
def test_hash_seed(healthy: Make, seed: str | None, version: str | None, level: Level) -> None:
    """P001: the seed's value is not shown."""
    finding = only(healthy(hash_seed=seed, vllm=version), "hash seed")
    assert finding.level is level
    assert only(healthy(hash_seed="7654321"), "hash seed").seen.count("7654321") == 0


# ---------------------------------------------------------------------------------------------------- servers


@pytest.mark.parametrize(
    ("answer", "level", "word"),
    [
        (ServerAnswer("a", "store9:9900"), Level.FAIL, "its name has no IP address here"),
        (ServerAnswer("a", "10.10.0.9:9900", "10.10.0.9", problem="refused", fix="start it"), Level.FAIL, "refused"),
        (at("10.10.0.9"), Level.OK, "answers (id abababab, version 1.0)"),
        (replace(at("10.10.0.9"), version="1.1"), Level.WARN, "version 1.1, this is 1.0"),
        (replace(at("10.10.0.9"), version=""), Level.OK, "does not say its version"),
    ],
)
def test_servers(healthy: Make, answer: ServerAnswer, level: Level, word: str) -> None:
    """P096: two releases side by side are seen."""
    finding = only(healthy(servers=(answer,)), "server")
    assert (finding.level, word in finding.seen) == (level, True), finding


@pytest.mark.parametrize(
    ("skew_s", "error_s", "level", "word"),
    [
        (None, 0.0, Level.OK, "skew unknown"),
        (4.0, 0.1, Level.OK, "+4.0 s"),
        (-60.0, 0.1, Level.WARN, "-60.0 s"),
        (6.0, 2.0, Level.OK, "within 2.0 s"),
    ],
)
def test_clock(healthy: Make, skew_s: float | None, error_s: float, level: Level, word: str) -> None:
    finding = only(healthy(servers=(at("10.10.0.9", skew_s=skew_s, skew_error_s=error_s),)), "clock")
    assert (finding.level, word in finding.seen) == (level, True), finding


@pytest.mark.parametrize(
    ("paths", "problem", "level", "word"),
    [
        (("verbs",), "", Level.OK, "reads and writes this host's memory over mlx5_0:1"),
        (("verbs",), "retry exceeded", Level.FAIL, "retry exceeded"),
        ((), None, Level.FAIL, "does not offer verbs"),
        (("verbs",), None, Level.OK, "offers verbs; not tried from here"),
        (None, None, Level.OK, "does not say what it offers"),
    ],
)
def test_data_path(healthy: Make, paths: tuple[str, ...] | None, problem: str | None, level: Level, word: str) -> None:
    answer = at("10.10.0.9", data_paths=paths, data_path_problem=problem, data_path_rail="mlx5_0:1")
    finding = only(healthy(servers=(answer,)), "data path")
    assert (finding.level, word in finding.seen) == (level, True), finding
    wanted = only(healthy(servers=(answer,), need=Need.WANTED), "data path")
    assert wanted.level is (Level.WARN if level is Level.FAIL else level)


def test_one_server_under_two_names_and_two_under_one(healthy: Make) -> None:
    twice = of(check_all(healthy(servers=(at("10.10.0.9", "a"), at("10.10.1.9", "b")))), "server")[-1]
    assert (twice.level, twice.seen) == (Level.FAIL, "a and b are one server")
    assert twice.fix.endswith("NAME=10.10.0.9:9900|10.10.1.9:9900")
    other = replace(at("10.10.1.9"), server_id="cd" * 16)
    split = of(check_all(healthy(servers=(at("10.10.0.9"), other))), "server")[-1]
    assert (split.level, "2 different servers" in split.seen) == (Level.FAIL, True)


# ---------------------------------------------------------------------------------------------------- storage hosts


def storage(**changed: Any) -> ServerSide:
    side = ServerSide(
        arena_bytes=64 * GIB,
        hugepages="auto",
        free_hugepages_bytes=0,
        available_bytes=100 * GIB,
        limit_bytes=None,
        max_descriptors=65536,
        needed_descriptors=6272,
        drives=(),
        listening="free",
        address="0.0.0.0:9900",
        host="0.0.0.0",
    )
    return replace(side, **changed)


@pytest.mark.parametrize(
    ("changed", "check", "level", "word"),
    [
        ({}, "arena", Level.OK, "100.0 GiB can be had now"),
        ({"available_bytes": 65 * GIB}, "arena", Level.FAIL, "65.0 GiB can be had now"),
        ({"available_bytes": 1, "listening": "running"}, "arena", Level.OK, "a server runs"),
        ({"available_bytes": None}, "arena", Level.OK, "not known"),
        ({"limit_bytes": 66 * GIB}, "arena", Level.FAIL, "this container may use 66.0 GiB"),
        ({}, "hugepages", Level.OK, "ordinary pages will be used"),
        ({"hugepages": "on"}, "hugepages", Level.FAIL, "the arena needs 32768 of them"),
        ({"hugepages": "on", "free_hugepages_bytes": 64 * GIB}, "hugepages", Level.OK, "64.0 GiB"),
        ({"max_descriptors": 1024}, "descriptors", Level.WARN, "1024 descriptors allowed"),
        ({}, "address", Level.OK, "is free"),
        ({"listening": "running"}, "address", Level.OK, "listens on 0.0.0.0:9900 already"),
        ({"listening": "Cannot assign requested address"}, "address", Level.FAIL, "Cannot assign"),
        ({"host": "192.168.1.10", "address": "192.168.1.10:9900"}, "rail", Level.WARN, "no client gets verbs there"),
        ({"host": "10.10.0.1", "address": "10.10.0.1:9900"}, "rail", Level.WARN, "cannot come to 10.10.1.1 (mlx5_1:1)"),
    ],
)
def test_storage_host(healthy: Make, changed: dict[str, Any], check: str, level: Level, word: str) -> None:
    facts = healthy(side=Side.SERVER, server_side=storage(**changed), servers=(), devices=("mlx5_0", "mlx5_1"))
    finding = of(check_all(facts), check)[-1]
    assert (finding.level, word in finding.seen) == (level, True), finding


def test_a_server_says_where_clients_reach_it(healthy: Make) -> None:
    """P070: these addresses, and no other, belong into the clients' settings."""
    facts = healthy(side=Side.SERVER, server_side=storage(), servers=(), devices=("mlx5_0", "mlx5_1"))
    assert only(facts, "rail").seen.startswith(
        "clients reach it over verbs at 10.10.0.1 (mlx5_0:1), 10.10.1.1 (mlx5_1:1)"
    )


@pytest.mark.parametrize(
    ("drive", "level", "word"),
    [
        (DriveFacts("/d", 10 * GIB, exists=True, free=20 * GIB), Level.OK, "20.0 GiB free"),
        (DriveFacts("/d", 10 * GIB, exists=False), Level.FAIL, "is not there"),
        (DriveFacts("/d", 10 * GIB, exists=True, is_writable=False), Level.FAIL, "not writable"),
        (DriveFacts("/d", 10 * GIB, exists=True, problem="Input/output error"), Level.FAIL, "Input/output error"),
        (DriveFacts("/d", 10 * GIB, True, is_block_device=True, size=8 * GIB), Level.FAIL, "has 8.0 GiB"),
        (DriveFacts("/d", 10 * GIB, True, is_block_device=True, size=10 * GIB), Level.OK, "has 10.0 GiB"),
    ],
)
def test_drives(healthy: Make, drive: DriveFacts, level: Level, word: str) -> None:
    facts = healthy(side=Side.SERVER, server_side=storage(drives=(drive,)), servers=())
    finding = of(check_all(facts), "drive")[0]
    assert (finding.level, word in finding.seen) == (level, True), finding


def test_drives_that_share_a_file_system(healthy: Make) -> None:
    drives = tuple(DriveFacts(f"/d{at}", 10 * GIB, True, free=15 * GIB, size=GIB, file_system=7) for at in range(2))
    facts = healthy(side=Side.SERVER, server_side=storage(drives=drives), servers=())
    assert of(check_all(facts), "drive")[-1].seen == "/d0, /d1 may grow by 18.0 GiB; 15.0 GiB is free there"


def test_without_a_yaml_a_server_side_says_what_it_did_not_look_at(healthy: Make) -> None:
    finding = only(healthy(side=Side.SERVER, servers=()), "settings")
    assert (finding.level, finding.fix) == (Level.WARN, "give --config FILE")


def test_what_did_not_answer_in_time_is_said(healthy: Make) -> None:
    finding = only(healthy(unanswered=("the verbs library did not answer in time",), library=None), "doctor")
    assert (finding.level, finding.seen) == (Level.WARN, "the verbs library did not answer in time")


def test_wrong_settings_are_all_shown(healthy: Make) -> None:
    facts = healthy(settings_problems=("a = 1: expected 2; set 2", "odd"), servers=())
    findings = of(check_all(facts), "settings")
    assert [(finding.seen, finding.fix) for finding in findings] == [
        ("a = 1: expected 2", "set 2"),
        ("odd", "correct it; docs/reference/settings.md has them all"),
    ]
    assert of(check_all(facts), "server") == []
